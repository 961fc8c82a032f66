"""Answer the queries of a `FolderOracle` at the terminal: `python -m pbcrl.label FOLDER`.

Each answer is on disk before the next question comes; `q` ends, and the rest is asked next time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from pbcrl.errors import CorruptFileError, StorageError
from pbcrl.folder_oracle import hold_folder, query_names, read_answers, read_query, write_answer
from pbcrl.trajectory import Label

_PREFERENCE = {"1": 1.0, "2": 0.0, "=": 0.5, "": math.nan}
_SAFE = {"y": 1.0, "n": 0.0, "": math.nan}


def main(argv: list[str] | None = None) -> None:
    """Ask about every unanswered query of a folder, one person at a time."""
    parser = argparse.ArgumentParser(prog="python -m pbcrl.label", description=__doc__)
    parser.add_argument("folder", type=Path, help="that of a FolderOracle")
    folder: Path = parser.parse_args(argv).folder
    if not folder.is_dir():
        raise SystemExit(f"error: there is no folder {folder}; name that of a FolderOracle")
    try:
        with hold_folder(folder, by="annotator"):
            answered = read_answers(folder)
            names = [name for name in query_names(folder) if name not in answered]
            print(f"{len(names)} queries without answer in {_printable(folder)}; q ends")
            for name in names:
                _ask_about(folder, name)
    except (EOFError, KeyboardInterrupt):
        print()
    except StorageError as error:
        raise SystemExit(f"error: {_printable(error)}") from error


def _ask_about(folder: Path, name: str) -> None:
    try:
        query = read_query(folder, name)
    except CorruptFileError as error:
        print(f"\nwarning: {_printable(error)}; this query is left out")
        return
    print(f"\n{name}: episodes of {len(query.first)} and {len(query.second)} steps")
    for path in sorted(folder.glob(f"{name}*")):
        print(f"   {_printable(path)}")
    while True:
        preference = _choose("which one is safer? 1, 2, = or Enter (can't tell): ", _PREFERENCE)
        first = _choose("is 1 safe? y, n or Enter (can't tell): ", _SAFE)
        second = _choose("is 2 safe? y, n or Enter (can't tell): ", _SAFE)
        if (preference, first, second) not in ((1, 0, 1), (0, 1, 0)):
            break
        safer, other = (1, 2) if preference == 1 else (2, 1)
        print(f"{safer} is safer, yet it is unsafe and {other} is safe: that cannot be; once more")
    write_answer(folder, name, Label(preference, first, second))


def _choose(question: str, answers: Mapping[str, float]) -> float:
    while True:
        given = input(question).strip().lower()
        if given == "q":
            raise EOFError
        if given in answers:
            return answers[given]


def _printable(text: object) -> str:
    """What can be printed as it is; a file's name may hold codes that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


if __name__ == "__main__":
    main()
