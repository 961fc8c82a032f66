"""The dead zone δ above the learned limit: fixed, or moved until predicted violations match labels.

It depends on two violation rates alone, not on the cost model; fine-tuning the model with the new δ
is what closes the loop.
"""

from __future__ import annotations

import math

from pbcrl.errors import require_in


class DeadZone:
    r"""Finds the δ at which the cost model predicts as many violations as the labels hold.

    .. math:: δ ← clip(δ - 2 lr (P̂ - P), 0, maximum)              (Eq. 11, `eq:delta`)

    The paper calls this gradient descent on (P̂ - P)², but that gradient is 0 wherever it exists:
    P̂ = mean 1[Ĉ > 0] is a step function of the cost model's weights, and no function of δ. What
    holds is that training with a larger δ raises the costs and so P̂. Root finding (Robbins and
    Monro) needs no more than that; the unknown but positive slope dP̂/dδ is absorbed by `lr`.
    Trap: autograd through a smooth mean σ(Ĉ - δ) sees a negative slope, and drives δ away.

    Args:
        initial: First δ, in [0, maximum], in units of the learned trajectory cost.
        lr: Step size >= 0, in units of δ per unit of rate; 0 keeps δ fixed, as in pretraining. The
            slope is about 0.02-0.035, so that 1 closes a gap in some tens of updates.
        maximum: Largest δ.

    Raises:
        ValueError: If an argument is out of range or not finite.
    """

    def __init__(self, initial: float = 1.0, *, lr: float = 1.0, maximum: float = 10.0) -> None:
        if not 0 <= initial <= maximum < math.inf:
            raise ValueError(
                f"a dead zone needs 0 <= initial <= maximum < inf, got initial={initial} and "
                f"maximum={maximum}; initial=0 is plain Bradley-Terry"
            )
        require_in("[0, inf)", lr=lr, remedy="0 keeps the dead zone fixed")
        self.value = float(initial)
        """δ, to be passed to the loss; set it to restore a saved one."""
        self._lr = lr
        self._maximum = maximum

    def __repr__(self) -> str:
        return f"DeadZone(value={self.value:.4g}, lr={self._lr:g}, maximum={self._maximum:g})"

    def update(self, predicted_violation_rate: float, violation_rate: float) -> float:
        """Move δ one step: down if the model predicts too many violations, up if too few.

        Args:
            predicted_violation_rate: P̂ in [0, 1], share of the labelled trajectories with Ĉ > 0.
            violation_rate: P in [0, 1], share of the same trajectories that are labelled unsafe.

        Returns:
            The new δ.

        Raises:
            ValueError: If a rate is outside [0, 1] or NaN; δ is left as it was.
        """
        require_in(
            "[0, 1]",
            predicted_violation_rate=predicted_violation_rate,
            violation_rate=violation_rate,
            remedy="skip the update if no trajectory is labelled",
        )
        step = 2 * self._lr * (predicted_violation_rate - violation_rate)
        self.value = min(max(self.value - step, 0.0), self._maximum)
        return self.value
