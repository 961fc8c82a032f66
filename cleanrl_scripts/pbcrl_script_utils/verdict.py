"""What the numbers of a run mean, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pbcrl_script_utils.certificate import MOST_EPISODES, percent_up, unsafe_bound

_Row = TypeVar("_Row")

_LONGER = "; train longer"
_FEW_STEPS_FOUND = 0.6  # step AUROC; whole episodes as preferences gave 0.57, segments 0.68
_FEW = 5  # costly episodes, for a normal interval of the mean cost
_FEW_OF_A_SIDE = 10  # for one of a share that is judged right
_BLOCKS = 15  # of a run, of which three are its last fifth
FIRST_ROWS = 3
"""Of a log in which episodes ended: of a policy that is hardly trained."""


def limit_verdict(
    true_costs: Mapping[str, Any],
    *,
    suffix: str = "",
    policy: str,
    episodes: int,
    flag: str = "--eval-episodes",
) -> str:
    """Say whether a policy meets its limit, and whether the episodes are enough to tell.

    Where fewer than five episodes cost anything, their normal interval says nothing. Then the exact
    interval of how often that happens (Clopper and Pearson 1934), times what such an episode costs
    on average, is the interval of the mean; a limit inside it is one about which they cannot tell.

    Args:
        true_costs: Has `true_cost`, `true_cost_interval` and `violation_rate`, and `cost_limit`,
            perhaps `costly_episodes` and `costly_episode_cost`; if no true cost is known, perhaps
            `labelled_unsafe_rate`.
        suffix: Of the keys that differ by policy.
        policy: Its name.
        episodes: That were played.
        flag: That sets how many are.
    """
    cost, limit = true_costs[f"true_cost{suffix}"], true_costs["cost_limit"]
    half = true_costs[f"true_cost{suffix}_interval"]
    shown = f"true cost {plus_minus(cost, half)}"
    who = f"{policy} policy, {episodes} episode{'s' * (episodes > 1)}"
    if math.isnan(cost) and limit == math.inf:
        return f"no limit, and no true cost is known ({who})"
    if math.isnan(cost):
        rate = true_costs.get("labelled_unsafe_rate", math.nan)
        if math.isnan(rate):
            said = "no true cost is known, and labels alone can tell whether the limit is met"
            return f"{said} ({who})"
        return (
            "no true cost is known, nor whether this policy keeps the limit; of what was judged of "
            f"the policies before it, in the last labelling rounds, {rate:.0%} was called unsafe"
        )
    if not math.isfinite(limit):
        unknown = "no limit is known" if math.isnan(limit) else "no limit"
        return f"{unknown}: {shown} ({who})"
    too_few = f"too few episodes to tell: true cost {cost:.3g}, limit {limit:g}"
    if episodes < _FEW:
        return f"{too_few} ({who}); play 50 with {flag} 50"
    costly = true_costs.get(f"costly_episodes{suffix}", episodes)
    if costly < _FEW:
        low, high = rare_interval(costly, episodes)
        size = cost * episodes / costly if costly else true_costs["costly_episode_cost"]
        # Not if nothing has ever cost anything (NaN), nor about 0, of which no number can tell.
        if limit > 0 and low * size <= limit < high * size:
            often = f"{costly or 'none'} of which cost anything"
            return (
                f"{too_few} ({who}, {often}: at 95 % the mean lies in {low * size:.2g} to "
                f"{high * size:.2g}); {_enough(costly, episodes, limit / size, flag)}"
            )
        if costly:
            shown = f"true cost {cost:.3g}, at 95 % in {low * size:.2g} to {high * size:.2g},"
            half = math.inf  # the normal one
    rate = true_costs[f"violation_rate{suffix}"]
    above = round(rate * episodes)
    who += f", {f'{rate:.0%} of them' if above else 'none'} above it"
    if above < episodes:  # an interval of 0 must not pass for certainty
        who += f": at most {percent_up(unsafe_bound(above, episodes))} are, at 95 %"
    met, sign = ("met", "<=") if cost <= limit else ("violated", ">")
    unclear = 0 < half < math.inf and abs(cost - limit) < half
    noise = ", within the noise" if unclear else ""
    return f"limit {met}{noise}: {shown} {sign} {limit:g} ({who})"


def rare_interval(count: int, total: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share of which `count` of `total` were seen.

    One-sided if none was: 3 / `total`, roughly.
    """
    from scipy.stats import beta  # a quarter of a second, at the end of a run

    tail = 0.025 if count else 0.05
    lowest = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    highest = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return lowest, highest


