"""The process that draws clips for the page: `python -m pbcrl.label.draw FOLDER`.

A process of its own, so that drawing neither slows the page down nor, if a library that draws
crashes, ends it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pbcrl.errors import PbcrlError
from pbcrl.label.clips import draw_replay, note_failure
from pbcrl.label.replay import Replay
from pbcrl.label.store import LabelStore


def main() -> None:
    """Draw what the page asks for: a digest per line comes in, the same one goes out when done."""
    if hasattr(os, "nice"):
        os.nice(10)
    folder = Path(sys.argv[1])
    store = LabelStore(folder)
    for line in sys.stdin:
        digest = line.strip()
        try:
            replay = store.replay(digest)
            assert replay is not None
            draw_replay(folder, digest, Replay.from_bytes(replay), store.trajectory(digest))
        except PbcrlError as error:
            note_failure(folder, digest, str(error))
        except Exception as error:  # an env may raise anything
            note_failure(folder, digest, f"{type(error).__name__}: {error}")
        try:
            print(digest, flush=True)
        except BrokenPipeError:  # the page has ended, and nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return


if __name__ == "__main__":
    main()
