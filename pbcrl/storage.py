"""Files on disk: checkpoints, trajectory datasets, label logs; versioned, checksummed, no pickle.

A checkpoint appears whole or not at all, and a label is on disk when `append` returns. Damage is
found when a file is opened, and no size that a file claims is believed before it is checked.

Knows nothing of models, environments or oracles: only tensors, trajectories and labels. Checksums
guard against accidents, not against somebody who forges a file together with its checksum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast, final, overload

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbcrl.errors import CorruptFileError, FormatVersionError, MismatchError, StorageError
from pbcrl.trajectory import Label, Trajectory

_logger = logging.getLogger(__name__)

_VERSION = 1
"""Of all three formats; rises when an older reader would misread a newer file."""


# -- Checkpoints: one safetensors file each --------------------------------------------------------

_CHECKPOINT_FORMAT = "pbcrl-checkpoint"


def save_tensors(
    path: str | os.PathLike[str],
    *,
    kind: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, object],
) -> None:
    """Write named tensors and their description to one safetensors file, whole or not at all.

    An existing file is replaced only once the new one is on disk; equal contents give equal bytes.
    Missing folders are made. NaN and infinities are stored as they are.

    Args:
        path: The file to write.
        kind: What the file holds, such as "cost_model"; `load_tensors` asks for it again.
        tensors: Any shapes and devices, every dtype that safetensors has.
        meta: What JSON can hold, under string keys; tuples come back as lists.

    Raises:
        TypeError: If an entry is no dense tensor of a storable dtype, or `meta` is not JSON.
        ValueError: If a tensor is called "__metadata__", which safetensors reserves.
        StorageError: If the file cannot be written; an older file at `path` is untouched.
    """
    if "__metadata__" in tensors:
        raise ValueError(
            "safetensors reserves the name '__metadata__', but a tensor has it; rename the tensor"
        )
    on_cpu = {name: _plain(name, tensors[name]) for name in sorted(tensors)}
    about = json.dumps(
        {"format": _CHECKPOINT_FORMAT, "version": _VERSION, "kind": kind, "meta": dict(meta)}
    )
    try:
        # One metadata entry: safetensors writes several in random order.
        data = safetensors.torch.save(on_cpu, {"pbcrl": f"{_sha256(about, on_cpu)} {about}"})
    except KeyError as error:
        raise TypeError(
            f"safetensors cannot hold {error.args[0]}, the dtype of a tensor for {path}; "
            "convert it first"
        ) from error
    _write_atomically(Path(path), data)


def load_tensors(
    path: str | os.PathLike[str], *, kind: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote.

    Args:
        path: The file to read.
        kind: What the file must hold.

    Returns:
        The tensors by name, on the CPU, and the `meta` that was saved with them.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If it is damaged, or no checkpoint of this package.
        FormatVersionError: If another version of the format wrote it.
        MismatchError: If it holds another kind.
    """
    data = _read(Path(path))
    try:
        # Checks every length and offset in the header against `data` before it makes a tensor.
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        sha256, _, text = header["__metadata__"]["pbcrl"].partition(" ")
        about = json.loads(text)
        found_format, version = about["format"], about["version"]
    except Exception as error:  # the bytes may be anything, and so may the parsers' complaints
        raise _corrupt(path, f"it is no checkpoint ({error!r})") from error
    _check_format(path, found_format, version, expected=_CHECKPOINT_FORMAT)
    if sha256 != _sha256(text, tensors):
        raise _corrupt(path, "its contents do not match its sha256")
    found_kind, meta = about["kind"], about["meta"]
    if found_kind != kind:
        raise MismatchError(
            f"a checkpoint must be of the kind that is asked for: {path} holds {found_kind!r}, "
            f"not {kind!r}; pass the file that holds {kind!r}, or load this one as {found_kind!r}"
        )
    return tensors, meta


