"""What was asked and what was answered, on disk before it counts: nothing is paid for twice.

A query is known by its contents, so that a process that starts again, and asks again, gets the
answers that an earlier one paid for. Knows nothing of who answers, nor of labelled pairs.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import numpy as np

from pbcrl.errors import BudgetError
from pbcrl.journal import Journal
from pbcrl.label_log import label_from_json, label_to_json
from pbcrl.oracle import check_left, checked_budget
from pbcrl.storage import corrupt
from pbcrl.trajectory import Label, Query, Trajectory

_KIND = "pbcrl-ledger"


def query_digest(query: Query) -> str:
    """Name a query by what it shows: 32 hex digits that observations, actions and order decide."""
    both = (trajectory_digest(query.first), trajectory_digest(query.second))
    return hashlib.sha256("".join(both).encode()).hexdigest()[:32]


def trajectory_digest(trajectory: Trajectory) -> str:
    """Name a trajectory likewise, by its observations and actions."""
    digest = hashlib.sha256()
    for array in (trajectory.obs, trajectory.actions):
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


@final
class BudgetLedger:
    """A file of what was asked and what was answered; all of it is on disk when a call returns.

    Each line is JSON with the crc32 of the rest of the line: a query's digest when it is asked, the
    digest and the label when it is answered. An existing ledger is continued, so that its budget
    holds over all processes that ever used it. One at a time: a second one is refused, until
    `close` or the end of the process lets it in.

    Args:
        path: The file; missing folders are made.
        budget: Most queries to ask; None is no bound.

    Raises:
        ValueError: If the budget is negative.
        StorageError: If the file cannot be written, or another ledger has it open.
        CorruptFileError, FormatVersionError: If it is damaged or of another version. Half a line at
            the end, as a crash leaves it, is dropped with one warning.
    """

    def __init__(self, path: str | os.PathLike[str], *, budget: int | None = None) -> None:
        self.path = Path(path)
        self.budget = checked_budget(budget)
        self.answers: dict[str, Label | None] = {}
        """The label of each query that was ever asked, by digest; None until it is answered."""
        self._lock = threading.Lock()
        self._journal = Journal(self.path, kind=_KIND)
        try:
            self._replay()
        except BaseException:
            self.close()
            raise

    @property
    def queries_used(self) -> int:
        """Different queries asked so far, answered or not, by this and by earlier processes."""
        return len(self.answers)

    @property
    def num_unanswered(self) -> int:
        """How many of them have no answer yet."""
        return sum(label is None for label in self.answers.values())

    def ask(self, digests: Sequence[str]) -> None:
        """Note that queries are about to be asked; those asked before cost nothing.

        Raises:
            BudgetError: If the new ones exceed what is left of the budget; none is noted then.
            StorageError: If they cannot be written; none is noted then.
        """
        with self._lock:
            new = [digest for digest in dict.fromkeys(digests) if digest not in self.answers]
            check_left(self.budget, used=self.queries_used, asked=len(new))
            self._journal.append([{"query": digest} for digest in new], sync=True)
            self.answers |= dict.fromkeys(new)

    def answer(self, digest: str, label: Label) -> None:
        """Note the answer to a query that was asked.

        Raises:
            BudgetError: If it was not.
            StorageError: If the answer cannot be written.
        """
        with self._lock:
            if digest not in self.answers:
                raise BudgetError(
                    f"only what was asked can be answered, but {digest} was not; call ask first"
                )
            self._journal.append([{"query": digest} | label_to_json(label)], sync=True)
            self.answers[digest] = label

    def close(self) -> None:
        """Let another process use the ledger; a second call does nothing."""
        self._journal.close()

    def _replay(self) -> None:
        if self._journal.num_torn:
            warnings.warn(
                f"a ledger ends with a finished line, but the last {self._journal.num_torn} bytes "
                f"of {self.path} are half a line, as a crash leaves them; they are dropped",
                stacklevel=3,
            )
        for number, entry in enumerate(self._journal.entries, start=2):
            try:
                digest = entry.pop("query")
                if not isinstance(digest, str):
                    raise TypeError(f"a query's name is a string, got {digest!r}")
                self.answers[digest] = label_from_json(entry) if entry else None
            except (ArithmeticError, KeyError, TypeError, ValueError) as error:
                finding = f"line {number} is no question and no answer ({error!r})"
                raise corrupt(self.path, finding) from error


@final
class FunctionOracle:
    """Asks a function in the background, one query after the other, and notes all in a ledger.

    For whoever answers slowly or for money: a window that shows two films, a model behind an
    interface. After a crash, queries with an answer get it from the ledger, and those that were
    asked without being answered are asked again without being counted again.

    Args:
        ask: Answers one query; called in a thread of its own. What it raises is raised by the next
            `collect` or `label`, and that query stays unanswered.
        ledger: Where to note it; its budget holds.
    """

    def __init__(self, ask: Callable[[Query], Label], ledger: BudgetLedger) -> None:
        self.ledger = ledger
        self._ask = ask
        self._submitted = 0
        self._questions: queue.SimpleQueue[tuple[int, str, Query]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[int, Label | Exception]] = queue.SimpleQueue()
        self._answers: dict[int, Label] = {}
        # A daemon: a question that nobody answers must not keep the process alive.
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def queries_used(self) -> int:
        """Different queries asked so far, also by earlier processes."""
        return self.ledger.queries_used

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Hand in queries; return their numbers.

        Raises:
            BudgetError: If those never asked before exceed what is left of the ledger's budget.
            StorageError: If they cannot be noted; none is asked then.
        """
        digests = [query_digest(query) for query in queries]
        self.ledger.ask(digests)
        numbers = list(range(self._submitted, self._submitted + len(queries)))
        self._submitted += len(queries)
        for question in zip(numbers, digests, queries, strict=True):
            self._questions.put(question)
        return numbers

    def collect(self) -> dict[int, Label]:
        """Return the answers that came since the last call, by number."""
        while not self._replies.empty():
            self._take_reply()
        answers, self._answers = self._answers, {}
        return answers

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order; waits for the function. Raises as `submit`."""
        numbers = self.submit(queries)
        while any(number not in self._answers for number in numbers):
            self._take_reply()
        return [self._answers.pop(number) for number in numbers]

    def _take_reply(self) -> None:
        number, reply = self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        self._answers[number] = reply

    def _work(self) -> None:
        while True:
            number, digest, query = self._questions.get()
            try:
                label = self.ledger.answers[digest]
                if label is None:
                    label = self._ask(query)
                    self.ledger.answer(digest, label)
                self._replies.put((number, label))
            except Exception as error:
                self._replies.put((number, error))
