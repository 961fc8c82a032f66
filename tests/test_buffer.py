import math

import numpy as np
import pytest
import torch

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.errors import LabelError
from pbcrl.oracle import SyntheticOracle
from pbcrl.trajectory import Label, Trajectory

NAN = math.nan
FIRST_SAFER, SECOND_SAFER = Label(1, 1, 0), Label(0, 0, 1)


def episode(cost=0.0, *, obs_dim=1, act_dim=1):
    return Trajectory(np.full((1, obs_dim), cost), np.zeros((1, act_dim)), np.array([cost]))


def buffer_of(num):
    """A buffer with `num` episodes; the true cost of episode i, and its only observation, is i."""
    buffer = PreferenceBuffer()
    buffer.add_trajectories([episode(i) for i in range(num)])
    return buffer


def draw(num_trajectories, num_pairs, seed=0):
    return draw_pairs(num_trajectories, num_pairs, rng=np.random.default_rng(seed))


def different(pairs):
    return len({frozenset(pair) for pair in pairs.tolist()})


# -- Drawing pairs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_trajectories", "num_pairs"), [(2, 1), (5, 6), (5, 10), (30, 200), (30, 435), (1000, 700)]
)
def test_drawn_pairs_are_all_different_in_either_order(num_trajectories, num_pairs):
    pairs = draw(num_trajectories, num_pairs)
    assert pairs.shape == (num_pairs, 2)
    assert pairs.dtype == np.int64
    assert different(pairs) == num_pairs
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert pairs.min() >= 0
    assert pairs.max() < num_trajectories


@pytest.mark.parametrize("num_trajectories", [100, 101])
def test_half_as_many_pairs_as_trajectories_use_none_of_them_twice(num_trajectories):
    assert len(np.unique(draw(num_trajectories, 50))) == 100


def test_no_trajectory_is_used_three_times_before_all_are_used_once():
    """75 pairs of 100 trajectories: one permutation uses up all, half of the next reuses half."""
    uses = np.bincount(draw(100, 75).ravel(), minlength=100)
    assert uses.min() == 1
    assert uses.max() == 2


@pytest.mark.parametrize(("num_trajectories", "num_pairs"), [(2000, 1000), (50, 1225)])
def test_the_first_of_a_pair_has_the_lower_index_about_half_the_time(num_trajectories, num_pairs):
    pairs = draw(num_trajectories, num_pairs)
    share = (pairs[:, 0] < pairs[:, 1]).mean()
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(num_pairs)


def test_every_pair_is_as_likely_as_any_other():
    """6 possible pairs, 1 or 5 of them drawn (the sparse and the dense way), 1,200 times."""
    for num_pairs, seeds in [(1, 1200), (5, 1200)]:
        counts = np.zeros((4, 4))
        for seed in range(seeds):
            low, high = np.sort(draw(4, num_pairs, seed), axis=1).T
            counts[low, high] += 1
        share = counts[np.triu_indices(4, k=1)] / seeds
        expected = num_pairs / 6
        assert np.abs(share - expected).max() < 4 * math.sqrt(expected * (1 - expected) / seeds)


@pytest.mark.parametrize("num_pairs", [40, 400])
def test_the_same_seed_draws_the_same_pairs(num_pairs):
    np.testing.assert_array_equal(draw(30, num_pairs, seed=3), draw(30, num_pairs, seed=3))
    assert (draw(30, num_pairs, seed=3) != draw(30, num_pairs, seed=4)).any()


def test_more_pairs_than_there_are_different_ones_are_refused():
    with pytest.raises(ValueError, match="5 trajectories make 10 pairs, 11 were asked; draw fewer"):
        draw(5, 11)
    with pytest.raises(ValueError, match="1 trajectories make 0 pairs, 1 were asked"):
        draw(1, 1)
    with pytest.raises(ValueError, match="-1 were asked"):
        draw(5, -1)


@pytest.mark.parametrize("num_trajectories", [0, 1, 5])
def test_drawing_no_pairs_gives_an_empty_array_of_pairs(num_trajectories):
    assert draw(num_trajectories, 0).shape == (0, 2)


def test_a_seed_is_no_generator():
    with pytest.raises(
        TypeError, match=r"rng is a NumPy generator, got 0; pass np\.random\.default_"
    ):
        draw_pairs(4, 2, rng=0)


# -- Trajectories ----------------------------------------------------------------------------


def test_trajectories_are_kept_by_reference_under_consecutive_indices():
    buffer, episodes = PreferenceBuffer(), [episode(i) for i in range(3)]
    assert buffer.add_trajectories(episodes[:2]).tolist() == [0, 1]
    assert buffer.add_trajectories([]).tolist() == []
    assert buffer.add_trajectories(episodes[2:]).tolist() == [2]
    assert all(kept is given for kept, given in zip(buffer.trajectories, episodes, strict=True))


