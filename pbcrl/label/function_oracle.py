"""A function as oracle, called in the background; every question and answer is in a log first."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from pbcrl.data.label_log import LabelLog, check_left, checked_budget, query_digest
from pbcrl.errors import UnsupportedError
from pbcrl.oracle import check_store
from pbcrl.trajectory import AnyLabel, Label, Query, Trajectory


@final
class FunctionOracle:
    """Asks a function in the background, one query after the other, and logs what it answers.

    For whoever answers slowly or for money: a window that shows two films, a model behind an
    interface. After a crash, queries with an answer get it from the log, and those that were asked
    without being answered are asked again without being counted again.

    Args:
        ask: Answers one query; called in a separate thread. What it raises is raised by the next
            `collect` or `label`. A query from `submit` is then asked again.
        path: File of the log; missing folders are made. An existing log is continued, so that its
            budget holds over all processes that ever used it, one at a time.
        budget: Most different queries in the log, earlier ones included; None is no bound.

    Raises:
        ValueError: If the budget is negative.
        StorageError: As `LabelLog`.
    """

    has_store = True

    def __init__(
        self,
        ask: Callable[[Query], Label],
        path: str | os.PathLike[str],
        *,
        budget: int | None = None,
    ) -> None:
        self.budget = checked_budget(budget)
        self.log = LabelLog(path)
        self._ask = ask
        self._submitted = 0
        self._open: dict[int, Query] = {}  # by number, until the answer has come from the thread
        self._questions: queue.SimpleQueue[tuple[int, Query]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[int, Label | Exception]] = queue.SimpleQueue()
        self._answers: dict[int, Label] = {}
        # A daemon: a question that nobody answers must not keep the process alive.
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def queries_used(self) -> int:
        """Different queries asked so far, also by earlier processes."""
        return self.log.queries_asked

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Hand in queries; return their numbers.

        Raises:
            BudgetError: If those never asked before exceed what is left of the budget.
            StorageError: If they cannot be logged; none is asked then.
        """
        digests = [query_digest(query) for query in queries]
        new = {digest for digest in digests if digest not in self.log.answers}
        check_left(self.budget, used=self.queries_used, asked=len(new))
        self.log.ask(digests)
        numbers = list(range(self._submitted, self._submitted + len(queries)))
        self._submitted += len(queries)
        for number, query in zip(numbers, queries, strict=True):
            self._open[number] = query
            self._questions.put((number, query))
        return numbers

    def submit_batch(self, episodes: Sequence[Trajectory]) -> int:
        """Refused: the function answers queries.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"a SyntheticOracle and a FolderOracle can judge a batch of episodes, but "
            f"{len(episodes)} were shown to a FunctionOracle; constrain the share of unsafe "
            "episodes instead (UnsafeRate), which queries tell"
        )

    def submit_grid(self, episodes: Sequence[Trajectory]) -> int:
        """Refused: the function answers queries.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"a SyntheticOracle and a FolderOracle can be asked about a grid, but {len(episodes)} "
            "episodes were shown to a FunctionOracle; ask about pairs alone (grids=False)"
        )

    def collect(self, *, wait: float = 0.0) -> dict[int, AnyLabel]:
        """Return the answers that came since the last call, by number.

        Args:
            wait: Seconds to wait at most, until every open query is answered; may be inf.
        """
        end = time.monotonic() + wait
        while not self._replies.empty():
            self._take_reply()
        while self._open and (left := end - time.monotonic()) > 0:
            try:
                self._take_reply(timeout=min(left, threading.TIMEOUT_MAX))
            except queue.Empty:
                break
        answers, self._answers = self._answers, {}
        return dict(answers)

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order; waits for the function. Raises as `submit`."""
        numbers = self.submit(queries)
        try:
            while any(number not in self._answers for number in numbers):
                self._take_reply()
        except BaseException:
            for number in numbers:  # nobody waits for these any more
                self._open.pop(number, None)
                self._answers.pop(number, None)
            raise
        return [self._answers.pop(number) for number in numbers]

    def close(self) -> None:
        """Let another process use the log; a second call does nothing."""
        self.log.close()

    def state_dict(self) -> dict[str, Any]:
        """How many queries the log holds; it keeps all else itself."""
        return {"queries_used": self.queries_used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the log with a state; open queries are handed in again by whoever waits for them.

        Raises:
            StorageError: If queries are missing from the log.
        """
        check_store(self.log.path, known=state["queries_used"], found=self.queries_used)
        self._open, self._answers = {}, {}

    def _take_reply(self, *, timeout: float | None = None) -> None:
        number, reply = self._replies.get(timeout=timeout)
        if number not in self._open:
            return
        if isinstance(reply, Exception):
            self._questions.put((number, self._open[number]))
            raise reply
        del self._open[number]
        self._answers[number] = reply

    def _work(self) -> None:
        while True:
            number, query = self._questions.get()
            try:
                self._replies.put((number, self._label(query)))
            except Exception as error:
                self._replies.put((number, error))

    def _label(self, query: Query) -> Label:
        digest = query_digest(query)
        known = self.log.answers[digest]
        if known is not None:
            return known
        label: object = self._ask(query)
        if not isinstance(label, Label):
            raise TypeError(
                f"a function that answers queries returns a Label, but {self._ask!r} returned "
                f"{label!r}; return Label(preference, first_safe, second_safe), with nan for what "
                "has no answer"
            )
        self.log.answer(digest, label)
        return label
