"""People as oracle: questions and answers lie in a folder, and people answer on a page.

A question is in the folder before anybody sees it, and an answer before it is used. So the process
may end and start again at any time, and the same question is not asked twice, whichever run asks
it. Who answers when, and what an answer is, `pbcrl.label` knows.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, final
from weakref import finalize

import numpy as np

from pbcrl.buffer import Pairs
from pbcrl.data.label_log import check_left, checked_budget, trajectory_digest
from pbcrl.env_modules import env_id_flag
from pbcrl.errors import CorruptFileError
from pbcrl.label.clips import draw_frames
from pbcrl.label.replay import Replay
from pbcrl.label.standing import Kind
from pbcrl.label.store import LabelStore, hold_folder, question_digest, tell_pairs_to_come
from pbcrl.oracle import check_batch, check_grid, check_store, num_queries
from pbcrl.trajectory import AnyLabel, GridLabel, Label, Query, Trajectory
from pbcrl.tree_trainer import Clip

Show = Callable[[Trajectory], "Replay | np.ndarray | None"]
"""What people see of a trajectory: how to play it again, frames as uint8 (F, H, W, 3), one per step
or fewer, or None for curves of its observations."""


@final
class FolderOracle:
    """Puts questions into a label folder and picks up what people answer there.

    They answer on a page, `python -m pbcrl.label FOLDER`, or at the terminal. True costs are not
    put into the folder. One oracle at a time: a second one on the same folder is refused, until
    `close` or the end of the process lets it in. What several people say is combined by
    `pbcrl.label.standing.combined`; an answer that is corrected after it was collected is used by
    later runs.

    Args:
        folder: Made if it is missing; may hold the questions and answers of other runs.
        budget: Most queries that `run` may ask, in all its processes; None is no bound. A batch of
            m episodes counts as ceil(m / 2), a grid as one.
        run: Whose budget it is. Runs share the answers, and each counts what it has asked.
        annotators: How many people are to answer each question.
        show: What they see of a trajectory; by default curves.
        say: Told what is being waited for, whenever more was answered, once in ten seconds at most.
        poll_seconds: How often the folder is looked into while something waits.

    Raises:
        ValueError: If the budget is negative, or nobody is to answer.
        StorageError: If the folder cannot be written, or another oracle uses it.
    """

    has_store = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        budget: int | None = None,
        run: str = "",
        annotators: int = 1,
        show: Show | None = None,
        say: Callable[[str], object] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        self.folder = Path(folder)
        self.budget = checked_budget(budget)
        if annotators < 1:
            raise ValueError(f"somebody must answer: annotators must be >= 1, got {annotators}")
        self._annotators, self._show, self._say = annotators, show, say
        self._poll_seconds = poll_seconds
        self.store = LabelStore(self.folder, create=True)
        """The questions and answers."""
        self._held = hold_folder(self.folder, by="oracle")
        self.close = finalize(self, _close, self.store, self._held)
        """Let another oracle use the folder; a second call does nothing."""
        self._submitted = 0
        self._open: dict[int, int] = {}  # the store's number of each that waits, by ours
        self._labels: dict[int, AnyLabel] = {}
        self._num_events = -1  # that `_labels` knows
        self._use(run)

    def _use(self, run: str) -> None:
        self._run = run
        self._asked = {
            one.digest: (one.id, _cost(one.kind, len(one.members))) for one in self.store.asked(run)
        }
        tell_pairs_to_come(self._held, self._num_to_come)

    @property
    def _num_to_come(self) -> int | None:
        """Pairs that this run may still ask."""
        return None if self.budget is None else max(self.budget - self.queries_used, 0)

    @property
    def queries_used(self) -> int:
        """Queries that this run has asked, answered or not, in all its processes."""
        return sum(cost for _, cost in self._asked.values())

    @property
    def num_open(self) -> int:
        """Questions handed in by this process whose answers have not been collected."""
        return len(self._open)

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Ask those queries that are not in the folder yet; return the numbers of all.

        Raises:
            BudgetError: If the new ones exceed what is left of the budget; none is asked then.
            StorageError: If they cannot be written; none is asked then.
        """
        return self._submit([("pair", (query.first, query.second)) for query in queries])

    def submit_batch(self, episodes: Sequence[Trajectory]) -> int:
        """Ask whether the mean cost of these episodes is acceptable; return the question's number.

        Raises:
            BudgetError, StorageError: As `submit`.
            ValueError: If there is no episode.
        """
        check_batch(episodes)
        (number,) = self._submit([("batch", tuple(episodes))])
        return number

    def submit_grid(self, episodes: Sequence[Trajectory]) -> int:
        """Ask which of these episodes are safe; return the question's number.

        Raises:
            BudgetError, StorageError: As `submit`.
            ValueError: If there is no episode, or more than `GRID`.
        """
        check_grid(episodes)
        (number,) = self._submit([("grid", tuple(episodes))])
        return number

    def collect(self, *, wait: float = 0.0) -> dict[int, AnyLabel]:
        """Return the answers found since the last call, by number.

        Args:
            wait: Seconds to wait at most, until all is answered that this process has asked; may be
                inf.
        """
        found = self._wait_for(list(self._open.values()), wait)
        numbers = [number for number, ours in self._open.items() if ours in found]
        return {number: found[self._open.pop(number)] for number in numbers}

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order; waits for the people. Raises as `submit`."""
        numbers = self.submit(queries)
        found = self._wait_for([self._open[number] for number in numbers], math.inf)
        labels = [found[self._open.pop(number)] for number in numbers]
        return cast("list[Label]", labels)  # of pairs alone

    def label_grids(self, grids: Sequence[Sequence[Trajectory]]) -> list[GridLabel]:
        """Ask of each trajectory in each grid whether it is safe; waits for the people.

        Raises:
            BudgetError, StorageError: As `submit`.
            ValueError: If a grid has no trajectory, or more than `GRID`.
        """
        for grid in grids:
            check_grid(grid)
        numbers = self._submit([("grid", tuple(grid)) for grid in grids])
        found = self._wait_for([self._open[number] for number in numbers], math.inf)
        labels = [found[self._open.pop(number)] for number in numbers]
        return cast("list[GridLabel]", labels)  # of grids alone

    def state_dict(self) -> dict[str, Any]:
        """What this run has asked, and batches and grids that wait; the folder keeps all else."""
        waiting = [
            [number, self.store.question(ours).digest]
            for number, ours in self._open.items()
            if self.store.question(ours).kind != "pair"
        ]
        return {"queries_used": self.queries_used, "run": self._run, "batches": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the folder with a state; open queries are submitted again by whoever waits.

        Raises:
            StorageError: If questions are missing from the folder.
        """
        self._use(state["run"])
        check_store(self.folder, known=state["queries_used"], found=self.queries_used)
        self._open = {number: self._asked[digest][0] for number, digest in state["batches"]}
        self._submitted = max([self._submitted - 1, *self._open]) + 1

    def _submit(self, questions: list[tuple[Kind, tuple[Trajectory, ...]]]) -> list[int]:
        digests = [question_digest(kind, members) for kind, members in questions]
        new = {
            digest: one
            for digest, one in zip(digests, questions, strict=True)
            if digest not in self._asked
        }
        costs = {digest: _cost(kind, len(members)) for digest, (kind, members) in new.items()}
        check_left(self.budget, used=self.queries_used, asked=sum(costs.values()))
        replays = self._drawn([one for _, members in new.values() for one in members])
        # All of them: what is waited for comes before what other runs have asked.
        numbers = self.store.ask(questions, run=self._run, wanted=self._annotators, replays=replays)
        self._num_events = -1  # what had enough answers may want more now
        number_of = dict(zip(digests, numbers, strict=True))
        self._asked |= {digest: (number_of[digest], cost) for digest, cost in costs.items()}
        tell_pairs_to_come(self._held, self._num_to_come)
        ours = list(range(self._submitted, self._submitted + len(questions)))
        self._submitted += len(questions)
        self._open |= {n: self._asked[digest][0] for n, digest in zip(ours, digests, strict=True)}
        return ours

    def _drawn(self, trajectories: list[Trajectory]) -> dict[str, bytes]:
        """How to draw each trajectory; frames become clips at once, before anybody is asked."""
        if self._show is None:
            return {}
        replays = {}
        for one in trajectories:
            digest = trajectory_digest(one)
            if digest in replays:
                continue
            shown = self._show(one)
            if isinstance(shown, Replay):
                replays[digest] = shown.to_bytes()
            elif shown is not None:
                draw_frames(self.folder, digest, shown, steps=len(one))
        return replays

    def _wait_for(self, asked: list[int], seconds: float) -> dict[int, AnyLabel]:
        """Wait for the answers to some of the store's questions; return all that are there then."""
        end, said = time.monotonic() + seconds, (-1, -math.inf)
        while True:
            found = self._found()
            missing = sum(number not in found for number in asked)
            now, answered = time.monotonic(), len(asked) - missing
            if missing == 0 or now >= end:
                return found
            if self._say is not None and answered != said[0] and now - said[1] >= 10:
                more = self._num_to_come or 0
                minutes, in_all = (
                    max(1, math.ceil(self.store.seconds_left(asked, pairs=pairs) / 60))
                    for pairs in (0, more * self._annotators)
                )
                later = f", {in_all} with the {more} questions to come" if more else ""
                self._say(
                    f"waiting for people: {answered} of {len(asked)} answered, about {minutes} min "
                    f"to go{later}; the page: {self._command(asked)}"
                )
                said = answered, now
            time.sleep(min(self._poll_seconds, max(end - now, 0)))

    def _command(self, asked: list[int]) -> str:
        """What to type for the page; the env's module is named in it if it is not installed."""
        words = ["python", "-m", "pbcrl.label", str(self.folder)]
        digests = (one for number in asked for one in self.store.question(number).members)
        with suppress(CorruptFileError):  # the page shows curves, then
            for replay in filter(None, map(self.store.replay, digests)):
                words += env_id_flag(Replay.from_bytes(replay).env_id)
                break
        return shlex.join(words)

    def _found(self) -> dict[int, AnyLabel]:
        """The labels so far, by the store's number."""
        if (num_events := self.store.num_events) != self._num_events:
            self._labels, self._num_events = self.store.labels(), num_events
        return self._labels


