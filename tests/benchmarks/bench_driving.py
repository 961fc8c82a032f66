"""The driving tasks: speed of the arrays against highway-env, and what PPO-Lag makes of them.

`make driving` prints the speeds, measured in turns, then one row per task, method and seed. Every
run is a plain call of a script, with the settings of `pbcrl_script_utils/recipes.py`: any row can
be repeated alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import gymnasium
import numpy as np
import tyro

import pbcrl_envs

sys.path.insert(0, str(Path(__file__).parents[2] / "cleanrl_scripts" / "paper"))
sys.path.insert(0, str(Path(__file__).parents[2] / "cleanrl_scripts"))

from presets import command_of

from pbcrl_script_utils.recipes import BLOCK, LANE, recipe_of

TASKS = BLOCK, LANE
SETTINGS = {env_id: recipe_of(env_id, script="ppo_lag") for env_id in TASKS}
METHODS: dict[str, dict[str, object]] = {"ppo_lag": {}, "ppo": {"cost-limit": "inf"}}


@dataclass(frozen=True)
class Args:
    seeds: int = 3
    """how many of every method; 0 measures speed alone"""
    first_seed: int = 0
    """the lowest of them"""
    eval_episodes: int = 500
    """episodes of each final evaluation"""
    workers: int = 2
    """runs at a time"""
    rounds: int = 5
    """times that both versions are measured, in turns; 0 leaves speed out"""
    num_envs: int = 1000
    """copies in the arrays whose speed is measured"""
    runs_dir: str = "runs/bench_driving"
    """folder of the runs; what is finished there is not run again"""


def single_rate(env_id: str, seconds: float = 2.0) -> float:
    """Env steps per second of the highway-env version, resets included."""
    env = gymnasium.make(env_id)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        *_, terminated, truncated, _ = env.step(rng.uniform(-1, 1, 2))
        steps += 1
        if terminated or truncated:
            env.reset()
    return steps / (time.perf_counter() - start)


def batched_rate(env_id: str, num_envs: int, seconds: float = 2.0) -> float:
    """Env steps per second of the arrays, resets included."""
    envs = gymnasium.make_vec(env_id, num_envs=num_envs, autoreset_mode="SameStep")
    actions = np.random.default_rng(0).uniform(-1, 1, (50, num_envs, 2))
    envs.reset(seed=0)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        envs.step(actions[steps % 50])
        steps += 1
    return steps * num_envs / (time.perf_counter() - start)


def measure_speed(args: Args) -> None:
    print(f"env steps per second, random actions; {args.num_envs} copies in the arrays")
    for env_id in TASKS:
        rates = [
            (single_rate(env_id), batched_rate(env_id, args.num_envs)) for _ in range(args.rounds)
        ]
        ratios = [batched / single for single, batched in rates]
        single, batched = np.median(np.array(rates), axis=0)
        print(
            f"   {env_id:<22} highway-env {single:7,.0f}   arrays {batched:9,.0f}   "
            f"{np.median(ratios):,.0f} times as fast ({min(ratios):,.0f} to {max(ratios):,.0f})",
            flush=True,
        )


def run(args: Args, env_id: str, method: str, seed: int) -> dict[str, float]:
    name = f"{env_id}__{method}__{seed}"
    folder = Path(args.runs_dir) / name
    summary = folder / "summary.json"
    if not summary.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was stopped
        options: dict[str, object] = {
            "env-id": env_id,
            "seed": seed,
            "eval-episodes": args.eval_episodes,
            "threads": 1,
            "runs-dir": args.runs_dir,
            "run-name": name,
            **METHODS[method],
        }
        command = command_of("ppo_lag", options)
        with (Path(args.runs_dir) / f"{name}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    found: dict[str, float] = json.loads(summary.read_text())
    return found


def main(args: Args) -> None:
    if args.rounds:
        measure_speed(args)
    if not args.seeds:
        return
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    settings = Path(args.runs_dir) / "settings.json"
    now = json.dumps([SETTINGS, METHODS, args.eval_episodes], sort_keys=True)
    if settings.exists() and settings.read_text() != now:
        raise SystemExit(f"error: {args.runs_dir} holds runs of other settings; use another folder")
    settings.write_text(now)
    jobs = list(product(TASKS, METHODS, range(args.first_seed, args.first_seed + args.seeds)))
    with ThreadPoolExecutor(args.workers) as pool:
        results = dict(zip(jobs, pool.map(lambda job: run(args, *job), jobs), strict=True))
    keys = "return", "true_cost", "return_stochastic", "true_cost_stochastic"
    for env_id in TASKS:
        print(f"{env_id}, limit {pbcrl_envs.cost_limit(env_id):g}")
        columns = ("seed", 5), ("return", 9), ("true cost", 11), ("stochastic: return", 20)
        heads = [f"{name:>{width}}" for name, width in (*columns, ("cost", 7), ("minutes", 9))]
        print(f"   {'method':<9}" + "".join(heads))
        for method in METHODS:
            rows = [(job[2], results[job]) for job in jobs if job[:2] == (env_id, method)]
            for seed, found in rows:
                values = [found[key] for key in keys]
                print(
                    f"   {method:<9}{seed:>5}{values[0]:>9.2f}{values[1]:>11.3f}{values[2]:>20.2f}"
                    f"{values[3]:>7.2f}{found['wall_seconds'] / 60:>9.1f}"
                )
            means = np.mean([[found[key] for key in keys] for _, found in rows], axis=0)
            print(
                f"   {method:<9}{'mean':>5}{means[0]:>9.2f}{means[1]:>11.3f}{means[2]:>20.2f}"
                f"{means[3]:>7.2f}"
            )


if __name__ == "__main__":
    main(tyro.cli(Args))
