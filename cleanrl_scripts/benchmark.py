"""Runs of a table of the paper: task x variant x seed, on this machine or on a Ray cluster.

    python cleanrl_scripts/benchmark.py --preset results --seeds 5 --workers 2
    python cleanrl_scripts/report.py

What is finished is skipped, what was cut off is resumed, what dies is tried again and its error
kept in `failures.jsonl`. All presets share one folder: a run that two tables need is made once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tyro
from presets import TABLES, VARIANTS, options_of
from rich.console import Console
from rich.live import Live
from rich.table import Table

SCRIPTS = Path(__file__).parent


@dataclass(frozen=True)
class Args:
    preset: tuple[str, ...]
    """tables to make the runs of, by name; a wrong name lists them all"""
    seeds: int = 5
    """runs of every task and variant"""
    first_seed: int = 0
    """the lowest seed"""
    tasks: tuple[str, ...] = ()
    """only these env ids of the presets"""
    variants: tuple[str, ...] = ()
    """only these variants of the presets (and PPO-Lag, whose episodes they learn from)"""
    total_timesteps: int | None = None
    """env steps of every run, in place of the presets' own"""
    workers: int = 2
    """runs at a time, on this machine; on Ray as many as it has room for"""
    torch_threads: int = 1
    """threads of each run"""
    retries: int = 1
    """how often a run that died is started again, in this call"""
    runs_dir: str = "runs/benchmark"
    """folder of all runs; on a Ray cluster all nodes must see it under this path"""
    engine: str = "local"
    """local, or ray"""
    ray_address: str = "auto"
    """the Ray cluster to use; 'local' starts one on this machine"""
    dry_run: bool = False
    """print the commands and run nothing"""


@dataclass
class Job:
    """One run and what has become of it."""

    name: str
    """Name of its folder."""
    command: list[str]
    """To begin it; `--resume` goes on with it."""
    needs: Path | None
    """Dataset that must be there first."""
    total: int | None
    """Env steps that it will take, if known."""
    state: str = "waiting"
    failures: list[str] = field(default_factory=list)
    started: float = 0.0
    steps_at_start: int = 0


# -- The grid --------------------------------------------------------------------------------------


