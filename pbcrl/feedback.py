"""The online preference loop of Alg. 1 as two calls per iteration: `add`, and now and then `round`.

A `FeedbackLoop` stands between a training loop and an oracle. It keeps the episodes that are not
compared yet, the queries without an answer and the labels, on disk if it has a folder. It does not
depend on the policy, and learns nothing itself: a round returns `Answers`, from which a trainer
learns and by which a constraint moves λ. `label_all` labels what was collected before.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from pbcrl.buffer import (
    Pairs,
    PreferenceBuffer,
    check_buffer,
    check_generator,
    check_trajectories,
)
from pbcrl.cost_model import LearnedCost
from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.data.label_log import LabelLog, label_to_json
from pbcrl.errors import BudgetError, LabelError, MismatchError, StorageError
from pbcrl.oracle import GRID, Oracle, num_queries
from pbcrl.selection import Selection, num_new_pairs, uniform
from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Trajectory,
    cut_segments,
    stretches_of,
)


@dataclass(frozen=True, eq=False)
class Answers:
    """What one labelling round brought; `Answers()` is a round in which nothing was asked."""

    pairs: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Positions in the buffer of the newly labelled pairs, which are its last. int64 (B,)."""
    unsafe_rate: float | None = None
    """Share labelled unsafe of the trajectories in them and in grids that were shown for the first
    time, each counted once, in [0, 1]; None if none of these has a safety label."""
    judged: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, 2)))
    """How many trajectories the model called safe (row 0) and unsafe (row 1) before it learned from
    these labels, and labels safe (column 0) and unsafe (column 1). float64 (2, 2); one with labels
    of both kinds is in both columns in part. They are those with a safety label, once another label
    has taught the model, in a pair or a grid. One labelled unsafe that the model called safe is not
    among them before a second look confirmed or withdrew that."""
    num_late: int = 0
    """How many of the pairs show episodes of an older policy: those asked about before the newest
    round that asked about pairs."""
    batch: BatchLabel | None = None
    """The answer about a batch, if one came; its `safe` is NaN if the oracle could not tell."""
    batch_shown: bool = False
    """Whether a batch was shown in this round. If not, an answer about one is late."""


_MOST_FRESH = 4_000  # a checkpoint has room for 50,000 arrays, and each has up to six


