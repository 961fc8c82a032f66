"""Memory of a whole run of `ppo_lag_pbcrl.py`: what it needs at most, and whether it grows.

    python tests/benchmarks/bench_memory.py                      # Goal1, two million steps
    python tests/benchmarks/bench_memory.py --dataset FOLDER     # without collecting episodes first

Options that are not of this benchmark go to the script. Memory maps count as far as they are in
memory, though they may be dropped at any time; memory that the process owns is listed separately.
Reads /proc.
Stops with an error above `--max-megabytes`, and if the run has grown by more than `--max-growth`
since its first fifth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

SCRIPT = Path(__file__).parents[2] / "cleanrl_scripts" / "ppo_lag_pbcrl.py"


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointGoal1-v0"
    """task to run"""
    total_timesteps: int = 2_000_000
    """env steps of policy training"""
    dataset: str | None = None
    """folder of episodes to pretrain on; default: another process, not measured, collects them"""
    runs_dir: str | None = None
    """where to keep the run; default: nowhere"""
    max_megabytes: float = 3_000.0
    """of the whole process, at any time"""
    max_growth: float = 100.0
    """megabytes by which its own memory may grow after the first fifth of policy training"""


def megabytes(pid: int) -> dict[str, float]:
    """Resident memory: all of it, what the process owns, and the highest so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = {"all": "VmRSS", "own": "RssAnon", "peak": "VmHWM"}
    return {key: int(fields[name].split()[0]) / 1024 for key, name in names.items()}


def newest_step(folder: Path) -> int:
    """Env steps of policy training so far; 0 before the first."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError:
        return 0
    lines = text[: text.rfind("\n") + 1].splitlines()
    return json.loads(lines[-1])["env_steps"] if lines else 0


def watch(command: list[str], folder: Path, log: Path) -> tuple[int, np.ndarray, float]:
    """Run a command; return its exit status, (steps, all, own) at every change, and the peak."""
    seen: list[tuple[int, float, float]] = []
    peak = 0.0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(1)
            try:
                now = megabytes(process.pid)
            except (OSError, KeyError):  # it has just ended
                break
            peak = max(peak, now["peak"])
            step = newest_step(folder)
            if step and (not seen or step > seen[-1][0]):
                seen.append((step, now["all"], now["own"]))
                if len(seen) % 10 == 1:
                    print(f"{step:>12,} steps {now['all']:>8,.0f} MB, own {now['own']:>8,.0f} MB")
                    sys.stdout.flush()
        status = process.wait()
    return status, np.array(seen), peak


def main(args: Args, options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(args.runs_dir or scratch)
        runs.mkdir(parents=True, exist_ok=True)
        folder, log = runs / "memory", runs / "memory.txt"
        command = [sys.executable, str(SCRIPT), "--env-id", args.env_id]
        command += ["--total-timesteps", str(args.total_timesteps)]
        command += ["--dataset", args.dataset] if args.dataset else []
        command += ["--runs-dir", str(runs), "--run-name", folder.name, *options]
        start = time.monotonic()
        status, seen, peak = watch(command, folder, log)
        if status != 0:
            raise SystemExit(f"error: the run ended with status {status}:\n{log.read_text()}")
    if len(seen) < 10:
        raise SystemExit(
            f"error: growth is measured over ten iterations or more, got {len(seen)}; raise "
            "--total-timesteps"
        )
    warm = seen[len(seen) // 5 :]
    growth = float(warm[-1, 2] - warm[0, 2])
    slope = float(np.polyfit(warm[:, 0] / 1e6, warm[:, 2], 1)[0])
    print(
        f"{args.env_id}, {seen[-1, 0]:,.0f} steps in {(time.monotonic() - start) / 60:.0f} min: "
        f"peak {peak:,.0f} MB; own memory {warm[0, 2]:,.0f} MB after {warm[0, 0]:,.0f} steps, "
        f"{warm[-1, 2]:,.0f} MB at the end ({slope:+.1f} MB per million steps)"
    )
    if peak > args.max_megabytes:
        raise SystemExit(f"error: more than {args.max_megabytes:,.0f} MB")
    if growth > args.max_growth:
        raise SystemExit(f"error: grew by {growth:,.0f} MB, more than {args.max_growth:,.0f}")


if __name__ == "__main__":
    main(*tyro.cli(Args, return_unknown_args=True))
