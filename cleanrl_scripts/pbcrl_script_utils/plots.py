"""Pictures of a learned cost: along an episode, over the plane, by input, calibration and tail.

`evaluate.py --plots` writes them into the run's folder, `report.py` draws the last two of all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pbcrl import LearnedCost, Trajectory
from pbcrl.effects import Effect, Threshold
from pbcrl_script_utils.envs import flat_dims, make_envs
from pbcrl_script_utils.verdict import rare_interval

TRUE, LEARNED, LIMIT = "tab:red", "tab:blue", "black"
SAFE, UNSAFE = "#2a9d8f", "#e76f51"
_INK, _GREY = "#264653", "#7a8794"
_COLORS = {"safe": SAFE, "unsafe": UNSAFE, "all": _GREY}
_GRID = 61
_WIDTHS = {"PointHazards-v0": 1.0, "SafetyPoint": 1.9}
"""Half the width of the plane, by the beginning of an id."""


def step_costs(episode: Trajectory, cost_model: LearnedCost, title: str = "") -> Figure:
    """Cost of every step of an episode: the true one, if it is known, and below it the learned."""
    shown = [("learned cost", cost_model.step_cost(episode.obs, episode.actions), LEARNED)]
    if episode.costs is not None:
        shown.insert(0, ("true cost", episode.costs, TRUE))
    size = 7, 0.4 + 1.6 * len(shown)
    figure, axes = plt.subplots(
        len(shown), 1, figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (name, costs, color) in zip(axes[:, 0], shown, strict=True):
        axis.plot(costs, color=color, linewidth=1)
        axis.set_title(f"sum {float(np.sum(costs)):.3g}", fontsize="small", loc="right")
        axis.set_ylabel(name)
        axis.grid(alpha=0.25)
    axes[0, 0].set_title(title, fontsize="medium", loc="left")
    axes[-1, 0].set_xlabel("step")
    return figure


def calibration(
    true: np.ndarray, learned: np.ndarray, limit: float, learned_limit: float, title: str = ""
) -> Figure:
    """Share of unsafe episodes against the probability that the cost model gives for it.

    The safety loss takes P(unsafe) = σ(learned cost - learned limit) of an episode. Bins are of
    equal width, so that they lie apart wherever most episodes are; on the dashed line the
    probability is right. What is above all of them is not drawn. Bars are exact 95 % intervals,
    one-sided where no episode is unsafe.

    Args:
        true: True costs, (E,).
        learned: Learned costs, (E,).
        limit: Highest true cost that is safe.
        learned_limit: Highest learned cost that is judged safe.
        title: Above the picture.
    """
    probability = 1 / (1 + np.exp(-np.clip(learned - learned_limit, -50, 50)))
    unsafe = (true > limit).astype(np.float64)
    edges = np.linspace(0, max(probability.max(), 1e-6), 11)[1:-1]
    place = np.digitize(probability, edges)
    bins = [np.flatnonzero(place == i) for i in np.unique(place)]
    said, seen = (np.array([x[part].mean() for part in bins]) for x in (probability, unsafe))
    numbers = np.array([len(part) for part in bins])
    low, high = np.transpose([rare_interval(int(unsafe[part].sum()), len(part)) for part in bins])
    figure, axis = plt.subplots(figsize=(4.2, 3.8), layout="constrained")
    axis.plot([0, 1], [0, 1], "--", color=LIMIT, linewidth=1)
    axis.errorbar(said, seen, (seen - low, high - seen), fmt="none", color=LEARNED)
    axis.scatter(said, seen, 15 + 120 * numbers / len(true), color=LEARNED, zorder=2.5)
    right, top = max(said.max(), 0.01), high.max()
    axis.set(xlim=(-0.05 * right, 1.05 * right), ylim=(-0.05 * top, 1.05 * top))
    axis.set_xlabel("P(unsafe) by the learned cost")
    axis.set_ylabel(f"share of episodes with C > {limit:g}")
    about = f"{title}, {len(true)} episodes: more in larger points"
    axis.set_title(about.lstrip(", "), fontsize="small")
    axis.grid(alpha=0.25)
    return figure


def tail(
    true: np.ndarray, learned: np.ndarray, limit: float, learned_limit: float, title: str = ""
) -> Figure | None:
    """Share of episodes that cost at least c, of true and of learned costs.

    Learned costs are moved and scaled so that the learned limit lies on the true one and their
    standard deviations agree, as for the scaled W2. What is then below 0, which no cost is, counts
    as 0. None if either has no spread.
    """
    if true.std() == 0 or learned.std() == 0:
        return None
    scaled = limit + true.std() / learned.std() * (learned - learned_limit)
    figure, axis = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
    for costs, name, color in ((true, "true", TRUE), (scaled, "learned, scaled", LEARNED)):
        above = 1 - np.arange(len(costs)) / len(costs)
        axis.step(np.sort(costs).clip(0), above, where="pre", color=color, label=name)
    axis.axvline(limit, color=LIMIT, linestyle="--", linewidth=1, label=f"limit {limit:g}")
    axis.set_yscale("log")
    right = max(limit, true.max(), scaled.max())
    axis.set_xlim(-0.03 * right, 1.05 * right)  # episodes that cost nothing are a line at 0
    axis.set_xlabel("episode cost c")
    axis.set_ylabel("share of episodes with C >= c")
    axis.set_title(f"{title}, {len(true)} episodes".lstrip(", "), fontsize="small")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.25)
    return figure


def cost_over_plane(
    env_id: str, cost_model: LearnedCost, *, seed: int, views: int = 8
) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Score an agent that stands still at every place of one layout.

    Args:
        env_id: The toy or a task of the point robot.
        cost_model: What scores it.
        seed: Of the layout.
        views: Over how many headings (of the robot) or goals (of the toy) is averaged.

    Returns:
        True and learned cost per step, (G, G) each with rows along y, and half the width of the
        plane; None for other envs.
    """
    plain_id = env_id.rpartition(":")[-1]
    half = next((w for name, w in _WIDTHS.items() if plain_id.startswith(name)), None)
    if half is None:
        return None
    axis = np.linspace(-half, half, _GRID)
    places = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    envs = make_envs(env_id, len(places))
    batch: Any = envs.unwrapped
    still = np.zeros((len(places), flat_dims(envs)[1]), np.float32)
    true, learned = np.zeros(len(places)), np.zeros(len(places))
    for view in range(views):
        is_toy = plain_id in _WIDTHS
        envs.reset(seed=seed + view * len(places) if is_toy else seed)
        state = {key: np.repeat(rows[:1], len(places), axis=0) for key, rows in first(batch)}
        if is_toy:
            state["position"] = places
        else:
            state["qpos"][:, :2] = places
            state["qpos"][:, 2] = 2 * np.pi * view / views
            state["qvel"][:] = 0
        batch.load_state_dict(state)
        obs, *_, infos = envs.step(still)
        true += infos["cost"] / views
        learned += cost_model.step_cost(obs, still) / views
    envs.close()
    return true.reshape(_GRID, _GRID), learned.reshape(_GRID, _GRID), half


