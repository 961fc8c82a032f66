"""Learn a cost from simulated answers on the toy, and draw it: some five minutes of a core.

    pbcrl demo

Trains a policy by reward alone, labels pairs of its episodes, learns a cost from the labels, and
trains a policy under that cost. The true cost only answers the questions and draws the picture.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from evaluate import load_agent

from pbcrl import load_cost_model
from pbcrl_script_utils.args import Count, NonNegativeInt, check_args
from pbcrl_script_utils.evaluation import play
from pbcrl_script_utils.launch import main
from pbcrl_script_utils.plots import cost_over_plane, draw_paths, draw_plane, save
from pbcrl_script_utils.resume import read_args
from pbcrl_script_utils.run import command_of

TOY = "PointHazards-v0"


@dataclass(frozen=True)
class Args:
    seed: NonNegativeInt = 0
    """of everything random"""
    total_timesteps: Count = 750_000
    """env steps of the policy under the learned cost"""
    reward_timesteps: Count = 150_000
    """env steps of the policy that knows the reward alone"""
    queries: Count = 2_000
    """pairs of episodes that the simulated oracle labels before; as many while training"""
    runs_dir: str = "runs/demo"
    """folder of the two runs and of the picture; what lies there is used again"""


def train(script: str, name: str, args: Args, **options: object) -> dict[str, float]:
    """Train unless it is done already, with the output in a file; return the summary.

    Raises:
        ValueError: If the folder holds a run with other options.
        RuntimeError: If the training fails.
    """
    folder = Path(args.runs_dir) / name
    options |= {"env_id": TOY, "seed": args.seed, "eval_episodes": 50}
    if (folder / "args.json").exists():
        stored = read_args(folder)
        if other := [option for option, value in options.items() if stored.get(option) != value]:
            raise ValueError(
                f"what lies in --runs-dir is used again, but {folder} was trained with "
                f"{', '.join(f'{option}={stored.get(option)}' for option in other)}; remove "
                f"{args.runs_dir}, or name another folder"
            )
    if not (folder / "summary.json").exists():
        path = Path(__file__).with_name(f"{script}.py")
        if (folder / "args.json").exists():
            words: list[object] = ["--resume", folder]
        else:
            words = ["--runs-dir", args.runs_dir, "--run-name", name]
            for option, value in options.items():
                words += [f"--{option.replace('_', '-')}", value]
        print(f"   {command_of(script, *words)}", flush=True)
        log = Path(args.runs_dir) / f"{name}.log"
        with log.open("a") as output:
            command = [sys.executable, str(path), *map(str, words)]
            status = subprocess.run(command, stdout=output, check=False).returncode
        if status != 0:
            raise RuntimeError(f"training must succeed, but it ended with status {status}: {log}")
    found: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return found


def demo(args: Args) -> None:
    check_args(args)
    start = time.perf_counter()
    root = Path(args.runs_dir)
    root.mkdir(parents=True, exist_ok=True)

    print("1 of 3: a policy that knows the reward alone")
    episodes = str(root / "episodes")
    before = train(
        "ppo_lag",
        "reward",
        args,
        total_timesteps=args.reward_timesteps,
        cost_limit=math.inf,
        save_trajectories=episodes,
    )
    print(f"2 of 3: a cost, learned from {args.queries} labelled pairs, and a policy under it")
    after = train(
        "ppo_lag_pbcrl",
        "pbcrl",
        args,
        total_timesteps=args.total_timesteps,
        dataset=episodes,
        offline_queries=args.queries,
        online_queries=args.queries,
    )
    print("3 of 3: a picture")
    picture = draw(root, root / "demo.png", before, after)

    limit = after["cost_limit"]
    print(f"\n{'':<28}{'return':>8}{'true cost':>11}   (limit {limit:g}, 50 episodes)")
    for name, found in (("by reward alone", before), ("under the learned cost", after)):
        print(f"{name:<28}{found['return']:>8.1f}{found['true_cost']:>11.1f}")
    accuracy = after["balanced_accuracy"]  # None if all new episodes are on one side
    shown = "not known" if accuracy is None else f"{accuracy:.2f}"
    print(f"balanced accuracy of the learned cost on new episodes: {shown}")
    print(f"\npicture: {picture}   ({time.perf_counter() - start:.0f} s)\n\nnext:")
    run = root / "pbcrl"
    print(f"   {command_of('evaluate', run, '--plots')}   # learned against true cost")
    print(f"   {command_of('ppo_lag_pbcrl', '--env-id', 'DrivingLaneChange-v0')}   # a real task")
    own = "--env-id", "my_module:MyEnv-v0", "--label-folder", "questions"
    print(f"   {command_of('ppo_lag_pbcrl', *own)}   # your env, labelled by you")


def draw(root: Path, path: Path, before: dict[str, float], after: dict[str, float]) -> Path | None:
    """The learned cost over the plane, and the paths of both policies."""
    cost_model, _ = load_cost_model(root / "pbcrl" / "cost_model.safetensors")
    found = cost_over_plane(TOY, cost_model, seed=0)
    assert found is not None
    true, learned, half = found
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7), layout="constrained")
    names = ("reward", "by reward alone", before), ("pbcrl", "under the learned cost", after)
    for axis, (name, title, summary) in zip(axes[::2], names, strict=True):
        folder = root / name
        agent, _, _ = load_agent(folder, read_args(folder), None, trusted=False)
        _, episodes = play(agent, TOY, episodes=10, seed=1, deterministic=True)
        shown = f"{title}: cost {summary['true_cost']:.1f}, return {summary['return']:.1f}"
        draw_paths(axis, episodes, true, half, shown)
    draw_plane(axes[1], learned, true, half, "learned cost per step; lines: true hazards")
    return save(figure, path)


if __name__ == "__main__":
    main(demo, Args)
