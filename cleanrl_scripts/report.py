"""The paper's tables and figures from what `benchmark.py` left, whatever part of it is finished.

    python cleanrl_scripts/report.py --runs-dir runs/benchmark --out runs/report

Writes `report.md`, `runs.csv` with one row per run, and every figure as PNG and SVG. Tables show
the mean and the standard deviation over seeds, the interquartile mean with its 95 % bootstrap
interval (Agarwal et al., 2021), and the paper's number.
"""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.figure import Figure
from presets import TABLES, VARIANTS, Table
from rliable import library, metrics
from scipy import stats

import pbcrl_envs

METRICS = {
    "return": "return",
    "true_cost": "cost",
    "learned_cost": "learned cost",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "type_ii_rate": "type II rate",
    "w2_scaled": "W2, scaled",
    "w2_raw": "W2, raw",
    "w2_zscored": "W2, z-scored",
    "bias": "\\|cost - d\\|",
    "return_mid": "return, mid",
    "true_cost_mid": "cost, mid",
    "return_last_tenth": "return, end",
    "true_cost_last_tenth": "cost, end",
}
"""What a table can show, and its name there. `mid` is half-way through the training."""
CURVES = "return", "true_cost", "learned_cost"


@dataclass(frozen=True)
class Args:
    runs_dir: str = "runs/benchmark"
    """folder that benchmark.py wrote"""
    out: str = "runs/report"
    """folder for the report"""
    tables: tuple[str, ...] = ()
    """presets to report on; default: all that have a finished run"""
    bootstrap: int = 2_000
    """resamples of the seeds for each interval"""
    seed: int = 0
    """of the bootstrap"""


@dataclass(frozen=True)
class Run:
    """One finished run."""

    env_id: str
    variant: str
    seed: int
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    """Of metrics.jsonl."""
    folder: Path


