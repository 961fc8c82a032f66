"""The driving tasks: reference values, the paper's simulator, and highway-env against the twin."""

import itertools

import gymnasium
import numpy as np
import pygame
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from scipy.special import expit

from pbcrl_envs import check_cost_env, check_cost_vector_env
from pbcrl_envs.driving import SCENARIOS, DrivingVectorEnv
from pbcrl_envs.driving.highway import DrivingEnv, ScriptedVehicle
from pbcrl_envs.driving.rules import COMPONENTS, Cars, judge, proximity_to
from tests.envs.driving import (
    LANES,
    TASKS,
    UNIT,
    Paper,
    at_random,
    constant,
    follow,
    gap_to,
    hold_speed,
    play,
    speed_of,
    speed_of_car,
)

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
BLOCKED_ROAD, LANE_CHANGE = TASKS
each_task = pytest.mark.parametrize("env_id", TASKS)
each_mode = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
IDM = "highway_env.vehicle.behavior.IDMVehicle"
SCRIPTED = "pbcrl_envs.driving.highway.ScriptedVehicle"
NO_ENDS = {"end_on_collision": False, "end_out_of_frame": False}


def judged(x, y=0.0, v=0.3, *, others=((9.0, 9.0),), task="BlockedRoad", before=0.0):
    """The verdict on one ego at (x, y) with speed v, in the paper's units and axes."""
    places = np.array([(x, y), *others])
    cars = Cars(
        longitudinal=places[:, 1:] * UNIT,
        lateral=(places[:, :1] + 0.17) * UNIT,
        heading=np.zeros((len(places), 1)),
        speed=np.full((len(places), 1), v * UNIT),
    )
    return judge(SCENARIOS[task], cars, np.array([before * UNIT]))


def components(verdict):
    return {name for name in COMPONENTS if verdict.components[name][0]}


# -- Rules -----------------------------------------------------------------------------------------


def test_progress_pays_ten_per_unit_and_the_middle_of_a_lane_next_to_nothing():
    verdict = judged(0.17, 0.1, before=0.0)
    assert verdict.reward[0] == pytest.approx(10 * 0.1 - expit(-10))
    assert verdict.cost[0] == 0


@pytest.mark.parametrize(("distance", "penalty"), [(0.0, 0.0), (0.04472, 0.5), (0.085, 1.0)])
def test_between_two_lanes_a_step_pays_one_less(distance, penalty):
    assert judged(distance).reward[0] == pytest.approx(-penalty, abs=2e-3)


@pytest.mark.parametrize(
    ("x", "y", "v", "found"),
    [
        (0.0, 0.0, 0.3, set()),
        (0.0, 0.0, 0.751, {"speeding"}),
        (0.254, 0.0, 0.3, set()),
        (0.256, 0.0, 0.3, {"off_road"}),
        (0.0, 0.0, -0.01, {"backward"}),
        (-0.701, 0.0, 0.3, {"off_road", "out_of_frame"}),
        (0.0, -0.201, 0.3, {"out_of_frame"}),
    ],
)
def test_a_step_costs_one_whatever_it_is_for(x, y, v, found):
    verdict = judged(x, y, v)
    assert components(verdict) == found
    assert verdict.cost[0] == float(bool(found))
    assert verdict.terminated[0] == ("out_of_frame" in found)


@pytest.mark.parametrize(
    ("dx", "dy", "found"),
    [
        (0.116, 0.0, set()),
        (0.114, 0.0, {"proximity"}),
        (0.0, 0.259, set()),
        (0.0, -0.257, {"proximity"}),
        (0.065, 0.0, {"proximity"}),
        (0.063, 0.0, {"proximity", "collision"}),
        (0.0, 0.143, {"proximity"}),
        (0.0, 0.141, {"proximity", "collision"}),
    ],
)
def test_a_car_is_too_near_and_collides_within_the_distances_of_the_paper(dx, dy, found):
    verdict = judged(0.0, 0.0, others=[(dx, dy)])
    assert components(verdict) == found
    assert verdict.terminated[0] == ("collision" in found)


def test_the_nearness_of_two_cars_adds_up():
    places = np.array([[0.0], [0.3], [-0.3]])
    still = np.zeros((3, 1))
    alone, both = (
        proximity_to(Cars(places[:n] * UNIT, still[:n], still[:n], still[:n]))[0] for n in (2, 3)
    )
    assert both == pytest.approx(2 * alone)


