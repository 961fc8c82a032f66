"""What a driving task is made of, and the two that the paper has; changed as highway-env's configs.

Everything here is in the units of the paper's simulator, in which a lane is 0.17 wide: one unit is
23.53 m.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbcrl_envs.checks import check_task

LANE_WIDTH = 4.0
"""Metres, as highway-env has it."""
UNIT = LANE_WIDTH / 0.17
"""Metres per unit of length of the paper's simulator; its speeds are in units per second."""


@dataclass(frozen=True)
class Car:
    """One car of the traffic; it drives straight at its speed unless `steering` says otherwise."""

    lane: int
    """0 is the leftmost."""
    position: float
    """Along the road at the start; the ego starts at -0.1."""
    speed: float
    """Mean speed, drawn once per episode."""
    speed_std: float = 0.0
    """Standard deviation of that draw."""
    steering: tuple[tuple[float, float], ...] = ()
    """(seconds, command) one after the other from the start; then 0. Right is positive."""


@dataclass(frozen=True)
class Scenario:
    """What a task is made of. Lengths in units of the paper's simulator (23.53 m), times in s.

    Raises:
        ValueError: If a field is out of its range, or two of them contradict each other.
    """

    traffic: tuple[Car, ...]
    """The other cars, in the order of the observation."""
    start_lanes: tuple[int, ...]
    """One of them is drawn for the ego, each equally likely."""
    start_speed: float
    """Of the ego."""
    speed_limit: float | None
    """A step that ends faster costs; None: no limit."""
    lanes_count: int = 3
    """Parallel lanes."""
    start_position: float = -0.1
    """Of the ego along the road; the frame ends 0.1 behind it."""
    goal: float = 5.0
    """Passing this position ends the episode."""
    proximity_limit: float | None = 0.025
    """A step that ends with more proximity (see `proximity_to`) costs; None: closeness is free."""
    collision_limit: float = 0.4
    """Proximity above which cars collide."""
    end_on_collision: bool = True
    """Whether a collision ends the episode."""
    end_out_of_frame: bool = True
    """Whether leaving the frame ends the episode."""
    policy_frequency: int = 5
    """Steps per second."""
    simulation_frequency: int = 5
    """Euler steps per second, a multiple of `policy_frequency`."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def frames(self) -> int:
        """Euler steps per env step."""
        return self.simulation_frequency // self.policy_frequency

    @property
    def obs_dim(self) -> int:
        """Length of one observation."""
        return 5 + 6 * len(self.traffic)

    @property
    def observation_names(self) -> tuple[str, ...]:
        """What each number of `rules.observe` is, (obs_dim,): x along the road, y to the right.

        "vehicle1.dx" is how far the first car of the traffic is ahead of the ego.
        """
        ego = [f"ego.{name}" for name in ("x", "y", "heading", "speed", "acceleration")]
        of_car = "dx", "dy", "dvx", "dvy", "heading", "acceleration"
        cars = range(1, 1 + len(self.traffic))
        return (*ego, *(f"vehicle{car}.{name}" for car in cars for name in of_car))

    @cached_property
    def traffic_speeds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means and standard deviations of the traffic's speeds, (C - 1,) each."""
        means = np.array([car.speed for car in self.traffic], dtype=np.float64)
        return means, np.array([car.speed_std for car in self.traffic], dtype=np.float64)

    def steering_schedule(self) -> NDArray[np.float64]:
        """Steering of the traffic, frame by frame; the last column is repeated. (C - 1, F)."""
        rows = [
            np.repeat(
                [command for _, command in car.steering],
                [round(seconds * self.simulation_frequency) for seconds, _ in car.steering],
            )
            for car in self.traffic
        ]
        schedule = np.zeros((len(rows), 1 + max(map(len, rows), default=0)))
        for row, commands in zip(schedule, rows, strict=True):
            row[: len(commands)] = commands
        return schedule


