"""Writes the tables of results into README.md and docs, from the CSV files of the runs.

    python docs/make_tables.py            # after rows of docs/results/runs.csv have changed
    python docs/make_tables.py --check    # only compares, as a test does

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. Every number is a mean
over seeds with its 95 % interval, by Student's t with n - 1 degrees of freedom; of one seed there
is none. The cost in the last fifth of training is a mean over episodes: those of the iterations in
curves.csv, some hundred per run, after 80 % of the env steps. Where a run of a cell has no curves,
the cell shows the last tenth, which runs.csv has of every run, and says so.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from pbcrl_script_utils.certificate import unsafe_bound

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / page for page in ("README.md", "docs/results.md", "docs/notebook/results-in-full.md")
)

TASKS = {
    "SafetyPointGoal1-v0": "pbcrl_accept",
    "SafetyPointPush1-v0": "pbcrl_accept",
    "SafetyPointButton1-v0": "pbcrl_accept",
    "SafetyHalfCheetahVelocity-v1": "pbcrl_accept",
    "SafetyWalker2dVelocity-v1": "pbcrl_accept",
    "SafetyHumanoidVelocity-v1": "pbcrl_accept",
    "DrivingLaneChange-v0": "pbcrl_rate",
    "DrivingBlockedRoad-v0": "pbcrl_rate",
}
"""Each task, and the variant that its recipe trains."""

METHODS = {
    "ppo_lag": "PPO-Lag, told the true cost",
    "pbcrl_accept": "PbCRL, λ by fresh labels",
    "pbcrl_rate": "PbCRL, λ by fresh labels",
    "pbcrl": "PbCRL, `learned` (the paper's)",
    "ppo_bt": "PPO-BT",
    "rlsf": "RLSF (ours)",
    "pbcrl_constant": "PbCRL, λ = 5",
}

ABLATIONS = {
    ("SafetyPointGoal1-v0", "dead_zone_0"): "δ = 0",
    ("SafetyPointGoal1-v0", "dead_zone_0.1"): "δ = 0.1",
    ("SafetyPointGoal1-v0", "pbcrl"): "δ = 1, PbCRL, `learned`",
    ("SafetyPointGoal1-v0", "dead_zone_2"): "δ = 2",
    ("SafetyPointGoal1-v0", "pbcrl_offline"): "δ = 1, all queries offline",
    ("DrivingBlockedRoad-v0", "pbcrl"): "PbCRL, `learned`, no label flipped",
    ("DrivingBlockedRoad-v0", "pbcrl_noise_5"): "PbCRL, 5 % of the preferences flipped",
    ("DrivingBlockedRoad-v0", "pbcrl_noise_10"): "PbCRL, 10 %",
    ("DrivingBlockedRoad-v0", "pbcrl_noise_30"): "PbCRL, 30 %",
    ("DrivingBlockedRoad-v0", "ppo_bt"): "PPO-BT, no label flipped",
    ("DrivingBlockedRoad-v0", "ppo_bt_noise_5"): "PPO-BT, 5 %",
    ("DrivingBlockedRoad-v0", "ppo_bt_noise_10"): "PPO-BT, 10 %",
    ("DrivingBlockedRoad-v0", "ppo_bt_noise_30"): "PPO-BT, 30 %",
}
"""Changes of the paper's method, as its tables have them."""

TREES = {
    "ppo_lag": "PPO-Lag, told the true cost",
    "trees_labels": "trees, λ by fresh labels, 20,000 queries",
    "trees_labels_500": "trees, λ by fresh labels, 350 + 150 queries",
    "trees_labels_online_500": "trees, λ by fresh labels, 500 queries, all online",
    "trees_learned": "trees, `learned`, 20,000 queries",
    "trees_learned_500": "trees, `learned`, 350 + 150 queries",
    "trees_learned_online_500": "trees, `learned`, 500 queries, all online",
    "net_labels_500": "network, λ by fresh labels, 350 + 150 queries",
    "net_learned_500": "network, `learned`, 350 + 150 queries",
}
"""Of the table of trees: trees.csv, of seeds that no setting was chosen on."""

