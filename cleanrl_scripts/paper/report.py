"""The paper's tables and figures from the finished runs of `benchmark.py`, or from any other runs.

    python cleanrl_scripts/paper/report.py --runs-dir runs/benchmark --out runs/report

`--earlier FOLDER` counts the runs of an earlier report as well, from its two CSV files, and shows
its figures where there is no data to draw them again, so that run folders need not be kept:
`--runs-dir none --earlier docs/results --out docs/results` writes the documentation's report again,
from whose CSV files `docs/make_tables.py` makes the tables of README and results.

A run whose folder is not called `ENV__VARIANT__SEED` is identified by its `args.json`; a script of
your own is a method by its name. Runs that no table of the paper has are reported at the end. A
missing or damaged file is named in a warning and left out.

Writes `report.md`, `runs.csv` with one row per run, `curves.csv` with some hundred points of each,
and every figure as PNG and SVG. Tables show the mean and the standard deviation over seeds, the
interquartile mean with its 95 % bootstrap interval (Agarwal et al., 2021), and the paper's number.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.figure import Figure
from presets import (
    ACCURACY,
    COST,
    LEARNED,
    RETURN,
    TABLES,
    VARIANTS,
    Table,
    Variant,
    made_as,
)

import pbcrl_envs

try:
    from rliable import library, metrics
except ImportError:  # it needs Python 3.11
    library = metrics = None

METRICS = {
    "return": "return",
    "true_cost": "cost",
    "violation_rate": "share above d",
    "return_stochastic": "return, stochastic",
    "true_cost_stochastic": "cost, stochastic",
    "learned_cost": "learned cost",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "type_ii_rate": "type II rate",
    "w2_scaled": "W2, scaled",
    "w2_offset": "W2, scaled, of means",
    "w2_shape": "W2, scaled, of shapes",
    "w2_raw": "W2, raw",
    "w2_zscored": "W2, z-scored",
    "bias": "bias",
    "step_auroc": "step AUROC",
    "true_cost_at_limit": "cost at the learned limit",
    "return_mid": "return, mid",
    "true_cost_mid": "cost, mid",
    "return_last_tenth": "return, end",
    "true_cost_last_tenth": "cost, end",
}
"""Keys of a summary that a table can show, and their titles."""

NOTES = """
Return and cost are those of the final evaluation, of the deterministic policy where nothing else is
said, and of the stochastic one, which was trained; the share above d is that of its episodes
(deterministic). Mid and end are of the training episodes: those around half of the env steps (45 to
55 %), and the last tenth. Bias is |cost - d| of each run, d the true limit. W2, accuracy, type II
rate, step AUROC and cost at the learned limit are taken on test episodes that were never labelled;
the last is the mean true cost where the mean learned cost is at its limit. Learned costs of RLSF
are counts of states, held to d; all others are logits, held to the learned limit, which is 0 for a
network. ± is the standard deviation over seeds, IQM the interquartile mean with its 95 % interval
over bootstrapped seeds. – is missing or undefined.
"""

CELL = "env_id", "variant", "seed"
MADE_BY = "commit", "hardware", "command"
NOT_STAGES = "wall_seconds", "oracle_seconds"
"""Columns in seconds of `runs.csv` that are no stage of a run."""
CURVE = "env_steps", "episodes", "return", "true_cost", "learned_cost", "wall_seconds"
NUMBERS = *METRICS, "cost_limit", "learned_limit", "wall_seconds", "oracle_seconds"
"""Columns of `runs.csv` that tables and figures compute with."""
CURVE_POINTS = 120
"""At most, in `curves.csv`."""

EPISODES_IN_A_ROW = 200
"""Training episodes by which a policy is held against the paper's."""

COLORS = {
    "ppo_lag": "tab:red",
    "pbcrl": "tab:blue",
    "rlsf": "tab:orange",
    "ppo_bt": "tab:green",
}
"""The paper's."""
OTHERS = "tab:purple", "tab:brown", "tab:pink", "tab:gray", "tab:olive", "tab:cyan", "black"


