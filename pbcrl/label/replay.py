"""How to play a trajectory again, so that it can be drawn long after it was recorded.

An env that starts alike and gets the same actions goes the same way. Whether it did is checked:
nobody is shown anything that was not played.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numpy.typing import ArrayLike, NDArray

from pbcrl.env_modules import registered
from pbcrl.errors import MismatchError
from pbcrl.label.arrays import pack, unpack
from pbcrl.spaces import obs_rows
from pbcrl.storage import described_by
from pbcrl.trajectory import FloatArray, Trajectory

Image = NDArray[np.uint8]

_MAX_ABOUT = 1 << 16  # bytes


@dataclass(frozen=True, eq=False)
class Replay:
    """Where a trajectory began; give `seed`, `rng` or `state`.

    Raises:
        ValueError: If none of them is given, or more than one.
    """

    env_id: str
    """As `gymnasium.make` takes it; "module:Id-v0" imports the module that registers it, if that
    is installed (`pbcrl.env_modules`)."""
    seed: int | None = None
    """The episode began with `reset(seed=seed)`."""
    rng: Mapping[str, Any] | None = None
    """The state of `env.unwrapped.np_random` (`bit_generator.state`) before `reset()`."""
    state: Mapping[str, ArrayLike] | None = None
    """What `env.unwrapped.load_state_dict` takes: arrays of numbers by name."""
    before: FloatArray | None = None
    """Actions that were played before the first step, (S, act_dim), for a segment; None if none."""

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.seed, self.rng, self.state)) != 1:
            raise ValueError(
                "an episode is played again from a seed, from a generator's state or from an env's "
                f"state: give exactly one to the replay of {self.env_id}"
            )

    def segment(self, actions: FloatArray, start: int) -> Replay:
        """The replay of a segment that begins `start` steps later, given the whole's actions."""
        before = (
            actions[:start]
            if self.before is None
            else (np.concatenate([self.before, actions[:start]]))
        )
        return Replay(self.env_id, self.seed, self.rng, self.state, before)

    def to_bytes(self) -> bytes:
        """As a label folder keeps it; no pickle.

        Raises:
            ValueError: If it is too large to be read again: its arrays have at most 256 MiB.
        """
        about = json.dumps({"env_id": self.env_id, "seed": self.seed, "rng": self.rng}).encode()
        _check_about(len(about))
        arrays = {f"state/{k}": np.asarray(v) for k, v in (self.state or {}).items()}
        if self.before is not None and len(self.before):
            arrays["before"] = np.asarray(self.before, np.float32)
        return pack({"about": np.frombuffer(about, np.uint8), **arrays})

    @classmethod
    def from_bytes(cls, data: bytes) -> Replay:
        """The inverse of `to_bytes`, of bytes that may be anything.

        Raises:
            CorruptFileError: If these are no such bytes, or they claim more than 256 MiB.
        """
        with described_by("a replay"):
            arrays = unpack(data)
            _check_about(arrays["about"].nbytes)
            about = json.loads(bytes(arrays["about"]))
            state = {k[6:]: array for k, array in arrays.items() if k.startswith("state/")}
            before = arrays.get("before")
            env_id, seed, rng = about["env_id"], about["seed"], about["rng"]
            if not (isinstance(env_id, str) and isinstance(seed, int | None)):
                raise TypeError(f"an env id {env_id!r} and a seed {seed!r}")
            if not isinstance(rng, dict | None) or (before is not None and before.ndim != 2):
                raise TypeError("a generator's state or actions of another kind")
            return cls(env_id, seed, rng, state or None, before)


def _check_about(num_bytes: int) -> None:
    """JSON takes many times its size when it is read."""
    if num_bytes > _MAX_ABOUT:
        raise ValueError(
            f"env_id, seed and rng of a replay have at most {_MAX_ABOUT} bytes, got {num_bytes}; "
            "give a state, whose arrays may be larger"
        )


def replay_frames(
    replay: Replay, trajectory: Trajectory, *, every: int = 1
) -> Iterator[tuple[Image, str]]:
    """Play a trajectory again and draw it.

    Args:
        replay: Where it began.
        trajectory: Its actions are played; its observations must come again.
        every: Steps from one picture to the next.

    Yields:
        The picture of s_0, s_every, ... and of the state after the last step, uint8 (H, W, 3), and
        what the env has to say then: `info["caption"]`, or nothing.

    Raises:
        MismatchError: If other observations come than were recorded.
        ValueError: If `render()` returns no picture (H, W, 3) of integers from 0 to 255.
        Exception: Whatever the env raises.
    """
    _, options = drawn_how(replay.env_id)
    env: gym.Env[Any, Any] = gym.make(
        registered(replay.env_id), render_mode="rgb_array", disable_env_checker=True, **options
    )
    try:
        yield from _frames(env, replay, trajectory, every)
    finally:
        env.close()


