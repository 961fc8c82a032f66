"""A dataset that is being written: rows of steps, and a journal of those that are wholly on disk.

Knows which rows are whole and which are free, and nothing of which trajectories a sample keeps.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
import zlib
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, final

import numpy as np

from pbcrl.errors import StorageError
from pbcrl.journal import Journal
from pbcrl.storage import corrupt, open_regular, unreadable, unwritable, write_all
from pbcrl.trajectory import Trajectory

StepArrays = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of one trajectory's row in each array, by the names of `Trajectory`."""

UNFINISHED = "pbcrl-unfinished-trajectories"
JOURNAL = "journal.jsonl"
FILES = {"meta.json", "obs.npy", "actions.npy", "costs.npy", "lengths.npy", "episodes.npy"}
FILES |= {JOURNAL}  # in an unfinished one; a kill just after the renaming leaves it behind
_LEFTOVER = "meta.json.*.partial"  # of a run that was killed while it wrote meta.json
HEADER_BYTES = 256  # of each .npy file: fixed, as the number of rows is filled in at the end


@dataclass(frozen=True)
class Row:
    """A trajectory that is wholly on disk."""

    row: int
    """Where in the arrays it is."""
    episode: int
    """Its serial number in the run."""
    steps: int
    data_crc32: int
    """Checksum of its steps, array by array: a power cut may keep the journal and lose the row."""


