"""What moves λ: numbers by hand, and that λ goes up exactly where the constraint is broken."""

import json
import math

import numpy as np
import pytest

from pbcrl.constraint import Acceptance, LearnedLimit, UnsafeRate
from pbcrl.feedback import Answers
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.trajectory import BatchLabel

NONE = np.empty(0)
SAFE, UNSAFE, NO_ANSWER = BatchLabel(1), BatchLabel(0), BatchLabel(math.nan)


def pairs(unsafe_rate, *, num_late=0):
    return Answers(np.arange(4), unsafe_rate=unsafe_rate, num_late=num_late)


def batch(label, *, shown=True):
    return Answers(batch=label, batch_shown=shown)


def test_the_learned_limit_is_compared_with_the_mean_learned_cost_whatever_labels_say():
    """Costs -1, 2 and 5 have a mean of 2."""
    costs = np.array([-1.0, 2.0, 5.0])
    for answers in (Answers(), pairs(1.0), batch(UNSAFE)):
        assert LearnedLimit().measure(answers, costs, 3.0) == (2.0, 3.0)


def test_without_an_episode_there_is_no_learned_cost():
    assert LearnedLimit().measure(pairs(0.5), NONE, 3.0) == (None, 3.0)


def test_without_a_model_the_unsafe_rate_is_that_of_labels():
    constraint = UnsafeRate(0.2)
    assert constraint.measure(pairs(0.25), np.array([9.0]), 3.0) == (0.25, 0.2)
    assert constraint.measure(Answers(), np.array([9.0]), 3.0) == (None, 0.2)


def judged(*, right=0.0, missed=0.0, false_alarms=0.0, found=0.0):
    """What the model called safe, labelled safe and unsafe; what it called unsafe, likewise."""
    return Answers(judged=np.array([[right, missed], [false_alarms, found]]))


def test_what_the_model_says_of_all_episodes_is_corrected_by_its_errors_on_labelled_ones():
    """It calls a quarter unsafe. 3 + 1 of 4 + 1 alarms were right; it missed 2 of 8 + 3.

    Each iteration takes a fiftieth of the weight, each label by the newer ones as well.
    """
    constraint = UnsafeRate(0.2)
    costs = np.array([1.0, 2.0, 2.5, 9.0])
    labels = judged(right=6, missed=2, false_alarms=1, found=3)
    rate, allowed = constraint.measure(labels, costs, 3.0)
    assert (rate, allowed) == (pytest.approx(0.25 * 4 / 5 + 0.75 * 2 / 11), 0.2)
    rate, _ = constraint.measure(Answers(), costs, 3.0)
    assert rate == pytest.approx(0.25 * (2.94 + 1) / (3.92 + 1) + 0.75 * 1.96 / (7.84 + 3))
    rate, _ = constraint.measure(judged(right=10), costs, 3.0)
    kept = 0.98**2 * math.exp(-10 / 20)
    right, wrong = (kept * 3 + 1) / (kept * 4 + 1), kept * 2 / (kept * 8 + 10 + 3)
    assert rate == pytest.approx(0.25 * right + 0.75 * wrong)
    assert constraint.measure(Answers(), NONE, 3.0) == (None, 0.2)


def test_a_small_share_is_told_by_more_labels():
    """By p* = 0.02 a hundred labels take 1 - 1/e of the weight, and not twenty."""
    constraint = UnsafeRate(0.02)
    constraint.measure(judged(right=49, missed=1), NONE, 3.0)
    rate, _ = constraint.measure(judged(right=100), np.zeros(4), 3.0)
    kept = 0.98 * math.exp(-1)
    assert rate == pytest.approx(kept / (kept * 50 + 100 + 3))


def test_false_alarms_do_not_hold_a_safe_policy_back():
    """Eight of ten were false: of the half that it calls unsafe 3 of 11 are, where 0.2 may be."""
    labels = judged(right=40, false_alarms=8, found=2)
    rate, allowed = UnsafeRate(0.2).measure(labels, np.array([1.0, 5]), 3.0)
    assert rate / allowed == pytest.approx(1 + (0.5 * 3 / 11 / 0.2 - 1) / 2)  # half as fast
    assert rate < allowed