SINCE_SLOW = "b33f78a", "458af02", "9e0876f", "3fcb557", "4d9a0fb"
"""Commits by which λ moves slowly above 1, and the share of unsafe episodes has two counts."""

SINCE_REST = "bd231d3", "15f211e", "334a503", "f07999b", "b61c450", "437b046", *SINCE_SLOW
"""Commits by which λ rests first by `learned`, too."""

SINCE_MANY = "e74e046", "6eb9f64", "7f77038", "be6cd60", "afbabed", "a5df709", *SINCE_REST
"""Commits by which trees learn from more than 500 pairs as they do today."""

TODAY = "25e359d", "a5da304", "201412d", "9aa9086", "b739406", "6b013db", "c9c8067", *SINCE_MANY
"""Commits of the short table, by which trees learn from fewer as they do today.

PPO-Lag is older: of each of its seeds the newest run counts.
"""

MARKED = (
    "580c3fc",
    "b739406",
    "7caa6b1",
    "d41d6e9",
    "4e496e5",
    "eecc28c",
    "2d4c962",
    "be6cd60",
    "b0c4313",
    "0108e57",
    "108104d",
)
"""Likewise, of the table of marks: all pairs are about the policy's own episodes."""

SINCE_MOVED = "2e68f11", "d68d1eb"
"""Later ones: marks are moved to where other episodes say that it costs, and shared."""

SINCE_MEAN = "2fe1c63", "bd231d3"
"""Later ones: by `rate`, too, the mean learned cost must be within the learned limit."""

SINCE_LATE = (
    *(("abd7c18", "da69b1d"), ("aeaa216", "83062d5"), ("d7228bc",), ("8e6bbe0", "f07999b")),
    *(("437b046",), ("b33f78a",), ("9e0876f",), ("3fcb557", "4d9a0fb")),
)
"""Later ones, by which a person who errs is late as well, which trees find out; rule by rule.

Since the second every second query is a grid. Since the third λ begins at 0.1, and beside what a
grid found comes a fresh episode. Since the fourth a policy that keeps λ at its cap starts afresh.
Since the fifth λ rests at 1, and where labels do not nearly all say unsafe the cap takes longer.
Since the sixth λ moves slowly above 1, since the seventh the model's word on the mean a fifth as
fast. Since the last λ falls at least half as fast as P asks.
Rows of 80fb95e and ac4ef66 are by a rule that was dropped. Those of ffd33a3 have half of the third,
and by 334a503 what a fresh start left behind was a rival of safe policies.
"""

GATE = {"step_auroc": 2, "balanced_accuracy": 2, "true_cost_at_limit": 1}
"""Columns of gate.csv that are tables, and their digits."""

SOURCES = {"reward": "PPO, reward alone", "lag": "PPO-Lag"}
"""Whose episodes the gate has, by its name for them."""

PERSON = {
    **dict.fromkeys(("0", "False"), "is exact"),
    **dict.fromkeys(("1", "True"), "errs"),
    "ten steps": "errs, marks off by ten steps",
    "late": "errs, and is late",
}
"""How a simulated person answers, by the column `errors`."""

PROVING = {
    "ppo": "PPO, no limit",
    "ppo_lag": "PPO-Lag, told the true cost",
    "pbcrl": "PbCRL, 20,000 queries",
    "pbcrl_500": "PbCRL, 500 queries",
    "pbcrl_person": "PbCRL, 150 queries, 1 answer in 20 wrong",
    "learned": "`learned`, 20,000 queries",
    "learned_500": "`learned`, 500 queries",
    "learned_offline": "`learned`, 18,000 + 2,000 queries",
}
"""Of the table of the proving ground: proving.csv."""

PROVING_SUMMARY = "ppo", "ppo_lag", "pbcrl_person", "pbcrl_500", "pbcrl"
"""Methods of the short table."""

