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
from script_runs import add_row
from torch import Tensor, nn

import pbcrl_envs
from pbcrl import (
    CostModel,
    CostModelEnsemble,
    CostModelTrainer,
    LearnedCost,
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
from pbcrl.cost_model import MLP
from pbcrl.errors import LabelError
from pbcrl.metrics import cost_model_report, step_auroc
from pbcrl.spaces import names_of
from pbcrl.trees import like_inputs
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
    models: tuple[str, ...] = ("trees", "net")
    """what learns: trees, trees_plain (without pooled inputs), trees_5 (members), net, and changes
    of it: net_pooled (inputs), net_binned (piecewise-linear inputs), net_5 (members), net_decay (of
    weights, 0.01), net_all (pooled, binned, decay)"""
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


class Read(nn.Module):
    """The network of `CostModel` on pooled inputs too, or on piecewise-linear bins of each."""

    bounds: Tensor | None

    def __init__(
        self, groups: list[tuple[int, int]], bounds: Tensor | None, num_inputs: int
    ) -> None:
        super().__init__()
        self.groups = groups
        self.register_buffer("bounds", bounds)  # (num_inputs + pools, K + 1)
        width = num_inputs + 3 * len(groups)
        self.mlp = MLP(width if bounds is None else width * (bounds.shape[1] - 1), (64, 64))

    def columns(self, obs: Tensor, actions: Tensor) -> Tensor:
        pools = [
            pool
            for start, stop in self.groups
            for part in [obs[..., start:stop]]
            for pool in (part.amax(-1), part.amin(-1), part.mean(-1))
        ]
        return torch.cat([obs, actions, *(pool[..., None] for pool in pools)], dim=-1)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = self.columns(obs, actions)
        if self.bounds is not None:
            low, high = self.bounds[:, :-1], self.bounds[:, 1:]
            x = ((x[..., None] - low) / (high - low)).clamp(0, 1).flatten(-2)
        output: Tensor = self.mlp(x[..., :0], x)
        return output


def net_of(kind: str, spaces: Any, limits: Any, train: PreferenceBuffer, names: Any) -> LearnedCost:
    if kind in ("net", "net_decay"):
        return CostModel(*spaces, **limits)
    if kind == "net_5":
        return CostModelEnsemble([CostModel(*spaces, **limits) for _ in range(5)])
    dim = spaces[0].shape[0]
    groups = [] if kind == "net_binned" else list(like_inputs(names[:dim]).values())
    plain = CostModel(*spaces, **limits)
    plain.fit_input_scale(train.trajectories)
    bounds = None
    if kind in ("net_binned", "net_all"):
        rows = [
            plain._scaled(torch.tensor(t.obs[::7]), torch.tensor(t.actions[::7]))
            for t in train.trajectories[:200]
        ]
        reader = Read(groups, None, dim + spaces[1].shape[0])
        columns = torch.cat([reader.columns(*row) for row in rows])[:200_000]
        shares = torch.linspace(0, 1, 17)
        bounds = torch.quantile(columns[torch.randperm(len(columns))[:10_000]], shares, dim=0).t()
        bounds = bounds + 1e-4 * torch.arange(17)  # apart, where many are equal
    return CostModel(*spaces, net=Read(groups, bounds, dim + spaces[1].shape[0]), **limits)


def trainer_of(
    kind: str,
    env_id: str,
    horizon: int,
    train: PreferenceBuffer,
    args: Args,
    seed: int,
    *,
    of_episodes: bool,
) -> Trainer:
    like = train.trajectories[0]
    spaces = [Box(-np.inf, np.inf, shape) for shape in (like.obs.shape[1:], like.actions.shape[1:])]
    limits: dict[str, Any] = {"output_scale": horizon**-0.5}
    if of_episodes:
        limits["horizon"] = horizon  # a sum of clips has any length
    rng = np.random.default_rng(seed)
    names = names_of(make_envs(env_id, 1))
    if kind.startswith("net"):
        torch.manual_seed(seed)
        net = CostModelTrainer(net_of(kind, spaces, limits, train, names), rng=rng)
        if kind in ("net_decay", "net_all"):
            net._optimizer.param_groups[0]["weight_decay"] = 0.01
        return net
    limits |= {"num_members": 5 if kind == "trees_5" else 1, "pooled": kind != "trees_plain"}
    trees = TreeCost(*spaces, names=names, **limits)
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
    trainer = trainer_of(
        model, data.env_id, data.horizon, train, args, seed, of_episodes=kind == "episodes"
    )
    start = time.perf_counter()
    trainer.model.fit_input_scale(train.trajectories)
    trainer.pretrain(train, valid)
    seconds = time.perf_counter() - start
    learned = trainer.model.score(test)
    true = np.array([episode.true_cost for episode in test])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        at = trainer.model.learned_limit
        report = cost_model_report(learned, true, limit, learned_limit=at)
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
                    row |= {"commit": made_by(__file__)["commit"] or "", **found}
                    add_row(out, COLUMNS, {k: rounded(v) for k, v in row.items()})
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
