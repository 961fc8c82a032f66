"""The paper's lemma, theorem, corollary and bounds, as properties of our loss in float64.

Costs stay within |Ĉ| <= 15: beyond, both gradients round to the same number.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from pbcrl.losses import safety_loss

law = settings(derandomize=True, deadline=None, max_examples=50)
cost = st.floats(-15, 15)
dead_zones = st.floats(0.01, 10)
step_sizes = st.floats(0.001, 3.99)


def gradient(costs: object, *, dead_zone: float, unsafe_probability: float = 1.0) -> Tensor:
    """Gradient of the safety loss with respect to each cost, as if it were alone in its batch."""
    leaf = torch.as_tensor(costs, dtype=torch.float64).clone().requires_grad_()
    safe = torch.full_like(leaf, 1 - unsafe_probability)
    (len(leaf) * safety_loss(leaf, safe, dead_zone=dead_zone)).backward()
    assert leaf.grad is not None
    return leaf.grad


def descend(costs: Tensor, *, step_size: float, dead_zone: float) -> Tensor:
    return costs - step_size * gradient(costs, dead_zone=dead_zone)


@law
@given(cost, dead_zones)
def test_dead_zone_pushes_every_unsafe_cost_up_harder_than_plain_bradley_terry(value, dead_zone):
    """Lemma 3.1."""
    plain = gradient([value], dead_zone=0).item()
    with_dead_zone = gradient([value], dead_zone=dead_zone).item()
    assert with_dead_zone < plain < 0


@law
@given(cost, dead_zones, step_sizes)
def test_gradient_descent_with_a_dead_zone_stays_strictly_above_and_within_it(
    value, dead_zone, step_size
):
    """Theorem 3.2, with its own condition, step size < 4; and the shift never exceeds δ."""
    plain = with_dead_zone = tensor([value], dtype=torch.float64)
    for _ in range(20):
        plain = descend(plain, step_size=step_size, dead_zone=0)
        with_dead_zone = descend(with_dead_zone, step_size=step_size, dead_zone=dead_zone)
        assert plain < with_dead_zone <= plain + dead_zone


@law
@given(st.lists(cost, min_size=1, max_size=20), dead_zones, step_sizes, cost)
def test_dead_zone_never_lightens_the_right_tail_and_is_heavier_where_a_cost_crosses(
    values, dead_zone, step_size, z
):
    """Corollary 3.3; strict only at a z that some cost crosses, for an empirical distribution."""
    plain = with_dead_zone = tensor(values, dtype=torch.float64)
    for _ in range(10):
        plain = descend(plain, step_size=step_size, dead_zone=0)
        with_dead_zone = descend(with_dead_zone, step_size=step_size, dead_zone=dead_zone)
    assert (with_dead_zone >= z).sum() >= (plain >= z).sum()
    for crossed in with_dead_zone:
        assert (with_dead_zone >= crossed).sum() > (plain >= crossed).sum()


@pytest.mark.parametrize("dead_zone", [0.5, 1.0, 3.0])
def test_the_gap_between_the_two_losses_tends_to_the_dead_zone(dead_zone):
    """Ĉ - δ follows the same dynamics as Ĉ from a lower start, and the start is forgotten.

    So the dead zone is a bounded shift of unsafe costs, not a change of their tail index.
    """
    plain = with_dead_zone = tensor([-2.0, 0.0, 2.0], dtype=torch.float64)
    for _ in range(1000):
        plain = descend(plain, step_size=3.9, dead_zone=0)
        with_dead_zone = descend(with_dead_zone, step_size=3.9, dead_zone=dead_zone)
    np.testing.assert_allclose(with_dead_zone - plain, dead_zone, atol=0.02)


@pytest.mark.parametrize(
    ("dead_zone", "boundary"), [(0.0, 0.5), (1.0, 0.406), (2.0, 0.362), (20.0, 1 / 3)]
)
def test_the_model_calls_unsafe_what_is_unsafe_with_less_than_even_odds(dead_zone, boundary):
    """A trajectory that is unsafe with probability p has its best cost where the gradient is 0.

    That is (1 - p) σ(Ĉ) = p σ(δ - Ĉ). At Ĉ = 0, (1 - p) / 2 = p σ(δ), so p = 1 / (1 + 2 σ(δ)) with
    σ(δ) = e^δ / (1 + e^δ): p = (e^δ + 1) / (3 e^δ + 1). It falls from 1/2 at δ = 0 to 1/3. Riskier
    trajectories are pushed above 0, less risky ones below.
    """
    e = math.exp(dead_zone)
    p = (e + 1) / (3 * e + 1)
    assert p == pytest.approx(boundary, abs=5e-4)
    at_limit = {"costs": [0.0], "dead_zone": dead_zone}
    assert gradient(**at_limit, unsafe_probability=p).item() == pytest.approx(0, abs=1e-12)
    assert gradient(**at_limit, unsafe_probability=p + 0.01).item() < 0
    assert gradient(**at_limit, unsafe_probability=p - 0.01).item() > 0


@law
@given(st.lists(st.tuples(st.floats(-3, 3), cost), min_size=2, max_size=8))
def test_the_spread_of_costs_bounds_the_policy_gradient(rows):
    """Eq. 34 for a softmax policy over trajectories: |∇J|² <= Var(Ĉ) E|∇ log π|²."""
    logits, costs = tensor(rows, dtype=torch.float64).unbind(dim=1)
    logits.requires_grad_()
    policy = logits.softmax(0)
    (policy_gradient,) = torch.autograd.grad((policy * costs).sum(), logits)

    policy = policy.detach()
    variance = (policy * costs**2).sum() - (policy * costs).sum() ** 2
    score = torch.eye(len(rows), dtype=torch.float64) - policy  # ∇ log π of each trajectory, by row
    score_variance = (policy * score.square().sum(1)).sum()
    assert policy_gradient.square().sum() <= variance * score_variance + 1e-9


def test_a_flat_cost_gives_no_policy_gradient_and_twice_the_spread_twice_the_gradient():
    logits = tensor([0.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    costs = tensor([0.0, 1.0, 5.0], dtype=torch.float64)

    def policy_gradient(costs: Tensor) -> Tensor:
        return torch.autograd.grad((logits.softmax(0) * costs).sum(), logits)[0]

    torch.testing.assert_close(
        policy_gradient(torch.full_like(costs, 7.0)), torch.zeros_like(costs)
    )
    torch.testing.assert_close(policy_gradient(2 * costs), 2 * policy_gradient(costs))