def read_labelled(folder: str | os.PathLike[str]) -> tuple[list[Trajectory], Pairs, list[Label]]:
    """All pairs that were ever answered in a folder, as `PreferenceBuffer` takes them.

    Returns:
        The trajectories, each once, as its contents tell; the pairs of them that were asked, int64
        (B, 2); their B labels.

    Raises:
        StorageError: If there is no store.
        CorruptFileError: If it is damaged.
    """
    store = LabelStore(folder)
    labels = store.labels()
    place: dict[str, int] = {}
    trajectories: list[Trajectory] = []
    pairs, answers = [], []
    for question in store.questions():
        label = labels.get(question.id)
        if not isinstance(label, Label):  # no answer, or one about many
            continue
        first, second = question.members
        keys = [first, f"{second} again" if first == second else second]  # two that went alike
        for key in keys:
            if key not in place:
                place[key] = len(trajectories)
                trajectories.append(store.trajectory(key.removesuffix(" again")))
        pairs.append([place[key] for key in keys])
        answers.append(label)
    store.close()
    return trajectories, np.array(pairs, dtype=np.int64).reshape(-1, 2), answers


def read_clips(folder: str | os.PathLike[str]) -> list[Clip]:
    """All that was ever answered about the grids of a folder, as `TreeTrainer.fit` takes it.

    Returns:
        One for each clip of each grid, in their order, without those that nobody could tell.

    Raises:
        StorageError: If there is no store.
        CorruptFileError: If it is damaged.
    """
    store = LabelStore(folder)
    labels = store.labels()
    clips = [
        Clip(store.trajectory(digest), safe)
        for question in store.questions()
        if isinstance(label := labels.get(question.id), GridLabel)
        for digest, safe in zip(question.members, label.safe, strict=True)
        if not math.isnan(safe)
    ]
    store.close()
    return clips


def _cost(kind: str, num_members: int) -> int:
    return num_queries(num_members) if kind == "batch" else 1


def _close(store: LabelStore, held: Any) -> None:
    store.close()
    held.close()
