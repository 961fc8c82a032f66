"""The scale of rewards and costs, so that learning does not depend on their units.

`LagrangeMultiplier` is a price between a reward and a cost that have been divided by their scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pbcrl.errors import NonFiniteError, require_in

_TOO_LARGE = 1e18


class SignalScale:
    """Root mean square of the discounted sums of reward and cost, over recent rollouts.

    Divided by it, both have sums of about 1, whatever they are measured in. It changes slowly, so
    that a multiplier is a price: it says how much scaled reward a unit of scaled cost is worth, in
    a safe policy's rollout as in an unsafe one's.

    Args:
        num_envs: N.
        gamma: Discount per step, in [0, 1].
        forget: Share of the newest rollout in the mean, in (0, 1]: with the default some ten count,
            all alike until there are so many. Whoever takes note of single steps, as rollouts of
            T = 1, needs a smaller one.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, num_envs: int, gamma: float, *, forget: float = 0.1) -> None:
        require_in("[1, inf)", num_envs=num_envs)
        require_in("[0, 1]", gamma=gamma)
        require_in("(0, 1]", forget=forget)
        self._gamma, self._forget = gamma, forget
        self._sums = np.zeros((2, num_envs))  # discounted, up to now, within the episode
        self._square = np.zeros(2)
        self._rollouts = 0

    def update(self, signals: Tensor, done: Tensor) -> Tensor:
        """Take note of a rollout, and return what to divide it by.

        Args:
            signals: Rewards and costs, (2, T, N).
            done: Whether an episode ended at a step, (T, N).

        Returns:
            (2, 1, 1), > 0: of a signal that has been 0 all the time it is 1.

        Raises:
            NonFiniteError: If the signals are so large that nothing can be learned from them.
        """
        total, going_on = np.zeros(2), ~done.numpy()
        for t, step in enumerate(signals.double().numpy().swapaxes(0, 1)):
            self._sums = self._gamma * self._sums + step
            total += np.square(self._sums).mean(axis=1)
            self._sums *= going_on[t]
        self._rollouts += 1
        weight = max(1 / self._rollouts, self._forget)
        self._square += weight * (total / len(going_on) - self._square)
        if not (self._square < _TOO_LARGE**2).all():
            raise NonFiniteError(
                "the squares of discounted sums of rewards and costs must be finite in float32, "
                f"got sums of {np.sqrt(self._square).max():.1e}; find the huge rewards or costs, "
                "or divide them"
            )
        scale = np.where(self._square > 0, np.sqrt(self._square), 1.0)
        return torch.from_numpy(scale).float()[:, None, None]

    def reset(self) -> None:
        """Forget the sums of unfinished episodes, because all envs have been reset."""
        self._sums[:] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that the next scale depends on."""
        return {
            "sums": self._sums.copy(),
            "square": self._square.copy(),
            "rollouts": self._rollouts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._sums = np.array(state["sums"], np.float64)
        self._square = np.array(state["square"], np.float64)
        self._rollouts = int(state["rollouts"])
