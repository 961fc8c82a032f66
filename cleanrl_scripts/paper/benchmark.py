"""Runs of a table of the paper: task x variant x seed, on this machine or on a Ray cluster.

    python cleanrl_scripts/paper/benchmark.py --preset results --seeds 5 --workers 2
    python cleanrl_scripts/paper/report.py

Finished runs are skipped, interrupted runs are resumed, and a run that dies is tried again and its
error kept in `failures.jsonl`. All presets share one folder: a run that two tables need is made
once.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import tyro
from presets import SCRIPTS, TABLES, VARIANTS, command_of, made_as, options_of
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pbcrl.storage import write_atomically

PLACES = "runs-dir", "dataset", "save-trajectories"


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
    """only these variants of the presets, and PPO-Lag, whose episodes they learn from"""
    total_timesteps: int | None = None
    """env steps of every run, in place of the presets' own"""
    workers: int = 2
    """runs at a time, on this machine; on Ray as many as it has room for"""
    threads: int = 1
    """threads of each run"""
    retries: int = 1
    """how often a run that died is started again, in this call"""
    runs_dir: str = "runs/benchmark"
    """folder of all runs; on a Ray cluster all nodes must see it under this path"""
    engine: Literal["local", "ray"] = "local"
    """where the runs are made: as child processes, or as tasks of a Ray cluster"""
    ray_address: str = "auto"
    """the Ray cluster to use; 'auto' is the one that this machine is a node of"""
    dry_run: bool = False
    """print the commands and run nothing"""


State = Literal["waiting", "running", "done", "failed", "impossible"]


@dataclass
class Job:
    """One run and what has become of it."""

    name: str
    """Of its folder, below `--runs-dir`."""
    folder: Path
    script: Path
    options: dict[str, object]
    needs: str | None
    """Name of the run that must be done first, as this one learns from its episodes."""
    state: State = "waiting"
    failures: list[str] = field(default_factory=list)
    log_start: int = 0
    """Offset in `log.txt` at which the output of the present attempt begins."""

    @property
    def total(self) -> int:
        """Env steps of the run."""
        return int(str(self.options["total-timesteps"]))

    @property
    def finished(self) -> bool:
        """Whether it has left a summary; an empty or damaged one does not count."""
        return read_object(self.folder / "summary.json") is not None

    @property
    def command(self) -> list[str]:
        """The command that starts the run."""
        return command_of(self.script.stem, self.options)

    @property
    def resuming(self) -> list[str]:
        """The command that resumes the run."""
        return [sys.executable, str(self.script), "--resume", str(self.folder)]

    @property
    def next_command(self) -> list[str]:
        """The command that resumes the run if it was begun, and starts it otherwise."""
        begun = read_object(self.folder / "args.json") is not None
        return self.resuming if begun else self.command


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, empty or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found else None


# -- The grid --------------------------------------------------------------------------------------


def jobs_of(args: Args) -> list[Job]:
    """Every run of the presets once, and those whose episodes they need before them."""
    check_names("preset", args.preset, TABLES)
    check_names("variants", args.variants, VARIANTS)
    check_names("tasks", args.tasks, [t for name in args.preset for t in TABLES[name].tasks])
    found: dict[str, Job] = {}
    for table in args.preset:
        chosen = [v for v in TABLES[table].variants if v in (args.variants or VARIANTS)]
        if not chosen:
            raise SystemExit(
                f"error: --variants leave nothing of {table}, which has "
                f"{', '.join(TABLES[table].variants)}"
            )
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for variant in [VARIANTS[v].episodes for v in chosen] + chosen:
                for env_id in TABLES[table].tasks:
                    if env_id in (args.tasks or TABLES[table].tasks):
                        job = job_of(args, table, env_id, made_as(env_id, variant), seed)
                        found.setdefault(job.name, job)
    return sorted(found.values(), key=lambda job: job.needs is not None)


