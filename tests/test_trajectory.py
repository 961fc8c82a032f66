import math

import numpy as np
import pytest
import torch

from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl.trajectory import Label, PairBatch, Trajectory, cut_segments, pad, unsafe_stretches

NAN = math.nan


def trajectory(rows, *, obs_dim=2, act_dim=1):
    """Rows of (s_t, a_t) written out as lists."""
    rows = np.array(rows, dtype=np.float32).reshape(-1, obs_dim + act_dim)
    return Trajectory(rows[:, :obs_dim], rows[:, obs_dim:])


# -- Trajectory ------------------------------------------------------------------------------


def test_the_length_of_a_trajectory_is_its_number_of_steps():
    assert len(Trajectory(np.zeros((7, 3)), np.zeros((7, 2)))) == 7


def test_the_true_cost_is_the_plain_sum_of_the_step_costs():
    steps = Trajectory(np.zeros((4, 1)), np.zeros((4, 1)), costs=np.array([1.0, 0.0, 0.5, 2.0]))
    assert steps.true_cost == 3.5


def test_a_million_small_costs_are_summed_without_float32_rounding():
    """Added one by one in float32, 0.1 a million times is 100,958."""
    n = 1_000_000
    long = Trajectory(np.zeros((n, 1)), np.zeros((n, 1)), costs=np.full(n, 0.1, np.float32))
    assert long.true_cost == pytest.approx(n * float(np.float32(0.1)), rel=1e-12)


def test_a_trajectory_without_costs_has_no_true_cost():
    with pytest.raises(MissingCostError, match=r"costs=None; record an env that reports info\['co"):
        _ = Trajectory(np.zeros((2, 1)), np.zeros((2, 1))).true_cost


def test_float32_arrays_are_kept_without_a_copy():
    obs, actions = np.ones((3, 2), np.float32), np.ones((3, 1), np.float32)
    costs = np.ones(3, np.float32)
    kept = Trajectory(obs, actions, costs)
    assert kept.obs is obs
    assert kept.actions is actions
    assert kept.costs is costs


def test_a_read_only_memory_map_stays_on_disk(tmp_path):
    np.save(tmp_path / "obs.npy", np.ones((3, 2), np.float32))
    on_disk = np.load(tmp_path / "obs.npy", mmap_mode="r")
    kept = Trajectory(on_disk, np.zeros((3, 1)))
    assert np.shares_memory(kept.obs, on_disk)
    assert not kept.obs.flags.writeable


def test_observations_keep_any_shape_and_bytes_stay_bytes():
    frames = np.full((3, 4, 4, 1), 255, np.uint8)
    kept = Trajectory(frames, np.zeros((3, 2)))
    assert kept.obs is frames
    assert kept.layout == ((4, 4, 1), 2, "uint8")
    assert Trajectory(frames / 255, np.zeros((3, 2))).layout == ((4, 4, 1), 2, "float32")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64, np.int8, np.bool_])
def test_other_numbers_are_cast_to_float32(dtype):
    given = np.array([[0, 1], [1, 0]], dtype=dtype)
    kept = Trajectory(given, given, costs=given[0])
    assert kept.obs.dtype == kept.actions.dtype == kept.costs.dtype == np.float32
    np.testing.assert_array_equal(kept.obs, given)


@pytest.mark.parametrize("dtype", [object, complex, "U3", "datetime64[s]"])
def test_what_is_not_a_number_is_refused_with_its_dtype(dtype):
    with pytest.raises(TypeError, match="obs must be an array of numbers, got dtype"):
        Trajectory(np.ones((2, 2)).astype(dtype), np.zeros((2, 1)))


def test_a_kept_final_observation_is_named_as_the_likely_slip():
    with pytest.raises(ValueError, match="got 4 of obs, 3 of actions; drop the final obs"):
        Trajectory(np.zeros((4, 2)), np.zeros((3, 1)))


