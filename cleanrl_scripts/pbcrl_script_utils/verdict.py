"""What the numbers of a run mean, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LONGER = "; train longer, or raise --multiplier-lr"
_FEW_STEPS_FOUND = 0.6  # step AUROC; whole episodes as preferences gave 0.57, segments 0.68


def limit_verdict(
    true_costs: Mapping[str, Any], *, suffix: str = "", policy: str, episodes: int
) -> str:
    """Say whether a policy meets its limit, and whether the episodes are enough to tell.

    Args:
        true_costs: Has `true_cost`, `true_cost_interval` and `violation_rate`, and `cost_limit`; if
            no true cost is known, perhaps `labelled_unsafe_rate`.
        suffix: Of the first of these keys, for another policy.
        policy: Its name.
        episodes: That were played.
    """
    cost, limit = true_costs[f"true_cost{suffix}"], true_costs["cost_limit"]
    half = true_costs[f"true_cost{suffix}_interval"]
    shown = f"true cost {plus_minus(cost, half)}"
    who = f"{policy} policy, {episodes} episodes"
    if math.isnan(cost) and limit == math.inf:
        return f"no limit, and no true cost is known ({who})"
    if math.isnan(cost):
        rate = true_costs.get("labelled_unsafe_rate", math.nan)
        if math.isnan(rate):
            said = "no true cost is known, and labels alone can tell whether the limit is met"
            return f"{said} ({who})"
        return (
            f"no true cost is known; in the last labelling rounds {rate:.0%} of what was judged "
            "was called unsafe"
        )
    if not math.isfinite(limit):
        unknown = "no limit is known" if math.isnan(limit) else "no limit"
        return f"{unknown}: {shown} ({who})"
    rate = true_costs[f"violation_rate{suffix}"]
    if rate > 0:
        who += f", {rate:.0%} of them above it"
    else:  # an interval of 0 must not pass for certainty
        who += f", none above it: at most {1 - 0.05 ** (1 / episodes):.1%} are, at 95 %"
    met, sign = ("met", "<=") if cost <= limit else ("violated", ">")
    noise = "" if half == 0 or abs(cost - limit) >= half else ", within the noise"
    return f"limit {met}{noise}: {shown} {sign} {limit:g} ({who})"


def limit_verdicts(found: Mapping[str, Any]) -> list[str]:
    """`limit_verdict` of each policy in a summary, or of the one that evaluate.py has played."""
    if "policy" in found:
        return [limit_verdict(found, policy=found["policy"], episodes=found["episodes"])]
    policies = [("_stochastic", "stochastic"), ("", "deterministic")]
    if math.isnan(found["true_cost"]):
        del policies[1:]  # the same again
    return [
        limit_verdict(found, suffix=suffix, policy=policy, episodes=found["eval_episodes"])
        for suffix, policy in policies
    ]


def cost_model_verdicts(found: Mapping[str, Any]) -> list[str]:
    """Say what a learned cost is worth; nothing if there is none."""
    if "learned_cost" not in found:
        return []
    said = []
    suffix = "_stochastic" if "learned_cost_stochastic" in found else ""
    learned, learned_limit = found[f"learned_cost{suffix}"], found["learned_limit"]
    if math.isnan(found[f"true_cost{suffix}"]) or math.isnan(found["cost_limit"]):
        holds = learned <= learned_limit
        sign = "<=" if holds else ">"
        said.append(
            f"the learned cost is {'within' if holds else 'above'} its limit: {learned:.3g} {sign} "
            f"{learned_limit:g}{'' if holds else _LONGER}"
        )
        return said
    if found[f"true_cost{suffix}"] > found["cost_limit"]:
        said.append(
            f"the learned cost says that the limit holds: {learned:.3g} <= {learned_limit:g}"
            if learned <= learned_limit
            else f"the learned cost is above its limit, too: {learned:.3g} > {learned_limit:g}"
            f"{_LONGER}"
        )
    number = found.get("test_episodes", found.get("episodes"))
    episodes = f"{number} test episodes" if "test_episodes" in found else f"these {number} episodes"
    accuracy, base_rate = found["balanced_accuracy"], found["base_rate"]
    if math.isnan(accuracy):
        said.append(f"the cost model cannot be judged: {episodes} are on one side of the limit")
    else:
        # Of a coin, on as many safe and unsafe episodes as there are.
        half = 0.49 / math.sqrt(number * base_rate * (1 - base_rate))
        shown = f"balanced accuracy {accuracy:.2f} on {episodes}"
        more = "more episodes or queries"
        if accuracy <= 0.5 + half < found["auroc"] - 0.1:
            said.append(
                f"the cost model orders episodes, but its limit is misplaced: {shown}, and AUROC "
                f"{found['auroc']:.2f}"
            )
        elif accuracy <= 0.5:
            said.append(f"the cost model is no better than guessing: {shown}; {more}")
        elif accuracy <= 0.5 + half:
            said.append(
                f"the cost model may be no better than guessing: {shown}, where guessing "
                f"gives {plus_minus(0.5, half)}; {more}"
            )
        else:
            said.append(f"the cost model tells safe from unsafe: {shown}")
    if found["step_auroc"] < _FEW_STEPS_FOUND:  # not if NaN
        said.append(
            f"the cost model hardly knows which steps cost: step AUROC {found['step_auroc']:.2f}, "
            "guessing gives 0.5"
        )
    return said


def verdict(found: Mapping[str, Any]) -> list[str]:
    """Say in words what a summary means: the policy, then the learned cost."""
    return [*limit_verdicts(found), *cost_model_verdicts(found)]


def plus_minus(mean: float, half: float) -> str:
    """A mean and the half-width of its interval, to two digits of that: 18.9 +- 4.2."""
    if not math.isfinite(half):
        return f"{mean:.4g}"
    if half == 0:
        return f"{mean:.4g} +- 0"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:,.{digits}f} +- {half:,.{digits}f}"


def interval(values: np.ndarray | Sequence[float]) -> float:
    """Half-width of the normal 95 % interval of the mean; NaN of fewer than two values."""
    sample = np.asarray(values, dtype=np.float64)
    return float(1.96 * sample.std(ddof=1) / np.sqrt(len(sample))) if len(sample) > 1 else np.nan
