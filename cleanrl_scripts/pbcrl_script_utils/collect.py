"""Episodes to pretrain on: recorded while `ppo_lag.py` trains, cached by its arguments."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from pbcrl import Trajectory, TrajectoryWriter
from pbcrl.env_modules import env_id_flag
from pbcrl.errors import PbcrlError
from pbcrl.label.replay import Replay
from pbcrl.storage import write_atomically
from pbcrl_script_utils.datasets import Split, open_dataset
from pbcrl_script_utils.envs import flat_dims, horizon_of
from pbcrl_script_utils.launch import INTERRUPTED
from pbcrl_script_utils.replays import Replays
from pbcrl_script_utils.resume import is_finished, read_args
from pbcrl_script_utils.run import SCRIPTS, Run, open_child

_SHARED = """
    env_id seed num_envs num_steps update_epochs minibatch_size learning_rate lr_decay max_grad_norm
    hidden_sizes gamma gae_lambda clip_coef target_kl bound_coef threads device
"""


_PER_QUERY = 3  # two are shown, and a fifth of all is kept to validate and to test on
_FEWEST_STEPS = 100_000  # a policy of the reward alone is to be random at first, reckless at last


def collection_steps(args: Any, horizon: int) -> int:
    """Return how many env steps are collected by the reward alone: three episodes per query.

    What nobody is asked about need not be played. The shorter it is, the more of it is from before
    the policy has found what it repeats: few queries see more kinds of behaviour.

    Args:
        args: Of `ppo_lag_pbcrl.py`.
        horizon: Most steps of an episode.
    """
    wanted = _PER_QUERY * args.offline_queries * horizon
    steps: int = min(max(wanted, _FEWEST_STEPS), args.total_timesteps)
    return steps


class Collector:
    """Writes a uniform sample of a run's episodes to `args.save_trajectories`.

    Args:
        args: Needs that path, `max_trajectories`, `env_id`, `seed` and `resume`.
        envs: Of `make_envs`.
    """

    def __init__(self, args: Any, envs: VectorEnv[Any, Any, Any]) -> None:
        obs_dim, act_dim = flat_dims(envs)
        # A stream for itself: whether episodes are saved changes no training.
        self._rng = np.random.default_rng([args.seed, 1])
        self._writer = TrajectoryWriter(
            args.save_trajectories,
            env_id=args.env_id,
            obs_shape=(obs_dim,),
            act_dim=act_dim,
            horizon=horizon_of(envs),
            capacity=args.max_trajectories,
            rng=self._rng,
            overwrite=args.resume is not None,
        )
        self._replays = Replays(self._writer.path)

    def add(self, trajectories: Sequence[Trajectory], replays: Sequence[Replay | None]) -> None:
        """Take finished episodes, with how they can be played again, into the sample."""
        for trajectory, replay in zip(trajectories, replays, strict=True):
            if self._writer.add(trajectory):
                self._replays.add([trajectory], [replay])

    def sync(self) -> None:
        """Put on disk what was added, if it is not closed: then all is."""
        if not self._replays.close.alive:
            return
        self._replays.sync()  # first: what is in the dataset can be played again
        self._writer.flush()

    def close(self) -> None:
        """Finish the dataset."""
        self._replays.close()
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """All of it; what was added is on disk when this returns."""
        self.sync()
        return {"writer": self._writer.state_dict(), "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._writer.load_state_dict(state["writer"])
        self._rng.bit_generator.state = state["rng"]


def offline_episodes(
    args: Any,
    run: Run,
    envs: VectorEnv[Any, Any, Any],
    *,
    replays: Replays | None = None,
) -> Split:
    """Return those of `args.dataset`, or collect them; none if nothing is learned offline.

    Args:
        args: Of `ppo_lag_pbcrl.py`.
        run: Whose folder holds what is collected until it is finished.
        envs: Of `make_envs`, which the episodes must fit.
        replays: Where it is looked up how they can be played again, if that is wanted.

    Raises:
        PbcrlError: If collecting fails, or the dataset does not fit.
    """
    path = args.dataset
    if path is None and args.offline_queries:
        with run.phase("phase 1 of 4: collect episodes by the reward alone", stage="collect"):
            path = collect(args, run, horizon_of(envs))
    if path is None:
        return [], [], []
    if not args.offline_queries:
        run.say(f"   nobody is asked about {path}, only tested on: --offline-queries is 0")
    if replays is not None and not replays.include(path):
        run.warn(f"{path} does not say how to play its episodes again: people will see curves")
    # The same split whenever a run goes on.
    return open_dataset(
        path,
        args.env_id,
        envs,
        rng=np.random.default_rng(args.seed),
        warn=run.warn,
        needs_costs=args.label_folder is None,
    )


def collect(args: Any, run: Run, horizon: int) -> Path:
    """Return the cached dataset, or start `ppo_lag.py` as a child to make it.

    Nobody has told a cost yet, so its policy is a reckless one; while it learns, it is many others.

    Raises:
        PbcrlError: If the child fails.
    """
    options = {name: getattr(args, name) for name in _SHARED.split()}
    options["cost_limit"] = np.inf
    options["total_timesteps"] = _steps_of(args, run, horizon)
    # Other arguments make another dataset, so they are part of its name.
    digest = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]
    env_name = args.env_id.rsplit(":", 1)[-1].replace("/", "-")
    cached = Path(args.runs_dir) / "datasets"
    cached /= f"{env_name}__{options['total_timesteps']}__{args.seed}__{digest}"
    if cached.exists():
        run.say(f"   using the episodes collected before in {cached}")
        return cached
    begun, episodes = run.folder / "collect", run.folder / "collected"
    if not _can_be_used(begun, options) or (is_finished(begun) and not episodes.exists()):
        # By other arguments, or its episodes were in a cache that was deleted.
        for folder in (begun, episodes):
            shutil.rmtree(folder, ignore_errors=True)
    if not is_finished(begun):
        options |= {"runs_dir": run.folder, "run_name": "collect", "eval_episodes": 1}
        # Absolute: who goes on may be in another directory.
        options["save_trajectories"] = episodes.resolve()
        command = [sys.executable, str(SCRIPTS / "ppo_lag.py")]
        if (begun / "args.json").exists():
            command += ["--resume", str(begun), *env_id_flag(args.env_id)]
        else:
            for name, value in options.items():
                values = value if isinstance(value, tuple) else (value,)
                if value is not False:
                    flag = f"--{name.replace('_', '-')}"
                    command += [flag] if value is True else [flag, *map(str, values)]
        # Its bar and errors are shown, its warnings below; nobody asks what its policy is worth.
        child = open_child(command, stdout=subprocess.DEVNULL)
        try:
            status = child.wait()
        except KeyboardInterrupt:
            child.wait()  # Ctrl-C reached the child too: it is writing down what it has
            raise
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status != 0:
            raise PbcrlError(f"collecting episodes failed with status {status}; its error is above")
        for warning in json.loads((begun / "summary.json").read_text())["warnings"]:
            run.warn(warning)
    if cached.exists():  # another run was faster
        return episodes
    cached.parent.mkdir(parents=True, exist_ok=True)
    episodes.rename(cached)
    return cached


def _steps_of(args: Any, run: Run, horizon: int) -> int:
    """How many env steps are collected: an extended run keeps the episodes of its beginning."""
    noted = run.folder / "collected.json"
    if args.resume is not None and noted.exists():
        return int(json.loads(noted.read_text())["total_timesteps"])
    steps = collection_steps(args, horizon)
    write_atomically(noted, json.dumps({"total_timesteps": steps}).encode())
    return steps


def _can_be_used(begun: Path, options: Mapping[str, Any]) -> bool:
    """Whether a child that was begun, if one was, collects by these arguments."""
    if not (begun / "args.json").exists():
        return not begun.exists()
    found = read_args(begun)
    wanted = json.loads(json.dumps({name: options[name] for name in _SHARED.split()}))
    return all(found.get(name) == value for name, value in wanted.items())
