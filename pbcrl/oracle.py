"""Who answers queries: an oracle turns each into one preference and two safety labels.

An oracle is handed queries (`submit`) and asked now and then what has been answered (`collect`), so
that a slow one delays labels, never training; `label` waits. Some also judge a whole batch of
episodes at once (`submit_batch`), or each of a few (`submit_grid`). `SyntheticOracle` answers from
true costs, as well or as badly as its `Teacher`, and is the only reader of the true limit d besides
the evaluation. People answer through a `FolderOracle`, functions through a `FunctionOracle`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from pbcrl._marks import steps_off
from pbcrl.data.label_log import check_left, checked_budget, label_from_json, label_to_json
from pbcrl.errors import StorageError
from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Query,
    Stretches,
    Trajectory,
    unsafe_stretches,
)

GRID = 12
"""Most trajectories that a person sees in a grid: what one can watch at once."""


class Oracle(Protocol):
    """What a training loop needs of whoever labels."""

    @property
    def has_store(self) -> bool:
        """Whether queries and answers are on disk, in a store that outlives the process.

        Such an oracle answers in no fixed order. After a restart its open queries are handed in
        again, at no charge; one without a store has them in its state and keeps their numbers.
        """
        ...

    @property
    def queries_used(self) -> int:
        """Queries taken so far, answered or not: each was paid for when it was handed in."""
        ...

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Hand in queries; return the number of each, under which its answer will come.

        Raises:
            BudgetError: If they exceed what is left of the budget; none is taken then.
        """
        ...

    def submit_batch(self, episodes: Sequence[Trajectory]) -> int:
        """Ask whether the mean cost of these episodes is within the limit; return the number.

        It is counted as `num_queries(len(episodes))` queries.

        Raises:
            BudgetError: If they exceed what is left of the budget; nothing is asked then.
            UnsupportedError: If this oracle is not asked about batches.
            ValueError: If there is no episode.
        """
        ...

    def submit_grid(self, episodes: Sequence[Trajectory]) -> int:
        """Ask which of these episodes are safe; return the number.

        It is counted as one query.

        Raises:
            BudgetError: If nothing is left of the budget; nothing is asked then.
            UnsupportedError: If this oracle is not asked about grids.
            ValueError: If there is no episode, or more than `GRID`.
        """
        ...

    def collect(self, *, wait: float = 0.0) -> dict[int, AnyLabel]:
        """Return the answers that came since the last call, by number.

        A query is answered by a `Label`, a batch by a `BatchLabel`, a grid by a `GridLabel`.

        Args:
            wait: Seconds to wait at most, until all is answered that was handed in; may be inf.
        """
        ...

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order, however long that takes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that its answers will depend on, as plain numbers, strings, lists and dicts."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        ...


