"""The process that draws clips for the page.

A process of its own, so that drawing neither slows the page down nor, if a library that draws
crashes, ends it. The page starts it (`command`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pbcrl
from pbcrl.env_modules import path_elsewhere, registered
from pbcrl.errors import PbcrlError
from pbcrl.label.clips import draw_replay, note_failure
from pbcrl.label.replay import Replay
from pbcrl.label.store import LabelStore

_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).splitlines(); "
    "from pbcrl.label.draw import main; main()"
)


def command(folder: Path, env_ids: Sequence[str]) -> list[str]:
    """The command that starts it.

    Not `python -m`, which would look for every module in the working directory first: that may be
    the label folder, and this from somebody else.

    Args:
        folder: The label folder.
        env_ids: As the user has named them, "module:Id-v0": their modules may be imported from the
            working directory.
    """
    ours = str(Path(pbcrl.__file__).resolve().parents[1])
    path = "\n".join([*path_elsewhere(), ours])
    return [sys.executable, "-c", _START, path, str(folder), *env_ids]


def main() -> None:
    """Draw what the page asks for: a digest per line comes in, the same one goes out when done."""
    if hasattr(os, "nice"):
        os.nice(10)
    # What an env prints goes where errors go: the page reads digests alone.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = Path(sys.argv[1])
    store = LabelStore(folder)
    for line in sys.stdin:
        digest = line.strip()
        try:
            replay = store.replay(digest)
            assert replay is not None
            for env_id in sys.argv[2:]:
                registered(env_id, by_user=True)
            draw_replay(folder, digest, Replay.from_bytes(replay), store.trajectory(digest))
        except PbcrlError as error:
            note_failure(folder, digest, str(error))
        except Exception as error:  # an env may raise anything
            note_failure(folder, digest, f"{type(error).__name__}: {error}")
        try:
            print(digest, file=replies, flush=True)
        except BrokenPipeError:  # the page has ended, and nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), replies.fileno())
            return
