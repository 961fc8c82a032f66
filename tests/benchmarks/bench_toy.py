"""The toy, several seeds: unconstrained PPO, PPO-Lag on the true cost, PbCRL on a learned one.

`make toy` prints one row per seed and method, and the means: true cost over the limit, and PbCRL's
return over that of PPO-Lag. Every run is a plain call of a script, so that any row can be repeated.
PbCRL is pretrained on labelled pairs of the episodes of PPO-Lag's run of the same seed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import pbcrl_envs

sys.path.insert(0, str(Path(__file__).parents[2] / "cleanrl_scripts" / "paper"))
sys.path.insert(0, str(Path(__file__).parents[2] / "cleanrl_scripts"))

from benchmark import read_object
from presets import command_of

from pbcrl_script_utils.recipes import TOY, recipe_of


@dataclass(frozen=True)
class Args:
    seeds: int = 5
    """how many of every method"""
    first_seed: int = 0
    """the lowest of them"""
    eval_episodes: int = 100
    """episodes of each final evaluation"""
    workers: int = 2
    """runs at a time"""
    runs_dir: str = "runs/bench_toy"
    """folder of the runs; what is finished there is not run again"""


def run(args: Args, method: str, seed: int) -> dict[str, float]:
    name = f"{method}__{seed}"
    folder = Path(args.runs_dir) / name
    summary = read_object(folder / "summary.json")
    if summary is None:
        shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was stopped
        options: dict[str, object] = {
            "env-id": TOY,
            "seed": seed,
            "eval-episodes": args.eval_episodes,
            "threads": 1,
            "runs-dir": args.runs_dir,
            "run-name": name,
        }
        episodes = Path(args.runs_dir) / f"episodes__{seed}"
        if method == "ppo":
            command = command_of("ppo_lag", {**options, "cost-limit": "inf"})
        elif method == "ppo_lag":
            shutil.rmtree(episodes, ignore_errors=True)
            command = command_of("ppo_lag", {**options, "save-trajectories": episodes})
        else:
            command = command_of("ppo_lag_pbcrl", {**options, "dataset": episodes})
        with (Path(args.runs_dir) / f"{name}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        summary = json.loads((folder / "summary.json").read_text())
    return summary


def main(args: Args) -> None:
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    settings = Path(args.runs_dir) / "settings.json"
    used = [recipe_of(TOY, script=script) for script in ("ppo_lag", "ppo_lag_pbcrl")]
    now = json.dumps([used, args.eval_episodes], sort_keys=True)
    if settings.exists() and settings.read_text() != now:
        raise SystemExit(f"error: {args.runs_dir} holds runs of other settings; use another folder")
    settings.write_text(now)
    methods = "ppo", "ppo_lag", "pbcrl"
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    results: dict[tuple[str, int], dict[str, float]] = {}
    with ThreadPoolExecutor(args.workers) as pool:
        for method in ("ppo_lag", "pbcrl", "ppo"):  # PbCRL learns from the episodes of PPO-Lag
            found = pool.map(lambda seed, name=method: run(args, name, seed), seeds)
            results |= {(method, seed): summary for seed, summary in zip(seeds, found, strict=True)}
    limit = pbcrl_envs.cost_limit(TOY)
    assert limit is not None
    print(f"{TOY}, limit {limit:g}, {args.eval_episodes} evaluation episodes")
    columns = ("seed", 5), ("return", 9), ("true cost", 11), ("stochastic: return", 20), ("cost", 7)
    print(f"{'method':<10}" + "".join(f"{name:>{width}}" for name, width in columns))
    for (method, seed), result in sorted(results.items(), key=lambda item: item[0]):
        print(
            f"{method:<10}{seed:>5}{result['return']:>9.2f}{result['true_cost']:>11.2f}"
            f"{result['return_stochastic']:>20.2f}{result['true_cost_stochastic']:>7.2f}"
        )
    means = {
        (method, key): float(np.mean([results[method, seed][key] for seed in seeds]))
        for method in methods
        for key in ("return", "true_cost", "return_stochastic", "true_cost_stochastic")
    }
    for kind, suffix in (("deterministic", ""), ("stochastic", "_stochastic")):
        print(f"means of the {kind} policies:")
        for method in methods:
            cost, reward = means[method, "true_cost" + suffix], means[method, "return" + suffix]
            print(
                f"   {method:<9} return {reward:6.2f}, true cost {cost:6.2f} = {cost / limit:.2f} d"
            )
        share = means["pbcrl", "return" + suffix] / means["ppo_lag", "return" + suffix]
        print(f"   PbCRL's return is {share:.0%} of PPO-Lag's")


if __name__ == "__main__":
    main(tyro.cli(Args))
