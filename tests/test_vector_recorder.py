"""Recording of vector envs without any cost model."""

import copy
import doctest

import numpy as np
import pytest

pytest.importorskip(
    "gymnasium", "1.1", reason="vector envs say when they reset themselves since Gymnasium 1.1"
)

from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
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


@each_mode
def test_where_costs_are_needed_envs_without_any_are_refused_at_their_first_step(mode):
    envs = RecordTrajectories(counters(mode, cost=NOT_REPORTED), needs_cost=True)
    envs.reset(seed=0)
    with pytest.raises(
        MissingCostError, match=r"needed here, but .* reports none; put a number in"
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
