"""An env without a cost: a walker crosses a field from left to right, again and again.

Nothing here says where it should not go; whoever labels may know.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


class Field(gym.Env[FloatArray, FloatArray]):
    """The square [-1, 1]²; each step goes up to 0.1 in any direction, and its reward is 10 Δx.

    Who reaches the right edge starts again on the left one, at any height. Observation: the place,
    float32 (2,). It cannot be drawn.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Box(-1.0, 1.0, (2,), np.float32)
    _x: float
    _y: float

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Start on the left edge."""
        super().reset(seed=seed, options=options)
        self._start()
        return self._obs(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Walk."""
        east, north = action.tolist()
        pace = 0.1 / max(1.0, math.hypot(east, north))
        x = self._x
        self._x = min(max(x + pace * east, -1.0), 1.0)
        self._y = min(max(self._y + pace * north, -1.0), 1.0)
        reward = 10 * (self._x - x)
        if self._x == 1.0:
            self._start()
        return self._obs(), reward, False, False, {}

    def _start(self) -> None:
        self._x, self._y = -1.0, float(self.np_random.uniform(-1, 1))

    def _obs(self) -> FloatArray:
        return np.array([self._x, self._y], np.float32)


gym.register("Field-v0", "field:Field", max_episode_steps=50)
