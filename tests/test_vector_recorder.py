"""Recording of vector envs without any cost model."""

import copy
import doctest

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip(
    "gymnasium", "1.1", reason="vector envs say when they reset themselves since Gymnasium 1.1"
)

from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

import pbcrl.vector_recorder
from pbcrl import (
    PreferenceCostVectorWrapper,
    PreferenceCostWrapper,
    RecordTrajectories,
    Trajectory,
    finished_trajectories,
)
from pbcrl.errors import MissingCostError

from .counters import NOT_REPORTED, Counter, assert_same, linear_model
from .every_space import OBS_SPACES, Discrete, Wander

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
LENGTHS = [3, 1, 4]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (20, len(LENGTHS), 1)).astype(np.float32)


def counters(mode, **options):
    make = [lambda n=n: TimeLimit(Counter(99, **options), n) for n in LENGTHS]
    return SyncVectorEnv(make, autoreset_mode=mode)


# By step of the episode, as a task writes them down.
MIXED_COSTS = {
    "int, then float": {1: 0, 2: 0.7, 3: 1, 4: 0.25},
    "bool, then float": {1: False, 2: 0.7, 3: np.True_, 4: 0.25},
    "np.int64, then np.float32": {1: np.int64(0), 2: np.float32(0.7), 3: 1, 4: np.float32(0.25)},
    "float32, then float64": {1: np.float32(0.1), 2: 0.7, 3: 1e-30, 4: np.float64(0.25)},
    "small, then large": {1: np.int8(1), 2: np.int64(300), 3: np.uint8(255), 4: np.float16(0.5)},
    "array, then float": {1: np.array(0), 2: 0.7, 3: np.array(True), 4: 0.25},
}


def by_hand(row, mode):
    """The episodes of one env, stepped alone with the actions that the vector env gives it."""
    env, found, rows = TimeLimit(Counter(99), LENGTHS[row]), [], []
    obs, resets = env.reset(seed=row)[0], False
    for action in ACTIONS[:, row]:
        if resets:  # a NEXT_STEP env spends an action on it
            obs, resets = env.reset()[0], False
            continue
        next_obs, reward, terminated, truncated, info = env.step(action)
        rows.append((obs, action, info["cost"], reward))
        obs = next_obs
        if terminated or truncated:
            found.append(Trajectory(*map(np.array, zip(*rows, strict=True)), terminated, next_obs))
            rows, resets = [], mode is AutoresetMode.NEXT_STEP
            if not resets:
                obs = env.reset()[0]
    return found


@each_mode
def test_the_episodes_are_those_of_a_loop_by_hand(mode):
    envs = RecordTrajectories(counters(mode))
    envs.reset(seed=0)
    found = [[] for _ in LENGTHS]
    for actions in ACTIONS:
        *_, terminated, truncated, infos = envs.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        assert finished_trajectories(infos) == [infos["trajectory"][row] for row in ended]
        for row in ended:
            found[row].append(infos["trajectory"][row])
    for row in range(len(LENGTHS)):
        expected = by_hand(row, mode)
        assert len(expected) >= 4
        assert_same(found[row], expected)
        for one, other in zip(found[row], expected, strict=True):
            np.testing.assert_array_equal(one.rewards, other.rewards)
            np.testing.assert_array_equal(one.final_obs, other.final_obs)
            assert one.terminated is other.terminated is False


@each_mode
def test_what_the_envs_report_stays_as_it_is_and_the_true_cost_stands_beside(mode):
    """Env 1 ends in every step: SAME_STEP moves its cost to final_info, NEXT_STEP resets it."""
    bare, envs = counters(mode), RecordTrajectories(counters(mode))
    bare.reset(seed=0)
    envs.reset(seed=0)
    for t, actions in enumerate(ACTIONS):
        *expected, expected_infos = bare.step(actions)
        *found, infos = envs.step(actions)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        own = {k: v for k, v in infos.items() if "true_cost" not in k and "trajectory" not in k}
        assert own.keys() == expected_infos.keys()
        np.testing.assert_array_equal(own.get("cost"), expected_infos.get("cost"))
        resets = mode is AutoresetMode.NEXT_STEP and t % 2 == 1
        cost = 0.0 if resets else abs(actions[1, 0])
        assert infos["true_cost"].dtype == np.float32
        assert (infos["true_cost"][1], infos["_true_cost"][1]) == (cost, not resets)


