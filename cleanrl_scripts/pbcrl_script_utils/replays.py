"""How episodes can be played again, noted while they are played, so that people can see them.

An episode is known by its contents, so that datasets, in whose folder this lies, need not read it.
What is not noted, or goes another way when it is played again, is shown as curves instead.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from pbcrl import Trajectory, finished_trajectories
from pbcrl.data.dataset import REPLAYS
from pbcrl.data.label_log import trajectory_digest
from pbcrl.errors import CorruptFileError
from pbcrl.label.replay import Replay
from pbcrl.recorder import discarded_envs
from pbcrl.storage import unwritable, write_all
from pbcrl_envs.batched import BatchedEnv

_RECORD = struct.Struct("<16sII")  # digest of a trajectory, bytes and crc32 of its replay
_MAX_BYTES = 1 << 28  # of a replay


class NoteStart(gym.Wrapper[Any, Any, Any, Any]):
    """Notes where an episode of a single env begins.

    By its state, if the env offers one, else by its seed or the state of its `np_random`, as far as
    `Replay` needs it.
    """

    start: dict[str, Any] | None = None
    _steps_left: int | None = None  # until an episode is cut off that is not to be a whole one

    def cut_first(self, steps: int) -> None:
        """Truncate the episode that has just begun after some steps, marked as "partial"."""
        self._steps_left = steps

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, and cut off the episode if it is time."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0 and not (terminated or truncated):
                truncated, info = True, {**info, "partial": True}
        return obs, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        env: Any = self.unwrapped
        self._steps_left = None
        self.start = {"seed": seed}
        if seed is None:  # of another kind of generator the state is no plain numbers
            bits = getattr(env.np_random, "bit_generator", None)
            self.start = {"rng": bits.state} if isinstance(bits, np.random.PCG64) else None
        result = self.env.reset(seed=seed, options=options)
        if hasattr(env, "state_dict") and hasattr(env, "load_state_dict"):
            self.start = {"state": env.state_dict()}
        return result


class Replays:
    """Replays in a file, by the digest of their trajectory.

    Records are only added, each with a checksum, and what a kill or a power cut leaves of the last
    ones is dropped: replays decide nothing, and those that are lost are shown as curves. Those of
    trajectories that are not there any more are never looked up.

    Args:
        folder: Of the file; must exist.

    Raises:
        StorageError: If the file cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / REPLAYS
        self._places: dict[bytes, tuple[FileIO, int, int]] = {}  # file, first byte, bytes
        self._files = ExitStack()
        self.close = finalize(self, self._files.close)
        """Close the files; a second call does nothing."""
        try:
            self._file = self._files.enter_context(FileIO(self._path, "a+b"))
            self._file.truncate(self._read(self._file))
        except OSError as error:
            raise unwritable(self._path, error) from error

    def include(self, folder: str | Path) -> bool:
        """Look into those of a dataset, too, without writing there; return whether it has any."""
        try:
            file = self._files.enter_context(FileIO(Path(folder) / REPLAYS, "rb"))
        except OSError:
            return False
        return self._read(file) > 0

    def add(self, trajectories: Sequence[Trajectory], replays: Sequence[Replay | None]) -> None:
        """Note how trajectories can be played again.

        Raises:
            StorageError: If that cannot be written.
        """
        for trajectory, replay in zip(trajectories, replays, strict=True):
            digest = bytes.fromhex(trajectory_digest(trajectory))
            if replay is None or digest in self._places:
                continue
            data = replay.to_bytes()
            head = _RECORD.pack(digest, len(data), zlib.crc32(digest + data))
            end = self._file.seek(0, os.SEEK_END)
            try:
                write_all(self._file, head + data)
            except OSError as error:
                self._file.truncate(end)  # or what is added later would come after half a record
                raise unwritable(self._path, error) from error
            self._places[digest] = self._file, end + len(head), len(data)

    def of(self, trajectory: Trajectory) -> Replay | None:
        """How a trajectory can be played again, if that is known."""
        place = self._places.get(bytes.fromhex(trajectory_digest(trajectory)))
        if place is None:
            return None
        file, start, size = place
        file.seek(start)
        with suppress(CorruptFileError):  # it is shown as curves
            return Replay.from_bytes(file.read(size))
        return None

    def sync(self) -> None:
        """Put on disk what was added, so that a power cut does not take it."""
        os.fsync(self._file.fileno())

    def _read(self, file: FileIO) -> int:
        """Find the records of a file; return where the last whole one ends."""
        start = file.seek(0)
        while len(head := file.read(_RECORD.size)) == _RECORD.size:
            digest, size, crc32 = _RECORD.unpack(head)
            data = file.read(size) if size <= _MAX_BYTES else b""
            if len(data) != size or zlib.crc32(digest + data) != crc32:
                break
            start += _RECORD.size
            self._places.setdefault(digest, (file, start, size))
            start += size
        return start


