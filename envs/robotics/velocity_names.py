"""What the numbers of a velocity task's observation are, by the fields and names of MuJoCo."""

from __future__ import annotations

import mujoco

_FREE = mujoco.mjtJoint.mjJNT_FREE.value
_BODY_FIELDS = {
    "cinert": ("ixx", "iyy", "izz", "ixy", "ixz", "iyz", "mx", "my", "mz", "mass"),
    "cvel": ("wx", "wy", "wz", "vx", "vy", "vz"),
    "cfrc_ext": ("tx", "ty", "tz", "fx", "fy", "fz"),
}
"""Inertia, mass times offset, and mass; velocities and outer forces, each turning before moving."""


def joint_names(model: mujoco.MjModel) -> tuple[list[str], list[str]]:
    """Return names for the generalised positions, (nq,), and velocities, (nv,), of a robot.

    "qpos.bthigh" is the position of the joint bthigh; a free joint root has "qpos.root.x" to
    "qpos.root.qz", and "qvel.root.vx" to "qvel.root.wz". Joints turn in rad, slides move in m.
    """
    qpos, qvel = list[str](), list[str]()
    for i in range(model.njnt):
        name = model.joint(i).name
        if model.jnt_type[i] == _FREE:
            qpos += [f"qpos.{name}.{part}" for part in ("x", "y", "z", "qw", "qx", "qy", "qz")]
            qvel += [f"qvel.{name}.{part}" for part in ("vx", "vy", "vz", "wx", "wy", "wz")]
        else:
            qpos.append(f"qpos.{name}")
            qvel.append(f"qvel.{name}")
    return qpos, qvel


def body_names(model: mujoco.MjModel) -> tuple[str, ...]:
    """Return names for cinert, cvel, qfrc_actuator and cfrc_ext, one after the other.

    "cvel.torso.vx" belongs to the body torso, "qfrc_actuator.right_knee" to a joint.
    """
    bodies = [model.body(i).name for i in range(model.nbody)]
    of_bodies = {
        field: [f"{field}.{body}.{part}" for body in bodies for part in parts]
        for field, parts in _BODY_FIELDS.items()
    }
    forces = [name.replace("qvel.", "qfrc_actuator.", 1) for name in joint_names(model)[1]]
    return (*of_bodies["cinert"], *of_bodies["cvel"], *forces, *of_bodies["cfrc_ext"])
