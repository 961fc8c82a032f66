"""Trajectories on disk: a uniform sample of those of a whole run, however long, memory-mapped.

A dataset is a folder of plain .npy files, which NumPy alone reads, and a `meta.json` that describes
them. Row i of every array belongs to trajectory i; a row of steps is as long as the longest
possible trajectory, with zeros after its end. These are never written, so that short episodes take
no more space on disk than they need, where the file system knows holes. Knows nothing of
environments and labels.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final, overload

import numpy as np
from numpy.typing import NDArray

from pbcrl.errors import MismatchError, StorageError
from pbcrl.journal import read_journal
from pbcrl.storage import (
    check_format,
    corrupt,
    read_bytes,
    sync_folder,
    unreadable,
    unwritable,
    write_all,
    write_atomically,
)
from pbcrl.trajectory import Trajectory
from pbcrl.unfinished import (
    FILES,
    HEADER_BYTES,
    JOURNAL,
    UNFINISHED,
    StepArrays,
    UnfinishedRows,
    array_bytes,
    write_at,
)

_logger = logging.getLogger(__name__)

_FORMAT = "pbcrl-trajectories"
_VERSION = 2  # version 1 knew float32 vectors only, by their `obs_dim`
_OBS_DTYPES = ("<f4", "|u1")
_FROM_FIRST = ("obs_dtype", "has_costs")  # what the first trajectory decides
_MAX_AXES = 8  # of an observation


@final
class TrajectoryWriter:
    """Keeps a uniform sample of all trajectories of a run in a folder, however long the run.

    The first `capacity` trajectories are all kept, in order; later ones replace a random one
    (reservoir sampling, Algorithm R), so that every trajectory of the run is equally likely to be
    in the sample. Leaving the `with` block closes, also by an exception or Ctrl-C: what was
    collected is kept.

    Nothing is lost to a killed process either. Rows go to disk at once, into `<path>.partial`, and
    then one line of a journal there says so; the row that is replaced stays until then. `close`
    completes the files and renames the folder to `path`. What a killed run left is finished by
    `TrajectoryDataset.recover`, or continued by `resume=True`; no other writer replaces it.

    Args:
        path: The folder to make; missing parents are made.
        env_id: Gymnasium id of the env that the trajectories come from.
        obs_shape: Shape of one observation: (obs_dim,), or (H, W, C) of an image.
        act_dim: Width of an action row.
        horizon: Steps of the longest possible trajectory.
        capacity: Trajectories to keep.
        rng: Draws which ones.
        overwrite: Replace the dataset at `path` on closing; the old one stays until then. What a
            killed run left in `<path>.partial` is replaced at once.
        resume: Continue what a killed run left in `<path>.partial`, if there is anything.

    Raises:
        ValueError: If a size is below 1.
        StorageError: If `path` exists, a killed run left trajectories there, another writer is at
            work there, or the folder cannot be written.
        CorruptFileError, FormatVersionError: If what is to be continued is damaged.
        MismatchError: If what is to be continued has another env, other sizes or another capacity.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        env_id: str,
        obs_shape: Sequence[int],
        act_dim: int,
        horizon: int,
        capacity: int = 10_000,
        rng: np.random.Generator,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        shape = [operator.index(size) for size in obs_shape]  # of NumPy's integers, too
        if not shape or min(*shape, act_dim, horizon, capacity) < 1:
            raise ValueError(
                "a dataset needs sizes of at least 1, got "
                f"obs_shape={tuple(shape)}, {act_dim=}, {horizon=}, {capacity=}; "
                "`obs_shape_of` and `act_dim_of` tell those of a space"
            )
        self.path = Path(path)
        """Where the dataset will be."""
        self._meta = _Meta(env_id, shape, act_dim, horizon)
        self._capacity = capacity
        self._rng, self._overwrite, self._closed = rng, overwrite, False
        self._check_target()
        self._rows = UnfinishedRows(_partial(self.path))
        try:
            if resume and self._rows.about is not None:
                self._resume(self._rows.about)
            elif self._rows.kept and not overwrite:
                raise StorageError(
                    f"a killed run left {len(self._rows.kept)} trajectories in {self._rows.folder}"
                    f", which a new dataset must not replace: finish that one by "
                    f"TrajectoryDataset.recover({str(self.path)!r}), go on with it by resume=True, "
                    "or remove the folder"
                )
            else:
                self._rows.clear()
            self._check_target()  # again: a writer that was at work before us may have finished
        except BaseException:
            self._rows.close()
            raise

    @property
    def seen(self) -> int:
        """Trajectories of the run so far, kept or not."""
        return self._meta.seen

    def add(self, trajectory: Trajectory) -> None:
        """Count one more trajectory of the run, and keep it or not as the draw falls.

        Raises:
            ValueError: If its shapes, the dtype of its observations, its length or having costs
                does not fit the dataset.
            StorageError: If the writer is closed, or the disk is full; then the trajectory is not
                in the dataset, and those before it are.
        """
        if self._closed:
            raise StorageError(
                f"trajectories go into an open dataset, but {self.path} is closed; "
                "write a new one to another path"
            )
        self._check(trajectory)
        number = self.seen
        self._meta.seen += 1
        if self._rows.about is None:
            self._meta.has_costs = trajectory.costs is not None
            self._meta.obs_dtype = "|u1" if trajectory.obs.dtype == np.uint8 else "<f4"
            self._rows.begin(self._meta.about() | {"capacity": self._capacity})
        place = number if number < self._capacity else int(self._rng.integers(number + 1))
        if place < self._capacity:
            replaced = place if number >= self._capacity else None
            self._rows.add(trajectory, self._meta.step_arrays(), episode=number, replaced=replaced)
        else:
            self._rows.skip(episode=number)

    def close(self) -> None:
        """Finish the dataset and put it at `path`; a second call does nothing.

        Raises:
            StorageError: If no trajectory was added (then nothing is left behind), or the dataset
                cannot be written (then the message says where the rows are).
        """
        if self._closed:
            return
        self._closed = True
        if not self._rows.kept:
            self._rows.remove()
            raise StorageError(
                "a dataset needs at least one finished episode, but none was added to "
                f"{self.path}; collect for longer than one episode"
            )
        try:
            self._rows.fill_gaps(self._meta.step_arrays())
            self._describe()
            if sys.platform == "win32":  # where no folder with an open file can be moved
                self._rows.close()
            self._publish()
        except OSError as error:
            raise unwritable(self._rows.folder, error) from error
        finally:
            self._rows.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except StorageError as error:
            if kind is None:
                raise
            # What ended the run goes on to the caller; this must not hide it.
            _logger.error("interrupted, and no dataset was written: %s", error)
        else:
            if kind is not None:
                kept = self._meta.count
                _logger.warning("interrupted: %d trajectories are in %s", kept, self.path)

    def _check_target(self) -> None:
        if not self.path.exists():
            return
        if not self._overwrite:
            raise StorageError(
                f"a dataset is written to a new folder, but {self.path} exists; choose another "
                "path, remove it, or pass overwrite=True"
            )
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else {"a file"}
        if foreign := sorted(names - FILES):
            raise StorageError(
                f"overwrite=True replaces a dataset and nothing else, but {self.path} holds "
                f"{', '.join(foreign)}; move that away, or choose another path"
            )

    def _resume(self, found: Mapping[str, Any]) -> None:
        meta = self._meta
        if found.get("obs_dtype") not in _OBS_DTYPES or type(found.get("has_costs")) is not bool:
            raise corrupt(self._rows.folder / JOURNAL, "line 2 describes no dataset")
        meta.obs_dtype, meta.has_costs = found["obs_dtype"], found["has_costs"]
        asked = meta.about() | {"capacity": self._capacity}
        if differing := [name for name in asked if found.get(name) != asked[name]]:
            raise MismatchError(
                f"a dataset is continued as it was begun, but {', '.join(differing)} of "
                f"{self._rows.folder} differ from what was asked: "
                f"{[found.get(name) for name in differing]} and "
                f"{[asked[name] for name in differing]}; repeat the first run's arguments, or "
                "choose another path"
            )
        self._rows.drop_torn(meta.step_arrays())
        meta.seen = self._rows.seen

    def _check(self, trajectory: Trajectory) -> None:
        meta = self._meta
        found = (trajectory.obs.shape[1:], trajectory.actions.shape[1])
        expected = (tuple(meta.obs_shape), meta.act_dim)
        if found != expected:
            raise ValueError(
                f"the trajectories of {self.path} have obs_shape {expected[0]} and act_dim "
                f"{expected[1]}, got {found[0]} and {found[1]}; write another env to another path"
            )
        if self._rows.about is not None and trajectory.obs.dtype != meta.obs_dtype:
            raise ValueError(
                f"all trajectories of {self.path} have observations of one dtype, but this one has "
                f"{trajectory.obs.dtype} and the first had {np.dtype(meta.obs_dtype)}; record "
                "uint8 in every episode, or in none"
            )
        if len(trajectory) > meta.horizon:
            raise ValueError(
                f"the trajectories of {self.path} have at most {meta.horizon} steps, got "
                f"{len(trajectory)}; open the writer with a longer horizon"
            )
        if self._rows.about is not None and meta.has_costs != (trajectory.costs is not None):
            raise ValueError(
                f"all trajectories of {self.path} have costs or none has, but this one differs "
                "from the first; record info['cost'] in every episode, or in none"
            )

    def _describe(self) -> None:
        """Complete the .npy files, now that the number of their rows is known, and add the meta."""
        meta, folder = self._meta, self._rows.folder
        kept = sorted(self._rows.kept, key=lambda row: row.row)
        meta.count = len(kept)
        for name, numbers in (
            ("lengths", [row.steps for row in kept]),
            ("episodes", [row.episode for row in kept]),
        ):
            write_at(folder / f"{name}.npy", HEADER_BYTES, np.array(numbers, "<i8").tobytes())
        for name, (dtype, shape) in meta.arrays().items():
            path = folder / f"{name}.npy"
            with open(path, "r+b", buffering=0) as file:
                write_all(file, _npy_header(dtype, shape))
                file.truncate(_file_bytes(dtype, shape))
                os.fsync(file.fileno())
            meta.crc32[name] = _crc32(path)
        write_atomically(folder / "meta.json", meta.to_json().encode())

    def _publish(self) -> None:
        """Move the folder to its place; an older dataset there goes only now."""
        replaced = self.path.with_name(f"{self.path.name}.replaced")
        if self._overwrite and self.path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(self.path, replaced)
        os.rename(self._rows.folder, self.path)
        sync_folder(self.path.parent)
        (self.path / JOURNAL).unlink()  # not before: it is what a recovery reads
        shutil.rmtree(replaced, ignore_errors=True)


