"""How well a learned cost agrees with the true one, on trajectories that it was not trained on.

Inputs are (n,) arrays of trajectory costs, learned and true of the same n trajectories in the same
order; all arithmetic is float64. A trajectory is safe if its true cost C <= d, and judged safe if
its learned cost Ĉ <= the learned limit, 0 unless said otherwise. A measure that the input leaves
undefined (no trajectory, one class only, no spread) is NaN, with one `RuntimeWarning`; costs that
are NaN or infinite are refused. It knows nothing of cost models.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.errors import NonFiniteError

Costs = NDArray[np.float64]

_REPORT = (
    "accuracy",
    "balanced_accuracy",
    "base_rate",
    "pair_accuracy",
    "type_ii_rate",
    "violation_gap",
    "w2_raw",
    "w2_scaled",
    "w2_zscored",
    "skewness_learned",
    "skewness_true",
    "tail_quantile_error",
)


def cost_model_report(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> dict[str, float]:
    """Every measure of this file that compares a learned with a true cost, by name.

    Args:
        learned_cost: Ĉ, (n,).
        true_cost: C, (n,), of the same trajectories.
        cost_limit: d, highest true cost that is safe.
        learned_limit: Highest learned cost that is judged safe.

    Returns:
        `accuracy`, `balanced_accuracy`, `base_rate`, `pair_accuracy`, `type_ii_rate`,
        `violation_gap`, `w2_raw`, `w2_scaled`, `w2_zscored`, `skewness_learned`, `skewness_true`,
        `tail_quantile_error`; all NaN, with one warning, if n = 0.

    Raises:
        ValueError: If the shapes differ or are not (n,), or a limit is not finite.
        NonFiniteError: If a cost is NaN or infinite.
    """
    learned, true = _both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not len(true):
        nothing = _undefined("the cost model report", "there is no trajectory")
        return dict.fromkeys(_REPORT, nothing)
    args = (learned, true, cost_limit)
    values = (
        accuracy(*args, learned_limit=learned_limit),
        balanced_accuracy(*args, learned_limit=learned_limit),
        base_rate(true, cost_limit),
        pair_accuracy(learned, true),
        type_ii_rate(*args, learned_limit=learned_limit),
        violation_gap(*args, learned_limit=learned_limit),
        wasserstein2(learned, true),
        w2_scaled(*args, learned_limit=learned_limit),
        w2_zscored(learned, true),
        skewness(learned),
        skewness(true),
        tail_quantile_error(*args, learned_limit=learned_limit),
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
        return _undefined("balanced_accuracy", "it needs both safe and unsafe trajectories")
    return float((judged[safe].mean() + (~judged[~safe]).mean()) / 2)


def base_rate(true_cost: ArrayLike, cost_limit: float) -> float:
    """Accuracy of the best constant answer: the share of the commoner class, in [0.5, 1]."""
    _check_limits(cost_limit, 0.0)
    unsafe = _mean("base_rate", _costs("true_cost", true_cost) > cost_limit)
    return max(unsafe, 1 - unsafe)


def type_ii_rate(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """Share of the unsafe trajectories that are judged safe, in [0, 1]: the dangerous error."""
    judged, safe = _judge(learned_cost, true_cost, cost_limit, learned_limit)
    if safe.all():
        return _undefined("type_ii_rate", "no trajectory is unsafe")
    return float(judged[~safe].mean())


def violation_gap(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """P̂ - P in [-1, 1], predicted minus true share of unsafe trajectories; < 0 underestimates."""
    judged, safe = _judge(learned_cost, true_cost, cost_limit, learned_limit)
    return _mean("violation_gap", safe.astype(float) - judged)


def pair_accuracy(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """Share of all pairs with different true costs that the learned cost orders alike, in [0, 1].

    A pair with equal learned costs counts half, so that a constant cost scores 0.5 like any guess.
    """
    learned, true = _both(learned_cost, true_cost)
    order = np.argsort(true)
    learned, true = learned[order], true[order]
    pairs, agree = 0, 0.0
    for cost, first_dearer in zip(learned, np.searchsorted(true, true, side="right"), strict=True):
        dearer = learned[first_dearer:]
        pairs += len(dearer)
        agree += np.sum(dearer > cost) + np.sum(dearer == cost) / 2
    if not pairs:
        return _undefined("pair_accuracy", "no two trajectories differ in true cost")
    return float(agree / pairs)


def wasserstein2(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """2-Wasserstein distance of the two cost distributions as they are, in units of cost, >= 0.

    In one dimension the best transport matches sorted samples: the root mean square of the sorted
    differences. It says nothing about *which* trajectory got which cost.
    """
    learned, true = _both(learned_cost, true_cost)
    if not len(true):
        return _undefined("wasserstein2", "there is no trajectory")
    return float(np.sqrt(np.mean((np.sort(learned) - np.sort(true)) ** 2)))


def w2_scaled(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """`wasserstein2` after removing the learned cost's arbitrary scale, in units of true cost.

    The learned cost becomes d + (sd(C) / sd(Ĉ)) (Ĉ - learned_limit): "the learned limit means d" is
    kept, so a misplaced limit still shows. NaN, with a warning, if the learned costs are all equal.
    """
    learned, true = _both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _spread(learned):
        return _undefined("w2_scaled", "the learned costs have no spread")
    return wasserstein2(_match_scale(learned, true, cost_limit, learned_limit), true)


def w2_zscored(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """`wasserstein2` of both costs at mean 0 and standard deviation 1: the shape alone, in [0, √2].

    NaN, with a warning, if either cost is constant.
    """
    learned, true = _both(learned_cost, true_cost)
    if not (_spread(learned) and _spread(true)):
        return _undefined("w2_zscored", "the learned or the true costs have no spread")
    return wasserstein2(
        (learned - learned.mean()) / learned.std(), (true - true.mean()) / true.std()
    )


def skewness(cost: ArrayLike) -> float:
    """Third standardised moment of the costs, without bias correction; > 0 is a long right tail."""
    costs = _costs("cost", cost)
    if not _spread(costs):
        return _undefined("skewness", "the costs have no spread")
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
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie in [0, 1], got {quantile}")
    learned, true = _both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    if not _spread(learned):
        return _undefined("tail_quantile_error", "the learned costs have no spread")
    scaled = _match_scale(learned, true, cost_limit, learned_limit)
    return float(np.quantile(scaled, quantile) - np.quantile(true, quantile))


def bias(mean_true_cost: float, cost_limit: float) -> float:
    """|mean true episode cost - d| at the end of training: how far off the limit the policy is."""
    return abs(mean_true_cost - cost_limit)


def _match_scale(learned: Costs, true: Costs, cost_limit: float, learned_limit: float) -> Costs:
    scaled: Costs = cost_limit + true.std() / learned.std() * (learned - learned_limit)
    return scaled


def _judge(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, learned_limit: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Judged safe, and safe; both bool (n,)."""
    learned, true = _both(learned_cost, true_cost)
    _check_limits(cost_limit, learned_limit)
    return learned <= learned_limit, true <= cost_limit


