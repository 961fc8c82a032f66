"""Random layouts in upstream's own random stream, so that a seed gives upstream's layout.

Safety-Gymnasium draws everything of one environment from one legacy `RandomState`: first positions
(agent, then every object in the task's order), then headings, then the goal. Each step spends one
more number, on a frame skip that always comes out as ten. `LayoutStream` repeats these draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.robotics.tasks import AGENT_KEEPOUT, Kind, Task

FloatArray = NDArray[np.float64]
Obstacles = list[tuple[float, float, float]]
"""Position of what stands already, and how far to stay away from it, squared: (x, y, m^2)."""

_LAYOUT_TRIES = 10_000
_OBJECT_TRIES = 100
_GOAL_TRIES = 10_000
_TRIED_SINGLY = 8  # places that are faster tried in a loop than as an array
_SIEVED = 300  # places that are sieved together; objects of equal keepout share them
_FIRST_READ, _NEXT_READS = 256, 2048  # places read ahead at once
_ROUNDING = 1e-9  # m^2, far more than the sieve's arithmetic can be off


class LayoutStream:
    """The layouts of one environment, one after the other.

    A crowded task rejects thousands of places per layout. So numbers are read ahead, and where the
    first tries fail, a sieve finds the places that are not clearly taken, many at a time. What is
    accepted, and how many numbers that costs, is decided by upstream's own arithmetic.

    Args:
        task: What to place.
        seed: Seed in [0, 2**32 - 1]; None takes one from the operating system.
    """

    def __init__(self, task: Task, seed: int | None = None) -> None:
        self._rng = np.random.RandomState(seed)
        self._extent = task.extent
        kinds = [group.kind for group in task.objects for _ in range(group.num)]
        self._keepouts = [AGENT_KEEPOUT]
        self._keepouts += [group.keepout for group in task.objects for _ in range(group.num)]
        self._goal = 1 + kinds.index(Kind.GOAL)
        different = set(self._keepouts)
        # By the keepout of what is placed, then by that of what it stays away from.
        self._apart = {
            k: {other: _smallest_square(other + k) for other in different} for k in different
        }
        # What was read ahead, within one draw: places by their index, each of two numbers.
        self._numbers, self._num_read = list[float](), 0
        self._sieves: dict[float, FloatArray] = {}  # by keepout, (4, places)
        self._next = 0

    def get_state(self) -> tuple[NDArray[np.uint32], int]:
        """The state of the stream: the generator's words, (624,), and its position in [0, 624]."""
        words = self._rng.get_state(legacy=False)["state"]
        return words["key"], words["pos"]

    def set_state(self, words: NDArray[np.uint32], position: int) -> None:
        """Go on from a state that `get_state` gave."""
        self._rng.set_state(("MT19937", words, position, 0, 0.0))

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
        self._read(_FIRST_READ)
        for _ in range(_LAYOUT_TRIES):
            positions = self._try_layout()
            if positions is not None:
                self._put_back()
                return positions, 2 * np.pi * self._rng.random_sample(len(positions))
        raise RuntimeError(
            f"a layout must keep its objects apart, but {_LAYOUT_TRIES} tries found none; "
            "give the task a larger extent or smaller keepouts"
        )

    def draw_goal(self, positions: FloatArray) -> FloatArray | None:
        """Draw a new place for the goal.

        Args:
            positions: Where the agent and the objects are now, (1 + K, 2); the goal's row is
                ignored.

        Returns:
            The place, (2,), or None if none of 10,000 draws is far enough from everything else.
        """
        keepout = self._keepouts[self._goal]
        apart = self._apart[keepout]
        obstacles = [
            (x, y, apart[other])
            for (x, y), other in zip(positions.tolist(), self._keepouts, strict=True)
        ]
        del obstacles[self._goal]
        self._read(_FIRST_READ)
        place = None
        for _ in range(_GOAL_TRIES // _OBJECT_TRIES):
            if self._next + _OBJECT_TRIES > self._num_read:
                self._read_on()
            first, last = self._next, self._next + _OBJECT_TRIES
            place = self._try_places(range(first, first + _TRIED_SINGLY), keepout, obstacles)
            if place is None:
                left = self._sieve(first, last, keepout, obstacles)
                place = self._try_places(left, keepout, obstacles)
            if place is not None:
                break
            self._next = last
        self._put_back()
        return None if place is None else np.array(place)

    def draw_index(self, num: int) -> int:
        """Draw one of `num` equally likely indices."""
        return int(self._rng.choice(num))

    def _try_layout(self) -> FloatArray | None:
        placed: list[tuple[float, float]] = []
        obstacles: dict[float, Obstacles] = {keepout: [] for keepout in self._apart}
        growing = [(obstacles[keepout], apart) for keepout, apart in self._apart.items()]
        previous, hopeful, known = -1.0, [0], 0  # places below `known` are sieved for `previous`
        for keepout in self._keepouts:
            if keepout != previous:
                previous, known = keepout, 0
            if self._next + _OBJECT_TRIES > self._num_read:
                self._read_on()
                known = 0
            first, last = self._next, self._next + _OBJECT_TRIES
            around, place = obstacles[keepout], None
            if known < last:
                place = self._try_places(range(first, first + _TRIED_SINGLY), keepout, around)
                if place is None:
                    known = min(first + _SIEVED, self._num_read)
                    hopeful = self._sieve(first, known, keepout, around)
            if place is None:
                left = [i for i in hopeful if first <= i < last]
                place = self._try_places(left, keepout, around)
            if place is None:
                self._next = last
                return None
            placed.append(place)
            x, y = place
            for known_obstacles, apart in growing:
                known_obstacles.append((x, y, apart[keepout]))
        return np.array(placed)

    def _try_places(
        self, indices: Iterable[int], keepout: float, obstacles: Obstacles
    ) -> tuple[float, float] | None:
        """Try some of the places read ahead; stop at the first free one, and go on behind it."""
        low = -self._extent + keepout
        span = self._extent - keepout - low
        numbers = self._numbers
        for i in indices:
            x, y = low + span * numbers[2 * i], low + span * numbers[2 * i + 1]
            for other_x, other_y, apart in obstacles:
                dx, dy = x - other_x, y - other_y
                if dx * dx + dy * dy < apart:
                    break
            else:
                self._next = i + 1
                return x, y
        return None

    def _sieve(self, first: int, last: int, keepout: float, obstacles: Obstacles) -> list[int]:
        """Those of the places in [first, last) that are not clearly too close to something."""
        if keepout not in self._sieves:
            low = -self._extent + keepout
            places = low + (self._extent - keepout - low) * np.array(self._numbers).reshape(-1, 2)
            x, y = places.T
            self._sieves[keepout] = np.stack([x, y, x * x + y * y, np.ones(len(x))])
        # |place - obstacle|^2 - apart, for all of them in one product of matrices.
        rows = [(-2 * x, -2 * y, 1.0, x * x + y * y - apart) for x, y, apart in obstacles]
        excess = np.array(rows) @ self._sieves[keepout][:, first:last]  # (obstacles, places)
        hopeful: list[int] = (excess.min(axis=0) > -_ROUNDING).nonzero()[0].tolist()
        return [first + i for i in hopeful]

    def _read(self, places: int) -> None:
        """Read numbers ahead from where the stream is."""
        self._mark = self._rng.get_state()
        self._numbers, self._num_read = self._rng.random_sample(2 * places).tolist(), places
        self._sieves = {}
        self._next = 0

    def _read_on(self) -> None:
        """Read ahead again, from behind the last place that was tried."""
        self._put_back()
        self._read(_NEXT_READS)

    def _put_back(self) -> None:
        """Let the stream go on behind the last place that was tried."""
        self._rng.set_state(self._mark)
        self._rng.random_sample(2 * self._next)


def _smallest_square(distance: float) -> float:
    """The smallest number whose square root is not below `distance`.

    Comparing squares with it is comparing distances, to the last bit, without taking roots.
    """
    square = distance * distance
    while math.sqrt(square) >= distance:
        square = math.nextafter(square, 0.0)
    while math.sqrt(square) < distance:
        square = math.nextafter(square, math.inf)
    return square