@dataclass(frozen=True)
class Args:
    runs_dir: str = "runs/benchmark"
    """folder of the runs, by benchmark.py or by hand; or of one run"""
    out: str = "runs/report"
    """folder for the report"""
    earlier: str | None = None
    """folder of an earlier report, whose runs count where runs_dir has none of the same task,
    variant and seed; default: none"""
    tables: tuple[str, ...] = ()
    """presets to report on; default: all that have a finished run"""
    bootstrap: int = 2_000
    """resamples of the seeds for each interval"""
    seed: int = 0
    """of the bootstrap"""


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run."""

    env_id: str
    variant: str
    seed: int
    summary: dict[str, Any]
    """Of summary.json; `bias` is against the true limit."""
    rows: list[dict[str, Any]]
    """Of metrics.jsonl."""
    test_costs: np.ndarray | None
    """True and learned costs of the test episodes, (n, 2)."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Of args.json: command, commit and hardware."""
    folder: Path | None = None

    @property
    def limit(self) -> float | None:
        """d, the true limit; None if the run is unconstrained. Labels may follow a stricter one."""
        if VARIANTS[self.variant].shifted:
            return pbcrl_envs.cost_limit(self.env_id)
        found: float | None = self.summary.get("cost_limit")
        return found

    @property
    def counts_states(self) -> bool:
        """Whether its learned cost is a number of states."""
        return VARIANTS[self.variant].script == "ppo_lag_rlsf"

    @property
    def learned_limit(self) -> float | None:
        """Limit of its learned costs; d itself for RLSF."""
        found: float | None = self.summary.get("learned_limit")
        return found


