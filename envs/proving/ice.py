"""The sealed task that is a plain Gymnasium env, as a user would write one: nothing is batched."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from numpy.typing import NDArray

from pbcrl_envs.checks import checked_actions
from pbcrl_envs.proving.base import unbounded
from pbcrl_envs.simulation import FloatArray


class Ice(gymnasium.Env[NDArray[Any], NDArray[Any]]):
    """A sledge on a frozen lake: too fast where the ice is thin, it breaks in, which costs 1, once.

    It is pulled out and goes on. How strong the ice is differs between episodes and is not seen;
    where it is thin is seen. Reward: the way made. `gymnasium.make` adds the time limit.

    Args:
        render_mode: None; nothing is drawn.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    name: ClassVar[str] = "Ice"
    horizon: ClassVar[int] = 100
    cost_limit: ClassVar[float] = 0.1
    observation_names: ClassVar[tuple[str, ...]] = (
        *("speed", "y", "thin_here", "thin_ahead", "thin_left", "thin_right", "wet"),
    )

    def __init__(self, *, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = unbounded(len(self.observation_names))
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Draw the ice, and stand anywhere across it."""
        super().reset(seed=seed, options=options)
        low, high = [-1, 0, 0, math.log(0.9)], [1, 2 * math.pi, 2 * math.pi, math.log(2.2)]
        self._y, self._along, self._across, strength = self.np_random.uniform(low, high).tolist()
        self._strength = math.exp(strength)
        self._x = self._speed = 0.0
        self._wet = False
        self._begun = True
        return self._look(), {}

    def step(self, action: NDArray[Any]) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Slide for 0.1; push sets what the speed tends to, 0 to 1.5.

        Raises:
            ResetNeeded: If there was no reset.
            ValueError: If the action has another shape, or is not finite.
        """
        if not self._begun:
            raise ResetNeeded("an episode begins with reset(), but there was none; call it first")
        push, steer = checked_actions(action, shape=(2,), axes="(push, steer)").tolist()
        self._speed = 0.8 * self._speed + 0.2 * (0.75 + 0.75 * push)
        way = 0.1 * self._speed
        self._x += way
        self._y = min(max(self._y + 0.06 * steer, -1.5), 1.5)
        carried = self._strength * (1.6 - 1.0 * self._thin(self._x, self._y))
        breaks = not self._wet and self._speed > carried
        if breaks:
            self._wet, self._speed = True, 0.0
        return self._look(), way, False, False, {"cost": float(breaks)}

    def _thin(self, x: float, y: float) -> float:
        """How thin the ice is, 0 to 1."""
        return 0.5 + 0.5 * math.sin(1.2 * x + self._along) * math.cos(2 * y + self._across)

    def _look(self) -> NDArray[np.float32]:
        x, y, thin = self._x, self._y, self._thin
        near = thin(x, y), thin(x + 0.4, y), thin(x + 0.2, y - 0.3), thin(x + 0.2, y + 0.3)
        return np.array([self._speed, y, *near, self._wet], np.float32)

    @staticmethod
    def safe(obs: NDArray[np.float32]) -> FloatArray:
        """Go where the ice is thick, and slowly where it is not."""
        _, _, here, ahead, left, right, wet = obs.T.astype(float)
        want = 0.88 * (1.6 - np.maximum(here, ahead)) + 2 * wet
        return Ice._slide(obs, want, 4 * (left - right))

    @staticmethod
    def reckless(obs: NDArray[np.float32]) -> FloatArray:
        """Go straight on, as fast as can be."""
        return Ice._slide(obs, np.full(len(obs), 2.0), np.zeros(len(obs)))

    @staticmethod
    def _slide(obs: NDArray[np.float32], want: FloatArray, steer: FloatArray) -> FloatArray:
        push = ((want - 0.8 * obs[:, 0]) / 0.2 - 0.75) / 0.75
        return np.stack([push, steer], 1).clip(-1, 1)
