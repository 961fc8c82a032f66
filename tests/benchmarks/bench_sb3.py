"""The recipe of docs/adapters.md for Stable-Baselines3, word for word: does it keep a limit?

`told` trains with the true cost and its limit, on tasks of the proving ground, `unlimited` there
with no limit. `learned` trains on the toy, under a cost learned from labels: a network, pretrained
on whole episodes of scripted drivers, from reckless to cautious, that goes on learning from labels
of the policy's episodes; the true costs reach the simulated oracle and the results only. Return and
true cost are those of the stochastic policy after training; each run adds a row to `--out`, and
what has a row there is not run again.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from script_runs import add_row

import pbcrl_envs
from pbcrl import (
    CostModel,
    CostModelTrainer,
    FeedbackLoop,
    PreferenceBuffer,
    SyntheticOracle,
    Trajectory,
)
from pbcrl_envs.proving import GROUND
from pbcrl_envs.toy.point_hazards import HAZARDS
from pbcrl_script_utils.run import made_by

ROOT = Path(__file__).parents[2]
TOY, HORIZON = "PointHazards-v0", 100
COLUMNS = (
    *("commit", "command", "method", "task", "seed", "limit", "return", "true_cost"),
    *("multiplier", "wall_seconds"),
)


@dataclass(frozen=True)
class Args:
    out: str | None = None
    """CSV file to add rows to"""
    tasks: tuple[str, ...] = ("Cruise", "Gap")
    """of the proving ground, by name; not for `learned`"""
    methods: tuple[Literal["told", "unlimited", "learned"], ...] = ("told", "unlimited", "learned")
    """which of them to run"""
    seeds: tuple[int, ...] = (0, 1, 2)
    total_timesteps: int = 500_000
    """env steps of each policy's training"""
    eval_episodes: int = 200
    offline_queries: int = 4_500
    """pairs of drivers' episodes, a tenth of them for validation"""
    online_queries: int = 1_000
    """pairs of the policy's episodes, spread evenly over the training"""


def recipe() -> dict[str, Callable[..., Any]]:
    """Return the functions of the page's first block, `train` and `evaluate`."""
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    functions: dict[str, Any] = {}
    exec(compile(block[1], "adapters.md", "exec"), functions)
    return functions


def drive(count: int, rng: np.random.Generator) -> list[Trajectory]:
    """Return an episode of each of `count` scripted drivers, from reckless to cautious."""
    envs = gym.make_vec(TOY, count, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    caution, noise = rng.uniform(0, 2, (count, 1)), rng.uniform(0.1, 0.5, (count, 1))
    obs, _ = envs.reset(seed=int(rng.integers(2**31 - count)))
    rows = []
    for _ in range(HORIZON):
        goal, away = obs[:, 2:], obs[:, None, :2] - HAZARDS  # (N, 2), (N, hazards, 2)
        distance = np.linalg.norm(away, axis=2, keepdims=True)
        push = (away / distance * np.clip((0.4 - distance) / 0.15, 0, 1)).sum(axis=1)
        towards = goal / (np.linalg.norm(goal, axis=1, keepdims=True) + 1e-6)
        actions = towards + caution * push + noise * rng.normal(size=(count, 2))
        before, actions = obs.copy(), np.clip(actions, -1, 1).astype(np.float32)
        obs, *_, infos = envs.step(actions)
        rows.append((before, actions, infos["cost"].copy()))
    arrays = [np.stack(column, axis=1) for column in zip(*rows, strict=True)]
    return [Trajectory(*episode) for episode in zip(*arrays, strict=True)]


def learned_cost(args: Args, seed: int) -> tuple[CostModel, Callable[[Sequence[Trajectory]], None]]:
    """Return a pretrained cost model, and what asks about the policy's episodes and trains it."""
    rng, limit = np.random.default_rng(seed), pbcrl_envs.cost_limit(TOY)
    assert limit is not None
    model = CostModel.for_env(gym.make(TOY))
    train, valid = PreferenceBuffer(), PreferenceBuffer()
    train.add_trajectories(drive(1_000, rng))
    valid.add_trajectories(drive(200, rng))
    feedback = FeedbackLoop(SyntheticOracle(limit), train, rng=rng)
    num_valid = args.offline_queries // 10
    feedback.label_all([(train, args.offline_queries - num_valid), (valid, num_valid)])
    model.fit_input_scale(train.trajectories)
    trainer = CostModelTrainer(model, lr=3e-3, batch_size=32, rng=rng)
    trainer.pretrain(train, valid, max_epochs=20, patience=40)
    played = 0

    def on_episodes(episodes: Sequence[Trajectory]) -> None:
        nonlocal played
        played += HORIZON * len(episodes)
        feedback.add(episodes)
        due = args.online_queries * played // args.total_timesteps
        if due >= feedback.queries_asked + 50:  # not for a few answers only
            trainer.finetune(train, num_new=len(feedback.round(due, model=model).pairs))

    return model, on_episodes


def run(args: Args, method: str, task: str, seed: int) -> dict[str, float]:
    """Train and evaluate one policy, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    functions, start = recipe(), time.perf_counter()
    options: dict[str, Any]
    if method == "learned":
        model, on_episodes = learned_cost(args, seed)
        env_id, options = TOY, {"cost_model": model, "on_episodes": on_episodes}
    else:
        env_id, limit = GROUND[task].env_id, GROUND[task].limit
        options = {"limit": limit if method == "told" else np.inf}
    agent = functions["train"](env_id, args.total_timesteps, seed=seed, **options)
    wall_seconds = time.perf_counter() - start
    multiplier = agent.get_env().multiplier.value
    episode_return, true_cost = functions["evaluate"](agent, args.eval_episodes)
    names = "return", "true_cost", "multiplier", "wall_seconds"
    numbers = episode_return, true_cost, multiplier, wall_seconds
    return {name: float(f"{number:.5g}") for name, number in zip(names, numbers, strict=True)}


def main(args: Args) -> list[dict[str, Any]]:
    """Run all, print and return the rows."""
    out, done, found = None if args.out is None else Path(args.out), set(), []
    if out is not None and out.exists():
        with out.open(newline="") as file:
            done = {(row["method"], row["task"], int(row["seed"])) for row in csv.DictReader(file)}
    jobs = [
        (method, task, seed)
        for method in args.methods
        for task in ([TOY] if method == "learned" else args.tasks)
        for seed in args.seeds
    ]
    for method, task, seed in jobs:
        if (method, task, seed) in done:
            continue
        made = made_by(__file__)
        row = {
            **{"commit": made["commit"] or "", "command": made["command"]},
            **{"method": method, "task": task, "seed": seed},
            "limit": pbcrl_envs.cost_limit(TOY) if method == "learned" else GROUND[task].limit,
            **run(args, method, task, seed),
        }
        found.append(row)
        print({name: row[name] for name in COLUMNS[2:]}, flush=True)
        if out is not None:
            add_row(out, COLUMNS, row)
    return found


if __name__ == "__main__":
    main(tyro.cli(Args))
