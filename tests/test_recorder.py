import numpy as np
import pytest

from pbcrl.errors import MissingCostError
from pbcrl.recorder import TrajectoryRecorder, discarded_envs, step_costs

from .counters import assert_same


def test_step_costs_without_any_cost_is_none():
    assert step_costs({}, 2, np.array([False, False])) is None


def test_step_costs_of_a_batched_env_are_its_own():
    costs = step_costs({"cost": np.array([1.0, 2.0])}, 2, np.array([True, False]))
    np.testing.assert_array_equal(costs, [1.0, 2.0])


def test_step_costs_of_an_ended_episode_come_from_final_info():
    infos = {
        "cost": np.array([7.0, 2.0]),  # 7 is what the reset reported
        "_cost": np.array([True, True]),
        "final_info": {"cost": np.array([1.0, 0.0]), "_cost": np.array([True, False])},
        "_final_info": np.array([True, False]),
    }
    np.testing.assert_array_equal(step_costs(infos, 2, np.array([True, False])), [1.0, 2.0])


def test_step_costs_of_reset_rows_are_zero_and_need_no_report():
    infos = {"cost": np.array([5.0, 2.0]), "_cost": np.array([False, True])}
    done, valid = np.array([False, False]), np.array([False, True])
    np.testing.assert_array_equal(step_costs(infos, 2, done, valid=valid), [0.0, 2.0])
    with pytest.raises(MissingCostError, match=r"env\(s\) \[0\] .* mark the reset steps"):
        step_costs(infos, 2, done)


def test_step_costs_are_zero_where_all_envs_reset():
    no = np.array([False, False])
    np.testing.assert_array_equal(step_costs({}, 2, no, valid=no), [0.0, 0.0])


NEITHER, BOTH = np.array([False, False]), np.array([True, True])


def row(t):
    """obs, actions, costs of two envs at step t."""
    return np.full((2, 3), t), np.full((2, 1), -t), np.array([t, 10.0 * t])


def test_the_recorder_gives_each_env_its_own_episode():
    recorder = TrajectoryRecorder(2)
    assert recorder.record(*row(0), NEITHER) == []
    (second,) = recorder.record(*row(1), np.array([False, True]))
    np.testing.assert_array_equal(second.costs, [0.0, 10.0])
    first, again = recorder.record(*row(2), BOTH)
    np.testing.assert_array_equal(first.costs, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(first.actions[:, 0], [0, -1, -2])
    np.testing.assert_array_equal(again.obs, [[2, 2, 2]])


def test_the_recorder_skips_rows_that_are_no_steps():
    recorder = TrajectoryRecorder(2)
    recorder.record(*row(0), NEITHER, valid=np.array([True, False]))
    recorder.record(*row(1)[:2], None, NEITHER, valid=NEITHER)  # no step, so no cost is missing
    np.testing.assert_array_equal(recorder.lengths, [1, 0])
    first, second = recorder.record(*row(2), BOTH)
    np.testing.assert_array_equal(first.costs, [0.0, 2.0])
    np.testing.assert_array_equal(second.costs, [20.0])


def test_a_handed_out_trajectory_is_not_overwritten():
    recorder = TrajectoryRecorder(2)
    first, _ = recorder.record(*row(1), BOTH)
    recorder.record(*row(2), NEITHER)
    np.testing.assert_array_equal(first.obs, [[1, 1, 1]])


def test_the_recorder_reads_numbers_as_done_flags():
    recorder = TrajectoryRecorder(2)
    (only,) = recorder.record(*row(3), np.array([0.0, 1.0]))
    np.testing.assert_array_equal(only.costs, [30.0])


def test_the_recorder_refuses_costs_that_vanish_and_keeps_what_it_has():
    recorder = TrajectoryRecorder(2)
    recorder.record(*row(0), NEITHER)
    with pytest.raises(MissingCostError, match="missing at this step and reported at the one bef"):
        recorder.record(*row(1)[:2], None, NEITHER)
    np.testing.assert_array_equal(recorder.lengths, [1, 1])
    recorder.drop_unfinished()
    recorder.record(*row(1)[:2], None, NEITHER)
    with pytest.raises(MissingCostError, match="reported at this step and missing at the one bef"):
        recorder.record(*row(2), NEITHER)


def test_the_recorder_refuses_rows_that_numpy_would_spread():
    recorder = TrajectoryRecorder(2)
    obs, actions, costs = row(0)
    with pytest.raises(ValueError, match=r"actions .* shape \(2, 1\), .* got \w+ \(2,\)"):
        recorder.record(obs, actions[:, 0], costs, NEITHER)
    with pytest.raises(ValueError, match=r"costs .* shape \(2,\), .* got \w+ \(2, 1\)"):
        recorder.record(obs, actions, costs[:, None], NEITHER)
    recorder.record(obs, actions, costs, NEITHER)
    with pytest.raises(ValueError, match=r"obs .* shape \(2, 3\), .* got \w+ \(2, 1\)"):
        recorder.record(obs[:, :1], actions, costs, NEITHER)
    with pytest.raises(ValueError, match=r"num_envs must lie in \[1, inf\), got 0"):
        TrajectoryRecorder(0)


def test_an_episode_of_100_000_steps_is_told_once_to_have_no_end():
    recorder = TrajectoryRecorder(1)
    step = np.zeros((1, 1)), np.zeros((1, 1)), None, np.array([False])
    for _ in range(100_000):
        recorder.record(*step)
    with pytest.warns(RuntimeWarning, match="gone on for 100000 steps, .*give the env a"):
        recorder.record(*step)
    recorder.drop_unfinished()
    for _ in range(100_001):  # warnings are errors here: there is no second one
        recorder.record(*step)


def test_negative_costs_of_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"must be >= 0, got info\['cost'\] = -3.0; pay for"):
        step_costs({"cost": np.array([1.0, -3.0])}, 2, NEITHER)


