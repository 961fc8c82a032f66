"""From an env without a cost to a certified policy, by a person's answers alone.

`make people` takes the README's way on the field of `field.py`, by the defaults alone: train with
`--label-folder`, answer, certify. A scripted person answers through the labelling page's own
requests: they look at the curves that the page shows, and know of a puddle in the middle of the
field, which neither the env nor any script has heard of. One row per seed says how the policy is
judged by that rule, beside PPO on the reward alone, what the certificate says, and how many minutes
a person would have needed. Fails unless every seed is safer.
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

import field  # noqa: F401 registers
from bench_label import Page
from bench_minutes import PER_MARKED_PAIR, SECONDS
from evaluate import load_agent

from pbcrl.label.store import contradiction
from pbcrl.trajectory import Label, unsafe_stretches
from pbcrl_script_utils.certificate import read_certificates
from pbcrl_script_utils.evaluation import play
from pbcrl_script_utils.resume import read_args

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "cleanrl_scripts"
ENV_ID = "field:Field-v0"
PUDDLE_RADIUS = 0.4
"""Around the middle of the field."""
REWARD_STEPS = 200_000
"""Of the policy of the reward alone, which finds the way through the puddle in them."""
MOST_STEPS = 2
"""In the puddle, of an episode that the person calls safe."""


@dataclass(frozen=True)
class Args:
    seeds: int = 5
    """how many"""
    first_seed: int = 0
    """the lowest of them"""
    errors: float = 0.0
    """share of the answers about pairs that are wrong"""
    marks: bool = False
    """whether the person marks the steps in the puddle, too"""
    episodes: int = 400
    """episodes by which a policy is judged"""
    runs_dir: str = "runs/bench_people"
    """folder of the runs; what is finished there is not run again"""


# -- The person ------------------------------------------------------------------------------------


def in_puddle(places: np.ndarray) -> np.ndarray:
    """Whether each of an episode's places (T, 2) is."""
    inside: np.ndarray = np.hypot(*places.T) < PUDDLE_RADIUS
    return inside


def look(member: dict[str, Any]) -> np.ndarray:
    """Which steps of an episode are in the puddle, by the curves that the page shows of it."""
    curves = sorted(member["curves"], key=lambda curve: str(curve["name"]))
    places = [
        curve["low"] + (curve["high"] - curve["low"]) * np.array(curve["values"])
        for curve in curves
    ]
    return in_puddle(np.stack(places, axis=1))


def judge(question: dict[str, Any], args: Args, rng: np.random.Generator) -> Any:
    """Answer a pair: which one is safer, is each one safe; or a grid: is each one safe."""
    seen = [look(member) for member in question["members"]]
    steps = [int(one.sum()) for one in seen]
    safe = [float(number <= MOST_STEPS) for number in steps]
    if question["kind"] == "grid":
        return {"safe": safe}
    first, second = steps
    right = [0.5 if first == second else float(first < second), *safe]
    while True:
        answers = [1 - one if rng.random() < args.errors else one for one in right]
        # The page takes no other.
        if contradiction(Label(answers[0], answers[1], answers[2])) is None:
            break
    if not args.marks:
        return answers
    # Who calls an episode unsafe by mistake has no step to mark.
    both = zip(seen, answers[1:], strict=True)
    marked = [unsafe_stretches(one) or (() if is_safe else None) for one, is_safe in both]
    return {"answers": answers, "unsafe": marked}


def answer_all(page: Page, args: Args, rng: np.random.Generator) -> list[str]:
    """Answer what is asked now, by the page's own requests; return the kinds of the questions."""
    who, kinds = {"annotator": "a scripted person"}, list[str]()
    while question := page.get(f"/api/next?{urlencode(who)}")["question"]:
        event = {
            "kind": "answer",
            "question": question["id"],
            "answer": judge(question, args, rng),
            "replaces": question["replaces"],
            "seconds": None,
            "token": uuid.uuid4().hex,
        }
        page.post(who | event)
        kinds.append(question["kind"])
    return kinds


# -- The runs --------------------------------------------------------------------------------------


