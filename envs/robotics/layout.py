"""Random layouts in upstream's own random stream, so that a seed gives upstream's layout.

Safety-Gymnasium draws everything of one environment from one legacy `RandomState`: first positions
(agent, then every object in the task's order), then headings, then the goal. Each step spends one
more number, on a frame skip that always comes out as ten. `LayoutStream` repeats these draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pbcrl_envs.robotics.tasks import AGENT_KEEPOUT, Kind, Task

FloatArray = NDArray[np.float64]

_LAYOUT_TRIES = 10_000
_OBJECT_TRIES = 100
_GOAL_TRIES = 10_000
_READ_AHEAD = 4096


class LayoutStream:
    """The layouts of one environment, one after the other.

    A crowded task rejects thousands of places per layout. So numbers are read ahead and tried a
    hundred at a time, and those left over are put back before anything else draws.

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
        self._keepouts = np.array(
            [AGENT_KEEPOUT] + [group.keepout for group in task.objects for _ in range(group.num)]
        )
        self._goal = 1 + kinds.index(Kind.GOAL)

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
        others = np.delete(positions, self._goal, axis=0)
        keepouts = np.delete(self._keepouts, self._goal)
        for _ in range(_GOAL_TRIES // _OBJECT_TRIES):
            place = self._draw_place(self._keepouts[self._goal], others, keepouts)
            if place is not None:
                return place
        return None

    def draw_index(self, num: int) -> int:
        """Draw one of `num` equally likely indices."""
        self._put_back()
        index = int(self._rng.choice(num))
        self._mark = self._rng.get_state()
        return index

    def _try_layout(self) -> FloatArray | None:
        positions = np.empty((len(self._keepouts), 2))
        for i, keepout in enumerate(self._keepouts):
            place = self._draw_place(keepout, positions[:i], self._keepouts[:i])
            if place is None:
                return None
            positions[i] = place
        return positions

    def _draw_place(
        self, keepout: float, others: FloatArray, keepouts: FloatArray
    ) -> FloatArray | None:
        """Draw up to a hundred places, x before y, and stop at the first that is free."""
        low, high = -self._extent + keepout, self._extent - keepout
        places = low + (high - low) * self._peek(2 * _OBJECT_TRIES).reshape(-1, 2)
        dx = places[:, :1] - others[:, 0]  # (100, others)
        dy = places[:, 1:] - others[:, 1]
        # Not np.hypot: its last bit differs, and upstream's layouts hang on that bit.
        far = np.sqrt(dx * dx + dy * dy) >= keepouts + keepout
        free: NDArray[np.bool_] = np.all(far, axis=1)
        tries = int(free.argmax())
        if not free[tries]:
            self._spend(2 * _OBJECT_TRIES)
            return None
        self._spend(2 * (tries + 1))
        place: FloatArray = places[tries]
        return place

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
