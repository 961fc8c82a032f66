"""The learned cost in place of the true one, for single and for vectorised environments.

A wrapper scores every step with a cost model, so that code which reads `info["cost"]` trains on the
learned cost unchanged, and returns each finished episode as a `Trajectory`. Does not depend on
labels, limits or training.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from pbcrl.cost_model import LearnedCost, require_learned_cost, warn_of_a_copy
from pbcrl.recorder import (
    CLIPPED,
    NORMALISED,
    NOT_FIVE,
    RECORDED_TWICE,
    RESET_FIRST,
    BoolArray,
    TrajectoryRecorder,
    cost_array,
    discarded_envs,
    require_finite,
)
from pbcrl.spaces import act_dim_of, executed_actions, obs_rows, obs_shape_of
from pbcrl.trajectory import ObsArray
from pbcrl.vector_recorder import RecordTrajectories, VectorWrapper

if TYPE_CHECKING:
    from gymnasium.wrappers import Autoreset
else:
    # Gymnasium before 1.1, as the real Safety-Gymnasium needs it: single envs only.
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
    the unfinished rows; a step after an episode's end is passed on but never recorded. Where the
    env reports a cost at its reset, 0 stands there instead: nothing was done yet.

    A deep copy, and an env made again from its `spec`, share the model. A pickled copy and a
    wrapper in a worker process, such as those of `AsyncVectorEnv`, have one of their own, which
    fine-tuning does not reach: they warn. Put `PreferenceCostVectorWrapper` around the vector env.

    Args:
        env: An env whose spaces have a fixed length: observations as in `obs_shape_of`, actions as
            in `act_dim_of`.
        cost_model: Scores the steps; it is not copied, so that the wrapper follows fine-tuning.
            `TreeCost.for_env(env)` fits; for images, `CostModel.for_env(env)`.

    Raises:
        TypeError: If `cost_model` is no `LearnedCost`.
        ValueError: If a space has no fixed length or does not fit the cost model, if its time limit
            is not the horizon of the cost model, or if the env is wrapped already, resets itself or
            normalises its observations.
    """

    def __init__(self, env: gym.Env[Any, Any], cost_model: LearnedCost) -> None:
        # A deep copy of a model would silently stop following fine-tuning.
        gym.utils.RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, cost_model=cost_model
        )
        self._saved_kwargs = _Shared(cost_model=cost_model)  # wrappers outside copy the spec
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
        require_finite("obs", rows, np.zeros(len(rows), np.int64))
        self._obs = rows
        if "cost" in info:
            # Not the env's own under the learned one's name; and in a vector env an int there would
            # make the learned costs of the others ints.
            info = {**info, "cost": 0.0}
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env, with a Box action clipped to its bounds.

        Raises:
            NonFiniteError: If the action, or what the env returned, holds NaN or an infinity. A bad
                action leaves the episode as it was; the others end it unrecorded.
            MissingCostError: If the env reports a cost at some steps of an episode only.
            ResetNeeded: If there was no reset since the start or since an error.
            ValueError: If the action or the observation does not fit its space, the env's reward or
                cost is not one number, the cost is negative, or the episode goes on beyond the
                horizon of the cost model. A bad action leaves the episode as it was.
        """
        if self._obs is None:
            raise ResetNeeded(RESET_FIRST)
        action, executed, is_clipped = executed_actions(self.env.action_space, action)
        if is_clipped and not self._has_warned:
            self._has_warned = True
            warnings.warn(CLIPPED.format(module="gymnasium.wrappers"), stacklevel=2)
        step = self._recorder.lengths + 1
        self.cost_model.check_length(int(step[0]))
        learned_cost = float(self.cost_model.step_cost(self._obs, executed)[0])

        # An error from here on leaves the env in an unknown state: reset first.
        obs, self._obs = self._obs, None
        answer: tuple[Any, ...] = self.env.step(action)
        if len(answer) != 5:
            raise ValueError(NOT_FIVE.format(count=len(answer)))
        next_obs, reward, terminated, truncated, env_info = answer
        next_rows = self._rows(next_obs)
        require_finite("obs", next_rows, step)
        given = np.asarray(reward)
        if given.shape != () or given.dtype.kind not in "fiub":
            raise ValueError(
                f"a reward must be one number per step, got shape {given.shape} and dtype "
                f"{given.dtype}; return float(reward) in the env"
            )
        reward = float(reward)
        _require_finite("reward", reward, step)
        done = bool(terminated or truncated)
        info = {**env_info, "cost": learned_cost}  # a copy: the env may reuse its dict
        true_cost = None
        if "cost" in env_info:
            true_cost = cost_array(env_info["cost"], ())[None]
            info["true_cost"] = float(true_cost[0])
            _require_finite("cost", info["true_cost"], step)
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
        return next_obs, reward, bool(terminated), bool(truncated), info

    def __deepcopy__(self, memo: dict[int, Any]) -> PreferenceCostWrapper:
        return _copy_around_model(self, memo)

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn(_PICKLED, stacklevel=2)
        return vars(self)

    def _rows(self, obs: Any) -> ObsArray:
        return obs_rows(self._obs_space, obs).reshape(1, *self.cost_model.obs_shape)


class PreferenceCostVectorWrapper(VectorWrapper):
    """`PreferenceCostWrapper` for vector envs: one call of the cost model per step for all of them.

    It scores what `RecordTrajectories`, which it puts around the envs, is about to record. Each
    step's infos hold
    `cost`: learned cost of (s_t, a_t), float32 (N,), 0 on a reset step; `_cost`: real steps;
    `true_cost`, `_true_cost`, `trajectory`, `_trajectory`: as of `RecordTrajectories`.
    In `infos["final_info"]` the names `cost` and `true_cost` mean the same as outside it.

    Args:
        envs: A vector env of single envs that `PreferenceCostWrapper` takes; its metadata names its
            autoreset mode.
        cost_model: Scores the steps; it is not copied, so that the wrapper follows fine-tuning.

    Raises:
        ImportError: If Gymnasium is older than 1.1.
        TypeError: If `cost_model` is no `LearnedCost`.
        ValueError: If a space has no fixed length or does not fit the cost model, if the time limit
            is not the horizon of the cost model, if the autoreset mode is not given or DISABLED, or
            if the envs are wrapped already or normalise their observations.
    """

    env: RecordTrajectories

    def __init__(self, envs: VectorEnv, cost_model: LearnedCost) -> None:
        super().__init__(envs)
        _require_fit(envs.single_observation_space, envs.single_action_space, cost_model)
        _require_horizon(envs.spec, cost_model)
        self.env = RecordTrajectories(envs, obs_shape=cost_model.obs_shape)
        self.cost_model = cost_model

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], BoolArray, BoolArray, dict[str, Any]]:
        """Step all envs, with Box actions clipped to their bounds.

        Raises:
            NonFiniteError, MissingCostError, ResetNeeded, ValueError: As `RecordTrajectories.step`;
                NonFiniteError, too, if a learned cost is NaN or infinite, and ValueError, if an
                episode goes on beyond the horizon of the cost model. These two leave the episodes
                as they were.
        """
        obs, executed = self.env.peek(actions)
        step = self.env.next_step
        self.cost_model.check_length(int(step.max()))
        learned_cost = self.cost_model.step_cost(obs, executed)  # (N,)
        next_obs, rewards, terminated, truncated, infos = self.env.step(actions)
        valid = step > 0
        infos |= {"cost": np.where(valid, learned_cost, np.float32(0)), "_cost": valid}
        if "final_info" in infos:
            # What reads costs there must not find the true one under the learned one's name.
            ended = np.logical_or(terminated, truncated) & valid
            own = {name: infos[name] for name in ("cost", "true_cost") if name in infos}
            masks = {f"_{name}": ended for name in own}
            infos["final_info"] = {**infos["final_info"], **own, **masks}
        return next_obs, rewards, terminated, truncated, infos

    @property
    def restores_envs(self) -> bool:
        """Whether `state_dict` holds the envs' own state, because they have a `state_dict` too."""
        return self.env.restores_envs

    def state_dict(self) -> dict[str, Any]:
        """What is remembered between two steps, as of `RecordTrajectories`; no model."""
        return self.env.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, as `RecordTrajectories` does."""
        self.env.load_state_dict(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreferenceCostVectorWrapper:
        return _copy_around_model(self, memo)

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn(_PICKLED, stacklevel=2)
        return vars(self)


_PICKLED = (
    "a pickled wrapper holds a copy of the cost model, which does not follow its fine-tuning; "
    "after loading set env.cost_model = the model that is trained, or wrap the env again"
)
_Wrapper = TypeVar("_Wrapper", PreferenceCostWrapper, PreferenceCostVectorWrapper)


class _Shared(dict[str, Any]):
    """Arguments that a deep copy shares."""

    def __deepcopy__(self, _: dict[int, Any]) -> _Shared:
        return self


def _copy_around_model(wrapper: _Wrapper, memo: dict[int, Any]) -> _Wrapper:
    """A deep copy with the same model, unless that has been copied along."""
    memo.setdefault(id(wrapper.cost_model), wrapper.cost_model)
    copied = object.__new__(type(wrapper))
    memo[id(wrapper)] = copied
    vars(copied).update(copy.deepcopy(vars(wrapper), memo))
    return copied


def _require_finite(quantity: str, value: float, step: NDArray[np.int64]) -> None:
    # A tenth of the time that an array takes.
    if not math.isfinite(value):
        require_finite(quantity, np.array([value]), step)


def _require_fit(
    obs_space: gym.Space[Any], action_space: gym.Space[Any], cost_model: LearnedCost
) -> None:
    require_learned_cost(cost_model)
    warn_of_a_copy(cost_model)
    obs_shape, act_dim = obs_shape_of(obs_space), act_dim_of(action_space)
    readable = {obs_shape, (math.prod(obs_shape),)}
    if isinstance(obs_space, Box) and obs_space.shape:
        readable.add(obs_space.shape)
    if cost_model.obs_shape not in readable or cost_model.act_dim != act_dim:
        raise ValueError(
            f"the cost model must fit the env: it reads obs_shape={cost_model.obs_shape} and "
            f"act_dim={cost_model.act_dim}, the env has {obs_shape} and {act_dim}; use "
            "CostModel.for_env(env) or TreeCost.for_env(env), or the env that it was trained on"
        )


def _require_horizon(spec: EnvSpec | None, cost_model: LearnedCost) -> None:
    # An env that does not tell its time limit is found out when an episode passes the horizon.
    if spec is not None and spec.max_episode_steps is not None:
        cost_model.check_horizon(spec.max_episode_steps)


def _require_bare(env: gym.Env[Any, Any]) -> None:
    while isinstance(env, gym.Wrapper):
        if isinstance(env, PreferenceCostWrapper):
            raise ValueError(RECORDED_TWICE)
        if isinstance(env, Autoreset):
            raise ValueError(
                "the wrapper records from reset() to the end of an episode, but the env resets "
                "itself by Autoreset; put Autoreset outside this wrapper"
            )
        if isinstance(env, gym.wrappers.NormalizeObservation):
            name = "NormalizeObservation"
            raise ValueError(NORMALISED.format(inside=name, outside="it"))
        env = env.env
