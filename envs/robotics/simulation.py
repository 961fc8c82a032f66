"""N copies of one navigation task, stepped together: physics, goal, reward, cost, observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mujoco
import numpy as np
from gymnasium.spaces import Box
from mujoco.batch import Batch, SimulationError

from pbcrl_envs.checks import State, check_num_threads, check_task
from pbcrl_envs.robotics.layout import LayoutStream
from pbcrl_envs.robotics.lidar import lidar
from pbcrl_envs.robotics.physics import (
    AGENT_HEIGHT,
    FIXED,
    FREE,
    GOAL_HEIGHT,
    GREMLIN_TARGET_HEIGHT,
    HEIGHTS,
    SUBSTEPS,
    TIMESTEP,
    build_model,
)
from pbcrl_envs.robotics.resting import Resting
from pbcrl_envs.robotics.tasks import NUM_BINS, NUM_SENSORS, TASKS, Kind
from pbcrl_envs.simulation import BoolArray, FloatArray, IndexArray, Simulation, StepResult

_REWARD_LIMIT = 10.0
_BUTTON_DELAY = 10  # steps for which all buttons are hidden and free of cost after a success
_RESTING_SPEED = 1e-4  # metres per second from which a vase counts as moving
_PHYSICS = ("time", "qpos", "qvel", "qacc_warmstart", "ctrl", "mocap_pos", "mocap_quat")


class Snapshot(NamedTuple):
    """What one copy looks like at one moment, for whoever draws it."""

    physics: dict[str, FloatArray]
    """Fields of MuJoCo's data by name: qpos, mocap_pos, mocap_quat."""
    positions: FloatArray
    """Of the agent and the K objects in the task's order, (1 + K, 2)."""
    lidars: FloatArray
    """Closeness by kind of object and bin, (kinds, NUM_BINS)."""
    cost: float
    """Of the step that led here; 0 where no step did."""