def test_a_policy_that_costs_more_never_lets_lambda_fall_faster():
    """Whether 6 of 100 episodes are just below the learned limit or above, labels call all safe."""
    measured = []
    for top in (0.0, 0.5, 0.99, 1.0, 1.01, 1.5):
        costs = np.where(np.arange(100) < 6, top, 0.0)
        measured.append(UnsafeRate(0.05).measure(judged(right=200, false_alarms=50), costs, 1.0)[0])
    assert measured == sorted(measured)


def test_labels_that_come_while_no_episode_ends_count_once_one_does():
    constraint = UnsafeRate(0.2)
    assert constraint.measure(judged(right=3, missed=2), NONE, 3.0) == (None, 0.2)
    rate, _ = constraint.measure(Answers(unsafe_rate=0.5), np.zeros(4), 3.0)
    assert rate == pytest.approx(0.98 * 2 / (0.98 * 5 + 3))


@pytest.mark.parametrize(
    ("costs", "labels", "measured"),
    [
        ([4.0, 4.0], judged(right=5), 0.4),  # all are safe, by six tenths: 1 - 0.6 in place of 0
        ([9.9, 9.9], judged(right=5), 0.5),  # by a hundredth: half of e counts
        ([-9.0, 9.0], judged(right=5), 0.5),  # the cost that a fifth of the episodes exceed
        ([-9.0, -9.0], judged(right=5), 0.0),  # no more than P says
        ([10.1, 10.1], judged(right=5), 5.0),  # all are unsafe, by whatever it may be
        ([7.0, 7.0], judged(missed=4.5), 3.0),  # the model errs, labels say 4.5 of 7.5
        ([12.0, 12.0], judged(false_alarms=9), 0.75),  # false alarms: a tenth of both are unsafe
    ],
)
def test_lambda_falls_no_faster_than_learned_costs_are_below_their_limit(costs, labels, measured):
    """Of p* = 0.2 and of a learned limit of 10; measured is in units of p*."""
    found, allowed = UnsafeRate(0.2).measure(labels, np.array(costs), 10.0)
    assert (found / allowed, allowed) == (pytest.approx(measured), 0.2)


@pytest.mark.parametrize(
    ("costs", "by_labels", "by_marks"),
    [
        ([0.0] * 19 + [400.0], 1, 1.2),  # one of twenty is unsafe, as is allowed: the mean is 20
        ([0.0] * 19 + [30.0], 1, 1),  # the mean is 1.5
        ([9.0] * 20, 0.5, 0.9),  # λ falls no faster than the mean is below the limit
        ([0.0] * 20, 0, 0),
        ([11.0] * 20, 20, 20),  # all are unsafe, by little
    ],
)
def test_by_marks_the_mean_learned_cost_must_be_within_the_limit_too(costs, by_labels, by_marks):
    """In units of p* = 0.05, with a learned limit of 10."""
    answers = judged(right=10)
    for expected, known in ((by_labels, False), (by_marks, True)):
        found, _ = UnsafeRate(0.05).measure(answers, np.array(costs), 10.0, by_marks=known)
        assert found / 0.05 == pytest.approx(expected)


def test_a_network_whose_limit_is_0_has_no_relative_excess():
    found, _ = UnsafeRate(0.2).measure(judged(right=10), np.array([0.1, 0.1]), 0.0)
    assert found == pytest.approx(1.0)


def counted(said, unsafe):
    return Answers(
        judged=np.array([[np.sum((said == i) & (unsafe == j)) for j in (0, 1)] for i in (0, 1)])
    )


