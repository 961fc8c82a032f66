"""Millions of steps at random actions: nothing raises, nothing is NaN, memory does not grow.

    python tests/benchmarks/soak.py                   # 20 million steps over all robot tasks
    python tests/benchmarks/soak.py --scale 0.01      # a short look

Stops with an error at the first observation, reward or cost that is not finite, and if the process
has grown by more than `--max-growth` between a task's first tenth and its end.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import gymnasium
import numpy as np
import tyro

import pbcrl_envs  # noqa: F401 - registers the tasks

STEPS = {
    "SafetyPointGoal0-v0": 500_000,
    "SafetyPointGoal1-v0": 5_000_000,
    "SafetyPointGoal2-v0": 250_000,
    "SafetyPointPush0-v0": 250_000,
    "SafetyPointPush1-v0": 1_500_000,
    "SafetyPointPush2-v0": 250_000,
    "SafetyPointButton0-v0": 500_000,
    "SafetyPointButton1-v0": 2_500_000,
    "SafetyPointButton2-v0": 250_000,
    "SafetyHalfCheetahVelocity-v1": 5_000_000,
    "SafetyWalker2dVelocity-v1": 2_500_000,
    "SafetyHumanoidVelocity-v1": 1_500_000,
}
"""Twenty million in all, fewer where a step takes longer."""


@dataclass(frozen=True)
class Args:
    scale: float = 1.0
    """factor on the number of steps of every task"""
    num_envs: int = 64
    """environments stepped together"""
    num_threads: int = 2
    """physics threads"""
    seed: int = 0
    """of layouts and actions"""
    max_growth: float = 20.0
    """megabytes by which a task may grow after its first tenth"""


def megabytes() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def main(args: Args) -> None:
    rng = np.random.default_rng(args.seed)
    total = 0
    for env_id, steps in STEPS.items():
        envs = gymnasium.make_vec(env_id, num_envs=args.num_envs, num_threads=args.num_threads)
        calls = max(10, round(args.scale * steps / args.num_envs))
        shape = envs.action_space.shape
        assert shape is not None
        envs.reset(seed=args.seed)
        start, early, episodes = time.perf_counter(), 0.0, 0
        for t in range(calls):
            # Held for a while at random, so that the robots get somewhere and bump into things.
            if t % 10 == 0:
                held = rng.uniform(-1, 1, shape)
            action = np.clip(held + rng.normal(0, 0.2, shape), -1, 1)
            obs, reward, terminated, truncated, infos = envs.step(action)
            if not np.isfinite(obs.sum() + reward.sum() + infos["cost"].sum()):
                raise SystemExit(f"error: {env_id} returned a number that is not finite at {t}")
            episodes += int((terminated | truncated).sum())
            if t == calls // 10:
                early = megabytes()
        growth, seconds = megabytes() - early, time.perf_counter() - start
        diverged = envs.unwrapped.num_diverged  # type: ignore[attr-defined]
        envs.close()
        total += calls * args.num_envs
        print(
            f"{env_id:<30}{calls * args.num_envs:>10,} steps, {episodes:>7,} episodes, "
            f"{diverged} diverged, {growth:+.1f} MB, {calls * args.num_envs / seconds:>8,.0f}/s",
            flush=True,
        )
        if growth > args.max_growth:
            raise SystemExit(f"error: {env_id} grew by {growth:.0f} MB after its first tenth")
    print(f"{total:,} steps without an error")


if __name__ == "__main__":
    main(tyro.cli(Args))
