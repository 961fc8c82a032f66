"""The loss of preference-based constraint inference (PbCI): preference, safety and SNR terms.

Pure functions of (B,) tensors of trajectory costs and labels, which depend on nothing else of this
package, so that they fit into any project. A label may be NaN, "not given":
such an entry adds nothing to a loss, and no NaN ever reaches a gradient. Everything is computed in
logits, because probabilities round to 0 and 1 and lose the gradient once costs are far apart, and
at least in float32, because sums over a batch pass the largest float16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_ENTROPY = 0.1 * math.log(2)


class PbCILoss(NamedTuple):
    """The total loss and its terms, each a 0-d tensor that carries gradients to the costs."""

    total: Tensor
    """Sum of the three terms. Not for model selection: it rewards any spread of the costs."""
    preference: Tensor
    """In nats, >= 0."""
    safety: Tensor
    """In nats, >= 0."""
    snr: Tensor
    """<= 0; its weight is already applied."""


def pbci_loss(
    first_cost: Tensor,
    second_cost: Tensor,
    preference: Tensor,
    first_safe: Tensor,
    second_safe: Tensor,
    *,
    dead_zone: float = 1.0,
    snr_weight: float = 1e-3,
    max_std: float | None = 5.0,
) -> PbCILoss:
    r"""Sum of the preference, safety and SNR losses over one batch of pairs, each with weight 1.

    Safety and variance are taken over the 2B members; one that is in two pairs counts twice.
    `dead_zone=0, snr_weight=0` is Bradley-Terry with safety labels, the loss of PPO-BT. For model
    selection and early stopping use `preference + safety`: the total rewards any spread of costs.

    .. math:: L_{PbCI} = L_{pair} + L_{safe}^{DZ} + L_{SNR}     (Eq. 5, `eq:total_loss`)

    Args:
        first_cost: Learned trajectory cost Ĉ(τ₁), (B,), in units where the learned limit is 0.
        second_cost: Ĉ(τ₂), (B,).
        preference: μ, (B,): probability that the first is the safer one, NaN where not given.
        first_safe: ε₁, (B,): 1 safe, 0 unsafe, NaN where not given.
        second_safe: ε₂, (B,).
        dead_zone: δ >= 0, in the units of the costs.
        snr_weight: ζ >= 0.
        max_std: Standard deviation of the costs above which the SNR term stops growing, > 0;
            None is the paper's unbounded term.

    Returns:
        The total and the three terms.

    Raises:
        TypeError: If an input is no tensor, or the costs are not floating point.
        ValueError: If the shapes differ, a label is outside [0, 1], or an option is out of range.
    """
    _require_tensors(first_safe, second_safe)
    pair_term = preference_loss(first_cost, second_cost, preference)
    _check_labels("first_safe", first_safe, first_cost)
    _check_labels("second_safe", second_safe, second_cost)
    cost = torch.cat([first_cost, second_cost])  # (2B,)
    safe = torch.cat([first_safe, second_safe])  # (2B,)
    safety_term = safety_loss(cost, safe, dead_zone=dead_zone)
    snr_term = snr_loss(cost, preference, snr_weight=snr_weight, max_std=max_std)
    return PbCILoss(pair_term + safety_term + snr_term, pair_term, safety_term, snr_term)


def preference_loss(first_cost: Tensor, second_cost: Tensor, preference: Tensor) -> Tensor:
    r"""Cross-entropy of the preference under Bradley-Terry: the cheaper trajectory is preferred.

    Only cost differences enter: adding the same number to every cost changes nothing.

    .. math:: L = -E[μ log σ(Ĉ₂ - Ĉ₁) + (1 - μ) log σ(Ĉ₁ - Ĉ₂)]   (Eq. 4, `eq:likelihood`)

    Args:
        first_cost: Learned trajectory cost Ĉ(τ₁), (B,).
        second_cost: Ĉ(τ₂), (B,).
        preference: μ in [0, 1], (B,): probability that the first is the safer one; 0.5 is a tie,
            NaN not given.

    Returns:
        Mean over the pairs that have a preference, in nats; 0 if there are none. 0-d.

    Raises:
        TypeError: If an input is no tensor, or the costs are not floating point.
        ValueError: If the shapes differ or a preference is outside [0, 1].
    """
    _require_tensors(first_cost, second_cost, preference)
    if first_cost.shape != second_cost.shape:
        raise ValueError(
            "first_cost and second_cost must have one entry per pair: got shapes "
            f"{tuple(first_cost.shape)} and {tuple(second_cost.shape)}"
        )
    given = _check_labels("preference", preference, first_cost)
    # Selecting before computing: multiplying a NaN label away would leave NaN in the gradient.
    gap = (_wide(second_cost) - _wide(first_cost))[given]
    mu = preference[given].to(gap.dtype)
    log_likelihood = mu * F.logsigmoid(gap) + (1 - mu) * F.logsigmoid(-gap)
    return -log_likelihood.sum() / max(len(gap), 1)


def safety_loss(cost: Tensor, safe: Tensor, *, dead_zone: float = 0.0) -> Tensor:
    r"""Cross-entropy of the safe/unsafe label with a dead zone above the threshold.

    Safe trajectories are pushed below 0, unsafe ones above `dead_zone` rather than above 0: a shift
    of unsafe costs by at most `dead_zone` that counters their underestimation. A trajectory that is
    unsafe with probability p is best scored 0 if p = (e^δ + 1) / (3 e^δ + 1): the model calls it
    unsafe from p = 0.41 on at δ = 1. `dead_zone=0` is plain Bradley-Terry, with p = 0.5.

    .. math:: L = -E[ε log σ(-Ĉ) + (1 - ε) log σ(Ĉ - δ)]         (Eq. 8, `eq:safeloss`)

    Args:
        cost: Learned trajectory cost Ĉ(τ), (B,), in units where the learned limit is 0.
        safe: ε, (B,): 1 safe, 0 unsafe, between them a probability of safe, NaN where not given.
        dead_zone: δ >= 0, in the units of `cost`.

    Returns:
        Mean over the labelled trajectories, in nats; 0 if there are none. 0-d.

    Raises:
        TypeError: If an input is no tensor, or `cost` is not floating point.
        ValueError: If the shapes differ, a label is outside [0, 1], or `dead_zone` is negative or
            not finite.
    """
    if not 0 <= dead_zone < math.inf:
        raise ValueError(
            f"dead_zone must be >= 0 and finite, got {dead_zone}; use 0 for plain Bradley-Terry"
        )
    _require_tensors(cost, safe)
    given = _check_labels("safe", safe, cost)
    cost = _wide(cost)[given]
    eps = safe[given].to(cost.dtype)
    log_likelihood = eps * F.logsigmoid(-cost) + (1 - eps) * F.logsigmoid(cost - dead_zone)
    return -log_likelihood.sum() / max(len(cost), 1)


def snr_loss(
    cost: Tensor,
    preference: Tensor,
    *,
    snr_weight: float = 1e-3,
    max_std: float | None = 5.0,
) -> Tensor:
    r"""Reward for spread-out costs: minus their variance per nat of preference entropy.

    A flat cost gives the policy no gradient: the norm of ∇J is at most sd(Ĉ) times the standard
    deviation of the score function (Eq. 34, `eq:policy_gradient_bound`).

    .. math:: L = -ζ Var(Ĉ) / H(p),  H = -p ln p - (1 - p) ln(1 - p)   (Eq. 9, `eq:snr`)

    The paper's term is unbounded: it grows with the square of the costs' scale, the cross-entropies
    only linearly, so that long training runs away. Here Var stops growing at `max_std`² and passes
    no gradient beyond (`None` is the paper's). The paper is silent on the rest: Var is the
    population variance; p = mean(μ) over the given preferences of the batch; H, which depends on
    labels alone, is floored at 0.1 ln 2, because a one-sided batch would divide by 0.

    Args:
        cost: Learned cost Ĉ(τ) of both members of every pair, in any order, (2B,).
        preference: μ in [0, 1], (B,), NaN where not given.
        snr_weight: ζ >= 0; 0 switches the term off.
        max_std: Standard deviation above which the term stops growing, > 0; None never.

    Returns:
        The weighted term, <= 0; 0 if no preference is given. 0-d.

    Raises:
        TypeError: If an input is no tensor, or `cost` is not floating point.
        ValueError: If there are not two costs per preference, a preference is outside [0, 1],
            `snr_weight` is negative or not finite, or `max_std` is not positive.
    """
    if not 0 <= snr_weight < math.inf:
        raise ValueError(
            f"snr_weight must be >= 0 and finite, got {snr_weight}; use 0 to switch the term off"
        )
    if max_std is not None and not max_std > 0:
        raise ValueError(
            f"max_std must be > 0, got {max_std}; use None for no bound, snr_weight=0 for no term"
        )
    _require_tensors(cost, preference)
    if preference.ndim != 1 or cost.shape != (2 * len(preference),):
        raise ValueError(
            "snr_loss needs the costs of both members of every pair: got cost of shape "
            f"{tuple(cost.shape)} for preference of shape {tuple(preference.shape)}; pass (2B,) "
            "and (B,), for example torch.cat([first_cost, second_cost])"
        )
    given = _check_labels("preference", preference, cost[: len(preference)])
    cost = _wide(cost)
    if not given.any():
        return cost[:0].sum()  # 0 that still carries a gradient
    p = preference[given].to(cost.dtype).detach().mean()
    entropy: Tensor = (torch.special.entr(p) + torch.special.entr(1 - p)).clamp(min=_MIN_ENTROPY)
    variance = cost.var(correction=0)
    if max_std is not None:
        variance = variance.clamp(max=max_std**2)
    return -snr_weight * variance / entropy


def _wide(cost: Tensor) -> Tensor:
    return cost.float() if cost.dtype in (torch.float16, torch.bfloat16) else cost


def _require_tensors(*given: object) -> None:
    for values in given:
        if not isinstance(values, Tensor):
            raise TypeError(
                "a loss takes tensors, whose gradient leads to the costs, got "
                f"{type(values).__name__}; convert labels by torch.as_tensor, and keep costs as "
                "the model returned them"
            )


def _check_labels(name: str, label: Tensor, cost: Tensor) -> Tensor:
    """Refuse labels that do not fit the costs; return which are given, bool (B,)."""
    if not cost.is_floating_point():
        raise TypeError(f"costs must be floating point to be learned, got dtype {cost.dtype}")
    if cost.ndim != 1 or label.shape != cost.shape:
        raise ValueError(
            f"costs and {name} must have shape (B,): got costs {tuple(cost.shape)} and {name} "
            f"{tuple(label.shape)}; give one cost and one label per trajectory, no other axes"
        )
    given = ~label.isnan()
    wrong = given & ~((label >= 0) & (label <= 1))
    if wrong.any():
        raise ValueError(
            f"{name} must lie in [0, 1] or be NaN (not given), got {label[wrong][0].item()}; "
            "labels of -1 and 1 must be mapped to 0 and 1"
        )
    return given
