"""A person as oracle: queries lie in a folder, answers are lines that the person adds to a file.

A query is in the folder, under a name made of its contents, before anybody sees it, and an answer
before it is used. So the process may end and start again at any time, and the same query is not
asked twice. What the trajectories look like is up to `render`.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, final
from weakref import finalize

import numpy as np

from pbcrl.buffer import Pairs
from pbcrl.label_log import (
    check_left,
    checked_budget,
    label_from_json,
    label_to_json,
    lock,
    query_digest,
    trajectory_digest,
)
from pbcrl.oracle import cannot_accept, check_store
from pbcrl.storage import corrupt, read_bytes, sync_folder, unwritable, write_all, write_atomically
from pbcrl.trajectory import Label, Query, Trajectory

_ANSWERS = "answers.jsonl"
_MAX_BYTES = 1 << 28  # of a query's arrays: 256 MiB, however small the file
_NAME = re.compile(r"\d{6,}-[0-9a-f]{32}")


@final
class FolderOracle:
    """Writes queries into a folder and picks up the answers that a person writes there.

    A query is `NAME.npz` with `first_obs`, `first_actions`, `second_obs` and `second_actions`, but
    never the true costs. An answer is a line of `answers.jsonl`, written by hand or by
    `python -m pbcrl.label FOLDER`:

        {"query": "NAME", "preference": 1, "first_safe": 1, "second_safe": 0}

    What is left out or null was not answered. The last line for a query holds, until it has been
    collected. One oracle at a time: a second one on the same folder is refused, until `close` or
    the end of the process lets it in.

    Args:
        folder: Made if it is missing; may hold the queries and answers of earlier processes.
        budget: Most different queries in the folder, earlier ones included; None is no bound.
        render: Called with each new query and a path to which it may add endings: whatever it
            writes there, films for instance, is shown to the person by name.
        poll_seconds: How often `label` looks for answers while it waits.

    Raises:
        ValueError: If the budget is negative.
        StorageError: If the folder cannot be written, or another oracle uses it.
    """

    has_store = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        budget: int | None = None,
        render: Callable[[Query, Path], object] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        self.folder = Path(folder)
        self.budget = checked_budget(budget)
        self._render = render
        self._poll_seconds = poll_seconds
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        held = hold_folder(self.folder, by="oracle")
        self.close = finalize(self, held.close)
        """Let another oracle use the folder; a second call does nothing."""
        self._names = {name.partition("-")[2]: name for name in query_names(self.folder)}
        self._submitted = 0
        self._open: dict[int, str] = {}  # the name of each query that awaits its answer, by number
        self._warned_of: set[str] = set()

    @property
    def queries_used(self) -> int:
        """Different queries in the folder, answered or not."""
        return len(self._names)

    @property
    def num_open(self) -> int:
        """Queries handed in by this process whose answers have not been collected."""
        return len(self._open)

    def submit(self, queries: Sequence[Query]) -> list[int]:
        """Write those queries that are not in the folder yet; return the numbers of all.

        Raises:
            BudgetError: If the new ones exceed what is left of the budget; none is written then.
            StorageError: If one cannot be written.
        """
        digests = [query_digest(query) for query in queries]
        new = {d: q for d, q in zip(digests, queries, strict=True) if d not in self._names}
        check_left(self.budget, used=self.queries_used, asked=len(new))
        for digest, query in new.items():
            name = f"{len(self._names) + 1:06d}-{digest}"
            if self._render is not None:  # first: a query that can be read is complete
                self._render(query, self.folder / name)
            write_atomically(self.folder / f"{name}.npz", _to_npz(query))
            self._names[digest] = name
        numbers = list(range(self._submitted, self._submitted + len(queries)))
        self._submitted += len(queries)
        self._open |= {n: self._names[d] for n, d in zip(numbers, digests, strict=True)}
        return numbers

    def collect(self) -> dict[int, Label]:
        """Return the answers found since the last call, by number; never waits."""
        found = self._found()
        numbers = [number for number, name in self._open.items() if name in found]
        return {number: found[self._open.pop(number)] for number in numbers}

    def label(self, queries: Sequence[Query]) -> list[Label]:
        """Answer every query, in order; waits for the person. Raises as `submit`."""
        numbers = self.submit(queries)
        while True:
            found = self._found()
            if all(self._open[number] in found for number in numbers):
                return [found[self._open.pop(number)] for number in numbers]
            time.sleep(self._poll_seconds)

    def accepts(self, episodes: Sequence[Trajectory]) -> bool | None:
        """Refused: no file shows a batch yet.

        Raises:
            UnsupportedError: Always.
        """
        raise cannot_accept(self, episodes)

    def state_dict(self) -> dict[str, Any]:
        """How many queries the folder holds; it keeps all else itself."""
        return {"queries_used": self.queries_used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the folder with a state; open queries are submitted again by whoever waits.

        Raises:
            StorageError: If queries are missing from the folder.
        """
        check_store(self.folder, known=state["queries_used"], found=self.queries_used)
        self._open = {}

    def _found(self) -> dict[str, Label]:
        """The answers by name; warns once of each name that is not asked here."""
        found = read_answers(self.folder)
        unknown = found.keys() - set(self._names.values()) - self._warned_of
        if unknown:
            self._warned_of |= unknown
            warnings.warn(
                f"an answer names a query of its folder, but {self.folder / _ANSWERS} answers "
                f"{', '.join(map(repr, sorted(unknown)))}, which {self.folder} does not hold; "
                "correct the name, or restore the query's file",
                RuntimeWarning,
                stacklevel=3,
            )
        return found


