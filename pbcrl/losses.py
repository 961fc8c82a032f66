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
        ValueError: If the shapes differ, the costs are not floating point, a label is outside
            [0, 1], or an option is out of range.
    """
    pair_term = preference_loss(first_cost, second_cost, preference)
    cost = torch.cat([first_cost, second_cost])  # (2B,)
    safe = torch.stack([first_safe, second_safe]).flatten()  # (2B,); equal shapes only
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
        ValueError: If the shapes differ, the costs are not floating point, or a preference is
            outside [0, 1].
    """
    given = _given(first_cost, preference) & _given(second_cost, preference)
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
        ValueError: If the shapes differ, `cost` is not floating point, a label is outside [0, 1],
            or `dead_zone` is negative or not finite.
    """
    if not 0 <= dead_zone < math.inf:
        raise ValueError(
            f"dead_zone must be >= 0 and finite, got {dead_zone}; use 0 for plain Bradley-Terry"
        )
    given = _given(cost, safe)
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
        ValueError: If there are not two costs per preference, `cost` is not floating point, a
            preference is outside [0, 1], `snr_weight` is negative or not finite, or `max_std` is
            not positive.
    """
    if not 0 <= snr_weight < math.inf or (max_std is not None and not max_std > 0):
        raise ValueError(
            f"snr_weight must be >= 0 and finite and max_std > 0 or None, got {snr_weight} and "
            f"{max_std}; snr_weight=0 switches the term off"
        )
    given = _given(cost, preference.repeat(2))[: len(preference)]
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


def _given(cost: Tensor, label: Tensor) -> Tensor:
    """Which labels are given, bool (B,); refuses costs and labels that make no batch."""
    given = ~label.isnan()
    wrong = label[given & ~((label >= 0) & (label <= 1))]
    fits = cost.is_floating_point() and cost.ndim == 1 and cost.shape == label.shape
    if not fits or len(wrong):
        raise ValueError(
            "costs and labels must be (B,), costs floating point and labels in [0, 1] or NaN (not "
            f"given): got costs {tuple(cost.shape)}, {cost.dtype}, and labels "
            f"{tuple(label.shape)} with {wrong[:1].tolist() or 'none'} outside; give one cost and "
            "one label per trajectory, and map labels of -1 to 0"
        )
    return given
