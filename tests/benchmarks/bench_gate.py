"""The gate of the cost model: what it learns from how many labels, judged on later episodes.

`python tests/benchmarks/bench_gate.py --dataset FOLDER` takes a folder of `ppo_lag.py
--save-trajectories` that has kept all episodes of its run. The last ones, of policies that the
model has not seen, are the test; from the others episodes and pairs are drawn anew by each seed. A
change of the method is a default only if it passes here, on other runs than it was chosen on.

Every result is a row of `--out`, and what has a row is not run again.
"""

from __future__ import annotations

import csv
import math
import resource
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box

import pbcrl_envs
from pbcrl import (
    CostModel,
    CostModelTrainer,
    PreferenceBuffer,
    SyntheticOracle,
    Trainer,
    Trajectory,
    TrajectoryDataset,
    TreeCost,
    TreeTrainer,
    cut_segments,
    draw_pairs,
)
from pbcrl.errors import LabelError
from pbcrl.metrics import cost_model_report, step_auroc
from pbcrl.spaces import names_of
from pbcrl_script_utils.envs import make_envs
from pbcrl_script_utils.run import made_by

MEASURES = "step_auroc", "auroc", "balanced_accuracy", "accuracy", "base_rate"
AT_LIMIT = "true_cost_at_limit", "true_cost_at_limit_interval"
COLUMNS = (
    *("commit", "env", "source", "kind", "model", "pairs", "episodes", "seed"),
    *(*MEASURES, *AT_LIMIT, "cost_limit", "seconds", "peak_mb", "size"),
)


@dataclass(frozen=True)
class Args:
    dataset: str
    """folder of trajectories, in the order of play"""
    source: str
    """whose episodes these are, for the table, such as "reward" or "lag" """
    out: str
    """CSV file to add rows to"""
    models: tuple[Literal["trees", "pooled", "net"], ...] = ("trees", "net")
    """what learns: trees without and with the pooled inputs, the network"""
    kinds: tuple[Literal["episodes", "clips"], ...] = ("episodes", "clips")
    """pairs of what"""
    clip_length: int = 25
    """steps of a clip, which is safe within its share of the limit"""
    pairs: tuple[int, ...] = (50, 150, 500, 2_000, 18_000)
    """labelled pairs, a tenth of them for validation"""
    max_episodes: int = 2_000
    """most episodes to draw pairs from; fewer if two per pair are fewer"""
    test_share: float = 0.15
    """share of the episodes, the last ones, to test on"""
    max_test_episodes: int = 300
    """at most this many of them"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """of episodes, pairs and models"""
    threads: int = 1
    """of PyTorch and LightGBM"""


def trainer_of(
    kind: str, like: Trajectory, env_id: str, horizon: int, args: Args, seed: int
) -> Any:
    obs_space = Box(-np.inf, np.inf, like.obs.shape[1:])
    action_space = Box(-np.inf, np.inf, like.actions.shape[1:])
    limits: dict[str, Any] = {"output_scale": horizon**-0.5}
    rng = np.random.default_rng(seed)
    if kind == "net":
        torch.manual_seed(seed)
        return CostModelTrainer(CostModel(obs_space, action_space, **limits), rng=rng)
    names = names_of(make_envs(env_id, 1)) if kind == "pooled" else None
    trees = TreeCost(obs_space, action_space, pooled=kind == "pooled", names=names, **limits)
    return TreeTrainer(trees, rng=rng, threads=args.threads)


def labelled(
    episodes: list[Trajectory], queries: int, oracle: SyntheticOracle, rng: np.random.Generator
) -> PreferenceBuffer:
    buffer = PreferenceBuffer(episodes)
    count = min(queries, len(episodes) * (len(episodes) - 1) // 2)
    pairs = draw_pairs(len(episodes), count, rng=rng)
    buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
    return buffer


def trial(
    args: Args,
    data: TrajectoryDataset,
    test: list[Trajectory],
    kind: str,
    model: str,
    pairs: int,
    seed: int,
) -> dict[str, Any]:
    """Learn once; return the measures."""
    rng = np.random.default_rng(seed)
    limit = pbcrl_envs.cost_limit(data.env_id)
    assert limit is not None
    length = args.clip_length if kind == "clips" else data.horizon
    oracle = SyntheticOracle(limit * length / data.horizon, budget=pairs)
    pool = len(data) - len(test)
    chosen = rng.permutation(pool)[: min(pool, args.max_episodes, 2 * pairs)].tolist()
    parts, buffers = (chosen[: len(chosen) // 10], chosen[len(chosen) // 10 :]), []
    for part, queries in zip(parts, (pairs // 10, pairs - pairs // 10), strict=True):
        shown = [data[i] for i in sorted(part)]
        if kind == "clips":
            shown = cut_segments(shown, length)
            picked = rng.permutation(len(shown))[: min(len(shown), 2 * queries)]
            shown = [shown[i] for i in np.sort(picked)]
        buffers.append(labelled(shown, queries, oracle, rng))
    valid, train = buffers
    trainer: Trainer = trainer_of(model, test[0], data.env_id, data.horizon, args, seed)
    start = time.perf_counter()
    trainer.model.fit_input_scale(train.trajectories)
    trainer.pretrain(train, valid)
    seconds = time.perf_counter() - start
    learned = trainer.model.score(test)
    true = np.array([episode.true_cost for episode in test])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        report = cost_model_report(learned, true, limit)
        report["step_auroc"] = step_auroc(trainer.model.step_cost, test)
    return {
        **{name: report[name] for name in (*MEASURES, *AT_LIMIT)},
        "episodes": train.num_compared,
        "cost_limit": limit,
        "seconds": round(seconds, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "size": trainer.steps,
    }


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", "episodes differ in length")
    data = TrajectoryDataset(args.dataset)
    num_test = min(int(args.test_share * len(data)), args.max_test_episodes)
    test = [data[i] for i in range(len(data) - num_test, len(data))]
    out = Path(args.out)
    done = set()
    if out.exists():
        with out.open(newline="") as file:
            done = {
                tuple(row[k] for k in COLUMNS[1:8] if k != "episodes")
                for row in csv.DictReader(file)
            }
    for pairs in args.pairs:
        for kind in args.kinds:
            for model in args.models:
                for seed in args.seeds:
                    about = (data.env_id, args.source, kind, model, str(pairs), str(seed))
                    if about in done:
                        continue
                    try:
                        found = trial(args, data, test, kind, model, pairs, seed)
                    except LabelError as error:
                        print(f"{' '.join(about)}: {str(error)[:90]}", flush=True)
                        continue
                    row = dict(
                        zip(("env", "source", "kind", "model", "pairs", "seed"), about, strict=True)
                    )
                    row |= {"commit": made_by(__file__)["commit"], **found}
                    is_new = not out.exists()
                    with out.open("a", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS)
                        if is_new:
                            writer.writeheader()
                        writer.writerow({k: rounded(v) for k, v in row.items()})
                    print(
                        " ".join(f"{k}={rounded(v)}" for k, v in row.items() if k != "commit"),
                        flush=True,
                    )


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else round(value, 4)
    return value


if __name__ == "__main__":
    main(tyro.cli(Args))
