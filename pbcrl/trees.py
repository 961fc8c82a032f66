"""A learned cost of boosted trees: sums of thresholds on single inputs, for flat observations.

A cost is evaluated in training, and never differentiated by its inputs, so nothing needs a network.
From few labels of whole episodes trees find which steps cost (docs/cost-models.md). Scoring, files
and exports need nothing but this package; `TreeTrainer` grows the trees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from pbcrl.cost_model import KIND, LearnedCost
from pbcrl.errors import MismatchError, require_in, require_whole
from pbcrl.spaces import check_names, find_image, input_names, names_of, spaces_of
from pbcrl.storage import described_by, load_tensors, save_tensors
from pbcrl.trajectory import Trajectory

NUM_LEAVES = 8
"""Most leaves of a tree: the leaves that a step may still fall into are the bits of one byte."""
_NODES = NUM_LEAVES - 1
UNUSED = -128
"""Both children of a node that is none."""
MOST_TREES = 20_000
"""In a model, all members together: each takes a kilobyte laid out for scoring."""
_COMPARISONS = 2**20  # at a time, so that they stay in the CPU's caches


class Trees(NamedTuple):
    """M x R trees of at most eight leaves, member by member, in the order in which they were grown.

    A step goes to the left child where its input is at most the threshold. Children that are >= 0
    are nodes, and come after their parent; leaf k is -1 - k. A smaller tree has unused nodes at its
    end, whose children are both -128; one without any node is its leaf 0.
    """

    feature: Tensor
    """Which input each node compares, int32 (M, R, 7)."""
    threshold: Tensor
    """float32 (M, R, 7)."""
    left: Tensor
    """int8 (M, R, 7)."""
    right: Tensor
    """int8 (M, R, 7)."""
    value: Tensor
    """Of each leaf, before the output scale, float32 (M, R, 8)."""

    @classmethod
    def none(cls, num_members: int) -> Trees:
        """No tree at all: every step costs 0."""
        nodes, leaves = (num_members, 0, _NODES), (num_members, 0, NUM_LEAVES)
        children = torch.empty(nodes, dtype=torch.int8)
        feature = torch.empty(nodes, dtype=torch.int32)
        return cls(feature, torch.empty(nodes), children, children.clone(), torch.empty(leaves))


class _OfOne(NamedTuple):
    """The trees as arrays, to score one row; n = M R trees."""

    features: NDArray[np.int64]  # (7 n,)
    thresholds: NDArray[np.float32]  # (7 n,)
    if_left: NDArray[np.uint8]  # (7, n)
    change: NDArray[np.uint8]  # (7, n)
    values: NDArray[np.float32]  # (256 n,)
    offsets: NDArray[np.int64]  # (n,)


class TreeCost(LearnedCost):
    r"""Boosted trees of (s, a), whose sum over an episode is its learned cost.

    .. math:: c(s, a) = output_scale · Σ_r tree_r(s, a)

    With a horizon the learned limit is a number of its own, and the cost of a harmless step about
    0, so that a policy cannot pay for unsafe steps by longer episodes, nor save costs by ending
    them: `TreeTrainer` sees to that. Without a horizon no such limit holds for all lengths, and it
    is 0. Costs are signed. Before training every episode lies exactly on the limit. Inputs need no
    scale. It has no parameters and no gradient.

    Several members, each trained on a bootstrap resample of the trajectories, are averaged:
    c = mean_m c_m + κ sd_m c_m, as of `CostModelEnsemble`.

    Args:
        observation_space: Of one env, not of a batch: any space of fixed length but an image.
        action_space: Likewise; no `Dict` or `Tuple`.
        discount: Weight γ per step. The default 1 sums undiscounted, as labels and limits do.
        output_scale: Factor on the sum of the trees; None is horizon ** -0.5, and 0.03 without a
            horizon. `prorate` does not change it.
        horizon: Steps of a full-length trajectory: the env's time limit, or the length of segments.
            Longer ones are refused. None takes any.
        num_members: M.
        pessimism: κ, in standard deviations of the members.
        pooled: Whether trees also read the highest, the lowest and the mean of each group of at
            least four like inputs: those whose names differ in a last index alone, such as
            "lidar[0]", "lidar[1]". What nobody named, "obs[3]", is in no group.
        names: Of all inputs, observation first, (obs_dim + act_dim,); None is `input_names` of the
            spaces.

    Raises:
        TypeError: If a space is no `gymnasium.spaces.Space`, a name no text, or a count no integer.
        ValueError: If observations are images or hold one, a space has no fixed length, a number is
            out of range, or there is not one name per input.
    """

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor
    limit: Tensor

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        discount: float = 1.0,
        output_scale: float | None = None,
        horizon: int | None = None,
        num_members: int = 1,
        pessimism: float = 0.0,
        pooled: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._fit_to(observation_space, action_space, None, discount, output_scale, horizon)
        if len(self.obs_shape) != 1:
            raise ValueError(
                f"trees read rows of numbers, got images {self.obs_shape}: a threshold on a pixel "
                "says nothing; use CostModel, whose network has convolutions"
            )
        require_whole(1, num_members=num_members)
        require_in("[1, 64]", num_members=num_members)
        require_in("(-inf, inf)", pessimism=pessimism, remedy="0 is the plain mean")
        self.num_members, self.pessimism, self.pooled = num_members, pessimism, pooled
        if (key := find_image(observation_space)) is not None:
            raise ValueError(
                f"trees read rows of numbers, but the observation's part {key!r} is an image: a "
                "threshold on a pixel says nothing; leave it out by a wrapper, or use CostModel"
            )
        if names is None and type(observation_space) is not Space:
            names = input_names(observation_space, action_space)
        self.names = check_names(() if names is None else names, self.obs_dim + self.act_dim)
        self.groups = like_inputs(self.names[: self.obs_dim]) if pooled else {}
        for name, tensor in Trees.none(num_members)._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("limit", torch.zeros(num_members))
        self._compile()

    @classmethod
    def for_env(cls, env: gym.Env[Any, Any] | VectorEnv, **options: Any) -> TreeCost:
        """Make the model that fits an env, single or vectorised, with its time limit as horizon.

        Args:
            env: Its time limit is `env.spec.max_episode_steps`; an env that has none gets the
                horizon None. Its names are `names_of(env)`.
            **options: As of the constructor.

        Raises:
            TypeError: If it is no env.
            ValueError: As the constructor.
        """
        *spaces, time_limit = spaces_of(env)
        return cls(*spaces, **{"horizon": time_limit, "names": names_of(env), **options})

    @property
    def learned_limit(self) -> float:
        """Mean of the members' limits, which are 0 without a horizon."""
        return float(self.limit.double().mean())

    @property
    def num_trees(self) -> int:
        """R, of each member."""
        return self.feature.shape[1]

    @property
    def trees(self) -> Trees:
        """Those that it is made of."""
        return Trees(self.feature, self.threshold, self.left, self.right, self.value)

    @property
    def read_names(self) -> tuple[str, ...]:
        """Of the columns of `columns`: the inputs, then "max lidar" and so on of each group."""
        pools = [f"{how} {name}" for name in self.groups for how in ("max", "min", "mean")]
        return (*self.names, *pools)

    @property
    def splits(self) -> tuple[NDArray[np.float32], ...]:
        """Where any tree splits each of `read_names`: different thresholds, ascending."""
        used = self.left != UNUSED
        feature, threshold = self.feature[used].cpu().numpy(), self.threshold[used].cpu().numpy()
        return tuple(np.unique(threshold[feature == k]) for k in range(len(self.read_names)))

    def set_trees(self, trees: Trees, limit: Tensor | None = None) -> None:
        """Replace all trees, and each member's limit.

        Args:
            trees: Of all members.
            limit: Highest C that each judges safe, float32 (M,); None is 0.

        Raises:
            MismatchError: If they do not fit the model or each other, or something in them makes
                no sense.
        """
        check_trees(trees, num_members=self.num_members, num_inputs=len(self.read_names))
        limit = torch.zeros(self.num_members) if limit is None else limit
        fits = limit.dtype == torch.float32 and limit.shape == (self.num_members,)
        if not fits or not torch.isfinite(limit).all():
            raise MismatchError(
                f"each of {self.num_members} members has a finite limit, in float32, got "
                f"{limit.tolist()!r:.80} ({limit.dtype}); restore the file from a copy"
            )
        self.limit = limit.to(self.limit)
        for name, tensor in trees._asdict().items():
            setattr(self, name, tensor.to(self.feature.device))
        self._compile()

    def columns(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return what trees compare: (N, obs_dim), (N, act_dim) -> float32 (N, num_inputs)."""
        obs = obs.to(torch.float32)
        # Means in float64: else the order of the terms would decide who passes a threshold.
        pools = [
            pool
            for start, stop in self.groups.values()
            for part in [obs[:, start:stop]]
            for pool in (part.amax(1), part.amin(1), part.mean(1, dtype=torch.float64).float())
        ]
        rows = torch.cat([obs, actions.to(torch.float32)], dim=1)
        return torch.cat([rows, torch.stack(pools, dim=1)], dim=1) if pools else rows

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return the cost of each step.

        Args:
            obs: Raw observations s_t, (..., obs_dim).
            actions: Executed actions a_t, (..., act_dim).

        Returns:
            c(s_t, a_t), (...,), per step; lower is safer. NaN where an input is.

        Raises:
            ValueError: If the last axes are not obs_dim and act_dim, or the others differ.
        """
        return self._pessimistic(self._member_costs(obs, actions))

    def _cost_of_one(
        self, obs: NDArray[Any], actions: NDArray[np.float32]
    ) -> NDArray[np.float32] | None:
        tables = self._of_one
        if tables is None:
            return None
        row = self.columns(torch.from_numpy(obs), torch.from_numpy(actions)).numpy()[0]
        above = (row[tables.features] > tables.thresholds).view(np.uint8).reshape(_NODES, -1)
        reachable = tables.if_left ^ (above * tables.change)
        outputs = tables.values[np.bitwise_and.reduce(reachable) + tables.offsets]
        costs = torch.from_numpy(outputs).view(self.num_members, self.num_trees, 1).sum(dim=1)
        cost: NDArray[np.float32] = self._pessimistic(self.output_scale * costs).numpy()
        return cost

    def member_excess(self, obs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return each member's C minus its limit, without pessimism, (M, B)."""
        self.check_length(actions.shape[1])
        costs = self._member_costs(obs, actions)  # (M, B, T)
        if self.discount < 1:
            costs = costs * self.discount ** torch.arange(costs.shape[2], device=costs.device)
        if mask is not None:
            costs = costs.masked_fill(~mask.to(costs.device), 0.0)
        return costs.sum(dim=2) - self.limit[:, None]

    def prorate(self, horizon: int) -> None:
        """Let the limit hold for longer or shorter trajectories; see `LearnedCost.prorate`."""
        before = self.horizon
        self._prorate(horizon)
        self.limit = self.limit * (horizon / (before or horizon))

    def fit_input_scale(self, trajectories: Sequence[Trajectory]) -> None:
        """Do nothing: a threshold has the unit of its input."""

    def save(self, path: str | os.PathLike[str], **info: float | int | str | None) -> None:
        """Write trees, names and sizes to one safetensors file, atomically; see `CostModel.save`.

        Raises:
            StorageError: If the file cannot be written.
        """
        config = {
            "kind": "trees",
            "obs_shape": list(self.obs_shape),
            "act_dim": self.act_dim,
            "discount": self.discount,
            "output_scale": self.output_scale,
            "horizon": self.horizon,
            "num_members": self.num_members,
            "pessimism": self.pessimism,
            "pooled": self.pooled,
            "names": list(self.names),
        }
        meta: Mapping[str, Any] = {"config": config, "info": info}
        save_tensors(path, kind=KIND, tensors=self.state_dict(), meta=meta)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[TreeCost, dict[str, Any]]:
        """Read a model and the `info` that was saved with it; no code is run, and no library asked.

        Raises:
            StorageError: If the file is missing, damaged, of another version or of another kind, or
                its trees make no sense.
        """
        tensors, meta = load_tensors(path, kind=KIND)
        with described_by(path):
            config, tensors = dict(meta["config"]), dict(tensors)
            if config.pop("kind", None) != "trees":
                raise MismatchError(
                    f"{path} holds a network, or several, no trees; read it by load_cost_model"
                )
            obs_shape, act_dim = config.pop("obs_shape"), config.pop("act_dim")
            require_in("[1, inf)", obs_dim=min(obs_shape), act_dim=act_dim)
            spaces: list[Space[Any]] = [Space(obs_shape), Space([act_dim])]
            limit = tensors.pop("limit")
            trees = Trees(**tensors)
            model = cls(*spaces, **config)
            try:
                model.set_trees(trees, limit)
            except MismatchError as error:
                raise MismatchError(f"{path}: {error}") from error
            return model, dict(meta["info"])

    def _pessimistic(self, costs: Tensor) -> Tensor:
        """Of the members' costs, (M, ...) -> (...,)."""
        if self.num_members == 1:
            return costs[0]
        mean = costs.mean(dim=0)
        return mean + self.pessimism * costs.std(dim=0, correction=0) if self.pessimism else mean

    def _member_costs(self, obs: Tensor, actions: Tensor) -> Tensor:
        batch = actions.shape[:-1]
        self._check_sizes(obs.shape[len(batch) :], actions.shape[-1])
        if obs.shape[: len(batch)] != batch:
            raise ValueError(
                f"observations and actions are those of the same steps, got {tuple(obs.shape)} and "
                f"{tuple(actions.shape)}; check their leading axes"
            )
        device = self.threshold.device
        flat_obs = obs.to(device).reshape(-1, self.obs_dim)
        columns = self.columns(flat_obs, actions.to(device).reshape(-1, self.act_dim))
        size = max(1, _COMPARISONS // max(1, self._thresholds.numel()))
        costs = torch.cat([self._outputs(part) for part in columns.split(size)], dim=1)
        # NaN is above no threshold, so that trees would take it for a number.
        costs = costs.masked_fill(columns.isnan().any(dim=1), torch.nan)
        return self.output_scale * costs.view(self.num_members, *batch)

    @torch.no_grad()
    def _outputs(self, columns: Tensor) -> Tensor:
        """Sum of each member's trees, (M, N), of columns (N, num_inputs)."""
        num_trees = self.num_members * self.num_trees
        if not num_trees:
            return columns.new_zeros(self.num_members, len(columns))
        above = columns.t().contiguous()[self._features] > self._thresholds
        above = above.view(_NODES, num_trees, -1).view(torch.uint8)
        # A node leaves its own subtree's other side out; what all of them leave is one leaf.
        reachable = self._if_left ^ (above * self._change)
        leaves = reachable[0]
        for node in range(1, _NODES):
            leaves = leaves & reachable[node]
        outputs = torch.take(self._values, leaves.long() + self._offsets)
        return outputs.view(self.num_members, self.num_trees, -1).sum(dim=1)

    def _compile(self) -> None:
        """Lay the trees out for scoring."""
        feature, threshold, *_, value = self.trees
        below = self.leaves_below()  # (M, R, 7, 2)
        if_left, if_right = ~below[..., 1], ~below[..., 0]

        def by_node(x: Tensor) -> Tensor:
            return x.reshape(-1, _NODES).t().contiguous()

        self._features = by_node(feature).reshape(-1).long()
        self._thresholds = by_node(threshold).reshape(-1, 1)
        self._if_left = by_node(if_left)[..., None]
        self._change = self._if_left ^ by_node(if_right)[..., None]
        num_trees = feature.shape[0] * feature.shape[1]
        self._offsets = 256 * torch.arange(num_trees, device=value.device)[:, None]
        lowest = torch.tensor([(b & -b).bit_length() - 1 for b in range(1, 256)])
        table = value.reshape(-1, NUM_LEAVES)[:, lowest.to(value.device)]
        self._values = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1).reshape(-1)
        self._of_one: _OfOne | None = None
        if num_trees and value.device.type == "cpu":
            laid_out = (
                *(self._features, self._thresholds[:, 0], self._if_left[..., 0]),
                *(self._change[..., 0], self._values, self._offsets[:, 0]),
            )
            self._of_one = _OfOne(*(part.numpy() for part in laid_out))

    def leaves_below(self) -> Tensor:
        """Leaves under the left and right child of each node, as bits, uint8 (M, R, 7, 2)."""
        children = torch.stack([self.left, self.right], dim=-1).long()  # (M, R, 7, 2)
        leaves = torch.zeros_like(children)
        bits = 1 << torch.arange(NUM_LEAVES, device=children.device)
        for node in reversed(range(_NODES)):  # children come after their parent
            child = children[:, :, node]  # (M, R, 2)
            both = leaves[..., 0] | leaves[..., 1]  # under each node, (M, R, 7)
            inner = both.gather(2, child.clamp(min=0))
            leaf = torch.where(child == UNUSED, 0, bits[(-1 - child).clamp(0, NUM_LEAVES - 1)])
            leaves[:, :, node] = torch.where(child >= 0, inner, leaf)
        return leaves.to(torch.uint8)

    def _load_from_state_dict(  # a state may have another number of trees
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],  # noqa: ARG002
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        fields = *Trees._fields, "limit"
        if strict:
            known = {prefix + name for name in fields}
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]
        names = [name for name in fields if prefix + name not in state_dict]
        if names:
            missing_keys += [prefix + name for name in names]
            return
        try:
            *trees, limit = (state_dict[prefix + name] for name in fields)
            self.set_trees(Trees(*trees), limit)
        except MismatchError as error:
            error_msgs.append(str(error))

    def _apply(self, fn: Any, recurse: bool = True) -> TreeCost:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._compile()
        return self


def check_trees(trees: Trees, *, num_members: int, num_inputs: int) -> None:
    """Refuse arrays that are no trees, in time and memory of their own size.

    Raises:
        MismatchError: If so.
    """
    rounds = trees.feature.shape[1] if trees.feature.ndim == 3 else -1
    if num_members * rounds > MOST_TREES:
        raise MismatchError(
            f"a model has {MOST_TREES:,} trees at most, got {num_members} x {rounds:,}; restore "
            "the file from a copy, or grow fewer"
        )
    trees = Trees(*(tensor.cpu() for tensor in trees))
    nodes, leaves = (num_members, rounds, _NODES), (num_members, rounds, NUM_LEAVES)
    kinds = {
        "feature": (torch.int32, nodes),
        "threshold": (torch.float32, nodes),
        "left": (torch.int8, nodes),
        "right": (torch.int8, nodes),
        "value": (torch.float32, leaves),
    }
    for name, (dtype, shape) in kinds.items():
        found = getattr(trees, name)
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise MismatchError(
                f"{name} of {num_members} x {rounds} trees must be {dtype} {shape}, got "
                f"{found.dtype} {tuple(found.shape)}; restore the file from a copy"
            )
    children = torch.stack([trees.left, trees.right], dim=-1).long()  # (M, R, 7, 2)
    used = (children != UNUSED).any(dim=-1)  # (M, R, 7)
    place = torch.arange(_NODES)[:, None]
    is_node = children >= 0
    finding = None
    if not torch.isfinite(trees.value).all() or trees.threshold.isnan().any():
        finding = "a leaf or a threshold is not finite"
    elif ((trees.feature < 0) | (trees.feature >= num_inputs)).any():
        finding = f"a node reads an input beyond the {num_inputs} that there are"
    elif (used[..., 1:] & ~used[..., :-1]).any() or (used != (children != UNUSED).all(-1)).any():
        finding = "an unused node lies between used ones, or has a child"
    elif (is_node & (children <= place)).any() or (children >= _NODES).any():
        finding = "a child does not come after its parent"
    elif ((children < -NUM_LEAVES) & (children != UNUSED)).any():
        finding = "a child is no leaf"
    else:
        # Each node but the root, and each leaf, is the child of one node: that makes a tree.
        num_nodes = used.sum(dim=-1)  # (M, R)
        # Node j has slot j, leaf k slot 15 - k, and slot 7 is nobody's.
        slots = torch.where(children == UNUSED, 7, children % 16).flatten(2)
        counts = torch.zeros(*num_nodes.shape, 16, dtype=torch.long)
        counts.scatter_add_(2, slots, torch.ones_like(slots))
        index = torch.arange(16)
        has_node = (index > 0) & (index < num_nodes[..., None])
        has_leaf = (index >= 15 - num_nodes[..., None]) & (num_nodes[..., None] > 0)
        wanted = torch.where(index < 7, has_node, has_leaf).long()
        wanted[..., 7] = counts[..., 7]
        if (counts != wanted).any():
            finding = "a node or a leaf has not one parent"
    if finding is not None:
        raise MismatchError(
            f"arrays must be trees to be scored by: {finding}; restore the file from a copy, or "
            "train the model again"
        )


def like_inputs(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return groups of at least four neighbours whose names differ in their last index alone.

    Returns:
        The first and one beyond the last place of each, by its name: "lidar" of "lidar[0]", ...
    """
    stems = [re.sub(r"\[\d+\]$", "", name) for name in names]
    bounds = [0, *(i for i in range(1, len(stems)) if stems[i] != stems[i - 1]), len(stems)]
    runs = [run for run in pairwise(bounds) if run[1] - run[0] >= 4 and stems[run[0]] != "obs"]
    taken = [stems[start] for start, _ in runs]
    return {
        name if taken.count(name) == 1 else f"{name} from {names[start]}": (start, stop)
        for name, (start, stop) in zip(taken, runs, strict=True)
    }


def require_trees(model: object) -> None:
    """Refuse what is no `TreeCost`.

    Raises:
        TypeError: If so.
    """
    if not isinstance(model, TreeCost):
        raise TypeError(
            f"a TreeTrainer grows the trees of a TreeCost, got {model!r:.200}; a CostModel is "
            "trained by CostModelTrainer"
        )


def floor32(threshold: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the highest float32 that is not above: float32 inputs compare with it all the same."""
    with np.errstate(over="ignore"):
        near = threshold.astype(np.float32)
        below = np.nextafter(near, np.float32(-np.inf))
    return np.where(near.astype(np.float64) > threshold, below, near)
