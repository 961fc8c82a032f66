"""N copies of one navigation task, stepped together: physics, goal, reward, cost, observation.

Knows nothing of episodes: who resets which copy, and when, is the environments' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import NDArray

from pbcrl_envs.robotics.layout import LayoutStream
from pbcrl_envs.robotics.lidar import lidar
from pbcrl_envs.robotics.physics import (
    GREMLIN_TARGET_HEIGHT,
    HEIGHTS,
    SUBSTEPS,
    TIMESTEP,
    build_model,
)
from pbcrl_envs.robotics.tasks import NUM_BINS, NUM_SENSORS, Kind, Task

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]

_REWARD_LIMIT = 10.0
_BUTTON_DELAY = 10  # steps for which all buttons are hidden and free of cost after a success


class StepResult(NamedTuple):
    """What one step brought to the n copies that took it."""

    reward: FloatArray
    """Progress towards the goal in metres, plus 1 for reaching it. (n,)."""
    cost: FloatArray
    """1 if anything constrained was entered or touched, else 0. (n,)."""
    terminated: BoolArray
    """True if no room is left for a new goal. (n,)."""


class NavigationSimulation:
    """N independent copies of a task; every copy must be reset before it is stepped.

    Args:
        task: The task.
        num_envs: N.
        num_threads: Physics threads; 0 takes one per CPU.
    """

    def __init__(self, task: Task, *, num_envs: int, num_threads: int) -> None:
        self.task = task
        self.num_envs = num_envs
        self._streams = [LayoutStream(task) for _ in range(num_envs)]
        self._steps_to_skip = np.zeros(num_envs, dtype=np.int64)

        self._batch = Batch(build_model(task), num_envs, num_threads)
        self._time: FloatArray = self._batch.bind("time")
        self._qpos: FloatArray = self._batch.bind("qpos")
        self._qvel: FloatArray = self._batch.bind("qvel")
        self._ctrl: FloatArray = self._batch.bind("ctrl")
        self._sensors: FloatArray = self._batch.bind("sensordata")
        self._mocap_pos: FloatArray = self._batch.bind("mocap_pos")  # (N, mocaps, 3)
        self._mocap_quat: FloatArray = self._batch.bind("mocap_quat")

        # Rows of `positions` by kind; row 0 is the agent.
        kinds = [group.kind for group in task.objects for _ in range(group.num)]
        self._rows = {kind: 1 + np.flatnonzero([k is kind for k in kinds]) for kind in Kind}
        self._lidar_of = np.repeat(
            np.arange(len(task.objects)), [group.num for group in task.objects]
        )
        free = np.concatenate([self._rows[kind] for kind in (Kind.VASE, Kind.GREMLIN)])
        self._free_rows = np.sort(free)
        self._free_qpos = 3 + 7 * np.arange(len(free))  # qpos address of each free body
        self._free_height = np.array([HEIGHTS[kinds[row - 1]] for row in self._free_rows])
        touching = (Kind.BUTTON, Kind.GREMLIN)
        self._contact_of = {
            kind: NUM_SENSORS + np.flatnonzero([k is kind for k in kinds if k in touching])
            for kind in touching
        }
        sizes = {group.kind: group.size for group in task.objects}
        self._goal_row = int(self._rows[Kind.GOAL][0])
        self._goal_size = sizes[Kind.GOAL]
        self._hazard_size = sizes.get(Kind.HAZARD, 0.0)
        self._travel = max(group.travel for group in task.objects)

        self._positions = np.zeros((num_envs, 1 + len(kinds), 2))
        self._gremlin_spawn = np.zeros((num_envs, len(self._rows[Kind.GREMLIN]), 2))
        self._goal_distance = np.zeros(num_envs)
        self._goal_button = np.zeros(num_envs, dtype=np.intp)
        self._button_timer = np.zeros(num_envs, dtype=np.int64)

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Start the random stream of each copy anew; None leaves a copy's stream as it is."""
        for i, seed in enumerate(seeds):
            if seed is not None:
                self._streams[i] = LayoutStream(self.task, seed)
                self._steps_to_skip[i] = 0

    def reset(self, ids: IndexArray) -> None:
        """Put the copies `ids` (sorted) into fresh layouts, at rest."""
        self._batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        buttons, gremlins = self._rows[Kind.BUTTON], self._rows[Kind.GREMLIN]
        for i in ids:
            stream = self._synced_stream(i)
            positions, headings = stream.draw_layout()
            self._positions[i] = positions
            self._gremlin_spawn[i] = positions[gremlins]
            self._qpos[i, :3] = *positions[0], headings[0]
            quaternions = np.zeros((len(headings), 4))
            quaternions[:, 0], quaternions[:, 3] = np.cos(headings / 2), np.sin(headings / 2)
            for row, start, height in zip(
                self._free_rows, self._free_qpos, self._free_height, strict=True
            ):
                self._qpos[i, start : start + 7] = *positions[row], height, *quaternions[row]
            if len(buttons):
                self._mocap_pos[i, : len(buttons), :2] = positions[buttons]
                self._mocap_pos[i, : len(buttons), 2] = HEIGHTS[Kind.BUTTON]
                self._mocap_quat[i, : len(buttons)] = quaternions[buttons]
            # Welds start satisfied; the first step moves the targets away.
            self._mocap_pos[i, len(buttons) :, :2] = positions[gremlins]
            self._mocap_pos[i, len(buttons) :, 2] = HEIGHTS[Kind.GREMLIN]
            self._mocap_quat[i, len(buttons) :] = quaternions[gremlins]
            if not self._draw_goal(i, stream):
                raise RuntimeError(
                    "a layout must leave room for its goal, but none was found on reset; "
                    "give the task a larger extent or smaller keepouts"
                )
        self._button_timer[ids] = 0
        self._batch.forward(ids)
        self._goal_distance[ids] = self._distances_to_goal(ids)

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Advance the copies `ids` (sorted) by 0.02 s.

        Args:
            ids: Which copies, (n,).
            actions: Their thrust and turn, clipped to [-1, 1], (n, 2).

        Raises:
            RuntimeError: If a copy diverged; the message names it.
        """
        self._ctrl[ids] = actions
        self._advance(ids)
        self._steps_to_skip[ids] += 1
        moving = self._positions
        moving[ids, 0] = self._qpos[ids, :2]
        for row, start in zip(self._free_rows, self._free_qpos, strict=True):
            moving[ids, row] = self._qpos[ids, start : start + 2]

        distance = self._distances_to_goal(ids)
        reached = self._reached(ids, distance)
        progress = self._goal_distance[ids] - distance
        reward = np.clip(progress + reached, -_REWARD_LIMIT, _REWARD_LIMIT)
        self._goal_distance[ids] = distance
        cost = self._costs(ids)
        self._button_timer[ids] = np.maximum(0, self._button_timer[ids] - 1)
        terminated = np.zeros(len(ids), dtype=np.bool_)
        for k in np.flatnonzero(reached):
            i = ids[k]
            terminated[k] = not self._draw_goal(i, self._synced_stream(i))
            self._button_timer[i] = _BUTTON_DELAY
        renewed = ids[reached]
        self._goal_distance[renewed] = self._distances_to_goal(renewed)
        return StepResult(reward, cost, terminated)

    def observe(self, ids: IndexArray) -> FloatArray:
        """Observations of the copies `ids`, (n, obs_dim)."""
        positions = self._positions[ids]
        lidars = lidar(
            positions[:, 1:] - positions[:, :1],
            self._qpos[ids, 2],
            self._lidar_of,
            num_bins=NUM_BINS,
        )
        for k, group in enumerate(self.task.objects):
            if group.kind is Kind.BUTTON:
                hidden = self._button_timer[ids] != 0
                lidars[hidden, NUM_BINS * k : NUM_BINS * (k + 1)] = 0
        return np.concatenate([self._sensors[ids, :NUM_SENSORS], lidars], axis=1)

    def _advance(self, ids: IndexArray) -> None:
        try:
            if len(self._rows[Kind.GREMLIN]):
                self._batch.rollout(
                    SUBSTEPS,
                    self._mocap_targets(ids),
                    mujoco.mjtState.mjSTATE_MOCAP_POS.value,
                    record=(),
                    ids=ids,
                )
                self._batch.forward(ids)
            else:
                self._batch.step(ids, SUBSTEPS, mujoco.mjtStage.mjSTAGE_ACC.value)
        except SimulationError as error:
            raise RuntimeError(_divergence(error.ids)) from error
        # Warnings come one physics step late, so the last one's state is looked at as well.
        warned = self._batch.warning[ids, :, 1].any(axis=1)
        diverged = warned | ~np.isfinite(self._qvel[ids].sum(axis=1))
        if diverged.any():
            raise RuntimeError(_divergence(ids[diverged]))

    def _mocap_targets(self, ids: IndexArray) -> FloatArray:
        """Where the mocap bodies are in each physics step, (n, SUBSTEPS, 3 * mocaps)."""
        # Summed one by one, as the engine does it, so that phases agree to the last bit.
        times = np.full((len(ids), SUBSTEPS), TIMESTEP)
        times[:, 0] = self._time[ids]
        phase = np.add.accumulate(times, axis=1)
        circle = self._travel * np.stack([np.sin(phase), np.cos(phase)], axis=-1)
        targets = np.repeat(self._mocap_pos[ids][:, None], SUBSTEPS, axis=1)
        first = len(self._rows[Kind.BUTTON])
        targets[:, :, first:, :2] = self._gremlin_spawn[ids][:, None] + circle[:, :, None]
        targets[:, :, first:, 2] = GREMLIN_TARGET_HEIGHT
        return targets.reshape(len(ids), SUBSTEPS, -1)

    def _distances_to_goal(self, ids: IndexArray) -> FloatArray:
        offset = self._positions[ids, self._goal_row] - self._positions[ids, 0]
        distances: FloatArray = np.sqrt((offset * offset).sum(axis=1))
        return distances

    def _reached(self, ids: IndexArray, distance: FloatArray) -> BoolArray:
        if not self.task.press_goal:
            return distance <= self._goal_size
        contact = self._contact_of[Kind.BUTTON][self._goal_button[ids]]
        return self._sensors[ids, contact] > 0

    def _costs(self, ids: IndexArray) -> FloatArray:
        unsafe = np.zeros(len(ids), dtype=np.bool_)
        if Kind.HAZARD in self.task.constrained:
            hazards = self._positions[ids[:, None], self._rows[Kind.HAZARD]]  # (n, hazards, 2)
            offsets = hazards - self._positions[ids, :1]
            distances = np.sqrt((offsets * offsets).sum(axis=2))
            unsafe |= (distances < self._hazard_size).any(axis=1)
        if Kind.GREMLIN in self.task.constrained:
            touched = self._sensors[ids[:, None], self._contact_of[Kind.GREMLIN]] > 0
            unsafe |= touched.any(axis=1)
        if Kind.BUTTON in self.task.constrained:
            touched = self._sensors[ids[:, None], self._contact_of[Kind.BUTTON]] > 0
            touched[np.arange(len(ids)), self._goal_button[ids]] = False
            unsafe |= touched.any(axis=1) & (self._button_timer[ids] == 0)
        return unsafe.astype(np.float64)

    def _draw_goal(self, i: int, stream: LayoutStream) -> bool:
        """Give copy `i` a new goal; false if there is no room for one."""
        if self.task.press_goal:
            self._goal_button[i] = stream.draw_index(len(self._rows[Kind.BUTTON]))
            button = self._rows[Kind.BUTTON][self._goal_button[i]]
            self._positions[i, self._goal_row] = self._positions[i, button]
            return True
        occupied = self._positions[i].copy()
        # Upstream keeps clear of where gremlins started, not of where they are.
        occupied[self._rows[Kind.GREMLIN]] = self._gremlin_spawn[i]
        place = stream.draw_goal(occupied)
        if place is None:
            return False
        self._positions[i, self._goal_row] = place
        return True

    def _synced_stream(self, i: int) -> LayoutStream:
        stream = self._streams[i]
        stream.skip_steps(int(self._steps_to_skip[i]))
        self._steps_to_skip[i] = 0
        return stream


def _divergence(ids: NDArray[np.integer]) -> str:
    return (
        f"the simulation must stay finite, but it diverged in envs {ids.tolist()}; "
        "reset all of them, and look at the actions that led there"
    )
