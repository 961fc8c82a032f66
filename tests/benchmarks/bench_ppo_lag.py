"""End-to-end rate of PPO-Lag against its ceiling, all measured in turns in one run (`make bench`).

The ceiling is `1 / (1 / env_rate + 1 / update_rate)`: the bare env with random actions, and the
bare gradient steps of actor and critics on a rollout of the same size. What is missing to 100 % is
inference, advantages, bookkeeping and logging.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import nn

SCRIPTS = Path(__file__).parents[2] / "cleanrl_scripts"
sys.path.insert(0, str(SCRIPTS))

import ppo_lag  # noqa: E402
from run_io import action_bounds, flat_dims, make_envs  # noqa: E402


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointGoal1-v0"
    """task to run"""
    rounds: int = 3
    """times that all three are measured, in turns; medians are compared"""
    iterations: int = 3
    """iterations of PPO-Lag per round; the first is warm-up and not counted"""
    torch_threads: int = 2
    """threads of PyTorch"""


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
    envs.close()
    torch.manual_seed(0)
    agent = ppo_lag.Agent(obs_dim, act_dim, hidden_sizes=run.hidden_sizes)
    actor = [*agent.mean.parameters(), agent.log_std]
    critics = [*agent.critic_r.parameters(), *agent.critic_c.parameters()]
    optimizers = [torch.optim.Adam(part, lr=run.lr, fused=True) for part in (actor, critics)]
    obs, actions = torch.randn(run.batch_size, obs_dim), torch.randn(run.batch_size, act_dim)
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(run.epochs):
        order = torch.from_numpy(rng.permutation(run.batch_size))
        for rows in torch.split(order, run.minibatch_size):
            batch = obs[rows]
            value_r, value_c = agent.critic_r(batch), agent.critic_c(batch)
            losses = (
                -agent.log_prob(agent.mean(batch), actions[rows]).mean(),
                value_r.square().mean() + value_c.square().mean(),
            )
            for optimizer, part, loss in zip(optimizers, (actor, critics), losses, strict=True):
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(part, run.max_grad_norm)
                optimizer.step()
    return run.batch_size / (time.perf_counter() - start)


def end_to_end_rate(args: Args, run: ppo_lag.Args) -> float:
    """Env steps per second of `ppo_lag.py` itself, from its own log, without the KL stop."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPTS / "ppo_lag.py"), "--env-id", args.env_id]
        command += ["--total-timesteps", str(args.iterations * run.batch_size)]
        command += ["--target-kl", "inf", "--eval-episodes", "1", "--runs-dir", folder]
        command += ["--run-name", "run", "--torch-threads", str(args.torch_threads)]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
    steps = last["env_steps"] - first["env_steps"]
    return float(steps / (last["wall_seconds"] - first["wall_seconds"]))


def main(args: Args) -> None:
    torch.set_num_threads(args.torch_threads)
    run = ppo_lag.Args(env_id=args.env_id, torch_threads=args.torch_threads)
    print(
        f"{args.env_id}: {run.num_envs} envs x {run.num_steps} steps, {run.epochs} epochs of "
        f"{run.minibatch_size}, nets {run.hidden_sizes}, {args.torch_threads} threads of "
        f"{os.cpu_count()} cores"
    )
    rates = []
    for _ in range(args.rounds):
        env, update, whole = (f(args, run) for f in (env_rate, update_rate, end_to_end_rate))
        ceiling = 1 / (1 / env + 1 / update)
        rates.append((env, update, ceiling, whole, whole / ceiling))
        print(
            f"   env {env:8,.0f}   update {update:8,.0f}   ceiling {ceiling:8,.0f}   "
            f"end to end {whole:8,.0f} steps/s = {whole / ceiling:.0%}",
            flush=True,
        )
    env, update, ceiling, whole, share = np.median(np.array(rates), axis=0)
    print(f"median: end to end {whole:,.0f} steps/s, {share:.0%} of its ceiling {ceiling:,.0f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