@pytest.mark.parametrize(("obs_dim", "act_dim"), [(3, 1), (1, 2)])
def test_trajectories_of_another_size_are_refused_and_none_is_kept(obs_dim, act_dim):
    buffer, other = PreferenceBuffer(), episode(obs_dim=obs_dim, act_dim=act_dim)
    message = rf"\(\(1,\), 1, 'float32'\), got \(\({obs_dim},\), {act_dim}, 'float32'\); use one"
    with pytest.raises(ValueError, match=message):
        buffer.add_trajectories([episode(), other])
    assert buffer.trajectories == []
    buffer.add_trajectories([episode()])
    with pytest.raises(ValueError, match=message):
        buffer.add_trajectories([other])


# -- Labels ----------------------------------------------------------------------------------


def test_queries_show_the_trajectories_that_the_pairs_name():
    buffer = buffer_of(3)
    (query,) = buffer.queries(np.array([[2, 0]]))
    assert query.first is buffer.trajectories[2]
    assert query.second is buffer.trajectories[0]


def test_the_length_counts_pairs_and_num_compared_the_trajectories_in_them():
    buffer = buffer_of(5)
    assert (len(buffer), buffer.num_compared) == (0, 0)
    buffer.add_labels(np.array([[0, 1], [1, 3]]), [FIRST_SAFER] * 2)
    assert (len(buffer), buffer.num_compared) == (2, 3)


def test_an_oracle_s_answers_stay_with_the_pairs_that_were_asked_about():
    buffer, pairs = buffer_of(6), np.array([[5, 0], [1, 4], [2, 3]])
    buffer.add_labels(pairs, SyntheticOracle(2).label(buffer.queries(pairs)))
    batch = buffer.batch(np.array([2, 0]))
    assert batch.preference.tolist() == [1, 0]
    assert batch.safe.tolist() == [[1, 0], [0, 1]]
    costs = [[batch.trajectories[i].true_cost for i in pair] for pair in batch.pairs.tolist()]
    assert costs == [[2, 3], [5, 0]]


def test_a_trajectory_shared_by_pairs_occurs_once_in_a_batch():
    buffer = buffer_of(9)
    buffer.add_labels(np.array([[7, 2], [2, 5], [7, 5]]), [FIRST_SAFER] * 3)
    batch = buffer.batch(np.array([0, 1, 2]))
    assert [t.true_cost for t in batch.trajectories] == [2, 5, 7]
    assert batch.pairs.tolist() == [[2, 0], [0, 1], [2, 1]]
    assert batch.pairs.dtype == torch.int64


def test_a_pair_may_be_asked_for_twice_in_one_batch():
    buffer = buffer_of(2)
    buffer.add_labels(np.array([[0, 1]]), [FIRST_SAFER])
    batch = buffer.batch(np.array([0, 0, 0]))
    assert len(batch) == 3
    assert len(batch.trajectories) == 2


def test_more_than_500_labelled_pairs_are_many():
    buffer = buffer_of(40)
    pairs = draw(40, 501)
    buffer.add_labels(pairs[:500], [FIRST_SAFER] * 500)
    assert not buffer.has_many
    buffer.add_labels(pairs[500:], [FIRST_SAFER])
    assert buffer.has_many


def test_no_positions_make_an_empty_batch():
    batch = buffer_of(2).batch(np.arange(0))
    assert len(batch) == 0
    assert batch.pairs.shape == batch.safe.shape == (0, 2)


def test_an_answer_that_was_not_given_stays_nan():
    buffer = buffer_of(2)
    buffer.add_labels(np.array([[0, 1]]), [Label(NAN, 1, NAN)])
    batch = buffer.batch(np.array([0]))
    assert batch.preference.isnan().tolist() == [True]
    assert batch.safe.isnan().tolist() == [[False, True]]


def test_each_pair_needs_its_label_and_nothing_is_kept_otherwise():
    buffer = buffer_of(3)
    with pytest.raises(LabelError, match=r"got 2 pairs and 1 labels; .* Label\(nan, nan, nan\)"):
        buffer.add_labels(np.array([[0, 1], [1, 2]]), [FIRST_SAFER])
    assert len(buffer) == 0


