"""The velocity tasks: robots, rewards, costs, ends, seeds, states, errors."""

from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v4 import HalfCheetahEnv
from gymnasium.envs.mujoco.humanoid_v4 import HumanoidEnv
from gymnasium.envs.mujoco.walker2d_v4 import Walker2dEnv
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import pbcrl_envs
from pbcrl_envs.robotics import SafetyVelocityEnv, SafetyVelocityVectorEnv
from pbcrl_envs.robotics.velocity_simulation import TASKS, VelocitySimulation

SIZES = {"HalfCheetah": (17, 6), "Walker2d": (17, 6), "Humanoid": (376, 17)}
SECONDS = {"HalfCheetah": 0.05, "Walker2d": 0.008, "Humanoid": 0.015}
"""Of a step."""
LARGEST = {"HalfCheetah": 1.0, "Walker2d": 1.0, "Humanoid": 0.4}
LEGS_UP = {"Walker2d": {3: -1.5, 6: -1.5}, "Humanoid": {12: -1.5, 16: -1.5}}
"""Generalised positions in which the legs are off the ground at any height."""
each_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(autouse=True)
def _mujoco_logs_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a log file in the working folder


def random_actions(task, steps, num_envs, *, seed=0):
    high = LARGEST[task]
    return np.random.default_rng(seed).uniform(-high, high, (steps, num_envs, SIZES[task][1]))


def make(task, num_envs=2, **kwargs):
    return SafetyVelocityVectorEnv(num_envs, task=task, **{"num_threads": 1, **kwargs})


def bodies(state, *, copy=0):
    """Generalised positions and velocities in a state, which has them after MuJoCo's time."""
    physics = np.atleast_2d(state["physics"])[copy]
    nq, nv = (24, 23) if state["obs"].shape[-1] == SIZES["Humanoid"][0] else (9, 9)
    return physics[1 : 1 + nq], physics[1 + nq : 1 + nq + nv]


def put(env, *, copy=0, qpos=(), qvel=()):
    """Set entries of qpos or qvel by hand: put(env, qpos={1: 0.7})."""
    state = env.state_dict()
    for field, entries in zip(bodies(state, copy=copy), (qpos, qvel), strict=True):
        for index, value in dict(entries).items():
            field[index] = value
    env.load_state_dict(state)


def still(env):
    return np.zeros(env.action_space.shape)


# -- The same robots, rewards and ends as others have ------------------------------------------


@pytest.mark.parametrize(
    ("task", "theirs"), [("HalfCheetah", HalfCheetahEnv), ("Walker2d", Walker2dEnv)]
)
def test_on_one_engine_the_planar_robots_are_gymnasiums_own_to_the_last_bit(task, theirs):
    env, other = SafetyVelocityEnv(task=task), theirs()
    ends = 0
    np.testing.assert_array_equal(env.reset(seed=3)[0], other.reset(seed=3)[0])
    for (action,) in random_actions(task, 100, 1):
        obs, reward, terminated, _, _ = env.step(action)
        other_obs, other_reward, other_terminated, _, _ = other.step(action)
        np.testing.assert_array_equal(obs, other_obs)
        assert (reward, terminated) == (other_reward, other_terminated)
        if terminated:
            ends += 1
            np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
    assert ends == {"HalfCheetah": 0, "Walker2d": 2}[task]


def test_above_ground_gymnasiums_own_humanoid_differs_by_what_its_integrator_corrects():
    """MuJoCo 4.0 corrected how Runge-Kutta turns a free joint; upstream's engine did not."""
    env, other = SafetyVelocityEnv(task="Humanoid"), HumanoidEnv()
    env.reset(seed=3)
    other.reset(seed=3)
    for (action,) in random_actions("Humanoid", 10, 1):
        other.set_state(*bodies(env.state_dict()))
        obs, reward, terminated, _, _ = env.step(action)
        other_obs, other_reward, other_terminated, _, _ = other.step(action)
        assert not obs[-84:].any()  # no contact forces
        np.testing.assert_allclose(obs, other_obs, rtol=0, atol=1e-3)
        assert terminated == other_terminated
    assert np.abs(obs - other_obs).max() > 1e-9
    assert reward == pytest.approx(
        other_reward, abs=1e-2
    )  # the centre before: a stage's, a state's


