"""What the navigation tasks look like: colours, lights, cameras, lidar rings.

Colours and the names of cameras are upstream's, so that pictures read the same: green goal, blue
hazards, cyan vases, lilac pillars, a yellow box, orange buttons, purple gremlins; the agent is dark
red with a blue nose. Above it hovers one ring of small balls per lidar in the colour of what it
sees, counted from the nose, the clearer the closer. A red halo is the cost of the step just taken.
"""

from __future__ import annotations

import math

import mujoco
import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.robotics.physics import model_xml
from pbcrl_envs.robotics.rendering import Camera, Image, Mark, Renderer
from pbcrl_envs.robotics.simulation import NavigationSimulation, Snapshot
from pbcrl_envs.robotics.tasks import NUM_BINS, Kind, Task

CAMERAS = ("fixedfar", "fixednear", "overhead", "track", "vision")
"""The whole square from the side, its middle from nearby, the square from above, behind the agent,
and what the agent itself would see."""

COLOURS = {
    Kind.GOAL: (0.0, 1.0, 0.0),
    Kind.HAZARD: (0.0, 0.0, 1.0),
    Kind.VASE: (0.0, 1.0, 1.0),
    Kind.PILLAR: (0.5, 0.5, 1.0),
    Kind.BOX: (1.0, 1.0, 0.0),
    Kind.BUTTON: (1.0, 0.5, 0.0),
    Kind.GREMLIN: (0.5, 0.0, 1.0),
}
"""Red, green and blue of each kind."""

_AGENT, _NOSE = (0.74, 0.04, 0.18, 1.0), (0.0, 0.15, 0.4, 1.0)
_HALO, _HALO_RADIUS = (1.0, 0.0, 0.0, 0.4), 0.25
_GOAL_OPACITY, _HAZARD_OPACITY = 0.3, 0.45
_DISC = 0.01  # half height of a hazard
_RING_RADIUS, _RING_HEIGHT, _RING_STEP, _BALL = 0.15, 0.5, 0.06, 0.025
_CYLINDER, _SPHERE = mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_SPHERE


class NavigationPainter:
    """Draws the copies of a navigation task.

    Args:
        simulation: The copies.
        mode: "rgb_array" or "human".
        camera_name: One of `CAMERAS`.
        width: In pixels.
        height: In pixels.
        overlays: Draw the rings and the halo, too.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If the library that draws, or the display, is missing.
    """

    def __init__(
        self,
        simulation: NavigationSimulation,
        *,
        mode: str,
        camera_name: str,
        width: int,
        height: int,
        overlays: bool = True,
    ) -> None:
        if camera_name not in CAMERAS:
            raise ValueError(
                f"camera_name must be one of {', '.join(CAMERAS)}, got {camera_name!r}"
            )
        self._simulation, self._task = simulation, simulation.task
        self._camera_name = camera_name
        self._overlays = overlays and camera_name != "vision"
        stage = _stage(simulation.task)
        if camera_name == "vision":
            stage.geom("agent").rgba[3] = 0  # its eye looks over the nose, not through the head
        self._renderer = Renderer(stage, mode=mode, width=width, height=height)

    def draw(self, i: int) -> Image | None:
        """Return the picture of copy `i`, uint8 (height, width, 3); None in a window."""
        return self.draw_snapshot(self._simulation.snapshot(i))

    def draw_snapshot(self, snapshot: Snapshot) -> Image | None:
        """Return the picture of any scene of the task."""
        return self._renderer.draw(
            snapshot.physics, camera=self._camera(snapshot), marks=self._marks(snapshot)
        )

    def close(self) -> None:
        """Close the window and release what OpenGL holds."""
        self._renderer.close()

    def _camera(self, snapshot: Snapshot) -> Camera:
        x, y, heading = snapshot.physics["qpos"][:3].tolist()
        # Up to the rim of the square from the side, a little less than its edge from above.
        extent = self._task.extent
        if self._camera_name == "fixednear":
            return Camera((0, 0, 0), 2 * math.sqrt(2), azimuth=90, elevation=-45)
        if self._camera_name == "fixedfar":
            distance = 5 * math.sqrt(2)
            angle = 2 * math.degrees(math.atan(1.3 * extent / distance))
            return Camera((0, 0, 0), distance, 90, -45, field_of_view=angle)
        if self._camera_name == "overhead":
            distance = 10.0
            angle = 2 * math.degrees(math.atan(1.3 * extent / distance))
            return Camera((0, 0, 0), distance, 90, -90, field_of_view=angle)
        degrees = math.degrees(heading)
        if self._camera_name == "track":
            return Camera((x, y, 0.2), 3.0, degrees, -35)
        # The eye sits on top of the agent and looks down a little, as upstream's does.
        ahead = (x + math.cos(heading), y + math.sin(heading), 0.25 - 0.4)
        return Camera(ahead, math.hypot(1, 0.4), degrees, -math.degrees(math.atan(0.4)), 90)

    def _marks(self, snapshot: Snapshot) -> list[Mark]:
        marks = self._discs(snapshot)
        if self._overlays:
            marks += _rings(self._task, snapshot)
            if snapshot.cost > 0:
                x, y = snapshot.positions[0].tolist()
                marks.append(Mark(_SPHERE, (x, y, 0.1), (_HALO_RADIUS, 0, 0), _HALO))
        return marks

    def _discs(self, snapshot: Snapshot) -> list[Mark]:
        """The goal and the hazards, which touch nothing and so are not in the model."""
        marks, row = [], 1
        for group in self._task.objects:
            places = snapshot.positions[row : row + group.num].tolist()
            row += group.num
            for x, y in places:
                if group.kind is Kind.GOAL:
                    size = (group.size, group.size / 2, 0.0)
                    colour = (*COLOURS[Kind.GOAL], _GOAL_OPACITY)
                    marks.append(Mark(_CYLINDER, (x, y, size[1] + 0.01), size, colour))
                elif group.kind is Kind.HAZARD:
                    size = (group.size, _DISC, 0.0)
                    colour = (*COLOURS[Kind.HAZARD], _HAZARD_OPACITY)
                    marks.append(Mark(_CYLINDER, (x, y, 0.02), size, colour))
        return marks


