"""What is compared: the tasks as a table, and the jobs of the real package in their order."""

import os
from dataclasses import dataclass


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
    """Steps recorded from each of four seeds."""


NAVIGATION = {
    "Goal0": Comparison(layouts=100),
    "Goal1": Comparison(layouts=100, episodes=400, horizon=400),
    "Goal2": Comparison(),
    "Push0": Comparison(layouts=100, steps=900),
    "Push1": Comparison(layouts=100, steps=900, episodes=250, horizon=500),
    "Push2": Comparison(steps=900),
    "Button0": Comparison(layouts=100),
    "Button1": Comparison(layouts=30, episodes=300, horizon=300),
    "Button2": Comparison(layouts=10),
}
"""A crowded layout takes the package a second to draw, hence fewer of them."""
VELOCITY = {
    "HalfCheetahVelocity": Comparison(layouts=100, episodes=200),
    "Walker2dVelocity": Comparison(layouts=100, episodes=200),
    "HumanoidVelocity": Comparison(layouts=100, episodes=200),
}

_CHOSEN = os.environ.get("PBCRL_PARITY_TASKS", "").split()
_CHUNK = 50


def chosen(tasks):
    return {name: row for name, row in tasks.items() if not _CHOSEN or name in _CHOSEN}


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
    return {"kind": kind, "task": task, "policy": policy, "seeds": [0, 4], "steps": row.steps}


def models_job(task):
    if task in VELOCITY:
        return {"kind": "robot_numbers", "task": task}
    return {"kind": "models", "task": task, "seeds": [0, 4]}


LEARNING_JOB = {"kind": "learning", "task": "Goal1", "max_steps": 100}


def jobs(files):
    """The jobs of the test `files`: the short ones, then episodes, of the slowest tasks first."""
    rows = {**chosen(NAVIGATION), **chosen(VELOCITY)}
    for task, row in rows.items():
        if "test_seeds.py" in files:
            yield layout_job(task, row)
        if "test_states.py" in files:
            yield steps_job(task, row)
        if "test_template.py" in files:
            yield models_job(task)
    if "test_old_gymnasium.py" in files:
        yield LEARNING_JOB
    if "test_episodes.py" in files:
        slowest = ("Button1", "Push1", "Goal1", "HumanoidVelocity")
        for task in sorted(rows, key=lambda name: (*slowest, name).index(name)):
            yield from episode_jobs(task, rows[task])