def first(batch: Any) -> list[tuple[str, np.ndarray]]:
    """The state of a batch by name, as arrays."""
    return [(key, np.asarray(rows)) for key, rows in batch.state_dict().items()]


def draw_plane(axis: Axes, costs: np.ndarray, true: np.ndarray, half: float, title: str) -> None:
    """Draw costs over the plane; a line encloses where it really costs."""
    picture = axis.imshow(
        costs,
        origin="lower",
        extent=(-half, half, -half, half),
        cmap="viridis",
        interpolation="bilinear",
    )
    places = np.linspace(-half, half, len(true))
    if 0 < (true > 0.5).mean() < 1:
        axis.contour(places, places, true, levels=[0.5], colors="white", linewidths=1.2)
    axis.set_title(title, fontsize="medium")
    axis.set_xticks([])
    axis.set_yticks([])
    plt.colorbar(picture, ax=axis, shrink=0.8)


def plane(env_id: str, cost_model: LearnedCost, *, seed: int) -> Figure | None:
    """True and learned cost over the plane of a layout, side by side; None for other envs."""
    found = cost_over_plane(env_id, cost_model, seed=seed)
    if found is None:
        return None
    true, learned, half = found
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    draw_plane(axes[0], true, true, half, "true cost per step")
    draw_plane(axes[1], learned, true, half, "learned cost per step")
    return figure


def draw_paths(
    axis: Axes, episodes: Sequence[Trajectory], true: np.ndarray, half: float, title: str
) -> None:
    """Draw the paths of the toy's point; red where it costs."""
    places = np.linspace(-half, half, len(true))
    axis.contourf(places, places, true, levels=[0.5, 2], colors=["tab:red"], alpha=0.25)
    for episode in episodes:
        xy = episode.obs[:, :2]
        axis.plot(*xy.T, color="tab:gray", linewidth=0.7, alpha=0.8)
        if episode.costs is not None:  # a step costs where it ends
            ends = np.concatenate([xy[1:], xy[-1:]])[episode.costs > 0]
            axis.plot(*ends.T, ".", color="tab:red", markersize=3)
    axis.set(xlim=(-half, half), ylim=(-half, half), aspect="equal")
    axis.set_title(title, fontsize="medium")
    axis.set_xticks([])
    axis.set_yticks([])


