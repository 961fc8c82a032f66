"""Label folders as they were before there was a store: a file per query, answers as lines."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from pbcrl.data.label_log import label_from_json, query_digest
from pbcrl.errors import CorruptFileError, StorageError
from pbcrl.label.arrays import from_npz
from pbcrl.storage import corrupt, read_bytes
from pbcrl.trajectory import Label, Query

ANSWERS = "answers.jsonl"
"""The file of the answers."""

_NAME = re.compile(r"\d{6,}-([0-9a-f]{32})")


def has_queries(folder: Path) -> bool:
    """Whether there are any."""
    return bool(_queries(folder))


def read_folder(folder: Path) -> list[tuple[Query, Label | None]]:
    """All queries, in the order of asking, with their answers; the last answer to one holds.

    Raises:
        CorruptFileError: If a line is no answer, names no query of the folder, or a query is
            damaged; the message names it.
    """
    answers, queries = read_answers(folder), _queries(folder)
    if unknown := answers.keys() - {path.stem for path in queries}:
        raise CorruptFileError(
            f"an answer names a query of its folder, but {folder / ANSWERS} answers "
            f"{', '.join(map(repr, sorted(unknown)))}, which {folder} does not hold; "
            "correct the name, or restore the query's file"
        )
    return [(_read_query(path), answers.get(path.stem)) for path in queries]


def read_answers(folder: Path) -> dict[str, Label]:
    """The answers, by the query's name.

    Raises:
        CorruptFileError: If a line is none.
    """
    path = folder / ANSWERS
    answers: dict[str, Label] = {}
    if not path.exists():
        return answers
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            names = ("preference", "first_safe", "second_safe")
            values = {name: entry.pop(name, None) for name in names}
            name = entry.pop("query")
            if entry or not isinstance(name, str):
                raise ValueError(f"unknown keys {list(entry)}")
            answers[name] = label_from_json(values)
        except Exception as error:  # a person may have written anything
            raise CorruptFileError(
                f"an answer is a line like {{'query': NAME, 'preference': 1, 'first_safe': 1, "
                f"'second_safe': 0}}, but line {number} of {path} is not ({error!r}); fix it, and "
                "the folder will be taken over"
            ) from error
    return answers


def set_aside(folder: Path) -> None:
    """Rename the answers, which the store has now."""
    path = folder / ANSWERS
    if path.exists():
        os.replace(path, path.with_name(f"{ANSWERS}.taken-over"))


def _queries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.npz") if _NAME.fullmatch(path.stem))


def _read_query(path: Path) -> Query:
    try:
        data = read_bytes(path)
        first, second = (
            from_npz(data, (f"{which}_obs", f"{which}_actions")) for which in ("first", "second")
        )
        query = Query(first, second)
    except StorageError:
        raise
    except Exception as error:  # the bytes may be anything
        raise corrupt(path, f"it is no query ({error!r})") from error
    if query_digest(query) != path.stem.partition("-")[2]:
        raise corrupt(path, "it is not the query that its name says")
    return query
