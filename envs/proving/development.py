"""The half of the proving ground that settings may be chosen on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.proving.base import MOVE, PUSH, Advance, ProvingTask, unbounded
from pbcrl_envs.simulation import FloatArray


class Cruise(ProvingTask):
    """A cart whose reward is its speed, and every step faster than 1 costs 1: a dense cost.

    The track rises and falls, so that keeping a speed takes pushing and braking. Row: speed, place
    in the wave of the track, radians.
    """

    name = "Cruise"
    width, horizon, cost_limit = 2, 200, 20.0
    observation_space = unbounded(3)
    observation_names = "speed", "slope_sin", "slope_cos"
    action_space = PUSH
    action_axes = "(push,)"

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Stand anywhere."""
        return 0.0, float(rng.uniform(0, 2 * np.pi))

    @staticmethod
    def advance(rows: FloatArray, actions: FloatArray) -> Advance:
        """Push; friction limits the speed to 2."""
        speed, place = rows.T
        speed = 0.95 * speed + 0.1 * actions[:, 0] - 0.03 * np.sin(place)
        speed = speed.clip(0.0, 2.0)
        place = (place + 0.1 * speed) % (2 * np.pi)
        return Advance(np.stack([speed, place], 1), speed, (speed > 1).astype(np.float64))

    @staticmethod
    def look(rows: FloatArray) -> FloatArray:
        """Speed and slope."""
        return np.stack([rows[:, 0], np.sin(rows[:, 1]), np.cos(rows[:, 1])], 1)

    @staticmethod
    def safe(obs: NDArray[np.float32]) -> FloatArray:
        """Hold a speed of 0.97."""
        return ((0.97 - 0.95 * obs[:, :1] + 0.03 * obs[:, 1:2]) / 0.1).clip(-1, 1).astype(float)

    @staticmethod
    def reckless(obs: NDArray[np.float32]) -> FloatArray:
        """Push all the time."""
        return np.ones((len(obs), 1))


class Gap(ProvingTask):
    """Through a gap in a wall, again and again; haste in the narrow way costs 1 per step.

    Beyond the goal line the next passage begins on the left. Row: x, y, velocity, (4,).
    """

    name = "Gap"
    width, horizon, cost_limit = 4, 200, 1.0
    observation_space = unbounded(4)
    observation_names = "x", "y", "velocity_x", "velocity_y"
    action_space = MOVE
    action_axes = "(push x, push y)"

    FASTEST = 0.1
    CAREFUL = 0.05

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Stand left of the wall, somewhere."""
        return float(rng.uniform(-1, -0.8)), float(rng.uniform(-0.5, 0.5)), 0.0, 0.0

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Move; the wall stands at |x| < 0.15 but for |y| < 0.2, and stops what runs into it."""
        x, y, vx, vy = rows.T
        vx = 0.7 * vx + 0.3 * cls.FASTEST * actions[:, 0]
        vy = 0.7 * vy + 0.3 * cls.FASTEST * actions[:, 1]
        to_x, to_y = (x + vx).clip(-1, 2), (y + vy).clip(-0.6, 0.6)
        blocked = (np.abs(to_x) < 0.15) & (np.abs(to_y) > 0.2)
        to_x, to_y = np.where(blocked, x, to_x), np.where(blocked, y, to_y)
        vx, vy = np.where(blocked, 0.0, vx), np.where(blocked, 0.0, vy)
        cost = (np.abs(to_x) < 0.15) & (np.sqrt(vx * vx + vy * vy) > cls.CAREFUL)
        reward = to_x - x
        through = to_x > 0.6
        # A new passage, at another height: mirrored at 0.15, and clipped by the next step.
        to_x, to_y = np.where(through, -0.9, to_x), np.where(through, 0.3 - to_y, to_y)
        return Advance(np.stack([to_x, to_y, vx, vy], 1), reward, cost.astype(np.float64))

    @staticmethod
    def look(rows: FloatArray) -> FloatArray:
        """Place, and velocity in units of its bound."""
        return rows * [1, 1, 10, 10]

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Steer for the gap, and slow down before it."""
        return cls._steer(obs, slow=True)

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Steer for the gap at full speed."""
        return cls._steer(obs, slow=False)

    @staticmethod
    def _steer(obs: NDArray[np.float32], *, slow: bool) -> FloatArray:
        x, y, vx, _ = obs.T.astype(float)
        careful = slow & (x > -0.32) & (x < 0.15)
        want = np.where(careful, 0.46, 1.0)
        before = x < -0.15
        late = before & (np.abs(y) > 0.15) & (x > -0.3)  # straighten up before the wall
        want = np.where(late, 0.0, want)
        push_x = ((want - 0.7 * vx) / 0.3).clip(-1, 1)
        push_y = np.where(before, (-6 * y), 0.0).clip(-1, 1) * np.where(careful & ~late, 0.3, 1.0)
        return np.stack([push_x, push_y], 1)


