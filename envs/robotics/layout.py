"""Random layouts in upstream's own random stream, so that a seed gives upstream's layout.

Safety-Gymnasium draws everything of one environment from one legacy `RandomState`: first positions
(agent, then every object in the task's order), then headings, then the goal. Each step spends one
more number, on a frame skip that always comes out as ten. `LayoutStream` repeats these draws.

A crowded task throws dozens of layouts and ten thousand places away for each layout that it keeps,
and a seed gives upstream's only if every one of them is drawn. So the draws are compiled, by numba,
on the first reset of a process.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pbcrl_envs.robotics.tasks import AGENT_KEEPOUT, Kind, Task

FloatArray = NDArray[np.float64]

_LAYOUT_TRIES = 10_000
_OBJECT_TRIES = 100
_GOAL_TRIES = 10_000


class LayoutStream:
    """The layouts of one environment, one after the other.

    Args:
        task: What to place.
        seed: Seed in [0, 2**32 - 1]; None takes one from the operating system.
    """

    def __init__(self, task: Task, seed: int | None = None) -> None:
        bits = np.random.MT19937()
        # One stream, two interfaces: numba takes the new one, the legacy one seeds it as upstream.
        self._rng, self._generator = np.random.RandomState(bits), np.random.Generator(bits)
        if seed is not None:
            self._rng.seed(seed)
        kinds = [group.kind for group in task.objects for _ in range(group.num)]
        keepouts = [group.keepout for group in task.objects for _ in range(group.num)]
        self._extent = task.extent
        self._keepouts = np.array([AGENT_KEEPOUT, *keepouts])
        self._goal = 1 + kinds.index(Kind.GOAL)

    def position(self) -> tuple[NDArray[np.uint32], int]:
        """Where the stream is: the generator's words, (624,), and its place in them, [0, 624]."""
        words = self._rng.get_state(legacy=False)["state"]
        return words["key"], words["pos"]

    def go_to(self, words: NDArray[np.uint32], place: int) -> None:
        """Go on from where `position` was taken."""
        self._rng.set_state(("MT19937", words, place, 0, 0.0))

    def skip_steps(self, steps: int) -> None:
        """Spend the numbers that `steps` environment steps cost upstream."""
        self._rng.random_sample(steps)

    def draw_layout(self) -> tuple[FloatArray, FloatArray]:
        """Draw a fresh layout.

        Returns:
            Positions of the agent and the K objects, (1 + K, 2), and their headings in [0, 2π),
            (1 + K,).

        Raises:
            RuntimeError: If no valid layout turns up.
        """
        positions = np.zeros((len(self._keepouts), 2))
        if not _place_all(self._generator, self._extent, self._keepouts, positions):
            raise RuntimeError(
                f"a layout must keep its objects apart, but {_LAYOUT_TRIES} tries found none; "
                "give the task a larger extent or smaller keepouts"
            )
        return positions, 2 * np.pi * self._rng.random_sample(len(positions))

    def draw_goal(self, positions: FloatArray) -> FloatArray | None:
        """Draw a new place for the goal.

        Args:
            positions: Where the agent and the objects are now, (1 + K, 2); the goal's row is
                ignored.

        Returns:
            The place, (2,), or None if none of 10,000 draws is far enough from everything else.
        """
        places, num = positions.copy(), len(positions)
        stream, keepouts = self._generator, self._keepouts
        found = _place(stream, self._extent, keepouts, places, num, self._goal, _GOAL_TRIES)
        return places[self._goal] if found else None

    def draw_index(self, num: int) -> int:
        """Draw one of `num` equally likely indices."""
        return int(self._rng.choice(num))


@njit()
def _place_all(
    stream: np.random.Generator, extent: float, keepouts: FloatArray, places: FloatArray
) -> bool:
    """Draw a layout into `places`, (1 + K, 2); false if none is found."""
    for _ in range(_LAYOUT_TRIES):
        num = 0
        while num < len(places):
            if not _place(stream, extent, keepouts, places, num, num, _OBJECT_TRIES):
                break
            num += 1
        else:
            return True
    return False


@njit()
def _place(
    stream: np.random.Generator,
    extent: float,
    keepouts: FloatArray,
    places: FloatArray,
    num: int,
    i: int,
    tries: int,
) -> bool:
    """Draw a place for object `i` apart from the first `num`, itself aside; false if none is."""
    low = -extent + keepouts[i]
    span = extent - keepouts[i] - low
    for _ in range(tries):
        x, y = low + span * stream.random(), low + span * stream.random()
        for j in range(num):
            dx, dy = x - places[j, 0], y - places[j, 1]
            if j != i and math.sqrt(dx * dx + dy * dy) < keepouts[j] + keepouts[i]:
                break
        else:
            places[i, 0], places[i, 1] = x, y
            return True
    return False
