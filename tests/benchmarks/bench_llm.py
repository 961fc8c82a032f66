"""The token tasks, several seeds: PPO-Lag on the true cost, and under costs learned from labels.

`make tokens` prints a table per task: the true cost where the learned mean meets its limit, and the
true cost and reward of the trained policies. `bt` is learned by Safe RLHF's loss, `pbcrl` with a
dead zone of 1, `adapted` moves it on labels of fresh responses, and in `labels` the multiplier
follows such labels. Any row can be repeated by a call of the script.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[2] / "cleanrl_scripts"))

import ppo_lag_llm

from pbcrl_envs.tokens import TokenTask

METHODS: dict[str, dict[str, Any]] = {
    "oracle": {"cost": "true"},
    "bt": {"dead_zone": 0.0, "snr_weight": 0.0, "safety_weight": 2.0},
    "pbcrl": {},
    "adapted": {"online_queries": 480},
    "labels": {"constraint": "accept"},
}


@dataclass(frozen=True)
class Args:
    tasks: tuple[Literal["after", "announced"], ...] = ("after", "announced")
    """token tasks"""
    methods: tuple[Literal["oracle", "bt", "pbcrl", "adapted", "labels"], ...] = (
        "oracle",
        "bt",
        "pbcrl",
        "adapted",
        "labels",
    )
    """rows of the tables"""
    seeds: int = 5
    """how many of every method"""
    first_seed: int = 0
    """the lowest of them"""
    eval_episodes: int = 1_000
    """responses of the final evaluation"""
    runs_dir: str = "runs/bench_llm"
    """folder of the runs; what is finished there is not run again"""


def run(args: Args, task: str, method: str, seed: int) -> dict[str, Any]:
    name = f"{task}__{method}__{seed}"
    folder = Path(args.runs_dir) / name
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was stopped
        options: dict[str, Any] = {
            "task": task,
            "seed": seed,
            "eval_episodes": args.eval_episodes,
            "runs_dir": args.runs_dir,
            "run_name": name,
        }
        with (
            Path(args.runs_dir, f"{name}.log").open("w") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            ppo_lag_llm.train(ppo_lag_llm.Args(**options, **METHODS[method]))
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{np.mean(known):.1f} ± {np.std(known, ddof=min(1, len(known) - 1)):.1f}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def main(args: Args) -> None:
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for task in args.tasks:
        rows = {
            method: [run(args, task, method, seed) for seed in seeds] for method in args.methods
        }
        limit = TokenTask(task).cost_limit
        print(f"severity {task}, limit {limit:g}, {args.seeds} seeds, mean ± sd")
        print("| method | true cost at the learned limit | true cost | by seed | reward |")
        print("|---|---|---|---|---|")
        for method, found in rows.items():
            columns = {
                key: [one.get(key) for one in found]
                for key in ("true_cost_at_limit", "true_cost", "return")
            }
            by_seed = ", ".join(f"{cost:.1f}" for cost in columns["true_cost"])
            cells = [spread(column) for column in columns.values()]
            print(f"| `{method}` | {cells[0]} | {cells[1]} | {by_seed} | {cells[2]} |")
        for name in TokenTask(task).classes if task == "announced" else ():
            costs = {m: spread([one[f"true_cost_{name}"] for one in f]) for m, f in rows.items()}
            print(f"true cost of prompts that say {name}: {costs}")


if __name__ == "__main__":
    main(tyro.cli(Args))
