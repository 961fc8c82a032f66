"""What the velocity tasks look like: Gymnasium's robots, followed from the side.

A red halo around the torso is the cost of the step just taken.
"""

from __future__ import annotations

import copy

import mujoco

from pbcrl_envs.robotics.rendering import Camera, Image, Mark, Renderer
from pbcrl_envs.robotics.velocity_simulation import Snapshot, VelocitySimulation

_HALO, _HALO_RADIUS = (1.0, 0.0, 0.0, 0.4), 0.35
_SPHERE = mujoco.mjtGeom.mjGEOM_SPHERE


class VelocityPainter:
    """Draws the copies of a velocity task.

    Args:
        simulation: The copies.
        mode: "rgb_array" or "human".
        width: In pixels.
        height: In pixels.
        overlays: Draw the halo, too.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If the library that draws, or the display, is missing.
    """

    def __init__(
        self,
        simulation: VelocitySimulation,
        *,
        mode: str,
        width: int,
        height: int,
        overlays: bool = True,
    ) -> None:
        self._overlays = overlays
        self._simulation, model, seconds = simulation, simulation.model, simulation.seconds
        stage = copy.copy(model)
        stage.geom("floor").size[:2] = 0  # endless: an episode leads off Gymnasium's floor
        stage.material("MatPlane").texrepeat[:] = 1.0
        self._renderer = Renderer(stage, mode=mode, width=width, height=height, seconds=seconds)
        torso_height = float(model.body_pos[1, 2])  # at the start
        self._view_height = 0.75 * torso_height
        self._in_space = model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
        self._height_at_zero = torso_height - float(model.qpos0[1])

    def draw(self, i: int) -> Image | None:
        """Return the picture of copy `i`, uint8 (height, width, 3); None in a window."""
        snapshot = self._simulation.snapshot(i)
        x, y, z = self._torso(snapshot)
        marks = []
        if self._overlays and snapshot.cost > 0:
            marks.append(Mark(_SPHERE, (x, y, z), (_HALO_RADIUS, 0, 0), _HALO))
        # At a fixed height: following the torso up and down would hide how it moves.
        camera = Camera((x, y, self._view_height), 4.0, azimuth=90, elevation=-10)
        return self._renderer.draw({"qpos": snapshot.qpos}, camera=camera, marks=marks)

    def close(self) -> None:
        """Close the window and release what OpenGL holds."""
        self._renderer.close()

    def _torso(self, snapshot: Snapshot) -> tuple[float, float, float]:
        if self._in_space:
            x, y, z = snapshot.qpos[:3].tolist()
            return x, y, z
        x, z = snapshot.qpos[:2].tolist()
        return x, 0.0, self._height_at_zero + z
