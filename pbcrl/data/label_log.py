"""Labels on disk, one JSON line each: nothing that was paid for is lost or paid for twice.

A `LabelLog` holds labels in the order in which they were bought, and, for oracles that charge for
each query, what was asked: a query is known by its contents (`query_digest`), so that a process
that starts again and asks again gets the answer that an earlier one paid for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import warnings
import zlib
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, final
from weakref import finalize

import numpy as np

from pbcrl.errors import BudgetError, LabelError, StorageError
from pbcrl.storage import (
    check_format,
    corrupt,
    open_regular,
    sync_folder,
    unreadable,
    unwritable,
    write_all,
)
from pbcrl.trajectory import (
    AnyLabel,
    BatchLabel,
    GridLabel,
    Label,
    Query,
    Trajectory,
    stretches_of,
)

_KIND, _VERSION = "pbcrl-labels", 2
_MAX_LINE = 2**24  # bytes; no claim of a file makes a reader hold more at once


# -- Queries and budgets ---------------------------------------------------------------------------


def query_digest(query: Query) -> str:
    """Name a query by what it shows: 32 hex digits of its observations, actions and order."""
    both = (trajectory_digest(query.first), trajectory_digest(query.second))
    return hashlib.sha256("".join(both).encode()).hexdigest()[:32]


def trajectory_digest(trajectory: Trajectory) -> str:
    """Name a trajectory likewise, by its observations and actions."""
    digest = hashlib.sha256()
    for array in (trajectory.obs, trajectory.actions):
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def checked_budget(budget: int | None) -> int | None:
    """Return a budget, or refuse a negative one."""
    if budget is not None and budget < 0:
        raise ValueError(f"a query budget must be >= 0, got {budget}; None is no bound")
    return budget


def check_left(budget: int | None, *, used: int, asked: int) -> None:
    """Refuse to take more queries than are left.

    Raises:
        BudgetError: If so.
    """
    if budget is not None and asked > budget - used:
        raise BudgetError(
            f"the oracle's budget of {budget} queries must not be passed: {max(budget - used, 0)} "
            f"are left, {asked} were asked; ask fewer, or raise the budget"
        )


# -- Log -------------------------------------------------------------------------------------------


@final
class LabelLog:
    """A file to which labels are added as they are bought, so that a crash loses none.

    Each line is JSON, NaN as null: a label (`append`), or the digest of a query that is asked
    (`ask`), or both (`answer`). The label of a pair has the keys `preference`, `first_safe` and
    `second_safe`, and if steps were marked, `first_unsafe` and `second_unsafe`; that of a batch has
    `batch_safe` alone, of a grid `grid_safe`. A line ends with a crc32 over itself and all lines
    before it, so that lines which were swapped, doubled or deleted are found; only the last lines
    can go unnoticed. An existing log is continued. One writer at a time: a second one is refused
    before it has asked anybody for a label. `close`, the end of a `with` block or of the process
    lets the next one in.

    Args:
        path: The file; missing folders are made.

    Raises:
        StorageError: If the file cannot be written, or another log has it open.
        CorruptFileError, FormatVersionError: As `read_labels`; a damaged log is not continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.labels: list[AnyLabel] = []
        """All labels of the log, in the order in which they were added."""
        self.answers: dict[str, Label | None] = {}
        """The label of each query that was ever asked, by digest; None until it is answered."""
        self._threads = threading.Lock()
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
            lock(
                self._file,
                f"a file has one writer at a time, but another one has {self.path} open; wait "
                "until it has finished, close it, or choose another path",
            )
            found = _read(self.path)
            _warn_of_torn_line(self.path, found.num_torn)
            for entry in found.entries:
                self._take(entry)
            self._ends = found.ends
            self._file.truncate(self._end)
            if not self._ends:
                self._write_header()
            sync_folder(self.path.parent)
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def queries_asked(self) -> int:
        """Different queries that were ever asked, answered or not, by any process."""
        return len(self.answers)

    def append(self, labels: Sequence[AnyLabel]) -> None:
        """Add labels at the end; they are on disk when this returns.

        Raises:
            StorageError: If they cannot be written; then none of them is in the log.
        """
        self._add([label_to_json(label) for label in labels])

    def ask(self, digests: Sequence[str]) -> None:
        """Note that queries are about to be asked; those that are in the log are left out.

        Raises:
            StorageError: If they cannot be written; none is noted then.
        """
        new = [digest for digest in dict.fromkeys(digests) if digest not in self.answers]
        self._add([{"query": digest} for digest in new])

    def answer(self, digest: str, label: Label) -> None:
        """Note the answer to a query that was asked.

        Raises:
            BudgetError: If it was not.
            StorageError: If the answer cannot be written.
        """
        if digest not in self.answers:
            raise BudgetError(
                f"only what was asked can be answered, but {digest} was not; call ask first"
            )
        self._add([{"query": digest} | label_to_json(label)])

    def cut(self, keep: int, *, unused: str | os.PathLike[str]) -> None:
        """Leave the first labels in a log made by `append`, and move the others to another log.

        A process that is killed in between leaves them in both.

        Raises:
            StorageError: If a file cannot be written; no label is lost then.
        """
        assert not self.answers, "a log of queries is never cut"
        with LabelLog(unused) as other:
            other.append(self.labels[keep:])
        with self._threads:
            self._check_open()
            self._file.truncate(self._ends[keep][0])
            del self._ends[keep + 1 :], self.labels[keep:]

    def __enter__(self) -> LabelLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _end(self) -> int:
        return self._ends[-1][0] if self._ends else 0

    def _take(self, entry: _Entry) -> None:
        if entry.digest is not None:
            assert isinstance(entry.label, Label | None)  # else refused by `_parsed`
            self.answers[entry.digest] = entry.label
        if entry.label is not None:
            self.labels.append(entry.label)

    def _add(self, entries: Sequence[Mapping[str, Any]]) -> None:
        with self._threads:
            self._check_open()
            ends, lines = [self._ends[-1]], []
            for entry in entries:
                line, crc32 = _line(entry, ends[-1][1])
                if len(line) >= _MAX_LINE:
                    raise LabelError(
                        f"a label takes less than {_MAX_LINE} bytes in a log, got one of "
                        f"{len(line)}; mark fewer stretches of its episodes; nothing was added"
                    )
                lines.append(line)
                ends.append((ends[-1][0] + len(line), crc32))
            self._write(b"".join(lines))
            self._ends += ends[1:]
            for entry in entries:
                self._take(_parsed(entry))

    def _check_open(self) -> None:
        try:
            is_ours = not self._file.closed and os.path.samestat(
                os.stat(self.path), os.fstat(self._file.fileno())
            )
        except OSError as error:
            raise unwritable(self.path, error) from error
        if not is_ours:
            raise StorageError(
                f"labels go into a log that is open, but {self.path} was closed, or replaced by "
                "another file; nothing was added: open it again"
            )

    def _write_header(self) -> None:
        header = _header(_KIND, _VERSION)
        self._write(header)
        self._ends = [(len(header), zlib.crc32(header))]

    def _write(self, lines: bytes) -> None:
        end = self._end
        try:
            self._file.seek(end)
            try:
                write_all(self._file, lines)
                os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(end)  # the next entry must not continue half a line
                raise
        except OSError as error:
            raise unwritable(self.path, error) from error


