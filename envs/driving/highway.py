"""The driving tasks on highway-env: its road, vehicles, actions, configuration and renderer.

Only the motion is not highway-env's: its bicycle model has no friction, and under it the car that
merges would end off the road. Traffic that reacts is highway-env's own, by the config
`{"other_vehicles_type": "highway_env.vehicle.behavior.IDMVehicle"}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from pbcrl_envs.checks import (
    State,
    check_render_mode,
    checked_actions,
    needs_extra,
    require_render_mode,
)
from pbcrl_envs.driving.rules import (
    Cars,
    Floats,
    Obs,
    Verdict,
    advance,
    draw_start,
    judge,
    observe,
    proximity_to,
    start_cars,
)
from pbcrl_envs.driving.scenario import (
    LANE_WIDTH,
    UNIT,
    as_config,
    changed,
    find_scenario,
    refuse_unknown,
)
from pbcrl_envs.driving.twin import DrivingSimulation
from pbcrl_envs.episodes import Episodes

with needs_extra("driving"):
    from highway_env import utils
    from highway_env.envs.common.abstract import AbstractEnv
    from highway_env.envs.common.action import action_factory
    from highway_env.envs.common.graphics import EnvViewer
    from highway_env.envs.common.observation import ObservationType, observation_factory
    from highway_env.road.road import Road, RoadNetwork
    from highway_env.vehicle.graphics import VehicleGraphics
    from highway_env.vehicle.kinematics import Vehicle
    from highway_env.vehicle.objects import Landmark

_ROAD_START, _ROAD_LENGTH = -100.0, 2000.0
"""Metres: further than any car comes within an episode."""
_ONLY = np.zeros(1, dtype=np.intp)


def make_viewer(env: AbstractEnv) -> None:
    """Let an env of highway-env draw frames whatever SDL_VIDEODRIVER says.

    highway-env leaves them black with the driver "dummy", though its surfaces need no display.
    """
    if env.render_mode is not None and env.viewer is None:
        env.viewer = EnvViewer(env)
        env.viewer.enabled = True


class _PaperVehicle(Vehicle):  # type: ignore[misc] # highway-env has no types
    """A vehicle that moves as the paper's simulator has it; its size is where collisions begin."""

    LENGTH, WIDTH = 3.3, 1.5
    position: Floats
    heading: float
    speed: float

    def _move(self, acceleration: float, steering: float, dt: float) -> None:
        before = Cars(*np.array([*self.position, self.heading, self.speed]).reshape(4, 1, 1))
        after = advance(before, np.array([[acceleration]]), np.array([[steering]]), dt)
        x, y, self.heading, self.speed = (float(value.item()) for value in after)
        self.position = np.array([x, y])
        self.on_state_update()


class EgoVehicle(_PaperVehicle):
    """The car that the agent drives: commands in [-1, 1] and unit friction.

    A crash does not stop it, where highway-env's own step would take over.
    """

    def step(self, dt: float) -> None:
        """Move by one Euler step."""
        acceleration = UNIT * self.action["acceleration"] - self.speed
        self._move(acceleration, self.action["steering"], dt)


class ScriptedVehicle(_PaperVehicle):
    """A car of the paper's traffic: constant speed, and steering by a schedule."""

    schedule: Floats = np.zeros(1)
    """Steering, frame by frame; the last one is repeated."""
    frame: int = 0
    """Euler steps since the start of the episode."""

    def step(self, dt: float) -> None:
        """Move by one Euler step."""
        steering = self.schedule[min(self.frame, len(self.schedule) - 1)]
        self._move(0.0, steering, dt)
        self.frame += 1


class ScenarioObservation(ObservationType):  # type: ignore[misc]
    """The observation of the driving tasks; see `scenario.observe`. float32 (obs_dim,)."""

    def space(self) -> Box:
        """Unbounded: a car may be anywhere."""
        return Box(-np.inf, np.inf, (self.env.scenario.obs_dim,), np.float32)

    def observe(self) -> Obs:
        """See the current state."""
        obs: Obs = self.env.observe_cars()
        return obs


