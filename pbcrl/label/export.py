"""What was answered, as a table and in numbers: for other programs and for whoever asked."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from pbcrl.data.label_log import label_to_json
from pbcrl.label.agreement import cohen_kappa, krippendorff_alpha
from pbcrl.label.standing import Event
from pbcrl.label.store import LabelStore
from pbcrl.storage import write_atomically
from pbcrl.trajectory import AnyLabel, BatchLabel, GridLabel, Label, unsafe_steps

COLUMNS = (
    "question",
    "kind",
    "first",
    "second",
    "annotator",
    "answer",
    "preference",
    "first_safe",
    "second_safe",
    "batch_safe",
    "grid_safe",
    "first_unsafe",
    "second_unsafe",
    "seconds",
    "time",
)
"""Of the table: one row per person and question. `first` and `second` are the trajectories'
digests, of a batch and of a grid all of them in `first`. A batch has `batch_safe` alone of the
answers, a grid `grid_safe`: 1, 0 or ? for each, with spaces between them. Of a pair whose unsafe
steps were marked, `first_unsafe` has the stretches, "3:5 9:10" for the steps 3, 4 and 9,
"none" for none."""


_NUMBERS = "preference", "first_safe", "second_safe"
_MARKED = "first_unsafe", "second_unsafe"


def table(store: LabelStore) -> list[dict[str, Any]]:
    """The answers and skips that stand, oldest first, under the names of `COLUMNS`."""
    questions = {question.id: question for question in store.questions()}
    rows = []
    for event in store.events():
        question = questions[event.query]
        pair = question.kind == "pair"
        rows.append(
            {
                "question": question.name,
                "kind": question.kind,
                "first": question.members[0] if pair else " ".join(question.members),
                "second": question.members[1] if pair else None,
                "annotator": event.annotator,
                "answer": event.kind,
                **dict.fromkeys((*_NUMBERS, "batch_safe", "grid_safe", *_MARKED)),
                **_given(event),
                "seconds": event.seconds,
                "time": datetime.fromtimestamp(event.time, timezone.utc).isoformat(),
            }
        )
    return rows


def _given(event: Event) -> dict[str, Any]:
    """The answers that a person gave, by the names of their columns."""
    found = label_to_json(event.label)
    if isinstance(event.label, GridLabel):
        marks = ["?" if one is None else f"{one:.0f}" for one in found["grid_safe"]]
        return {"grid_safe": " ".join(marks) if event.kind == "answer" else None}
    for name in _MARKED:
        if name in found:
            found[name] = " ".join(f"{start}:{end}" for start, end in found[name]) or "none"
    return found


def export(store: LabelStore, path: Path) -> int:
    """Write the table to a .csv or .parquet file; return its rows.

    The latter needs the extra `parquet`.

    Raises:
        ValueError: If the file's ending is another one, or the extra is missing.
        StorageError: If it cannot be written.
    """
    rows = table(store)
    if path.suffix == ".csv":
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([{k: _no_formula(v) for k, v in row.items()} for row in rows])
        write_atomically(path, file.getvalue().encode())
    elif path.suffix == ".parquet":
        write_atomically(path, _parquet(rows))
    else:
        raise ValueError(f"answers are exported to .csv or .parquet, got {path}; rename it")
    return len(rows)


def agreement(store: LabelStore) -> dict[str, float]:
    """How far people agree, under the name of each measure; NaN where too few answered the same.

    Returns:
        `alpha_preference` (with the squared distance of first 1, tie 0.5, second 0), `alpha_safety`
        and `alpha_accept`, `alpha_grid` of each trajectory in a grid, `alpha_marks` of each step of
        those in which steps were marked; `kappa_NAME_A_B` for each two people A and B who share a
        question.
    """
    found: dict[str, float] = {}
    people, tables = _ratings(store)
    for name, ratings in tables.items():
        distance = "interval" if name == "preference" else "nominal"
        found[f"alpha_{name}"] = krippendorff_alpha(ratings, distance=distance)  # type: ignore[arg-type]
    for (i, one), (j, other) in itertools.combinations(enumerate(people), 2):
        for name, ratings in tables.items():
            kappa = cohen_kappa(ratings[i], ratings[j])
            if not math.isnan(kappa):
                found[f"kappa_{name}_{one}_{other}"] = kappa
    return found


def disagreements(store: LabelStore) -> list[tuple[str, list[Event]]]:
    """The questions on which people do not agree, by name, each with all answers to it."""
    names = {question.id: question.name for question in store.questions()}
    by_query: dict[int, list[Event]] = {}
    for event in store.events():
        if event.kind == "answer":
            by_query.setdefault(event.query, []).append(event)

    def differ(events: Sequence[Event]) -> bool:
        rows = np.array([_numbers(event.label) for event in events])
        return any(len(np.unique(column[~np.isnan(column)])) > 1 for column in rows.T)

    return [(names[n], events) for n, events in sorted(by_query.items()) if differ(events)]


def _numbers(label: AnyLabel) -> Sequence[float]:
    """The answers without the marks, of which no two are the same to the step."""
    if isinstance(label, Label):
        return [getattr(label, name) for name in _NUMBERS]
    return label.safe if isinstance(label, GridLabel) else [label.safe]


def _ratings(store: LabelStore) -> tuple[list[str], dict[str, np.ndarray]]:
    """People, and tables of their ratings, (people, items), NaN for "can't tell"."""
    events = [event for event in store.events() if event.kind == "answer"]
    people = sorted({event.annotator for event in events})
    pairs = sorted({e.query for e in events if isinstance(e.label, Label)})
    batches = sorted({e.query for e in events if isinstance(e.label, BatchLabel)})
    members = {question.id: question.members for question in store.questions()}
    grids: dict[int, int] = {}  # where the columns of each begin
    marked: dict[tuple[int, str], tuple[int, int]] = {}  # first column and steps, of a member
    width = steps = 0
    for event in events:
        if isinstance(event.label, GridLabel) and event.query not in grids:
            grids[event.query], width = width, width + len(event.label.safe)
        for name, digest in _marked_members(event, members):
            if (event.query, name) not in marked:
                length = len(store.trajectory(digest))
                marked[event.query, name], steps = (steps, length), steps + length
    tables = {
        "preference": np.full((len(people), len(pairs)), np.nan),
        "safety": np.full((len(people), 2 * len(pairs)), np.nan),
        "accept": np.full((len(people), len(batches)), np.nan),
        "grid": np.full((len(people), width), np.nan),
        "marks": np.full((len(people), steps), np.nan),
    }
    for event in events:
        row = people.index(event.annotator)
        label = event.label
        if isinstance(label, BatchLabel):
            tables["accept"][row, batches.index(event.query)] = label.safe
            continue
        if isinstance(label, GridLabel):
            first = grids[event.query]
            tables["grid"][row, first : first + len(label.safe)] = label.safe
            continue
        column = pairs.index(event.query)
        tables["preference"][row, column] = label.preference
        tables["safety"][row, 2 * column : 2 * column + 2] = label.first_safe, label.second_safe
        for name, _ in _marked_members(event, members):
            begin, length = marked[event.query, name]
            tables["marks"][row, begin : begin + length] = unsafe_steps(
                getattr(label, name), length
            )
    return people, tables


def _marked_members(event: Event, members: Mapping[int, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Which of a pair somebody marked the steps: field of the label, digest of the trajectory."""
    label = event.label
    if not isinstance(label, Label):
        return []
    both = zip(_MARKED, members[event.query], strict=True)
    return [(name, digest) for name, digest in both if getattr(label, name) is not None]


def _no_formula(value: Any) -> Any:
    """A spreadsheet runs what begins like a formula; an annotator chooses their name."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t" else value


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"parquet files are written by pyarrow, which is missing ({error}); "
            "pip install 'pbcrl[parquet]', or export to .csv"
        ) from error
    numbers = {*_NUMBERS, "batch_safe", "seconds"}
    schema = pyarrow.schema(
        [(name, pyarrow.float64() if name in numbers else pyarrow.string()) for name in COLUMNS]
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), file)
    return file.getvalue()