def _plain(name: str, tensor: object) -> Tensor:
    """A dense CPU copy, since safetensors refuses views and tensors that share memory."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise TypeError(
            f"a checkpoint holds dense tensors, but {name!r} is {type(tensor).__name__}; "
            "convert it, or put it into meta if it is a plain number or text"
        )
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _sha256(about: str, tensors: Mapping[str, Tensor]) -> str:
    """Digest of everything that a reader relies on, in an order that the file does not decide."""
    names = sorted(tensors)
    listing = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([about, listing]).encode())
    for name in names:
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- Label logs: one JSON line per label -----------------------------------------------------------

_LABEL_FORMAT = "pbcrl-labels"
_LABEL_HEADER = json.dumps({"format": _LABEL_FORMAT, "version": _VERSION}) + "\n"
_LABEL_FIELDS = ("preference", "first_safe", "second_safe")


@final
class LabelLog:
    """A file to which labels are added as they are bought, so that a crash loses none.

    Each line is one label as JSON, NaN as null, with the crc32 of the rest of the line; the first
    line says what the file is. An existing log is continued.

    Args:
        path: The file; missing folders are made.

    Raises:
        StorageError: If the file cannot be written.
        CorruptFileError, FormatVersionError: As `read_labels`; a damaged log is not continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        _, intact_bytes = _parse_labels(self.path)
        try:
            os.truncate(self.path, intact_bytes)
            if intact_bytes == 0:
                self._write(_LABEL_HEADER)
            _sync_folder(self.path.parent)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def append(self, labels: Sequence[Label]) -> None:
        """Add labels at the end; they are on disk when this returns.

        Raises:
            StorageError: If they cannot be written; then none of them is in the log.
        """
        try:
            self._write("".join(_label_line(label) for label in labels))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _write(self, text: str) -> None:
        with open(self.path, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, text.encode())
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # the next label must not continue half a line
                raise


def read_labels(path: str | os.PathLike[str]) -> list[Label]:
    """Read a label log, in the order in which the labels were added.

    A crash while writing leaves a last line without its end; it is dropped with one warning.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If a finished line is damaged; the message has its number, from 1.
        FormatVersionError: If another version of the format wrote it.
    """
    labels, _ = _parse_labels(Path(path))
    return labels


def _parse_labels(path: Path) -> tuple[list[Label], int]:
    """The labels of a log and the number of bytes up to the end of its last finished line."""
    *lines, torn = _read(path).split(b"\n")
    if not lines and not _LABEL_HEADER.encode().startswith(torn):
        raise _corrupt(path, "it does not begin as a label log does")
    if torn:
        warnings.warn(
            f"a label log ends with a finished line, but the last {len(torn)} bytes of {path} are "
            "half a line, as a crash leaves them; they are dropped: ask for that label again",
            stacklevel=3,
        )
    labels = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number > 1:
                labels.append(Label(**{name: _label_value(entry[name]) for name in _LABEL_FIELDS}))
                intact = _label_line(labels[-1]).encode() == line + b"\n"
            else:
                found_format, version = entry["format"], entry["version"]
                intact = True
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _corrupt(path, f"line {number} is not what it should be ({error!r})") from error
        if number == 1:
            _check_format(path, found_format, version, expected=_LABEL_FORMAT)
        if not intact:
            raise _corrupt(path, f"line {number} does not match its crc32")
    return labels, sum(len(line) + 1 for line in lines)


def _label_line(label: Label) -> str:
    values = {name: float(getattr(label, name)) for name in _LABEL_FIELDS}
    body = {name: None if math.isnan(value) else value for name, value in values.items()}
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body).encode())}) + "\n"


def _label_value(value: float | None) -> float:
    return math.nan if value is None else float(value)


# -- Trajectory datasets: one folder each ----------------------------------------------------------

_DATASET_FORMAT = "pbcrl-trajectories"
_HEADER_BYTES = 256  # of each .npy file: fixed, as the number of rows is filled in at the end
_Layout = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name
_ARRAYS = ("obs", "actions", "costs", "lengths", "episodes")  # each in <name>.npy
_SIZES = ("obs_dim", "act_dim", "horizon", "count", "seen")


