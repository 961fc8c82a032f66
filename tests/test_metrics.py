import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pbcrl import Trajectory, errors, metrics

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


def test_four_of_the_six_pairs_of_safe_and_unsafe_are_ordered_rightly():
    """Unsafe are judged 2 and -1, safe -3, 1 and 0: 2 lies above all three, -1 above one."""
    assert metrics.auroc(LEARNED, TRUE, 20) == pytest.approx(4 / 6)


def test_a_constant_learned_cost_tells_safe_from_unsafe_like_a_guess():
    assert metrics.auroc([0.0] * 5, TRUE, 20) == 0.5


@law
@given(cost_pairs.filter(lambda rows: min(t for _, t in rows) <= 0 < max(t for _, t in rows)))
def test_auroc_is_the_rank_sum_statistic_of_mann_and_whitney(rows):
    learned, true = split(rows)
    unsafe = true > 0
    n_unsafe, n_safe = unsafe.sum(), (~unsafe).sum()
    rank_sum = stats.rankdata(learned)[unsafe].sum()
    expected = (rank_sum - n_unsafe * (n_unsafe + 1) / 2) / (n_unsafe * n_safe)
    assert metrics.auroc(learned, true, 0) == pytest.approx(expected)


def test_auroc_ignores_where_the_learned_limit_lies():
    shifted = metrics.auroc(3 * np.array(LEARNED) + 100, TRUE, 20)
    assert shifted == metrics.auroc(LEARNED, TRUE, 20)


# -- Steps -------------------------------------------------------------------------------------


def steps(learned: list[float], true: list[float]) -> Trajectory:
    """An episode whose only observation is the learned cost of the step."""
    return Trajectory(np.array(learned)[:, None], np.zeros((len(true), 1)), np.array(true))


def observed(obs: np.ndarray, _: np.ndarray) -> np.ndarray:
    return obs[:, 0]


def test_of_the_six_pairs_of_a_costly_and_a_free_step_four_and_a_half_are_ordered_rightly():
    """Costly steps have 1 and 3, free ones 0, 1 and 2: 1 is above 0 and level with 1."""
    episodes = [steps([1.0, 0.0], [0.5, 0.0]), steps([3.0, 1.0, 2.0], [2.0, 0.0, 0.0])]
    assert metrics.step_auroc(observed, episodes) == pytest.approx(4.5 / 6)


def test_a_cost_that_knows_the_episode_and_not_the_step_finds_no_step():
    """Unsafe episodes score higher at every step; each has as many costly steps as free ones."""
    episodes = [steps([1.0, 1.0], [1.0, 0.0]), steps([0.0, 0.0], [1.0, 0.0])]
    assert metrics.step_auroc(observed, episodes) == 0.5
    assert metrics.auroc([2.0, 0.0], [30.0, 10.0], 20) == 1


def test_steps_of_large_observations_are_scored_in_parts():
    sizes = []

    def counted(obs, actions):
        assert len(obs) == len(actions)
        sizes.append(len(obs))
        return obs[:, 0]

    obs = np.repeat(np.arange(6, dtype=np.float32)[:, None], 1_500_000, axis=1)
    assert metrics.step_auroc(counted, [Trajectory(obs, np.zeros((6, 1)), np.arange(6) > 3)]) == 1
    assert sum(sizes) == 6 > max(sizes)


def test_steps_without_a_true_cost_or_with_a_cost_of_another_shape_are_refused():
    without = Trajectory(np.zeros((3, 1)), np.zeros((3, 1)))
    with pytest.raises(errors.MissingCostError, match=r"step_auroc needs .* has costs=None"):
        metrics.step_auroc(observed, [without])
    with pytest.raises(
        ValueError, match=r"one cost per step, got shape \(2, 1\) for 2 steps; pass"
    ):
        metrics.step_auroc(lambda obs, _: obs, [steps([0.0, 1.0], [0.0, 1.0])])
    with pytest.raises(errors.NonFiniteError, match="step_cost must be finite, got 1 NaN"):
        metrics.step_auroc(lambda obs, _: obs[:, 0] * np.nan, [steps([0.0], [1.0])])


