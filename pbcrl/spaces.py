"""What a cost model reads of Gymnasium's spaces: rows of numbers, all of one shape.

An image stays an image; everything else is laid out as `gymnasium.spaces.utils.flatten` does it:
one-hot for `Discrete` and each entry of `MultiDiscrete`, the parts of `Dict` and `Tuple` one after
another. That function takes one sample; the functions here take those of N envs at once, and refuse
what does not lie in its space. Does not depend on models or wrappers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.spaces.utils import flatdim, flatten_space
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from pbcrl.errors import NonFiniteError
from pbcrl.trajectory import FloatArray, ObsArray

_FIX_ENV = "fix the env, or the space that it declares"
_MEND_POLICY = "check the output of the policy; the episode goes on as if it was never sent"


def obs_shape_of(space: Space[Any]) -> tuple[int, ...]:
    """Return the shape of the row that a cost model reads for one observation.

    Args:
        space: Of a single env, not of a batch.

    Returns:
        (H, W, C) for an image, that is a uint8 Box with three axes; (obs_dim,) for all else.

    Raises:
        ValueError: If the space, or a part of it, has no fixed length, or holds no number at all.
    """
    dim = _fixed_length(space, name="observation", wrapper="TransformObservation")
    if isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3:
        return space.shape
    return (dim,)


def act_dim_of(space: Space[Any]) -> int:
    """Return the size of the flat row that a cost model reads for one action.

    Args:
        space: Of a single env, not of a batch.

    Raises:
        ValueError: If it is no Box, Discrete, MultiDiscrete or MultiBinary, or holds no number.
    """
    if isinstance(space, Dict | Tuple):
        raise ValueError(
            "an action space must be a Box, Discrete, MultiDiscrete or MultiBinary, got "
            f"{space}; put TransformAction inside this wrapper, to split a flat action"
        )
    return _fixed_length(space, name="action", wrapper="TransformAction")


def spaces_of(env: gym.Env[Any, Any] | VectorEnv) -> tuple[Space[Any], Space[Any], int | None]:
    """Return the spaces of one env of an env, single or vectorised, and its time limit.

    Raises:
        TypeError: If it is no env.
    """
    if isinstance(env, VectorEnv):
        spaces = env.single_observation_space, env.single_action_space
    elif isinstance(env, gym.Env):
        spaces = env.observation_space, env.action_space
    else:
        raise TypeError(
            f"for_env takes an env, single or vectorised, got {env!r}; make it first, by "
            "gymnasium.make or make_vec, or pass its spaces to the model"
        )
    return *spaces, None if env.spec is None else env.spec.max_episode_steps


def input_names(
    observation_space: Space[Any],
    action_space: Space[Any],
    names: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Return a name for each number that a cost model reads, observation first.

    Those of a `Dict` have its keys, "speed" or "lidar[3]"; the categories of a `Discrete` are
    "gear=2". Other parts go by their place: "obs[3]", "action[0]".

    Args:
        observation_space: Of a single env; no image.
        action_space: Likewise.
        names: Better ones for the observation, (obs_dim,), as the env has them.

    Returns:
        (obs_dim + act_dim,).

    Raises:
        TypeError, ValueError: As `check_names`, of all names.
    """
    found, actions = _names(observation_space, "obs"), _names(action_space, "action")
    if names is None and len({*found, *actions}) < len(found) + len(actions):
        found = [f"obs[{i}]" for i in range(len(found))]  # keys that make the same names
    if names is not None:
        found = list(check_names(names, len(found), of="observation_names of the env"))
    return check_names([*found, *actions], len(found) + len(actions))


def check_names(names: Sequence[str], dim: int, *, of: str = "names of inputs") -> tuple[str, ...]:
    """Return names as a tuple.

    Args:
        names: One per number, all different, each in one line.
        dim: How many.
        of: What they are, in errors.

    Raises:
        TypeError: If they are no sequence of texts.
        ValueError: If there is not one for each, two are the same, or one has a line break.
    """
    wrong = (
        names if isinstance(names, str) or not isinstance(names, Sequence | np.ndarray) else None
    )
    if wrong is None:
        wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"{of} are a sequence of texts, one per number, got {wrong!r:.80}")
    if len(names) != dim or len(set(names)) != dim:
        raise ValueError(
            f"{of} are one per number, observations first, all different: {dim}, got {len(names)}, "
            f"{len(set(names))} of them different; leave them out, or mend the list"
        )
    if broken := [name for name in names if len(name.splitlines()) != 1]:
        raise ValueError(f"{of} are one line each, got {broken[0]!r:.80}; mend the list")
    return tuple(map(str, names))


