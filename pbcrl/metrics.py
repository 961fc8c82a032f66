"""How well a learned cost agrees with the true one, on trajectories that it was not trained on.

First judgement, order and probability: is a trajectory judged as it is, are pairs ordered as they
are, do the model's probabilities come true; are the steps found that cost. Then what a policy would
truly cost that meets the learned limit, and the distributions of the costs, tails above all, no
matter which trajectory got which cost. `epic.py` compares step costs as functions.

Inputs, but for `step_auroc`, are (n,) arrays of trajectory costs, learned and true of the same n
trajectories in the same order; all arithmetic is float64. A trajectory is safe if its true cost
C <= d, and judged safe if its learned cost Ĉ <= the learned limit, 0 unless said otherwise. A
measure that the input leaves undefined (no trajectory, one class only, no spread) is NaN, with one
`RuntimeWarning`; costs that are NaN or infinite are refused. Does not depend on cost models.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.errors import MissingCostError, NonFiniteError, require_in
from pbcrl.trajectory import Trajectory

Costs = NDArray[np.float64]

_NUMBERS = 4_000_000  # of observations that are scored at a time: 16 MB

REPORT = (
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
    "true_cost_at_limit",
    "true_cost_at_limit_interval",
    "w2_raw",
    "w2_scaled",
    "w2_offset",
    "w2_shape",
    "w2_zscored",
    "skewness_learned",
    "skewness_true",
    "tail_quantile_error_90",
    "tail_quantile_error",
    "tail_quantile_error_99",
    "cvar_error",
)
"""Names of what `cost_model_report` returns."""


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
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not len(true):
        nothing = undefined("the cost model report", "there is no trajectory")
        return dict.fromkeys(REPORT, nothing)
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
        true_cost_at_limit(learned, true, learned_limit=learned_limit),
        true_cost_at_limit_interval(learned, true, learned_limit=learned_limit),
        wasserstein2(learned, true),
        w2_scaled(*args, learned_limit=learned_limit),
        w2_offset(*args, learned_limit=learned_limit),
        w2_shape(*args, learned_limit=learned_limit),
        w2_zscored(learned, true),
        skewness(learned),
        skewness(true),
        tail_quantile_error(*args, learned_limit=learned_limit, quantile=0.9),
        tail_quantile_error(*args, learned_limit=learned_limit),
        tail_quantile_error(*args, learned_limit=learned_limit, quantile=0.99),
        cvar_error(*args, learned_limit=learned_limit),
    )
    return dict(zip(REPORT, values, strict=True))


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
    _check_limits(cost_limit, 0.0)
    unsafe = _mean("base_rate", _check_costs("true_cost", true_cost) > cost_limit)
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
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, 0.0)
    safe = true <= cost_limit
    if safe.all() or not safe.any():
        return undefined("auroc", "it needs both safe and unsafe trajectories")
    return _share_above(learned[~safe], learned[safe])


def step_auroc(
    step_cost: Callable[[NDArray[Any], NDArray[Any]], ArrayLike], trajectories: Iterable[Trajectory]
) -> float:
    """`auroc` of steps: is the learned cost higher where the true step cost is above 0.

    Over all steps of all trajectories together, in [0, 1]; equal learned costs count half, guessing
    gives 0.5. A cost that tells safe from unsafe episodes without knowing which steps cost can be
    lowered by a policy that is no safer.

    Args:
        step_cost: Learned cost (T,) of obs (T, *obs_shape) and actions (T, act_dim), such as
            `CostModel.step_cost`. Called on parts of a trajectory if its observations are large.
        trajectories: With true costs. One at a time is held, and 9 bytes of every step.

    Returns:
        The share; NaN, with a warning, unless some steps cost and others do not.

    Raises:
        MissingCostError: If a trajectory was recorded without costs.
        NonFiniteError: If a learned cost is NaN or infinite.
        ValueError: If `step_cost` does not return one cost per step.
    """
    scores: list[Costs] = []
    costly: list[NDArray[np.bool_]] = []
    for trajectory in trajectories:
        if trajectory.costs is None:
            raise MissingCostError(
                "step_auroc needs the true cost of every step, but a trajectory has costs=None; "
                "record an env that reports info['cost']"
            )
        rows = max(1, _NUMBERS // math.prod(trajectory.obs.shape[1:]))
        for start in range(0, len(trajectory), rows):
            part = slice(start, start + rows)
            found = np.asarray(step_cost(trajectory.obs[part], trajectory.actions[part]))
            if found.shape != trajectory.costs[part].shape:
                raise ValueError(
                    f"step_cost must return one cost per step, got shape {found.shape} for "
                    f"{len(trajectory.costs[part])} steps; pass CostModel.step_cost"
                )
            scores.append(_check_costs("step_cost", found))
        costly.append(trajectory.costs > 0)
    learned = np.concatenate([np.empty(0), *scores])
    costs = np.concatenate([np.empty(0, bool), *costly])
    if costs.all() or not costs.any():
        return undefined("step_auroc", "it needs both steps that cost and steps that do not")
    return _share_above(learned[costs], learned[~costs])


def pair_accuracy(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """Share of all pairs with different true costs that the learned cost orders alike, in [0, 1].

    A pair with equal learned costs counts half, so that a constant cost scores 0.5 like any guess.
    """
    learned, true = _check_both(learned_cost, true_cost)
    order = np.argsort(true)
    learned, true = learned[order], true[order]
    pairs, agree = 0, 0.0
    for cost, first_higher in zip(learned, np.searchsorted(true, true, side="right"), strict=True):
        higher = learned[first_higher:]
        pairs += len(higher)
        agree += np.sum(higher > cost) + np.sum(higher == cost) / 2
    if not pairs:
        return undefined("pair_accuracy", "no two trajectories differ in true cost")
    return float(agree / pairs)


def spearman(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """Spearman's rank correlation in [-1, 1]; equal costs share the mean of their ranks.

    NaN, with a warning, if either cost is constant.
    """
    learned, true = _check_both(learned_cost, true_cost)
    if not (_has_spread(learned) and _has_spread(true)):
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
            NaN where unknown, which leaves the row out. (n,).
        num_bins: >= 1. More bins see more, and more noise: some sqrt(num_bins / n).

    Returns:
        The error; NaN, with a warning, if there is no outcome.

    Raises:
        ValueError: If the shapes differ or are not (n,), an entry is outside [0, 1], or `num_bins`
            is less than 1.
    """
    predicted = np.asarray(probability, dtype=np.float64)
    happened = np.asarray(outcome, dtype=np.float64)
    shares = np.concatenate([predicted.ravel(), happened[~np.isnan(happened)]])
    if not predicted.shape == happened.shape == (predicted.size,) or not _are_shares(shares):
        raise ValueError(
            "probability and outcome must both be (n,) and lie in [0, 1], an unknown outcome NaN, "
            f"got {predicted.shape} and {happened.shape}; pass σ(-Ĉ) as probability, not Ĉ"
        )
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
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
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
    learned, true = _check_both(learned_cost, true_cost)
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