@functools.cache
def drawn_how(env_id: str) -> tuple[float, dict[str, Any]]:
    """How an env wants to be drawn for people, as its metadata says.

    Returns:
        Its steps per second: `render_fps`, or 30. The arguments of `gymnasium.make`, besides the
        render mode, by which people can judge best: `labelling`, or none.

    Raises:
        ValueError: If it cannot be drawn.
    """
    env: gym.Env[Any, Any] = gym.make(registered(env_id), disable_env_checker=True)
    metadata = env.metadata
    env.close()
    if "rgb_array" not in (metadata.get("render_modes") or []):
        raise ValueError(f'{env_id} has no render mode "rgb_array"')
    return float(metadata.get("render_fps") or 30), dict(metadata.get("labelling") or {})


def _frames(
    env: gym.Env[Any, Any], replay: Replay, trajectory: Trajectory, every: int
) -> Iterator[tuple[Image, str]]:
    if replay.rng is not None:
        env.reset(seed=0)  # makes what only a first reset makes; its draws are overwritten
        env.unwrapped.np_random.bit_generator.state = replay.rng
        obs, info = env.reset()
    else:
        obs, info = env.reset(seed=replay.seed or 0)
    known = replay.state is None
    if replay.state is not None:
        env.unwrapped.load_state_dict(replay.state)  # type: ignore[attr-defined]
    for action in () if replay.before is None else replay.before:
        obs, _, _, _, info = env.step(_unflat(env.action_space, action))
        known = True
    for step in range(len(trajectory)):
        # After a state is loaded the first observation is not told; the second one is.
        if known:
            _compare(env, obs, trajectory.obs[step], step)
        if step % every == 0:
            yield _picture(env), str(info.get("caption", ""))
        obs, _, _, _, info = env.step(_unflat(env.action_space, trajectory.actions[step]))
        known = True
    yield _picture(env), str(info.get("caption", ""))


def _compare(env: gym.Env[Any, Any], obs: Any, recorded: NDArray[Any], step: int) -> None:
    row = obs_rows(env.observation_space, obs).reshape(recorded.shape)
    if not np.allclose(row, recorded, rtol=1e-4, atol=1e-5):
        raise MismatchError(
            "a trajectory is drawn by playing it again, but at step "
            f"{step} the env shows other observations than were recorded; give frames instead, or "
            "see that the env depends on its seed and its actions alone"
        )


def _picture(env: gym.Env[Any, Any]) -> Image:
    image = env.render()
    if not (isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] >= 3):
        raise ValueError(f"render() returns a picture (H, W, 3), got {type(image).__name__}")
    is_whole = image.dtype.kind in "iu" and image.size > 0
    if not is_whole or image.min() < 0 or image.max() > 255:
        found = f"{image.min()} to {image.max()}" if image.size else "nothing"
        raise ValueError(
            "render() returns a picture as integers from 0 to 255 (fractions of 1 would be shown "
            f"black), got {image.dtype} from {found}; return it as np.uint8, fractions as "
            "np.uint8(255 * picture)"
        )
    return np.ascontiguousarray(image[:, :, :3], dtype=np.uint8)


def _unflat(space: gym.Space[Any], row: FloatArray) -> Any:
    """The action that `action_rows` made into this row."""
    if isinstance(space, Box):
        return row.reshape(space.shape).astype(space.dtype)
    if isinstance(space, Discrete):
        return int(space.start + row.argmax())
    if isinstance(space, MultiDiscrete):
        nvec, start = np.ravel(space.nvec), np.ravel(getattr(space, "start", 0))
        parts = np.split(row, np.cumsum(nvec)[:-1])
        index = np.array([part.argmax() for part in parts]) + start
        return index.reshape(space.nvec.shape).astype(space.dtype)
    if isinstance(space, MultiBinary):
        return row.reshape(space.shape).astype(np.int8)
    raise ValueError(f"actions of {space} cannot be played again")