class DrivingEnv(AbstractEnv):  # type: ignore[misc]
    """One driving task as an env of highway-env.

    `config` takes highway-env's own keys (observation, action, other_vehicles_type, rendering) and
    the fields of `Scenario`; both stand in `env.unwrapped.config`, and `configure` or
    `reset(options={"config": ...})` changes them. Actions are (throttle, steering) in [-1, 1], and
    right is positive. Reaching the goal, a collision and leaving the frame terminate; the time
    limit is that of the registered id.

    `info` holds the `cost` of the step, 0 or 1, what it was for (`proximity`, `speeding`,
    `off_road`, `backward`, `out_of_frame`, `collision`), whether the `goal` was reached, and
    highway-env's `speed` in m/s and `crashed`.

    Args:
        config: Changes to the default configuration.
        render_mode: None, "rgb_array" or "human".
        task: "BlockedRoad" or "LaneChange".

    Raises:
        ValueError: If an argument is not one of those above, or the configuration is impossible.
    """

    metadata: dict[str, Any]
    action_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    road: Any

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        *,
        task: str = "BlockedRoad",
    ) -> None:
        check_render_mode(render_mode, modes=("rgb_array", "human"), env=f"Driving{task}")
        self.scenario = find_scenario(task)
        self._task = task
        self._verdict: Verdict | None = None  # None right after a reset
        self._finished = False
        self._acceleration: Floats = np.zeros((0, 1))
        super().__init__(dict(config or {}), render_mode)

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return highway-env's keys; the fields of the scenario come with the task."""
        config: dict[str, Any] = super().default_config()
        return config | {
            "observation": {"type": "Scenario"},
            "action": {
                "type": "ContinuousAction",
                "acceleration_range": (-1.0, 1.0),
                "steering_range": (-1.0, 1.0),
            },
            "other_vehicles_type": "pbcrl_envs.driving.highway.ScriptedVehicle",
            "screen_width": 800,
            "screen_height": 160,
            "scaling": 6.0,
            "centering_position": [0.25, 0.5],
        }

    def configure(self, config: Mapping[str, Any] | None) -> None:
        """Change the configuration; takes effect with the next reset.

        Raises:
            ValueError: If a key is unknown, or a value impossible; nothing is changed then.
        """
        config = config or {}
        names = list(as_config(self.scenario))
        refuse_unknown(config, [*names, *self.default_config()])
        action = config.get("action", self.config["action"])
        if action.get("type") not in ("ContinuousAction", "DiscreteAction"):
            raise ValueError(
                "the action type must be ContinuousAction or DiscreteAction, got "
                f"{action.get('type')!r}; the others need highway-env's own vehicles"
            )
        self.scenario = changed(self.scenario, {k: v for k, v in config.items() if k in names})
        super().configure({**config, **as_config(self.scenario)})

    @property
    def observation_names(self) -> tuple[str, ...] | None:
        """What the numbers of an observation are, (obs_dim,); None for highway-env's own kinds."""
        own = isinstance(self.observation_type, ScenarioObservation)
        return self.scenario.observation_names if own else None

    def update_metadata(self, video_real_time_ratio: int = 1) -> None:
        """Set the frames per second of films, of this env alone and in real time."""
        fps = video_real_time_ratio * self.scenario.policy_frequency
        self.metadata = {**self.metadata, "render_fps": fps}

    def define_spaces(self) -> None:
        """Make the spaces; one that did not change stays the same object, and keeps its seed."""
        before = self.action_space, self.observation_space
        if self.config["observation"] == {"type": "Scenario"}:
            self.observation_type = ScenarioObservation(self)
        else:
            self.observation_type = observation_factory(self, self.config["observation"])
        self.action_type = action_factory(self, self.config["action"])
        after = self.action_type.space(), self.observation_type.space()
        self.action_space, self.observation_space = (
            old if old == new else new for old, new in zip(before, after, strict=True)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a new episode.

        Args:
            seed: Without one the stream of random numbers runs on.
            options: None, or {"config": changes to the configuration}.

        Returns:
            The observation, and `speed` and `crashed` as info.

        Raises:
            ValueError: If `options` holds anything else, or the configuration is impossible.
        """
        refuse_unknown(options or {}, ["config"])
        result: tuple[Any, dict[str, Any]] = super().reset(seed=seed, options=options)
        return result

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Drive on by one step.

        Args:
            action: (throttle, steering), clipped to [-1, 1]; or an index, if so configured.

        Returns:
            obs, reward, terminated, False and info; see the class.

        Raises:
            ValueError: If the action has another shape, or holds NaN or an infinity.
        """
        if isinstance(self.action_space, Box):
            # In float64: highway-env would map float32 commands with float32 rounding.
            shape = self.action_space.shape
            action = checked_actions(action, shape=shape, axes=DrivingSimulation.action_axes)
        result: tuple[Any, float, bool, bool, dict[str, Any]] = super().step(action)
        return result

    def state_dict(self) -> State:
        """Return all that the future depends on: one row of the batch's `state_dict`.

        Raises:
            ValueError: If the traffic reacts; highway-env's own vehicles hold more than this.
        """
        self._require_scripted()
        twin, episodes = self._as_batch()
        episodes.begin(_ONLY)  # what it draws is overwritten
        twin.cars, twin.acceleration = self._cars(), self._acceleration
        twin.streams[0] = self.np_random
        twin.elapsed[0] = self.steps // self.scenario.frames
        episodes.finished[0] = self._finished
        return {name: np.asarray(row[0]) for name, row in episodes.state_dict(_ONLY).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`, or from a row of the batch's of the same task.

        Raises:
            ValueError: If it is not a state of this task, or the traffic reacts; the env is left as
                it was.
        """
        self._require_scripted()
        twin, episodes = self._as_batch()
        rows = {name: np.asarray(values)[None] for name, values in state.items()}
        episodes.load_state_dict(rows, _ONLY)
        self.np_random = twin.streams[0]
        self.steps = int(twin.elapsed[0]) * self.scenario.frames
        self.time = self.steps / self.config["simulation_frequency"]
        self._finished = bool(episodes.finished[0])
        self._populate(twin.cars)
        self._acceleration = twin.acceleration

    def render(self) -> NDArray[np.uint8] | None:
        """Return a frame, uint8 (height, width, 3), or show it, as the render mode has it.

        Raises:
            ValueError: If the env was made without a render mode.
        """
        require_render_mode(self.render_mode)
        make_viewer(self)
        frame: NDArray[np.uint8] | None = super().render()
        return frame

    def observe_cars(self) -> Obs:
        """Return the observation of the current state, float32 (obs_dim,)."""
        obs: Obs = observe(self.scenario, self._cars(), self._acceleration)[0]
        return obs

    # -- What highway-env calls ----------------------------------------------------------------

    def _reset(self) -> None:
        # Also a config that was written to without `configure`, as highway-env's users do.
        self.configure({name: self.config[name] for name in as_config(self.scenario)})
        lane, speeds = draw_start(self.scenario, self.np_random)
        self._verdict, self._finished = None, False
        self._acceleration = np.zeros((1 + len(speeds), 1))
        self._populate(start_cars(self.scenario, [lane], speeds[:, None]))

    def _simulate(self, action: Any = None) -> None:
        before = self._cars()
        super()._simulate(action)
        after = self._cars()
        self._acceleration = (after.speed - before.speed) * self.scenario.policy_frequency
        self._verdict = judge(self.scenario, after, before.longitudinal[0])
        self._finished = bool(self._verdict.terminated[0])
        self._show_crash(after)

    def _reward(self, action: Any) -> float:  # noqa: ARG002 - highway-env's signature
        assert self._verdict is not None
        return float(self._verdict.reward[0])

    def _is_terminated(self) -> bool:
        return self._finished

    def _is_truncated(self) -> bool:
        return False

    def _info(self, obs: Any, action: Any = None) -> dict[str, Any]:  # noqa: ARG002
        info = {"speed": self.vehicle.speed, "crashed": self.vehicle.crashed}
        verdict = self._verdict
        if verdict is None:
            return info
        flags = {"goal": verdict.goal, **verdict.components}
        return {
            **info,
            "cost": float(verdict.cost[0]),
            **{name: bool(flag[0]) for name, flag in flags.items()},
        }

    # -- The scene -----------------------------------------------------------------------------

    def _populate(self, cars: Cars) -> None:
        """Make the road, and on it the ego and the traffic where `cars` (C, 1) has them."""
        lanes = self.scenario.lanes_count
        network = RoadNetwork.straight_road_network(
            lanes, start=_ROAD_START, length=_ROAD_LENGTH, speed_limit=30
        )
        self.road = Road(
            network,
            np_random=self.np_random,
            record_history=self.config["show_trajectories"],
        )
        kind = utils.class_from_path(self.config["other_vehicles_type"])
        kinds = [EgoVehicle] + [kind] * len(self.scenario.traffic)
        for kind, x, y, heading, speed in zip(kinds, *(v[:, 0] for v in cars), strict=True):
            vehicle = kind(self.road, [x, y], float(heading), float(speed))
            # Cars pass through each other: a collision is judged by proximity, and pushes nobody.
            vehicle.collidable = False
            self.road.vehicles.append(vehicle)
        schedule = self.scenario.steering_schedule()
        ego, *traffic = self.road.vehicles
        self.vehicle = ego
        self._show_crash(cars)
        for vehicle, steering in zip(traffic, schedule, strict=True):
            if isinstance(vehicle, ScriptedVehicle):
                vehicle.schedule, vehicle.frame = steering, self.steps
                vehicle.color = VehicleGraphics.BLUE
        goal = Landmark(
            self.road,
            [self.scenario.goal * UNIT, (lanes - 1) / 2 * LANE_WIDTH],
            heading=np.pi / 2,
        )
        goal.LENGTH, goal.WIDTH = lanes * LANE_WIDTH, 0.6  # a line across the road
        self.road.objects.append(goal)

    def _show_crash(self, cars: Cars) -> None:
        crashed = bool(proximity_to(cars)[0] > self.scenario.collision_limit)
        self.vehicle.crashed = crashed
        self.vehicle.color = VehicleGraphics.RED if crashed else VehicleGraphics.EGO_COLOR

    def _cars(self) -> Cars:
        rows = [(*v.position, v.heading, v.speed) for v in self.road.vehicles]
        return Cars(*np.array(rows, dtype=np.float64).T[:, :, None])

    def _as_batch(self) -> tuple[DrivingSimulation, Episodes]:
        twin = DrivingSimulation(self._task, self.scenario, num_envs=1)
        return twin, Episodes(twin)

    def _require_scripted(self) -> None:
        if not all(isinstance(vehicle, _PaperVehicle) for vehicle in self.road.vehicles):
            raise ValueError(
                "a state holds the paper's traffic alone, got other_vehicles_type "
                f"{self.config['other_vehicles_type']!r}; reset with a seed instead"
            )