def test_the_goal_ends_an_episode_and_pays_no_more_than_the_way_to_it():
    verdict = judged(0.0, 5.01, before=4.9)
    assert verdict.terminated[0]
    assert verdict.goal[0]
    assert verdict.reward[0] == pytest.approx(10 * 0.11, abs=1e-3)
    assert not judged(0.0, 4.99).goal[0]


# -- The paper's simulator -------------------------------------------------------------------------


@each_task
@pytest.mark.parametrize(
    "driver", [at_random(1), at_random(2, steering=0.1), constant(0.55, 0.02), constant(1.0)]
)
def test_every_step_is_that_of_the_papers_simulator(env_id, driver):
    envs = gymnasium.make_vec(env_id, num_envs=20, autoreset_mode="SameStep")
    obs, _ = envs.reset(seed=0)
    speeds = np.column_stack([speed_of_car(obs, car) for car in range((obs.shape[1] - 5) // 6)])
    papers = [
        Paper(env_id, lane=1 + round(float(row[1])), speeds=v)
        for row, v in zip(obs, speeds, strict=True)
    ]
    running = np.ones(20, bool)
    while running.any():
        actions = driver(obs)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        done = terminations | truncations
        seen = np.where(done[:, None], infos.get("final_obs", obs), obs)
        for i in np.flatnonzero(running):
            reward, cost, ended = papers[i].step(actions[i, 0], -actions[i, 1])
            x, y, heading, v = papers[i].ego
            # float32 observations of the traffic's speeds are where the simulators start to differ
            assert rewards[i] == pytest.approx(reward, abs=2e-5)
            assert (infos["cost"][i], terminations[i]) == (cost, ended)
            ego = y * UNIT / 50, x / 0.17, np.pi / 2 - heading, v * UNIT / 10
            np.testing.assert_allclose(seen[i, :4], ego, atol=2e-6)
            for k, (car_x, car_y, car_heading, _) in enumerate(papers[i].cars):
                there = (car_y - y) * UNIT / 50, (car_x - x) / 0.17
                np.testing.assert_allclose(seen[i, 5 + 6 * k : 7 + 6 * k], there, atol=1e-5)
                assert seen[i, 9 + 6 * k] == pytest.approx(np.pi / 2 - car_heading, abs=1e-5)
        running &= ~done


def test_the_car_from_the_right_ends_up_in_the_middle_of_the_middle_lane():
    envs = gymnasium.make_vec(LANE_CHANGE, num_envs=1)
    obs, _ = envs.reset(seed=0)
    assert obs[0, 6] == 1  # one lane to the right
    for _ in range(20):
        obs, *_ = envs.step(constant(0.0)(obs))
    assert abs(obs[0, 6]) < 0.1
    assert obs[0, 9] == pytest.approx(0, abs=1e-6)


def test_starts_and_speeds_are_distributed_as_the_paper_has_them():
    obs, _ = gymnasium.make_vec(BLOCKED_ROAD, num_envs=4000).reset(seed=0)
    lanes, counts = np.unique(obs[:, 1], return_counts=True)
    np.testing.assert_array_equal(lanes, (-1, 1))
    assert abs(counts[0] - 2000) < 100
    np.testing.assert_allclose(speed_of(obs), 0.5, atol=1e-6)
    for car, (start, speed) in enumerate([(0.40, 0.20), (0.45, 0.25), (0.50, 0.30)]):
        np.testing.assert_allclose(gap_to(obs, car), start + 0.1, atol=1e-6)
        speeds = speed_of_car(obs, car)
        assert speeds.mean() == pytest.approx(speed, abs=0.003)
        assert speeds.std() == pytest.approx(0.05, abs=0.003)


# -- Reference values ------------------------------------------------------------------------------


def test_lane_change_at_half_speed_in_the_middle_returns_51_to_52_at_no_cost():
    for driver in (hold_speed(0.5), constant(0.5)):
        returns, costs, _ = play(LANE_CHANGE, driver)
        assert costs.max() == 0
        assert returns.min() > 50.95
        assert returns.max() < 52


def test_lane_change_at_full_throttle_returns_51_at_a_cost_of_26():
    returns, costs, _ = play(LANE_CHANGE, constant(1.0))
    np.testing.assert_array_equal(costs, 26)
    assert returns.mean() == pytest.approx(51.0, abs=0.1)


def test_blocked_road_behind_the_slow_left_car_returns_about_40_at_no_cost():
    """Twenty seconds at its speed, 0.2 +- 0.05: 40 +- 10; the goal cuts off the fastest."""
    returns, costs, _ = play(
        BLOCKED_ROAD, follow(0, 0.36), num_envs=1000, config={"start_lanes": [0]}
    )
    assert costs.max() == 0
    assert 39 < returns.mean() < 41


def test_blocked_road_behind_the_fast_right_car_reaches_the_goal_at_no_cost():
    returns, costs, lengths = play(BLOCKED_ROAD, follow(2, 0.36), config={"start_lanes": [2]})
    assert costs.max() == 0
    assert np.median(returns) == pytest.approx(51.5, abs=0.3)
    assert np.median(lengths) == pytest.approx(80, abs=3)


@each_task
def test_random_driving_without_ends_costs_45_to_95(env_id):
    _, costs, lengths = play(env_id, at_random(), config=NO_ENDS)
    assert (lengths == 100).mean() > 0.99
    assert 45 < costs.mean() < 95


@each_task
def test_driving_fast_and_straight_breaks_the_limit(env_id):
    returns, costs, _ = play(env_id, constant(1.0))
    assert costs.min() >= 2
    if env_id == BLOCKED_ROAD:
        assert returns.max() < -80  # into the car ahead


# -- Highway-env and the twin ----------------------------------------------------------------------

DRIVERS = {
    "random": at_random(3),
    "random, little steering": at_random(4, steering=0.1),
    "half speed": hold_speed(0.5),
    "full throttle": constant(1.0),
    "follow": follow(0, 0.36),
    "into the ditch": constant(0.5, 0.6),
    "backward": constant(-0.5),
    "stand": hold_speed(0.0),
    "overtake": constant(0.9, -0.03),
}


@each_task
@each_mode
def test_the_twin_is_highway_env_step_for_step_over_whole_episodes(env_id, mode):
    """Two episodes per driver; the later starts come from the same streams as well."""
    num_envs = len(DRIVERS)
    envs = gymnasium.make_vec(env_id, num_envs=num_envs, autoreset_mode=mode)
    singles = [gymnasium.make(env_id) for _ in range(num_envs)]
    obs, _ = envs.reset(seed=7)
    for i, single in enumerate(singles):
        np.testing.assert_array_equal(obs[i], single.reset(seed=7 + i)[0])
    ends, resetting, ended = set(), np.zeros(num_envs, bool), np.zeros(num_envs, int)
    for _ in range(201):
        actions = [driver(obs[i : i + 1])[0] for i, driver in enumerate(DRIVERS.values())]
        actions = np.array(actions, np.float32)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        done = terminations | truncations
        for i, single in enumerate(singles):
            if resetting[i]:
                np.testing.assert_allclose(obs[i], single.reset()[0], atol=1e-6)
                assert (rewards[i], infos["cost"][i], done[i]) == (0, 0, False)
                continue
            seen, reward, terminated, truncated, info = single.step(actions[i])
            last = infos["final_obs"][i] if done[i] and mode is SAME_STEP else obs[i]
            np.testing.assert_allclose(last, seen, atol=1e-6)
            assert rewards[i] == pytest.approx(reward, abs=1e-9)
            assert (terminations[i], truncations[i]) == (terminated, truncated)
            for name in ("cost", "goal", *COMPONENTS):
                assert infos[name][i] == info[name]
            if done[i]:
                ended[i] += 1
                ends.add(next((n for n in ("goal", *COMPONENTS[-2:]) if info[n]), "time"))
                if mode is SAME_STEP:
                    np.testing.assert_allclose(obs[i], single.reset()[0], atol=1e-6)
        resetting = done & (mode is NEXT_STEP)
    assert ends == {"goal", "collision", "out_of_frame", "time"}
    assert ended.min() >= 2 - (mode is NEXT_STEP)


@each_task
def test_both_hold_to_a_changed_scenario(env_id):
    config = {
        "lanes_count": 4,
        "start_lanes": [3],
        "goal": 2.0,
        "speed_limit": None,
        "traffic": [
            {"lane": 1, "position": 0.5, "speed": 0.3, "steering": [(0.4, 0.0), (1.0, -0.5)]}
        ],
        "simulation_frequency": 20,
        "policy_frequency": 10,
    }
    envs = gymnasium.make_vec(env_id, num_envs=2, config=config, autoreset_mode="SameStep")
    single = gymnasium.make(env_id, config=config)
    obs, _ = envs.reset(seed=1)
    np.testing.assert_array_equal(obs[0], single.reset(seed=1)[0])
    for _ in range(60):
        obs, rewards, terminations, _, infos = envs.step(constant(0.8, -0.05)(obs))
        seen, reward, terminated, _, info = single.step(np.array([0.8, -0.05]))
        last = infos["final_obs"][0] if terminated else obs[0]
        np.testing.assert_allclose(last, seen, atol=1e-6)
        assert (rewards[0], terminations[0]) == (pytest.approx(reward), terminated)
        if terminated:
            break
    assert info["goal"]
    assert not info["speeding"]


# -- Highway-env -----------------------------------------------------------------------------------


@each_task
@pytest.mark.filterwarnings("ignore:.*A Box observation space m")  # a car may be anywhere
def test_the_envs_keep_the_contracts_of_gymnasium_and_of_costs(env_id):
    check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)
    check_cost_env(gymnasium.make(env_id))
    for mode in (NEXT_STEP, SAME_STEP):
        check_cost_vector_env(gymnasium.make_vec(env_id, num_envs=3, autoreset_mode=mode))


def test_it_is_an_env_of_highway_env_with_its_road_vehicles_and_configuration():
    env = gymnasium.make(BLOCKED_ROAD, config={"goal": 4.0}).unwrapped
    env.reset(seed=0)
    lanes = env.road.network.graph["0"]["1"]
    middles = [lane.local_coordinates(env.vehicle.position)[1] / UNIT for lane in lanes]
    assert min(map(abs, middles)) == 0
    assert [lane.width for lane in lanes] == [4, 4, 4]
    np.testing.assert_allclose(np.diff(middles), -0.17)
    assert env.vehicle.lane_index in (("0", "1", 0), ("0", "1", 2))
    assert env.config["goal"] == 4.0
    env.configure({"start_lanes": [1]})
    env.reset(options={"config": {"goal": 3.0}})
    assert env.vehicle.lane_index == ("0", "1", 1)
    assert (env.scenario.goal, env.config["goal"]) == (3.0, 3.0)
    env.config["speed_limit"] = 0.1  # past `configure`, as highway-env's users do
    env.reset()
    assert env.step(np.zeros(2))[4]["speeding"]


def test_highway_envs_own_observations_and_discrete_actions_can_be_had():
    config = {"observation": {"type": "Kinematics"}, "action": {"type": "DiscreteAction"}}
    env = gymnasium.make(BLOCKED_ROAD, config=config)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (5, 5)
    assert env.action_space == gymnasium.spaces.Discrete(9)
    assert env.step(4)[4]["cost"] == 0


@pytest.mark.parametrize("throttle", [-0.5, 0.0])
def test_idm_traffic_brakes_for_a_slow_ego_and_scripted_traffic_does_not(throttle):
    slowest = {}
    for kind in (SCRIPTED, IDM):
        config = {
            "other_vehicles_type": kind,
            "lanes_count": 1,
            "start_lanes": [0],
            "start_position": 2.0,
            "start_speed": 0.1,
            "traffic": [{"lane": 0, "position": 0.5, "speed": 0.5}],
            **NO_ENDS,
        }
        env = DrivingEnv(config)
        env.reset(seed=0)
        speeds = []
        for _ in range(40):
            env.step(np.array([throttle / 10, 0]))
            speeds.append(env.road.vehicles[1].speed / UNIT)
        slowest[kind] = min(speeds)
    assert slowest[IDM] < 0.25
    assert slowest[SCRIPTED] == pytest.approx(0.5)


def test_idm_traffic_repeats_with_its_seed_and_has_the_same_speeds_as_the_scripted():
    env = gymnasium.make(BLOCKED_ROAD, config={"other_vehicles_type": IDM})
    check_cost_env(env)
    scripted = gymnasium.make(BLOCKED_ROAD)
    np.testing.assert_array_equal(env.reset(seed=3)[0], scripted.reset(seed=3)[0])


def test_the_seed_of_an_action_space_survives_a_reset():
    samples = []
    for _ in range(2):
        env = DrivingEnv()
        env.action_space.seed(0)
        env.reset(seed=0)
        samples.append(env.action_space.sample())
    np.testing.assert_array_equal(*samples)


# -- State -----------------------------------------------------------------------------------------


def run(envs, driver, steps):
    """Everything that comes out of some steps."""
    obs = None
    out = []
    for _ in range(steps):
        actions = driver(np.zeros((envs.num_envs, 1)) if obs is None else obs)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        out.append((obs, rewards, terminations, truncations, *(infos[n] for n in sorted(infos))))
    return out


def assert_same(first, second):
    for a, b in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        np.testing.assert_array_equal(a, b)


@each_task
@each_mode
def test_going_on_from_a_state_is_bit_for_bit_as_if_nothing_had_happened(env_id, mode):
    envs = gymnasium.make_vec(env_id, num_envs=5, autoreset_mode=mode)
    envs.reset(seed=2)
    for steps in range(0, 60, 20):
        run(envs, at_random(steps), 7 + steps)
        state = envs.state_dict()
        going_on = run(envs, at_random(9), 60)
        fresh = gymnasium.make_vec(env_id, num_envs=5, autoreset_mode=mode)
        fresh.load_state_dict(state)
        assert_same(run(fresh, at_random(9), 60), going_on)
        envs.load_state_dict(state)


@each_task
def test_rows_go_where_they_are_put_and_only_there(env_id):
    envs = gymnasium.make_vec(env_id, num_envs=4)
    envs.reset(seed=2)
    run(envs, at_random(0), 5)
    state = envs.state_dict([2, 0])
    before = envs.state_dict()
    envs.load_state_dict(state, ids=[1, 3])
    after = envs.state_dict()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values[[0, 2, 2, 0]])


@each_task
def test_the_single_env_takes_a_row_of_the_twin_and_gives_one_back(env_id):
    envs = gymnasium.make_vec(env_id, num_envs=2)
    envs.reset(seed=2)
    run(envs, constant(0.2, 0.01), 7)
    row = {name: values[1] for name, values in envs.state_dict().items()}
    single = DrivingEnv(task=env_id.removeprefix("Driving").removesuffix("-v0"))
    single.load_state_dict(row)
    for name, value in single.state_dict().items():
        np.testing.assert_array_equal(value, row[name])
    for _ in range(3):
        obs, rewards, *_ = envs.step(constant(0.2)(np.zeros((2, 1))))
        seen, reward, *_ = single.step(np.array([0.2, 0.0]))
        np.testing.assert_allclose(seen, obs[1], atol=1e-6)
        assert reward == pytest.approx(rewards[1], abs=1e-9)
    envs.load_state_dict(
        {name: value[None] for name, value in single.state_dict().items()}, ids=[0]
    )
    np.testing.assert_array_equal(envs.state_dict([0])["speed"], envs.state_dict([1])["speed"])
    single.reset()
    envs.reset()
    np.testing.assert_array_equal(single.state_dict()["stream"], envs.state_dict()["stream"][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("speed"), r"\['speed'\] are missing"),
        (lambda s: s.update(speed=s["speed"][..., :2]), "'speed' of .* must have shape"),
        (lambda s: s["speed"].fill(np.nan), "'speed' of .* must hold finite numbers"),
        (lambda s: s.update(elapsed=s["elapsed"] - 1), r"'elapsed' .* must be in \[0, inf\]"),
        (lambda s: s.update(finished=s["elapsed"] + 0.5), "'finished' of .* must fit into bool"),
        (lambda s: s.update(task=s["task"] + 1), "a state must be one of DrivingBlockedRoad"),
    ],
)
def test_a_broken_state_is_refused_and_changes_nothing(change, message):
    envs = gymnasium.make_vec(BLOCKED_ROAD, num_envs=2)
    envs.reset(seed=0)
    before, state = envs.state_dict(), envs.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        envs.load_state_dict(state)
    for name, values in envs.state_dict().items():
        np.testing.assert_array_equal(values, before[name])
    single = DrivingEnv()
    with pytest.raises(ValueError, match=message):
        single.load_state_dict({name: values[0] for name, values in state.items()})


