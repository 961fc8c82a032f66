"""The point agent's navigation tasks as Gymnasium environments, one or many at a time.

Both are thin: the simulation is in `simulation.py`; here are spaces, seeds, episodes and autoreset.
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
from pbcrl_envs.robotics.scenery import NavigationPainter
from pbcrl_envs.robotics.simulation import NavigationSimulation
from pbcrl_envs.robotics.tasks import NUM_SENSORS, TASKS, Task

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_NAME = "SafetyPoint"
_AXES = "(thrust, turn)"


class SafetyPointVectorEnv(VectorEnv[FloatArray, FloatArray, NDArray[Any]]):
    """N copies of one navigation task of Safety-Gymnasium, stepped together.

    Observations are float64 (N, obs_dim), actions (N, 2): thrust and turn, clipped to [-1, 1].
    `infos["cost"]` is float64 (N,), in every step: the cost of the step just taken, 0 or 1, with
    the mask `infos["_cost"]` of Gymnasium's convention. The copy with seed s lives through exactly
    what `SafetyPointEnv` does with seed s; its layouts are those of Safety-Gymnasium 1.0.0.

    With autoreset NEXT_STEP, the step after an episode's end ignores the action and returns the
    reset observation with reward and cost 0: it is no transition. With SAME_STEP the reset
    observation comes at once, and the episode's last one is in `infos["final_obs"]`, (N, obs_dim),
    on the rows where `infos["_final_obs"]` is true; without an end the two keys are absent.

    Where the physics breaks down, the episode of that copy alone ends, truncated, with reward and
    cost 0 and its last sound observation; `infos["diverged"]`, bool (N,), marks it, and is absent
    otherwise. The first time there is a warning; `num_diverged` counts.

    Args:
        num_envs: N.
        task: One of the names in `TASKS`, as "Goal1".
        max_episode_steps: Steps after which an episode is truncated.
        autoreset_mode: NEXT_STEP or SAME_STEP, or their string values.
        num_threads: Physics threads; 0 takes one per CPU. Results do not depend on it.
        render_mode: None, or "rgb_array": `render()` returns one picture per copy.
        camera_name: "fixedfar", "fixednear", "overhead", "track" or "vision".
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws is missing.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012

    num_diverged: int
    """Episodes that a diverged simulation ended, since construction."""

    def __init__(
        self,
        num_envs: int,
        *,
        task: str = "Goal1",
        max_episode_steps: int = 1000,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        num_threads: int = 0,
        render_mode: str | None = None,
        camera_name: str = "fixedfar",
        width: int = 480,
        height: int = 480,
    ) -> None:
        check_at_least_one("num_envs", num_envs)
        check_at_least_one("max_episode_steps", max_episode_steps)
        check_render_mode(render_mode, modes=("rgb_array",), env=_NAME)
        check_num_threads(num_threads)
        mode = checked_autoreset_mode(autoreset_mode)
        found = _find_task(task)
        self.metadata = {**type(self).metadata, "autoreset_mode": mode}
        self.render_mode = render_mode
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _spaces(found)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.num_diverged = 0
        self._task_name = task
        self._max_episode_steps = max_episode_steps
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._simulation = NavigationSimulation(found, num_envs=num_envs, num_threads=num_threads)
        self._all = np.arange(num_envs)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._finished = np.zeros(num_envs, dtype=np.bool_)  # ended on the last step, not yet reset
        self._begun = np.zeros(num_envs, dtype=np.bool_)
        self._painter = _make_painter(found, render_mode, camera_name, width, height)

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
        return self._simulation.observe(self._all), self._infos(np.zeros(self.num_envs))

    def step(
        self, actions: FloatArray
    ) -> tuple[FloatArray, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Advance every copy by 0.02 s; under NEXT_STEP, finished ones are reset instead.

        Raises:
            ValueError: If the actions have the wrong shape, or hold NaN or an infinity.
            RuntimeError: If some copy was never reset.
        """
        clipped = checked_actions(actions, shape=(self.num_envs, 2), axes=_AXES)
        check_begun(self._begun)
        reward, cost = np.zeros(self.num_envs), np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        diverged = np.zeros(self.num_envs, dtype=np.bool_)
        # Under SAME_STEP nothing is left unfinished between two steps, so `renewed` is empty.
        renewed, stepped = np.flatnonzero(self._finished), np.flatnonzero(~self._finished)
        if len(stepped):
            result = self._simulation.step(stepped, clipped[stepped])
            reward[stepped], cost[stepped] = result.reward, result.cost
            terminated[stepped], diverged[stepped] = result.terminated, result.diverged
            self._steps[stepped] += 1
        if len(renewed):
            self._begin(renewed)
        truncated = (self._steps >= self._max_episode_steps) | diverged
        done = terminated | truncated
        obs = self._simulation.observe(self._all)
        infos = self._infos(cost)
        if diverged.any():
            infos["diverged"] = diverged
            self.num_diverged = count_diverged(
                self.num_diverged, np.flatnonzero(diverged), env=_NAME
            )
        if self._same_step and done.any():
            infos["final_obs"], infos["_final_obs"] = obs, done
            ended = np.flatnonzero(done)
            self._begin(ended)
            obs = obs.copy()
            obs[ended] = self._simulation.observe(ended)
        elif not self._same_step:
            self._finished = done
        return obs, reward, terminated, truncated, infos

    def get_state(self, ids: ArrayLike | None = None) -> State:
        """Return all that the future of some copies depends on, actions aside.

        Whatever takes it over by `set_state` goes on bit by bit as this env would: any copy of an
        env of the same task, whatever its number of copies or threads, in this process or another.

        Args:
            ids: Which copies, n different indices in any order; None takes all.

        Returns:
            Arrays of numbers by name, one row per copy, (n, ...).

        Raises:
            ValueError: If `ids` are not different indices of copies.
            RuntimeError: If one of the copies was never reset.
        """
        chosen = checked_ids(ids, num_envs=self.num_envs)
        check_begun(self._begun[chosen])
        return self._state(chosen)

    def set_state(self, state: Mapping[str, ArrayLike], ids: ArrayLike | None = None) -> None:
        """Put some copies into a state that `get_state` gave; they are then ready to step.

        Args:
            state: Arrays by name, (n, ...).
            ids: Which copies take its rows, in that order; None means all.

        Raises:
            ValueError: If the state is of another task, or its keys, shapes or numbers are wrong,
                or `ids` are not different indices; all copies are left as they were.
        """
        chosen = checked_ids(ids, num_envs=self.num_envs)
        checked = checked_state(
            state,
            like=self._state(chosen),
            bounds={"elapsed": (0, np.inf), **self._simulation.state_bounds},
            env=_NAME + self._task_name,
        )
        self._simulation.set_state(checked, chosen)
        self._steps[chosen], self._finished[chosen] = checked["elapsed"], checked["finished"]
        self._begun[chosen] = True

    def render(self) -> tuple[Image, ...]:
        """Draw every copy: N pictures, uint8 (height, width, 3).

        Raises:
            ValueError: If `render_mode` is None.
            RuntimeError: If some copy was never reset.
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

    def _state(self, ids: NDArray[np.intp]) -> State:
        return {
            "task": np.full(len(ids), task_number(self._task_name)),
            "elapsed": self._steps[ids],
            "finished": self._finished[ids],
            **self._simulation.get_state(ids),
        }

    def _begin(self, ids: NDArray[np.intp]) -> None:
        self._simulation.reset(ids)
        self._steps[ids] = 0
        self._finished[ids] = False
        self._begun[ids] = True

    def _infos(self, cost: FloatArray) -> dict[str, Any]:
        return {"cost": cost, "_cost": np.ones(self.num_envs, dtype=np.bool_)}


class SafetyPointEnv(gym.Env[FloatArray, FloatArray]):
    """One navigation task of Safety-Gymnasium; `info["cost"]` is the cost of the step, 0 or 1.

    It has no time limit of its own: `gymnasium.make` adds the one of the registered id.
    `reset(seed=s)` gives the layout that Safety-Gymnasium 1.0.0 gives for seed s.

    If the physics breaks down, the episode ends, truncated, with reward and cost 0, its last sound
    observation and `info["diverged"] = True`. The first time there is a warning; `num_diverged`
    counts.

    Args:
        task: One of the names in `TASKS`, as "Goal1".
        render_mode: None; "rgb_array": `render()` returns a picture; "human": every step and reset
            is shown in a window, in real time.
        camera_name: "fixedfar", "fixednear", "overhead", "track" or "vision".
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws, or for a
            window the display, is missing.
    """

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"], "render_fps": 50}  # noqa: RUF012

    num_diverged: int
    """Episodes that a diverged simulation ended, since construction."""

    def __init__(
        self,
        *,
        task: str = "Goal1",
        render_mode: str | None = None,
        camera_name: str = "fixedfar",
        width: int = 480,
        height: int = 480,
    ) -> None:
        check_render_mode(render_mode, modes=("human", "rgb_array"), env=_NAME)
        found = _find_task(task)
        self.render_mode = render_mode
        self.observation_space, self.action_space = _spaces(found)
        self.num_diverged = 0
        self._task_name = task
        self._simulation = NavigationSimulation(found, num_envs=1, num_threads=1)
        self._only = np.zeros(1, dtype=np.intp)
        self._steps = 0
        self._finished = False
        self._begun = False
        self._painter = _make_painter(found, render_mode, camera_name, width, height)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin a new episode; without a seed, go on with the stream of random numbers."""
        refuse_options(options, env=_NAME)
        super().reset(seed=seed)
        self._simulation.seed([seed])
        self._simulation.reset(self._only)
        self._steps, self._finished, self._begun = 0, False, True
        if self.render_mode == "human":
            self.render()
        return self._simulation.observe(self._only)[0], {"cost": 0.0}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Advance by 0.02 s.

        Raises:
            ValueError: If the action has the wrong shape, or holds NaN or an infinity.
            RuntimeError: If the env was never reset.
        """
        clipped = checked_actions(action, shape=(2,), axes=_AXES)
        check_begun(self._begun)
        result = self._simulation.step(self._only, clipped[None])
        self._steps += 1
        if self.render_mode == "human":
            self.render()
        obs = self._simulation.observe(self._only)[0]
        info: dict[str, Any] = {"cost": float(result.cost[0])}
        terminated, diverged = bool(result.terminated[0]), bool(result.diverged[0])
        if diverged:
            info["diverged"] = True
            self.num_diverged = count_diverged(self.num_diverged, self._only, env=_NAME)
        self._finished = terminated or diverged
        return obs, float(result.reward[0]), terminated, diverged, info

    def get_state(self) -> State:
        """Return all that the future of the env depends on: one row of `SafetyPointVectorEnv`'s.

        The steps that a `TimeLimit` around it counts are its own.

        Raises:
            RuntimeError: If the env was never reset.
        """
        check_begun(self._begun)
        return self._state()

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Go on from a state that `get_state` gave, or from one row of `SafetyPointVectorEnv`'s.

        Raises:
            ValueError: If the state is of another task, or its keys, shapes or numbers are wrong;
                the env is left as it was.
        """
        checked = checked_state(
            state,
            like=self._state(),
            bounds={"elapsed": (0, np.inf), **self._simulation.state_bounds},
            env=_NAME + self._task_name,
        )
        self._simulation.set_state({key: a[None] for key, a in checked.items()}, self._only)
        self._steps, self._finished = int(checked["elapsed"]), bool(checked["finished"])
        self._begun = True

    def render(self) -> Image | None:
        """Draw the state: uint8 (height, width, 3); None in a window.

        Raises:
            ValueError: If `render_mode` is None.
            RuntimeError: If the env was never reset.
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
            "task": np.array(task_number(self._task_name)),
            "elapsed": np.array(self._steps),
            "finished": np.array(self._finished),
            **{key: np.asarray(array[0]) for key, array in simulated.items()},
        }


def _make_painter(
    task: Task, mode: str | None, camera_name: str, width: int, height: int
) -> NavigationPainter | None:
    if mode is None:
        return None
    return NavigationPainter(task, mode=mode, camera_name=camera_name, width=width, height=height)


def _find_task(name: str) -> Task:
    check_task(name, TASKS)
    return TASKS[name]


def _spaces(task: Task) -> tuple[gym.Space[FloatArray], gym.Space[FloatArray]]:
    """Observation and action space of one copy."""
    low, high = np.full(task.obs_dim, -np.inf), np.full(task.obs_dim, np.inf)
    low[NUM_SENSORS:], high[NUM_SENSORS:] = 0, 1  # lidars
    observations: gym.Space[Any] = Box(low, high, dtype=np.float64)
    actions: gym.Space[Any] = Box(-1, 1, (2,), dtype=np.float64)
    return observations, actions