@final
class TrajectoryDataset(Sequence[Trajectory]):
    """The trajectories of a folder, memory-mapped: each is a read-only view, read when it is used.

    Opening reads every file once, to compare its checksum.

    Args:
        path: A folder that `TrajectoryWriter` made.
        env_id: The env that the trajectories must come from; None takes any.

    Raises:
        StorageError: If the dataset is missing or unreadable.
        CorruptFileError: If a file is damaged; the message names it.
        FormatVersionError: If another version of the format wrote it.
        MismatchError: If it comes from another env than `env_id`.
    """

    env_id: str
    """Gymnasium id of the env that the trajectories come from."""
    obs_shape: tuple[int, ...]
    """Shape of one observation: (obs_dim,), or (H, W, C) of an image."""
    act_dim: int
    """Width of an action row."""
    horizon: int
    """Steps of the longest possible trajectory."""
    has_costs: bool
    """Whether the trajectories have true costs."""
    seen: int
    """Trajectories of the whole run, of which these are a uniform sample."""
    episodes: NDArray[np.int64]
    """Serial number of each trajectory among all of the run, from 0. int64 (len(self),)."""
    lengths: NDArray[np.int64]
    """Steps of each trajectory. int64 (len(self),)."""

    def __init__(self, path: str | os.PathLike[str], *, env_id: str | None = None) -> None:
        self.path = Path(path)
        if not self.path.exists() and (_partial(self.path) / JOURNAL).exists():
            raise StorageError(
                f"a dataset must be finished to be opened, but {self.path} is still "
                f"{_partial(self.path).name}; wait for its writer, or, if that was killed, finish "
                f"it by TrajectoryDataset.recover({str(self.path)!r})"
            )
        meta = _Meta.read(self.path / "meta.json")
        if env_id not in (None, meta.env_id):
            raise MismatchError(
                f"trajectories must come from the env that they are used for: {self.path} was "
                f"recorded on {meta.env_id!r}, not on {env_id!r}; record one on {env_id!r}, or "
                f"ask for {meta.env_id!r}"
            )
        self.env_id, self.obs_shape, self.act_dim = meta.env_id, tuple(meta.obs_shape), meta.act_dim
        self.horizon, self.has_costs, self.seen = meta.horizon, meta.has_costs, meta.seen
        arrays = {
            name: _map_array(self.path / f"{name}.npy", dtype, shape, meta.crc32.get(name))
            for name, (dtype, shape) in meta.arrays().items()
        }
        self.lengths = np.array(arrays.pop("lengths"))
        self.episodes = np.array(arrays.pop("episodes"))
        self._steps = arrays
        if self.lengths.min() < 1 or self.lengths.max() > self.horizon:
            raise corrupt(
                self.path / "lengths.npy", f"its lengths are not all in [1, {self.horizon}]"
            )

    @classmethod
    def recover(cls, path: str | os.PathLike[str], *, overwrite: bool = False) -> TrajectoryDataset:
        """Finish what a killed run left in `<path>.partial`, and open it.

        Args:
            path: Where the dataset should have been.
            overwrite: Replace the dataset at `path`, if the killed run was to do so.

        Raises:
            StorageError: If there is nothing to finish, or a writer is still at work on it.
            CorruptFileError, FormatVersionError: If what is there is damaged.
        """
        journal = _partial(Path(path)) / JOURNAL
        found, _ = read_journal(journal, kind=UNFINISHED)
        if not found:
            raise StorageError(
                f"a dataset needs at least one finished episode, but {journal.parent} has none; "
                "collect for longer than one episode"
            )
        about = {name: value for name, value in found[0].items() if name not in _FROM_FIRST}
        options: dict[str, Any] = {"rng": np.random.default_rng(0), "overwrite": overwrite}
        try:
            writer = TrajectoryWriter(path, **about, **options, resume=True)
        except (TypeError, ValueError) as error:
            raise corrupt(journal, f"line 2 describes no dataset ({error})") from error
        writer.close()
        return cls(path)

    def __len__(self) -> int:
        """Trajectories in the dataset."""
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        length = self.lengths[index]
        return Trajectory(**{name: rows[index, :length] for name, rows in self._steps.items()})


