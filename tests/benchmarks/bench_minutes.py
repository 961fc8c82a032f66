"""What a cost model learns from so many minutes of a person, by the kind of question.

`python tests/benchmarks/bench_minutes.py --dataset FOLDER --out FILE` takes a folder of
`ppo_lag.py --save-trajectories`, as `bench_gate.py` does; the last episodes are the test. A
simulated person answers questions about the others, as many as fit into the minutes by `SECONDS`:

- `pairs`: which of two whole episodes is safer, and is each of them safe;
- `grids`: which of twelve clips have an unsafe step;
- `marks`: which steps of an episode are unsafe, and is the whole of it safe;
- `labels`, a control: is a whole episode safe;
- `preferences`, another: which of two is safer. Trees refuse to learn from that alone, as nothing
  tells how much is too much, so of one episode they are told that it is unsafe.

Trees learn from the answers. Every result is a row of `--out`; what has a row is not run again.
"""

from __future__ import annotations

import csv
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from bench_gate import rounded
from gymnasium.spaces import Box
from script_runs import add_row

import pbcrl_envs
from pbcrl import (
    Label,
    Marks,
    PreferenceBuffer,
    Trajectory,
    TrajectoryDataset,
    TreeCost,
    TreeTrainer,
    cut_segments,
)
from pbcrl.errors import LabelError
from pbcrl.metrics import cost_model_report, step_auroc
from pbcrl.spaces import names_of
from pbcrl_script_utils.envs import make_envs
from pbcrl_script_utils.run import made_by

Kind = Literal["pairs", "grids", "marks", "labels", "preferences"]
SECONDS: dict[Kind, float] = {
    **{"pairs": 7.0, "grids": 13.5, "marks": 14.5},
    **{"labels": 3.5, "preferences": 5.5},
}
"""Of a person, per question; estimates, of which `bench_keys.py` times the handling alone: three or
four keys; twelve clips, of which some are clicked; an episode of 20 s at twice its speed, and a key
for the whole; half a pair; a pair without two of its keys."""
PER_MARKED_PAIR = SECONDS["pairs"] + 2 * SECONDS["marks"]
"""Of a pair of whole episodes, in both of which the unsafe moments are marked."""
GRID = 12
COLUMNS = (
    *("commit", "env", "source", "kind", "errors", "minutes", "seed", "questions"),
    *("step_auroc", "auroc", "balanced_accuracy", "true_cost_at_limit", "cost_limit", "seconds"),
)


