import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl import errors
from pbcrl.lagrange import (
    AdamMultiplier,
    AscentMultiplier,
    LagrangeMultiplier,
    PIDMultiplier,
    SoftplusMultiplier,
)

RULES = (AdamMultiplier, AscentMultiplier, SoftplusMultiplier, PIDMultiplier)
each_rule = pytest.mark.parametrize("rule", RULES)
law = settings(derandomize=True, deadline=None, max_examples=30)
cost_sequences = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


def after(costs, *, limit=0.0, initial=0.01, rule=AdamMultiplier, **options):
    """A multiplier that has seen these mean episode costs."""
    multiplier = rule(initial=initial, **options)
    for cost in costs:
        multiplier.update(cost, limit)
    return multiplier


@pytest.mark.parametrize("excess", [0.1, 5.0, 300.0])
def test_the_first_step_is_the_learning_rate_however_large_the_excess(excess):
    """Adam's first step is lr · g / |g|."""
    multiplier = AdamMultiplier(lr=0.035, initial=0.01)
    assert multiplier.update(excess) == pytest.approx(0.045)


def test_being_below_the_limit_lowers_the_multiplier():
    assert AdamMultiplier(lr=0.035, initial=0.1).update(-3.0) == pytest.approx(0.065)


def test_away_from_0_the_multiplier_is_torch_s_adam():
    costs = [30.0, 12.0, -4.0, -20.0, 3.0, 3.0, -1.0, 8.0]
    value = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([value], lr=0.035, maximize=True)
    multiplier = AdamMultiplier(lr=0.035, initial=2.0)
    for cost in costs:
        value.grad = torch.tensor(cost, dtype=torch.float64)
        adam.step()
        assert multiplier.update(cost) == pytest.approx(value.item(), rel=1e-12)


def test_ascent_adds_a_hundredth_of_each_excess_and_stops_at_0():
    multiplier = AscentMultiplier(lr=0.01, initial=0.1)
    values = [multiplier.update(cost, 20) for cost in (35.0, 10.0, -30.0, 22.0)]
    assert values == pytest.approx([0.25, 0.15, 0.0, 0.02])


@law
@given(cost_sequences)
def test_pid_with_the_integral_alone_is_ascent(costs):
    ascent = AscentMultiplier(lr=0.02)
    pid = PIDMultiplier(lr=0.02, proportional=0, derivative=0, smoothing=0.7)
    assert all(pid.update(cost) == ascent.update(cost) for cost in costs)


def test_pid_without_averaging_is_algorithm_2_of_stooke_et_al():
    """K_I = .1, K_P = .2, K_D = .3, limit 1. Costs 3, 5, 2, 0 leave the integral at
    .2, .6, .7, .6; add .2 times the excess 2, 4, 1, -1 and .3 times the only rise, 2."""
    pid = PIDMultiplier(lr=0.1, initial=0, proportional=2, derivative=3, smoothing=0)
    values = [pid.update(cost, 1.0) for cost in (3.0, 5.0, 2.0, 0.0)]
    assert values == pytest.approx([0.6, 0.6 + 0.8 + 0.6, 0.7 + 0.2, 0.6 - 0.2])


def test_pid_averages_the_excess_and_the_cost():
    """Costs 4, 8: averages 4, then 6 with half the weight on the old; a rise of 2."""
    pid = PIDMultiplier(lr=0.1, initial=0, proportional=1, derivative=1, smoothing=0.5)
    assert pid.update(4.0) == pytest.approx(0.4 + 0.4)
    assert pid.update(8.0) == pytest.approx(1.2 + 0.6 + 0.2)


def test_anti_windup_forgets_the_updates_in_which_lambda_was_at_its_cap():
    """lr .1, part 5, cap 1, limit 1. Costs 4, 4 ask for 1.5 at once, which is the cap: the integral
    stays at 0. Cost 2 asks for .5 and leaves .1; cost 0 takes that back."""
    gains = {"lr": 0.1, "initial": 0, "cap": 1.0, "proportional": 5, "derivative": 0}
    held, wound = (PIDMultiplier(**gains, smoothing=0, anti_windup=on) for on in (True, False))
    costs = (4.0, 4.0, 2.0, 0.0)
    assert [held.update(cost, 1.0) for cost in costs] == pytest.approx([1.0, 1.0, 0.6, 0.0])
    assert held.state_dict()["integral"] == pytest.approx(0.0)
    assert [wound.update(cost, 1.0) for cost in costs] == pytest.approx([1.0, 1.0, 1.0, 0.1])
    assert wound.state_dict()["integral"] == pytest.approx(0.6)