# -- Reading ---------------------------------------------------------------------------------------


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def read_object(path: Path, *keys: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None, with a warning, if it is damaged or lacks a key."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.keys() >= set(keys):
            return found
        why = f"it is no JSON object with {', '.join(keys)}"
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    warn(f"{path} cannot be read ({why}); its run is left out")
    return None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; those that are torn are left out, with one warning."""
    rows = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        warn(f"{path} cannot be read ({error}); its run has no curves")
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.keys() >= {"env_steps", "episodes", "return", "true_cost"}:
            rows.append(row)
    if len(rows) < len(lines):
        warn(f"{len(lines) - len(rows)} of {len(lines)} lines of {path} are damaged and left out")
    return rows


def read_costs(path: Path) -> np.ndarray | None:
    """Return the true and learned costs in test_costs.csv, (n, 2), or None if there are none."""
    if not path.exists():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's own, if the file is empty
            costs = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        if len(costs) and costs.shape[1] == 2:
            return costs
        why = f"its numbers have the shape {costs.shape}, not (n, 2)"
    except (OSError, ValueError) as error:
        why = str(error)
    warn(f"{path} cannot be read ({why}); its run has no distribution of costs")
    return None


def identity(folder: Path) -> tuple[str, str, int] | None:
    """Return env id, variant and seed of a run: from its folder's name, or else its arguments."""
    env_id, _, rest = folder.name.partition("__")
    variant, _, seed = rest.rpartition("__")
    if variant in VARIANTS and seed.isdecimal():
        return env_id, variant, int(seed)
    args = read_object(folder / "args.json", "script", "env_id", "seed")
    if args is None:
        return None
    # The variant that agrees with the run in most options. "cost-limit" is "cost_limit" there.
    options: dict[str, object] = {name.replace("_", "-"): value for name, value in args.items()}
    options.setdefault("cost-model", "net")  # of a run before there were trees
    if options["cost-model"] == "net" and options.get("dead-zone") is None:
        options["dead-zone"] = 1.0
    fitting = [
        name
        for name, row in VARIANTS.items()
        if row.script == args["script"] and row.options.items() <= options.items()
    ]
    if not fitting:  # somebody's own script: a method by its name
        name = args["script"]
        if name in VARIANTS and VARIANTS[name].script != name:  # one of ours has that name
            name += ".py"
        VARIANTS.setdefault(name, Variant(name, args["script"]))
        return args["env_id"], name, args["seed"]
    best = max(fitting, key=lambda name: len(VARIANTS[name].options))
    return args["env_id"], made_as(args["env_id"], best), args["seed"]


def read_made_by(folder: Path) -> dict[str, str | None]:
    """Return what `args.json` says of command, commit and hardware; nothing in an older run."""
    try:
        return dict(json.loads((folder / "args.json").read_bytes())["made_by"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def load(folder: Path) -> list[Run]:
    """Read every finished run in a folder, in the order of their names."""
    runs, seen = [], dict[tuple[str, str, int], Path]()
    # Below a run lies at most the one that collected its episodes, which is no result.
    found_in = "summary.json" if (folder / "summary.json").exists() else "*/summary.json"
    for path in sorted(folder.glob(found_in)):
        summary = read_object(path, "return", "true_cost", "wall_seconds")
        found = identity(path.parent) if summary is not None else None
        if summary is None or found is None:
            continue
        if (first := seen.setdefault(found, path.parent)) != path.parent:
            warn(
                f"{first} and {path.parent} are of the same env, method and seed, and count as two "
                "seeds; report on runs with other settings from another folder"
            )
        rows = read_rows(path.with_name("metrics.jsonl"))
        costs = read_costs(path.with_name("test_costs.csv"))
        made_by = read_made_by(path.parent)
        run = Run(*found, summary | at_half(rows), rows, costs, made_by, path.parent)
        target = paper_oracle(run.env_id)
        if target is not None and rows:
            seconds = seconds_until(run, target)
            run.summary["oracle_seconds"] = math.inf if seconds is None else seconds
        if run.limit is not None and summary["true_cost"] is not None:
            run.summary["bias"] = abs(summary["true_cost"] - run.limit)
        runs.append(run)
    return runs


def load_report(folder: Path) -> list[Run]:
    """Read the runs of an earlier report; of several rows of one task, variant and seed, the last.

    They have the numbers of their summaries and, if `curves.csv` is there, thinned curves, but no
    test episodes.
    """
    points: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    if (folder / "curves.csv").exists():
        for row in read_csv(folder / "curves.csv", *CELL, "env_steps", numbers=CURVE):
            key = tuple(row.pop(name) for name in CELL)
            points.setdefault(key, []).append({k: number(v) for k, v in row.items()})
    runs = {}
    for row in read_csv(folder / "runs.csv", *CELL, "wall_seconds", numbers=NUMBERS):
        key = tuple(row[name] for name in CELL)
        VARIANTS.setdefault(row["variant"], Variant(row["variant"], row["variant"]))
        made_by = {name: row.pop(name, "") or None for name in MADE_BY}
        summary: dict[str, Any] = {k: number(v) for k, v in row.items() if k not in CELL}
        timed = [k for k in summary if k.endswith("_seconds") and k not in NOT_STAGES]
        stages = {key.removesuffix("_seconds"): summary.pop(key) for key in timed}
        summary["stage_seconds"] = {k: v for k, v in stages.items() if v is not None}
        env_id, variant, seed = key
        runs[key] = Run(env_id, variant, int(seed), summary, points.get(key, []), None, made_by)
    return list(runs.values())


def read_csv(path: Path, *keys: str, numbers: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file that must have `keys`, and nothing but numbers in `numbers`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(f"error: --earlier must hold the files of a report: {error}") from None
    for line, row in enumerate(rows, start=2):
        whole = None not in row and all(row.get(key) for key in keys)
        if not whole or not row["seed"].isdecimal():
            raise SystemExit(
                f"error: {path}, line {line}, must have {', '.join(keys)} and no cell too many; "
                "mend the line, or take the file from version control"
            )
        texts = [key for key in numbers if isinstance(number(row.get(key) or ""), str)]
        if texts:
            raise SystemExit(
                f"error: {path}, line {line}, must have a number or nothing as {texts[0]}, got "
                f"{row[texts[0]]!r}; mend the line, or take the file from version control"
            )
    return rows


def number(cell: str) -> float | str | None:
    """A cell of a CSV file: a number, a text, or None if it is empty."""
    try:
        return (int(cell) if cell.isdecimal() else float(cell)) if cell else None
    except ValueError:
        return cell


def at_half(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean return and cost of the episodes from 45 % to 55 % of the env steps, or NaN."""
    found = {}
    for key in ("return", "true_cost"):
        total = rows[-1]["env_steps"] if rows else 0
        near = [r for r in rows if 0.45 * total <= r["env_steps"] <= 0.55 * total]
        near = [r for r in near if r[key] is not None]
        values, weights = [r[key] for r in near], [r["episodes"] for r in near]
        found[f"{key}_mid"] = float(np.average(values, weights=weights)) if near else math.nan
    return found


def runs_of(runs: Sequence[Run], env_id: str, variant: str) -> list[Run]:
    """The runs of a variant on a task, by seed."""
    variant = made_as(env_id, variant)
    return [run for run in runs if (run.env_id, run.variant) == (env_id, variant)]


def limit_of(runs: Sequence[Run]) -> float | None:
    """The true limit of runs that share it."""
    return next((run.limit for run in runs if run.limit is not None), None)


# -- Tables ----------------------------------------------------------------------------------------


def values_of(runs: Sequence[Run], metric: str) -> np.ndarray:
    """A metric by seed, (n,); runs in which it is undefined are left out."""
    found = [run.summary.get(metric) for run in runs]
    return np.array([value for value in found if value is not None and math.isfinite(value)])


def short(number: float) -> str:
    """A number with three or four digits."""
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{round(number, digits) + 0.0:.{digits}f}"  # + 0.0: no -0.00


def mean_and_std(values: np.ndarray) -> str:
    """Mean ± sample standard deviation over seeds; the mean alone of a single one."""
    if len(values) == 0:
        return "–"
    if len(values) == 1:
        return short(values[0])
    return f"{short(values.mean())} ± {short(values.std(ddof=1))}"


def interquartile(scores: np.ndarray, args: Args) -> str:
    """Interquartile mean over (seeds, tasks), and its 95 % interval over bootstrapped seeds."""
    if len(scores) < 2 or library is None:
        return "–"
    np.random.seed(args.seed)  # noqa: NPY002 - rliable draws from this one, whatever it is given
    points, intervals = library.get_interval_estimates(
        {"": scores}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=args.bootstrap
    )
    low, high = intervals[""][:, 0]
    return f"{short(points[''][0])} [{short(low)}, {short(high)}]"


def markdown(name: str, table: Table, runs: Sequence[Run], args: Args) -> str:
    """One table: ours as mean ± sd and as interquartile mean, and the paper's."""
    lines = [f"## {table.title} (`{name}`)", ""]
    lines.append(f"| task | | | {' | '.join(map(table.head, table.variants))} |")
    lines.append("|---|---|---" + "|---" * len(table.variants) + "|")
    seeds: set[int] = set()
    for env_id in table.tasks:
        chosen = [runs_of(runs, env_id, variant) for variant in table.variants]
        seeds |= {run.seed for of_variant in chosen for run in of_variant}
        limit = limit_of([run for of_variant in chosen for run in of_variant])
        task = env_id if limit is None else f"{env_id}, d = {limit:g}"
        for metric in table.metrics:
            cells = [values_of(of_variant, metric) for of_variant in chosen]
            if not any(len(values) for values in cells):
                continue
            # The paper has none of the methods that are ours alone: those on the right.
            papers = [cell or "–" for cell in table.paper.get((env_id, metric), ())]
            papers += ["–"] * (len(cells) - len(papers))
            kinds = [
                ("mean ± sd", [mean_and_std(values) for values in cells]),
                ("IQM [95 %]", [interquartile(values[:, None], args) for values in cells]),
                ("paper", papers),
            ]
            for kind, row in kinds:
                if kind == "mean ± sd" or set(row) - {"–"}:
                    lines.append(f"| {task} | {METRICS[metric]} | {kind} | {' | '.join(row)} |")
                    task = ""
    lines += over_tasks(table, runs, args)
    return "\n".join([*lines, "", f"Seeds: {', '.join(map(str, sorted(seeds)))}.", ""])


def over_tasks(table: Table, runs: Sequence[Run], args: Args) -> list[str]:
    """Rows over all tasks at once: return as a share of PPO-Lag's, cost as a share of the limit.

    Only over tasks and seeds that every variant of the table has finished.
    """
    lines = []
    for metric, title in (("return", "return / PPO-Lag's"), ("true_cost", "cost / d")):
        if metric not in table.metrics or len(table.tasks) < 2:
            continue
        shares: dict[str, list[np.ndarray]] = {variant: [] for variant in table.variants}
        for env_id in table.tasks:
            chosen = {v: runs_of(runs, env_id, v) for v in table.variants}
            sources = {VARIANTS[v].episodes for v in table.variants}
            oracle = values_of([r for v in sources for r in runs_of(runs, env_id, v)], metric)
            limit = limit_of(chosen[table.variants[-1]])
            unit = limit if metric == "true_cost" else float(oracle.mean()) if len(oracle) else None
            for variant, of_variant in chosen.items():
                if unit is not None and unit > 0:
                    shares[variant].append(values_of(of_variant, metric) / unit)
        lengths = {len(values) for of_tasks in shares.values() for values in of_tasks}
        if len(lengths) == 1 and len(shares[table.variants[0]]) == len(table.tasks):
            row = [interquartile(np.stack(of_tasks, axis=1), args) for of_tasks in shares.values()]
            lines.append(f"| all tasks | {title} | IQM [95 %] | {' | '.join(row)} |")
    return lines


def paper_oracle(env_id: str) -> tuple[float, float] | None:
    """Mean return and cost of the paper's PPO-Lag on the true cost, or None if it has no such."""
    for name in ("results", "driving"):
        cells = [TABLES[name].paper.get((env_id, metric)) for metric in (RETURN, COST)]
        if cells[0] and cells[1]:
            return float(cells[0][0].split()[0]), float(cells[1][0].split()[0])
    return None


def seconds_until(run: Run, target: tuple[float, float]) -> float | None:
    """Wall seconds until 200 episodes in a row return and cost as a target on average, or None."""
    recent: list[tuple[int, float, float]] = []
    for row in run.rows:
        if row["return"] is None or row["true_cost"] is None:
            continue
        recent.append((row["episodes"], row["return"], row["true_cost"]))
        while sum(count for count, *_ in recent[1:]) >= EPISODES_IN_A_ROW:
            recent.pop(0)
        counts, *values = np.transpose(recent)
        if counts.sum() >= EPISODES_IN_A_ROW:
            mean_return, mean_cost = (np.average(value, weights=counts) for value in values)
            if mean_return >= target[0] and mean_cost <= target[1]:
                return float(row["wall_seconds"])
    return None


def minutes_until_oracle(runs: Sequence[Run]) -> str:
    """A cell: mean minutes of the runs that reached the paper's oracle, and how many did."""
    known = [run.summary["oracle_seconds"] for run in runs if "oracle_seconds" in run.summary]
    known = [seconds for seconds in known if seconds is not None]
    if not known:
        return "–"
    reached = [seconds for seconds in known if math.isfinite(seconds)]
    minutes = f"{np.mean(reached) / 60:.1f}" if reached else "–"
    return f"{minutes} ({len(reached)} of {len(known)})"


def wall_time(runs: Sequence[Run]) -> str:
    """Minutes per stage, mean over seeds, and until the policy is as good as the paper's oracle."""
    stages = list(dict.fromkeys(s for run in runs for s in run.summary.get("stage_seconds", {})))
    lines = [
        "## Wall time, minutes",
        "",
        f"The last column is the time until {EPISODES_IN_A_ROW} training episodes in a row are as "
        "good as the paper's PPO-Lag on the true cost, in mean return and in mean cost: mean over "
        "the seeds that got there.",
        "",
        f"| task | method | {' | '.join([*stages, 'other', 'all'])} | the paper's oracle |",
    ]
    lines.append("|---|---" + "|---:" * (len(stages) + 3) + "|")
    for env_id, variant in dict.fromkeys((run.env_id, run.variant) for run in runs):
        chosen = runs_of(runs, env_id, variant)
        spent = [[run.summary.get("stage_seconds", {}).get(s) for run in chosen] for s in stages]
        whole = [run.summary["wall_seconds"] for run in chosen]
        in_stages = [sum(run.summary.get("stage_seconds", {}).values()) for run in chosen]
        spent += [[a - b for a, b in zip(whole, in_stages, strict=True)], whole]
        known = [[seconds for seconds in row if seconds is not None] for row in spent]
        cells = [f"{np.mean(row) / 60:.2f}" if row else "–" for row in known]
        cells.append(minutes_until_oracle(chosen))
        lines.append(f"| {env_id} | {VARIANTS[variant].title} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One row per run: every number of its summary, seconds per stage, and what made it."""
    rows = []
    for run in runs:
        stages = run.summary.get("stage_seconds", {})
        row = {"env_id": run.env_id, "variant": run.variant, "seed": run.seed}
        row |= {"true_limit": run.limit, **run.summary}
        row |= {key: run.made_by.get(key) for key in MADE_BY}
        row.pop("stage_seconds", None)
        rows.append(row | {f"{stage}_seconds": seconds for stage, seconds in stages.items()})
    keys = list(dict.fromkeys(key for row in rows for key in row))
    write_rows(path, keys, rows)


def write_curves(path: Path, runs: Sequence[Run]) -> None:
    """Up to 120 points of the curves of every run, evenly over its iterations, the last included.

    A point is an iteration, not a mean over several.
    """
    rows = []
    for run in runs:
        chosen = np.linspace(0, len(run.rows) - 1, min(CURVE_POINTS, len(run.rows))).round()
        who = {"env_id": run.env_id, "variant": run.variant, "seed": run.seed}
        rows += [who | {key: run.rows[i].get(key) for key in CURVE} for i in chosen.astype(int)]
    write_rows(path, [*CELL, *CURVE], rows)


def write_rows(path: Path, keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# -- Figures ---------------------------------------------------------------------------------------


def colors(table: Table) -> dict[str, str]:
    """The methods in the paper's colors, whatever else a table has in others."""
    rest = cycle(OTHERS)
    bases = {v: VARIANTS[v].without_limit or v for v in table.variants}
    return {v: COLORS.get(base) or next(rest) for v, base in bases.items()}


def at(steps: np.ndarray, run: Run, key: str) -> np.ndarray | None:
    """A curve of a run, linear between its points; None if it has none."""
    points = [(r["env_steps"], r[key]) for r in run.rows if r.get(key) is not None]
    return np.interp(steps, *np.array(points).T) if points else None


def curves(env_id: str, table: Table, runs: Sequence[Run]) -> Figure | None:
    """Return, true cost and learned cost over env steps: mean and standard deviation over seeds.

    Limits are dashed. Learned costs of RLSF have a separate axis, since their unit differs.
    """
    chosen = {variant: runs_of(runs, env_id, variant) for variant in table.variants}
    present = [run for of_variant in chosen.values() for run in of_variant]
    panels: list[tuple[str, str, list[Run]]] = [
        ("return", "return", present),
        ("true_cost", "true cost", present),
        ("learned_cost", "learned cost", [run for run in present if not run.counts_states]),
        ("learned_cost", "learned cost, RLSF", [run for run in present if run.counts_states]),
    ]
    panels = [p for p in panels if any(at(np.zeros(1), run, p[0]) is not None for run in p[2])]
    if not panels:
        return None
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(7, 0.6 + 2.2 * len(panels)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (key, title, shown) in zip(axes[:, 0], panels, strict=True):
        for variant, color in colors(table).items():
            lines = [run for run in chosen[variant] if run in shown and run.rows]
            if not lines:
                continue
            begin = max(run.rows[0]["env_steps"] for run in lines)
            steps = np.linspace(begin, min(run.rows[-1]["env_steps"] for run in lines), 200)
            known = [y for y in (at(steps, run, key) for run in lines) if y is not None]
            if not known:
                continue
            mean, std = np.mean(known, axis=0), np.std(known, axis=0, ddof=len(known) > 1)
            axis.plot(steps, mean, color=color, linewidth=1.5, label=table.head(variant))
            axis.fill_between(steps, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
        limits = {run.limit if key == "true_cost" else run.learned_limit for run in shown}
        for limit in limits - {None} if key != "return" else ():
            axis.axhline(limit, color="black", linestyle="--", linewidth=1)
        axis.set_ylabel(title)
        axis.grid(alpha=0.25)
    axes[0, 0].set_title(env_id)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    axes[-1, 0].set_xlabel("env steps")
    return figure


def distributions(env_id: str, table: Table, runs: Sequence[Run]) -> Figure | None:
    """Histograms of true and learned costs of the test episodes of all seeds.

    Learned costs are moved and scaled so that the learned limit lies on d and their spread is that
    of the true ones, as by the scaled W2. A solid line is the mean, the dashed one the limit.
    """
    panels: list[tuple[str, str, np.ndarray]] = []
    limit = limit_of([run for v in table.variants for run in runs_of(runs, env_id, v)])
    for variant, color in colors(table).items():
        scaled, true = list[np.ndarray](), list[np.ndarray]()
        for run in runs_of(runs, env_id, variant):
            if run.test_costs is None or limit is None or run.learned_limit is None:
                continue
            cost, learned = run.test_costs.T
            if cost.std() > 0 and learned.std() > 0:
                true.append(cost)
                scaled.append(limit + cost.std() / learned.std() * (learned - run.learned_limit))
        if not scaled:
            continue
        if not panels:
            panels.append(("true cost", "black", np.concatenate(true)))
        panels.append((f"{table.head(variant)}, learned", color, np.concatenate(scaled)))
    if not panels:
        return None
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7, 0.6 + 1.5 * len(panels)), sharex=True, layout="constrained"
    )
    low = min(costs.min() for _, _, costs in panels)
    high = max(costs.max() for _, _, costs in panels)
    bins = np.linspace(low, high, 80)
    for axis, (title, color, costs) in zip(axes, panels, strict=True):
        axis.hist(costs, bins, density=True, color=color, alpha=0.4)
        axis.axvline(costs.mean(), color=color, linewidth=1.5)
        axis.axvline(limit, color="black", linestyle="--", linewidth=1)
        axis.set_title(f"{title}: mean {short(costs.mean())}", fontsize="small", loc="left")
        axis.set_ylim(bottom=0)
        axis.set_yticks([])
    axes[0].set_title(env_id, loc="right", fontsize="medium")
    axes[-1].set_xlabel(f"episode cost (learned ones scaled to it); dashed: limit {limit:g}")
    return figure


def judged(env_id: str, variant: str, runs: Sequence[Run]) -> tuple[Figure | None, Figure | None]:
    """Calibration and tail of the learned costs of the test episodes, all seeds together."""
    from pbcrl_script_utils.plots import calibration, tail

    true, learned, scaled = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    limit = limit_of(runs)
    for run in runs_of(runs, env_id, variant):
        if run.test_costs is None or run.learned_limit is None or run.counts_states:
            continue
        if limit is not None:
            cost, score = run.test_costs.T
            true.append(cost)
            learned.append(score - run.learned_limit)
            scaled.append(learned[-1] * cost.std() / (score.std() or 1.0))
    if not true or limit is None:
        return None, None
    costs, title = np.concatenate(true), f"{env_id}, {VARIANTS[variant].title}"
    return (
        calibration(costs, np.concatenate(learned), limit, 0.0, title),
        tail(costs, np.concatenate(scaled), limit, 0.0, title),
    )


def pictures(run: Run, out: Path) -> str:
    """What `evaluate.py --plots` has drawn of a run, copied; the Markdown that shows it."""
    shown = []
    for name in ("steps", "plane"):
        path = None if run.folder is None else run.folder / "plots" / f"{name}.png"
        if path is not None and path.exists():
            copy = f"{run.env_id.replace('/', '-')}__{run.variant}__{run.seed}__{name}"
            shutil.copy(path, out / f"{copy}.png")
            shown.append(f"![{copy}]({copy}.png)\n")
    return "\n".join(shown)


def bars(table: Table, runs: Sequence[Run]) -> Figure | None:
    """Every metric by task, learned costs aside: the mean over seeds, and each seed as a dot."""
    tasks = [t for t in table.tasks if any(runs_of(runs, t, v) for v in table.variants)]
    shown = [v for v in table.variants if any(runs_of(runs, t, v) for t in tasks)]
    rows = [
        metric
        for metric in table.metrics
        if metric != "learned_cost"  # of several units, see `curves`
        if any(len(values_of(runs_of(runs, t, v), metric)) for t in tasks for v in shown)
    ]
    if not rows:
        return None
    color_of = colors(table)
    figure, axes = plt.subplots(
        len(rows),
        len(tasks),
        figsize=(1.2 + 2.6 * len(tasks), 1.2 + 2.0 * len(rows)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for (row, metric), (column, env_id) in (
        (row, column) for row in enumerate(rows) for column in enumerate(tasks)
    ):
        axis = axes[row, column]
        for number, variant in enumerate(shown):
            values = values_of(runs_of(runs, env_id, variant), metric)
            if len(values):
                axis.bar(number, values.mean(), color=color_of[variant], alpha=0.6)
                axis.plot([number] * len(values), values, "k.", markersize=4)
        limit = limit_of([run for v in shown for run in runs_of(runs, env_id, v)])
        if metric.startswith("true_cost") and limit is not None:
            axis.axhline(limit, color="black", linestyle="--", linewidth=1)
        heads = [table.head(variant) for variant in shown]
        axis.set_xticks(range(len(heads)), heads, rotation=40, ha="right", fontsize="x-small")
        axis.grid(axis="y", alpha=0.25)
        if row == 0:
            axis.set_title(env_id, fontsize="small")
        if column == 0:
            axis.set_ylabel(METRICS[metric])
    return figure


def save(figure: Figure | None, out: Path, name: str, earlier: str | None) -> str:
    """Write a figure as PNG and SVG; return the Markdown that shows it.

    One that cannot be drawn, as the folders of its runs are gone, is the earlier report's.
    """
    if figure is None:
        path = None if earlier is None else Path(earlier) / f"{name}.png"
        if path is None or not path.exists():
            return ""
        if path.parent.resolve() != out.resolve():
            shutil.copy(path, out)
        return f"![{name}]({name}.png)\n"
    for suffix in ("png", "svg"):
        figure.savefig(out / f"{name}.{suffix}", dpi=130)
    plt.close(figure)
    return f"![{name}]({name}.png)\n"


# -- The report ------------------------------------------------------------------------------------


def table_of_others(runs: Sequence[Run]) -> Table:
    """A table of runs that no table of the paper has."""
    tasks = tuple(dict.fromkeys(run.env_id for run in runs))
    variants = tuple(v for v in VARIANTS if any(run.variant == v for run in runs))
    return Table("Other runs", tasks, variants, (RETURN, COST, LEARNED, ACCURACY))


def main(args: Args) -> None:
    root, out = Path(args.runs_dir), Path(args.out)
    if args.bootstrap < 1 or args.seed < 0:
        raise SystemExit(
            f"error: --bootstrap must be at least 1 and --seed at least 0, got {args.bootstrap} "
            f"and {args.seed}"
        )
    runs_in = {name: load(root / name) for name in ("", "smoke")}
    if args.earlier is not None:
        present = {(run.env_id, run.variant, run.seed) for run in runs_in[""]}
        runs_in[""] += [
            run
            for run in load_report(Path(args.earlier))
            if (run.env_id, run.variant, run.seed) not in present
        ]
        runs_in[""].sort(key=lambda run: (run.env_id, run.variant, run.seed))
    wanted = {
        name: {(t, made_as(t, v)) for t in table.tasks for v in table.variants}
        for name, table in TABLES.items()
    }
    others = [r for r in runs_in[""] if (r.env_id, r.variant) not in set().union(*wanted.values())]
    tables = TABLES | {"other": table_of_others(others)}
    wanted["other"] = {(run.env_id, run.variant) for run in others}
    for name in args.tables:
        if name not in tables:
            raise SystemExit(f"error: --tables must be of {', '.join(tables)}, got {name!r}")
    if library is None:
        warn(
            "no interquartile means, as rliable is not installed; pip install 'pbcrl[benchmark]', "
            "with Python 3.11 or later"
        )
    # Those of the smoke preset are short ones of the same names.
    parts, reported, smoke = ["# Report", NOTES], list[Run](), list[Run]()
    # The variants whose figures there are, by task and whether it is the smoke preset's.
    drawn: dict[tuple[str, bool], list[set[str]]] = {}
    for name, table in tables.items():
        found = runs_in["smoke" if name == "smoke" else ""]
        runs = [run for run in found if (run.env_id, run.variant) in wanted[name]]
        if (args.tables and name not in args.tables) or not runs:
            continue
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"error: --out must be a folder to write to ({error})") from error
        kept = smoke if name == "smoke" else reported
        kept += [run for run in runs if run not in kept]
        parts.append(markdown(name, table, found, args))
        parts.append(save(bars(table, runs), out, f"{name}__bars", args.earlier))
        for env_id in dict.fromkeys(run.env_id for run in runs):
            shown = {run.variant for run in runs if run.env_id == env_id}
            if any(shown <= others for others in drawn.setdefault((env_id, name == "smoke"), [])):
                continue  # a table before has drawn them all
            drawn[env_id, name == "smoke"].append(shown)
            prefix = f"{name}__{env_id.replace('/', '-')}"
            for figure, kind in (
                (curves(env_id, table, runs), "curves"),
                (distributions(env_id, table, runs), "costs"),
            ):
                parts.append(save(figure, out, f"{prefix}__{kind}", args.earlier))
            for variant in table.variants:
                of_variant = runs_of(runs, env_id, made_as(env_id, variant))
                figures = judged(env_id, variant, of_variant)
                for one, kind in zip(figures, ("calibration", "tail"), strict=True):
                    parts.append(save(one, out, f"{prefix}__{variant}__{kind}", args.earlier))
                parts += [pictures(run, out) for run in of_variant[:1]]
    reported = reported or smoke
    if not reported:
        raise SystemExit(
            f"error: {root} has no finished run to report on; run benchmark.py first, or name "
            "its folder by --runs-dir"
        )
    parts.append(wall_time(reported))
    write_csv(out / "runs.csv", reported)
    write_curves(out / "curves.csv", reported)
    text = "\n".join(part for part in parts if part)
    (out / "report.md").write_text(text, encoding="utf-8")
    print(f"{len(reported)} runs reported in {out / 'report.md'} and {out / 'runs.csv'}")


if __name__ == "__main__":
    main(tyro.cli(Args, prog="pbcrl report"))