def _enough(costly: int, episodes: int, share: float, flag: str) -> str:
    """How many episodes tell whether costly ones are rarer than `share`, in (0, 1]."""
    if costly == 0:
        wanted = math.log(0.05) / math.log1p(-share)
        return f"{flag} {math.ceil(wanted)} would tell if none of them costs anything"
    found = costly / episodes
    distance = abs(found - share)
    wanted = 1.96**2 * found * (1 - found) / distance**2 if distance else math.inf
    wanted = max(wanted, _FEW / found)
    if wanted > MOST_EPISODES:
        return "so near to the limit no number of episodes tells"
    digits = max(1, 10 ** (math.floor(math.log10(wanted)) - 1))
    return f"{flag} {math.ceil(wanted / digits) * digits} may tell"


def limit_verdicts(found: Mapping[str, Any], *, flag: str = "--eval-episodes") -> list[str]:
    """`limit_verdict` of each policy in a summary, or of the one that it names."""
    if "policy" in found:
        policy, episodes = found["policy"], found["episodes"]
        return [limit_verdict(found, policy=policy, episodes=episodes, flag=flag)]
    policies = [("_stochastic", "stochastic"), ("", "deterministic")]
    if math.isnan(found["true_cost"]):
        del policies[1:]  # the same again
    return [
        limit_verdict(
            found, suffix=suffix, policy=policy, episodes=found["eval_episodes"], flag=flag
        )
        for suffix, policy in policies
    ]


def cost_model_verdicts(found: Mapping[str, Any]) -> list[str]:
    """Say what a learned cost is worth; nothing if there is none."""
    if "learned_cost" not in found:
        return []
    said = []
    suffix = "_stochastic" if "learned_cost_stochastic" in found else ""
    learned, learned_limit = found[f"learned_cost{suffix}"], found["learned_limit"]
    if one_sided := _labels_on_one_side(found):
        said.append(f"no limit was learned: {one_sided}")
    if math.isnan(found[f"true_cost{suffix}"]) or math.isnan(found["cost_limit"]):
        if one_sided:
            return said
        holds = learned <= learned_limit
        sign = "<=" if holds else ">"
        said.append(
            f"the learned cost is {'within' if holds else 'above'} its limit: {learned:.3g} {sign} "
            f"{learned_limit:g}{'' if holds else _LONGER}"
        )
        return said
    if found[f"true_cost{suffix}"] > found["cost_limit"] and not one_sided:
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
        rarer = round(number * (1 - base_rate))  # of the safe or of the unsafe ones
        if rarer < _FEW_OF_A_SIDE:
            said.append(
                f"too few episodes to judge the cost model by: {shown}, only {rarer} of them on "
                "one side of the limit"
            )
        elif accuracy <= 0.5 + half < found["auroc"] - 0.1:
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


def _labels_on_one_side(found: Mapping[str, Any]) -> str | None:
    """Which safety labels there are, if they tell no limit; None too if nobody counted them."""
    safe, unsafe = found.get("safe_labels", 1), found.get("unsafe_labels", 1)
    if safe and unsafe:
        return None
    if not safe + unsafe:
        return "no label says whether an episode is safe"
    return f"all {safe + unsafe} safety labels are {'safe' if safe else 'unsafe'}"