def check_names(flag: str, given: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise SystemExit(f"error: --{flag} must be of {', '.join(known)}, got {name!r}")


def job_of(args: Args, table: str, env_id: str, variant: str, seed: int) -> Job:
    root = Path(args.runs_dir).resolve()
    # The sizes of the smoke preset are its own, and so are its runs.
    place = root / "smoke" if table == "smoke" else root
    source = made_as(env_id, VARIANTS[variant].episodes)
    episodes = place / "episodes" / f"{env_id}__{source}__{seed}"
    options = options_of(table, env_id, variant, episodes=str(episodes))
    if args.total_timesteps is not None:
        options["total-timesteps"] = args.total_timesteps
    folder = place / f"{env_id}__{variant}__{seed}"
    options |= {"seed": seed, "threads": args.threads}
    options |= {"runs-dir": str(place), "run-name": folder.name}
    needs = None if variant == source else place / f"{env_id}__{source}__{seed}"
    return Job(
        name=str(folder.relative_to(root)),
        folder=folder,
        script=SCRIPTS / f"{VARIANTS[variant].script}.py",
        options=options,
        needs=None if needs is None else str(needs.relative_to(root)),
    )


def claim(job: Job) -> None:
    """Note the options of a run in its folder, or refuse a folder that was made with others."""
    noted = job.folder / "options.json"
    now = {name: value for name, value in job.options.items() if name not in PLACES}
    now = json.loads(json.dumps({"script": job.script.stem, **now}))
    if not noted.exists():
        write_atomically(noted, (json.dumps(now, indent=2) + "\n").encode())
        return
    then = read_object(noted)
    if then is None:
        raise SystemExit(
            f"error: options.json tells what settings a run was started with, but {noted} is empty "
            "or damaged; delete that file if the settings were these, or move the folder away"
        )
    differing = [
        f"{name} ({then.get(name)} there, {now.get(name)} now)"
        for name in then | now
        if then.get(name) != now.get(name)
    ]
    if differing:
        raise SystemExit(
            f"error: {job.folder} holds a run of other settings: {', '.join(differing)}; use the "
            "same settings, or another --runs-dir"
        )


def set_aside_damaged_summary(job: Job) -> str:
    """Rename a summary that cannot be read, so that the run is resumed; return what to say."""
    path = job.folder / "summary.json"
    if not path.exists() or job.finished:
        return ""
    path.replace(path.with_name("summary.json.damaged"))
    return (
        f"warning: {path} is empty or damaged, so this run counts as not finished: it is resumed, "
        "and the file is kept as summary.json.damaged"
    )


def lock(root: Path) -> TextIO:
    """Keep other benchmarks out of a folder for as long as the file that is returned is open."""
    root.mkdir(parents=True, exist_ok=True)
    file = (root / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with file:
            file.seek(0)
            owner = file.read()
        raise SystemExit(
            f"error: one benchmark at a time works on a folder, but {root} is in use by {owner}; "
            "wait for it, stop it, or use another --runs-dir"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} of {os.uname().nodename}")
    file.flush()
    return file


# -- Where the runs are made -----------------------------------------------------------------------


class Engine(Protocol):
    """Starts runs and says how they end."""

    def slots(self) -> int:
        """Runs at a time."""
        ...

    def start(self, job: Job, command: list[str]) -> None: ...

    def finished(self) -> list[tuple[Job, str]]:
        """Runs that have ended since the last call, each with its cause of death, "" if none."""
        ...

    def stop(self) -> None:
        """End all runs as Ctrl-C does, and wait until they have ended."""
        ...


def open_child(command: list[str], log: str) -> subprocess.Popen[bytes]:
    """Start a run; it ends with the process that started it, however that dies (on Linux)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG

    with open(log, "ab") as file:
        # In a new session, so that Ctrl-C in the terminal reaches it once, through the engine.
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def run_to_end(command: list[str], log: str) -> int:
    """Run a command on a node of the cluster; Ray's cancelling reaches it as Ctrl-C."""
    child = open_child(command, log)
    try:
        while child.poll() is None:
            time.sleep(0.2)  # Ray interrupts Python code only, no waiting for a child
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        child.wait()
    return child.returncode


def reason(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


class LocalEngine:
    """Child processes of this one."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._running: list[tuple[Job, subprocess.Popen[bytes]]] = []

    def slots(self) -> int:
        return self._workers

    def start(self, job: Job, command: list[str]) -> None:
        self._running.append((job, open_child(command, str(job.folder / "log.txt"))))

    def finished(self) -> list[tuple[Job, str]]:
        ended = [(job, child) for job, child in self._running if child.poll() is not None]
        self._running = [pair for pair in self._running if pair not in ended]
        return [(job, reason(child.returncode)) for job, child in ended]

    def stop(self) -> None:
        for _, child in self._running:
            child.send_signal(signal.SIGINT)  # none if it has ended
        for _, child in self._running:
            child.wait()


class RayEngine:
    """Tasks of a Ray cluster, which take as many processors as a run has threads."""

    def __init__(self, address: str, threads: int) -> None:
        try:
            import ray

            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except ImportError as error:
            raise SystemExit(f"error: --engine ray needs Ray ({error}); pip install ray") from error
        except ConnectionError as error:
            raise SystemExit(
                f"error: no Ray cluster at --ray-address {address}; start one by `ray start --head`"
            ) from error
        self._ray: Any = ray
        self._threads = threads
        # What died is started again here, where it is noted; Ray itself tries once.
        self._remote = ray.remote(num_cpus=threads, max_retries=0)(run_to_end)
        self._running: dict[Any, Job] = {}

    def slots(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0) // self._threads)

    def start(self, job: Job, command: list[str]) -> None:
        self._running[self._remote.remote(command, str(job.folder / "log.txt"))] = job

    def finished(self) -> list[tuple[Job, str]]:
        if not self._running:
            return []
        references = list(self._running)
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        ended = []
        for reference in ready:
            job = self._running.pop(reference)
            try:
                ended.append((job, reason(self._ray.get(reference))))
            except self._ray.exceptions.RayError as error:  # the node or its worker died
                ended.append((job, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
        return ended

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=60)
        self._ray.shutdown()


# -- What is seen ----------------------------------------------------------------------------------


def recent_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the newest lines of metrics.jsonl, about twenty; lines that are torn are left out."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - 16_384)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines[start > 0 : -1]:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and {"env_steps", "wall_seconds"} <= row.keys():
                rows.append(row)
    return rows


def rate_of(rows: Sequence[dict[str, Any]]) -> float | None:
    """Env steps per second over these lines; None if they are too few."""
    if len(rows) < 2:
        return None
    steps, seconds = (rows[-1][key] - rows[0][key] for key in ("env_steps", "wall_seconds"))
    return steps / seconds if seconds > 0 else None


def picture(jobs: Sequence[Job]) -> Table:
    """A table of the runs in progress, with rates and the time that is left."""
    table = Table(title_justify="left")
    for head in ("run", "env steps", "steps/s", "left", "return", "true cost", "learned"):
        table.add_column(head, justify="left" if head == "run" else "right")
    to_do, rates = 0, list[float]()
    for job in jobs:
        to_do += job.total if job.state in ("waiting", "running") else 0
        if job.state != "running":
            continue
        rows = recent_rows(job.folder)
        if not rows:
            table.add_row(job.name, "preparing")
            continue
        steps, rate = rows[-1]["env_steps"], rate_of(rows)
        to_do -= steps
        rates += [rate] if rate is not None else []
        left = "" if rate is None else clock((job.total - steps) / rate)
        numbers = [rows[-1].get(key) for key in ("return", "true_cost", "learned_cost")]
        shown = ["" if number is None else f"{number:.3g}" for number in numbers]
        table.add_row(job.name, f"{steps:,}", f"{rate:,.0f}" if rate else "", left, *shown)
    states = [job.state for job in jobs]
    table.title = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    if rates:  # on the assumption that waiting runs are as fast as running ones
        table.title += f"; about {clock(to_do / sum(rates))} left"
    return table


def say(console: Console, text: str) -> None:
    """Print a line above the live table, as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    hours, rest = divmod(int(max(0.0, seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def last_words(job: Job) -> str:
    """The error that this attempt of a run ended with, or the last line that it printed."""
    try:
        with (job.folder / "log.txt").open("rb") as file:
            file.seek(max(job.log_start, file.seek(0, os.SEEK_END) - 8_192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or "Error:" in line]
    return (errors or lines or [""])[-1]


# -- The loop --------------------------------------------------------------------------------------


def launch(job: Job, engine: Engine) -> None:
    log = job.folder / "log.txt"
    job.log_start = log.stat().st_size if log.exists() else 0
    job.state = "running"
    engine.start(job, job.next_command)


def settle(job: Job, death: str, args: Args, console: Console) -> None:
    """Note that a run has ended; one that died waits for another try, while it has any left."""
    if job.finished:  # though something may have failed after its last word
        if death:
            say(console, f"warning  {job.name} has finished, and then {death}: {last_words(job)}")
        job.state = "done"
    else:
        why = f"{death or 'no readable summary.json'}: {last_words(job)}"
        job.failures.append(why)
        job.state = "failed" if len(job.failures) > args.retries else "waiting"
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        entry = {"time": now, "run": job.name, "attempt": len(job.failures), "error": why}
        with (Path(args.runs_dir) / "failures.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if job.state == "waiting":
            say(console, f"   again  {job.name}: {why}")
            return
    why = job.failures[-1] if job.state == "failed" else ""
    say(console, f"{job.state:>8}  {job.name} {why}".rstrip())


def work(args: Args, jobs: list[Job], engine: Engine, console: Console) -> None:
    by_name = {job.name: job for job in jobs}
    # Drawn by this thread alone: a process with others must not be forked with a preexec_fn.
    view = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()
    with view as live:
        while any(job.state in ("waiting", "running") for job in jobs):
            for job, death in engine.finished():
                settle(job, death, args, console)
            room = engine.slots() - sum(job.state == "running" for job in jobs)
            for job in jobs:
                source = by_name[job.needs] if job.needs is not None else None
                if job.state == "waiting" and source and source.state in ("failed", "impossible"):
                    job.state = "impossible"
                    job.failures.append(f"it needs the episodes of {source.name}")
                if job.state == "waiting" and room > 0 and (not source or source.state == "done"):
                    launch(job, engine)
                    room -= 1
            if live is not None:
                live.update(picture(jobs), refresh=True)
            time.sleep(1.0)


def main(args: Args) -> None:
    for name in ("seeds", "workers", "threads"):
        if (number := getattr(args, name)) < 1:
            raise SystemExit(f"error: --{name} must be at least 1, got {number}; nothing would run")
    jobs = jobs_of(args)
    if args.dry_run:
        for job in jobs:
            print(shlex.join(job.command))
        return
    root, start, console = Path(args.runs_dir), time.monotonic(), Console()
    with lock(root):
        for job in jobs:
            claim(job)
            if warning := set_aside_damaged_summary(job):
                say(console, warning)
            job.state = "done" if job.finished else "waiting"
        engine: Engine = (
            LocalEngine(args.workers)
            if args.engine == "local"
            else RayEngine(args.ray_address, args.threads)
        )
        say(console, f"{len(jobs)} runs, {sum(job.state == 'done' for job in jobs)} done before")
        try:
            work(args, jobs, engine, console)
        except KeyboardInterrupt:
            say(console, "stopping the runs; the same command resumes them")
            raise SystemExit(130) from None
        finally:
            engine.stop()
    bad = [job for job in jobs if job.state != "done"]
    took = clock(time.monotonic() - start)
    say(console, f"{len(jobs) - len(bad)} of {len(jobs)} runs are done, after {took}")
    for job in bad:
        say(console, f"{job.state}: {job.name}: {job.failures[-1]}")
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, prog="pbcrl benchmark"))
