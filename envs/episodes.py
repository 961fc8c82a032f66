"""The episodes of N copies of a simulation: their clocks, their ends and their states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import State, checked_state, task_number
from pbcrl_envs.simulation import BoolArray, FloatArray, IndexArray, Simulation, StepResult


class Episodes:
    """What a single env and a batch keep about episodes besides the physics.

    Args:
        simulation: The copies.
    """

    finished: BoolArray
    """Whether the episode of each copy has ended and the next one has not begun, (N,)."""
    cut: NDArray[np.int64]
    """Steps by which the time limit of each copy's episode is shortened, (N,); usually 0."""
    num_diverged: int
    """Episodes that a diverged simulation ended, since construction."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.finished = np.zeros(simulation.num_envs, dtype=np.bool_)
        self.cut = np.zeros(simulation.num_envs, dtype=np.int64)
        self.num_diverged = 0
        self._begun = np.zeros(simulation.num_envs, dtype=np.bool_)

    def check_begun(self, ids: IndexArray) -> None:
        """Refuse to go on with copies that never began an episode.

        Raises:
            ResetNeeded: If any of them did not.
        """
        if not self._begun[ids].all():
            raise ResetNeeded(
                "an episode begins with reset() or load_state_dict(), but env(s) "
                f"{ids[~self._begun[ids]].tolist()} saw neither; call reset()"
            )

    def begin(self, ids: IndexArray) -> None:
        """Reset some copies."""
        self._simulation.reset(ids)
        self._simulation.elapsed[ids] = 0
        self.finished[ids], self.cut[ids], self._begun[ids] = False, 0, True

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Advance some copies; warns of the first simulation that diverges, and counts them all."""
        result = self._simulation.step(ids, actions)
        self._simulation.elapsed[ids] += 1
        if result.diverged.any():
            if self.num_diverged == 0:
                warnings.warn(
                    f"the physics of {self._simulation.name} diverged in env(s) "
                    f"{ids[result.diverged].tolist()}: the episode ends there, truncated, and "
                    "infos['diverged'] is true; later ones are only counted in num_diverged; if "
                    "there are many, look at the actions",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self.num_diverged += int(result.diverged.sum())
        return result

    def state_dict(self, ids: IndexArray) -> State:
        """Return all that the future of some copies depends on, one row each, (n, ...).

        Raises:
            ResetNeeded: If one of them never began an episode.
        """
        self.check_begun(ids)
        return self._state(ids)

    def load_state_dict(self, state: Mapping[str, ArrayLike], ids: IndexArray) -> None:
        """Put some copies into a state of `state_dict`; they are then ready to step.

        Raises:
            ValueError: If the state is of another task, or its keys, shapes or numbers are wrong;
                all copies are left as they were.
        """
        simulation = self._simulation
        never_negative = (0, np.inf)
        checked = checked_state(
            state,
            like=self._state(ids),
            bounds={"elapsed": never_negative, "cut": never_negative, **simulation.state_bounds},
            env=simulation.name,
        )
        simulation.load_state_dict(checked, ids)
        simulation.elapsed[ids] = checked["elapsed"]
        self.finished[ids], self.cut[ids] = checked["finished"], checked["cut"]
        self._begun[ids] = True

    def _state(self, ids: IndexArray) -> State:
        return {
            "task": np.full(len(ids), task_number(self._simulation.name)),
            "elapsed": self._simulation.elapsed[ids],
            "finished": self.finished[ids],
            "cut": self.cut[ids],
            **self._simulation.state_dict(ids),
        }
