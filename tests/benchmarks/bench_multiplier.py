"""What moves λ best, by so many labels a round: a simulation of a policy that follows slowly.

`python tests/benchmarks/bench_multiplier.py` needs no training and takes a minute. Costs of
episodes are log-normal, and their mean follows λ as a policy does, a tenth of the way in each of
150 rounds of 60 episodes. Some are labelled, and a model, whose costs are 20 % too high or too low,
judges all of them. The limit d is on the *mean*. Compared are

- `labels`: the share of labelled episodes that are unsafe, held to p*;
- `rate`: the same with the model's judgement of all, corrected by its errors (`UnsafeRate`);
- `accept`: whether the mean of a batch is within d (`Acceptance`), once ten or more are shown;
- `cascade`: half of the labels move λ as `rate` does, the others, in batches, the p* of that.

The first two are told the p* at which the mean is d, which nobody knows; `rate` at half of it
shows what a wrong one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tyro
from numpy.typing import NDArray

from pbcrl import Acceptance, Answers, BatchLabel, LagrangeMultiplier, UnsafeRate

ROUNDS, EPISODES, SPREAD, LIMIT = 150, 60, 0.75, 20.0
SMALLEST_BATCH = 10
CASCADE = 0.1
"""Change of logit p* by a batch."""


@dataclass(frozen=True)
class Args:
    labels: tuple[int, ...] = (4, 8, 20)
    """episodes that are labelled in each round"""
    runs: int = 200
    """simulated, of each kind"""
    seed: int = 0


def rate_at_limit() -> float:
    """The share of episodes above d where their mean is d."""
    return 0.5 * math.erfc(SPREAD / 2 / math.sqrt(2))


class Batches:
    """Answers about batches, of episodes that are shown until there are enough."""

    def __init__(self, per_round: int) -> None:
        self._per_round = per_round
        self._shown: list[float] = []

    def answer(self, costs: NDArray[np.float64]) -> float | None:
        """1 accepted, 0 rejected, None as long as there are too few."""
        self._shown += costs[-self._per_round :].tolist()
        if len(self._shown) < SMALLEST_BATCH:
            return None
        mean, self._shown = float(np.mean(self._shown)), []
        return float(mean <= LIMIT)


def run(kind: str, labels: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the mean cost over the last two thirds of the rounds, as a share of d, and sd(λ)."""
    multiplier = LagrangeMultiplier()
    of_batches = {"accept": labels, "cascade": labels // 2}.get(kind, 0)
    batches, acceptance = Batches(of_batches), Acceptance(SMALLEST_BATCH)
    goal = rate_at_limit() / (2 if kind == "rate, half p*" else 1)
    logit, rate = (0.0 if kind == "cascade" else math.log(goal / (1 - goal))), UnsafeRate(goal)
    level, bias = 1.5, math.log(1.2) * rng.choice((-1, 1))
    means, prices = [], []
    for _ in range(ROUNDS):
        level += 0.1 * (1.5 - 2 * math.log1p(multiplier.value) - level)
        costs = LIMIT * np.exp(level + SPREAD * rng.normal(size=EPISODES))
        judged = costs * np.exp(bias + 0.3 * rng.normal(size=EPISODES))
        shown = costs[: labels - of_batches] > LIMIT
        accepted = batches.answer(costs) if of_batches else None
        answers = Answers(
            unsafe_rate=float(shown.mean()) if len(shown) else None,
            batch=None if accepted is None else BatchLabel(accepted),
        )
        if kind == "accept":
            multiplier.update(*acceptance.measure(answers, judged, LIMIT))
        elif kind == "labels":
            multiplier.update(answers.unsafe_rate, goal)
        else:
            if accepted is not None:
                logit += CASCADE * (2 * accepted - 1)
            rate.max_rate = 1 / (1 + math.exp(-logit))
            called = judged[: len(shown)] > LIMIT
            counts = np.histogram2d(called, shown, bins=2, range=[(-0.5, 1.5), (-0.5, 1.5)])[0]
            corrected = Answers(judged=counts)
            multiplier.update(*rate.measure(corrected, judged, LIMIT))
        means.append(math.exp(level + SPREAD**2 / 2))
        prices.append(multiplier.value)
    settled = ROUNDS // 3
    return float(np.mean(means[settled:])), float(np.std(prices[settled:]))


def main(args: Args) -> None:
    print(
        f"p* = {rate_at_limit():.3f}; mean cost over d, and sd of λ within a run: mean ± sd of runs"
    )
    for labels in args.labels:
        for kind in ("labels", "rate", "rate, half p*", "accept", "cascade"):
            rng = np.random.default_rng(args.seed)
            found = np.array([run(kind, labels, rng) for _ in range(args.runs)])
            cost, price = (f"{x.mean():.2f} ± {x.std():.2f}" for x in found.T)
            print(f"{labels:3} labels a round, {kind:14} cost {cost}, sd(λ) {price}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