# -- Ranks -------------------------------------------------------------------------------------


def test_rank_differences_0_2_0_1_and_3_correlate_with_three_tenths():
    """1 - 6 Σ d² / (n (n² - 1)) = 1 - 6 · 14 / 120."""
    assert metrics.spearman(LEARNED, TRUE) == pytest.approx(0.3)


@law
@given(cost_pairs.filter(lambda rows: min(len(set(costs)) for costs in split(rows)) > 1))
def test_spearman_agrees_with_scipy_also_on_ties(rows):
    learned, true = split(rows)
    expected = stats.spearmanr(learned, true).statistic
    assert metrics.spearman(learned, true) == pytest.approx(expected)


# -- Calibration -------------------------------------------------------------------------------


def test_a_quarter_that_happens_half_the_time_and_three_that_always_do_are_off_by_a_quarter():
    error = metrics.expected_calibration_error([0.25, 0.25, 0.75, 0.75], [1, 0, 1, 1])
    assert error == pytest.approx((0.25 + 0.25) / 2)


def test_always_predicting_the_base_rate_is_calibrated():
    assert metrics.expected_calibration_error([0.25] * 8, [1, 0] * 2 + [0] * 4) == 0


def test_what_nobody_labelled_does_not_count():
    error = metrics.expected_calibration_error([0.9, 0.1, 0.3], [1.0, math.nan, math.nan])
    assert error == pytest.approx(0.1)


@law
@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=20),
    st.integers(1, 12),
)
def test_calibration_error_agrees_with_its_definition_bin_by_bin(rows, num_bins):
    probability, outcome = split(rows)
    edges = np.arange(num_bins + 1) / num_bins
    bins = np.clip(np.searchsorted(edges, probability, side="right") - 1, 0, num_bins - 1)
    expected = 0.0
    for b in range(num_bins):
        inside = bins == b
        if inside.any():
            expected += inside.mean() * abs(outcome[inside].mean() - probability[inside].mean())
    error = metrics.expected_calibration_error(probability, outcome, num_bins=num_bins)
    assert error == pytest.approx(expected, abs=1e-9)


def test_costs_of_ln_3_are_safe_with_probability_a_quarter():
    learned = np.log(3) * np.array([1, 1, -1, -1])  # predicted 1/4, 1/4, 3/4, 3/4
    true = [10.0, 30.0, 10.0, 10.0]
    assert metrics.safety_calibration_error(learned, true, 20) == pytest.approx(0.25)
    moved = metrics.safety_calibration_error(learned + 7, true, 20, learned_limit=7)
    assert moved == pytest.approx(0.25)


def test_bold_costs_are_off_by_their_wrong_judgements_alone():
    """Far from the limit every probability is 0 or 1; two of five are wrong."""
    learned = 1000 * (np.array(LEARNED) - 0.5)
    assert metrics.safety_calibration_error(learned, TRUE, 20) == pytest.approx(2 / 5)


def test_the_costlier_by_ln_3_should_be_the_less_safe_one_three_times_in_four():
    """Of one pair, preferred with 3/4: right, a tie, wrong."""
    for true, error in (([0.0, 1.0], 1 / 4), ([1.0, 1.0], 1 / 4), ([1.0, 0.0], 3 / 4)):
        found = metrics.preference_calibration_error([0.0, math.log(3)], true)
        assert found == pytest.approx(error)


@law
@given(cost_pairs)
def test_preference_calibration_is_that_of_all_ordered_pairs(rows):
    learned, true = split(rows)
    first, second = np.array([(i, j) for i in range(len(rows)) for j in range(len(rows))]).T
    first, second = first[first != second], second[first != second]
    expected = metrics.expected_calibration_error(
        0.5 + 0.5 * np.tanh((learned[second] - learned[first]) / 2),
        np.where(true[first] == true[second], 0.5, true[first] < true[second]),
    )
    found = metrics.preference_calibration_error(learned, true)
    assert found == pytest.approx(expected, abs=1e-9)