def test_an_empty_episode_is_refused():
    with pytest.raises(ValueError, match=r"at least one step: got 0 of obs, .* skip empty"):
        Trajectory(np.zeros((0, 2)), np.zeros((0, 1)))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("shape", [(5,), ()])
def test_steps_without_an_axis_of_their_own_are_refused_with_their_shape(shape, dtype):
    with pytest.raises(ValueError, match=r"obs of a trajectory must have shape \(T, dim\), got \("):
        Trajectory(np.zeros(shape, dtype), np.zeros((5, 1)))


@pytest.mark.parametrize("shape", [(5,), (5, 2, 2), ()])
def test_actions_that_are_not_flat_rows_are_refused_with_their_shape(shape):
    with pytest.raises(ValueError, match=r"actions of a trajectory.*flatten each step to one row"):
        Trajectory(np.zeros((5, 1)), np.zeros(shape))


def test_costs_must_be_one_number_per_step():
    obs, actions = np.zeros((3, 2)), np.zeros((3, 1))
    with pytest.raises(ValueError, match=r"shape \(T,\), got \(3, 1\); give one number per step"):
        Trajectory(obs, actions, costs=np.zeros((3, 1)))
    with pytest.raises(ValueError, match="got 3 of obs, 3 of actions, 2 of costs"):
        Trajectory(obs, actions, costs=np.zeros(2))


