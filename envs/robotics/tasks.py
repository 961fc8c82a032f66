"""The navigation tasks of Safety-Gymnasium as a table: what stands where, and what counts.

Knows nothing of physics or of stepping. All lengths are metres.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

AGENT_KEEPOUT = 0.4
"""Free radius around the agent when a layout is drawn."""


class Kind(Enum):
    """What an object is made of and whether it moves."""

    GOAL = "goal"
    """A disc to reach; touches nothing."""
    HAZARD = "hazard"
    """A disc to stay out of; touches nothing."""
    VASE = "vase"
    """A light cube that slides when pushed."""
    BUTTON = "button"
    """A fixed sphere to press."""
    GREMLIN = "gremlin"
    """A cube that is driven around a circle."""


@dataclass(frozen=True)
class Objects:
    """All objects of one kind in a task."""

    kind: Kind
    """What they are."""
    num: int
    """How many there are."""
    size: float
    """Radius of a disc or sphere, half the edge of a cube."""
    keepout: float
    """Radius that a layout keeps free around each of them."""
    travel: float = 0.0
    """Radius of the circle that a gremlin is driven around."""


@dataclass(frozen=True)
class Task:
    """One navigation task of the point agent.

    The order of `objects` is that of the random draws and of the lidars in an observation.
    """

    extent: float
    """Half the edge of the square in which everything is placed."""
    objects: tuple[Objects, ...]
    """What stands in the square besides the agent: one goal, buttons before gremlins."""
    constrained: frozenset[Kind]
    """Kinds that cost: a hazard by entering it, anything else by touching it."""
    press_goal: bool = False
    """True if the goal marks a button that must be touched, false if it is a place to reach."""

    @property
    def obs_dim(self) -> int:
        """Length of an observation: four sensors of three axes, then one lidar per kind."""
        return NUM_SENSORS + NUM_BINS * len(self.objects)


NUM_SENSORS = 12
"""Accelerometer, velocimeter, gyro and magnetometer, three axes each."""
NUM_BINS = 16
"""Bins of one lidar around the full circle."""

TASKS = {
    "Goal1": Task(
        extent=1.5,
        objects=(
            Objects(Kind.GOAL, num=1, size=0.3, keepout=0.305),
            Objects(Kind.HAZARD, num=8, size=0.2, keepout=0.18),
            Objects(Kind.VASE, num=1, size=0.1, keepout=0.15),
        ),
        constrained=frozenset({Kind.HAZARD}),
    ),
    "Button1": Task(
        extent=1.5,
        objects=(
            Objects(Kind.BUTTON, num=4, size=0.1, keepout=0.2),
            Objects(Kind.GOAL, num=1, size=0.2, keepout=0.4),
            Objects(Kind.HAZARD, num=4, size=0.2, keepout=0.18),
            Objects(Kind.GREMLIN, num=4, size=0.1, keepout=0.4, travel=0.35),
        ),
        constrained=frozenset({Kind.HAZARD, Kind.GREMLIN, Kind.BUTTON}),
        press_goal=True,
    ),
}
"""The tasks by the name in their id: `SafetyPointGoal1-v0` is "Goal1"."""
