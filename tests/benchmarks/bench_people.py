"""From an env without a cost to a safer policy, by a person's answers alone.

`make people` trains `ppo_lag_pbcrl.py --label-folder` on the field of `field.py`. A scripted person
answers through the labelling page's own requests: they look at the curves that the page shows, and
know of a puddle in the middle of the field, which neither the env nor any script has heard of. One
row per seed says how the policy is judged by that rule, beside the policy that collected the
offline episodes: PPO on the reward, trained as long. Fails unless every seed is safer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cleanrl_scripts"))

from bench_label import Page
from evaluate import load_agent

from pbcrl_script_utils.evaluation import play
from pbcrl_script_utils.resume import read_args

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "cleanrl_scripts"
ENV_ID = "field:Field-v0"
PUDDLE_RADIUS = 0.4
"""Around the middle of the field."""
MOST_STEPS = 2
"""In the puddle, of an episode that the person calls safe."""
TRAINING = {
    "env-id": ENV_ID,
    "total-timesteps": 120_000,
    "num-envs": 20,
    "num-steps": 50,
    "minibatch-size": 250,
    "hidden-sizes": 32,
    "learning-rate": 1e-3,
    "lr-decay": 0.9,
    "offline-queries": 200,
    "online-queries": 480,
    "finetune-interval": 5,
    "constraint": "rate",
    "max-unsafe-rate": 0.05,
    "label-wait": "inf",
    "eval-episodes": 1,
    "torch-threads": 1,
    "run-name": "run",
}


@dataclass(frozen=True)
class Args:
    seeds: int = 5
    """how many"""
    first_seed: int = 0
    """the lowest of them"""
    episodes: int = 200
    """episodes by which a policy is judged"""
    runs_dir: str = "runs/bench_people"
    """folder of the runs; what is finished there is not run again"""


# -- The person ------------------------------------------------------------------------------------


def steps_in_puddle(places: np.ndarray) -> int:
    """The rule, of an episode's places (T, 2)."""
    return int((np.hypot(*places.T) < PUDDLE_RADIUS).sum())


def look(member: dict[str, Any]) -> int:
    """Judge an episode by the curves that the page shows of it."""
    curves = sorted(member["curves"], key=lambda curve: str(curve["name"]))
    places = [
        curve["low"] + (curve["high"] - curve["low"]) * np.array(curve["values"])
        for curve in curves
    ]
    return steps_in_puddle(np.stack(places, axis=1))


def judge(members: Sequence[dict[str, Any]]) -> list[float]:
    """An answer: is the first one safer, is the first one safe, is the second one."""
    first, second = map(look, members)
    preference = 0.5 if first == second else float(first < second)
    return [preference, float(first <= MOST_STEPS), float(second <= MOST_STEPS)]


def answer_all(page: Page) -> None:
    """Answer what is asked now, by the page's own requests."""
    who = {"annotator": "a scripted person"}
    while question := page.get(f"/api/next?{urlencode(who)}")["question"]:
        event = {
            "kind": "answer",
            "question": question["id"],
            "answer": judge(question["members"]),
            "replaces": question["replaces"],
            "seconds": None,
            "token": uuid.uuid4().hex,
        }
        page.post(who | event)


# -- The runs --------------------------------------------------------------------------------------


def train(folder: Path, seed: int) -> None:
    """Train a policy in `folder/run`, answering all that it asks in `folder/questions`."""
    shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was stopped
    folder.mkdir(parents=True)
    questions = folder / "questions"
    command = [sys.executable, str(SCRIPTS / "ppo_lag_pbcrl.py")]
    place = {"seed": seed, "runs-dir": folder, "label-folder": questions}
    for name, value in {**TRAINING, **place}.items():
        command += [f"--{name}", str(value)]
    with (folder / "log").open("w") as log:
        # From the folder of the env's module, which is imported by its name.
        run = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=subprocess.STDOUT)
        while run.poll() is None and not (questions / "labels.sqlite").exists():
            time.sleep(0.1)
        if run.poll() is None:
            with closing(Page(questions)) as page:
                while run.poll() is None:
                    answer_all(page)
                    time.sleep(0.1)
    if run.returncode != 0:
        raise SystemExit(f"error: training failed; its log is {folder / 'log'}")


def judged(run: Path, episodes: int) -> dict[str, float]:
    """Play a run's policy, and judge it by the rule."""
    agent, env_id, _ = load_agent(run, read_args(run), None, trusted=False)
    returns, played = play(
        agent, env_id, episodes=episodes, seed=1_000_000, deterministic=True, needs_cost=False
    )
    steps = np.array([steps_in_puddle(one.obs) for one in played])
    return {
        "return": float(returns.mean()),
        "steps": float(steps.mean()),
        "unsafe": float((steps > MOST_STEPS).mean()),
    }


def main(args: Args) -> None:
    """Run all seeds, one after the other, and print the table."""
    print("| seed | policy | return | steps in the puddle | unsafe episodes | CPU seconds |")
    print("|---|---|---|---|---|---|")
    safer = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        folder, before = Path(args.runs_dir).resolve() / str(seed), os.times()
        if not (folder / "run" / "summary.json").exists():
            train(folder, seed)
        now = os.times()  # of the run, with the collection, and of the page
        took = now.children_user - before.children_user
        took += now.children_system - before.children_system
        reward, people = (judged(folder / name, args.episodes) for name in ("run/collect", "run"))
        rows = ("reward alone", reward, ""), ("people", people, f"{took:.0f}")
        for name, found, seconds in rows:
            print(
                f"| {seed} | {name} | {found['return']:.1f} | {found['steps']:.1f} | "
                f"{found['unsafe']:.3f} | {seconds} |",
                flush=True,
            )
        safer.append(people["unsafe"] < reward["unsafe"])
    if not all(safer):
        raise SystemExit(f"error: {safer.count(False)} of {len(safer)} seeds are no safer")


if __name__ == "__main__":
    main(tyro.cli(Args))
