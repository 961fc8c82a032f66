"""What the tasks of the proving ground share: a table of numbers per copy, and two scripts each.

A task is a row of numbers per copy, and three functions of rows: `start`, `advance` and `look`. All
chance is in `start`, so that an episode is a function of its first row and the actions. Each
task has a policy that keeps its limit, `safe`, and one that takes all the reward there is,
`reckless`; both see observations alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from pbcrl_envs.checks import State
from pbcrl_envs.simulation import BoolArray, FloatArray, IndexArray, Simulation, StepResult
from pbcrl_envs.streams import Streams

PUSH = Box(-1.0, 1.0, (1,), np.float32)
MOVE = Box(-1.0, 1.0, (2,), np.float32)

Policy = Callable[[NDArray[np.float32]], FloatArray]
"""Actions (n, act_dim) for observations (n, obs_dim)."""


class Advance(NamedTuple):
    """What a step of n copies leads to."""

    rows: FloatArray
    """(n, width)."""
    reward: FloatArray
    """(n,)."""
    cost: FloatArray
    """True cost of the step, >= 0, (n,)."""
    terminated: BoolArray | None = None
    """Whether it ended the episode, (n,); None: none."""


class ProvingTask(Simulation):
    """N copies of a small task; a subclass says what a row is.

    Args:
        num_envs: N.
    """

    width: ClassVar[int]
    """Numbers in a row."""
    horizon: ClassVar[int]
    """Steps after which an episode is truncated."""
    cost_limit: ClassVar[float]
    """d: highest mean episode cost that is still safe."""
    render_fps = 10

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.rows = np.zeros((num_envs, self.width))
        self._streams = Streams(num_envs)

    @staticmethod
    @abstractmethod
    def start(rng: np.random.Generator) -> Sequence[float]:
        """Draw the row of a new episode, (width,)."""

    @staticmethod
    @abstractmethod
    def advance(rows: FloatArray, actions: FloatArray) -> Advance:
        """Take one step of n copies, (n, width) and (n, act_dim), actions within their bounds."""

    @staticmethod
    @abstractmethod
    def look(rows: FloatArray) -> FloatArray:
        """Return what a policy sees, (n, obs_dim)."""

    @staticmethod
    @abstractmethod
    def safe(obs: NDArray[np.float32]) -> FloatArray:
        """Act so that the limit is kept, and most of the reward had."""

    @staticmethod
    @abstractmethod
    def reckless(obs: NDArray[np.float32]) -> FloatArray:
        """Act as if there were no cost."""

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the random stream of each copy; None lets a stream run on."""
        self._streams.seed(seeds)

    def reset(self, ids: IndexArray) -> None:
        """Draw the first row of some copies."""
        for i in ids.tolist():
            self.rows[i] = self.start(self._streams[i])

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Advance some copies."""
        rows, reward, cost, terminated = self.advance(self.rows[ids], actions)
        self.rows[ids] = rows
        never = np.zeros(len(ids), dtype=np.bool_)
        return StepResult(reward, cost, never if terminated is None else terminated, never)

    def observe(self, ids: IndexArray) -> NDArray[np.float32]:
        """Return observations, float32 (n, obs_dim)."""
        return self.look(self.rows[ids]).astype(np.float32)

    def state_dict(self, ids: IndexArray) -> State:
        """Return rows and random streams of some copies."""
        return {"rows": self.rows[ids], "stream": self._streams.words(ids)}

    def load_state_dict(self, state: State, ids: IndexArray) -> None:
        """Put some copies into a state of `state_dict`."""
        self.rows[ids] = state["rows"]
        self._streams.set_words(ids, state["stream"])


def unbounded(dim: int) -> Box:
    """A space of `dim` numbers."""
    return Box(-np.inf, np.inf, (dim,), np.float32)