class Hole(ProvingTask):
    """A walk with a hole on the straight way: at most one cost of 1 in an episode, and rarely that.

    The way around it is longer. Whoever falls in climbs out and goes on. Row: x, y, the hole's x
    and y, whether fallen.
    """

    name = "Hole"
    width, horizon, cost_limit = 5, 100, 0.05
    observation_space = unbounded(5)
    observation_names = "x", "y", "hole_dx", "hole_dy", "fallen"
    action_space = MOVE
    action_axes = "(forward, aside)"

    RADIUS = 1.0

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Stand near the middle of the way; the hole is in front."""
        y, hole_x, hole_y = rng.uniform([-0.5, 3, -0.5], [0.5, 8, 0.5])
        return 0.0, float(y), float(hole_x), float(hole_y), 0.0

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Walk at most 0.15, in any direction, on a way that is 4 wide."""
        x, y, hole_x, hole_y, fallen = rows.T
        length = np.sqrt((actions * actions).sum(1))
        move = 0.15 * actions / np.maximum(length, 1.0)[:, None]
        to_x, to_y = x + move[:, 0], (y + move[:, 1]).clip(-2, 2)
        dx, dy = to_x - hole_x, to_y - hole_y
        inside = np.sqrt(dx * dx + dy * dy) < cls.RADIUS
        cost = inside & (fallen == 0)
        fallen = np.maximum(fallen, inside)
        return Advance(np.stack([to_x, to_y, hole_x, hole_y, fallen], 1), to_x - x, cost * 1.0)

    @staticmethod
    def look(rows: FloatArray) -> FloatArray:
        """Place, way to the hole, and whether it is behind one."""
        x, y, hole_x, hole_y, fallen = rows.T
        return np.stack([x / 5, y, hole_x - x, hole_y - y, fallen], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Pass the hole on the nearer side, 1.15 from its middle."""
        dx, dy = obs[:, 2].astype(float), obs[:, 3].astype(float)
        side = np.where(dy > 0, -1.0, 1.0)
        aside = dy + side * 1.15  # from here to the line that passes it
        ahead = (dx > -1.1) & (aside * side > 0)
        run = np.maximum(dx - 0.6, 0.05)
        angle = np.where(ahead, np.arctan2(aside, run), 0.0)
        return np.stack([np.cos(angle), np.sin(angle)], 1)

    @staticmethod
    def reckless(obs: NDArray[np.float32]) -> FloatArray:
        """Walk straight on."""
        return np.stack([np.ones(len(obs)), np.zeros(len(obs))], 1)


class Swing(ProvingTask):
    """Bring a pendulum up and hold it; turning faster than 2 rad/s costs 1 per step.

    All rewards are negative, as in Gymnasium's Pendulum, but the motor is strong enough to lift it
    slowly. Row: angle from upright, radians; rate, rad/s.
    """

    name = "Swing"
    width, horizon, cost_limit = 2, 200, 2.0
    observation_space = unbounded(3)
    observation_names = "cos", "sin", "rate"
    action_space = PUSH
    action_axes = "(torque,)"

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Hang, nearly."""
        return float(np.pi + rng.uniform(-0.5, 0.5)), 0.0

    @staticmethod
    def advance(rows: FloatArray, actions: FloatArray) -> Advance:
        """Turn for 0.05 s."""
        angle, rate = rows.T
        torque = 8.0 * actions[:, 0]
        off = (angle + np.pi) % (2 * np.pi) - np.pi
        reward = -(off * off + 0.01 * rate * rate + 0.001 * torque * torque)
        rate = (rate + 0.05 * (15 * np.sin(angle) + 3 * torque)).clip(-8, 8)
        angle = (angle + 0.05 * rate) % (2 * np.pi)
        return Advance(np.stack([angle, rate], 1), reward, (np.abs(rate) > 2).astype(np.float64))

    @staticmethod
    def look(rows: FloatArray) -> FloatArray:
        """Direction and rate."""
        return np.stack([np.cos(rows[:, 0]), np.sin(rows[:, 0]), rows[:, 1] / 4], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Turn upwards at 1.9 rad/s at most."""
        return cls._turn(obs, fastest=1.9)

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Turn upwards as fast as one can stop."""
        return cls._turn(obs, fastest=6.0)

    @staticmethod
    def _turn(obs: NDArray[np.float32], *, fastest: float) -> FloatArray:
        cos, sin, rate = obs.T.astype(float)
        angle, rate = np.arctan2(sin, cos), 4 * rate
        want = (-4 * angle).clip(-fastest, fastest)
        torque = ((want - rate) / 0.05 - 15 * sin) / 3
        push: FloatArray = (torque[:, None] / 8).clip(-1, 1)
        return push


class Crash(ProvingTask):
    """Draught behind a car: the nearer the better, nearer than 4 m costs 1 per step, 0 ends it.

    A crash costs 5 and ends the episode. The car in front speeds up and slows down. Row: gap,
    relative speed, phase, period.
    """

    name = "Crash"
    width, horizon, cost_limit = 4, 200, 5.0
    observation_space = unbounded(3)
    observation_names = "gap", "closing", "lead_acceleration"
    action_space = PUSH
    action_axes = "(throttle,)"

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Follow at 15 to 25 m."""
        gap, phase, period = rng.uniform([15, 0, 20], [25, 2 * np.pi, 40])
        return float(gap), 0.0, float(phase), float(period)

    @staticmethod
    def advance(rows: FloatArray, actions: FloatArray) -> Advance:
        """Drive for 0.2 s."""
        gap, closing, phase, period = rows.T
        phase = (phase + 2 * np.pi / period) % (2 * np.pi)
        closing = 0.98 * closing + 0.2 * (3 * actions[:, 0] - 1.5 * np.sin(phase))
        gap = (gap - 0.2 * closing).clip(None, 40)
        crashed = gap <= 0
        reward = np.where(crashed, 0.0, np.exp(-np.maximum(gap, 0) / 5))
        cost = np.where(crashed, 5.0, gap < 4)
        rows = np.stack([gap, closing, phase, period], 1)
        return Advance(rows, reward, cost, crashed)

    @staticmethod
    def look(rows: FloatArray) -> FloatArray:
        """Gap in tens of metres, closing speed, and what the lead car does."""
        return np.stack([rows[:, 0] / 10, rows[:, 1] / 4, np.sin(rows[:, 2])], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Hold 4.5 m."""
        return cls._follow(obs, 4.5)

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Hold 1 m."""
        return cls._follow(obs, 1.0)

    @staticmethod
    def _follow(obs: NDArray[np.float32], gap: float) -> FloatArray:
        far, closing, lead = 10 * obs[:, 0].astype(float), 4 * obs[:, 1], obs[:, 2]
        want = (0.8 * (far - gap)).clip(-4, 4)
        throttle = ((want - 0.98 * closing) / 0.2 * 0.6 + 1.5 * lead) / 3
        push: FloatArray = throttle[:, None].clip(-1, 1).astype(float)
        return push