@pytest.mark.parametrize("pair", [(1, 1), (0, 3), (-1, 0)])
def test_a_pair_must_name_two_different_trajectories_of_the_buffer(pair):
    buffer, pairs = buffer_of(3), np.array([(0, 1), pair])
    message = rf"two different trajectories of 3, got \[{pair[0]}, {pair[1]}\]"
    with pytest.raises(ValueError, match=message):
        buffer.queries(pairs)
    with pytest.raises(ValueError, match=message):
        buffer.add_labels(pairs, [FIRST_SAFER] * 2)
    assert len(buffer) == 0


@pytest.mark.parametrize("pairs", [[0, 1], [[0, 1, 2]], [[0.0, 1.0]], []])
def test_pairs_of_another_shape_or_dtype_are_refused(pairs):
    with pytest.raises(ValueError, match=r"pairs must be integers of shape \(B, 2\), got"):
        buffer_of(3).queries(np.array(pairs))


# -- What can be learned from ----------------------------------------------------------------


def labelled(*labels):
    buffer = buffer_of(2)
    buffer.add_labels(np.tile([0, 1], (len(labels), 1)), labels)
    return buffer


def test_preferences_alone_are_refused_as_what_they_are():
    rule = "there are preferences alone, 2 pairs without first_safe and second_safe; ask whether"
    with pytest.raises(LabelError, match=rule):
        labelled(Label(1), Label(0.5)).check_trainable()


def test_one_safe_and_one_unsafe_label_are_enough():
    labelled(Label(NAN, 1, 0)).check_trainable()
    labelled(Label(1, 1, NAN), Label(1, NAN, 0)).check_trainable()


def test_a_buffer_without_labels_is_refused():
    with pytest.raises(LabelError, match="needs labels, but the buffer's 0 pairs have none; label"):
        buffer_of(2).check_trainable()
    with pytest.raises(LabelError, match="the buffer's 2 pairs have none"):
        labelled(*[Label(NAN, NAN, NAN)] * 2).check_trainable()


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([Label(1, 1, 1)] * 2, "got 4 safe and 0 unsafe"),
        ([Label(1, 0, 0), Label(1, NAN, 0)], "got 0 safe and 3 unsafe"),
    ],
)
def test_one_sided_labels_are_refused_with_their_counts(labels, found):
    with pytest.raises(LabelError, match=f"{found}; add trajectories of the other kind, or check"):
        labelled(*labels).check_trainable()


@pytest.mark.parametrize(
    ("pairs", "labels", "num"),
    [
        ([(0, 1), (0, 1)], [FIRST_SAFER, SECOND_SAFER], 3),  # the pair, and both of its members
        ([(0, 1), (1, 0)], [FIRST_SAFER, SECOND_SAFER], 0),  # the same answer, the other way round
        ([(0, 1), (1, 0)], [Label(1, NAN, NAN), Label(0.8, 1, 0)], 1),
        ([(0, 1), (0, 1)], [Label(1, NAN, 1), Label(0.5, NAN, 0)], 1),  # a tie contradicts nothing
        ([(0, 1), (2, 0)], [Label(1, 1, 0), Label(1, 1, 0)], 1),
    ],
)
def test_labels_that_contradict_each_other_are_counted(pairs, labels, num):
    buffer = buffer_of(3)
    buffer.add_labels(np.array(pairs), labels)
    assert buffer.num_contradictions == num


def test_contradictory_labels_are_odd_and_warn_once():
    buffer = buffer_of(3)
    buffer.add_labels(np.array([(0, 1), (0, 1)]), [FIRST_SAFER, SECOND_SAFER])
    with pytest.warns(UserWarning, match=r"of 3 pairs or trajectories the labels contradict"):
        buffer.check_trainable()
    buffer.check_trainable()


def test_what_is_no_trajectory_or_no_label_is_named_and_nothing_is_added():
    buffer = buffer_of(2)
    with pytest.raises(TypeError, match="a sequence of Trajectory, got NoneType; pass a list"):
        buffer.add_trajectories([episode(), None])
    with pytest.raises(TypeError, match="a sequence of Trajectory, got generator"):
        buffer.add_trajectories(episode() for _ in range(2))
    with pytest.raises(TypeError, match=r"must be Label objects, got 1; make them by Label\("):
        buffer.add_labels(np.array([[0, 1]]), [1])
    assert (len(buffer.trajectories), len(buffer)) == (2, 0)


# -- Safety labels ---------------------------------------------------------------------------


def safety_buffer(num_trajectories, pairs, *safe):
    """Pairs whose members have these safety labels, and no preferences."""
    buffer = PreferenceBuffer()
    buffer.add_trajectories(
        [Trajectory(np.full((1, 1), i), np.zeros((1, 1))) for i in range(num_trajectories)]
    )
    buffer.add_labels(np.array(pairs), [Label(math.nan, *both) for both in safe])
    return buffer