PRICES = "0.03", "0.1", "0.3", "1", "3", "10"
"""Constant λ of the proving ground's profile."""

PROVING_COLUMNS = (
    "task, limit",
    "scripted policies, safe and reckless: return, cost",
    "method",
    "seeds",
    "stochastic policy: return",
    "of the safe script's",
    "true cost",
    "last fifth of training: true cost",
)

COLUMNS = (
    "task, limit",
    "method",
    "seeds",
    "stochastic policy: return",
    "true cost",
    "last fifth of training: true cost",
    "deterministic policy: true cost",
    "return",
)
"""Of each table but the README's."""

SUMMARY_COLUMNS = (
    "task, limit",
    "seeds",
    "PPO-Lag, told the true cost: return",
    "true cost",
    "PbCRL, λ by fresh labels: return",
    "true cost",
    "in the last fifth of training",
    "deterministic policy",
)
"""Of the README's: one row per task; the last two are true costs of PbCRL, too."""


MINUTES = "10", "30"
"""Of the short table of a person's minutes."""

OTHERS = "reward_57"
"""Whose episodes more kinds of questions were asked about, by its name for them."""
QUESTIONS = {
    "pairs": "pairs",
    "episodes, marked": "marks",
    "pairs, marked": "marked_pairs",
    "episodes, marks tenfold": "marks_tenfold",
    "pairs, marks tenfold": "marked_pairs_tenfold",
    "grids": "grids",
    "half pairs, half grids": "pairs_and_grids",
    "grids, the least certain clips": "grids_uncertain",
    "grids, the most costly clips": "grids_suspect",
    "grids, blame by EM": "grids_em",
    "single clips": "clips",
}
"""Kinds of `bench_minutes.py`, by their titles; "tenfold" are those of 4128b8a."""
ASKED = {
    "step AUROC": "step_auroc",
    "AUROC of episodes": "auroc",
    "balanced accuracy": "balanced_accuracy",
}
"""What the table of these has."""

