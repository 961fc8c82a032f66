"""Files that grow by whole lines: a line is there to stay, and only one process may add to them.

Each line is a JSON object with the crc32 of the rest of the line; the first one says what the file
is. Knows nothing of what the entries mean.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, final
from weakref import finalize

from pbcrl.errors import StorageError
from pbcrl.storage import (
    FORMAT_VERSION,
    check_format,
    corrupt,
    open_regular,
    sync_folder,
    unreadable,
    unwritable,
    write_all,
)

_MAX_LINE = 65_536  # bytes; no claim of a file makes a reader hold more at once

Entry = Mapping[str, Any]


@final
class Journal:
    """A file to which entries are added, all of a call or none, by one process at a time.

    An existing journal is continued; the half line that a crash leaves at its end is cut off. The
    lock is the system's and goes with the process, so that a killed one blocks nobody. (Windows and
    file systems that know no locks go without.)

    Args:
        path: The file; missing folders are made.
        kind: What the file holds, such as "pbcrl-labels"; stands in its first line.

    Raises:
        StorageError: If the file cannot be written, or another writer has it open.
        CorruptFileError, FormatVersionError: As `read_journal`; a damaged journal is not continued.
    """

    def __init__(self, path: str | os.PathLike[str], *, kind: str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            open_regular(self.path).close()
            self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115, open as long as we are
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.close = finalize(self, self._file.close)
        """Let another writer in; nothing can be added any more. A second call does nothing."""
        try:
            self._lock()
            self.entries, self.num_torn = read_journal(self.path, kind=kind)
            """What the file held when it was opened, and the bytes of half a line after it."""
            self._end = self._file.seek(0, os.SEEK_END) - self.num_torn
            self._file.truncate(self._end)
            self._start = len(_header(kind))
            if self._end == 0:
                self._write(_header(kind), sync=True)
            sync_folder(self.path.parent)
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    def append(self, entries: Sequence[Entry], *, sync: bool) -> None:
        """Add entries of JSON values at the end, in order.

        A process may be killed at any moment after this returns; with `sync` the computer may, too.

        Raises:
            StorageError: If they cannot be written; then none of them is in the file.
        """
        try:
            if self._file.closed or not os.path.samestat(
                os.stat(self.path), os.fstat(self._file.fileno())
            ):
                raise StorageError(
                    f"{self.path} was closed, or replaced by another file, while it was being "
                    "written; nothing was added: open it anew"
                )
            self._write(b"".join(_line(entry) for entry in entries), sync=sync)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def clear(self) -> None:
        """Take all entries out again."""
        try:
            self._file.truncate(self._start)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._end = self._start

    def _write(self, lines: bytes, *, sync: bool) -> None:
        self._file.seek(self._end)
        try:
            write_all(self._file, lines)
            if sync:
                os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(self._end)  # the next entry must not continue half a line
            raise
        self._end += len(lines)

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"a file has one writer at a time, but another one has {self.path} open; wait "
                "until it has finished, close it, or choose another path"
            ) from error
        except OSError:  # some network file systems
            return


def read_journal(path: str | os.PathLike[str], *, kind: str) -> tuple[list[dict[str, Any]], int]:
    """Read the entries of a journal, in order; entry i is on line i + 2.

    Returns:
        The entries, and the number of bytes after the last finished line, as a crash leaves them.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If a finished line is damaged; the message has its number, from 1.
        FormatVersionError: If another version of the format wrote it.
    """
    entries: list[dict[str, Any]] = []
    try:
        with open_regular(Path(path)) as file:
            for number in count(1):
                line = file.readline(_MAX_LINE)
                if not line.endswith(b"\n"):
                    break
                entry = _parse(path, number, line)
                if number == 1:
                    check_format(path, entry["format"], entry["version"], expected=kind)
                else:
                    entries.append(entry)
    except OSError as error:
        raise unreadable(Path(path), error) from error
    if len(line) == _MAX_LINE:
        raise corrupt(path, f"line {number} is longer than {_MAX_LINE} bytes")
    if number == 1 and not _header(kind).startswith(line):
        raise corrupt(path, f"it does not begin as a file of the format {kind!r} does")
    return entries, len(line)


def _parse(path: str | os.PathLike[str], number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if number == 1:
            return {"format": entry["format"], "version": entry["version"]}
        del entry["crc32"]
        intact = _line(entry) == line
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        finding = f"line {number} is not what it should be ({type(error).__name__}: {error})"
        raise corrupt(path, finding) from error
    if not intact:
        raise corrupt(path, f"line {number} does not match its crc32")
    return dict(entry)


def _header(kind: str) -> bytes:
    return (json.dumps({"format": kind, "version": FORMAT_VERSION}) + "\n").encode()


def _line(entry: Entry) -> bytes:
    crc32 = zlib.crc32(json.dumps(entry).encode())
    return (json.dumps({**entry, "crc32": crc32}) + "\n").encode()