def test_labels_drawn_from_the_model_s_own_probabilities_are_calibrated():
    rng = np.random.default_rng(0)
    learned = rng.normal(0, 2, 20_000)
    safe = rng.random(20_000) < 1 / (1 + np.exp(learned))
    assert metrics.safety_calibration_error(learned, 1.0 - safe, 0.5) < 0.01
    assert metrics.safety_calibration_error(3 * learned, 1.0 - safe, 0.5) > 0.1


# -- At the learned limit ----------------------------------------------------------------------


def test_where_the_mean_is_at_the_limit_already_the_true_cost_is_the_plain_mean():
    assert metrics.true_cost_at_limit([-1.0, 3.0, -2.0], [0.0, 5.0, 40.0]) == pytest.approx(15)


def test_two_learned_costs_are_weighted_by_the_limit_alone():
    """Mean 0.5 of -1 and 1 takes a quarter and three quarters: (10 + 3 · 30) / 4."""
    found = metrics.true_cost_at_limit([-1.0, 1.0], [10.0, 30.0], learned_limit=0.5)
    assert found == pytest.approx(25)


def test_three_learned_costs_are_weighted_by_a_cube_root():
    """Weights u⁻¹, 1, u² of -1, 0, 2 with u = exp(-t): the mean is 0 where 2 u³ = 1."""
    u = 0.5 ** (1 / 3)
    expected = (10 / u + 20 + 90 * u**2) / (1 / u + 1 + u**2)
    found = metrics.true_cost_at_limit([-1.0, 0.0, 2.0], [10.0, 20.0, 90.0])
    assert found == pytest.approx(expected)


@law
@given(st.lists(costs, min_size=2, max_size=12), st.floats(0, 1), costs, costs)
def test_a_true_cost_that_is_linear_in_the_learned_one_is_exact(learned, share, slope, offset):
    limit = min(learned) + share * (max(learned) - min(learned))
    true = offset + slope * np.array(learned)
    found = metrics.true_cost_at_limit(learned, true, learned_limit=limit)
    assert found == pytest.approx(offset + slope * limit, abs=1e-6)


def test_a_learned_cost_that_is_the_logarithm_of_the_true_one_lets_the_policy_cost_more():
    """Ĉ = ln(C / d), normal: at E[Ĉ] = 0 the geometric mean is d, and E[C] is d exp(σ² / 2)."""
    learned = 0.5 * stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000) + 0.3
    found = metrics.true_cost_at_limit(learned, 20 * np.exp(learned))
    assert found == pytest.approx(20 * np.exp(0.125), rel=2e-3)


def test_at_the_lowest_learned_cost_only_what_has_it_counts():
    found = metrics.true_cost_at_limit([0.0, 0.0, 1.0], [10.0, 20.0, 90.0])
    assert found == 15


def test_the_true_cost_at_the_limit_ignores_the_scale_of_the_learned_one():
    found = [metrics.true_cost_at_limit(scale * np.array(LEARNED), TRUE) for scale in (1, 1e9)]
    assert found[0] == pytest.approx(found[1])


def test_what_the_learned_cost_explains_adds_nothing_to_the_interval():
    """Residuals 1, -2, 1 of the line 10 + 3 Ĉ, a third each, over 1 - leverage = 1/6, 2/3, 1/6."""
    found = metrics.true_cost_at_limit_interval([-1.0, 0.0, 1.0], [8.0, 8.0, 14.0])
    assert found == pytest.approx(1.96 * math.sqrt(2**2 + 1**2 + 2**2))


