"""What every env of this package checks at its door: actions, seeds, options, modes and states.

One wording for all tasks; a message names the env where its rule is specific to that env. For the
envs of this package alone: `testing.py` is what a user's env calls.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike, NDArray

State = dict[str, NDArray[Any]]
"""What `state_dict` returns: arrays of numbers, with one leading row per copy in a batch."""


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Within this, name the extra of the project that brings a module which is missing.

    Raises:
        DependencyNotInstalled: If an import within finds no such module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise DependencyNotInstalled(
            f"the {name} tasks need the packages of the extra {name!r}, but there is no module "
            f'{missing}; run `pip install "pbcrl[{name}]"`'
        ) from error


def checked_actions(
    actions: object,
    *,
    shape: tuple[int, ...],
    axes: str,
    low: ArrayLike = -1.0,
    high: ArrayLike = 1.0,
) -> NDArray[np.float64]:
    """Return the actions that the env executes: float64, clipped to their bounds.

    Args:
        actions: Array-like of `shape`.
        shape: (act_dim,) of a single env, (N, act_dim) of a batch.
        axes: What the numbers of one action are, for the message: "(thrust, turn)".
        low: Smallest action, one for all axes or (act_dim,).
        high: Largest action, likewise.

    Returns:
        A new array of `shape`.

    Raises:
        ValueError: If the actions have another shape, or hold NaN or an infinity.
    """
    given = np.asarray(actions, dtype=np.float64)
    if given.shape != shape:
        raise ValueError(
            f"actions must have shape {shape}, got {given.shape}; each action is {axes}, "
            "one row per env in a batch"
        )
    broken = ~np.isfinite(given)
    if broken.any():
        rows = np.flatnonzero(np.atleast_2d(broken).any(axis=1))
        raise ValueError(
            f"actions must be finite, got {int(broken.sum())} NaN or infinite of {given.size} "
            f"numbers, for envs {rows.tolist()}; look for the update that broke the policy"
        )
    return np.clip(given, np.asarray(low, np.float64), np.asarray(high, np.float64))


def check_at_least_one(name: str, value: int) -> None:
    """Refuse numbers below 1 of what must be there.

    Raises:
        ValueError: If `value` is below 1; the message has its `name`.
    """
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_num_threads(num_threads: int) -> None:
    """Refuse negative numbers of threads.

    Raises:
        ValueError: If `num_threads` is negative.
    """
    if num_threads < 0:
        raise ValueError(f"num_threads must be >= 0, got {num_threads}; 0 takes one thread per CPU")


def check_task(task: str, known: Collection[str]) -> None:
    """Refuse names that are not those of a task.

    Raises:
        ValueError: If `task` is not among the `known`; the message proposes the nearest of them.
    """
    if task not in known:
        close = difflib.get_close_matches(str(task), known, n=1, cutoff=0.3) or list(known)
        raise ValueError(
            f"task must be one of {', '.join(known)}, got {task!r}; did you mean {close[0]!r}?"
        )


def checked_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return NEXT_STEP or SAME_STEP, given as the member or as its value ("NextStep").

    Raises:
        ValueError: If the mode is DISABLED or none at all.
    """
    supported = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    for known in supported:
        if mode in (known, known.value):
            return known
    raise ValueError(
        f"autoreset_mode must be one of {', '.join(known.value for known in supported)}, got "
        f"{mode!r}; a batch resets its finished envs itself, for anything else use single envs"
    )