class PlainHumanoid:
    """MuJoCo 2.3.3's Runge-Kutta step of Gymnasium's humanoid, written with plain functions."""

    def __init__(self):
        xml = Path(gym.__file__).parent / "envs" / "mujoco" / "assets" / "humanoid.xml"
        self.model = mujoco.MjModel.from_xml_path(str(xml))
        self.model.geom_margin[:] = 0.0005  # of two geoms, 0.001: margins are added up now
        self.data = mujoco.MjData(self.model)

    def reset(self, qpos, qvel):
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:] = qpos, qvel
        self._forward()
        self.centre = self._centre()

    def step(self, action):
        data, model, h = self.data, self.model, self.model.opt.timestep
        data.ctrl[:] = action
        for _ in range(5):
            qpos, qvel, rates = data.qpos.copy(), data.qvel.copy(), []
            for reach in (0.5, 0.5, 1.0, None):
                self._forward()
                rates.append((data.qvel.copy(), data.qacc.copy()))
                if reach is not None:
                    self._move(qpos, qvel, reach * h, *rates[-1])
            mean = [
                sum(w * r[i] for w, r in zip((1, 2, 2, 1), rates, strict=True)) / 6 for i in (0, 1)
            ]
            self._move(qpos, qvel, h, *mean)
        mujoco.mj_rnePostConstraint(model, data)
        before, self.centre = self.centre, self._centre()
        vx, vy = (self.centre - before) / 0.015
        reward = 1.25 * vx + 5 - 0.1 * np.sum(action**2)
        parts = data.qpos[2:], data.qvel, data.cinert, data.cvel, data.qfrc_actuator, data.cfrc_ext
        cost = float(np.hypot(vx, vy) > 1.4149)
        return np.concatenate([p.ravel() for p in parts]), reward, cost, not 1 < data.qpos[2] < 2

    def _move(self, qpos, qvel, seconds, velocity, acceleration):
        moved = qpos.copy()
        mujoco.mj_integratePos(self.model, moved, velocity, seconds)
        self.data.qpos[:], self.data.qvel[:] = moved, qvel + seconds * acceleration

    def _forward(self):
        mujoco.mj_forward(self.model, self.data)
        self.data.qacc_warmstart[:] = self.data.qacc

    def _centre(self):
        mass = self.model.body_mass
        return mass @ self.data.xipos[:, :2] / mass.sum()


def test_the_humanoid_does_what_a_plain_loop_over_the_old_integrator_does():
    envs, plain = make("Humanoid", 3), PlainHumanoid()
    envs.reset(seed=0)
    put(envs, copy=1, qvel={0: 1.25, 1: -0.65})
    plain.reset(*bodies(envs.state_dict(), copy=1))
    touched, costs = 0, []
    for t, actions in enumerate(random_actions("Humanoid", 30, 3)):
        obs, rewards, terminated, _, infos = envs.step(actions)
        expected, reward, cost, fallen = plain.step(actions[1])
        scale = np.maximum(1, np.abs(expected))  # forces go to a thousand
        assert (np.abs(obs[1] - expected) / scale).max() < 1e-8
        if t > 0:  # the push came after the reset had noted where the centre was
            assert rewards[1] == pytest.approx(reward, abs=1e-8)
        assert (infos["cost"][1], terminated[1]) == (cost, fallen)
        touched += expected[-84:].any()
        costs.append(cost)
        if fallen:
            break
    assert fallen
    assert touched > 3
    assert set(costs) == {0, 1}


@pytest.mark.parametrize(
    ("task", "limit"), [("HalfCheetah", 3.2096), ("Walker2d", 2.3415), ("Humanoid", 1.4149)]
)
def test_limits_are_those_of_version_1_of_the_tasks(task, limit):
    assert TASKS[task].speed_limit == limit


@each_task
def test_a_speed_of_exactly_the_limit_costs_nothing_and_one_rounding_more_costs_one(
    task, monkeypatch
):
    def step():
        env = SafetyVelocityEnv(task=task)
        env.reset(seed=0)
        put(env, qvel={0: 2.0})
        before = env.state_dict()["location"]
        cost = env.step(still(env))[4]["cost"]
        velocity = (env.state_dict()["location"] - before) / SECONDS[task]
        return np.sqrt((velocity**2).sum()), cost

    speed, _ = step()
    for limit, cost in [(speed, 0), (np.nextafter(speed, 0), 1)]:
        monkeypatch.setitem(TASKS, task, replace(TASKS[task], speed_limit=limit))
        assert step() == (speed, cost)


