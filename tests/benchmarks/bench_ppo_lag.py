"""PPO-Lag end to end against its ceiling, and with `--bf16`, in turns; part of `make bench`.

The ceiling is `1 / (1 / env_rate + 1 / update_rate)`: the bare env with random actions, and the
script's own gradient steps on a rollout of the same size and nothing else, in float32. What is
missing to 100 % is inference, advantages, bookkeeping and logging. Then where the time goes, with
and without a learned cost, and how the rate grows with environments and threads.

`--device cuda` does the same with the updates on a GPU.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import tyro
from script_runs import SCRIPTS, Rows, phases, print_phases, rate, run_script

sys.path.insert(0, str(SCRIPTS))

import ppo_lag
from run_io import action_bounds, flat_dims, make_envs

BATCH = 20_480
"""Env steps per iteration where the number of environments varies: a multiple of all of them."""


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointGoal1-v0"
    """task to run"""
    rounds: int = 3
    """times that all are measured, in turns; medians are compared"""
    iterations: int = 3
    """iterations of PPO-Lag per round; the first is warm-up and not counted"""
    num_steps: int = 1_000
    """env steps per env and iteration, with the script's 20 environments"""
    torch_threads: int = 2
    """threads of PyTorch"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the updates are computed"""
    num_envs: tuple[int, ...] = (1, 4, 20, 64, 256)
    """numbers of environments to compare, with as many steps per iteration; may be empty"""
    num_threads: tuple[int, ...] = (1, 2)
    """numbers of PyTorch's threads to compare; may be empty"""
    learned_cost: bool = True
    """whether to show the phases of ppo_lag_pbcrl.py, too"""


def env_rate(args: Args, run: ppo_lag.Args) -> float:
    """Env steps per second of the bare vectorised env, resets included."""
    envs = make_envs(args.env_id, run.num_envs)
    low, high = action_bounds(envs)
    actions = np.random.default_rng(0).uniform(low, high, (run.num_steps, run.num_envs, len(low)))
    actions = actions.astype(np.float32)
    envs.reset(seed=0)
    start = time.perf_counter()
    for t in range(run.num_steps):
        envs.step(actions[t])
    seconds = time.perf_counter() - start
    envs.close()
    return run.batch_size / seconds


def update_rate(args: Args, run: ppo_lag.Args) -> float:
    """Env steps per second of nothing but the gradient steps on them, all epochs."""
    envs = make_envs(args.env_id, 1)
    obs_dim, act_dim = flat_dims(envs)
    low, high = action_bounds(envs)
    envs.close()
    torch.manual_seed(0)
    agent = ppo_lag.Agent(obs_dim, act_dim, hidden_sizes=run.hidden_sizes)
    learner = ppo_lag.Learner(agent, replace(run, device=args.device), low, high)
    learner.take_rollout(torch.randn(run.batch_size, obs_dim), torch.randn(run.batch_size, act_dim))
    rng = np.random.default_rng(0)
    start = 0.0
    for epoch in range(-4, run.epochs):
        if epoch == 0:  # those before have warmed up
            float(learner.kl)  # a GPU has done what was asked of it
            start = time.perf_counter()
        learner.order.copy_(torch.from_numpy(rng.permutation(run.batch_size)))
        learner.run_epoch(train_actor=True)
    float(learner.kl)
    return run.batch_size / (time.perf_counter() - start)


def train(
    args: Args,
    *options: object,
    script: str = "ppo_lag.py",
    num_envs: int = 20,
    num_steps: int | None = None,
    iterations: int | None = None,
    torch_threads: int | None = None,
) -> Rows:
    """Run a script without the KL stop, so that every iteration takes as many gradient steps."""
    num_steps = num_steps or args.num_steps
    return run_script(
        script,
        *("--env-id", args.env_id, "--device", args.device, "--target-kl", "inf"),
        *("--num-envs", num_envs, "--num-steps", num_steps),
        *("--total-timesteps", (iterations or args.iterations) * num_envs * num_steps),
        *("--torch-threads", torch_threads or args.torch_threads, "--eval-episodes", 1),
        *options,
    )


def compare(args: Args, run: ppo_lag.Args) -> None:
    """Print the share of the ceiling that is reached, and what `--bf16` gains."""
    rates, tables = [], []
    for _ in range(args.rounds):
        env, update = env_rate(args, run), update_rate(args, run)
        fp32, bf16 = train(args), train(args, "--bf16")
        ceiling = 1 / (1 / env + 1 / update)
        share, gain = rate(fp32) / ceiling, rate(bf16) / rate(fp32)
        rates.append((env, update, ceiling, rate(fp32), share, rate(bf16), gain))
        tables.append((phases(fp32), phases(bf16)))
        print(
            f"   env {env:8,.0f}   update {update:8,.0f}   ceiling {ceiling:8,.0f}   end to end "
            f"{rate(fp32):8,.0f} steps/s = {share:.0%}   with --bf16 {rate(bf16):8,.0f} = "
            f"{gain:.2f} times",
            flush=True,
        )
    _, _, ceiling, whole, share, half, gain = np.median(np.array(rates), axis=0)
    print(
        f"median: end to end {whole:,.0f} steps/s, {share:.0%} of its ceiling {ceiling:,.0f}; "
        f"with --bf16 {half:,.0f}, {gain:.2f} times as fast\n"
    )
    titles, shown = ["ppo_lag.py", "ppo_lag.py --bf16"], list(tables[-1])
    if args.learned_cost:
        # Its queries per labelling round are those of 2,000 over 2M steps.
        online = "--offline-queries", 0, "--online-queries", 100, "--finetune-interval", 5
        for option in ((), ("--bf16",)):
            titles.append(" ".join(["ppo_lag_pbcrl.py", *option]))
            rows = train(args, *online, *option, script="ppo_lag_pbcrl.py", iterations=6)
            shown.append(phases(rows))
    print_phases(titles, shown)


def scale(args: Args) -> None:
    """Print the rate by the number of environments and by that of threads."""
    for num_envs in args.num_envs:
        rows = train(
            args,
            *("--minibatch-size", BATCH // 10),
            num_envs=num_envs,
            num_steps=BATCH // num_envs,
            iterations=2,
        )
        print(
            f"   {num_envs:4d} envs   {rate(rows):8,.0f} steps/s   (env "
            f"{phases(rows)['env']:,.0f} us per step, inference {phases(rows)['inference']:,.0f})",
            flush=True,
        )
    for threads in args.num_threads:
        rows = train(args, torch_threads=threads)
        print(f"   {threads:4d} threads of PyTorch   {rate(rows):8,.0f} steps/s", flush=True)


def main(args: Args) -> None:
    torch.set_num_threads(args.torch_threads)
    run = ppo_lag.Args(env_id=args.env_id, num_steps=args.num_steps)
    where = f"{os.cpu_count()} cores"
    if args.device == "cuda":
        where += f", {torch.cuda.get_device_name()}"
    print(
        f"{args.env_id}: {run.num_envs} envs x {run.num_steps} steps, {run.epochs} epochs of "
        f"{run.minibatch_size}, nets {run.hidden_sizes}, {args.torch_threads} threads of {where}"
    )
    compare(args, run)
    print(f"\nby environments, {BATCH} steps per iteration, and by threads")
    scale(args)


if __name__ == "__main__":
    main(tyro.cli(Args))