def test_states_of_another_task_and_of_reacting_traffic_are_refused():
    other = gymnasium.make_vec(LANE_CHANGE, num_envs=1)
    other.reset(seed=0)
    with pytest.raises(ValueError, match="it is of another task"):
        DrivingVectorEnv(1).load_state_dict(other.state_dict())
    reacting = DrivingEnv({"other_vehicles_type": IDM})
    with pytest.raises(ValueError, match="a state holds the paper's traffic alone"):
        reacting.state_dict()


# -- Autoreset -------------------------------------------------------------------------------------


@each_mode
def test_every_episode_has_at_most_100_steps_and_each_env_its_own_clock(mode):
    envs = gymnasium.make_vec(BLOCKED_ROAD, num_envs=50, autoreset_mode=mode)
    obs, _ = envs.reset(seed=0)
    driver, clock, lengths = at_random(steering=0.1), np.zeros(50, int), []
    for _ in range(300):
        resetting = clock < 0
        obs, _, terminations, truncations, _ = envs.step(driver(obs))
        clock = np.where(resetting, 0, clock + 1)
        np.testing.assert_array_equal(truncations, clock == 100)
        done = terminations | truncations
        lengths += clock[done].tolist()
        clock[done] = -1 if mode is NEXT_STEP else 0
    assert max(lengths) == 100
    assert min(lengths) < 20


