"""Who answers queries: an oracle turns each into one preference and two safety labels.

`SyntheticOracle` answers from true costs and is the only reader of the true limit d besides the
evaluation; `ReplayOracle` gives labels again that were bought before. A person is an oracle too:
anything with `label` and `queries_used` is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pbcrl.errors import BudgetError
from pbcrl.trajectory import Label, Query


class Oracle(Protocol):
    """What a training loop needs of whoever labels."""

    @property
    def queries_used(self) -> int:
        """Queries answered so far."""
        ...

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order."""
        ...


class SyntheticOracle:
    """Labels from true costs: exact, or with noise flipped in once at labelling time.

    The first trajectory is preferred if its true episode cost is lower, a tie gives 0.5, and a
    trajectory is safe if C(τ) <= d. Costs are summed undiscounted.

    Args:
        cost_limit: d >= 0, the true limit, per episode.
        budget: Most queries to answer; None is no bound.
        preference_noise: Probability in [0, 1] that a preference μ is flipped to 1 - μ.
        safety_noise: The same for each safety label, independently.
        rng: Source of the noise; needed if there is any.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        cost_limit: float,
        *,
        budget: int | None = None,
        preference_noise: float = 0.0,
        safety_noise: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not 0 <= cost_limit < math.inf:
            raise ValueError(
                f"the true cost limit must be finite and >= 0, got {cost_limit}; it is the highest "
                "episode cost that still counts as safe"
            )
        if budget is not None and budget < 0:
            raise ValueError(f"a query budget must be >= 0, got {budget}; None is no bound")
        for name, noise in [("preference_noise", preference_noise), ("safety_noise", safety_noise)]:
            if not 0 <= noise <= 1:
                raise ValueError(f"{name} is a probability, got {noise}; give a number in [0, 1]")
        if rng is None and preference_noise + safety_noise > 0:
            raise ValueError("label noise is random: pass rng=np.random.default_rng(seed)")
        self.cost_limit = cost_limit
        self.budget = budget
        self._preference_noise = preference_noise
        self._safety_noise = safety_noise
        self._rng = rng
        self._queries_used = 0

    @property
    def queries_used(self) -> int:
        """Queries answered so far."""
        return self._queries_used

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order.

        Raises:
            BudgetError: If the queries exceed what is left of the budget; none is answered then.
            MissingCostError: If a trajectory has no true costs; none is answered then.
        """
        left = math.inf if self.budget is None else self.budget - self._queries_used
        if len(queries) > left:
            raise BudgetError(
                f"the oracle's budget of {self.budget} queries must not be passed: {left} are "
                f"left, {len(queries)} were asked; ask fewer, or raise the budget"
            )
        # All costs first: a missing one must not leave the stream of noise half drawn.
        costs = [(query.first.true_cost, query.second.true_cost) for query in queries]
        self._queries_used += len(queries)
        return [self._answer(first_cost, second_cost) for first_cost, second_cost in costs]

    def _answer(self, first_cost: float, second_cost: float) -> Label:
        preference = 0.5 + 0.5 * float(np.sign(second_cost - first_cost))
        if self._flip(self._preference_noise):
            preference = 1 - preference
        first_safe, second_safe = (
            float((cost <= self.cost_limit) != self._flip(self._safety_noise))
            for cost in (first_cost, second_cost)
        )
        return Label(preference, first_safe, second_safe)

    def _flip(self, probability: float) -> bool:
        # No draw without noise, so that exact labels need no generator.
        return probability > 0 and self._rng is not None and bool(self._rng.random() < probability)


class ReplayOracle:
    """Gives recorded labels again, in the order in which they were bought.

    For repeating a run without paying for its labels twice: with the same seeds the queries come in
    the same order, so the answers fit. It never looks at the trajectories.

    Args:
        labels: What `read_labels` returned.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = list(labels)
        self._queries_used = 0

    @property
    def queries_used(self) -> int:
        """Queries answered so far."""
        return self._queries_used

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query with the next recorded label.

        Raises:
            BudgetError: If fewer labels are left than queries asked; none is answered then.
        """
        start, stop = self._queries_used, self._queries_used + len(queries)
        if stop > len(self._labels):
            raise BudgetError(
                f"a replay cannot answer more queries than were recorded: {len(self._labels)} "
                f"labels, {stop} queries; repeat the run with the arguments it was recorded with"
            )
        self._queries_used = stop
        return self._labels[start:stop]
