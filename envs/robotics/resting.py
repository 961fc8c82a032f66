"""Leaves loose objects out of the physics while they lie still and the agent is far from anything.

A box on the floor has twenty contacts with it, a vase four, and all of them are solved in every
physics step, whether anything happens or not. That is most of a task's physics, and all that comes
of it for a thing at rest is the solver's noise, some 1e-10 m/s. Bodies that share no contact do not
affect each other: an agent that touches but the floor moves the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from pbcrl_envs.robotics.physics import SUBSTEPS, TIMESTEP

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]

_STILL = 1e-8  # m/s and rad/s; the noise that solving to the model's tolerance leaves is below 5e-9
_SETTLED = 10  # steps; in as many, settling slower than that dies down to the noise
_CLEARANCE = 0.01  # metres; in a step, the agent's thrust adds 6e-4 to what its speed covers
_JOINTS = 3  # of the agent


class Resting:
    """Steps copies of a task with their loose objects, or without them while they rest.

    A copy's loose objects are left out together or not at all; their poses then stay as they are.
    What is left out is a function of the state, `still_steps` included.

    Args:
        batch: The physics of a task whose free bodies move by being pushed alone.
    """

    still_steps: NDArray[np.int64]
    """Steps for which all loose objects of a copy have lain still, (N,)."""

    def __init__(self, batch: Batch) -> None:
        model = batch.model
        self.still_steps = np.zeros(batch.nsim, dtype=np.int64)
        self._qpos: FloatArray = batch.bind("qpos")
        self._qvel: FloatArray = batch.bind("qvel")
        self._moving: list[FloatArray] = [self._qpos, self._qvel, batch.bind("qacc_warmstart")]
        self._collides = [batch.expand(name) for name in ("geom_contype", "geom_conaffinity")]
        self._geoms = np.flatnonzero(model.body_dofnum[model.geom_bodyid] == 6)
        self._mocap_pos: FloatArray = batch.bind("mocap_pos")
        # How far bodies stretch from their origin at most, fixed ones along the floor.
        corners = np.linalg.norm(np.abs(model.geom_pos) + model.geom_size, axis=1)
        fixed = model.body_mocapid >= 0
        extents = np.where(fixed[model.geom_bodyid], model.geom_size[:, 0], corners)
        radius = np.zeros(model.nbody)
        np.maximum.at(radius, model.geom_bodyid, extents)
        (agent,), loose = (np.flatnonzero(model.body_dofnum == num) for num in (_JOINTS, 6))
        self._reach = _CLEARANCE + radius[agent] + np.append(radius[loose], radius[fixed])
        self._places = _JOINTS + 7 * np.arange(len(loose))[:, None] + np.arange(2)

    def wake(self, ids: IndexArray, still_steps: NDArray[np.int64] | int = 0) -> None:
        """Let all objects of the copies `ids` take part again, and count on from `still_steps`."""
        self.still_steps[ids] = still_steps
        self._take_part(ids, np.ones(len(ids), dtype=np.bool_))

    @contextmanager
    def left_out(self, ids: IndexArray) -> Iterator[None]:
        """Within this the copies `ids` are stepped once, SUBSTEPS of the physics."""
        loose = slice(_JOINTS, None)
        still = (np.abs(self._qvel[ids, loose]) < _STILL).all(axis=1)
        self.still_steps[ids] = np.where(still, self.still_steps[ids] + 1, 0)
        loose_places = self._qpos[ids[:, None, None], self._places]
        places = np.concatenate([loose_places, self._mocap_pos[ids, :, :2]], axis=1)
        ways = places - self._qpos[ids, None, :2]  # (n, loose + fixed, 2)
        speed = np.hypot(self._qvel[ids, 0], self._qvel[ids, 1])
        reach = self._reach + SUBSTEPS * TIMESTEP * speed[:, None]
        away = (np.hypot(ways[..., 0], ways[..., 1]) > reach).all(axis=1)
        out = away & (self.still_steps[ids] > _SETTLED)
        self._take_part(ids, ~out)
        # What touches nothing falls meanwhile.
        fallen = ids[out]
        kept = [(field, field[fallen, loose]) for field in self._moving]
        yield
        for field, values in kept:
            field[fallen, loose] = values

    def _take_part(self, ids: IndexArray, takes_part: NDArray[np.bool_]) -> None:
        for mask in self._collides:
            mask[ids[:, None], self._geoms] = takes_part[:, None]
