"""The Lagrange multiplier λ: the price of cost, raised while the limit is exceeded.

Plain Python floats, no tensors: it knows one mean episode cost and one limit per iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pbcrl.errors import NonFiniteError

_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8  # Adam's usual constants
_STATE = ("value", "first_moment", "second_moment", "updates")


class LagrangeMultiplier:
    r"""Dual ascent on λ >= 0 by Adam, projected at 0.

    .. math:: λ ← max(0, λ + lr · Adam(J - limit))                (Eq. 45, `eq:lagrange_update`)

    The paper's plain ascent steps by lr (J - limit), so that its speed depends on the scale of the
    costs, which is arbitrary when they are learned. Adam divides by the recent size of J - limit:
    multiplying all costs by a constant changes nothing. Where the projection acts, the momentum is
    dropped: otherwise a long safe phase would hold λ at 0 for several updates after a violation.

    The paper's convergence proof wants lr_λ ≪ lr_θ ≪ lr_ψ, all decaying. The default is not of that
    kind: it is constant, and Adam's rates do not compare across such different parameters. It
    follows the order by count: one step of λ per iteration, against tens or hundreds of minibatch
    steps of the policy, which start from a cost model that has finished its own.

    Args:
        lr: Change of λ per update while J - limit stays about the same, > 0.
        initial: First λ >= 0; choose 0 with `limit=inf`, or the first iteration prices cost.

    Raises:
        ValueError: If an argument is out of range or not finite.
    """

    def __init__(self, *, lr: float = 0.035, initial: float = 0.01) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"lr must be > 0 and finite, got {lr}")
        if not 0 <= initial < math.inf:
            raise ValueError(f"initial must be >= 0 and finite, got {initial}")
        self._lr = lr
        self._value = float(initial)
        self._first_moment = 0.0
        self._second_moment = 0.0
        self._updates = 0

    @property
    def value(self) -> float:
        """λ >= 0."""
        return self._value

    def update(self, episode_cost: float | None, limit: float = 0.0) -> float:
        """Raise λ if the episodes cost more than the limit, else lower it, at most to 0.

        Args:
            episode_cost: Mean undiscounted cost of the episodes that ended since the last update;
                None if none ended, which leaves everything as it was.
            limit: Highest mean episode cost allowed, in the same units; 0 for a learned cost.
                `inf` is unconstrained: λ becomes 0 whatever the cost.

        Returns:
            The new λ.

        Raises:
            NonFiniteError: If `episode_cost` is NaN or infinite; λ is left as it was.
            ValueError: If `limit` is NaN or -inf.
        """
        if math.isnan(limit) or limit == -math.inf:
            raise ValueError(
                f"limit must be a number or inf (unconstrained), got {limit}; "
                "use 0 for a learned cost"
            )
        if episode_cost is not None and not math.isfinite(episode_cost):
            raise NonFiniteError(
                f"a multiplier needs a finite mean episode cost, got {episode_cost}; pass None if "
                "no episode ended, otherwise find the step costs that are not finite"
            )
        if limit == math.inf:
            self._value = 0.0
            return self._value
        if episode_cost is None:
            return self._value

        excess = episode_cost - limit
        self._updates += 1
        self._first_moment = _BETA_1 * self._first_moment + (1 - _BETA_1) * excess
        self._second_moment = _BETA_2 * self._second_moment + (1 - _BETA_2) * excess**2
        mean = self._first_moment / (1 - _BETA_1**self._updates)
        scale = math.sqrt(self._second_moment / (1 - _BETA_2**self._updates))
        self._value += self._lr * mean / (scale + _EPS)
        if self._value < 0:
            self._value = 0.0
            self._first_moment = 0.0
        return self._value

    def state_dict(self) -> dict[str, float]:
        """Everything that `update` changes, as plain floats; not `lr`."""
        return {
            "value": self._value,
            "first_moment": self._first_moment,
            "second_moment": self._second_moment,
            "updates": float(self._updates),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            ValueError: If `state` has other keys, or values that no update can lead to.
        """
        if set(state) != set(_STATE):
            raise ValueError(
                f"a multiplier's state has the keys {sorted(_STATE)}, got {sorted(state)}; "
                "pass what state_dict() returned"
            )
        finite = all(math.isfinite(number) for number in state.values())
        if not finite or min(state["value"], state["second_moment"], state["updates"]) < 0:
            raise ValueError(
                "a multiplier's state must be finite, with value, second_moment and updates >= 0, "
                f"got {dict(state)}; pass what state_dict() returned"
            )
        self._value = float(state["value"])
        self._first_moment = float(state["first_moment"])
        self._second_moment = float(state["second_moment"])
        self._updates = int(state["updates"])
