"""Going on with a run: one that was cut off to its end, a finished one beyond it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pbcrl.errors import StorageError
from pbcrl.storage import write_atomically

ArgsT = TypeVar("ArgsT")

SHOWN = {"track"}
"""Arguments that decide what is shown of a run; one that is resumed may have others."""
OF_LENGTH = {"total_timesteps", "online_queries"}
"""Arguments that change when a finished run is extended."""


def read_args(folder: Path) -> dict[str, Any]:
    """Read `args.json` of a run.

    Raises:
        StorageError: If there is none, or it is not readable.
    """
    try:
        stored = json.loads((folder / "args.json").read_text())
        if not isinstance(stored, dict):
            raise ValueError(f"it holds {type(stored).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise StorageError(
            f"a run's folder holds args.json, but {folder} has none that can be read ({error}); "
            "give the folder that the training script named, or start a new run"
        ) from error
    return stored


def check_layers(folder: Path, args: Mapping[str, Any]) -> None:
    """Refuse hidden layers that the weights of a run cannot have, before memory is taken for them.

    Args:
        folder: The run's.
        args: Of `read_args`.

    Raises:
        StorageError: If the layers need more weights than the run's files can hold.
    """
    sizes = args.get("hidden_sizes", [])
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise StorageError(
            f"hidden layers have whole numbers of units, but args.json of {folder} has "
            f"{sizes!r:.99}; restore that file"
        )
    needed = max([*sizes, sum(one * next_one for one, next_one in pairwise(sizes))], default=0)
    files = (folder / name for name in ("agent.safetensors", "checkpoint.safetensors"))
    held = max((file.stat().st_size // 4 for file in files if file.exists()), default=needed)
    if needed > held:
        raise StorageError(
            f"a run's layers have the sizes of its weights, but those in args.json of {folder} "
            f"need {needed} weights or more, and its files can hold {held}; restore args.json"
        )


def is_finished(folder: Path) -> bool:
    """Whether a run has written its summary; an empty or torn file is no summary."""
    try:
        return bool(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError):
        return False


def stored_args(args_type: type[ArgsT], folder: Path, *, script: str) -> ArgsT:
    """Return the arguments with which a run was begun, to go on with it where it lies now.

    Args:
        args_type: Of the script.
        folder: The run's.
        script: The script's name, without its `.py`.

    Raises:
        StorageError: If the folder holds no run of this script, or of another version of it.
    """
    if folder.name in ("", ".."):  # "." has no name that a run's folder could have
        folder = folder.resolve()
    stored = read_args(folder)
    if stored.pop("script", None) != script:
        raise StorageError(
            f"--resume takes a run of {script}.py, {folder} holds one of another script; use that"
        )
    stored.pop("made_by", None)
    check_layers(folder, stored)
    names = {field.name for field in dataclasses.fields(args_type)}  # type: ignore[arg-type]
    if unknown := sorted(set(stored) ^ names):
        raise StorageError(
            f"{folder} was written by another version of {script}.py, which differs in "
            f"{', '.join(unknown)}; start a new run"
        )
    stored = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    place = {"resume": str(folder), "runs_dir": str(folder.parent), "run_name": folder.name}
    return args_type(**(stored | place))


def resumed(stored: ArgsT, given: ArgsT) -> ArgsT:
    """Return the arguments to go on with.

    Args:
        stored: Of `stored_args`.
        given: The same, where nothing else was asked for; a finished run is extended to a larger
            `total_timesteps`.

    Raises:
        ValueError: If others differ; or the run is finished and is not to be extended, or the
            reverse.
    """
    then, now = (dataclasses.asdict(args) for args in (stored, given))  # type: ignore[call-overload]
    folder = Path(then["resume"])
    kept = set(then) - SHOWN - {"resume", "total_timesteps"}
    if clashing := [
        f"--{name.replace('_', '-')} is {then[name]}, got {now[name]}"
        for name in sorted(kept)
        if then[name] != now[name]
    ]:
        raise ValueError(
            f"a resumed run keeps its arguments, but in {folder} {', and '.join(clashing)}; "
            "leave out what differs, or start a new run"
        )
    total, wanted = (args.get("total_timesteps", 0) for args in (then, now))
    changed = {name: now[name] for name in SHOWN & set(now)}
    if wanted == total:
        check_unfinished(folder, extendable=bool(total))
    else:
        _check_extension(folder, stored, wanted=wanted)
        changed |= _extended(then, wanted)
    return dataclasses.replace(stored, **changed)  # type: ignore[type-var]


def check_unfinished(folder: Path, *, extendable: bool) -> None:
    """Refuse to go on with a finished run as it is.

    Raises:
        ValueError: If it is finished.
    """
    if is_finished(folder):
        raise ValueError(
            f"--resume takes a run that was cut off, but {folder} is finished; "
            f"{'extend it by a larger --total-timesteps, or ' if extendable else ''}start another"
        )


def _check_extension(folder: Path, stored: Any, *, wanted: int) -> None:
    if not is_finished(folder):
        raise ValueError(
            f"a finished run goes on to more --total-timesteps, but {folder} was cut off before "
            f"its {stored.total_timesteps:,}; finish it by --resume alone first"
        )
    done = stored.num_iterations * stored.batch_size  # whole iterations
    if wanted <= done:
        raise ValueError(
            f"--total-timesteps counts all env steps of the run, and {folder} has {done:,} "
            f"already, got {wanted:,}; give more"
        )


def _extended(stored: Mapping[str, Any], wanted: int) -> dict[str, Any]:
    """The arguments of a longer run, with labels as often as before and the same offline data."""
    total, changed = stored["total_timesteps"], {"total_timesteps": wanted}
    if "online_queries" in stored:
        changed["online_queries"] = int(stored["online_queries"] * (wanted / total) ** 0.5)
    return changed


def note_extension(folder: Path, changed: Mapping[str, Any]) -> None:
    """Turn a finished run into one that was cut off, with other arguments.

    Done once its checkpoint has been read, and not before: what cannot be extended stays finished.

    Args:
        folder: The run's.
        changed: The arguments in which it is longer now.

    Raises:
        StorageError: If it cannot be written.
    """
    if not is_finished(folder):
        return  # noted already: the extension was cut off
    text = json.dumps({**read_args(folder), **changed}, indent=2)
    # In this order: at every moment it is a finished run, or one that was cut off.
    (folder / "summary.json").rename(folder / "summary_before.json")
    write_atomically(folder / "args.json", f"{text}\n".encode())
