import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl import errors
from pbcrl.lagrange import LagrangeMultiplier

law = settings(derandomize=True, deadline=None, max_examples=30)
cost_sequences = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


def after(costs, *, limit=1.0, **options):
    """A multiplier that has seen these mean episode costs."""
    multiplier = LagrangeMultiplier(**options)
    for cost in costs:
        multiplier.update(cost, limit)
    return multiplier


def test_the_rule_by_hand():
    """Limit 10, costs 15, 25, 0, so relative excesses of .5, 1.5, -1, which are averaged to .5, .7
    and .36. The integral: .05, .12, .156; ten times as much at once: .5, .7, .36.
    """
    multiplier = LagrangeMultiplier(cap=5.0)
    values = [math.log(multiplier.update(cost, 10.0)) for cost in (15.0, 25.0, 0.0)]
    assert values == pytest.approx([0.05 + 0.5, 0.12 + 0.7, 0.156 + 0.36])


def test_a_hundred_times_the_limit_is_remembered_no_longer_than_six_times():
    many, six = (after([cost, 0.5, 0.5]).value for cost in (100.0, 6.0))
    assert many == six


@pytest.mark.parametrize("period", [3, 4])
def test_a_cost_that_comes_now_and_then_is_judged_by_its_mean(period):
    """0 in all but one update of `period`, and 1.2 times the limit on average. Clipped by itself,
    each such excess would count 1, and the others -1."""
    assert after(([0.0] * (period - 1) + [1.2 * period]) * 30).value > 1


@law
@given(costs=cost_sequences, unit=st.sampled_from([1e-6, 0.125, 1000.0]))
def test_the_unit_of_costs_and_limit_does_not_matter(costs, unit):
    one, other = LagrangeMultiplier(), LagrangeMultiplier()
    for cost in costs:
        scaled = other.update(unit * cost, unit * 7.0)
        assert scaled == pytest.approx(one.update(cost, 7.0), rel=1e-9)


@law
@given(costs=cost_sequences)
def test_it_stays_between_its_bounds_and_its_integral_does_not_wind_up(costs):
    multiplier = LagrangeMultiplier(lr=0.5, cap=3.0)
    assert all(0.03 <= multiplier.update(cost, 5.0) <= 3.0 for cost in costs)
    for _ in range(200):
        multiplier.update(50.0, 5.0)
    assert multiplier.value == pytest.approx(3.0)
    values = [multiplier.update(0.0, 5.0) for _ in range(16)]
    assert values[-1] < 1.0  # and not after as many updates as it was broken for


def test_after_a_long_safe_phase_a_violation_raises_it_within_four_updates():
    multiplier = after([0.0] * 500)
    assert multiplier.value == pytest.approx(0.03)
    assert max(multiplier.update(6.0, 1.0) for _ in range(4)) > 0.06


def test_it_finds_prices_that_lie_orders_of_magnitude_apart():
    """A policy whose cost falls as 10 / (1 + λ / p) meets the limit 5 at λ = p."""
    for price, updates in ((0.04, 500), (1.0, 500), (25.0, 3000)):  # above 3 it moves slowly
        multiplier = LagrangeMultiplier(cap=30.0)
        for _ in range(updates):
            multiplier.update(10 / (1 + multiplier.value / price), 5.0)
        assert multiplier.value == pytest.approx(price, rel=0.01)


@pytest.mark.parametrize("missing", [None, 3])
@pytest.mark.parametrize(("delay", "follow"), [(3, 1.0), (0, 0.3)], ids=["late", "slow"])
def test_with_a_late_or_slow_policy_it_finds_the_price_of_the_limit(delay, follow, missing):
    """The cost tends to 10 / (1 + λ), which meets 5 at 1; every third update may see no episode."""
    multiplier, cost, values = LagrangeMultiplier(initial=0.1), 10.0, [0.1]
    for step in range(1500):
        seen = values[max(0, len(values) - 1 - delay)]
        cost += follow * (10 / (1 + seen) - cost)
        unfinished = missing is not None and step % missing == 0
        values.append(multiplier.update(None if unfinished else cost, 5.0))
    assert values[-100:] == pytest.approx([1.0] * 100, abs=0.01)