# -- Pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["dummy", "offscreen"])
def test_frames_show_the_road_without_a_display(driver, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", driver)
    env = gymnasium.make(LANE_CHANGE, render_mode="rgb_array")
    envs = gymnasium.make_vec(LANE_CHANGE, num_envs=2, render_mode="rgb_array")
    env.reset(seed=0)
    envs.reset(seed=0)
    start = env.render()
    assert (start.shape, start.dtype) == ((160, 800, 3), np.uint8)
    green, blue, white = (50, 200, 0), (100, 200, 255), (255, 255, 255)
    assert {green, blue, white} <= set(map(tuple, start.reshape(-1, 3).tolist()))
    for _ in range(5):
        env.step(np.array([0.5, 0.0]))
        envs.step(np.array([[0.5, 0.0], [1.0, 0.0]]))
    frame, (same, other) = env.render(), envs.render()
    np.testing.assert_array_equal(same, frame)
    assert not np.array_equal(frame, start)
    assert not np.array_equal(other, frame)
    env.close()
    envs.close()


def test_a_crashed_ego_turns_red():
    env = gymnasium.make(BLOCKED_ROAD, render_mode="rgb_array")
    env.reset(seed=0)
    red = 0
    for _ in range(7):
        assert red == 0
        terminated = env.step(np.array([1.0, 0.0]))[2]
        red = (env.render() == (255, 100, 100)).all(axis=2).sum()
        if terminated:
            break
    assert red > 50
    env.close()


def test_a_window_shows_the_episode_and_needs_no_asking(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = DrivingEnv(render_mode="human")
    env.reset(seed=0)
    before = pygame.surfarray.array3d(env.viewer.screen)
    assert before.std() > 10
    for _ in range(4):
        env.step(np.array([0.5, 0.0]))
    assert not np.array_equal(pygame.surfarray.array3d(env.viewer.screen), before)
    env.close()


@pytest.mark.parametrize("env", [DrivingEnv(), DrivingVectorEnv(1)])
def test_nothing_is_drawn_without_a_render_mode(env):
    env.reset(seed=0)
    with pytest.raises(ValueError, match="render_mode asks for, but it is None"):
        env.render()


# -- Refusals --------------------------------------------------------------------------------------

CAR = {"lane": 0, "position": 0.5, "speed": 0.2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lanes_count": -1}, "lanes_count must be >= 1, got -1"),
        ({"lanes_count": 2.5}, "lanes_count must be a whole number, got 2.5"),
        ({"lanes_count": 2}, r"start_lanes must be in 0\.\.1, got 2"),
        ({"start_lanes": []}, "start_lanes must name at least one lane"),
        ({"goal": -0.5}, "goal must lie ahead of start_position, got goal -0.5"),
        ({"goal": np.nan}, "goal must be finite"),
        ({"start_position": 6.0}, "goal must lie ahead of start_position"),
        ({"traffic": []}, "a proximity cost needs traffic, got proximity_limit 0.025 and no cars"),
        ({"traffic": [{**CAR, "lane": 3}]}, r"lane of a car in traffic must be in 0\.\.2, got 3"),
        ({"traffic": [{**CAR, "sped": 1}]}, "no key 'sped'; did you mean 'speed'"),
        ({"traffic": [{"lane": 0}]}, "a car of the traffic needs position, speed"),
        ({"traffic": [{**CAR, "speed": 2.0}]}, r"traffic\[0\].speed must be in \[-1, 1\], got 2"),
        ({"traffic": [{**CAR, "speed_std": -1}]}, r"traffic\[0\].speed_std must be >= 0, got -1"),
        ({"traffic": [{**CAR, "steering": [(1, 2)]}]}, r"steering must hold .*, got \(1.0, 2.0\)"),
        ({"start_speed": 1.5}, r"start_speed must be in \[-1, 1\], got 1.5"),
        ({"speed_limit": 0.0}, "speed_limit must be > 0, got 0"),
        ({"proximity_limit": -0.1}, "proximity_limit must be > 0, got -0.1"),
        ({"simulation_frequency": 10.0}, "simulation_frequency must be a whole number, got 10.0"),
        ({"simulation_frequency": 7}, "must be a multiple of policy_frequency, .* got 7 and 5"),
        ({"speed_limits": 1}, "config has no key 'speed_limits'; did you mean 'speed_limit'"),
    ],
)
def test_impossible_configurations_are_refused_by_name(config, message):
    for env in (DrivingEnv, lambda config: DrivingVectorEnv(1, config=config)):
        with pytest.raises(ValueError, match=message):
            env(config=config)
    env = DrivingEnv()
    before = dict(env.config)
    with pytest.raises(ValueError, match=message):
        env.reset(options={"config": config})
    assert env.config == before


def test_without_traffic_and_proximity_cost_the_road_is_free():
    returns, costs, _ = play(
        BLOCKED_ROAD, hold_speed(0.7), num_envs=2, config={"traffic": [], "proximity_limit": None}
    )
    assert costs.max() == 0
    assert returns.min() > 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"num_envs": 1, "max_episode_steps": 0}, "max_episode_steps must be at least 1, got 0"),
        ({"num_envs": 1, "autoreset_mode": "Disabled"}, "one of NextStep, SameStep"),
        ({"num_envs": 1, "render_mode": "human"}, "must be one of 'rgb_array', None, got 'human'"),
        ({"num_envs": 1, "task": "Parking"}, "task must be one of BlockedRoad, LaneChange"),
        (
            {"num_envs": 1, "config": {"other_vehicles_type": IDM}},
            "config has no key 'other_vehicles_type'",
        ),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        DrivingVectorEnv(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"render_mode": "ansi"}, "must be one of 'rgb_array', 'human', None, got 'ansi'"),
        ({"task": "Parking"}, "task must be one of"),
        ({"config": {"action": {"type": "DiscreteMetaAction"}}}, "got 'DiscreteMetaAction'"),
    ],
)
def test_the_single_env_refuses_the_same(arguments, message):
    with pytest.raises(ValueError, match=message):
        DrivingEnv(**arguments)


def test_broken_actions_and_options_are_refused():
    env, envs = DrivingEnv(), DrivingVectorEnv(2)
    env.reset(seed=0)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="actions must be finite, got 1 NaN or infinite of 2"):
        env.step(np.array([np.nan, 0.0]))
    with pytest.raises(ValueError, match="actions must be finite, got 4 NaN or infinite of 4"):
        envs.step(np.full((2, 2), np.inf))
    with pytest.raises(ValueError, match=r"each action is \(throttle, steering\)"):
        envs.step(np.zeros(2))
    with pytest.raises(ValueError, match="no key 'goal'"):
        env.reset(options={"goal": 3})
    with pytest.raises(ValueError, match=r"only reset option .* is stagger"):
        envs.reset(options={"goal": 3})


def test_the_default_traffic_is_scripted():
    env = DrivingEnv()
    assert all(isinstance(car, ScriptedVehicle) for car in env.road.vehicles[1:])
    assert len(LANES) == env.config["lanes_count"]
