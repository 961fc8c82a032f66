"""The Lagrange multiplier λ: the price of cost, raised while the limit is exceeded.

The paper adds lr (J - limit) to λ (Eq. 45, `eq:lagrange_update`), so that its speed depends on the
scale of the costs, which is arbitrary where they are learned, and on how large λ has to become,
which nobody knows. `LagrangeMultiplier` moves λ by factors, by the *relative* excess, so that one
set of gains suits all tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pbcrl.errors import NonFiniteError, require_in

KEPT = 0.8
"""Weight of the old average of the relative excess in each new one."""
MOST_EXCESS = 5.0
"""Relative excess that is averaged at most: a reckless start is not remembered for long."""

_SLOWLY = 0.1
_LOWEST = 0.03  # λ, unless it begins below
_SIGNED = ("log_integral", "log_ceiling", "excess")


class LagrangeMultiplier:
    r"""Proportional and integral control of log λ by the relative excess over a limit.

    .. math::
        E ← 0.8 E + 0.2 \min(J / limit - 1, 5), \quad e = clip(E, -1, 1) \\
        I ← I + lr · e, \quad λ = clip(exp(I + 10 lr · e), \min(0.03, initial), \min(c, cap))

    J is the mean episode cost, or any other figure that a limit is set for, such as a share of
    unsafe episodes (`docs/constraint.md`). Nothing depends on its unit: multiplying all costs and
    the limit by a constant changes nothing. Nor does it need to be known how large λ has to be: it
    changes by a factor, 1.1 per update by default, up as well as down. The proportional part
    answers a violation at once, by a factor of up to 2.7, and damps the overshoot of the integral
    where the policy follows slowly. J is averaged before it is clipped: a rare cost is 0 in most
    updates and many times its limit in one, and a mean of clipped figures would call that safe. The
    integral rests while λ is at a bound and e asks for more. 0.03 is as good as no price, and a λ
    that fell further would come back too late.

    The ceiling c is `dear`, and while λ is at it log c grows by lr · e / 10; it falls alike, and so
    does I above it. So above `dear` λ moves at a tenth of its speed: a policy follows slowly, and
    what is still unsafe at that price mostly needs time; a limit that needs a higher one gets it
    all the same. The higher the price of a *learned* cost, the more a policy follows its errors,
    which grow where it has not been yet; at 3 return and safety fell together on the blocked road.

    λ is the price of a unit of cost in units of reward, so a loop that it serves should divide both
    by their own scale (`SignalScale`); then 1 is a price that lets a policy neither learn the
    reward alone nor stand still.

    A limit of 0, that of a network's learned cost, is no measure of an excess: the running average
    of \|J\| is then. Costs that are never negative, such as true ones, then never take λ below
    `initial`.

    Args:
        lr: Change of log λ per update at twice the limit or more, >= 0; 0 is a constant λ.
        initial: First λ, in (0, cap] and finite; with `lr=0` 0, too.
        dear: Above it λ moves slowly, > 0. 1 is one for a learned cost that few labels move.
        cap: Highest λ. Without one, λ grows without end against a limit that no policy can meet.
            Far above 3 the reward hardly counts, and a policy follows a learned cost's errors; a
            true cost has none, and `ppo_lag.py` a cap of 30.

    Raises:
        ValueError: If an argument is out of range or not finite (`cap` may be infinite).
    """

    def __init__(
        self, *, lr: float = 0.1, initial: float = 1.0, dear: float = 3.0, cap: float = 3.0
    ) -> None:
        require_in("[0, inf)", lr=lr, remedy="0 is a constant multiplier")
        require_in("(0, inf)", dear=dear)
        require_in("(0, inf]", cap=cap, remedy="inf is no cap")
        above, to = "(" if lr else "[", "]" if cap < math.inf else ")"
        require_in(
            f"{above}0, {cap}{to}", initial=initial, remedy="λ moves by factors, up to its cap"
        )
        self._lr = lr
        self._dear, self._cap = math.log(dear), cap
        self._lowest = min(_LOWEST, initial)
        log_initial = math.log(initial) if initial else 0.0  # 0 stays
        # All that `update` changes, by name, as it is at first.
        self._first = {"value": float(initial), "log_integral": log_initial}
        self._first |= {"log_ceiling": max(self._dear, log_initial)}
        self._first |= {"excess": 0.0, "scale": 0.0, "updates": 0.0}
        self.reset()

    def __repr__(self) -> str:
        return f"LagrangeMultiplier(value={self.value:.4g}, lr={self._lr:g}, cap={self._cap:g})"

    @property
    def dear(self) -> float:
        """Above it λ moves slowly."""
        return math.exp(self._dear)

    @property
    def value(self) -> float:
        """λ >= 0."""
        return self._state["value"]

    def reset(self, *, ceiling: float = 0.0) -> None:
        """Make it as it was at first, for a policy that begins anew.

        Args:
            ceiling: What it may rise to at once, finite; c is at least as at first.
        """
        require_in("[0, inf)", ceiling=ceiling)
        self._state = dict(self._first)
        if ceiling:
            lifted = max(math.log(ceiling), self._first["log_ceiling"])
            self._state["log_ceiling"] = lifted

    def update(self, episode_cost: float | None, limit: float = 0.0) -> float:
        """Raise λ if the episodes cost more than the limit, else lower it.

        Args:
            episode_cost: Mean undiscounted cost of the episodes that ended since the last update;
                None if none ended, which leaves everything as it was.
            limit: Highest mean episode cost allowed, in the same units; 0 for a network's learned
                cost. `inf` is unconstrained: λ becomes 0 whatever the cost.

        Returns:
            The new λ.

        Raises:
            NonFiniteError: If `episode_cost` is NaN or infinite; λ is left as it was.
            ValueError: If `limit` is NaN or -inf.
        """
        if math.isnan(limit) or limit == -math.inf:
            raise ValueError(
                f"limit must be a number or inf (unconstrained), got {limit}; "
                "use 0 for a network's learned cost"
            )
        if episode_cost is not None and not math.isfinite(episode_cost):
            raise NonFiniteError(
                f"a multiplier needs a finite mean episode cost, got {episode_cost}; pass None if "
                "no episode ended, otherwise find the step costs that are not finite"
            )
        if limit == math.inf:  # free, and nothing is left that brings the old price back
            self._state = {**self._first, "value": 0.0}
        elif episode_cost is not None and self._lr:  # at 0, λ would move by rounding only
            self._state["value"] = self._step(float(episode_cost), limit)
        return self.value

    def _step(self, episode_cost: float, limit: float) -> float:
        state, keep = self._state, KEPT if self._state["updates"] else 0.0
        excess, size = episode_cost - limit, abs(limit)
        state["updates"] += 1
        state["scale"] = keep * state["scale"] + (1 - keep) * abs(excess)
        if size == 0:
            size = state["scale"]
        relative = min(max(excess / size, -1.0), MOST_EXCESS) if size > 0 else 0.0
        state["excess"] = keep * state["excess"] + (1 - keep) * relative
        e = min(max(state["excess"], -1.0), 1.0)
        answer, integral = 10 * self._lr * e, state["log_integral"]
        fast, slow = self._lr * e, _SLOWLY * self._lr * e
        is_there = state["value"] > math.exp(state["log_ceiling"]) * (1 - 1e-9)
        if is_there or e < 0:
            state["log_ceiling"] = max(self._dear, state["log_ceiling"] + slow)
        lowest, highest = math.log(self._lowest), min(math.log(self._cap), state["log_ceiling"])
        if e > 0:
            integral = max(integral, min(integral + fast, highest - answer))
        else:
            change = slow if integral > self._dear else fast
            integral = min(integral, max(integral + change, lowest - answer))
        state["log_integral"] = integral
        return min(max(math.exp(min(integral + answer, highest)), self._lowest), self._cap)

    def state_dict(self) -> dict[str, float]:
        """Everything that `update` changes, as plain floats; no argument of the constructor."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            ValueError: If `state` has other keys, or values that no update can lead to.
        """
        if set(state) | {"log_ceiling"} != set(self._state):  # older ones lack it
            raise ValueError(
                f"the state of a LagrangeMultiplier has the keys {sorted(self._state)}, got "
                f"{sorted(state)}; pass what its state_dict() returned"
            )
        state = {"log_ceiling": self._first["log_ceiling"], **state}
        finite = all(math.isfinite(number) for number in state.values())
        unsigned = [name for name in self._state if name not in _SIGNED]
        if not finite or min(state[name] for name in unsigned) < 0:
            raise ValueError(
                f"a multiplier's state must be finite, with {', '.join(unsigned)} >= 0, "
                f"got {dict(state)}; pass what state_dict() returned"
            )
        self._state = {name: float(state[name]) for name in self._state}
