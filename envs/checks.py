"""What every env of this package checks at its door: actions, seeds, options and modes.

One wording for all tasks; a message names the env where its rule is the env's own. Knows nothing of
tasks or simulators. For the envs of this package alone: `testing.py` is what a user's env calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray


def checked_actions(actions: object, *, shape: tuple[int, ...], axes: str) -> NDArray[np.float64]:
    """Return the actions that the env executes: float64, clipped to [-1, 1].

    Args:
        actions: Array-like of `shape`.
        shape: (act_dim,) of a single env, (N, act_dim) of a batch.
        axes: What the numbers of one action are, for the message: "(thrust, turn)".

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
    return np.clip(given, -1.0, 1.0)


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
    return list(seed)


def refuse_options(options: dict[str, Any] | None, *, env: str) -> None:
    """Refuse reset options other than None and {}.

    Raises:
        ValueError: If `options` holds anything; the message names `env`.
    """
    if options:
        raise ValueError(f"{env} has no reset options, got {sorted(options)}; leave `options` out")


def refuse_rendering(render_mode: str | None, *, env: str) -> None:
    """Refuse every render mode but None.

    Raises:
        ValueError: If `render_mode` is not None; the message names `env`.
    """
    if render_mode is not None:
        raise ValueError(
            f"{env} draws nothing: render_mode must be None, got {render_mode!r}; leave it out"
        )