def effects(found: Sequence[Effect], title: str, note: str) -> Figure | None:
    """What each input does to the learned cost, and below it where the data lie.

    Args:
        found: Of `pbcrl.effects.telling`, at most six; None is returned if there are none.
        title: Above the picture.
        note: Below it, on who says which episodes are safe.
    """
    if not found:
        return None
    columns = min(len(found), 2 if len(found) == 4 else 3)
    rows = -(-len(found) // columns)
    size = 3.3 * columns + 0.6, 2.9 * rows + 0.8
    layout = ConstrainedLayoutEngine(wspace=0.05, hspace=0.05)
    figure = plt.figure(figsize=size, layout=layout)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontweight="bold")
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3, 1] * rows)
    costs = np.concatenate([effect.costs for effect in found])
    low, high = costs.min() - 0.08 * np.ptp(costs), costs.max() + 0.2 * np.ptp(costs)
    for place, effect in enumerate(found):
        row, column = divmod(place, columns)
        curve = figure.add_subplot(grid[2 * row, column])
        data = figure.add_subplot(grid[2 * row + 1, column], sharex=curve)
        curve.set_ylim(low, high)
        _draw_curve(curve, effect)
        _draw_shares(data, effect, curve)
        curve.tick_params(labelbottom=False, labelleft=column == 0)
        if column == 0:
            curve.set_ylabel("learned cost per step", color=_INK)
            data.set_ylabel("data", color=_INK)
    patches = [
        Patch(color=_COLORS[kind], alpha=0.6, label=f"steps of {kind} episodes")
        for kind in found[0].shares
    ]
    line = Line2D([], [], color=_INK, linestyle="--", linewidth=1.2, label="threshold")
    figure.legend(
        handles=[line, *patches],
        title=note,
        loc="outside lower center",
        ncols=1 if columns == 1 else 3,
        frameon=False,
    )
    return figure


def _draw_curve(axis: Axes, effect: Effect) -> None:
    bottom = axis.get_ylim()[0]
    axis.stairs(effect.costs, effect.edges, baseline=bottom, fill=True, color=UNSAFE, alpha=0.16)
    axis.stairs(effect.costs, effect.edges, baseline=None, color=_INK, linewidth=2)
    axis.set_title(effect.name, loc="left", fontweight="bold", color=_INK, fontsize="medium")
    axis.set_title(f"share {effect.importance:.0%}", loc="right", color=_GREY, fontsize="small")
    for threshold in _drawn(effect, axis):
        is_right = threshold.at > (effect.edges[0] + effect.edges[-1]) / 2
        axis.annotate(
            effect.shown(threshold).replace("-", "\N{MINUS SIGN}"),
            (threshold.at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if is_right else 4, -3),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="top",
            color=_INK,
        )
        axis.axvline(threshold.at, color=_INK, linestyle="--", linewidth=1.2, clip_on=False)
    axis.grid(alpha=0.2)
    axis.spines[["top", "right"]].set_visible(False)


def _drawn(effect: Effect, curve: Axes) -> list[Threshold]:
    """The thresholds of a curve, if they can be seen: not those of a curve that is almost flat."""
    low, high = curve.get_ylim()
    return [t for t in effect.thresholds if abs(t.change) > 0.1 * (high - low)]


def _draw_shares(axis: Axes, effect: Effect, curve: Axes) -> None:
    for kind, share in effect.shares.items():
        axis.stairs(share, effect.bins, fill=True, color=_COLORS[kind], alpha=0.55, linewidth=0)
    # One full bin, as of a sensor that mostly sees nothing, would flatten all others.
    highest, second = np.sort(np.max(list(effect.shares.values()), axis=0))[[-1, -2]]
    axis.set_ylim(0, 1.05 * min(highest, 3 * second) or 1)
    for threshold in _drawn(effect, curve):
        axis.axvline(threshold.at, color=_INK, linestyle="--", linewidth=1.2, clip_on=False)
    axis.set_yticks([])
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlim(effect.edges[0], effect.edges[-1])
    axis.spines[["top", "right", "left"]].set_visible(False)


def save(figure: Figure | None, path: Path) -> Path | None:
    """Write a figure, and forget it; None stays None."""
    if figure is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
