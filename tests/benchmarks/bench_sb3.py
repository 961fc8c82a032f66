"""The recipe of docs/adapters.md for Stable-Baselines3, word for word: does it keep a limit?

`told` trains with the true cost and its limit, `unlimited` with no limit, `trees` and `trees_500`
under a cost and a limit learned from 20,000 and from 500 queries about pairs of the policy's
episodes: there the true costs reach the simulated oracle and the results only. Return and true cost
are those of the stochastic policy after training; each run adds a row to `--out`, and what has a
row there is not run again.
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
    FeedbackLoop,
    PreferenceBuffer,
    SyntheticOracle,
    Trajectory,
    TreeCost,
    TreeTrainer,
)
from pbcrl_envs.proving import GROUND
from pbcrl_script_utils.run import made_by

ROOT = Path(__file__).parents[2]
Method = Literal["told", "unlimited", "trees", "trees_500"]
TOY = "PointHazards-v0"
QUERIES = {"trees": 20_000, "trees_500": 500}
"""About pairs of the policy's episodes."""
COLUMNS = (
    *("commit", "command", "method", "task", "seed", "limit", "return", "true_cost"),
    *("multiplier", "wall_seconds"),
)


@dataclass(frozen=True)
class Args:
    out: str | None = None
    """CSV file to add rows to"""
    tasks: tuple[str, ...] = ("Cruise", "Gap", "PointHazards")
    """of the proving ground, by name, or the toy"""
    methods: tuple[Method, ...] = ("told", "unlimited", "trees", "trees_500")
    """which of them to run"""
    seeds: tuple[int, ...] = (0, 1, 2)
    total_timesteps: int = 500_000
    """env steps of each policy's training"""
    eval_episodes: int = 200


def recipe() -> dict[str, Callable[..., Any]]:
    """Return the functions of the page's first block, `train` and `evaluate`."""
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    functions: dict[str, Any] = {}
    exec(compile(block[1], "adapters.md", "exec"), functions)
    return functions


def learned_cost(
    env_id: str, limit: float, queries: int, steps: int, seed: int
) -> tuple[TreeCost, Callable[[Sequence[Trajectory]], None]]:
    """Return a cost model, and what asks about the policy's episodes and trains it."""
    rng, buffer = np.random.default_rng(seed), PreferenceBuffer()
    model = TreeCost.for_env(gym.make(env_id))
    trainer = TreeTrainer(model, rng=rng)
    feedback = FeedbackLoop(SyntheticOracle(limit), buffer, rng=rng)
    played = 0

    def on_episodes(episodes: Sequence[Trajectory]) -> None:
        nonlocal played
        played += sum(map(len, episodes))
        feedback.add(episodes)
        due = int(queries * min(played / steps, 1) ** 0.5)  # more of them early, as the scripts
        trainer.update(buffer, feedback.round(due, model=model).pairs)

    return model, on_episodes


def task_of(name: str) -> tuple[str, float]:
    """Return the id and the limit of a task."""
    env_id = TOY if name == "PointHazards" else GROUND[name].env_id
    limit = pbcrl_envs.cost_limit(env_id)
    assert limit is not None
    return env_id, limit


def run(args: Args, method: Method, task: str, seed: int) -> dict[str, float]:
    """Train and evaluate one policy, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    functions, start = recipe(), time.perf_counter()
    env_id, limit = task_of(task)
    options: dict[str, Any] = {"limit": limit if method == "told" else np.inf}
    if method in QUERIES:
        parts = learned_cost(env_id, limit, QUERIES[method], args.total_timesteps, seed)
        options = dict(zip(("cost_model", "on_episodes"), parts, strict=True))
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
        for task in args.tasks
        for seed in args.seeds
    ]
    for method, task, seed in jobs:
        if (method, task, seed) in done:
            continue
        made = made_by(__file__)
        row = {
            **{"commit": made["commit"] or "", "command": made["command"]},
            **{"method": method, "task": task, "seed": seed},
            "limit": task_of(task)[1],
            **run(args, method, task, seed),
        }
        found.append(row)
        print({name: row[name] for name in COLUMNS[2:]}, flush=True)
        if out is not None:
            add_row(out, COLUMNS, row)
    return found


if __name__ == "__main__":
    main(tyro.cli(Args))
