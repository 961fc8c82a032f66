"""The robotics tasks against Safety-Gymnasium 1.0.0, in turns in one run; part of `make bench`.

For every task and round: 64 environments of ours with two threads and with one, and the real
package in one process and in two at a time, as it ships and without its sky. All rates count
resets; the ratios are medians of ratios within a round, since the machine's speed drifts.
Needs the environment of `make parity-env`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

WORKER = Path(__file__).with_name("robotics_rates.py")
TASKS = {
    "Goal1": "SafetyPointGoal1-v0",
    "Push1": "SafetyPointPush1-v0",
    "Button1": "SafetyPointButton1-v0",
    "HalfCheetah": "SafetyHalfCheetahVelocity-v1",
    "Walker2d": "SafetyWalker2dVelocity-v1",
    "Humanoid": "SafetyHumanoidVelocity-v1",
}


@dataclass(frozen=True)
class Args:
    parity_python: str = ".venv-parity/bin/python"
    """interpreter that has the real package"""
    tasks: tuple[str, ...] = tuple(TASKS)
    """which of them"""
    rounds: int = 3
    """turns of every measurement"""
    seconds: float = 3.0
    """least duration of one measurement; ours take whole episodes of 64 environments"""


def measure(commands: Sequence[list[str]]) -> list[dict[str, float]]:
    """Run the workers at the same time."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    results = []
    for process in running:
        out, err = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"error: a measurement failed\n{err}")
        results.append(json.loads(out.splitlines()[-1]))
    return results


def header(*titles: str) -> None:
    print(f"{'':<12}" + "".join(f"{title:>17}" for title in titles), flush=True)


def main(args: Args) -> None:
    if not Path(args.parity_python).exists():
        raise SystemExit(
            f"error: the real package is compared with, but there is no {args.parity_python}; "
            "build its environment with `make parity-env`"
        )
    print(f"steps per second, median of {args.rounds} rounds; resets included", flush=True)
    header("ours, 2 threads", "1 thread", "real, 1 process", "2 processes", "no sky", "2, no sky")
    ratios, details = [], []
    for name in args.tasks:
        env_id = TASKS[name]

        def ours(threads: int, env_id: str = env_id) -> dict[str, float]:
            command = [sys.executable, str(WORKER), "native", env_id, str(threads)]
            return measure([[*command, str(args.seconds)]])[0]

        def real(processes: int, *, sky: bool, env_id: str = env_id) -> float:
            command = [args.parity_python, str(WORKER), "real", env_id, str(int(sky))]
            found = measure([[*command, str(args.seconds)]] * processes)
            return sum(result["rate"] for result in found)

        rows, shares = [], []
        for _ in range(args.rounds):
            two = ours(2)
            one_process = real(1, sky=True)
            one = ours(1)
            two_processes = real(2, sky=True)
            no_sky, no_sky_twice = real(1, sky=False), real(2, sky=False)
            rows.append(
                [two["rate"], one["rate"], one_process, two_processes, no_sky, no_sky_twice]
            )
            shares.append(two)
        rates = np.array(rows)  # (rounds, 6)
        medians = np.median(rates, axis=0)
        print(f"{name:<12}" + "".join(f"{rate:>17,.0f}" for rate in medians), flush=True)
        pairs = [(0, 2), (1, 2), (0, 3), (0, 4), (0, 5)]
        ratios.append([float(np.median(rates[:, a] / rates[:, b])) for a, b in pairs])
        details.append(
            [float(np.median([share[key] for share in shares])) for key in shares[0]][1:]
        )
    print("\ntimes as fast")
    header("2 threads / 1", "1 thread / 1", "2 threads / 2", "2 / 1, no sky", "2 / 2, no sky")
    for name, row in zip(args.tasks, ratios, strict=True):
        print(f"{name:<12}" + "".join(f"{ratio:>16.1f}x" for ratio in row))
    print("\nours, 2 threads")
    header("time in physics", "memory of 64", "reset, 99th p.")
    for name, (share, megabytes, p99) in zip(args.tasks, details, strict=True):
        print(f"{name:<12}{share:>17.0%}{megabytes:>14,.0f} MB{1000 * p99:>14.2f} ms")


if __name__ == "__main__":
    main(tyro.cli(Args))