def test_with_a_limit_of_0_it_asks_how_large_the_excess_was_of_late():
    """4 is as large as its own average: e = 1. Then -1 against .8 · 4 + .2 · 1 = 3.4, so that
    e = .8 - .2 / 3.4 = .741."""
    multiplier = LagrangeMultiplier(lr=0.05)
    assert math.log(multiplier.update(4.0)) == pytest.approx(0.05 + 0.5)
    e = 0.8 - 0.2 / 3.4
    assert math.log(multiplier.update(-1.0)) == pytest.approx(0.05 + 0.05 * e + 0.5 * e)
    assert LagrangeMultiplier().update(0.0) == 1.0  # nothing costs: nothing to move for


@law
@given(costs=st.lists(st.floats(0, 100), max_size=30))
def test_by_a_limit_of_0_true_costs_never_take_it_below_its_start(costs):
    """After many updates without a cost, too: the integral falls in none."""
    multiplier = LagrangeMultiplier()
    assert min(multiplier.update(cost) for cost in [*costs, *[0.0] * 200]) >= 1.0


def test_by_a_limit_of_0_costs_that_go_on_take_it_to_its_cap():
    """A cost in one update of a hundred: λ rests higher each time, in the end at the cap."""
    rests = [after(([5.0] + [0.0] * 99) * count, limit=0.0).value for count in (0, 1, 2, 20)]
    assert 1.0 == rests[0] < rests[1] < rests[2] < 3.0
    assert rests[-1] == pytest.approx(3.0, abs=0.01)


def test_above_a_dear_price_it_moves_at_a_tenth_of_its_speed():
    """At twice the limit e = 1, of which 1 is there at once: an integral of log 3 - 1 is a λ of 3,
    and grows by 0.01 per update, not 0.1. Without any cost e falls to -1, and 0.01 is lost."""
    multiplier = LagrangeMultiplier(cap=30.0)
    values = [multiplier.update(20.0, 10.0) for _ in range(201)]
    assert values[::100] == pytest.approx([3.0, 3 * math.exp(1), 3 * math.exp(2)])
    falling = [multiplier.update(0.0, 10.0) for _ in range(40)]
    assert falling[-1] / falling[-2] == pytest.approx(math.exp(-0.01), rel=1e-3)


def test_above_a_dear_price_of_1_a_violation_raises_it_slowly_and_it_falls_at_once():
    """The ceiling begins at 1, where λ is: by e = 1 it is e^0.01, e^0.02, ... e. The integral rests
    at 0. Then nothing costs: E is 0.6, 0.28, 0.024, and the integral a tenth of their sum. The
    ceiling, where λ was once more by then, and so by 0.006 higher, is there still."""
    multiplier = LagrangeMultiplier(dear=1.0)
    values = [multiplier.update(20.0, 10.0) for _ in range(100)]
    assert values == pytest.approx(np.exp(np.arange(1, 101) / 100))
    falling = [math.log(multiplier.update(0.0, 10.0)) for _ in range(3)]
    assert falling == pytest.approx([0.06 + 0.6, 0.088 + 0.28, 0.0904 + 0.024])
    again = [math.log(multiplier.update(60.0, 10.0)) for _ in range(2)]
    assert again == pytest.approx([1.006, 1.016])


def test_a_first_price_above_the_dear_one_is_where_it_begins():
    multiplier = LagrangeMultiplier(initial=2.0, dear=1.0)
    assert multiplier.update(20.0, 10.0) == pytest.approx(2.0 * math.exp(0.01))


@pytest.mark.parametrize("dear", [0.0, -1.0, math.nan, math.inf])
def test_a_dear_price_that_is_none_is_refused(dear):
    with pytest.raises(ValueError, match=r"dear must lie in \(0, inf\), got"):
        LagrangeMultiplier(dear=dear)


def test_a_reset_may_lift_the_ceiling():
    """A violation takes λ to it at once: 1.01 times the first one, which it is at, or 2."""
    multiplier = LagrangeMultiplier(dear=1.0)
    assert multiplier.dear == 1.0
    for ceiling, expected in ((0.0, math.exp(0.01)), (2.0, 2.0), (1.0, math.exp(0.01))):
        multiplier.reset(ceiling=ceiling)
        assert multiplier.update(60.0, 10.0) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"ceiling must lie in \[0, inf\), got inf"):
        multiplier.reset(ceiling=math.inf)


def test_against_a_limit_that_no_policy_meets_it_stops_at_its_cap():
    assert after([12.0] * 1000, cap=3.0).value == 3


