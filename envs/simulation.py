"""What a task must offer to become Gymnasium envs: its physics, for N copies at once.

`BatchedEnv` and `SingleEnv` add everything else: episodes, time limits, autoreset, seeds, states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from pbcrl_envs.checks import State, check_at_least_one

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
Image = NDArray[np.uint8]


class StepResult(NamedTuple):
    """What one step brought to the n copies that took it; all 0 or false where it diverged."""

    reward: FloatArray
    """(n,)."""
    cost: FloatArray
    """True cost of the step, >= 0, (n,)."""
    terminated: BoolArray
    """Whether the step ended the episode by the task's own rules, (n,)."""
    diverged: BoolArray
    """Whether the physics broke down; such a copy shows its last sound observation. (n,)."""
    extras: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """Further infos by name, (n,) each; the same names in every step."""


class Simulation(ABC):
    """N independent copies of one task; a copy is reset, or its state loaded, before it is stepped.

    `ids` are the indices of n copies, sorted and without repetition, except in `state_dict` and
    `load_state_dict`, where they have any order. What a copy does depends neither on N nor on which
    other copies are stepped with it. Returned arrays are new ones.

    Args:
        num_envs: N >= 1.

    Raises:
        ValueError: If `num_envs` is below 1.
    """

    name: str
    """Of the task, in its states and in messages."""
    observation_space: Box
    """Of one copy."""
    observation_names: tuple[str, ...]
    """What each number of an observation is, (obs_dim,), all different. Where names differ in a
    last index alone, "goal_lidar[3]", the numbers are of the same kind."""
    action_space: Box
    """Of one copy."""
    action_axes: str
    """What the numbers of an action are, for messages."""
    render_fps: int
    """Env steps per simulated second."""
    state_bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Smallest and largest value of some keys of a state."""
    elapsed: NDArray[np.int64]
    """Env steps since each copy's reset, (N,); counted by `Episodes`."""

    def __init__(self, num_envs: int) -> None:
        check_at_least_one("num_envs", num_envs)
        self.num_envs = num_envs
        self.elapsed = np.zeros(num_envs, dtype=np.int64)

    @abstractmethod
    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the random stream of each copy, (N,) seeds; None lets a stream run on."""

    @abstractmethod
    def reset(self, ids: IndexArray) -> None:
        """Put some copies at the start of an episode."""

    @abstractmethod
    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Advance some copies by one env step; there may be none of them.

        Args:
            ids: Which copies, (n,).
            actions: Within the bounds of `action_space`, (n, act_dim).
        """

    @abstractmethod
    def observe(self, ids: IndexArray) -> NDArray[Any]:
        """Return the observations of some copies, (n, obs_dim)."""

    @abstractmethod
    def state_dict(self, ids: IndexArray) -> State:
        """Return all that the future of some copies depends on, (n, ...) each; `elapsed` aside."""

    @abstractmethod
    def load_state_dict(self, state: State, ids: IndexArray) -> None:
        """Put some copies into a state of `state_dict`; only its types and bounds were checked.

        Raises:
            ValueError: If the copies cannot go on from there; all are left as they were.
        """


class Painter(Protocol):
    """Draws the copies of one simulation."""

    def draw(self, i: int) -> Image | None:
        """Return the picture of copy `i`, uint8 (height, width, 3); None in a window."""

    def close(self) -> None:
        """Release what drawing holds."""
