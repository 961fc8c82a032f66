"""Several cost models of the same labels, and how far they disagree: mean plus pessimism.

Each member is trained on a bootstrap resample of the trajectories (by `CostModelTrainer`), so
that members agree where the labels decide the cost of a step, and differ where they do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pbcrl.cost_model import KIND, CostModel, LearnedCost
from pbcrl.errors import MismatchError, require_in
from pbcrl.storage import check_finite, described_by, load_tensors, save_tensors
from pbcrl.trajectory import Trajectory
from pbcrl.trees import TreeCost


class CostModelEnsemble(LearnedCost):
    r"""The mean of M cost models, plus κ standard deviations where they disagree.

    .. math:: c(s, a) = mean_m c_m(s, a) + κ sd_m(c_m(s, a))

    The deviation is taken step by step, so that step costs still sum to the trajectory cost, and a
    policy is charged for the steps that are unknown. It is that of the population. Over a
    trajectory, the deviations of its steps add up to at least that of its sum, and to about √T
    times as much if members disagree without a pattern: a small κ goes a long way. κ = 0 is the
    plain mean, negative ones are optimistic. The limit is that of the members, 0.

    Args:
        members: M >= 2 models of the same sizes, discount and horizon, each its own object.
        pessimism: κ, in standard deviations.

    Raises:
        ValueError: If there are fewer than two members, they do not fit each other, or `pessimism`
            is not finite.
    """

    def __init__(self, members: Sequence[CostModel], *, pessimism: float = 0.0) -> None:
        super().__init__()
        kinds = [(m.obs_shape, m.act_dim, m.discount, m.horizon) for m in members]
        if not 2 <= len(members) == len(set(map(id, members))) or len(set(kinds)) > 1:
            raise ValueError(
                "an ensemble needs two different members or more, with the same obs_shape, "
                f"act_dim, discount and horizon, got {len(set(map(id, members)))} different ones "
                f"of {len(members)} with {sorted(set(map(str, kinds)))}; use the CostModel itself "
                "if it is one"
            )
        require_in("(-inf, inf)", pessimism=pessimism, remedy="0 is the plain mean")
        self.obs_shape, self.act_dim, self.discount, self.horizon = kinds[0]
        self.num_members = len(members)
        self.members = nn.ModuleList(members)
        self.pessimism = pessimism

    @property
    def learned_limit(self) -> float:
        """0, as that of each member."""
        return 0.0

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return the pessimistic cost of each step: (..., *obs_shape), (..., act_dim) -> (...,)."""
        cost = torch.stack([member(obs, actions) for member in self._models()])  # (M, ...)
        mean = cost.mean(dim=0)
        if self.pessimism == 0:
            return mean
        return mean + self.pessimism * cost.std(dim=0, correction=0)

    def member_excess(self, obs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return each member's C_ψ, whose limit is 0, without pessimism, (M, B)."""
        return torch.cat([member.member_excess(obs, actions, mask) for member in self._models()])

    def prorate(self, horizon: int) -> None:
        """Let every member's limit hold for longer or shorter trajectories."""
        for member in self._models():
            member.prorate(horizon)
        self.horizon = horizon

    @property
    def has_input_scale(self) -> bool:
        """Whether that of the members is fixed."""
        return next(iter(self._models())).has_input_scale

    def fit_input_scale(self, trajectories: Sequence[Trajectory]) -> None:
        """Fix the mean and the scale of the inputs from data, the same for all members."""
        first, *others = self._models()
        first.fit_input_scale(trajectories)
        for member in others:
            member.input_mean.copy_(first.input_mean)
            member.input_scale.copy_(first.input_scale)

    def save(self, path: str | os.PathLike[str], **info: float | int | str | None) -> None:
        """Write all members to one safetensors file, atomically; see `CostModel.save`."""
        config = {
            "members": [member.config() for member in self._models()],
            "pessimism": self.pessimism,
        }
        meta: Mapping[str, Any] = {"config": config, "info": info}
        save_tensors(path, kind=KIND, tensors=self.state_dict(), meta=meta, finite=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, nets: Sequence[nn.Module] | None = None
    ) -> tuple[CostModelEnsemble, dict[str, Any]]:
        """Read an ensemble and the `info` that was saved with it.

        Args:
            path: File to read.
            nets: One module per member, if they had custom networks.

        Raises:
            StorageError: If the file is missing, damaged, of another version or of another kind,
                or if it does not fit `nets`.
        """
        tensors, meta = load_tensors(path, kind=KIND)
        with described_by(path):
            config = meta["config"]
            if config.get("kind") == "trees":
                raise MismatchError(f"{path} holds trees, no networks; read it by TreeCost.load")
            if "members" not in config:
                raise MismatchError(
                    f"{path} holds a single cost model, not an ensemble; read it by CostModel.load"
                )
            check_finite(path, tensors)
            configs = config["members"]
            if nets is not None and len(nets) != len(configs):
                raise MismatchError(
                    f"each member takes a custom network: {path} has {len(configs)} members, "
                    f"got {len(nets)} networks; pass one module per member"
                )
            members = []
            for i, member in enumerate(configs):
                prefix = f"members.{i}."
                own = {
                    k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)
                }
                net = None if nets is None else nets[i]
                members.append(CostModel.from_config(path, member, own, net=net))
            return cls(members, pessimism=config["pessimism"]), dict(meta["info"])

    def _models(self) -> list[CostModel]:
        return [member for member in self.members if isinstance(member, CostModel)]


def load_cost_model(path: str | os.PathLike[str]) -> tuple[LearnedCost, dict[str, Any]]:
    """Read trees, a network or an ensemble, whichever the file holds, and its `info`.

    Raises:
        StorageError: If the file is missing, damaged, of another version or of another kind, or
            holds a custom network.
    """
    _, meta = load_tensors(path, kind=KIND)
    with described_by(path):
        if meta["config"].get("kind") == "trees":
            return TreeCost.load(path)
        return (CostModelEnsemble if "members" in meta["config"] else CostModel).load(path)
