import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pbcrl import distributions, errors

law = settings(derandomize=True, deadline=None, max_examples=50)
# Rounded, so that ties occur and scaling cannot underflow.
costs = st.floats(-50, 50).map(lambda cost: round(cost, 2))
cost_pairs = st.lists(st.tuples(costs, costs), min_size=2, max_size=12)

TRUE = [0.0, 10.0, 20.0, 30.0, 90.0]


def split(rows: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    learned, true = zip(*rows, strict=True)
    return np.array(learned), np.array(true)


def test_shifting_a_distribution_by_3_moves_it_by_3():
    assert distributions.wasserstein2(np.array(TRUE)[::-1] + 3, TRUE) == pytest.approx(3)


def test_w2_of_0_1_and_0_3_is_root_2():
    assert distributions.wasserstein2([1.0, 0.0], [0.0, 3.0]) == pytest.approx(math.sqrt(2))


@law
@given(cost_pairs)
def test_w2_is_the_best_assignment_of_learned_to_true_costs(rows):
    learned, true = split(rows)
    squared = (learned[:, None] - true[None, :]) ** 2
    best = squared[optimize.linear_sum_assignment(squared)].mean()
    assert distributions.wasserstein2(learned, true) == pytest.approx(math.sqrt(best))


@law
@given(cost_pairs.filter(lambda rows: len({learned for learned, _ in rows}) > 1))
def test_scaled_w2_ignores_the_scale_of_the_learned_cost_but_not_where_its_limit_lies(rows):
    learned, true = split(rows)
    w2 = distributions.w2_scaled(learned, true, 20)
    assert distributions.w2_scaled(7 * learned, true, 20) == pytest.approx(w2)
    assert distributions.w2_scaled(learned + 5, true, 20, learned_limit=5) == pytest.approx(w2)


def test_a_limit_learned_too_high_shows_in_the_scaled_w2_and_not_in_the_z_scored():
    """Learned costs of the true shape, half its scale, zero at 26 instead of 20: off by 6."""
    learned = (np.array(TRUE) - 26) / 2
    assert distributions.w2_scaled(learned, TRUE, 20) == pytest.approx(6)
    assert distributions.w2_zscored(learned, TRUE) == pytest.approx(0)


def test_opposite_two_point_shapes_are_z_scored_apart():
    """(1, -1) against (1, -1) in any place and scale is 0; a skewed shape is not."""
    assert distributions.w2_zscored([0.0, 8.0], [3.0, 1.0]) == pytest.approx(0)
    assert distributions.w2_zscored([0.0, 0.0, 3.0], [0.0, 3.0, 3.0]) == pytest.approx(1.0)


@law
@given(st.lists(costs, min_size=2, max_size=12).filter(lambda sample: len(set(sample)) > 1))
def test_skewness_agrees_with_scipy(sample):
    assert distributions.skewness(sample) == pytest.approx(stats.skew(sample), abs=1e-9)


def test_a_tail_that_is_too_short_has_a_negative_quantile_error():
    """A symmetric learned cost reaches d plus 1.4 standard deviations; the true maximum is 90."""
    learned = [-2.0, -1.0, 0.0, 1.0, 2.0]
    scaled_maximum = 20 + np.std(TRUE) / np.std(learned) * 2
    error = distributions.tail_quantile_error(learned, TRUE, 20, quantile=1)
    assert error == pytest.approx(scaled_maximum - 90)
    assert error < 0


def test_the_worst_15_percent_of_1_to_10_are_10_and_half_of_9():
    worst = distributions.conditional_value_at_risk(range(1, 11), quantile=0.85)
    assert worst == pytest.approx((10 + 0.5 * 9) / 1.5)


@law
@given(st.lists(costs, min_size=1, max_size=12), st.sampled_from([0.0, 0.3, 0.5, 0.95]))
def test_cvar_is_the_least_of_all_z_plus_the_mean_excess_over_z(sample, quantile):
    """Rockafellar and Uryasev's formula is convex with kinks at the costs, so least at one."""
    bound = min(z + np.maximum(0, np.array(sample) - z).mean() / (1 - quantile) for z in sample)
    found = distributions.conditional_value_at_risk(sample, quantile=quantile)
    assert found == pytest.approx(bound, abs=1e-9)
    assert np.mean(sample) - 1e-9 <= found <= max(sample) + 1e-9


def test_cvar_at_0_is_the_mean_and_near_1_the_maximum():
    assert distributions.conditional_value_at_risk(TRUE, quantile=0) == pytest.approx(30)
    assert distributions.conditional_value_at_risk(TRUE, quantile=0.9) == pytest.approx(90)


def test_a_quantile_does_not_see_how_far_a_tail_reaches_but_cvar_does():
    """20 costs with the limit 0, of which the learned ones stretch the worst alone, 20 to 40."""
    true = np.arange(1.0, 21.0)
    learned = np.where(true == 20, 40.0, true)
    scale = true.std() / learned.std()
    error = distributions.cvar_error(learned, true, 0, quantile=0.9)
    assert error == pytest.approx(scale * (40 + 19) / 2 - (20 + 19) / 2)
    quantile = distributions.tail_quantile_error(learned, true, 0, quantile=0.9)
    assert quantile == pytest.approx(scale * 18.1 - 18.1)


# -- Degenerate and wrong input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (lambda: distributions.wasserstein2([], []), "wasserstein2 is undefined"),
        (
            lambda: distributions.w2_scaled([1.0, 1.0], [1.0, 2.0], 20),
            "learned costs have no spread",
        ),
        (lambda: distributions.w2_zscored([1.0, 2.0], [1.0, 1.0]), "w2_zscored is .* no spread"),
        (lambda: distributions.skewness([4.0]), "skewness is undefined, because the costs have no"),
        (lambda: distributions.tail_quantile_error([0.1] * 3, [1.0, 2.0, 3.0], 20), "no spread"),
        (
            lambda: distributions.cvar_error([0.1] * 3, [1.0, 2.0, 3.0], 20),
            "cvar_error is .* no sp",
        ),
        (lambda: distributions.conditional_value_at_risk([]), "there is no trajectory"),
    ],
)
def test_what_the_data_leave_undefined_is_nan_with_one_warning(measure, why):
    with pytest.warns(RuntimeWarning, match=why) as caught:
        assert math.isnan(measure())
    assert len(caught) == 1


def test_different_numbers_of_costs_are_refused():
    with pytest.raises(
        ValueError, match="same trajectories in the same order: got 2 and 3 of them"
    ):
        distributions.wasserstein2([1.0, 2.0], [1.0, 2.0, 3.0])


def test_costs_that_are_not_finite_are_refused():
    with pytest.raises(errors.NonFiniteError, match="cost must be finite, got 1 NaN or infinite"):
        distributions.skewness([1.0, math.nan])


def test_a_quantile_given_in_percent_is_refused():
    with pytest.raises(ValueError, match=r"quantile must lie in \[0, 1\], got 95"):
        distributions.tail_quantile_error(TRUE, TRUE, 20, quantile=95)
    with pytest.raises(ValueError, match=r"quantile must lie in \[0, 1\), got 1; 0\.95 is the"):
        distributions.conditional_value_at_risk(TRUE, quantile=1)
