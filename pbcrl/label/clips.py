"""Clips of trajectories: H.264 files that any browser plays and seeks in, one per trajectory.

They lie in the label folder under `clips`, named by the trajectory's digest, and are made once. A
clip is `DIGEST.mp4` and `DIGEST.json`, which is written last and says how pictures and steps go
together; without a film it says why there is none. Needs the extra `label`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pbcrl.errors import LabelError, StorageError
from pbcrl.label.replay import Image, Replay, drawn_how, replay_frames
from pbcrl.storage import make_folder, open_regular, write_atomically

CLIPS = "clips"
"""Their folder in a label folder."""
PARTIAL = ".partial.mp4"
"""Ends the names of those that are being drawn."""

_MOST_FPS = 15.0  # drawing costs more than seeing less
_MOST_FRAMES = 400
_MAX_ABOUT = 1 << 22  # bytes; what is cut off there is no JSON
_MAX_CAPTION = 1000  # letters, so that those of all frames have fewer
# A key picture every 15, and the index in front: seeking is exact and quick.
_OPTIONS = ("-crf", "23", "-preset", "veryfast", "-g", "15", "-movflags", "+faststart", "-an")


def draw_frames(
    folder: Path, digest: str, frames: Iterable[np.ndarray], *, steps: int, fps: float = 15.0
) -> None:
    """Make a clip of recorded frames.

    Args:
        folder: The label folder.
        digest: Of the trajectory.
        frames: In order, evenly spaced over the trajectory: uint8 (H, W, 3) each, of one size.
        steps: Of the trajectory.
        fps: Frames per second of real time.

    Raises:
        LabelError: If `imageio-ffmpeg` is missing, or these are no such frames.
        StorageError: If the clip cannot be written.
    """
    pictures = [np.asarray(frame) for frame in frames]
    shapes = {picture.shape for picture in pictures}
    kinds = {picture.dtype for picture in pictures}
    size = next(iter(shapes), ())
    if len(shapes) != 1 or kinds != {np.dtype(np.uint8)} or len(size) != 3 or size[2] != 3:
        raise LabelError(
            f"frames are uint8 (H, W, 3) of one size, got {sorted(map(str, kinds))} of "
            f"{sorted(shapes)[:3]}; convert them"
        )
    every = _steps_each(steps, len(pictures))
    _write(folder, digest, ((one, "") for one in pictures), fps=fps, every=every, steps=steps)


def _steps_each(steps: int, count: int) -> float:
    """Steps from one picture to the next: whole where it can be, with one after the last or not."""
    for between in (count - 1, count):
        if between > 0 and steps % between == 0:
            return steps // between
    return max(1.0, steps / max(1, count - 1))


def draw_replay(folder: Path, digest: str, replay: Replay, trajectory: Any) -> None:
    """Make a clip by playing a trajectory again.

    Raises as `replay_frames` and `draw_frames`; LabelError, too, if the pictures change their size.
    """
    per_second, _ = drawn_how(replay.env_id)
    steps = len(trajectory)
    every = max(1, math.ceil(per_second / _MOST_FPS), math.ceil(steps / _MOST_FRAMES))
    frames = replay_frames(replay, trajectory, every=every)
    _write(folder, digest, frames, fps=per_second / every, every=every, steps=steps)


def remove_leftovers(folder: Path) -> None:
    """Remove what drawings that were cut off have left there, an hour ago or more."""
    for path in checked_clips(folder).glob(f"*{PARTIAL}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


def missing() -> str | None:
    """Say what clips are made with and is not installed, or None."""
    try:
        _ffmpeg()
    except LabelError as error:
        return str(error)
    return None


def note_failure(folder: Path, digest: str, why: str) -> None:
    """Say that a trajectory cannot be drawn, so that its curves are shown instead."""
    path = checked_clips(folder) / f"{digest}.json"
    write_atomically(path, json.dumps({"error": why[:1000]}).encode())


def checked_clips(folder: Path) -> Path:
    """The folder of a label folder's clips, which need not be there yet.

    Raises:
        StorageError: If it is a link: clips would be read and written anywhere.
    """
    path = folder / CLIPS
    if path.is_symlink():
        raise StorageError(
            f"a label folder holds its clips itself, but {path} is a link to {path.readlink()}; "
            "remove the link, or put the folder itself in its place"
        )
    return path


def open_clip(folder: Path, digest: str) -> BufferedReader:
    """A clip's film; an `OSError` if there is none in the folder itself."""
    return open_regular(folder / CLIPS / f"{digest}.mp4", follow_links=False)


def clip_of(folder: Path, digest: str) -> dict[str, Any] | None:
    """What is known of a clip; None if it has not been made.

    Returns:
        `fps`, `frames` (their number), `every` (steps from one to the next), `steps` and
        `captions` (one per frame, or none); or `error` alone.
    """
    try:
        with open_regular(folder / CLIPS / f"{digest}.json", follow_links=False) as file:
            found = json.loads(file.read(_MAX_ABOUT))
        if not isinstance(found, dict):
            return None
        if "error" not in found:
            open_clip(folder, digest).close()
    except (OSError, ValueError, RecursionError):
        return None
    return found


def _write(
    folder: Path,
    digest: str,
    frames: Iterator[tuple[Image, str]],
    *,
    fps: float,
    every: float,
    steps: int,
) -> None:
    ffmpeg = _ffmpeg()
    path = checked_clips(folder) / f"{digest}.mp4"
    make_folder(path.parent)
    partial = path.with_name(f"{digest}.{os.getpid()}{PARTIAL}")
    first, caption = next(frames)
    captions, count = [caption[:_MAX_CAPTION]], 0
    height, width = first.shape[:2]
    even = width + width % 2, height + height % 2
    writer = ffmpeg.write_frames(
        str(partial),
        even,
        fps=fps,
        codec="libx264",
        macro_block_size=2,
        quality=None,
        output_params=[*_OPTIONS, "-threads", "1"],
        ffmpeg_log_level="error",
    )
    try:
        writer.send(None)
        for image, said in chain([(first, caption)], frames):
            if image.shape != first.shape:
                raise LabelError(
                    f"the pictures of a clip are of one size, got {first.shape[:2]} and then "
                    f"{image.shape[:2]}; let render() return one size in all of an episode"
                )
            pad = ((0, even[1] - image.shape[0]), (0, even[0] - image.shape[1]), (0, 0))
            writer.send(np.ascontiguousarray(np.pad(image, pad, mode="edge")))
            count += 1
            if count > 1:
                captions.append(said[:_MAX_CAPTION])
        writer.close()
        os.replace(partial, path)
    finally:
        writer.close()
        with suppress(OSError):
            partial.unlink()
    about: dict[str, Any] = {"fps": fps, "frames": count, "every": every, "steps": steps}
    about["captions"] = captions if any(captions) else []
    write_atomically(path.with_suffix(".json"), json.dumps(about).encode())


def _ffmpeg() -> Any:
    try:
        module = importlib.import_module("imageio_ffmpeg")
        module.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise LabelError(
            f"clips are made with imageio-ffmpeg, but it is missing ({error}); install the extra: "
            "pip install 'pbcrl[label]'"
        ) from error
    return module
