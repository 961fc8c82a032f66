"""The proving ground: which limits are kept by the defaults alone, on tasks that nobody tuned for.

`python tests/benchmarks/bench_proving.py --out docs/results/proving.csv` runs methods x tasks x
seeds by the scripts' own defaults, 500,000 steps each, and adds a row for each to the file. What
has a row is not run again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import tyro
from gymnasium.vector import VectorEnv
from script_runs import add_row, rows_there, summary_of

from pbcrl_envs.proving import GROUND
from pbcrl_envs.proving.base import Policy
from pbcrl_script_utils.envs import make_envs
from pbcrl_script_utils.run import made_by

METHODS: dict[str, list[str]] = {
    "ppo": ["ppo_lag.py", "--cost-limit", "inf"],
    "ppo_lag": ["ppo_lag.py"],
    "pbcrl": ["ppo_lag_pbcrl.py"],
    "pbcrl_500": ["ppo_lag_pbcrl.py", "--online-queries", "500"],
    "pbcrl_person": [
        *("ppo_lag_pbcrl.py", "--online-queries", "150"),
        *("--preference-noise", "0.05", "--safety-noise", "0.05"),
    ],
    "learned": ["ppo_lag_pbcrl.py", "--constraint", "learned"],
    "learned_500": ["ppo_lag_pbcrl.py", "--constraint", "learned", "--online-queries", "500"],
    "learned_offline": [
        *("ppo_lag_pbcrl.py", "--constraint", "learned"),
        *("--offline-queries", "18000", "--online-queries", "2000"),
    ],
    **{
        f"constant_{price}": [
            *("ppo_lag.py", "--multiplier-lr", "0", "--multiplier-initial", price),
            *("--multiplier-cap", "10"),
        ]
        for price in ("0.03", "0.1", "0.3", "1", "3", "10")
    },
}
MEASURES = (
    *("return_stochastic", "true_cost_stochastic", "true_cost_stochastic_interval"),
    *("return_last_fifth", "true_cost_last_fifth", "return", "true_cost", "multiplier"),
    "violation_rate_stochastic",
)
COLUMNS = (
    *("commit", "task", "sealed", "method", "seed", "limit", "safe_return", "safe_cost"),
    *("reckless_return", "reckless_cost", *MEASURES, "wall_seconds", "command"),
)


@dataclass(frozen=True)
class Args:
    out: str
    """CSV file to add rows to"""
    tasks: tuple[str, ...] = tuple(GROUND)
    """of the proving ground, by name"""
    methods: tuple[str, ...] = ("ppo", "ppo_lag")
    """ppo (no limit), ppo_lag (told the true cost), pbcrl (20,000 queries), pbcrl_500 (with 500),
    pbcrl_person (with 150, as people are asked by default; one answer in 20 is wrong),
    learned and learned_500 (λ follows the learned limit), learned_offline (18,000 about episodes of
    the reward alone, 2,000 about fresh ones), and constant_0.03 to constant_10, PPO-Lag with a λ
    that stays"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    total_timesteps: int = 500_000
    eval_episodes: int = 400
    workers: int = 1
    """runs at a time"""


def played(env_id: str, policy: Policy, *, episodes: int = 100) -> tuple[float, float]:
    """Mean return and cost of the first episodes that a scripted policy plays, seeds from 0 on."""
    envs: VectorEnv[Any, Any, Any] = make_envs(env_id, min(episodes, 20))
    first: list[np.ndarray] = []
    for start in range(0, episodes, envs.num_envs):
        obs, _ = envs.reset(seed=start)
        total, alive = np.zeros((2, envs.num_envs)), np.ones(envs.num_envs, np.bool_)
        while alive.any():
            obs, reward, terminated, truncated, infos = envs.step(
                policy(obs).astype(envs.single_action_space.dtype)
            )
            cost = np.array(infos.get("cost", np.zeros(envs.num_envs)), np.float64)
            ended = infos.get("final_info", {})
            if "cost" in ended:  # Gymnasium's own batches put the last step's there
                cost = np.where(terminated | truncated, ended["cost"], cost)
            total += alive * np.stack([reward, cost])
            alive &= ~(terminated | truncated)
        first.append(total)
    mean = np.concatenate(first, axis=1).mean(axis=1)
    return float(mean[0]), float(mean[1])


def main(args: Args) -> None:
    out, lock = Path(args.out), Lock()
    done = rows_there(out, ("task", "method", "seed"))
    scripted = dict[str, dict[str, float]]()
    for task in args.tasks:
        entry, few = GROUND[task], 10 if "Driving" in GROUND[task].env_id else 100
        safe = played(entry.env_id, entry.safe, episodes=few)
        reckless = played(entry.env_id, entry.reckless, episodes=few)
        names = "safe_return", "safe_cost", "reckless_return", "reckless_cost"
        scripted[task] = dict(zip(names, (*safe, *reckless), strict=True))

    def run(job: tuple[str, str, int]) -> None:
        task, method, seed = job
        entry, (script, *flags) = GROUND[task], METHODS[method]
        words = [script, "--env-id", entry.env_id, *flags]
        words += ["--total-timesteps", str(args.total_timesteps), "--seed", str(seed)]
        words += ["--eval-episodes", str(args.eval_episodes), "--threads", "1"]
        summary = summary_of(words)
        if summary is None:
            return
        row = {
            "commit": made_by(__file__)["commit"] or "",
            **{"task": task, "sealed": entry.sealed, "method": method, "seed": seed},
            **{"limit": entry.limit, **scripted[task]},
            **{name: summary[name] for name in MEASURES},
            "wall_seconds": summary["wall_seconds"],
            "command": "python cleanrl_scripts/" + " ".join(words),
        }
        row = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
        with lock:
            add_row(out, COLUMNS, row)
        shown = ("return_stochastic", "true_cost_stochastic", "true_cost_last_fifth", "multiplier")
        print(task, method, seed, {name: row[name] for name in shown}, flush=True)

    jobs = [
        (task, method, seed)
        for seed in args.seeds
        for method in args.methods
        for task in args.tasks
        if (task, method, str(seed)) not in done
    ]
    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(run, jobs))


if __name__ == "__main__":
    main(tyro.cli(Args))