def num_queries(num_episodes: int) -> int:
    """As how many queries a batch of episodes counts: a query shows two."""
    return -(-num_episodes // 2)


@dataclass(frozen=True)
class Teacher:
    """How a simulated teacher answers from true costs; the default makes no mistakes.

    The irrational teachers of B-Pref (Lee et al. 2021), with costs in the place of returns. Numbers
    are in units of true episode cost, and used as they are. Each applies to the preference, in this
    order: a skip, a tie, a comparison, a slip. What a teacher compares is the episode's cost *as
    remembered*, which is the plain sum unless `discount` is below 1.

    Safety labels: a skip is no answer at all; `beta` acts as if the episode were compared with one
    that costs exactly d, which is how Eq. 6 reads a safety label; `safety_noise` flips. Ties and
    memory do not act on them: there is no third answer, and d is a limit on whole sums. A batch is
    judged as an episode would be that costs its mean; it is skipped if all of it would be. A marked
    step is one that costs; a stretch of them may be missed, and begin and end wrong or late.

    Raises:
        ValueError: If an argument is out of its range.
    """

    beta: float = math.inf
    """Rationality > 0: prefers the first with probability σ(beta (C_2 - C_1)). inf never errs."""
    preference_noise: float = 0.0
    """Probability of a slip: the preference μ is given as 1 - μ."""
    safety_noise: float = 0.0
    """The same for each safety label, independently."""
    skip_above: float = math.inf
    """Gives no answer if both cost more: B-Pref's teacher skips if neither is any good."""
    equal_margin: float = 0.0
    """Calls it a tie (0.5) if the costs differ by no more than this."""
    mark_error: float = 0.0
    """By how much a marked stretch begins and ends wrong at most, evenly and independently, as a
    share of the trajectory's steps in [0, 1], rounded up to a step: who marks errs in time, and a
    film of many steps is watched as fast as one of few."""
    mark_lag: float = 0.0
    """By how much all marked stretches begin and end late besides, likewise: what a hand takes from
    what is seen to a key, less what a page takes back."""
    missed: float = 0.0
    """Probability that an unsafe stretch is not marked."""
    discount: float = 1.0
    """γ in (0, 1]: a step counts γ^(T - 1 - t), so that what came last is remembered best."""

    def __post_init__(self) -> None:
        for name in ("preference_noise", "safety_noise", "missed"):
            noise = getattr(self, name)
            if not 0 <= noise <= 1:
                raise ValueError(f"{name} is a probability, got {noise}; give a number in [0, 1]")
        for name in ("mark_error", "mark_lag"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(
                    f"{name} is a share of a trajectory's steps, got {share}; give a number in "
                    "[0, 1], such as 0.02 for 2 steps of 100"
                )
        for name in ("skip_above", "equal_margin"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} is a true episode cost and must be >= 0, got {getattr(self, name)}"
                )
        if not self.beta > 0 or not 0 < self.discount <= 1:
            raise ValueError(
                f"a teacher needs beta > 0 and discount in (0, 1], got {self.beta} and "
                f"{self.discount}; beta=inf is without error, discount=1 remembers everything"
            )

    @property
    def is_random(self) -> bool:
        """Whether the same query may get another answer."""
        noise = self.preference_noise + self.safety_noise + self.mark_error + self.missed
        return self.beta < math.inf or noise > 0


TEACHERS = ("perfect", "beta", "mistake", "skip", "equal", "myopic")


def make_teacher(name: str, *, cost_scale: float, horizon: int) -> Teacher:
    """Return one of `TEACHERS`, each with one weakness, for a task with costs of a known size.

    - `perfect`: none.
    - `beta`: 3 / scale, so that a difference of one scale is ordered correctly 95 times in 100.
    - `mistake`: slips at one label in ten, of each kind; B-Pref's rate.
    - `skip`: no answer if both cost more than two scales.
    - `equal`: a tie within half a scale.
    - `myopic`: 1 - 5 / horizon, a memory of the last fifth; B-Pref's 0.9 on its 50 steps.

    Args:
        name: Which.
        cost_scale: A true episode cost that is felt as large, > 0: the limit d, or, where that is
            0, the standard deviation of the episode costs. Never a return: what a step costs says
            nothing about what it earns.
        horizon: Steps of an episode.

    Raises:
        ValueError: If there is no such teacher, or it needs a `cost_scale` or `horizon` > 0.
    """
    if name not in TEACHERS:
        raise ValueError(f"a teacher is one of {', '.join(TEACHERS)}, got {name!r}")
    if name in ("beta", "skip", "equal") and not 0 < cost_scale < math.inf:
        raise ValueError(
            f"the margins of the teacher {name!r} need a finite cost scale > 0, got {cost_scale}; "
            "with the limit 0 take the standard deviation of the true episode costs"
        )
    if horizon < 1:
        raise ValueError(f"horizon counts the steps of an episode and must be >= 1, got {horizon}")
    if name == "beta":
        return Teacher(beta=3 / cost_scale)
    if name == "mistake":
        return Teacher(preference_noise=0.1, safety_noise=0.1)
    if name == "skip":
        return Teacher(skip_above=2 * cost_scale)
    if name == "equal":
        return Teacher(equal_margin=cost_scale / 2)
    if name == "myopic":
        return Teacher(discount=max(1 - 5 / horizon, 0.5))
    return Teacher()


@final
class SyntheticOracle:
    """Labels from true costs, at once.

    The first trajectory is preferred if its true cost is lower, a tie gives 0.5, and a trajectory
    is safe if C(τ) <= share · d. Costs are summed undiscounted. A `Teacher` may blur all this,
    once, at labelling time.

    Args:
        cost_limit: d >= 0, the true limit, per episode.
        share: Of the limit, in (0, 1], within which a trajectory of a pair or grid is safe: for
            segments length / horizon. A batch shows whole episodes, and is judged by the limit
            itself.
        budget: Most queries to take; None is no bound. A skipped query counts, since it
            was shown. (B-Pref counts only those that got an answer.)
        marks: Whether the unsafe steps of a pair are marked, too: those that cost.
        teacher: Who answers; by default one that makes no mistakes.
        rng: Source of chance; needed if the teacher is random.

    Raises:
        ValueError: If an argument is out of its range.
    """

    has_store = False

    def __init__(
        self,
        cost_limit: float,
        *,
        share: float = 1.0,
        budget: int | None = None,
        marks: bool = False,
        teacher: Teacher | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not 0 <= cost_limit < math.inf:
            raise ValueError(
                f"the true cost limit must be finite and >= 0, got {cost_limit}; it is the highest "
                "episode cost that still counts as safe"
            )
        if not 0 < share <= 1:
            raise ValueError(
                f"a segment has a share of its episode's limit in (0, 1], got share={share}; pass "
                "its steps divided by the horizon"
            )
        self.cost_limit, self.share = cost_limit, share
        self.budget = checked_budget(budget)
        self.marks = marks
        self.teacher = Teacher() if teacher is None else teacher
        if rng is None and self.teacher.is_random:
            raise ValueError("label noise is random: pass rng=np.random.default_rng(seed)")
        self._rng = rng
        self._queries_used = 0
        self._answers: dict[int, AnyLabel] = {}  # that are to be collected

    @property
    def queries_used(self) -> int:
        """Queries answered so far."""
        return self._queries_used

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Answer the queries for the next `collect`; return their numbers. Raises as `label`."""
        labels = self.label(queries)
        numbers = list(range(self._queries_used - len(labels), self._queries_used))
        self._answers |= zip(numbers, labels, strict=True)
        return numbers

    def submit_batch(self, episodes: Sequence[Trajectory]) -> int:
        """Judge a batch for the next `collect`; return its number.

        It is safe if the mean true cost of its episodes is at most d; skipped, it has no answer.

        Raises:
            BudgetError: If `num_queries(len(episodes))` exceeds what is left of the budget.
            MissingCostError: If an episode has no true costs; nothing is counted then.
            ValueError: If there is no episode.
        """
        check_batch(episodes)
        asked = num_queries(len(episodes))
        check_left(self.budget, used=self._queries_used, asked=asked)
        costs = [episode.true_cost for episode in episodes]
        self._queries_used += asked
        skipped = min(costs) > self.teacher.skip_above
        safe = math.nan if skipped else self._safe(float(np.mean(costs)), self.cost_limit)
        number = self._queries_used - 1
        self._answers[number] = BatchLabel(safe)
        return number

    def submit_grid(self, episodes: Sequence[Trajectory]) -> int:
        """Judge each of a few episodes for the next `collect`; return the grid's number.

        Each is safe as in a pair; one that is skipped has no answer.

        Raises:
            BudgetError: If nothing is left of the budget.
            MissingCostError: If an episode has no true costs; nothing is counted then.
            ValueError: If there is no episode, or more than `GRID`.
        """
        check_grid(episodes)
        check_left(self.budget, used=self._queries_used, asked=1)
        costs = [episode.true_cost for episode in episodes]
        self._queries_used += 1
        number = self._queries_used - 1
        skip = self.teacher.skip_above
        limit = self.share * self.cost_limit
        safe = (math.nan if cost > skip else self._safe(cost, limit) for cost in costs)
        self._answers[number] = GridLabel(tuple(safe))
        return number

    def collect(self, *, wait: float = 0.0) -> dict[int, AnyLabel]:  # noqa: ARG002 - none is late
        """Return the answers to all that was submitted since the last call, by number."""
        answers, self._answers = self._answers, {}
        return answers

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order.

        Raises:
            BudgetError: If the queries exceed what is left of the budget; none is answered then.
            MissingCostError: If a trajectory has no true costs; none is answered then.
        """
        check_left(self.budget, used=self._queries_used, asked=len(queries))
        # All costs first: a missing one must not leave the stream of noise half drawn.
        costs = [(query.first.true_cost, query.second.true_cost) for query in queries]
        self._queries_used += len(queries)
        return [self._answer(query, *both) for query, both in zip(queries, costs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What has been asked, what is still to be collected, and the stream of chance."""
        return {
            "queries_used": self._queries_used,
            "answers": _plain(self._answers),
            "rng": None if self._rng is None else self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: with the same queries come the same answers."""
        self._queries_used = state["queries_used"]
        self._answers = _labels(state["answers"])
        if self._rng is not None:
            self._rng.bit_generator.state = state["rng"]

    def _answer(self, query: Query, first_cost: float, second_cost: float) -> Label:
        teacher = self.teacher
        first, second = first_cost, second_cost
        if teacher.discount < 1:
            first, second = (self._remembered(t) for t in (query.first, query.second))
        if min(first, second) > teacher.skip_above:
            return Label(math.nan, math.nan, math.nan)
        tie = abs(second - first) <= teacher.equal_margin
        preference = 0.5 if tie else self._judge(second - first)
        if self._flip(teacher.preference_noise):
            preference = 1 - preference
        limit = self.share * self.cost_limit
        safe = self._safe(first_cost, limit), self._safe(second_cost, limit)
        if not self.marks:
            return Label(preference, *safe)
        return Label(preference, *safe, self._marked(query.first), self._marked(query.second))

    def _marked(self, trajectory: Trajectory) -> Stretches:
        """The stretches in which steps cost, as the teacher marks them."""
        assert trajectory.costs is not None  # checked by `true_cost`
        found, steps = unsafe_stretches(trajectory.costs > 0), len(trajectory)
        error, lag = (
            steps_off(share, steps) for share in (self.teacher.mark_error, self.teacher.mark_lag)
        )
        seen = np.zeros(steps, np.bool_)
        for start, end in found:
            if self._flip(self.teacher.missed):
                continue
            if error and self._rng is not None:
                start, end = (int(x + self._rng.integers(-error, error + 1)) for x in (start, end))
            start = min(max(start + lag, 0), steps - 1)
            seen[start : max(end + lag, start + 1)] = True
        return unsafe_stretches(seen)

    def _safe(self, cost: float, limit: float) -> float:
        return abs(self._judge(limit - cost) - self._flip(self.teacher.safety_noise))

    def _remembered(self, trajectory: Trajectory) -> float:
        assert trajectory.costs is not None  # checked by `true_cost`
        age = np.arange(len(trajectory))[::-1]
        return float(np.sum(trajectory.costs * self.teacher.discount**age, dtype=np.float64))

    def _judge(self, margin: float) -> float:
        """Whether a cost lies below another by this margin, as the teacher sees it: 1 or 0."""
        if self.teacher.beta == math.inf or self._rng is None:
            return float(margin >= 0)
        probability = 0.5 + 0.5 * math.tanh(self.teacher.beta * margin / 2)  # σ, without overflow
        return float(self._rng.random() < probability)

    def _flip(self, probability: float) -> bool:
        # No draw without noise, so that exact labels need no generator.
        return probability > 0 and self._rng is not None and bool(self._rng.random() < probability)


@final
class DelayedOracle:
    """Another oracle, whose answers come some calls of `collect` late: what a slow teacher costs.

    Args:
        oracle: Who answers.
        rounds: How many calls late, >= 0; 0 changes nothing. `label` does not wait for them.

    Raises:
        ValueError: If `rounds` is negative.
    """

    def __init__(self, oracle: Oracle, *, rounds: int) -> None:
        if rounds < 0:
            raise ValueError(f"rounds counts calls of collect and must be >= 0, got {rounds}")
        self._oracle = oracle
        self._late: deque[dict[int, AnyLabel]] = deque({} for _ in range(rounds))

    @property
    def has_store(self) -> bool:
        """As of the other oracle."""
        return self._oracle.has_store

    @property
    def queries_used(self) -> int:
        """Queries taken so far."""
        return self._oracle.queries_used

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Hand in queries; return their numbers."""
        return self._oracle.submit(queries)

    def submit_batch(self, episodes: Sequence[Trajectory]) -> int:
        """Hand in a batch; return its number."""
        return self._oracle.submit_batch(episodes)

    def submit_grid(self, episodes: Sequence[Trajectory]) -> int:
        """Hand in a grid; return its number."""
        return self._oracle.submit_grid(episodes)

    def collect(self, *, wait: float = 0.0) -> dict[int, AnyLabel]:
        """Return the answers that were due `rounds` calls ago, by number."""
        self._late.append(self._oracle.collect(wait=wait))
        return self._late.popleft()

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order, without delay."""
        return self._oracle.label(queries)

    def state_dict(self) -> dict[str, Any]:
        """The state of the other oracle, and the answers that are on their way."""
        late = [_plain(answers) for answers in self._late]
        return {"oracle": self._oracle.state_dict(), "late": late}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; what a store has answered is late once more."""
        self._oracle.load_state_dict(state["oracle"])
        late = [{} if self.has_store else _labels(answers) for answers in state["late"]]
        self._late = deque(late)


def check_store(path: str | os.PathLike[str], *, known: int, found: int) -> None:
    """Refuse a store that holds fewer queries than a state knows.

    Raises:
        StorageError: If so.
    """
    if found < known:
        raise StorageError(
            f"a run goes on with every query that it asked: {known} were in {path}, but {found} "
            "are there; restore the others from a copy, or start a new run"
        )


def check_batch(episodes: Sequence[Trajectory]) -> None:
    """Refuse a batch of no episode.

    Raises:
        ValueError: If so.
    """
    if not episodes:
        raise ValueError("a batch that is judged by its mean cost has episodes, got none")


def check_grid(episodes: Sequence[Trajectory]) -> None:
    """Refuse a grid of no trajectory, or of more than one can watch at once.

    Raises:
        ValueError: If so.
    """
    if not 1 <= len(episodes) <= GRID:
        raise ValueError(
            f"a grid shows 1 to {GRID} trajectories, got {len(episodes)}; ask about them in several"
        )


def _plain(answers: Mapping[int, AnyLabel]) -> dict[int, dict[str, float | None]]:
    return {number: label_to_json(label) for number, label in answers.items()}


def _labels(answers: Mapping[int, Mapping[str, float | None]]) -> dict[int, AnyLabel]:
    return {number: label_from_json(entry) for number, entry in answers.items()}
