"""Recording of vector envs, apart from scoring: whole episodes, and the true cost of each step.

A loop that learns a cost needs the episodes of its own rollouts, and their true costs for labels
and reports. `RecordTrajectories` puts both into the infos, exactly in both autoreset modes, and
needs no cost model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from pbcrl.errors import MissingCostError
from pbcrl.recorder import (
    CLIPPED,
    NORMALISED,
    RECORDED_TWICE,
    RESET_FIRST,
    BoolArray,
    TrajectoryRecorder,
    discarded_envs,
    finished_trajectories,
    is_number,
    require_finite,
    step_costs,
)
from pbcrl.spaces import act_dim_of, executed_actions, obs_rows, obs_shape_of
from pbcrl.trajectory import FloatArray, ObsArray

try:
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
    from gymnasium.vector import VectorWrapper as VectorWrapper
    from gymnasium.wrappers.vector import NormalizeObservation
except ImportError:  # Gymnasium before 1.1, as the real Safety-Gymnasium needs it

    class VectorWrapper:  # type: ignore[no-redef]
        """Stands in for the base class, so that single envs can be wrapped."""

        def __init__(self, _: object) -> None:
            raise ImportError(
                "the vector wrapper needs gymnasium >= 1.1, whose vector envs say when they reset "
                f"themselves, got gymnasium {gym.__version__}; wrap the single envs with "
                "PreferenceCostWrapper, or install a newer gymnasium"
            )


class RecordTrajectories(VectorWrapper):
    """Puts every finished episode of a vector env into its infos, and the true cost of each step.

    Each step's infos hold, besides what the envs report,
    `true_cost`: the envs' own `info["cost"]` of the step, wherever Gymnasium has put it, float32
    (N,), 0 on a reset step; `_true_cost`: real steps; both absent if the envs report none;
    `trajectory`: object array (N,) of finished `Trajectory` or None; `_trajectory`: its mask; both
    absent if no episode ended but discarded ones (`discarded_envs`). `finished_trajectories`
    reads them.
    `cost` stays as the envs report it, though as floats where Gymnasium batches it.

    One env may report a cost as an int and another as a float: Gymnasium's own batching, which
    takes the type of the first and cuts off the others, is told to keep floats. Integers that
    another vector env has put together from single envs are refused: they may have been cut off.

    Exact in both autoreset modes: the reset step of NEXT_STEP is no transition and is not recorded;
    with SAME_STEP the observation of a reset never joins the last action. A Box action is clipped
    to its bounds, for the env too, any other outside of its space is refused. Put it inside all
    that changes observations or actions: what is recorded is what the policy's env saw.

    Example:
        >>> import gymnasium as gym
        >>> from pbcrl import RecordTrajectories, finished_trajectories
        >>> envs = RecordTrajectories(gym.make_vec("Pendulum-v1", 2))
        >>> obs, infos = envs.reset(seed=0)
        >>> for _ in range(200):
        ...     obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
        >>> [len(episode) for episode in finished_trajectories(infos)]
        [200, 200]

    Args:
        envs: A vector env whose metadata names its autoreset mode, with spaces of fixed length.
        needs_cost: Whether to refuse envs that report no cost, at their first step.
        obs_shape: Of a recorded observation, such as that of a cost model; None is `obs_shape_of`
            the space.

    Raises:
        ImportError: If Gymnasium is older than 1.1.
        ValueError: If a space has no fixed length, or another one than `obs_shape`, if the
            autoreset mode is not given or DISABLED, or if the envs are recorded already or
            normalise their observations.
    """

    def __init__(
        self, envs: VectorEnv, *, needs_cost: bool = False, obs_shape: Sequence[int] | None = None
    ) -> None:
        super().__init__(envs)
        self._obs_space = envs.single_observation_space
        own_shape, _ = obs_shape_of(self._obs_space), act_dim_of(envs.single_action_space)
        self._obs_shape = own_shape if obs_shape is None else tuple(obs_shape)
        if math.prod(self._obs_shape) != math.prod(own_shape):
            raise ValueError(
                "a recorded observation has all numbers of the env's, whose shape is "
                f"{own_shape}, got obs_shape={self._obs_shape}; leave it out"
            )
        mode = envs.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ValueError(
                "the envs must reset themselves, and the wrapper must know when, but "
                f"metadata['autoreset_mode'] of {envs} is {mode or 'not set'}; set it to "
                "AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP, whichever the envs do"
            )
        normalises, inner = False, envs
        while isinstance(inner, VectorWrapper):
            if isinstance(inner, RecordTrajectories):
                raise ValueError(RECORDED_TWICE)
            normalises |= isinstance(inner, NormalizeObservation)
            inner = inner.env
        if isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
            # Other processes can be asked for a name, but not for a type.
            normalises |= any(inner.call("has_wrapper_attr", "obs_rms"))
        if normalises:
            outside = "gymnasium.wrappers.vector.NormalizeObservation"
            raise ValueError(NORMALISED.format(inside="NormalizeObservation", outside=outside))
        self._needs_cost = needs_cost
        self._resets_next_step = mode == AutoresetMode.NEXT_STEP
        self._recorder = TrajectoryRecorder(envs.num_envs)
        self._obs: ObsArray | None = None  # s_t, (N, *obs_shape); None: reset first
        self._valid = np.ones(envs.num_envs, np.bool_)  # false: the next step only resets
        self._has_warned = False

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every env; unfinished ones are dropped.

        Raises:
            NonFiniteError: If an observation holds NaN or an infinity.
            ValueError: If `options` ask to reset some of the envs only.
        """
        if options is not None and "reset_mask" in options:
            raise ValueError(
                "the envs reset themselves, one by one, so reset() is for all of them at once, "
                "got options['reset_mask']; leave it out"
            )
        self._obs = None
        self._recorder.drop_unfinished()
        self._valid = np.ones(self.num_envs, np.bool_)
        obs, infos = self.env.reset(seed=seed, options=options)
        rows = self._rows(obs)
        require_finite("obs", rows, np.zeros(len(rows), np.int64))
        self._obs = rows
        return obs, infos

    @property
    def next_step(self) -> NDArray[np.int64]:
        """Which step of its episode comes next, from 1; 0 if it only resets the env. (N,)."""
        return np.where(self._valid, self._recorder.lengths + 1, 0)

    def peek(self, actions: Any) -> tuple[ObsArray, FloatArray]:
        """Return what a step with these actions is going to record, without taking it.

        For what must be known of a step beforehand, such as its learned cost.

        Returns:
            s_t, (N, *obs_shape), to be read only, and a_t as it is going to be executed,
            (N, act_dim).

        Raises:
            NonFiniteError, ResetNeeded, ValueError: As `step`, for bad actions.
        """
        obs, _, executed = self._prepared(actions)
        return obs, executed

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], BoolArray, BoolArray, dict[str, Any]]:
        """Step all envs, with Box actions clipped to their bounds.

        Raises:
            NonFiniteError: If an action, or what an env returned, holds NaN or an infinity. A bad
                action leaves the episodes as they were; the others end them all, unrecorded.
            MissingCostError: If some envs report a cost and others do not, or at some steps only,
                or none does and `needs_cost`.
            ResetNeeded: If there was no reset since the start or since an error.
            ValueError: If an action or an observation does not fit its space, or a cost is negative
                or not one number per env. A bad action leaves the episodes as they were.
        """
        obs, actions, executed = self._prepared(actions)
        step, valid = self.next_step, self._valid
        # An error from here on leaves the envs in an unknown state: reset first.
        self._obs = None
        next_obs, rewards, terminated, truncated, env_infos = _step_with_exact_costs(
            self.env, actions
        )
        done = np.logical_or(terminated, truncated)
        next_rows = self._rows(next_obs)
        require_finite(
            "obs", next_rows, step if self._resets_next_step else np.where(done, 0, step)
        )
        require_finite("reward", np.asarray(rewards), step)
        true_cost = self._true_cost(env_infos, done, step)
        infos = dict(env_infos)  # a copy: the envs may reuse theirs
        if true_cost is not None:
            infos |= {"true_cost": true_cost, "_true_cost": valid}
        ended, discarded = done & valid, discarded_envs(env_infos, self.num_envs)
        finished = self._recorder.record(
            obs,
            executed,
            true_cost,
            done,
            valid=valid,
            discarded=discarded,
            rewards=np.asarray(rewards),
            terminated=np.asarray(terminated, np.bool_),
            final_obs=self._final_rows(env_infos, next_rows, ended, step) if ended.any() else None,
        )
        if ended.any() and finished_trajectories(env_infos):
            raise ValueError(RECORDED_TWICE)
        if finished:
            kept = ended & ~discarded
            entries = np.full(self.num_envs, None, dtype=object)
            for row, trajectory in zip(np.flatnonzero(kept), finished, strict=True):
                entries[row] = trajectory
            infos |= {"trajectory": entries, "_trajectory": kept}
        self._obs = next_rows
        self._valid = ~done if self._resets_next_step else np.ones(self.num_envs, np.bool_)
        return next_obs, rewards, terminated, truncated, infos

    @property
    def restores_envs(self) -> bool:
        """Whether `state_dict` holds the envs' own state, because they have a `state_dict` too."""
        return callable(getattr(self.env.unwrapped, "state_dict", None))

    def state_dict(self) -> dict[str, Any]:
        """What the wrapper and, if they can tell it, the envs remember between two steps.

        `"envs"` is `state_dict()` of the unwrapped envs; None if they have none.

        Raises:
            ResetNeeded: If there was no reset since the start or since an error.
        """
        if self._obs is None:
            raise ResetNeeded(RESET_FIRST)
        envs: Any = self.env.unwrapped
        return {
            "obs": self._obs.copy(),
            "valid": self._valid.copy(),
            "recorder": self._recorder.state_dict(),
            "envs": envs.state_dict() if self.restores_envs else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; needs no reset if the state holds that of the envs.

        If it does not (`"envs"` is None), the envs are left alone: go on with those from which it
        was taken, or call `reset`, which drops the unfinished episodes.

        Raises:
            ValueError: If the state is one of another number of envs, or holds that of envs, and
                these cannot take it.
        """
        if state["envs"] is not None and not self.restores_envs:
            raise ValueError(
                "a state that holds that of its envs needs envs with state_dict and "
                f"load_state_dict, got {self.env.unwrapped}; make the envs that were saved"
            )
        self._recorder.load_state_dict(state["recorder"])
        if state["envs"] is not None:
            envs: Any = self.env.unwrapped
            envs.load_state_dict(state["envs"])
        self._obs, self._valid = state["obs"].copy(), state["valid"].copy()

    def _prepared(self, actions: Any) -> tuple[ObsArray, Any, FloatArray]:
        """s_t, the actions that the envs are to execute, and the rows of these."""
        if self._obs is None:
            raise ResetNeeded(RESET_FIRST)
        space, num_envs = self.env.single_action_space, self.num_envs
        actions, executed, is_clipped = executed_actions(space, actions, num_envs=num_envs)
        if is_clipped and not self._has_warned:
            self._has_warned = True
            warnings.warn(CLIPPED.format(module="gymnasium.wrappers.vector"), stacklevel=3)
        return self._obs, actions, executed

    def _true_cost(
        self, infos: Mapping[str, Any], done: BoolArray, step: NDArray[np.int64]
    ) -> FloatArray | None:
        """The true cost of the step, (N,); None if the envs report none."""
        valid = self._valid
        costs = step_costs(infos, self.num_envs, done, valid=valid)
        if not valid.any() and not self._recorder.reports_costs:
            return None  # all envs reset in this step, and they report no costs
        if costs is not None:
            require_finite("cost", costs, step)
        elif self._needs_cost:
            name = self.env if self.env.spec is None else self.env.spec.id
            raise MissingCostError(
                f"the true cost of every step is needed here, but {name} reports none of this one; "
                "put a number into info['cost'] at every step of the env"
            )
        return costs

    def _final_rows(
        self,
        infos: Mapping[str, Any],
        next_rows: ObsArray,
        ended: BoolArray,
        step: NDArray[np.int64],
    ) -> ObsArray | None:
        """s_T of the episodes that ended, (N, *obs_shape); None if the envs do not tell it."""
        final_obs = infos.get("final_obs")
        if final_obs is None:
            return next_rows if self._resets_next_step else None
        rows = np.zeros((self.num_envs, math.prod(self._obs_shape)), next_rows.dtype)
        if isinstance(final_obs, np.ndarray):  # Gymnasium's hold one observation per env
            for row in np.flatnonzero(ended):
                rows[row] = obs_rows(self._obs_space, final_obs[row])
        else:
            rows[ended] = obs_rows(self._obs_space, final_obs, num_envs=self.num_envs)[ended]
        require_finite("obs", rows, step)
        return rows.reshape(next_rows.shape)

    def _rows(self, obs: Any) -> ObsArray:
        rows = obs_rows(self._obs_space, obs, num_envs=self.num_envs)
        return rows.reshape(self.num_envs, *self._obs_shape)


def _step_with_exact_costs(envs: VectorEnv, actions: Any) -> Any:
    """`envs.step`, in which Gymnasium makes an array of floats of the costs of single envs.

    `VectorEnv._add_info` makes it of the type of the first env that reports: after an int 0, a cost
    of 0.7 becomes 0. All vector envs of Gymnasium call it, those in processes too, and what it is
    given is the last place where the cost of a single env can be seen.
    """
    unwrapped: Any = envs.unwrapped

    def add_info(
        vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        if "cost" in env_info:
            cost = env_info["cost"]
            if is_number(cost):
                env_info = {**env_info, "cost": np.float64(cost)}
            elif isinstance(vector_infos.get("cost"), np.ndarray):
                # Kept as it is, to be refused by name: an error here would stop an
                # AsyncVectorEnv in the middle of its answers.
                vector_infos["cost"] = vector_infos["cost"].astype(object)
        infos: dict[str, Any] = type(unwrapped)._add_info(
            unwrapped, vector_infos, env_info, env_num
        )
        return infos

    # For this step only: envs that remember it could not be pickled.
    unwrapped._add_info = add_info
    try:
        return envs.step(actions)
    finally:
        del unwrapped._add_info
