"""What a cost of trees takes: microseconds per scored step, bytes of its files, seconds of a fit.

The same trees score steps as a `TreeCost`, as one that pools three groups of 16 inputs as well, and
as LightGBM's own `Booster.predict`; beside them a `CostModel`. All take turns. Each fit runs in a
process of its own, whose peak memory is measured whole, and before the fit, with PyTorch and all
trajectories. Those are random: an episode costs the steps in which its first input is above 1.

`python tests/benchmarks/bench_trees.py` prints the tables of docs/notebook/speed-cost-model.md.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import torch
import tyro
from bench_memory import megabytes
from gymnasium.spaces import Box

from pbcrl import (
    CostModel,
    PreferenceBuffer,
    SyntheticOracle,
    Trajectory,
    TreeCost,
    TreeTrainer,
    draw_pairs,
)
from pbcrl.export.onnx import export_onnx
from pbcrl.tree_trainer import _stacked, _Tree


@dataclass(frozen=True)
class Args:
    num_trees: int = 150
    """trees of eight leaves"""
    obs_dim: int = 60
    """numbers of an observation, at least 48"""
    act_dim: int = 2
    """numbers of an action"""
    rows: tuple[int, ...] = (1, 10, 100, 1_000)
    """steps that are scored at a time"""
    rounds: int = 15
    """turns of each way; medians are shown"""
    fits: tuple[tuple[int, int], ...] = ((500, 400), (18_000, 2_000))
    """pairs and episodes of each fit"""
    num_steps: int = 1_000
    """steps of an episode"""
    threads: int = 1
    """of PyTorch and of LightGBM"""

    @property
    def spaces(self) -> tuple[Box, Box]:
        return Box(-np.inf, np.inf, (self.obs_dim,)), Box(-1, 1, (self.act_dim,))


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    booster = grown(args)
    trees = TreeCost(*args.spaces, output_scale=1.0)
    single = [_Tree.read(booster.dump_model(1, start_iteration=i)) for i in range(args.num_trees)]
    trees.set_trees(_stacked([single]))
    names = [f"lidar {i // 16}[{i % 16}]" for i in range(48)]
    names += [f"input {i}" for i in range(48, args.obs_dim)]
    names += [f"action {i}" for i in range(args.act_dim)]
    pooled = TreeCost(*args.spaces, output_scale=1.0, names=names)
    pooled.set_trees(trees.trees)
    net = CostModel(*args.spaces)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    print(f"PyTorch {torch.__version__}, LightGBM {lightgbm.__version__}, {args.threads} threads\n")
    score(args, booster, {"trees": trees, "pooled": pooled, "net": net})
    write(booster, trees, net)
    fit_all(args)


def grown(args: Args) -> lightgbm.Booster:
    """Trees that fit noise, and so use all of their leaves and inputs."""
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((20_000, args.obs_dim + args.act_dim), np.float32)
    data = lightgbm.Dataset(columns, rng.standard_normal(len(columns)))
    options = {"num_leaves": 8, "verbose": -1, "num_threads": args.threads}
    # Else its predictions would begin at the mean of the targets.
    return lightgbm.train({**options, "boost_from_average": False}, data, args.num_trees)


def score(args: Args, booster: lightgbm.Booster, models: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    print("| rows | trees, us per step | pooled | net | LightGBM | trees / net | / LightGBM |")
    print("|---" * 7 + "|")
    for rows in args.rows:
        obs = rng.standard_normal((rows, args.obs_dim), np.float32)
        actions = rng.uniform(-1, 1, (rows, args.act_dim)).astype(np.float32)
        columns = np.concatenate([obs, actions], axis=1)
        ways: dict[str, Callable[[], Any]] = {
            name: partial(model.step_cost, obs, actions) for name, model in models.items()
        }
        ways["LightGBM"] = partial(booster.predict, columns, num_threads=args.threads)
        np.testing.assert_allclose(ways["trees"](), ways["LightGBM"](), atol=1e-5)
        calls = max(10, 1_000 // rows)
        times = np.array(
            [[seconds(way, calls) for way in ways.values()] for _ in range(args.rounds)]
        )
        each = np.median(times, axis=0) * 1e6 / rows
        ratios = np.median(times[:, :1] / times[:, 2:], axis=0)
        cells = [f"{x:,.3g}" for x in each] + [f"{x:.2f}" for x in ratios]
        print(f"| {rows:,} | {' | '.join(cells)} |", flush=True)
    print()


def seconds(function: Callable[[], object], calls: int) -> float:
    """Of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def write(booster: lightgbm.Booster, trees: TreeCost, net: CostModel) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees.save(folder / "trees")
        export_onnx(trees, folder / "trees as ONNX")
        net.save(folder / "net")
        booster.save_model(folder / "LightGBM's own text")
        sizes = {path.name: path.stat().st_size / 1000 for path in sorted(folder.iterdir())}
    print("kilobytes: " + ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items()) + "\n")


def fit_all(args: Args) -> None:
    print(f"| pairs, episodes of {args.num_steps:,} steps | fit, s | peak GB | before the fit |")
    print("|---" * 4 + "|")
    for pairs, episodes in args.fits:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            took, peak, before = pool.apply(fit, (args, pairs, episodes))
        print(f"| {pairs:,}, {episodes:,} | {took:.1f} | {peak:.2f} | {before:.2f} |", flush=True)


def fit(args: Args, num_pairs: int, num_episodes: int) -> tuple[float, float, float]:
    """Seconds, and gigabytes at most and before."""
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    buffer = PreferenceBuffer()
    for _ in range(num_episodes):
        obs = rng.standard_normal((args.num_steps, args.obs_dim), np.float32)
        actions = rng.uniform(-1, 1, (args.num_steps, args.act_dim)).astype(np.float32)
        buffer.add_trajectories([Trajectory(obs, actions, (obs[:, 0] > 1).astype(np.float32))])
    pairs = draw_pairs(num_episodes, num_pairs, rng=rng)
    limit = float(np.median([episode.true_cost for episode in buffer.trajectories]))
    buffer.add_labels(pairs, SyntheticOracle(limit).label(buffer.queries(pairs)))
    model = TreeCost(*args.spaces, horizon=args.num_steps)
    trainer = TreeTrainer(model, rng=rng, rounds=args.num_trees, threads=args.threads)
    before = megabytes(os.getpid())["peak"]
    start = time.perf_counter()
    trainer.fit(buffer)
    took = time.perf_counter() - start
    assert model.num_trees == args.num_trees
    peak = megabytes(os.getpid())["peak"]
    return took, peak * 2**20 / 1e9, before * 2**20 / 1e9


if __name__ == "__main__":
    main(tyro.cli(Args))