Key = tuple[str, str, str]
"""Env id, variant, and seed or commit of a run."""


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in docs/results."""
    with (ROOT / "docs" / "results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def interval(values: Sequence[float], digits: int) -> str:
    """Mean ± half of its 95 % interval over seeds; the mean alone of a single one.

    `[1, 2, 3]` is 2 ± 2.5: the quantile of t with 2 degrees of freedom, 4.30, times 1 / √3.
    """
    mean = f"{round(float(np.mean(values)), digits) + 0.0:,.{digits}f}"  # + 0.0: no -0.00
    if len(values) < 2:
        return mean
    half = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{mean} ± {half:,.{digits}f}"


def last_fifth(points: Sequence[dict[str, str]]) -> float:
    """Mean true cost of the training episodes after 80 % of the env steps of a run."""
    total = max(int(point["env_steps"]) for point in points)
    late = [p for p in points if int(p["env_steps"]) > 0.8 * total and p["true_cost"]]
    costs = [float(point["true_cost"]) for point in late]
    return float(np.average(costs, weights=[int(point["episodes"]) for point in late]))


def cells(
    task: str, method: str, runs: Sequence[dict[str, str]], curves: dict[Key, list[dict[str, str]]]
) -> list[str]:
    """One row of a table: the runs of a method on a task."""
    limit = float(runs[0]["true_limit"])
    of_cost = 3 if limit < 1 else 1
    of_return = 0 if abs(float(runs[0]["return"])) >= 1000 else 1
    keys = [(run["env_id"], run["variant"], run["seed"]) for run in runs]
    if all(run.get("true_cost_last_fifth") for run in runs):
        late = interval(column(runs, "true_cost_last_fifth"), of_cost)
    elif all(key in curves for key in keys):
        late = interval([last_fifth(curves[key]) for key in keys], of_cost)
    else:
        late = f"{interval(column(runs, 'true_cost_last_tenth'), of_cost)} (last tenth)"
    return [
        f"{task.rpartition('-')[0]}, {limit:g}",
        method,
        f"{len(runs)}",
        interval(column(runs, "return_stochastic"), of_return),
        interval(column(runs, "true_cost_stochastic"), of_cost),
        late,
        interval(column(runs, "true_cost"), of_cost),
        interval(column(runs, "return"), of_return),
    ]


def column(runs: Sequence[dict[str, str]], key: str) -> list[float]:
    """Return a number of each run."""
    return [float(run[key]) for run in runs]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, whose first row is its head; no line ends within an interval."""
    lines = [
        f"| {' | '.join(row)} |".replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
        for row in rows
    ]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def tables() -> dict[str, str]:
    """Return the tables by name, in Markdown."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in read("runs.csv"):
        runs.setdefault((run["env_id"], run["variant"]), []).append(run)
    curves: dict[Key, list[dict[str, str]]] = {}
    for point in read("curves.csv"):
        key = point["env_id"], point["variant"], point["seed"]
        curves.setdefault(key, []).append(point)

    def row(task: str, variant: str, method: str) -> list[str]:
        return cells(task, method, runs[task, variant], curves)

    made = {name: [list(COLUMNS)] for name in ("methods", "constant", "ablations")}
    made["results"] = [list(SUMMARY_COLUMNS)]
    for task, default in TASKS.items():
        found = {v: row(task, v, METHODS[v]) for v in METHODS if (task, v) in runs}
        made["methods"] += found.values()
        name, _, seeds, *told = found["ppo_lag"]
        _, _, our_seeds, *ours = found[default]
        assert seeds == our_seeds, f"{name}: the README has one column of seeds for both methods"
        made["results"].append([name, seeds, *told[:2], *ours[:4]])
        if task.startswith("Driving"):
            prices = {
                float(variant.removeprefix("pbcrl_constant_")): variant
                for env_id, variant in runs
                if env_id == task and variant.startswith("pbcrl_constant_")
            }
            made["constant"] += [row(task, prices[p], f"λ = {p:g}") for p in sorted(prices)]
            made["constant"].append(row(task, "pbcrl_constant", "λ = 5, whole episodes"))
            made["constant"].append(found[default])
    for (task, variant), method in ABLATIONS.items():
        made["ablations"].append(row(task, variant, method))
    made |= trees() | gate() | minutes() | ways_to_ask() | marks() | proving()
    return {name: markdown(rows) for name, rows in made.items()}


def trees() -> dict[str, list[list[str]]]:
    """Return the tables of policies under trees: each commit's runs, and those by today's code."""
    made = {
        "trees": [[*COLUMNS[:2], "commit", *COLUMNS[2:]]],
        "trees_short": [[*COLUMNS[:5], "unsafe episodes", COLUMNS[5]]],
    }
    fresh: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in read("trees.csv"):
        fresh.setdefault((run["env_id"], run["variant"]), []).append(run)
    for task in TASKS:
        of_task = [run for (env_id, _), runs in fresh.items() if env_id == task for run in runs]
        seeds = {run["seed"] for run in of_task if run["commit"] in TODAY}
        for variant, method in TREES.items():
            runs = fresh.get((task, variant), [])
            for commit in dict.fromkeys(run["commit"] for run in runs):
                row = cells(task, method, [run for run in runs if run["commit"] == commit], {})
                made["trees"].append([*row[:2], commit, *row[2:]])
            newest = {run["seed"]: run for run in runs if run["seed"] in seeds}  # the file's last
            if variant != "ppo_lag":
                newest = {s: run for s, run in newest.items() if run["commit"] in TODAY}
            rows = list(newest.values())
            if variant == "trees_labels":
                rows = [run for run in rows if run["commit"] in SINCE_MANY]
            if variant.startswith("trees_learned"):
                rows = [run for run in rows if run["commit"] in SINCE_REST]
            if rows:
                row = cells(task, method, rows, {})
                unsafe = interval([100 * r for r in column(rows, "violation_rate_stochastic")], 1)
                made["trees_short"].append([*row[:5], f"{unsafe} %", row[5]])
    return made


def gate() -> dict[str, list[list[str]]]:
    """Return the tables of what cost models learn from how many pairs, by `bench_gate.py`."""
    found: dict[tuple[str, ...], dict[int, list[dict[str, str]]]] = {}
    for row in read("gate.csv"):
        key = row["env"], row["source"], row["kind"], row["model"]
        found.setdefault(key, {}).setdefault(int(row["pairs"]), []).append(row)
    sizes = sorted({size for by_size in found.values() for size in by_size})
    head = "task, limit", "episodes of", "pairs of", "model", *(f"{n:,} pairs" for n in sizes)
    made = {name: [list(head)] for name in GATE}
    columns = [("trees", 150), ("trees", 500), ("net", 500)]
    made["gate"] = [["task", *(f"{model}, {n} pairs" for model, n in columns)]]
    for env_id in sorted({key[0] for key in found}):
        by_model = {m: found.get((env_id, "reward", "episodes", m), {}) for m in ("trees", "net")}
        values = [[float(r["step_auroc"]) for r in by_model[m].get(n, [])] for m, n in columns]
        shown = [interval(one, 2) if one else "" for one in values]
        made["gate"].append([env_id.rpartition("-")[0], *shown])
    for (env_id, source, kind, model), by_size in sorted(found.items()):
        limit = float(next(iter(by_size.values()))[0]["cost_limit"])
        about = f"{env_id.rpartition('-')[0]}, {limit:g}", SOURCES[source], kind, model
        for name, digits in GATE.items():
            values = {
                n: [float(row[name]) for row in rows if row[name]] for n, rows in by_size.items()
            }
            shown = [interval(values[n], digits) if values.get(n) else "" for n in sizes]
            made[name].append([*about, *shown])
    return made


def person(row: dict[str, str]) -> str:
    """Return how the simulated person of a row answers, a key of `PERSON`."""
    by_late = any(row["commit"] in commits for commits in SINCE_LATE)
    return "late" if by_late and PERSON[row["errors"]] == "errs" else row["errors"]


def minutes() -> dict[str, list[list[str]]]:
    """Return the tables of what a person's minutes buy, by `bench_minutes.py`: steps, episodes."""
    found: dict[tuple[str, ...], dict[int, list[dict[str, str]]]] = {}
    for row in read("minutes.csv"):
        if row["source"] == OTHERS:
            continue
        key = row["env"], row["source"], row["kind"], person(row)
        found.setdefault(key, {}).setdefault(int(row["minutes"]), []).append(row)
    sizes = sorted({size for by_size in found.values() for size in by_size})
    head = "task, limit", "episodes of", "questions", "the person", *(f"{n} minutes" for n in sizes)
    kinds = "pairs", "grids", "marks"
    columns = [(kind, size) for kind in kinds for size in MINUTES]
    short = [["task", "the person", *(f"{kind}, {size} minutes" for kind, size in columns)]]
    for env_id, source, errors in sorted({(e, s, x) for e, s, _, x in found}):
        if source != "reward":
            continue
        cells = []
        for kind, size in columns:
            rows = found.get((env_id, source, kind, errors), {}).get(int(size), [])
            values = [float(row["step_auroc"]) for row in rows if row["step_auroc"]]
            cells.append(f"{np.mean(values):.2f}" if values else "")
        short.append([env_id.rpartition("-")[0], PERSON[errors], *cells])
    measures = {
        "minutes_steps": "step_auroc",
        "minutes_episodes": "auroc",
        "minutes_accuracy": "balanced_accuracy",
    }
    made = {name: [list(head)] for name in measures} | {"minutes": short}
    for (env_id, source, kind, errors), by_size in sorted(found.items()):
        limit = float(next(iter(by_size.values()))[0]["cost_limit"])
        about = f"{env_id.rpartition('-')[0]}, {limit:g}", SOURCES[source], kind, PERSON[errors]
        for name, measure in measures.items():
            values = {n: [float(r[measure]) for r in by_size[n] if r[measure]] for n in by_size}
            shown = [interval(values[n], 2) if values.get(n) else "" for n in sizes]
            if any(shown):
                made[name].append([*about, *shown])
    return made


