"""The velocity tasks as Gymnasium environments, one or many at a time.

Both are thin: the simulation is in `velocity_simulation.py`; here are spaces, seeds, episodes,
autoreset, states and what happens when a simulation diverges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import (
    State,
    check_at_least_one,
    check_begun,
    check_num_threads,
    check_render_mode,
    check_task,
    checked_actions,
    checked_autoreset_mode,
    checked_ids,
    checked_state,
    count_diverged,
    refuse_options,
    require_render_mode,
    seed_per_env,
    task_number,
)
from pbcrl_envs.robotics.rendering import Image
from pbcrl_envs.robotics.velocity_scenery import VelocityPainter
from pbcrl_envs.robotics.velocity_simulation import TASKS, VelocitySimulation

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_NAME = "SafetyVelocity"
_AXES = "one torque per motor"
_BOUNDS = {"elapsed": (0.0, np.inf)}


class SafetyVelocityVectorEnv(VectorEnv[FloatArray, NDArray[np.floating[Any]], NDArray[Any]]):
    """N copies of one velocity task of Safety-Gymnasium, stepped together.

    Observations are float64 (N, obs_dim), actions (N, act_dim), clipped to their bounds:
    HalfCheetah and Walker2d have 17 and 6 in [-1, 1], Humanoid has 376 and 17 in [-0.4, 0.4].
    Episodes end after `max_episode_steps`, and when Walker2d or Humanoid falls: they differ in
    length. `infos["cost"]` is float64 (N,), in every step: 1 if the robot was faster in the step
    just taken than its limit, with the mask `infos["_cost"]` of Gymnasium's convention. The copy
    with seed s lives through exactly what `SafetyVelocityEnv` does with seed s; it starts where
    Safety-Gymnasium 1.0.0 does.

    With autoreset NEXT_STEP, the step after an episode's end ignores the action and returns the
    reset observation with reward and cost 0: it is no transition. With SAME_STEP the reset
    observation comes at once, and the episode's last one is in `infos["final_obs"]`, (N, obs_dim),
    on the rows where `infos["_final_obs"]` is true; without an end the two keys are absent.

    If a simulation diverges, that episode alone is truncated: its last step repeats the last sound
    observation with reward and cost 0, and `infos["diverged"]`, otherwise absent, is true there.

    Args:
        num_envs: N.
        task: "HalfCheetah", "Walker2d" or "Humanoid".
        max_episode_steps: Steps after which an episode is truncated.
        autoreset_mode: NEXT_STEP or SAME_STEP, or their string values.
        num_threads: Physics threads; 0 takes one per CPU. Results do not depend on it.
        render_mode: None, or "rgb_array": `render()` returns one picture per copy.
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws is missing.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    num_diverged: int
    """Episodes that ended because their simulation diverged, since the construction."""

    def __init__(
        self,
        num_envs: int,
        *,
        task: str = "HalfCheetah",
        max_episode_steps: int = 1000,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        num_threads: int = 0,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
    ) -> None:
        check_at_least_one("num_envs", num_envs)
        check_at_least_one("max_episode_steps", max_episode_steps)
        check_num_threads(num_threads)
        check_task(task, TASKS)
        check_render_mode(render_mode, modes=("rgb_array",), env=_NAME)
        mode = checked_autoreset_mode(autoreset_mode)
        self.render_mode = render_mode
        self.num_envs = num_envs
        self._simulation = VelocitySimulation(task, num_envs=num_envs, num_threads=num_threads)
        self._painter = _make_painter(self._simulation, render_mode, width, height)
        self.metadata = _metadata(type(self).metadata, self._simulation) | {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = _spaces(self._simulation)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.num_diverged = 0
        self._title = _NAME + task
        self._max_episode_steps = max_episode_steps
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._all = np.arange(num_envs)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._finished = np.zeros(num_envs, dtype=np.bool_)  # ended, and not yet begun anew
        self._begun = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin a new episode in every copy.

        Args:
            seed: With an int s, copy i gets seed s + i; a sequence has one seed (or None) per copy;
                None goes on with the streams of random numbers.
            options: Must be None or empty.

        Returns:
            The observations, (N, obs_dim), and infos with a cost of 0.

        Raises:
            ValueError: If there is not one seed per copy, or `options` holds anything.
        """
        refuse_options(options, env=_NAME)
        seeds = seed_per_env(seed, num_envs=self.num_envs)
        if isinstance(seed, int | np.integer):
            super().reset(seed=int(seed))
        self._simulation.seed(seeds)
        self._begin(self._all)
        self._finished[:] = False
        self._begun[:] = True
        return self._simulation.obs.copy(), self._infos(np.zeros(self.num_envs))

    def step(
        self, actions: NDArray[np.floating[Any]]
    ) -> tuple[FloatArray, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Advance every copy by one step; under NEXT_STEP, finished ones are reset instead.

        Raises:
            ValueError: If the actions have the wrong shape, or hold NaN or an infinity.
            RuntimeError: If a copy was neither reset nor set since the construction.
        """
        simulation = self._simulation
        shape = (self.num_envs, len(simulation.max_action))
        clipped = checked_actions(actions, shape=shape, axes=_AXES, bound=simulation.max_action)
        check_begun(self._begun)
        reward, cost = np.zeros(self.num_envs), np.zeros(self.num_envs)
        terminated, diverged = (np.zeros(self.num_envs, dtype=np.bool_) for _ in range(2))
        renewed, stepped = np.flatnonzero(self._finished), np.flatnonzero(~self._finished)
        if len(stepped):
            result = simulation.step(stepped, clipped[stepped])
            reward[stepped], cost[stepped] = result.reward, result.cost
            terminated[stepped], diverged[stepped] = result.terminated, result.diverged
            self._elapsed[stepped] += 1
        if len(renewed):
            self._begin(renewed)
        truncated = (self._elapsed >= self._max_episode_steps) | diverged
        done = terminated | truncated
        obs = simulation.obs.copy()
        infos = self._infos(cost)
        if diverged.any():
            infos["diverged"] = diverged
            self.num_diverged = count_diverged(
                self.num_diverged, np.flatnonzero(diverged), env=_NAME
            )
        self._finished = done
        if self._same_step and done.any():
            self._finished = np.zeros_like(done)
            infos["final_obs"], infos["_final_obs"] = obs, done
            self._begin(np.flatnonzero(done))
            obs = simulation.obs.copy()
        return obs, reward, terminated, truncated, infos

    def get_state(self, ids: ArrayLike | None = None) -> State:
        """Return all that the future of the copies depends on, as plain arrays of n rows.

        Going on after `set_state` is, to the last bit, not having stopped: in any env of the task,
        whatever its number of copies, threads or autoreset mode.

        Args:
            ids: Which copies, all by default.

        Raises:
            ValueError: If `ids` are not different numbers of copies.
            RuntimeError: If one of them was neither reset nor set since the construction.
        """
        rows = checked_ids(ids, num_envs=self.num_envs)
        check_begun(self._begun[rows])
        return self._state_of(rows)

    def set_state(self, state: Mapping[str, ArrayLike], ids: ArrayLike | None = None) -> None:
        """Put back what `get_state` gave, here or in another env of the same task.

        Args:
            state: One row per copy that is to be set.
            ids: Which copies, all by default.

        Raises:
            ValueError: If the state is not one of this task, or has not one row per copy; nothing
                is changed then.
        """
        rows = checked_ids(ids, num_envs=self.num_envs)
        checked = checked_state(state, like=self._state_of(rows), bounds=_BOUNDS, env=self._title)
        self._simulation.set_state(rows, checked)
        self._elapsed[rows] = checked["elapsed"]
        self._finished[rows] = checked["finished"]
        self._begun[rows] = True

    def render(self) -> tuple[Image, ...]:
        """Draw every copy: N pictures, uint8 (height, width, 3).

        Raises:
            ValueError: If `render_mode` is None.
            RuntimeError: If a copy was neither reset nor set since the construction.
        """
        require_render_mode(self.render_mode)
        check_begun(self._begun)
        assert self._painter is not None
        images = [self._painter.draw(self._simulation.snapshot(i)) for i in range(self.num_envs)]
        return tuple(image for image in images if image is not None)

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002 - Gymnasium's signature
        """Give back what drawing holds."""
        if self._painter is not None:
            self._painter.close()

    def _state_of(self, ids: NDArray[np.intp]) -> State:
        return {
            "task": np.full(len(ids), task_number(self._title)),
            "elapsed": self._elapsed[ids],
            "finished": self._finished[ids],
            **self._simulation.get_state(ids),
        }

    def _begin(self, ids: NDArray[np.intp]) -> None:
        self._simulation.reset(ids)
        self._elapsed[ids] = 0

    def _infos(self, cost: FloatArray) -> dict[str, Any]:
        return {"cost": cost, "_cost": np.ones(self.num_envs, dtype=np.bool_)}


class SafetyVelocityEnv(gym.Env[FloatArray, NDArray[np.floating[Any]]]):
    """One velocity task of Safety-Gymnasium; `info["cost"]` is the cost of the step, 0 or 1.

    It has no time limit of its own: `gymnasium.make` adds the one of the registered id. If the
    simulation diverges, the step repeats the last observation with reward and cost 0, truncates the
    episode and has a true `info["diverged"]`.

    Args:
        task: "HalfCheetah", "Walker2d" or "Humanoid".
        render_mode: None; "rgb_array": `render()` returns a picture; "human": every step and reset
            is shown in a window, in real time.
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws, or for a
            window the display, is missing.
    """

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012

    num_diverged: int
    """Episodes that ended because their simulation diverged, since the construction."""

    def __init__(
        self,
        *,
        task: str = "HalfCheetah",
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
    ) -> None:
        check_task(task, TASKS)
        check_render_mode(render_mode, modes=("human", "rgb_array"), env=_NAME)
        self.render_mode = render_mode
        self._simulation = VelocitySimulation(task, num_envs=1, num_threads=1)
        self._painter = _make_painter(self._simulation, render_mode, width, height)
        self.metadata = _metadata(type(self).metadata, self._simulation)
        self.observation_space, self.action_space = _spaces(self._simulation)
        self.num_diverged = 0
        self._title = _NAME + task
        self._only = np.zeros(1, dtype=np.intp)
        self._elapsed = 0
        self._finished = False
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin a new episode; without a seed, go on with the stream of random numbers."""
        refuse_options(options, env=_NAME)
        super().reset(seed=seed)
        self._simulation.seed([seed])
        self._simulation.reset(self._only)
        self._elapsed, self._finished, self._begun = 0, False, True
        if self.render_mode == "human":
            self.render()
        return self._simulation.obs[0].copy(), {"cost": 0.0}

    def step(
        self, action: NDArray[np.floating[Any]]
    ) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Advance by one step.

        Raises:
            ValueError: If the action has the wrong shape, or holds NaN or an infinity.
            RuntimeError: If there was neither a reset nor a state set.
        """
        highest = self._simulation.max_action
        clipped = checked_actions(action, shape=highest.shape, axes=_AXES, bound=highest)
        check_begun(self._begun)
        result = self._simulation.step(self._only, clipped[None])
        terminated, diverged = bool(result.terminated[0]), bool(result.diverged[0])
        info: dict[str, Any] = {"cost": float(result.cost[0])}
        if diverged:
            info["diverged"] = True
            self.num_diverged = count_diverged(self.num_diverged, self._only, env=_NAME)
        self._elapsed += 1
        self._finished = terminated or diverged
        if self.render_mode == "human":
            self.render()
        return self._simulation.obs[0].copy(), float(result.reward[0]), terminated, diverged, info

    def get_state(self) -> State:
        """Return all that the future depends on: a row of the vector env's `get_state`.

        Raises:
            RuntimeError: If there was neither a reset nor a state set.
        """
        check_begun(self._begun)
        return self._state()

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Put back what `get_state` gave, or a row of the vector env's; then step or reset.

        Wrappers know nothing of it: the time limit of `gymnasium.make` goes on counting.

        Raises:
            ValueError: If the state is not one of this task; nothing is changed then.
        """
        checked = checked_state(state, like=self._state(), bounds=_BOUNDS, env=self._title)
        self._simulation.set_state(self._only, {k: v[None] for k, v in checked.items()})
        self._elapsed, self._finished = int(checked["elapsed"]), bool(checked["finished"])
        self._begun = True

    def render(self) -> Image | None:
        """Draw the state: uint8 (height, width, 3); None in a window.

        Raises:
            ValueError: If `render_mode` is None.
            RuntimeError: If there was neither a reset nor a state set.
        """
        require_render_mode(self.render_mode)
        check_begun(self._begun)
        assert self._painter is not None
        return self._painter.draw(self._simulation.snapshot(0))

    def close(self) -> None:
        """Close the window and give back what drawing holds."""
        if self._painter is not None:
            self._painter.close()

    def _state(self) -> State:
        simulated = self._simulation.get_state(self._only)
        return {
            "task": np.array(task_number(self._title)),
            "elapsed": np.array(self._elapsed),
            "finished": np.array(self._finished),
            **{key: rows[0] for key, rows in simulated.items()},
        }


def _make_painter(
    simulation: VelocitySimulation, mode: str | None, width: int, height: int
) -> VelocityPainter | None:
    if mode is None:
        return None
    seconds = simulation.seconds
    return VelocityPainter(simulation.model, mode=mode, width=width, height=height, seconds=seconds)


def _metadata(shared: dict[str, Any], simulation: VelocitySimulation) -> dict[str, Any]:
    return {**shared, "render_fps": round(1 / simulation.seconds)}


def _spaces(
    simulation: VelocitySimulation,
) -> tuple[gym.Space[FloatArray], gym.Space[NDArray[np.floating[Any]]]]:
    """Observation and action space of one copy; the types are Safety-Gymnasium's."""
    observations: gym.Space[Any] = Box(-np.inf, np.inf, simulation.obs.shape[1:], np.float64)
    actions: gym.Space[Any] = Box(-simulation.max_action, simulation.max_action, dtype=np.float32)
    return observations, actions
