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


def test_the_unsafe_rate_is_compared_with_the_highest_allowed_whatever_was_learned():
    constraint = UnsafeRate(0.2)
    assert constraint.measure(pairs(0.25), np.array([9.0]), 3.0) == (0.25, 0.2)
    assert constraint.measure(Answers(), np.array([9.0]), 3.0) == (None, 0.2)


@pytest.mark.parametrize(
    ("label", "measured"), [(SAFE, 0.0), (UNSAFE, 1.0), (NO_ANSWER, None), (None, None)]
)
def test_a_rejected_batch_is_1_and_an_accepted_one_0_of_at_most_a_half(label, measured):
    constraint = Acceptance(20)
    assert constraint.measure(batch(label), np.array([9.0]), 3.0) == (measured, 0.5)
    assert constraint.judge(batch(label)) == (measured, 0.5)


@pytest.mark.parametrize(("constraint", "allowed"), [(LearnedLimit(), 0.5), (UnsafeRate(0.2), 0.2)])
def test_labels_of_pairs_judge_the_policy_that_is_there_and_not_an_older_one(constraint, allowed):
    assert constraint.judge(pairs(0.25)) == (0.25, allowed)
    assert constraint.judge(pairs(0.25, num_late=1)) == (None, allowed)
    assert constraint.judge(Answers()) == (None, allowed)


def test_a_late_answer_moves_the_multiplier_but_judges_no_policy():
    late = batch(UNSAFE, shown=False)
    assert Acceptance(20).measure(late, NONE, 0.0) == (1.0, 0.5)
    assert Acceptance(20).judge(late) == (None, 0.5)
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
