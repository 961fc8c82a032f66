"""The learned cost in `imitation`, which learns rewards from preferences, by duck typing.

Its pins exclude current Gymnasium, so nothing of it is imported: `PricedReward` is a `RewardFn`,
and `OracleGatherer` does what a `PreferenceGatherer` does. There are no safety labels there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from pbcrl.cost_model import LearnedCost, require_learned_cost
from pbcrl.errors import LabelError
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.oracle import Oracle
from pbcrl.recorder import cost_array
from pbcrl.spaces import action_rows, obs_rows
from pbcrl.trajectory import FloatArray, Query, Trajectory


class RewardFn(Protocol):
    """As `imitation.rewards.reward_function.RewardFn`."""

    def __call__(
        self,
        state: NDArray[Any],
        action: NDArray[Any],
        next_state: NDArray[Any],
        done: NDArray[Any],
    ) -> NDArray[Any]:
        """Return the reward of each transition, (B,)."""
        ...


class Fragment(Protocol):
    """What is read of an `imitation.data.types.TrajectoryWithRew`."""

    obs: Any
    """s_t and the last observation, (T + 1, ...)."""
    acts: NDArray[Any]
    """a_t, (T, ...)."""
    infos: NDArray[Any] | None
    """An info per step, (T,)."""


@final
class PricedReward:
    """A `RewardFn`: a reward minus λ c_ψ(s_t, a_t), as `RewardVecEnvWrapper` takes it.

    Args:
        cost_model: Scores the steps; it is not copied, so that fine-tuning has effect here.
        multiplier: λ, read at every call.
        observation_space: Of a single env.
        action_space: Of the same env.
        reward_fn: What it is subtracted from, such as the `predict_processed` of a learned
            `RewardNet`; None is a reward of 0. The env's own is not known here.

    Raises:
        TypeError: If `cost_model` is no `LearnedCost`.
    """

    def __init__(
        self,
        cost_model: LearnedCost,
        multiplier: LagrangeMultiplier,
        *,
        observation_space: Space[Any],
        action_space: Space[Any],
        reward_fn: RewardFn | None = None,
    ) -> None:
        require_learned_cost(cost_model)
        self._cost_model = cost_model
        self._multiplier = multiplier
        self._spaces = observation_space, action_space
        self._reward_fn = reward_fn

    def __call__(
        self,
        state: NDArray[Any],
        action: NDArray[Any],
        next_state: NDArray[Any],
        done: NDArray[Any],
    ) -> NDArray[np.float32]:
        """Return reward - λ c_ψ of B transitions, float32 (B,).

        Args:
            state: s_t, (B, ...).
            action: a_t, (B, ...); a Box is clipped to its bounds, as envs execute it.
            next_state: s_{t+1}, (B, ...). For `reward_fn` alone.
            done: Ends of episodes, bool (B,). Likewise.

        Raises:
            ValueError: If a shape does not fit its space or the cost model.
            NonFiniteError: If a number is NaN or infinite.
        """
        rows, acts = _rows(state, action, *self._spaces)
        cost = self._cost_model.step_cost(rows.reshape(-1, *self._cost_model.obs_shape), acts)
        penalty = self._multiplier.value * cost
        reward: NDArray[Any] = np.zeros(len(cost), np.float32)
        if self._reward_fn is not None:
            reward = np.asarray(self._reward_fn(state, action, next_state, done))
        return np.asarray(reward - penalty, np.float32)


@final
class OracleGatherer:
    """Answers as a `PreferenceGatherer`: the preference of a pair is the oracle's, the safer one.

    So a reward that `PreferenceComparisons` learns from it is one for safety. It waits for the
    answers.

    Args:
        oracle: Who answers. The true cost of a step is its info's "true_cost", as our wrappers have
            it, else its "cost", if every step of the fragment has one.
        observation_space: Of a single env.
        action_space: Of the same env.
    """

    def __init__(
        self, oracle: Oracle, *, observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        self._oracle = oracle
        self._spaces = observation_space, action_space

    def __call__(self, fragment_pairs: Sequence[tuple[Fragment, Fragment]]) -> FloatArray:
        """Return the probability that the first fragment is the safer one, float32 (B,).

        Raises:
            BudgetError: If they exceed what is left of the oracle's budget; none is asked then.
            LabelError: If the oracle has no answer about a pair.
        """
        queries = [
            Query(trajectory_of(first, *self._spaces), trajectory_of(second, *self._spaces))
            for first, second in fragment_pairs
        ]
        answers = [label.preference for label in self._oracle.label(queries)]
        preferences = np.array(answers, np.float32)
        if np.isnan(preferences).any():
            raise LabelError(
                "imitation needs a preference about every pair, but the oracle has none about "
                f"{int(np.isnan(preferences).sum())} of {len(preferences)}; pass one that answers "
                "0.5 where it cannot tell"
            )
        return preferences


def trajectory_of(
    fragment: Fragment, observation_space: Space[Any], action_space: Space[Any]
) -> Trajectory:
    """Return a fragment of `imitation` as a trajectory, without its last observation.

    Args:
        fragment: T steps; those of whole episodes make whole trajectories. `DictObs` are none of
            them: flatten the observations first.
        observation_space: Of a single env.
        action_space: Likewise.

    Raises:
        ValueError: If a shape does not fit its space, or a cost is not one number >= 0.
    """
    obs, acts = _rows(fragment.obs[:-1], fragment.acts, observation_space, action_space)
    if isinstance(observation_space, Box) and obs.dtype == np.uint8:
        obs = obs.reshape(-1, *observation_space.shape)
    infos = [] if fragment.infos is None else list(fragment.infos)
    # Under one of our wrappers "cost" is the learned one, which the oracle must not see.
    wrapped = any("true_cost" in info or "trajectory" in info for info in infos)
    name, costs = "true_cost" if wrapped else "cost", None
    if infos and all(name in info for info in infos):
        costs = cost_array([info[name] for info in infos], (len(infos),))
    return Trajectory(obs, acts, costs)


def _rows(
    obs: Any, actions: NDArray[Any], observation_space: Space[Any], action_space: Space[Any]
) -> tuple[NDArray[Any], FloatArray]:
    if isinstance(action_space, Box):
        actions = np.clip(actions, action_space.low, action_space.high)
    count = len(actions)
    return (
        obs_rows(observation_space, obs, num_envs=count),
        action_rows(action_space, actions, num_envs=count),
    )