def last_fifth(rows: Sequence[_Row]) -> Sequence[_Row]:
    """Return the last fifth of a log, at least one of its rows."""
    return rows[-max(1, len(rows) // 5) :]


def multiplier_verdict(
    values: Sequence[float], *, cap: float, is_kept: bool | None, longer: str
) -> str | None:
    """Say if λ was at its cap at the end, or had not found its place yet.

    It is at its cap if it was so in half of the last fifth of the run or more. It is still rising
    if the means of the last three fifteenths rise, by a tenth or more, and are above all others of
    the second half: of a λ that swings about its place, once in 336 times, or in some fifty if it
    swings slowly.

    Args:
        values: λ after each iteration.
        cap: Highest λ.
        is_kept: Whether the mean cost in the last fifth was within the limit; None if nobody knows.
        longer: The flag for a longer run.
    """
    if len(values) and np.mean(np.asarray(last_fifth(values)) >= cap * (1 - 1e-6)) >= 0.5:
        said = f"λ was at its cap of {cap:g} in the last fifth of the run"
        enough = ", which was enough: cost was within the limit"
        higher = (
            ", give a learned cost more labels, or raise --multiplier-cap; if no policy can keep "
            "the limit, raise the limit"
        )
    else:
        if len(values) < _BLOCKS:
            return None
        means = [block.mean() for block in np.array_split(np.asarray(values), _BLOCKS)]
        *before, first, middle, last = means[_BLOCKS // 2 :]
        if not max(before) < first < middle < last or last < 1.1 * first:
            return None
        said = f"λ was still rising in the last fifth of the run, from {first:.2g} to {last:.2g}"
        enough, higher = ", while cost was within the limit", ""
    if is_kept:
        return f"{said}{enough}"
    above = ": where the limit is not kept," if is_kept is None else ", and cost above the limit:"
    return f"{said}{above} train longer, {longer}{higher}"


def share_verdict(
    values: Sequence[float], *, cost: float, limit: float, unsafe_rate: float
) -> str | None:
    """Say if the allowed share of unsafe episodes is what binds, and a limit on the mean would not.

    It is so if the mean cost of the last fifth is below half of the limit, while λ was 0.1 or more
    on average: a policy pays for nothing else.

    Args:
        values: λ after each iteration.
        cost: Mean true cost of the last fifth; NaN if nobody knows.
        limit: d.
        unsafe_rate: p*.
    """
    if not (cost < limit / 2 and len(values) and np.mean(last_fifth(values)) >= 0.1):
        return None
    return (
        f"cost was {cost:.3g} in the last fifth, far within {limit:g}: what binds is that "
        f"{unsafe_rate:.0%} of the episodes may be above it (--max-unsafe-rate). If only the mean "
        "counts, raise that (docs/constraint.md)"
    )


def standstill_verdict(
    returns: Sequence[float], *, were_unsafe: bool = False, by_labels: bool = True
) -> str | None:
    """Say if the policy earns less than in its first episodes: the cost may have stopped it.

    The mean of the last fifth of the iterations is below that of the first three, by more than the
    normal 95 % interval of the difference. Of fewer than 40 iterations nothing is said.

    Args:
        returns: Mean return of the training episodes of each iteration, of those in which some
            ended.
        were_unsafe: Whether the first ones were, so that a safe policy may have to earn less.
        by_labels: Whether the cost was learned, so that labels would help.
    """
    if len(returns) < 40:
        return None
    start = np.asarray(returns[:FIRST_ROWS])
    end = np.asarray(last_fifth(returns))
    if start.mean() - end.mean() <= math.hypot(interval(start), interval(end)):
        return None
    labels = "ask more, mark unsafe moments (docs/labels.md), or " if by_labels else ""
    means, which = f"{end.mean():.4g} to {start.mean():.4g}", ", which were unsafe" * were_unsafe
    why = "that may be the price of safety" if were_unsafe else "the cost has stopped it"
    return (
        f"the policy earns less than in its first episodes{which}, {means}: {why}. If a safe "
        f"policy can earn more, {labels}raise the limit"
    )


def verdict(
    found: Mapping[str, Any], *, multiplier: Sequence[str] = (), flag: str = "--eval-episodes"
) -> list[str]:
    """Say in words what a summary means: the policy, what was said of λ, then the learned cost."""
    return [*limit_verdicts(found, flag=flag), *multiplier, *cost_model_verdicts(found)]


def plus_minus(mean: float, half: float) -> str:
    """A mean and the half-width of its interval, to two digits of that: 18.9 +- 4.2."""
    if not math.isfinite(half):
        return f"{mean:.4g}"
    if half == 0:
        return f"{mean:.4g} +- 0"
    if half < 1e-6 * abs(mean):
        return f"{mean:.4g} +- {half:.1g}"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:,.{digits}f} +- {half:,.{digits}f}"


def interval(values: np.ndarray | Sequence[float]) -> float:
    """Half-width of the normal 95 % interval of the mean; NaN of fewer than two values."""
    sample = np.asarray(values, dtype=np.float64)
    return float(1.96 * sample.std(ddof=1) / np.sqrt(len(sample))) if len(sample) > 1 else np.nan