@final
class TrajectoryWriter:
    """Keeps a uniform sample of all trajectories of a run in a folder, however long the run.

    The first `capacity` trajectories are all kept, in order; later ones replace a random one
    (reservoir sampling, Algorithm R), so that every trajectory of the run is equally likely to be
    in the sample. Rows go to disk at once, into `<path>.partial`; `close` renames that to `path`.
    Leaving the `with` block closes, also by an exception or Ctrl-C: what was collected is kept.

    Each trajectory takes a row of `horizon` steps, zeros after its end. One writer per path: the
    partial folder of a killed run is replaced.

    Args:
        path: The folder to make; missing parents are made.
        env_id: Gymnasium id of the env that the trajectories come from.
        obs_dim: Width of an observation row.
        act_dim: Width of an action row.
        horizon: Steps of the longest possible trajectory.
        capacity: Trajectories to keep.
        rng: Draws which ones.
        overwrite: Replace the dataset at `path` on closing; the old one stays until then.

    Raises:
        ValueError: If a size is below 1.
        StorageError: If `path` exists, or the folder cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        env_id: str,
        obs_dim: int,
        act_dim: int,
        horizon: int,
        capacity: int = 10_000,
        rng: np.random.Generator,
        overwrite: bool = False,
    ) -> None:
        if min(obs_dim, act_dim, horizon, capacity) < 1:
            raise ValueError(
                "a dataset needs sizes of at least 1, got "
                f"{obs_dim=}, {act_dim=}, {horizon=}, {capacity=}; flatten spaces to vectors"
            )
        self.path = Path(path)
        """Where the dataset will be."""
        self.seen = 0
        """Trajectories added so far."""
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._env_id, self._rng, self._overwrite = env_id, rng, overwrite
        self._obs_dim, self._act_dim, self._horizon = obs_dim, act_dim, horizon
        self._has_costs: bool | None = None  # as the first trajectory has
        self._count = 0
        self._lengths = np.zeros(capacity, np.int64)  # 0: the row is not whole
        self._episodes = np.zeros(capacity, np.int64)
        self._closed = False
        self._check_target()
        try:
            if self._partial.exists():
                _logger.info("replacing %s, left by a run that was killed", self._partial)
                shutil.rmtree(self._partial)
            self._partial.mkdir(parents=True)
            self._files = {
                name: open(self._partial / f"{name}.npy", "w+b", buffering=0)  # noqa: SIM115
                for name in _ARRAYS
            }
        except OSError as error:
            raise _unwritable(self._partial, error) from error

    def add(self, trajectory: Trajectory) -> None:
        """Count one more trajectory of the run, and keep it or not as the draw falls.

        Raises:
            ValueError: If its widths, its length or having costs does not fit the dataset.
            StorageError: If the writer is closed, or the disk is full.
        """
        if self._closed:
            raise StorageError(
                f"trajectories go into an open dataset, but {self.path} is closed; "
                "write a new one to another path"
            )
        self._check(trajectory)
        self._has_costs = trajectory.costs is not None
        capacity = len(self._lengths)
        slot = self.seen if self.seen < capacity else int(self._rng.integers(self.seen + 1))
        if slot < capacity:
            try:
                self._write_row(slot, trajectory)
            except OSError as error:
                raise _unwritable(self._partial, error) from error
        self.seen += 1
        if slot < capacity:  # after `seen`: an interrupt in between must not leave more than seen
            self._count = max(self._count, slot + 1)

    def close(self) -> None:
        """Finish the dataset and put it at `path`; a second call does nothing.

        Raises:
            StorageError: If no trajectory was added (then nothing is left behind), or the dataset
                cannot be written (then the message says where the rows are).
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._drop_torn_rows()
            if self._count:
                self._finish()
        except OSError as error:
            raise _unwritable(self._partial, error) from error
        finally:
            for file in self._files.values():
                file.close()
        if not self._count:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise StorageError(
                "a dataset needs at least one finished episode, but none was added to "
                f"{self.path}; collect for longer than one episode"
            )

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
                _logger.warning("interrupted: %d trajectories are in %s", self._count, self.path)

    def _check_target(self) -> None:
        if not self.path.exists():
            return
        if not self._overwrite:
            raise StorageError(
                f"a dataset is written to a new folder, but {self.path} exists; choose another "
                "path, remove it, or pass overwrite=True"
            )
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else {"a file"}
        foreign = sorted(names - {"meta.json", *(f"{name}.npy" for name in _ARRAYS)})
        if foreign:
            raise StorageError(
                f"overwrite=True replaces a dataset and nothing else, but {self.path} holds "
                f"{', '.join(foreign)}; move that away, or choose another path"
            )

    def _check(self, trajectory: Trajectory) -> None:
        found = (trajectory.obs.shape[1], trajectory.actions.shape[1])
        if found != (self._obs_dim, self._act_dim):
            raise ValueError(
                f"the trajectories of {self.path} have obs_dim {self._obs_dim} and act_dim "
                f"{self._act_dim}, got {found[0]} and {found[1]}; write another env to another path"
            )
        if len(trajectory) > self._horizon:
            raise ValueError(
                f"the trajectories of {self.path} have at most {self._horizon} steps, got "
                f"{len(trajectory)}; open the writer with a longer horizon"
            )
        if self._has_costs not in (None, trajectory.costs is not None):
            raise ValueError(
                f"all trajectories of {self.path} have costs or none has, but this one differs "
                "from the first; record info['cost'] in every episode, or in none"
            )

    def _write_row(self, slot: int, trajectory: Trajectory) -> None:
        self._lengths[slot] = 0
        self._episodes[slot] = self.seen
        for name, (dtype, shape) in self._rows().items():
            row = np.zeros(shape, dtype)
            row[: len(trajectory)] = getattr(trajectory, name)
            self._files[name].seek(_HEADER_BYTES + slot * row.nbytes)
            _write_all(self._files[name], row.tobytes())
        self._lengths[slot] = len(trajectory)

    def _rows(self) -> _Layout:
        """Dtype and shape of one row of each array that `add` writes."""
        layout = _layout(self._about())
        return {
            name: (dtype, shape[1:])
            for name, (dtype, shape) in layout.items()
            if name not in ("lengths", "episodes")
        }

    def _about(self) -> dict[str, Any]:
        return {
            "env_id": self._env_id,
            "obs_dim": self._obs_dim,
            "act_dim": self._act_dim,
            "horizon": self._horizon,
            "count": self._count,
            "seen": self.seen,
            "has_costs": bool(self._has_costs),
            "crc32": {},
        }

    def _drop_torn_rows(self) -> None:
        """Put the last row into the place of one whose overwriting was interrupted."""
        for slot in np.flatnonzero(self._lengths[: self._count] == 0)[::-1]:
            self._count -= 1
            for name, (dtype, shape) in self._rows().items():
                row_bytes = math.prod(shape) * np.dtype(dtype).itemsize
                self._files[name].seek(_HEADER_BYTES + self._count * row_bytes)
                row = self._files[name].read(row_bytes)
                self._files[name].seek(_HEADER_BYTES + int(slot) * row_bytes)
                _write_all(self._files[name], row)
            self._lengths[slot] = self._lengths[self._count]
            self._episodes[slot] = self._episodes[self._count]

    def _finish(self) -> None:
        """Fill in the number of rows, describe the files, and move the folder to its place."""
        about = self._about()
        layout = _layout(about)
        for name, file in self._files.items():
            file_path = self._partial / f"{name}.npy"
            if name not in layout:
                file_path.unlink()  # costs that no trajectory had
                continue
            header, data_bytes = _npy_header(*layout[name])
            file.seek(0)
            _write_all(file, header)
            if name == "lengths":
                _write_all(file, self._lengths[: self._count].astype("<i8").tobytes())
            elif name == "episodes":
                _write_all(file, self._episodes[: self._count].astype("<i8").tobytes())
            file.truncate(_HEADER_BYTES + data_bytes)
            os.fsync(file.fileno())
            about["crc32"][name] = _crc32(file_path)
        _write_atomically(self._partial / "meta.json", _meta_text(about).encode())
        replaced = self.path.with_name(f"{self.path.name}.replaced")
        if self._overwrite and self.path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(self.path, replaced)
        os.rename(self._partial, self.path)
        _sync_folder(self.path.parent)
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
    obs_dim: int
    """Width of an observation row."""
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

    def __init__(self, path: str | os.PathLike[str], *, env_id: str | None = None) -> None:
        self.path = Path(path)
        about = _read_meta(self.path / "meta.json")
        if env_id not in (None, about["env_id"]):
            raise MismatchError(
                f"trajectories must come from the env that they are used for: {self.path} was "
                f"recorded on {about['env_id']!r}, not on {env_id!r}; record one on {env_id!r}, or "
                f"ask for {about['env_id']!r}"
            )
        self.env_id = about["env_id"]
        self.obs_dim, self.act_dim = about["obs_dim"], about["act_dim"]
        self.horizon, self.seen = about["horizon"], about["seen"]
        self.has_costs = about["has_costs"]
        arrays = {
            name: _map_array(self.path / f"{name}.npy", dtype, shape, about["crc32"].get(name))
            for name, (dtype, shape) in _layout(about).items()
        }
        self._obs, self._actions = arrays["obs"], arrays["actions"]
        self._costs = arrays.get("costs")
        self._lengths = np.array(arrays["lengths"])
        self.episodes = np.array(arrays["episodes"])
        if self._lengths.min() < 1 or self._lengths.max() > self.horizon:
            raise _corrupt(
                self.path / "lengths.npy",
                f"its lengths are not all in [1, {self.horizon}]",
            )

    def __len__(self) -> int:
        """Trajectories in the dataset."""
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        length = self._lengths[index]
        return Trajectory(
            obs=self._obs[index, :length],
            actions=self._actions[index, :length],
            costs=None if self._costs is None else self._costs[index, :length],
        )


