"""EPIC distance of two step costs: whether they are equivalent for training, for any policy.

Compares costs as functions of (s, a, s'), in torch; does not depend on cost models, labels or
limits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pbcrl.errors import NonFiniteError, require_in
from pbcrl.metrics import undefined

StepCost = Callable[[Tensor, Tensor, Tensor], Tensor]
"""c(s, a, s'): (B, ...), (B, act_dim) and (B, ...) to costs (B,)."""

_MAX_ROWS = 65_536
# Below this share of what was added and subtracted, a spread is rounding of float32.
_ROUNDING = 1e-5


@torch.no_grad()
def epic_distance(
    first: StepCost,
    second: StepCost,
    obs: Tensor,
    actions: Tensor,
    next_obs: Tensor,
    *,
    generator: torch.Generator,
    discount: float = 1.0,
    num_samples: int = 256,
) -> float:
    r"""Equivalent-Policy Invariant Comparison of two step costs (Gleave et al. 2021), in [0, 1].

    .. math::
        C(c)(s, a, s') = c(s, a, s') + E[γ c(s', A, S') - c(s, A, S')] + const, \\
        EPIC(c_1, c_2) = sqrt((1 - ρ(C(c_1), C(c_2))) / 2)

    ρ is the correlation over the coverage batch, A and S' are drawn from it, independently. 0 says
    that the costs differ by a positive factor, a constant per step and a potential shaping
    γ Φ(s') - Φ(s) only, so that in a task without end they rank all policies alike; unrelated costs
    have 1/√2, opposite ones 1. No policy is trained, but both costs must be functions that can be
    evaluated anywhere: recorded numbers do not suffice.

    **Of a cost of (s, a) only**, such as a `CostModel`, the canonical form is c(s, a) - m(s) +
    γ m(s'), with m(s) the mean of c(s, A): what the action adds to the usual cost of its state, and
    the usual cost of the state that it leads to. A cost f(s) of *being* somewhere and one γ f(s')
    of *arriving* there are then the same, since they differ by the shaping with Φ = f.

    **It cannot see the limit.** A constant per step moves the learned limit and leaves the distance
    as it is; for that there is `metrics.violation_gap`.

    Args:
        first: c_1(s, a, s'); for a cost model `lambda obs, actions, next_obs: model(obs, actions)`.
        second: c_2(s, a, s').
        obs: s of the coverage batch, (N, ...), N >= 2; transitions as the policies to be compared
            meet them, or more widely spread.
        actions: a, (N, ...).
        next_obs: s', (N, ...).
        generator: Draws the samples of A and S'; both costs see the same ones.
        discount: γ in [0, 1], of the shaping; 1 for undiscounted episode costs.
        num_samples: Samples of (A, S') per expectation; any number keeps the invariances exact.
            Each cost is evaluated (2 num_samples + 1) N times.

    Returns:
        The distance; NaN, with a warning, if a cost is constant up to shaping.

    Raises:
        ValueError: If the batch's sizes differ or N < 2, a cost does not return (B,), or an option
            is out of range.
        NonFiniteError: If a cost is NaN or infinite anywhere.
    """
    if not len(obs) == len(actions) == len(next_obs) or len(obs) < 2:
        raise ValueError(
            "a coverage batch needs two or more transitions with one row each in obs, actions and "
            f"next_obs, got {len(obs)}, {len(actions)} and {len(next_obs)} rows"
        )
    require_in("[0, 1]", discount=discount, remedy="1 is no discounting")
    require_in("[1, inf)", num_samples=num_samples)
    drawn = torch.randint(len(obs), (2, num_samples), generator=generator)
    sampled = actions[drawn[0]], next_obs[drawn[1]]
    canonical = []
    for cost in (first, second):
        here = _checked(cost, obs, actions, next_obs)
        usual = torch.stack([_mean_cost(cost, states, *sampled) for states in (obs, next_obs)])
        shaped = here - usual[0] + discount * usual[1]
        centred = shaped - shaped.mean()
        size = max(float(here.abs().max()), float(usual.abs().max()))
        if float(centred.abs().max()) <= _ROUNDING * size:
            return undefined("epic_distance", "a cost is constant, apart from potential shaping")
        canonical.append(centred / centred.norm())
    # |x - y| / 2 of unit vectors is sqrt((1 - ρ) / 2), without its cancellation near ρ = 1.
    return float((canonical[0] - canonical[1]).norm() / 2)


def _mean_cost(cost: StepCost, states: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
    """Mean cost of each state over all M pairs of sampled action and next state, float64 (N,)."""
    num_samples = len(actions)
    means = []
    for chunk in torch.split(states, max(1, _MAX_ROWS // num_samples)):
        n = len(chunk)
        rows = (
            chunk.repeat_interleave(num_samples, dim=0),
            actions.repeat(n, *[1] * (actions.ndim - 1)),
            next_obs.repeat(n, *[1] * (next_obs.ndim - 1)),
        )
        means.append(_checked(cost, *rows).view(n, num_samples).mean(dim=1))
    return torch.cat(means)


def _checked(cost: StepCost, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
    values = cost(obs, actions, next_obs)
    if values.shape != (len(obs),):
        raise ValueError(
            f"a step cost must return one number per row, ({len(obs)},), got {tuple(values.shape)}"
        )
    values = values.double()
    if not values.isfinite().all():
        raise NonFiniteError(
            "a step cost must be finite on all states and actions of the batch, also in new "
            f"combinations, got {int((~values.isfinite()).sum())} NaN or infinite entries"
        )
    return values
