"""Random layouts in upstream's own random stream, so that a seed gives upstream's layout.

Safety-Gymnasium draws everything of one environment from one legacy `RandomState`: first positions
(agent, then every object in the task's order), then headings, then the goal. Each step spends one
more number, on a frame skip that always comes out as ten. `LayoutStream` repeats these draws.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.robotics.tasks import AGENT_KEEPOUT, Kind, Task

FloatArray = NDArray[np.float64]

_LAYOUT_TRIES = 10_000
_OBJECT_TRIES = 100
_GOAL_TRIES = 10_000
_READ_AHEAD = 4096
_TRIED_SINGLY = 5  # places that are faster tried in a loop than as an array


class LayoutStream:
    """The layouts of one environment, one after the other.

    A crowded task rejects thousands of places per layout. So numbers are read ahead and most
    places tried together; numbers left over are put back before anything else draws.

    Args:
        task: What to place.
        seed: Seed in [0, 2**32 - 1]; None takes one from the operating system.
    """

    def __init__(self, task: Task, seed: int | None = None) -> None:
        self._rng = np.random.RandomState(seed)
        self._mark = self._rng.get_state()
        self._ahead: FloatArray = np.empty(0)  # drawn since the mark
        self._spent = 0  # how many of them count as drawn
        self._extent = task.extent
        kinds = [group.kind for group in task.objects for _ in range(group.num)]
        self._keepouts = [AGENT_KEEPOUT]
        self._keepouts += [group.keepout for group in task.objects for _ in range(group.num)]
        self._goal = 1 + kinds.index(Kind.GOAL)

    def get_state(self) -> tuple[NDArray[np.uint32], int]:
        """The state of the stream: the generator's words, (624,), and its position in [0, 624]."""
        self._put_back()
        _, words, position, *_ = self._rng.get_state()
        return words, position

    def set_state(self, words: NDArray[np.uint32], position: int) -> None:
        """Go on from a state that `get_state` gave."""
        self._rng.set_state(("MT19937", words, position))
        self._mark = self._rng.get_state()
        self._ahead, self._spent = np.empty(0), 0

    def skip_steps(self, steps: int) -> None:
        """Spend the numbers that `steps` environment steps cost upstream."""
        self._spend(steps)

    def draw_layout(self) -> tuple[FloatArray, FloatArray]:
        """Draw a fresh layout.

        Returns:
            Positions of the agent and the K objects, (1 + K, 2), and their headings in [0, 2π),
            (1 + K,).

        Raises:
            RuntimeError: If no valid layout turns up.
        """
        for _ in range(_LAYOUT_TRIES):
            positions = self._try_layout()
            if positions is not None:
                return positions, 2 * np.pi * self._spend(len(positions))
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
        others = [
            (x, y, keepout)
            for (x, y), keepout in zip(positions.tolist(), self._keepouts, strict=True)
        ]
        del others[self._goal]
        for _ in range(_GOAL_TRIES // _OBJECT_TRIES):
            place = self._draw_place(self._keepouts[self._goal], others)
            if place is not None:
                return np.array(place)
        return None

    def draw_index(self, num: int) -> int:
        """Draw one of `num` equally likely indices."""
        self._put_back()
        index = int(self._rng.choice(num))
        self._mark = self._rng.get_state()
        return index

    def _try_layout(self) -> FloatArray | None:
        placed: list[tuple[float, float, float]] = []
        for keepout in self._keepouts:
            place = self._draw_place(keepout, placed)
            if place is None:
                return None
            placed.append((*place, keepout))
        return np.array(placed)[:, :2]

    def _draw_place(
        self, keepout: float, others: list[tuple[float, float, float]]
    ) -> tuple[float, float] | None:
        """Draw up to a hundred places, x before y, and stop at the first that is free.

        Args:
            keepout: Keepout of what is placed.
            others: Position and keepout (x, y, keepout) of what it must stay away from.
        """
        low, high = -self._extent + keepout, self._extent - keepout
        numbers = self._peek(2 * _OBJECT_TRIES)
        few = (low + (high - low) * numbers[: 2 * _TRIED_SINGLY]).tolist()
        for k in range(0, 2 * _TRIED_SINGLY, 2):
            x, y = few[k], few[k + 1]
            for other_x, other_y, other_keepout in others:
                dx, dy = x - other_x, y - other_y
                # Not a hypot: its last bit differs, and upstream's layouts hang on that bit.
                if math.sqrt(dx * dx + dy * dy) < other_keepout + keepout:
                    break
            else:
                self._spend(k + 2)
                return x, y
        xs = low + (high - low) * numbers[::2]
        ys = low + (high - low) * numbers[1::2]
        other_xs, other_ys, keepouts = np.array(others).T
        dxs, dys = xs[:, None] - other_xs, ys[:, None] - other_ys  # (100, others)
        far = np.sqrt(dxs * dxs + dys * dys) >= keepouts + keepout
        free: NDArray[np.bool_] = far.all(axis=1)
        tries = int(free.argmax())
        if not free[tries]:
            self._spend(2 * _OBJECT_TRIES)
            return None
        self._spend(2 * (tries + 1))
        return float(xs[tries]), float(ys[tries])

    def _peek(self, count: int) -> FloatArray:
        if self._spent + count > len(self._ahead):
            self._put_back()
            self._mark = self._rng.get_state()
            self._ahead = self._rng.random_sample(max(count, _READ_AHEAD))
        return self._ahead[self._spent : self._spent + count]

    def _spend(self, count: int) -> FloatArray:
        numbers = self._peek(count)
        self._spent += count
        return numbers

    def _put_back(self) -> None:
        self._rng.set_state(self._mark)
        self._rng.random_sample(self._spent)
        self._mark = self._rng.get_state()
        self._ahead, self._spent = np.empty(0), 0