def _layout(about: Mapping[str, Any]) -> _Layout:
    """Name, dtype and shape of each array of a dataset; the file is `<name>.npy`."""
    count, horizon = about["count"], about["horizon"]
    layout: _Layout = {
        "obs": ("<f4", (count, horizon, about["obs_dim"])),
        "actions": ("<f4", (count, horizon, about["act_dim"])),
        "lengths": ("<i8", (count,)),
        "episodes": ("<i8", (count,)),
    }
    return layout | ({"costs": ("<f4", (count, horizon))} if about["has_costs"] else {})


def _npy_header(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The start of the .npy file of an array (NumPy's format 1.0), and the bytes that follow it."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape})
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", _HEADER_BYTES - 10)
    header = (start + text.encode()).ljust(_HEADER_BYTES - 1) + b"\n"
    return header, math.prod(shape) * np.dtype(dtype).itemsize


def _map_array(path: Path, dtype: str, shape: tuple[int, ...], crc32: object) -> NDArray[Any]:
    """Map an array after checking that the file is exactly the one that the meta data describe."""
    header, data_bytes = _npy_header(dtype, shape)
    try:
        found_bytes = path.stat().st_size
        with open(path, "rb") as file:
            found_header = file.read(len(header))
        # Nothing is mapped before both agree, so that no claim of the file is believed.
        if found_bytes != len(header) + data_bytes or found_header != header:
            raise _corrupt(
                path, f"it has {found_bytes} bytes and is not the {dtype} array of shape {shape}"
            )
        if _crc32(path) != crc32:
            raise _corrupt(path, "its contents do not match its crc32")
        mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    return mapped


def _meta_text(about: Mapping[str, Any]) -> str:
    crc32 = zlib.crc32(json.dumps(about).encode())
    top = {"format": _DATASET_FORMAT, "version": _VERSION, "crc32": crc32, "dataset": about}
    return json.dumps(top, indent=2) + "\n"


def _read_meta(path: Path) -> dict[str, Any]:
    data = _read(path)
    try:
        top = json.loads(data)
        found_format, version = top["format"], top["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(path, f"it describes no dataset ({error!r})") from error
    _check_format(path, found_format, version, expected=_DATASET_FORMAT)
    about = top.get("dataset")
    if _meta_text(about).encode() != data:
        raise _corrupt(path, "its contents do not match its crc32")
    if not all(type(about[name]) is int and about[name] > 0 for name in _SIZES):
        raise _corrupt(path, f"{', '.join(_SIZES)} are not all positive integers")
    return cast(dict[str, Any], about)


def _crc32(path: Path) -> int:
    """Checksum of a file of any size; crc32 finds every accident worth naming, at disk speed."""
    crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc32 = zlib.crc32(block, crc32)
    return crc32


# -- Shared by the formats -------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: a reader or a crash sees the old file or the new."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # after the replacement there is none
            partial.unlink()


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write without a buffer, whose rest would surface at some later write or at the closing."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows cannot open folders and does without."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_format(
    path: str | os.PathLike[str], found: object, version: object, *, expected: str
) -> None:
    if found != expected:
        raise _corrupt(path, f"its format is {found!r}, not {expected!r}")
    if version != _VERSION:
        raise FormatVersionError(
            f"this pbcrl reads version {_VERSION} of {expected}, but {path} has version "
            f"{version!r}; use the pbcrl that wrote it, or make the file again"
        )


def _corrupt(path: str | os.PathLike[str], finding: str) -> CorruptFileError:
    return CorruptFileError(
        f"a file must be read as it was written: {path} is damaged or not a file of this "
        f"package: {finding}; restore it from a copy, or make it again"
    )


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"a file must exist and be readable to be loaded: {path}: {error.strerror or error}; "
        "check the path, or make the file first"
    )


def _unwritable(path: str | os.PathLike[str], error: OSError) -> StorageError:
    return StorageError(
        f"{path} must be writable, but: {error.strerror or error}; free disk space, check "
        "the folder's permissions, or choose another path"
    )
