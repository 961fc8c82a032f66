"""Recipes: what the paper's tasks and people need in place of the scripts' own defaults.

`--env-id` chooses a task's recipe, `--label-folder` that of people; what is given on the command
line counts more. `--help` beside these flags lists the recipe, and so does the start of a run.
All values were found by trials on the true cost, which are in `docs/notebook/`.
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

# -- All of the paper's tasks ----------------------------------------------------------------------

# The values and the rule of λ that their other values were found with, before the defaults were
# made for any env.
_PAPER: Recipe = {
    "minibatch_size": 2_000,
    "learning_rate": 3e-4,
    "lr_decay": 0.0,
    "hidden_sizes": (256, 256, 256),
    "bound_coef": 0.0,
    "multiplier_initial": 0.01,
    "multiplier_cap": 5.0,
    "multiplier_proportional": 5.0,
}

# -- Navigation: Goal, Push, Button ----------------------------------------------------------------

_NAVIGATION: Recipe = {
    **_PAPER,
    "total_timesteps": 6_000_000,
    # Many short rollouts: what is learned from differs more than in few long ones.
    "num_envs": 100,
    "num_steps": 200,
    "update_epochs": 5,
    "lr_decay": 0.9,  # the gradient of a rare cost is mostly noise, which large steps follow
    "eval_episodes": 400,  # by 50 a cost of 20 is known to 7 only
}
_SLOW: Recipe = {
    # The cost follows λ slowly: an integral alone overshoots and comes back too late.
    "multiplier_rule": "pid",
    # Once the reward is learned: before, the gradient of a rare cost is noise that drowns it.
    "multiplier_warmup": 0.12,
}
_NAVIGATION_LIMIT: Recipe = {
    **_SLOW,
    "multiplier_lr": 0.001,
    "multiplier_proportional": 200.0,
}
_ACCEPT: Recipe = {
    # What costs adds up to some 20 bad steps in an episode: whether a mean is acceptable can be
    # asked of a batch, and a share of unsafe ones would be hard to name.
    "constraint": "accept",
    # Most of the some 60 new episodes in one batch: costs have a heavy tail, so that the mean of a
    # small one is mostly below the mean of all, and near the limit hardly more than a coin.
    "accept_batch": 50,
    "offline_queries": 14_000,
    "online_queries": 6_000,
    "multiplier_rule": "pid",
    "multiplier_lr": 0.1,
    "multiplier_proportional": 60.0,
    "finetune_interval": 3,
}
_NAVIGATION_PBCRL: Recipe = {**_SLOW, **_ACCEPT}

# -- Velocity: HalfCheetah, Walker2d, Humanoid -----------------------------------------------------

_VELOCITY: Recipe = {**_NAVIGATION, "update_epochs": 10}
_VELOCITY_LIMIT: Recipe = {
    # In proportion to itself. At 5 the noise of a policy that knows the limit still breaks it.
    "multiplier_rule": "softplus",
    "multiplier_lr": 0.12,
    "multiplier_cap": 10.0,
}
# Carried over from the point robots as it was, but for the cap: no trials.
_VELOCITY_PBCRL: Recipe = {**_ACCEPT, "multiplier_cap": 10.0}

# -- Driving: lane change, blocked road ------------------------------------------------------------

_DRIVING: Recipe = {
    **_PAPER,
    "total_timesteps": 3_000_000,
    "num_envs": 100,
    "num_steps": 100,
    "hidden_sizes": (64, 64),
    "learning_rate": 1e-3,
    "lr_decay": 0.9,  # or the last iterate is left to chance
    "target_kl": 0.01,
    "bound_coef": 0.1,
    "initial_log_std": -1.0,
    "eval_episodes": 500,
}
_DRIVING_LIMIT: Recipe = {
    # The limit means not one bad step: the price of one must soon outweigh all haste. But a crash
    # ends the episode, and its cost with it: the ten bad steps of a beginner must not be dearer.
    "multiplier_rule": "pid",
    "multiplier_lr": 0.05,
    "multiplier_proportional": 40.0,
}
# A beginner's forty bad steps at 5 each are dearer than the crash that ends them, 100.
_BLOCK_LIMIT: Recipe = {**_DRIVING_LIMIT, "multiplier_cap": 3.0}
_DRIVING_PBCRL: Recipe = {
    "constraint": "rate",
    # An unsafe episode has two to eight bad steps: a mean of 0.04 to 0.16.
    "max_unsafe_rate": 0.02,
    "offline_queries": 14_000,
    "online_queries": 6_000,
    # All episodes are unsafe at first, and safe rounds take back 0.012 at a time: an integral that
    # takes that up leaves λ so high that policies creep, and one in small steps cannot follow what
    # a seed needs. So λ is at its cap at first, and the integral begins when it has left it.
    "multiplier_rule": "pid",
    "multiplier_lr": 0.6,
    "multiplier_proportional": 12.5,
    "multiplier_anti_windup": True,
}

# -- The toy ---------------------------------------------------------------------------------------

_TOY: Recipe = {
    **_PAPER,
    "multiplier_rule": "adam",
    "num_envs": 50,
    "num_steps": 100,
    "minibatch_size": 500,
    "hidden_sizes": (128, 128),
    "learning_rate": 1e-3,
    "target_kl": 0.05,
    "gamma": 0.95,
    "bound_coef": 0.1,
    # Cost is priced from the start: a policy that has learned to drive straight through the
    # hazards finds no way around them, since both sides of a disc look alike from its middle.
    "multiplier_initial": 1.5,
    "multiplier_lr": 0.01,
    "eval_episodes": 100,
}
_TOY_PBCRL: Recipe = {
    # As fast as the learned cost, whose unit is that of its labels' log-odds.
    "multiplier_rule": "pid",
    "multiplier_lr": 0.03,
    "multiplier_proportional": 30.0,
}

# -- People ----------------------------------------------------------------------------------------

_PEOPLE: Recipe = {
    "collect_timesteps": 200_000,  # 100 pairs need 200 episodes, and somebody waits for them
    "offline_queries": 100,
    "online_queries": 50,
}
"""What `ppo_lag_pbcrl.py --label-folder` asks: 5 to 10 seconds each, so 15 to 25 minutes."""
# So few queries show no batch of fifty episodes: the learned cost moves λ, in units of its own.
_PEOPLE_NAVIGATION: Recipe = {
    "constraint": "learned",
    "multiplier_lr": 0.01,
    "multiplier_proportional": 200.0,
}
_PEOPLE_VELOCITY: Recipe = {
    "constraint": "learned",
    "multiplier_rule": "softplus",
    "multiplier_lr": 0.12,
}
_OF_PEOPLE: dict[str, Recipe] = {
    **dict.fromkeys((GOAL, PUSH, BUTTON), _PEOPLE_NAVIGATION),
    **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _PEOPLE_VELOCITY),
}

_OF_ALL: dict[str, Recipe] = {
    **dict.fromkeys((GOAL, PUSH, BUTTON), _NAVIGATION),
    **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _VELOCITY),
    **dict.fromkeys((BLOCK, LANE), _DRIVING),
    TOY: _TOY,
}
_OF_TRUE_COST: dict[str, Recipe] = {
    **dict.fromkeys((GOAL, PUSH, BUTTON), _NAVIGATION_LIMIT),
    **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _VELOCITY_LIMIT),
    BLOCK: _BLOCK_LIMIT,
    LANE: _DRIVING_LIMIT,
}
_OF_SCRIPT: dict[str, dict[str, Recipe]] = {
    "ppo_lag": _OF_TRUE_COST,
    "ppo_lag_rlsf": _OF_TRUE_COST,
    "ppo_lag_pbcrl": {
        **dict.fromkeys((GOAL, PUSH, BUTTON), _NAVIGATION_PBCRL),
        **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _VELOCITY_PBCRL),
        **dict.fromkeys((BLOCK, LANE), _DRIVING_PBCRL),
        TOY: _TOY_PBCRL,
    },
}


def recipe_of(env_id: str, *, script: str, by_people: bool = False) -> Recipe:
    """Return what a script, named without its `.py`, takes for a task; maybe nothing."""
    recipe = {**_OF_ALL.get(env_id, {}), **_OF_SCRIPT.get(script, {}).get(env_id, {})}
    if by_people and script == "ppo_lag_pbcrl":
        recipe |= _PEOPLE | _OF_PEOPLE.get(env_id, {})
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
