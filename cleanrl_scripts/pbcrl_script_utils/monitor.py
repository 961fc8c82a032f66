"""What labels say of a run while it trains: warnings, and what is logged of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pbcrl import Answers, FeedbackLoop, LearnedCost, Trajectory
from pbcrl.constraint import Constraint
from pbcrl_script_utils.evaluation import true_costs
from pbcrl_script_utils.run import Run

_ROUNDS = 5  # by chance, all of them have a majority of unsafe labels once in 32 times


class LabelMonitor:
    """Watches the labels of a run, and what was learned from them.

    Args:
        run: Told what is wrong.
        args: Of `ppo_lag_pbcrl.py`.
        cost_model: That is trained on the labels.
        feedback: Where labels come from.
        constraint: What moves λ.
        horizon: Steps of a whole episode.
        limit: d, for the log alone; NaN if it is not known.
    """

    def __init__(
        self,
        run: Run,
        args: Any,
        cost_model: LearnedCost,
        feedback: FeedbackLoop,
        constraint: Constraint,
        *,
        horizon: int,
        limit: float,
    ) -> None:
        self._run, self._args, self._cost_model = run, args, cost_model
        self._feedback, self._constraint = feedback, constraint
        self._horizon, self._limit = horizon, limit
        self._watch = LabelWatch()

    def update(
        self,
        iteration: int,
        answers: Answers,
        finished: Sequence[Trajectory],
        learned: np.ndarray,
        measured: float | None,
    ) -> dict[str, float | None]:
        """Take note of an iteration; return what to log of it.

        Args:
            iteration: The present one.
            answers: Of its labelling round; empty if it has none.
            finished: The episodes that ended in it.
            learned: Their learned costs, by the model as it is now, (len(finished),).
            measured: What moves λ in this iteration, if anything.
        """
        limit = self._cost_model.learned_limit
        if self._args.is_round(iteration):
            self._warn(iteration, answers, moved=measured is not None)
        mean, std = (learned.mean(), learned.std()) if len(learned) else (None, None)
        if warning := self._watch.update(answers.unsafe_rate, mean, limit):
            self._run.warn(warning)
        missed = learned[true_costs(finished) > self._limit] <= limit
        return {
            "learned_cost": None if mean is None else float(mean),
            "learned_limit": limit,
            "learned_cost_std": None if std is None else float(std),
            "type_ii_rate": float(missed.mean()) if len(missed) else None,
            "unsafe_rate": answers.unsafe_rate,
            "queries_used": self._feedback.queries_used,
        }

    def _warn(self, iteration: int, answers: Answers, *, moved: bool) -> None:
        safe = set(self._feedback.buffer.labels[:, 1:].flat)
        if len(answers.pairs) and not {0.0, 1.0} <= safe:
            self._run.warn("at first all episodes were on one side of the limit")
        if not self._constraint.by_labels:
            return
        batch, interval = self._constraint.batch, self._args.finetune_interval
        is_late = answers.batch is not None and not answers.batch_shown
        if moved and (is_late if batch else answers.num_late):
            self._run.warn("labels came late: λ follows the episodes of older policies")
        # Episodes that began before the run are not shown, and the last round is short.
        begun = (iteration - interval) * self._args.num_steps > self._horizon
        if batch and not moved and begun and iteration % interval == 0:
            self._run.warn(
                f"fewer than {batch} episodes were new or had an answer in a labelling round, and "
                "λ stayed; lower --accept-batch, or raise --finetune-interval"
            )
        asked = self._feedback.num_open or len(answers.pairs)
        if not batch and asked and answers.unsafe_rate is None:
            self._run.warn(
                "no safety label came in a labelling round: λ follows the model as corrected before"
            )

    def summary(self) -> dict[str, float | None]:
        """What a summary has of the labels; warns of queries that were due and not answered."""
        asked, due = self._feedback.queries_asked, self._args.online_queries
        if self._feedback.num_open or asked < due:
            self._run.warn(
                f"{asked} of {due} online queries were asked, as episodes ended, and "
                f"{self._feedback.num_open} have no answer"
            )
        safe, unsafe = self._feedback.buffer.num_safety_labels
        return {
            "safe_labels": safe,
            "unsafe_labels": unsafe,
            "compared_episodes": self._feedback.buffer.num_compared,
            "queries_used": self._feedback.queries_used,
            "labelled_unsafe_rate": self._watch.unsafe_rate,
        }

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._watch.load_state_dict(state)


class LabelWatch:
    """Notices that labels say the constraint is broken while the learned cost says that it holds.

    Labels tell P(C > d), and the constraint is E[C] <= d: neither decides the other. But if more
    than half of the episodes are unsafe, the median of C is above d, and so is its mean where the
    long tail is to the right, as it is with accidents. So this warns if in each of the last five
    labelling rounds more than half of the labels were unsafe, and the mean learned cost after these
    rounds was within its limit on average. Violations that are rarer, and larger, go unnoticed.
    """

    def __init__(self) -> None:
        self._rounds: list[tuple[float, float]] = []

    def update(
        self, unsafe_rate: float | None, learned_cost: float | None, learned_limit: float
    ) -> str | None:
        """Take note of an iteration, and return a warning if there is reason for one.

        Args:
            unsafe_rate: Share labelled unsafe in this iteration's labelling round; None or NaN if
                there was none.
            learned_cost: Mean of the iteration's episodes; None if none ended.
            learned_limit: What it is held to.
        """
        if unsafe_rate is None or math.isnan(unsafe_rate) or learned_cost is None:
            return None
        self._rounds = [*self._rounds, (unsafe_rate, learned_cost - learned_limit)][-_ROUNDS:]
        rates, excess = zip(*self._rounds, strict=True)
        if len(rates) < _ROUNDS or min(rates) <= 0.5 or np.mean(excess) > 0:
            return None
        return (
            "labels say that the constraint is broken, the learned cost says that it holds: in "
            f"each of {_ROUNDS} labelling rounds more than half of the labels were unsafe, while "
            "the mean learned cost was within its limit; ask more --online-queries"
        )

    @property
    def unsafe_rate(self) -> float:
        """Mean share labelled unsafe in the last five rounds; NaN before the first."""
        return float(np.mean([rate for rate, _ in self._rounds])) if self._rounds else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The last rounds."""
        return {"rounds": [list(one) for one in self._rounds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._rounds = [(rate, excess) for rate, excess in state["rounds"]]
