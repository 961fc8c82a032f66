"""Labels on disk, one JSON line each: a label is there to stay when `append` returns.

Labels are the dearest data there are: a person gave them. Knows nothing of queries and oracles;
which line answers which query is the caller's to know.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, final

from pbcrl.journal import Journal, read_journal
from pbcrl.storage import corrupt
from pbcrl.trajectory import Label

_KIND = "pbcrl-labels"


@final
class LabelLog:
    """A file to which labels are added as they are bought, so that a crash loses none.

    Each line is one label as JSON, NaN as null, with the crc32 of the rest of the line; the first
    line says what the file is. An existing log is continued. One writer at a time: a second one is
    refused before it has asked anybody for a label. `close`, the end of a `with` block or of the
    process lets the next one in.

    Args:
        path: The file; missing folders are made.

    Raises:
        StorageError: If the file cannot be written, or another log has it open.
        CorruptFileError, FormatVersionError: As `read_labels`; a damaged log is not continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._journal = Journal(self.path, kind=_KIND)
        try:
            _labels(self.path, self._journal.entries, self._journal.num_torn)
        except BaseException:
            self.close()
            raise

    def append(self, labels: Sequence[Label]) -> None:
        """Add labels at the end; they are on disk when this returns.

        Raises:
            StorageError: If they cannot be written; then none of them is in the log.
        """
        self._journal.append([label_to_json(label) for label in labels], sync=True)

    def close(self) -> None:
        """Let another writer in; a second call does nothing."""
        self._journal.close()

    def __enter__(self) -> LabelLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_labels(path: str | os.PathLike[str]) -> list[Label]:
    """Read a label log, in the order in which the labels were added.

    A crash while writing leaves a last line without its end; it is dropped with one warning.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If a finished line is damaged; the message has its number, from 1.
        FormatVersionError: If another version of the format wrote it.
    """
    return _labels(Path(path), *read_journal(path, kind=_KIND))


def label_to_json(label: Label) -> dict[str, float | None]:
    """A label as JSON has it: NaN is null."""
    values = {name: float(value) for name, value in asdict(label).items()}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def label_from_json(entry: Mapping[str, Any]) -> Label:
    """The inverse of `label_to_json`.

    Raises:
        ArithmeticError, TypeError, ValueError: If it is no label.
    """
    return Label(**{name: math.nan if value is None else value for name, value in entry.items()})


def _labels(path: Path, entries: list[dict[str, Any]], num_torn: int) -> list[Label]:
    if num_torn:
        warnings.warn(
            f"a label log ends with a finished line, but the last {num_torn} bytes of {path} are "
            "half a line, as a crash leaves them; they are dropped: ask for that label again",
            stacklevel=3,
        )
    labels = []
    for number, entry in enumerate(entries, start=2):
        try:
            label = label_from_json(entry)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise corrupt(path, f"line {number} is no label ({error})") from error
        labels.append(label)
    return labels
