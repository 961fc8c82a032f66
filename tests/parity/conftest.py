"""What all rungs share: the real package in child processes, the native tasks, and the report.

The real package's side is slow, so all of its jobs are started at once, two at a time and the
longest first, and each test waits for its own. `PBCRL_PARITY_TASKS` chooses tasks by name.
"""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.parity import plan

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PBCRL_PARITY_PYTHON")
REPORT = ROOT / "build" / "parity.md"

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


class RealPackage:
    """Runs jobs of `real_side.py`, each once, and returns the arrays that they made."""

    def __init__(self, folder, *, processes=2):
        self._folder = folder
        self._pool = ThreadPoolExecutor(processes)
        self._jobs = {}

    def start(self, **job):
        key = json.dumps(job, sort_keys=True)
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(self._run, key, len(self._jobs))
        return self._jobs[key]

    def __call__(self, **job):
        return self.start(**job).result()

    def stop(self):
        self._pool.shutdown(cancel_futures=True)

    def _run(self, job, number):
        output = self._folder / f"{number}.npz"
        child = subprocess.run(
            [Path(PYTHON).absolute(), "-m", "tests.parity.real_side", job, output],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode != 0:
            raise RuntimeError(f"the job {job} of the real package failed:\n{child.stderr[-3000:]}")
        with np.load(output, allow_pickle=False) as arrays:
            return dict(arrays)


@pytest.fixture(scope="session")
def real(request, tmp_path_factory):
    package = RealPackage(tmp_path_factory.mktemp("real"))
    tests = [
        (item.path.name, item.callspec.params if hasattr(item, "callspec") else {})
        for item in request.session.items
        if not item.get_closest_marker("skip")  # of a kind of task of which none is chosen
    ]
    for job in plan.jobs(tests):
        package.start(**job)
    yield package
    package.stop()


# -- Report ----------------------------------------------------------------------------------

RUNGS = {
    "a": "Seeds: layouts, goals and first observations after `reset(seed=s)`",
    "b": "Functions of recorded states: largest error",
    "c": "One step from each recorded state: error by contact",
    "d": "The native model against the package's own XML on the same engine: error by contact",
    "e": "Whole episodes of a fixed policy, by seed: native minus real",
}
ROWS = {rung: [] for rung in RUNGS}


@pytest.fixture(scope="session")
def report():
    """Call it with a rung and the cells of one row, by column."""
    return lambda rung, **cells: ROWS[rung].append(cells)


def table(rows):
    lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    lines.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pytest_terminal_summary(terminalreporter):
    parts = [f"({rung}) {RUNGS[rung]}\n\n{table(rows)}\n" for rung, rows in ROWS.items() if rows]
    if parts:
        text = "\n".join(parts)
        terminalreporter.write_sep("=", "parity with safety-gymnasium 1.0.0")
        terminalreporter.write(text)
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(text, encoding="utf-8")
