"""Short runs of the training scripts for the benchmarks, read from their own logs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pbcrl_script_utils.certificate import read_certificates

ROOT = Path(__file__).parents[2]
PHASES = ("rollout", "cost_model", "update")
"""The fields `seconds_*` of metrics.jsonl; a script logs those that it has."""
OLDER_FLAGS = {"--learning-rate": "--lr", "--update-epochs": "--epochs", "--clip-coef": "--clip"}
"""Flags of today, and their names before the scripts had CleanRL's."""

Rows = list[dict[str, Any]]
"""The lines of a run's metrics.jsonl, one per iteration."""


def add_row(path: Path, columns: Sequence[str], row: Mapping[str, object]) -> None:
    """Add a row to a CSV file with these columns, or begin one; what the row lacks is empty.

    Raises:
        SystemExit: If the file has other columns: they would say what the row does not.
    """
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            if (found := next(csv.reader(file), [])) != list(columns):
                raise SystemExit(f"error: {path} has the columns {found}, not {list(columns)}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def rows_there(path: Path, names: Sequence[str]) -> set[tuple[str, ...]]:
    """What a CSV file has rows for, by these columns; nothing if there is no file."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(row[name] for name in names) for row in csv.DictReader(file)}


def summary_of(words: Sequence[str], *, certify: bool = False) -> dict[str, Any] | None:
    """Run a script with these flags, its name first, in a folder that is deleted afterwards.

    Args:
        words: Name and flags.
        certify: Whether `certify.py` judges the policy by the true cost, as it does by default.

    Returns:
        Its summary.json, with `certificate_episodes` and `certificate_unsafe`, how many of them
        were; None if it failed, and the end of what it said is printed then.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        commands = [[*words, "--runs-dir", folder, "--run-name", "run"]]
        if certify:
            commands.append(["certify.py", str(run)])
        for name, *flags in commands:
            command = [sys.executable, str(ROOT / "cleanrl_scripts" / name), *flags]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"{name} {' '.join(flags)} failed: {done.stderr[-500:]}", flush=True)
                return None
        found: dict[str, Any] = json.loads((run / "summary.json").read_text())
        for made in read_certificates(run):
            found |= {"certificate_episodes": made.episodes, "certificate_unsafe": made.unsafe}
        return found


def run_script(name: str, *options: object, checkout: Path = ROOT) -> Rows:
    """Run a script of a checkout to its end, in a folder that is deleted afterwards.

    Raises:
        SystemExit: If it fails, with its output.
    """
    checkout = checkout.resolve()
    script = checkout / "cleanrl_scripts" / name
    words = list(map(str, options))
    if "learning_rate:" not in script.read_text(encoding="utf-8"):
        words = [OLDER_FLAGS.get(word, word) for word in words]
    # Ahead of the checkout that is installed; `.typings` has the link `pbcrl_envs` to `envs`.
    paths = os.pathsep.join(map(str, (checkout, checkout / ".typings")))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *words, "--runs-dir", folder, "--run-name", "run"]
        env = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise SystemExit(f"error: {' '.join(command)} failed\n{done.stdout}{done.stderr}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rate(rows: Rows) -> float:
    """Env steps per second from the end of the first iteration, which warms up, to the last."""
    steps: int = rows[-1]["env_steps"] - rows[0]["env_steps"]
    return float(steps / (rows[-1]["wall_seconds"] - rows[0]["wall_seconds"]))


def phases(rows: Rows) -> dict[str, float]:
    """Microseconds per env step of each phase, without the first iteration; "rest" is the rest."""
    steps = rows[-1]["env_steps"] - rows[0]["env_steps"]
    found = {
        phase: sum(row[f"seconds_{phase}"] for row in rows[1:]) / steps * 1e6
        for phase in PHASES
        if f"seconds_{phase}" in rows[0]
    }
    return {**found, "rest": 1e6 / rate(rows) - sum(found.values())}


def print_phases(titles: Sequence[str], tables: Sequence[dict[str, float]]) -> None:
    """Print microseconds per env step and shares by phase, one row per run."""
    width = max(map(len, titles)) + 2
    names = [*PHASES, "rest"]
    print(f"   {'us per env step':<{width}}" + "".join(f"{name:>18}" for name in names))
    for title, table in zip(titles, tables, strict=True):
        total = sum(table.values())
        cells = [
            f"{table[name]:,.0f} ({table[name] / total:.0%})" if name in table else "-"
            for name in names
        ]
        print(f"   {title:<{width}}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
