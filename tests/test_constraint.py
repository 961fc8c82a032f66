"""What moves λ: numbers by hand, and that λ goes up exactly where the constraint is broken."""

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


def labelled(unsafe_rate, predicted_rate, number):
    return Answers(
        np.arange(4),
        unsafe_rate=unsafe_rate,
        model_error=unsafe_rate - predicted_rate,
        num_judged=number,
    )


def test_what_the_model_says_of_all_episodes_is_corrected_by_its_error_on_labelled_ones():
    """It calls 2 of 4 unsafe, and called 3 of 12 so where 6 were: 3 errors of 12, and 3 as none.

    Each iteration takes a twentieth of the weight, each label by the newer ones as well.
    """
    constraint = UnsafeRate(0.2)
    costs = np.array([1.0, 2.0, 5.0, 9.0])
    assert constraint.measure(labelled(0.5, 0.25, 12), costs, 3.0) == (
        pytest.approx(0.5 + 3 / 15),
        0.2,
    )
    rate, _ = constraint.measure(Answers(), costs, 3.0)
    assert rate == pytest.approx(0.5 + 0.95 * 3 / (0.95 * 12 + 3))
    rate, _ = constraint.measure(labelled(0.5, 0.5, 10), costs, 3.0)  # an exact one
    kept = 0.95**2 * math.exp(-10 / 20)
    assert rate == pytest.approx(0.5 + kept * 3 / (kept * 12 + 10 + 3))
    assert constraint.measure(Answers(), NONE, 3.0) == (None, 0.2)


@pytest.mark.parametrize(
    ("costs", "error", "measured"),
    [
        ([7.0, 7.0], 0.0, 0.7),  # all are safe, by three tenths: 1 - 0.3 in the place of 0
        ([9.9, 9.9], 0.0, 0.8),  # by a hundredth: a fifth of e counts
        ([-9.0, 9.0], 0.0, 0.8),  # the cost that a fifth of the episodes exceed
        ([-9.0, -9.0], 0.0, 0.0),  # no more than P says
        ([10.1, 10.1], 0.0, 5.0),  # all are unsafe, by whatever it may be
        ([7.0, 7.0], 0.6, 3.0),  # the model errs, labels say 0.6
        ([12.0, 12.0], -0.9, 0.5),
    ],
)
def test_lambda_falls_no_faster_than_learned_costs_are_below_their_limit(costs, error, measured):
    """Of p* = 0.2 and of a learned limit of 10; measured is in units of p*."""
    answers = Answers(model_error=error * 1.3, num_judged=10)  # and 3 that found it right
    found, allowed = UnsafeRate(0.2).measure(answers, np.array(costs), 10.0)
    assert (found / allowed, allowed) == (pytest.approx(measured), 0.2)


@pytest.mark.parametrize(
    ("costs", "by_labels", "by_marks"),
    [
        ([0.0] * 19 + [400.0], 1, 2),  # one of twenty is unsafe, as is allowed: the mean is 20
        ([0.0] * 19 + [30.0], 1, 1),  # the mean is 1.5
        ([9.0] * 20, 0.8, 0.9),  # λ falls no faster than the mean is below the limit
        ([0.0] * 20, 0, 0),
        ([11.0] * 20, 20, 20),  # all are unsafe, by little
    ],
)
def test_by_marks_the_mean_learned_cost_must_be_within_the_limit_too(costs, by_labels, by_marks):
    """In units of p* = 0.05, with a learned limit of 10."""
    answers = Answers(model_error=0.0, num_judged=10)
    for expected, known in ((by_labels, False), (by_marks, True)):
        found, _ = UnsafeRate(0.05).measure(answers, np.array(costs), 10.0, by_marks=known)
        assert found / 0.05 == pytest.approx(expected)


def test_a_network_whose_limit_is_0_has_no_relative_excess():
    answers = Answers(model_error=0.0, num_judged=10)
    assert UnsafeRate(0.2).measure(answers, np.array([0.1, 0.1]), 0.0) == (1.0, 0.2)


def test_whatever_the_model_says_the_corrected_rate_is_unbiased_and_steadier_than_labels():
    """30 % are unsafe; a model is right in nine cases of ten; 20 of 200 episodes get a label."""
    rng, constraint = np.random.default_rng(0), UnsafeRate(0.2)
    corrected, by_labels = [], []
    for _ in range(4_000):
        unsafe = rng.random(200) < 0.3
        said = unsafe ^ (rng.random(200) < 0.1)
        shares = unsafe[:20].mean(), said[:20].mean()
        rate, _ = constraint.measure(labelled(*shares, 20), said.astype(float), 0.5)
        corrected.append(rate)
        by_labels.append(shares[0])
    assert abs(np.mean(corrected) - 0.3) < 0.005
    assert abs(said.mean() - 0.3) > 0.03  # the model alone is wrong: 0.34
    assert np.std(corrected) < 0.6 * np.std(by_labels)


def test_what_is_known_of_the_model_outlives_the_process():
    old, new = UnsafeRate(0.2), UnsafeRate(0.2)
    old.measure(labelled(0.5, 0.25, 8), NONE, 3.0)
    new.load_state_dict(old.state_dict())
    assert new == old
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
