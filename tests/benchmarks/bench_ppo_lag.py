"""PPO-Lag end to end; part of `make bench`.

    python tests/benchmarks/bench_ppo_lag.py
    python tests/benchmarks/bench_ppo_lag.py --against ../other-checkout --rounds 5
    python tests/benchmarks/bench_ppo_lag.py --minibatch-size 64 --hidden-sizes 64 64
    python tests/benchmarks/bench_ppo_lag.py --learned-cost trees net --env-id DrivingLaneChange-v0

Rates count from the second iteration on, without the KL stop, so that every iteration takes as many
gradient steps. With `--against`, the scripts and the library of another checkout run in turns with
those of this one; ratios are this one's rate over the other's. With `--learned-cost` those in turns
are whole runs of `ppo_lag_pbcrl.py`, 20,000 queries and 1M steps, by either cost model: a fit takes
longer the more labels there are. Options that are not of this benchmark go to the script.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from script_runs import ROOT, Rows, phases, print_phases, rate, run_script


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointGoal1-v0"
    """task to run"""
    rounds: int = 3
    """times that all are measured, in turns"""
    iterations: int = 3
    """iterations per run, unless the cost is learned; the first is warm-up and not counted"""
    num_envs: int = 20
    """environments"""
    num_steps: int = 1_000
    """env steps per env and iteration"""
    threads: int = 2
    """threads of PyTorch"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the updates are computed"""
    against: str | None = None
    """another checkout of this repository to compare with"""
    learned_cost: tuple[Literal["trees", "net"], ...] = ()
    """measure whole runs of ppo_lag_pbcrl.py by these cost models instead, in turns"""


def train(args: Args, measured: str, options: list[str]) -> Rows:
    """Run a checkout's script, or that of a cost model."""
    script, checkout, sizes = "ppo_lag.py", ROOT, list[object]()
    if args.learned_cost:
        script, sizes = "ppo_lag_pbcrl.py", ["--cost-model", measured]
    else:
        checkout = Path(args.against) if args.against and measured == "other" else ROOT
        sizes = ["--num-envs", args.num_envs, "--num-steps", args.num_steps]
        sizes += ["--total-timesteps", args.iterations * args.num_envs * args.num_steps]
    return run_script(
        script,
        *("--env-id", args.env_id, "--device", args.device, "--target-kl", "inf"),
        *(*sizes, "--threads", args.threads, "--eval-episodes", 1),
        *options,
        checkout=checkout,
    )


def spread(values: list[float], form: str) -> str:
    """Median, least and largest."""
    low, high = min(values), max(values)
    return f"{np.median(values):{form}} ({low:{form}} to {high:{form}})"


def main(args: Args, options: list[str]) -> None:
    if args.learned_cost and args.against:
        raise SystemExit("error: --against compares ppo_lag.py; leave --learned-cost out")
    print(
        f"{args.env_id}: {args.threads} threads of {os.cpu_count()} cores, {args.device} "
        f"{' '.join(options)}".rstrip()
    )
    names: tuple[str, ...] = args.learned_cost or ("this", *(["other"] if args.against else []))
    rates: dict[str, list[float]] = {name: [] for name in names}
    tables: dict[str, dict[str, float]] = {}
    for number in range(args.rounds):
        # Every other round begins with the other one: a machine that slows down favours nobody.
        for name in names[:: -1 if number % 2 else 1]:
            rows = train(args, name, options)
            rates[name].append(rate(rows))
            tables[name] = phases(rows)
        shown = [f"{name} {found[-1]:,.0f}" for name, found in rates.items()]
        print(f"   round {number + 1}, steps/s: {'; '.join(shown)}", flush=True)
    print_phases(list(tables), list(tables.values()))
    for name, found in rates.items():
        print(f"{name}: {spread(found, ',.0f')} steps/s")
    if len(names) == 2:
        ratios = np.array(rates[names[0]]) / np.array(rates[names[1]])
        print(f"{names[0]} over {names[1]}: {spread(list(ratios), '.3f')}")


if __name__ == "__main__":
    main(*tyro.cli(Args, return_unknown_args=True))
