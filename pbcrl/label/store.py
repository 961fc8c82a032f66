"""Questions to people and their answers, in one SQLite file per label folder.

Answers are events that are only ever added: an answer, a question put off ("skip"), or an undo of
one of these. So nothing that was acknowledged can be overwritten, and what a person corrected stays
on record. WAL with full sync: an event is on disk when the call that adds it returns. Several
processes may have a store open, such as a training run and the page. What stands and whose turn it
is says `Standing`, to which each reads what was added since; who may ask how much is
`FolderOracle`'s to say.
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, final
from weakref import WeakMethod

from pbcrl.data.label_log import label_from_json, label_to_json, trajectory_digest
from pbcrl.errors import LabelError, StorageError
from pbcrl.label.arrays import from_npz, to_npz
from pbcrl.label.database import Database, check_head, make_database, wait_for_lock
from pbcrl.label.standing import Claim, Event, Kind, Progress, Question, Standing
from pbcrl.storage import (
    corrupt,
    make_folder,
    open_regular,
    unreadable,
    unwritable,
    write_atomically,
)
from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Trajectory,
    check_stretches,
    stretches_of,
)

STORE = "labels.sqlite"
"""The store's file in a label folder."""
INTRO = "intro.md"
"""A file there in which somebody has written what counts as unsafe, in Markdown."""

_APPLICATION, _VERSION = 0x7062636C, 2  # "pbcl"
_CLAIM_SECONDS = 900.0  # after so long without a sign of life, a question goes to somebody else
_MAX_INTRO = 65_536  # bytes
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,64}")

_QUERIES = """(
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('pair', 'batch', 'grid')),
    members TEXT NOT NULL, wanted INTEGER NOT NULL CHECK (wanted >= 1), time REAL NOT NULL)"""

# The answer about a batch is in `first_safe`, that about a grid in `many`, a list in JSON, as are
# the stretches that are marked in both members of a pair; the other columns are NULL. The views are
# for other programs: `Standing` says the same, without looking at every event each time.
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
_VERSION_1 = _SCHEMA.replace(", 'grid'", "").replace(", many TEXT", "")  # it had no grids

_UPGRADE = f"""
CREATE TABLE newer {_QUERIES};
INSERT INTO newer SELECT id, digest, kind, members, wanted, time FROM queries;
DROP TABLE queries;
ALTER TABLE newer RENAME TO queries;
ALTER TABLE events ADD COLUMN many TEXT
"""

_ANSWERED_BY = {"pair": Label, "batch": BatchLabel, "grid": GridLabel}


class ConflictError(LabelError):
    """An answer came to a question that the same person has answered elsewhere in the meantime."""


def contradiction(label: AnyLabel) -> str | None:
    """Say in which way an answer contradicts itself, or None if it does not."""
    if not isinstance(label, Label):
        return None
    safe = label.first_safe, label.second_safe
    for side, is_safe, marked in zip(("left", "right"), safe, label.unsafe, strict=True):
        if is_safe == 0 and marked == ():
            return (
                f"{side} is unsafe, yet each of its steps is safe: mark the unsafe ones, or leave "
                "its marks out (None)"
            )
    safer = {(1.0, 0.0, 1.0): ("left", "right"), (0.0, 1.0, 0.0): ("right", "left")}
    found = safer.get((label.preference, *safe))
    if found is None:
        return None
    return f"{found[0]} is safer, yet it is unsafe and {found[1]} is safe: that cannot be"


def checked_name(annotator: str) -> str:
    """Return an annotator's name as it is kept: without spaces around it.

    Raises:
        ValueError: If it is empty, longer than 60 characters, or holds what cannot be printed.
    """
    name = annotator.strip(" ")
    if not 1 <= len(name) <= 60 or not name.isprintable():
        raise ValueError(
            f"an annotator's name has 1 to 60 printable characters, got {annotator[:80]!r}; choose "
            "a shorter one, or one without line breaks"
        )
    return name


