"""`python -m pbcrl.label FOLDER`: answer the questions of a label folder, or see what was answered.

The page opens in a browser, on this machine alone. `FOLDER/intro.md`, if there is one, says in the
words of the task what counts as unsafe.
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # `python -m` looks for every module in the working directory first, which may be the label
    # folder, and this from somebody else.
    del sys.path[0]

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pbcrl.label.store import LabelStore


def main(argv: list[str] | None = None, *, prog: str = "python -m pbcrl.label") -> None:
    """Serve the page, ask at the terminal, export, or tell how far people agree."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("folder", type=Path, help="of a FolderOracle, or of --label-folder")
    parser.add_argument("--annotator", help="who answers; the page asks, if it is not given")
    parser.add_argument("--terminal", action="store_true", help="ask here, without a browser")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write all answers to .csv or .parquet"
    )
    parser.add_argument("--agreement", action="store_true", help="print how far people agree")
    parser.add_argument("--port", type=int, default=0, help="of the page; default: a free one")
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    parser.add_argument(
        "--listen",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="of this machine in a network whose people answer; unencrypted, and whoever has the "
        "printed link can see and answer all questions; default: this machine alone",
    )
    parser.add_argument(
        "--env-id",
        action="append",
        default=[],
        metavar="MODULE:ID",
        help="of an env whose clips are drawn and whose module is your own: it is imported from "
        "the working directory; installed ones need not be named",
    )
    args = parser.parse_args(argv)
    # Not above: --help need not wait for them.
    import getpass

    from pbcrl.errors import PbcrlError
    from pbcrl.label.export import export
    from pbcrl.label.server import serve
    from pbcrl.label.store import LabelStore, checked_name, hold_folder
    from pbcrl.label.terminal import ask_at_terminal, printable

    if not args.folder.is_dir():
        raise SystemExit(
            f"error: there is no folder {args.folder}; a run makes the one that its --label-folder "
            "names, so begin that first"
        )
    try:
        name = None if args.annotator is None else checked_name(args.annotator)
        if args.export is not None:
            with _store_to_read(args.folder) as store:
                print(f"{export(store, args.export)} answers in {args.export}")
        elif args.agreement:
            with _store_to_read(args.folder) as store:
                _print_agreement(store)
        elif args.terminal:
            with hold_folder(args.folder, by="annotator"):
                ask_at_terminal(LabelStore(args.folder), annotator=name or getpass.getuser())
        else:
            with hold_folder(args.folder, by="annotator"):
                serve(
                    LabelStore(args.folder),
                    listen=args.listen,
                    port=args.port,
                    annotator=name,
                    env_ids=args.env_id,
                    browse=not args.no_browser,
                )
    except (PbcrlError, OSError, ValueError) as error:
        raise SystemExit(f"error: {printable(error)}") from error


@contextmanager
def _store_to_read(folder: Path) -> "Iterator[LabelStore]":
    """A folder's store; of one that cannot be written, a copy, since SQLite writes while it reads.

    Raises:
        StorageError: If there is no store.
        OSError: If it cannot be copied.
    """
    import os
    import shutil
    from tempfile import TemporaryDirectory

    from pbcrl.label.store import STORE, LabelStore

    writable = os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    with TemporaryDirectory() as copy:
        if not writable and (folder / STORE).exists():
            for path in folder.glob(f"{STORE}*"):  # with its log, which may hold the last answers
                shutil.copyfile(path, Path(copy) / path.name)
            folder = Path(copy)
        store = LabelStore(folder)
        try:
            yield store
        finally:
            store.close()


def _print_agreement(store: "LabelStore") -> None:
    import math
    from dataclasses import asdict

    import numpy as np

    from pbcrl.label.export import agreement, disagreements
    from pbcrl.label.terminal import printable

    for name, value in agreement(store).items():
        print(f"{name:<32} {'too few answers' if math.isnan(value) else f'{value:.3f}'}")
    for name, events in disagreements(store):
        print(printable(name))
        for event in events:
            answer = ", ".join(
                f"{name.replace('_', ' ')} {' '.join(f'{one:g}' for one in np.ravel(value))}"
                for name, value in asdict(event.label).items()
                if value is not None
            )
            print(f"   {printable(event.annotator)}: {answer}")


if __name__ == "__main__":
    main()