def flags(options: dict[str, object]) -> list[str]:
    """Options as a command line."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name}", *map(str, values)]
    return words


def jobs_of(args: Args) -> list[Job]:
    """Every run of the presets once, those that others need first."""
    for name, known in [("preset", TABLES), ("variants", VARIANTS)]:
        for given in getattr(args, name):
            if given not in known:
                raise SystemExit(
                    f"error: --{name} must be one of {', '.join(known)}, got {given!r}"
                )
    found: dict[str, Job] = {}
    for table in args.preset:
        tasks = [t for t in TABLES[table].tasks if t in (args.tasks or TABLES[table].tasks)]
        chosen = [v for v in TABLES[table].variants if v in (args.variants or VARIANTS)]
        if not tasks or not chosen:
            raise SystemExit(
                f"error: --tasks and --variants leave nothing of {table}, which has the tasks "
                f"{', '.join(TABLES[table].tasks)} and the variants "
                f"{', '.join(TABLES[table].variants)}"
            )
        # The oracle's episodes are what the cost models are pretrained on.
        variants = dict.fromkeys(["ppo_lag", *chosen])
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for variant in variants:
                for env_id in tasks:
                    job = job_of(args, table, env_id, variant, seed)
                    found.setdefault(job.name, job)
    return sorted(found.values(), key=lambda job: job.needs is not None)


def job_of(args: Args, table: str, env_id: str, variant: str, seed: int) -> Job:
    runs_dir = Path(args.runs_dir).resolve() / ("smoke" if table == "smoke" else "")
    dataset = runs_dir / "episodes" / f"{env_id}__{seed}"
    options = options_of(table, env_id, variant, dataset=str(dataset))
    if args.total_timesteps is not None:
        options["total-timesteps"] = args.total_timesteps
    name = f"{env_id}__{variant}__{seed}"
    options |= {"seed": seed, "torch-threads": args.torch_threads}
    options |= {"runs-dir": runs_dir, "run-name": name}
    script = SCRIPTS / f"{VARIANTS[variant].script}.py"
    return Job(
        name=str((runs_dir / name).relative_to(Path(args.runs_dir).resolve())),
        command=[sys.executable, str(script), *flags(options)],
        needs=dataset if "dataset" in options else None,
        total=int(str(options["total-timesteps"])) if "total-timesteps" in options else None,
    )


def check_settings(job: Job, folder: Path) -> None:
    """Refuse a folder whose run was made by another command."""
    stored = folder / "command.json"
    wanted = json.dumps(job.command[2:])
    if stored.exists():
        if stored.read_text() != wanted:
            raise SystemExit(
                f"error: {folder} holds a run of other settings; use another --runs-dir"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        stored.write_text(wanted)


# -- Where the runs are made -----------------------------------------------------------------------


class Engine(Protocol):
    """Starts runs and says how they end."""

    slots: float
    """Runs at a time."""

    def start(self, job: Job, command: list[str], log: Path) -> None: ...

    def finished(self) -> list[tuple[Job, int]]:
        """The runs that have ended since the last call, with their exit status."""
        ...

    def stop(self) -> None:
        """End all runs as Ctrl-C does."""
        ...


class LocalEngine:
    """Child processes of this one."""

    def __init__(self, workers: int) -> None:
        self.slots: float = workers
        self._running: list[tuple[Job, subprocess.Popen[bytes]]] = []

    def start(self, job: Job, command: list[str], log: Path) -> None:
        with log.open("ab") as file:
            # A session of its own: Ctrl-C reaches the runs through `stop` alone, and once.
            child = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._running.append((job, child))

    def finished(self) -> list[tuple[Job, int]]:
        ended = [
            (job, child.returncode) for job, child in self._running if child.poll() is not None
        ]
        self._running = [(job, child) for job, child in self._running if child.returncode is None]
        return ended

    def stop(self) -> None:
        for _, child in self._running:
            os.killpg(child.pid, signal.SIGINT)
        for _, child in self._running:
            child.wait()


class RayEngine:
    """Tasks of a Ray cluster, one processor and more each; all nodes share the folder of runs."""

    def __init__(self, address: str, threads: int) -> None:
        import ray

        self._ray = ray
        ray.init(address=None if address == "local" else address, log_to_driver=False)
        self.slots = float("inf")  # Ray holds back what does not fit
        self._remote = ray.remote(num_cpus=threads, max_retries=0)(run_command)
        self._running: dict[Any, Job] = {}

    def start(self, job: Job, command: list[str], log: Path) -> None:
        self._running[self._remote.remote(command, str(log))] = job

    def finished(self) -> list[tuple[Job, int]]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        ended = []
        for reference in ready:
            job = self._running.pop(reference)
            try:
                ended.append((job, int(self._ray.get(reference))))
            except self._ray.exceptions.RayError as error:  # the node or its worker died
                ended.append((job, -1))
                job.failures.append(str(error).splitlines()[0])
        return ended

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=False)
        self._ray.wait(list(self._running), num_returns=len(self._running), timeout=60)
        self._ray.shutdown()


def run_command(command: list[str], log: str) -> int:
    """Run a command to its end; Ctrl-C and Ray's cancelling reach it as Ctrl-C."""
    with open(log, "ab") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise


# -- What is seen ----------------------------------------------------------------------------------


