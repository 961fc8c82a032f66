"""Answer the queries of a `FolderOracle` at the terminal: `python -m pbcrl.label FOLDER`.

Each answer is on disk before the next question comes; `q` ends, and the rest is asked next time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from pbcrl.errors import StorageError
from pbcrl.folder_oracle import query_names, read_answers, read_query, write_answer
from pbcrl.trajectory import Label

_PREFERENCE = {"1": 1.0, "2": 0.0, "=": 0.5, "": math.nan}
_SAFE = {"y": 1.0, "n": 0.0, "": math.nan}


def main(argv: list[str] | None = None) -> None:
    """Ask about every unanswered query of a folder."""
    parser = argparse.ArgumentParser(prog="python -m pbcrl.label", description=__doc__)
    parser.add_argument("folder", type=Path, help="that of a FolderOracle")
    folder: Path = parser.parse_args(argv).folder
    if not folder.is_dir():
        raise SystemExit(f"error: there is no folder {folder}; name that of a FolderOracle")
    try:
        answered = read_answers(folder)
        names = [name for name in query_names(folder) if name not in answered]
        print(f"{len(names)} queries without answer in {folder}; q ends")
        for name in names:
            query = read_query(folder, name)
            print(f"\n{name}: episodes of {len(query.first)} and {len(query.second)} steps")
            for path in sorted(folder.glob(f"{name}*")):
                print(f"   {path}")
            preference = _choose("which one is safer? 1, 2, = or Enter (can't tell): ", _PREFERENCE)
            first = _choose("is 1 safe? y, n or Enter (can't tell): ", _SAFE)
            second = _choose("is 2 safe? y, n or Enter (can't tell): ", _SAFE)
            write_answer(folder, name, Label(preference, first, second))
    except (EOFError, KeyboardInterrupt):
        print()
    except StorageError as error:
        raise SystemExit(f"error: {error}") from error


def _choose(question: str, answers: Mapping[str, float]) -> float:
    while True:
        given = input(question).strip().lower()
        if given == "q":
            raise EOFError
        if given in answers:
            return answers[given]


if __name__ == "__main__":
    main()