def test_anti_windup_lets_the_integral_fall_while_lambda_is_at_its_cap():
    """The averaged excess, 5 then 2, still asks for the cap when the cost has met the limit."""
    pid = PIDMultiplier(lr=0.1, cap=1.0, initial=0.5, proportional=5, anti_windup=True)
    pid.update(6.0, 1.0)
    assert pid.update(0.0, 1.0) == 1.0
    assert pid.state_dict()["integral"] == pytest.approx(0.4)


@law
@given(cost_sequences)
def test_anti_windup_changes_nothing_below_the_cap(costs):
    plain, free = PIDMultiplier(lr=1e-6, cap=5.0), PIDMultiplier(lr=1e-6, anti_windup=True)
    held = PIDMultiplier(lr=1e-6, cap=5.0, anti_windup=True)
    for cost in costs:
        assert held.update(cost) == plain.update(cost) == free.update(cost) < 5.0


def test_softplus_is_torch_s_adam_on_its_argument():
    costs = [30.0, 12.0, -4.0, -20.0, 3.0, 3.0, -1.0, 8.0]
    raw = torch.tensor(math.log(math.expm1(2.0)), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([raw], lr=0.05, maximize=True)
    multiplier = SoftplusMultiplier(lr=0.05, initial=2.0)
    for cost in costs:
        adam.zero_grad()
        (torch.nn.functional.softplus(raw) * cost).backward()
        adam.step()
        value = torch.nn.functional.softplus(raw).item()
        assert multiplier.update(cost) == pytest.approx(value, rel=1e-6)


@each_rule
@law
@given(costs=cost_sequences)
def test_the_multiplier_is_never_negative(rule, costs):
    multiplier = rule()
    assert all(multiplier.update(cost) >= 0 for cost in costs)


@each_rule
@law
@given(costs=cost_sequences)
def test_the_multiplier_never_exceeds_its_cap(rule, costs):
    multiplier = rule(lr=0.5, cap=1.5)
    assert all(multiplier.update(cost) <= 1.5 for cost in costs)


@each_rule
@law
@given(costs=cost_sequences, initial=st.floats(0.001, 4.0))
def test_a_step_size_of_0_is_a_constant_multiplier(rule, costs, initial):
    multiplier = rule(lr=0.0, initial=initial, cap=5.0)
    assert all(multiplier.update(cost) == initial for cost in costs)
    assert multiplier.update(1.0, math.inf) == 0  # free all the same without a limit


@pytest.mark.parametrize(("beta2", "steps"), [(0.9, 1.0), (0.98, 1 / 18.8), (0.999, 1 / 67)])
def test_a_smaller_beta2_forgets_a_large_first_excess_sooner(beta2, steps):
    """200 updates after an excess of 1000, one of 1 still moves λ by 1 / sqrt(v) of a step only:
    v = (1 + 10^6 β^200 (1 - β)) / (1 - β^200). Torch's Adam agrees."""
    value = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([value], lr=0.01, betas=(0.9, beta2), maximize=True)
    multiplier = AdamMultiplier(lr=0.01, initial=2.0, beta2=beta2)
    for cost in [1000.0, *[1.0] * 200]:
        before = multiplier.value
        value.grad = torch.tensor(cost, dtype=torch.float64)
        adam.step()
        assert multiplier.update(cost) == pytest.approx(value.item(), rel=1e-12)
    assert multiplier.value - before == pytest.approx(0.01 * steps, rel=0.02)


@pytest.mark.parametrize("rule", [AdamMultiplier, SoftplusMultiplier])
@law
@given(costs=cost_sequences, scale=st.sampled_from([0.5, 8.0, 1024.0]))
def test_the_scale_of_the_costs_does_not_matter_to_adam(rule, costs, scale):
    costs = [round(cost, 2) for cost in costs]
    scaled = after([scale * cost for cost in costs], rule=rule)
    assert scaled.value == pytest.approx(after(costs, rule=rule).value, abs=1e-5)


@pytest.mark.parametrize("rule", [AscentMultiplier, PIDMultiplier])
@law
@given(costs=cost_sequences, scale=st.sampled_from([0.5, 8.0, 1024.0]))
def test_ascent_and_pid_answer_scaled_costs_as_they_would_a_scaled_step_size(rule, costs, scale):
    plain, scaled = rule(lr=0.01 * scale), rule(lr=0.01)
    for cost in costs:
        assert scaled.update(scale * cost) == pytest.approx(plain.update(cost), rel=1e-9, abs=1e-9)


@each_rule
def test_only_the_excess_over_the_limit_matters(rule):
    above_20 = after([45.0, 30.0, 60.0, 10.0], limit=20, rule=rule)
    assert above_20.value == after([25.0, 10.0, 40.0, -10.0], rule=rule).value


@each_rule
def test_a_rollout_in_which_no_episode_ends_leaves_everything_as_it_was(rule):
    multiplier = after([3.0, 5.0], rule=rule)
    before = multiplier.state_dict()
    assert multiplier.update(None) == before["value"]
    assert multiplier.state_dict() == before


def test_an_infinite_limit_makes_cost_free_and_leaves_adam_alone():
    multiplier = after([3.0, 5.0])
    before = multiplier.state_dict()
    assert multiplier.update(1e6, math.inf) == 0
    assert multiplier.update(None, math.inf) == 0
    assert multiplier.state_dict() == {**before, "value": 0}


@each_rule
def test_an_infinite_limit_leaves_nothing_that_would_bring_the_old_price_back(rule):
    multiplier = rule(lr=0.5, initial=4.0)
    assert multiplier.update(30.0, math.inf) == 0
    assert multiplier.update(None) == 0
    assert multiplier.update(0.0) < 0.002  # the cost just meets its limit


@each_rule
def test_after_a_long_safe_phase_a_violation_raises_the_multiplier_within_two_updates(rule):
    """Kept momentum would hold Adam at 0 for 7 updates: 0.9⁷ < 1/2; a sunken x for hundreds."""
    multiplier = after([-5.0] * 500, rule=rule)
    lowest = multiplier.value
    assert lowest == pytest.approx(0.0, abs=0.0011)
    multiplier.update(5.0)
    assert multiplier.update(5.0) > 1.004 * lowest


@each_rule
def test_after_long_at_its_cap_the_multiplier_falls_within_two_updates(rule):
    multiplier = after([5.0] * 500, rule=rule, cap=2.0)
    assert multiplier.value == 2
    multiplier.update(-5.0)
    assert multiplier.update(-5.0) < 1.999


@each_rule
def test_the_multiplier_settles_where_the_policy_just_meets_the_limit(rule):
    """A policy whose cost falls as 40 / (1 + λ) meets the limit 20 at λ = 1."""
    multiplier, values = rule(), []
    for _ in range(1500):
        values.append(multiplier.update(40 / (1 + multiplier.value), 20))
    assert values[-100:] == pytest.approx([1.0] * 100, abs=0.05)


def closed_loop(multiplier, *, limit=0.0, steps=600, delay=0, follow=1.0, missing=None):
    """Values of λ against a policy whose cost tends to 10 (1 - λ), seen late or followed slowly."""
    values, cost = [multiplier.value], 10.0
    for step in range(steps):
        seen = values[max(0, len(values) - 1 - delay)]
        cost += follow * (10 * (1 - seen) - cost)
        unfinished = missing is not None and step % missing == 0
        values.append(multiplier.update(None if unfinished else cost, limit))
    return values


@each_rule
@pytest.mark.parametrize("limit", [0.0, -5.0, 5.0])
@pytest.mark.parametrize("missing", [None, 3])
@pytest.mark.parametrize("plant", [{"delay": 3}, {"follow": 0.1}], ids=["late", "slow"])
def test_with_a_late_or_slow_policy_every_rule_finds_the_price_of_the_limit(
    rule, limit, missing, plant
):
    """10 (1 - λ) meets 0 at λ = 1, -5 at 1.5, 5 at 0.5; every third update may see no episode."""
    values = closed_loop(rule(lr=0.01), limit=limit, missing=missing, steps=1500, **plant)
    price = 1 - limit / 10
    assert max(values) < 1.3 * price
    assert values[-100:] == pytest.approx([price] * 100, abs=0.01)


def test_large_steps_of_adam_swing_around_the_price_once_it_has_forgotten_the_first_excess():
    values = closed_loop(AdamMultiplier(lr=0.035), follow=0.1, steps=1500)
    assert values[500:600] == pytest.approx([1.0] * 100, abs=0.01)
    assert 0.2 < min(values[-300:]) < 0.5 < 1.5 < max(values[-300:]) < 1.8
    assert sum(values[-300:]) / 300 == pytest.approx(1.0, abs=0.05)


def test_the_proportional_term_damps_the_overshoot_of_ascent_with_a_slow_policy():
    ascent = closed_loop(AscentMultiplier(lr=0.01), follow=0.1)
    pid = closed_loop(PIDMultiplier(lr=0.01), follow=0.1)
    assert max(ascent) > 1.2
    assert max(pid) < 1.1


@each_rule
def test_against_a_limit_that_no_policy_meets_the_multiplier_stops_at_its_cap(rule):
    multiplier = rule(cap=3.0)
    values = [multiplier.update(2.0 + 10.0 / (1 + step)) for step in range(1000)]
    assert values[-1] == 3


@each_rule
def test_a_multiplier_continues_exactly_from_its_saved_state(rule):
    original = after([3.0, -5.0, 9.0], rule=rule)
    restored = rule(initial=4.0)
    restored.load_state_dict(original.state_dict())
    assert restored.value == original.value
    for cost in (4.0, -30.0, 2.0):
        assert restored.update(cost) == original.update(cost)


@each_rule
@pytest.mark.parametrize("cost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_a_cost_that_is_not_finite_is_refused_and_changes_nothing(rule, cost, limit):
    multiplier = after([3.0], rule=rule)
    before = multiplier.state_dict()
    with pytest.raises(errors.NonFiniteError, match=r"finite mean episode cost, got .*; pass None"):
        multiplier.update(cost, limit)
    assert multiplier.state_dict() == before


@each_rule
@pytest.mark.parametrize("limit", [math.nan, -math.inf])
def test_a_limit_that_is_no_limit_is_refused(rule, limit):
    with pytest.raises(ValueError, match=r"limit must be a number or inf \(unconstrained\), got"):
        rule().update(1.0, limit)


@each_rule
@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_a_step_size_that_is_none_is_refused(rule, lr):
    with pytest.raises(ValueError, match=r"lr must lie in \[0, inf\), got .*; 0 is a constant"):
        rule(lr=lr)


@each_rule
@pytest.mark.parametrize("initial", [-0.1, math.nan, math.inf])
def test_a_negative_or_endless_start_is_refused(rule, initial):
    with pytest.raises(ValueError, match=r"initial must lie in \[0, inf\), got"):
        rule(initial=initial)


@each_rule
def test_a_start_above_the_cap_and_a_cap_of_nothing_are_refused(rule):
    with pytest.raises(ValueError, match=r"initial must lie in \[0, 2\.0\], got 3\.0; cap is"):
        rule(initial=3.0, cap=2.0)
    for cap in (0.0, math.nan):
        with pytest.raises(ValueError, match=r"cap must lie in \(0, inf\], got .*; inf is no cap"):
            rule(cap=cap)


@pytest.mark.parametrize("beta2", [-0.1, 1.0, math.nan])
def test_a_memory_that_lasts_for_ever_is_refused(beta2):
    with pytest.raises(ValueError, match=r"beta2 must lie in \[0, 1\), got"):
        AdamMultiplier(beta2=beta2)


def test_softplus_cannot_start_at_0():
    with pytest.raises(ValueError, match=r"\[0\.001, inf\), got 0\.0; softplus never reaches 0"):
        SoftplusMultiplier(initial=0.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [("proportional", -1.0), ("derivative", math.inf), ("smoothing", 1.0), ("smoothing", -0.1)],
)
def test_gains_that_no_controller_has_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must .*, got {value}; 0 "):
        PIDMultiplier(**{option: value})


def test_a_state_with_other_keys_or_impossible_values_is_refused_and_changes_nothing():
    multiplier = after([3.0])
    state = multiplier.state_dict()
    with pytest.raises(ValueError, match=r"AdamMultiplier has the keys .*got \['value'\]"):
        multiplier.load_state_dict(AscentMultiplier().state_dict())
    for broken in ({"value": -1.0}, {"first_moment": math.nan}, {"updates": -1.0}):
        with pytest.raises(ValueError, match="state must be finite, with value, second_moment"):
            multiplier.load_state_dict({**state, **broken})
    assert multiplier.state_dict() == state


def test_the_relative_rule_by_hand():
    """lr .1, part 5, no averaging. Limit 10, cost 15: e = .5, log λ = .05 + .25. Cost 40: e = 1,
    .15 + .5. Cost 0: e = -1, .05 - .5."""
    multiplier = LagrangeMultiplier(lr=0.1, proportional=5, smoothing=0)
    values = [math.log(multiplier.update(cost, 10.0)) for cost in (15.0, 40.0, 0.0)]
    assert values == pytest.approx([0.3, 0.65, -0.45])


def test_the_relative_rule_averages_the_excess_but_not_its_integral():
    """e = 1, then -1, with half the weight on the old: averages 1 and 0; the integral .1 and 0."""
    multiplier = LagrangeMultiplier(lr=0.1, proportional=5, smoothing=0.5)
    values = [math.log(multiplier.update(cost, 10.0)) for cost in (40.0, 0.0)]
    assert values == pytest.approx([0.6, 0.0])


@law
@given(costs=cost_sequences, unit=st.sampled_from([1e-6, 0.125, 1000.0]))
def test_the_unit_of_costs_and_limit_does_not_matter_to_the_relative_rule(costs, unit):
    one, other = LagrangeMultiplier(), LagrangeMultiplier()
    for cost in costs:
        scaled = other.update(unit * cost, unit * 7.0)
        assert scaled == pytest.approx(one.update(cost, 7.0), rel=1e-9)


@law
@given(costs=cost_sequences)
def test_the_relative_rule_stays_between_its_bounds_and_its_integral_does_not_wind_up(costs):
    multiplier = LagrangeMultiplier(lr=0.5, cap=3.0)
    assert all(0.01 <= multiplier.update(cost, 5.0) <= 3.0 for cost in costs)
    for _ in range(200):
        multiplier.update(50.0, 5.0)
    assert multiplier.value == pytest.approx(3.0)
    values = [multiplier.update(0.0, 5.0) for _ in range(4)]
    assert values[-1] < 1.0  # and not after as many updates as it was broken for


def test_the_relative_rule_finds_prices_that_lie_orders_of_magnitude_apart():
    """A policy whose cost falls as 10 / (1 + λ / p) meets the limit 5 at λ = p."""
    for price in (0.03, 1.0, 8.0):
        multiplier = LagrangeMultiplier()
        for _ in range(500):
            multiplier.update(10 / (1 + multiplier.value / price), 5.0)
        assert multiplier.value == pytest.approx(price, rel=0.01)


def test_with_a_limit_of_0_the_relative_rule_asks_how_large_the_excess_was_of_late():
    multiplier = LagrangeMultiplier(lr=0.1, proportional=0, smoothing=0.5)
    multiplier.update(4.0)  # as large as its own average: e = 1
    assert math.log(multiplier.value) == pytest.approx(0.1)
    multiplier.update(-1.0)  # against (4 + 1) / 2: e = -.4
    assert math.log(multiplier.value) == pytest.approx(0.06)
    assert LagrangeMultiplier().update(0.0) == 1.0  # nothing costs: nothing to move for


def test_the_relative_rule_begins_anew_when_a_limit_returns():
    multiplier = LagrangeMultiplier(initial=2.0)
    for _ in range(20):
        multiplier.update(9.0, 1.0)
    assert multiplier.update(None, math.inf) == 0
    assert multiplier.update(1.0, 1.0) < 6.0  # 2, but for the average of the excess


def test_the_relative_rule_continues_exactly_from_its_state_and_keeps_a_constant():
    one, other = LagrangeMultiplier(), LagrangeMultiplier()
    for cost in (3.0, 0.0, 9.0):
        one.update(cost, 2.0)
    other.load_state_dict(one.state_dict())
    assert [one.update(c, 2.0) for c in (0.0, 5.0)] == [other.update(c, 2.0) for c in (0.0, 5.0)]
    assert LagrangeMultiplier(lr=0, initial=0.0).update(5.0, 1.0) == 0


def test_what_the_relative_rule_cannot_begin_with_is_refused():
    with pytest.raises(
        ValueError, match=r"initial must lie in \[0\.01, 10\.0\], got 0\.0; it changes"
    ):
        LagrangeMultiplier(initial=0.0)
    with pytest.raises(ValueError, match=r"smoothing must lie in \[0, 1\), got 1"):
        LagrangeMultiplier(smoothing=1.0)
