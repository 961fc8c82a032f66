"""The velocity tasks of Safety-Gymnasium: what a step pays and costs, and where robots start.

A robot is paid for running forward and breaks its limit by running fast. The tasks are version 4 of
Gymnasium's HalfCheetah, Walker2d and Humanoid, plus a cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gymnasium.spaces import Box

from pbcrl_envs.checks import State, check_num_threads, check_task
from pbcrl_envs.robotics.velocity_names import body_names, joint_names
from pbcrl_envs.robotics.velocity_physics import Physics, load_model
from pbcrl_envs.simulation import FloatArray, IndexArray, Simulation, StepResult
from pbcrl_envs.streams import Streams


@dataclass(frozen=True)
class VelocityTask:
    """One robot: how it is paid, when it has fallen, and how fast it may run."""

    model_file: str
    """The robot's XML file among Gymnasium's."""
    substeps: int
    """Steps of the engine per env step."""
    speed_limit: float
    """A step costs 1 if the robot is faster than this, in m/s."""
    forward_weight: float
    """Reward per m/s forward."""
    control_weight: float
    """Reward lost per squared unit of action."""
    start_noise: float
    """Size of the random displacement from the model's posture at a start."""
    alive_reward: float = 0.0
    """Reward per step, the one in which it falls included."""
    upright: tuple[tuple[int, float, float], ...] = ()
    """(index, low, high) of generalised positions: outside of (low, high) the robot has fallen."""
    normal_start_velocities: bool = False
    """True if velocities start normally distributed, false if uniformly as positions do."""
    shown_velocity: float = math.inf
    """Largest generalised velocity that an observation shows."""
    in_space: bool = False
    """True if the robot moves in all directions: then its speed is that of its centre of mass in
    the plane, and observations also hold inertias, velocities and forces of its bodies."""


TASKS = {
    "HalfCheetah": VelocityTask(
        model_file="half_cheetah.xml",
        substeps=5,
        speed_limit=3.2096,
        forward_weight=1.0,
        control_weight=0.1,
        start_noise=0.1,
        normal_start_velocities=True,
    ),
    "Walker2d": VelocityTask(
        model_file="walker2d.xml",
        substeps=4,
        speed_limit=2.3415,
        forward_weight=1.0,
        control_weight=1e-3,
        start_noise=5e-3,
        alive_reward=1.0,
        upright=((1, 0.8, 2.0), (2, -1.0, 1.0)),
        shown_velocity=10.0,
    ),
    "Humanoid": VelocityTask(
        model_file="humanoid.xml",
        substeps=5,
        speed_limit=1.4149,
        forward_weight=1.25,
        control_weight=0.1,
        start_noise=1e-2,
        alive_reward=5.0,
        upright=((2, 1.0, 2.0),),
        in_space=True,
    ),
}
"""The tasks by the name in their id: `SafetyHumanoidVelocity-v1` is "Humanoid"."""

_BODY_FIELDS = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")  # in the order of an observation


class Snapshot(NamedTuple):
    """What one copy looks like at one moment, for whoever draws it."""

    qpos: FloatArray
    """Generalised positions, (nq,)."""
    cost: float
    """Of the step that led here; 0 where no step did."""