@dataclass
class _Meta:
    """What `meta.json` says of a dataset; the writer fills it in."""

    env_id: str
    obs_shape: list[int]
    act_dim: int
    horizon: int
    obs_dtype: str = "<f4"
    """The first trajectory's; all others are float32."""
    count: int = 0
    """Trajectories in the dataset."""
    seen: int = 0
    has_costs: bool = False
    crc32: dict[str, int] = field(default_factory=dict)
    """Checksum of each .npy file."""

    @classmethod
    def read(cls, path: Path) -> _Meta:
        data = read_bytes(path, max_bytes=1 << 20)
        try:
            top = json.loads(data)
            version, about = top["version"], top["dataset"]
            check_format(path, top["format"], version, expected=_FORMAT, versions=(1, _VERSION))
            intact = _meta_json(version, about).encode() == data
            if version == 1:
                about = {**about, "obs_shape": [about["obs_dim"]]}
                del about["obs_dim"]
            meta = cls(**about)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            finding = f"it describes no dataset ({type(error).__name__}: {error})"
            raise corrupt(path, finding) from error
        if not intact:
            raise corrupt(path, "its contents do not match its crc32")
        if not (type(meta.obs_shape) is list and 1 <= len(meta.obs_shape) <= _MAX_AXES):
            raise corrupt(path, f"obs_shape is no list of 1 to {_MAX_AXES} sizes")
        sizes = [*meta.obs_shape, meta.act_dim, meta.horizon, meta.count, meta.seen]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise corrupt(
                path, "obs_shape, act_dim, horizon, count, seen are not all positive integers"
            )
        if type(meta.has_costs) is not bool or type(meta.crc32) is not dict:
            raise corrupt(path, "has_costs is no boolean, or crc32 no table of checksums")
        if meta.obs_dtype not in _OBS_DTYPES:
            raise corrupt(path, f"obs_dtype is not one of {', '.join(_OBS_DTYPES)}")
        return meta

    def to_json(self) -> str:
        return _meta_json(_VERSION, asdict(self))

    def about(self) -> dict[str, Any]:
        """What is known from the first trajectory on."""
        return {k: v for k, v in asdict(self).items() if k not in ("count", "seen", "crc32")}

    def step_arrays(self) -> StepArrays:
        """Dtype and shape of one trajectory's row in each array, by the names of `Trajectory`."""
        arrays: StepArrays = {
            "obs": (self.obs_dtype, (self.horizon, *self.obs_shape)),
            "actions": ("<f4", (self.horizon, self.act_dim)),
        }
        return arrays | ({"costs": ("<f4", (self.horizon,))} if self.has_costs else {})

    def arrays(self) -> StepArrays:
        """Dtype and shape of all arrays; the file is `<name>.npy`."""
        steps = {
            name: (dtype, (self.count, *row)) for name, (dtype, row) in self.step_arrays().items()
        }
        return steps | {"lengths": ("<i8", (self.count,)), "episodes": ("<i8", (self.count,))}


