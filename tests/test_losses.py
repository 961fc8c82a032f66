import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from pbcrl.losses import pbci_loss, preference_loss, safety_loss, snr_loss

LN_2 = math.log(2)
NAN = math.nan

law = settings(derandomize=True, deadline=None, max_examples=50)
cost = st.floats(-15, 15)
probability = st.floats(0, 1)


def f64(values: object) -> Tensor:
    return tensor(values, dtype=torch.float64)


def leaf(values: object) -> Tensor:
    return f64(values).requires_grad_()


@st.composite
def pair_batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Costs and labels of 1 to 6 pairs: first, second, preference, first safe, second safe."""
    row = st.tuples(cost, cost, probability, st.sampled_from([0, 1]), st.sampled_from([0, 1]))
    rows = draw(st.lists(row, min_size=1, max_size=6))
    return tuple(f64(column) for column in zip(*rows, strict=True))


# -- Preference ------------------------------------------------------------------------------


def test_equal_costs_lose_ln_2_whatever_the_preference():
    loss = preference_loss(f64([3.0, 3.0, 3.0]), f64([3.0, 3.0, 3.0]), f64([0.0, 0.5, 1.0]))
    assert loss.item() == pytest.approx(LN_2)


def test_preferring_the_cheaper_one_by_ln_3_costs_ln_4_thirds():
    """σ(ln 3) = 3/4, so a right preference loses ln(4/3) and a wrong one ln 4."""
    first, second = f64([0.0]), f64([math.log(3)])
    assert preference_loss(first, second, f64([1.0])).item() == pytest.approx(math.log(4 / 3))
    assert preference_loss(first, second, f64([0.0])).item() == pytest.approx(math.log(4))


def test_a_preferred_trajectory_gets_cheaper_and_the_other_costlier():
    first, second = leaf([0.0]), leaf([0.0])
    preference_loss(first, second, f64([1.0])).backward()
    assert first.grad.item() == pytest.approx(0.5)  # descent lowers the preferred one's cost
    assert second.grad.item() == pytest.approx(-0.5)


@law
@given(pair_batches())
def test_swapping_the_pair_and_the_preference_changes_nothing(batch):
    first, second, mu, _, _ = batch
    torch.testing.assert_close(
        preference_loss(first, second, mu), preference_loss(second, first, 1 - mu)
    )


@law
@given(pair_batches(), cost)
def test_the_preference_loss_sees_only_cost_differences(batch, shift):
    first, second, mu, _, _ = batch
    torch.testing.assert_close(
        preference_loss(first + shift, second + shift, mu), preference_loss(first, second, mu)
    )


def test_a_tie_is_best_explained_by_equal_costs():
    first, second = leaf([2.0]), leaf([2.0])
    preference_loss(first, second, f64([0.5])).backward()
    assert first.grad.item() == second.grad.item() == 0


# -- Safety ----------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [0.0, 1.0])
def test_a_cost_at_the_learned_limit_loses_ln_2(safe):
    assert safety_loss(f64([0.0]), f64([safe])).item() == pytest.approx(LN_2)


def test_an_unsafe_cost_at_the_dead_zone_loses_ln_2():
    assert safety_loss(f64([1.5]), f64([0.0]), dead_zone=1.5).item() == pytest.approx(LN_2)


@law
@given(cost, st.floats(0, 10))
def test_the_dead_zone_does_not_touch_safe_trajectories(value, dead_zone):
    with_dead_zone = safety_loss(f64([value]), f64([1.0]), dead_zone=dead_zone)
    assert with_dead_zone == safety_loss(f64([value]), f64([1.0]))


@law
@given(cost, st.sampled_from([0.0, 1.0]))
def test_a_safety_label_without_dead_zone_is_a_preference_against_a_threshold_of_cost_0(value, eps):
    """Eq. 6: safe means preferred to a threshold trajectory of learned cost 0."""
    as_preference = preference_loss(f64([value]), f64([0.0]), f64([eps]))
    torch.testing.assert_close(safety_loss(f64([value]), f64([eps])), as_preference)


def test_labels_may_be_booleans():
    costs = f64([-1.0, 2.0])
    assert safety_loss(costs, tensor([True, False])) == safety_loss(costs, f64([1.0, 0.0]))


# -- SNR -------------------------------------------------------------------------------------


def test_snr_of_unit_variance_and_balanced_labels_is_the_weight_over_ln_2():
    loss = snr_loss(f64([1.0, 3.0, 1.0, 3.0]), f64([1.0, 0.0]), snr_weight=1e-3)
    assert loss.item() == pytest.approx(-1e-3 / LN_2)


def test_one_sided_preferences_have_their_entropy_floored_at_a_tenth_of_ln_2():
    """Without the floor, labels stored "safer first" would divide by 0."""
    loss = snr_loss(f64([1.0, 3.0, 1.0, 3.0]), f64([1.0, 1.0]), snr_weight=1e-3)
    assert loss.item() == pytest.approx(-1e-3 / (0.1 * LN_2))


def test_the_entropy_is_that_of_the_mean_preference_not_the_mean_of_entropies():
    """Two ties and two certain, opposite preferences have the same marginal p = 0.5."""
    costs = f64([0.0, 1.0, 2.0, 3.0])
    assert snr_loss(costs, f64([0.5, 0.5])) == snr_loss(costs, f64([0.0, 1.0]))


def test_a_cost_in_two_pairs_counts_twice_in_the_variance():
    """Costs (0, 3) and (0, 0): the population variance of 0, 0, 3, 0 is 27/16."""
    loss = snr_loss(f64([0.0, 0.0, 3.0, 0.0]), f64([1.0, 0.0]), snr_weight=LN_2)
    assert loss.item() == pytest.approx(-27 / 16)


def test_snr_stops_growing_at_max_std_and_passes_no_gradient_beyond():
    inside, beyond = leaf([-4.0, 4.0]), leaf([-10.0, 10.0])
    tie = f64([0.5])
    assert snr_loss(inside, tie, snr_weight=LN_2, max_std=5).item() == pytest.approx(-16)
    loss = snr_loss(beyond, tie, snr_weight=LN_2, max_std=5)
    assert loss.item() == pytest.approx(-25)
    loss.backward()
    assert beyond.grad.tolist() == [0, 0]
    assert snr_loss(beyond, tie, snr_weight=LN_2, max_std=None).item() == pytest.approx(-100)


def test_snr_below_max_std_is_the_paper_s_unbounded_term():
    costs, mu = f64([-1.0, 2.0, 0.5, 4.0]), f64([1.0, 0.3])
    assert snr_loss(costs, mu, max_std=5) == snr_loss(costs, mu, max_std=None)


def test_descending_the_snr_loss_spreads_costs_apart():
    costs = leaf([-1.0, 1.0])
    snr_loss(costs, f64([0.5])).backward()
    assert costs.grad[0] > 0 > costs.grad[1]


# -- The sum ---------------------------------------------------------------------------------


@law
@given(pair_batches())
def test_the_total_is_the_sum_of_its_terms_over_both_members(batch):
    first, second, mu, first_safe, second_safe = batch
    loss = pbci_loss(*batch, dead_zone=0.7, snr_weight=0.01, max_std=3)
    members, safe = torch.cat([first, second]), torch.cat([first_safe, second_safe])
    assert loss.preference == preference_loss(first, second, mu)
    assert loss.safety == safety_loss(members, safe, dead_zone=0.7)
    assert loss.snr == snr_loss(members, mu, snr_weight=0.01, max_std=3)
    assert loss.total == loss.preference + loss.safety + loss.snr


@law
@given(pair_batches())
def test_swapping_all_pairs_and_their_labels_changes_no_term(batch):
    first, second, mu, first_safe, second_safe = batch
    swapped = pbci_loss(second, first, 1 - mu, second_safe, first_safe)
    for term, swapped_term in zip(pbci_loss(*batch), swapped, strict=True):
        torch.testing.assert_close(term, swapped_term)


@law
@given(pair_batches())
def test_without_dead_zone_and_snr_the_loss_is_that_of_safe_rlhf(batch):
    """Dai et al. (2024) write the cost model's loss with the dearer answer w, the cheaper l.

    L = -E[log σ(C_w - C_l)] - E[log σ(s_w C_w) + log σ(s_l C_l)], s = 1 harmful, -1 harmless. They
    sum both members' sign terms, we average them.
    """
    first, second, mu, first_safe, second_safe = (column.numpy() for column in batch)
    first_is_cheaper = mu > 0.5
    mu = first_is_cheaper.astype(float)

    def log_sigmoid(x):
        return -np.logaddexp(0, -x)

    dearer = np.where(first_is_cheaper, second, first)
    cheaper = np.where(first_is_cheaper, first, second)
    pair_term = -np.mean(log_sigmoid(dearer - cheaper))
    signs = 1 - 2 * first_safe, 1 - 2 * second_safe
    sign_term = -np.mean(log_sigmoid(signs[0] * first) + log_sigmoid(signs[1] * second))

    loss = pbci_loss(batch[0], batch[1], f64(mu), *batch[3:], dead_zone=0, snr_weight=0)
    assert loss.preference.item() == pytest.approx(pair_term)
    assert loss.safety.item() == pytest.approx(sign_term / 2)
    assert loss.snr == 0
    assert loss.total.item() == pytest.approx(pair_term + sign_term / 2)


def test_with_max_std_no_scale_of_costs_makes_the_total_low():
    """ζ max_std² / (0.1 ln 2) bounds the SNR term, and the cross-entropies are >= 0."""
    bound = -1e-3 * 5**2 / (0.1 * LN_2)
    ones, zeros = f64([1.0, 1.0]), f64([0.0, 0.0])
    for scale in (1.0, 1e2, 1e4):
        first, second = f64([-1.0, -2.0]) * scale, f64([1.0, 2.0]) * scale
        bounded = pbci_loss(first, second, ones, ones, zeros, max_std=5).total
        assert bounded >= bound - 1e-12
    assert pbci_loss(first, second, ones, ones, zeros, max_std=None).total < -1e5


# -- Extreme costs, missing labels -----------------------------------------------------------


def test_a_preference_that_is_wrong_by_1e4_still_has_the_full_gradient():
    """In float32; the probability form has no gradient left past a gap of about 50."""
    first, second = tensor([1e4], requires_grad=True), tensor([0.0], requires_grad=True)
    loss = preference_loss(first, second, tensor([1.0]))
    loss.backward()
    assert (loss.item(), first.grad.item(), second.grad.item()) == (1e4, 1, -1)


@pytest.mark.parametrize(("value", "safe", "gradient"), [(1e4, 1.0, 1), (-1e4, 0.0, -1)])
def test_a_safety_label_that_is_wrong_by_1e4_still_has_the_full_gradient(value, safe, gradient):
    costs = tensor([value], requires_grad=True)
    loss = safety_loss(costs, tensor([safe]))
    loss.backward()
    assert (loss.item(), costs.grad.item()) == (1e4, gradient)


def test_labels_that_are_right_by_1e4_cost_nothing_and_have_no_gradient():
    first, second = tensor([-1e4], requires_grad=True), tensor([1e4], requires_grad=True)
    one, zero = tensor([1.0]), tensor([0.0])
    total = pbci_loss(first, second, one, one, zero, snr_weight=0).total
    total.backward()
    assert (total.item(), first.grad.item(), second.grad.item()) == (0, 0, 0)


def test_a_missing_label_adds_nothing_to_loss_or_gradient():
    first, second = leaf([0.3, -2.0]), leaf([1.0, 9.0])
    loss = preference_loss(first, second, f64([1.0, NAN]))
    loss.backward()
    assert loss == preference_loss(f64([0.3]), f64([1.0]), f64([1.0]))
    assert first.grad[1] == second.grad[1] == 0
    assert first.grad[0] != 0

    costs = leaf([0.3, -2.0, 5.0])
    loss = safety_loss(costs, f64([NAN, 0.0, NAN]), dead_zone=1.0)
    loss.backward()
    assert loss == safety_loss(f64([-2.0]), f64([0.0]), dead_zone=1.0)
    assert costs.grad[0] == costs.grad[2] == 0
    assert costs.grad[1] < 0


def test_missing_preferences_do_not_enter_the_entropy_but_their_costs_enter_the_variance():
    loss = snr_loss(f64([1.0, 3.0, 1.0, 3.0]), f64([0.5, NAN]), snr_weight=LN_2)
    assert loss.item() == pytest.approx(-1)


@law
@given(pair_batches(), st.data())
def test_no_pattern_of_missing_labels_makes_a_gradient_nan(batch, data):
    first, second, *labels = batch
    keep = data.draw(st.lists(st.booleans(), min_size=3 * len(first), max_size=3 * len(first)))
    labels = [
        torch.where(mask, label, NAN)
        for label, mask in zip(labels, tensor(keep).view(3, -1), strict=True)
    ]
    first.requires_grad_()
    second.requires_grad_()
    pbci_loss(first, second, *labels).total.backward()
    assert first.grad.isfinite().all()
    assert second.grad.isfinite().all()


@pytest.mark.parametrize("n_pairs", [0, 2])
def test_no_label_at_all_is_a_loss_of_0_that_still_has_a_gradient(n_pairs):
    first, second = leaf([1.0] * n_pairs), leaf([-1.0] * n_pairs)
    nothing = f64([NAN] * n_pairs)
    loss = pbci_loss(first, second, nothing, nothing, nothing)
    loss.total.backward()
    assert [term.item() for term in loss] == [0, 0, 0, 0]
    assert first.grad.tolist() == second.grad.tolist() == [0] * n_pairs


# -- Refusals --------------------------------------------------------------------------------

ONE = tensor([1.0])


def test_a_column_of_costs_is_refused_instead_of_broadcast():
    with pytest.raises(ValueError, match=r"got costs \(2, 1\), .* and labels \(2,\) .*; give one"):
        preference_loss(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"got costs \(2, 1\), .* and labels \(2,\)"):
        safety_loss(torch.zeros(2, 1), torch.zeros(2))


def test_safety_labels_must_fit_their_own_member():
    """Of the right total length, but split wrongly: silently it would label the wrong costs."""
    costs, three, one = torch.zeros(2), torch.zeros(3), torch.zeros(1)
    with pytest.raises(RuntimeError, match="equal size"):
        pbci_loss(costs, costs, torch.zeros(2), three, one)
    with pytest.raises(ValueError, match=r"got costs \(4,\), .* and labels \(6,\)"):
        pbci_loss(costs, costs, torch.zeros(2), three, three)


def test_snr_of_one_cost_per_pair_is_refused():
    with pytest.raises(ValueError, match=r"got costs \(2,\), .* and labels \(4,\)"):
        snr_loss(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("label", [-1.0, 1.5])
def test_labels_outside_0_to_1_are_refused(label):
    message = rf"labels in \[0, 1\] or NaN .* with \[{label}\] outside"
    with pytest.raises(ValueError, match=message):
        safety_loss(ONE, tensor([label]))
    with pytest.raises(ValueError, match=message):
        preference_loss(ONE, ONE, tensor([label]))
    with pytest.raises(ValueError, match=message):
        snr_loss(torch.zeros(2), tensor([label]))


def test_integer_costs_are_refused():
    with pytest.raises(ValueError, match=r"costs floating point .* got costs \(1,\), torch\.int64"):
        safety_loss(tensor([1]), ONE)


@pytest.mark.parametrize("dead_zone", [-0.1, NAN, math.inf])
def test_a_negative_or_endless_dead_zone_is_refused(dead_zone):
    with pytest.raises(ValueError, match=r"dead_zone must be >= 0 and finite.* use 0 for plain"):
        safety_loss(ONE, ONE, dead_zone=dead_zone)


@pytest.mark.parametrize(
    ("option", "value"),
    [("snr_weight", -1e-3), ("snr_weight", NAN), ("max_std", 0), ("max_std", NAN)],
)
def test_snr_options_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=rf"max_std > 0 or None, got .*{value}.*; snr_weight=0"):
        snr_loss(tensor([0.0, 1.0]), ONE, **{option: value})
