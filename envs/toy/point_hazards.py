"""PointHazards: drive a point from goal to goal past four hazard discs, alone or as a batch.

The task is small enough to learn in seconds on a CPU and yet has the conflict of the real ones: the
straight way to most goals leads through a hazard, and every goal can be reached around them. Both
classes share one set of dynamics, so that env i of a batch seeded with s moves, to the last bit, as
the single env seeded with s + i. Knows nothing of learners or preferences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import (
    State,
    check_render_mode,
    checked_actions,
    checked_autoreset_mode,
    checked_ids,
    checked_state,
    refuse_options,
    require_render_mode,
    seed_per_env,
    task_number,
)
from pbcrl_envs.toy.drawing import Image, draw

Floats = NDArray[np.float64]
Obs = NDArray[np.float32]

STEP_LENGTH = 0.1
"""Largest displacement per step and axis; the arena is [-1, 1]^2."""
HAZARDS: Floats = np.array([(x, y) for x in (-0.45, 0.45) for y in (-0.45, 0.45)])
"""Centres of the hazard discs. (4, 2)."""
HAZARD_RADIUS = 0.25
"""A step that ends strictly inside a disc costs 1."""
SPAWN_MARGIN = 0.05
"""Starts and goals keep at least this distance from every disc."""
GOAL_RADIUS = 0.1
"""A goal counts as reached within this distance, bound included."""

_NAME = "PointHazards"
_AXES = "(x, y)"
_RENDER_MODES = ("rgb_array",)
_METADATA: dict[str, Any] = {"render_modes": list(_RENDER_MODES), "render_fps": 10}
_BOUNDS = {"position": (-1, 1), "goal": (-1, 1), "elapsed": (0, np.inf)}
_OBS_SPACE = Box(np.array([-1, -1, -2, -2], np.float32), np.array([1, 1, 2, 2], np.float32))
_ACTION_SPACE = Box(-1.0, 1.0, (2,), np.float32)


class PointHazardsEnv(gymnasium.Env[Obs, NDArray[np.float32]]):
    """A point that collects goals in the square [-1, 1]^2 with four hazard discs in it.

    Each step moves the point by 0.1 times the clipped action, no further than the walls. The reward
    is the decrease of the distance to the goal, plus 1 when the step ends within 0.1 of it; then a
    new goal is drawn. `info["cost"]` is 1 if the step ends inside a hazard, otherwise 0. Starts and
    goals are uniform over the arena, at least 0.05 away from every hazard. The env never
    terminates; `PointHazards-v0` is truncated after 100 steps by Gymnasium's `TimeLimit`.

    The limit is 5 per episode. Measured over 1,000 episodes: driving straight at each goal returns
    21.5 at an episode cost of 22.3; driving around the hazards returns 18.9 at a cost of 0. So
    reward alone breaks the limit four times over, while a policy that never touches a hazard keeps
    88 % of the return.

    Observation: x, y, goal_x - x, goal_y - y, float32 (4,). Action: direction and speed along the
    axes, in [-1, 1], clipped to it, float32 (2,).

    Args:
        render_mode: None, or "rgb_array": `render()` returns the arena from above.

    Raises:
        ValueError: If `render_mode` is another one.
    """

    metadata: dict[str, Any] = _METADATA

    def __init__(self, *, render_mode: str | None = None) -> None:
        check_render_mode(render_mode, modes=_RENDER_MODES, env=_NAME)
        self.render_mode = render_mode
        self.observation_space = _OBS_SPACE
        self.action_space = _ACTION_SPACE
        self._position: Floats | None = None  # (1, 2), a batch of one
        self._goal = np.zeros((1, 2))
        self._elapsed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Draw a start and a goal; returns the first observation and an empty info.

        Raises:
            ValueError: If `options` holds anything.
        """
        refuse_options(options, env=_NAME)
        super().reset(seed=seed)
        self._position = _draw_free_point(self.np_random)[None]
        self._goal = _draw_free_point(self.np_random)[None]
        self._elapsed = 0
        return _observe(self._position, self._goal)[0], {}

    def step(self, action: NDArray[np.float32]) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Move once.

        Args:
            action: (2,), clipped to [-1, 1].

        Returns:
            obs, reward, False, False and {"cost": 0.0 or 1.0}, the cost of this step.

        Raises:
            ResetNeeded: If the env was never reset.
            ValueError: If the action has another shape, or holds NaN or an infinity.
        """
        if self._position is None:
            raise ResetNeeded(_RESET_FIRST)
        checked = checked_actions(action, shape=(2,), axes=_AXES)[None]
        self._position, reward, cost, reached = _move(self._position, self._goal, checked)
        self._elapsed += 1
        if reached[0]:
            self._goal = _draw_free_point(self.np_random)[None]
        obs = _observe(self._position, self._goal)[0]
        return obs, float(reward[0]), False, False, {"cost": float(cost[0])}

    def render(self) -> Image:
        """Draw the arena from above, uint8 (240, 240, 3).

        Raises:
            ValueError: If `render_mode` is None.
            ResetNeeded: If the env was never reset.
        """
        require_render_mode(self.render_mode)
        if self._position is None:
            raise ResetNeeded(_RESET_FIRST)
        return _draw(self._position[0], self._goal[0])

    def get_state(self) -> State:
        """Return all that the future depends on: one row of `PointHazardsVectorEnv.get_state`.

        The steps that a `TimeLimit` around the env counts are its own.

        Raises:
            ResetNeeded: If the env was never reset.
        """
        if self._position is None:
            raise ResetNeeded(_RESET_FIRST)
        state = _state(
            self._position, self._goal, [self.np_random], np.array([self._elapsed]), np.zeros(1)
        )
        return {key: np.asarray(array[0]) for key, array in state.items()}

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Go on, bit by bit, from a state that `get_state` gave here or as a row of a batch.

        Raises:
            ValueError: If the state is of another task, or its keys, shapes or numbers are wrong;
                the env is left as it was.
        """
        none = np.zeros(1)
        like = _state(np.zeros((1, 2)), np.zeros((1, 2)), [_new_stream()], none, none)
        like = {key: np.asarray(array[0]) for key, array in like.items()}
        checked = checked_state(state, like=like, bounds=_BOUNDS, env=_NAME)
        self._position, self._goal = checked["position"][None], checked["goal"][None]
        self._elapsed = int(checked["elapsed"])
        self.np_random = _stream(checked["stream"])


