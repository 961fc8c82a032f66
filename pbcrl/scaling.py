"""The scale of rewards and costs, so that learning does not depend on their units.

`LagrangeMultiplier` is a price between a reward and a cost that have been divided by their scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
        gamma: Discount per step, in [0, 1]. With 0 it is the scale of single steps, such as that of
            advantages.
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
            signals: Rewards and costs, (2, T, N), of any dtype; T >= 1.
            done: Whether an episode ended at a step, bool (T, N).

        Returns:
            (2, 1, 1), > 0: of a signal that has been 0 all the time it is 1.

        Raises:
            ValueError: If a shape, or the dtype of `done`, is another.
            NonFiniteError: If a signal is NaN or infinite, or so large that nothing can be learned
                from it. After an error everything is as it was.
        """
        values, ends = self._checked(signals, done)
        sums, total = self._sums, np.zeros(2)
        for t, step in enumerate(values.swapaxes(0, 1)):
            sums = self._gamma * sums + step
            total += np.square(sums).mean(axis=1)
            sums *= ~ends[t]
        weight = max(1 / (self._rollouts + 1), self._forget)
        square = self._square + weight * (total / len(ends) - self._square)
        if not (square < _TOO_LARGE**2).all():
            raise NonFiniteError(
                "the squares of discounted sums of rewards and costs must be finite in float32, "
                f"got sums of {np.sqrt(square).max():.1e}; find the huge rewards or costs, "
                "or divide them"
            )
        self._sums, self._square, self._rollouts = sums, square, self._rollouts + 1
        scale = np.where(square > 0, np.sqrt(square), 1.0)
        return torch.from_numpy(scale).float()[:, None, None]

    def _checked(self, signals: Tensor, done: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        num_envs = self._sums.shape[1]
        fits = done.shape[1:] == (num_envs,) and signals.shape == (2, *done.shape)
        if not fits or not len(done) or done.dtype != torch.bool:
            raise ValueError(
                f"a rollout of {num_envs} envs has rewards and costs of shape (2, T, {num_envs}) "
                f"and bool ends of episodes of shape (T, {num_envs}), with T >= 1, got "
                f"{tuple(signals.shape)} and {done.dtype} {tuple(done.shape)}; stack the steps "
                "along T, and compare a done of numbers with 0"
            )
        values = signals.double().numpy()
        if not np.isfinite(values).all():
            which, t, i = np.argwhere(~np.isfinite(values))[0]
            raise NonFiniteError(
                f"rewards and costs must be finite, got a {('reward', 'cost')[which]} of "
                f"{values[which, t, i]} in step {t} of env {i}; find where it comes from"
            )
        return values, done.numpy()

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
