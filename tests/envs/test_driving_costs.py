"""Costs on highway-env's own envs: by hand on an empty road, and the contract on all four."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FlattenObservation
from highway_env.envs import HighwayEnv
from highway_env.vehicle.kinematics import Vehicle
from highway_env.vehicle.objects import Landmark, Obstacle

from pbcrl_envs import check_cost_env
from pbcrl_envs.driving.costs import HighwayCostWrapper, make_highway_env

STRAIGHT = np.zeros(2, np.float32)
FEWER = {"highway": {"vehicles_count": 3}, "intersection": {"initial_vehicle_count": 3}}
names = pytest.mark.parametrize("name", ["highway", "merge", "roundabout", "intersection"])


def empty_road(**costs):
    """An ego at 25 m/s on an empty road of four lanes, 5 m long and 2 m wide."""
    config = {
        "vehicles_count": 0,
        "action": {"type": "ContinuousAction"},
        "policy_frequency": 5,
        "simulation_frequency": 5,
        "initial_lane_id": 1,
    }
    env = HighwayCostWrapper(HighwayEnv(config), **costs)
    env.reset(seed=0)
    return env, env.unwrapped.vehicle, env.unwrapped.road


def costs_of(env):
    info = env.step(STRAIGHT)[4]
    found = {name for name in ("proximity", "speeding", "off_road") if info[name]}
    assert info["cost"] == float(bool(found))
    return found


@pytest.mark.parametrize(
    ("ahead", "aside", "near"),
    [
        (12.9, 0.0, True),  # 5 m of car between the middles, 8 m of gap
        (13.1, 0.0, False),
        (-12.9, 0.0, True),
        (12.9, 2.9, True),  # 2 m of car, 1 m of gap
        (12.9, 3.1, False),
        (0.0, 4.0, False),  # alongside, in the next lane
        (6.0, -2.9, True),
    ],
)
def test_a_car_is_near_within_both_gaps_bumper_to_bumper(ahead, aside, near):
    env, ego, road = empty_road()
    road.vehicles.append(Vehicle(road, np.add(ego.position, [ahead, aside]), speed=ego.speed))
    assert costs_of(env) == ({"proximity"} if near else set())


def test_gaps_turn_with_the_ego():
    env, ego, road = empty_road(proximity=(8.0, 1.0), off_road=False)
    ego.heading, ego.speed = np.pi / 2, 0.0
    road.vehicles.append(Vehicle(road, np.add(ego.position, [0.0, 12.0]), heading=np.pi / 2))
    assert costs_of(env) == {"proximity"}
    road.vehicles[-1].position = np.add(ego.position, [12.0, 0.0])
    assert costs_of(env) == set()


def test_obstacles_count_and_marks_on_the_road_do_not():
    for kind, found in ((Obstacle, {"proximity"}), (Landmark, set())):
        env, ego, road = empty_road()
        road.objects.append(kind(road, np.add(ego.position, [14.0, 0.0])))
        assert costs_of(env) == found  # 5 m closer after the step


def test_a_crash_is_as_near_as_can_be():
    env, ego, _ = empty_road()
    ego.crashed = True
    assert costs_of(env) == {"proximity"}


def test_speed_costs_above_the_limit_only():
    assert costs_of(empty_road(speed_limit=24.9)[0]) == {"speeding"}
    assert costs_of(empty_road(speed_limit=25.1)[0]) == set()
    assert costs_of(empty_road()[0]) == set()


def test_leaving_the_road_costs_unless_switched_off():
    for off_road, found in ((True, {"off_road"}), (False, set())):
        env, ego, _ = empty_road(off_road=off_road)
        ego.position[1] = -3.0
        assert costs_of(env) == found


@names
def test_each_env_keeps_the_contract_with_continuous_actions_and_flat_observations(name):
    env = gymnasium.make(f"Driving{name.title()}-v0", config=FEWER.get(name), max_episode_steps=15)
    assert env.action_space == gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    assert len(env.observation_space.shape) == 1
    check_cost_env(env)


@names
def test_full_throttle_costs_in_each_env(name):
    env = gymnasium.make(f"Driving{name.title()}-v0", config=FEWER.get(name))
    env.reset(seed=0)
    for _ in range(30):
        *_, terminated, _, info = env.step(np.array([1.0, 0.0], np.float32))
        if info["speeding"] or terminated:
            break
    assert info["cost"] == 1
    assert info["speeding"]


def test_frames_are_drawn_whatever_the_video_driver(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = gymnasium.make("DrivingMerge-v0", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().std() > 10
    env.close()


def test_a_config_reaches_highway_env_and_costs_the_wrapper():
    env = make_highway_env("highway", config={"lanes_count": 2, **FEWER["highway"]}, speed_limit=9)
    assert isinstance(env, FlattenObservation)
    env.reset(seed=0)
    assert len(env.unwrapped.road.network.graph["0"]["1"]) == 2
    assert env.step(STRAIGHT)[4]["speeding"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"proximity": (0.0, 1.0)}, r"proximity must be two gaps > 0 .*, got \(0.0, 1.0\)"),
        ({"proximity": (8.0,)}, "proximity must be two gaps"),
        ({"speed_limit": -3.0}, "speed_limit must be > 0 in m/s, got -3.0"),
        ({"proximity": None, "off_road": False}, "at least one cost must be on"),
    ],
)
def test_costs_out_of_range_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        empty_road(**arguments)


def test_other_envs_names_and_keys_are_refused():
    with pytest.raises(TypeError, match="an env of highway-env, got CartPoleEnv"):
        HighwayCostWrapper(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match="name must be one of highway, merge"):
        make_highway_env("parking")
    with pytest.raises(ValueError, match="no key 'lane_count'; did you mean 'lanes_count'"):
        make_highway_env("highway", config={"lane_count": 2})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lanes_count": -1}, "lanes_count must be >= 1, got -1"),
        ({"vehicles_count": -3}, "vehicles_count must be >= 0, got -3"),
        ({"vehicles_count": 0}, "a proximity cost needs traffic, got vehicles_count 0"),
        ({"policy_frequency": 0}, "policy_frequency must be >= 1, got 0"),
        ({"policy_frequency": 6}, "must be >= policy_frequency, .* got 5 and 6"),
        ({"controlled_vehicles": 2}, "the cost is that of one vehicle, got 2"),
    ],
)
def test_configurations_that_highway_env_would_take_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        make_highway_env("highway", config=config)


def test_without_a_proximity_cost_the_road_may_be_empty():
    env = make_highway_env("highway", config={"vehicles_count": 0}, proximity=None)
    env.reset(seed=0)
    assert env.step(STRAIGHT)[4]["cost"] == 0
