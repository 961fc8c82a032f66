"""What a learned cost has learned: which inputs it follows, from where on, and by how much.

`effects` measures any cost model, trees or network, on recorded steps: it moves one input at a time
and looks at what the cost of the step does. `telling` picks the few that are worth reading, and
`Effect.rule` says each in words. Nothing here draws, or knows a true cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.buffer import check_generator, check_trajectories
from pbcrl.cost_model import LearnedCost
from pbcrl.errors import require_in
from pbcrl.spaces import check_names
from pbcrl.trajectory import FloatArray, Trajectory
from pbcrl.trees import TreeCost, like_inputs

Floats = NDArray[np.float64]

_SCORED = 80_000
"""About how many steps are scored for all importances, and for all curves: for 150 trees, that is a
second."""
_MOST_VALUES = 24  # of an input, in its curve
_NUM_BINS = 30  # of the histograms
_SHIFTS = 4  # times that a group of inputs moves to other steps
_WINDOW = 0.2  # of the curve's range, on either side of a threshold


@dataclass(frozen=True)
class Threshold:
    """Where a curve rises or falls."""

    at: float
    """Value of the input. Of trees it is a true split: the cost changes beyond it, not on it."""
    change: float
    """Mean cost per step over the next fifth of the curve's range, minus that over the last fifth
    before: > 0 where the cost rises."""


@dataclass(frozen=True, eq=False)
class Effect:
    """What one input does to the cost of a step, or the highest or lowest of a group of inputs."""

    name: str
    """"velocimeter[0]"; "max hazards_lidar" and "min hazards_lidar" are of a group."""
    group: str | None
    """That it is of, or that the input belongs to: "hazards_lidar"."""
    importance: float
    """Root of the mean squared change of the step cost when this input alone, or its whole group,
    is permuted over the steps; divided by √2 times the standard deviation of the step cost. That is
    0 for what is never read and 1 if nothing else is: the root of Sobol's total index."""
    spread: float
    """Standard deviation of the curve over the steps, as a share of that of the step cost: what the
    input explains by itself, in [0, 1] but for chance."""
    edges: Floats
    """Bounds of the K pieces of the curve, ascending, (K + 1,): from the 1st to the 99th percentile
    of the input. Of trees they are splits."""
    costs: Floats
    """The curve: mean learned cost per step while the input is between two edges and all others
    stay as they are, (K,)."""
    thresholds: tuple[Threshold, ...]
    """Where the curve changes most; then where it changes most in the other direction, if that is a
    third as much or more, and a fifth of the step cost's standard deviation. None if it is flat."""
    bins: Floats
    """Bounds of the bins of `shares`, as far as the curve goes, (31,)."""
    shares: Mapping[str, Floats] = field(repr=False)
    """Of the steps in each bin, (30,): those of episodes labelled "safe" and "unsafe", or of "all";
    what lies outside counts in the bins at the ends, so that each sums to 1."""

    @property
    def threshold(self) -> Threshold | None:
        """The first of `thresholds`."""
        return self.thresholds[0] if self.thresholds else None

    @property
    def rule(self) -> str:
        """The thresholds in words, with changes per step; "no effect" without any.

        "cost rises above 0.93 (+0.12 per step)", or below. Of two, "cost rises below 0.00 (+0.25
        per step) and above 1.76 (+0.16 per step)", or "cost rises above 0.2 (+0.1 per step) and
        falls above 0.7 (-0.1 per step)".
        """
        if not self.thresholds:
            return "no effect"
        first, *others = sorted(self.thresholds, key=lambda threshold: threshold.at)
        side = "above" if first.change > 0 else "below"
        text = f"cost rises {side} {self.shown(first)} (+{abs(first.change):.2g} per step)"
        for other in others:
            verb = "falls above" if other.change < 0 else "above"
            text += f" and {verb} {self.shown(other)} ({other.change:+.2g} per step)"
        return text

    @property
    def shown_threshold(self) -> str:
        """The first threshold as it is shown, "0.93"; "" without one."""
        return self.shown(self.thresholds[0]) if self.thresholds else ""

    def shown(self, threshold: Threshold) -> str:
        """One of the thresholds, as finely as a thirtieth of the curve's range: "0.93"."""
        digits = math.ceil(-math.log10((self.edges[-1] - self.edges[0]) / 30))
        shown = round(threshold.at, digits) + 0.0  # no -0
        return f"{shown:.{max(0, digits)}f}"


