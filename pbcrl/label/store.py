"""Questions to people and their answers, in one SQLite file per label folder.

Answers are events that are only ever added: an answer, a question put off ("skip"), or an undo of
one of these. So nothing that was acknowledged can be overwritten, and what a person corrected stays
on record. WAL with full sync: an event is on disk when the call that adds it returns. Several
processes may have a store open, such as a training run and the page. What an answer means for
training is `combined`'s to say; who may ask how much is `FolderOracle`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sqlite3
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, final

import numpy as np

from pbcrl.data.label_log import label_from_json, label_to_json, trajectory_digest
from pbcrl.errors import LabelError, StorageError
from pbcrl.label.arrays import from_npz, to_npz
from pbcrl.label.database import Database, check_head, make_database, wait_for_lock
from pbcrl.storage import corrupt, make_folder, unwritable
from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Stretches,
    Trajectory,
    check_stretches,
    stretches_of,
    unsafe_steps,
    unsafe_stretches,
)

STORE = "labels.sqlite"
"""The store's file in a label folder."""

Kind = Literal["pair", "batch", "grid"]

_APPLICATION, _VERSION = 0x7062636C, 2  # "pbcl"
_CLAIM_SECONDS = 900.0  # after so long without a sign of life, a question goes to somebody else
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,64}")

_QUERIES = """(
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('pair', 'batch', 'grid')),
    members TEXT NOT NULL, wanted INTEGER NOT NULL CHECK (wanted >= 1), time REAL NOT NULL)"""

# The answer about a batch is in `first_safe`, that about a grid in `many`, a list in JSON, as are
# the stretches that are marked in both members of a pair; the other columns are NULL.
_SCHEMA = f"""
CREATE TABLE trajectories (digest TEXT PRIMARY KEY, arrays BLOB NOT NULL, replay BLOB);
CREATE TABLE queries {_QUERIES};
CREATE TABLE asked (
    run TEXT NOT NULL, query INTEGER NOT NULL REFERENCES queries, PRIMARY KEY (run, query));
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL UNIQUE,
    query INTEGER NOT NULL REFERENCES queries, annotator TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('answer', 'skip', 'undo')),
    preference REAL, first_safe REAL, second_safe REAL,
    undone INTEGER UNIQUE REFERENCES events, seconds REAL, time REAL NOT NULL,
    crc32 INTEGER NOT NULL, many TEXT);
CREATE TABLE claims (
    query INTEGER NOT NULL REFERENCES queries, annotator TEXT NOT NULL, tab TEXT NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (query, annotator, tab));
CREATE INDEX events_of_query ON events (query, annotator);
CREATE VIEW standing AS SELECT * FROM events WHERE kind != 'undo'
    AND id NOT IN (SELECT undone FROM events WHERE undone IS NOT NULL);
CREATE VIEW current AS SELECT * FROM standing WHERE id IN
    (SELECT max(id) FROM standing GROUP BY query, annotator);
"""


_UPGRADE = f"""
CREATE TABLE newer {_QUERIES};
INSERT INTO newer SELECT id, digest, kind, members, wanted, time FROM queries;
DROP TABLE queries;
ALTER TABLE newer RENAME TO queries;
ALTER TABLE events ADD COLUMN many TEXT
"""
"""From version 1, which had no grids."""

_ANSWERED_BY = {"pair": Label, "batch": BatchLabel, "grid": GridLabel}


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


class ConflictError(LabelError):
    """An answer came to a question that the same person has answered elsewhere in the meantime."""


