"""The folder of a run: its lock, its logs and its progress bar.

A run's folder holds `args.json`, a copy of the script that made it, `metrics.jsonl` (one line per
iteration), TensorBoard events, checkpoints, weights and, at the end, `summary.json`. The keys are
listed in `docs/metrics.md`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import math
import os
import platform
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import pbcrl
from pbcrl.env_modules import env_id_flag
from pbcrl.errors import PbcrlError, StorageError
from pbcrl.export.policy import POLICY_FILE
from pbcrl.metrics import REPORT
from pbcrl.storage import FolderLock, remove_leftovers, write_atomically
from pbcrl.trainer import Evaluation
from pbcrl_script_utils.args import longer, slow_multiplier
from pbcrl_script_utils.door import (
    constant_reward,
    endless_episodes,
    horizon_by_id,
    unmeasurable_limit,
)
from pbcrl_script_utils.recipes import recipe_lines
from pbcrl_script_utils.resume import check_unfinished, read_args
from pbcrl_script_utils.rollout import Rollout
from pbcrl_script_utils.verdict import (
    FIRST_ROWS,
    last_fifth,
    limit_verdicts,
    multiplier_verdict,
    plus_minus,
    share_verdict,
    standstill_verdict,
    verdict,
)
from pbcrl_script_utils.video import animated, check_film

_ABOVE = Path(__file__).resolve().parents[1]
SCRIPTS = _ABOVE / "pbcrl_scripts" if (_ABOVE / "pbcrl_scripts").is_dir() else _ABOVE
"""Where the training scripts are: beside this package if installed, around it in a checkout."""
_BOARD_SECONDS = 10.0  # for TensorBoard to write its last events
_PAID_FOR = (
    *("agent.safetensors", "cost_model.safetensors", "labels.jsonl", "metrics.jsonl"),
    "collected",  # episodes, until there are enough
)


class HasIteration(Protocol):
    """What `Run.iterations` needs to know of a script's progress."""

    iteration: int


