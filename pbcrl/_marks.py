"""What marks say of single steps, where those who mark them are a few steps off.

A person sees that something is unsafe, and says when by a key or on a time line. The ends of what
is marked are off by some steps, and a single costly step is easily missed by as many; all of them
are late by the time that a hand takes. Computes with arrays alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pbcrl.trajectory import unsafe_stretches

Steps = NDArray[np.float64]

OFF = 0.02
"""Share of a trajectory's steps by which a mark begins or ends too early or too late at most."""

LATE = 0.04
"""Share of the horizon by which all marks are late at most."""

_TIE = 1e-3  # per step moved, in chances: what is as good stays


def steps_off(share: float, steps: int) -> int:
    """Return a share of so many steps, rounded up to a step."""
    return math.ceil(round(share * steps, 6))  # 0.07 · 100 is 7.000000000000001


def earlier(unsafe: Steps, steps: int) -> Steps:
    """Return marks whose stretches begin and end so many steps earlier, (T,).

    None is lost before the first step. What lasts to the end still does: whoever marks could not
    go on, and when it ended nobody knows.
    """
    found, last = np.zeros(len(unsafe)), len(unsafe)
    for start, end in unsafe_stretches(unsafe):
        start = max(0, start - steps)
        found[start : last if end == last else max(start + 1, end - steps)] = 1
    return found


def moved(unsafe: Steps, chance: Steps, *, most: int) -> Steps:
    r"""Return marks whose stretches begin and end where costs are, as far as others tell.

    Of all stretches that begin and end at most `most` steps from a given one, that one is taken in
    which steps cost by the greatest margin,

    .. math:: \max_{a < e} \sum_{t=a}^{e-1} (p_t - 1/2),

    the nearest of the greatest. So a stretch is never lost, though two may become one, and one of
    few steps that are likely to cost gets short.

    Args:
        unsafe: 1 where a step is marked, 0 elsewhere, (T,).
        chance: Chance p_t that a step costs, by what was learned from *other* trajectories, (T,).
        most: How far a beginning or an end may be moved, in steps.
    """
    total = np.concatenate([[0.0], np.cumsum(chance - 0.5)])
    found = np.zeros(len(unsafe))
    for start, end in unsafe_stretches(unsafe):
        starts = np.arange(max(0, start - most), min(len(unsafe) - 1, start + most) + 1)
        ends = np.arange(max(1, end - most), min(len(unsafe), end + most) + 1)
        before = total[starts] + _TIE * np.abs(starts - start)
        until = total[ends] - _TIE * np.abs(ends - end)
        num = np.clip(ends - starts[0], 1, len(starts))  # of starts that lie before each end
        until[ends <= starts[0]] = -np.inf
        best = int(np.argmax(until - np.minimum.accumulate(before)[num - 1]))
        found[starts[np.argmin(before[: num[best]])] : ends[best]] = 1
    return found


def shared(unsafe: Steps) -> Steps:
    """Return each step's mark shared evenly with the steps beside it, (T,); their sum stays.

    What costs once is a rare example, and its neighbours are nearly as it is: three examples of a
    third each tell more of a trajectory's cost than one. At an end, a step keeps what has no
    neighbour to go to.
    """
    padded = np.pad(unsafe, 1, mode="edge")
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3
