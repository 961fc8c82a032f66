"""Where the steps of an iteration are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from pbcrl_script_utils.envs import flat_dims


class Rollout:
    """T steps of N envs; each iteration writes over them.

    Args:
        num_steps: T.
        envs: Of `make_envs`, N of them.
    """

    def __init__(self, num_steps: int, envs: VectorEnv[Any, Any, Any]) -> None:
        obs_dim, act_dim = flat_dims(envs)
        shape = num_steps, envs.num_envs
        self.obs = np.zeros((*shape, obs_dim), np.float32)
        """s_t, raw, (T, N, obs_dim)."""
        self.actions = np.zeros((*shape, act_dim), np.float32)
        """As sampled, (T, N, act_dim)."""
        self.executed = np.zeros_like(self.actions)
        """As the envs took them: clipped to the bounds."""
        self.rewards = np.zeros(shape, np.float32)
        """(T, N)."""
        self.costs = np.zeros(shape, np.float32)
        """What the policy is charged, (T, N): true costs, or learned ones in their place."""
        self.terminated = np.zeros(shape, bool)
        """(T, N)."""
        self.done = np.zeros(shape, bool)
        """Terminated or truncated, (T, N)."""