@final
class UnfinishedRows:
    """The folder of an unfinished dataset: rows of steps, and a journal of those that are whole.

    A row counts from the moment that its line is in the journal. A replacement goes into a row that
    is free, and the same line gives up the row that it replaces, so that nothing is ever missing
    but the trajectory that is just being written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
        if foreign := {name for name in names - FILES if not fnmatch(name, _LEFTOVER)}:
            raise StorageError(
                f"an unfinished dataset is alone in its folder, but {folder} holds "
                f"{', '.join(sorted(foreign))}; move that away, or choose another path"
            )
        self._journal = Journal(folder / JOURNAL, kind=UNFINISHED)
        self.kept: list[Row] = []
        """The trajectories of the sample, each at its place in the reservoir."""
        self.about: dict[str, Any] | None = None
        """What the dataset will be; None until it has a first trajectory."""
        self.seen = 0
        self._free: list[int] = []
        self._written: list[int] = []  # steps of each row that were ever written
        try:
            for leftover in folder.glob(_LEFTOVER):
                leftover.unlink()
            self._replay()
        except BaseException:
            self.close()
            raise

    def begin(self, about: dict[str, Any]) -> None:
        """Note what the dataset will be, as its first trajectory decides it."""
        self._journal.append([about], sync=False)
        self.about = about

    def skip(self, *, episode: int) -> None:
        """Count a trajectory that is not kept."""
        self._journal.append([{"episode": episode}], sync=False)

    def add(
        self, trajectory: Trajectory, arrays: StepArrays, *, episode: int, replaced: int | None
    ) -> None:
        """Write a trajectory; with `replaced`, into that place of the reservoir."""
        if not self._free:
            self._free.append(len(self._written))
            self._written.append(0)
        row = self._free[-1]  # free until all of it is on disk
        steps = self._written[row] = max(self._written[row], len(trajectory))
        data_crc32 = 0
        try:
            for name, (dtype, shape) in arrays.items():
                rows = np.zeros((steps, *shape[1:]), dtype)
                rows[: len(trajectory)] = getattr(trajectory, name)
                data_crc32 = zlib.crc32(rows[: len(trajectory)].tobytes(), data_crc32)
                at = HEADER_BYTES + row * array_bytes(dtype, shape)
                write_at(self.folder / f"{name}.npy", at, rows.tobytes())
        except OSError as error:
            raise unwritable(self.folder, error) from error
        new = Row(row, episode, len(trajectory), data_crc32)
        if replaced is None or replaced >= len(self.kept):  # a full disk left a place empty
            self._commit(new, None)
            self._free.pop()
            self.kept.append(new)
        else:
            old = self.kept[replaced]
            self._commit(new, old)
            self._free[-1] = old.row
            self.kept[replaced] = new

    def fill_gaps(self, arrays: StepArrays) -> None:
        """Move the last rows into free ones, so that the first `len(kept)` are whole."""
        gaps = sorted(set(range(len(self.kept))) - {row.row for row in self.kept})
        moved = [i for i, row in enumerate(self.kept) if row.row >= len(self.kept)]
        for gap, i in zip(gaps, moved, strict=True):
            old = self.kept[i]
            for name, (dtype, shape) in arrays.items():
                path, row_bytes = self.folder / f"{name}.npy", array_bytes(dtype, shape)
                with open(path, "rb") as file:
                    file.seek(HEADER_BYTES + old.row * row_bytes)
                    data = file.read(row_bytes).ljust(row_bytes, b"\0")  # the file's end is a hole
                write_at(path, HEADER_BYTES + gap * row_bytes, data)
            self.kept[i] = replace(old, row=gap)
            self._commit(self.kept[i], old)

    def drop_torn(self, arrays: StepArrays) -> None:
        """Leave out rows that are not what was written, as a power cut or a bad disk brings about.

        Raises:
            CorruptFileError: If none is left; the files stay as they are.
        """
        horizon = arrays["actions"][1][0]
        torn = {
            row
            for row in self.kept
            if not 0 < row.steps <= horizon or self._data_crc32(row, arrays) != row.data_crc32
        }
        if torn and len(torn) == len(self.kept):
            raise corrupt(self.folder, "none of its trajectories matches its checksum")
        if torn:
            warnings.warn(
                f"trajectories are kept as they were written, but {len(torn)} of {len(self.kept)} "
                f"in {self.folder} do not match their checksum; they are left out: copy the folder "
                "first if a part of them is worth having",
                stacklevel=5,
            )
        self.kept = [row for row in self.kept if row not in torn]
        self._free += [row.row for row in torn]
        self._written = [horizon] * len(self._written)

    def clear(self) -> None:
        """Start afresh; the journal goes first, so that no line of it speaks of rows to come."""
        self._journal.clear()
        try:
            for name in FILES - {JOURNAL}:
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        self.kept, self.about, self.seen, self._free, self._written = [], None, 0, [], []

    def close(self) -> None:
        """Let another writer in."""
        self._journal.close()

    def remove(self) -> None:
        """Leave nothing behind."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _commit(self, new: Row, old: Row | None) -> None:
        replaces = None if old is None else old.row
        self._journal.append([asdict(new) | {"replaces": replaces}], sync=False)

    def _replay(self) -> None:
        if not self._journal.entries:
            return
        self.about, *entries = self._journal.entries
        places: dict[int, int] = {}  # in the reservoir, by row
        for number, entry in enumerate(entries, start=3):
            try:
                replaces = entry.pop("replaces", None)
                row = Row(**entry) if "row" in entry else Row(0, entry["episode"], 1, 0)
                # A new row is the first free one, so that there are never more than lines.
                sound = all(type(field) is int for field in asdict(row).values())
                if not (sound and 0 <= row.row < number and 0 <= row.episode < 2**62):
                    raise ValueError(f"a row that cannot be: {row}")
                self.seen = max(self.seen, row.episode + 1)
                if "row" not in entry:
                    continue
                # A replacement stands where the trajectory stood that it replaces, as the next
                # draw goes by places.
                place = places.pop(row.row if replaces is None else replaces, len(self.kept))
                self.kept[place : place + 1] = [row]
                places[row.row] = place
            except (KeyError, TypeError, ValueError) as error:
                raise corrupt(self._journal.path, f"line {number}: {error!r}") from error
        used = max(places, default=-1) + 1
        self._free = sorted(set(range(used)) - set(places), reverse=True)
        self._written = [0] * used

    def _data_crc32(self, row: Row, arrays: StepArrays) -> int:
        data_crc32 = 0
        for name, (dtype, shape) in arrays.items():
            path = self.folder / f"{name}.npy"
            at = HEADER_BYTES + row.row * array_bytes(dtype, shape)
            num_bytes = row.steps * array_bytes(dtype, shape[1:])
            try:
                with open_regular(path) as file:
                    if os.fstat(file.fileno()).st_size < at + num_bytes:
                        return -1  # and nothing is read, whatever length is claimed
                    file.seek(at)
                    data_crc32 = zlib.crc32(file.read(num_bytes), data_crc32)
            except OSError as error:
                raise unreadable(path, error) from error
        return data_crc32


def write_at(path: Path, at: int, data: bytes) -> None:
    """Write at an offset; what is skipped becomes a hole of zeros."""
    path.touch()
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        write_all(file, data)


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of an array, whatever it claims: Python's integers do not overflow."""
    return math.prod(shape) * np.dtype(dtype).itemsize