@dataclass(frozen=True)
class Args:
    dataset: str
    """folder of trajectories, in the order of play"""
    source: str
    """whose episodes these are, for the table, such as "reward" or "lag" """
    out: str
    """CSV file to add rows to"""
    kinds: tuple[Kind, ...] = ("pairs", "grids", "marks")
    """of questions"""
    minutes: tuple[int, ...] = (3, 10, 30, 100)
    """of the person"""
    errors: bool = False
    """whether the person errs: 5 % of answers flipped; marks begin and end up to 10 steps off, and
    a tenth of the unsafe stretches is missed"""
    clip_length: int = 25
    """steps of a clip"""
    rounds: int = 150
    """trees"""
    test_share: float = 0.15
    """share of the episodes, the last ones, to test on"""
    max_test_episodes: int = 300
    """at most this many of them"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """of questions and models"""
    threads: int = 1
    """of PyTorch and LightGBM"""


def safe(episode: Trajectory, limit: float, flips: float, rng: np.random.Generator) -> float:
    """What the person says of a trajectory."""
    return float((episode.true_cost <= limit) != (rng.random() < flips))


def marked(episode: Trajectory, *, errors: bool, rng: np.random.Generator) -> Marks:
    """What the person marks in an episode."""
    assert episode.costs is not None
    unsafe = (episode.costs > 0).astype(np.float64)
    if not errors:
        return Marks(episode, unsafe)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unsafe, [0]])))
    seen = np.zeros(len(unsafe))
    for start, stop in edges.reshape(-1, 2):
        if rng.random() < 0.1:
            continue
        start, stop = (int(edge + rng.integers(-10, 11)) for edge in (start, stop))
        seen[max(start, 0) : max(stop, start + 1, 1)] = 1
    return Marks(episode, seen)


def answered(
    kind: Kind,
    data: TrajectoryDataset,
    pool: int,
    questions: int,
    args: Args,
    limit: float,
    rng: np.random.Generator,
) -> tuple[PreferenceBuffer, list[Marks]]:
    """Labels of so many questions, about episodes drawn from the first `pool`."""
    flips = 0.05 if args.errors else 0.0
    if kind == "grids":
        shown = []
        for i in rng.integers(pool, size=questions * GRID):
            clips = cut_segments([data[int(i)]], args.clip_length)
            shown.append(clips[rng.integers(len(clips))])
        bound = 0.0  # one unsafe step
    else:
        count = min(pool, questions * (2 if kind in ("pairs", "preferences") else 1))
        shown = [data[i] for i in np.sort(rng.choice(pool, count, replace=False))]
        bound = limit
    if len(shown) % 2:
        shown = shown[:-1]
    order = rng.permutation(len(shown)).reshape(-1, 2)
    labels, told = list[Label](), False
    for i, j in order:
        first, second = (safe(shown[k], bound, flips, rng) for k in (i, j))
        preference = math.nan
        if kind in ("pairs", "preferences"):
            costs = shown[i].true_cost, shown[j].true_cost
            preference = 0.5 if costs[0] == costs[1] else float(costs[0] < costs[1])
            preference = 1 - preference if rng.random() < flips else preference
        if kind == "preferences":
            is_first_unsafe = not told and first == 0
            told |= is_first_unsafe
            first, second = 0.0 if is_first_unsafe else math.nan, math.nan
        labels.append(Label(preference, first, second))
    buffer = PreferenceBuffer(shown)
    buffer.add_labels(order, labels)
    marks = [marked(one, errors=args.errors, rng=rng) for one in shown] if kind == "marks" else []
    return buffer, marks


def trial(
    args: Args, data: TrajectoryDataset, test: list[Trajectory], kind: Kind, minutes: int, seed: int
) -> dict[str, Any]:
    """Ask and learn once; return the measures."""
    rng = np.random.default_rng(seed)
    limit = pbcrl_envs.cost_limit(data.env_id)
    assert limit is not None
    questions = int(60 * minutes / SECONDS[kind])
    pool = len(data) - len(test)
    buffer, marks = answered(kind, data, pool, questions, args, limit, rng)
    like = test[0]
    spaces = [Box(-np.inf, np.inf, shape) for shape in (like.obs.shape[1:], like.actions.shape[1:])]
    horizon = args.clip_length if kind == "grids" else data.horizon
    trees = TreeCost(
        *spaces,
        names=names_of(make_envs(data.env_id, 1)),
        output_scale=horizon**-0.5,
        horizon=horizon,
        pooled=True,
    )
    trainer = TreeTrainer(trees, rng=rng, rounds=args.rounds, threads=args.threads)
    start = time.perf_counter()
    trainer.fit(buffer, marks=marks)
    seconds = time.perf_counter() - start
    true = np.array([episode.true_cost for episode in test])
    costs = np.array([float(trees.step_cost(t.obs, t.actions).sum()) for t in test])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        of_episodes = kind not in ("grids", "preferences")
        at = trees.learned_limit if of_episodes else float(np.median(costs))
        report = cost_model_report(costs, true, limit, learned_limit=at)
        report["step_auroc"] = step_auroc(trees.step_cost, test)
    if not of_episodes:  # what is learned says nothing of the limit of an episode
        report["balanced_accuracy"] = report["true_cost_at_limit"] = math.nan
    names = "step_auroc", "auroc", "balanced_accuracy", "true_cost_at_limit"
    return {
        "questions": questions,
        **{name: report[name] for name in names},
        "cost_limit": limit,
        "seconds": round(seconds, 1),
    }


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    for known in (
        "episodes differ in length",
        "segments must not be longer than the episodes",
        "no labelled trajectory is safe",
    ):
        warnings.filterwarnings("ignore", known)
    data = TrajectoryDataset(args.dataset)
    num_test = min(int(args.test_share * len(data)), args.max_test_episodes)
    test = [data[i] for i in range(len(data) - num_test, len(data))]
    out, done = Path(args.out), set()
    if out.exists():
        with out.open(newline="") as file:
            done = {tuple(row[k] for k in COLUMNS[1:7]) for row in csv.DictReader(file)}
    for minutes in args.minutes:
        for kind in args.kinds:
            for seed in args.seeds:
                about = (data.env_id, args.source, kind, str(args.errors), str(minutes), str(seed))
                if about in done:
                    continue
                try:
                    found = trial(args, data, test, kind, minutes, seed)
                except LabelError as error:  # all answers are on one side
                    print(f"{' '.join(about)}: {str(error)[:90]}", flush=True)
                    continue
                row = dict(zip(COLUMNS[1:7], about, strict=True))
                row |= {"commit": made_by(__file__)["commit"] or "", **found}
                add_row(out, COLUMNS, {k: rounded(v) for k, v in row.items()})
                print(" ".join(f"{k}={rounded(v)}" for k, v in row.items() if k != "commit"))


if __name__ == "__main__":
    main(tyro.cli(Args))