@each_mode
def test_envs_without_a_cost_are_recorded_without_one(mode):
    envs = RecordTrajectories(counters(mode, cost=NOT_REPORTED))
    envs.reset(seed=0)
    *_, infos = envs.step(ACTIONS[0])
    assert "true_cost" not in infos
    assert [one.costs for one in finished_trajectories(infos)] == [None]


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("costs", MIXED_COSTS.values(), ids=MIXED_COSTS)
@each_mode
def test_costs_are_exact_whatever_type_the_env_that_comes_first_reports(make, costs, mode):
    """Gymnasium alone makes 0 of 0.7 where another env reports the int 0 before it."""
    single = [lambda n=n: TimeLimit(Counter(99, cost=costs), n) for n in LENGTHS]
    envs = RecordTrajectories(make(single, autoreset_mode=mode))
    envs.reset(seed=0)
    step, episodes, resets = np.zeros(len(LENGTHS), int), 0, np.zeros(len(LENGTHS), bool)
    while episodes < 100:
        *_, terminated, truncated, infos = envs.step(ACTIONS[0])
        step = np.where(resets, 0, step + 1)
        expected = [float(costs.get(t, 0)) for t in step]
        np.testing.assert_array_equal(infos["true_cost"], np.float32(expected))
        done = terminated | truncated
        for row in np.flatnonzero(done):
            whole = [float(costs[t]) for t in range(1, LENGTHS[row] + 1)]
            np.testing.assert_array_equal(infos["trajectory"][row].costs, np.float32(whole))
            episodes += 1
        if mode is AutoresetMode.NEXT_STEP:
            resets = done
        else:
            step[done] = 0
        reported = infos.get("_cost", np.zeros(len(LENGTHS), bool)) & ~done
        np.testing.assert_array_equal(
            infos.get("cost", step)[reported], np.array(expected)[reported]
        )
    envs.close()


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("silent", [0, 1, 2])
@each_mode
def test_one_env_that_never_reports_a_cost_is_refused(make, silent, mode):
    single = [
        lambda i=i: TimeLimit(Counter(99, cost=NOT_REPORTED if i == silent else {1: 0}), 4)
        for i in range(3)
    ]
    envs = RecordTrajectories(make(single, autoreset_mode=mode))
    envs.reset(seed=0)
    with pytest.raises(MissingCostError, match=rf"env\(s\) \[{silent}\] of 3 reported none"):
        envs.step(ACTIONS[0])
    envs.close()


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
@each_mode
def test_an_env_that_reports_from_its_second_step_on_is_refused(make, mode):
    single = [lambda i=i: Counter(4, cost={1: None} if i == 0 else {1: 0}) for i in range(2)]
    envs = RecordTrajectories(make(single, autoreset_mode=mode))
    envs.reset(seed=0)
    with pytest.raises(MissingCostError, match=r"env\(s\) \[0\] of 2 reported none"):
        envs.step(ACTIONS[0, :2])
    envs.close()


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("bad", [None, "0.7", np.array([0.7]), 1 + 0j], ids=str)
@pytest.mark.parametrize("bad_row", [0, 1])
def test_a_cost_that_is_no_number_is_refused_whichever_env_reports_it(make, bad, bad_row):
    """Counter reports no cost for None, so the entry is set by a wrapper."""
    single = [lambda i=i: Reports(Counter(4), bad if i == bad_row else 0.5) for i in range(2)]
    envs = RecordTrajectories(make(single))
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="must be one number per env and step"):
        envs.step(ACTIONS[0, :2])
    envs.reset(seed=0)  # the envs are still there
    envs.close()


class Reports(gym.Wrapper):
    """Reports one value as the cost of every step."""

    def __init__(self, env, cost):
        super().__init__(env)
        self.cost = cost

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | {"cost": self.cost}


class WithOwnInfos(SyncVectorEnv):
    """Batches infos by itself, and takes the type of the first."""

    def step(self, actions):
        answers = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        obs, rewards, terminated, truncated, infos = map(list, zip(*answers, strict=True))
        costs = np.array([infos[0]["cost"]] * self.num_envs)
        for i, info in enumerate(infos):
            costs[i] = info["cost"]
        mask = np.ones(self.num_envs, bool)
        flags = np.array(terminated), np.array(truncated)
        return np.stack(obs), np.array(rewards), *flags, {"cost": costs, "_cost": mask}


