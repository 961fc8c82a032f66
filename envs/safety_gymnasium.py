"""`safety_gymnasium.make` for code that was written for Safety-Gymnasium: one import to change.

    from pbcrl_envs import safety_gymnasium  # instead of: import safety_gymnasium

Steps return the cost as their third value. Has the tasks of this package, single envs only; the
real Safety-Gymnasium is in `pbcrl_envs.upstream`.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym

Step = tuple[Any, SupportsFloat, float, bool, bool, dict[str, Any]]


class SafetyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose step returns (obs, reward, cost, terminated, truncated, info)."""

    def step(self, action: Any) -> Step:  # type: ignore[override]
        """Take a step; the cost is that of `info["cost"]`, per step, >= 0.

        Raises:
            KeyError: If the env reports none.
        """
        obs, reward, terminated, truncated, info = self.env.step(action)
        if "cost" not in info:
            raise KeyError(
                f"a step has a cost, but the info of {self.env} has the keys {sorted(info)}; make "
                "one of pbcrl_envs.TASKS"
            )
        return obs, reward, info["cost"], terminated, truncated, info


def make(id: str, **kwargs: Any) -> SafetyEnv:  # noqa: A002
    """Return a task of this package as Safety-Gymnasium would.

    Args:
        id: Such as "SafetyPointGoal1-v0"; `pbcrl_envs.TASKS` has them all.
        **kwargs: Of `gymnasium.make`, such as `render_mode` and `max_episode_steps`.

    Raises:
        gymnasium.error.NameNotFound: If there is no such task, with the nearest one.
    """
    return SafetyEnv(gym.make(id, **kwargs))