@final
class FeedbackLoop:
    """Asks an oracle about fresh episodes and puts the answers into a buffer.

    A second look: who labels errs now and then, and where few episodes are unsafe most labels that
    say so may be errors. So an episode that is labelled unsafe though the model judged it safe is
    shown once more, in one of the next pairs that are due, beside a fresh one.

    Grids: episodes that the model wrongly calls safe are rare, and teach most. Among a dozen that
    are drawn at random and seen at once somebody finds them in the time of a pair or less. So a
    grid of fresh episodes tells how the model errs, and those that it calls unsafe, and the model
    safe, come in the next pairs: there they are looked at for a second time, and marked. Each is
    beside a fresh one: were all that is marked unsafe, few labels would say safe, most of them
    wrongly, and neither what costs nothing nor the limit could be learned.

    With a folder, every label is in `labels.jsonl` there before it is used, and the episodes that
    were compared online lie in `online/0001`, ..., a dataset per round that asked about pairs, so
    that they take no memory. A process that was killed continues from a `state_dict`. It gets the
    labels that were logged after that state again and does not log them twice; a label that then
    differs is refused.

    Args:
        oracle: Who answers; only this loop may call its `collect`.
        buffer: Where labelled pairs go. Trajectories that are compared offline are put into it
            before the first round.
        rng: Draws the pairs. It is the caller's, and not part of `state_dict`.
        folder: Where the log and the compared episodes are; None keeps all in memory.
        select: Chooses the online pairs among the fresh episodes.
        segment_length: Steps of the segments of fresh episodes, see `cut_segments`, that pairs and
            grids show instead of whole ones. Batches show whole ones still.

    Raises:
        TypeError: If `buffer` or `rng` is something else.
        ValueError: If `segment_length` is below 1.
        StorageError, CorruptFileError, FormatVersionError: As `LabelLog`.
    """

    def __init__(
        self,
        oracle: Oracle,
        buffer: PreferenceBuffer,
        *,
        rng: np.random.Generator,
        folder: str | os.PathLike[str] | None = None,
        select: Selection = uniform,
        segment_length: int | None = None,
    ) -> None:
        check_buffer(buffer)
        if segment_length is not None and segment_length < 1:
            raise ValueError(f"a segment has at least 1 step, got segment_length={segment_length}")
        check_generator(rng)
        self.oracle = oracle
        self.buffer = buffer
        self._rng = rng
        self._select = select
        self._segment_length = segment_length
        self._folder = None if folder is None else Path(folder)
        self._log = None if self._folder is None else LabelLog(self._folder / "labels.jsonl")
        self._bought = deque(self._log.labels if self._log else [])  # logged, but not used yet
        self._num_labels = 0  # that were used, offline and for other buffers too
        self._fresh: list[Trajectory] = []
        self._num_unjudged = 0  # of the newest fresh ones, that no batch has shown
        self._start = 0  # the first online trajectory in the buffer
        self._rounds: list[int] = []  # the number of trajectories that each round put there
        self._queries_asked = 0
        self._open: dict[int, NDArray[np.int64]] = {}  # the pair of each, by the oracle's number
        self._open_batch: int | None = None  # the oracle's number
        self._answers: dict[int, AnyLabel] = {}  # collected, but not logged yet
        self._surprises: list[int] = []  # positions in the buffer of what is to be seen once more
        self._open_grids: dict[int, list[Trajectory]] = {}  # the episodes of each
        self._missed: list[Trajectory] = []  # called unsafe in grids, and not by the model
        self._chosen: list[int] = []  # positions in the buffer of such ones, not judged yet
        self._warned_of_budget = False

    @property
    def queries_asked(self) -> int:
        """Online queries so far, answered or not; a batch counts as half as many as it shows."""
        return self._queries_asked

    @property
    def num_open(self) -> int:
        """Online queries that have no answer yet; a batch counts as one, and so does a grid."""
        return len(self._open) + len(self._open_grids) + (self._open_batch is not None)

    @property
    def queries_used(self) -> int:
        """Queries that the oracle has counted, online and offline."""
        return self.oracle.queries_used

    @property
    def num_labels(self) -> int:
        """Labels so far, online and offline, for whatever buffer; one per batch and grid, too."""
        return self._num_labels

    def label_all(self, parts: Sequence[tuple[PreferenceBuffer, int]]) -> list[int]:
        """Label distinct pairs of the trajectories of buffers, however long the oracle takes.

        All are asked at once.

        Args:
            parts: Different buffers, such as this loop's and one for validation, and how many
                queries each. If a buffer has fewer pairs without a label, only those are asked.

        Returns:
            How many labels were added to each.

        Raises:
            BudgetError: If they exceed what is left of the oracle's budget; none is asked then.
            MismatchError: If a label in the log is not the one that the oracle gives now.
            StorageError: If the labels cannot be logged; none is used then.
            TypeError, ValueError: If a number of queries is no integer >= 0.
        """
        pairs = []
        for buffer, number in parts:
            check_buffer(buffer)
            left = num_new_pairs(buffer.trajectories, buffer)
            count = min(_checked_count("num_queries", number), left)
            pairs.append(uniform(buffer.trajectories, count, asked=buffer, rng=self._rng))
        queries = [
            query
            for (buffer, _), chosen in zip(parts, pairs, strict=True)
            for query in buffer.queries(chosen)
        ]
        labels = self.oracle.label(queries)
        self._log_labels(labels)
        rest = iter(labels)
        for (buffer, _), chosen in zip(parts, pairs, strict=True):
            buffer.add_labels(chosen, list(islice(rest, len(chosen))))
        return [len(chosen) for chosen in pairs]

    def add(self, finished: Sequence[Trajectory]) -> None:
        """Keep finished episodes for the next round that finds queries due.

        The newest 4,000 stay in memory, and in `state_dict`, until then: who is asked once in many
        iterations is asked about the policy as it is.

        Raises:
            TypeError: If one is no trajectory.
        """
        check_trajectories(finished)
        self._fresh = [*self._fresh, *finished][-_MOST_FRESH:]
        self._num_unjudged = min(self._num_unjudged + len(finished), _MOST_FRESH)

    def round(
        self,
        due: int,
        *,
        model: LearnedCost | None = None,
        batch: int = 0,
        grids: bool = False,
        wait: float = 0.0,
    ) -> Answers:
        """Ask about fresh episodes until `due` queries have been asked in all; collect answers.

        First the newest `batch` episodes are shown at once, if they are new, all their queries are
        due and no earlier batch waits for its answer. No episode is shown in two batches, but one
        may be compared as well. With `grids` every second query is one. Then pairs are asked about:
        if the episodes make fewer than are due, the rest is asked in a later round. Then all fresh
        ones are forgotten, compared or not. If the oracle's budget ends, a warning says so, once.

        Answers come when they come, from people maybe rounds later.

        Args:
            due: Online queries since the beginning, such as
                `online_queries * iteration // num_iterations`. A batch counts as half as many as it
                shows episodes.
            model: What has been learned so far. It judges the labelled episodes (`judged`),
                and an episode that it wrongly calls safe is shown once more. A `select` may look
                at it, too. None asks for no second look.
            batch: Episodes per batch; 0 shows none.
            grids: Whether grids of `pbcrl.oracle.GRID` fresh episodes are shown, too. They need a
                model.
            wait: Seconds to wait at most for the answers that are open; may be inf.

        Returns:
            What came now, also if it was asked in an earlier round. Labels of pairs are in the
            buffer then, and all are in the log.

        Raises:
            LabelError: If an answer belongs to no query of this loop, or is of the wrong kind.
            MismatchError: If a label in the log is not the one that the oracle gives now.
            StorageError: If a question, the compared episodes or the labels cannot be written.
                Nothing is lost: the next round goes on with what was asked and answered.
            TypeError, ValueError: If a number is no integer >= 0, or `wait` is negative.
            UnsupportedError: If `batch` > 0 and the oracle is not asked about batches, or likewise
                of `grids`.
        """
        _checked_count("due", due)
        if not wait >= 0:
            raise ValueError(f"wait is in seconds and must be >= 0, got {wait}; 0 never waits")
        _checked_count("batch", batch, of="episodes")
        shown = batch > 0 and self._ask_batch(batch, due=due)
        has_grids = grids and model is not None and self._ask_grids(due)
        self._ask(due, model=model)
        if has_grids:
            self._fresh, self._num_unjudged = [], 0
        return self._collect(wait, model=model, batch_shown=shown)

    def set_unused_labels_aside(self) -> int:
        """Move the labels in the log that this loop has not used to `labels_unused.jsonl`.

        For a process that continues with other episodes than it had, as with environments that
        cannot be put where they were. For an oracle with a store, which answers in no fixed order,
        the loop does so itself as soon as a label differs: the store will give it again.

        Returns:
            How many labels were moved.
        """
        return self._set_aside(0)

    def state_dict(self) -> dict[str, Any]:
        """All that the loop's future depends on, save `rng` and what is in the folder.

        Raises:
            ValueError: If trajectories came into the buffer from elsewhere after the first round.
        """
        trajectories = self.buffer.trajectories
        if self._rounds and len(trajectories) != self._start + sum(self._rounds):
            raise ValueError(
                "trajectories that are compared offline are in the buffer before the first online "
                f"query, but {len(trajectories) - self._start - sum(self._rounds)} came later; add "
                "them earlier, or to another buffer"
            )
        num_offline = self._start if self._rounds else len(trajectories)
        in_memory = trajectories[num_offline:] if self._folder is None else []
        return {
            "num_offline": num_offline,
            "rounds": list(self._rounds),
            "compared": [_arrays(trajectory) for trajectory in in_memory],
            "pairs": self.buffer.labelled_pairs,
            "labels": self.buffer.labels,
            "unsafe": self.buffer.stretches,
            "num_labels": self._num_labels,
            "fresh": [_arrays(trajectory) for trajectory in self._fresh],
            "num_unjudged": self._num_unjudged,
            "queries_asked": self._queries_asked,
            "open_numbers": list(self._open),
            "open_pairs": np.array(list(self._open.values()), dtype=np.int64).reshape(-1, 2),
            "open_batch": self._open_batch,
            "surprises": list(self._surprises),
            "open_grids": [
                (number, [_arrays(one) for one in grid])
                for number, grid in self._open_grids.items()
            ],
            "missed": [_arrays(one) for one in self._missed],
            "chosen": list(self._chosen),
            "oracle": self.oracle.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, bit by bit, with a new oracle and a new buffer.

        The buffer holds the trajectories that are compared offline, in their old order, and no
        label; the state has the labels. The state of `rng` is set by the caller.

        Raises:
            StorageError: If the log or the oracle's store has less than the state knows.
            MismatchError: If the buffer or a dataset in `online` is not what it was.
        """
        found = len(self.buffer.trajectories), len(self.buffer)
        if found != (state["num_offline"], 0):
            raise MismatchError(
                f"a feedback loop continues with the {state['num_offline']} trajectories that its "
                f"buffer held before the first online query, and no labels, but there are "
                f"{found[0]} and {found[1]} labels; put the same ones into a new buffer"
            )
        logged = self._log.labels if self._log else []
        if self._log and len(logged) < state["num_labels"]:
            raise StorageError(
                f"a run goes on with every label that it bought: {state['num_labels']} were in "
                f"{self._log.path}, but {len(logged)} are there; restore it from a copy, or start "
                "a new run"
            )
        self.buffer.add_trajectories(self._compared(state))
        labels = [
            Label(*row, *map(stretches_of, both))
            for row, both in zip(state["labels"].tolist(), state["unsafe"], strict=True)
        ]
        self.buffer.add_labels(state["pairs"], labels)
        self._start, self._rounds = state["num_offline"], list(state["rounds"])
        self._num_labels = state["num_labels"]
        self._bought = deque(logged[self._num_labels :])
        self._fresh = [Trajectory(*arrays) for arrays in state["fresh"]]
        self._num_unjudged = state["num_unjudged"]
        self._queries_asked = state["queries_asked"]
        self._answers = {}
        self.oracle.load_state_dict(state["oracle"])
        numbers, pairs = state["open_numbers"], state["open_pairs"]
        if self.oracle.has_store:  # it knows these queries, but by other numbers
            numbers = self.oracle.submit(self.buffer.queries(pairs))
        self._open = dict(zip(numbers, pairs, strict=True))
        self._open_batch = state["open_batch"]
        self._surprises = list(state["surprises"])
        self._open_grids = {  # older states have nothing of grids
            number: [Trajectory(*arrays) for arrays in grid]
            for number, grid in state.get("open_grids", [])
        }
        self._missed = [Trajectory(*arrays) for arrays in state.get("missed", [])]
        self._chosen = list(state.get("chosen", []))

    def close(self) -> None:
        """Let another loop use the log; a second call does nothing."""
        if self._log is not None:
            self._log.close()

    def _ask_batch(self, batch: int, *, due: int) -> bool:
        """Show the newest episodes, if they are new and due; return whether they were shown."""
        missing, count = due - self._queries_asked, num_queries(batch)
        if self._open_batch is not None or self._num_unjudged < batch or missing < count:
            return False
        try:
            self._open_batch = self.oracle.submit_batch(self._fresh[-batch:])
        except BudgetError as error:
            self._warn_of_budget(due, error, stacklevel=4)
            return False
        self._queries_asked += count
        self._num_unjudged = 0
        return True

    def _ask_grids(self, due: int) -> bool:
        """Show fresh episodes in grids: every second query; return whether any was shown."""
        fresh = self._in_segments(self._fresh)
        count = min(due // 2 - self._queries_asked // 2, len(fresh) // GRID)
        if count <= 0:
            return False
        shown = self._rng.choice(len(fresh), (count, GRID), replace=False)
        before = self._queries_asked
        for grid in shown.tolist():
            episodes = [fresh[i] for i in grid]
            try:
                self._open_grids[self.oracle.submit_grid(episodes)] = episodes
            except BudgetError as error:
                self._warn_of_budget(due, error, stacklevel=4)
                break
            self._queries_asked += 1
        return self._queries_asked > before

    def _ask(self, due: int, *, model: LearnedCost | None) -> None:
        """Ask about pairs of fresh episodes until `due` queries have been asked in all."""
        missing = due - self._queries_asked
        if missing <= 0:
            return
        fresh = self._in_segments(self._fresh)
        count = min(missing, num_new_pairs(fresh, self.buffer))
        if count <= 0:
            return
        again = np.array(self._surprises[: min(count, len(fresh))], dtype=np.int64)
        beside = self._rng.choice(len(fresh), len(again), replace=False)
        pairs = np.empty((0, 2), dtype=np.int64)
        if left := count - len(again):
            pairs = self._select(fresh, left, asked=self.buffer, model=model, rng=self._rng)
        missed = self._missed[: len(pairs)]
        if missed:  # one in a pair, beside a fresh one; no side tells which
            pairs[: len(missed), 0] = len(fresh) + np.arange(len(missed))
            pairs, fresh = self._rng.permuted(pairs, axis=1), [*fresh, *missed]
        used, inverse = np.unique([*beside, *pairs.flat], return_inverse=True)
        before, start = self._queries_asked, len(self.buffer.trajectories)
        kept = self.buffer.add_trajectories([fresh[i] for i in used.tolist()])[inverse]
        second_looks = np.column_stack([again, kept[: len(again)]])
        second_looks = self._rng.permuted(second_looks, axis=1)
        pairs = np.concatenate([second_looks, kept[len(again) :].reshape(-1, 2)])
        try:
            self._submit(pairs, due=due)
            self._fresh, self._num_unjudged = [], 0
        finally:  # the oracle's disk may be full: what was asked by then counts
            asked = self._queries_asked - before
            del self._surprises[: min(asked, len(again))]
            if asked:
                del self._missed[: len(missed)]
                # `used` is sorted, so that what was missed comes last.
                end = len(self.buffer.trajectories)
                self._chosen += range(end - len(missed), end)
            self._end_round(start, has_asked=asked > 0)

    def _in_segments(self, fresh: list[Trajectory]) -> list[Trajectory]:
        return fresh if self._segment_length is None else cut_segments(fresh, self._segment_length)

    def _submit(self, pairs: Pairs, *, due: int) -> None:
        """Submit queries one by one, so that the number of each is known if a later one fails."""
        for pair in pairs:
            try:
                (number,) = self.oracle.submit(self.buffer.queries(pair[None]))
            except BudgetError as error:
                self._warn_of_budget(due, error, stacklevel=5)
                return
            self._open[number] = pair
            self._queries_asked += 1

    def _warn_of_budget(self, due: int, error: BudgetError, *, stacklevel: int) -> None:
        if not self._warned_of_budget:
            self._warned_of_budget = True
            warnings.warn(
                f"{due} online queries are due, but {self._queries_asked} were asked and no more "
                f"can be: {error}",
                RuntimeWarning,
                stacklevel=stacklevel,  # whoever called `round`
            )

    def _collect(self, wait: float, *, model: LearnedCost | None, batch_shown: bool) -> Answers:
        """Log the answers that have come, and put those about pairs into the buffer."""
        self._answers |= self.oracle.collect(wait=wait)
        of_grids = {n: one for n, one in self._answers.items() if n in self._open_grids}
        about_many = {self._open_batch, *of_grids}
        about_pairs = {n: one for n, one in self._answers.items() if n not in about_many}
        batch = self._answers.get(self._open_batch) if self._open_batch is not None else None
        if unknown := [number for number in about_pairs if number not in self._open]:
            raise LabelError(
                "the oracle of a feedback loop is asked by the loop alone, but it answered queries "
                f"{unknown} of somebody else; give the loop an oracle that nothing else uses"
            )
        labels = [one for one in about_pairs.values() if isinstance(one, Label)]
        grids = [one for one in of_grids.values() if isinstance(one, GridLabel)]
        sizes = [len(self._open_grids[number]) for number in of_grids]
        if (
            len(labels) < len(about_pairs)
            or not isinstance(batch, BatchLabel | None)
            or [len(one.safe) for one in grids] != sizes
        ):
            found = [*about_pairs.values(), *of_grids.values(), *([] if batch is None else [batch])]
            raise LabelError(
                "an oracle answers a query by a Label, a batch by a BatchLabel and a grid by a "
                f"GridLabel with an answer for each of its episodes, but got {found}"
            )
        self._log_labels([*([] if batch is None else [batch]), *grids, *labels])
        if labels:
            self.buffer.add_labels(np.stack([self._open.pop(n) for n in about_pairs]), labels)
        if batch is not None:
            self._open_batch = None
        self._answers = {}
        new = np.arange(len(self.buffer) - len(labels), len(self.buffer), dtype=np.int64)
        shown, unsafe = self.buffer.unsafe_shares(new)
        is_first, counts = self._looks(new, shown)
        # What a grid has found is looked at for the second time, and was not drawn by chance.
        is_chosen = np.isin(shown, self._chosen)
        is_first &= ~is_chosen
        counts |= is_chosen
        self._chosen = [i for i in self._chosen if i not in shown]
        shown, unsafe, is_first = shown[counts], unsafe[counts], is_first[counts]
        # A model that no label has taught yet says nothing of one that these have.
        if len(self.buffer) == len(labels):
            model = None
        judged = self._judged_in_pairs(shown, unsafe, is_first, model=model)
        in_grids, judged_there = self._judged_in_grids(list(of_grids), grids, model=model)
        drawn = np.concatenate([unsafe[is_first], in_grids])
        return Answers(
            pairs=new,
            unsafe_rate=float(drawn.mean()) if len(drawn) else None,
            judged=judged + judged_there,
            num_late=self._num_late(new),
            batch=batch,
            batch_shown=batch_shown,
        )

    def _looks(
        self, new: NDArray[np.int64], shown: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of the episodes shown in new pairs are judged for the first time, and which count.

        A second look counts, too. It is a pair of two rounds, and is about the older one. Whoever
        answers late may judge an episode of several pairs in several rounds: the first counts.
        """
        pairs, num_before = self.buffer.labelled_pairs, len(self.buffer) - len(new)
        judged = pairs[:num_before][~np.isnan(self.buffer.labels[:num_before, 1:])]
        is_first = ~np.isin(shown, judged)
        asked_in = np.searchsorted(self._start + np.cumsum(self._rounds), pairs[new], side="right")
        looked_again = pairs[new].min(axis=1)[asked_in[:, 0] != asked_in[:, 1]]
        return is_first, is_first | np.isin(shown, looked_again)

    def _judged_in_pairs(
        self,
        shown: NDArray[np.int64],
        unsafe: NDArray[np.float64],
        is_first: NDArray[np.bool_],
        *,
        model: LearnedCost | None,
    ) -> NDArray[np.float64]:
        """Count what the model called them and what labels do; keep what is to be seen again."""
        if model is None or not len(shown):
            return np.zeros((2, 2))
        costs = model.score([self.buffer.trajectories[i] for i in shown.tolist()])
        unlike = costs > model.learned_limit  # as a constraint judges those without a label
        called = np.where(is_first, unlike, False)  # at the first look it was safe
        surprising = is_first & (unsafe > called)
        self._surprises += [i for i in shown[surprising].tolist() if i not in self._surprises]
        return _counts(called[~surprising], unsafe[~surprising])

    def _judged_in_grids(
        self, numbers: Sequence[int], grids: Sequence[GridLabel], *, model: LearnedCost | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What was labelled of the episodes in grids, 1 unsafe, and counts as `Answers.judged`.

        Those that the model had called safe, and the grid unsafe, are kept for the next pairs, the
        newest first, and do not count among the second before.
        """
        episodes = [one for number in numbers for one in self._open_grids.pop(number)]
        unsafe = np.array([1 - safe for grid in grids for safe in grid.safe])
        given = np.flatnonzero(~np.isnan(unsafe))
        unsafe = unsafe[given]
        if model is None or not len(given):
            return unsafe, np.zeros((2, 2))
        episodes = [episodes[i] for i in given.tolist()]
        called = model.score(episodes) > model.learned_limit
        missed = unsafe > called
        found = [one for one, is_missed in zip(episodes, missed, strict=True) if is_missed]
        self._missed = [*found, *self._missed][:GRID]
        return unsafe, _counts(called[~missed], unsafe[~missed])

    def _num_late(self, positions: NDArray[np.int64]) -> int:
        """How many labelled pairs were asked about before the newest questions about pairs.

        In one with a second look that is told by the other episode.
        """
        if not self._rounds:
            return 0
        newest = len(self.buffer.trajectories) - self._rounds[-1]
        return int((self.buffer.labelled_pairs[positions] < newest).all(axis=1).sum())

    def _end_round(self, start: int, *, has_asked: bool) -> None:
        """Move the trajectories from `start` on, which have just been compared, to the disk."""
        episodes = self.buffer.trajectories[start:]
        if not has_asked:
            del self.buffer.trajectories[start:]
            return
        if not self._rounds:
            self._start = start
        self._rounds.append(len(episodes))
        if self._folder is not None:
            self.buffer.trajectories[start:] = _stored(self._folder_of(len(self._rounds)), episodes)

    def _log_labels(self, labels: Sequence[AnyLabel]) -> None:
        """Log labels, save those that the log has already."""
        num_logged = 0
        for label, before in zip(labels, self._bought, strict=False):
            if label_to_json(before) == label_to_json(label):  # NaN is not equal to itself
                num_logged += 1
                continue
            assert self._log is not None
            if not self.oracle.has_store:
                raise MismatchError(
                    f"a run that goes on gets the labels that it got before, but {before} is in "
                    f"{self._log.path}, and now it is {label}; the environments, the episodes or "
                    "the arguments have changed: start a new run in another folder"
                )
            self._set_aside(num_logged)
            break
        if self._log is not None:
            self._log.append(labels[num_logged:])
        for _ in range(num_logged):
            self._bought.popleft()
        self._num_labels += len(labels)

    def _set_aside(self, keep: int) -> int:
        """Move logged labels that were not used to another log, but for the first ones."""
        num_unused = len(self._bought) - keep
        if self._log is not None and num_unused > 0:
            unused = self._log.path.with_name("labels_unused.jsonl")
            self._log.cut(self._num_labels + keep, unused=unused)
            self._bought = deque(islice(self._bought, keep))
        return num_unused

    def _folder_of(self, number: int) -> Path:
        """Of the episodes that a round compared, numbered from 1."""
        assert self._folder is not None
        return self._folder / "online" / f"{number:04d}"

    def _compared(self, state: Mapping[str, Any]) -> list[Trajectory]:
        """The online trajectories of a state."""
        if self._folder is None:
            return [Trajectory(*arrays) for arrays in state["compared"]]
        trajectories: list[Trajectory] = []
        for number, size in enumerate(state["rounds"], start=1):
            folder = self._folder_of(number)
            found = list(TrajectoryDataset(folder))
            if len(found) != size:
                raise MismatchError(
                    f"a run goes on with the episodes that it compared: {size} were in {folder}, "
                    f"but {len(found)} are there; restore the folder from a copy, or start a new "
                    "run"
                )
            trajectories += found
        return trajectories


def _counts(called: NDArray[Any], unsafe: NDArray[np.float64]) -> NDArray[np.float64]:
    """As `Answers.judged`: what a model called episodes, 1 unsafe, and their shares of labels."""
    labels = np.stack([1 - unsafe, unsafe], axis=1)
    return np.stack([labels[called == 0].sum(axis=0), labels[called == 1].sum(axis=0)])


def _stored(path: Path, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Write trajectories to a dataset; return them memory-mapped, in the same order."""
    obs_shape, act_dim, _ = trajectories[0].layout
    with TrajectoryWriter(
        path,
        env_id="unknown",
        obs_shape=obs_shape,
        act_dim=act_dim,
        horizon=max(map(len, trajectories)),
        capacity=len(trajectories),
        rng=np.random.default_rng(0),  # draws nothing: all of them fit
        overwrite=True,  # what a killed process wrote after its newest state
    ) as writer:
        for trajectory in trajectories:
            writer.add(trajectory)
    return list(TrajectoryDataset(path))


def _arrays(trajectory: Trajectory) -> list[Any]:
    t = trajectory
    return [t.obs, t.actions, t.costs, t.rewards, t.terminated, t.final_obs]


def _checked_count(name: str, count: int, *, of: str = "queries") -> int:
    try:
        number = operator.index(count)
    except TypeError as error:
        raise TypeError(
            f"{name} is a number of {of}, got {count!r}; round it down to an integer"
        ) from error
    if number < 0:
        raise ValueError(f"{name} is a number of {of} and must be >= 0, got {count}")
    return number