@pytest.mark.parametrize(
    ("first", "dtype"), [(0, "int64"), (True, "bool"), (np.float16(0), "float16")]
)
def test_integers_that_another_vector_env_made_of_single_costs_are_refused(first, dtype):
    """There the true value is gone: 0 may have been 0.7."""
    single = [lambda i=i: Reports(Counter(4), 0.7 if i else first) for i in range(2)]
    envs = RecordTrajectories(WithOwnInfos(single))
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=rf"may have been cut off.* {dtype}.*float\(cost\)"):
        envs.step(ACTIONS[0, :2])


@each_mode
def test_where_costs_are_needed_envs_without_any_are_refused_at_their_first_step(mode):
    envs = RecordTrajectories(counters(mode, cost=NOT_REPORTED), needs_cost=True)
    envs.reset(seed=0)
    with pytest.raises(
        MissingCostError, match=r"needed here, but .* reports none of this one; put a number in"
    ):
        envs.step(ACTIONS[0])
    with pytest.raises(ResetNeeded):
        envs.step(ACTIONS[0])


@each_mode
def test_where_costs_are_needed_a_step_that_only_resets_needs_none(mode):
    envs = SyncVectorEnv([lambda: Counter(1), lambda: Counter(1)], autoreset_mode=mode)
    envs = RecordTrajectories(envs, needs_cost=True)
    envs.reset(seed=0)
    for _ in range(3):
        *_, infos = envs.step(np.ones((2, 1), np.float32))
    assert infos["true_cost"].tolist() == [1, 1]


@each_mode
def test_a_recorder_of_the_same_envs_goes_on_exactly(mode):
    whole, singles = RecordTrajectories(counters(mode)), counters(mode)
    before, after = RecordTrajectories(singles), RecordTrajectories(singles)
    whole.reset(seed=0)
    before.reset(seed=0)
    expected = [one for a in ACTIONS for one in finished_trajectories(whole.step(a)[-1])]
    found = [one for a in ACTIONS[:9] for one in finished_trajectories(before.step(a)[-1])]
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    found += [one for a in ACTIONS[9:] for one in finished_trajectories(after.step(a)[-1])]
    assert len(expected) > 5
    assert_same(found, expected)


def test_what_a_step_is_going_to_record_can_be_seen_before():
    envs = RecordTrajectories(counters(AutoresetMode.NEXT_STEP))
    with pytest.raises(ResetNeeded):
        envs.peek(ACTIONS[0])
    envs.reset(seed=0)
    assert envs.next_step.tolist() == [1, 1, 1]
    with pytest.warns(UserWarning, match="clipped"):
        obs, executed = envs.peek(np.full((3, 1), 5.0))
    assert executed.tolist() == [[1], [1], [1]]
    (episode,) = finished_trajectories(envs.step(np.full((3, 1), 5.0))[-1])  # env 1
    np.testing.assert_array_equal(episode.obs, obs[1:2])
    np.testing.assert_array_equal(episode.actions, executed[1:2])
    assert envs.next_step.tolist() == [2, 0, 2]


def test_observations_are_recorded_in_the_shape_that_is_asked_for():
    space = OBS_SPACES["Box, two axes"]
    shapes = []
    for obs_shape in (None, (3, 2), (6,)):
        envs = SyncVectorEnv([lambda: Wander(space, Discrete(2), 1)])
        envs = RecordTrajectories(envs, obs_shape=obs_shape)
        envs.reset(seed=0)
        (episode,) = finished_trajectories(envs.step(np.array([0]))[-1])
        shapes.append(episode.obs.shape)
    assert shapes == [(1, 6), (1, 3, 2), (1, 6)]
    with pytest.raises(ValueError, match=r"shape is \(6,\), got obs_shape=\(5,\); leave it out"):
        RecordTrajectories(envs.env, obs_shape=(5,))


@pytest.mark.parametrize(
    "wrap",
    [RecordTrajectories, lambda envs: PreferenceCostVectorWrapper(envs, linear_model())],
    ids=["recorded", "scored"],
)
def test_envs_that_are_recorded_already_are_refused(wrap):
    with pytest.raises(ValueError, match="but one inside it records already"):
        RecordTrajectories(wrap(counters(AutoresetMode.SAME_STEP)))


@each_mode
def test_single_envs_that_are_recorded_already_are_found_out_when_an_episode_ends(mode):
    envs = [lambda: PreferenceCostWrapper(Counter(1), linear_model())]
    envs = RecordTrajectories(SyncVectorEnv(envs, autoreset_mode=mode))
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="one inside it records already"):
        envs.step(np.zeros((1, 1), np.float32))


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(pbcrl.vector_recorder)
    assert (result.failed, result.attempted > 0) == (0, True)