@pytest.mark.parametrize(
    ("task", "axis", "velocity", "cost"),
    [
        ("HalfCheetah", 0, 5.0, 1),
        ("HalfCheetah", 0, -5.0, 0),
        ("Walker2d", 0, -5.0, 0),
        ("Humanoid", 0, -3.0, 1),
        ("Humanoid", 1, 3.0, 1),
        ("Humanoid", 2, 3.0, 0),
    ],
)
def test_planar_robots_pay_for_running_forward_and_the_humanoid_for_any_direction(
    task, axis, velocity, cost
):
    env = SafetyVelocityEnv(task=task)
    env.reset(seed=0)
    put(env, qvel={axis: velocity})
    assert env.step(still(env))[4]["cost"] == cost


@pytest.mark.parametrize(
    ("task", "positions", "fallen"),
    [
        ("HalfCheetah", {1: -0.3, 2: 3.0}, False),
        ("Walker2d", {}, False),
        ("Walker2d", {1: 0.79, **LEGS_UP["Walker2d"]}, True),
        ("Walker2d", {1: 0.81, **LEGS_UP["Walker2d"]}, False),
        ("Walker2d", {1: 1.99}, False),
        ("Walker2d", {1: 2.01}, True),
        ("Walker2d", {1: 1.9, 2: 0.98}, False),
        ("Walker2d", {1: 1.9, 2: 1.02}, True),
        ("Walker2d", {1: 1.9, 2: -1.02}, True),
        ("Humanoid", {}, False),
        ("Humanoid", {2: 0.99, **LEGS_UP["Humanoid"]}, True),
        ("Humanoid", {2: 1.01, **LEGS_UP["Humanoid"]}, False),
        ("Humanoid", {2: 1.99}, False),
        ("Humanoid", {2: 2.02}, True),
    ],
)
def test_walker_and_humanoid_fall_by_height_and_lean_and_the_cheetah_never(task, positions, fallen):
    env = SafetyVelocityEnv(task=task)
    env.reset(seed=0)
    put(env, qpos=positions, qvel=dict.fromkeys(range(3), 0.0))
    _, reward, terminated, truncated, _ = env.step(still(env))
    assert (terminated, truncated) == (fallen, False)
    if task == "Walker2d" and positions.get(1, 0) > 1.9:  # high above ground, at rest
        assert reward == pytest.approx(1, abs=0.1)  # the step in which it falls is paid as well


@each_task
def test_effort_is_priced_by_the_squared_action(task):
    price = {"HalfCheetah": 0.1, "Walker2d": 1e-3, "Humanoid": 0.1}[task]
    simulation = VelocitySimulation(task, num_envs=1, num_threads=1)
    simulation.seed([0])
    simulation.reset(np.zeros(1, dtype=np.intp))
    only = np.zeros(1, dtype=np.intp)
    start = simulation.state_dict(only)["location"]
    action = np.full((1, SIZES[task][1]), LARGEST[task] / 2)
    reward = simulation.step(only, action).reward[0]
    velocity = (simulation.state_dict(only)["location"] - start)[0, 0] / SECONDS[task]
    alive, weight = TASKS[task].alive_reward, TASKS[task].forward_weight
    assert reward == pytest.approx(weight * velocity + alive - price * (action**2).sum(), abs=1e-12)


# -- Episodes ----------------------------------------------------------------------------------


@each_task
def test_one_env_lives_through_exactly_what_its_copy_in_a_batch_does(task):
    envs, env = make(task, 3, autoreset_mode="SameStep"), SafetyVelocityEnv(task=task)
    np.testing.assert_array_equal(env.reset(seed=7)[0], envs.reset(seed=5)[0][2])
    ends = 0
    for actions in random_actions(task, 50, 3):
        batch_obs, rewards, ended, _, infos = envs.step(actions)
        obs, reward, terminated, truncated, info = env.step(actions[2])
        row = infos["final_obs"][2] if ended[2] else batch_obs[2]
        np.testing.assert_array_equal(obs, row)
        assert (reward, info) == (rewards[2], {"cost": infos["cost"][2]})
        assert (terminated, truncated) == (ended[2], False)
        if terminated:
            ends += 1
            np.testing.assert_array_equal(env.reset()[0], batch_obs[2])
    assert ends == 0 if task == "HalfCheetah" else ends > 0


