"""What is compared: the tasks as a table, and the jobs of the real package in their order.

The short ladder compares every task step by step, from few seeds; `nightly` tests add the others
and whole episodes.
"""

import os
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class Comparison:
    """How much of one task is compared."""

    episodes: int = 0
    """Whole episodes a side; 0 leaves the rung out."""
    horizon: int = 1000
    """Steps after which they are truncated."""
    layouts: int = 20
    """Seeds whose layouts or first observations are compared."""
    steps: int = 400
    """Steps recorded from each of the `step_seeds`."""
    step_seeds: int = 4
    short_step_seeds: int = 2
    """As many in the short ladder: each contact that there can be must occur."""


NAVIGATION = {
    "Goal0": Comparison(layouts=100),
    "Goal1": Comparison(layouts=100, episodes=400, horizon=400),
    "Goal2": Comparison(),
    "Push0": Comparison(layouts=100, steps=900),
    "Push1": Comparison(layouts=100, steps=900, short_step_seeds=3, episodes=250, horizon=500),
    "Push2": Comparison(steps=900),
    "Button0": Comparison(layouts=100),
    # Two seeds have about ten contacts between boxes: too few to tell one in a hundred.
    "Button1": Comparison(
        layouts=30, step_seeds=12, short_step_seeds=12, episodes=300, horizon=300
    ),
    "Button2": Comparison(layouts=10, step_seeds=12, short_step_seeds=12),
}
"""A crowded layout takes the package a second to draw, hence fewer of them."""
VELOCITY = {
    "HalfCheetahVelocity": Comparison(layouts=100, episodes=200),
    "Walker2dVelocity": Comparison(layouts=100, episodes=200),
    "HumanoidVelocity": Comparison(layouts=100, episodes=200),
}

_CHOSEN = os.environ.get("PBCRL_PARITY_TASKS", "").split()
_CHUNK = 50
SHORT_LAYOUTS = 6


def chosen(tasks):
    return {name: row for name, row in tasks.items() if not _CHOSEN or name in _CHOSEN}


def sizes(tasks):
    """Each chosen task with what the short ladder compares of it, and with all of it."""
    sized = []
    for name, row in chosen(tasks).items():
        short = replace(row, layouts=SHORT_LAYOUTS, step_seeds=row.short_step_seeds)
        sized.append(pytest.param(name, short, id=f"{name}-short"))
        sized.append(pytest.param(name, row, id=f"{name}-full", marks=pytest.mark.nightly))
    return sized


def policy_of(task):
    return task.removesuffix("Velocity").rstrip("012").lower()


def episode_jobs(task, row):
    first = range(0, row.episodes, _CHUNK)
    return [
        {
            "kind": "episodes",
            "task": task,
            "policy": policy_of(task),
            "horizon": row.horizon,
            "seeds": [start, min(start + _CHUNK, row.episodes)],
        }
        for start in first
    ]


def layout_job(task, row):
    kind = "first_observations" if task in VELOCITY else "layouts"
    return {"kind": kind, "task": task, "seeds": [0, row.layouts], "resets": 2}


def steps_job(task, row):
    if task in VELOCITY:
        policy, kind = policy_of(task), "velocity_steps"
    else:
        policy, kind = "bump", "navigation_steps"
        if task.startswith("Push"):  # its goal is not met by chance
            policy = "bump_and_score"
    return {
        "kind": kind,
        "task": task,
        "policy": policy,
        "seeds": [0, row.step_seeds],
        "steps": row.steps,
    }


def models_job(task):
    if task in VELOCITY:
        return {"kind": "robot_numbers", "task": task}
    return {"kind": "models", "task": task, "seeds": [0, 4]}


LEARNING_JOB = {"kind": "learning", "task": "Goal1", "max_steps": 100}
OMNISAFE_JOB = {"kind": "omnisafe", "task": "Goal1", "max_steps": 50, "epochs": 2}
FSRL_JOB = {"kind": "fsrl", "max_steps": 50, "epochs": 2}
SKIES_JOB = {"kind": "skies", "task": "Goal1", "steps": 200}


def jobs(tests):
    """The jobs of the chosen tests, (file, parameters) each: short ones, then the longest first."""
    episodes = []
    for file, parameters in tests:
        task, row = parameters.get("task"), parameters.get("row")
        if file == "test_seeds.py":
            yield layout_job(task, row)
        elif file == "test_states.py":
            yield steps_job(task, row)
        elif file == "test_template.py":
            yield models_job(task)
        elif file == "test_old_gymnasium.py":
            yield LEARNING_JOB
            yield SKIES_JOB
        elif file == "test_safe_rl.py":
            yield OMNISAFE_JOB
            yield FSRL_JOB
        elif file == "test_episodes.py":
            episodes.append((task, row))
    slowest = ("Button1", "Push1", "Goal1", "HumanoidVelocity")
    for task, row in sorted(episodes, key=lambda pair: (*slowest, pair[0]).index(pair[0])):
        yield from episode_jobs(task, row)