def true_cost_at_limit(
    learned_cost: ArrayLike, true_cost: ArrayLike, *, learned_limit: float = 0.0
) -> float:
    r"""E[C] of trajectories whose mean learned cost is the learned limit, in units of true cost.

    What a policy would truly cost that meets the learned constraint exactly, as far as trajectories
    of other policies tell. They are weighted so that their mean learned cost becomes the limit, by
    the weights that differ least from equal ones, in the sense of relative entropy:

    .. math:: w_i ∝ exp(-t Ĉ_i),   Σ_i w_i Ĉ_i = learned limit

    The plain mean of C if the mean of Ĉ is at the limit already; exact if C is linear in Ĉ. The
    further the mean has to be moved, the fewer trajectories the answer rests on:
    `true_cost_at_limit_interval`.

    Returns:
        The weighted mean; NaN, with a warning, if all learned costs lie on one side of the limit.
    """
    learned, true = _check_both(learned_cost, true_cost)
    weights = _weights_at(learned, learned_limit)
    if weights is None:
        return undefined("true_cost_at_limit", "all learned costs lie on one side of the limit")
    return float(weights @ true)


def true_cost_at_limit_interval(
    learned_cost: ArrayLike, true_cost: ArrayLike, *, learned_limit: float = 0.0
) -> float:
    r"""Half-width of the normal 95 % interval of `true_cost_at_limit`, in units of true cost.

    .. math:: 1.96 sqrt(Σ_i (w_i r_i / (1 - h_i))²)

    with r the residuals of the weighted regression of C on Ĉ, as what Ĉ explains has no error when
    its mean is given, and h their leverages (HC3, MacKinnon and White 1985). Too short where only a
    few trajectories have any weight. NaN, with a warning, where `true_cost_at_limit` is, or if one
    of them decides alone.
    """
    learned, true = _check_both(learned_cost, true_cost)
    name = "true_cost_at_limit_interval"
    weights = _weights_at(learned, learned_limit)
    if weights is None:
        return undefined(name, "all learned costs lie on one side of the limit")
    excess, deviation = learned - learned_limit, true - weights @ true
    spread = float(weights @ excess**2) or 1.0  # 0 only where each excess is 0 that has a weight
    residual = deviation - (weights @ (excess * deviation)) / spread * excess
    free = 1 - weights * (1 + excess**2 / spread)
    if free.min() < 1e-9:
        return undefined(name, "too few learned costs are near the limit")
    return float(1.96 * np.sqrt(np.sum((weights * residual / free) ** 2)))


