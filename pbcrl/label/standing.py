"""What stands of the answers of a label folder, and whose turn it is, kept while events come in.

Events are only ever added, so that each is looked at once, however many there are: what a person
answered, what is open and what comes next are then at hand. Does not depend on where events are
stored; the claims of people at work are given.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import numpy as np

from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Stretches,
    unsafe_steps,
    unsafe_stretches,
)

Kind = Literal["pair", "batch", "grid"]

SECONDS: Mapping[Kind, float] = {"pair": 7.0, "grid": 13.5, "batch": 13.5}
"""What an answer takes until people have shown it; estimates, as in docs/results.md."""

_PACE = 100  # answers from which a person's pace is told: the latest ones say it best


@dataclass(frozen=True)
class Question:
    """What a person is asked.

    Which of two trajectories is safer, answered by a `Label`; whether a batch is acceptable, by a
    `BatchLabel`; which of a grid are safe, by a `GridLabel`.
    """

    id: int
    """From 1, in the order of asking."""
    kind: Kind
    digest: str
    """Made of its contents: 32 hex digits."""
    members: tuple[str, ...]
    """The digests of its trajectories; two of a pair, in their order."""
    wanted: int
    """How many people are to answer it."""

    @property
    def name(self) -> str:
        """As people and logs see it."""
        return f"{self.id:06d}-{self.digest}"


class Event(NamedTuple):
    """An answer or a skip that stands: it was neither undone nor followed by another one."""

    id: int
    query: int
    annotator: str
    kind: str
    """"answer" or "skip"."""
    label: AnyLabel
    seconds: float | None
    """What the person needed."""
    time: float
    """When it was given, in seconds since 1970."""


class Progress(NamedTuple):
    """How far a person is."""

    answered: int
    """Questions that they have answered."""
    skipped: int
    """Questions that they have put off and that are still open."""
    left: int
    """Questions that they may be asked now, those that were put off among them."""
    of_others: int
    """How many of these the run that asked last has not asked: perhaps nobody waits for them."""
    upcoming: list[Question]
    """The first of these."""
    median_seconds: float | None
    """What their last 100 answers took; None if there are none."""


class Claim(NamedTuple):
    """A question that a person looks at in one of their windows."""

    query: int
    annotator: str
    tab: str


def combined(labels: Sequence[AnyLabel]) -> AnyLabel:
    """Make one label of those that several people gave to one question.

    The preference is their mean: the cross-entropy is linear in it, so that training on the mean is
    training on all of them. A safety label, and an answer about a batch or in a grid, is what most
    of them say, and not given if as many say the opposite. "Can't tell" does not count. A step is
    marked if more than half of those mark it who were to mark the steps. Of an unsafe trajectory
    of which no step is, nothing is known of the steps.

    Args:
        labels: At least one, all of the same kind.
    """

    def given(name: str) -> list[float]:
        return [value for one in labels if not math.isnan(value := getattr(one, name))]

    def majority(values: list[float]) -> float:
        excess = sum(values) - len(values) / 2
        return math.nan if excess == 0 else float(excess > 0)

    if isinstance(labels[0], BatchLabel):
        return BatchLabel(majority(given("safe")))
    if isinstance(labels[0], GridLabel):
        columns = zip(*(one.safe for one in labels if isinstance(one, GridLabel)), strict=True)
        return GridLabel(tuple(majority([v for v in c if not math.isnan(v)]) for c in columns))
    preferences = given("preference")
    first, second = majority(given("first_safe")), majority(given("second_safe"))
    return Label(
        sum(preferences) / len(preferences) if preferences else math.nan,
        first,
        second,
        _most_marked((one.first_unsafe for one in labels if isinstance(one, Label)), safe=first),
        _most_marked((one.second_unsafe for one in labels if isinstance(one, Label)), safe=second),
    )


def _most_marked(given: Iterable[Stretches | None], *, safe: float) -> Stretches | None:
    """The steps that more than half of those who marked any trajectory marked."""
    known = [one for one in given if one is not None]
    if not known:
        return None
    steps = max([0, *(end for one in known for _, end in one)])
    votes = np.sum([unsafe_steps(one, steps) for one in known], axis=0)
    # None of an unsafe trajectory: they disagree about where, or the store let it pass once.
    return unsafe_stretches(votes > len(known) / 2) or (None if safe == 0 else ())


@dataclass
class _Person:
    """Events of one person, each by its question, but `standing` by its number, oldest first."""

    standing: dict[int, Event] = field(default_factory=dict)
    answered: dict[int, Event] = field(default_factory=dict)
    skipped: dict[int, Event] = field(default_factory=dict)


@final
class Standing:
    """What stands, made of questions and events that are added in the order of their numbers."""

    def __init__(self) -> None:
        self.questions: dict[int, Question] = {}
        """All of them, in the order of asking."""
        self.open: set[int] = set()
        """Those that fewer people have answered than wanted."""
        self.first: set[int] = set()
        """Those that the run that asked last has asked; all others come after them."""
        self._num_closed = 0  # about how many holes `open` has
        self._people: dict[str, _Person] = {}
        self._stacks: dict[tuple[int, str], list[Event]] = {}  # of one person about one question
        self._answers: dict[int, dict[str, Event]] = {}  # by question and person
        self._labels: dict[int, AnyLabel] = {}
        self._changed: set[int] = set()  # since `labels` was asked for

    def ask(self, question: Question) -> None:
        """Add a question, or note that another number of people is to answer it."""
        self.questions[question.id] = question
        self._settle(question.id)

    def add(self, event: Event) -> None:
        """Add an answer or a skip; its question was added before."""
        self._people.setdefault(event.annotator, _Person()).standing[event.id] = event
        self._stacks.setdefault((event.query, event.annotator), []).append(event)
        self._put(event.query, event.annotator)

    def take_back(self, number: int, annotator: str) -> None:
        """Take back an event of a person, so that what it had replaced stands again."""
        event = self._person(annotator).standing.pop(number)
        self._stacks[event.query, annotator].remove(event)
        self._put(event.query, annotator)

    def event_of(self, number: int, annotator: str) -> Event | None:
        """What stands of one person about one question, if anything does."""
        stack = self._stacks.get((number, annotator))
        return stack[-1] if stack else None

    def newest_of(self, annotator: str) -> Event | None:
        """A person's newest event that was not taken back, if there is any."""
        standing = self._person(annotator).standing
        return standing[next(reversed(standing))] if standing else None

    def events(self, annotator: str | None = None) -> list[Event]:
        """What stands, newest last, of one person or of all."""
        people = self._people.values() if annotator is None else [self._person(annotator)]
        found = [e for one in people for e in (*one.answered.values(), *one.skipped.values())]
        return sorted(found, key=lambda event: event.id)

    def labels(self) -> dict[int, AnyLabel]:
        """The `combined` label of each question that as many people have answered as wanted."""
        for number in self._changed:
            if number in self.open:
                self._labels.pop(number, None)
            else:
                answers = sorted(self._answers[number].values(), key=lambda event: event.id)
                self._labels[number] = combined([event.label for event in answers])
        self._changed = set()
        return dict(self._labels)

    def open_for(
        self, annotator: str, tab: str, claims: Sequence[Claim], *, most: int | None = None
    ) -> tuple[set[int], list[Question]]:
        """Which questions a person may be asked now, and the first `most`, or all, in order.

        First comes what is under way in this window, last, of each run, what was put off.
        """
        person = self._person(annotator)
        here = {claim.query for claim in claims if claim[1:] == (annotator, tab)}
        elsewhere = {claim.query for claim in claims if claim.annotator == annotator} - here
        found = self.open.difference(person.answered) - self._taken(annotator, claims)
        apart = found & (here | elsewhere | person.skipped.keys())

        def turn(number: int) -> tuple[bool, bool, int, int, int]:
            skip = person.skipped.get(number)
            where = 0 if number in here else 2 if number in elsewhere else 1
            of_other = number not in self.first and number not in here
            is_late = skip is not None and number not in here
            return of_other, is_late, where, 0 if skip is None else skip.id, number

        most = len(found) if most is None else most
        rest = found - apart
        chosen = heapq.nsmallest(most, rest & self.first)
        chosen += heapq.nsmallest(most - len(chosen), rest - self.first)
        chosen = sorted([*chosen, *apart], key=turn)[:most]
        return found, [self.questions[number] for number in chosen]

    def progress(self, annotator: str, tab: str, claims: Sequence[Claim], *, most: int) -> Progress:
        """How far a person is, and the `most` questions that come first."""
        person = self._person(annotator)
        found, upcoming = self.open_for(annotator, tab, claims, most=most)
        latest = itertools.islice(reversed(person.standing.values()), _PACE)
        times = [e.seconds for e in latest if e.kind == "answer" and e.seconds is not None]
        median = float(np.median(times)) if times else None
        skipped = len(self.open & person.skipped.keys())
        of_others = len(found - self.first)
        return Progress(len(person.answered), skipped, len(found), of_others, upcoming, median)

    def seconds_left(self, numbers: Iterable[int], *, pairs: int = 0) -> float:
        """What people still need for these questions, as if one answered after the other.

        Of each kind by the median of the last 100 answers of all people, or `SECONDS` if there is
        none.

        Args:
            numbers: Of the questions.
            pairs: Answers about pairs that will be asked for besides.
        """
        pace: dict[Kind, list[float]] = {kind: [] for kind in SECONDS}
        for event in self.events():
            if event.kind == "answer" and event.seconds is not None:
                pace[self.questions[event.query].kind].append(event.seconds)
        each = {k: np.median(pace[k][-_PACE:]) if pace[k] else SECONDS[k] for k in SECONDS}
        asked = [self.questions[number] for number in numbers if number in self.open]
        missing = {one.id: one.wanted - len(self._answers[one.id]) for one in asked}
        return float(sum(missing[one.id] * each[one.kind] for one in asked) + pairs * each["pair"])

    def _taken(self, annotator: str, claims: Sequence[Claim]) -> set[int]:
        """Questions that others are at work on, as many of them as are still wanted."""
        busy: dict[int, set[str]] = {}
        for query, other, _ in claims:
            if other != annotator and other not in self._answers.get(query, {}):
                busy.setdefault(query, set()).add(other)
        return {
            number
            for number, others in busy.items()
            if len(self._answers[number]) + len(others) >= self.questions[number].wanted
        }

    def _person(self, annotator: str) -> _Person:
        return self._people.get(annotator) or _Person()

    def _put(self, number: int, annotator: str) -> None:
        """Note what is now on top of one person's events about one question."""
        event, person = self.event_of(number, annotator), self._person(annotator)
        by_kind: Mapping[str, dict[int, Event]] = {
            "answer": person.answered,
            "skip": person.skipped,
        }
        for kind, events in by_kind.items():
            events.pop(number, None)
            if event is not None and event.kind == kind:
                events[number] = event
        self._answers[number].pop(annotator, None)
        if number in person.answered:
            self._answers[number][annotator] = person.answered[number]
        self._settle(number)

    def _settle(self, number: int) -> None:
        """Note whether a question has all its answers."""
        answers = self._answers.setdefault(number, {})
        is_open = len(answers) < self.questions[number].wanted
        if is_open:
            self.open.add(number)
        elif number in self.open:
            self.open.remove(number)
            self._num_closed += 1
            if self._num_closed > len(self.open):
                # A set walks over what was removed, too.
                self.open, self._num_closed = set(self.open), 0
        self._changed.add(number)
