"""Costs for highway-env's own envs, which have rewards alone.

`HighwayCostWrapper` stands around any of them; `make_highway_env` makes the four registered here,
`DrivingHighway-v0`, `DrivingMerge-v0`, `DrivingRoundabout-v0` and `DrivingIntersection-v0`, with
continuous actions and flat observations. Merge and highway have a limit, as parts of the proving
ground; others are the user's to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import FlattenObservation

from pbcrl_envs.checks import needs_extra
from pbcrl_envs.driving.scenario import refuse_unknown

with needs_extra("driving"):
    from highway_env.envs import HighwayEnv, IntersectionEnv, MergeEnv, RoundaboutEnv
    from highway_env.envs.common.abstract import AbstractEnv

    from pbcrl_envs.driving.highway import make_viewer


class HighwayCostWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Report `info["cost"]`, 0 or 1 per step, on an env of highway-env with one controlled vehicle.

    A step costs 1 if at its end one of these holds, which stand in `info` as bools:

    - `proximity`: another vehicle or an obstacle is nearer than `proximity` both along and across
      the ego's heading, bumper to bumper and side to side; or the ego has crashed;
    - `speeding`: the ego is faster than `speed_limit`;
    - `off_road`: the ego's middle is off its lane.

    Args:
        env: An env of highway-env, other wrappers between them allowed.
        proximity: Gaps (along, across) in metres; None: only crashes count. The default is the
            ego's own lane, and neighbours who cut in.
        speed_limit: In m/s; None: speed is free.
        off_road: Whether leaving the road costs.

    Raises:
        TypeError: If the env is not one of highway-env.
        ValueError: If a number is out of its range, no cost is left, or the env does not control
            exactly one vehicle.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        proximity: tuple[float, float] | None = (8.0, 1.0),
        speed_limit: float | None = None,
        off_road: bool = True,
    ) -> None:
        if not isinstance(env.unwrapped, AbstractEnv):
            raise TypeError(
                "HighwayCostWrapper reads the road of an env of highway-env, got "
                f"{type(env.unwrapped).__name__}; put the cost of any other into info['cost'] "
                "yourself"
            )
        controlled = env.unwrapped.config.get("controlled_vehicles", 1)
        if controlled != 1:
            raise ValueError(
                f"the cost is that of one vehicle, got {controlled} controlled_vehicles"
            )
        if proximity is not None and not (len(proximity) == 2 and min(proximity) > 0):
            raise ValueError(
                f"proximity must be two gaps > 0 in metres (along, across), got {proximity}; "
                "None switches it off"
            )
        if speed_limit is not None and not speed_limit > 0:
            raise ValueError(f"speed_limit must be > 0 in m/s, got {speed_limit}; None: no limit")
        if proximity is None and speed_limit is None and not off_road:
            raise ValueError(
                "at least one cost must be on, got proximity None, speed_limit None and off_road "
                "False"
            )
        RecordConstructorArgs.__init__(
            self, proximity=proximity, speed_limit=speed_limit, off_road=off_road
        )
        super().__init__(env)
        self._proximity, self._speed_limit, self._off_road = proximity, speed_limit, off_road

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the env and judge where it led."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        road: Any = self.unwrapped
        ego = road.vehicle
        components = {
            "proximity": bool(ego.crashed or self._is_near(ego, road.road)),
            "speeding": self._speed_limit is not None and bool(ego.speed > self._speed_limit),
            "off_road": self._off_road and not bool(ego.on_road),
        }
        cost = float(any(components.values()))
        return obs, reward, bool(terminated), bool(truncated), info | components | {"cost": cost}

    def render(self) -> Any:
        """Draw the env, with any video driver."""
        make_viewer(self.unwrapped)
        return self.env.render()

    def _is_near(self, ego: Any, road: Any) -> bool:
        """Whether someone is within the gaps; all are taken to be aligned with the ego."""
        if self._proximity is None:
            return False
        solid = [thing for thing in road.objects if thing.solid]
        others = [thing for thing in [*road.vehicles, *solid] if thing is not ego]
        if not others:
            return False
        offset = np.array([other.position for other in others]) - ego.position  # (V, 2)
        ahead = ego.direction
        sizes = np.array([(other.LENGTH, other.WIDTH) for other in others])
        along = np.abs(offset @ ahead) - (sizes[:, 0] + ego.LENGTH) / 2
        across = np.abs(offset @ [-ahead[1], ahead[0]]) - (sizes[:, 1] + ego.WIDTH) / 2
        return bool(((along < self._proximity[0]) & (across < self._proximity[1])).any())


class _Merge(MergeEnv):  # type: ignore[misc] # highway-env has no types
    def _rewards(self, action: Any) -> Any:  # noqa: ARG002
        # highway-env asks `action in [0, 2]`, two lane changes, which an array cannot answer.
        return super()._rewards(None)


class _Roundabout(RoundaboutEnv):  # type: ignore[misc]
    def _rewards(self, action: Any) -> Any:  # noqa: ARG002
        return super()._rewards(None)


class _Known(NamedTuple):
    env: type[AbstractEnv]
    speed_limit: float
    """m/s; below what the env's own reward asks for, so that reward and cost pull apart."""
    config: dict[str, Any]


