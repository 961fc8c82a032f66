"""The learned cost in place of the true one, for single and for vectorised environments.

A wrapper scores every step with a cost model, so that code which reads `info["cost"]` trains on the
learned cost unchanged, and returns each finished episode as a `Trajectory`. Does not depend on
labels, limits or training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from pbcrl.cost_model import LearnedCost, require_learned_cost
from pbcrl.errors import NonFiniteError
from pbcrl.recorder import (
    BoolArray,
    TrajectoryRecorder,
    cost_array,
    discarded_envs,
    finished_trajectories,
    step_costs,
)
from pbcrl.spaces import act_dim_of, action_rows, obs_rows, obs_shape_of
from pbcrl.trajectory import ObsArray

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode, VectorWrapper
    from gymnasium.wrappers import Autoreset
else:
    # Gymnasium before 1.1, as the real Safety-Gymnasium needs it: single envs only.
    AutoresetMode = getattr(gym.vector, "AutoresetMode", None)
    VectorWrapper = getattr(gym.vector, "VectorWrapper", object)
    Autoreset = getattr(gym.wrappers, "Autoreset", None) or gym.wrappers.AutoResetWrapper


class PreferenceCostWrapper(
    gym.Wrapper[Any, Any, Any, Any],
    gym.utils.RecordConstructorArgs,
):
    """Puts the learned cost of every step into `info["cost"]`, and records finished episodes.

    Each step's info holds
    `cost`: the learned cost of (s_t, a_t) under the model's present weights, per step;
    `true_cost`: the env's own `info["cost"]`, for labels and reports only; absent if it has none;
    `trajectory`: the finished `Trajectory`, at the last step of an episode only; absent if the env
    discards it (`discarded_envs`), since what was cut short compares with nothing.

    Policy and env see each other's observations and actions as they are; the model and the
    trajectories hold them as `obs_rows` and `action_rows`, images in their shape if the model has
    it. A Box action is clipped to its bounds, any other outside of its space is refused.

    Put it outside `TimeLimit`, or it sees no episode end, and inside all that changes observations:
    the cost model must see raw observations, not drifting statistics. `reset` in mid-episode drops
    the unfinished rows; a step after an episode's end is passed on but never recorded.

    Args:
        env: An env whose spaces have a fixed length: observations as in `obs_shape_of`, actions as
            in `act_dim_of`.
        cost_model: Scores the steps; it is not copied, so that the wrapper follows fine-tuning.
            `CostModel.for_env(env)` fits.

    Raises:
        TypeError: If `cost_model` is no `LearnedCost`.
        ValueError: If a space has no fixed length or does not fit the cost model, if its time limit
            is not the horizon of the cost model, or if the env is wrapped already or resets itself.
    """

    def __init__(self, env: gym.Env[Any, Any], cost_model: LearnedCost) -> None:
        # A deep copy of a network would silently stop following fine-tuning.
        gym.utils.RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, cost_model=cost_model
        )
        gym.Wrapper.__init__(self, env)
        _require_bare(env)
        _require_fit(env.observation_space, env.action_space, cost_model)
        _require_horizon(env.spec, cost_model)
        self.cost_model = cost_model
        # As it was when the model was found to fit: an env may change its own.
        self._obs_space = env.observation_space
        self._recorder = TrajectoryRecorder(1)
        self._obs: ObsArray | None = None  # s_t, (1, *obs_shape); None: reset first
        self._ended = False
        self._has_warned = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; an unfinished one is dropped.

        Raises:
            NonFiniteError: If the observation holds NaN or an infinity.
        """
        self._obs = None
        self._recorder.drop_unfinished()
        self._ended = False
        obs, info = self.env.reset(seed=seed, options=options)
        rows = self._rows(obs)
        _require_finite("obs", rows, np.zeros(len(rows), np.int64))
        self._obs = rows
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env, with a Box action clipped to its bounds.

        Raises:
            NonFiniteError: If the action, or what the env returned, holds NaN or an infinity. A bad
                action leaves the episode as it was; the others end it unrecorded.
            MissingCostError: If the env reports a cost at some steps of an episode only.
            ResetNeeded: If there was no reset since the start or since an error.
            ValueError: If the action or the observation does not fit its space, the env's cost is
                negative or not one number, or the episode goes on beyond the horizon of the cost
                model. A bad action leaves the episode as it was.
        """
        if self._obs is None:
            raise ResetNeeded(_RESET_FIRST)
        action, clipped = _clipped(action, self.env.action_space)
        if clipped and not self._has_warned:
            self._has_warned = True
            warnings.warn(_CLIPPED.format(module="gymnasium.wrappers"), stacklevel=2)
        executed = action_rows(self.env.action_space, action)
        step = self._recorder.lengths + 1
        self.cost_model.check_length(int(step.max()))
        learned_cost = self.cost_model.step_cost(self._obs, executed)  # (1,)
        _require_finite("learned cost", learned_cost, step)

        # An error from here on leaves the env in an unknown state: reset first.
        obs, self._obs = self._obs, None
        next_obs, reward, terminated, truncated, env_info = self.env.step(action)
        next_rows = self._rows(next_obs)
        _require_finite("obs", next_rows, step)
        _require_finite("reward", np.array([reward], np.float64), step)
        done = bool(terminated or truncated)
        info = {**env_info, "cost": float(learned_cost[0])}  # a copy: the env may reuse its dict
        true_cost = None
        if "cost" in env_info:
            true_cost = cost_array(env_info["cost"], ())[None]
            _require_finite("cost", true_cost, step)
            info["true_cost"] = float(true_cost[0])
        if not self._ended:
            discarded = discarded_envs(env_info, 1)
            for trajectory in self._recorder.record(
                obs,
                executed,
                true_cost,
                np.array([done]),
                discarded=discarded,
                rewards=np.array([reward], np.float32),
                terminated=np.array([terminated], np.bool_),
                final_obs=next_rows,
            ):
                info["trajectory"] = trajectory
            self._ended = done
        self._obs = next_rows
        return next_obs, float(reward), bool(terminated), bool(truncated), info

    def _rows(self, obs: Any) -> ObsArray:
        return obs_rows(self._obs_space, obs).reshape(1, *self.cost_model.obs_shape)


class PreferenceCostVectorWrapper(VectorWrapper):
    """`PreferenceCostWrapper` for vector envs: one call of the cost model per step for all of them.

    Each step's infos hold
    `cost`: learned cost of (s_t, a_t), float32 (N,), 0 on a reset step; `_cost`: real steps;
    `true_cost`, `_true_cost`: likewise the envs' own `info["cost"]`; absent if they report none;
    `trajectory`: object array (N,) of finished `Trajectory` or None; `_trajectory`: its mask; both
    absent if no episode ended but discarded ones (`discarded_envs`). `finished_trajectories`
    reads them.

    Exact in both autoreset modes: the reset step of NEXT_STEP is no transition and is not recorded;
    with SAME_STEP the observation of a reset never joins the last action. In `infos["final_info"]`
    the names `cost` and `true_cost` mean the same as outside it.

    Args:
        envs: A vector env of single envs that `PreferenceCostWrapper` takes; its metadata names its
            autoreset mode.
        cost_model: Scores the steps; it is not copied, so that the wrapper follows fine-tuning.

    Raises:
        ImportError: If Gymnasium is older than 1.1.
        TypeError: If `cost_model` is no `LearnedCost`.
        ValueError: If a space has no fixed length or does not fit the cost model, if the time limit
            is not the horizon of the cost model, or if the autoreset mode is not given or DISABLED.
    """

    def __init__(self, envs: VectorEnv, cost_model: LearnedCost) -> None:
        if AutoresetMode is None:
            raise ImportError(
                "the vector wrapper needs gymnasium >= 1.1, whose vector envs say when they reset "
                f"themselves, got gymnasium {gym.__version__}; wrap the single envs with "
                "PreferenceCostWrapper, or install a newer gymnasium"
            )
        super().__init__(envs)
        _require_fit(envs.single_observation_space, envs.single_action_space, cost_model)
        if "autoreset_mode" not in envs.metadata:
            raise ValueError(
                "the wrapper must know when the envs reset themselves, but "
                f"metadata['autoreset_mode'] of {envs} is not set; set it to "
                "AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP, whichever the envs do"
            )
        mode = AutoresetMode(envs.metadata["autoreset_mode"])
        if mode is AutoresetMode.DISABLED:
            raise ValueError(
                "the envs must reset themselves, got AutoresetMode.DISABLED; "
                "make them with AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP"
            )
        _require_horizon(envs.spec, cost_model)
        self.cost_model = cost_model
        self._obs_space = envs.single_observation_space
        self._resets_next_step = mode is AutoresetMode.NEXT_STEP
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
        _require_finite("obs", rows, np.zeros(len(rows), np.int64))
        self._obs = rows
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], BoolArray, BoolArray, dict[str, Any]]:
        """Step all envs, with Box actions clipped to their bounds.

        Raises:
            NonFiniteError: If an action, or what an env returned, holds NaN or an infinity. A bad
                action leaves the episodes as they were; the others end them all, unrecorded.
            MissingCostError: If some envs report a cost and others do not, or at some steps only.
            ResetNeeded: If there was no reset since the start or since an error.
            ValueError: If an action or an observation does not fit its space, a cost is negative
                or not one number per env, or an episode goes on beyond the horizon of the cost
                model. A bad action leaves the episodes as they were.
        """
        if self._obs is None:
            raise ResetNeeded(_RESET_FIRST)
        actions, clipped = _clipped(actions, self.env.action_space)
        if clipped and not self._has_warned:
            self._has_warned = True
            warnings.warn(_CLIPPED.format(module="gymnasium.wrappers.vector"), stacklevel=2)
        executed = action_rows(self.env.single_action_space, actions, num_envs=self.num_envs)
        valid = self._valid
        step = np.where(valid, self._recorder.lengths + 1, 0)
        self.cost_model.check_length(int(step.max()))
        learned_cost = self.cost_model.step_cost(self._obs, executed)  # (N,)
        _require_finite("learned cost", learned_cost, step)

        # An error from here on leaves the envs in an unknown state: reset first.
        obs, self._obs = self._obs, None
        next_obs, rewards, terminated, truncated, env_infos = self.env.step(actions)
        done = np.logical_or(terminated, truncated)
        next_rows = self._rows(next_obs)
        obs_step = step if self._resets_next_step else np.where(done, 0, step)
        _require_finite("obs", next_rows, obs_step)
        _require_finite("reward", np.asarray(rewards), step)
        true_cost = step_costs(env_infos, self.num_envs, done, valid=valid)
        if not valid.any() and not self._recorder.reports_costs:
            true_cost = None  # all envs reset in this step, and they report no costs
        infos = {**env_infos, "cost": np.where(valid, learned_cost, np.float32(0)), "_cost": valid}
        if true_cost is not None:
            _require_finite("cost", true_cost, step)
            infos |= {"true_cost": true_cost, "_true_cost": valid}
        discarded = discarded_envs(env_infos, self.num_envs)
        ended = done & valid
        final_rows = self._final_rows(env_infos, next_rows, ended, step) if ended.any() else None
        finished = self._recorder.record(
            obs,
            executed,
            true_cost,
            done,
            valid=valid,
            discarded=discarded,
            rewards=np.asarray(rewards),
            terminated=np.asarray(terminated, np.bool_),
            final_obs=final_rows,
        )
        if ended.any():
            if finished_trajectories(env_infos):
                raise ValueError(_WRAPPED_TWICE)
            infos |= self._ending(infos, ended)
        if finished:
            entries = np.full(self.num_envs, None, dtype=object)
            for row, trajectory in zip(np.flatnonzero(ended & ~discarded), finished, strict=True):
                entries[row] = trajectory
            infos |= {"trajectory": entries, "_trajectory": ended & ~discarded}
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
            raise ResetNeeded(_RESET_FIRST)
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
        rows = np.zeros((self.num_envs, math.prod(self.cost_model.obs_shape)), next_rows.dtype)
        if isinstance(final_obs, np.ndarray):  # Gymnasium's hold one observation per env
            for row in np.flatnonzero(ended):
                rows[row] = obs_rows(self._obs_space, final_obs[row])
        else:
            rows[ended] = obs_rows(self._obs_space, final_obs, num_envs=self.num_envs)[ended]
        _require_finite("obs", rows, step)
        return rows.reshape(next_rows.shape)

    def _ending(self, infos: Mapping[str, Any], ended: BoolArray) -> dict[str, Any]:
        if "final_info" not in infos:
            return {}
        # What reads costs there must not find the true one under the learned one's name.
        final_info = {**infos["final_info"], "cost": infos["cost"], "_cost": ended}
        if "true_cost" in infos:
            final_info |= {"true_cost": infos["true_cost"], "_true_cost": ended}
        return {"final_info": final_info}

    def _rows(self, obs: Any) -> ObsArray:
        rows = obs_rows(self._obs_space, obs, num_envs=self.num_envs)
        return rows.reshape(self.num_envs, *self.cost_model.obs_shape)


_RESET_FIRST = (
    "an episode starts with reset(), but step() was called before it or after an error "
    "within an episode; call reset()"
)
_CLIPPED = (
    "an action should lie within the bounds of the action space, got one outside; it is clipped, "
    "for the env too, so that what is recorded is what was executed, and later ones are clipped "
    "silently; put {module}.ClipAction outside this wrapper to clip on purpose"
)
_WRAPPED_TWICE = (
    "an env takes one preference-cost wrapper, but one inside it records already, so that its "
    "info['cost'] is no true cost; wrap the single envs or the vector env, not both"
)
_REMEDY = {
    "action": "check the policy for divergence; the episode goes on as if it was never sent",
    "learned cost": "the cost model has diverged: load its last sound checkpoint",
    "obs": "fix the env, or end its episode before this; call reset() to go on",
    "reward": "fix the env, or end its episode before this; call reset() to go on",
    "cost": "fix the env's info['cost']; call reset() to go on",
}


def _require_finite(quantity: str, rows: NDArray[Any], step: NDArray[np.int64]) -> None:
    """Refuse NaN and infinities by name; rows (N, ...), step (N,) counts from 1, 0 is the reset."""
    if rows.dtype == np.uint8 or (finite := np.isfinite(rows)).all():
        return
    row = int(np.argwhere(~finite)[0, 0])
    where = f"step {step[row]} of an episode" if step[row] else "reset"
    if len(rows) > 1:
        where += f" in env {row}"
    raise NonFiniteError(
        f"{quantity} must be finite, got {rows[~finite][0]} at {where}; {_REMEDY[quantity]}"
    )


def _clipped(action: Any, space: gym.Space[Any]) -> tuple[Any, bool]:
    """Return the action as the env shall execute it, and whether it lay outside a Box."""
    if not isinstance(space, Box):
        return action, False
    action = np.asarray(action)
    if action.shape != space.shape:
        raise ValueError(
            f"an action must have the shape {space.shape} of its space, got {action.shape}; "
            "NumPy would broadcast it silently"
        )
    if not np.isfinite(action).all():
        raise NonFiniteError(
            f"action must be finite, got {action[~np.isfinite(action)][0]}; {_REMEDY['action']}"
        )
    inside = np.minimum(np.maximum(action, space.low), space.high)
    if (inside == action).all():
        return action, False
    return inside, True


def _require_fit(
    obs_space: gym.Space[Any], action_space: gym.Space[Any], cost_model: LearnedCost
) -> None:
    require_learned_cost(cost_model)
    obs_shape, act_dim = obs_shape_of(obs_space), act_dim_of(action_space)
    readable = {obs_shape, (math.prod(obs_shape),)}
    if isinstance(obs_space, Box) and obs_space.shape:
        readable.add(obs_space.shape)
    if cost_model.obs_shape not in readable or cost_model.act_dim != act_dim:
        raise ValueError(
            f"the cost model must fit the env: it reads obs_shape={cost_model.obs_shape} and "
            f"act_dim={cost_model.act_dim}, the env has {obs_shape} and {act_dim}; use "
            "CostModel.for_env(env), or the env that the model was trained on"
        )


def _require_horizon(spec: EnvSpec | None, cost_model: LearnedCost) -> None:
    # An env that does not tell its time limit is found out when an episode passes the horizon.
    if spec is not None and spec.max_episode_steps is not None:
        cost_model.check_horizon(spec.max_episode_steps)


def _require_bare(env: gym.Env[Any, Any]) -> None:
    while isinstance(env, gym.Wrapper):
        if isinstance(env, PreferenceCostWrapper):
            raise ValueError(_WRAPPED_TWICE)
        if isinstance(env, Autoreset):
            raise ValueError(
                "the wrapper records from reset() to the end of an episode, but the env resets "
                "itself by Autoreset; put Autoreset outside this wrapper"
            )
        env = env.env