@law
@given(costs=cost_sequences, initial=st.floats(0, 4.0))
def test_a_step_size_of_0_is_a_constant_multiplier(costs, initial):
    multiplier = LagrangeMultiplier(lr=0.0, initial=initial, cap=5.0)
    assert all(multiplier.update(cost) == initial for cost in costs)
    assert multiplier.update(1.0, math.inf) == 0  # free all the same without a limit


def test_a_rollout_in_which_no_episode_ends_leaves_everything_as_it_was():
    multiplier = after([3.0, 5.0])
    before = multiplier.state_dict()
    assert multiplier.update(None) == before["value"]
    assert multiplier.state_dict() == before


def test_an_infinite_limit_makes_cost_free_and_a_limit_begins_anew():
    multiplier = after([9.0] * 20, initial=2.0)
    assert multiplier.update(None, math.inf) == 0
    assert multiplier.update(1e6, math.inf) == 0
    assert multiplier.update(1.0, 1.0) == pytest.approx(2.0)


def test_after_a_reset_it_goes_as_at_first():
    first, again = LagrangeMultiplier(initial=0.1), LagrangeMultiplier(initial=0.1)
    again.update(50.0, 10.0)
    again.reset()
    assert again.state_dict() == first.state_dict()
    assert [again.update(30.0, 20.0) for _ in range(5)] == [
        first.update(30.0, 20.0) for _ in range(5)
    ]
    again.reset()
    assert again.value == 0.1


def test_it_continues_exactly_from_its_saved_state():
    original = after([3.0, 0.0, 9.0])
    restored = LagrangeMultiplier(initial=2.0)
    restored.load_state_dict(original.state_dict())
    assert restored.value == original.value
    for cost in (4.0, -30.0, 2.0):
        assert restored.update(cost, 1.0) == original.update(cost, 1.0)


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


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_a_step_size_that_is_none_is_refused(lr):
    with pytest.raises(ValueError, match=r"lr must lie in \[0, inf\), got .*; 0 is a constant"):
        LagrangeMultiplier(lr=lr)


@pytest.mark.parametrize("initial", [-0.1, 0.0, 3.1, math.nan, math.inf])
def test_a_start_out_of_bounds_is_refused(initial):
    with pytest.raises(ValueError, match=r"initial must lie in \(0, 3\.0\], got .*; λ moves"):
        LagrangeMultiplier(initial=initial)


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_an_infinite_start_is_refused_without_a_cap_too(lr):
    with pytest.raises(ValueError, match=r"initial must lie in .0, inf\), got inf; λ moves"):
        LagrangeMultiplier(lr=lr, initial=math.inf, cap=math.inf)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_of_nothing_is_refused(cap):
    with pytest.raises(ValueError, match=r"cap must lie in \(0, inf\], got .*; inf is no cap"):
        LagrangeMultiplier(cap=cap)


def test_a_multiplier_shows_its_price():
    """λ = e^(0.05 + 10 · 0.05) after twice the limit; its first digits."""
    multiplier = LagrangeMultiplier(lr=0.05, cap=math.inf)
    assert repr(multiplier) == "LagrangeMultiplier(value=1, lr=0.05, cap=inf)"
    multiplier.update(40.0, 20.0)
    assert repr(multiplier) == "LagrangeMultiplier(value=1.733, lr=0.05, cap=inf)"


def test_a_state_with_other_keys_or_impossible_values_is_refused_and_changes_nothing():
    multiplier = after([3.0])
    state = multiplier.state_dict()
    with pytest.raises(ValueError, match=r"LagrangeMultiplier has the keys .*got \['value'\]"):
        multiplier.load_state_dict({"value": 1.0})
    for broken in ({"value": -1.0}, {"excess": math.nan}, {"updates": -1.0}):
        with pytest.raises(ValueError, match="state must be finite, with value, scale, updates"):
            multiplier.load_state_dict({**state, **broken})
    assert multiplier.state_dict() == state


@pytest.mark.parametrize(
    ("initial", "lowest"), [(1.0, 0.03), (0.1, 0.03), (0.03, 0.03), (0.01, 0.01)]
)
def test_without_cost_the_price_falls_to_3_hundredths_or_to_where_it_began(initial, lowest):
    multiplier = LagrangeMultiplier(initial=initial)
    for _ in range(200):
        multiplier.update(0.0, 1.0)
    assert multiplier.value == pytest.approx(lowest)