def test_the_safe_share_of_a_trajectory_is_the_mean_of_its_labels():
    buffer = buffer_of(4)
    assert np.isnan(buffer.safe_shares).all()
    labels = [Label(1, 1, 0), Label(1, 1, NAN), Label(NAN, 0, NAN)]
    buffer.add_labels([(0, 1), (0, 2), (0, 1)], labels)
    np.testing.assert_allclose(buffer.safe_shares, [2 / 3, 0, NAN, NAN])


def unsafe_shares(buffer, *positions):
    found, shares = buffer.unsafe_shares(np.array(positions, dtype=np.int64))
    return dict(zip(found.tolist(), shares.tolist(), strict=True))


def test_unsafe_shares_have_each_trajectory_once_however_many_pairs_it_is_in():
    buffer = safety_buffer(4, [[0, 1], [2, 0], [0, 3]], (0, 1), (1, 0), (0, 1))
    assert unsafe_shares(buffer, 0, 1, 2) == {0: 1, 1: 0, 2: 0, 3: 0}
    assert unsafe_shares(buffer, 1) == {0: 1, 2: 0}


def test_unsafe_shares_are_of_labels_that_differ_and_leave_out_those_not_given():
    """Trajectory 0 is called unsafe once in two, 1 is safe, of 2 nothing is known."""
    buffer = safety_buffer(3, [[0, 1], [0, 2]], (0, 1), (1, math.nan))
    assert unsafe_shares(buffer, 0, 1) == {0: 0.5, 1: 0}


def test_without_safety_labels_there_are_no_unsafe_shares():
    buffer = safety_buffer(2, [[0, 1]], (math.nan, math.nan))
    assert unsafe_shares(buffer, 0) == unsafe_shares(buffer) == {}


SS, SU, UU, S, U, NONE = (1, 1), (1, 0), (0, 0), (math.nan, 1), (0, math.nan), (math.nan, math.nan)


@pytest.mark.parametrize(
    "safe",
    [[SS] * 9 + [SU] * 3 + [UU], [S] * 5 + [U], [SS] * 7 + [U] * 2 + [NONE], [UU] * 5 + [SS, SU]],
)
def test_balanced_weights_make_safe_and_unsafe_members_equally_frequent(safe):
    buffer = safety_buffer(2, [[0, 1]] * len(safe), *safe)
    weights = buffer.balanced_weights(len(safe))
    labels = np.array(safe, dtype=float)
    num_safe, num_unsafe = (weights @ (labels == value).sum(axis=1) for value in (1, 0))
    assert num_safe == pytest.approx(num_unsafe) != 0
    assert weights.sum() == pytest.approx(1)


def test_balanced_weights_are_powers_of_one_factor_per_surplus_label():
    """16 safe pairs, 3 mixed, 1 unsafe: t^4 = 16, so weights 1/4, 1 and 4, and 4 + 3 + 4 in all."""
    buffer = safety_buffer(2, [[0, 1]] * 20, *[SS] * 16, *[SU] * 3, UU)
    expected = np.array([1 / 4] * 16 + [1] * 3 + [4]) / 11
    np.testing.assert_allclose(buffer.balanced_weights(20), expected)


def test_where_no_balance_can_be_had_mixed_pairs_are_drawn_or_all_alike():
    buffer = safety_buffer(2, [[0, 1]] * 4, SS, SU, SS, UU)
    np.testing.assert_array_equal(buffer.balanced_weights(3), [0, 1, 0])
    np.testing.assert_array_equal(buffer.balanced_weights(1), [1])
    unlabelled = safety_buffer(2, [[0, 1]] * 2, NONE, NONE)
    np.testing.assert_array_equal(unlabelled.balanced_weights(2), [0.5, 0.5])
    all_safe = safety_buffer(2, [[0, 1]] * 2, SS, S)
    np.testing.assert_array_equal(all_safe.balanced_weights(2), [0.5, 0.5])


def test_what_is_marked_outside_of_its_trajectory_is_refused_and_nothing_is_added():
    buffer = PreferenceBuffer([episode(), episode()])
    steps = len(episode())
    labels = [Label(1, 1, 1, ()), Label(1, 1, 1, None, ((0, steps + 1),))]
    with pytest.raises(ValueError, match=rf"got \(\(0, {steps + 1}\),\) of {steps} steps"):
        buffer.add_labels([(0, 1), (0, 1)], labels)
    assert (len(buffer), buffer.stretches, buffer.marks) == (0, [], [])
    buffer.add_labels([(0, 1)], labels[:1])
    assert [mark.unsafe.tolist() for mark in buffer.marks] == [[0] * steps]