def test_whatever_the_model_says_the_corrected_rate_is_unbiased_and_steadier_than_labels():
    """30 % are unsafe; a model is right in nine cases of ten; 20 of 200 episodes get a label."""
    rng, constraint = np.random.default_rng(0), UnsafeRate(0.2)
    corrected, by_labels = [], []
    for _ in range(4_000):
        unsafe = rng.random(200) < 0.3
        said = unsafe ^ (rng.random(200) < 0.1)
        rate, _ = constraint.measure(counted(said[:20], unsafe[:20]), said.astype(float), 0.5)
        corrected.append(rate)
        by_labels.append(unsafe[:20].mean())
    assert abs(np.mean(corrected) - 0.3) < 0.005
    assert abs(said.mean() - 0.3) > 0.03  # the model alone is wrong: 0.34
    assert np.std(corrected) < 0.6 * np.std(by_labels)


def test_what_is_known_of_the_model_outlives_the_process():
    old, new = UnsafeRate(0.2), UnsafeRate(0.2)
    old.measure(judged(right=5, missed=1, found=2), NONE, 3.0)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    costs = np.array([1.0, 5.0])
    assert new.measure(Answers(), costs, 3.0) == old.measure(Answers(), costs, 3.0)
    for stateless in (LearnedLimit(), Acceptance(10)):
        stateless.load_state_dict(stateless.state_dict())


@pytest.mark.parametrize(
    ("label", "measured"), [(SAFE, 0.0), (UNSAFE, 1.0), (NO_ANSWER, None), (None, None)]
)
def test_a_rejected_batch_is_1_and_an_accepted_one_0_of_at_most_a_half(label, measured):
    constraint = Acceptance(20)
    assert constraint.measure(batch(label), np.array([9.0]), 3.0) == (measured, 0.5)


def test_a_late_answer_moves_the_multiplier():
    late = batch(UNSAFE, shown=False)
    assert Acceptance(20).measure(late, NONE, 0.0) == (1.0, 0.5)
    assert UnsafeRate(0.2).measure(pairs(0.25, num_late=4), NONE, 0.0) == (0.25, 0.2)


@pytest.mark.parametrize(
    ("constraint", "answers", "learned_cost", "direction"),
    [
        (LearnedLimit(), Answers(), 4.0, 1),
        (LearnedLimit(), Answers(), 2.0, -1),
        (UnsafeRate(0.3), pairs(0.4), 0.0, 1),
        (UnsafeRate(0.3), pairs(0.2), 0.0, -1),
        (UnsafeRate(0.3), Answers(), 0.0, 0),
        (Acceptance(10), batch(UNSAFE), 0.0, 1),
        (Acceptance(10), batch(SAFE), 0.0, -1),
        (Acceptance(10), Answers(), 0.0, 0),
    ],
)
def test_lambda_rises_where_the_constraint_is_broken_and_stays_where_nothing_was_measured(
    constraint, answers, learned_cost, direction
):
    multiplier = LagrangeMultiplier(initial=1.0)
    measured, allowed = constraint.measure(answers, np.array([learned_cost]), 3.0)
    assert np.sign(multiplier.update(measured, allowed) - 1.0) == direction


def test_only_acceptance_shows_a_batch():
    assert [one.batch for one in (LearnedLimit(), UnsafeRate(0.2), Acceptance(12))] == [0, 0, 12]


@pytest.mark.parametrize("rate", [0, 1, -0.1, math.nan])
def test_a_rate_that_every_policy_keeps_or_none_is_refused(rate):
    with pytest.raises(ValueError, match=rf"unsafe episodes lies in \(0, 1\), got {rate}"):
        UnsafeRate(rate)


def test_a_batch_too_small_to_stand_for_a_policy_is_refused():
    with pytest.raises(ValueError, match="at least 10 episodes, got batch=9"):
        Acceptance(9)


@pytest.mark.parametrize(
    ("constraint", "by_labels"),
    [(LearnedLimit(), False), (UnsafeRate(0.1), True), (Acceptance(10), True)],
)
def test_what_follows_labels_measures_nothing_without_any(constraint, by_labels):
    measured, _ = constraint.measure(Answers(), np.array([1.0, 2.0]), 0.0)
    assert (measured is None) is by_labels is constraint.by_labels
