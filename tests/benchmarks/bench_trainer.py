"""What a gradient step of the cost model takes: seconds and peak memory, by three ways in turns.

"plain" is what one would write first: both members of every pair padded into one batch, and
autograd straight through. The other two are `CostModelTrainer`, in float32 and with `bf16=True`.
Each way runs in a process of its own, which is measured whole: PyTorch takes 0.2 to 0.3 GB of it,
and the steps are read from memory-mapped files, of which what was read counts too.

`python tests/benchmarks/bench_trainer.py` prints the tables of docs/notebook/speed-cost-model.md.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from bench_memory import megabytes
from gymnasium.spaces import Box

from pbcrl import CostModel, CostModelTrainer, Label, PreferenceBuffer, Trajectory, pbci_loss
from pbcrl.trajectory import PairBatch, pad

Way = Literal["plain", "fp32", "bf16"]
WAYS: tuple[Way, ...] = ("plain", "fp32", "bf16")


@dataclass(frozen=True)
class Args:
    num_pairs: int = 512
    """pairs of a batch"""
    num_steps: int = 1000
    """steps of a trajectory"""
    obs_dim: int = 60
    """numbers of an observation"""
    act_dim: int = 2
    """numbers of an action"""
    pool: int = 0
    """different trajectories that the pairs are made of; 0: two per pair"""
    hidden_sizes: tuple[int, ...] = (64, 64, 64)
    """widths of the ReLU layers"""
    rounds: int = 7
    """steps of each way, in turns, after a first one that does not count"""
    growth: bool = True
    """whether to print the three tables of growth, too"""
    threads: int = 2
    """threads of PyTorch"""

    @property
    def num_trajectories(self) -> int:
        return self.pool or 2 * self.num_pairs


def main(args: Args) -> None:
    print(f"PyTorch {torch.__version__}, {args.threads} threads, nets {args.hidden_sizes}")
    print(f"median seconds of a gradient step (fastest) and peak GB, of {args.rounds} rounds\n")
    table("one batch", [args])
    if args.growth:
        few = replace(args, num_pairs=128, rounds=3)
        lengths = [replace(few, num_steps=steps) for steps in (250, 1000, 4000)]
        batches = [replace(few, num_pairs=num) for num in (32, 128, 512)]
        pools = [replace(few, num_pairs=512, pool=size) for size in (64, 256, 1024)]
        table("length of the trajectories", lengths)
        table("pairs of a batch", batches)
        table("different trajectories", pools)


def table(title: str, settings: list[Args]) -> None:
    ways = " | ".join(f"{way}, s | GB" for way in WAYS)
    print(f"| {title}: pairs x steps of trajectories | {ways} | fp32 | bf16 |")
    print("|---" * (2 * len(WAYS) + 3) + "|")
    for setting in settings:
        seconds, gigabytes = measure(setting)
        medians = {way: statistics.median(seconds[way]) for way in WAYS}
        cells = [
            f"{medians[way]:.2f} ({min(seconds[way]):.2f}) | {gigabytes[way]:.2f}" for way in WAYS
        ]
        gains = [f"{medians['plain'] / medians[way]:.1f}x" for way in WAYS[1:]]
        name = f"{setting.num_pairs} x {setting.num_steps} of {setting.num_trajectories}"
        print(f"| {name} | {' | '.join([*cells, *gains])} |", flush=True)
    print()


def measure(args: Args) -> tuple[dict[Way, list[float]], dict[Way, float]]:
    """Seconds of each round and peak memory of each way, whose processes take turns."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        write_steps(Path(folder), args)
        pipes: dict[Way, Connection] = {}
        for way in WAYS:
            pipes[way], other = context.Pipe()
            context.Process(target=serve, args=(other, way, args, folder), daemon=True).start()
        for pipe in pipes.values():
            pipe.recv()  # all have started: from here on one at a time
        seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
        for _ in range(1 + args.rounds):
            for way, pipe in pipes.items():
                pipe.send(True)
                seconds[way].append(pipe.recv())
        gigabytes: dict[Way, float] = {}
        for way, pipe in pipes.items():
            pipe.send(False)
            gigabytes[way] = pipe.recv()
    return {way: every[1:] for way, every in seconds.items()}, gigabytes


def write_steps(folder: Path, args: Args) -> None:
    rng = np.random.default_rng(0)
    for name, width in (("obs", args.obs_dim), ("actions", args.act_dim)):
        shape = (args.num_trajectories, args.num_steps, width)
        steps = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape)
        for rows in steps:
            rows[:] = rng.standard_normal(rows.shape, dtype=np.float32)


def serve(pipe: Connection, way: Way, args: Args, folder: str) -> None:
    """Take a gradient step whenever asked to; in the end tell the process's peak memory."""
    torch.set_num_threads(args.threads)
    step = make_step(way, args, Path(folder))
    pipe.send("ready")
    while pipe.recv():
        start = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - start)
    pipe.send(megabytes(os.getpid())["peak"] * 2**20 / 1e9)


def make_step(way: Way, args: Args, folder: Path) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("obs", "actions")]
    buffer = PreferenceBuffer()
    buffer.add_trajectories([Trajectory(*rows) for rows in zip(*arrays, strict=True)])
    # Every trajectory is used as often as any other, and never against itself.
    order = np.arange(2 * args.num_pairs).reshape(-1, 2) % args.num_trajectories
    labels = [Label(*rng.integers(2, size=3).tolist()) for _ in order]
    buffer.add_labels(order, labels)
    batch = buffer.batch(np.arange(args.num_pairs))
    torch.manual_seed(0)
    spaces = (Box(-np.inf, np.inf, (dim,)) for dim in (args.obs_dim, args.act_dim))
    model = CostModel(*spaces, hidden_sizes=args.hidden_sizes)
    if way == "plain":
        return plain_step(model, batch)
    trainer = CostModelTrainer(model, rng=rng, bf16=way == "bf16")
    return lambda: trainer.gradient_step(batch)


def plain_step(model: CostModel, batch: PairBatch) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step() -> None:
        members = [batch.trajectories[i] for i in batch.pairs.T.flatten().tolist()]
        cost = model.trajectory_cost(*pad(members))
        first, second = cost.chunk(2)
        loss = pbci_loss(first, second, batch.preference, *batch.safe.unbind(dim=1)).total
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(tyro.cli(Args))
