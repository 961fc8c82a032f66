"""Exact resume: everything that a run's future depends on, on disk, whole or not at all.

A run that was killed at any moment goes on from its newest checkpoint and ends as if nothing had
happened: the same weights and the same metrics, to the last bit, on the same CPU. What lies in the
folder beyond the checkpoint is made again, labels excepted: those are never bought twice.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from pbcrl import (
    CorruptFileError,
    LabelLog,
    StorageError,
    TrajectoryDataset,
    TrajectoryWriter,
    load_tensors,
    read_labels,
    save_tensors,
)

ArgsT = TypeVar("ArgsT")

_NEWEST, _BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint beside the one before, which is kept in case this one is damaged.

    Args:
        folder: The run's.
        state: Nested dicts and lists of tensors, arrays, numbers, strings and None.
    """
    newest = folder / _NEWEST
    if newest.exists():
        os.replace(newest, folder / _BEFORE)
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, "state", tensors)
    save_tensors(newest, kind="run", tensors=tensors, meta={"tree": tree})


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the newest checkpoint that is whole, or None if the run was cut off before the first.

    Raises:
        CorruptFileError: If there are checkpoints and all are damaged.
    """
    damaged = None
    for name in (_NEWEST, _BEFORE):
        if not (folder / name).exists():
            continue
        try:
            tensors, meta = load_tensors(folder / name, kind="run")
        except CorruptFileError as error:
            print(f"warning: {error}", flush=True)
            damaged = error
            continue
        state: dict[str, Any] = _unpack(meta["tree"], tensors)
        return state
    if damaged is not None:
        raise damaged
    return None


def resumed(args: ArgsT, *, script: str) -> ArgsT:
    """Return the arguments of the run to go on with, or `args` if `--resume` is not given.

    Raises:
        StorageError: If the folder holds no run of this script.
        ValueError: If that run is finished, or other arguments are given along with `--resume`.
    """
    given = dataclasses.asdict(args)  # type: ignore[call-overload]
    if given["resume"] is None:
        return args
    folder = Path(given["resume"])
    try:
        stored = json.loads((folder / "args.json").read_text())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"--resume takes the folder of a run, but {folder} has no readable args.json "
            f"({error}); start the run anew"
        ) from error
    if stored.pop("script", None) != script:
        raise StorageError(
            f"--resume takes a run of {script}.py, {folder} holds one of another script; use that"
        )
    if (folder / "summary.json").exists():
        raise ValueError(f"--resume takes a run that was cut off, but {folder} is finished")
    defaults = dataclasses.asdict(type(args)())  # type: ignore[call-overload]
    stored = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
    if unknown := sorted(set(stored) ^ set(defaults)):
        raise StorageError(
            f"{folder} was written by another version of {script}.py, which differs in "
            f"{', '.join(unknown)}; start the run anew"
        )
    clashing = [n for n in given if given[n] not in (defaults[n], stored[n]) and n != "resume"]
    if clashing:
        raise ValueError(
            f"a resumed run keeps its arguments, but {', '.join(sorted(clashing))} differ from "
            f"those in {folder}; leave them out, or start a new run"
        )
    place = {"resume": str(folder), "runs_dir": str(folder.parent), "run_name": folder.name}
    again: ArgsT = dataclasses.replace(args, **(stored | place))  # type: ignore[type-var]
    return again


def envs_state(envs: VectorEnv[Any, Any, Any]) -> dict[str, np.ndarray] | None:
    """The state of all envs, or None if they do not offer theirs (`get_state`)."""
    get_state = getattr(envs.unwrapped, "get_state", None)
    state: dict[str, np.ndarray] | None = None if get_state is None else get_state()
    return state


def restore_envs(envs: VectorEnv[Any, Any, Any], state: Mapping[str, np.ndarray]) -> None:
    """Put the envs where `envs_state` found them."""
    envs.unwrapped.set_state(state)  # type: ignore[attr-defined]


def cut_labels(path: Path, *, keep: int) -> None:
    """Leave the first labels in a log, and move the others to `labels_unused.jsonl` beside it."""
    labels = read_labels(path) if path.exists() else []
    if len(labels) <= keep:
        return
    with LabelLog(path.with_name("labels_unused.jsonl")) as unused:
        unused.append(labels[keep:])
    partial = path.with_name("labels.partial.jsonl")
    partial.unlink(missing_ok=True)
    with LabelLog(partial) as kept:
        kept.append(labels[:keep])
    os.replace(partial, path)


def take_up(writer: TrajectoryWriter) -> None:
    """Let a writer go on with a dataset that Ctrl-C has finished; it has taken up a partial one.

    Raises:
        StorageError: If it is a sample already, of more episodes than fit into it.
    """
    if writer.seen > 0 or not writer.path.exists():
        return
    before = TrajectoryDataset(writer.path)
    if before.seen > len(before):
        raise StorageError(
            f"{writer.path} was finished when the run was stopped, and holds a sample of its "
            f"{before.seen} episodes, to which no more can be added; move it away, and start anew"
        )
    for trajectory in before:
        writer.add(trajectory)


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of a nested state; tensors and arrays go to `tensors` and leave their names."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        return {"array": path}
    if isinstance(value, Mapping):
        # As pairs: the keys of an optimizer's state are numbers.
        return {"dict": [[k, _pack(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {path}, which is {type(value).__name__}")


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "dict":
        return {k: _unpack(v, tensors) for k, v in value}
    return [_unpack(v, tensors) for v in value]