def combined(labels: Sequence[AnyLabel]) -> AnyLabel:
    """Make one label of those that several people gave to one question.

    The preference is their mean: the cross-entropy is linear in it, so that training on the mean is
    training on all of them. A safety label, and an answer about a batch or in a grid, is what most
    of them say, and not given if as many say the opposite. "Can't tell" does not count. A step is
    marked if more than half of those mark it who were to mark the steps.

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
    return Label(
        sum(preferences) / len(preferences) if preferences else math.nan,
        majority(given("first_safe")),
        majority(given("second_safe")),
        _most_marked(one.first_unsafe for one in labels if isinstance(one, Label)),
        _most_marked(one.second_unsafe for one in labels if isinstance(one, Label)),
    )


def _most_marked(given: Iterable[Stretches | None]) -> Stretches | None:
    """The steps that more than half of those who marked any trajectory marked."""
    known = [one for one in given if one is not None]
    if not known:
        return None
    steps = max([0, *(end for one in known for _, end in one)])
    votes = np.sum([unsafe_steps(one, steps) for one in known], axis=0)
    return unsafe_stretches(votes > len(known) / 2)


def contradiction(label: AnyLabel) -> str | None:
    """Say in which way an answer contradicts itself, or None if it does not."""
    if not isinstance(label, Label):
        return None
    safer = {(1.0, 0.0, 1.0): ("left", "right"), (0.0, 1.0, 0.0): ("right", "left")}
    found = safer.get((label.preference, label.first_safe, label.second_safe))
    if found is None:
        return None
    return f"{found[0]} is safer, yet it is unsafe and {found[1]} is safe: that cannot be"


def checked_name(annotator: str) -> str:
    """Return an annotator's name as it is kept.

    Raises:
        ValueError: If it is empty, longer than 60 characters, or holds what cannot be printed.
    """
    name = " ".join(annotator.split(" ")).strip()
    if not 1 <= len(name) <= 60 or not name.isprintable():
        raise ValueError(
            f"an annotator's name has 1 to 60 printable characters, got {annotator[:80]!r}; choose "
            "a shorter one, or one without line breaks"
        )
    return name


@final
class LabelStore:
    """The questions and answers of a label folder.

    Args:
        folder: The label folder.
        create: Make the folder and the store if they are missing.

    Raises:
        StorageError: If there is no store, or it cannot be written.
        CorruptFileError: If the store is damaged.
        FormatVersionError: If another version of the format wrote it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, create: bool = False) -> None:
        self.folder = Path(folder)
        self.path = self.folder / STORE
        is_there = self.path.exists() or self.path.is_symlink()
        if not (is_there or create):
            raise StorageError(
                f"a label folder holds {STORE}, but {self.folder} has none; name the folder of a "
                "FolderOracle, or of --label-folder"
            )
        try:
            make_folder(self.folder)
            if is_there:
                check_head(self.path)
            # A lock, since two processes may open a new folder at once.
            with open(self.folder / ".store.lock", "ab") as opening:
                refusal = f"{opening.name} has been locked for 30 s; end the process that holds it"
                wait_for_lock(opening, refusal, seconds=30)
                self._open()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _open(self) -> None:
        if not self.path.exists():
            make_database(self.path, _SCHEMA, application=_APPLICATION, version=_VERSION)
        self._db = Database(self.path)
        self.close = self._db.close
        """Close the file; a second call does nothing."""
        try:
            self._db.upgrade(_UPGRADE, application=_APPLICATION, version=_VERSION)
            self._db.check(application=_APPLICATION, version=_VERSION)
            self._check_rows()
            self._db.sync_fully()
        except BaseException:
            self.close()
            raise

    # -- Questions ---------------------------------------------------------------------------------

    def ask(
        self,
        questions: Sequence[tuple[Kind, Sequence[Trajectory]]],
        *,
        run: str = "",
        wanted: int = 1,
        replays: Mapping[str, bytes] | None = None,
    ) -> list[int]:
        """Add those questions that are not there yet; return the numbers of all.

        Args:
            questions: Each with its trajectories; their true costs are not kept.
            run: Who asks; see `asked`.
            wanted: How many people are to answer them, or more if another run wanted more.
            replays: How to draw trajectories, by digest: `Replay.to_bytes`.

        Raises:
            StorageError: If they cannot be written; none is added then.
        """
        new: dict[str, bytes] = {}
        rows = []
        for kind, members in questions:
            digests = [trajectory_digest(one) for one in members]
            for digest, one in zip(digests, members, strict=True):
                if digest not in new and not self._has_trajectory(digest):
                    new[digest] = to_npz(one)
            rows.append((question_digest(kind, members), kind, json.dumps(digests)))
        with self._db.transaction() as db:
            for digest, arrays in new.items():
                db.execute(
                    "INSERT OR IGNORE INTO trajectories VALUES (?, ?, NULL)", (digest, arrays)
                )
            for digest, replay in (replays or {}).items():
                db.execute(
                    "UPDATE trajectories SET replay = ? WHERE digest = ? AND replay IS NULL",
                    (replay, digest),
                )
            numbers = []
            for row in rows:
                db.execute(
                    "INSERT OR IGNORE INTO queries (digest, kind, members, wanted, time) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (*row, wanted, time.time()),
                )
                db.execute(
                    "UPDATE queries SET wanted = max(wanted, ?) WHERE digest = ?", (wanted, row[0])
                )
                ((number,),) = db.execute("SELECT id FROM queries WHERE digest = ?", row[:1])
                db.execute("INSERT OR IGNORE INTO asked VALUES (?, ?)", (run, number))
                numbers.append(number)
        return numbers

    def questions(self) -> list[Question]:
        """All of them, in the order of asking."""
        rows = self._db.rows("SELECT id, kind, digest, members, wanted FROM queries ORDER BY id")
        return [_question(row) for row in rows]

    def question(self, number: int) -> Question:
        """One of them.

        Raises:
            LabelError: If there is none of this number.
        """
        rows = self._db.rows(
            "SELECT id, kind, digest, members, wanted FROM queries WHERE id = ?", (number,)
        )
        if not rows:
            raise LabelError(
                f"an answer belongs to a question of its folder, but {self.folder} has no question "
                f"{number}; it has {len(self.questions())}"
            )
        return _question(rows[0])

    def asked(self, run: str) -> list[Question]:
        """What a run has asked so far, in this process or an earlier one."""
        rows = self._db.rows(
            "SELECT id, kind, digest, members, wanted FROM queries JOIN asked ON query = id "
            "WHERE run = ? ORDER BY id",
            (run,),
        )
        return [_question(row) for row in rows]

    def trajectory(self, digest: str) -> Trajectory:
        """One that is shown, without true costs.

        Raises:
            CorruptFileError: If it is missing or damaged.
        """
        rows = self._db.rows("SELECT arrays FROM trajectories WHERE digest = ?", (digest,))
        where = f"trajectory {digest}"
        if not rows:
            raise corrupt(self.path, f"{where} is missing")
        try:
            found = from_npz(rows[0][0])
        except Exception as error:  # the bytes may be anything, and so may NumPy's complaints
            raise corrupt(self.path, f"{where} is damaged ({error!r})") from error
        if trajectory_digest(found) != digest:
            raise corrupt(self.path, f"{where} is not what was written")
        return found

    def replay(self, digest: str) -> bytes | None:
        """How to draw a trajectory, if somebody said so: for `Replay.from_bytes`."""
        rows = self._db.rows("SELECT replay FROM trajectories WHERE digest = ?", (digest,))
        found: bytes | None = rows[0][0] if rows else None
        return found

    # -- Answers -----------------------------------------------------------------------------------

    def answer(
        self,
        number: int,
        label: AnyLabel,
        *,
        annotator: str,
        replaces: int | None = None,
        seconds: float | None = None,
        token: str | None = None,
    ) -> int:
        """Add an answer; it is on disk when this returns.

        Args:
            number: The question's.
            label: The answer, of the type that `Question` says.
            annotator: Who gives it.
            replaces: The number of the same person's event that it corrects; None if it is the
                first answer.
            seconds: What the person needed.
            token: Of whoever sends it: the same one is added once, however often it is sent.

        Returns:
            The event's number.

        Raises:
            ConflictError: If the person's newest event about this question is not `replaces`.
            LabelError: If there is no such question, or the answer is none to it, or contradicts
                itself.
            ValueError: If what is marked lies outside of its trajectory.
            StorageError: If it cannot be written.
        """
        question = self.question(number)
        expected = _ANSWERED_BY[question.kind]
        if not isinstance(label, expected):
            raise LabelError(
                f"question {number} is about a {question.kind} and answered by a "
                f"{expected.__name__}, got {label}"
            )
        if isinstance(label, GridLabel) and len(label.safe) != len(question.members):
            raise LabelError(
                f"question {number} shows {len(question.members)} clips, but the answer is about "
                f"{len(label.safe)}; answer each of them"
            )
        if isinstance(label, Label):
            for digest, marked in zip(question.members, label.unsafe, strict=True):
                if marked is not None:
                    check_stretches(marked, steps=len(self.trajectory(digest)))
        if found := contradiction(label):
            raise LabelError(f"{found}; answer question {number} once more")
        return self._add(number, annotator, "answer", _row(label), replaces, seconds, token)

    def skip(
        self,
        number: int,
        *,
        annotator: str,
        replaces: int | None = None,
        seconds: float | None = None,
        token: str | None = None,
    ) -> int:
        """Put a question off: the person gets it again after all others. Otherwise as `answer`."""
        self.question(number)
        nothing = (None, None, None, None)
        return self._add(number, annotator, "skip", nothing, replaces, seconds, token)

    def undo(self, *, annotator: str, token: str | None = None) -> int | None:
        """Take back the person's newest event that stands; return its question, None if none does.

        What it had replaced stands again. Sent again with the same token, it does nothing more.
        """
        annotator, token = checked_name(annotator), _checked_token(token)
        with self._db.transaction() as db:
            for (number,) in db.execute("SELECT query FROM events WHERE token = ?", (token,)):
                return int(number)
            newest = db.execute(
                "SELECT id, query FROM standing WHERE annotator = ? ORDER BY id DESC LIMIT 1",
                (annotator,),
            ).fetchone()
            if newest is None:
                return None
            nothing = (None, None, None)
            _insert(db, (token, newest[1], annotator, "undo", *nothing, newest[0], None), None)
            return int(newest[1])

    def events(self, *, annotator: str | None = None) -> list[Event]:
        """What stands, newest last, of one person or of all."""
        rows = self._db.rows(
            f"{_CURRENT} WHERE ? IS NULL OR annotator = ? ORDER BY current.id",
            (annotator, annotator),
        )
        return [_event(row) for row in rows]

    def event_of(self, number: int, annotator: str) -> Event | None:
        """What stands of one person about one question, if anything does."""
        rows = self._db.rows(f"{_CURRENT} WHERE query = ? AND annotator = ?", (number, annotator))
        return _event(rows[0]) if rows else None

    def labels(self) -> dict[int, AnyLabel]:
        """The `combined` label of each question that as many people have answered as wanted."""
        given: dict[int, list[AnyLabel]] = {}
        for event in self.events():
            if event.kind == "answer":
                given.setdefault(event.query, []).append(event.label)
        wanted = dict(self._db.rows("SELECT id, wanted FROM queries"))
        return {n: combined(labels) for n, labels in given.items() if len(labels) >= wanted[n]}

    @property
    def num_events(self) -> int:
        """How many events were ever added; if it has not changed, neither have the labels."""
        ((count,),) = self._db.rows("SELECT coalesce(max(id), 0) FROM events")
        return int(count)

    # -- Whose turn it is --------------------------------------------------------------------------

    def next_for(self, annotator: str, *, tab: str = "") -> Question | None:
        """The question that a person should answer now, kept for them until they have.

        Nobody else is asked it meanwhile, unless it wants several people: as long as the person
        gives a sign of life every 15 minutes. The same one comes again if this is called again.

        Args:
            annotator: Who.
            tab: Of several windows of the same person; each gets another question.
        """
        annotator, now = checked_name(annotator), time.time()
        mine = (annotator, tab)
        with self._db.transaction() as db:
            db.execute("DELETE FROM claims WHERE time < ?", (now - _CLAIM_SECONDS,))
            rows = db.execute(_OPEN_FOR, {"annotator": annotator, "tab": tab}).fetchall()
            if not rows:
                db.execute("DELETE FROM claims WHERE annotator = ? AND tab = ?", mine)
                return None
            question = _question(rows[0])
            db.execute(
                "DELETE FROM claims WHERE annotator = ? AND tab = ? AND query != ?",
                (*mine, question.id),
            )
            db.execute(
                "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)", (question.id, *mine, now)
            )
            return question

    def claim(self, number: int, annotator: str, *, tab: str = "") -> None:
        """Keep a question for a person who has turned back to it, in place of the present one."""
        mine = (checked_name(annotator), tab)
        with self._db.transaction() as db:
            db.execute("DELETE FROM claims WHERE annotator = ? AND tab = ?", mine)
            db.execute("INSERT INTO claims VALUES (?, ?, ?, ?)", (number, *mine, time.time()))

    def open_for(self, annotator: str, *, tab: str = "") -> list[Question]:
        """All questions that a person may be asked now, in the order in which they would come."""
        rows = self._db.rows(_OPEN_FOR, {"annotator": checked_name(annotator), "tab": tab})
        return [_question(row) for row in rows]

    @property
    def num_questions(self) -> int:
        """How many there are, answered or not."""
        ((count,),) = self._db.rows("SELECT count(*) FROM queries")
        return int(count)

    def num_open(self) -> int:
        """Questions that fewer people have answered than wanted."""
        ((count,),) = self._db.rows(
            "SELECT count(*) FROM queries LEFT JOIN (SELECT query, count(*) AS number FROM current "
            "WHERE kind = 'answer' GROUP BY query) ON query = id WHERE wanted > coalesce(number, 0)"
        )
        return int(count)

    # -- Inside ------------------------------------------------------------------------------------

    def _add(
        self,
        number: int,
        annotator: str,
        kind: str,
        values: tuple[Any, ...],
        replaces: int | None,
        seconds: float | None,
        token: str | None,
    ) -> int:
        annotator, token = checked_name(annotator), _checked_token(token)
        if seconds is not None and not 0 <= seconds < 1e7:
            raise ValueError(f"an answer takes between 0 and 1e7 seconds, got {seconds}")
        seconds = None if seconds is None else float(seconds)  # as SQLite gives it back
        with self._db.transaction() as db:
            for (event,) in db.execute("SELECT id FROM events WHERE token = ?", (token,)):
                return int(event)  # sent again, since the acknowledgement was lost
            newest = db.execute(
                "SELECT max(id) FROM current WHERE query = ? AND annotator = ?", (number, annotator)
            ).fetchone()[0]
            if newest != replaces:
                raise ConflictError(
                    f"{annotator} has answered question {number} elsewhere in the meantime, in "
                    "another window for instance; look at that answer, and correct it if need be"
                )
            *three, many = values
            event = _insert(db, (token, number, annotator, kind, *three, None, seconds), many)
            db.execute("DELETE FROM claims WHERE query = ? AND annotator = ?", (number, annotator))
            return event

    def _has_trajectory(self, digest: str) -> bool:
        return bool(self._db.rows("SELECT 1 FROM trajectories WHERE digest = ?", (digest,)))

    def _check_rows(self) -> None:
        """SQLite sees what is no database, but not that a number in it is another one."""
        try:
            for *event, many, crc32 in self._db.rows(f"SELECT {_EVENT}, many, crc32 FROM events"):
                if _crc32(event, many) != crc32:
                    raise ValueError(f"the event {event[0]} does not match its crc32")
            for question in self.questions():
                if _digest(question.kind, question.members) != question.digest:
                    raise ValueError(f"question {question.id} is not what its digest says")
        except StorageError:
            raise
        except Exception as error:  # a damaged row may hold anything
            raise corrupt(self.path, str(error)) from error