def ways_to_ask() -> dict[str, list[list[str]]]:
    """Return the table of more kinds of questions, at equal minutes, by `bench_minutes.py`."""
    made = [["task", "questions", *ASKED]]
    every = [row for row in read("minutes.csv") if row["source"] == OTHERS]
    for env_id in dict.fromkeys(row["env"] for row in every):
        for title, kind in QUESTIONS.items():
            rows = [row for row in every if row["env"] == env_id and row["kind"] == kind]
            measured = ([float(r[name]) for r in rows if r[name]] for name in ASKED.values())
            shown = [interval(values, 3) if values else "" for values in measured]
            made.append([env_id.rpartition("-")[0], title, *shown])
    return {"minutes_asked": made}


def marks() -> dict[str, list[list[str]]]:
    """Return the tables of policies by a person who marks, by `bench_marks.py`."""
    first, *others = SINCE_LATE
    newest_first = [*reversed(others), (*SINCE_MEAN, *first)]
    head, *rows = marks_of(newest_first[0])
    for later, commits in pairwise(newest_first):
        rows += marks_of(commits, f", before {later[0]}")[1:]
    rows.sort(key=lambda row: row[0])
    before = marks_of(MARKED) + marks_of(SINCE_MOVED, f", since {SINCE_MOVED[0]}")[1:]
    return {"marks": [head, *rows], "marks_before": before}