class PointHazardsVectorEnv(VectorEnv[Obs, NDArray[np.float32], NDArray[Any]]):
    """N copies of `PointHazardsEnv`, moved together, each with its own random stream.

    Every step reports `infos["cost"]`, float64 (N,): the cost of the step just taken, also where it
    ended an episode. Episodes end by truncation only. What follows an end depends on the mode:

    - NEXT_STEP: the next step of that env ignores its action and returns the reset observation
      with reward 0 and cost 0. It is no transition.
    - SAME_STEP: the returned row is already the reset observation; the true last one stands in
      `infos["final_obs"]`, float32 (N, 4), where the mask `infos["_final_obs"]` is true. Both keys
      exist only if some episode ended.

    Args:
        num_envs: N >= 1.
        max_episode_steps: Steps after which an episode is truncated, >= 1.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        render_mode: None, or "rgb_array": `render()` returns one picture per env.

    Raises:
        ValueError: If an argument is out of its range, or the mode is DISABLED.
    """

    metadata: dict[str, Any] = _METADATA

    def __init__(
        self,
        num_envs: int,
        *,
        max_episode_steps: int = 100,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        check_render_mode(render_mode, modes=_RENDER_MODES, env=_NAME)
        self.render_mode = render_mode
        for name, count in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if count < 1:
                raise ValueError(f"{name} must be >= 1, got {count}")
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.autoreset_mode = checked_autoreset_mode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = _OBS_SPACE
        self.single_action_space = _ACTION_SPACE
        self.observation_space = batch_space(_OBS_SPACE, num_envs)
        self.action_space = batch_space(_ACTION_SPACE, num_envs)
        self._rngs: list[np.random.Generator | None] = [None] * num_envs  # None: never reset
        self._position = np.zeros((num_envs, 2))
        self._goal = np.zeros((num_envs, 2))
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._done = np.zeros(num_envs, dtype=np.bool_)  # ended on the last step, not yet reset

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Obs, dict[str, Any]]:
        """Start a new episode in every env.

        Args:
            seed: An int s seeds env i with s + i; a sequence gives one seed per env; None, there or
                as the whole, lets a stream run on.
            options: None or empty.

        Returns:
            obs (N, 4) and an empty info.

        Raises:
            ValueError: If there is not one seed per env, or `options` holds anything.
        """
        refuse_options(options, env=_NAME)
        for i, env_seed in enumerate(seed_per_env(seed, num_envs=self.num_envs)):
            if env_seed is not None or self._rngs[i] is None:
                self._rngs[i], _ = seeding.np_random(env_seed)
            self._start_episode(i)
        self._done[:] = False
        return _observe(self._position, self._goal), {}

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[Obs, Floats, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Move every env once; see the class for what happens where an episode ends.

        Args:
            actions: (N, 2), clipped to [-1, 1].

        Returns:
            obs (N, 4), rewards (N,), terminations (N,) all false, truncations (N,), infos.

        Raises:
            ResetNeeded: If the envs were never reset.
            ValueError: If the actions have another shape, or hold NaN or an infinity.
        """
        if None in self._rngs:
            raise ResetNeeded(_RESET_FIRST)
        checked = checked_actions(actions, shape=(self.num_envs, 2), axes=_AXES)
        resetting = self._done.copy()  # (N,); always false in SAME_STEP
        moved, reward, cost, reached = _move(self._position, self._goal, checked)
        self._position = moved
        self._elapsed += 1
        for i in np.flatnonzero(reached & ~resetting).tolist():
            self._goal[i] = _draw_free_point(self._rng(i))
        for i in np.flatnonzero(resetting).tolist():
            self._start_episode(i)
        reward[resetting] = 0.0
        cost[resetting] = 0.0
        obs = _observe(self._position, self._goal)  # (N, 4)
        truncated = self._elapsed >= self.max_episode_steps
        infos: dict[str, Any] = {"cost": cost}
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._done = truncated.copy()
        elif truncated.any():
            infos |= {"final_obs": obs, "_final_obs": truncated.copy()}
            for i in np.flatnonzero(truncated).tolist():
                self._start_episode(i)
            obs = _observe(self._position, self._goal)
        return obs, reward, np.zeros_like(truncated), truncated, infos

    def render(self) -> tuple[Image, ...]:
        """Draw every arena from above, N times uint8 (240, 240, 3).

        Raises:
            ValueError: If `render_mode` is None.
            ResetNeeded: If the envs were never reset.
        """
        require_render_mode(self.render_mode)
        if None in self._rngs:
            raise ResetNeeded(_RESET_FIRST)
        return tuple(map(_draw, self._position, self._goal))

    def get_state(self, ids: ArrayLike | None = None) -> State:
        """Return all that the future of some copies depends on, actions aside.

        Whatever takes it over by `set_state` goes on bit by bit as this env would: any copy of such
        an env, whatever its number of copies, in this process or another.

        Args:
            ids: Which copies, n different indices in any order; None takes all.

        Returns:
            Arrays of numbers by name, one row per copy, (n, ...).

        Raises:
            ValueError: If `ids` are not different indices of copies.
            ResetNeeded: If one of the copies was never reset.
        """
        chosen = checked_ids(ids, num_envs=self.num_envs)
        rngs = [rng for i in chosen if (rng := self._rngs[i]) is not None]
        if len(rngs) < len(chosen):
            raise ResetNeeded(_RESET_FIRST)
        return _state(
            self._position[chosen],
            self._goal[chosen],
            rngs,
            self._elapsed[chosen],
            self._done[chosen],
        )

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
        points, numbers = np.zeros((len(chosen), 2)), np.zeros(len(chosen))
        like = _state(points, points, [_new_stream()] * len(chosen), numbers, numbers)
        checked = checked_state(state, like=like, bounds=_BOUNDS, env=_NAME)
        self._position[chosen], self._goal[chosen] = checked["position"], checked["goal"]
        self._elapsed[chosen], self._done[chosen] = checked["elapsed"], checked["finished"]
        for i, words in zip(chosen.tolist(), checked["stream"], strict=True):
            self._rngs[i] = _stream(words)

    def _start_episode(self, i: int) -> None:
        rng = self._rng(i)
        self._position[i] = _draw_free_point(rng)
        self._goal[i] = _draw_free_point(rng)
        self._elapsed[i] = 0

    def _rng(self, i: int) -> np.random.Generator:
        rng = self._rngs[i]
        assert rng is not None  # reset() has filled the list
        return rng


_RESET_FIRST = "an episode starts with a reset, but there was none; call reset()"


def _move(
    position: Floats, goal: Floats, action: Floats
) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    """One step of N points, (N, 2) each: new positions (N, 2); reward, cost, goal reached (N,).

    The actions are within their bounds: `checked_actions` has clipped them.
    """
    moved = np.clip(position + STEP_LENGTH * action, -1.0, 1.0)
    distance = _distance(moved, goal)
    reached = distance <= GOAL_RADIUS
    reward = _distance(position, goal) - distance + reached
    inside = _distance(moved[:, None], HAZARDS) < HAZARD_RADIUS  # (N, 4)
    cost = np.any(inside, axis=1, keepdims=True)[:, 0].astype(np.float64)
    return moved, reward, cost, reached


def _distance(a: Floats, b: Floats) -> Floats:
    """Euclidean distance along the last axis.

    Spelled out: `norm` and `hypot` may round a batch differently from a single row.
    """
    dx, dy = a[..., 0] - b[..., 0], a[..., 1] - b[..., 1]
    distance: Floats = np.sqrt(dx * dx + dy * dy)
    return distance


def _observe(position: Floats, goal: Floats) -> Obs:
    return np.concatenate([position, goal - position], axis=1).astype(np.float32)


def _draw(position: Floats, goal: Floats) -> Image:
    return draw(
        position, goal, goal_radius=GOAL_RADIUS, hazards=HAZARDS, hazard_radius=HAZARD_RADIUS
    )


def _draw_free_point(rng: np.random.Generator) -> Floats:
    """A point uniform over the arena, at least `SPAWN_MARGIN` away from every hazard. (2,)."""
    while True:
        point = rng.uniform(-1.0, 1.0, size=2)
        if (_distance(point, HAZARDS) >= HAZARD_RADIUS + SPAWN_MARGIN).all():
            return point


def _state(
    position: Floats,
    goal: Floats,
    rngs: Sequence[np.random.Generator],
    elapsed: NDArray[Any],
    finished: NDArray[Any],
) -> State:
    """The state of n points as new arrays, (n, ...); position and goal (n, 2), the rest (n,)."""
    return {
        "task": np.full(len(position), task_number(_NAME)),
        "elapsed": elapsed.astype(np.int64),
        "finished": finished.astype(np.bool_),
        "position": position.copy(),
        "goal": goal.copy(),
        "stream": np.array([_words(rng) for rng in rngs], dtype=np.uint64).reshape(-1, 4),
    }


def _new_stream() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(0))


def _words(rng: np.random.Generator) -> list[int]:
    """State and increment of a PCG64 stream as 64-bit words, the high one first.

    Its spare half word is left out: points are drawn from whole ones.
    """
    inner = rng.bit_generator.state["state"]
    return [w for n in (inner["state"], inner["inc"]) for w in (n >> 64, n & (2**64 - 1))]


def _stream(words: NDArray[np.uint64]) -> np.random.Generator:
    """The stream that `_words` describes."""
    rng = _new_stream()
    state, low_state, increment, low_increment = map(int, words)
    numbers = {"state": state << 64 | low_state, "inc": increment << 64 | low_increment}
    rng.bit_generator.state = {**rng.bit_generator.state, "state": numbers}
    return rng
