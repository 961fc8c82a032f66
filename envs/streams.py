"""Random streams of envs that draw from PCG64, as Gymnasium does, and their state as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

_LOW_WORD = 2**64 - 1


class Streams:
    """One stream per copy; the same seed gives the numbers of `gymnasium.Env.np_random`.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._rngs = [seeding.np_random()[0] for _ in range(num_envs)]

    def __getitem__(self, i: int) -> np.random.Generator:
        return self._rngs[i]

    def __setitem__(self, i: int, rng: np.random.Generator) -> None:
        self._rngs[i] = rng

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the stream of each copy, (N,) seeds; None lets a copy's stream run on."""
        for i, seed in enumerate(seeds):
            if seed is not None:
                self._rngs[i] = seeding.np_random(seed)[0]

    def words(self, ids: NDArray[np.intp]) -> NDArray[np.uint64]:
        """State and increment of some streams as 64-bit words, the high one first, (n, 4).

        The spare half word of a stream is left out: episodes draw whole words only.
        """
        inner = [self._rngs[i].bit_generator.state["state"] for i in ids.tolist()]
        words = [
            [w for n in (s["state"], s["inc"]) for w in (n >> 64, n & _LOW_WORD)] for s in inner
        ]
        return np.array(words, dtype=np.uint64).reshape(-1, 4)

    def set_words(self, ids: NDArray[np.intp], words: NDArray[np.uint64]) -> None:
        """Put some streams into the states that `words` returned."""
        for i, (state, low_state, inc, low_inc) in zip(ids.tolist(), words.tolist(), strict=True):
            rng = np.random.Generator(np.random.PCG64(0))
            inner = {"state": state << 64 | low_state, "inc": inc << 64 | low_inc}
            rng.bit_generator.state = {**rng.bit_generator.state, "state": inner}
            self._rngs[i] = rng
