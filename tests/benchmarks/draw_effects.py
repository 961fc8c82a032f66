"""The picture of what a cost of trees follows, from 500 simulated answers about the Goal task.

`python tests/benchmarks/draw_effects.py` trains PPO by the reward alone for a million steps, has
pairs of its episodes labelled, fits the trees, and draws docs/images/effects.png.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import pbcrl
import pbcrl_envs
from pbcrl.effects import effects, telling
from pbcrl_script_utils import plots
from pbcrl_script_utils.envs import make_envs

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Args:
    env_id: str = "SafetyPointGoal1-v0"
    """a task of this package"""
    dataset: str | None = None
    """episodes to label; default: those of a new run"""
    pairs: int = 500
    """labelled pairs, a tenth of them for validation"""
    episodes: int = 440
    """drawn among all"""
    seed: int = 0
    """of the run, the episodes, the pairs and the trees"""
    out: Path = ROOT / "docs" / "images" / "effects.png"
    """the picture"""


def collect(args: Args, folder: str) -> str:
    script = ROOT / "cleanrl_scripts" / "ppo_lag.py"
    words = ["--env-id", args.env_id, "--seed", args.seed, "--total-timesteps", 1_000_000]
    words += ["--cost-limit", "inf", "--eval-episodes", 1, "--threads", 1]
    words += ["--runs-dir", folder, "--save-trajectories", f"{folder}/episodes"]
    subprocess.run([sys.executable, str(script), *map(str, words)], check=True)
    return f"{folder}/episodes"


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = pbcrl.TrajectoryDataset(args.dataset or collect(args, folder))
        rng = np.random.default_rng(args.seed)
        chosen = rng.permutation(len(data))[: args.episodes]
        parts = np.split(chosen, [args.episodes // 10])
        limit = pbcrl_envs.cost_limit(args.env_id)
        assert limit is not None
        buffers = []
        for part, queries in zip(parts, (args.pairs // 10, args.pairs * 9 // 10), strict=True):
            buffer = pbcrl.PreferenceBuffer([data[i] for i in np.sort(part)])
            pairs = pbcrl.draw_pairs(len(part), queries, rng=rng)
            oracle = pbcrl.SyntheticOracle(limit, budget=queries)
            buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
            buffers.append(buffer)
        valid, train = buffers
        model = pbcrl.TreeCost.for_env(make_envs(args.env_id, 1), horizon=data.horizon)
        pbcrl.TreeTrainer(model, rng=rng).pretrain(train, valid)
        found = effects(model, train.trajectories, rng=rng, safe=train.safe_shares)
        for effect in telling(found):
            print(f"{effect.name} ({effect.importance:.0%}): {effect.rule}")
        title = f"What the learned cost of {args.env_id} follows"
        note = f"an episode is safe if its true cost is at most {limit:g}"
        plots.save(plots.effects(telling(found), title, note), args.out)
        print(args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
