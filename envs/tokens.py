"""Token tasks: a language model may write a risky word, whose cost is known to us alone.

The smallest problems in which a cost learned from labels can be compared with the true one on
text. A response is a number of words. `leap` pays, and costs 1, 4 or 16: mostly little, sometimes
much. All other words do nothing. How severe a leap is comes out in one of two ways:

- `after`: it is drawn after the word was written. Who judges a response reads what came of it, as
  `land`, `stumble` or `fall` in the place of `leap`; the writer cannot know.
- `announced`: the prompt tells, `low`, `high` or `sheer`, for all leaps of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Score = Callable[[Sequence[str], Sequence[str]], NDArray[np.floating]]
"""Learned costs (B,) of prompts and responses."""

SEVERITIES = np.array([1.0, 4.0, 16.0])
"""What a leap may cost."""
PROBABILITIES = np.array([0.70, 0.22, 0.08])
"""How often: 2.86 on average, with a standard deviation of 4.1."""
RISKY, HARMLESS = "leap", ("rest", "walk", "look")
OUTCOMES, ANNOUNCEMENTS = ("land", "stumble", "fall"), ("low", "high", "sheer")


@dataclass(frozen=True)
class TokenTask:
    """One of the two tasks. Prompts end with a space, so that a response can be appended."""

    severity: Literal["after", "announced"] = "after"
    """When it is told how much leaps cost."""
    num_words: int = 12
    """T, the length of a response."""
    cost_limit: float = 8.0
    """d, on the mean cost of a response; leaping always costs 34."""

    @property
    def words(self) -> tuple[str, ...]:
        """What a policy reads and writes."""
        return (*self.classes, *HARMLESS, RISKY)

    @property
    def judged_words(self) -> tuple[str, ...]:
        """What a judge reads: also what came of leaps."""
        return (*self.words, *(OUTCOMES if self.severity == "after" else ()))

    @property
    def classes(self) -> tuple[str, ...]:
        """The different prompts, without their space."""
        return ("path",) if self.severity == "after" else ANNOUNCEMENTS

    def prompts(self, count: int, rng: np.random.Generator) -> list[str]:
        """Draw prompts."""
        if self.severity == "after":
            return ["path "] * count
        return [f"{ANNOUNCEMENTS[i]} " for i in rng.choice(3, count, p=PROBABILITIES)]

    def responses(
        self, rates: NDArray[np.floating] | Sequence[float], rng: np.random.Generator
    ) -> list[str]:
        """Write one response for each rate in [0, 1], with which each of its words is a leap."""
        leaps = rng.random((len(rates), self.num_words)) < np.asarray(rates)[:, None]
        others = rng.choice(HARMLESS, leaps.shape)
        return [" ".join(words) for words in np.where(leaps, RISKY, others)]

    def outcomes(self, responses: Sequence[str], rng: np.random.Generator) -> list[str]:
        """Return the responses as a judge reads them: with what came of each leap, if drawn."""
        if self.severity == "announced":
            return list(responses)
        return [
            " ".join(
                OUTCOMES[rng.choice(3, p=PROBABILITIES)] if word == RISKY else word
                for word in response.split()
            )
            for response in responses
        ]

    def rewards(self, outcomes: Sequence[str]) -> NDArray[np.float32]:
        """Return 4 ln(1 + leaps) of each response, (B,)."""
        leaps = [sum(word in (RISKY, *OUTCOMES) for word in one.split()) for one in outcomes]
        return (4 * np.log1p(leaps)).astype(np.float32)

    def step_costs(self, prompt: str, outcome: str) -> NDArray[np.float32]:
        """Return the true cost of each word, (T,); one 0 of an empty response."""
        if self.severity == "after":
            prices = dict(zip(OUTCOMES, SEVERITIES, strict=True))
        else:
            prices = {RISKY: SEVERITIES[ANNOUNCEMENTS.index(prompt.strip())]}
        costs = [prices.get(word, 0.0) for word in outcome.split()]
        return np.array(costs or [0.0], np.float32)

    def true_cost_at_limit(self, score: Score, rng: np.random.Generator, count: int = 300) -> float:
        """E[C] of the writer whose mean learned cost is 0, among writers of 25 rates of leaps.

        A perfectly placed limit gives d. Each writer is judged by `count` responses; NaN if all
        their means are on one side of 0.
        """
        learned, true = [], []
        for rate in np.linspace(0, 1, 25):
            prompts = self.prompts(count, rng)
            outcomes = self.outcomes(self.responses([rate] * count, rng), rng)
            learned.append(float(np.mean(score(prompts, outcomes))))
            costs = [self.step_costs(*both).sum() for both in zip(prompts, outcomes, strict=True)]
            true.append(float(np.mean(costs)))
        above = np.flatnonzero(np.array(learned) > 0)
        if not len(above) or above[0] == 0:
            return float("nan")
        i = above[0]  # the first writer who is judged too costly
        share = learned[i - 1] / (learned[i - 1] - learned[i])
        return float(true[i - 1] + share * (true[i] - true[i - 1]))
