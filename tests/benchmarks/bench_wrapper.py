"""What the wrappers add to a step, of vectorised envs and of a single one; part of `make bench`.

Bare and wrapped envs run in turns, with the same seeds and actions, a whole episode of each env per
turn. Of the wrapped step, the time in the cost model (scoring) and in the recorder (recording) is
told apart; the rest are the wrapper's checks and infos.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro

import pbcrl_envs  # noqa: F401 - registers the tasks
from pbcrl import CostModel, PreferenceCostVectorWrapper, PreferenceCostWrapper


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointGoal1-v0"
    """task to run"""
    single_id: str = "PointHazards-v0"
    """task to run as a single env"""
    num_envs: int = 64
    """environments stepped together"""
    steps: int = 1_001
    """steps per turn: an episode and its reset"""
    rounds: int = 7
    """turns of each; medians are compared"""
    threads: tuple[int, ...] = (1, 2)
    """threads of PyTorch; a table for each"""


class Stopwatch:
    """Adds up the seconds spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def episode_seconds(envs: Any, actions: np.ndarray) -> float:
    """Seconds for all steps, without the first reset."""
    envs.reset(seed=0)
    start = time.perf_counter()
    for action in actions:
        envs.step(action)
    return time.perf_counter() - start


def single_env(args: Args) -> None:
    """The same for one env, an episode of it per turn."""
    torch.set_num_threads(1)
    bare, inner = gymnasium.make(args.single_id), gymnasium.make(args.single_id)
    model = CostModel.for_env(inner)
    wrapped = PreferenceCostWrapper(inner, model)
    scoring = Stopwatch(model.step_cost)
    model.step_cost = scoring  # type: ignore[method-assign]
    assert inner.spec is not None
    assert inner.spec.max_episode_steps is not None
    inner.action_space.seed(0)
    actions = np.stack([inner.action_space.sample() for _ in range(inner.spec.max_episode_steps)])
    rows = []
    for _ in range(20 * args.rounds):
        plain = episode_seconds(bare, actions)
        scoring.seconds = 0.0
        rows.append((plain, episode_seconds(wrapped, actions), scoring.seconds))
    plain, total, score = np.median(np.array(rows) / len(actions) * 1e6, axis=0)
    print(
        f"1 x {args.single_id}: bare {plain:.0f}, wrapped {total:.0f}, so {total - plain:.0f} "
        f"microseconds more per step, of it scoring {score:.0f}",
        flush=True,
    )


def main(args: Args) -> None:
    single_env(args)
    bare: Any = gymnasium.make_vec(args.env_id, args.num_envs)
    inner: Any = gymnasium.make_vec(args.env_id, args.num_envs)
    model = CostModel.for_env(inner)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    wrapped: Any = PreferenceCostVectorWrapper(inner, model)
    scoring, recording = Stopwatch(model.step_cost), Stopwatch(wrapped.env._recorder.record)
    model.step_cost = scoring  # type: ignore[method-assign]
    wrapped.env._recorder.record = recording
    rng = np.random.default_rng(0)
    space = inner.single_action_space
    actions = rng.uniform(space.low, space.high, (args.steps, args.num_envs, *space.shape))
    actions = actions.astype(np.float32)
    print(
        f"{args.num_envs} x {args.env_id}, {args.steps} steps per turn, {os.cpu_count()} cores; "
        "microseconds per step of all envs"
    )
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows = []
        for _ in range(args.rounds):
            plain = episode_seconds(bare, actions)
            scoring.seconds = recording.seconds = 0.0
            total = episode_seconds(wrapped, actions)
            rows.append((plain, total, scoring.seconds, recording.seconds))
        times = np.array(rows) / args.steps * 1e6  # (rounds, 4)
        shares = times / times[:, 1:2]
        plain, total, score, record = np.median(times, axis=0)
        _, _, score_share, record_share = np.median(shares, axis=0)
        print(
            f"torch threads {threads}: bare {plain:,.0f}, wrapped {total:,.0f}, of it scoring "
            f"{score:.0f} = {score_share:.1%} ({shares[:, 2].min():.1%} to "
            f"{shares[:, 2].max():.1%}), recording {record:.0f} = {record_share:.1%}; "
            f"wrapped / bare {np.median(times[:, 1] / times[:, 0]):.2f}",
            flush=True,
        )
    bare.close()
    wrapped.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
