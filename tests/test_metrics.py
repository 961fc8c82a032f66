import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pbcrl import errors, metrics

law = settings(derandomize=True, deadline=None, max_examples=50)
# Rounded, so that ties occur and scaling cannot underflow.
costs = st.floats(-50, 50).map(lambda cost: round(cost, 2))
cost_pairs = st.lists(st.tuples(costs, costs), min_size=2, max_size=12)

# Limit 20. Safe: the first three, of which two are judged so. Unsafe: the last two, one judged so.
TRUE = [0.0, 10.0, 20.0, 30.0, 90.0]
LEARNED = [-3.0, 1.0, 0.0, 2.0, -1.0]


def split(rows: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    learned, true = zip(*rows, strict=True)
    return np.array(learned), np.array(true)


# -- Judging -----------------------------------------------------------------------------------


def test_three_of_five_trajectories_are_judged_as_they_are():
    assert metrics.accuracy(LEARNED, TRUE, 20) == pytest.approx(3 / 5)


def test_balanced_accuracy_averages_two_thirds_of_the_safe_and_half_of_the_unsafe():
    assert metrics.balanced_accuracy(LEARNED, TRUE, 20) == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_always_answering_safe_is_right_for_the_three_safe_of_five():
    assert metrics.base_rate(TRUE, 20) == pytest.approx(3 / 5)
    assert metrics.base_rate(TRUE, 5) == pytest.approx(4 / 5)  # here "unsafe" is the better guess


def test_one_of_two_unsafe_trajectories_is_judged_safe():
    assert metrics.type_ii_rate(LEARNED, TRUE, 20) == pytest.approx(1 / 2)


def test_two_of_five_are_unsafe_and_two_are_judged_so():
    assert metrics.violation_gap(LEARNED, TRUE, 20) == 0


def test_calling_everything_safe_underestimates_violations_by_their_whole_rate():
    assert metrics.violation_gap([-1.0] * 5, TRUE, 20) == pytest.approx(-2 / 5)
    assert metrics.balanced_accuracy([-1.0] * 5, TRUE, 20) == 0.5
    assert metrics.type_ii_rate([-1.0] * 5, TRUE, 20) == 1


def test_a_cost_equal_to_its_limit_is_safe():
    assert metrics.accuracy([0.0, 0.0], [20.0, 20.1], 20) == 0.5


def test_the_learned_limit_can_be_another_than_0():
    assert metrics.accuracy(TRUE, TRUE, 20, learned_limit=20) == 1


# -- Pairs -------------------------------------------------------------------------------------


def test_of_ten_pairs_the_learned_cost_orders_six_as_the_true_one_does():
    """LEARNED in order of true cost is -3, 1, 0, 2, -1: wrong are (1, 0) and the three with -1."""
    assert metrics.pair_accuracy(LEARNED, TRUE) == pytest.approx(6 / 10)


def test_pairs_with_equal_true_costs_do_not_count():
    assert metrics.pair_accuracy([1.0, 2.0, 3.0], [5.0, 5.0, 6.0]) == 1


def test_a_constant_learned_cost_orders_pairs_like_a_guess():
    assert metrics.pair_accuracy([0.0] * 5, TRUE) == 0.5


@law
@given(cost_pairs.filter(lambda rows: len({true for _, true in rows}) > 1))
def test_pair_accuracy_agrees_with_counting_every_pair(rows):
    learned, true = split(rows)
    scores = [
        1.0 if (learned[i] > learned[j]) else 0.5 if learned[i] == learned[j] else 0.0
        for i in range(len(rows))
        for j in range(len(rows))
        if true[i] > true[j]
    ]
    assert metrics.pair_accuracy(learned, true) == pytest.approx(np.mean(scores))


# -- Distributions -----------------------------------------------------------------------------


def test_shifting_a_distribution_by_3_moves_it_by_3():
    assert metrics.wasserstein2(np.array(TRUE)[::-1] + 3, TRUE) == pytest.approx(3)


def test_w2_of_0_1_and_0_3_is_root_2():
    assert metrics.wasserstein2([1.0, 0.0], [0.0, 3.0]) == pytest.approx(math.sqrt(2))


@law
@given(cost_pairs)
def test_w2_is_the_best_assignment_of_learned_to_true_costs(rows):
    learned, true = split(rows)
    squared = (learned[:, None] - true[None, :]) ** 2
    best = squared[optimize.linear_sum_assignment(squared)].mean()
    assert metrics.wasserstein2(learned, true) == pytest.approx(math.sqrt(best))


@law
@given(cost_pairs.filter(lambda rows: len({learned for learned, _ in rows}) > 1))
def test_scaled_w2_ignores_the_scale_of_the_learned_cost_but_not_where_its_limit_lies(rows):
    learned, true = split(rows)
    w2 = metrics.w2_scaled(learned, true, 20)
    assert metrics.w2_scaled(7 * learned, true, 20) == pytest.approx(w2)
    assert metrics.w2_scaled(learned + 5, true, 20, learned_limit=5) == pytest.approx(w2)


def test_a_limit_learned_too_high_shows_in_the_scaled_w2_and_not_in_the_z_scored():
    """Learned costs of the true shape, half its scale, zero at 26 instead of 20: off by 6."""
    learned = (np.array(TRUE) - 26) / 2
    assert metrics.w2_scaled(learned, TRUE, 20) == pytest.approx(6)
    assert metrics.w2_zscored(learned, TRUE) == pytest.approx(0)


def test_opposite_two_point_shapes_are_z_scored_apart():
    """(1, -1) against (1, -1) in any place and scale is 0; a skewed shape is not."""
    assert metrics.w2_zscored([0.0, 8.0], [3.0, 1.0]) == pytest.approx(0)
    assert metrics.w2_zscored([0.0, 0.0, 3.0], [0.0, 3.0, 3.0]) == pytest.approx(1.0)


@law
@given(st.lists(costs, min_size=2, max_size=12).filter(lambda sample: len(set(sample)) > 1))
def test_skewness_agrees_with_scipy(sample):
    assert metrics.skewness(sample) == pytest.approx(stats.skew(sample), abs=1e-9)


def test_a_tail_that_is_too_short_has_a_negative_quantile_error():
    """A symmetric learned cost reaches d plus 1.4 standard deviations; the true maximum is 90."""
    learned = [-2.0, -1.0, 0.0, 1.0, 2.0]
    scaled_maximum = 20 + np.std(TRUE) / np.std(learned) * 2
    error = metrics.tail_quantile_error(learned, TRUE, 20, quantile=1)
    assert error == pytest.approx(scaled_maximum - 90)
    assert error < 0


def test_bias_is_the_distance_to_the_limit_from_either_side():
    assert metrics.bias(18.5, 20) == metrics.bias(21.5, 20) == 1.5


# -- Report ------------------------------------------------------------------------------------


def test_a_learned_cost_that_is_the_true_excess_in_other_units_is_perfect_by_every_measure():
    learned = (np.array(TRUE) - 20) / 7
    report = metrics.cost_model_report(learned, TRUE, 20)
    assert report.pop("w2_raw") > 20  # not comparable: the units differ
    assert report.pop("base_rate") == pytest.approx(3 / 5)
    assert report.pop("skewness_learned") == pytest.approx(report.pop("skewness_true"))
    assert report == pytest.approx(
        {
            "accuracy": 1,
            "balanced_accuracy": 1,
            "pair_accuracy": 1,
            "type_ii_rate": 0,
            "violation_gap": 0,
            "w2_scaled": 0,
            "w2_zscored": 0,
            "tail_quantile_error": 0,
        }
    )


def test_the_report_holds_each_measure_under_its_own_name():
    report = metrics.cost_model_report(LEARNED, TRUE, 20, learned_limit=0.5)
    for name in (
        "accuracy",
        "balanced_accuracy",
        "type_ii_rate",
        "violation_gap",
        "w2_scaled",
        "tail_quantile_error",
    ):
        assert report[name] == getattr(metrics, name)(LEARNED, TRUE, 20, learned_limit=0.5)
    assert report["base_rate"] == metrics.base_rate(TRUE, 20)
    assert report["pair_accuracy"] == metrics.pair_accuracy(LEARNED, TRUE)
    assert report["w2_raw"] == metrics.wasserstein2(LEARNED, TRUE)
    assert report["w2_zscored"] == metrics.w2_zscored(LEARNED, TRUE)
    assert report["skewness_learned"] == metrics.skewness(LEARNED)
    assert report["skewness_true"] == metrics.skewness(TRUE)
    assert all(type(value) is float for value in report.values())


def test_a_report_on_no_trajectory_is_nan_throughout_with_one_warning():
    with pytest.warns(RuntimeWarning, match="report is undefined, because there is no") as caught:
        report = metrics.cost_model_report([], [], 20)
    assert len(caught) == 1
    assert report.keys() == metrics.cost_model_report(LEARNED, TRUE, 20).keys()
    assert all(math.isnan(value) for value in report.values())


def test_a_report_without_an_unsafe_trajectory_keeps_what_is_defined():
    with pytest.warns(RuntimeWarning) as caught:
        report = metrics.cost_model_report(LEARNED, TRUE, 100)
    undefined = {name for name, value in report.items() if math.isnan(value)}
    assert undefined == {"balanced_accuracy", "type_ii_rate"}
    assert len(caught) == 2
    assert report["base_rate"] == 1


def test_a_report_on_a_constant_learned_cost_keeps_what_is_defined():
    with pytest.warns(RuntimeWarning) as caught:
        report = metrics.cost_model_report([0.1] * 5, TRUE, 20)
    undefined = {name for name, value in report.items() if math.isnan(value)}
    assert undefined == {"w2_scaled", "w2_zscored", "skewness_learned", "tail_quantile_error"}
    assert len(caught) == 4


# -- Degenerate and wrong input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (lambda: metrics.accuracy([], [], 20), "accuracy is undefined, because there is no"),
        (lambda: metrics.base_rate([], 20), "base_rate is undefined"),
        (lambda: metrics.violation_gap([], [], 20), "violation_gap is undefined"),
        (lambda: metrics.wasserstein2([], []), "wasserstein2 is undefined"),
        (lambda: metrics.balanced_accuracy([1.0], [1.0], 20), "both safe and unsafe"),
        (lambda: metrics.type_ii_rate([1.0], [1.0], 20), "no trajectory is unsafe"),
        (lambda: metrics.pair_accuracy([1.0, 2.0], [5.0, 5.0]), "no two trajectories differ"),
        (lambda: metrics.w2_scaled([1.0, 1.0], [1.0, 2.0], 20), "learned costs have no spread"),
        (lambda: metrics.w2_zscored([1.0, 2.0], [1.0, 1.0]), "w2_zscored is .* no spread"),
        (lambda: metrics.skewness([4.0]), "skewness is undefined, because the costs have no"),
        (lambda: metrics.tail_quantile_error([0.1] * 3, [1.0, 2.0, 3.0], 20), "no spread"),
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
        metrics.wasserstein2([1.0, 2.0], [1.0, 2.0, 3.0])


def test_step_costs_instead_of_trajectory_costs_are_refused():
    with pytest.raises(ValueError, match=r"learned_cost must have shape \(n,\).* got \(2, 3\)"):
        metrics.accuracy(np.zeros((2, 3)), np.zeros((2, 3)), 20)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_costs_that_are_not_finite_are_refused(bad):
    with pytest.raises(
        errors.NonFiniteError, match="learned_cost must be finite, got 1 NaN or inf"
    ):
        metrics.cost_model_report([1.0, bad], [1.0, 2.0], 20)


@pytest.mark.parametrize("limit", [math.nan, math.inf])
def test_a_report_without_a_finite_limit_is_refused(limit):
    with pytest.raises(ValueError, match="cost_limit must be finite to tell safe from unsafe"):
        metrics.cost_model_report(LEARNED, TRUE, limit)


def test_a_quantile_given_in_percent_is_refused():
    with pytest.raises(ValueError, match=r"quantile must lie in \[0, 1\], got 95"):
        metrics.tail_quantile_error(LEARNED, TRUE, 20, quantile=95)