def _rings(task: Task, snapshot: Snapshot) -> list[Mark]:
    x, y, heading = snapshot.physics["qpos"][:3].tolist()
    angles = heading + 2 * np.pi * (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    circle: NDArray[np.float64] = _RING_RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    marks = []
    for k, (group, closeness) in enumerate(zip(task.objects, snapshot.lidars, strict=True)):
        height = 0.1 + _RING_HEIGHT + k * _RING_STEP
        for (dx, dy), reading in zip(circle.tolist(), closeness.tolist(), strict=True):
            colour = (*COLOURS[group.kind], min(1.0, 0.1 + reading))
            marks.append(Mark(_SPHERE, (x + dx, y + dy, height), (_BALL, 0, 0), colour))
    return marks


def _stage(task: Task) -> mujoco.MjModel:
    """The model of the task with colours, lights and a checked floor."""
    spec = mujoco.MjSpec.from_string(model_xml(task))
    spec.add_texture(
        name="floor",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.86, 0.84, 0.8],
        rgb2=[0.8, 0.78, 0.74],
        width=128,
        height=128,
    )
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=[0.62, 0.75, 0.88],
        rgb2=[0.9, 0.93, 0.96],
        width=32,
        height=32,
    )
    material = spec.add_material(name="floor", texrepeat=[7, 7], specular=0, shininess=0)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "floor"
    spec.geom("floor").material = "floor"
    spec.worldbody.add_light(
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, dir=[0.2, 0.3, -1], diffuse=[0.4] * 3
    )
    spec.visual.headlight.ambient = [0.45] * 3
    spec.visual.headlight.diffuse = [0.4] * 3
    spec.visual.headlight.specular = [0] * 3
    kinds = {kind.value: kind for kind in Kind}
    for body in spec.bodies:
        kind = kinds.get(body.name.rstrip("0123456789"))
        for geom in body.geoms:
            if kind is not None:
                geom.rgba = (*COLOURS[kind], 1)
            elif body.name == "agent":
                geom.rgba = _NOSE if geom.name == "pointarrow" else _AGENT
    return spec.compile()
