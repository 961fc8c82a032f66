"""An SQLite file that several threads and processes use, and that loses nothing it acknowledged.

A file appears whole or not at all, is checked when it is opened, and errors of SQLite become those
of this package. Does not depend on what the rows mean.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, final
from weakref import WeakSet, finalize

from pbcrl.data.label_log import lock
from pbcrl.errors import FormatVersionError, StorageError
from pbcrl.storage import (
    corrupt,
    open_regular,
    remove_leftovers,
    sync_folder,
    unreadable,
    unwritable,
)

_PATIENCE = 30  # seconds, with others who write
_MAX_LOG = 1 << 22  # bytes
_OBJECTS = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"


@final
class Database:
    """A file that is open.

    Args:
        path: The file; made if it is missing, but empty: see `make_database`.
        keep: Keeps elsewhere what is known of its contents, as far as that can be, when the file
            turns out to have been overwritten; returns where.
    """

    def __init__(self, path: Path, *, keep: Callable[[], object] = lambda: "no file") -> None:
        self.path = path
        self.lock = threading.RLock()
        """Held while something is done with the file; hold it to do several things in one go."""
        self._db = sqlite3.connect(
            path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        self._place = path.absolute()  # whatever the working folder becomes
        self._file = _identity(self._place)
        self._contents: tuple[int, int] | None = None  # None: not watched, (0, 0): not known
        self._keep = keep
        self._saved: object = None  # where what the file held is, if it is not in its place
        self.close = finalize(self, _close, self._db, self.lock)
        """Close the file; a second call does nothing."""
        self._db.execute("PRAGMA foreign_keys = ON")
        _databases.add(self)

    def is_of(self, path: Path) -> bool:
        """Whether the file of this name is the one that is open here."""
        return self.close.alive and self._file == _identity(path)

    def check(self, *, application: int, schemas: Mapping[int, str]) -> None:
        """Refuse a file that is damaged or somebody else's.

        A trigger, a view or a table of its own could add, change and remove what is written, so
        that the file has what its schema makes and nothing else.

        Args:
            application: Whose file it is.
            schemas: What makes the tables, by version; the last one is the present version.

        Raises:
            CorruptFileError: If it is damaged, or another program's, or has another schema.
            FormatVersionError: If it has another version.
        """
        ((found,),) = self.rows("PRAGMA application_id")
        if found != application:
            raise corrupt(self.path, f"its application id is {found:#x}")
        ((found,),) = self.rows("PRAGMA user_version")
        if found not in schemas:
            raise FormatVersionError(
                f"this pbcrl reads version {[*schemas][-1]} of label stores, but {self.path} has "
                f"version {found}; use the pbcrl that wrote it"
            )
        try:
            self._check_schema(schemas[found])
            ((text,), *_) = self.rows("PRAGMA quick_check(1)")
        except UnicodeDecodeError as error:  # it quotes what is damaged
            raise corrupt(self.path, str(error)) from error
        if text != "ok":
            raise corrupt(self.path, str(text))

    def _check_schema(self, schema: str) -> None:
        with closing(sqlite3.connect(":memory:")) as right:
            right.executescript(schema)
            wanted = {_plain(row) for row in right.execute(_OBJECTS)}
        found = {_plain(row) for row in self.rows(_OBJECTS)}
        for kind, name, _ in sorted(found ^ wanted):
            raise corrupt(self.path, f"the {kind} {name} is not as this package makes it")

    def upgrade(self, statements: str, *, version: int) -> None:
        """Bring a file of the version before to `version`, all or nothing; leave any other alone.

        Args:
            statements: That change the tables, separated by semicolons.
            version: Of the schema that they lead to.

        Raises:
            StorageError: If it cannot be written.
        """
        ((found,),) = self.rows("PRAGMA user_version")
        if found != version - 1:
            return
        self.rows("PRAGMA foreign_keys = OFF")  # or no table that others refer to can be replaced
        with self.transaction() as db:
            for statement in statements.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {version}")
        self.rows("PRAGMA foreign_keys = ON")

    def sync_fully(self) -> None:
        """From now on what a transaction has done is on disk when it ends.

        SQLite adds it to a log. What is in the log comes into the file in `_checkpoint` alone, so
        that a file that changes at another time has been overwritten.
        """
        self.rows("PRAGMA journal_mode = WAL")
        self.rows("PRAGMA wal_autocheckpoint = 0")
        self._contents = _contents(self._place)

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """All rows that a statement gives.

        Raises:
            StorageError: If the file is closed, was removed or replaced, or cannot be read or
                written.
            CorruptFileError: If it is damaged.
        """
        with self.lock, self._named_errors():
            self._check_place()
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on disk, in its place, when the block is left; raises as `rows`.

        Args:
            durable: False, for what may be lost in a power cut, does not wait for the disk: it is
                there with the next one that is durable.
        """
        with self.lock, self._named_errors():
            self._check_place()
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._check_place()
            self._checkpoint()

    def _check_place(self) -> None:
        """Refuse to go on with a file that nobody will find again; keep what it holds.

        Who removes or replaces the file, as programs do that synchronise folders, takes its name
        from it: it is still open here, and gone when it is closed. Who copies another file over it
        leaves a mixture of both.
        """
        is_there = _identity(self._place) == self._file
        if is_there and (self._contents is None or self._is_as_left()):
            self._saved = None
            return
        if self._saved is None:
            self._saved = self._keep() if is_there else self._save()
        raise StorageError(
            f"a store stays as it is while it is open, but {self.path} was "
            f"{'overwritten' if is_there else 'removed or replaced'}; all that was acknowledged is "
            f"in {self._saved}: end what has the store open, put the right one of the files in "
            f"place as {self.path.name}, without any {self.path.name}-wal, and start again"
        )

    def _is_as_left(self) -> bool:
        """Whether nobody but another process of ours has written to the file since."""
        if self._contents == (0, 0):
            self._contents = _contents(self._place)
        if self._contents == _contents(self._place):
            return True
        with open(self._mark, "a+b") as mark:
            wait_for_lock(mark, f"{mark.name} has been locked for 30 s", seconds=30)
            mark.seek(0)
            contents = _contents(self._place)
            if mark.read(100) != _told(contents):
                return False
            self._contents = contents
            return True

    def _checkpoint(self) -> None:
        """Bring what is in the log into the file, if that is much, and say so to other processes.

        At an error it stays in the log, where it is as safe.
        """
        log = self._place.with_name(f"{self._place.name}-wal")
        if self._contents is None or not log.exists() or log.stat().st_size < _MAX_LOG:
            return
        with open(self._mark, "ab") as mark:
            try:
                lock(mark, "another process does it just now")
            except StorageError:
                return
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.execute(f"PRAGMA busy_timeout = {1000 * _PATIENCE}")
            self._contents = _contents(self._place)
            mark.truncate(0)
            mark.write(_told(self._contents))

    @property
    def _mark(self) -> Path:
        """Says how `_checkpoint` has left the file; locked meanwhile."""
        return self._place.with_name(f".{self._place.name}.mark")

    def _save(self) -> Path:
        when = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        saved = self._place.with_stem(f"{self._place.stem}-{when}")
        partial = saved.with_name(f"{saved.name}.{os.getpid()}.partial")
        try:
            # Its log keeps its name and would be read as that of the file that took its place.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._contents = 0, 0  # the file may come back
            with closing(sqlite3.connect(partial)) as copy:
                self._db.backup(copy)
            os.replace(partial, saved)
            sync_folder(saved.parent)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"a store stays as it is while it is open, but {self.path} was removed or "
                f"replaced, and what it held cannot be saved beside it ({error}); make the folder "
                "again and free disk space before you end what has the store open: it tries again "
                "whenever it is asked something"
            ) from error
        return saved

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise StorageError(
                f"{self.path} must be open, but: {error}; open the store again"
            ) from error
        except sqlite3.OperationalError as error:
            raise unwritable(self.path, OSError(str(error))) from error
        except OSError as error:
            raise unwritable(self.path, error) from error
        except sqlite3.DatabaseError as error:
            raise corrupt(self.path, str(error)) from error


