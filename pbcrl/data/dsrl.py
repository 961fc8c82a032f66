"""Trajectories as a DSRL file, which OSRL reads, and back. Needs the extra `dsrl` (h5py).

One flat HDF5 file: `observations`, `next_observations`, `actions`, `rewards`, `costs`, `terminals`
and `timeouts`, a row per step; an episode ends where a terminal or a timeout is true. A D4RL file
is the same without costs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pbcrl.errors import StorageError
from pbcrl.storage import corrupt, described_by, write_atomically
from pbcrl.trajectory import Trajectory, require_outcomes

try:
    import h5py
except ImportError as error:
    raise ImportError("DSRL's files need h5py; pip install 'pbcrl[dsrl]'") from error

_KEYS = "observations", "next_observations", "actions", "rewards", "terminals", "timeouts"


def to_dsrl(trajectories: Sequence[Trajectory], path: str | os.PathLike[str]) -> None:
    """Write trajectories to one HDF5 file, atomically; the file is built in memory.

    Args:
        trajectories: With rewards, `terminated` and `final_obs`, and with costs, or all without.
        path: File to write.

    Raises:
        ValueError: If there is no trajectory, one lacks its outcome, or only some have costs.
        StorageError: If the file cannot be written.
    """
    require_outcomes(trajectories, "a DSRL file")
    with_costs = [one.costs is not None for one in trajectories]
    if any(with_costs) and not all(with_costs):
        raise ValueError(
            f"all trajectories of a DSRL file have costs or none has, but {sum(with_costs)} of "
            f"{len(with_costs)} have; leave the others out"
        )
    lasts = [(one, np.arange(1, len(one) + 1) == len(one)) for one in trajectories]
    rows: dict[str, list[Any]] = {
        "observations": [one.obs for one in trajectories],
        "next_observations": [
            np.concatenate([one.obs[1:], np.asarray(one.final_obs)[None]]) for one in trajectories
        ],
        "actions": [one.actions for one in trajectories],
        "rewards": [one.rewards for one in trajectories],
        "terminals": [last & bool(one.terminated) for one, last in lasts],
        "timeouts": [last & (not one.terminated) for one, last in lasts],
    }
    if all(with_costs):
        rows["costs"] = [one.costs for one in trajectories]
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        for name, parts in rows.items():
            file.create_dataset(name, data=np.concatenate(parts))
    write_atomically(Path(path), memory.getvalue())


def from_dsrl(path: str | os.PathLike[str]) -> list[Trajectory]:
    """Read a DSRL file, or one of D4RL: then without costs.

    Actions are taken as they are: the file does not say the bounds to which an env clips them.

    Returns:
        Its episodes in order. Steps after the last end are an episode that was cut off, and are
        returned as such, `terminated` false.

    Raises:
        StorageError: If it cannot be read.
        CorruptFileError: If it is no HDF5 file, lacks an array, or the arrays make no trajectories.
        NonFiniteError: If a number is NaN or infinite.
    """
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"a DSRL file is read from disk, but there is none at {path}")
    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in _KEYS if name not in file]
            if missing:
                raise corrupt(path, f"it lacks {', '.join(missing)} of DSRL's arrays")
            arrays = {name: file[name][()] for name in (*_KEYS, "costs") if name in file}
    except OSError as error:
        raise corrupt(path, f"it is no HDF5 file ({error})") from error
    if len({rows.shape[:1] for rows in arrays.values()}) != 1:
        raise corrupt(path, f"its arrays have the shapes {[a.shape for a in arrays.values()]}")
    terminal = arrays["terminals"].astype(bool)
    ends = np.flatnonzero(terminal | arrays["timeouts"].astype(bool)) + 1
    steps = len(terminal)
    bounds = [0, *ends.tolist(), *([] if steps in ends else [steps])]
    with described_by(path):
        return [
            Trajectory(
                arrays["observations"][start:end],
                arrays["actions"][start:end],
                arrays["costs"][start:end] if "costs" in arrays else None,
                arrays["rewards"][start:end],
                bool(terminal[end - 1]),
                arrays["next_observations"][end - 1],
            )
            for start, end in pairwise(bounds)
            if end > start
        ]
