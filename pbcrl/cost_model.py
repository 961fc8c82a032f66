"""The learned cost c_ψ(s, a): one signed number per step, summed over an episode (Eq. 3, `eq:bt`).

Larger is worse; an episode is judged safe if its summed cost is at most 0, the learned limit. Knows
nothing of labels, losses or environments: training is `CostModelTrainer`'s, data is `Trajectory`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pbcrl.errors import MismatchError
from pbcrl.storage import load_tensors, save_tensors
from pbcrl.trajectory import Trajectory, pad

_KIND = "cost-model"
# Contacts make rare spikes of a hundred standard deviations; beyond ten they carry no more news.
_INPUT_CLIP = 10.0


class CostModel(nn.Module):
    r"""MLP on (s, a) whose sum over the steps of an episode is the learned episode cost.

    .. math:: C_ψ(τ) = Σ_t discount^t c_ψ(s_t, a_t)        (below Eq. 3, `eq:bt`)

    The output is signed and unbounded and the learned limit is 0. The last layer starts at zero, so
    that an untrained model judges every episode to lie exactly on the limit: the sum of a thousand
    outputs of a default-initialised layer would start where every sigmoid is saturated.

    Args:
        obs_dim: Size of one flat observation.
        act_dim: Size of one flat action.
        hidden_sizes: Widths of the ReLU layers. The paper's "3-layer MLP with 64 units" counts the
            output layer, as its code base does.
        discount: Weight γ per step. The default 1 sums undiscounted, as labels and limits do.
        output_scale: Factor on the net's output. An episode sums T of them, so with a long one
            hardly any change of the weights fits the labels, and the hidden layers never learn what
            makes a step costly; with a small factor they do. About 1/√T is right; the default is
            for a thousand steps (`tests/benchmarks/bench_cost_model.py`).

    Raises:
        ValueError: If a size or `output_scale` is not positive or `discount` is outside (0, 1].
    """

    input_mean: Tensor
    input_scale: Tensor

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        discount: float = 1.0,
        output_scale: float = 0.03,
    ) -> None:
        super().__init__()
        sizes = [obs_dim + act_dim, *hidden_sizes]
        if min(obs_dim, act_dim, *sizes) < 1:
            raise ValueError(
                "obs_dim, act_dim and hidden_sizes must be positive, got "
                f"{obs_dim}, {act_dim} and {tuple(hidden_sizes)}"
            )
        if not 0 < discount <= 1:
            raise ValueError(f"discount must lie in (0, 1], got {discount}; 1 is no discounting")
        if not 0 < output_scale < math.inf:
            raise ValueError(
                f"output_scale must be > 0 and finite, got {output_scale}; 1 is the bare output"
            )
        self.obs_dim = obs_dim
        self.act_dim = act_dim
        self.hidden_sizes = tuple(hidden_sizes)
        self.discount = discount
        self.output_scale = output_scale
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        last = nn.Linear(sizes[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(*layers, last)
        self.register_buffer("input_mean", torch.zeros(obs_dim + act_dim))
        self.register_buffer("input_scale", torch.ones(obs_dim + act_dim))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return the cost of each step.

        Args:
            obs: Raw observations s_t, (..., obs_dim).
            actions: Executed actions a_t, (..., act_dim).

        Returns:
            c_ψ(s_t, a_t), (...,), per step; negative is safer than the limit's share of a step.

        Raises:
            ValueError: If the last axes are not obs_dim and act_dim.
        """
        self._check_sizes(obs.shape[-1], actions.shape[-1])
        inputs = (torch.cat([obs, actions], dim=-1) - self.input_mean) / self.input_scale
        output: Tensor = self.net(inputs.clamp(-_INPUT_CLIP, _INPUT_CLIP)).squeeze(-1)
        return self.output_scale * output

    def trajectory_cost(self, obs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return C_ψ of padded trajectories; padding has no influence.

        Args:
            obs: (B, T, obs_dim).
            actions: (B, T, act_dim).
            mask: bool (B, T), true on real steps; None if all are.

        Returns:
            Summed cost, (B,), per episode, in units where the learned limit is 0.
        """
        step_cost = self(obs, actions)  # (B, T)
        if self.discount < 1:
            step_cost = step_cost * self.discount ** torch.arange(
                step_cost.shape[1], device=step_cost.device
            )
        if mask is not None:
            step_cost = step_cost.masked_fill(~mask, 0.0)
        total: Tensor = step_cost.sum(dim=1)
        return total

    @torch.no_grad()
    def step_cost(
        self, obs: NDArray[np.floating[Any]], actions: NDArray[np.floating[Any]]
    ) -> NDArray[np.float32]:
        """Return c_ψ for NumPy rows, without gradients: (N, obs_dim), (N, act_dim) -> (N,)."""
        device = self.input_mean.device
        # Copied, because PyTorch warns of read-only arrays such as memory maps.
        cost: Tensor = self(
            torch.tensor(obs, dtype=torch.float32, device=device),
            torch.tensor(actions, dtype=torch.float32, device=device),
        )
        return cost.cpu().numpy()

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """Return C_ψ of each trajectory, float64 (len(trajectories),); empty in, empty out."""
        device = self.input_mean.device
        costs = [
            self.trajectory_cost(obs.to(device), actions.to(device), mask).cpu()
            for obs, actions, mask in padded_chunks(trajectories)
        ]
        return torch.cat([torch.empty(0), *costs]).double().numpy()

    def fit_input_scale(self, trajectories: Sequence[Trajectory]) -> None:
        """Fix the mean and the scale of the inputs from data, once, before training.

        They are part of the checkpoint and do not follow later data: a model whose inputs drift
        would give another cost to the same step. A feature that never varies keeps the scale 1.

        Raises:
            ValueError: If there is no trajectory, or one has other sizes than the model.
        """
        if not trajectories:
            raise ValueError("the input scale needs at least one trajectory, got none")
        count = 0
        total = np.zeros(self.obs_dim + self.act_dim)
        total_square = np.zeros_like(total)
        first = np.concatenate([trajectories[0].obs[0], trajectories[0].actions[0]])
        for trajectory in trajectories:
            self._check_sizes(trajectory.obs.shape[1], trajectory.actions.shape[1])
            rows = np.concatenate([trajectory.obs, trajectory.actions], axis=1, dtype=np.float64)
            rows -= first  # near the mean, so that the squares do not cancel
            count += len(rows)
            total += rows.sum(axis=0)
            total_square += np.square(rows).sum(axis=0)
        mean = total / count
        scale = np.sqrt(np.maximum(total_square / count - mean**2, 0.0))
        scale[scale < 1e-6] = 1.0
        self.input_mean.copy_(torch.as_tensor(mean + first))
        self.input_scale.copy_(torch.as_tensor(scale))

    def save(self, path: str | os.PathLike[str], **info: float | int | str | None) -> None:
        """Write weights, input scale and sizes to one safetensors file, atomically.

        Args:
            path: File to write; its folder is made if need be.
            **info: What else should travel with the weights, such as `env_id` or `dead_zone`.

        Raises:
            StorageError: If the file cannot be written.
        """
        config = {
            "obs_dim": self.obs_dim,
            "act_dim": self.act_dim,
            "hidden_sizes": list(self.hidden_sizes),
            "discount": self.discount,
            "output_scale": self.output_scale,
            "aggregation": "sum",
            "learned_limit": 0.0,
        }
        meta: Mapping[str, Any] = {"config": config, "info": info}
        save_tensors(path, kind=_KIND, tensors=self.state_dict(), meta=meta)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[CostModel, dict[str, Any]]:
        """Read a model and the `info` that was saved with it.

        Raises:
            StorageError: If the file is missing, damaged, of another version or of another kind.
        """
        tensors, meta = load_tensors(path, kind=_KIND)
        config = meta["config"]
        if config["aggregation"] != "sum" or config["learned_limit"] != 0.0:
            raise MismatchError(
                f"{path} holds a cost model that sums to another limit ({config}); this version "
                "reads summed costs with the learned limit 0 only"
            )
        model = cls(
            config["obs_dim"],
            config["act_dim"],
            hidden_sizes=config["hidden_sizes"],
            discount=config["discount"],
            output_scale=config["output_scale"],
        )
        model.load_state_dict(tensors)
        return model, meta["info"]

    def _check_sizes(self, obs_dim: int, act_dim: int) -> None:
        # The net sees their concatenation, so equal sums of sizes would pass unnoticed.
        if (obs_dim, act_dim) != (self.obs_dim, self.act_dim):
            raise ValueError(
                "a cost model reads the sizes that it was made for: (obs_dim, act_dim) = "
                f"({self.obs_dim}, {self.act_dim}), got ({obs_dim}, {act_dim}); use the model of "
                "this environment, or check the order of the arguments"
            )


def padded_chunks(
    trajectories: Sequence[Trajectory], *, max_rows: int = 16_000
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield trajectories in order as padded (obs, actions, mask), about `max_rows` steps at a time.

    Small enough for the activations to stay in the CPU's cache and for memory to stay constant,
    however many trajectories there are. The mask is None where nothing is padded.
    """
    start = 0
    while start < len(trajectories):
        stop, longest = start, 0
        while stop < len(trajectories):
            longest = max(longest, len(trajectories[stop]))
            if stop > start and longest * (stop + 1 - start) > max_rows:
                break
            stop += 1
        obs, actions, mask = pad(trajectories[start:stop])
        yield obs, actions, None if bool(mask.all()) else mask
        start = stop