class Run:
    """The folder of one run, its lock, its logs and its progress bar.

    Leaving the `with` block closes them. If an error or Ctrl-C ends it, what is worth keeping is
    saved (`on_error`), and the run says what it left behind and how to go on.

    Args:
        args: The script's arguments; needs `env_id`, `seed`, `runs_dir`, `run_name`, `resume`,
            `batch_size` and `num_iterations`.
        script: Path of the script.
        cost_limit: d, drawn beside the true cost; NaN if none is known.

    Raises:
        StorageError: If the folder cannot be made or written, holds another run, or another process
            is at work in it.
        ValueError: If films are asked for that the env cannot give.
    """

    def __init__(self, args: Any, *, script: str, cost_limit: float = math.nan) -> None:
        if getattr(args, "capture_video", 0) > 0:
            check_film(args.env_id)
        name = Path(script).stem
        stamp = time.strftime("%Y%m%d-%H%M%S")
        env_name = args.env_id.rsplit(":", 1)[-1].replace("/", "-")
        self._args, self._script, self._cost_limit = args, script, cost_limit
        self.folder = Path(args.runs_dir) / (
            args.run_name or f"{env_name}__{name}__{args.seed}__{stamp}"
        )
        if args.resume is None and any(_has_content(self.folder / file) for file in _PAID_FOR):
            raise StorageError(
                f"a run must not write over another: {self.folder} holds one already; "
                f"give another --run-name, or go on with it by --resume {self.folder}"
            )
        self._lock = FolderLock(self.folder)
        if args.resume is not None:
            try:
                self._check_unfinished()
            except BaseException:
                self._lock.release()
                raise
        remove_leftovers(self.folder)
        kept, source = self.folder / f"{name}.py", Path(script).read_bytes()
        is_changed = kept.exists() and kept.read_bytes() != source
        write_atomically(kept, source)
        if args.resume is None:
            stored = {"script": name, **dataclasses.asdict(args), "made_by": made_by(script)}
            write_atomically(self.folder / "args.json", _json(stored))
        self._metrics = (self.folder / "metrics.jsonl").open("a")
        self._tracked = _track(args, self.folder) if getattr(args, "track", False) else None
        self._board = SummaryWriter(str(self.folder))
        self._board.add_text("hyperparameters", _table(dataclasses.asdict(args)))
        self._bar: tqdm[Any] | None = None
        self._begun = 0  # env steps before this iteration
        self._start = self._lap_start = time.perf_counter()
        self._laps: dict[str, float] = {}
        self._lines = 0
        self._warnings: list[str] = []
        self._keep: Callable[[], None] | None = None
        self.stage_seconds: dict[str, float] = {}
        """How long each stage took, all parts of a run that was resumed together."""
        self._stage: tuple[str, float] | None = None  # its name, and when it began
        if args.resume is not None and is_changed:
            self.warn(f"{name}.py has changed since the run began; it goes on with the new one")

    def _check_unfinished(self) -> None:
        """Once more under the lock: another process may have finished the run meanwhile."""
        total = getattr(self._args, "total_timesteps", 0)
        if read_args(self.folder).get("total_timesteps", 0) != total:
            return  # it is to be extended
        check_unfinished(self.folder, extendable=bool(total))

    def __enter__(self) -> Run:
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._take_warning
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        warnings.showwarning = self._show_warning
        self.close_bar()
        if error is not None:
            self._say_kept(error)
        self._keep = None  # it knows all parts and they know the run: files would stay open
        self._metrics.close()
        # TensorBoard's writer waits for its thread, without end if Ctrl-C came while an event was
        # handed over: the run then ends without its last events. metrics.jsonl has them all.
        closing = threading.Thread(target=self._board.close, daemon=True)
        closing.start()
        closing.join(timeout=_BOARD_SECONDS)
        if self._tracked is not None:
            self._tracked.finish(exit_code=0 if error is None else 1)
        self._lock.release()

    def begin(self, method: str) -> None:
        """Say what begins, and which arguments have their value from a recipe."""
        self.say(f"== {method} on {self._args.env_id}; files in {self.folder}")
        if lines := recipe_lines(self._args):
            self.say("   its recipe (pbcrl_script_utils/recipes.py):")
            for line in lines:
                self.say(f"      {line}")
        horizon, limit = horizon_by_id(self._args), self._cost_limit
        if horizon is not None and (warning := endless_episodes(self._args, horizon)):
            self.warn(warning)
        elif note := self._slow_multiplier():
            self.say(f"   note: {note}")
        if horizon is not None and (note := unmeasurable_limit(self._args, horizon, limit)):
            self.say(f"   note: {note}")

    def on_error(self, keep: Callable[[], None]) -> None:
        """Call this if an error or Ctrl-C ends the run; it may raise a `PbcrlError`."""
        self._keep = keep

    @property
    def wall_seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    @contextmanager
    def phase(self, title: str, *, stage: str) -> Iterator[None]:
        """Announce a phase, and how long it took when it is over; the time goes to `stage`."""
        self.say(f"== {title}")
        start = time.perf_counter()
        self._stage = stage, start
        yield
        self._end_stage()
        self.close_bar()
        self.say(f"   done in {time.perf_counter() - start:.1f} s")

    def iterations(self, progress: HasIteration) -> Iterator[int]:
        """Count `progress.iteration` up to the last one, with a progress bar; the stage "train"."""
        args = self._args
        if args.resume is not None:
            if progress.iteration == 0:  # cut off before the first checkpoint
                self.load_state_dict(None)
            self.say(f"   going on after iteration {progress.iteration} of {args.num_iterations}")
        self._stage = "train", time.perf_counter()
        total = args.num_iterations * args.batch_size
        self._bar = tqdm(
            total=total,
            initial=progress.iteration * args.batch_size,
            unit="step",
            unit_scale=True,
            smoothing=0,  # the mean so far: rollouts and updates alternate
        )
        while progress.iteration < args.num_iterations:
            self._begun = progress.iteration * args.batch_size
            progress.iteration += 1
            self._lap_start = time.perf_counter()
            yield progress.iteration
        self._end_stage()
        self.close_bar()

    def is_checkpoint(self, iteration: int) -> bool:
        """Whether the run is to be saved after this iteration."""
        last: int = self._args.num_iterations
        every: int = self._args.checkpoint_interval
        return iteration % every == 0 or iteration == last

    def lap(self, name: str) -> None:
        """Count the time since the last lap, or since the iteration began, as `seconds_NAME`."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._lap_start
        self._lap_start = now

    def stepped(self, t: int) -> None:
        """Move the progress bar to step t of the rollout: the first one may take minutes."""
        assert self._bar is not None
        self._bar.update(self._begun + (t + 1) * self._args.num_envs - self._bar.n)

    def rolled_out(self, rollout: Rollout, iteration: int) -> None:
        """Warn of a rollout from which nothing can be learned; the lap "rollout" is over."""
        if warning := constant_reward(rollout, iteration):
            self.warn(warning)
        self.lap("rollout")

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write one line of metrics, with the laps, and move the progress bar to `step`."""
        seconds = {f"seconds_{name}": value for name, value in self._laps.items()}
        self._laps = {}
        wall = {"env_steps": step, "wall_seconds": round(self.wall_seconds, 3)}
        row = {**wall, **metrics, **seconds}
        self._metrics.write(json.dumps(_plain(row)) + "\n")
        self._metrics.flush()
        self._lines += 1
        shown = {f"{_group(key)}/{key}": value for key, value in {**metrics, **seconds}.items()}
        self._draw({**shown, "policy/cost_limit": self._cost_limit}, step)
        assert self._bar is not None
        self._bar.update(step - self._bar.n)
        limit = f" of {self._cost_limit:g}" if math.isfinite(self._cost_limit) else ""
        marks = {"return": "R", "true_cost": "C", "learned_cost": "Ĉ", "multiplier": "λ"}
        text = [
            f"{mark} {metrics[key]:.3g}{limit if key == 'true_cost' else ''}"
            for key, mark in marks.items()
            if _finite(metrics.get(key))
        ]
        self._bar.set_postfix_str(" ".join(text))

    def _draw(self, values: Mapping[str, object], step: int, *, axis: str = "env_steps") -> None:
        """Add the finite numbers to their curves, here and at Weights & Biases."""
        finite = {key: value for key, value in values.items() if _finite(value)}
        for key, value in finite.items():
            self._board.add_scalar(key, value, step)
        if self._tracked is not None:
            self._tracked.log({**finite, axis: step})

    def pretrained(self, steps: int, evaluation: Evaluation) -> None:
        """Say, and draw, how well the cost model predicts held-out labels in pretraining."""
        loss, pairs = evaluation.selection_loss, evaluation.pair_accuracy
        safety = evaluation.safety_accuracy
        self.say(
            f"   {steps:5d} steps: held-out loss {loss:.3f}, accuracy of pairs {pairs:.3f}, of "
            f"safety {safety:.3f}"
        )
        found = {"loss": loss, "pair_accuracy": pairs, "safety_accuracy": safety}
        shown = {f"pretraining/{name}": value for name, value in found.items()}
        self._draw(shown, steps, axis="pretraining/steps")

    def filmed(self, paths: Sequence[Path]) -> None:
        """Show films in TensorBoard, as animated pictures of their first 20 seconds."""
        steps = self._args.num_iterations * self._args.batch_size
        for path in paths:
            image, height, width = animated(path)
            picture = Summary.Image(
                encoded_image_string=image, height=height, width=width, colorspace=3
            )
            value = Summary.Value(tag=f"films/{path.stem}", image=picture)
            writer: Any = self._board.file_writer
            writer.add_summary(Summary(value=[value]), steps)
            if self._tracked is not None:
                video = importlib.import_module("wandb").Video(str(path), format="mp4")
                self._tracked.log({f"films/{path.stem}": video, "env_steps": steps})

    def say(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def warn(self, text: str) -> None:
        """Say once what is wrong, and again in the summary."""
        if text not in self._warnings:
            self._warnings.append(text)
            self.say(f"   warning: {text}")

    def _take_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """What pbcrl and the script warn of is the run's; all else is shown as before."""
        ours = SCRIPTS, Path(self._script).resolve(), Path(pbcrl.__file__).resolve().parent
        if any(Path(filename).resolve().is_relative_to(one) for one in ours):
            self.warn(str(message))
        else:
            self._show_warning(message, category, filename, lineno, file, line)

    def close_bar(self) -> None:
        """Take the progress bar down, so that it does not tick on under other words."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def state_dict(self) -> dict[str, Any]:
        """How long the logs are, what was warned of, and the time that has passed.

        The log is synced first: a checkpoint must not know of lines that a power cut can take.
        """
        os.fsync(self._metrics.fileno())
        stages = dict(self.stage_seconds)
        if self._stage is not None:
            name, start = self._stage
            stages[name] = stages.get(name, 0.0) + time.perf_counter() - start
        return {
            "lines": self._lines,
            "wall_seconds": self.wall_seconds,
            "stages": stages,
            "warnings": list(self._warnings),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Cut the logs back to a checkpoint; None is their start.

        Lines that are missing or torn are lost, with a warning: they decide nothing.
        """
        path = self.folder / "metrics.jsonl"
        wanted = 0 if state is None else int(state["lines"])
        rows, whole = path.read_bytes().splitlines()[:wanted], []
        for row in rows:
            try:
                whole.append(json.loads(row))
            except ValueError:
                continue
        if len(whole) < wanted:
            self.say(
                f"warning: {path} has {len(whole)} whole lines, but the checkpoint knows of "
                f"{wanted}: a power cut, or somebody, has taken the others; the run goes on"
            )
        self._metrics.close()
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in whole).encode())
        self._metrics = path.open("a")
        self._lines = len(whole)
        step = 0 if state is None else int(state["lines"]) * self._args.batch_size
        if state is not None:
            self._start -= state["wall_seconds"]
            self.stage_seconds = dict(state["stages"])
            now = [text for text in self._warnings if text not in state["warnings"]]
            self._warnings = [*state["warnings"], *now]
        self._board.close()
        self._board = SummaryWriter(str(self.folder), purge_step=step + 1)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, say what it means, print it, and say what one may do next."""
        self.close_bar()
        train_seconds = self.stage_seconds["train"]
        steps = self._args.num_iterations * self._args.batch_size
        of_multiplier = self._multiplier_verdicts(summary)
        summary = {
            **summary,
            "verdict": verdict(summary, multiplier=of_multiplier),
            "env_steps": steps,
            "wall_seconds": self.wall_seconds,
            "stage_seconds": self.stage_seconds,
            "steps_per_second": steps / train_seconds,
            "warnings": self._warnings,
        }
        write_atomically(self.folder / "summary.json", _json(_plain(summary)))
        self._draw({f"evaluation/{key}": value for key, value in summary.items()}, steps)
        self.say("== verdict")
        for line in summary["verdict"]:
            self.say(f"   {line}")
        self.say(f"== summary ({self.folder / 'summary.json'})")
        print_groups(summary)
        for line in [*limit_verdicts(summary), *of_multiplier]:
            self.say(line)
        named = env_id_flag(self._args.env_id)
        if _has_content(self.folder / "agent.safetensors"):
            self.say(f"play it again: {command_of('evaluate', self.folder, *named)}")
        if _has_content(self.folder / POLICY_FILE) and self._cost_limit != math.inf:
            self.say(
                f"how often is it unsafe, at most: {command_of('certify', self.folder, *named)}"
            )
        self.say(f"curves: tensorboard --logdir {shlex.quote(str(self.folder.parent))}")

    def _slow_multiplier(self, moved: tuple[int, int] | None = None) -> str | None:
        is_priced = hasattr(self._args, "multiplier_lr") and self._cost_limit != math.inf
        horizon = horizon_by_id(self._args)
        return slow_multiplier(self._args, horizon, moved=moved) if is_priced else None

    def _multiplier_verdicts(self, summary: Mapping[str, Any]) -> list[str]:
        """What the course of λ and of the returns means, as far as the log still has it."""
        args = self._args
        if self._cost_limit == math.inf or getattr(args, "multiplier_lr", 0) == 0:
            return []
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        costs: list[Any] = [summary.get("true_cost_last_fifth")]
        limit = self._cost_limit
        if not _finite(costs[0]) and getattr(args, "constraint", "learned") == "learned":
            costs = [row.get("learned_cost") for row in last_fifth(rows)]
            limit = summary.get("learned_limit", math.nan)
        known = [cost for cost in costs if _finite(cost)]
        is_kept = sum(known) / len(known) <= limit if known and math.isfinite(limit) else None
        values = [row["multiplier"] for row in rows if _finite(row.get("multiplier"))]
        more = longer(args, 2 * args.num_iterations)
        # Moved too seldom, it is mostly at its cap or rising, too: said once.
        stood = sum(not _finite(row.get(_followed(args, row))) for row in rows)
        moved = args.num_iterations - stood  # in iterations whose line is lost, too
        said = self._slow_multiplier((moved, args.num_iterations)) or multiplier_verdict(
            values, cap=args.multiplier_cap, is_kept=is_kept, longer=more
        )
        found = [said]
        if getattr(args, "constraint", None) == "rate" and _finite(costs[0]):
            share = args.max_unsafe_rate
            found.append(share_verdict(values, cost=costs[0], limit=limit, unsafe_rate=share))
        ended = [row for row in rows if _finite(row.get("return"))]
        earned = [row["return"] for row in ended]
        first = [row["true_cost"] for row in ended[:FIRST_ROWS] if _finite(row.get("true_cost"))]
        were_unsafe = bool(first) and sum(first) / len(first) > self._cost_limit
        if not first:  # people judge
            labelled = [row["unsafe_rate"] for row in rows if _finite(row.get("unsafe_rate"))]
            were_unsafe = bool(labelled) and labelled[0] > 0.5
        if is_kept is not False:  # a policy that is not safe was not stopped
            by_labels = hasattr(args, "online_queries")
            found.append(standstill_verdict(earned, were_unsafe=were_unsafe, by_labels=by_labels))
        return [line for line in found if line is not None]

    def _end_stage(self) -> None:
        assert self._stage is not None
        name, start = self._stage
        self._stage = None
        seconds = time.perf_counter() - start
        self.stage_seconds[name] = self.stage_seconds.get(name, 0.0) + seconds

    def _say_kept(self, error: BaseException) -> None:
        try:
            if self._keep is not None:
                self._keep()
        except PbcrlError as problem:
            self.say(f"warning: {problem}")
        kept = [file for file in _PAID_FOR if _has_content(self.folder / file)]
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        self.say(f"stopped ({why}): kept {', '.join(kept) or 'nothing'} in {self.folder}")
        named = env_id_flag(self._args.env_id)
        command = command_of(self._script, "--resume", self.folder, *named)
        mended = "" if isinstance(error, KeyboardInterrupt) else "when its cause is mended, "
        self.say(f"{mended}go on with: {command}")


def _followed(args: Any, row: Mapping[str, Any]) -> str:
    """The key of what λ follows in a row, null where it was not measured."""
    if "measured" in row:
        return "measured"
    if hasattr(args, "constraint"):  # of language models
        return {"rate": "violation_rate", "accept": "rejected"}.get(args.constraint, "return")
    return "learned_cost" if "learned_cost" in row else "true_cost"


_GROUP_OF = {
    "policy": "return true_cost multiplier episodes discarded",
    "cost_model": "learned_ dead_zone queries_ type_ii_ unsafe_rate measured allowed rejected "
    "violation_ finetune_ classifier_ positives negatives",
    "seconds": "seconds_",
}
"""The tabs of TensorBoard, by the beginnings of their keys; `update` has all others."""


def _group(key: str) -> str:
    for group, beginnings in _GROUP_OF.items():
        if key.startswith(tuple(beginnings.split())):
            return group
    return "update"


def _table(values: Mapping[str, Any]) -> str:
    rows = (f"| {name} | {value} |" for name, value in values.items())
    return "\n".join(["| argument | value |", "|---|---|", *rows])


def _track(args: Any, folder: Path) -> Any:
    """Begin, or go on with, a run of Weights & Biases; env steps (of pretraining) are its axis."""
    wandb: Any = importlib.import_module("wandb")
    note = folder / "wandb_id"
    if not note.exists():
        write_atomically(note, secrets.token_hex(4).encode())
    # Not sync_tensorboard: with wandb 0.31 every event repeats all numbers of its step, films too.
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "pbcrl"),
        id=note.read_text(),
        resume="allow",
        name=folder.name,
        dir=str(folder),
        config=dataclasses.asdict(args),
    )
    tracked.define_metric("*", step_metric="env_steps")
    tracked.define_metric("pretraining/*", step_metric="pretraining/steps")
    return tracked


def print_groups(values: Mapping[str, Any]) -> None:
    """Print numbers under headings, with their intervals; what is undefined is left out."""
    width = max(map(len, values)) + 2
    groups: dict[str, list[str]] = {heading: [] for heading in _GROUPS}
    for key, value in values.items():
        nothing = value is None or value == [] or value != value  # NaN
        if nothing or key == "verdict" or key.endswith("_interval"):
            continue
        half = values.get(f"{key}_interval")
        shown = _shown(value) if half is None else plus_minus(value, half)
        groups[_heading(key)].append(f"   {key:<{width}}{shown}")
    for heading, lines in groups.items():
        if "test_episodes" not in values:
            heading = heading.replace("test", "these")
        if lines:
            print(f"-- {heading}", *lines, sep="\n")


_GROUPS = "policy", "learned cost", "cost model on test episodes", "run"
_OF_POLICY = (
    *("return", "true_cost", "cost_limit", "bias", "violation_rate", "labelled_unsafe_rate"),
    *("upstream", "multiplier", "costly"),
)
_OF_EVALUATION = "env_id", "episodes", "policy", "eval_episodes"
_OF_LEARNED_COST = (
    *("learned_", "dead_zone", "queries_", "compared_"),
    *("safe_labels", "unsafe_labels"),
)


def _heading(key: str) -> str:
    policy, learned, tested, run = _GROUPS
    if key.endswith("_evaluation") or key.startswith(_OF_LEARNED_COST):
        return learned
    if key in (*REPORT, "step_auroc", "test_episodes") or key.startswith("pretrained_"):
        return tested
    return policy if key.startswith(_OF_POLICY) or key in _OF_EVALUATION else run


def open_child(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, however this one dies (on Linux)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG

    return subprocess.Popen(command, preexec_fn=die_with_parent, **options)


def made_by(script: str) -> dict[str, str | None]:
    """Return what a number must be reported with: command, versions, commit and hardware."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(script).resolve().parent,
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # no checkout, or no git
    here = f"{Path.cwd()}{os.sep}"  # as one would type it there
    words = [word.removeprefix(here) for word in sys.argv]
    started = Path(sys.argv[0]).resolve() == Path(script).resolve()  # and not imported
    return {
        "command": command_of(script, *words[1:]) if started else shlex.join(["python", *words]),
        "commit": commit,
        "pbcrl": pbcrl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": f"{_processor()}, {os.cpu_count()} cores",
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        text = ""
    named = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return named[0] if named else platform.processor() or platform.machine()


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def command_of(script: str, *words: object) -> str:
    """What to type here to run a script: the name of one of ours, or the path of any.

    They are run by the command `pbcrl` where this process was, or where they are installed, and
    otherwise by their paths.
    """
    path = Path(script)
    if path.suffix != ".py":
        path = SCRIPTS / f"{script}.py"
    path = path.resolve()
    shown = shlex.quote(
        str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    )
    by_command = any(Path(word).stem == "pbcrl" for word in sys.orig_argv[:2])
    if by_command or SCRIPTS.name == "pbcrl_scripts":
        ours = path.is_relative_to(SCRIPTS)
        trains = "train " if path.stem.startswith("ppo_") or not ours else ""
        begin = f"pbcrl {trains}{path.stem if ours else shown}"
    else:
        begin = f"python {shown}"
    return " ".join([begin, *(shlex.quote(str(word)) for word in words)])


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    # NaN is not JSON: what is undefined is null.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