def test_the_interval_holds_the_answer_19_times_in_20():
    """Ĉ normal with mean 0.5, C = 20 + 5 Ĉ + noise: at the limit 0 it is 20."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(400):
        learned = rng.normal(0.5, 1.0, 100)
        true = 20 + 5 * learned + rng.normal(0, 10, 100)
        half = metrics.true_cost_at_limit_interval(learned, true)
        inside += abs(metrics.true_cost_at_limit(learned, true) - 20) <= half
    assert 0.9 < inside / 400 < 0.98


def test_two_of_five_trajectories_are_above_the_limit():
    assert metrics.violation_rate(TRUE, 20) == pytest.approx(2 / 5)


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


@law
@given(cost_pairs.filter(lambda rows: len({learned for learned, _ in rows}) > 1), costs)
def test_the_square_of_the_scaled_w2_is_that_of_its_offset_plus_that_of_its_shape(rows, limit):
    learned, true = split(rows)
    whole = metrics.w2_scaled(learned, true, 20, learned_limit=limit)
    offset = metrics.w2_offset(learned, true, 20, learned_limit=limit)
    shape = metrics.w2_shape(learned, true, 20, learned_limit=limit)
    assert offset**2 + shape**2 == pytest.approx(whole**2, abs=1e-9)


def test_a_limit_learned_too_high_is_all_offset_and_a_skewed_shape_is_none():
    """Zero at 26 instead of 20: learned costs are 6 too low. (0, 0, 3) has its mean at 1.

    About the means, (-1, -1, 2) and (-2, 1, 1) differ by 1, -2 and 1.
    """
    learned = (np.array(TRUE) - 26) / 2
    assert metrics.w2_offset(learned, TRUE, 20) == pytest.approx(-6)
    assert metrics.w2_shape(learned, TRUE, 20) == pytest.approx(0, abs=1e-6)
    skewed = [0.0, 0.0, 3.0], [0.0, 3.0, 3.0]
    assert metrics.w2_offset(*skewed, 2, learned_limit=1) == pytest.approx(0)
    assert metrics.w2_shape(*skewed, 2, learned_limit=1) == pytest.approx(math.sqrt(6 / 3))


@law
@given(cost_pairs.filter(lambda rows: min(len(set(costs)) for costs in split(rows)) > 1))
def test_the_shape_is_the_z_scored_distance_in_units_of_true_cost(rows):
    learned, true = split(rows)
    expected = true.std() * metrics.w2_zscored(learned, true)
    assert metrics.w2_shape(learned, true, 20) == pytest.approx(expected, abs=1e-6)


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


def test_the_worst_15_percent_of_1_to_10_are_10_and_half_of_9():
    worst = metrics.conditional_value_at_risk(range(1, 11), quantile=0.85)
    assert worst == pytest.approx((10 + 0.5 * 9) / 1.5)


@law
@given(st.lists(costs, min_size=1, max_size=12), st.sampled_from([0.0, 0.3, 0.5, 0.95]))
def test_cvar_is_the_least_of_all_z_plus_the_mean_excess_over_z(sample, quantile):
    """Rockafellar and Uryasev's formula is convex with kinks at the costs, so least at one."""
    bound = min(z + np.maximum(0, np.array(sample) - z).mean() / (1 - quantile) for z in sample)
    found = metrics.conditional_value_at_risk(sample, quantile=quantile)
    assert found == pytest.approx(bound, abs=1e-9)
    assert np.mean(sample) - 1e-9 <= found <= max(sample) + 1e-9


def test_cvar_at_0_is_the_mean_and_near_1_the_maximum():
    assert metrics.conditional_value_at_risk(TRUE, quantile=0) == pytest.approx(30)
    assert metrics.conditional_value_at_risk(TRUE, quantile=0.9) == pytest.approx(90)


def test_a_quantile_does_not_see_how_far_a_tail_reaches_but_cvar_does():
    """20 costs with the limit 0, of which the learned ones stretch the worst alone, 20 to 40."""
    true = np.arange(1.0, 21.0)
    learned = np.where(true == 20, 40.0, true)
    scale = true.std() / learned.std()
    error = metrics.cvar_error(learned, true, 0, quantile=0.9)
    assert error == pytest.approx(scale * (40 + 19) / 2 - (20 + 19) / 2)
    quantile = metrics.tail_quantile_error(learned, true, 0, quantile=0.9)
    assert quantile == pytest.approx(scale * 18.1 - 18.1)


# -- Bias --------------------------------------------------------------------------------------


def test_bias_is_the_distance_to_the_limit_from_either_side():
    assert metrics.bias(18.5, 20) == metrics.bias(21.5, 20) == 1.5


