"""The half of the proving ground that is for results alone; no setting was chosen on it.

A sixth task, `Ice`, is a plain Gymnasium env: `ice.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from pbcrl_envs.proving.base import MOVE, PUSH, Advance, ProvingTask, unbounded
from pbcrl_envs.simulation import FloatArray

_TURN = 2 * np.pi


class Channel(ProvingTask):
    """A boat in a winding channel; its wake costs as much as it is too fast for bend and bank.

    Touching the bank takes half the speed. Row: place in the wave of the channel, radians; waves
    per unit of way; offset from the middle; heading against the channel; speed.
    """

    name = "Channel"
    width, horizon, cost_limit = 5, 200, 8.0
    observation_space = unbounded(5)
    observation_names = "offset", "heading", "speed", "bend", "bend_change"
    action_space = MOVE
    action_axes = "(throttle, rudder)"

    BEND = 0.8

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Drift slowly, anywhere in the channel."""
        place, waves, offset, heading = rng.uniform([0, 0.8, -0.5, -0.3], [_TURN, 1.2, 0.5, 0.3])
        return float(place), float(waves), float(offset), float(heading), 0.2

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Sail for 0.1; throttle sets what the speed tends to, 0.1 to 1.3."""
        place, waves, offset, heading, speed = rows.T
        speed = 0.9 * speed + 0.1 * (0.7 + 0.6 * actions[:, 0])
        turn = 2.0 * actions[:, 1] - cls.BEND * np.sin(place) * speed
        heading = (heading + 0.1 * turn).clip(-1, 1)
        way = 0.1 * speed * np.cos(heading)
        offset = offset + 0.1 * speed * np.sin(heading)
        touches = np.abs(offset) > 1
        offset = offset.clip(-1, 1)
        speed = np.where(touches, 0.5 * speed, speed)
        heading = np.where(touches, 0.0, heading)
        place = (place + waves * way) % _TURN
        cost = np.maximum(speed - cls._allowed(np.sin(place), offset), 0)
        return Advance(np.stack([place, waves, offset, heading, speed], 1), way, cost)

    @staticmethod
    def look(rows: FloatArray) -> FloatArray:
        """All but the length of the waves."""
        place, _, offset, heading, speed = rows.T
        return np.stack([offset, heading, speed, np.sin(place), np.cos(place)], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Sail nearly as fast as is allowed here and a little further on."""
        offset, _, _, bend, change = obs.T.astype(float)
        further = bend * np.cos(0.5) + change * np.sin(0.5)
        strongest = np.maximum(np.abs(bend), np.abs(further))
        return cls._sail(obs, 0.95 * cls._allowed(strongest, offset))

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Sail at full throttle."""
        return cls._sail(obs, np.full(len(obs), 2.0))

    @staticmethod
    def _allowed(bend: FloatArray, offset: FloatArray) -> FloatArray:
        return 1.0 - 0.5 * bend * bend - 0.3 * offset * offset

    @classmethod
    def _sail(cls, obs: NDArray[np.float32], want: FloatArray) -> FloatArray:
        offset, heading, speed, bend, _ = obs.T.astype(float)
        throttle = ((want - 0.9 * speed) / 0.1 - 0.7) / 0.6
        rudder = (cls.BEND * bend * speed - 3 * heading - 2 * offset) / 2
        return np.stack([throttle, rudder], 1).clip(-1, 1)


class Kiln(ProvingTask):
    """A kiln for 1,000 steps: the hotter the charge, the more it yields; hotter than 1 costs 1.

    Cold material cools the charge, and the fuel is now better, now worse. Row: heat of the gas and
    of the charge; phases, radians, and rates of the two swings of the fuel.
    """

    name = "Kiln"
    width, horizon, cost_limit = 6, 1000, 30.0
    observation_space = unbounded(4)
    observation_names = "gas", "charge", "fuel", "fuel_change"
    action_space = MOVE
    action_axes = "(burner, feed)"

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Start cold."""
        low, high = [0.2, 0.2, 0, 0, 0.02, 0.05], [0.5, 0.5, _TURN, _TURN, 0.04, 0.1]
        return [float(number) for number in rng.uniform(low, high)]

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Burn and feed; the lowest action is none of it."""
        gas, charge, slow, fast, slow_rate, fast_rate = rows.T
        burner, feed = ((actions + 1) / 2).T
        gas = gas + 0.05 * (2.2 * burner * cls._fuel(slow, fast) - gas)
        charge = charge + 0.02 * (gas - charge) - 0.01 * feed * charge
        reward = 0.1 * feed * charge * charge
        slow, fast = (slow + slow_rate) % _TURN, (fast + fast_rate) % _TURN
        rows = np.stack([gas, charge, slow, fast, slow_rate, fast_rate], 1)
        return Advance(rows, reward, (charge > 1).astype(np.float64))

    @classmethod
    def look(cls, rows: FloatArray) -> FloatArray:
        """Both heats, and what the fuel is worth now and soon."""
        gas, charge, slow, fast, slow_rate, fast_rate = rows.T
        now = cls._fuel(slow, fast)
        soon = cls._fuel(slow + 5 * slow_rate, fast + 5 * fast_rate)
        return np.stack([gas, charge, now, soon - now], 1)

    @staticmethod
    def safe(obs: NDArray[np.float32]) -> FloatArray:
        """Hold a charge of 0.96 at full feed."""
        gas, charge, fuel, _ = obs.T.astype(float)
        want = (1.5 * 0.96 + 6 * (0.96 - charge)).clip(0, 2.2)
        burner = (gas + (want - gas) / 0.2) / (2.2 * fuel)
        return np.stack([(2 * burner - 1).clip(-1, 1), np.ones(len(obs))], 1)

    @staticmethod
    def reckless(obs: NDArray[np.float32]) -> FloatArray:
        """Burn and feed all there is."""
        return np.ones((len(obs), 2))

    @staticmethod
    def _fuel(slow: FloatArray, fast: FloatArray) -> FloatArray:
        return 1 + 0.15 * np.sin(slow) + 0.1 * np.sin(fast)


class Storage(ProvingTask):
    """A reservoir that pumps when power is cheap and sells when it is dear: large rewards.

    Reward: euros above the mean price of what is sold, below it of what is bought, less a fee of
    1.20 per MWh. Cost: the risk that a bank slips, at most 0.002 per step, where the reservoir is
    nearly empty or nearly full. Row: level; phases and rates of the two swings of the price;
    strength of the first.
    """

    name = "Storage"
    width, horizon, cost_limit = 6, 168, 0.02
    observation_space = unbounded(6)
    observation_names = "level", "price", "day_sin", "day_cos", "shift_sin", "shift_cos"
    action_space = PUSH
    action_axes = "(power,)"

    FULL = 5000.0  # MWh
    STEP = 0.12
    SWING = 40.0  # euros per MWh

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Begin half full, at any hour."""
        low, high = [0.4, 0, 0, 0.22, 0.6, 0.7], [0.6, _TURN, _TURN, 0.3, 0.9, 1.3]
        return [float(number) for number in rng.uniform(low, high)]

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Sell, or buy, for an hour; at most what is there, or finds room."""
        level, day, shift, day_rate, shift_rate, strength = rows.T
        price = cls._price(day, shift, strength)
        left = (level - cls.STEP * actions[:, 0]).clip(0, 1)
        sold = cls.FULL * (level - left)  # MWh; bought where negative
        reward = sold * price - 1.2 * np.abs(sold)
        cost = 0.01 * np.maximum(np.abs(left - 0.5) - 0.3, 0)
        day, shift = (day + day_rate) % _TURN, (shift + shift_rate) % _TURN
        rows = np.stack([left, day, shift, day_rate, shift_rate, strength], 1)
        return Advance(rows, reward, cost)

    @classmethod
    def look(cls, rows: FloatArray) -> FloatArray:
        """Level, price in euros, and where its swings are."""
        level, day, shift, _, _, strength = rows.T
        price = cls._price(day, shift, strength)
        waves = np.sin(day), np.cos(day), np.sin(shift), np.cos(shift)
        return np.stack([level, price, *waves], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Use the middle 60 % of the reservoir."""
        return cls._trade(obs, 0.3)

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Use all of it."""
        return cls._trade(obs, 0.5)

    @classmethod
    def _price(cls, day: FloatArray, shift: FloatArray, strength: FloatArray) -> FloatArray:
        """Euros above the mean."""
        return cls.SWING * (strength * np.sin(day) + 0.4 * np.sin(shift))

    @classmethod
    def _trade(cls, obs: NDArray[np.float32], depth: float) -> FloatArray:
        level, price = obs[:, 0].astype(float), obs[:, 1].astype(float)
        want = 0.5 - depth * np.sign(price)
        power = np.where(np.abs(price) > 4, (level - want) / cls.STEP, 0.0)
        return power[:, None].clip(-1, 1)


class Thicket(ProvingTask):
    """From goal to goal between nine bushes; nearer than 0.15 to one costs 1: 68 inputs.

    Bushes stop nobody. 32 rays see them; 32 gauges show something else. Row: x, y, velocity, number
    of the goal, ten goals, nine bushes, phases and rates of the gauges.
    """

    name = "Thicket"
    width, horizon, cost_limit = 107, 150, 4.0
    RAYS, GAUGES, BUSHES, GOALS = 32, 32, 9, 10
    observation_space = unbounded(4 + RAYS + GAUGES)
    observation_names = (
        *("velocity_x", "velocity_y", "goal_dx", "goal_dy"),
        *(f"range[{i}]" for i in range(RAYS)),
        *(f"gauge_{i}" for i in range(GAUGES)),
    )
    action_space = MOVE
    action_axes = "(push x, push y)"

    FASTEST = 0.08
    RADIUS = 0.15
    NEAR = 0.15
    SIGHT = 1.0

    @classmethod
    def start(cls, rng: np.random.Generator) -> Sequence[float]:
        """Stand at a place like the goals: in the middle between bushes, each far from the last."""
        grid = np.array([(i, j) for i in (-1.0, 0.0, 1.0) for j in (-1.0, 0.0, 1.0)])
        bushes = grid + rng.uniform(-0.12, 0.12, grid.shape)
        places: list[FloatArray] = []
        while len(places) < cls.GOALS + 1:
            place = np.floor(rng.uniform(0, 4, 2)) - 1.5
            if not places or np.abs(place - places[-1]).max() > 1.5:
                places.append(place)
        way = np.array(places) + rng.uniform(-0.1, 0.1, (cls.GOALS + 1, 2))
        phases = rng.uniform(0, _TURN, cls.GAUGES)
        rates = rng.uniform(0.02, 0.1, cls.GAUGES)
        moving = np.zeros(3)
        parts = way[0], moving, way[1:].ravel(), bushes.ravel(), phases, rates
        return [float(number) for number in np.concatenate(parts)]

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Move; at the goal, which pays 1 more, the next one counts."""
        rows = rows.copy()
        push = actions / np.maximum(np.sqrt((actions * actions).sum(1)), 1.0)[:, None]
        goal = cls._goal(rows)
        before = _length(goal - rows[:, :2])
        rows[:, 2:4] = 0.6 * rows[:, 2:4] + 0.4 * cls.FASTEST * push
        rows[:, :2] = (rows[:, :2] + rows[:, 2:4]).clip(-1.8, 1.8)
        after = _length(goal - rows[:, :2])
        reached = after < 0.2
        rows[:, 4] = (rows[:, 4] + reached) % cls.GOALS
        rows[:, 43:75] = (rows[:, 43:75] + rows[:, 75:]) % _TURN
        gap = _length(cls._bushes(rows) - rows[:, None, :2]).min(1) - cls.RADIUS
        return Advance(rows, before - after + reached, (gap < cls.NEAR).astype(np.float64))

    @classmethod
    def look(cls, rows: FloatArray) -> FloatArray:
        """Velocity in units of its bound, way to the goal, rays and gauges."""
        velocity = rows[:, 2:4] / cls.FASTEST
        to_goal = cls._goal(rows) - rows[:, :2]
        return np.concatenate([velocity, to_goal, cls._ranges(rows), np.sin(rows[:, 43:75])], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Take the free direction that is nearest to that of the goal."""
        ahead = cls._towards_goal(obs)
        ranges = obs[:, 4 : 4 + cls.RAYS].astype(float)
        distance = _length(obs[:, 2:4].astype(float))[:, None]
        free = np.ones_like(ranges, dtype=np.bool_)
        # A bush at some distance forbids the rays that would pass it too near.
        for shift in range(-10, 11):
            other = np.roll(ranges, shift, 1)
            aside = other * np.abs(np.sin(_TURN * shift / cls.RAYS))
            along = other * np.cos(_TURN * shift / cls.RAYS)
            free &= (aside > 0.24) | (along > np.minimum(distance, 0.6)) | (along < 0)
        x, y = cls._rays()
        inward = ahead[:, :1] * x + ahead[:, 1:] * y  # (n, rays)
        best = np.where(free, inward, inward + 3 * ranges - 9).argmax(1)
        push = np.stack([x[best], y[best]], 1)
        straight = free[np.arange(len(obs)), inward.argmax(1)]
        return np.where(straight[:, None], ahead, push)

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Go straight."""
        return cls._towards_goal(obs)

    @classmethod
    def _goal(cls, rows: FloatArray) -> FloatArray:
        goals = rows[:, 5:25].reshape(-1, cls.GOALS, 2)
        goal: FloatArray = goals[np.arange(len(rows)), rows[:, 4].astype(np.intp)]
        return goal

    @classmethod
    def _bushes(cls, rows: FloatArray) -> FloatArray:
        return rows[:, 25:43].reshape(-1, cls.BUSHES, 2)

    @classmethod
    def _rays(cls) -> tuple[FloatArray, FloatArray]:
        angles = np.arange(cls.RAYS) * (_TURN / cls.RAYS)
        return np.cos(angles), np.sin(angles)

    @classmethod
    def _ranges(cls, rows: FloatArray) -> FloatArray:
        """How far it is to a bush along each ray, at most `SIGHT`; 0 within one."""
        x, y = cls._rays()
        to_bush = cls._bushes(rows) - rows[:, None, :2]
        dx, dy = to_bush[:, :, 0, None], to_bush[:, :, 1, None]
        along, across = dx * x + dy * y, dx * y - dy * x  # (n, bushes, rays)
        half = np.sqrt(np.maximum(cls.RADIUS**2 - across * across, 0))
        hits = (np.abs(across) < cls.RADIUS) & (along + half > 0)
        seen = np.where(hits, np.maximum(along - half, 0), cls.SIGHT)
        nearest: FloatArray = np.minimum(seen.min(1), cls.SIGHT)
        return nearest

    @staticmethod
    def _towards_goal(obs: NDArray[np.float32]) -> FloatArray:
        to_goal = obs[:, 2:4].astype(float)
        return to_goal / np.maximum(_length(to_goal), 1e-6)[:, None]


class Tow(ProvingTask):
    """A tug tows a barge: a pull of more than 12 costs 1, one of 24 breaks the cable and ends it.

    So does leaving the fairway; either takes 10. Reward: the barge's way, less fuel, less the
    distance from the middle of the fairway. Actions and observations are in units of their own.
    Row: speeds of tug and barge, stretch of the cable, offset from the middle, side speed, phases
    and rates of the waves and of the current.
    """

    name = "Tow"
    width, horizon, cost_limit = 9, 200, 4.0
    observation_space = unbounded(8)
    observation_names = (
        *("tug_speed", "barge_speed", "pull", "offset", "side_speed"),
        *("wave", "wave_change", "current"),
    )
    action_space = Box(np.array([0, -0.02], np.float32), np.array([40, 0.05], np.float32))
    action_axes = "(power, rudder)"

    RATED, BREAKS = 12.0, 24.0

    @staticmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Make slow headway, near the middle."""
        low, high = [-0.3, 0, 0.3, 0, 0.03], [0.3, _TURN, 0.5, _TURN, 0.08]
        offset, wave, wave_rate, current, current_rate = rng.uniform(low, high).tolist()
        return 1.0, 1.0, 0.5, offset, 0.0, wave, wave_rate, current, current_rate

    @classmethod
    def advance(cls, rows: FloatArray, actions: FloatArray) -> Advance:
        """Tow for 0.5 s."""
        tug, barge, stretch, offset, aside, wave, wave_rate, current, current_rate = rows.T
        power, rudder = actions.T
        pull = cls._pull(tug, barge, stretch)
        tug = tug + 0.5 * (0.1 * power - 0.2 * tug - 0.1 * pull + 0.4 * np.sin(wave))
        barge = barge + 0.5 * (0.04 * pull - 0.1 * barge)
        stretch = stretch + 0.5 * (tug - barge)
        aside = 0.8 * aside + 0.2 * (8 * rudder - cls._drift(current))
        offset = offset + 0.25 * aside
        wave, current = (wave + wave_rate) % _TURN, (current + current_rate) % _TURN
        pull = cls._pull(tug, barge, stretch)
        lost = (pull > cls.BREAKS) | (np.abs(offset) > 1)
        reward = 0.1 * barge - 0.01 * power - 0.5 * np.abs(offset) - 10.0 * lost
        cost = (pull > cls.RATED).astype(np.float64)
        motion = tug, barge, stretch, offset, aside
        rows = np.stack([*motion, wave, wave_rate, current, current_rate], 1)
        return Advance(rows, reward, cost, lost)

    @classmethod
    def look(cls, rows: FloatArray) -> FloatArray:
        """What moves, the pull, the waves and the current."""
        tug, barge, stretch, offset, aside, wave, _, current, _ = rows.T
        pull = cls._pull(tug, barge, stretch)
        waves = np.sin(wave), np.cos(wave)
        return np.stack([tug, barge, pull, offset, aside, *waves, cls._drift(current)], 1)

    @classmethod
    def safe(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Pull with 10.5."""
        return cls._tow(obs, 10.5)

    @classmethod
    def reckless(cls, obs: NDArray[np.float32]) -> FloatArray:
        """Pull with 19."""
        return cls._tow(obs, 19.0)

    @staticmethod
    def _pull(tug: FloatArray, barge: FloatArray, stretch: FloatArray) -> FloatArray:
        return np.where(stretch > 0, np.maximum(4 * stretch + 4 * (tug - barge), 0), 0.0)

    @staticmethod
    def _drift(current: FloatArray) -> FloatArray:
        return 0.1 + 0.05 * np.sin(current)

    @staticmethod
    def _tow(obs: NDArray[np.float32], want: float) -> FloatArray:
        tug, barge, pull, offset, aside, wave, _, drift = obs.T.astype(float)
        # What holds the pull and the waves in balance, and the difference of speeds that mends it.
        faster = (0.1 * (want - pull)).clip(-0.6, 0.6) - (tug - barge)
        power = 2 * tug + pull - 4 * wave + 10 * faster
        rudder = (drift - 1.5 * offset - 2 * aside) / 8
        power, rudder = power.clip(0, 40), rudder.clip(-0.02, 0.05)
        return np.stack([power, rudder], 1)


def _length(vectors: FloatArray) -> FloatArray:
    """Lengths of vectors (..., 2); the rounding does not depend on how many there are."""
    x, y = vectors[..., 0], vectors[..., 1]
    return np.sqrt(x * x + y * y)