_CONTINUOUS = {"action": {"type": "ContinuousAction"}, "policy_frequency": 5}
_ENVS = {
    # Traffic as in highway-env's own fast version: the default of 50 cars makes 4 steps per second.
    "highway": _Known(HighwayEnv, 26.0, {"vehicles_count": 20, "simulation_frequency": 5}),
    "merge": _Known(_Merge, 26.0, {}),
    "roundabout": _Known(_Roundabout, 12.0, {}),
    "intersection": _Known(IntersectionEnv, 8.0, {}),
}


def make_highway_env(
    name: str,
    *,
    config: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    **costs: Any,
) -> gymnasium.Env[Any, Any]:
    """Make one of highway-env's envs with continuous actions, flat observations and a cost.

    Args:
        name: "highway", "merge", "roundabout" or "intersection".
        config: Changes to highway-env's configuration; actions are continuous and there are 5 steps
            per second unless it says otherwise.
        render_mode: None, "rgb_array" or "human".
        costs: Arguments of `HighwayCostWrapper`; `speed_limit` is by default 26 m/s on highway and
            merge, 12 in the roundabout and 8 at the intersection.

    Raises:
        ValueError: If the name or a key of the configuration is unknown, or a value impossible.
    """
    if name not in _ENVS:
        raise ValueError(f"name must be one of {', '.join(_ENVS)}, got {name!r}")
    known = _ENVS[name]
    refuse_unknown(config or {}, list(known.env.default_config()))
    config = {**_CONTINUOUS, **known.config, **(config or {})}
    costs = {"speed_limit": known.speed_limit, **costs}
    _check({**known.env.default_config(), **config}, proximity=costs.get("proximity", True))
    return FlattenObservation(HighwayCostWrapper(known.env(config, render_mode), **costs))


def _check(config: Mapping[str, Any], *, proximity: Any) -> None:
    """Refuse what highway-env accepts silently, or fails on later and elsewhere."""
    for name in ("lanes_count", "policy_frequency", "simulation_frequency"):
        if config.get(name, 1) < 1:
            raise ValueError(f"{name} must be >= 1, got {config[name]}")
    if config["simulation_frequency"] < config["policy_frequency"]:
        raise ValueError(
            "simulation_frequency must be >= policy_frequency, or nothing moves, got "
            f"{config['simulation_frequency']} and {config['policy_frequency']}"
        )
    for name in ("vehicles_count", "initial_vehicle_count"):
        if config.get(name, 0) < 0:
            raise ValueError(f"{name} must be >= 0, got {config[name]}")
    if proximity is not None and config.get("vehicles_count") == 0:
        raise ValueError(
            "a proximity cost needs traffic, got vehicles_count 0; add vehicles, or set proximity "
            "to None"
        )
