"""The benchmark tasks as a table: which env, how much cost, how long an episode.

A limit that stands here is for oracles and evaluation only; a learner never reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One benchmark task: an env and the cost it may incur."""

    env_id: str
    """Gymnasium id, registered by `import pbcrl_envs`."""
    threshold: float
    """d: highest episode cost still called safe; undiscounted sum of step costs."""
    horizon: int
    """Steps after which an episode is truncated."""


TASKS = {
    "toy": Task("PointHazards-v0", threshold=5.0, horizon=100),
    "goal": Task("SafetyPointGoal1-v0", threshold=20.0, horizon=1000),
    "push": Task("SafetyPointPush1-v0", threshold=35.0, horizon=1000),
    "button": Task("SafetyPointButton1-v0", threshold=40.0, horizon=1000),
    "halfcheetah": Task("SafetyHalfCheetahVelocity-v1", threshold=5.0, horizon=1000),
    "walker2d": Task("SafetyWalker2dVelocity-v1", threshold=5.0, horizon=1000),
    "humanoid": Task("SafetyHumanoidVelocity-v1", threshold=5.0, horizon=1000),
    "blocked_road": Task("DrivingBlockedRoad-v0", threshold=0.1, horizon=100),
    "lane_change": Task("DrivingLaneChange-v0", threshold=0.1, horizon=100),
}
"""By short name; the thresholds are the paper's, but for that of the toy, which is ours.

Levels 0 and 2 of the robotics tasks are registered too, but the paper names no limit for them."""

PROVING = {
    "Cruise": (200, 20.0),
    "Gap": (200, 1.0),
    "Hole": (100, 0.05),
    "Swing": (200, 2.0),
    "Crash": (200, 5.0),
    "Channel": (200, 8.0),
    "Kiln": (1000, 30.0),
    "Storage": (168, 0.02),
    "Thicket": (150, 4.0),
    "Tow": (200, 4.0),
    "Ice": (100, 0.1),
}
"""Horizon and limit of the proving ground's own tasks, by name."""

_HIGHWAY = {"DrivingMerge-v0": 8.0, "DrivingHighway-v0": 10.0}
"""Limits of those of highway-env's own envs that belong to the proving ground."""


def cost_limit(env_id: str) -> float | None:
    """Look up d, the true cost limit per episode of a known env; None for any other env.

    Args:
        env_id: Gymnasium id, spelled as registered; `pbcrl_envs:` may stand before it.
    """
    limits = {task.env_id: task.threshold for task in TASKS.values()}
    limits |= {f"Proving{name}-v0": limit for name, (_, limit) in PROVING.items()}
    limits |= _HIGHWAY
    return limits.get(env_id.removeprefix("pbcrl_envs:"))