class NavigationSimulation(Simulation):
    """N independent copies of a task.

    A step pays the progress towards the goal in metres, plus 1 for reaching it; it costs 1 if
    anything constrained was entered, touched or moved, and terminates if no room is left for a new
    goal.

    Args:
        task: A name in `TASKS`.
        num_envs: N.
        num_threads: Physics threads; 0 takes one per CPU.

    Raises:
        ValueError: If there is no such task, or a number is out of its range.
    """

    action_space = Box(-1, 1, (2,), dtype=np.float64)
    action_axes = "(thrust, turn)"
    render_fps = 50

    def __init__(self, task: str, *, num_envs: int, num_threads: int) -> None:
        super().__init__(num_envs)
        check_num_threads(num_threads)
        check_task(task, TASKS)
        self.name = f"SafetyPoint{task}"
        self.task = TASKS[task]
        low, high = np.full(self.task.obs_dim, -np.inf), np.full(self.task.obs_dim, np.inf)
        low[NUM_SENSORS:], high[NUM_SENSORS:] = 0, 1  # lidars
        self.observation_space = Box(low, high, dtype=np.float64)
        self.observation_names = self.task.observation_names
        self._streams = [LayoutStream(self.task) for _ in range(num_envs)]
        self._steps_to_skip = np.zeros(num_envs, dtype=np.int64)

        self._batch = Batch(build_model(self.task), num_envs, num_threads)
        self._physics: dict[str, FloatArray] = {name: self._batch.bind(name) for name in _PHYSICS}
        self._qpos, self._qvel = self._physics["qpos"], self._physics["qvel"]
        self._mocap_pos = self._physics["mocap_pos"]  # (N, mocaps, 3)
        self._sensors: FloatArray = self._batch.bind("sensordata")
        self._resting = Resting(self._batch)

        # Rows of `positions` by kind; row 0 is the agent.
        kinds = [group.kind for group in self.task.objects for _ in range(group.num)]
        self._rows = {kind: 1 + np.flatnonzero([k is kind for k in kinds]) for kind in Kind}
        self._lidar_of = np.repeat(
            np.arange(len(self.task.objects)), [group.num for group in self.task.objects]
        )
        self._free_rows = 1 + np.flatnonzero([k in FREE for k in kinds])
        self._fixed_rows = 1 + np.flatnonzero([k in FIXED for k in kinds])
        self._heights = np.array([AGENT_HEIGHT] + [HEIGHTS.get(kind, 0.0) for kind in kinds])
        # Columns of qpos and qvel where each free body's numbers begin.
        self._free_qpos = 3 + 7 * np.arange(len(self._free_rows))
        free_qvel = 3 + 6 * np.arange(len(self._free_rows))
        self._box_qpos = int(self._free_qpos[-1]) if self.task.has(Kind.BOX) else 0
        is_vase = np.isin(self._free_rows, self._rows[Kind.VASE])
        self._vase_qvel = free_qvel[is_vase, None] + np.arange(3)
        self._contacts_of = {
            kind: NUM_SENSORS + np.flatnonzero([k is kind for k in kinds if k in self.task.felt])
            for kind in self.task.felt
        }
        self._touch_costs = np.concatenate(
            [
                np.empty(0, dtype=np.intp),
                *(self._contacts_of[k] for k in self.task.felt if k is not Kind.BUTTON),
            ]
        )
        sizes = {group.kind: group.size for group in self.task.objects}
        self._goal_row = int(self._rows[Kind.GOAL][0])
        self._goal_size = sizes[Kind.GOAL]
        self._hazard_size = sizes.get(Kind.HAZARD, 0.0)
        self._travel = max(group.travel for group in self.task.objects)

        self._positions = np.zeros((num_envs, 1 + len(kinds), 2))
        self._gremlin_spawn = np.zeros((num_envs, len(self._rows[Kind.GREMLIN]), 2))
        self._goal_button = np.zeros(num_envs, dtype=np.int64)
        self._button_timer = np.zeros(num_envs, dtype=np.int64)
        self.state_bounds = {
            "goal_button": (0, max(0, len(self._rows[Kind.BUTTON]) - 1)),
            "button_timer": (0, _BUTTON_DELAY),
            "stream_position": (0, 624),
        }
        self._last_cost = np.zeros(num_envs)  # to be shown, no part of the state
        self._distances = np.zeros((num_envs, 1 + self.task.has(Kind.BOX)))  # those being rewarded

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the random stream of each copy, (N,) seeds; None lets a stream run on."""
        for i, seed in enumerate(seeds):
            if seed is not None:
                self._streams[i] = LayoutStream(self.task, seed)
                self._steps_to_skip[i] = 0

    def reset(self, ids: IndexArray) -> None:
        """Put the copies `ids` (sorted) into fresh layouts, at rest."""
        self._batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        drawn = [self._synced_stream(i).draw_layout() for i in ids]
        positions = np.array([layout for layout, _ in drawn])  # (n, 1 + K, 2)
        headings = np.array([angles for _, angles in drawn])  # (n, 1 + K)
        self._positions[ids] = positions
        gremlins = self._rows[Kind.GREMLIN]
        self._gremlin_spawn[ids] = positions[:, gremlins]
        heights = np.broadcast_to(self._heights[:, None], (*positions.shape[:2], 1))
        poses = np.concatenate([positions, heights, np.zeros((*positions.shape[:2], 4))], axis=2)
        poses[:, :, 3], poses[:, :, 6] = np.cos(headings / 2), np.sin(headings / 2)
        self._qpos[ids, :2], self._qpos[ids, 2] = positions[:, 0], headings[:, 0]
        self._qpos[ids, 3:] = poses[:, self._free_rows].reshape(len(ids), -1)
        # Welds start satisfied; the first step moves the targets away.
        mocaps = np.concatenate([self._fixed_rows, gremlins])
        self._mocap_pos[ids] = poses[:, mocaps, :3]
        self._physics["mocap_quat"][ids] = poses[:, mocaps, 3:]
        for i in ids:
            if not self._draw_goal(i, self._streams[i]):
                raise RuntimeError(
                    "a layout must leave room for its goal, but none was found on reset; "
                    "give the task a larger extent or smaller keepouts"
                )
        self._button_timer[ids] = 0
        self._last_cost[ids] = 0
        self._resting.wake(ids)
        self._batch.forward(ids)
        self._distances[ids] = self._measure(ids)

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Advance the copies `ids` (sorted) by 0.02 s.

        Args:
            ids: Which copies, (n,).
            actions: Their thrust and turn, clipped to [-1, 1], (n, 2).
        """
        before = self._batch.state[ids]  # a copy
        self._last_cost[ids] = 0
        self._physics["ctrl"][ids] = actions
        diverged = self._advance(ids)
        self._steps_to_skip[ids] += 1
        if not diverged.any():
            return StepResult(*self._judge(ids), diverged)
        broken = ids[diverged]
        self._batch.state[broken] = before[diverged]
        self._batch.warning[broken] = 0
        self._resting.wake(broken)
        self._batch.forward(broken)
        result = StepResult(
            np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids), dtype=np.bool_), diverged
        )
        for whole, part in zip(result[:3], self._judge(ids[~diverged]), strict=True):
            whole[~diverged] = part
        return result

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

    def snapshot(self, i: int) -> Snapshot:
        """What copy `i` looks like; the arrays are copies."""
        names = ("qpos", "mocap_pos", "mocap_quat")
        lidars = self.observe(np.array([i]))[0, NUM_SENSORS:].reshape(-1, NUM_BINS)
        return Snapshot(
            {name: self._physics[name][i].copy() for name in names},
            self._positions[i].copy(),
            lidars,
            float(self._last_cost[i]),
        )

    def state_dict(self, ids: IndexArray) -> State:
        """All that the future of the copies `ids` depends on, actions aside; arrays (n, ...)."""
        streams = [self._synced_stream(i).position() for i in ids]
        return {
            **{name: array[ids] for name, array in self._physics.items()},
            "positions": self._positions[ids],
            "gremlin_spawn": self._gremlin_spawn[ids],
            "still_steps": self._resting.still_steps[ids],
            "goal_button": self._goal_button[ids],
            "button_timer": self._button_timer[ids],
            "stream_words": np.array([words for words, _ in streams], np.uint32).reshape(-1, 624),
            "stream_position": np.array([position for _, position in streams], np.int64),
        }

    def load_state_dict(self, state: State, ids: IndexArray) -> None:
        """Put the copies `ids` into a state of `state_dict`.

        Where moving objects are is taken from qpos, and how far the goal is from positions.

        Raises:
            ValueError: If the physics cannot go on from there; all copies are left as they were.
        """
        kept = self.state_dict(ids)
        if self._write(state, ids).all():
            return
        self._write(kept, ids)
        raise ValueError(
            "a state must be one that the physics can go on from, but its accelerations are not "
            "finite; look for huge positions or velocities in it"
        )

    def _write(self, state: State, ids: IndexArray) -> BoolArray:
        """Take over a state; return which copies have a sound one, (n,)."""
        for name, array in self._physics.items():
            array[ids] = state[name]
        self._positions[ids] = state["positions"]
        self._gremlin_spawn[ids] = state["gremlin_spawn"]
        self._goal_button[ids] = state["goal_button"]
        self._button_timer[ids] = state["button_timer"]
        self._last_cost[ids] = 0
        words, places = state["stream_words"], state["stream_position"]
        for i, row, position in zip(ids, words, places, strict=True):
            self._streams[i].go_to(row, int(position))
        self._steps_to_skip[ids] = 0
        self._batch.warning[ids] = 0
        self._resting.wake(ids, state["still_steps"])
        failed = self._failures(ids, lambda: self._batch.forward(np.sort(ids)))
        self._follow(ids)
        self._distances[ids] = self._measure(ids)
        return ~(failed | self._broken(ids))

    def _advance(self, ids: IndexArray) -> BoolArray:
        """Run the physics of one step; return which copies diverged, (n,)."""
        if not len(self._rows[Kind.GREMLIN]):
            stage = mujoco.mjtStage.mjSTAGE_ACC.value
            with self._resting.left_out(ids):
                failed = self._failures(ids, lambda: self._batch.step(ids, SUBSTEPS, stage))
            return failed | self._broken(ids)
        targets, spec = self._mocap_targets(ids), mujoco.mjtState.mjSTATE_MOCAP_POS.value
        failed = self._failures(
            ids, lambda: self._batch.rollout(SUBSTEPS, targets, spec, record=(), ids=ids)
        )
        return failed | self._failures(ids, lambda: self._batch.forward(ids)) | self._broken(ids)

    @staticmethod
    def _failures(ids: IndexArray, call: Callable[[], object]) -> BoolArray:
        """Make a call of the batch; return in which copies it raised, (n,)."""
        try:
            call()
        except SimulationError as error:
            return np.isin(ids, error.ids)
        return np.zeros(len(ids), dtype=np.bool_)

    def _broken(self, ids: IndexArray) -> BoolArray:
        # Warnings come one physics step late, so the last one's state is looked at as well.
        total = self._qvel[ids].sum(axis=1) + self._sensors[ids].sum(axis=1)
        broken: BoolArray = self._batch.warning[ids, :, 1].any(axis=1) | ~np.isfinite(total)
        return broken

    def _judge(self, ids: IndexArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Reward, cost and termination of the step that led here; a reached goal is renewed."""
        self._follow(ids)
        distances = self._measure(ids)  # (n, distances)
        reached = self._reached(ids, distances)
        progress = (self._distances[ids] - distances).sum(axis=1)
        reward = np.clip(progress + reached, -_REWARD_LIMIT, _REWARD_LIMIT)
        self._distances[ids] = distances
        cost = self._costs(ids)
        self._last_cost[ids] = cost
        self._button_timer[ids] = np.maximum(0, self._button_timer[ids] - 1)
        terminated = np.zeros(len(ids), dtype=np.bool_)
        if reached.any():
            renewed = ids[reached]
            terminated[reached] = [
                not self._draw_goal(i, self._synced_stream(i)) for i in renewed.tolist()
            ]
            self._button_timer[renewed] = _BUTTON_DELAY
            self._distances[renewed] = self._measure(renewed)
        return reward, cost, terminated

    def _follow(self, ids: IndexArray) -> None:
        """Note where the moving things are."""
        self._positions[ids, 0] = self._qpos[ids, :2]
        for row, start in zip(self._free_rows, self._free_qpos, strict=True):
            self._positions[ids, row] = self._qpos[ids, start : start + 2]

    def _mocap_targets(self, ids: IndexArray) -> FloatArray:
        """Where the mocap bodies are in each physics step, (n, SUBSTEPS, 3 * mocaps)."""
        # Summed one by one, as the engine does it, so that phases agree to the last bit.
        times = np.full((len(ids), SUBSTEPS), TIMESTEP)
        times[:, 0] = self._physics["time"][ids]
        phase = np.add.accumulate(times, axis=1)
        circle = self._travel * np.stack([np.sin(phase), np.cos(phase)], axis=-1)
        targets = np.repeat(self._mocap_pos[ids][:, None], SUBSTEPS, axis=1)
        first = len(self._fixed_rows)
        targets[:, :, first:, :2] = self._gremlin_spawn[ids][:, None] + circle[:, :, None]
        targets[:, :, first:, 2] = GREMLIN_TARGET_HEIGHT
        return targets.reshape(len(ids), SUBSTEPS, 3 * targets.shape[2])

    def _measure(self, ids: IndexArray) -> FloatArray:
        """The distances whose decrease is rewarded, (n, 1 or 2).

        From the agent to the goal on the floor; or, with a box, from the agent to the box and from
        the box to the goal, both in space.
        """
        agent, goal = self._positions[ids, 0], self._positions[ids, self._goal_row]
        if not self.task.has(Kind.BOX):
            return _lengths(goal - agent)[:, None]
        to_agent = self._qpos[ids, self._box_qpos : self._box_qpos + 3]  # both are copies
        to_goal = to_agent.copy()
        to_agent[:, :2] -= agent
        to_agent[:, 2] -= AGENT_HEIGHT
        to_goal[:, :2] -= goal
        to_goal[:, 2] -= GOAL_HEIGHT
        return np.stack([_lengths(to_agent), _lengths(to_goal)], axis=1)

    def _reached(self, ids: IndexArray, distances: FloatArray) -> BoolArray:
        if not self.task.has(Kind.BUTTON):
            return distances[:, -1] <= self._goal_size
        contact = self._contacts_of[Kind.BUTTON][self._goal_button[ids]]
        return self._sensors[ids, contact] > 0

    def _costs(self, ids: IndexArray) -> FloatArray:
        unsafe = np.zeros(len(ids), dtype=np.bool_)
        constrained = self.task.constrained
        if Kind.HAZARD in constrained:
            hazards = self._positions[ids[:, None], self._rows[Kind.HAZARD]]  # (n, hazards, 2)
            distances = _lengths(hazards - self._positions[ids, :1])
            unsafe |= (distances < self._hazard_size).any(axis=1)
        if len(self._touch_costs):
            unsafe |= (self._sensors[ids[:, None], self._touch_costs] > 0).any(axis=1)
        if Kind.VASE in constrained:
            speeds = _lengths(self._qvel[ids[:, None, None], self._vase_qvel])  # (n, vases)
            unsafe |= (speeds >= _RESTING_SPEED).any(axis=1)
        if Kind.BUTTON in constrained:
            touched = self._sensors[ids[:, None], self._contacts_of[Kind.BUTTON]] > 0
            touched[np.arange(len(ids)), self._goal_button[ids]] = False
            unsafe |= touched.any(axis=1) & (self._button_timer[ids] == 0)
        return unsafe.astype(np.float64)

    def _draw_goal(self, i: int, stream: LayoutStream) -> bool:
        """Give copy `i` a new goal; false if there is no room for one."""
        if self.task.has(Kind.BUTTON):
            self._goal_button[i] = stream.draw_index(len(self._rows[Kind.BUTTON]))
            button = self._rows[Kind.BUTTON][self._goal_button[i]]
            self._positions[i, self._goal_row] = self._positions[i, button]
            return True
        place = stream.draw_goal(self._positions[i])
        if place is None:
            return False
        self._positions[i, self._goal_row] = place
        return True

    def _synced_stream(self, i: int) -> LayoutStream:
        stream = self._streams[i]
        stream.skip_steps(int(self._steps_to_skip[i]))
        self._steps_to_skip[i] = 0
        return stream


def _lengths(vectors: FloatArray) -> FloatArray:
    """Euclidean length along the last axis."""
    lengths: FloatArray = np.sqrt((vectors * vectors).sum(axis=-1))
    return lengths