def _both(learned_cost: ArrayLike, true_cost: ArrayLike) -> tuple[Costs, Costs]:
    learned, true = _costs("learned_cost", learned_cost), _costs("true_cost", true_cost)
    if len(learned) != len(true):
        raise ValueError(
            "learned_cost and true_cost must be of the same trajectories in the same order: got "
            f"{len(learned)} and {len(true)} of them; score every held-out trajectory once"
        )
    return learned, true


def _costs(name: str, cost: ArrayLike) -> Costs:
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
    for name, limit in (("cost_limit", cost_limit), ("learned_limit", learned_limit)):
        if not math.isfinite(limit):
            raise ValueError(
                f"{name} must be finite to tell safe from unsafe, got {limit}; "
                "there is nothing to measure without a limit"
            )


def _spread(costs: Costs) -> bool:
    # Both: rounding gives equal costs a tiny standard deviation, underflow gives close ones none.
    return len(costs) > 0 and bool(costs.max() > costs.min() and costs.std() > 0)


def _mean(name: str, values: NDArray[np.bool_] | Costs) -> float:
    return float(values.mean()) if len(values) else _undefined(name, "there is no trajectory")


def _undefined(name: str, why: str) -> float:
    warnings.warn(f"{name} is undefined, because {why}; returning NaN", RuntimeWarning, 3)
    return math.nan