class Starts:
    """Where the episodes under way began, of envs that can be drawn.

    Args:
        envs: Of `make_envs`, maybe wrapped.
        env_id: As `make_envs` takes it.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], env_id: str) -> None:
        self._envs = envs.unwrapped
        self._env_id = _importable(env_id)
        self._starts: list[Replay | None] = [None] * envs.num_envs
        self._drawable = "rgb_array" in (self._envs.metadata.get("render_modes") or [])

    def of(self, ids: np.ndarray) -> list[Replay | None]:
        """Where the episodes of some envs began, that have just ended."""
        return [self._starts[i] for i in ids.tolist()]

    def begin(self, ids: np.ndarray) -> None:
        """Note where the episodes begin that have just begun in some envs."""
        if not self._drawable:
            return
        if isinstance(self._envs, BatchedEnv):
            state = self._envs.state_dict(ids)
            for row, i in enumerate(ids.tolist()):
                one = {name: values[row] for name, values in state.items()}
                self._starts[i] = Replay(self._env_id, state=one)
        elif isinstance(self._envs, SyncVectorEnv):
            for i in ids.tolist():
                env = self._envs.envs[i]
                if isinstance(env, NoteStart) and env.start is not None:
                    self._starts[i] = Replay(self._env_id, **env.start)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        known = [one.to_bytes() if one else b"" for one in self._starts]
        return {"starts": [np.frombuffer(one, np.uint8).copy() for one in known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._starts = [Replay.from_bytes(bytes(s)) if len(s) else None for s in state["starts"]]


class Keeper(Protocol):
    """What takes episodes and how they can be played again."""

    def add(self, trajectories: Sequence[Trajectory], replays: Sequence[Replay | None]) -> None:
        """Keep them."""
        ...

    def sync(self) -> None:
        """Put on disk what was added."""
        ...


class RecordStarts(VectorWrapper[Any, Any, Any, Any]):
    """Hands on each episode that ends, with how it can be played again.

    Args:
        envs: Which put their trajectories into the infos, as `RecordTrajectories` does.
        env_id: As `make_envs` takes it.
        keeper: Who is told.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], env_id: str, keeper: Keeper) -> None:
        super().__init__(envs)
        self._inner: Any = envs
        self._begun, self._keeper = Starts(envs, env_id), keeper

    def reset(self, **options: Any) -> Any:
        """Reset all envs."""
        result = self.env.reset(**options)
        self._begun.begin(np.arange(self.num_envs))
        return result

    def step(self, actions: Any) -> Any:
        """Step all envs."""
        result = self.env.step(actions)
        _, _, terminated, truncated, infos = result
        done = terminated | truncated
        if done.any():
            kept = np.flatnonzero(done & ~discarded_envs(infos, self.num_envs))
            self._keeper.add(finished_trajectories(infos), self._begun.of(kept))
            self._begun.begin(np.flatnonzero(done))
        return result

    def state_dict(self) -> dict[str, Any]:
        """That of the envs, and where their episodes began; what was kept is on disk."""
        self._keeper.sync()
        return {"envs": self._inner.state_dict(), "begun": self._begun.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._inner.load_state_dict(state["envs"])
        self._begun.load_state_dict(state["begun"])


def _importable(env_id: str) -> str:
    """The id with the module that registers it, so that another process can make the env."""
    if ":" in env_id:
        return env_id
    entry = gym.spec(env_id).entry_point
    return f"pbcrl_envs:{env_id}" if str(entry).startswith("pbcrl_envs") else env_id
