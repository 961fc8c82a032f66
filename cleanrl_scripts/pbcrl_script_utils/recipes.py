"""Recipes: what the paper's tasks and people need in place of the scripts' own defaults.

`--env-id` chooses a task's recipe, `--label-folder` that of people; what is given on the command
line counts more. `--help` beside these flags lists the recipe, and so does the start of a run.
A task has five values at most, and people one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

Recipe = dict[str, Any]
"""Values by the name of their argument."""

GOAL, PUSH, BUTTON = (f"SafetyPoint{name}1-v0" for name in ("Goal", "Push", "Button"))
CHEETAH, WALKER, HUMANOID = (
    f"Safety{name}Velocity-v1" for name in ("HalfCheetah", "Walker2d", "Humanoid")
)
BLOCK, LANE, TOY = "DrivingBlockedRoad-v0", "DrivingLaneChange-v0", "PointHazards-v0"

_ROBOTS: Recipe = {
    "total_timesteps": 6_000_000,
    "num_envs": 100,
    "eval_episodes": 400,  # by 50 a cost of 20 is known to 7 only
}
_DRIVING: Recipe = {
    "total_timesteps": 3_000_000,
    "eval_episodes": 500,
}
_TOY: Recipe = {
    "gamma": 0.95,
    "hidden_sizes": (128, 128),  # which find ways round the hazards
    "eval_episodes": 100,
}

# What moves λ: answers about fresh episodes.

_ACCEPT: Recipe = {
    # What costs adds up to some 20 bad steps in an episode: whether a mean is acceptable can be
    # asked of a batch, and a share of unsafe ones would be hard to name.
    "constraint": "accept",
    # Most of the some 60 new episodes in one batch: costs have a heavy tail, so that the mean of a
    # small one is mostly below the mean of all, and near the limit hardly more than a coin.
    "accept_batch": 50,
}
_RATE: Recipe = {
    # An unsafe episode has two to eight bad steps: a mean of 0.04 to 0.16.
    "max_unsafe_rate": 0.02,
}

_LEARNED: Recipe = {
    # A limit on the mean: of the best policies within it half of the episodes cost more, and the
    # default, at most one unsafe episode in twenty, is kept by standing nearly still.
    "constraint": "learned",
}

# -- People ----------------------------------------------------------------------------------------

_PEOPLE: Recipe = {
    "online_queries": 150,
}
"""What `ppo_lag_pbcrl.py --label-folder` asks: 5 to 10 seconds each, so 15 to 25 minutes.

All are about the policy's own episodes: with two thirds of them about those of the reward alone,
limits broke where one answer in twenty was wrong.
"""

_OF_ALL: dict[str, Recipe] = {
    **dict.fromkeys((GOAL, PUSH, BUTTON, CHEETAH, WALKER, HUMANOID), _ROBOTS),
    **dict.fromkeys((BLOCK, LANE), _DRIVING),
    TOY: _TOY,
}
_OF_PBCRL: dict[str, Recipe] = {
    **dict.fromkeys((GOAL, PUSH, BUTTON, CHEETAH, WALKER, HUMANOID), _ACCEPT),
    **dict.fromkeys((BLOCK, LANE), _RATE),
    TOY: _LEARNED,
}


def recipe_of(env_id: str, *, script: str, by_people: bool = False) -> Recipe:
    """Return what a script, named without its `.py`, takes for a task; maybe nothing."""
    env_id = str(env_id).removeprefix("pbcrl_envs:")  # an argument that is missing is no text
    recipe = dict(_OF_ALL.get(env_id, {}))
    if script == "ppo_lag_pbcrl":
        # So few answers show no batch of fifty episodes.
        recipe |= _PEOPLE if by_people else _OF_PBCRL.get(env_id, {})
    return recipe


def recipe_lines(args: Any) -> list[str]:
    """Return a line for each argument that has its value from a recipe: name, value, instead of.

    Args:
        args: A script's arguments; what was given on the command line is no recipe's.
    """
    by_people = getattr(args, "label_folder", None) is not None
    env_id, script = getattr(args, "env_id", ""), getattr(args, "recipes", "")
    recipe = recipe_of(env_id, script=script, by_people=by_people)
    defaults = {field.name: field.default for field in fields(args)}
    return [
        f"{name} {_shown(value)} instead of {_shown(defaults[name])}"
        for name, value in recipe.items()
        if name in defaults and getattr(args, name) == value != defaults[name]
    ]


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