def read_labels(path: str | os.PathLike[str]) -> list[AnyLabel]:
    """Read the labels of a log, in the order in which they were added.

    A crash while writing leaves a last line without its end; it is dropped with one warning.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If a finished line is damaged or not where it was written; the message has
            its number, from 1.
        FormatVersionError: If another version of the format wrote it.
    """
    found = _read(Path(path))
    _warn_of_torn_line(Path(path), found.num_torn)
    return [entry.label for entry in found.entries if entry.label is not None]


def label_to_json(label: AnyLabel) -> dict[str, Any]:
    """A label as JSON has it: NaN is null. A batch has `batch_safe`, a grid `grid_safe`, a list."""
    if isinstance(label, GridLabel):
        return {"grid_safe": [None if math.isnan(one) else float(one) for one in label.safe]}
    if isinstance(label, BatchLabel):
        return {"batch_safe": _number(label.safe)}
    names = "preference", "first_safe", "second_safe"
    entry: dict[str, Any] = {name: _number(getattr(label, name)) for name in names}
    for name in ("first_unsafe", "second_unsafe"):
        if (marked := getattr(label, name)) is not None:
            entry[name] = [list(map(int, stretch)) for stretch in marked]
    return entry


def label_from_json(entry: Mapping[str, Any]) -> AnyLabel:
    """The inverse of `label_to_json`.

    Raises:
        ArithmeticError, TypeError, ValueError: If it is no label.
    """
    if list(entry) == ["grid_safe"]:
        return GridLabel(tuple(math.nan if one is None else one for one in entry["grid_safe"]))
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in entry.items()}
    if list(values) == ["batch_safe"]:
        return BatchLabel(values["batch_safe"])
    if not values.keys() >= {"preference", "first_safe", "second_safe"}:
        raise ValueError(f"a label's line has all three answers, got {list(values)}")
    for name in ("first_unsafe", "second_unsafe"):
        if name in values:
            values[name] = stretches_of(values[name])
    return Label(**values)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def lock(file: IO[bytes], refusal: str) -> None:
    """Hold a file until it is closed or the process ends, however it ends.

    The lock is the system's, so that a killed process blocks nobody. Windows, whose locks would
    keep readers from the file, too, and file systems without locks go without.

    Raises:
        StorageError: With `refusal`, if it is held already, by this process or another.
    """
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(refusal) from error
    except OSError:  # some network file systems
        return


