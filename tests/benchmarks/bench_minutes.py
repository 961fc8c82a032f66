"""What a cost model learns from so many minutes of a person, by the kind of question.

`python tests/benchmarks/bench_minutes.py --dataset FOLDER --out FILE` takes a folder of
`ppo_lag.py --save-trajectories`, as `bench_gate.py` does; the last episodes are the test. A
simulated person answers questions about the others, as many as fit into the minutes by `SECONDS`:

- `pairs`: which of two whole episodes is safer, and is each of them safe;
- `grids`: which of twelve clips have an unsafe step;
- `marks`: which steps of an episode are unsafe, and is the whole of it safe;
- `marked_pairs`: which of two is safer, is each safe, and which of their steps are unsafe, as
  `ppo_lag_pbcrl.py --marks` asks;
- `pairs_and_grids`: half of the time pairs, and half of it grids, whose clips are learned from
  beside them;
- `clips`: is a single clip safe, one after the other;
- `grids_uncertain`, `grids_suspect`: as `grids`, but after a first quarter at random each further
  quarter of the grids has the clips of which the model is least certain, or which it finds most
  costly, of twenty times as many that are drawn at random;
- `grids_em`: as `grids`, but each step of an unsafe clip is marked as unsafe at first, and then, in
  four rounds of fits, those alone that cost more than nearly all steps of safe clips;
- `labels`, a control: is a whole episode safe;
- `preferences`, another: which of two is safer. Trees refuse to learn from that alone, as nothing
  tells how much is too much, so of one episode they are told that it is unsafe.

Trees learn from the answers. Every result is a row of `--out`; what has a row is not run again.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import tyro
from bench_gate import rounded
from gymnasium.spaces import Box
from script_runs import add_row, rows_there

import pbcrl_envs
from pbcrl import (
    Label,
    Marks,
    PreferenceBuffer,
    Query,
    SyntheticOracle,
    Trajectory,
    TrajectoryDataset,
    TreeCost,
    TreeTrainer,
    cut_segments,
)
from pbcrl.errors import LabelError
from pbcrl.metrics import cost_model_report, step_auroc
from pbcrl.oracle import GRID, Teacher
from pbcrl.spaces import names_of
from pbcrl.trajectory import unsafe_steps
from pbcrl.tree_trainer import Clip
from pbcrl_script_utils.envs import make_envs
from pbcrl_script_utils.run import made_by

OfEpisodes = Literal["pairs", "marks", "labels", "preferences", "marked_pairs", "pairs_and_grids"]
OfClips = Literal["clips", "grids", "grids_em", "grids_uncertain", "grids_suspect"]
Kind = OfEpisodes | OfClips
SECONDS: dict[str, float] = {
    **{"pairs": 7.0, "grids": 13.5, "marks": 14.5, "clips": 2.0},
    **{"labels": 3.5, "preferences": 5.5},
}
"""Of a person, per question; estimates, of which `bench_keys.py` times the handling alone: three or
four keys; twelve clips, of which some are clicked; an episode of 20 s at twice its speed, and a key
for the whole; a clip and a key; half a pair; a pair without two of its keys."""
PER_MARKED_PAIR = SECONDS["pairs"] + 2 * SECONDS["marks"]
"""Of a pair of whole episodes, in both of which the unsafe moments are marked."""
CHOSEN = "grids_uncertain", "grids_suspect"
OF_CLIPS = get_args(OfClips)
OF_TWO = "pairs", "preferences", "marked_pairs"
CANDIDATES = 20
"""How many clips one is chosen from, where the model chooses."""
EM_ROUNDS = 4
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
    """whether the person errs: 5 % of answers flipped; marks begin and end 2 % of an episode late,
    and wrong by up to as much, and a tenth of the unsafe stretches is missed"""
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

    @property
    def flips(self) -> float:
        """Probability that an answer is wrong."""
        return 0.05 if self.errors else 0.0


def safe(episode: Trajectory, limit: float, flips: float, rng: np.random.Generator) -> float:
    """What the person says of a trajectory."""
    return float((episode.true_cost <= limit) != (rng.random() < flips))


def marked(episode: Trajectory, *, errors: bool, rng: np.random.Generator) -> Marks:
    """What the person marks in an episode."""
    teacher = Teacher(mark_error=0.02, mark_lag=0.02, missed=0.1) if errors else Teacher()
    oracle = SyntheticOracle(0.0, marks=True, teacher=teacher, rng=rng)
    stretches = oracle.label([Query(episode, episode)])[0].first_unsafe
    assert stretches is not None
    return Marks(episode, unsafe_steps(stretches, len(episode)).astype(np.float64))


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
    flips = args.flips
    if kind in OF_CLIPS:
        shown = random_clips(data, pool, questions * (1 if kind == "clips" else GRID), args, rng)
        bound = 0.0  # one unsafe step
    else:
        count = min(pool, questions * (2 if kind in OF_TWO else 1))
        shown = [data[i] for i in np.sort(rng.choice(pool, count, replace=False))]
        bound = limit
    if len(shown) % 2:
        shown = shown[:-1]
    order = rng.permutation(len(shown)).reshape(-1, 2)
    labels, told = list[Label](), False
    for i, j in order:
        first, second = (safe(shown[k], bound, flips, rng) for k in (i, j))
        preference = math.nan
        if kind in OF_TWO:
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
    if kind not in ("marks", "marked_pairs"):
        return buffer, []
    return buffer, [marked(one, errors=args.errors, rng=rng) for one in shown]


def random_clips(
    data: TrajectoryDataset, pool: int, count: int, args: Args, rng: np.random.Generator
) -> list[Trajectory]:
    """So many clips of episodes from the first `pool`."""
    found = []
    for i in rng.integers(pool, size=count):
        clips = cut_segments([data[int(i)]], args.clip_length)
        found.append(clips[rng.integers(len(clips))])
    return found


def add_chosen(
    kind: Kind,
    trainer: TreeTrainer,
    buffer: PreferenceBuffer,
    data: TrajectoryDataset,
    pool: int,
    count: int,
    args: Args,
    rng: np.random.Generator,
) -> None:
    """Add labels of so many clips to those in the buffer, which the model has learned from."""
    found = random_clips(data, pool, CANDIDATES * count, args, rng)
    model = trainer.model
    excess = model.score(found) - model.learned_limit
    order = np.argsort(np.abs(excess) if kind == "grids_uncertain" else -excess)
    start, flips = len(buffer.trajectories), args.flips
    shown = [found[i] for i in order[: count - count % 2]]
    pairs = start + rng.permutation(len(shown)).reshape(-1, 2)
    buffer.add_trajectories(shown)
    safes = [
        (safe(shown[i - start], 0.0, flips, rng), safe(shown[j - start], 0.0, flips, rng))
        for i, j in pairs
    ]
    buffer.add_labels(pairs, [Label(math.nan, *both) for both in safes])


def em_marks(trainer: TreeTrainer, buffer: PreferenceBuffer) -> list[Marks]:
    """Which steps of unsafe clips are to blame, by the fits themselves."""
    shown = buffer.trajectories
    is_safe = np.zeros(len(shown))
    is_safe[buffer.labelled_pairs.ravel()] = buffer.labels[:, 1:].ravel()
    blamed = [np.full(len(clip), 1 - is_safe[i]) for i, clip in enumerate(shown)]
    for _ in range(EM_ROUNDS):
        marks = [Marks(clip, unsafe) for clip, unsafe in zip(shown, blamed, strict=True)]
        trainer.fit(buffer, marks=marks)
        costs = [trainer.model.step_cost(clip.obs, clip.actions) for clip in shown]
        free = np.concatenate([cost for i, cost in enumerate(costs) if is_safe[i]])
        least = np.quantile(free, 0.99)
        for i, cost in enumerate(costs):
            if not is_safe[i]:
                blamed[i] = (cost >= min(least, cost.max())).astype(np.float64)
    return [Marks(clip, unsafe) for clip, unsafe in zip(shown, blamed, strict=True)]


def trial(
    args: Args, data: TrajectoryDataset, test: list[Trajectory], kind: Kind, minutes: int, seed: int
) -> dict[str, Any]:
    """Ask and learn once; return the measures."""
    rng = np.random.default_rng(seed)
    limit = pbcrl_envs.cost_limit(data.env_id)
    assert limit is not None
    budget, pool = 60.0 * minutes, len(data) - len(test)
    clips, first = list[Clip](), kind
    if kind == "pairs_and_grids":
        first, budget = "pairs", budget / 2
    per = PER_MARKED_PAIR if kind == "marked_pairs" else SECONDS[first.split("_")[0]]
    questions = int(budget / per)
    asked = questions // 4 if kind in CHOSEN else questions
    buffer, marks = answered(first, data, pool, asked, args, limit, rng)
    if kind == "pairs_and_grids":
        grids = int(budget / SECONDS["grids"])
        questions += grids
        shown = random_clips(data, pool, grids * GRID, args, rng)
        clips = [Clip(clip, safe(clip, 0.0, args.flips, rng)) for clip in shown]
    like = test[0]
    spaces = [Box(-np.inf, np.inf, shape) for shape in (like.obs.shape[1:], like.actions.shape[1:])]
    horizon = args.clip_length if kind in OF_CLIPS else data.horizon
    trees = TreeCost(
        *spaces,
        names=names_of(make_envs(data.env_id, 1)),
        output_scale=horizon**-0.5,
        horizon=horizon,
        pooled=True,
    )
    trainer = TreeTrainer(trees, rng=rng, rounds=args.rounds, threads=args.threads)
    start = time.perf_counter()
    for part in range(3 if kind in CHOSEN else 0):
        trainer.fit(buffer)
        ends = [questions * k // 4 for k in (part + 1, part + 2)]
        add_chosen(kind, trainer, buffer, data, pool, (ends[1] - ends[0]) * GRID, args, rng)
    if kind == "grids_em":
        marks = em_marks(trainer, buffer)
    trainer.fit(buffer, clips=clips, marks=marks)
    seconds = time.perf_counter() - start
    true = np.array([episode.true_cost for episode in test])
    costs = np.array([float(trees.step_cost(t.obs, t.actions).sum()) for t in test])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        of_episodes = kind not in (*OF_CLIPS, "preferences")
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
    out = Path(args.out)
    done = rows_there(out, COLUMNS[1:7])
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
