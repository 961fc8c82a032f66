"""The rules of the driving tasks: how a car moves, what a step is worth, what it costs and shows.

Pure functions of arrays over N envs, shared by the highway-env version and the batched twin. Car 0
is the ego; arrays of cars are (C, N), cars first, because sums over few cars are fast that way.
Positions, headings and speeds are highway-env's: metres along and across the road from the middle
of the leftmost lane, to the right positive; radians clockwise seen from above; m/s. Rewards, costs
and limits are in the units of the paper's simulator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.driving.scenario import LANE_WIDTH, UNIT, Scenario

Floats = NDArray[np.float64]
Obs = NDArray[np.float32]
Mask = NDArray[np.bool_]

_SHOULDER = 0.445
"""Units from the road's edge to the frame's; with three lanes the frame is |x| <= 0.7."""
_BEHIND = 0.1
"""Units from the ego's start to the rear of the frame."""
CRASH_REWARD = -100.0
"""The reward of a step that ends in a collision or out of the frame, whatever else it did."""

_ALONG, _ACROSS, _SPEED, _ACCELERATION = 50.0, LANE_WIDTH, 10.0, 10.0
"""Scales of observations, in metres and seconds."""

COMPONENTS = "proximity", "speeding", "off_road", "backward", "out_of_frame", "collision"
"""What can make a step cost 1, as named in `info`."""


# -- Motion ----------------------------------------------------------------------------------------


class Cars(NamedTuple):
    """Where the cars are, (C, N) each: metres, metres, radians, m/s."""

    longitudinal: Floats
    lateral: Floats
    heading: Floats
    speed: Floats


def draw_start(scenario: Scenario, rng: np.random.Generator) -> tuple[int, Floats]:
    """Draw what differs between episodes: the ego's lane, and the traffic's speeds in m/s, (C-1,).

    One place for both versions, so that same seeds mean same traffic.
    """
    lane = scenario.start_lanes[int(rng.random() * len(scenario.start_lanes))]
    means, stds = scenario.traffic_speeds
    return lane, (means + stds * rng.standard_normal(len(means))) * UNIT


def start_cars(scenario: Scenario, lanes: list[int], speeds: Floats) -> Cars:
    """Place the cars of N episodes.

    Args:
        scenario: The task.
        lanes: The ego's, one per episode.
        speeds: Of the traffic in m/s, (C - 1, N).
    """
    shape = (1 + len(scenario.traffic), len(lanes))
    longitudinal, lateral, speed = np.empty(shape), np.empty(shape), np.empty(shape)
    longitudinal[0] = scenario.start_position * UNIT
    lateral[0] = LANE_WIDTH * np.array(lanes, dtype=np.float64)
    speed[0] = scenario.start_speed * UNIT
    longitudinal[1:] = np.array([[car.position * UNIT] for car in scenario.traffic]).reshape(-1, 1)
    lateral[1:] = np.array([[LANE_WIDTH * car.lane] for car in scenario.traffic]).reshape(-1, 1)
    speed[1:] = speeds
    return Cars(longitudinal, lateral, np.zeros(shape), speed)


def advance(cars: Cars, acceleration: Floats, steering: Floats, dt: float) -> Cars:
    """Move cars by one Euler step of the paper's simulator, all rates taken at its beginning.

    There x' = v cos θ, y' = v sin θ, θ' = v u_1, v' = u_2 - v with |v| <= 1: unit friction, and a
    turning circle of radius one unit at full lock, however fast.

    Args:
        cars: Before the step.
        acceleration: UNIT u_2 - v, friction included, in m/s^2.
        steering: u_1 in [-1, 1], positive to the right.
        dt: In s.
    """
    travelled = cars.speed * dt
    return Cars(
        cars.longitudinal + travelled * np.cos(cars.heading),
        cars.lateral + travelled * np.sin(cars.heading),
        cars.heading + travelled / UNIT * steering,
        np.clip(cars.speed + acceleration * dt, -UNIT, UNIT),
    )


# -- Reward, cost, ends ----------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What a step was worth, (N,) each."""

    reward: Floats
    cost: Floats
    terminated: Mask
    goal: Mask
    components: dict[str, Mask]
    """Of the cost, by the names in `COMPONENTS`."""


