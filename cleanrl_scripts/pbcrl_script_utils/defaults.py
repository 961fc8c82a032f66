"""Where the scripts' own defaults do not suit a task: found on seeds that no result uses.

`--env-id` chooses them, and `--label-folder` a budget for people; what is given on the command line
counts more, and `--help` beside the two shows the result. The trials are in `docs/calibration.md`
and `docs/calibration-driving.md`.
"""

from __future__ import annotations

from typing import Any

GOAL, PUSH, BUTTON = (f"SafetyPoint{name}1-v0" for name in ("Goal", "Push", "Button"))
CHEETAH, WALKER, HUMANOID = (
    f"Safety{name}Velocity-v1" for name in ("HalfCheetah", "Walker2d", "Humanoid")
)
BLOCK, LANE, TOY = "DrivingBlockedRoad-v0", "DrivingLaneChange-v0", "PointHazards-v0"

_DRIVING: dict[str, Any] = {
    "total_timesteps": 3_000_000,
    "num_envs": 100,
    "num_steps": 100,
    "minibatch_size": 2_000,
    "hidden_sizes": (64, 64),
    "learning_rate": 1e-3,
    "lr_decay": 0.9,  # or the last iterate is left to chance
    "target_kl": 0.01,
    "bound_coef": 0.1,
    "initial_log_std": -1.0,
    "eval_episodes": 500,
}
_DRIVING_LIMIT: dict[str, Any] = {
    # The limit means not one bad step: the price of one must soon outweigh all haste. But a crash
    # ends the episode, and its cost with it: the ten bad steps of a beginner must not be dearer.
    "multiplier_rule": "pid",
    "multiplier_lr": 0.05,
    "multiplier_proportional": 40.0,
    "multiplier_cap": 5.0,
}
# A beginner's forty bad steps at 5 each are dearer than the crash that ends them, 100.
_BLOCK_LIMIT: dict[str, Any] = {**_DRIVING_LIMIT, "multiplier_cap": 3.0}
_DRIVING_PBCRL: dict[str, Any] = {
    # What costs are rare accidents. From labels of whole episodes the cost learned what unsafe ones
    # start with, not their bad steps, and three policies in ten followed it to somewhere worse.
    "constraint": "rate",
    "segment_length": 20,
    # An episode has three or five segments, and an unsafe one two to eight bad steps: a mean of
    # 0.02 to 0.12.
    "max_unsafe_rate": 0.003,
    # Of a round's segments hardly one is unsafe in the end: more of them show more such.
    "offline_queries": 14_000,
    "online_queries": 6_000,
    # All episodes are unsafe at first, and safe rounds take back 0.012 at a time: an integral that
    # takes that up leaves λ so high that policies creep, and one in small steps cannot follow what
    # a seed needs. So λ is at its cap at first, and the integral begins when it has left it.
    "multiplier_rule": "pid",
    "multiplier_lr": 4.0,
    "multiplier_proportional": 12.5,
    "multiplier_cap": 5.0,
    "multiplier_anti_windup": True,
    # A fixed length: the held-out loss first rests early or late by chance, and leaves costs of
    # very different steepness.
    "pretrain_epochs": 6,
    "patience": 100,  # evaluations, of which there are 60: none stops it
    # Rounds of safe segments alone: the few unsafe ones of all rounds say which steps cost, and
    # it takes many steps until the model sees them.
    "finetune_epochs": 20,
    "finetune_lr": 3e-4,
    "finetune_balanced": True,
}
_NAVIGATION: dict[str, Any] = {
    "total_timesteps": 6_000_000,
    # Many short rollouts: what is learned from differs more than in few long ones.
    "num_envs": 100,
    "num_steps": 200,
    "update_epochs": 5,
    "lr_decay": 0.9,  # the gradient of a rare cost is mostly noise, which large steps follow
    "eval_episodes": 400,  # by 50 a cost of 20 is known to 7 only
}
_VELOCITY: dict[str, Any] = {**_NAVIGATION, "update_epochs": 10}
_MULTIPLIER: dict[str, Any] = {
    # The cost follows λ slowly: an integral alone overshoots and comes back too late.
    "multiplier_rule": "pid",
    "multiplier_cap": 5.0,
    # Once the reward is learned: before, the gradient of a rare cost is noise that drowns it.
    "multiplier_warmup": 0.12,
}
_NAVIGATION_LIMIT: dict[str, Any] = {
    **_MULTIPLIER,
    "multiplier_lr": 0.001,
    "multiplier_proportional": 200.0,
}
_VELOCITY_LIMIT: dict[str, Any] = {
    # In proportion to itself. At 5 the noise of a policy that knows the limit still breaks it.
    "multiplier_rule": "softplus",
    "multiplier_lr": 0.12,
    "multiplier_cap": 10.0,
}
_ACCEPT: dict[str, Any] = {
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
    "finetune_lr": 3e-4,  # rounds are small
}
_NAVIGATION_PBCRL: dict[str, Any] = {**_MULTIPLIER, **_ACCEPT}
# Carried over from the point robots as it was, but for the cap: no trials.
_VELOCITY_PBCRL: dict[str, Any] = {**_ACCEPT, "multiplier_cap": 10.0}
_TOY: dict[str, Any] = {
    "total_timesteps": 1_000_000,
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
_TOY_PBCRL: dict[str, Any] = {
    "pretrain_epochs": 20,
    "validate_every": 200,
    "cost_batch_size": 32,
}

TASKS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((GOAL, PUSH, BUTTON), _NAVIGATION),
    **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _VELOCITY),
    **dict.fromkeys((BLOCK, LANE), _DRIVING),
    TOY: _TOY,
}
"""Arguments of a task, of all scripts alike."""
_LIMIT = {
    **dict.fromkeys((GOAL, PUSH, BUTTON), _NAVIGATION_LIMIT),
    **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _VELOCITY_LIMIT),
    BLOCK: _BLOCK_LIMIT,
    LANE: _DRIVING_LIMIT,
}
TASKS_OF: dict[str, dict[str, dict[str, Any]]] = {
    "ppo_lag": _LIMIT,
    "ppo_lag_rlsf": _LIMIT,
    "ppo_lag_pbcrl": {
        **dict.fromkeys((GOAL, PUSH, BUTTON), _NAVIGATION_PBCRL),
        **dict.fromkeys((CHEETAH, WALKER, HUMANOID), _VELOCITY_PBCRL),
        **dict.fromkeys((BLOCK, LANE), _DRIVING_PBCRL),
        TOY: _TOY_PBCRL,
    },
}
"""Those of one script."""


PEOPLE: dict[str, Any] = {
    "collect_timesteps": 200_000,  # 100 pairs need 200 episodes, and somebody waits for them
    "offline_queries": 100,
    "online_queries": 50,
}
"""What `ppo_lag_pbcrl.py --label-folder` asks: 5 to 10 seconds each, so 15 to 25 minutes."""


def defaults_of(env_id: str, *, script: str, by_people: bool = False) -> dict[str, Any]:
    """Return the arguments that a script, named without its `.py`, takes for a task; maybe none."""
    found = {**TASKS.get(env_id, {}), **TASKS_OF.get(script, {}).get(env_id, {})}
    if by_people and env_id in (BLOCK, LANE):  # six epochs of a hundred labels would be six steps
        found |= {"pretrain_epochs": 200, "patience": 10}
    return {**found, **PEOPLE} if by_people else found
