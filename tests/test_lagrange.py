import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl import errors
from pbcrl.lagrange import LagrangeMultiplier

law = settings(derandomize=True, deadline=None)
cost_sequences = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


def after(costs: list[float], *, limit: float = 0.0, initial: float = 0.01) -> LagrangeMultiplier:
    multiplier = LagrangeMultiplier(initial=initial)
    for cost in costs:
        multiplier.update(cost, limit)
    return multiplier


@pytest.mark.parametrize("excess", [0.1, 5.0, 300.0])
def test_the_first_step_is_the_learning_rate_however_large_the_excess(excess):
    """Adam's first step is lr · g / |g|."""
    multiplier = LagrangeMultiplier(lr=0.035, initial=0.01)
    assert multiplier.update(excess) == pytest.approx(0.045)


def test_being_below_the_limit_lowers_the_multiplier():
    assert LagrangeMultiplier(lr=0.035, initial=0.1).update(-3.0) == pytest.approx(0.065)


def test_away_from_0_the_multiplier_is_torch_s_adam():
    costs = [30.0, 12.0, -4.0, -20.0, 3.0, 3.0, -1.0, 8.0]
    value = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([value], lr=0.035, maximize=True)
    multiplier = LagrangeMultiplier(lr=0.035, initial=2.0)
    for cost in costs:
        value.grad = torch.tensor(cost, dtype=torch.float64)
        adam.step()
        assert multiplier.update(cost) == pytest.approx(value.item(), rel=1e-12)


@law
@given(cost_sequences)
def test_the_multiplier_is_never_negative(costs):
    multiplier = LagrangeMultiplier()
    assert all(multiplier.update(cost) >= 0 for cost in costs)


@law
@given(cost_sequences, st.sampled_from([0.5, 8.0, 1024.0]))
def test_the_scale_of_the_costs_does_not_matter(costs, scale):
    costs = [round(cost, 2) for cost in costs]
    scaled = after([scale * cost for cost in costs])
    assert scaled.value == pytest.approx(after(costs).value, abs=1e-5)


def test_only_the_excess_over_the_limit_matters():
    assert after([45.0, 30.0, 10.0], limit=20).value == after([25.0, 10.0, -10.0]).value


def test_a_rollout_in_which_no_episode_ends_leaves_everything_as_it_was():
    multiplier = after([3.0, 5.0])
    before = multiplier.state_dict()
    assert multiplier.update(None) == before["value"]
    assert multiplier.state_dict() == before


def test_an_infinite_limit_makes_cost_free_and_leaves_adam_alone():
    multiplier = after([3.0, 5.0])
    before = multiplier.state_dict()
    assert multiplier.update(1e6, math.inf) == 0
    assert multiplier.update(None, math.inf) == 0
    assert multiplier.state_dict() == {**before, "value": 0}


def test_after_a_long_safe_phase_the_first_violation_raises_the_multiplier_at_once():
    """Kept momentum would hold it at 0 for 7 updates: 0.9⁷ < 1/2."""
    multiplier = after([-5.0] * 200)
    assert multiplier.value == 0
    assert multiplier.update(5.0) > 0.003


def test_the_multiplier_settles_where_the_policy_just_meets_the_limit():
    """A policy whose cost falls as 40 / (1 + λ) meets the limit 20 at λ = 1."""
    multiplier, values = LagrangeMultiplier(), []
    for _ in range(1500):
        values.append(multiplier.update(40 / (1 + multiplier.value), 20))
    assert values[-100:] == pytest.approx([1.0] * 100, abs=0.05)


def test_a_multiplier_continues_exactly_from_its_saved_state():
    original, restored = after([3.0, -5.0, 9.0]), LagrangeMultiplier(initial=7.0)
    restored.load_state_dict(original.state_dict())
    for cost in (4.0, -30.0, 2.0):
        assert restored.update(cost) == original.update(cost)


@pytest.mark.parametrize("cost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_a_cost_that_is_not_finite_is_refused_and_changes_nothing(cost, limit):
    multiplier = after([3.0])
    before = multiplier.state_dict()
    with pytest.raises(errors.NonFiniteError, match=r"finite mean episode cost, got .*; pass None"):
        multiplier.update(cost, limit)
    assert multiplier.state_dict() == before


@pytest.mark.parametrize("limit", [math.nan, -math.inf])
def test_a_limit_that_is_no_limit_is_refused(limit):
    with pytest.raises(ValueError, match=r"limit must be a number or inf \(unconstrained\), got"):
        LagrangeMultiplier().update(1.0, limit)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_a_step_size_that_cannot_move_the_multiplier_is_refused(lr):
    with pytest.raises(ValueError, match="lr must be > 0 and finite, got"):
        LagrangeMultiplier(lr=lr)


@pytest.mark.parametrize("initial", [-0.1, math.nan, math.inf])
def test_a_negative_or_endless_start_is_refused(initial):
    with pytest.raises(ValueError, match="initial must be >= 0 and finite, got"):
        LagrangeMultiplier(initial=initial)


def test_a_state_with_other_keys_or_impossible_values_is_refused_and_changes_nothing():
    multiplier = after([3.0])
    state = multiplier.state_dict()
    with pytest.raises(ValueError, match=r"has the keys \['first_moment', .*got \['value'\]"):
        multiplier.load_state_dict({"value": 1.0})
    for broken in ({"value": -1.0}, {"first_moment": math.nan}, {"updates": -1.0}):
        with pytest.raises(ValueError, match="state must be finite, with value, second_moment"):
            multiplier.load_state_dict({**state, **broken})
    assert multiplier.state_dict() == state