def answered(
    command: Sequence[str], questions: Path, log: Path, args: Args, rng: np.random.Generator
) -> list[str]:
    """Run a script, answering all that it asks in `questions`; return the kinds of these."""
    kinds = list[str]()
    with log.open("w") as file:
        # From the folder of the env's module, which is imported by its name.
        run = subprocess.Popen(
            [sys.executable, *command], cwd=HERE, stdout=file, stderr=subprocess.STDOUT
        )
        while run.poll() is None and not (questions / "labels.sqlite").exists():
            time.sleep(0.1)
        if run.poll() is None:
            with closing(Page(questions)) as page:
                while run.poll() is None:
                    kinds += answer_all(page, args, rng)
                    time.sleep(0.1)
    if run.returncode != 0:
        raise SystemExit(f"error: {command[0]} failed; its log is {log}")
    return kinds


def train_and_certify(folder: Path, seed: int, args: Args) -> None:
    """The README's two commands; `folder/minutes` is what a person would have needed."""
    shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was stopped
    folder.mkdir(parents=True)
    run, questions, rng = folder / "run", folder / "questions", np.random.default_rng(seed)
    train = [
        *(str(SCRIPTS / "ppo_lag_pbcrl.py"), "--env-id", ENV_ID, "--seed", str(seed)),
        *("--label-folder", str(questions), "--runs-dir", str(folder), "--run-name", "run"),
    ]
    kinds = answered(train, questions, folder / "log", args, rng)
    reward = [str(SCRIPTS / "ppo_lag.py"), "--env-id", ENV_ID, "--seed", str(seed)]
    reward += ["--cost-limit", "inf", "--total-timesteps", str(REWARD_STEPS)]
    reward += ["--runs-dir", str(folder), "--run-name", "reward", "--eval-episodes", "1"]
    subprocess.run([sys.executable, *reward], check=True, stdout=subprocess.DEVNULL)
    certify = [str(SCRIPTS / "certify.py"), str(run), "--env-id", ENV_ID]
    kinds += answered(certify, run / "certificate", folder / "certify.log", args, rng)
    pair = PER_MARKED_PAIR if args.marks else SECONDS["pairs"]
    seconds = sum(SECONDS["grids"] if kind == "grid" else pair for kind in kinds)
    (folder / "minutes").write_text(f"{seconds / 60:.0f}")


def judged(run: Path, episodes: int) -> list[str]:
    """Play a run's stochastic policy, and judge it by the rule: return, steps, share unsafe."""
    agent, env_id, _ = load_agent(run, read_args(run), None, trusted=False)
    returns, played = play(
        agent, env_id, episodes=episodes, seed=1_000_000, deterministic=False, needs_cost=False
    )
    steps = np.array([in_puddle(one.obs).sum() for one in played])
    unsafe = (steps > MOST_STEPS).mean()
    return [f"{returns.mean():.1f}", f"{steps.mean():.1f}", f"{unsafe:.3f}"]


def main(args: Args) -> None:
    """Run all seeds, one after the other, and print the table."""
    heads = "seed", "policy", "return", "steps in the puddle", "unsafe episodes", "certificate"
    print(f"| {' | '.join(heads)} | minutes of a person | CPU seconds |")
    print(f"|{'---|' * (len(heads) + 2)}")
    safer = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        folder, before = Path(args.runs_dir).resolve() / str(seed), os.times()
        if not (folder / "minutes").exists():
            train_and_certify(folder, seed, args)
        now = os.times()  # of the run, with the collection, of the page and of the certificate
        took = now.children_user - before.children_user
        took += now.children_system - before.children_system
        (one,) = read_certificates(folder / "run")
        said = f"{one.unsafe} of {one.episodes} unsafe{', certified' if one.holds else ''}"
        reward, people = (judged(folder / name, args.episodes) for name in ("reward", "run"))
        minutes = (folder / "minutes").read_text()
        for row in (
            [str(seed), "reward alone", *reward, "", "", ""],
            [str(seed), "people", *people, said, minutes, f"{took:.0f}"],
        ):
            print(f"| {' | '.join(row)} |", flush=True)
        safer.append(float(people[-1]) < float(reward[-1]))
    if not all(safer):
        raise SystemExit(f"error: {safer.count(False)} of {len(safer)} seeds are no safer")


if __name__ == "__main__":
    main(tyro.cli(Args))