def violation_rate(true_cost: ArrayLike, cost_limit: float) -> float:
    """Share of trajectories that are unsafe, in [0, 1]; E[C] <= d does not bound it."""
    true = _check_costs("true_cost", true_cost)
    _check_limits(cost_limit, 0.0)
    return _mean("violation_rate", true > cost_limit)


def wasserstein2(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """2-Wasserstein distance of the two cost distributions as they are, in units of cost, >= 0.

    In one dimension the best transport matches sorted samples: the root mean square of the sorted
    differences. It says nothing about *which* trajectory got which cost.
    """
    learned, true = _check_both(learned_cost, true_cost)
    if not len(true):
        return undefined("wasserstein2", "there is no trajectory")
    return float(np.sqrt(np.mean((np.sort(learned) - np.sort(true)) ** 2)))


def w2_scaled(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """`wasserstein2` after removing the learned cost's arbitrary scale, in units of true cost.

    The learned cost becomes d + (sd(C) / sd(Ĉ)) (Ĉ - learned_limit): "the learned limit means d" is
    kept, so a misplaced limit still shows: its square is `w2_offset`² + `w2_shape`². NaN, with a
    warning, if the learned costs are all equal.
    """
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _has_spread(learned):
        return undefined("w2_scaled", "the learned costs have no spread")
    return wasserstein2(_match_scale(learned, true, cost_limit, learned_limit), true)


def w2_offset(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """Mean of the learned minus that of the true cost, on the scale of `w2_scaled`.

    How far off the learned limit is, in units of true cost: < 0 underestimates, so that a policy at
    the learned limit costs more than d. NaN, with a warning, where `w2_scaled` is.
    """
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _has_spread(learned):
        return undefined("w2_offset", "the learned costs have no spread")
    return float(_match_scale(learned, true, cost_limit, learned_limit).mean() - true.mean())


def w2_shape(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """`wasserstein2` of both costs about their means, on the scale of `w2_scaled`, >= 0.

    `w2_zscored` times the standard deviation of the true cost, so in its units; it depends on no
    limit. NaN, with a warning, where `w2_scaled` is.
    """
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _has_spread(learned):
        return undefined("w2_shape", "the learned costs have no spread")
    scaled = _match_scale(learned, true, cost_limit, learned_limit)
    return wasserstein2(scaled - scaled.mean(), true - true.mean())


def w2_zscored(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """`wasserstein2` of both costs at mean 0 and standard deviation 1: the shape alone, in [0, √2].

    NaN, with a warning, if either cost is constant.
    """
    learned, true = _check_both(learned_cost, true_cost)
    if not (_has_spread(learned) and _has_spread(true)):
        return undefined("w2_zscored", "the learned or the true costs have no spread")
    return wasserstein2(
        (learned - learned.mean()) / learned.std(), (true - true.mean()) / true.std()
    )


def skewness(cost: ArrayLike) -> float:
    """Third standardised moment of the costs, without bias correction; > 0 is a long right tail."""
    costs = _check_costs("cost", cost)
    if not _has_spread(costs):
        return undefined("skewness", "the costs have no spread")
    return float(np.mean(((costs - costs.mean()) / costs.std()) ** 3))


def tail_quantile_error(
    learned_cost: ArrayLike,
    true_cost: ArrayLike,
    cost_limit: float,
    *,
    learned_limit: float = 0.0,
    quantile: float = 0.95,
) -> float:
    """Upper quantile of the learned minus that of the true cost; < 0 if the tail is too short.

    In units of true cost, on the scale of `w2_scaled`; NaN, with a warning, where that is.
    """
    require_in("[0, 1]", quantile=quantile)
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _has_spread(learned):
        return undefined("tail_quantile_error", "the learned costs have no spread")
    scaled = _match_scale(learned, true, cost_limit, learned_limit)
    return float(np.quantile(scaled, quantile) - np.quantile(true, quantile))


def conditional_value_at_risk(cost: ArrayLike, *, quantile: float = 0.95) -> float:
    r"""Mean of the largest costs, a share 1 - `quantile` of all (Rockafellar and Uryasev 2000).

    .. math:: CVaR_q(C) = min_z z + E[max(0, C - z)] / (1 - q)

    `quantile=0` is the mean; towards 1 it becomes the maximum. Where the share is no whole number
    of costs, the smallest of them counts in part. NaN, with a warning, if there is no cost.

    Raises:
        ValueError: If `quantile` is outside [0, 1).
    """
    require_in("[0, 1)", quantile=quantile, remedy="0.95 is the mean of the worst 5 %")
    costs = _check_costs("cost", cost)
    if not len(costs):
        return undefined("conditional_value_at_risk", "there is no trajectory")
    value_at_risk = np.quantile(costs, quantile, method="inverted_cdf")  # a minimiser
    return float(value_at_risk + np.maximum(0, costs - value_at_risk).mean() / (1 - quantile))


def cvar_error(
    learned_cost: ArrayLike,
    true_cost: ArrayLike,
    cost_limit: float,
    *,
    learned_limit: float = 0.0,
    quantile: float = 0.95,
) -> float:
    """`conditional_value_at_risk` of the learned minus that of the true cost; < 0 is too light.

    In units of true cost, on the scale of `w2_scaled`; NaN, with a warning, where that is. Unlike a
    quantile it sees how far the tail reaches.
    """
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _has_spread(learned):
        return undefined("cvar_error", "the learned costs have no spread")
    scaled = _match_scale(learned, true, cost_limit, learned_limit)
    return conditional_value_at_risk(scaled, quantile=quantile) - conditional_value_at_risk(
        true, quantile=quantile
    )


def bias(mean_true_cost: float, cost_limit: float) -> float:
    """|mean true episode cost - d| at the end of training: how far off the limit the policy is."""
    return abs(mean_true_cost - cost_limit)


def _judge(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, learned_limit: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Judged safe, and safe; both bool (n,)."""
    learned, true = _check_both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    return learned <= learned_limit, true <= cost_limit


def _mean(name: str, values: NDArray[np.bool_] | Costs) -> float:
    return float(values.mean()) if len(values) else undefined(name, "there is no trajectory")


def _share_above(costs: Costs, others: Costs) -> float:
    """Share of all pairs of a cost and another in which it is the higher one; ties count half."""
    others = np.sort(others)
    below = np.searchsorted(others, costs, side="left")
    not_above = np.searchsorted(others, costs, side="right")
    return float((below + not_above).mean() / (2 * len(others)))


def _weights_at(learned: Costs, limit: float) -> Costs | None:
    """Weights ∝ exp(-t Ĉ), (n,), with which the mean of Ĉ is the limit; None if there are none."""
    _check_limits(0.0, limit)
    excess = learned - limit
    if not len(excess) or excess.min() > 0 or excess.max() < 0:
        return None
    # Rounded, so that t stays finite where a cost differs from the limit by rounding only.
    excess = np.round(excess / max(float(np.abs(excess).max()), 1e-300), 12)
    if excess.min() == 0 or excess.max() == 0:  # at the edge: t is infinite
        return _normalised((excess == 0).astype(np.float64))

    def weights(t: float) -> Costs:
        logits = -t * excess
        return _normalised(np.exp(logits - logits.max()))

    bound = 1.0
    while weights(bound) @ excess > 0 or weights(-bound) @ excess < 0:
        bound *= 2
    low, high = -bound, bound
    for _ in range(100):  # the mean falls as t rises; t is then exact to 1e-15 or better
        middle = (low + high) / 2
        low, high = (middle, high) if weights(middle) @ excess > 0 else (low, middle)
    return weights((low + high) / 2)


def _are_shares(values: Costs) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _normalised(weights: Costs) -> Costs:
    shares: Costs = weights / weights.sum()
    return shares


def _gaps(probability: Costs, outcome: Costs, num_bins: int) -> Costs:
    """Sum of outcome - probability in each bin, (num_bins,)."""
    require_in("[1, inf)", num_bins=num_bins)
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


def _match_scale(learned: Costs, true: Costs, cost_limit: float, learned_limit: float) -> Costs:
    scaled: Costs = cost_limit + true.std() / learned.std() * (learned - learned_limit)
    return scaled


def _check_both(learned_cost: ArrayLike, true_cost: ArrayLike) -> tuple[Costs, Costs]:
    """Return both as float64 (n,), finite and equally many."""
    learned, true = _check_costs("learned_cost", learned_cost), _check_costs("true_cost", true_cost)
    if len(learned) != len(true):
        raise ValueError(
            "learned_cost and true_cost must be of the same trajectories in the same order: got "
            f"{len(learned)} and {len(true)} of them; score every held-out trajectory once"
        )
    return learned, true


def _check_costs(name: str, cost: ArrayLike) -> Costs:
    """Return the costs as float64 (n,), all finite."""
    costs = np.asarray(cost, dtype=np.float64)
    if costs.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), one cost per trajectory, got {costs.shape}; "
            "sum the step costs of each trajectory"
        )
    if not np.isfinite(costs).all():
        raise NonFiniteError(
            f"{name} must be finite, got {int((~np.isfinite(costs)).sum())} NaN or infinite "
            f"entries of {len(costs)}; the cost model has diverged, or the trajectories are damaged"
        )
    return costs


def _check_limits(cost_limit: float, learned_limit: float) -> None:
    """Refuse limits that are not finite."""
    require_in("(-inf, inf)", cost_limit=cost_limit, learned_limit=learned_limit)


def _has_spread(costs: Costs) -> bool:
    """Say whether the costs differ by more than rounding."""
    # Both: rounding gives equal costs a tiny standard deviation, underflow gives close ones none.
    return len(costs) > 0 and bool(costs.max() > costs.min() and costs.std() > 0)


def undefined(name: str, why: str) -> float:
    """Warn that a measure is undefined, and return NaN."""
    warnings.warn(f"{name} is undefined, because {why}; returning NaN", RuntimeWarning, 3)
    return math.nan