_databases: WeakSet[Database] = WeakSet()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is that has this name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _contents(path: Path) -> tuple[int, int]:
    """Changes whenever a file is written to."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _told(contents: tuple[int, int]) -> bytes:
    return "{} {}".format(*contents).encode()


def _close(db: sqlite3.Connection, lock: threading.RLock) -> None:
    with lock:  # SQLite crashes if a file is closed in the middle of another thread's statement
        db.close()


def _plain(row: Sequence[object]) -> tuple[str, str, str]:
    """Type, name and SQL of an object, without the spaces and quotes that SQLite may change."""
    kind, name, sql = map(str, row)  # a damaged row may hold anything
    return kind, name, re.sub(r'[\s"]+', "", sql)


def make_database(
    path: Path,
    schema: str,
    *,
    application: int,
    version: int,
) -> None:
    """Make a file, under another name first: an empty one is then always a damaged one.

    Args:
        path: The file; its folder is there, and nobody else makes the file now.
        schema: Statements that make the tables, each with a semicolon.
        application: Says whose file it is.
        version: Of the schema.
    """
    remove_leftovers(path.parent)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    database = Database(partial)
    try:
        with database.transaction() as db:
            for statement in schema.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {application}")
            db.execute(f"PRAGMA user_version = {version}")
        database.close()
        os.replace(partial, path)
    finally:
        database.close()
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_head(path: Path) -> None:
    """Refuse what is no file, or a sparse one of a terabyte, which SQLite would read to its end.

    A database's head says how many pages it has; a checkpoint that was cut off may have added what
    was in the log. A file that this process has open is not looked at: the system takes back all
    locks of a process on a file as soon as it closes it once, and another process that then takes
    itself for the last one would remove the log that this one writes to.

    Raises:
        StorageError: If it cannot be read.
        CorruptFileError: If it is no database of its size.
    """
    if any(database.is_of(path) for database in list(_databases)):
        return
    try:
        with open_regular(path) as file:
            head = file.read(100)
            file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    page_bytes = int.from_bytes(head[16:18], "big")
    page_bytes = 65_536 if page_bytes == 1 else page_bytes
    num_pages = int.from_bytes(head[28:32], "big")
    log = path.with_name(f"{path.name}-wal")
    most = page_bytes * num_pages + (log.stat().st_size if log.exists() else 0)
    if not head.startswith(b"SQLite format 3\0") or file_bytes > most:
        raise corrupt(path, f"it is no SQLite database of its {file_bytes} bytes")


def wait_for_lock(file: IO[bytes], refusal: str, *, seconds: float) -> None:
    """Take the lock of a file as soon as it is free.

    Raises:
        StorageError: With `refusal`, if it is held for so long.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return lock(file, refusal)
        except StorageError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.02)
