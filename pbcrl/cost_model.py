"""The learned cost c_ψ(s, a): one number per step, summed over an episode (Eq. 3, `eq:bt`).

Larger is worse; an episode is judged safe if its summed cost is at most the learned limit. Does not
depend on labels, losses or environments: `CostModelTrainer` trains it, on `Trajectory`s.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Space
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor, nn

from pbcrl.errors import MismatchError, NonFiniteError, require_in, require_whole
from pbcrl.spaces import act_dim_of, obs_shape_of, spaces_of
from pbcrl.storage import check_finite, described_by, load_tensors, save_tensors
from pbcrl.trajectory import Trajectory, padded_chunks

KIND = "cost-model"
"""Of checkpoints, of a single model and of an ensemble."""
# Contacts make rare spikes of a hundred standard deviations; beyond ten they say nothing more.
_INPUT_CLIP = 10.0
# Waking a second thread for so few takes longer than scoring them, and it then spins for a while,
# on a core that the physics of the environments needs.
_FEW_NUMBERS = 2**16


class LearnedCost(nn.Module, ABC):
    r"""A cost per step and a limit on its sum: all that wrappers, trainers and metrics use.

    .. math:: C_ψ(τ) = Σ_t discount^t c_ψ(s_t, a_t)        (below Eq. 3, `eq:bt`)

    A trajectory is judged safe if C_ψ(τ) <= `learned_limit`. `CostModel` is one, and so is a
    `CostModelEnsemble`; a single model counts as an ensemble of one member.
    """

    obs_shape: tuple[int, ...]
    """Of one observation: (obs_dim,), or the shape of an image."""
    act_dim: int
    """Size of one flat action."""
    discount: float
    """Weight γ per step in the sum."""
    horizon: int | None
    """Steps of a full-length trajectory, for which the limit holds; None is any number."""
    num_members: int
    """M; 1 for a single model."""
    made_in: int | None = None
    """Id of the process that made it, by which a wrapper in another one knows it for a copy; None
    if it is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in = os.getpid()

    @property
    def obs_dim(self) -> int:
        """How many numbers an observation holds: the size of a flat one."""
        return math.prod(self.obs_shape)

    @property
    @abstractmethod
    def learned_limit(self) -> float:
        """Highest C_ψ that is judged safe, per trajectory."""

    @abstractmethod
    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return c_ψ(s_t, a_t) of each step: (..., *obs_shape), (..., act_dim) -> (...,)."""

    @abstractmethod
    def member_excess(self, obs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return by how much C_ψ of padded trajectories passes the limit, by each member alone.

        It is what the losses compare with 0, so that its gradient reaches a learned limit too.

        Args:
            obs: (B, T, *obs_shape).
            actions: (B, T, act_dim).
            mask: bool (B, T), true on real steps; None if all are.

        Returns:
            Each member's C_ψ minus its own limit, (M, B); <= 0 is judged safe.
        """

    @abstractmethod
    def prorate(self, horizon: int) -> None:
        """Let the limit hold for longer or shorter trajectories, with the same share per step.

        Right if labels were given by that share, as `SyntheticOracle(limit * length / horizon)`
        gives those of segments.

        Args:
            horizon: Steps of a full-length trajectory from now on, >= 1.

        Raises:
            ValueError: If `horizon` is below 1, or the model has none: its limit holds for any.
        """

    @property
    def has_input_scale(self) -> bool:
        """Whether `fit_input_scale` has been called, here or before the model was saved."""
        return False

    @abstractmethod
    def fit_input_scale(self, trajectories: Sequence[Trajectory]) -> None:
        """Fix the mean and the scale of the inputs from data, once, before training."""

    @abstractmethod
    def save(self, path: str | os.PathLike[str], **info: float | int | str | None) -> None:
        """Write everything that scores depend on to one file, atomically."""

    def trajectory_cost(self, obs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return C_ψ of padded trajectories; padding has no influence.

        Args:
            obs: (B, T, *obs_shape).
            actions: (B, T, act_dim).
            mask: bool (B, T), true on real steps; None if all are.

        Returns:
            Summed cost, (B,), per trajectory, in the units of `learned_limit`.

        Raises:
            ValueError: If T is above the horizon.
        """
        self.check_length(actions.shape[1])
        step_cost: Tensor = self(obs, actions)
        if self.discount < 1:
            steps = torch.arange(step_cost.shape[1], device=step_cost.device)
            step_cost = step_cost * self.discount**steps
        if mask is not None:
            step_cost = step_cost.masked_fill(~mask.to(step_cost.device), 0.0)
        total: Tensor = step_cost.sum(dim=1)
        return total

    @torch.no_grad()
    def step_cost(self, obs: NDArray[Any], actions: NDArray[Any]) -> NDArray[np.float32]:
        """Return c_ψ of NumPy rows of any dtype, without gradients.

        Args:
            obs: (N, *obs_shape).
            actions: (N, act_dim).

        Returns:
            float32 (N,).

        Raises:
            ValueError: If the shapes are not those of the model.
            NonFiniteError: If a number is NaN or infinite, also after the cast to float32, or the
                cost is: then the model has diverged.
        """
        rows = finite_rows(obs, actions)
        if (obs.shape, actions.shape) == ((1, *self.obs_shape), (1, self.act_dim)):
            of_one = self._cost_of_one(*rows)
            if of_one is not None:
                return finite_costs(of_one)
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if obs.size <= _FEW_NUMBERS else threads)
        try:
            cost: Tensor = self(*map(torch.from_numpy, rows))
        finally:
            torch.set_num_threads(threads)
        return finite_costs(cost.float().cpu().numpy())

    def _cost_of_one(
        self,
        obs: NDArray[Any],  # noqa: ARG002 - for those who can
        actions: NDArray[np.float32],  # noqa: ARG002
    ) -> NDArray[np.float32] | None:
        """The cost of one row, as of a single env, by NumPy, whose calls take less time.

        Args:
            obs: (1, *obs_shape), finite.
            actions: (1, act_dim), finite.

        Returns:
            float32 (1,); None if the model has no such way.
        """
        return None

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """Return C_ψ of each trajectory, float64 (len(trajectories),); empty in, empty out.

        Raises:
            NonFiniteError: If one is NaN or infinite: then the model has diverged.
        """
        # To the CPU in the end only: a GPU need not wait for the next chunk to be read.
        costs = [self.trajectory_cost(*chunk) for chunk in padded_chunks(trajectories)]
        return finite_costs(torch.cat(costs).double().cpu().numpy()) if costs else np.empty(0)

    @torch.no_grad()
    def member_scores(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        """Return each member's C_ψ minus its own limit: <= 0 is judged safe.

        Their mean is `score(trajectories) - learned_limit`, without the pessimism of an ensemble.

        Returns:
            float64 (M, len(trajectories)).
        """
        chunks = [self.member_excess(*chunk) for chunk in padded_chunks(trajectories)]
        if not chunks:
            return np.empty((self.num_members, 0))
        return torch.cat(chunks, dim=1).double().cpu().numpy()

    def check_horizon(self, time_limit: int) -> None:
        """Refuse to judge episodes of another time limit than the limit was learned for.

        A limit for segments of 50 steps does not apply to episodes of 1,000, and vice versa.

        Args:
            time_limit: Steps after which an episode is truncated.

        Raises:
            ValueError: If there is a horizon, and it is another.
        """
        if self.horizon is not None and time_limit != self.horizon:
            self._refuse(time_limit, f"but episodes here have a time limit of {time_limit}")

    def check_length(self, steps: int) -> None:
        """Refuse a trajectory that is longer than the horizon; shorter ones have ended early.

        Raises:
            ValueError: If `steps` is above the horizon.
        """
        if self.horizon is not None and steps > self.horizon:
            self._refuse(steps, f"got a trajectory of {steps}")

    def _fit_to(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        net: nn.Module | None,
        discount: float,
        output_scale: float | None,
        horizon: int | None,
    ) -> None:
        """Check and set what every single model has, see `CostModel`."""
        for space in (observation_space, action_space):
            if not isinstance(space, Space):
                raise TypeError(
                    f"a cost model is made for the spaces of an env, got {space!r}; pass "
                    "env.observation_space and env.action_space, or use "
                    f"{type(self).__name__}.for_env(env)"
                )
        self.obs_shape, self.act_dim = _sizes(observation_space, action_space, net)
        require_in("(0, 1]", discount=discount, remedy="1 is no discounting")
        if horizon is not None:
            require_whole(1, horizon=horizon, remedy="None is any number of steps")
        if output_scale is None:
            output_scale = 0.03 if horizon is None else horizon**-0.5
        require_in("(0, inf)", output_scale=output_scale, remedy="1 is the bare output")
        self.discount, self.output_scale, self.horizon = discount, output_scale, horizon

    def _prorate(self, horizon: int) -> None:
        if self.horizon is None:
            raise ValueError(
                f"a limit is prorated from one number of steps to another, got None and {horizon}; "
                "a model with horizon=None takes any length"
            )
        require_in("[1, inf)", horizon=horizon)
        self.horizon = horizon

    def _check_sizes(self, obs_shape: Sequence[int], act_dim: int) -> None:
        # A model sees their concatenation, so equal sums of sizes would pass unnoticed.
        if (tuple(obs_shape), act_dim) != (self.obs_shape, self.act_dim):
            name, wanted, found = "obs_shape", str(self.obs_shape), str(tuple(obs_shape))
            if len(self.obs_shape) == len(obs_shape) == 1:
                name, wanted, found = "obs_dim", str(self.obs_shape[0]), str(obs_shape[0])
            raise ValueError(
                f"a cost model reads the sizes that it was made for: ({name}, act_dim) = "
                f"({wanted}, {self.act_dim}), got ({found}, {act_dim}); use the model of "
                "this environment, or check the order of the arguments"
            )

    def _refuse(self, steps: int, finding: str) -> NoReturn:
        raise ValueError(
            f"a learned limit holds for as many steps as it was learned on: {self.horizon}, "
            f"{finding}; train a model on such episodes, or, if the segments were labelled by "
            f"their share of the limit, call prorate({steps})"
        )


class CostModel(LearnedCost):
    r"""A network of (s, a), by default an MLP, whose sum over an episode is its learned cost.

    .. math:: c_ψ(s, a) = output_scale · z_ψ(s, a)

    with z the output of the network. It is signed and unbounded, and the learned limit is 0. The
    last layer starts at zero, so that an untrained model judges every episode to lie exactly on the
    limit: the sum of a thousand outputs of a default-initialised layer would start where every
    sigmoid is saturated.

    An image, that is a uint8 `Box` with three axes, goes through three convolutions, 3 x 3 with
    stride 2, before the MLP; its pixels are read as fractions of 255, and its channels are the last
    axis, unless the first is shorter. All other observations, and all actions, are flat rows
    (`pbcrl.spaces.obs_rows`, `action_rows`), standardised by `fit_input_scale`.

    A custom network is a module that maps (obs, actions), scaled in the same way, to one number per
    step: (..., *obs_shape), (..., act_dim) -> (...,) or (..., 1). It reads a `Box` in its own
    shape. It must be a function of the single step, since training scores a batch in parts, and it
    should start at zero.

    Args:
        observation_space: Of one env, not of a batch: any space of fixed length.
        action_space: Likewise; no `Dict` or `Tuple`.
        hidden_sizes: Widths of the ReLU layers. The paper's "3-layer MLP with 64 units" counts the
            output layer, as its code base does. Not for a custom network.
        discount: Weight γ per step. The default 1 sums undiscounted, as labels and limits do.
        output_scale: Factor on the output of the network. An episode sums T of them: if T is large,
            hardly any change of the weights fits the labels, and the hidden layers never learn what
            makes a step costly; with a factor of about 1/√T they do
            (`tests/benchmarks/bench_cost_model.py`). None is horizon ** -0.5, and 0.03, for a
            thousand steps, without a horizon. `prorate` does not change it.
        horizon: Steps of a full-length trajectory: the env's time limit, or the length of segments.
            Longer ones are refused. None takes any.
        net: Custom network, in place of the MLP.

    Raises:
        TypeError: If a space is no `gymnasium.spaces.Space`.
        ValueError: If a space has no fixed length, a size, `horizon` or `output_scale` is not
            positive, `discount` is outside (0, 1], or a network depends on more than the single
            step.
    """

    input_mean: Tensor
    input_scale: Tensor

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        discount: float = 1.0,
        output_scale: float | None = None,
        horizon: int | None = None,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._fit_to(observation_space, action_space, net, discount, output_scale, horizon)
        require_in("[1, inf)", hidden_sizes=min(hidden_sizes, default=1))
        self.num_members = 1
        self.hidden_sizes = tuple(hidden_sizes)
        if net is not None:
            _require_one_step(net)
            self.net = net
        elif len(self.obs_shape) == 3:
            self.net = ConvNet(self.obs_shape, self.act_dim, hidden_sizes)
        else:
            self.net = MLP(self.obs_dim + self.act_dim, hidden_sizes)
        # Pixels have their scale already.
        num_scaled = self.act_dim + (self.obs_dim if len(self.obs_shape) == 1 else 0)
        self.register_buffer("input_mean", torch.zeros(num_scaled))
        self.register_buffer("input_scale", torch.ones(num_scaled))
        self._of_one: _OfOne | None = None

    @classmethod
    def for_env(cls, env: gym.Env[Any, Any] | VectorEnv, **options: Any) -> CostModel:
        """Make the model that fits an env, single or vectorised, with its time limit as horizon.

        Args:
            env: Its time limit is `env.spec.max_episode_steps`; an env that has none, as a vector
                env that was not made by `gymnasium.make_vec`, gets the horizon None.
            **options: As of the constructor; `horizon=` replaces the time limit.

        Raises:
            TypeError: If it is no env.
            ValueError: If a space has no fixed length, or an option is out of range.
        """
        *spaces, time_limit = spaces_of(env)
        return cls(*spaces, **{"horizon": time_limit, **options})

    @property
    def learned_limit(self) -> float:
        """0: the unit of the costs is arbitrary, and training puts the limit there."""
        return 0.0

    def prorate(self, horizon: int) -> None:
        """Let the limit hold for longer or shorter trajectories; see `LearnedCost.prorate`."""
        self._prorate(horizon)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return the cost of each step.

        Args:
            obs: Raw observations s_t, (..., *obs_shape).
            actions: Executed actions a_t, (..., act_dim).

        Returns:
            c_ψ(s_t, a_t), (...,), per step; lower is safer.

        Raises:
            TypeError: If images are not uint8.
            ValueError: If the last axes are not obs_shape and act_dim, the others differ, or a
                custom network returns another shape.
        """
        batch = actions.shape[:-1]
        self._check_sizes(obs.shape[len(batch) :], actions.shape[-1])
        output: Tensor = self.net(*self._scaled(obs, actions))
        if output.shape == (*batch, 1):
            output = output.squeeze(-1)
        elif output.shape != batch:
            raise ValueError(
                f"a network must return one number per step, {tuple(batch)} or {(*batch, 1)}, got "
                f"{tuple(output.shape)}; fix the forward of {type(self.net).__name__}"
            )
        if output.dtype in (torch.float16, torch.bfloat16):
            output = output.float()  # a sum over a thousand steps would lose the small ones
        return self.output_scale * output

    def member_excess(self, obs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return C_ψ, whose limit is 0, as the only member's, (1, B)."""
        return self.trajectory_cost(obs, actions, mask)[None]

    @property
    def has_input_scale(self) -> bool:
        """Whether `fit_input_scale` has been called, here or before the model was saved."""
        return bool((self.input_mean != 0).any() or (self.input_scale != 1).any())

    def fit_input_scale(self, trajectories: Sequence[Trajectory]) -> None:
        """Fix the mean and the scale of the inputs from data, once, before training.

        They are part of the checkpoint and do not follow later data: a model whose inputs drift
        would give another cost to the same step. A feature that never varies keeps the scale 1.
        Of images only the actions are scaled.

        Raises:
            ValueError: If there is no trajectory, or one has other sizes than the model.
        """
        if not trajectories:
            raise ValueError("the input scale needs at least one trajectory, got none")
        count = 0
        total = np.zeros(len(self.input_mean))
        total_square = np.zeros_like(total)
        first = np.zeros_like(total)
        for trajectory in trajectories:
            self._check_sizes(trajectory.obs.shape[1:], trajectory.actions.shape[1])
            parts = [trajectory.obs] if len(self.obs_shape) == 1 else []
            rows = np.concatenate([*parts, trajectory.actions], axis=1, dtype=np.float64)
            if count == 0:
                first = rows[0].copy()
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

        Of a custom network only the weights are written: `load` takes the module again.

        Args:
            path: File to write; its folder is made if need be.
            **info: What else should travel with the weights, such as `env_id` or `dead_zone`.

        Raises:
            NonFiniteError: If a weight is NaN or infinite; an older file is untouched.
            StorageError: If the file cannot be written.
        """
        meta: Mapping[str, Any] = {"config": self.config(), "info": info}
        save_tensors(path, kind=KIND, tensors=self.state_dict(), meta=meta, finite=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, net: nn.Module | None = None
    ) -> tuple[CostModel, dict[str, Any]]:
        """Read a model and the `info` that was saved with it.

        Args:
            path: File to read.
            net: A module as that of the model that was saved, if that was a custom one; it takes
                the weights in the file.

        Raises:
            StorageError: If the file is missing, damaged, of another version or of another kind,
                if a weight in it is NaN or infinite, or if it does not fit `net`.
        """
        tensors, meta = load_tensors(path, kind=KIND)
        with described_by(path):
            if meta["config"].get("kind") == "trees":
                raise MismatchError(f"{path} holds trees, no network; read it by TreeCost.load")
            if "members" in meta["config"]:
                raise MismatchError(
                    f"{path} holds an ensemble, not a single cost model; read it by "
                    "CostModelEnsemble.load"
                )
            check_finite(path, tensors)
            return cls.from_config(path, meta["config"], tensors, net=net), dict(meta["info"])

    def config(self) -> dict[str, Any]:
        """Return what `from_config` needs besides the tensors, as JSON can hold it."""
        return {
            "obs_shape": list(self.obs_shape),
            "act_dim": self.act_dim,
            "hidden_sizes": list(self.hidden_sizes),
            "discount": self.discount,
            "output_scale": self.output_scale,
            "horizon": self.horizon,
            "net": None if type(self.net) in (MLP, ConvNet) else _name(self.net),
        }

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        net: nn.Module | None,
    ) -> CostModel:
        """Return the model that `config` describes, with the weights that were read from `path`.

        Raises:
            MismatchError: If they do not fit each other or `net`.
        """
        sizes = dict(config)
        custom = sizes.pop("net")
        if (net is None) != (custom is None):
            found = custom or "the MLP of this package"
            given = "none" if net is None else _name(net)
            raise MismatchError(
                "a file holds the weights of a network, and its code must be given if it is no "
                f"part of this package: {path} has those of {found}, got net={given}; pass net= if "
                "and only if the model was made with it"
            )
        # Empty tensors and bare spaces: no size that a file claims takes memory before it has
        # proven true.
        with torch.device("meta"):
            obs_space: Space[Any] = Space(sizes.pop("obs_shape"))
            model = cls(obs_space, Space([sizes.pop("act_dim")]), net=net, **sizes)
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise MismatchError(
                f"the weights in {path} must fit the network, {_name(model.net)}: "
                f"{' '.join(str(error).split())}; pass the one that the model was made with"
            ) from error
        require_in("(0, inf)", smallest_input_scale=float(model.input_scale.min()))
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_of_one": None}

    def _cost_of_one(
        self, obs: NDArray[Any], actions: NDArray[np.float32]
    ) -> NDArray[np.float32] | None:
        arrays = self._mlp_arrays() if type(self.net) is MLP else []  # its forward, no other's
        if not arrays:
            return None
        mean, scale, *layers = arrays
        row = np.concatenate([obs, actions], axis=1, dtype=np.float32)
        row = np.minimum(np.maximum((row - mean) / scale, -_INPUT_CLIP), _INPUT_CLIP)
        for i in range(0, len(layers) - 2, 2):
            row = np.maximum(row @ layers[i].T + layers[i + 1], 0)
        cost: NDArray[np.float32] = (row @ layers[-2].T + layers[-1])[:, 0]
        return cost * np.float32(self.output_scale)

    def _mlp_arrays(self) -> list[NDArray[np.float32]]:
        """Mean and scale of the inputs, then weights and biases, as they are now; none on a GPU."""
        tensors = [self.input_mean, self.input_scale]
        for layer in self.net.children():
            if isinstance(layer, nn.Linear):
                tensors += layer.weight, layer.bias
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._of_one is None or self._of_one.addresses != addresses:
            # Views, so that they follow what is written into the tensors.
            is_here = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
            arrays = [tensor.detach().numpy() for tensor in tensors] if is_here else []
            self._of_one = _OfOne(addresses, arrays)
        return self._of_one.arrays

    def _scaled(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.input_mean, self.input_scale
        if len(self.obs_shape) == 1:
            obs = _standardised(obs, mean[: self.obs_dim], scale[: self.obs_dim])
        elif obs.dtype == torch.uint8:
            obs = obs.to(mean) / 255
        elif isinstance(self.net, ConvNet):
            raise TypeError(
                f"images are uint8, read as fractions of 255, got {obs.dtype}; convert them to "
                "bytes, or pass a custom network (net=), which reads floats as they are"
            )
        start = len(mean) - self.act_dim
        return obs.to(mean), _standardised(actions, mean[start:], scale[start:])


class _OfOne(NamedTuple):
    """Tensors as NumPy sees them, and where they were in memory then."""

    addresses: list[int]
    arrays: list[NDArray[np.float32]]


class MLP(nn.Sequential):
    """ReLU layers on both inputs side by side; the output is exactly 0 until it is trained."""

    def __init__(self, num_inputs: int, hidden_sizes: Sequence[int]) -> None:
        sizes = [num_inputs, *hidden_sizes]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        last = nn.Linear(sizes[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(*layers, last)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:  # type: ignore[override]
        """Return one number per step: (..., obs_dim), (..., act_dim) -> (..., 1)."""
        output = torch.cat([obs, actions], dim=-1)
        for layer in self:
            output = layer(output)
        return output


class ConvNet(nn.Module):
    """Three convolutions of an image, each halving its sides, then the MLP."""

    def __init__(
        self, obs_shape: tuple[int, ...], act_dim: int, hidden_sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self._channels_last = obs_shape[2] <= obs_shape[0]
        channels, *sides = (obs_shape[2], *obs_shape[:2]) if self._channels_last else obs_shape
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise([channels, 16, 32, 32]):
            layers += [nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        self._num_features = 32 * math.prod(math.ceil(side / 8) for side in sides)
        self.mlp = MLP(self._num_features + act_dim, hidden_sizes)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return one number per step: (..., *obs_shape), (..., act_dim) -> (..., 1)."""
        images = obs.flatten(0, -4) if obs.ndim > 3 else obs[None]  # (B, *obs_shape)
        if self._channels_last:
            images = images.movedim(-1, 1)
        features = self.encoder(images).reshape(*obs.shape[:-3], self._num_features)
        output: Tensor = self.mlp(features, actions)
        return output


def require_learned_cost(model: object) -> None:
    """Refuse what is no `LearnedCost`, such as the path of one or a bare network.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(model, LearnedCost):
        raise TypeError(
            f"a cost model must be a CostModel or another LearnedCost, got {model!r:.200}; read a "
            "file by load_cost_model(path)[0], and pass a network as "
            "CostModel(observation_space, action_space, net=network)"
        )


def warn_of_a_copy(model: LearnedCost) -> None:
    """Warn in a worker process, such as one of `AsyncVectorEnv`, of a model that came with it."""
    is_worker = multiprocessing.parent_process() is not None
    if is_worker and model.made_in not in (None, os.getpid()):
        warnings.warn(
            "a learned cost follows the fine-tuning of its model, but this one was made in another "
            "process, and this worker process has a copy, whose weights stay as they are; score "
            "in the process that trains, by PreferenceCostVectorWrapper around the vector env",
            stacklevel=4,
        )


def _sizes(
    observation_space: Space[Any], action_space: Space[Any], net: nn.Module | None
) -> tuple[tuple[int, ...], int]:
    """obs_shape and act_dim; a bare `Space` stands for sizes read from a file."""
    if type(observation_space) is Space:
        assert observation_space.shape
        assert action_space.shape
        return observation_space.shape, action_space.shape[0]
    obs_shape = obs_shape_of(observation_space)
    if net is not None and isinstance(observation_space, Box):
        obs_shape = observation_space.shape or obs_shape
    return obs_shape, act_dim_of(action_space)


def _require_one_step(net: nn.Module) -> None:
    for module in net.modules():
        if any(word in _name(module) for word in ("BatchNorm", "InstanceNorm", "Dropout")):
            raise ValueError(
                "the cost of a step must depend on that step alone, or a batch that is scored in "
                f"parts, and twice, has no one gradient; got {module} in {_name(net)}; leave it "
                "out, or use LayerNorm"
            )


def _standardised(values: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    on_device = values.to(mean.device, non_blocking=True).to(mean.dtype)
    return (on_device - mean).div_(scale).clamp_(-_INPUT_CLIP, _INPUT_CLIP)


def finite_rows(obs: NDArray[Any], actions: NDArray[Any]) -> list[NDArray[Any]]:
    """Return copies of both as a cost model reads them, float32 or uint8.

    Raises:
        NonFiniteError: If a number is NaN or infinite, also after the cast.
    """
    rows: list[NDArray[Any]] = []
    for name, given in zip(("obs", "actions"), (obs, actions), strict=True):
        with np.errstate(over="ignore"):  # what overflows becomes infinite
            rows.append(np.array(given, np.uint8 if given.dtype == np.uint8 else np.float32))
        if not np.isfinite(rows[-1]).all():
            raise NonFiniteError(
                f"{name} of a cost model must be finite, got NaN or an infinity in float32; "
                "find the step that produced it"
            )
    return rows


def finite_costs(cost: NDArray[Any]) -> NDArray[Any]:
    """Return learned costs as they are.

    Raises:
        NonFiniteError: If one is NaN or infinite.
    """
    if not np.isfinite(cost).all():
        raise NonFiniteError(
            "a learned cost must be finite, but it is NaN or infinite for finite observations and "
            "actions: the model has diverged; lower the learning rate of its trainer"
        )
    return cost


def _name(net: nn.Module) -> str:
    return type(net).__qualname__