def load(folder: Path) -> list[Run]:
    """Read every finished run in a folder, in the order of their names."""
    runs = []
    for path in sorted(folder.glob("*__*__*/summary.json")):
        env_id, variant, seed = path.parent.name.split("__")
        if variant not in VARIANTS:
            continue
        summary = json.loads(path.read_text())
        lines = (path.parent / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        summary |= at_half(rows)
        runs.append(Run(env_id, variant, int(seed), summary, rows, path.parent))
    return runs


def at_half(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return and cost around half of the training, from 45 % to 55 % of its steps."""
    found = {}
    for key in ("return", "true_cost"):
        total = rows[-1]["env_steps"] if rows else 0
        near = [r for r in rows if 0.45 * total <= r["env_steps"] <= 0.55 * total]
        near = [r for r in near if r[key] is not None]
        weights = [r["episodes"] for r in near]
        values = [r[key] for r in near]
        found[f"{key}_mid"] = float(np.average(values, weights=weights)) if near else float("nan")
    return found


# -- Tables ----------------------------------------------------------------------------------------


def values_of(runs: Sequence[Run], env_id: str, variant: str, metric: str) -> np.ndarray:
    """A metric by seed, (n,); runs in which it is undefined are left out."""
    found = [
        run.summary.get(metric) for run in runs if (run.env_id, run.variant) == (env_id, variant)
    ]
    defined = [float(value) for value in found if value is not None]
    return np.array([value for value in defined if np.isfinite(value)])


def short(number: float) -> str:
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def mean_and_std(values: np.ndarray) -> str:
    """Mean ± sample standard deviation over seeds; the mean alone of a single one."""
    if len(values) == 0:
        return "–"
    if len(values) == 1:
        return short(values[0])
    return f"{short(values.mean())} ± {short(values.std(ddof=1))}"


def interquartile(values: np.ndarray, args: Args) -> str:
    """Interquartile mean and its 95 % interval over bootstrapped seeds."""
    if len(values) < 2:
        return "–"
    scores = {"": values[:, None]}
    points, intervals = library.get_interval_estimates(
        scores,
        lambda x: np.array([metrics.aggregate_iqm(x)]),
        reps=args.bootstrap,
        random_state=np.random.RandomState(args.seed),
    )
    low, high = intervals[""][:, 0]
    return f"{short(points[''][0])} [{short(low)}, {short(high)}]"


def markdown(name: str, table: Table, runs: Sequence[Run], args: Args) -> str:
    """One table: ours as mean ± sd, ours as interquartile mean, the paper's."""
    heads = [VARIANTS[variant].title for variant in table.variants]
    lines = [f"## {table.title} (`{name}`)", "", f"| task | | | {' | '.join(heads)} |"]
    lines.append("|---|---|---" + "|---" * len(heads) + "|")
    for env_id in table.tasks:
        limit = pbcrl_envs.cost_limit(env_id)
        task = f"{env_id}, d = {limit:g}" if limit is not None else env_id
        for metric in table.metrics:
            cells = [values_of(runs, env_id, variant, metric) for variant in table.variants]
            if not any(len(values) for values in cells):
                continue
            kinds: list[tuple[str, Callable[[np.ndarray], str]]] = [
                ("mean ± sd", mean_and_std),
                ("IQM [95 %]", lambda values: interquartile(values, args)),
            ]
            for kind, text in kinds:
                row = [text(values) for values in cells]
                lines.append(f"| {task} | {METRICS[metric]} | {kind} | {' | '.join(row)} |")
                task = ""
            if (env_id, metric) in table.paper:
                paper = [cell or "–" for cell in table.paper[env_id, metric]]
                lines.append(f"| | {METRICS[metric]} | paper | {' | '.join(paper)} |")
    seeds = sorted(
        {run.seed for run in runs if run.env_id in table.tasks and run.variant in table.variants}
    )
    lines += ["", f"Seeds {', '.join(map(str, seeds))}; – is missing or undefined.", ""]
    return "\n".join(lines)


def wall_time(runs: Sequence[Run]) -> str:
    """Minutes per stage, mean over seeds."""
    stages = list(
        dict.fromkeys(stage for run in runs for stage in run.summary.get("stage_seconds", {}))
    )
    lines = ["## Wall time, minutes", "", f"| task | method | {' | '.join(stages)} | all |"]
    lines.append("|---|---" + "|---" * (len(stages) + 1) + "|")
    for env_id, variant in dict.fromkeys((run.env_id, run.variant) for run in runs):
        chosen = [run for run in runs if (run.env_id, run.variant) == (env_id, variant)]
        cells = []
        for stage in stages:
            seconds = [run.summary.get("stage_seconds", {}).get(stage) for run in chosen]
            known = [value for value in seconds if value is not None]
            cells.append(f"{np.mean(known) / 60:.1f}" if known else "–")
        total = np.mean([run.summary["wall_seconds"] for run in chosen]) / 60
        title = VARIANTS[variant].title
        lines.append(f"| {env_id} | {title} | {' | '.join(cells)} | {total:.1f} |")
    return "\n".join([*lines, ""])


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One row per run, every number of its summary."""
    keys = list(
        dict.fromkeys(k for r in runs for k, v in r.summary.items() if k != "stage_seconds")
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["env_id", "variant", "seed", *keys])
        for run in runs:
            values = [run.summary.get(key) for key in keys]
            cells = ["" if value is None else value for value in values]
            writer.writerow([run.env_id, run.variant, run.seed, *cells])


# -- Figures ---------------------------------------------------------------------------------------


def curves(env_id: str, variants: Sequence[str], runs: Sequence[Run]) -> Figure:
    """Return, true cost and learned cost over env steps: mean and standard deviation over seeds."""
    figure, axes = plt.subplots(len(CURVES), 1, figsize=(6, 8), sharex=True, layout="constrained")
    limit = pbcrl_envs.cost_limit(env_id)
    for axis, key in zip(axes, CURVES, strict=True):
        for number, variant in enumerate(variants):
            chosen = [r for r in runs if (r.env_id, r.variant) == (env_id, variant)]
            lines = [[(row["env_steps"], row.get(key)) for row in run.rows] for run in chosen]
            known = [[(x, y) for x, y in line if y is not None] for line in lines]
            known = [line for line in known if line]
            if not known:
                continue
            steps = np.linspace(0, min(line[-1][0] for line in known), 101)[1:]
            values = np.array([np.interp(steps, *np.array(line).T) for line in known])
            mean, std = values.mean(axis=0), values.std(axis=0)
            color = f"C{number}"
            axis.plot(steps, mean, color=color, label=VARIANTS[variant].title)
            axis.fill_between(steps, mean - std, mean + std, color=color, alpha=0.2, linewidth=0)
        if key == "true_cost" and limit is not None:
            axis.axhline(limit, color="black", linestyle="--", linewidth=1)
        if key == "learned_cost":
            axis.axhline(0.0, color="black", linestyle="--", linewidth=1)
        axis.set_ylabel(METRICS[key])
    axes[0].set_title(env_id)
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("env steps")
    return figure


def distributions(env_id: str, variants: Sequence[str], runs: Sequence[Run]) -> Figure | None:
    """Densities of the true and the learned costs of the test episodes, in units of the true sd.

    Learned costs are moved and scaled so that the learned limit lies on d and their spread is that
    of the true costs, as by the scaled W2. A solid line is the mean, the dashed one the limit.
    """
    limit = pbcrl_envs.cost_limit(env_id)
    panels: list[tuple[str, np.ndarray]] = []
    for variant in variants:
        chosen = [r for r in runs if (r.env_id, r.variant) == (env_id, variant)]
        parts = [test_costs(run) for run in chosen]
        parts = [part for part in parts if part is not None]
        if not parts or limit is None:
            continue
        true = np.concatenate([part[0] for part in parts])
        if not panels:
            panels.append(("true cost", true))
        scaled = [
            limit + t.std() / learned.std() * (learned - learned_limit)
            for t, learned, learned_limit in parts
            if learned.std() > 0
        ]
        if scaled:
            panels.append((VARIANTS[variant].title, np.concatenate(scaled)))
    panels = [(title, costs) for title, costs in panels if len(costs) > 2 and costs.std() > 0]
    if len(panels) < 2:
        return None
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(6, 1.8 * len(panels)), sharex=True, layout="constrained"
    )
    low = min(np.quantile(costs, 0.005) for _, costs in panels)
    high = max(np.quantile(costs, 0.995) for _, costs in panels)
    grid = np.linspace(low, high, 400)
    for number, (axis, (title, costs)) in enumerate(zip(axes, panels, strict=True)):
        density = stats.gaussian_kde(costs)(grid)
        axis.fill_between(grid, density, color=f"C{number}", alpha=0.4, linewidth=0)
        axis.axvline(costs.mean(), color=f"C{number}")
        axis.axvline(limit, color="black", linestyle="--", linewidth=1)
        axis.set_title(title, fontsize="small", loc="left")
        axis.set_yticks([])
    axes[-1].set_xlabel("episode cost; learned ones scaled to the true spread")
    return figure


def test_costs(run: Run) -> tuple[np.ndarray, np.ndarray, float] | None:
    """True and learned costs of a run's test episodes, (n,) each, and the learned limit."""
    path = run.folder / "test_costs.csv"
    if not path.exists():
        return None
    rows = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    return rows[:, 0], rows[:, 1], float(run.summary.get("learned_limit", 0.0))


def bars(table: Table, runs: Sequence[Run], metric: str) -> Figure | None:
    """A metric by task and variant: the mean over seeds, and every seed as a dot."""
    tasks = [t for t in table.tasks if any(r.env_id == t for r in runs)]
    if not tasks:
        return None
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(3.2 * len(tasks), 3.2), layout="constrained", squeeze=False
    )
    for axis, env_id in zip(axes[0], tasks, strict=True):
        for number, variant in enumerate(table.variants):
            values = values_of(runs, env_id, variant, metric)
            if len(values):
                axis.bar(number, values.mean(), color=f"C{number}", alpha=0.6)
                axis.plot([number] * len(values), values, "k.", markersize=4)
        limit = pbcrl_envs.cost_limit(env_id)
        if metric.startswith("true_cost") and limit is not None:
            axis.axhline(limit, color="black", linestyle="--", linewidth=1)
        titles = [VARIANTS[variant].title for variant in table.variants]
        axis.set_xticks(range(len(titles)), titles, rotation=45, ha="right", fontsize="x-small")
        axis.set_title(env_id, fontsize="small")
    axes[0][0].set_ylabel(METRICS[metric].replace("\\", ""))
    return figure


def save(figure: Figure | None, out: Path, name: str) -> str:
    """Write a figure as PNG and SVG; return the Markdown that shows it."""
    if figure is None:
        return ""
    for suffix in ("png", "svg"):
        figure.savefig(out / f"{name}.{suffix}", dpi=130)
    plt.close(figure)
    return f"![{name}]({name}.png)\n"


def main(args: Args) -> None:
    for name in args.tables:
        if name not in TABLES:
            raise SystemExit(f"error: --tables must be of {', '.join(TABLES)}, got {name!r}")
    root = Path(args.runs_dir)
    folders = {name: root / "smoke" if name == "smoke" else root for name in TABLES}
    loaded = {folder: load(folder) for folder in set(folders.values())}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    parts, reported = ["# Report\n"], list[Run]()
    for name, table in TABLES.items():
        runs = [r for r in loaded[folders[name]] if r.env_id in table.tasks]
        runs = [r for r in runs if r.variant in table.variants]
        if (args.tables and name not in args.tables) or not runs:
            continue
        reported += [run for run in runs if run not in reported]
        parts.append(markdown(name, table, runs, args))
        parts.append(
            save(bars(table, runs, table.metrics[-1]), out, f"{name}__{table.metrics[-1]}")
        )
        for env_id in dict.fromkeys(run.env_id for run in runs):
            parts.append(
                save(curves(env_id, table.variants, runs), out, f"{name}__{env_id}__curves")
            )
            drawn = distributions(env_id, table.variants, runs)
            parts.append(save(drawn, out, f"{name}__{env_id}__costs"))
    if not reported:
        raise SystemExit(
            f"error: {root} has no finished run to report on; run benchmark.py first, or name "
            "its folder by --runs-dir"
        )
    parts.append(wall_time(reported))
    write_csv(out / "runs.csv", reported)
    (out / "report.md").write_text("\n".join(part for part in parts if part))
    print(f"{len(reported)} runs reported in {out / 'report.md'} and {out / 'runs.csv'}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of rliable's dependencies
    main(tyro.cli(Args))
