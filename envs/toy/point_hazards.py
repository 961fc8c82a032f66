"""PointHazards: drive a point from goal to goal past four hazard discs, alone or as a batch.

The task is small enough to learn in seconds on a CPU and yet has the conflict of the real ones: the
straight way to most goals leads through a hazard, and every goal can be reached around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from pbcrl_envs.batched import BatchedEnv
from pbcrl_envs.checks import State
from pbcrl_envs.simulation import FloatArray, IndexArray, Simulation, StepResult
from pbcrl_envs.single import SingleEnv
from pbcrl_envs.streams import Streams
from pbcrl_envs.toy.drawing import Image, draw

STEP_LENGTH = 0.1
"""Largest displacement per step and axis; the arena is [-1, 1]^2."""
HAZARDS: FloatArray = np.array([(x, y) for x in (-0.45, 0.45) for y in (-0.45, 0.45)])
"""Centres of the hazard discs. (4, 2)."""
HAZARD_RADIUS = 0.25
"""A step that ends strictly inside a disc costs 1."""
SPAWN_MARGIN = 0.05
"""Starts and goals keep at least this distance from every disc."""
GOAL_RADIUS = 0.1
"""A goal counts as reached within this distance, bound included."""


class PointHazardsEnv(SingleEnv):
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
        render_mode: None, or "rgb_array": `render()` returns the arena from above,
            uint8 (240, 240, 3).

    Raises:
        ValueError: If `render_mode` is another one.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, *, render_mode: str | None = None) -> None:
        simulation = PointHazardsSimulation(1)
        super().__init__(
            simulation, render_mode=render_mode, painter=lambda _: _ArenaPainter(simulation)
        )


class PointHazardsVectorEnv(BatchedEnv):
    """N copies of `PointHazardsEnv`; `BatchedEnv` says what all batches have in common.

    Observations are float32 (N, 4), actions (N, 2). Episodes end by truncation only.

    Args:
        num_envs: N >= 1.
        max_episode_steps: Steps after which an episode is truncated, >= 1.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        render_mode: None, or "rgb_array": `render()` returns one picture per env.

    Raises:
        ValueError: If an argument is out of its range, or the mode is DISABLED.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        max_episode_steps: int = 100,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        simulation = PointHazardsSimulation(num_envs)
        super().__init__(
            simulation,
            max_episode_steps=max_episode_steps,
            autoreset_mode=autoreset_mode,
            render_mode=render_mode,
            painter=lambda _: _ArenaPainter(simulation),
        )


class PointHazardsSimulation(Simulation):
    """N points, each with its own goals.

    Args:
        num_envs: N.
    """

    name = "PointHazards"
    observation_space = Box(
        np.array([-1, -1, -2, -2], np.float32), np.array([1, 1, 2, 2], np.float32)
    )
    observation_names = "x", "y", "goal_dx", "goal_dy"
    action_space = Box(-1.0, 1.0, (2,), np.float32)
    action_axes = "(x, y)"
    render_fps = 10
    state_bounds = {"position": (-1, 1), "goal": (-1, 1)}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.position = np.zeros((num_envs, 2))
        self.goal = np.zeros((num_envs, 2))
        self._streams = Streams(num_envs)

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the random stream of each copy; None lets a stream run on."""
        self._streams.seed(seeds)

    def reset(self, ids: IndexArray) -> None:
        """Draw a start and a goal for some copies."""
        for i in ids.tolist():
            self.position[i] = _draw_free_point(self._streams[i])
            self.goal[i] = _draw_free_point(self._streams[i])

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Move some points, (n, 2), and draw a goal for those that reached theirs."""
        moved, reward, cost, reached = _move(self.position[ids], self.goal[ids], actions)
        self.position[ids] = moved
        for i in ids[reached].tolist():
            self.goal[i] = _draw_free_point(self._streams[i])
        never = np.zeros((2, len(ids)), dtype=np.bool_)
        return StepResult(reward, cost, *never)

    def observe(self, ids: IndexArray) -> NDArray[np.float32]:
        """Return position and way to the goal, float32 (n, 4)."""
        position = self.position[ids]
        return np.concatenate([position, self.goal[ids] - position], axis=1).astype(np.float32)

    def state_dict(self, ids: IndexArray) -> State:
        """Return positions, goals and random streams of some copies."""
        return {
            "position": self.position[ids],
            "goal": self.goal[ids],
            "stream": self._streams.words(ids),
        }

    def load_state_dict(self, state: State, ids: IndexArray) -> None:
        """Put some copies into a state of `state_dict`."""
        self.position[ids], self.goal[ids] = state["position"], state["goal"]
        self._streams.set_words(ids, state["stream"])


class _ArenaPainter:
    def __init__(self, simulation: PointHazardsSimulation) -> None:
        self._simulation = simulation

    def draw(self, i: int) -> Image:
        return draw(
            self._simulation.position[i],
            self._simulation.goal[i],
            goal_radius=GOAL_RADIUS,
            hazards=HAZARDS,
            hazard_radius=HAZARD_RADIUS,
        )

    def close(self) -> None:
        pass


def _move(
    position: FloatArray, goal: FloatArray, action: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, NDArray[np.bool_]]:
    """One step of n points, (n, 2) each: new positions (n, 2); reward, cost, goal reached (n,).

    The actions are within their bounds: `checked_actions` has clipped them.
    """
    moved = np.clip(position + STEP_LENGTH * action, -1.0, 1.0)
    distance = _distance(moved, goal)
    reached = distance <= GOAL_RADIUS
    reward = _distance(position, goal) - distance + reached
    inside = _distance(moved[:, None], HAZARDS) < HAZARD_RADIUS  # (n, 4)
    cost = np.any(inside, axis=1, keepdims=True)[:, 0].astype(np.float64)
    return moved, reward, cost, reached


def _distance(a: FloatArray, b: FloatArray) -> FloatArray:
    """Euclidean distance along the last axis.

    Spelled out: `norm` and `hypot` may round a batch differently from a single row.
    """
    dx, dy = a[..., 0] - b[..., 0], a[..., 1] - b[..., 1]
    distance: FloatArray = np.sqrt(dx * dx + dy * dy)
    return distance


def _draw_free_point(rng: np.random.Generator) -> FloatArray:
    """A point uniform over the arena, at least `SPAWN_MARGIN` away from every hazard. (2,)."""
    while True:
        point = rng.uniform(-1.0, 1.0, size=2)
        if (_distance(point, HAZARDS) >= HAZARD_RADIUS + SPAWN_MARGIN).all():
            return point
