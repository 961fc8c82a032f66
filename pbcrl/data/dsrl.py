"""Trajectories as a DSRL file, which OSRL reads, and back. Needs the extra `dsrl` (h5py).

One flat HDF5 file: `observations`, `next_observations`, `actions`, `rewards`, `costs`, `terminals`
and `timeouts`, a row per step; an episode ends where a terminal or a timeout is true. A D4RL file
is the same without costs, and often without `next_observations`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbcrl.errors import MismatchError, PbcrlError, StorageError
from pbcrl.storage import corrupt, described_by, write_atomically
from pbcrl.trajectory import Trajectory, require_outcomes

try:
    import h5py

    from pbcrl.data._hdf5 import check_claims
except ImportError as error:
    raise ImportError("DSRL's files need h5py; pip install 'pbcrl[dsrl]'") from error

_NEEDED = "observations", "actions", "rewards", "terminals", "timeouts"
_OPTIONAL = "next_observations", "costs"
_PER_STEP = "rewards", "costs", "terminals", "timeouts"
"""One number each: (N,), or (N, 1)."""


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
        returned as such, `terminated` false. Without `next_observations`, nothing says to what the
        last steps led: then episodes have no `rewards`, `terminated` and `final_obs`, which a
        Trajectory has all or not at all.

    Raises:
        StorageError: If it cannot be read.
        MismatchError: If it lacks an array, such as `timeouts`: nothing else says where a time
            limit ended an episode.
        CorruptFileError: If it is no HDF5 file, its arrays claim more memory than a file of its
            size can hold, or they make no trajectories.
        NonFiniteError: If a number is NaN or infinite.
    """
    return read_dsrl(path)[0]


def read_dsrl(path: str | os.PathLike[str]) -> tuple[list[Trajectory], list[bool]]:
    """Return what `from_dsrl` does, and of each episode whether it ended by itself."""
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"a DSRL file is read from disk, but there is none at {path}")
    arrays = _read(path)
    for name in set(_PER_STEP) & set(arrays):
        if arrays[name].shape[1:] == (1,):
            arrays[name] = arrays[name][:, 0]
    shapes = {name: rows.shape for name, rows in arrays.items()}
    steps = len(arrays["terminals"]) if shapes["terminals"] else 0
    if steps == 0 or {shape[:1] for shape in shapes.values()} != {(steps,)}:
        raise corrupt(path, f"its arrays have the shapes {shapes}")
    for name in ("terminals", "timeouts"):
        if arrays[name].ndim != 1 or not np.isin(arrays[name], (0, 1)).all():
            raise corrupt(path, f"its {name} are not one 0 or 1 per step")
    terminal = arrays["terminals"].astype(bool)
    ends = np.flatnonzero(terminal | arrays["timeouts"].astype(bool)) + 1
    bounds = [0, *ends.tolist(), *([] if steps in ends else [steps])]
    found = []
    with described_by(path):
        for start, end in pairwise(bounds):
            outcome: tuple[Any, ...] = ()
            if "next_observations" in arrays:
                last = arrays["next_observations"][end - 1]
                outcome = arrays["rewards"][start:end], bool(terminal[end - 1]), last
            costs = arrays["costs"][start:end] if "costs" in arrays else None
            rows = arrays["observations"][start:end], arrays["actions"][start:end]
            found.append(Trajectory(*rows, costs, *outcome))
    return found, [bool(terminal[end - 1]) for end in bounds[1:]]


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with h5py.File(path, "r") as file:
            check_claims(path, file)
            own = {name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)}
            if missing := [name for name in _NEEDED if name not in own]:
                raise MismatchError(
                    f"a DSRL or D4RL file has {', '.join(_NEEDED)}, a row per step, but {path} "
                    f"lacks {', '.join(missing)}; add what is missing, such as timeouts that are "
                    "true at the last step of each episode that a time limit ended"
                )
            found = {name: file[name] for name in (*_NEEDED, *_OPTIONAL) if name in own}
            for name, rows in found.items():
                if not isinstance(rows, h5py.Dataset) or rows.dtype.kind not in "biuf":
                    raise corrupt(path, f"{name} is no array of numbers, but {rows}")
            return {name: np.asarray(rows[()]) for name, rows in found.items()}
    except PbcrlError:
        raise
    except Exception as error:  # the bytes may be anything, and so may h5py's complaints
        finding = f"it is no HDF5 file ({type(error).__name__}: {error})"
        raise corrupt(path, finding) from error