# -- Report ------------------------------------------------------------------------------------


def test_a_learned_cost_that_is_the_true_excess_in_other_units_is_perfect_by_every_measure():
    learned = (np.array(TRUE) - 20) / 7
    report = metrics.cost_model_report(learned, TRUE, 20)
    assert report.pop("w2_raw") > 20  # not comparable: the units differ
    assert report.pop("base_rate") == pytest.approx(3 / 5)
    assert report.pop("skewness_learned") == pytest.approx(report.pop("skewness_true"))
    # Probabilities are those of the units: nearer to the limit they are less sure.
    assert 0 < report.pop("safety_calibration_error") < 0.5
    assert 0 < report.pop("preference_calibration_error") < 0.5
    assert report.pop("true_cost_at_limit_interval") == pytest.approx(0, abs=1e-9)
    assert report == pytest.approx(
        {
            "accuracy": 1,
            "balanced_accuracy": 1,
            "auroc": 1,
            "pair_accuracy": 1,
            "spearman": 1,
            "type_ii_rate": 0,
            "violation_gap": 0,
            "true_cost_at_limit": 20,
            "w2_scaled": 0,
            "w2_offset": 0,
            "w2_shape": 0,
            "w2_zscored": 0,
            "tail_quantile_error_90": 0,
            "tail_quantile_error": 0,
            "tail_quantile_error_99": 0,
            "cvar_error": 0,
        }
    )


def test_the_report_holds_each_measure_under_its_own_name():
    report = metrics.cost_model_report(LEARNED, TRUE, 20, learned_limit=0.5)
    for name in (
        "accuracy",
        "balanced_accuracy",
        "type_ii_rate",
        "violation_gap",
        "safety_calibration_error",
    ):
        assert report[name] == getattr(metrics, name)(LEARNED, TRUE, 20, learned_limit=0.5)
    for name in ("w2_scaled", "w2_offset", "w2_shape", "tail_quantile_error", "cvar_error"):
        assert report[name] == getattr(metrics, name)(LEARNED, TRUE, 20, learned_limit=0.5)
    for percent in (90, 99):
        assert report[f"tail_quantile_error_{percent}"] == metrics.tail_quantile_error(
            LEARNED, TRUE, 20, learned_limit=0.5, quantile=percent / 100
        )
    assert report["base_rate"] == metrics.base_rate(TRUE, 20)
    assert report["auroc"] == metrics.auroc(LEARNED, TRUE, 20)
    for name in ("pair_accuracy", "spearman", "preference_calibration_error"):
        assert report[name] == getattr(metrics, name)(LEARNED, TRUE)
    for name in ("true_cost_at_limit", "true_cost_at_limit_interval"):
        assert report[name] == getattr(metrics, name)(LEARNED, TRUE, learned_limit=0.5)
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
    assert undefined == {"balanced_accuracy", "auroc", "type_ii_rate"}
    assert len(caught) == 3
    assert report["base_rate"] == 1


def test_a_report_on_a_constant_learned_cost_keeps_what_is_defined():
    with pytest.warns(RuntimeWarning) as caught:
        report = metrics.cost_model_report([0.1] * 5, TRUE, 20)
    undefined = {name for name, value in report.items() if math.isnan(value)}
    tails = {
        "tail_quantile_error_90",
        "tail_quantile_error",
        "tail_quantile_error_99",
        "cvar_error",
    }
    parts = {"w2_scaled", "w2_offset", "w2_shape", "w2_zscored"}
    at_limit = {"true_cost_at_limit", "true_cost_at_limit_interval"}
    assert undefined == {"spearman", "skewness_learned", *parts, *at_limit, *tails}
    assert len(caught) == len(undefined)