def test_a_negative_cost_is_refused_with_its_step():
    rows = np.zeros((3, 1))
    Trajectory(rows, rows, np.array([0.0, -0.0, 2.0]))
    with pytest.raises(
        ValueError, match=r"must be >= 0, got -0.5 at step 1 of a trajectory; count"
    ):
        Trajectory(rows, rows, np.array([0.0, -0.5, -2.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["obs", "actions", "costs"])
def test_an_entry_that_is_not_finite_is_refused_by_name(name, bad):
    arrays = {"obs": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "costs": np.zeros(3)}
    arrays[name].flat[-1] = bad
    with pytest.raises(NonFiniteError, match=f"{name} of a trajectory must be finite, got 1 NaN"):
        Trajectory(**arrays)


@pytest.mark.parametrize("huge", [1e39, -1e300])
def test_a_finite_number_too_large_for_float32_is_refused_rather_than_made_infinite(huge):
    with pytest.raises(NonFiniteError, match="obs of a trajectory must be finite, got 1 NaN or"):
        Trajectory(np.array([[0.0, huge]]), np.zeros((1, 1)))


# -- Label -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preference", [0, 0.5, 0.25, 1, NAN])
@pytest.mark.parametrize("safe", [0, 1, NAN])
def test_a_label_holds_a_probability_and_two_verdicts_or_nan(preference, safe):
    label = Label(preference, safe, 1)
    assert label.preference is preference
    assert label.first_safe is safe


def test_a_preference_alone_says_nothing_of_safety():
    label = Label(1.0)
    assert (label.preference, label.unsafe) == (1.0, (None, None))
    assert np.isnan([label.first_safe, label.second_safe]).all()


@pytest.mark.parametrize("preference", [-0.1, 1.1, -1, math.inf])
def test_a_preference_that_is_no_probability_is_refused(preference):
    with pytest.raises(ValueError, match=rf"lie in \[0, 1\], .*: got preference={preference}"):
        Label(preference, 1, 1)


@pytest.mark.parametrize("verdict", [0.5, -1, 2, math.inf])
def test_a_verdict_other_than_safe_or_unsafe_is_refused_by_name(verdict):
    with pytest.raises(ValueError, match=r"be 1 \(safe\) or 0 \(unsafe\); .* got first_safe="):
        Label(0.5, verdict, 1)
    with pytest.raises(ValueError, match=f"got second_safe={verdict}"):
        Label(0.5, 1, verdict)


def test_an_answer_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="made of numbers, but preference is None; use"):
        Label(None, 1, 0)
    with pytest.raises(TypeError, match="but second_safe is 'yes'"):
        Label(1, 1, "yes")


# -- Padding ---------------------------------------------------------------------------------


def test_shorter_trajectories_are_filled_up_with_zeros_and_masked_out():
    obs, actions, mask = pad([trajectory([[1, 2, 3]]), trajectory([[4, 5, 6], [7, 8, 9]])])
    assert obs.tolist() == [[[1, 2], [0, 0]], [[4, 5], [7, 8]]]
    assert actions.tolist() == [[[3], [0]], [[6], [9]]]
    assert mask.tolist() == [[True, False], [True, True]]
    assert obs.dtype == actions.dtype == torch.float32


def test_padding_copies_so_that_the_trajectories_stay_as_they_were():
    only = trajectory([[1, 2, 3]])
    pad([only])[0].zero_()
    assert only.obs.tolist() == [[1, 2]]


def test_trajectories_of_different_sizes_are_not_broadcast_into_one_batch():
    """NumPy would copy the single number of the narrow row into all three columns."""
    wide, narrow = trajectory([[1, 2, 3, 4]], obs_dim=3), trajectory([[5, 6]], obs_dim=1)
    with pytest.raises(
        ValueError, match=r"= \(\(3,\), 1, 'float32'\), got \(\(1,\), 1, 'float32'\)"
    ):
        pad([wide, narrow])


def test_images_are_padded_as_bytes():
    frames = [np.full((length, 2, 2, 3), 200, np.uint8) for length in (1, 3)]
    obs, _, mask = pad([Trajectory(frame, np.zeros((len(frame), 1))) for frame in frames])
    assert (obs.dtype, obs.shape) == (torch.uint8, (2, 3, 2, 2, 3))
    assert (obs == 200).flatten(2).all(2).tolist() == mask.tolist()
    assert (obs == 0).flatten(2).all(2).tolist() == (~mask).tolist()


def test_bytes_and_floats_are_not_mixed_in_one_batch():
    """A model may divide bytes by 255 and must not do so with floats."""
    frames = np.ones((1, 4, 4, 1), np.uint8)
    action = np.zeros((1, 1))
    with pytest.raises(ValueError, match=r"'uint8'.*got .*'float32'"):
        pad([Trajectory(frames, action), Trajectory(frames.astype(np.float32), action)])


def test_the_size_of_a_batch_is_its_number_of_pairs():
    pairs = torch.tensor([[0, 1], [1, 0], [0, 1]])
    batch = PairBatch(
        [trajectory([[1, 2, 3]])] * 2, pairs, torch.zeros(3), torch.zeros(3, 2), pairs[:, 0]
    )
    assert len(batch) == 3


# -- Segments --------------------------------------------------------------------------------


def test_segments_follow_each_other_up_to_the_end_and_show_every_step():
    """Five steps make segments 0-1, 1-2 and 3-4: the first overlaps; one step stays whole."""
    whole = Trajectory(np.arange(5.0)[:, None], np.zeros((5, 1)), np.array([1, 2, 3, 4, 5]))
    short = Trajectory(np.full((1, 1), 9.0), np.zeros((1, 1)), np.full(1, 7.0))
    segments = cut_segments([whole, short], 2)
    assert [one.obs.ravel().tolist() for one in segments] == [[0, 1], [1, 2], [3, 4], [9]]
    assert [one.true_cost for one in segments] == [3, 5, 9, 7]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_no_step_of_an_episode_is_in_no_segment(length):
    """By as few segments as can do that, and all of them as long as can be."""
    wholes = [np.arange(steps * 1.0)[:, None] + 100 * steps for steps in range(1, 16)]
    segments = cut_segments([Trajectory(rows, rows) for rows in wholes], length)
    for rows in wholes:
        steps = len(rows)
        own = [one for one in segments if one.obs[0] // 100 == steps]
        assert np.unique([one.obs for one in own]).tolist() == rows.ravel().tolist()
        assert len(own) == -(-steps // length)
        assert {len(one) for one in own} == {min(steps, length)}
        assert own[-1].obs[-1] == rows[-1]


def test_segments_need_no_costs_and_share_the_memory_of_their_episode():
    whole = trajectory(np.zeros((6, 3)))
    segments = cut_segments([whole], 3)
    assert [segment.costs for segment in segments] == [None, None]
    assert all(np.shares_memory(segment.obs, whole.obs) for segment in segments)


def test_a_segment_of_no_steps_is_refused():
    with pytest.raises(ValueError, match=r"length must lie in \[1, inf\), got 0"):
        cut_segments([], 0)


def test_segments_longer_than_every_episode_are_told():
    wholes = [trajectory(np.zeros((3, 3)))] * 2
    with pytest.warns(UserWarning, match="got length=9, but the longest of 2 episodes has 3 ste"):
        assert [len(one) for one in cut_segments(wholes, 9)] == [3, 3]
    assert cut_segments([], 9) == []


def test_only_the_last_segment_ends_as_its_episode_did():
    obs = np.arange(7.0)[:, None]
    whole = Trajectory(obs[:-1], obs[:-1], None, np.arange(6.0), True, obs[-1])
    first, second, third = cut_segments([whole], 2)
    assert [one.terminated for one in (first, second, third)] == [False, False, True]
    assert [one.final_obs.item() for one in (first, second, third)] == [2, 4, 6]
    assert second.rewards.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terminated": None}, "or none of them, got only some"),
        ({"rewards": np.zeros(3)}, "got 2 of obs, 2 of actions, 3 of rewards"),
        ({"final_obs": np.zeros(2)}, r"float32 \(1,\), got float32 \(2,\)"),
        ({"final_obs": np.zeros(1, np.uint8)}, r"float32 \(1,\), got uint8 \(1,\)"),
    ],
)
def test_an_outcome_that_does_not_fit_is_refused(changes, message):
    outcome = {"rewards": np.zeros(2), "terminated": True, "final_obs": np.zeros(1)}
    with pytest.raises(ValueError, match=message):
        Trajectory(np.zeros((2, 1)), np.zeros((2, 1)), **{**outcome, **changes})


def test_stretches_are_the_steps_that_are_marked_one_after_the_other():
    assert unsafe_stretches([1, 1, 0, 0, 1]) == ((0, 2), (4, 5))
    assert unsafe_stretches([False, False]) == ()
    label = Label(1, 0, 1, ((0, 2), (4, 5)), ())
    assert (label.first_unsafe, label.second_unsafe) == (((0, 2), (4, 5)), ())
    assert Label(1, 0, 1).first_unsafe is None


@pytest.mark.parametrize(
    ("stretches", "remedy"),
    [
        pytest.param(((2, 2),), "the one after the last", id="empty"),
        pytest.param(((3, 1),), "the one after the last", id="reversed"),
        pytest.param(((0, 2), (1, 4)), "join those that touch or overlap", id="overlapping"),
        pytest.param(((0, 2), (2, 4)), "join those that touch or overlap", id="touching"),
        pytest.param(((3, 4), (0, 1)), "put them in order", id="out of order"),
        pytest.param(((-1, 2),), "cut off what is outside", id="before the first step"),
    ],
)
def test_stretches_that_are_no_stretches_are_refused_with_what_to_do(stretches, remedy):
    message = "lie within their trajectory, one after the other and apart.*" + remedy
    with pytest.raises(ValueError, match=message):
        Label(1, 0, 1, stretches)


@pytest.mark.parametrize("stretches", [(1, 2), ((0.5, 2),), ((0, 1, 2),), 3, (("a", "b"),)])
def test_what_is_not_made_of_pairs_of_steps_is_refused(stretches):
    with pytest.raises(TypeError, match="unsafe stretches are pairs of steps"):
        Label(1, 0, 1, None, stretches)
