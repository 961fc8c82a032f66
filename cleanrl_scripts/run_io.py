"""What every script shares and no algorithm cares about: environments by id, run folders, logs.

A run's folder holds `args.json`, `metrics.jsonl` (one line per iteration), TensorBoard events,
checkpoints and, at the end, `summary.json`. The keys are listed in `docs/metrics.md`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import pbcrl_envs
from pbcrl import MissingCostError, PbcrlError, StorageError

_BOARD_SECONDS = 10.0  # for TensorBoard to write its last events
_PAID_FOR = "agent.safetensors", "cost_model.safetensors", "labels.jsonl", "metrics.jsonl"

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C ended, as shells have it."""


def make_envs(env_id: str, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """Make `num_envs` copies of any Gymnasium env with flat Box spaces; ended ones reset at once.

    An id whose vector entry point takes `autoreset_mode` (all batched tasks of ours) is made
    batched; any other is run by `SyncVectorEnv`. `module:Id-v0` imports `module`.

    Raises:
        ValueError: If the id is unknown (the nearest are named), it has no time limit, or its
            spaces do not fit.
    """
    module, _, plain_id = env_id.rpartition(":")
    try:
        if module:
            # A script's path starts with its own folder, but users' modules lie where they work.
            sys.path[:] = dict.fromkeys([os.getcwd(), *sys.path])
            importlib.import_module(module)
        spec = gym.spec(plain_id)
    except (gym.error.Error, ModuleNotFoundError) as error:
        near = difflib.get_close_matches(plain_id, list(gym.registry), n=3, cutoff=0.4)
        ours = [task.env_id for task in pbcrl_envs.TASKS.values()]
        raise ValueError(
            f"--env-id must be a registered Gymnasium id, got {env_id!r} ({error}); "
            f"did you mean {' or '.join(near or ours)}? For an env of your own use 'module:Id-v0'"
        ) from error
    if spec.max_episode_steps is None:
        raise ValueError(
            f"episodes must end for their cost to be compared, but {env_id} has no time limit; "
            "register it with max_episode_steps"
        )
    entry: Any = spec.vector_entry_point
    if isinstance(entry, str):
        entry = load_env_creator(entry)
    if entry is not None and "autoreset_mode" in inspect.signature(entry).parameters:
        envs = gym.make_vec(plain_id, num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        options = {"autoreset_mode": AutoresetMode.SAME_STEP}
        envs = gym.make_vec(plain_id, num_envs, vectorization_mode="sync", vector_kwargs=options)
    for name, space in [
        ("observation", envs.single_observation_space),
        ("action", envs.single_action_space),
    ]:
        if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
            raise ValueError(
                f"the scripts need a flat Box {name} space, {env_id} has {space}; wrap the env, "
                "for example with gymnasium.wrappers.FlattenObservation, and register that"
            )
    return envs


def flat_dims(envs: VectorEnv[Any, Any, Any]) -> tuple[int, int]:
    """Return (obs_dim, act_dim) of envs from `make_envs`."""
    obs_shape, act_shape = envs.single_observation_space.shape, envs.single_action_space.shape
    assert obs_shape is not None
    assert act_shape is not None
    return obs_shape[0], act_shape[0]


def action_bounds(envs: VectorEnv[Any, Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest action of envs from `make_envs`, (act_dim,) each."""
    space = envs.single_action_space
    assert isinstance(space, gym.spaces.Box)
    return space.low, space.high


def horizon_of(envs: VectorEnv[Any, Any, Any]) -> int:
    """Return the time limit of envs from `make_envs`, in steps."""
    assert envs.spec is not None
    assert envs.spec.max_episode_steps is not None
    return envs.spec.max_episode_steps


def resolve_cost_limit(env_id: str, given: float | None) -> float:
    """Return d: the one given, else the task's own.

    Raises:
        ValueError: If neither is known, or the one given is negative or NaN.
    """
    limit = pbcrl_envs.cost_limit(env_id) if given is None else given
    if limit is None:
        raise ValueError(
            f"no cost limit is known for {env_id}; give the highest episode cost that still "
            "counts as safe with --cost-limit"
        )
    if not limit >= 0:
        raise ValueError(f"--cost-limit must be >= 0 (inf is unconstrained), got {limit}")
    return limit


def require_cost(costs: np.ndarray | None, env_id: str) -> np.ndarray:
    """Return the true costs of a step, or say that the env reports none.

    Raises:
        MissingCostError: If `costs` is None.
    """
    if costs is None:
        raise MissingCostError(
            f"the true cost is needed here, but {env_id} reports none; put a number into "
            "info['cost'] at every step (pbcrl_envs.check_cost_env tells whether it is right)"
        )
    return costs


def require_positive(args: Any, *names: str) -> None:
    """Refuse arguments that count something and are below 1.

    Raises:
        ValueError: If one is.
    """
    for name in names:
        if getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )


def require_device(name: str) -> None:
    """Refuse a GPU that PyTorch cannot use.

    Raises:
        ValueError: If it is asked for.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda needs a GPU that PyTorch can use, but torch.cuda.is_available() is "
            f"false with torch {torch.__version__}; install a CUDA build of PyTorch and a driver, "
            "or leave out --device"
        )


class Laps:
    """Where an iteration's time goes: each moment belongs to the phase that ends next."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def begin(self) -> None:
        """Forget the time since the last phase ended."""
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """Count the time since the last phase ended to this one."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase, and count anew."""
        taken, self._seconds = self._seconds, {}
        return taken


class TimedEnvs(VectorWrapper):
    """Tells the envs' own time from that of the wrapper around them, which scores their steps."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], laps: Laps) -> None:
        super().__init__(envs)
        self._laps = laps

    def step(self, actions: Any) -> Any:
        self._laps.end("cost_model")
        result = self.env.step(actions)
        self._laps.end("env")
        return result


class Run:
    """The folder of one run, its logs and its progress bar; closes them when the `with` block ends.

    A block that an error or Ctrl-C ends says what the run has left behind.

    Args:
        args: The script's arguments; needs `env_id`, `seed`, `runs_dir`, `run_name` and `resume`.
        total: Env steps of the main phase, for the progress bar.

    Raises:
        StorageError: If the folder cannot be made or written.
    """

    def __init__(self, args: Any, *, script: str, total: int) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        env_name = args.env_id.rsplit(":", 1)[-1].replace("/", "-")
        name = args.run_name or f"{env_name}__{script}__{args.seed}__{stamp}"
        self.folder = Path(args.runs_dir) / name
        if args.resume is None and any(_has_content(self.folder / file) for file in _PAID_FOR):
            raise StorageError(
                f"a run must not write over another: {self.folder} holds one already; "
                f"give another --run-name, or go on with it by --resume {self.folder}"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"script": script, **dataclasses.asdict(args)}, indent=2)
            if args.resume is None:
                draft = self.folder / "args.json.draft"
                draft.write_text(text + "\n")
                draft.replace(self.folder / "args.json")  # whole or not at all: a kill may come
            self._metrics = (self.folder / "metrics.jsonl").open("a")
        except OSError as error:
            raise StorageError(
                f"the run's folder must be writable: {self.folder} is not ({error}); "
                "choose another with --runs-dir"
            ) from error
        self._board = SummaryWriter(str(self.folder))
        self._total = total
        self._bar: tqdm[Any] | None = None
        self._start = time.perf_counter()
        self._lines = 0
        self.stage_seconds: dict[str, float] = {}
        """How long each stage took, all parts of a run that was resumed together."""
        self._stage: tuple[str, float] | None = None  # its name, and when it began

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is not None:
            self._say_kept(error)
        self._metrics.close()
        # TensorBoard's writer waits for its thread, and for ever if Ctrl-C came while an event was
        # handed over: the run then ends without its last events. metrics.jsonl has them all.
        closing = threading.Thread(target=self._board.close, daemon=True)
        closing.start()
        closing.join(timeout=_BOARD_SECONDS)

    @property
    def wall_seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    @contextmanager
    def phase(self, title: str, *, stage: str) -> Iterator[None]:
        """Announce a phase, and how long it took when it is over; the time goes to `stage`."""
        self.say(f"== {title}")
        start = time.perf_counter()
        self.begin_stage(stage)
        yield
        self.end_stage()
        self.say(f"   done in {time.perf_counter() - start:.1f} s")

    def begin_stage(self, name: str) -> None:
        """Count the time from now on to the stage `name`."""
        self._stage = name, time.perf_counter()

    def end_stage(self) -> float:
        """End the present stage; return the seconds that it has taken so far."""
        assert self._stage is not None
        name, start = self._stage
        self._stage = None
        seconds = self.stage_seconds.get(name, 0.0) + time.perf_counter() - start
        self.stage_seconds[name] = seconds
        return seconds

    def save_costs(self, true_costs: np.ndarray, learned_costs: np.ndarray) -> None:
        """Write the costs of the test episodes, (n,) each, to `test_costs.csv`."""
        rows = np.stack([true_costs, learned_costs], axis=1)
        path = self.folder / "test_costs.csv"
        np.savetxt(
            path, rows, fmt="%.9g", delimiter=",", header="true_cost,learned_cost", comments=""
        )

    def say(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def _say_kept(self, error: BaseException) -> None:
        kept = [file for file in _PAID_FOR if _has_content(self.folder / file)]
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        self.say(f"stopped ({why}): kept {', '.join(kept) or 'nothing'} in {self.folder}")

    def start_progress(self, step: int = 0) -> None:
        """Show the progress bar of the main phase, from `step` env steps."""
        self._bar = tqdm(
            total=self._total, initial=step, unit="step", unit_scale=True, smoothing=0.1
        )

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint needs of the logs: how long they are, and the time that has passed."""
        stages = dict(self.stage_seconds)
        if self._stage is not None:
            name, start = self._stage
            stages[name] = stages.get(name, 0.0) + time.perf_counter() - start
        return {"lines": self._lines, "wall_seconds": self.wall_seconds, "stages": stages}

    def set_state(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Cut the logs back to a checkpoint at `step` env steps; None is their start."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        self._lines = 0 if state is None else int(state["lines"])
        if len(lines) < self._lines:
            raise StorageError(
                f"metrics.jsonl in {self.folder} has {len(lines)} lines, but its checkpoint knows "
                f"of {self._lines}; restore that file, or start the run anew"
            )
        os.truncate(path, sum(map(len, lines[: self._lines])))
        if state is not None:
            self._start -= state["wall_seconds"]
            self.stage_seconds = dict(state["stages"])
        self._board.close()
        self._board = SummaryWriter(str(self.folder), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write one line of metrics and move the progress bar to `step` env steps."""
        row = {"env_steps": step, "wall_seconds": round(self.wall_seconds, 3), **metrics}
        self._metrics.write(json.dumps(_plain(row)) + "\n")
        self._metrics.flush()
        self._lines += 1
        for key, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._board.add_scalar(key, value, step)
        assert self._bar is not None
        self._bar.update(min(step, self._total) - self._bar.n)
        shown = {"return": "R", "true_cost": "C", "learned_cost": "Ĉ", "multiplier": "λ"}
        text = [
            f"{mark} {metrics[key]:.3g}" for key, mark in shown.items() if _finite(metrics.get(key))
        ]
        self._bar.set_postfix_str(" ".join(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` and print it as a table."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        draft = self.folder / "summary.json.draft"
        draft.write_text(json.dumps(_plain(summary), indent=2) + "\n")
        draft.replace(self.folder / "summary.json")
        self.say(f"== summary ({self.folder / 'summary.json'})")
        print_table(summary)


def main(train: Callable[[Any], Any], args_type: type[Any], argv: list[str] | None = None) -> None:
    """Parse the arguments and train; errors that a user can mend are one line, not a traceback."""
    args = tyro.cli(args_type, args=argv)
    try:
        train(args)
    except (PbcrlError, ValueError, RuntimeError, OSError, DependencyNotInstalled) as error:
        if os.environ.get("PBCRL_TRACEBACK"):
            raise
        sys.exit(f"error: {error}\n(PBCRL_TRACEBACK=1 shows where)")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def print_table(values: Mapping[str, Any]) -> None:
    """Print one line per entry; what is undefined is a dash."""
    width = max(map(len, values)) + 2
    for key, value in values.items():
        print(f"   {key:<{width}}{_shown(value)}")


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    # NaN is not JSON: what is undefined is null.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
