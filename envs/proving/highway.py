"""Scripted policies for two of highway-env's own tasks; nothing of highway-env is imported.

An observation is that of `pbcrl_envs.driving.costs.make_highway_env`: five cars in rows, the own
car first, by presence, x, y and velocity, in units of their bounds. Others are seen relative to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.simulation import FloatArray

_X, _SPEED = 200.0, 80.0  # metres, m/s
_LANE = 4.0  # metres; y is in units of all lanes together
_CAR = 5.0  # metres


def merge_safe(obs: NDArray[np.float32]) -> FloatArray:
    """Slow down to 16.5 m/s, and keep 15 m behind another car.

    The episode ends at the end of the road, and a step pays more than speed does: at that speed it
    lasts just as long as it may. The first four steps cost, because it starts at 30 m/s.
    """
    rows = _metres(obs, lanes=2)
    want = np.minimum(_behind(rows, rows[:, 0, 2], room=15.0, back=0.5), 16.5)
    return _drive(rows, want, np.full(len(obs), _LANE))


def merge_reckless(obs: NDArray[np.float32]) -> FloatArray:
    """Leave the road and circle at full throttle: speed pays for the whole 100 steps."""
    return np.tile([1.0, 0.5], (len(obs), 1))


def highway_safe(obs: NDArray[np.float32]) -> FloatArray:
    """Overtake at 25 m/s at most, with a wide berth."""
    return _overtake(obs, fastest=25.0, room=16.0)


def highway_reckless(obs: NDArray[np.float32]) -> FloatArray:
    """Overtake at 31 m/s, closely."""
    return _overtake(obs, fastest=31.0, room=5.0)


def _metres(obs: NDArray[np.float32], *, lanes: int) -> FloatArray:
    """Cars as presence, x, y and velocity in m and m/s, (n, 5, 5)."""
    units = np.array([1, _X, _LANE * lanes, _SPEED, _SPEED])
    rows: FloatArray = obs.reshape(-1, 5, 5).astype(float) * units
    return rows


def _behind(rows: FloatArray, y: FloatArray, *, room: float, back: float) -> FloatArray:
    """Speed that comes to follow the next car in the lane at `y` with some room, (n,)."""
    others = rows[:, 1:]
    aside = np.abs(rows[:, :1, 2] + others[:, :, 2] - y[:, None])
    ahead = (others[:, :, 0] > 0) & (others[:, :, 1] > 0) & (aside < 3.2)
    speed = rows[:, :1, 3] + others[:, :, 3]
    free: FloatArray = np.where(ahead, speed + back * (others[:, :, 1] - _CAR - room), np.inf)
    slowest: FloatArray = free.min(1)
    return slowest


def _overtake(obs: NDArray[np.float32], *, fastest: float, room: float) -> FloatArray:
    rows = _metres(obs, lanes=4)
    others = rows[:, 1:]
    own = np.round(rows[:, 0, 2] / _LANE).clip(0, 3)
    best, target = np.full(len(obs), -np.inf), own
    for lane in range(4):
        y = np.full(len(obs), lane * _LANE)
        aside = np.abs(rows[:, :1, 2] + others[:, :, 2] - y[:, None])
        beside = (others[:, :, 0] > 0) & (np.abs(others[:, :, 1]) < _CAR + room) & (aside < 3)
        steps = np.abs(lane - own)
        closed = (steps > 1) | ((steps == 1) & beside.any(1))
        speed = np.minimum(_behind(rows, y, room=room, back=0.15), fastest)
        score = np.where(closed, -np.inf, speed - 0.5 * steps + 0.7 * lane)
        target, best = np.where(score > best, lane, target), np.maximum(score, best)
    here, there = rows[:, 0, 2], target * _LANE
    want = np.minimum(
        _behind(rows, here, room=room, back=0.5), _behind(rows, there, room=room, back=0.5)
    )
    return _drive(rows, np.minimum(want, fastest), there)


def _drive(rows: FloatArray, want: FloatArray, y: FloatArray) -> FloatArray:
    """Throttle and steering towards a speed and the middle of a lane."""
    own = rows[:, 0]
    heading = np.arctan2(own[:, 4], np.maximum(own[:, 3], 1.0))
    aim = (0.04 * (y - own[:, 2])).clip(-0.1, 0.1)
    return np.stack([(want - own[:, 3]) / 2, 0.6 * (aim - heading)], 1).clip(-1, 1)
