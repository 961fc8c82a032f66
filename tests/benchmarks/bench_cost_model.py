"""How well a cost model judges new episodes, by the number of episodes that it learned from.

`python tests/benchmarks/bench_cost_model.py --dataset FOLDER` takes a folder of `ppo_lag.py
--save-trajectories`, sets a fixed test set aside, and pretrains on nested parts of the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box

import pbcrl_envs
from pbcrl import (
    CostModel,
    CostModelTrainer,
    DeadZone,
    PreferenceBuffer,
    SyntheticOracle,
    TrajectoryDataset,
    draw_pairs,
)
from pbcrl.metrics import cost_model_report


@dataclass(frozen=True)
class Args:
    dataset: str
    """folder of trajectories"""
    cost_limit: float | None = None
    """d, known to the oracle only; default: the task's own"""
    sizes: tuple[int, ...] = (500, 1000, 2000)
    """episodes to learn from, a tenth of them for validation"""
    test_episodes: int = 500
    """held-out episodes"""
    queries: int = 18_000
    """labelled pairs, a tenth of them for validation"""
    seeds: int = 1
    """seeds 0, 1, ... of every size; the test episodes are the same for all"""
    lr: float = 3e-3
    """Adam's step size"""
    batch_size: int = 128
    """pairs per gradient step"""
    patience: int = 10
    """validations without a new best at which training stops"""
    max_epochs: int = 200
    """most passes over the pairs"""
    validate_every: int = 10
    """gradient steps between two validations"""
    output_scale: float = 0.03
    """factor on the net's output per step"""
    dead_zone: float = 1.0
    """δ"""
    snr_weight: float = 1e-3
    """ζ"""
    torch_threads: int = 2
    """threads of PyTorch"""


def main(args: Args) -> None:
    torch.set_num_threads(args.torch_threads)
    dataset = TrajectoryDataset(args.dataset)
    limit = pbcrl_envs.cost_limit(dataset.env_id) if args.cost_limit is None else args.cost_limit
    if limit is None or args.test_episodes + max(args.sizes) > len(dataset):
        raise SystemExit(
            f"error: {args.test_episodes} test episodes and {max(args.sizes)} others are needed, "
            f"and a cost limit; {args.dataset} has {len(dataset)} of {dataset.env_id}"
        )
    order = np.random.default_rng(0).permutation(len(dataset))
    test = [dataset[i] for i in order[: args.test_episodes]]
    true = np.array([episode.true_cost for episode in test])
    unsafe = float((true > limit).mean())
    print(f"{len(dataset)} episodes of {dataset.env_id}, {len(test)} held out, {unsafe:.0%} unsafe")
    for size in args.sizes:
        for seed in range(args.seeds):
            rng = np.random.default_rng(seed)
            torch.manual_seed(seed)
            oracle = SyntheticOracle(limit, budget=args.queries)
            chosen = rng.permutation(order[args.test_episodes :])[:size]
            buffers = []
            for rows, queries in (
                (chosen[: size // 10], args.queries // 10),
                (chosen[size // 10 :], args.queries - args.queries // 10),
            ):
                buffer = PreferenceBuffer()
                buffer.add_trajectories([dataset[i] for i in rows])
                count = min(queries, len(rows) * (len(rows) - 1) // 2)
                pairs = draw_pairs(len(rows), count, rng=rng)
                buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
                buffers.append(buffer)
            valid, train = buffers
            model = CostModel(
                Box(-np.inf, np.inf, dataset.obs_shape),
                Box(-np.inf, np.inf, (dataset.act_dim,)),
                output_scale=args.output_scale,
            )
            model.fit_input_scale(train.trajectories)
            trainer = CostModelTrainer(
                model,
                rng=rng,
                dead_zone=DeadZone(args.dead_zone, lr=0.0),
                snr_weight=args.snr_weight,
                lr=args.lr,
                batch_size=args.batch_size,
            )
            start = time.perf_counter()
            history = trainer.pretrain(
                train,
                valid,
                max_epochs=args.max_epochs,
                patience=args.patience,
                validate_every=args.validate_every,
            )
            seconds = time.perf_counter() - start
            report = cost_model_report(model.score(test), true, limit)
            best = min(range(len(history)), key=lambda i: history[i].selection_loss)
            print(
                f"{size:5d} episodes, seed {seed}: balanced accuracy "
                f"{report['balanced_accuracy']:.3f}, accuracy {report['accuracy']:.3f} (base rate "
                f"{report['base_rate']:.3f}), pairs {report['pair_accuracy']:.3f}, W2 scaled "
                f"{report['w2_scaled']:.1f}, skewness {report['skewness_learned']:.1f} (true "
                f"{report['skewness_true']:.1f}); best of {len(history)} validations: {best}, "
                f"{seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Args))