class VelocitySimulation(Simulation):
    """N independent copies of a task.

    A step pays for running and standing, less that for effort; it costs 1 if the robot was strictly
    faster than its limit, and terminates if it has fallen.

    Args:
        task: A name in `TASKS`.
        num_envs: N.
        num_threads: Physics threads; 0 takes one per CPU.

    Raises:
        ValueError: If there is no such task, or a number is out of its range.
    """

    action_axes = "one torque per motor"
    obs: FloatArray
    """The last observation of every copy. To be read only. (N, obs_dim)."""
    seconds: float
    """Simulated time of one env step."""

    def __init__(self, task: str, *, num_envs: int, num_threads: int) -> None:
        super().__init__(num_envs)
        check_num_threads(num_threads)
        check_task(task, TASKS)
        self.name = f"SafetyVelocity{task}"
        self.task = TASKS[task]
        self.model = load_model(self.task.model_file)
        self.physics = Physics(self.model, num_envs=num_envs, num_threads=num_threads)
        self._body_fields: list[FloatArray] = []
        if self.task.in_space:
            self._body_fields = [self.physics.bind(name) for name in _BODY_FIELDS]
            self._body_positions = self.physics.bind("xipos")  # (N, bodies, 3)
        self.seconds = self.model.opt.timestep * self.task.substeps
        self.render_fps = round(1 / self.seconds)
        self._num_hidden = 2 if self.task.in_space else 1  # where it is in the world
        self._streams = Streams(num_envs)
        self._location = np.zeros((num_envs, self._num_hidden))
        sizes = [self.model.nq - self._num_hidden, self.model.nv]
        sizes += [math.prod(field.shape[1:]) for field in self._body_fields]
        self.obs = np.zeros((num_envs, sum(sizes)))
        self._last_cost = np.zeros(num_envs)  # to be shown, no part of the state
        highest = self.model.actuator_ctrlrange[:, 1].astype(np.float32)
        # The types are Safety-Gymnasium's.
        self.action_space = Box(-highest, highest, dtype=np.float32)
        self.observation_space = Box(-np.inf, np.inf, self.obs.shape[1:], np.float64)
        qpos, qvel = joint_names(self.model)
        self.observation_names = (*qpos[self._num_hidden :], *qvel)
        if self.task.in_space:
            self.observation_names += body_names(self.model)

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the random stream of each copy; None lets a stream run on."""
        self._streams.seed(seeds)

    def reset(self, ids: IndexArray) -> None:
        """Put the copies `ids` near the model's own posture; the same seed starts as upstream."""
        noise = self.task.start_noise
        qpos, qvel = self._posture(len(ids))
        for k, i in enumerate(ids.tolist()):
            stream = self._streams[i]
            qpos[k] += stream.uniform(-noise, noise, self.model.nq)
            if self.task.normal_start_velocities:
                qvel[k] = noise * stream.standard_normal(self.model.nv)
            else:
                qvel[k] = stream.uniform(-noise, noise, self.model.nv)
        self.physics.reset(ids, qpos, qvel)
        self._location[ids] = self._locate(ids)
        self._last_cost[ids] = 0
        self.obs[ids] = self._look(ids)

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Advance the copies `ids` by one env step.

        A copy that diverges keeps its last observation and must be reset or set.

        Args:
            ids: Which copies, (n,).
            actions: Torques in units of the motors, within their bounds, (n, act_dim).
        """
        task = self.task
        unstable = self.physics.step(ids, actions, substeps=task.substeps)
        with np.errstate(over="ignore", invalid="ignore"):  # of copies that diverged
            location = self._locate(ids)
            velocity = (location - self._location[ids]) / self.seconds
            speed = velocity[:, 0]
            if task.in_space:
                speed = np.sqrt(velocity[:, 0] ** 2 + velocity[:, 1] ** 2)
            effort = task.control_weight * np.square(actions).sum(axis=1)
            reward = task.forward_weight * velocity[:, 0] + task.alive_reward - effort
            obs = self._look(ids)
            # Not from the observation alone: clipping would hide an infinite velocity.
            total = obs.sum(axis=1) + self.physics.qvel[ids].sum(axis=1) + reward
        diverged = unstable | ~np.isfinite(total)
        cost = (speed > task.speed_limit).astype(np.float64)
        terminated = np.zeros(len(ids), dtype=np.bool_)
        for index, low, high in task.upright:
            position = self.physics.qpos[ids, index]
            terminated |= ~((low < position) & (position < high))
        if diverged.any():
            broken = ids[diverged]
            # A state that is taken before the copy is reset must not hold a NaN.
            self.physics.reset(broken, *self._posture(len(broken)))
            reward[diverged] = cost[diverged] = 0.0
            terminated[diverged] = False
            obs[diverged] = self.obs[broken]
            location[diverged] = self._location[broken]
        self.obs[ids], self._location[ids], self._last_cost[ids] = obs, location, cost
        return StepResult(reward, cost, terminated, diverged)

    def snapshot(self, i: int) -> Snapshot:
        """What copy `i` looks like; the array is a copy."""
        return Snapshot(self.physics.qpos[i].copy(), float(self._last_cost[i]))

    def observe(self, ids: IndexArray) -> FloatArray:
        """Return the observations of some copies, (n, obs_dim)."""
        return self.obs[ids]

    def state_dict(self, ids: IndexArray) -> State:
        """Return all that the future of some copies depends on, (n, ...) each."""
        return {
            "physics": self.physics.state_of(ids),
            "location": self._location[ids],
            "obs": self.obs[ids],
            "stream": self._streams.words(ids),
        }

    def load_state_dict(self, state: State, ids: IndexArray) -> None:
        """Put some copies into a state of `state_dict`."""
        self.physics.load_state(ids, state["physics"])
        self._location[ids] = state["location"]
        self._last_cost[ids] = 0
        self.obs[ids] = state["obs"]
        self._streams.set_words(ids, state["stream"])

    def _posture(self, count: int) -> tuple[FloatArray, FloatArray]:
        """The model's own positions (count, nq), at rest (count, nv)."""
        return np.tile(self.model.qpos0, (count, 1)), np.zeros((count, self.model.nv))

    def _locate(self, ids: IndexArray) -> FloatArray:
        """Where the copies are along the axes that count for speed, in metres, (n, 1 or 2)."""
        if not self.task.in_space:
            return self.physics.qpos[ids, :1]
        mass = self.model.body_mass
        moments = mass[:, None] * self._body_positions[ids, :, :2]  # (n, bodies, 2)
        # One by one, since the order of `sum` may depend on how many copies there are.
        centre: FloatArray = np.add.accumulate(moments, axis=1)[:, -1] / mass.sum()
        return centre

    def _look(self, ids: IndexArray) -> FloatArray:
        shown = self.task.shown_velocity
        parts = [
            self.physics.qpos[ids, self._num_hidden :],
            np.clip(self.physics.qvel[ids], -shown, shown),
        ]
        parts += [field[ids].reshape(len(ids), -1) for field in self._body_fields]
        return np.concatenate(parts, axis=1)