_OPEN_FOR = """
WITH given AS MATERIALIZED (SELECT id, query, annotator, kind FROM current),
others AS (SELECT query, count(*) AS number FROM given
    WHERE kind = 'answer' AND annotator != :annotator GROUP BY query),
busy AS (SELECT c.query, count(DISTINCT c.annotator) AS number FROM claims c
    LEFT JOIN given g ON g.query = c.query AND g.annotator = c.annotator AND g.kind = 'answer'
    WHERE c.annotator != :annotator AND g.id IS NULL GROUP BY c.query),
mine AS (SELECT id, query, kind FROM given WHERE annotator = :annotator),
claimed AS (SELECT query, max(tab = :tab) AS here FROM claims
    WHERE annotator = :annotator GROUP BY query)
SELECT q.id, q.kind, q.digest, q.members, q.wanted FROM queries q
LEFT JOIN others ON others.query = q.id
LEFT JOIN busy ON busy.query = q.id
LEFT JOIN mine ON mine.query = q.id
LEFT JOIN claimed ON claimed.query = q.id
WHERE (mine.id IS NULL OR mine.kind = 'skip')
AND q.wanted > coalesce(others.number, 0) + coalesce(busy.number, 0)
ORDER BY mine.id IS NOT NULL, CASE claimed.here WHEN 1 THEN 0 WHEN 0 THEN 2 ELSE 1 END,
    coalesce(mine.id, 0), q.id
"""
"""First what is under way in this window, last what was put off."""