def test_an_episode_that_a_diverged_simulation_cut_short_is_dropped():
    recorder = TrajectoryRecorder(2)
    recorder.record(*row(0), NEITHER)
    (second,) = recorder.record(*row(1), BOTH, discarded=np.array([True, False]))
    np.testing.assert_array_equal(second.costs, [0.0, 10.0])
    first, _ = recorder.record(*row(2), BOTH)
    np.testing.assert_array_equal(first.costs, [2.0])  # nothing is left of the dropped one


def test_an_episode_that_goes_on_is_whole_though_it_was_marked_while_another_ended():
    recorder = TrajectoryRecorder(2)
    recorder.record(*row(0), NEITHER)
    recorder.record(*row(1), np.array([True, False]), discarded=np.array([False, True]))
    _, second = recorder.record(*row(2), BOTH)
    assert len(second) == 3


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ({}, [False, False]),
        ({"diverged": np.array([False, True])}, [False, True]),
        ({"diverged": np.array([True, True]), "_diverged": np.array([False, True])}, [False, True]),
        ({"final_info": {"diverged": np.array([True, False])}}, [True, False]),
    ],
)
def test_discarded_envs_are_found_wherever_the_infos_tell_of_them(infos, expected):
    assert discarded_envs(infos, 2).tolist() == expected


def test_a_single_env_tells_of_divergence_by_a_flag():
    assert discarded_envs({"diverged": True}, 1).tolist() == [True]
    assert discarded_envs({"cost": 1.0}, 1).tolist() == [False]


def test_a_recorder_goes_on_where_another_was():
    rng = np.random.default_rng(0)
    steps = [
        (rng.normal(size=(3, 2)), rng.normal(size=(3, 1)), rng.random(3), rng.random(3) < 0.02)
        for _ in range(400)  # episodes longer than the first capacity
    ]
    whole, first, second = (TrajectoryRecorder(3) for _ in range(3))
    expected = [episode for step in steps for episode in whole.record(*step)]
    found = [episode for step in steps[:150] for episode in first.record(*step)]
    second.load_state_dict(first.state_dict())
    found += [episode for step in steps[150:] for episode in second.record(*step)]
    assert len(expected) > 10
    assert_same(found, expected)
    assert second.lengths.tolist() == whole.lengths.tolist()


def test_a_recorder_that_saw_no_step_yet_can_be_continued():
    recorder = TrajectoryRecorder(2)
    recorder.load_state_dict(TrajectoryRecorder(2).state_dict())
    rows = np.zeros((2, 5)), np.zeros((2, 1)), None, np.array([True, False])
    assert [len(episode) for episode in recorder.record(*rows)] == [1]


def test_the_state_of_another_number_of_envs_is_refused():
    with pytest.raises(ValueError, match="as many envs as it has, 2, got one for 3"):
        TrajectoryRecorder(2).load_state_dict(TrajectoryRecorder(3).state_dict())


def test_integers_that_gymnasium_made_of_single_costs_are_refused_and_those_of_a_batch_are_not():
    done = np.zeros(2, np.bool_)
    ones = np.ones(2, np.bool_)
    for costs in (np.array([0, 1]), np.array([False, True]), np.array([0, 1], np.float16)):
        assert step_costs({"cost": costs}, 2, done).tolist() == [0, 1]
        assert step_costs({"cost": costs[:1], "_cost": ones[:1]}, 1, done[:1]).tolist() == [0]
        for infos in (
            {"cost": costs, "_cost": ones},
            {"final_info": {"cost": costs, "_cost": ones}},
        ):
            with pytest.raises(ValueError, match=f"cut off .*got info.* as {costs.dtype} with"):
                step_costs(infos, 2, ones)
