"""How the distributions of learned and true trajectory costs differ, tails above all.

Inputs as in `metrics.py`: (n,) arrays of trajectory costs, learned and true of the same n
trajectories in the same order, float64 throughout; what the input leaves undefined is NaN, with one
`RuntimeWarning`. No measure here says *which* trajectory got which cost.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.errors import NonFiniteError

Costs = NDArray[np.float64]


def wasserstein2(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """2-Wasserstein distance of the two cost distributions as they are, in units of cost, >= 0.

    In one dimension the best transport matches sorted samples: the root mean square of the sorted
    differences. It says nothing about *which* trajectory got which cost.
    """
    learned, true = check_both(learned_cost, true_cost)
    if not len(true):
        return undefined("wasserstein2", "there is no trajectory")
    return float(np.sqrt(np.mean((np.sort(learned) - np.sort(true)) ** 2)))


def w2_scaled(
    learned_cost: ArrayLike, true_cost: ArrayLike, cost_limit: float, *, learned_limit: float = 0.0
) -> float:
    """`wasserstein2` after removing the learned cost's arbitrary scale, in units of true cost.

    The learned cost becomes d + (sd(C) / sd(Ĉ)) (Ĉ - learned_limit): "the learned limit means d" is
    kept, so a misplaced limit still shows. NaN, with a warning, if the learned costs are all equal.
    """
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, learned_limit)
    if not has_spread(learned):
        return undefined("w2_scaled", "the learned costs have no spread")
    return wasserstein2(_match_scale(learned, true, cost_limit, learned_limit), true)


def w2_zscored(learned_cost: ArrayLike, true_cost: ArrayLike) -> float:
    """`wasserstein2` of both costs at mean 0 and standard deviation 1: the shape alone, in [0, √2].

    NaN, with a warning, if either cost is constant.
    """
    learned, true = check_both(learned_cost, true_cost)
    if not (has_spread(learned) and has_spread(true)):
        return undefined("w2_zscored", "the learned or the true costs have no spread")
    return wasserstein2(
        (learned - learned.mean()) / learned.std(), (true - true.mean()) / true.std()
    )


def skewness(cost: ArrayLike) -> float:
    """Third standardised moment of the costs, without bias correction; > 0 is a long right tail."""
    costs = check_costs("cost", cost)
    if not has_spread(costs):
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
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie in [0, 1], got {quantile}")
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, learned_limit)
    if not has_spread(learned):
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
    if not 0 <= quantile < 1:
        raise ValueError(
            f"quantile must lie in [0, 1), got {quantile}; 0.95 is the mean of the worst 5 %"
        )
    costs = check_costs("cost", cost)
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
    learned, true = check_both(learned_cost, true_cost)
    check_limits(cost_limit, learned_limit)
    if not has_spread(learned):
        return undefined("cvar_error", "the learned costs have no spread")
    scaled = _match_scale(learned, true, cost_limit, learned_limit)
    return conditional_value_at_risk(scaled, quantile=quantile) - conditional_value_at_risk(
        true, quantile=quantile
    )


def _match_scale(learned: Costs, true: Costs, cost_limit: float, learned_limit: float) -> Costs:
    scaled: Costs = cost_limit + true.std() / learned.std() * (learned - learned_limit)
    return scaled


def check_both(learned_cost: ArrayLike, true_cost: ArrayLike) -> tuple[Costs, Costs]:
    """Return both as float64 (n,), finite and equally many."""
    learned, true = check_costs("learned_cost", learned_cost), check_costs("true_cost", true_cost)
    if len(learned) != len(true):
        raise ValueError(
            "learned_cost and true_cost must be of the same trajectories in the same order: got "
            f"{len(learned)} and {len(true)} of them; score every held-out trajectory once"
        )
    return learned, true


def check_costs(name: str, cost: ArrayLike) -> Costs:
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


def check_limits(cost_limit: float, learned_limit: float) -> None:
    """Refuse limits that are not finite."""
    for name, limit in (("cost_limit", cost_limit), ("learned_limit", learned_limit)):
        if not math.isfinite(limit):
            raise ValueError(
                f"{name} must be finite to tell safe from unsafe, got {limit}; "
                "there is nothing to measure without a limit"
            )


def has_spread(costs: Costs) -> bool:
    """Say whether the costs differ by more than rounding."""
    # Both: rounding gives equal costs a tiny standard deviation, underflow gives close ones none.
    return len(costs) > 0 and bool(costs.max() > costs.min() and costs.std() > 0)


def undefined(name: str, why: str) -> float:
    """Warn that a measure is undefined, and return NaN."""
    warnings.warn(f"{name} is undefined, because {why}; returning NaN", RuntimeWarning, 3)
    return math.nan
