"""The Lagrange multiplier λ: the price of cost, raised while the limit is exceeded.

`LagrangeMultiplier`, the default, moves λ by factors, by the *relative* excess of the mean episode
cost J over its limit, so that one set of gains suits all tasks. Four others move it by J - limit:
`AdamMultiplier`, `AscentMultiplier` (the paper's), `SoftplusMultiplier` and `PIDMultiplier`; the
recipes of the paper's tasks have them. All take one mean episode cost and one limit per iteration,
as Python floats. J may be any other figure that a limit is set for, such as a share of unsafe
episodes (`docs/constraint.md`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from pbcrl.errors import NonFiniteError, require_in

_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8  # Adam's usual constants
_SOFTPLUS_FLOOR = 0.001
_LOWEST = 0.01  # λ of `LagrangeMultiplier`
_SIGNED = ("first_moment", "raw", "smoothed_excess", "smoothed_cost", "log_integral")


class Multiplier(ABC):
    """What the rules share: λ in [0, cap], moved once per iteration in which an episode ended.

    Args:
        lr: Step size of the rule, >= 0; 0 is a constant λ.
        initial: First λ, in [0, cap]; 0 with `limit=inf`, or the first iteration prices cost.
        cap: Highest λ, > 0. Against a limit that no policy can meet, λ grows without end otherwise.

    Raises:
        ValueError: If an argument is out of range or not finite (`cap` may be infinite).
    """

    def __init__(self, *, lr: float, initial: float, cap: float) -> None:
        require_in("[0, inf)", lr=lr, remedy="0 is a constant multiplier")
        require_in("(0, inf]", cap=cap, remedy="inf is no cap")
        require_in("[0, inf)", initial=initial)
        require_in(f"[0, {cap}]", initial=initial, remedy="cap is the highest multiplier")
        self._lr = lr
        self._cap = cap
        # All that `update` changes, by name.
        self._state = {"value": float(initial)}

    @property
    def value(self) -> float:
        """λ >= 0."""
        return self._state["value"]

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
            self._release()
        elif episode_cost is not None and self._lr:  # at 0, λ would move by rounding only
            self._state["value"] = self._step(float(episode_cost), limit)
        return self.value

    @abstractmethod
    def _step(self, episode_cost: float, limit: float) -> float:
        """Return the new λ, in [0, cap]."""

    def _clipped(self, value: float) -> float:
        return min(max(0.0, value), self._cap)

    def _release(self) -> None:
        """Make cost free, and forget what would bring the old λ back when a limit returns."""
        self._state["value"] = 0.0

    def state_dict(self) -> dict[str, float]:
        """Everything that `update` changes, as plain floats; no argument of the constructor."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue exactly where `state_dict` of the same rule was taken.

        Raises:
            ValueError: If `state` has other keys, or values that no update can lead to.
        """
        if set(state) != set(self._state):
            raise ValueError(
                f"the state of a {type(self).__name__} has the keys {sorted(self._state)}, got "
                f"{sorted(state)}; pass what state_dict() of the same rule returned"
            )
        finite = all(math.isfinite(number) for number in state.values())
        unsigned = [name for name in self._state if name not in _SIGNED]
        if not finite or min(state[name] for name in unsigned) < 0:
            raise ValueError(
                f"a multiplier's state must be finite, with {', '.join(unsigned)} >= 0, "
                f"got {dict(state)}; pass what state_dict() returned"
            )
        self._state = {name: float(state[name]) for name in self._state}


class LagrangeMultiplier(Multiplier):
    r"""Proportional and integral control of log λ by the relative excess: the default.

    .. math::
        e = clip((J - limit) / limit, -1, 1) \\
        I ← I + lr · e, \quad λ = clip(exp(I + lr · proportional · E), 0.01, cap)

    E is a running average of e. Nothing depends on the units of the cost: multiplying all costs and
    the limit by a constant changes nothing. Nor does it need to be known how large λ has to be: it
    changes by a factor, 1.1 per update by default, up as well as down. The proportional part
    answers a violation at once, by a factor of up to 2.7, and damps the overshoot of the integral
    where the policy follows slowly. The integral rests while λ is at a bound and e asks for more.

    λ is the price of a unit of cost in units of reward, so a loop that it serves should divide both
    by their own scale (`pbcrl_script_utils/scaling.py` does so); then 1 is a price that lets a
    policy neither learn the reward alone nor stand still.

    A limit of 0, that of a network's learned cost, is no measure of an excess: the running average
    of \|J\| is then, so that e is near -1, 0 or 1.

    Args:
        lr: Change of log λ per update at twice the limit or more, >= 0.
        initial: First λ, in [0.01, cap]; with `lr=0` any in [0, cap].
        cap: As of `Multiplier`, > 0.01.
        proportional: Weight of the averaged excess, in updates, >= 0.
        smoothing: Weight of the old average in each new one, in [0, 1).
    """

    def __init__(
        self,
        *,
        lr: float = 0.1,
        initial: float = 1.0,
        cap: float = 10.0,
        proportional: float = 10.0,
        smoothing: float = 0.8,
    ) -> None:
        super().__init__(lr=lr, initial=initial, cap=cap)
        if lr > 0:
            require_in(f"[{_LOWEST}, {cap}]", initial=initial, remedy="it changes by factors")
        require_in("[0, inf)", proportional=proportional, remedy="0 turns it off")
        require_in("[0, 1)", smoothing=smoothing, remedy="0 is none")
        self._proportional = proportional
        self._smoothing = smoothing
        self._initial = math.log(max(initial, _LOWEST))
        self._state |= {"log_integral": self._initial, "smoothed_excess": 0.0}
        self._state |= {"scale": 0.0, "updates": 0.0}

    def _step(self, episode_cost: float, limit: float) -> float:
        state, keep = self._state, self._smoothing if self._state["updates"] else 0.0
        excess, size = episode_cost - limit, abs(limit)
        state["scale"] = keep * state["scale"] + (1 - keep) * abs(excess)
        if size == 0:
            size = state["scale"]
        relative = min(max(excess / size, -1.0), 1.0) if size > 0 else 0.0
        state["smoothed_excess"] = keep * state["smoothed_excess"] + (1 - keep) * relative
        state["updates"] += 1
        lowest, highest = math.log(_LOWEST), math.log(self._cap)
        answer = self._lr * self._proportional * state["smoothed_excess"]
        wanted = state["log_integral"] + self._lr * relative + answer
        if lowest <= wanted <= highest or (wanted > highest) == (relative < 0):
            integral = state["log_integral"] + self._lr * relative
            state["log_integral"] = min(max(integral, lowest), highest)
        return self._clipped(max(math.exp(min(state["log_integral"] + answer, highest)), _LOWEST))

    def _release(self) -> None:
        self._state |= {"value": 0.0, "log_integral": self._initial}


class AdamMultiplier(Multiplier):
    r"""Dual ascent on λ by Adam, projected at 0.

    .. math:: λ ← max(0, λ + lr · Adam(J - limit))                (Eq. 45, `eq:lagrange_update`)

    The paper's plain ascent (`AscentMultiplier`) steps by lr (J - limit), so that its speed depends
    on the scale of the costs, which is arbitrary when they are learned. Adam divides by the recent
    size of J - limit: multiplying all costs by a constant changes nothing. Where a bound acts, the
    momentum is dropped: otherwise a long safe phase would hold λ at 0 for several updates after a
    violation. That size is forgotten over some 1 / (1 - `beta2`) updates, while the step stays:
    with a large `lr` and a slow policy λ then swings around its place, where the other rules come
    to rest. Until then a large first excess keeps the steps small.

    The paper's convergence proof wants lr_λ ≪ lr_θ ≪ lr_ψ, all decaying. The default is not of that
    kind: it is constant, and Adam's rates do not compare across such different parameters. It
    follows the order by count: one step of λ per iteration, against tens or hundreds of minibatch
    steps of the policy, which start from a cost model that has finished its own.

    Args:
        lr: Change of λ per update while J - limit stays about the same, >= 0.
        initial: As of `Multiplier`.
        cap: As of `Multiplier`.
        beta2: Share of the mean of (J - limit)² that each update keeps, in [0, 1).
    """

    def __init__(
        self,
        *,
        lr: float = 0.035,
        initial: float = 0.01,
        cap: float = math.inf,
        beta2: float = _BETA_2,
    ) -> None:
        super().__init__(lr=lr, initial=initial, cap=cap)
        require_in("[0, 1)", beta2=beta2, remedy="Adam's default is 0.999")
        self._beta2 = beta2
        self._state |= {"first_moment": 0.0, "second_moment": 0.0, "updates": 0.0}

    def _step(self, episode_cost: float, limit: float) -> float:
        excess = episode_cost - limit
        wanted = self.value + _adam(self._state, excess, self._lr, beta2=self._beta2)
        value = self._clipped(wanted)
        if value != wanted:
            self._state["first_moment"] = 0.0
        return value


class AscentMultiplier(Multiplier):
    r"""The paper's projected dual ascent.

    .. math:: λ ← max(0, λ + lr (J - limit))                      (Eq. 45, `eq:lagrange_update`)

    λ scales with the costs: twice the costs move it twice as far, as twice the `lr` would.

    Args:
        lr: Change of λ per update and unit of episode cost, >= 0.
        initial: As of `Multiplier`.
        cap: As of `Multiplier`.
    """

    def __init__(
        self,
        *,
        lr: float = 0.01,
        initial: float = 0.01,
        cap: float = math.inf,
    ) -> None:
        super().__init__(lr=lr, initial=initial, cap=cap)

    def _step(self, episode_cost: float, limit: float) -> float:
        return self._clipped(self.value + self._lr * (episode_cost - limit))


class SoftplusMultiplier(Multiplier):
    r"""Ascent by Adam on x, where λ = softplus(x): the rule of several Safe-RL code bases.

    .. math:: x ← x + lr · Adam(σ(x) (J - limit)),   λ = ln(1 + e^x) <= cap

    It does not depend on the scale of the costs either. Small λ move in proportion to themselves,
    large ones by `lr` as with `AdamMultiplier`. λ never reaches 0; x is kept where λ >= 0.001
    and <= `cap`, and the momentum dropped there. Unbounded, x would sink further through
    every safe iteration, and take as many to return after a violation.

    Args:
        lr: Change of x per update while J - limit stays about the same, >= 0.
        initial: First λ, in [0.001, cap].
        cap: As of `Multiplier`.
    """

    def __init__(self, *, lr: float = 0.05, initial: float = 0.01, cap: float = 5.0) -> None:
        super().__init__(lr=lr, initial=initial, cap=cap)
        require_in("[0.001, inf)", initial=initial, remedy="softplus never reaches 0")
        self._state |= {"raw": _softplus_inverse(initial)}
        self._state |= {"first_moment": 0.0, "second_moment": 0.0, "updates": 0.0}

    def _step(self, episode_cost: float, limit: float) -> float:
        lowest = _softplus_inverse(_SOFTPLUS_FLOOR)
        highest = _softplus_inverse(self._cap)
        raw = max(lowest, self._state["raw"])
        gradient = (episode_cost - limit) / (1 + math.exp(-raw))  # of λ (J - limit)
        wanted = raw + _adam(self._state, gradient, self._lr)
        self._state["raw"] = min(max(lowest, wanted), highest)
        if self._state["raw"] != wanted:
            self._state["first_moment"] = 0.0
        return self._clipped(_softplus(self._state["raw"]))

    def _release(self) -> None:
        self._state |= {"value": 0.0, "raw": _softplus_inverse(_SOFTPLUS_FLOOR)}


class PIDMultiplier(Multiplier):
    r"""PID control of the episode cost (Stooke, Achiam and Abbeel 2020, Algorithm 2).

    .. math::
        I ← clip(I + lr (J - limit), 0, cap) \\
        λ = clip(I + lr · proportional · E + lr · derivative · max(0, ΔS), 0, cap)

    E and S are running averages of J - limit and of J, ΔS the last change of S. The gains of that
    paper are K_I = `lr`, K_P = `lr · proportional` and K_D = `lr · derivative`: `lr` alone depends
    on the scale of the costs. With both others 0 the rule is `AscentMultiplier`. The proportional
    term answers a violation at once and so damps the overshoot of ascent where the policy follows λ
    slowly; too large, it oscillates by itself. The derivative term answers to rising costs only.
    The integral is projected at both ends, so that it does not wind up beyond them;
    `anti_windup` also holds it where the sum of the terms brings λ to its cap.

    Differs from Algorithm 2 in the averaging, which `smoothing=0` turns off, and in the
    first update, whose ΔS is 0 rather than J.

    Args:
        lr: Gain of the integral: change of λ per update and unit of episode cost, >= 0.
        initial: First λ and first integral, in [0, cap].
        cap: As of `Multiplier`.
        proportional: Weight of the averaged excess, in updates, >= 0: that many updates' worth of
            integral at once.
        derivative: Weight of a rise of the averaged cost, in updates, >= 0.
        smoothing: Weight of the old average in each new one, in [0, 1).
        anti_windup: Leave the integral as it is while λ is at its cap and J exceeds the limit. λ
            cannot answer more by then, and a long unsafe start would be remembered as a high λ;
            where λ has to become high, what is remembered is a start. Without a cap: no effect.
    """

    def __init__(
        self,
        *,
        lr: float = 0.01,
        initial: float = 0.01,
        cap: float = math.inf,
        proportional: float = 5.0,
        derivative: float = 1.0,
        smoothing: float = 0.5,
        anti_windup: bool = False,
    ) -> None:
        super().__init__(lr=lr, initial=initial, cap=cap)
        require_in(
            "[0, inf)", proportional=proportional, derivative=derivative, remedy="0 turns it off"
        )
        require_in("[0, 1)", smoothing=smoothing, remedy="0 is none")
        self._proportional = proportional
        self._derivative = derivative
        self._smoothing = smoothing
        self._anti_windup = anti_windup
        self._state |= {"integral": float(initial), "updates": 0.0}
        self._state |= {"smoothed_excess": 0.0, "smoothed_cost": 0.0}

    def _step(self, episode_cost: float, limit: float) -> float:
        state, excess = self._state, episode_cost - limit
        if state["updates"] == 0:
            state["smoothed_excess"], state["smoothed_cost"] = excess, episode_cost
        state["updates"] += 1
        old = self._smoothing
        state["smoothed_excess"] = old * state["smoothed_excess"] + (1 - old) * excess
        before = state["smoothed_cost"]
        state["smoothed_cost"] = old * before + (1 - old) * episode_cost
        rise = max(0.0, state["smoothed_cost"] - before)
        answer = self._proportional * state["smoothed_excess"] + self._derivative * rise
        at_cap = state["integral"] + self._lr * answer >= self._cap
        if not (self._anti_windup and at_cap and excess > 0):
            state["integral"] = self._clipped(state["integral"] + self._lr * excess)
        return self._clipped(state["integral"] + self._lr * answer)

    def _release(self) -> None:
        self._state |= {"value": 0.0, "integral": 0.0}


MULTIPLIER_RULES: dict[str, Callable[..., Multiplier]] = {
    "relative": LagrangeMultiplier,
    "adam": AdamMultiplier,
    "ascent": AscentMultiplier,
    "softplus": SoftplusMultiplier,
    "pid": PIDMultiplier,
}
"""The rules by name, for command lines; each takes `lr`, `initial` and `cap`."""


def _softplus(raw: float) -> float:
    return max(raw, 0.0) + math.log1p(math.exp(-abs(raw)))


def _softplus_inverse(value: float) -> float:
    return value + math.log(-math.expm1(-value)) if value < math.inf else value


def _adam(state: dict[str, float], gradient: float, lr: float, *, beta2: float = _BETA_2) -> float:
    """Fold the gradient into Adam's moments and return its step, about ±lr."""
    state["updates"] += 1
    state["first_moment"] = _BETA_1 * state["first_moment"] + (1 - _BETA_1) * gradient
    state["second_moment"] = beta2 * state["second_moment"] + (1 - beta2) * gradient**2
    updates = int(state["updates"])
    mean = state["first_moment"] / (1 - _BETA_1**updates)
    scale = math.sqrt(state["second_moment"] / (1 - beta2**updates))
    return lr * mean / (scale + _EPS)