def proximity_to(cars: Cars) -> Floats:
    """Return S = sum over the traffic of exp(-30 (10 dx^2 + 2 dy^2) + 0.3), (N,).

    dx across, dy along, in units. One car alongside collides (S > 0.4) within 0.064 units, in the
    lane within 0.142; it is too near (S > 0.025) within 0.115 and 0.258.
    """
    along = (cars.longitudinal[1:] - cars.longitudinal[0]) / UNIT
    across = (cars.lateral[1:] - cars.lateral[0]) / UNIT
    nearness: Floats = np.exp(-30.0 * (10.0 * across**2 + 2.0 * along**2) + 0.3).sum(axis=0)
    return nearness


def judge(scenario: Scenario, cars: Cars, longitudinal_before: Floats) -> Verdict:
    """Reward, cost and ends of a step, all from the state after it.

    The reward is 10 times the distance gained along the road, less 1 off the road, less 1 driving
    backward, less a sigmoid of the distance to the nearest lane's middle; a collision and leaving
    the frame are worth -100 instead. The cost is 1 if any of `COMPONENTS` holds, else 0.

    Args:
        scenario: The task.
        cars: After the step.
        longitudinal_before: Of the ego, (N,), in metres.
    """
    along, across, speed = cars.longitudinal[0] / UNIT, cars.lateral[0], cars.speed[0]
    lane = np.clip(np.rint(across / LANE_WIDTH), 0, scenario.lanes_count - 1)
    from_lane = (across - LANE_WIDTH * lane) / UNIT
    middle = (scenario.lanes_count - 1) / 2 * LANE_WIDTH
    from_middle = np.abs(across - middle) / UNIT
    edge = scenario.lanes_count * LANE_WIDTH / UNIT / 2
    nearness = proximity_to(cars)

    off_road, backward = from_middle > edge, speed < 0.0
    out_of_frame = from_middle > edge + _SHOULDER
    out_of_frame |= along < scenario.start_position - _BEHIND
    collision = nearness > scenario.collision_limit
    components = {
        "proximity": _above(nearness, scenario.proximity_limit),
        "speeding": _above(speed / UNIT, scenario.speed_limit),
        "off_road": off_road,
        "backward": backward,
        "out_of_frame": out_of_frame,
        "collision": collision,
    }
    cost = np.zeros_like(off_road)
    for component in components.values():
        cost |= component

    not_in_lane = 1.0 / (1.0 + np.exp(10.0 - 5000.0 * from_lane**2))
    gained = (cars.longitudinal[0] - longitudinal_before) / UNIT
    reward = 10.0 * gained - off_road - backward - not_in_lane
    reward[out_of_frame | collision] = CRASH_REWARD

    goal = along > scenario.goal
    terminated = goal.copy()
    if scenario.end_on_collision:
        terminated |= collision
    if scenario.end_out_of_frame:
        terminated |= out_of_frame
    return Verdict(reward, cost.astype(np.float64), terminated, goal, components)


def _above(values: Floats, limit: float | None) -> Mask:
    return np.zeros(values.shape, np.bool_) if limit is None else values > limit


# -- Observation -----------------------------------------------------------------------------------


def observe(scenario: Scenario, cars: Cars, acceleration: Floats) -> Obs:
    """Return what the ego sees, float32 (N, 5 + 6 (C - 1)).

    Ego: position along the road / 50 m and across it from the middle / 4 m, heading in rad, speed
    / 10 m/s, acceleration in the last step / 10 m/s^2. Each other car: position along and across
    relative to the ego, over the same scales; relative velocity along and across / 10 m/s; heading;
    acceleration. The paper names position, velocity and acceleration; heading is ours, because
    steering needs it.
    """
    middle = (scenario.lanes_count - 1) / 2 * LANE_WIDTH
    along = cars.speed * np.cos(cars.heading)  # (C, N)
    across = cars.speed * np.sin(cars.heading)
    columns = [
        cars.longitudinal[:1] / _ALONG,
        (cars.lateral[:1] - middle) / _ACROSS,
        cars.heading[:1],
        cars.speed[:1] / _SPEED,
        acceleration[:1] / _ACCELERATION,
    ]
    others = (
        (cars.longitudinal[1:] - cars.longitudinal[0]) / _ALONG,
        (cars.lateral[1:] - cars.lateral[0]) / _ACROSS,
        (along[1:] - along[0]) / _SPEED,
        (across[1:] - across[0]) / _SPEED,
        cars.heading[1:],
        acceleration[1:] / _ACCELERATION,
    )
    columns.append(np.stack(others, axis=1).reshape(-1, cars.speed.shape[1]))  # car by car
    return np.ascontiguousarray(np.concatenate(columns).astype(np.float32).T)
