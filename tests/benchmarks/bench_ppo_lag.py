"""PPO-Lag end to end; part of `make bench`.

    python tests/benchmarks/bench_ppo_lag.py
    python tests/benchmarks/bench_ppo_lag.py --against ../other-checkout --rounds 5
    python tests/benchmarks/bench_ppo_lag.py --minibatch-size 64 --hidden-sizes 64 64

Rates count from the second iteration on, without the KL stop, so that every iteration takes as many
gradient steps. With `--against`, the scripts and the library of another checkout run in turns with
those of this one; ratios are this one's rate over the other's. Options that are not of this
benchmark go to the script.
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
    """iterations per run; the first is warm-up and not counted"""
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
    learned_cost: bool = False
    """measure ppo_lag_pbcrl.py, fine-tuned with 100 queries in every fifth iteration, instead"""


def train(args: Args, checkout: Path, options: list[str]) -> Rows:
    """Run the script of a checkout."""
    script, iterations = "ppo_lag.py", args.iterations
    labels: tuple[object, ...] = ()
    if args.learned_cost:
        # Its queries per labelling round are those of 2,000 over 2M steps.
        script, iterations = "ppo_lag_pbcrl.py", max(6, args.iterations)
        labels = "--offline-queries", 0, "--online-queries", 100, "--finetune-interval", 5
    return run_script(
        script,
        *("--env-id", args.env_id, "--device", args.device, "--target-kl", "inf"),
        *("--num-envs", args.num_envs, "--num-steps", args.num_steps),
        *("--total-timesteps", iterations * args.num_envs * args.num_steps),
        *("--threads", args.threads, "--eval-episodes", 1, *labels),
        *options,
        checkout=checkout,
    )


def spread(values: list[float], form: str) -> str:
    """Median, least and largest."""
    low, high = min(values), max(values)
    return f"{np.median(values):{form}} ({low:{form}} to {high:{form}})"


def main(args: Args, options: list[str]) -> None:
    checkouts = {"this": ROOT} | ({"other": Path(args.against)} if args.against else {})
    print(
        f"{args.env_id}: {args.num_envs} envs x {args.num_steps} steps, {args.threads} "
        f"threads of {os.cpu_count()} cores, {args.device} {' '.join(options)}".rstrip()
    )
    rates: dict[str, list[float]] = {checkout: [] for checkout in checkouts}
    table: dict[str, float] = {}
    for number in range(args.rounds):
        # Every other round begins with the other one: a machine that slows down favours nobody.
        for checkout in list(rates)[:: -1 if number % 2 else 1]:
            rows = train(args, checkouts[checkout], options)
            rates[checkout].append(rate(rows))
            if checkout == "this":
                table = phases(rows)
        shown = [f"{checkout} {found[-1]:,.0f}" for checkout, found in rates.items()]
        print(f"   round {number + 1}, steps/s: {'; '.join(shown)}", flush=True)
    print_phases(["this"], [table])
    for checkout, found in rates.items():
        print(f"{checkout} checkout: {spread(found, ',.0f')} steps/s")
    if args.against:
        ratios = np.array(rates["this"]) / np.array(rates["other"])
        print(f"this over other: {spread(list(ratios), '.3f')}")


if __name__ == "__main__":
    main(*tyro.cli(Args, return_unknown_args=True))
