"""Pictures of the toy, in plain NumPy: the arena from above, y upwards.

Colours are those of the robot tasks: blue hazards, green goal, a red point with a halo while it
costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Floats = NDArray[np.float64]

SIZE = 240
"""Width and height of a picture in pixels; the arena's edge is 2."""

_FLOOR, _HAZARD, _GOAL = (221, 217, 208), (120, 118, 230), (60, 220, 60)
_POINT, _HALO = (189, 11, 47), (255, 120, 110)
_POINT_RADIUS = 0.04


def draw(
    position: Floats,
    goal: Floats,
    *,
    goal_radius: float,
    hazards: Floats,
    hazard_radius: float,
) -> Image:
    """Draw one state.

    Args:
        position: Of the point, (2,).
        goal: Its goal, (2,).
        goal_radius: Radius within which the goal counts as reached.
        hazards: Centres of the discs, (H, 2).
        hazard_radius: Their radius; inside of one, where it costs, the point glows.

    Returns:
        uint8 (SIZE, SIZE, 3).
    """
    image = np.full((SIZE, SIZE, 3), _FLOOR, dtype=np.float64)
    for hazard in hazards:
        _disc(image, hazard, hazard_radius, _HAZARD)
    _disc(image, goal, goal_radius, _GOAL)
    if (np.hypot(*(hazards - position).T) < hazard_radius).any():
        _disc(image, position, 2 * _POINT_RADIUS, _HALO)
    _disc(image, position, _POINT_RADIUS, _POINT)
    return image.round().astype(np.uint8)


def _disc(image: Floats, centre: Floats, radius: float, colour: tuple[int, int, int]) -> None:
    """Paint a disc; its rim is blended over one pixel."""
    pixel = 2 / SIZE
    middles = -1 + pixel * (np.arange(SIZE) + 0.5)
    distance = np.hypot(middles - centre[0], middles[::-1, None] - centre[1])
    cover = np.clip((radius - distance) / pixel + 0.5, 0, 1)[..., None]
    image += cover * (np.array(colour) - image)