# -- Lines -----------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """What a line says; one of both may be missing."""

    digest: str | None
    label: AnyLabel | None


class _Found(NamedTuple):
    entries: list[_Entry]
    ends: list[tuple[int, int]]
    """Offset after each finished line, the header included, and its crc32."""
    num_torn: int
    """Bytes after the last finished line, as a crash leaves them."""


def _read(path: Path) -> _Found:
    entries: list[_Entry] = []
    ends: list[tuple[int, int]] = []
    offset = 0
    try:
        with open_regular(path) as file:
            for number in count(1):
                line = file.readline(_MAX_LINE)
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                if number == 1:
                    _check_header(path, line)
                    ends.append((offset, zlib.crc32(line)))
                    continue
                entry, crc32 = _checked(path, number, line, ends[-1][1])
                entries.append(entry)
                ends.append((offset, crc32))
    except OSError as error:
        raise unreadable(path, error) from error
    if len(line) == _MAX_LINE:
        raise corrupt(path, f"line {number} is longer than {_MAX_LINE} bytes")
    if number == 1 and not _header(_KIND, _VERSION).startswith(line):
        raise corrupt(path, f"it does not begin as a file of the format {_KIND!r} does")
    return _Found(entries, ends, len(line))


def _check_header(path: Path, line: bytes) -> None:
    """Refuse another format or version."""
    try:
        header = json.loads(line)
        kind, version = header["format"], header["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise corrupt(path, f"line 1 is not what it should be ({error!r})") from error
    check_format(path, kind, version, expected=_KIND, versions=(_VERSION,))


def _checked(path: Path, number: int, line: bytes, before: int) -> tuple[_Entry, int]:
    try:
        entry = json.loads(line)
        del entry["crc32"]
        expected, crc32 = _line(entry, before)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        finding = f"line {number} is not what it should be ({error!r})"
        raise corrupt(path, finding) from error
    if expected != line:
        raise corrupt(
            path, f"line {number} does not match its crc32: it was changed, or lines moved"
        )
    try:
        return _parsed(entry), crc32
    except (ArithmeticError, TypeError, ValueError) as error:
        raise corrupt(path, f"line {number} is no label and no query ({error!r})") from error


def _parsed(entry: Mapping[str, Any]) -> _Entry:
    values = dict(entry)
    digest = values.pop("query", None)
    if digest is not None and not isinstance(digest, str):
        raise TypeError(f"a query's name is a string, got {digest!r}")
    label = None if digest is not None and not values else label_from_json(values)
    if digest is not None and isinstance(label, BatchLabel | GridLabel):
        raise TypeError("a query is about a pair, but this is the label of many")
    return _Entry(digest, label)


def _header(kind: str, version: int) -> bytes:
    return (json.dumps({"format": kind, "version": version}) + "\n").encode()


def _line(entry: Mapping[str, Any], before: int) -> tuple[bytes, int]:
    """A line and its crc32, which continues the one before."""
    crc32 = zlib.crc32(json.dumps(entry).encode(), before)
    return (json.dumps({**entry, "crc32": crc32}) + "\n").encode(), crc32


def _warn_of_torn_line(path: Path, num_torn: int) -> None:
    if num_torn:
        warnings.warn(
            f"a label log ends with a finished line, but the last {num_torn} bytes of {path} are "
            "half a line, as a crash leaves them; they are dropped: ask for that label again",
            stacklevel=3,
        )