@each_task
def test_results_do_not_depend_on_the_number_of_threads(task):
    one, three = (make(task, 5, num_threads=n) for n in (1, 3))
    np.testing.assert_array_equal(one.reset(seed=0)[0], three.reset(seed=0)[0])
    for actions in random_actions(task, 25, 5):
        for a, b in zip(one.step(actions)[:4], three.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(a, b)


def episodes_of(envs, task, *, steps):
    """Per copy its transitions, acting by the number of transitions so far."""
    same = envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    plan = random_actions(task, steps, envs.num_envs)
    taken, resetting = np.zeros(envs.num_envs, dtype=int), np.zeros(envs.num_envs, dtype=bool)
    lived = [[] for _ in range(envs.num_envs)]
    envs.reset(seed=1)
    while (taken < steps).any():
        actions = plan[np.minimum(taken, steps - 1), np.arange(envs.num_envs)]
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        done = terminated | truncated
        for i in range(envs.num_envs):
            if resetting[i]:
                assert (rewards[i], infos["cost"][i], done[i]) == (0, 0, False)
                lived[i].append(obs[i])
                continue
            last = infos["final_obs"][i] if same and done[i] else obs[i]
            outcome = [rewards[i], infos["cost"][i], terminated[i], truncated[i]]
            lived[i].append(np.concatenate([last, outcome]))
            if same and done[i]:
                lived[i].append(obs[i])
            taken[i] += 1
        if not same:
            resetting = done
    return lived


@each_task
def test_both_autoreset_modes_live_through_the_same_though_copies_end_apart(task):
    """NEXT_STEP spends one more step per episode, which is no transition."""
    same, late = (
        episodes_of(make(task, 3, max_episode_steps=22, autoreset_mode=mode), task, steps=60)
        for mode in ("SameStep", "NextStep")
    )
    for a, b in zip(same, late, strict=True):
        count = min(len(a), len(b))
        assert count >= 60
        for x, y in zip(a[:count], b[:count], strict=True):
            np.testing.assert_array_equal(x, y)


@each_task
def test_gymnasium_makes_both_kinds_with_a_limit_of_1000_steps(task):
    env_id = f"Safety{task}Velocity-v1"
    assert gym.spec(env_id).max_episode_steps == 1000
    env = gym.make(env_id, max_episode_steps=3)
    assert isinstance(env.unwrapped, SafetyVelocityEnv)
    env.reset(seed=0)
    assert [env.step(still(env))[3] for _ in range(3)] == [False, False, True]
    envs = gym.make_vec(env_id, 2, num_threads=2, autoreset_mode=AutoresetMode.SAME_STEP)
    assert isinstance(envs.unwrapped, SafetyVelocityVectorEnv)
    assert envs.unwrapped.max_episode_steps == 1000
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


@each_task
def test_they_keep_the_contract_of_envs_with_costs(task):
    pbcrl_envs.check_cost_env(gym.make(f"Safety{task}Velocity-v1", max_episode_steps=30))
    for mode in ("SameStep", "NextStep"):
        pbcrl_envs.check_cost_vector_env(
            make(task, 3, max_episode_steps=30, autoreset_mode=mode), seed=1
        )


@each_task
def test_spaces_hold_what_the_envs_return(task):
    envs = make(task)
    obs, infos = envs.reset(seed=0)
    obs_dim, act_dim = SIZES[task]
    assert envs.observation_space.shape == obs.shape == (2, obs_dim)
    assert envs.action_space.shape == (2, act_dim)
    assert (envs.single_action_space.high == np.float32(LARGEST[task])).all()
    assert obs in envs.observation_space
    assert infos["cost"].tolist() == [0, 0]
    obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
    assert obs in envs.observation_space
    assert obs.dtype == rewards.dtype == infos["cost"].dtype == np.float64
    assert terminated.dtype == truncated.dtype == infos["_cost"].dtype == np.bool_


def test_the_single_env_passes_gymnasiums_own_check():
    env = gym.wrappers.TimeLimit(SafetyVelocityEnv(task="Walker2d"), 5)
    with pytest.warns(UserWarning, match="minimum value is -infinity|maximum value is infinity"):
        check_env(env.unwrapped, skip_render_check=True)


@each_task
def test_actions_beyond_their_bounds_are_those_at_the_bounds(task):
    envs = make(task, 3)
    envs.reset(seed=[0, 0, 0])
    largest = np.full(SIZES[task][1], np.float32(LARGEST[task]))
    for _ in range(3):
        obs, rewards, *_ = envs.step(np.stack([largest, 2 * largest, 99 * largest]))
    np.testing.assert_array_equal(obs, obs[[0, 0, 0]])
    assert rewards.tolist() == [rewards[0]] * 3


def test_returned_arrays_stay_as_they_are_when_the_env_moves_on():
    for task in TASKS:
        envs = make(task)
        first, _ = envs.reset(seed=0)
        returned = (first, *envs.step(still(envs))[:4])
        copies = [array.copy() for array in returned]
        envs.step(still(envs) + 0.3)
        for array, copy in zip(returned, copies, strict=True):
            np.testing.assert_array_equal(array, copy)


def test_seeds_count_up_from_one_int_and_none_goes_on_with_the_streams():
    envs = make("Walker2d")
    first, _ = envs.reset(seed=8)
    second, _ = envs.reset()
    np.testing.assert_array_equal(envs.reset(seed=np.array([8, 9]))[0], first)
    np.testing.assert_array_equal(envs.reset()[0], second)
    assert (first != second).any(axis=1).all()
    np.testing.assert_array_equal(envs.reset(seed=[None, 9])[0][1], first[1])


# -- States ------------------------------------------------------------------------------------


def run(envs, actions):
    """Everything that the steps return, row by row of the batch."""
    rows = []
    for action in actions:
        obs, rewards, terminated, truncated, infos = envs.step(action)
        outcome = [rewards, infos["cost"], terminated, truncated]
        rows.append(np.concatenate([obs, np.stack(outcome, axis=1)], axis=1))
    return np.array(rows)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
@each_task
def test_going_on_from_a_state_is_not_having_stopped(task, mode):
    """In a new env of another size, in other rows, on other threads, across falls and limits."""
    actions = random_actions(task, 60, 3)
    envs = make(task, 3, max_episode_steps=40, autoreset_mode=mode)
    envs.reset(seed=0)
    run(envs, actions[:21])
    state = envs.state_dict()
    expected = run(envs, actions[21:])

    others = make(task, 4, max_episode_steps=40, autoreset_mode=mode, num_threads=2)
    others.reset(seed=77)
    others.load_state_dict(state, ids=[3, 0, 2])
    spread = np.zeros((39, 4, SIZES[task][1]))
    spread[:, [3, 0, 2]] = actions[21:]
    np.testing.assert_array_equal(run(others, spread)[:, [3, 0, 2]], expected)

    fresh = make(task, 3, max_episode_steps=40, autoreset_mode=mode)
    fresh.load_state_dict(state)
    np.testing.assert_array_equal(run(fresh, actions[21:]), expected)


@each_task
def test_a_row_of_a_batch_is_a_state_of_a_single_env_and_back(task):
    envs, env = make(task, 3), SafetyVelocityEnv(task=task)
    envs.reset(seed=0)
    run(envs, random_actions(task, 10, 3))
    env.load_state_dict({key: rows[1] for key, rows in envs.state_dict().items()})
    back = make(task, 1)
    back.load_state_dict({key: row[None] for key, row in env.state_dict().items()})
    (action,) = random_actions(task, 1, 3, seed=1)
    obs, *_ = envs.step(action)
    np.testing.assert_array_equal(env.step(action[1])[0], obs[1])
    np.testing.assert_array_equal(back.step(action[1:2])[0][0], obs[1])
    assert env.state_dict()["elapsed"] == 11
    # The random stream came along: the next episodes are the same.
    np.testing.assert_array_equal(env.reset()[0], envs.reset()[0][1])


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    envs, walker = make("HalfCheetah"), make("Walker2d")
    envs.reset(seed=0)
    walker.reset(seed=0)
    good = envs.state_dict()
    broken = good["physics"].copy()
    broken[1, 3] = np.nan
    for state, message in [
        (
            walker.state_dict(),
            "must be one of SafetyVelocityHalfCheetah, but it is of another task",
        ),
        ({**good, "physics": broken}, "'physics' of .* must hold finite numbers"),
        ({**good, "obs": good["obs"][:1]}, r"must have shape \(2, 17\), got \(1, 17\)"),
        ({**good, "elapsed": -good["elapsed"] - 1}, r"'elapsed' .* must be in \[0, inf\]"),
        ({"task": good["task"]}, "must have the keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            envs.load_state_dict(state)
        after = envs.state_dict()
        for key, rows in good.items():
            np.testing.assert_array_equal(after[key], rows)
    with pytest.raises(ValueError, match=r"different integers in \[0, 2\), got \[2\]"):
        envs.state_dict([2])


# -- Divergence --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1e12, 1e300])
@each_task
def test_a_diverged_simulation_ends_its_own_episode_and_no_other(task, value):
    envs, sound = make(task, 3), make(task, 3)
    for e in (envs, sound):
        e.reset(seed=0)
        last = e.step(still(e))[0]
    put(envs, copy=1, qvel={1: value})
    actions = random_actions(task, 3, 3)
    with pytest.warns(RuntimeWarning, match=rf"SafetyVelocity{task} diverged in env\(s\) \[1\]"):
        obs, rewards, terminated, truncated, infos = envs.step(actions[0])
    assert truncated.tolist() == infos["diverged"].tolist() == [False, True, False]
    assert not terminated.any()
    assert (rewards[1], infos["cost"][1]) == (0, 0)
    np.testing.assert_array_equal(obs[1], last[1])
    assert envs.num_diverged == 1
    envs.load_state_dict(envs.state_dict())  # what is stored in between is sound
    expected = [sound.step(a) for a in actions]
    np.testing.assert_array_equal(obs[[0, 2]], expected[0][0][[0, 2]])
    obs, rewards, terminated, truncated, infos = envs.step(actions[1])
    assert "diverged" not in infos
    assert (rewards[1], truncated[1]) == (0, False)  # it was only reset
    np.testing.assert_array_equal(obs[[0, 2]], expected[1][0][[0, 2]])
    put(envs, copy=1, qvel={1: value})
    infos = envs.step(actions[2])[4]  # without a further warning
    assert infos["diverged"].tolist() == [False, True, False]
    assert envs.num_diverged == 2


@each_task
def test_same_step_hands_out_the_last_sound_observation_of_a_diverged_episode(task):
    envs = make(task, autoreset_mode="SameStep")
    last, _ = envs.reset(seed=0)
    put(envs, copy=0, qvel={1: 1e300})
    with pytest.warns(RuntimeWarning, match="diverged"):
        obs, _, _, truncated, infos = envs.step(still(envs))
    assert truncated.tolist() == infos["_final_obs"].tolist() == [True, False]
    np.testing.assert_array_equal(infos["final_obs"][0], last[0])
    assert np.isfinite(obs).all()
    assert (obs[0] != last[0]).any()  # of the new episode


def test_a_single_env_reports_that_it_diverged():
    env = SafetyVelocityEnv(task="Humanoid")
    last, _ = env.reset(seed=0)
    put(env, qvel={0: 1e300})
    with pytest.warns(RuntimeWarning, match=r"diverged in env\(s\) \[0\]"):
        obs, reward, terminated, truncated, info = env.step(still(env))
    np.testing.assert_array_equal(obs, last)
    assert (reward, terminated, truncated) == (0, False, True)
    assert info == {"cost": 0, "diverged": True}
    assert env.num_diverged == 1
    assert np.isfinite(env.reset()[0]).all()
    assert env.step(still(env))[4] == {"cost": 0}


# -- Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_threads": -1}, "num_threads must be >= 0, got -1; 0 takes one thread per CPU"),
        ({"task": "Walker"}, "one of HalfCheetah, Walker2d, Humanoid, got 'Walker'; did you mean"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SafetyVelocityVectorEnv(**{"num_envs": 2, **kwargs})


@each_task
def test_stepping_some_copies_leaves_the_others_alone(task):
    simulation = VelocitySimulation(task, num_envs=3, num_threads=1)
    simulation.seed([0, 1, 2])
    simulation.reset(np.arange(3))
    before, state = simulation.obs.copy(), simulation.physics.state_of(np.array([0, 2]))
    simulation.step(np.array([1]), np.ones((1, SIZES[task][1])))
    np.testing.assert_array_equal(simulation.obs[[0, 2]], before[[0, 2]])
    np.testing.assert_array_equal(simulation.physics.state_of(np.array([0, 2])), state)
    assert (simulation.obs[1] != before[1]).any()