def names_of(env: gym.Env[Any, Any] | VectorEnv) -> tuple[str, ...]:
    """Return `input_names` of an env, single or vectorised; its own for the observation if it can.

    An env names the numbers of its observation by an attribute `observation_names`, (obs_dim,); a
    `Dict` does so by its keys. Either counts if no wrapper has changed the observation space, but
    for flattening it. One env of an `AsyncVectorEnv` is made anew, to be looked at.

    Raises:
        TypeError: If it is no env, or its list is none of texts.
        ValueError: If it has such a list that does not fit.
    """
    observation_space, action_space, _ = spaces_of(env)
    inner: Any = env.unwrapped
    if not hasattr(inner, "observation_names"):
        if getattr(inner, "envs", None):  # of a SyncVectorEnv
            inner = inner.envs[0].unwrapped
        elif getattr(inner, "env_fns", None):  # of an AsyncVectorEnv, in other processes
            one = inner.env_fns[0]()
            inner = one.unwrapped
            one.close()
    names = getattr(inner, "observation_names", None)
    own: Any = getattr(inner, "single_observation_space", getattr(inner, "observation_space", None))
    if own == observation_space:
        return input_names(observation_space, action_space, names)
    if isinstance(own, Space) and own.is_np_flattenable and flatten_space(own) == observation_space:
        return input_names(own, action_space, names)  # the same numbers in the same order
    return input_names(observation_space, action_space)  # a wrapper has changed what is seen


def find_image(space: Space[Any], key: str = "") -> str | None:
    """Return the keys, joined by dots, of a part that is an image; None if there is none."""
    if isinstance(space, Dict | Tuple):
        inner = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        found = (find_image(part, f"{key}.{name}".lstrip(".")) for name, part in inner)
        return next((at for at in found if at is not None), None)
    is_image = isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3
    return key if is_image and key else None


def obs_rows(space: Space[Any], obs: Any, *, num_envs: int | None = None) -> ObsArray:
    """Return observations as the rows that a cost model reads and a recorder keeps, copied.

    Args:
        space: Of a single env.
        obs: What the env returned, or a vector env of N such envs.
        num_envs: N; None for a single env.

    Returns:
        Flat rows, (N, obs_dim), or (1, obs_dim) of a single env; reshape those of an image. uint8
        for a uint8 Box; float32 for all else, which rounds integers above 2^24.

    Raises:
        ValueError: If the shape, a key or an integer does not fit the space.
    """
    if isinstance(space, Box) and space.dtype == np.uint8:
        given = np.asarray(obs)
        if not np.can_cast(given.dtype, np.uint8):
            raise ValueError(
                f"obs of a uint8 space must be uint8, got {given.dtype}, which would be cut off; "
                f"{_FIX_ENV}"
            )
        return _flat(space, given, _batch(num_envs), "obs", _FIX_ENV).astype(np.uint8)
    return _float32(_flat(space, obs, _batch(num_envs), "obs", _FIX_ENV))


def action_rows(space: Space[Any], actions: Any, *, num_envs: int | None = None) -> FloatArray:
    """Return actions as the rows that a cost model reads and a recorder keeps, copied.

    Args:
        space: Of a single env.
        actions: What is passed to `step`, of a single env or of a vector env of N such envs.
        num_envs: N; None for a single env.

    Returns:
        Flat rows, (N, act_dim), or (1, act_dim) of a single env.

    Raises:
        ValueError: If the shape does not fit the space, or an integer lies outside of it. A Box is
            not compared with its bounds.
    """
    return _float32(_flat(space, actions, _batch(num_envs), "action", _MEND_POLICY))


def executed_actions(
    space: Space[Any], actions: Any, *, num_envs: int | None = None
) -> tuple[Any, FloatArray, bool]:
    """Return actions as the env shall execute them: a Box is clipped to its bounds.

    Args:
        space: Of a single env.
        actions: What is passed to `step`, of a single env or of a vector env of N such envs.
        num_envs: N; None for a single env.

    Returns:
        The actions for the env, their rows as of `action_rows`, and whether one was clipped.

    Raises:
        ValueError: As of `action_rows`.
        NonFiniteError: If an entry of a Box is NaN or infinite.
    """
    rows = action_rows(space, actions, num_envs=num_envs)
    if not isinstance(space, Box):
        return actions, rows, False
    actions = np.asarray(actions)
    if not np.isfinite(actions).all():
        raise NonFiniteError(
            f"action must be finite, got {actions[~np.isfinite(actions)][0]}; check the policy for "
            "divergence; the episode goes on as if it was never sent"
        )
    inside = np.minimum(np.maximum(actions, space.low), space.high)
    if (inside == actions).all():
        return actions, rows, False
    return inside, action_rows(space, inside, num_envs=num_envs), True