def _meta_json(version: int, about: object) -> str:
    crc32 = zlib.crc32(json.dumps(about).encode())
    top = {"format": _FORMAT, "version": version, "crc32": crc32, "dataset": about}
    return json.dumps(top, indent=2) + "\n"


def _partial(path: Path) -> Path:
    """Where the dataset `path` is while it is being written."""
    return path.with_name(f"{path.name}.partial")


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The start of the .npy file of an array (NumPy's format 1.0)."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape})
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", HEADER_BYTES - 10)
    return (start + text.encode()).ljust(HEADER_BYTES - 1) + b"\n"


def _file_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return HEADER_BYTES + array_bytes(dtype, shape)


def _map_array(path: Path, dtype: str, shape: tuple[int, ...], crc32: object) -> NDArray[Any]:
    """Map an array after checking that the file is exactly the one that the meta data describe."""
    try:
        found_bytes = path.stat().st_size
        # Before anything is mapped, so that no claimed size is believed.
        if found_bytes != _file_bytes(dtype, shape):
            raise corrupt(
                path, f"it has {found_bytes} bytes and is not the {dtype} array of shape {shape}"
            )
        if _crc32(path) != crc32:
            raise corrupt(path, "its contents do not match its crc32")
        return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=shape)
    except OSError as error:
        raise unreadable(path, error) from error


def _crc32(path: Path) -> int:
    """Checksum of a file of any size; crc32 finds every accident worth naming, at disk speed."""
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc32 = zlib.crc32(block, crc32)
    return crc32
