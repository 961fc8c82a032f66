"""Scripted drivers, and the paper's simulator a second time: plain Python, in its own units.

There x points to the right, y ahead, θ turns counterclockwise from x; a lane is 0.17 wide.
"""

import math

import gymnasium
import numpy as np

import pbcrl_envs  # noqa: F401 - registers the ids

UNIT = 4 / 0.17
TASKS = "DrivingBlockedRoad-v0", "DrivingLaneChange-v0"
TOO_FAST = {"DrivingBlockedRoad-v0": 0.75, "DrivingLaneChange-v0": 0.70}
LANES = -0.17, 0.0, 0.17


# -- Drivers: obs (N, obs_dim) -> actions (N, 2), throttle and steering ----------------------------


def constant(throttle, steering=0.0):
    return lambda obs: np.tile([throttle, steering], (len(obs), 1))


def speed_of(obs):
    """Of the ego, in units per second."""
    return obs[:, 3] * 10 / UNIT


def gap_to(obs, car):
    """Along the road, in units."""
    return obs[:, 5 + 6 * car] * 50 / UNIT


def speed_of_car(obs, car):
    """Along the road; of a straight ego."""
    return obs[:, 7 + 6 * car] * 10 / UNIT + speed_of(obs)


def hold_speed(target):
    """Reach a speed at once and keep it: throttle makes up for friction, and closes the gap."""

    def driver(obs):
        speed = speed_of(obs)
        throttle = np.clip(speed + (target - speed) / 0.2, -1, 1)
        return np.column_stack([throttle, np.zeros(len(obs))])

    return driver


def follow(car, gap):
    """Stay in the lane and keep a gap to the car ahead."""

    def driver(obs):
        wanted = speed_of_car(obs, car) + gap_to(obs, car) - gap
        return hold_speed(np.clip(wanted, 0, 0.7))(obs)

    return driver


def at_random(seed=0, *, steering=1.0):
    rng = np.random.default_rng(seed)
    return lambda obs: rng.uniform(-1, 1, (len(obs), 2)) * [1, steering]


def play(env_id, driver, *, num_envs=300, seed=0, **options):
    """Returns, costs and lengths, (N,) each, of one episode per env."""
    envs = gymnasium.make_vec(env_id, num_envs=num_envs, autoreset_mode="SameStep", **options)
    obs, _ = envs.reset(seed=seed)
    returns, costs, lengths = np.zeros((3, num_envs))
    running = np.ones(num_envs, bool)
    while running.any():
        obs, rewards, terminations, truncations, infos = envs.step(driver(obs))
        returns += rewards * running
        costs += infos["cost"] * running
        lengths += running
        running &= ~(terminations | truncations)
    return returns, costs, lengths


# -- The paper's simulator -------------------------------------------------------------------------


class Paper:
    """One episode. `ego` and `cars` are [x, y, θ, v]; the cars' speeds are given."""

    def __init__(self, env_id, *, lane, speeds):
        self.env_id, self.steps = env_id, 0
        if env_id == "DrivingBlockedRoad-v0":
            self.ego = [LANES[lane], -0.1, math.pi / 2, 0.5]
            starts = [(LANES[0], 0.40), (LANES[1], 0.45), (LANES[2], 0.50)]
        else:
            self.ego = [0.0, -0.1, math.pi / 2, 0.1]
            starts = [(LANES[2], 0.0), (LANES[0], 1.0)]
        self.cars = [[x, y, math.pi / 2, v] for (x, y), v in zip(starts, speeds, strict=True)]

    def step(self, throttle, left):
        """Returns reward, cost, ended; `left` is the paper's steering."""
        before = self.ego[1]
        merging = 0.0
        if self.env_id == "DrivingLaneChange-v0":
            merging = 1.0 if 5 <= self.steps < 9 else -1.0 if 9 <= self.steps < 13 else 0.0
        for i, car in enumerate(self.cars):
            self.move(car, merging if i == 0 else 0.0, car[3])
        self.move(self.ego, left, throttle)
        self.steps += 1
        x, y, _, v = self.ego
        nearness = sum(
            math.exp(-30 * (10 * (x - car[0]) ** 2 + 2 * (y - car[1]) ** 2) + 0.3)
            for car in self.cars
        )
        off_street, backward = abs(x) > 0.255, v < 0
        lost = abs(x) > 0.7 or y < -0.2 or nearness > 0.4
        d = min(abs(x - lane) for lane in LANES)
        not_in_lane = 1 / (1 + math.exp(-min(5000 * d**2 - 10, 500)))
        reward = 10 * (y - before) - off_street - backward - not_in_lane
        too_fast = v > TOO_FAST[self.env_id]
        cost = nearness > 0.025 or too_fast or off_street or backward or lost
        return -100.0 if lost else reward, float(cost), lost or y > 5

    @staticmethod
    def move(car, steering, throttle):
        x, y, heading, v = car
        car[:] = (
            x + v * math.cos(heading) * 0.2,
            y + v * math.sin(heading) * 0.2,
            heading + v * steering * 0.2,
            min(max(v + (throttle - v) * 0.2, -1), 1),
        )