# -- Degenerate and wrong input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (lambda: metrics.accuracy([], [], 20), "accuracy is undefined, because there is no"),
        (lambda: metrics.base_rate([], 20), "base_rate is undefined"),
        (lambda: metrics.violation_gap([], [], 20), "violation_gap is undefined"),
        (lambda: metrics.balanced_accuracy([1.0], [1.0], 20), "both safe and unsafe"),
        (lambda: metrics.type_ii_rate([1.0], [1.0], 20), "no trajectory is unsafe"),
        (lambda: metrics.auroc([1.0], [1.0], 20), "auroc .* both safe and unsafe"),
        (lambda: metrics.pair_accuracy([1.0, 2.0], [5.0, 5.0]), "no two trajectories differ"),
        (lambda: metrics.step_auroc(observed, []), "both steps that cost and steps that do not"),
        (lambda: metrics.violation_rate([], 20), "violation_rate is undefined"),
        (lambda: metrics.true_cost_at_limit([], []), "true_cost_at_limit is .* on one side"),
        (lambda: metrics.true_cost_at_limit([1.0, 2.0], [3.0, 4.0]), "lie on one side of the"),
        (lambda: metrics.true_cost_at_limit_interval([-1.0], [3.0]), "lie on one side of the"),
        (lambda: metrics.true_cost_at_limit_interval([-1.0, 1.0], [3.0, 4.0]), "too few learned"),
        (lambda: metrics.w2_offset([1.0, 1.0], [1.0, 2.0], 20), "w2_offset .* no spread"),
        (lambda: metrics.w2_shape([1.0, 1.0], [1.0, 2.0], 20), "w2_shape .* no spread"),
        (lambda: metrics.spearman([1.0, 2.0], [5.0, 5.0]), "spearman is .* no spread"),
        (lambda: metrics.expected_calibration_error([0.5], [math.nan]), "there is no outcome"),
        (lambda: metrics.safety_calibration_error([], [], 20), "there is no trajectory"),
        (lambda: metrics.preference_calibration_error([1.0], [1.0]), "there is no pair of"),
        (lambda: metrics.wasserstein2([], []), "wasserstein2 is undefined"),
        (
            lambda: metrics.w2_scaled([1.0, 1.0], [1.0, 2.0], 20),
            "learned costs have no spread",
        ),
        (lambda: metrics.w2_zscored([1.0, 2.0], [1.0, 1.0]), "w2_zscored is .* no spread"),
        (lambda: metrics.skewness([4.0]), "skewness is undefined, because the costs have no"),
        (lambda: metrics.tail_quantile_error([0.1] * 3, [1.0, 2.0, 3.0], 20), "no spread"),
        (
            lambda: metrics.cvar_error([0.1] * 3, [1.0, 2.0, 3.0], 20),
            "cvar_error is .* no sp",
        ),
        (lambda: metrics.conditional_value_at_risk([]), "there is no trajectory"),
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
        metrics.spearman([1.0, 2.0], [1.0, 2.0, 3.0])


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
    with pytest.raises(ValueError, match=r"cost_limit must lie in \(-inf, inf\), got"):
        metrics.cost_model_report(LEARNED, TRUE, limit)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([0.5, 1.2], [0, 1]), r"lie in \[0, 1\], .*; pass σ\(-Ĉ\) as probability, not Ĉ"),
        (([0.5, math.nan], [0, 1]), r"lie in \[0, 1\]"),
        (([0.5, 0.2], [0, 2]), r"lie in \[0, 1\], an unknown outcome NaN"),
        (([0.5, 0.2], [0]), r"both be \(n,\) .*, got \(2,\) and \(1,\)"),
    ],
)
def test_what_is_no_probability_or_no_outcome_is_refused(args, match):
    with pytest.raises(ValueError, match=match):
        metrics.expected_calibration_error(*args)


def test_calibration_without_bins_is_refused():
    with pytest.raises(ValueError, match=r"num_bins must lie in \[1, inf\), got 0"):
        metrics.preference_calibration_error(LEARNED, TRUE, num_bins=0)


def test_a_quantile_given_in_percent_is_refused():
    with pytest.raises(ValueError, match=r"quantile must lie in \[0, 1\], got 95"):
        metrics.tail_quantile_error(TRUE, TRUE, 20, quantile=95)
    with pytest.raises(ValueError, match=r"quantile must lie in \[0, 1\), got 1; 0\.95 is the"):
        metrics.conditional_value_at_risk(TRUE, quantile=1)