def seed_per_env(seed: int | Sequence[int | None] | None, *, num_envs: int) -> list[int | None]:
    """Return one seed per env: an int s gives env i seed s + i; None lets a stream run on.

    Raises:
        ValueError: If a sequence does not hold `num_envs` seeds.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(
            f"a sequence of seeds must have one entry per env, got {len(seed)} seeds for "
            f"{num_envs} envs; or pass one int, and env i gets seed + i"
        )
    return [None if one is None else int(one) for one in seed]


def refuse_options(options: dict[str, Any] | None, *, env: str) -> None:
    """Refuse reset options other than None and {}.

    Raises:
        ValueError: If `options` holds anything; the message names `env`.
    """
    if options:
        raise ValueError(f"{env} has no reset options, got {sorted(options)}; leave `options` out")


def wants_stagger(options: dict[str, Any] | None, *, env: str) -> bool:
    """Return whether the reset options of a batch ask for episodes that are out of step.

    Raises:
        ValueError: If `options` holds anything but a bool under "stagger"; the message names `env`.
    """
    known = {"stagger": False, **(options or {})}
    if len(known) > 1 or not isinstance(known["stagger"], bool | np.bool_):
        raise ValueError(
            f"the only reset option of {env} is stagger, True or False, got {options}; "
            "leave the others out"
        )
    return bool(known["stagger"])


def check_render_mode(render_mode: str | None, *, modes: tuple[str, ...], env: str) -> None:
    """Refuse every render mode but None and `modes`.

    Raises:
        ValueError: If `render_mode` is another; the message names `env`.
    """
    if render_mode is not None and render_mode not in modes:
        raise ValueError(
            f"render_mode of {env} must be one of {', '.join(map(repr, (*modes, None)))}, got "
            f"{render_mode!r}; with None, or left out, it draws nothing"
        )


def require_render_mode(render_mode: str | None) -> None:
    """Refuse to draw for an env that was made without a render mode.

    Raises:
        ValueError: If `render_mode` is None.
    """
    if render_mode is None:
        raise ValueError(
            "render() draws what render_mode asks for, but it is None; make the env with "
            'render_mode="rgb_array"'
        )


def task_number(name: str) -> int:
    """Number of a task in its states, under the key "task": the same in every version and process.

    A number, not the name itself, so that states go into any file format.
    """
    return zlib.crc32(name.encode())


def checked_ids(ids: ArrayLike | None, *, num_envs: int) -> NDArray[np.intp]:
    """Return the chosen copies of a batch as indices, (n,); None chooses all of them.

    Raises:
        ValueError: If they are not one row of different integers in [0, num_envs).
    """
    if ids is None:
        return np.arange(num_envs)
    given = np.asarray(ids)
    chosen = given.astype(np.intp) if given.dtype.kind in "iu" or given.size == 0 else None
    if (
        chosen is None
        or chosen.ndim != 1
        or ((chosen < 0) | (chosen >= num_envs)).any()
        or len(np.unique(chosen)) < len(chosen)
    ):
        raise ValueError(
            f"ids must be one row of different integers in [0, {num_envs}), got {ids!r}; "
            "leave ids out to choose all copies"
        )
    return chosen


def checked_state(
    state: Mapping[str, ArrayLike],
    *,
    like: State,
    bounds: Mapping[str, tuple[float, float]],
    env: str,
) -> State:
    """Return a state as arrays of the types that the env itself returns.

    Args:
        state: What `state_dict` of an env of the same task returned, in this process or another.
        like: What `state_dict` of the env that loads the state returns for the same copies.
        bounds: Smallest and largest value of some keys.
        env: Name of the env and its task, for the messages.

    Returns:
        New arrays with the keys, shapes and dtypes of `like`.

    Raises:
        ValueError: If the state is of another task, or has other keys or shapes, or holds NaN, an
            infinity, or a number outside its bounds or its dtype.
    """
    remedy = "pass what state_dict of an env of the same task returned"
    if "task" in state and (np.asarray(state["task"]) != like["task"].flat[:1]).any():
        raise ValueError(f"a state must be one of {env}, but it is of another task; {remedy}")
    if set(state) != set(like):
        missing, unknown = sorted(set(like) - set(state)), sorted(set(state) - set(like))
        raise ValueError(
            f"a state of {env} must have the keys {sorted(like)}, but {missing} are missing and "
            f"{unknown} unknown; {remedy}"
        )
    arrays: State = {}
    for key, expected in like.items():
        given = np.asarray(state[key])
        if given.shape != expected.shape:
            raise ValueError(
                f"{key!r} of a state of {env} must have shape {expected.shape}, got {given.shape}; "
                "a batch takes one row per copy, a single env one without that axis"
            )
        if given.dtype.kind not in "fiub" or not np.isfinite(given).all():
            raise ValueError(
                f"{key!r} of a state of {env} must hold finite numbers, got {given}; {remedy}"
            )
        with np.errstate(invalid="ignore"):  # what does not fit is refused by name
            arrays[key] = given.astype(expected.dtype)
        if (arrays[key] != given).any():
            raise ValueError(
                f"{key!r} of a state of {env} must fit into {expected.dtype}, got {given}; {remedy}"
            )
        low, high = bounds.get(key, (-np.inf, np.inf))
        if ((given < low) | (given > high)).any():
            raise ValueError(
                f"{key!r} of a state of {env} must be in [{low}, {high}], got {given}; {remedy}"
            )
    return arrays
