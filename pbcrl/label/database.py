"""An SQLite file that several threads and processes use, and that loses nothing it acknowledged.

A file appears whole or not at all, is checked when it is opened, and errors of SQLite become those
of this package. Does not depend on what the rows mean.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final
from weakref import finalize

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


@final
class Database:
    """A file that is open.

    Args:
        path: The file; made if it is missing, but empty: see `make_database`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._threads = threading.RLock()
        self._db = sqlite3.connect(
            path, timeout=30.0, isolation_level=None, check_same_thread=False
        )
        self.close = finalize(self, self._db.close)
        """Close the file; a second call does nothing."""
        self._db.execute("PRAGMA foreign_keys = ON")

    def check(self, *, application: int, version: int) -> None:
        """Refuse a file that is damaged or somebody else's.

        Raises:
            CorruptFileError: If it is damaged, or another program's.
            FormatVersionError: If it has another version.
        """
        ((found,),) = self.rows("PRAGMA application_id")
        if found != application:
            raise corrupt(self.path, f"its application id is {found:#x}")
        ((found,),) = self.rows("PRAGMA user_version")
        if found != version:
            raise FormatVersionError(
                f"this pbcrl reads version {version} of label stores, but {self.path} has version "
                f"{found}; use the pbcrl that wrote it"
            )
        try:
            ((text,), *_) = self.rows("PRAGMA quick_check(1)")
        except UnicodeDecodeError as error:  # it quotes what is damaged
            raise corrupt(self.path, str(error)) from error
        if text != "ok":
            raise corrupt(self.path, str(text))

    def upgrade(self, statements: str, *, application: int, version: int) -> None:
        """Bring a file of the version before to `version`, all or nothing; leave any other alone.

        Args:
            statements: That change the tables, separated by semicolons.
            application: Whose file it is.
            version: Of the schema that they lead to.

        Raises:
            StorageError: If it cannot be written.
        """
        ((whose,),) = self.rows("PRAGMA application_id")
        ((found,),) = self.rows("PRAGMA user_version")
        if (whose, found) != (application, version - 1):
            return
        self.rows("PRAGMA foreign_keys = OFF")  # or no table that others refer to can be replaced
        with self.transaction() as db:
            for statement in statements.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {version}")
        self.rows("PRAGMA foreign_keys = ON")

    def sync_fully(self) -> None:
        """From now on what a transaction has done is on disk when it ends."""
        self.rows("PRAGMA journal_mode = WAL")
        self.rows("PRAGMA synchronous = FULL")

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """All rows that a statement gives.

        Raises:
            StorageError: If the file is closed, or cannot be read or written.
            CorruptFileError: If it is damaged.
        """
        with self._threads, self._named_errors():
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on disk when the block is left; raises as `rows`."""
        with self._threads, self._named_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

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
        except sqlite3.DatabaseError as error:
            raise corrupt(self.path, str(error)) from error


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
    was in the log.

    Raises:
        StorageError: If it cannot be read.
        CorruptFileError: If it is no database of its size.
    """
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
