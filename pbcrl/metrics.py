"""How well a learned cost agrees with the true one, on trajectories that it was not trained on.

Judgement, order and probability: is a trajectory judged as it is, are pairs ordered as they are,
do the model's probabilities come true. `distributions.py` compares the costs as a whole, `epic.py`
compares step costs as functions.

Inputs are (n,) arrays of trajectory costs, learned and true of the same n trajectories in the same
order; all arithmetic is float64. A trajectory is safe if its true cost C <= d, and judged safe if
its learned cost Ĉ <= the learned limit, 0 unless said otherwise. A measure that the input leaves
undefined (no trajectory, one class only, no spread) is NaN, with one `RuntimeWarning`; costs that
are NaN or infinite are refused. It knows nothing of cost models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.distributions import (
    Costs,
    check_both,
    check_costs,
    check_limits,
    cvar_error,
    has_spread,
    skewness,
    tail_quantile_error,
    undefined,
    w2_scaled,
    w2_zscored,
    wasserstein2,
)

_REPORT = (
    "accuracy",
    "balanced_accuracy",
    "base_rate",
    "auroc",
    "pair_accuracy",
    "spearman",
    "type_ii_rate",
    "violation_gap",
    "safety_calibration_error",
    "preference_calibration_error",
    "w2_raw",
    "w2_scaled",
    "w2_zscored",
    "skewness_learned",
    "skewness_true",
    "tail_quantile_error_90",
    "tail_quantile_error",
    "tail_quantile_error_99",
    "cvar_error",
)


def cost_model_report(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> dict[str, float]:
    """Every measure of trajectory costs that compares a learned with a true one, by name.

    Args:
        learned_cost: Ĉ, (n,).
        true_cost: C, (n,), of the same trajectories.
        cost_limit: d, highest true cost that is safe.
        learned_limit: Highest learned cost that is judged safe.

    Returns:
        The measures under the names of their functions, except `w2_raw` (`wasserstein2`),
        `skewness_learned` and `skewness_true`; `tail_quantile_error` is that of the 95 % quantile,
        with those of 90 and 99 % beside it. All NaN, with one warning, if n = 0.

    Raises:
        ValueError: If the shapes differ or are not (n,), or a limit is not finite.
        NonFiniteError: If a cost is NaN or infinite.
    """
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, learned_limit)
    if not len(true):
        nothing = undefined("the cost model report", "there is no trajectory")
        return dict.fromkeys(_REPORT, nothing)
    args = (learned, true, cost_limit)
    values = (
        accuracy(*args, learned_limit=learned_limit),
        balanced_accuracy(*args, learned_limit=learned_limit),
        base_rate(true, cost_limit),
        auroc(*args),
        pair_accuracy(learned, true),
        spearman(learned, true),
        type_ii_rate(*args, learned_limit=learned_limit),
        violation_gap(*args, learned_limit=learned_limit),
        safety_calibration_error(*args, learned_limit=learned_limit),
        preference_calibration_error(learned, true),
        wasserstein2(learned, true),
        w2_scaled(*args, learned_limit=learned_limit),
        w2_zscored(learned, true),
        skewness(learned),
        skewness(true),
        tail_quantile_error(*args, learned_limit=learned_limit, quantile=0.9),
        tail_quantile_error(*args, learned_limit=learned_limit),
        tail_quantile_error(*args, learned_limit=learned_limit, quantile=0.99),
        cvar_error(*args, learned_limit=learned_limit),
    )
    return dict(zip(_REPORT, values, strict=True))


def accuracy(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """Share of trajectories judged as they are, in [0, 1]; compare it with `base_rate`."""
    judged, safe = _judge(learned_cost, true_cost, cost_limit, learned_limit)
    return _mean("accuracy", judged == safe)


def balanced_accuracy(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """Mean of the accuracies on safe and on unsafe trajectories, in [0, 1]; guessing gives 0.5."""
    judged, safe = _judge(learned_cost, true_cost, cost_limit, learned_limit)
    if safe.all() or not safe.any():
        return undefined("balanced_accuracy", "it needs both safe and unsafe trajectories")
    return float((judged[safe].mean() + (~judged[~safe]).mean()) / 2)


def base_rate(true_cost: ArrayLike, cost_limit: float) -> float:
    """Accuracy of the best constant answer: the share of the commoner class, in [0.5, 1]."""
    check_limits(cost_limit, 0.0)
    unsafe = _mean("base_rate", check_costs("true_cost", true_cost) > cost_limit)
    return max(unsafe, 1 - unsafe)


def type_ii_rate(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """Share of the unsafe trajectories that are judged safe, in [0, 1]: the dangerous error."""
    judged, safe = _judge(learned_cost, true_cost, cost_limit, learned_limit)
    if safe.all():
        return undefined("type_ii_rate", "no trajectory is unsafe")
    return float(judged[~safe].mean())


def violation_gap(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """P̂ - P in [-1, 1], predicted minus true share of unsafe trajectories; < 0 underestimates."""
    judged, safe = _judge(learned_cost, true_cost, cost_limit, learned_limit)
    return _mean("violation_gap", safe.astype(float) - judged)


def auroc(learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float) -> float:
    """Share of all pairs of a safe and an unsafe trajectory that the learned cost orders rightly.

    The area under the ROC curve, in [0, 1]: how well *some* learned limit could tell safe from
    unsafe, wherever the model has put its own. Equal learned costs count half; guessing gives 0.5.
    """
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, 0.0)
    safe = true <= cost_limit
    if safe.all() or not safe.any():
        return undefined("auroc", "it needs both safe and unsafe trajectories")
    order = np.sort(learned[safe])
    below = np.searchsorted(order, learned[~safe], side="left")
    not_above = np.searchsorted(order, learned[~safe], side="right")
    return float((below + not_above).mean() / (2 * len(order)))


def pair_accuracy(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """Share of all pairs with different true costs that the learned cost orders alike, in [0, 1].

    A pair with equal learned costs counts half, so that a constant cost scores 0.5 like any guess.
    """
    learned, true = check_both(learned_cost, true_cost)
    order = np.argsort(true)
    learned, true = learned[order], true[order]
    pairs, agree = 0, 0.0
    for cost, first_dearer in zip(learned, np.searchsorted(true, true, side="right"), strict=True):
        dearer = learned[first_dearer:]
        pairs += len(dearer)
        agree += np.sum(dearer > cost) + np.sum(dearer == cost) / 2
    if not pairs:
        return undefined("pair_accuracy", "no two trajectories differ in true cost")
    return float(agree / pairs)


def spearman(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """Spearman's rank correlation in [-1, 1]; equal costs share the mean of their ranks.

    NaN, with a warning, if either cost is constant.
    """
    learned, true = check_both(learned_cost, true_cost)
    if not (has_spread(learned) and has_spread(true)):
        return undefined("spearman", "the learned or the true costs have no spread")
    return float(np.corrcoef(_ranks(learned), _ranks(true))[0, 1])


def expected_calibration_error(
    probability: ArrayLike, outcome: ArrayLike, *, num_bins: int = 10
) -> float:
    r"""How far predicted probabilities are from the frequencies that follow, in [0, 1].

    .. math:: ECE = Σ_b (n_b / n) |mean outcome in b - mean probability in b|

    The bins b are `num_bins` equal parts of [0, 1], closed at their lower end, the last at both. A
    probability that is too bold shows as well as one that is too timid; one that always predicts
    the base rate has an error of 0, so that this measure says nothing without an accuracy beside.

    Args:
        probability: Of the event, (n,), in [0, 1].
        outcome: 1 where the event happened, 0 where not, or a frequency between (0.5 for a tie);
            NaN where nobody said, which leaves the row out. (n,).
        num_bins: >= 1. More bins see more, and more noise: some sqrt(num_bins / n).

    Returns:
        The error; NaN, with a warning, if there is no outcome.

    Raises:
        ValueError: If the shapes differ or are not (n,), an entry is outside [0, 1], or `num_bins`
            is less than 1.
    """
    predicted = np.asarray(probability, dtype=np.float64)
    happened = np.asarray(outcome, dtype=np.float64)
    if predicted.shape != happened.shape or predicted.ndim != 1:
        raise ValueError(
            "probability and outcome must both have shape (n,), one entry per event, got "
            f"{predicted.shape} and {happened.shape}"
        )
    if not ((predicted >= 0) & (predicted <= 1)).all():
        raise ValueError("a probability must lie in [0, 1]; pass σ(-Ĉ), not Ĉ")
    if ((happened < 0) | (happened > 1)).any():
        raise ValueError("an outcome must lie in [0, 1] or be NaN, which leaves it out")
    known = ~np.isnan(happened)
    if not known.any():
        return undefined("expected_calibration_error", "there is no outcome")
    return float(np.abs(_gaps(predicted[known], happened[known], num_bins)).sum() / known.sum())


def safety_calibration_error(
    learned_cost: ArrayLike,
    true_cost: ArrayLike,
    cost_limit: float,
    *,
    learned_limit: float = 0.0,
    num_bins: int = 10,
) -> float:
    """`expected_calibration_error` of "this trajectory is safe", predicted as σ(learned limit - Ĉ).

    That is the probability of the safety loss without a dead zone (Eq. 7). A dead zone shifts the
    unsafe costs up on purpose, so that "safe" is then predicted too seldom.
    """
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, learned_limit)
    if not len(true):
        return undefined("safety_calibration_error", "there is no trajectory")
    return expected_calibration_error(
        _sigmoid(learned_limit - learned), true <= cost_limit, num_bins=num_bins
    )


def preference_calibration_error(
    learned_cost: ArrayLike, true_cost: ArrayLike, *, num_bins: int = 10
) -> float:
    """`expected_calibration_error` of "the first is the safer one", σ(Ĉ₂ - Ĉ₁) (Eq. 3).

    Over all pairs of different trajectories, each in both orders; equal true costs are a tie, 0.5.
    """
    learned, true = check_both(learned_cost, true_cost)
    n = len(true)
    if n < 2:
        return undefined("preference_calibration_error", "there is no pair of trajectories")
    gaps: Costs | float = 0.0
    for i in range(n):  # row by row: memory stays that of one row
        predicted = _sigmoid(learned - learned[i])
        happened = (1 + np.sign(true - true[i])) / 2
        predicted[i] = happened[i] = 0  # no pair; adds nothing to any bin
        gaps = gaps + _gaps(predicted, happened, num_bins)
    return float(np.abs(gaps).sum() / (n * (n - 1)))


def bias(mean_true_cost: float, cost_limit: float) -> float:
    """|mean true episode cost - d| at the end of training: how far off the limit the policy is."""
    return abs(mean_true_cost - cost_limit)


def _judge(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, learned_limit: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Judged safe, and safe; both bool (n,)."""
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, learned_limit)
    return learned <= learned_limit, true <= cost_limit


def _mean(name: str, values: NDArray[np.bool_] | Costs) -> float:
    return float(values.mean()) if len(values) else undefined(name, "there is no trajectory")


def _gaps(probability: Costs, outcome: Costs, num_bins: int) -> Costs:
    """Sum of outcome - probability in each bin, (num_bins,)."""
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}; 10 are usual")
    bins = np.minimum((probability * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.bincount(bins, weights=outcome - probability, minlength=num_bins)
    return gaps.astype(np.float64, copy=False)


def _sigmoid(logit: Costs) -> Costs:
    return 0.5 + 0.5 * np.tanh(0.5 * logit)  # exp would overflow


def _ranks(costs: Costs) -> Costs:
    """Ranks from 1; equal costs share the mean of theirs."""
    _, inverse, counts = np.unique(costs, return_inverse=True, return_counts=True)
    last: Costs = np.cumsum(counts).astype(np.float64)
    return (last - (counts - 1) / 2)[inverse]
