import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pbcrl.dead_zone import DeadZone
from pbcrl.losses import safety_loss


def test_predicting_a_fifth_too_many_violations_lowers_the_dead_zone_by_two_fifths():
    dead_zone = DeadZone(1.0, lr=1.0)
    assert dead_zone.update(0.5, 0.3) == pytest.approx(1 - 2 * 0.2)
    assert dead_zone.value == pytest.approx(0.6)


def test_a_dead_zone_shows_where_it_is():
    dead_zone = DeadZone(1.0, lr=0.5)
    dead_zone.update(0.5, 0.25)
    assert repr(dead_zone) == "DeadZone(value=0.75, lr=0.5, maximum=10)"


def test_predicting_too_few_violations_raises_the_dead_zone():
    assert DeadZone(1.0, lr=0.5).update(0.1, 0.4) == pytest.approx(1 + 2 * 0.5 * 0.3)


def test_equal_rates_leave_the_dead_zone_as_it_was():
    assert DeadZone(1.3).update(0.25, 0.25) == 1.3


def test_the_dead_zone_stays_between_0_and_its_maximum():
    assert DeadZone(0.5).update(1.0, 0.0) == 0
    assert DeadZone(9.5).update(0.0, 1.0) == 10
    assert DeadZone(1.0, maximum=1.5).update(0.0, 1.0) == 1.5


def test_a_rate_of_0_keeps_the_dead_zone_fixed():
    assert DeadZone(1.0, lr=0).update(1.0, 0.0) == 1


def test_the_dead_zone_continues_from_a_saved_value():
    saved = DeadZone(1.0)
    saved.update(0.2, 0.5)
    assert DeadZone(saved.value).update(0.4, 0.3) == saved.update(0.4, 0.3)


def fine_tuned(costs: Tensor, unsafe_probability: Tensor, dead_zone: float) -> Tensor:
    """Costs after 60 gradient steps on labels that hold with the given probabilities."""
    for _ in range(60):
        leaf = costs.clone().requires_grad_()
        loss = safety_loss(leaf, 1 - unsafe_probability, dead_zone=dead_zone)
        (gradient,) = torch.autograd.grad(len(leaf) * loss, leaf)
        costs = costs - 2 * gradient
    return costs


UNSAFE_PROBABILITY = torch.tensor(np.random.default_rng(0).beta(1.2, 2.0, size=400))


def violation_rate(costs: Tensor) -> float:
    return (costs > 0).double().mean().item()


def test_training_with_a_larger_dead_zone_predicts_more_violations():
    """The monotonicity that root finding rests on; also why a model without dead zone is too lax.

    Of 400 trajectories of different risk, 37 % are unsafe on average, but only 28 % are so with
    better than even odds.
    """
    rates = [
        violation_rate(fine_tuned(torch.zeros(400).double(), UNSAFE_PROBABILITY, dead_zone))
        for dead_zone in (0.0, 0.5, 1.0, 2.0)
    ]
    assert rates == sorted(set(rates))
    assert rates[0] < UNSAFE_PROBABILITY.mean() < rates[-1]


@pytest.mark.parametrize("initial", [0.0, 5.0])
def test_alternating_with_fine_tuning_the_dead_zone_makes_the_violation_rates_agree(initial):
    dead_zone, costs = DeadZone(initial), torch.zeros(400).double()
    true_rate = UNSAFE_PROBABILITY.mean().item()
    before = abs(violation_rate(fine_tuned(costs, UNSAFE_PROBABILITY, initial)) - true_rate)
    for _ in range(60):
        costs = fine_tuned(costs, UNSAFE_PROBABILITY, dead_zone.value)
        dead_zone.update(violation_rate(costs), true_rate)
    assert abs(violation_rate(costs) - true_rate) <= 0.01 < 0.05 < before


def test_autograd_through_a_smooth_violation_rate_has_the_wrong_sign():
    """Descent on (mean σ(Ĉ - δ) - P)² raises δ when too many violations are predicted.

    A larger δ then trains the model to predict still more of them: positive feedback.
    """
    costs, true_rate = torch.tensor([3.0, 4.0, 5.0, -2.0]), 0.25
    delta = torch.tensor(1.0, requires_grad=True)
    ((costs - delta).sigmoid().mean() - true_rate).square().backward()
    autograd_step = -delta.grad.item()
    our_step = DeadZone(1.0).update(violation_rate(costs), true_rate) - 1.0
    assert our_step < 0 < autograd_step


@pytest.mark.parametrize("rate", [-0.01, 1.01, math.nan])
def test_a_rate_that_is_no_share_is_refused_and_changes_nothing(rate):
    dead_zone = DeadZone(1.0)
    with pytest.raises(ValueError, match=r"^predicted_violation_rate must lie in \[0, 1\], got"):
        dead_zone.update(rate, 0.5)
    with pytest.raises(ValueError, match=r"^violation_rate must lie in \[0, 1\], got .*; skip the"):
        dead_zone.update(0.5, rate)
    assert dead_zone.value == 1


@pytest.mark.parametrize(
    ("initial", "maximum"), [(-1.0, 10.0), (11.0, 10.0), (math.nan, 10.0), (1.0, math.inf)]
)
def test_a_start_outside_the_range_is_refused(initial, maximum):
    with pytest.raises(ValueError, match=r"0 <= initial <= maximum < inf, got initial="):
        DeadZone(initial, maximum=maximum)


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_a_negative_or_endless_step_size_is_refused(lr):
    with pytest.raises(ValueError, match=r"lr must lie in \[0, inf\), got .*; 0 keeps the"):
        DeadZone(lr=lr)