def read_intro(folder: str | os.PathLike[str]) -> str:
    """Return what counts as unsafe, in the words of whoever asks: the folder's intro.md, or "".

    Raises:
        StorageError: If it cannot be read, or is a link: that may lead anywhere.
    """
    path = Path(folder) / INTRO
    try:
        with open_regular(path, follow_links=False) as file:
            data = file.read(_MAX_INTRO + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise unreadable(path, error) from error
    text = data[:_MAX_INTRO].decode("utf-8", "replace")
    if len(data) > _MAX_INTRO:
        text += f"\n\n**Here {INTRO} is cut off, after {_MAX_INTRO} bytes.**\n"
    return text


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
        self._place = self.path.absolute()  # whatever the working folder becomes
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
        keep = WeakMethod(self._keep_answers)  # or the file would stay open until a cycle is found
        self._db = Database(self.path, keep=lambda: (method := keep()) and method())
        self.close = self._db.close
        """Close the file; a second call does nothing."""
        self._standing = Standing()
        self._newest: tuple[Any, ...] = ()  # the row of the event that was read last
        self._version: int | None = None  # of the file, as far as others wrote it, when it was read
        self._born: dict[tuple[Any, ...], float] = {}  # claims, and when they were first seen
        self._kept: Path | None = None  # the answers, when the file has lost some
        try:
            self._db.check(application=_APPLICATION, schemas={1: _VERSION_1, _VERSION: _SCHEMA})
            self._db.upgrade(_UPGRADE, version=_VERSION)
            self._stand()
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

        The questions of the run that asked last are answered first, those that it asks again among
        them: it waits, others may have ended.

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
                if digest not in new and not self.has_trajectory(digest):
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
                # Again with a new rowid: the highest is that of the run that asked last.
                db.execute("INSERT OR REPLACE INTO asked VALUES (?, ?)", (run, number))
                numbers.append(number)
            self._version = None  # what oneself has asked does not count as the file's change
        return numbers

    def intro(self) -> str:
        """`read_intro` of the folder."""
        return read_intro(self.folder)

    def questions(self) -> list[Question]:
        """All of them, in the order of asking."""
        with self._db.lock:
            return list(self._stand().questions.values())

    def question(self, number: int) -> Question:
        """One of them.

        Raises:
            LabelError: If there is none of this number.
        """
        with self._db.lock:
            questions = self._stand().questions
            if number not in questions:
                raise LabelError(
                    f"an answer belongs to a question of its folder, but {self.folder} has no "
                    f"question {number}; it has {len(questions)}"
                )
            return questions[number]

    def asked(self, run: str) -> list[Question]:
        """What a run has asked so far, in this process or an earlier one."""
        rows = self._db.rows("SELECT query FROM asked WHERE run = ? ORDER BY query", (run,))
        with self._db.lock:
            questions = self._stand().questions
            return [questions[number] for (number,) in rows]

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

    def trajectories(self, *, after: int, most: int = 1000) -> list[tuple[int, str, bool]]:
        """Those with the next numbers, in the order in which they came, `most` of them at most.

        Returns:
            Number, digest, and whether somebody said how to draw it, of each.
        """
        return self._db.rows(
            "SELECT rowid, digest, replay IS NOT NULL FROM trajectories WHERE rowid > ? "
            "ORDER BY rowid LIMIT ?",
            (after, most),
        )

    def has_trajectory(self, digest: str) -> bool:
        """Whether it is shown in a question; does not read it."""
        return bool(self._db.rows("SELECT 1 FROM trajectories WHERE digest = ?", (digest,)))

    def has_replay(self, digest: str) -> bool:
        """Whether somebody said how to draw a trajectory; does not read it."""
        found = "SELECT 1 FROM trajectories WHERE digest = ? AND replay IS NOT NULL"
        return bool(self._db.rows(found, (digest,)))

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
            token: Of whoever sends it: the same event is added once, however often it is sent.

        Returns:
            The event's number.

        Raises:
            ConflictError: If the person's newest event about this question is not `replaces`.
            LabelError: If there is no such question, or the answer is none to it, or contradicts
                itself, or another event came with this token.
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
            if row := _sent(db, token):
                _, number, *content = row
                _check_sent_again(token, content, [annotator, "undo", None, None, None, None])
                return int(number)
            newest = self._stand().newest_of(annotator)
            if newest is None:
                return None
            nothing = (None, None, None)
            values = (token, newest.query, annotator, "undo", *nothing, newest.id, None)
            _insert(db, values, None)
        self._catch_up()
        return newest.query

    def events(self, *, annotator: str | None = None) -> list[Event]:
        """What stands, newest last, of one person or of all."""
        with self._db.lock:
            return self._stand().events(annotator)

    def event_of(self, number: int, annotator: str) -> Event | None:
        """What stands of one person about one question, if anything does."""
        with self._db.lock:
            return self._stand().event_of(number, annotator)

    def labels(self) -> dict[int, AnyLabel]:
        """The `combined` label of each question that as many people have answered as wanted."""
        with self._db.lock:
            return self._stand().labels()

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
        mine = (checked_name(annotator), tab)
        with self._db.transaction(durable=False) as db:
            _, found = self._stand().open_for(*mine, self._claims(), most=1)
            for question in found:
                db.execute(
                    "DELETE FROM claims WHERE annotator = ? AND tab = ? AND query != ?",
                    (*mine, question.id),
                )
                self._claim(question.id, mine)
                return question
            db.execute("DELETE FROM claims WHERE annotator = ? AND tab = ?", mine)
            return None

    def claim(self, number: int, annotator: str, *, tab: str = "") -> None:
        """Keep a question for a person who has turned back to it, in place of the present one."""
        mine = (checked_name(annotator), tab)
        with self._db.transaction(durable=False) as db:
            db.execute("DELETE FROM claims WHERE annotator = ? AND tab = ?", mine)
            self._claim(number, mine)

    def open_for(self, annotator: str, *, tab: str = "") -> list[Question]:
        """All questions that a person may be asked now, in the order in which they would come."""
        with self._db.lock:
            return self._stand().open_for(checked_name(annotator), tab, self._claims())[1]

    def progress(self, annotator: str, *, tab: str = "", most: int = 0) -> Progress:
        """How far a person is, and the `most` questions that they would be asked first."""
        with self._db.lock:
            claims = self._claims()
            return self._stand().progress(checked_name(annotator), tab, claims, most=most)

    def seconds_left(self, numbers: Iterable[int], *, pairs: int = 0) -> float:
        """See `Standing.seconds_left`."""
        with self._db.lock:
            return self._stand().seconds_left(numbers, pairs=pairs)

    @property
    def num_questions(self) -> int:
        """How many there are, answered or not."""
        with self._db.lock:
            return len(self._stand().questions)

    def num_open(self) -> int:
        """Questions that fewer people have answered than wanted."""
        with self._db.lock:
            return len(self._stand().open)

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
            if row := _sent(db, token):
                event, *content = row  # the acknowledgement was lost
                _check_sent_again(token, content, [number, annotator, kind, *values])
                return int(event)
            newest = self._stand().event_of(number, annotator)
            if (newest and newest.id) != replaces:
                raise ConflictError(
                    f"{annotator} has answered question {number} elsewhere in the meantime, in "
                    "another window for instance; look at that answer, and correct it if need be"
                )
            *three, many = values
            event = _insert(db, (token, number, annotator, kind, *three, None, seconds), many)
            db.execute("DELETE FROM claims WHERE query = ? AND annotator = ?", (number, annotator))
        self._catch_up()
        return event

    def _catch_up(self) -> None:
        """What is acknowledged is known from here on, whatever happens to the file."""
        with self._db.lock:  # or two threads would apply the same event
            self._stand()

    def _claims(self) -> list[Claim]:
        """Who looks at what; what nobody gave a sign of for long is removed.

        Its age is what this process has seen of it, since a clock may be set: only of a claim that
        it finds does the clock say how old it is, if that makes sense.
        """
        now, rows = time.monotonic(), self._db.rows("SELECT * FROM claims")
        born = {row: now - max(0.0, time.time() - row[-1]) for row in rows}
        self._born = born | {row: self._born[row] for row in rows if row in self._born}
        stale = {row for row, when in self._born.items() if now - when > _CLAIM_SECONDS}
        for row in stale:
            self._db.rows(
                "DELETE FROM claims WHERE query = ? AND annotator = ? AND tab = ? AND time = ?", row
            )
        return [Claim(*row[:3]) for row in rows if row not in stale]

    def _claim(self, number: int, mine: tuple[str, str]) -> None:
        row = (number, *mine, time.time())
        self._db.rows("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)", row)
        self._born[row] = time.monotonic()

    def _stand(self) -> Standing:
        """What stands by now; who asks holds the lock for as long as they look at it.

        Raises:
            StorageError: If what was read before is not there any more.
            CorruptFileError: If a number is not what was written, which SQLite does not see.
        """
        known = self._newest
        rows = self._db.rows(
            f"SELECT id, {_EVENT}, many, crc32 FROM events WHERE id >= ? ORDER BY id",
            known[:1] or (0,),
        )
        if known and rows[:1] != [known]:
            raise self._taken_back(f"event {known[0]}")
        try:
            self._read_questions()  # after the events, so that none is about an unknown one
            for row in rows[bool(known) :]:
                number, *event, many, crc32 = row
                if _crc32(event, many) != crc32:
                    raise ValueError(f"the event {event[0]} does not match its crc32")
                self._newest = row
                _, query, annotator, kind, *values, undone, seconds, when = event
                if kind == "undo":
                    self._standing.take_back(undone, annotator)
                else:
                    label = _label(self._standing.questions[query].kind, values, many)
                    self._standing.add(Event(number, query, annotator, kind, label, seconds, when))
        except StorageError:
            raise
        except Exception as error:  # a damaged row may hold anything
            raise corrupt(self.path, str(error)) from error
        return self._standing

    def _read_questions(self) -> None:
        ((version,),) = self._db.rows("PRAGMA data_version")
        if version == self._version:
            return
        known = self._standing.questions
        wanted = dict(self._db.rows("SELECT id, wanted FROM queries"))
        if missing := known.keys() - wanted.keys():
            raise self._taken_back(f"question {min(missing)}")
        for question in list(known.values()):
            if wanted[question.id] != question.wanted:
                self._standing.ask(replace(question, wanted=wanted[question.id]))
        for number, kind, digest, members, count in self._db.rows(
            "SELECT id, kind, digest, members, wanted FROM queries WHERE id > ? ORDER BY id",
            (next(reversed(known), 0),),
        ):
            question = Question(number, kind, digest, tuple(json.loads(members)), count)
            if _digest(kind, question.members) != digest:
                raise ValueError(f"question {number} is not what its digest says")
            self._standing.ask(question)
        last = "SELECT run FROM asked ORDER BY rowid DESC LIMIT 1"
        rows = self._db.rows(f"SELECT query FROM asked WHERE run = ({last})")
        self._standing.first = {number for (number,) in rows}
        self._version = version

    def _taken_back(self, what: str) -> StorageError:
        return StorageError(
            f"what is in a store stays there, but {what} has gone from {self.path}, which was put "
            f"back to an earlier state while it was open; all that was acknowledged is in "
            f"{self._keep_answers()}: end what has the store open, and start again"
        )

    def _keep_answers(self) -> Path:
        """Write the answers that stand to a file, once, for a person to see; return its path."""
        if self._kept is None:
            when = time.strftime("%Y%m%d-%H%M%S")
            path = self._place.with_name(f"labels-{when}.jsonl")
            lines = [
                json.dumps(
                    {
                        "question": self._standing.questions[event.query].name,
                        "annotator": event.annotator,
                        "kind": event.kind,
                        **label_to_json(event.label),
                        "seconds": event.seconds,
                        "time": event.time,
                    }
                )
                for event in self._standing.events()
            ]
            write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
            self._kept = path
        return self._kept


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

    What is written to the file is `tell_pairs_to_come`'s.

    Args:
        folder: The label folder.
        by: The kind.
        patience: Seconds to try for. The page looks now and then whether a run is at work, by
            holding the folder for a moment, which must not turn away a run that starts just then.

    Raises:
        StorageError: If another one is at work there, or the folder cannot be written.
    """
    try:
        # Without a buffer: what a full disk has refused is not tried again when it is closed.
        file = open(folder / f".{by}.lock", "ab", buffering=0)  # noqa: SIM115, open while held
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


def tell_pairs_to_come(held: IO[bytes], number: int | None) -> None:
    """Let the page know how many pairs the run that holds a folder may still ask; None: not known.

    Args:
        held: Of `hold_folder`.
        number: At least 0.
    """
    with suppress(OSError):  # a full disk; the page says less, then
        held.truncate(0)
        held.write(b"" if number is None else b"%d" % number)


def read_pairs_to_come(folder: Path) -> int | None:
    """What `tell_pairs_to_come` has told last; None if it is not known."""
    with suppress(OSError), open_regular(folder / ".oracle.lock") as file:
        found = file.read(9)
        return int(found) if found.isdigit() else None
    return None


def _row(label: AnyLabel) -> tuple[Any, ...]:
    """The columns preference, first_safe, second_safe and many."""
    values = tuple(label_to_json(label).values())
    if isinstance(label, GridLabel):
        return None, None, None, json.dumps(values[0])
    if isinstance(label, BatchLabel):
        return None, *values, None, None
    return *values[:3], None if label.unsafe == (None, None) else json.dumps(label.unsafe)


def _label(kind: Kind, columns: Sequence[Any], many: str | None) -> AnyLabel:
    """The inverse of `_row`, about a question of this kind."""
    if kind == "grid":  # of one that was put off, nothing is given
        return label_from_json({"grid_safe": json.loads(many or "[null]")})
    preference, *safe = [math.nan if value is None else value for value in columns]
    if kind == "batch":
        return BatchLabel(safe[0])
    first, second = map(stretches_of, json.loads(many or "[null, null]"))
    return Label(preference, safe[0], safe[1], first, second)


def _sent(db: sqlite3.Connection, token: str) -> Sequence[Any] | None:
    """What came with a token: number, query, annotator, kind and the columns of `_row`."""
    columns = "id, query, annotator, kind, preference, first_safe, second_safe, many"
    found: Sequence[Any] | None = db.execute(
        f"SELECT {columns} FROM events WHERE token = ?", (token,)
    ).fetchone()
    return found


def _check_sent_again(token: str, before: Sequence[Any], now: Sequence[Any]) -> None:
    if before != now:
        raise LabelError(
            f"a token names one event, but {token} came with another one before ({before}) than "
            f"now ({now}); make a new token for each event"
        )


def _checked_token(token: str | None) -> str:
    if token is None:
        return uuid.uuid4().hex
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a token has 1 to 64 letters, digits, - and _, got {token[:80]!r}")
    return token