def marks_of(commits: Sequence[str], age: str = "") -> list[list[str]]:
    """Return the table of the runs by these commits that asked for marked pairs."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in read("marks.csv"):
        if row["commit"] in commits and row["asked"] == "marked_pairs":
            about = row["env"], row["cost_limit"], row["minutes"], person(row)
            found.setdefault((*about, row["max_unsafe_rate"]), []).append(row)
    head = "task, limit", "minutes", "the person", "unsafe, at most", "seeds"
    last = "last fifth of training: true cost", "certified"
    made = [[*head, "stochastic policy: return", "true cost", "unsafe episodes", *last]]
    for (env_id, limit, size, errors, rate), rows in sorted(found.items()):
        judged = [
            (int(row["certificate_unsafe"]), int(row["certificate_episodes"]))
            for row in rows
            if row["certificate_episodes"]
        ]
        certified = sum(unsafe_bound(*one) <= float(rate) for one in judged)
        measured = (
            ("return_stochastic", 1),
            ("true_cost_stochastic", 3),
            ("violation_rate_stochastic", 3),
            ("true_cost_last_fifth", 3),
        )
        made.append(
            [
                *(f"{env_id.rpartition('-')[0]}, {float(limit):g}", size, PERSON[errors] + age),
                *(rate or "by `learned`", f"{len(rows)}"),
                *(interval(column(rows, name), digits) for name, digits in measured),
                f"{certified} of {len(judged)}" if judged else "",
            ]
        )
    return made


def proving() -> dict[str, list[list[str]]]:
    """Return the tables of the proving ground, by `bench_proving.py`: development and sealed."""
    # Of a seed that ran under several commits the newest counts, the last of the file.
    newest = {(row["task"], row["method"], row["seed"]): row for row in read("proving.csv")}
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for (task, method, _), row in newest.items():
        found.setdefault((task, method), []).append(row)
    made = {name: [list(PROVING_COLUMNS)] for name in ("development", "sealed")}
    order = [(task, method) for task in sorted({task for task, _ in found}) for method in PROVING]
    for task, method in order:
        if (task, method) not in found:
            continue
        rows = found[task, method]
        one = rows[0]
        limit = float(one["limit"])
        of_cost = 3 if limit < 1 else 1
        of_return = 0 if abs(float(one["safe_return"])) >= 1000 else 1
        numbers = [
            (float(one[f"{who}_return"]), float(one[f"{who}_cost"])) for who in ("safe", "reckless")
        ]
        scripted = ", ".join(f"{r:,.{of_return}f} / {c:.{of_cost}f}" for r, c in numbers)
        made["sealed" if one["sealed"] == "True" else "development"].append(
            [
                *(f"{task}, {limit:g}", scripted, PROVING[method], f"{len(rows)}"),
                interval(column(rows, "return_stochastic"), of_return),
                relative(column(rows, "return_stochastic"), float(one["safe_return"])),
                interval(column(rows, "true_cost_stochastic"), of_cost),
                interval(column(rows, "true_cost_last_fifth"), of_cost),
            ]
        )
    head = "task, limit", "safe script: return", *(PROVING[method] for method in PROVING_SUMMARY)
    made["proving"] = [list(head)]
    for task in sorted(
        {task for task, _ in found}, key=lambda t: (found[t, "ppo_lag"][0]["sealed"], t)
    ):
        one = found[task, "ppo_lag"][0]
        limit, safe = float(one["limit"]), float(one["safe_return"])
        star = "*" if one["sealed"] == "True" else ""
        row = [f"{task}{star}, {limit:g}", f"{safe:,.{0 if abs(safe) >= 1000 else 1}f}"]
        made["proving"].append(
            [*row, *(kept(found.get((task, m), []), limit, safe) for m in PROVING_SUMMARY)]
        )
    made["profile"] = [["task, limit", "λ that adapts", *(f"λ = {price}" for price in PRICES)]]
    for task in sorted({task for task, _ in found}):
        methods = "ppo_lag", *(f"constant_{price}" for price in PRICES)
        if any((task, method) in found for method in methods[1:]):
            limit = float(found[task, "ppo_lag"][0]["limit"])
            shown = [outcome(found.get((task, method), []), limit) for method in methods]
            made["profile"].append([f"{task}, {limit:g}", *shown])
    return made


def outcome(rows: list[dict[str, str]], limit: float) -> str:
    """Mean return and true cost, in bold where the cost is within the limit; empty without rows."""
    if not rows:
        return ""
    of_return = 0 if abs(float(rows[0]["safe_return"])) >= 1000 else 1
    names = "return_stochastic", "true_cost_stochastic"
    gain, cost = (sum(column(rows, name)) / len(rows) for name in names)
    text = f"{gain:,.{of_return}f} / {cost:.{3 if limit < 1 else 1}f}"
    return f"**{text}**" if cost <= limit else text


def kept(rows: list[dict[str, str]], limit: float, safe_return: float) -> str:
    """Share of the safe script's return, and the mean true cost, bold within the limit."""
    if not rows:
        return ""
    gain = relative(column(rows, "return_stochastic"), safe_return)
    costs = column(rows, "true_cost_stochastic")
    cost = interval(costs, 3 if limit < 1 else 1)
    shown = f"**{cost}**" if sum(costs) / len(costs) <= limit else cost
    return f"{gain}, {shown}" + (f" ({len(rows)})" if len(rows) != 5 else "")


def relative(returns: list[float], of: float) -> str:
    """The mean in per cent of a return; of negative ones the inverse, so that more is better."""
    mean = sum(returns) / len(returns)
    return f"{100 * (mean / of if of > 0 else of / mean):.0f} %"


def with_tables(text: str) -> str:
    """Return a page with its tables as they are now."""
    made = tables()
    return re.sub(
        r"(<!-- table (\w+) -->).*?(<!-- end of table -->)",
        lambda found: f"{found[1]}\n\n{made[found[2]]}\n\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Write the tables, or say which page has others."""
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = with_tables(old)
        if new == old:
            continue
        if "--check" in sys.argv:
            raise SystemExit(f"error: {page} has other tables; run python docs/make_tables.py")
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
