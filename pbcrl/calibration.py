"""Where the limit of a learned cost lies, by the safety labels of whole episodes.

For costs learned from labels that set no limit, such as preferences on segments: the learned costs
order and price the steps, and a logistic regression on the labels of episodes finds the sum from
which an episode is unsafe. It finds the limit of single episodes; where the *mean* cost meets a
limit, no such label tells (`docs/constraint.md`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.errors import LabelError

_TOLERANCE = 1e-10  # of the gradient, per unit of weight
_MAX_STEPS = 100


class Calibration(NamedTuple):
    """A scale and a limit: Ĉ = scale · (cost - limit) is above 0 where an episode is unsafe."""

    scale: float
    """a > 0, logits per unit of learned cost."""
    limit: float
    """b, the learned cost of an episode that is as likely safe as unsafe."""


def calibrate_limit(
    cost: ArrayLike, safe: ArrayLike, *, weights: ArrayLike | None = None
) -> Calibration:
    r"""Fit σ(a (cost - b)) to the probability that an episode is unsafe, by maximum likelihood.

    The labels are smoothed as by Platt (1999), or the fit to labels that a cost separates would be
    infinitely steep: of n unsafe and m safe ones each unsafe one counts as (n + 1) / (n + 2)
    unsafe, each safe one as 1 / (m + 2). One safe at 0, one unsafe at 1 give b = 1/2, a = 2 ln 2.

    Args:
        cost: Learned cost of each episode, summed over its steps, (E,).
        safe: ε, (E,): 1 safe, 0 unsafe, NaN where nobody said; those are left out.
        weights: How often each label counts, > 0 where it counts at all, (E,): larger for newer
            ones, of policies that are more like the present. By default 1.

    Returns:
        a in logits per unit of cost, b in units of cost.

    Raises:
        LabelError: If there are not both safe and unsafe episodes, or unsafe ones cost no more.
        ValueError: If shapes differ, or a value is out of its range.
    """
    x, is_safe, weight = _checked(cost, safe, weights)
    total_safe, total_unsafe = float(weight[is_safe].sum()), float(weight[~is_safe].sum())
    if not total_safe or not total_unsafe:
        raise LabelError(
            "a limit lies between safe and unsafe episodes, so both labels must occur: got "
            f"{int(is_safe.sum())} safe and {int((~is_safe).sum())} unsafe; label more episodes"
        )
    target = np.where(is_safe, 1 / (total_safe + 2), (total_unsafe + 1) / (total_unsafe + 2))
    # Standardised, Newton's steps do not depend on the scale of the costs.
    center = float(np.average(x, weights=weight))
    spread = float(np.sqrt(np.average((x - center) ** 2, weights=weight)))
    slope, shift = _fit((x - center) / spread, target, weight) if spread else (0.0, 0.0)
    if slope <= 0:
        raise LabelError(
            "unsafe episodes should cost more, but labels do not rise with the learned cost: the "
            f"slope is {slope:.3g} per standard deviation; train the cost model on more labels"
        )
    scale = slope / spread
    return Calibration(scale=scale, limit=center - shift / scale)


def _fit(
    x: NDArray[np.float64], target: NDArray[np.float64], weight: NDArray[np.float64]
) -> tuple[float, float]:
    """Slope and intercept of a logistic regression with targets in (0, 1), by Newton's method."""
    design = np.stack([x, np.ones_like(x)], axis=1)  # (E, 2)
    weight = weight / weight.sum()

    def loss(parameters: NDArray[np.float64]) -> float:
        logit = design @ parameters
        return float(weight @ (np.logaddexp(0, logit) - target * logit))

    parameters = np.zeros(2)
    for _ in range(_MAX_STEPS):
        p = 0.5 + 0.5 * np.tanh(design @ parameters / 2)  # σ, without overflow
        gradient = design.T @ (weight * (p - target))
        if np.abs(gradient).max() < _TOLERANCE:
            break
        curvature = design.T @ (design * (weight * p * (1 - p))[:, None])
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-6 and loss(parameters - size * step) > loss(parameters):
            size /= 2
        parameters = parameters - size * step
    return float(parameters[0]), float(parameters[1])


def _checked(
    cost: ArrayLike, safe: ArrayLike, weights: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """The labelled episodes that count: costs, whether safe, weights."""
    x, label = np.asarray(cost, dtype=np.float64), np.asarray(safe, dtype=np.float64)
    weight = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    if x.ndim != 1 or not x.shape == label.shape == weight.shape:
        raise ValueError(
            "each episode has one cost, one label and one weight: got the shapes "
            f"{x.shape}, {label.shape} and {weight.shape}"
        )
    if not np.isfinite(x).all() or not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError("costs and weights must be finite, and weights >= 0")
    odd = label[~np.isnan(label) & (label != 0) & (label != 1)]
    if len(odd):
        raise ValueError(f"a safety label is 1 (safe), 0 (unsafe) or NaN (none), got {odd[0]}")
    counts = ~np.isnan(label) & (weight > 0)
    return x[counts], label[counts] == 1, weight[counts]