def effects(
    model: LearnedCost,
    trajectories: Sequence[Trajectory],
    *,
    rng: np.random.Generator,
    safe: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    num_steps: int = 2_000,
) -> list[Effect]:
    """Measure what each input does to the learned cost of a step.

    The curve of an input is its partial dependence: it is set to one value in all steps, and the
    costs are averaged. That asks the model about steps that nobody has seen, and answers "what does
    the cost follow", not "what is dangerous". Of a group of like inputs (`pbcrl.trees.like_inputs`)
    all move together, to those of another step, and costs are averaged by the highest or the lowest
    of them.

    Args:
        model: Trees or networks, several of them too; not of images.
        trajectories: Episodes or segments, E >= 1, labelled or not: such as the model was
            trained on.
        rng: Chooses the steps.
        safe: Mean label of each, 1 safe, 0 unsafe, NaN unknown, (E,), as
            `PreferenceBuffer.safe_shares`; exactly 0.5 counts as unknown. If one is known, only
            such episodes count, and as many steps are drawn from safe ones as from unsafe ones.
        names: Of all inputs, observation first, (obs_dim + act_dim,). None takes those of a
            `TreeCost`; other models have "obs[3]" and "action[0]" then. `pbcrl.spaces.names_of`
            has those of an env.
        num_steps: Most steps to score the model on, and to count of either label.

    Returns:
        One per input and two per group, the most important first.

    Raises:
        TypeError: If `rng` is no generator, or something else than trajectories is given.
        ValueError: If there is no trajectory, the model reads images or other sizes, there is not
            one label per trajectory, or not one different name per input.
    """
    check_trajectories(trajectories)
    check_generator(rng)
    require_in("[2, inf)", num_steps=num_steps)
    if not trajectories:
        raise ValueError(
            "effects are measured on recorded steps, got no trajectory; pass those that the model "
            "was trained on, or play some"
        )
    if len(model.obs_shape) != 1:
        raise ValueError(
            f"effects are those of named numbers, got a model of images {model.obs_shape}; a pixel "
            "by itself says nothing"
        )
    for trajectory in trajectories:
        model._check_sizes(trajectory.obs.shape[1:], trajectory.actions.shape[1])
    shown_names = _checked_names(model, names)
    samples = {
        kind: _draw_steps([trajectories[i] for i in chosen], num_steps, rng)
        for kind, chosen in _by_label(safe, len(trajectories)).items()
    }
    scored = np.concatenate([rows[:: len(samples)] for rows in samples.values()])
    probe = _Probe(model, shown_names, rng.permutation(scored), samples)
    found = [*probe.of_inputs(), *probe.of_groups()]
    return sorted(found, key=lambda effect: -effect.importance)


def telling(found: Sequence[Effect], *, most: int = 6, least: float = 0.1) -> list[Effect]:
    """Pick the effects that are worth reading, the most important first.

    Of each group there is at most one: its highest value, its lowest, or a single input, whichever
    has the largest `spread`.

    Args:
        found: What `effects` has returned.
        most: How many, at least 1.
        least: Lowest importance.

    Raises:
        ValueError: If `most` is below 1.
    """
    require_in("[1, inf)", most=most)
    best: dict[str, Effect] = {}
    for effect in found:
        key = effect.name if effect.group is None else effect.group
        if key not in best or effect.spread > best[key].spread:
            best[key] = effect
    chosen = [e for e in best.values() if e.importance >= least and e.thresholds]
    return sorted(chosen, key=lambda effect: -effect.importance)[:most]


