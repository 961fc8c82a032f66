"""How episodes can be played again, noted while they are played, so that people can see them.

An episode is known by its contents, so that whatever stores trajectories need not know of this.
What is not noted, or goes another way when it is played again, is shown as curves instead.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from pbcrl import Trajectory, finished_trajectories
from pbcrl.label.replay import Replay
from pbcrl.label_log import trajectory_digest
from pbcrl.recorder import discarded_envs
from pbcrl_envs.batched import BatchedEnv

REPLAYS = "replays.sqlite"
"""Their file, beside the episodes."""


class NoteStart(gym.Wrapper[Any, Any, Any, Any]):
    """Notes where an episode of a single env begins.

    By its state, if the env offers one, else by its seed or the state of its `np_random`, as far as
    `Replay` needs it.
    """

    start: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        env: Any = self.unwrapped
        self.start = {"rng": env.np_random.bit_generator.state} if seed is None else {"seed": seed}
        result = self.env.reset(seed=seed, options=options)
        if hasattr(env, "state_dict") and hasattr(env, "load_state_dict"):
            self.start = {"state": env.state_dict()}
        return result


class Replays:
    """Replays on disk, by the digest of their trajectory.

    They decide nothing: what a power cut takes of them is shown as curves.

    Args:
        folder: Of `replays.sqlite`; must exist.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / REPLAYS
        self._known: list[sqlite3.Connection] = []
        try:
            self._db = self._open(path)
        except sqlite3.DatabaseError:  # damaged by a power cut
            path.unlink()
            self._db = self._open(path)

    def _open(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TABLE IF NOT EXISTS replays (digest TEXT PRIMARY KEY, replay BLOB)")
        self._known.append(db)
        return db

    def include(self, folder: str | Path) -> bool:
        """Look into those of a dataset, too, without writing there; return whether it has any."""
        path = (Path(folder) / REPLAYS).resolve()
        if path.exists():
            self._known.append(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True))
        return path.exists()

    def add(self, trajectories: Sequence[Trajectory], replays: Sequence[Replay | None]) -> None:
        """Note how trajectories can be played again."""
        rows = [
            (trajectory_digest(trajectory), replay.to_bytes())
            for trajectory, replay in zip(trajectories, replays, strict=True)
            if replay is not None
        ]
        if rows:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO replays VALUES (?, ?)", rows)
            self._db.execute("COMMIT")

    def add_segments(
        self, segments: Sequence[Trajectory], wholes: Sequence[Trajectory], length: int
    ) -> None:
        """Note the segments that `cut_segments` has made of episodes."""
        starts = [
            (whole, start)
            for whole in wholes
            for start in range(0, len(whole) - length + 1, length)
        ]
        replays: list[Replay | None] = []
        for whole, start in starts:
            replay = self.of(whole)
            replays.append(replay and replay.segment(whole.actions, start))
        self.add(segments, replays)

    def of(self, trajectory: Trajectory) -> Replay | None:
        """How a trajectory can be played again, if that is known."""
        digest = (trajectory_digest(trajectory),)
        for db in self._known:
            try:
                found = db.execute("SELECT replay FROM replays WHERE digest = ?", digest).fetchone()
            except sqlite3.DatabaseError:
                continue
            if found:
                return Replay.from_bytes(found[0])
        return None

    def close(self) -> None:
        """Close the files."""
        for db in self._known:
            db.close()


class Starts:
    """Where the episodes under way began.

    Args:
        envs: Of `make_envs`, maybe wrapped.
        env_id: As `make_envs` takes it.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], env_id: str) -> None:
        self._envs = envs.unwrapped
        self._env_id = _importable(env_id)
        self._starts: list[Replay | None] = [None] * envs.num_envs

    def of(self, ids: np.ndarray) -> list[Replay | None]:
        """Where the episodes of some envs began, that have just ended."""
        return [self._starts[i] for i in ids.tolist()]

    def begin(self, ids: np.ndarray) -> None:
        """Note where the episodes begin that have just begun in some envs."""
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


class ReplayRecorder(VectorWrapper[Any, Any, Any, Any]):
    """Notes how each episode that ends can be played again.

    Args:
        envs: Around which `PreferenceCostVectorWrapper` has put its trajectories into the infos.
        env_id: As `make_envs` takes it.
        replays: Where it is noted.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], env_id: str, replays: Replays) -> None:
        super().__init__(envs)
        self._inner: Any = envs
        self._begun, self._replays = Starts(envs, env_id), replays

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
            self._replays.add(finished_trajectories(infos), self._begun.of(kept))
            self._begun.begin(np.flatnonzero(done))
        return result

    def state_dict(self) -> dict[str, Any]:
        """That of the envs, and where their episodes began."""
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