def _check(scenario: Scenario) -> None:
    s = scenario
    lanes = s.lanes_count
    for name in ("lanes_count", "policy_frequency", "simulation_frequency"):
        if not isinstance(getattr(s, name), int | np.integer):
            raise ValueError(f"{name} must be a whole number, got {getattr(s, name)!r}")
    if lanes < 1:
        raise ValueError(f"lanes_count must be >= 1, got {lanes}; a road needs a lane")
    if not s.start_lanes:
        raise ValueError("start_lanes must name at least one lane for the ego, got none")
    named = [("start_lanes", lane) for lane in s.start_lanes]
    named += [("lane of a car in traffic", car.lane) for car in s.traffic]
    for name, lane in named:
        if lane not in range(lanes):
            raise ValueError(
                f"{name} must be in 0..{lanes - 1}, got {lane}; "
                f"there are {lanes} lanes, 0 is the leftmost"
            )
    numbers = {"start_position": s.start_position, "goal": s.goal, "start_speed": s.start_speed}
    for i, car in enumerate(s.traffic):
        numbers |= {f"traffic[{i}].position": car.position, f"traffic[{i}].speed": car.speed}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {number}")
        if name.endswith("speed") and abs(number) > 1:
            raise ValueError(
                f"{name} must be in [-1, 1], got {number}; the fastest car drives one unit per "
                f"second, {UNIT:.2f} m/s"
            )
    if s.goal <= s.start_position:
        raise ValueError(
            f"goal must lie ahead of start_position, got goal {s.goal} and start_position "
            f"{s.start_position}"
        )
    if s.proximity_limit is not None and not s.traffic:
        raise ValueError(
            f"a proximity cost needs traffic, got proximity_limit {s.proximity_limit} and no cars; "
            "add cars, or set proximity_limit to None"
        )
    limits = {
        "speed_limit": s.speed_limit,
        "proximity_limit": s.proximity_limit,
        "collision_limit": s.collision_limit,
    }
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} must be > 0, got {limit}")
    for i, car in enumerate(s.traffic):
        if not 0 <= car.speed_std < math.inf:
            raise ValueError(f"traffic[{i}].speed_std must be >= 0, got {car.speed_std}")
        for seconds, command in car.steering:
            if not (0 <= seconds < math.inf and abs(command) <= 1):
                raise ValueError(
                    f"traffic[{i}].steering must hold (seconds >= 0, command in [-1, 1]), got "
                    f"({seconds}, {command})"
                )
    if s.policy_frequency < 1 or s.simulation_frequency % s.policy_frequency:
        raise ValueError(
            "simulation_frequency must be a multiple of policy_frequency, both >= 1, got "
            f"{s.simulation_frequency} and {s.policy_frequency}"
        )


SCENARIOS = {
    "BlockedRoad": Scenario(
        traffic=(
            Car(lane=0, position=0.40, speed=0.20, speed_std=0.05),
            Car(lane=1, position=0.45, speed=0.25, speed_std=0.05),
            Car(lane=2, position=0.50, speed=0.30, speed_std=0.05),
        ),
        start_lanes=(0, 2),
        start_speed=0.5,
        speed_limit=0.75,
    ),
    "LaneChange": Scenario(
        traffic=(
            # Merges from the right into the ego's lane: to the left and straight again.
            Car(lane=2, position=0.0, speed=0.528, steering=((1.0, 0.0), (0.8, -1.0), (0.8, 1.0))),
            Car(lane=0, position=1.0, speed=0.20, speed_std=0.05),
        ),
        start_lanes=(1,),
        start_speed=0.1,
        speed_limit=0.70,
    ),
}
"""The two scenarios of the paper, by the name of the task."""


def find_scenario(task: str) -> Scenario:
    """Return the scenario of a task.

    Raises:
        ValueError: If there is none of that name.
    """
    check_task(task, SCENARIOS)
    return SCENARIOS[task]


def changed(scenario: Scenario, config: Mapping[str, Any]) -> Scenario:
    """Return the scenario with some fields replaced; cars may be given as dicts.

    Raises:
        ValueError: If a name is not a field, or the result contradicts itself.
    """
    names = [field.name for field in dataclasses.fields(Scenario)]
    refuse_unknown(config, names)
    values = dict(config)
    if "traffic" in values:
        values["traffic"] = tuple(_as_car(car) for car in values["traffic"])
    if "start_lanes" in values:
        values["start_lanes"] = tuple(values["start_lanes"])
    return dataclasses.replace(scenario, **values)


def as_config(scenario: Scenario) -> dict[str, Any]:
    """Return the fields as a config of highway-env holds them: dicts and lists."""
    config = dataclasses.asdict(scenario)
    return config | {
        "traffic": list(config["traffic"]),
        "start_lanes": list(scenario.start_lanes),
    }


def refuse_unknown(config: Mapping[str, Any], names: list[str]) -> None:
    """Refuse keys of a config that mean nothing, which highway-env itself would ignore silently.

    Raises:
        ValueError: If there is one; the nearest known name is given.
    """
    for key in config:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5) or names
            raise ValueError(
                f"config has no key {key!r}; did you mean {near[0]!r}? "
                f"Known are {', '.join(sorted(names))}"
            )


def _as_car(given: Car | Mapping[str, Any]) -> Car:
    if isinstance(given, Car):
        return given
    names = [field.name for field in dataclasses.fields(Car)]
    refuse_unknown(given, names)
    missing = [name for name in ("lane", "position", "speed") if name not in given]
    if missing:
        raise ValueError(f"a car of the traffic needs {', '.join(missing)}, got {dict(given)}")
    steering = tuple((float(s), float(command)) for s, command in given.get("steering", ()))
    return Car(**{**given, "steering": steering})
