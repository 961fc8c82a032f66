"""The state of driving envs as plain arrays: one row per env, the random stream included.

A row of the batched twin and the state of the single env are the same thing, so that an episode can
move from one to the other in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import State, checked_state, task_number
from pbcrl_envs.driving.rules import Cars, Floats

_LOW_WORD = 2**64 - 1


def pack(
    task: str,
    cars: Cars,
    acceleration: Floats,
    *,
    elapsed: NDArray[Any],
    finished: NDArray[Any],
    rngs: Sequence[np.random.Generator],
) -> State:
    """Return the state of n envs as new arrays, cars last: (n, C).

    Args:
        task: Its name.
        cars: (C, n) each.
        acceleration: Of the last step, (C, n).
        elapsed: Env steps since the start of the episode, (n,).
        finished: Whether the episode has ended, (n,).
        rngs: The n streams, PCG64.
    """
    words = [_words(rng) for rng in rngs]
    return {
        "task": np.full(len(elapsed), task_number(task)),
        "elapsed": elapsed.astype(np.int64),
        "finished": finished.astype(np.bool_),
        **{name: values.T.copy() for name, values in cars._asdict().items()},
        "acceleration": acceleration.T.copy(),
        "stream": np.array(words, dtype=np.uint64).reshape(-1, 4),
    }


def unpack(
    state: Mapping[str, ArrayLike], *, task: str, num_envs: int, num_cars: int
) -> tuple[Cars, State, list[np.random.Generator]]:
    """Return the cars (C, n) of a state, all of it, and its streams.

    Raises:
        ValueError: If it is not a state of `num_envs` envs of this task, or holds impossible
            numbers.
    """
    none, zeros = np.zeros(num_envs), np.zeros((num_cars, num_envs))
    rngs = [np.random.default_rng(0)] * num_envs
    like = pack(task, Cars(*[zeros] * 4), zeros, elapsed=none, finished=none, rngs=rngs)
    bounds = {"elapsed": (0, np.inf)}
    checked = checked_state(state, like=like, bounds=bounds, env=f"Driving{task}")
    cars = Cars(*(checked[name].T.copy() for name in Cars._fields))
    return cars, checked, [_stream(words) for words in checked["stream"]]


def _words(rng: np.random.Generator) -> list[int]:
    """State and increment of a PCG64 stream as 64-bit words, the high one first.

    Its spare half word is left out: the start of an episode is drawn from whole ones.
    """
    inner = rng.bit_generator.state["state"]
    return [w for n in (inner["state"], inner["inc"]) for w in (n >> 64, n & _LOW_WORD)]


def _stream(words: NDArray[np.uint64]) -> np.random.Generator:
    """The stream that `_words` describes."""
    rng = np.random.Generator(np.random.PCG64(0))
    state, low_state, increment, low_increment = map(int, words)
    numbers = {"state": state << 64 | low_state, "inc": increment << 64 | low_increment}
    rng.bit_generator.state = {**rng.bit_generator.state, "state": numbers}
    return rng