def last_metrics(folder: Path) -> dict[str, Any]:
    """The newest whole line of metrics.jsonl, or nothing."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().split(b"\n")[:-1]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return found


def picture(jobs: Sequence[Job], root: Path) -> Table:
    """A table of what runs, with rates and the time that is left."""
    states = [job.state for job in jobs]
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    table = Table(title=counts, title_justify="left")
    for head in ("run", "env steps", "steps/s", "left", "return", "true cost", "learned"):
        table.add_column(head, justify="left" if head == "run" else "right")
    for job in jobs:
        if job.state != "running":
            continue
        row = last_metrics(root / job.name)
        steps = int(row.get("env_steps", 0))
        # The first row that this process saw is where it began to count.
        job.steps_at_start = job.steps_at_start or steps
        rate = (steps - job.steps_at_start) / max(time.monotonic() - job.started, 1e-9)
        left = "" if job.total is None or rate <= 0 else clock((job.total - steps) / rate)
        numbers = [row.get(key) for key in ("return", "true_cost", "learned_cost")]
        shown = ["" if number is None else f"{number:.3g}" for number in numbers]
        table.add_row(job.name, f"{steps:,}", f"{rate:,.0f}" if rate > 0 else "", left, *shown)
    return table


def clock(seconds: float) -> str:
    hours, rest = divmod(int(max(0.0, seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def last_words(log: Path) -> str:
    """The last line that a run printed: its error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    errors = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    named = [line for line in errors if line.startswith("error:") or "Error" in line]
    return (named or errors or [""])[-1].strip()


# -- The loop --------------------------------------------------------------------------------------


def launch(job: Job, folder: Path, engine: Engine) -> None:
    cut_off = (folder / "args.json").exists()
    script = job.command[:2]
    command = [*script, "--resume", str(folder)] if cut_off else job.command
    job.state, job.started, job.steps_at_start = "running", time.monotonic(), 0
    engine.start(job, command, folder / "log.txt")


def work(args: Args, jobs: list[Job], engine: Engine, console: Console) -> None:
    root = Path(args.runs_dir).resolve()
    for job in jobs:
        check_settings(job, root / job.name)
        if (root / job.name / "summary.json").exists():
            job.state = "done"
    view = Live(console=console, refresh_per_second=1) if console.is_terminal else nullcontext()
    with view as live:
        while any(job.state in ("waiting", "running") for job in jobs):
            for job, status in engine.finished():
                folder = root / job.name
                if status == 0 and (folder / "summary.json").exists():
                    job.state = "done"
                else:
                    why = last_words(folder / "log.txt")
                    job.failures.append(f"status {status}: {why}")
                    job.state = "failed" if len(job.failures) > args.retries else "waiting"
                    with (root / "failures.jsonl").open("a") as file:
                        entry = {"run": job.name, "status": status, "error": why}
                        file.write(json.dumps(entry) + "\n")
                    if job.state == "waiting":
                        console.print(f"trying {job.name} again: {job.failures[-1]}", markup=False)
                console.print(f"{job.state:>8}  {job.name}", markup=False, highlight=False)
            running = sum(job.state == "running" for job in jobs)
            for job in jobs:
                if job.state != "waiting" or running >= engine.slots:
                    continue
                if job.needs is not None and not job.needs.exists():
                    maker = next(other for other in jobs if makes(other, job.needs))
                    if maker.state in ("failed", "impossible"):
                        job.state = "impossible"
                        job.failures.append(f"it learns from the episodes of {maker.name}")
                    continue
                launch(job, root / job.name, engine)
                running += 1
            if live is not None:
                live.update(picture(jobs, root))
            time.sleep(1.0)


def makes(job: Job, dataset: Path) -> bool:
    return "--save-trajectories" in job.command and str(dataset) in job.command


def main(args: Args) -> None:
    jobs = jobs_of(args)
    if args.dry_run:
        for job in jobs:
            print(" ".join(job.command))
        return
    console = Console()
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    if args.engine not in ("local", "ray"):
        raise SystemExit(f"error: --engine is local or ray, got {args.engine!r}")
    engine: Engine = (
        LocalEngine(args.workers)
        if args.engine == "local"
        else RayEngine(args.ray_address, args.torch_threads)
    )
    start = time.monotonic()
    try:
        work(args, jobs, engine, console)
    except KeyboardInterrupt:
        console.print("stopping the runs; the same command goes on with them")
        raise SystemExit(130) from None
    finally:
        engine.stop()
    bad = [job for job in jobs if job.state in ("failed", "impossible")]
    took = clock(time.monotonic() - start)
    console.print(f"{len(jobs) - len(bad)} of {len(jobs)} runs are done, after {took}")
    for job in bad:
        console.print(f"{job.state}: {job.name}: {job.failures[-1]}", markup=False)
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))