class _Probe:
    """A model, and steps like those of which it is asked what others would cost.

    Args:
        model: Of rows.
        names: Of its inputs, (D,).
        steps: Observations and actions side by side, in random order, (n, D).
        samples: Such steps by label, (m, D) each.
    """

    def __init__(
        self,
        model: LearnedCost,
        names: Sequence[str],
        steps: FloatArray,
        samples: Mapping[str, FloatArray],
    ) -> None:
        self.model, self.names, self.steps, self.samples = model, names, steps, samples
        self.costs = self._score(steps)
        self.sd = float(self.costs.std())
        self.groups = like_inputs(names[: model.obs_dim])
        self.splits: dict[object, FloatArray] | None = None
        """Of trees: by the place of an input; by (how, first, beyond) of what is pooled."""
        if isinstance(model, TreeCost):
            pools = [(how, *at) for at in model.groups.values() for how in ("max", "min", "mean")]
            keys = [*range(len(names)), *pools]
            self.splits = dict(zip(keys, model.splits, strict=True))

    def of_inputs(self) -> list[Effect]:
        """Effects of single inputs, (D,)."""
        group_of = {i: (name, at) for name, at in self.groups.items() for i in range(*at)}
        pieces = []
        for i in range(len(self.names)):
            _, at = group_of.get(i, ("", ()))
            pieces.append(self._pieces(i, at))
        base = self.steps[: max(20, _SCORED // sum(len(values) for _, values in pieces))]
        found = []
        for i, (edges, values) in enumerate(pieces):
            rows = np.tile(base, (len(values), 1))
            rows[:, i] = np.repeat(values, len(base))
            curve = self._score(rows).reshape(len(values), -1).mean(axis=1)
            columns = {kind: sample[:, i] for kind, sample in self.samples.items()}
            group, _ = group_of.get(i, (None, ()))
            importance = self._importance(i)
            found.append(
                self._effect(
                    self.names[i], group, importance, edges, curve, columns, self.steps[:, i]
                )
            )
        return found

    def of_groups(self) -> list[Effect]:
        """Effects of the highest and the lowest input of each group."""
        found = []
        for name, (start, stop) in self.groups.items():
            donors = np.concatenate([np.roll(self.steps, k, axis=0) for k in range(1, 1 + _SHIFTS)])
            rows = np.tile(self.steps, (_SHIFTS, 1))
            rows[:, start:stop] = donors[:, start:stop]
            moved = self._score(rows)
            importance = self._share(moved - np.tile(self.costs, _SHIFTS))
            for how, pool in (("max", np.max), ("min", np.min)):
                columns = {k: pool(rows[:, start:stop], axis=1) for k, rows in self.samples.items()}
                values = pool(self.steps[:, start:stop], axis=1)
                edges = self._pooled_edges(how, start, stop, values)
                piece = np.searchsorted(edges[1:-1], pool(rows[:, start:stop], axis=1))
                count = np.bincount(piece, minlength=len(edges) - 1)
                curve = np.bincount(piece, weights=moved, minlength=len(edges) - 1) / count
                found.append(
                    self._effect(f"{how} {name}", name, importance, edges, curve, columns, values)
                )
        return found

    def _score(self, rows: FloatArray) -> Floats:
        """Costs of steps (N, D), (N,)."""
        dim = self.model.obs_dim
        return self.model.step_cost(rows[:, :dim], rows[:, dim:]).astype(np.float64)

    def _importance(self, i: int) -> float:
        """As of `Effect`, of a single input."""
        rows = self.steps[: max(100, _SCORED // len(self.names))].copy()
        rows[:, i] = np.roll(rows[:, i], 1)  # the order is random, so this permutes
        return self._share(self._score(rows) - self.costs[: len(rows)])

    def _share(self, change: Floats) -> float:
        if self.sd == 0:
            return 0.0
        return float(np.sqrt(np.square(change).mean() / 2) / self.sd)

    def _pieces(self, i: int, at: tuple[int, ...]) -> tuple[Floats, FloatArray]:
        """Edges of an input's curve, (K + 1,), and a value in each piece, (K,).

        Args:
            i: The input.
            at: The first and one beyond the last of its group, whose extremes it moves, too.
        """
        column = self.steps[:, i]
        low, high = _range(column)
        if self.splits is not None:
            keys = [i, *((how, *at) for how in ("max", "min"))]
            splits = [self.splits[key] for key in keys if key in self.splits]
            inner = _within(np.unique(np.concatenate(splits)), low, high)
            if len(inner) >= _MOST_VALUES:
                inner = inner[np.linspace(0, len(inner) - 1, _MOST_VALUES - 1).round().astype(int)]
            # A tree sends what lies on a split to the left: the upper edge belongs to its piece.
            return _edges(low, inner, high), np.append(inner, np.float32(high))
        different = np.unique(column[(column >= low) & (column <= high)])
        if 1 < len(different) <= _MOST_VALUES:
            return _edges(low, (different[1:] + different[:-1]) / 2, high), different
        edges = np.linspace(low, high, 2 if low == high else _MOST_VALUES + 1)
        return edges, ((edges[1:] + edges[:-1]) / 2).astype(np.float32)

    def _pooled_edges(self, how: str, start: int, stop: int, values: FloatArray) -> Floats:
        """Edges for the highest or lowest of a group, at least a hundredth of the steps between."""
        low, high = _range(values)
        inner = np.unique(np.quantile(values, np.linspace(0, 1, _MOST_VALUES + 1)[1:-1]))
        if self.splits is not None:
            own = self.splits.get((how, start, stop), ())
            single = [self.splits[i] for i in range(start, stop)]
            inner = np.unique(own if len(own) else np.concatenate(single))
        kept, last = [], 0
        ordered = np.sort(values)
        for edge in _within(inner, low, high):
            below = int(np.searchsorted(ordered, edge, side="right"))
            if min(below - last, len(values) - below) >= max(1, len(values) // 100):
                kept.append(edge)
                last = below
        return _edges(low, np.array(kept), high)

    def _effect(
        self,
        name: str,
        group: str | None,
        importance: float,
        edges: Floats,
        curve: Floats,
        columns: Mapping[str, FloatArray],
        values: FloatArray,
    ) -> Effect:
        at_steps = curve[np.searchsorted(edges[1:-1], values)]
        low, high = edges[0], edges[-1]
        if low == high:  # a constant, maybe so large that one more is nothing
            margin = max(0.5, 1e-6 * abs(low))
            low, high = low - margin, high + margin
        bins = np.linspace(low, high, _NUM_BINS + 1)
        shares = {
            kind: np.histogram(column.astype(np.float64).clip(bins[0], bins[-1]), bins)[0]
            / len(column)
            for kind, column in columns.items()
        }
        return Effect(
            name=name,
            group=group,
            importance=min(importance, 1.0),  # a sample of steps may say a little more
            spread=0.0 if self.sd == 0 else float(at_steps.std() / self.sd),
            edges=edges,
            costs=curve,
            thresholds=_thresholds(edges, curve, self.sd),
            bins=bins,
            shares=shares,
        )


def _thresholds(edges: Floats, costs: Floats, sd: float) -> tuple[Threshold, ...]:
    """Where the jumps of a curve around an edge add up to most, near ones above all.

    The means on both sides alone would mistake a small step near an end for a large one beside it.
    """
    inner = edges[1:-1]
    if np.ptp(costs) <= 1e-6 * np.abs(costs).max():
        return ()
    sums = np.concatenate([[0.0], np.cumsum(costs * np.diff(edges))])
    width = _WINDOW * (edges[-1] - edges[0])

    def mean(start: Floats, stop: Floats) -> Floats:
        total: Floats = np.interp(stop, edges, sums) - np.interp(start, edges, sums)
        return total / (stop - start)

    after = mean(inner, np.minimum(inner + width, edges[-1]))
    change = after - mean(np.maximum(inner - width, edges[0]), inner)
    nearness = np.maximum(0.0, 1 - np.abs(inner[:, None] - inner) / width)
    steepness = nearness @ np.diff(costs)
    best = int(np.abs(steepness).argmax())
    against = -np.sign(steepness[best])
    other = int((against * steepness).argmax())
    least = max(abs(change[best]) / 3, sd / 5)
    found = [best, other] if against * change[other] >= least else [best]
    return tuple(Threshold(at=float(inner[k]), change=float(change[k])) for k in found)


def _range(values: FloatArray) -> tuple[float, float]:
    """The 1st and the 99th percentile; all values if these are the same."""
    low, high = np.percentile(values, [1, 99])
    return (float(low), float(high)) if low < high else (float(values.min()), float(values.max()))


def _within(splits: NDArray[np.floating], low: float, high: float) -> NDArray[np.floating]:
    return splits[(splits > low) & (splits < high)]


def _edges(low: float, inner: ArrayLike, high: float) -> Floats:
    return np.concatenate([[low], np.asarray(inner, np.float64), [high]])


def _by_label(safe: ArrayLike | None, size: int) -> dict[str, NDArray[np.intp]]:
    """Places of trajectories, (E,) or fewer, by label."""
    if safe is None:
        return {"all": np.arange(size)}
    shares = np.asarray(safe, dtype=np.float64)
    if shares.shape != (size,):
        raise ValueError(
            f"each trajectory has its label, NaN if it is unknown: got {size} trajectories and "
            f"labels of shape {shares.shape}; see PreferenceBuffer.safe_shares"
        )
    known = {"safe": np.flatnonzero(shares > 0.5), "unsafe": np.flatnonzero(shares < 0.5)}
    return {kind: at for kind, at in known.items() if len(at)} or {"all": np.arange(size)}


def _checked_names(model: LearnedCost, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        if isinstance(model, TreeCost):
            return model.names
        obs, actions = range(model.obs_dim), range(model.act_dim)
        return (*(f"obs[{i}]" for i in obs), *(f"action[{i}]" for i in actions))
    return check_names(names, model.obs_dim + model.act_dim)


def _draw_steps(
    trajectories: Sequence[Trajectory], num_steps: int, rng: np.random.Generator
) -> FloatArray:
    """Different steps of any of them, each equally likely, float32 (n, obs_dim + act_dim)."""
    bounds = np.cumsum([len(trajectory) for trajectory in trajectories])
    places = np.sort(rng.choice(bounds[-1], min(num_steps, int(bounds[-1])), replace=False))
    owners = np.searchsorted(bounds, places, side="right")
    rows = []
    for owner in np.unique(owners).tolist():
        trajectory = trajectories[owner]
        steps = places[owners == owner] - (bounds[owner] - len(trajectory))
        parts = trajectory.obs[steps], trajectory.actions[steps]
        rows.append(np.concatenate(parts, axis=1, dtype=np.float32))
    return np.concatenate(rows)
