"""Trajectories on disk: a uniform sample of those of a whole run, in memory-mapped shards.

A dataset is a folder. Steps lie in shards, `000000-CRC32.safetensors` and so on, one per flush and
never changed afterwards: those of all their trajectories one after the other, without padding. The
manifest, `manifest.safetensors`, lists the shards and says which of their rows are in the sample.
Both appear whole or not at all. Does not depend on environments and labels.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, final, overload

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray

from pbcrl.errors import MismatchError, StorageError
from pbcrl.storage import (
    FolderLock,
    check_format,
    corrupt,
    described_by,
    load_tensors,
    open_regular,
    remove_leftovers,
    save_tensors,
    unreadable,
    unwritable,
    write_atomically,
)
from pbcrl.trajectory import Trajectory

_logger = logging.getLogger(__name__)

REPLAYS = "replays.bin"
"""A file that a script may keep in a dataset's folder, and that moves with it: how to play its
trajectories again. Nothing here reads it."""

_KIND, _VERSION = "trajectories", 3
_WITH_OUTCOMES = 4  # the version of datasets that have rewards, ends and final observations, too
_MANIFEST = "manifest.safetensors"
_SHARD = re.compile(r"\d{6,}-[0-9a-f]{8}\.safetensors")
_FLUSH_BYTES = 1 << 26  # of trajectories in memory; what is added beyond that flushes
_MAX_AXES = 8  # of an observation
_MAX_HEADER_BYTES = 4096  # of a shard

_PER_EPISODE = "starts", "terminated", "final_obs"
"""Arrays of a shard that have a row per trajectory; the others have one per step."""

_Row = tuple[int, int, int, int]
"""A trajectory of the sample: its shard, its first step there, its length, its serial number."""
_IN_MEMORY = -1  # in the place of the shard, until the flush


@final
class TrajectoryWriter:
    """Keeps a uniform sample of all trajectories of a run in a folder, however long the run.

    The first `capacity` trajectories are all kept, in order; later ones replace a random one
    (reservoir sampling, Algorithm R), so that every trajectory of the run is equally likely to be
    in the sample. A shard stays on disk when its rows are replaced, as an earlier checkpoint may
    need it. Replacements become rare: over a run of N trajectories about capacity · (1 + ln(N /
    capacity)) are written, 3.3 times the sample for N = 10 capacity.

    What was flushed survives a kill and a power cut; what was added since is lost with the process.
    Leaving the `with` block by an exception or Ctrl-C flushes; leaving it in order closes. With a
    `state_dict` in its checkpoint a run goes on exactly, also after it was closed.

    Args:
        path: The folder; it is made if it is missing.
        env_id: Gymnasium id of the env that the trajectories come from.
        obs_shape: Shape of one observation: (obs_dim,), or (H, W, C) of an image.
        act_dim: Width of an action row.
        horizon: Steps of the longest possible trajectory.
        capacity: Trajectories to keep.
        rng: Draws which ones; its state is the caller's to keep.
        overwrite: Replace a dataset at `path`, which stays until the first flush, or continue it by
            `load_state_dict`.

    Raises:
        ValueError: If a size is below 1.
        StorageError: If there is a dataset at `path` already, another writer is at work there, or
            the folder cannot be written.
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
    ) -> None:
        shape = [operator.index(size) for size in obs_shape]  # of NumPy's integers, too
        if not shape or min(*shape, act_dim, horizon, capacity) < 1:
            raise ValueError(
                "a dataset needs sizes of at least 1, got "
                f"obs_shape={tuple(shape)}, {act_dim=}, {horizon=}, {capacity=}; "
                "`obs_shape_of` and `act_dim_of` tell those of a space"
            )
        self.path = Path(path)
        """The dataset's folder."""
        self._manifest = _Manifest(env_id, shape, int(act_dim), int(horizon), int(capacity))
        self._rows: list[_Row] = []  # of the sample, each at its place in the reservoir
        self._in_memory: dict[int, Trajectory] = {}  # by serial number
        self._new_bytes = 0  # added since the last flush
        self._flushed = 0  # trajectories that the manifest on disk has seen
        self._rng, self._overwrite = rng, overwrite
        self._check_target()  # before the lock, which makes the folder
        self._lock = FolderLock(self.path)
        try:
            self._check_target()  # again: a writer that was at work before us may have finished
            remove_leftovers(self.path)
        except BaseException:
            self._lock.release()
            raise

    @property
    def seen(self) -> int:
        """Trajectories of the run so far, kept or not."""
        return self._manifest.seen

    def add(self, trajectory: Trajectory) -> bool:
        """Count one more trajectory of the run, and keep it or not as the draw falls.

        It is copied into memory. Beyond 64 MiB of them this flushes.

        Returns:
            Whether it is in the sample, where a later one may replace it.

        Raises:
            ValueError: If its shapes, the dtype of its observations, its length or having costs
                does not fit the dataset.
            StorageError: If the writer is closed; or as `flush`.
        """
        self._check_open()
        self._check(trajectory)
        manifest, number = self._manifest, self.seen
        if number == 0:
            manifest.obs_dtype = trajectory.obs.dtype.name
            manifest.has_costs = trajectory.costs is not None
            manifest.has_outcomes = trajectory.rewards is not None
        kept = manifest.capacity
        place = number if number < kept else int(self._rng.integers(number + 1))
        manifest.seen += 1
        if place >= kept:
            return False
        replaced = self._rows[place : place + 1]
        self._in_memory[number] = _copy(trajectory)
        self._rows[place : place + 1] = [(_IN_MEMORY, 0, len(trajectory), number)]
        for row in replaced:  # last, as Ctrl-C may come at any line
            self._in_memory.pop(row[3], None)
        self._new_bytes += trajectory.obs.nbytes + trajectory.actions.nbytes
        if self._new_bytes > _FLUSH_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Write what was added since the last flush as one shard; when it returns, it is durable.

        Raises:
            StorageError: If the writer is closed, or the disk is full; then the dataset is as it
                was, the new trajectories stay in memory, and a later flush tries again.
        """
        self._check_open()
        if self._flushed == self.seen:
            return
        if self._in_memory:
            data = _shard_bytes(list(self._in_memory.values()))
            steps = sum(map(len, self._in_memory.values()))
            number, shard = len(self._manifest.shards), [steps, len(data), zlib.crc32(data)]
            write_atomically(self.path / _shard_name(number, shard), data)
            start, placed = 0, {}
            for episode, trajectory in self._in_memory.items():
                placed[episode] = (number, start, len(trajectory), episode)
                start += len(trajectory)
            rows = [placed.get(row[3], row) for row in self._rows]
            manifest = replace(self._manifest, shards=[*self._manifest.shards, shard])
            # In one line, as Ctrl-C may come at any other.
            self._manifest, self._rows, self._in_memory = manifest, rows, {}
        first = self._flushed == 0
        self._save(finished=False)
        if first:
            self._remove_other_shards()

    def close(self) -> None:
        """Flush, and mark the dataset as finished; a second call does nothing.

        Raises:
            StorageError: If no trajectory was added (then nothing is left behind), or as `flush`.
        """
        if not self._lock.held:
            return
        if self.seen == 0:
            self._leave_nothing()
            raise StorageError(
                "a dataset needs at least one finished episode, but none was added to "
                f"{self.path}; collect for longer than one episode"
            )
        self.flush()
        self._save(finished=True)
        self._remove_other_shards()
        self._lock.release()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or self.seen == 0:
                self.close()
            elif self._lock.held:
                self.flush()
                kept = len(self._rows)
                _logger.warning("interrupted: %d trajectories are in %s", kept, self.path)
        except StorageError as error:
            if kind is None:
                raise
            # What ended the run goes on to the caller; this must not hide it.
            _logger.error("interrupted, and nothing more was written: %s", error)
        finally:
            self._lock.release()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with this dataset; flushes first, so that all is there.

        It has the size of the manifest: 32 bytes per trajectory kept and about 25 per shard.
        """
        if self._lock.held:
            self.flush()
        about = asdict(self._manifest)
        del about["finished"]
        return about | {"rows": np.array(self._rows, np.int64).reshape(-1, 4)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the dataset on disk back to what a `state_dict` knew; newer shards are removed.

        With the state of its generator, too, the run writes the same dataset as an undisturbed one,
        bit for bit. A dataset that was closed is open again.

        Raises:
            MismatchError: If the state is of another env, other sizes or another capacity.
            StorageError: If shards that it knows are missing; nothing is changed then.
            CorruptFileError: If one is damaged, or the state is; nothing is changed then.
        """
        self._check_open()
        asked = asdict(self._manifest)
        for name in ("env_id", "obs_shape", "act_dim", "horizon", "capacity"):
            if state.get(name) != asked[name]:
                raise MismatchError(
                    f"a dataset goes on as it was begun, but {name} of the state for {self.path} "
                    f"is {state.get(name)!r}, not {asked[name]!r}; repeat the first run's "
                    "arguments, or choose another path"
                )
        about = {name: state[name] for name in state if name != "rows"}
        manifest, rows = _checked(self.path, about, np.asarray(state.get("rows")))
        for number in set(rows[:, 0].tolist()):
            _map_shard(self.path, number, manifest)
        self._manifest, self._rows = manifest, [tuple(row) for row in rows.tolist()]
        self._in_memory, self._new_bytes = {}, 0
        if self._rows:
            self._save(finished=False)
        self._flushed = self.seen
        self._remove_other_shards()

    def _check_open(self) -> None:
        if not self._lock.held:
            raise StorageError(
                f"trajectories go into an open dataset, but {self.path} is closed; "
                "write a new one to another path"
            )

    def _check_target(self) -> None:
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        except OSError as error:
            raise unwritable(self.path, error) from error
        if _MANIFEST in names and not self._overwrite:
            raise StorageError(
                f"a dataset is written to a new folder, but {self.path} holds one; choose another "
                "path, remove it, or pass overwrite=True"
            )
        ours = {_MANIFEST, REPLAYS, ".lock"}
        foreign = [n for n in names - ours if not _SHARD.match(n) and not n.startswith(_MANIFEST)]
        if foreign:
            raise StorageError(
                f"a dataset is alone in its folder, but {self.path} holds "
                f"{', '.join(sorted(foreign))}; move that away, or choose another path"
            )

    def _check(self, trajectory: Trajectory) -> None:
        manifest = self._manifest
        found = (trajectory.obs.shape[1:], trajectory.actions.shape[1])
        expected = (tuple(manifest.obs_shape), manifest.act_dim)
        if found != expected:
            raise ValueError(
                f"the trajectories of {self.path} have obs_shape {expected[0]} and act_dim "
                f"{expected[1]}, got {found[0]} and {found[1]}; write another env to another path"
            )
        if self.seen > 0 and trajectory.obs.dtype != manifest.obs_dtype:
            raise ValueError(
                f"all trajectories of {self.path} have observations of one dtype, but this one has "
                f"{trajectory.obs.dtype} and the first had {manifest.obs_dtype}; record "
                "uint8 in every episode, or in none"
            )
        if len(trajectory) > manifest.horizon:
            raise ValueError(
                f"the trajectories of {self.path} have at most {manifest.horizon} steps, got "
                f"{len(trajectory)}; open the writer with a longer horizon"
            )
        if self.seen > 0 and manifest.has_costs != (trajectory.costs is not None):
            raise ValueError(
                f"all trajectories of {self.path} have costs or none has, but this one differs "
                "from the first; record info['cost'] in every episode, or in none"
            )
        if self.seen > 0 and manifest.has_outcomes != (trajectory.rewards is not None):
            raise ValueError(
                f"all trajectories of {self.path} have rewards, terminated and final_obs or none "
                "has, but this one differs from the first; record them in every episode, or in none"
            )

    def _save(self, *, finished: bool) -> None:
        about = asdict(replace(self._manifest, finished=finished))
        has_outcomes = about.pop("has_outcomes")  # which the version says
        meta = about | {"version": _WITH_OUTCOMES if has_outcomes else _VERSION}
        rows = torch.tensor(self._rows, dtype=torch.int64).reshape(-1, 4)
        save_tensors(self.path / _MANIFEST, kind=_KIND, tensors={"rows": rows}, meta=meta)
        self._flushed, self._new_bytes = self.seen, 0

    def _remove_other_shards(self) -> None:
        """Remove the shards of a dataset that was replaced, or of a future that was cut off."""
        ours = {_shard_name(*numbered) for numbered in enumerate(self._manifest.shards)}
        try:
            if not self._rows:
                (self.path / _MANIFEST).unlink(missing_ok=True)
            for entry in self.path.iterdir():
                if _SHARD.fullmatch(entry.name) and entry.name not in ours:
                    entry.unlink()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _leave_nothing(self) -> None:
        """Remove the folder if this writer has made it; a dataset to be replaced stays."""
        with suppress(OSError):
            names = {entry.name for entry in self.path.iterdir()}
            if names <= {".lock", REPLAYS}:
                for name in names:
                    (self.path / name).unlink()
                self.path.rmdir()
        self._lock.release()


@final
class TrajectoryDataset(Sequence[Trajectory]):
    """The trajectories of a folder, memory-mapped: each is a read-only view, read when it is used.

    Opening reads every shard once, to compare its checksum. A dataset that is still being written,
    or whose writer was killed, opens as its last flush left it.

    Args:
        path: A folder that `TrajectoryWriter` made.
        env_id: The env that the trajectories must come from; None takes any.

    Raises:
        StorageError: If the dataset is missing or unreadable, or nothing was flushed yet.
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
    has_outcomes: bool
    """Whether they have rewards, `terminated` and final observations."""
    seen: int
    """Trajectories of the whole run, of which these are a uniform sample."""
    finished: bool
    """Whether the writer was closed; if not, the run was cut off or is still going on."""
    episodes: NDArray[np.int64]
    """Serial number of each trajectory among all of the run, from 0. int64 (len(self),)."""
    lengths: NDArray[np.int64]
    """Steps of each trajectory. int64 (len(self),)."""

    def __init__(self, path: str | os.PathLike[str], *, env_id: str | None = None) -> None:
        self.path = Path(path)
        manifest, rows = _read_manifest(self.path)
        if env_id not in (None, manifest.env_id):
            raise MismatchError(
                f"trajectories must come from the env that they are used for: {self.path} was "
                f"recorded on {manifest.env_id!r}, not on {env_id!r}; record one on {env_id!r}, or "
                f"ask for {manifest.env_id!r}"
            )
        self.env_id, self.obs_shape = manifest.env_id, tuple(manifest.obs_shape)
        self.act_dim, self.horizon = manifest.act_dim, manifest.horizon
        self.has_costs, self.seen = manifest.has_costs, manifest.seen
        self.finished, self.has_outcomes = manifest.finished, manifest.has_outcomes
        self._shards = {
            number: _map_shard(self.path, number, manifest) for number in set(rows[:, 0].tolist())
        }
        self._places = rows[:, :2]  # shard and first step
        self.lengths, self.episodes = rows[:, 2], rows[:, 3]

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
        number, start = self._places[index].tolist()
        steps, shard = slice(start, start + int(self.lengths[index])), self._shards[number]
        arrays: dict[str, Any] = {
            name: rows[steps] for name, rows in shard.items() if name not in _PER_EPISODE
        }
        if not self.has_outcomes:
            return Trajectory(**arrays)
        which = int(np.searchsorted(shard["starts"], start))
        if which == len(shard["starts"]) or shard["starts"][which] != start:
            raise corrupt(self.path, f"no trajectory of shard {number} starts at step {start}")
        return Trajectory(
            **arrays,
            terminated=bool(shard["terminated"][which]),
            final_obs=shard["final_obs"][which],
        )


@dataclass
class _Manifest:
    """What the manifest says beside the rows of the sample."""

    env_id: str
    obs_shape: list[int]
    act_dim: int
    horizon: int
    capacity: int
    obs_dtype: str = "float32"
    """The first trajectory's; all other arrays are float32."""
    has_costs: bool = False
    seen: int = 0
    finished: bool = False
    has_outcomes: bool = False
    shards: list[list[int]] = field(default_factory=list)
    """Steps, bytes and crc32 of each shard that was ever flushed."""

    def arrays(self, steps: int) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of the arrays of a shard, by the names of `Trajectory`."""
        arrays = {
            "obs": (self.obs_dtype, [steps, *self.obs_shape]),
            "actions": ("float32", [steps, self.act_dim]),
        }
        if self.has_costs:
            arrays["costs"] = ("float32", [steps])
        if self.has_outcomes:
            # -1: as many as trajectories, in the order of their first steps.
            arrays["rewards"] = ("float32", [steps])
            arrays["starts"] = ("int64", [-1])
            arrays["terminated"] = ("uint8", [-1])
            arrays["final_obs"] = (self.obs_dtype, [-1, *self.obs_shape])
        return arrays


def _read_manifest(folder: Path) -> tuple[_Manifest, NDArray[np.int64]]:
    path = folder / _MANIFEST
    if folder.is_dir() and not path.exists():
        raise StorageError(
            f"a dataset has at least one flushed episode, but {folder} has no {_MANIFEST}; wait "
            "for its writer, check the path, or collect again"
        )
    tensors, meta = load_tensors(path, kind=_KIND)
    version = meta.pop("version", None)
    versions = _VERSION, _WITH_OUTCOMES
    check_format(path, _KIND, version, expected=_KIND, versions=versions)
    meta["has_outcomes"] = version == _WITH_OUTCOMES
    with described_by(path):
        rows = tensors["rows"].numpy()
    manifest, rows = _checked(path, meta, rows)
    if len(rows) == 0:
        raise corrupt(path, "it has no rows")
    return manifest, rows


def _checked(
    path: Path, about: Mapping[str, Any], rows: NDArray[Any]
) -> tuple[_Manifest, NDArray[np.int64]]:
    """A manifest whose parts fit each other; what is claimed may still not be on disk."""
    with described_by(path):
        made = _Manifest(**about)
        sizes = [made.act_dim, made.horizon, made.capacity, *made.obs_shape]
        if not (
            type(made.env_id) is str
            and type(made.obs_shape) is list
            and 1 <= len(made.obs_shape) <= _MAX_AXES
            and all(type(size) is int and size > 0 for size in sizes)
            and type(made.seen) is int
            and 0 <= made.seen < 2**62
            and type(made.has_costs) is type(made.finished) is type(made.has_outcomes) is bool
            and made.obs_dtype in ("float32", "uint8")
        ):
            raise ValueError(f"these sizes and names describe no trajectories: {made}"[:500])
        shards = np.array(made.shards, np.int64).reshape(-1, 3)
        if shards.tolist() != made.shards or (shards < 0).any() or (shards[:, 0] < 1).any():
            raise ValueError("its shards have no steps, bytes and crc32")
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != 4:
            raise ValueError(f"rows {rows.dtype} {rows.shape} are no table of int64 (n, 4)")
        number, start, steps, episode = rows.T
        if (
            len(rows) > min(made.capacity, made.seen)
            or (rows < 0).any()
            or (number >= len(shards)).any()
            or (steps < 1).any()
            or (steps > made.horizon).any()
            or (start > shards[number, 0] - steps).any()
            or (episode >= made.seen).any()
            or len(np.unique(episode)) < len(rows)
        ):
            raise ValueError("its rows do not lie in its shards")
    return made, rows


def _shard_name(number: int, shard: Sequence[int]) -> str:
    """With its checksum, so that no shard of another dataset has the same name."""
    return f"{number:06d}-{shard[2]:08x}.safetensors"


def _shard_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    first = trajectories[0]
    names = [n for n in ("obs", "actions", "costs", "rewards") if getattr(first, n) is not None]
    arrays = {name: np.concatenate([getattr(t, name) for t in trajectories]) for name in names}
    if first.rewards is not None:
        lengths = [len(trajectory) for trajectory in trajectories]
        arrays["starts"] = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        arrays["terminated"] = np.array([t.terminated for t in trajectories], np.uint8)
        arrays["final_obs"] = np.stack([np.asarray(t.final_obs) for t in trajectories])
    return safetensors.numpy.save(arrays)


def _map_shard(folder: Path, number: int, manifest: _Manifest) -> dict[str, NDArray[Any]]:
    """Map the arrays of a shard, after checking that the file is the one that was written."""
    steps, num_bytes, crc32 = shard = manifest.shards[number]
    path = folder / _shard_name(number, shard)
    expected = manifest.arrays(steps)
    try:
        with open_regular(path) as file:
            found_bytes = os.fstat(file.fileno()).st_size
            # Before anything is read or mapped, so that no claimed size is believed.
            if found_bytes != num_bytes:
                raise corrupt(path, f"it has {found_bytes} bytes, not {num_bytes}")
            if _crc32(file) != crc32:
                raise corrupt(path, "its contents do not match its crc32")
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        # Unlike np.memmap it keeps no file open: a run has a dataset per labelling round.
        whole = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise unreadable(path, OSError(str(error))) from error
    whole.flags.writeable = False
    data = whole[8 + header_bytes :]
    mapped = {}
    with described_by(path):
        about = json.loads(header)
        for name, (dtype, shape) in expected.items():
            start, end = about[name]["data_offsets"]
            if not 0 <= start <= end <= len(data):
                raise ValueError(f"{name} from {start} to {end} of {len(data)} bytes")
            mapped[name] = data[start:end].view(dtype).reshape(shape)
        if len({len(rows) for name, rows in mapped.items() if name in _PER_EPISODE}) > 1:
            raise ValueError(f"{' and '.join(_PER_EPISODE)} differ in their length")
    return mapped


def _crc32(file: BufferedReader) -> int:
    """Checksum of a file of any size; crc32 finds every accident worth naming, at disk speed."""
    crc32 = 0
    while block := file.read(1 << 20):
        crc32 = zlib.crc32(block, crc32)
    return crc32


def _copy(trajectory: Trajectory) -> Trajectory:
    """Its arrays may be rows of a buffer that is used again."""
    t = trajectory
    return Trajectory(
        t.obs.copy(),
        t.actions.copy(),
        None if t.costs is None else t.costs.copy(),
        None if t.rewards is None else t.rewards.copy(),
        t.terminated,
        None if t.final_obs is None else t.final_obs.copy(),
    )
