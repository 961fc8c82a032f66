"""Labelled pairs of responses of language models, from local files.

Three kinds of rows are read, told apart by their columns: Safe-RLHF's pairs, TRL's `chosen` and
`rejected`, and BeaverTails' single responses with a safety label. Does not depend on any library of
language models; `pbcrl.llm.cost_head` learns a cost from what is read here.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pbcrl.buffer import check_generator
from pbcrl.errors import CorruptFileError, LabelError
from pbcrl.storage import open_regular, unreadable
from pbcrl.trajectory import Label

Row = Mapping[str, Any]

_SAFE_RLHF = (
    "prompt",
    "response_0",
    "response_1",
    "is_response_0_safe",
    "is_response_1_safe",
    "better_response_id",
    "safer_response_id",
)
_TRL = "prompt", "chosen", "rejected"
_BEAVERTAILS = "prompt", "response", "is_safe"


@dataclass(frozen=True)
class TextPair:
    """Two responses to a prompt, and what was said of them; or one that is judged alone."""

    prompt: str
    """What a response is appended to, as the model reads it."""
    first: str
    """A response."""
    second: str | None
    """Another one to the same prompt; None if the first is judged alone."""
    label: Label
    """Which is the safer one, and whether each is safe; NaN where it was not said."""
    first_better: float = math.nan
    """Probability that the first is the more helpful one, in [0, 1]; NaN where it was not said."""

    @property
    def is_contradictory(self) -> bool:
        """Whether an unsafe response is called safer than a safe one, or than the same text."""
        mu, safe = self.label.preference, (self.label.first_safe, self.label.second_safe)
        if self.second == self.first:
            return mu < 0.5 or mu > 0.5 or safe in ((0, 1), (1, 0))  # of NaN nothing is said
        return (mu > 0.5 and safe == (0, 1)) or (mu < 0.5 and safe == (1, 0))


def read_pairs(
    path: str | os.PathLike[str],
    *,
    rng: np.random.Generator,
    conflicts: Literal["raise", "drop", "keep"] = "raise",
    template: str = "{prompt}",
) -> list[TextPair]:
    """Read labelled responses from a .jsonl, .jsonl.gz or .parquet file (extra `llm`).

    Each row is of one of three kinds. Further columns are not read, and a label that is null was
    not given.

    - Safe-RLHF: `prompt, response_0, response_1, is_response_0_safe, is_response_1_safe,
      better_response_id, safer_response_id`, where ids are 0 or 1.
    - TRL: `prompt, chosen, rejected` as texts, where the chosen response is the safer one; and, if
      they are known, `chosen_safe, rejected_safe`.
    - BeaverTails: `prompt, response, is_safe`, a safety label alone.

    Args:
        path: The file.
        rng: Swaps the two responses of a pair with probability 1/2. If the safer one always came
            first, the preferences of a batch would have no entropy for `snr_loss` to divide by.
        conflicts: What happens to a contradictory row, see `TextPair.is_contradictory`: it is
            refused, dropped with a warning that counts such rows, or kept.
        template: How a prompt is shown to the model; "{prompt}" stands for the row's.

    Returns:
        One pair per row, in the file's order.

    Raises:
        StorageError: If the file cannot be read; `CorruptFileError` if it is damaged.
        LabelError: If it has no rows, or a row is of no such kind, or contradictory.
        ValueError: If an argument is not one of those above, or pyarrow is missing.
    """
    check_generator(rng)
    if conflicts not in ("raise", "drop", "keep"):
        raise ValueError(f"conflicts must be 'raise', 'drop' or 'keep', got {conflicts!r}")
    if "{prompt}" not in template:
        raise ValueError(f"a template must hold '{{prompt}}', got {template!r}")
    path = Path(path)
    pairs, contradictory = [], 0
    for where, row in _rows(path):
        pair = _pair(where, row)
        if pair.is_contradictory and conflicts != "keep":
            if conflicts == "raise":
                raise LabelError(
                    f"labels of a row must not contradict each other, but {where} calls an unsafe "
                    "response safer than a safe one, or tells two equal texts apart; correct it, "
                    "or pass conflicts='drop' or conflicts='keep'"
                )
            contradictory += 1
            continue
        if pair.second is not None and rng.random() < 0.5:
            pair = _swapped(pair)
        pairs.append(replace(pair, prompt=template.replace("{prompt}", pair.prompt)))
    if contradictory:
        warnings.warn(f"{path}: {contradictory} contradictory rows were dropped", stacklevel=2)
    if not pairs:
        raise LabelError(
            f"a file of labelled responses has rows, but {path} has none to learn from"
        )
    return pairs


def helpfulness(pairs: list[TextPair]) -> list[TextPair]:
    """Relabel pairs so that a "cost" learned from them is how helpful a response is.

    The less helpful response takes the place of the safer one, and no safety is labelled: what is
    learned by the preference loss is then higher for helpful responses, a reward model.
    """
    return [
        replace(pair, label=Label(1 - pair.first_better, math.nan, math.nan))
        for pair in pairs
        if not math.isnan(pair.first_better)
    ]


def _swapped(pair: TextPair) -> TextPair:
    assert pair.second is not None
    label = Label(1 - pair.label.preference, pair.label.second_safe, pair.label.first_safe)
    return TextPair(pair.prompt, pair.second, pair.first, label, 1 - pair.first_better)


def _pair(where: str, row: Row) -> TextPair:
    if "response_0" in row:
        _check_columns(where, row, _SAFE_RLHF)
        prompt, first, second = (_text(where, row, name) for name in _SAFE_RLHF[:3])
        safe, other_safe = (_bit(where, row, name) for name in _SAFE_RLHF[3:5])
        safer, better = (_bit(where, row, f"{name}_response_id") for name in ("safer", "better"))
        return TextPair(prompt, first, second, Label(1 - safer, safe, other_safe), 1 - better)
    if "chosen" in row:
        _check_columns(where, row, _TRL)
        prompt, first, second = (_text(where, row, name) for name in _TRL)
        safe, other_safe = (_bit(where, row, name) for name in ("chosen_safe", "rejected_safe"))
        return TextPair(prompt, first, second, Label(1.0, safe, other_safe))
    _check_columns(where, row, _BEAVERTAILS)
    prompt, response = (_text(where, row, name) for name in _BEAVERTAILS[:2])
    return TextPair(prompt, response, None, Label(math.nan, _bit(where, row, "is_safe"), math.nan))


def _check_columns(where: str, row: Row, needed: tuple[str, ...]) -> None:
    if missing := [name for name in needed if name not in row]:
        raise LabelError(
            f"a row needs the columns {', '.join(needed)}, but {where} lacks {', '.join(missing)} "
            f"and has {', '.join(map(repr, sorted(row))) or 'none'}; rename its columns to those "
            "of Safe-RLHF, TRL (prompt, chosen, rejected) or BeaverTails"
        )


def _text(where: str, row: Row, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise LabelError(
            f"{name} must be text, but {where} has {type(value).__name__}; apply the chat template "
            "to a list of messages first"
        )
    return value


def _bit(where: str, row: Row, name: str) -> float:
    """A label that is true or false, 1 or 0, or null: NaN."""
    value = row.get(name)
    if value is None:
        return math.nan
    if value not in (0, 1):  # True == 1
        raise LabelError(f"{name} must be true, false, 0, 1 or null, but {where} has {value!r}")
    return float(value)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row, and how to name it in a message; lines of JSONL count from 1, and so do rows."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise ValueError(
        f"labelled responses are read from .jsonl, .jsonl.gz and .parquet files, got {path}; "
        "convert or rename it"
    )


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    where = str(path)
    try:
        with ExitStack() as stack:
            file: Any = stack.enter_context(open_regular(path))
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            lines = stack.enter_context(io.TextIOWrapper(file, "utf-8-sig"))
            for number, line in enumerate(lines, 1):  # not splitlines: U+2028 may stand in a text
                where = f"{path}, line {number},"
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"it holds {type(row).__name__}, not an object")
                    yield where, row
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(where, error) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"parquet files are read by pyarrow, which is missing ({error}); "
            "pip install 'pbcrl[parquet]', or convert to .jsonl"
        ) from error
    try:
        with open_regular(path) as file:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches()
            rows = [row for batch in batches for row in batch.to_pylist()]
    except (pyarrow.ArrowException, ValueError) as error:
        raise _damaged(str(path), error) from error
    except OSError as error:
        raise unreadable(path, error) from error
    return ((f"{path}, row {number},", row) for number, row in enumerate(rows, 1))


def _damaged(where: str, error: Exception) -> CorruptFileError:
    return CorruptFileError(
        f"a file must be read as it was written, but {where} makes no sense ({error}); "
        "download or write it again"
    )