def read_labelled(folder: str | os.PathLike[str]) -> tuple[list[Trajectory], Pairs, list[Label]]:
    """All that was ever answered in a folder, as `PreferenceBuffer` takes it.

    Returns:
        The trajectories, each once, as its contents tell; the pairs of them that were asked, int64
        (B, 2); their B labels.

    Raises:
        CorruptFileError: If a query is damaged.
    """
    folder = Path(folder)
    answers = read_answers(folder)
    names = [name for name in query_names(folder) if name in answers]
    place: dict[str, int] = {}
    trajectories: list[Trajectory] = []
    pairs = []
    for name in names:
        query = read_query(folder, name)
        digests = [trajectory_digest(query.first), trajectory_digest(query.second)]
        if digests[0] == digests[1]:  # two episodes that went alike
            digests[1] += " again"
        for digest, trajectory in zip(digests, (query.first, query.second), strict=True):
            if digest not in place:
                place[digest] = len(trajectories)
                trajectories.append(trajectory)
        pairs.append([place[digest] for digest in digests])
    return (
        trajectories,
        np.array(pairs, dtype=np.int64).reshape(-1, 2),
        [answers[name] for name in names],
    )


def query_names(folder: Path) -> list[str]:
    """The names of the queries in a folder, in the order in which they were asked."""
    return sorted(path.stem for path in folder.glob("*.npz") if _NAME.fullmatch(path.stem))


def read_query(folder: Path, name: str) -> Query:
    """One query of a folder, its trajectories without true costs.

    Raises:
        CorruptFileError: If the file is damaged.
    """
    path = folder / f"{name}.npz"
    data = read_bytes(path)
    try:
        _check_sizes(data)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            first, second = (
                Trajectory(arrays[f"{which}_obs"], arrays[f"{which}_actions"])
                for which in ("first", "second")
            )
    except Exception as error:  # the bytes may be anything, and so may NumPy's complaints
        raise corrupt(path, f"it is no query ({error!r})") from error
    return Query(first, second)


def read_answers(folder: Path) -> dict[str, Label]:
    """The answers in a folder, by the query's name.

    A line that is no answer is left out with a warning: a slip of the pen must not end a training.
    """
    path = folder / _ANSWERS
    answers: dict[str, Label] = {}
    if not path.exists():
        return answers
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            values = {name.name: entry.pop(name.name, None) for name in fields(Label)}
            name = entry.pop("query")
            if entry or not isinstance(name, str):
                raise ValueError(f"unknown keys {list(entry)}")
            label = label_from_json(values)
        except Exception as error:  # a person may have written anything
            if number < len(lines):  # else somebody may be writing it just now
                warnings.warn(
                    f"an answer is a line like {{'query': NAME, 'preference': 1, 'first_safe': 1, "
                    f"'second_safe': 0}}, but line {number} of {path} is not ({error!r}); fix it, "
                    "and it will be read",
                    RuntimeWarning,
                    stacklevel=3,
                )
            continue
        answers[name] = label
    return answers


def hold_folder(folder: Path, *, by: str) -> IO[bytes]:
    """Keep others of a kind, "oracle" or "annotator", out of a folder until the file is closed.

    Raises:
        StorageError: If another one is at work there, or the folder cannot be written.
    """
    try:
        file = open(folder / f".{by}.lock", "ab")  # noqa: SIM115, open as long as it is held
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        lock(
            file,
            f"a label folder has one {by} at a time, but another one is at work in {folder}; wait "
            "until it has ended, or choose another folder",
        )
    except BaseException:
        file.close()
        raise
    return file


def write_answer(folder: Path, name: str, label: Label) -> None:
    """Add an answer to a folder; it is on disk when this returns.

    Raises:
        StorageError: If it cannot be written.
    """
    path = folder / _ANSWERS
    text = json.dumps({"query": name} | label_to_json(label)) + "\n"
    try:
        with open(path, "ab+", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # written by hand
                    text = "\n" + text
            write_all(file, text.encode())
            os.fsync(file.fileno())
        sync_folder(folder)
    except OSError as error:
        raise unwritable(path, error) from error


def _check_sizes(npz: bytes) -> None:
    """Refuse arrays that claim more than the archive holds, or that it would blow up to."""
    with zipfile.ZipFile(io.BytesIO(npz)) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MAX_BYTES:
            raise ValueError(f"its arrays have more than the {_MAX_BYTES} bytes they may have")
        for info in archive.infolist():
            with archive.open(info) as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if math.prod(shape) * dtype.itemsize > info.file_size:
                raise ValueError(f"{info.filename} claims the shape {shape}")


def _to_npz(query: Query) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(
        file,
        first_obs=query.first.obs,
        first_actions=query.first.actions,
        second_obs=query.second.obs,
        second_actions=query.second.actions,
    )
    return file.getvalue()