def question_digest(kind: Kind, members: Sequence[Trajectory]) -> str:
    """Name a question by what it shows and asks; a pair as `query_digest` does."""
    return _digest(kind, [trajectory_digest(one) for one in members])


def _digest(kind: str, members: Sequence[str]) -> str:
    text = "".join(members) if kind == "pair" else f"{kind} " + "".join(members)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_EVENT = "token, query, annotator, kind, preference, first_safe, second_safe, undone, seconds, time"


def _insert(db: sqlite3.Connection, values: tuple[Any, ...], many: str | None) -> int:
    """Add an event with these values, all but the time; return its number."""
    row = (*values, time.time())
    cursor = db.execute(
        f"INSERT INTO events ({_EVENT}, many, crc32) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, many, _crc32(row, many)),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _crc32(event: Sequence[Any], many: str | None) -> int:
    """Of version 1, as far as that had the columns."""
    return zlib.crc32(json.dumps([*event, *([] if many is None else [many])]).encode())


def hold_folder(folder: Path, *, by: str, patience: float = 1.0) -> IO[bytes]:
    """Keep others of a kind, "oracle" or "annotator", out of a folder until the file is closed.

    Args:
        folder: The label folder.
        by: The kind.
        patience: Seconds to try for. The page looks now and then whether a run is at work, by
            holding the folder for a moment, which must not turn away a run that starts just then.

    Raises:
        StorageError: If another one is at work there, or the folder cannot be written.
    """
    try:
        file = open(folder / f".{by}.lock", "ab")  # noqa: SIM115, open as long as it is held
    except OSError as error:
        raise unwritable(folder, error) from error
    refusal = (
        f"a label folder has one {by} at a time, but another one is at work in {folder}; "
        "wait until it has ended, or choose another folder"
    )
    try:
        wait_for_lock(file, refusal, seconds=patience)
    except BaseException:
        file.close()
        raise
    return file


def _row(label: AnyLabel) -> tuple[Any, ...]:
    """The columns preference, first_safe, second_safe and many."""
    values = tuple(label_to_json(label).values())
    if isinstance(label, GridLabel):
        return None, None, None, json.dumps(values[0])
    if isinstance(label, BatchLabel):
        return None, *values, None, None
    return *values[:3], None if label.unsafe == (None, None) else json.dumps(label.unsafe)


_CURRENT = (
    "SELECT current.id, query, annotator, current.kind, seconds, current.time, queries.kind, "
    "many, preference, first_safe, second_safe FROM current JOIN queries ON queries.id = query"
)


def _event(row: Sequence[Any]) -> Event:
    number, query, annotator, kind, seconds, when, about, many, *columns = row
    values = [math.nan if value is None else value for value in columns]
    label: AnyLabel
    if about == "grid":  # of one that was put off, nothing is given
        label = label_from_json({"grid_safe": json.loads(many or "[null]")})
    elif about == "batch":
        label = BatchLabel(values[1])
    else:
        preference, *safe = values
        first, second = map(stretches_of, json.loads(many or "[null, null]"))
        label = Label(preference, safe[0], safe[1], first, second)
    return Event(number, query, annotator, kind, label, seconds, when)


def _question(row: Sequence[Any]) -> Question:
    number, kind, digest, members, wanted = row
    return Question(number, kind, digest, tuple(json.loads(members)), wanted)


def _checked_token(token: str | None) -> str:
    if token is None:
        return uuid.uuid4().hex
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a token has 1 to 64 letters, digits, - and _, got {token[:80]!r}")
    return token
