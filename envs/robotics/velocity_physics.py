"""N copies of a running robot, advanced together as MuJoCo 2.3.3 does, on current MuJoCo.

That is the version which Safety-Gymnasium 1.0.0 runs on. What has changed since for these robots is
undone here: the integrator and the contact margins of the humanoid, and when a quaternion is
normalised.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError

from pbcrl_envs.simulation import BoolArray, FloatArray, IndexArray

_HUGE = 1e10  # MuJoCo's own bound between large and unstable
_UNSTABLE = [
    warning.value
    for warning in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
    )
]
_STAGES = ((1 / 6, 0.5), (1 / 3, 0.5), (1 / 3, 1.0), (1 / 6, 0.0))
"""Runge-Kutta: the weight of a stage in the step, and how far along it the next stage lies."""
_SENSORS_OFF = mujoco.mjtDisableBit.mjDSBL_SENSOR.value
_PARTS = np.array([[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]])
_SIGNS = np.array([[-1, -1, -1], [1, -1, 1], [1, 1, -1], [-1, 1, 1]])


def load_model(file: str) -> mujoco.MjModel:
    """Compile a robot from the XML file of that name that Gymnasium ships.

    These are the robots of Safety-Gymnasium 1.0.0, compiled to the same numbers: it takes them from
    Gymnasium 0.28.1, and only `walker2d.xml` was rewritten since, in local coordinates.
    """
    package = importlib.util.find_spec("gymnasium")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "envs" / "mujoco" / "assets" / file
    robot = mujoco.MjSpec.from_file(str(path))
    # The attribute is deprecated and would warn on every start; this is the recommended way.
    total_mass, robot.compiler.settotalmass = robot.compiler.settotalmass, -1
    # The margins of two geoms are added since MuJoCo 3.5; before, the larger of the two counted.
    (margin,) = {geom.margin for geom in robot.geoms}
    for geom in robot.geoms:
        geom.margin = margin / 2
    torso = robot.worldbody.bodies[0]
    if torso.joints[0].type == mujoco.mjtJoint.mjJNT_FREE:
        # External forces are only computed for a sensor that needs them.
        robot.add_sensor(
            type=mujoco.mjtSensor.mjSENS_FRAMELINACC,
            objtype=mujoco.mjtObj.mjOBJ_BODY,
            objname=torso.name,
        )
    model = robot.compile()
    if total_mass > 0:
        mujoco.mj_setTotalmass(model, total_mass)
        mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


class Physics:
    """N copies of one robot; every copy must be reset or set before it is stepped.

    Results are the same, to the last bit, whatever the number of copies and of threads.

    Args:
        model: What `load_model` gave.
        num_envs: N.
        num_threads: Threads; 0 takes one per CPU.
    """

    qpos: FloatArray
    """Generalised positions of all copies, current after every call. To be read only. (N, nq)."""
    qvel: FloatArray
    """Generalised velocities, likewise. (N, nv)."""

    def __init__(self, model: mujoco.MjModel, *, num_envs: int, num_threads: int) -> None:
        self._batch = Batch(model, num_envs, num_threads)
        self._timestep = float(model.opt.timestep)
        self._has_free_joint = bool(model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE)
        self._time: FloatArray = self._batch.bind("time")
        self.qpos = self._batch.bind("qpos")
        self.qvel = self._batch.bind("qvel")
        self._controls: FloatArray = self._batch.bind("ctrl")
        self._warm_start: FloatArray = self._batch.bind("qacc_warmstart")
        self._acceleration: FloatArray = self._batch.bind("qacc")
        if self._has_free_joint:
            self._sensors_off = self._batch.expand("opt.disableflags")

    def bind(self, name: str) -> FloatArray:
        """Return a field of `MjData` for all copies, (N, ...), refreshed by every call.

        As in Gymnasium's envs, after a Runge-Kutta step it is that of the step's last stage.
        """
        field: FloatArray = self._batch.bind(name)
        return field

    def reset(self, ids: IndexArray, qpos: FloatArray, qvel: FloatArray) -> None:
        """Put the copies `ids` at time 0 into positions (n, nq) and velocities (n, nv)."""
        self._batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        self.qpos[ids], self.qvel[ids] = qpos, qvel
        if self._has_free_joint:
            self.qpos[ids, 3:7] = _normalized(qpos[:, 3:7])
            self._sensors_off[ids] = 0
            self._forward(ids)

    def step(self, ids: IndexArray, controls: FloatArray, *, substeps: int) -> BoolArray:
        """Take `substeps` steps of the engine under constant controls (n, nu).

        Returns:
            Which of the copies became unstable, (n,); those must be reset or set again. It may come
            one call late, so look for NaN and infinities too.
        """
        rows: IndexArray | slice = ids
        if len(ids) == len(self.qpos):
            rows = slice(None)  # views in place of copies
        self._controls[rows] = controls
        unstable = np.zeros(len(self.qpos), dtype=np.bool_)
        try:
            if self._has_free_joint:
                self._sensors_off[rows] = _SENSORS_OFF
                for number in range(1, substeps + 1):
                    unstable[rows] |= self._runge_kutta_step(rows, last=number == substeps)
            else:
                self._batch.step(_ids(rows), substeps)
        except SimulationError as error:
            unstable[error.ids] = True
        # MuJoCo counts, and puts what became unstable back to where the model starts.
        unstable |= self._batch.warning[:, _UNSTABLE, 1].any(axis=1)
        return unstable[ids]

    def state_of(self, ids: IndexArray) -> FloatArray:
        """Return all that the next step depends on, warm start and time included, (n, state)."""
        rows: FloatArray = self._batch.state[ids]
        return rows

    def load_state(self, ids: IndexArray, state: FloatArray) -> None:
        """Load what `state_of` returned; fields given by `bind` are as before."""
        self._batch.state[ids] = state
        self._batch.warning[ids] = 0

    def _runge_kutta_step(self, rows: IndexArray | slice, *, last: bool) -> BoolArray:
        """Take one step as MuJoCo did before 4.0, which corrects how stages turn a free joint."""
        seconds = self._timestep
        qpos, qvel = self.qpos[rows].copy(), self.qvel[rows].copy()
        velocity, acceleration = np.zeros_like(qvel), np.zeros_like(qvel)
        for weight, reach in _STAGES:
            if last and reach == 0:
                self._sensors_off[rows] = 0
            self._forward(rows)
            stage_velocity, stage_acceleration = self.qvel[rows], self._acceleration[rows]
            velocity += weight * stage_velocity
            acceleration += weight * stage_acceleration
            if reach > 0:
                self.qpos[rows] = _moved(qpos, (reach * seconds) * stage_velocity)
                self.qvel[rows] = qvel + (reach * seconds) * stage_acceleration
        self.qpos[rows] = _moved(qpos, seconds * velocity)
        self.qvel[rows] = qvel + seconds * acceleration
        self._time[rows] += seconds
        unstable: BoolArray = ~(np.abs(acceleration).max(axis=1) < _HUGE)
        return unstable

    def _forward(self, rows: IndexArray | slice) -> None:
        self._batch.forward(_ids(rows))
        self._warm_start[rows] = self._acceleration[rows]


def _ids(rows: IndexArray | slice) -> IndexArray | None:
    return None if isinstance(rows, slice) else rows


def _moved(qpos: FloatArray, way: FloatArray) -> FloatArray:
    """Where the generalised way (n, nv) of a robot with a free joint leads from `qpos`, (n, nq)."""
    moved = np.empty_like(qpos)
    moved[:, :3] = qpos[:, :3] + way[:, :3]
    moved[:, 3:7] = _turned(qpos[:, 3:7], way[:, 3:6])
    moved[:, 7:] = qpos[:, 7:] + way[:, 6:]
    return moved


def _turned(quaternions: FloatArray, rotations: FloatArray) -> FloatArray:
    """Turn unit quaternions, (n, 4), by rotation vectors in their own frames, (n, 3)."""
    angle = np.sqrt((rotations * rotations).sum(axis=1))
    cosine = np.cos(angle / 2)
    sine = np.sin(angle / 2) / np.where(angle > 0, angle, 1.0)
    # The product of quaternions with (0, rotation): row i sums _SIGNS[i] q[_PARTS[i]] rotation.
    products = (quaternions[:, _PARTS] * _SIGNS * rotations[:, None]).sum(axis=2)
    return _normalized(cosine[:, None] * quaternions + sine[:, None] * products)


def _normalized(quaternions: FloatArray) -> FloatArray:
    length = np.sqrt((quaternions * quaternions).sum(axis=1))
    normalized: FloatArray = quaternions * (1 / length)[:, None]
    return normalized
