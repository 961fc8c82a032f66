"""Labels on disk, one JSON line each: a label is there to stay when `append` returns.

Labels are the dearest data there are: a person gave them. Knows nothing of queries and oracles;
which line answers which query is the caller's to know.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import final

from pbcrl.storage import (
    FORMAT_VERSION,
    check_format,
    corrupt,
    read_bytes,
    sync_folder,
    unwritable,
    write_all,
)
from pbcrl.trajectory import Label

_FORMAT = "pbcrl-labels"
_HEADER = json.dumps({"format": _FORMAT, "version": FORMAT_VERSION}) + "\n"


@final
class LabelLog:
    """A file to which labels are added as they are bought, so that a crash loses none.

    Each line is one label as JSON, NaN as null, with the crc32 of the rest of the line; the first
    line says what the file is. An existing log is continued.

    Args:
        path: The file; missing folders are made.

    Raises:
        StorageError: If the file cannot be written.
        CorruptFileError, FormatVersionError: As `read_labels`; a damaged log is not continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise unwritable(self.path, error) from error
        _, intact_bytes = _parse(self.path)
        try:
            os.truncate(self.path, intact_bytes)
            if intact_bytes == 0:
                self._write(_HEADER)
            sync_folder(self.path.parent)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def append(self, labels: Sequence[Label]) -> None:
        """Add labels at the end; they are on disk when this returns.

        Raises:
            StorageError: If they cannot be written; then none of them is in the log.
        """
        try:
            self._write("".join(_line(label) for label in labels))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _write(self, text: str) -> None:
        with open(self.path, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                write_all(file, text.encode())
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # the next label must not continue half a line
                raise


def read_labels(path: str | os.PathLike[str]) -> list[Label]:
    """Read a label log, in the order in which the labels were added.

    A crash while writing leaves a last line without its end; it is dropped with one warning.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If a finished line is damaged; the message has its number, from 1.
        FormatVersionError: If another version of the format wrote it.
    """
    labels, _ = _parse(Path(path))
    return labels


def _parse(path: Path) -> tuple[list[Label], int]:
    """The labels of a log and the number of bytes up to the end of its last finished line."""
    *lines, torn = read_bytes(path).split(b"\n")
    if not lines and not _HEADER.encode().startswith(torn):
        raise corrupt(path, "it does not begin as a label log does")
    if torn:
        warnings.warn(
            f"a label log ends with a finished line, but the last {len(torn)} bytes of {path} are "
            "half a line, as a crash leaves them; they are dropped: ask for that label again",
            stacklevel=3,
        )
    labels = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number == 1:
                check_format(path, entry["format"], entry["version"], expected=_FORMAT)
                continue
            del entry["crc32"]
            label = Label(**{name: math.nan if v is None else v for name, v in entry.items()})
            intact = _line(label).encode() == line + b"\n"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise corrupt(path, f"line {number} is not what it should be ({error!r})") from error
        if not intact:
            raise corrupt(path, f"line {number} does not match its crc32")
        labels.append(label)
    return labels, sum(len(line) + 1 for line in lines)


def _line(label: Label) -> str:
    values = {name: float(value) for name, value in asdict(label).items()}
    body = {name: None if math.isnan(value) else value for name, value in values.items()}
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body).encode())}) + "\n"