def _names(space: Space[Any], name: str) -> list[str]:
    """In the order of `_flat`."""
    if isinstance(space, Dict):
        keys = [str(key) if name == "obs" else f"{name}.{key}" for key in space.spaces]
        parts = zip(keys, space.spaces.values(), strict=True)
        return [found for key, part in parts for found in _names(part, key)]
    if isinstance(space, Tuple):
        places = enumerate(space.spaces)
        return [found for i, part in places for found in _names(part, f"{name}.{i}")]
    if isinstance(space, Discrete | MultiDiscrete):
        nvec = np.ravel(space.nvec if isinstance(space, MultiDiscrete) else space.n).tolist()
        starts = np.broadcast_to(np.ravel(getattr(space, "start", 0)), len(nvec)).tolist()
        each = [name] if len(nvec) == 1 else [f"{name}[{i}]" for i in range(len(nvec))]
        return [
            f"{at}={start + k}"
            for at, start, n in zip(each, starts, nvec, strict=True)
            for k in range(n)
        ]
    dim = flatdim(space)
    return (
        [name]
        if dim == 1 and name not in ("obs", "action")
        else [f"{name}[{i}]" for i in range(dim)]
    )


def _batch(num_envs: int | None) -> tuple[int, ...]:
    return () if num_envs is None else (num_envs,)


def _float32(rows: NDArray[Any]) -> FloatArray:
    # A copy: envs may write the next observation into the same memory.
    if rows.dtype == np.float32:
        return rows.copy()
    with np.errstate(over="ignore"):  # what overflows becomes inf, and is then refused by name
        return rows.astype(np.float32)


def _flat(
    space: Space[Any], values: Any, batch: tuple[int, ...], name: str, remedy: str
) -> NDArray[Any]:
    """(1 or N, dim), of any dtype, maybe a view; `batch` is () for a single env, else (N,)."""
    if isinstance(space, Dict | Tuple):
        # A Tuple's values are found by their place, as a Dict's are by their key.
        given = values if isinstance(space, Dict) else dict(enumerate(values))
        inner = dict(space.spaces if isinstance(space, Dict) else enumerate(space.spaces))
        if set(given) != set(inner):
            raise ValueError(
                f"{name} must have the parts {list(inner)} of its space, got {list(given)}; "
                f"{remedy}"
            )
        parts = [(part, given[key], f"{name}[{key!r}]") for key, part in inner.items()]
    else:
        return _flat_array(space, np.asarray(values), batch, name, remedy)
    return np.concatenate([_flat(part, value, batch, at, remedy) for part, value, at in parts], 1)


def _flat_array(
    space: Space[Any], array: NDArray[Any], batch: tuple[int, ...], name: str, remedy: str
) -> NDArray[Any]:
    shape = space.shape
    assert shape is not None
    if array.shape != (*batch, *shape):
        raise ValueError(
            f"{name} must have the shape {(*batch, *shape)} of its space, got {array.shape}; "
            f"{remedy}"
        )
    rows = array.reshape(*(batch or (1,)), math.prod(shape))
    if isinstance(space, Box):
        return rows
    if isinstance(space, MultiBinary):
        outside = (rows != 0) & (rows != 1)
    else:
        nvec = np.ravel(space.nvec if isinstance(space, MultiDiscrete) else space.n)  # type: ignore[attr-defined]
        # MultiDiscrete has a start since Gymnasium 1.0.
        index = rows - np.ravel(getattr(space, "start", 0))
        outside = (index < 0) | (index >= nvec)
        if array.dtype.kind not in "iub":
            outside[:] = True
    if outside.any():
        row = int(np.argwhere(outside)[0, 0])
        where = f" in env {row}" if len(rows) > 1 else ""
        found = array[row] if batch else array
        raise ValueError(
            f"{name} must lie in {space}, got {found!s} ({array.dtype}){where}; {remedy}"
        )
    if isinstance(space, MultiBinary):
        return rows
    one_hot = np.zeros((len(rows), nvec.sum()), np.float32)
    np.put_along_axis(one_hot, index + np.cumsum(nvec) - nvec, 1, axis=1)
    return one_hot


def _fixed_length(space: Space[Any], *, name: str, wrapper: str) -> int:
    _require_fixed_length(space, name=name, wrapper=wrapper)
    dim = flatdim(space)
    if dim == 0:
        raise ValueError(
            f"a cost model reads at least one number, but the {name} space is {space}; give it a "
            "constant if there is nothing to see or to do"
        )
    return dim


def _require_fixed_length(space: Space[Any], *, name: str, wrapper: str) -> None:
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            _require_fixed_length(part, name=f"{name}[{key!r}]", wrapper=wrapper)
    elif isinstance(space, Tuple):
        for i, part in enumerate(space.spaces):
            _require_fixed_length(part, name=f"{name}[{i}]", wrapper=wrapper)
    elif not isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete):
        raise ValueError(
            "a cost model reads rows of one length, so every part of a space must be a Box, "
            f"Discrete, MultiDiscrete or MultiBinary, but {name} is {space}; put {wrapper} inside "
            "this wrapper, to turn it into a Box"
        )
