"""Environments by id, for the scripts: batched, checked, and counted by episodes."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import pbcrl_envs
from pbcrl import Trajectory
from pbcrl.env_modules import registered
from pbcrl.errors import MissingCostError
from pbcrl.recorder import step_costs
from pbcrl_envs.batched import BatchedEnv
from pbcrl_script_utils.replays import NoteStart


def make_envs(env_id: str, num_envs: int, *, threads: int = 1) -> VectorEnv[Any, Any, Any]:
    """Make `num_envs` copies of any Gymnasium env with flat Box spaces; ended ones reset at once.

    An id whose vector entry point takes `autoreset_mode` (all batched tasks of `pbcrl_envs`) is
    made batched; any other is run by `SyncVectorEnv`. `module:Id-v0` imports `module`, if it is
    installed: one of the working directory must have been imported, as `import_env` does it.

    Args:
        env_id: Gymnasium id.
        num_envs: N.
        threads: For batches that take `num_threads`, as those with physics do; what they return
            does not depend on it.

    Raises:
        ValueError: If the id is unknown (the nearest are named), it has no time limit, or its
            spaces do not fit; or its module must not be imported (`pbcrl.env_modules`).
    """
    plain_id = import_env(env_id, by_user=False)
    try:
        spec = gym.spec(plain_id)
    except gym.error.Error as error:
        near = difflib.get_close_matches(plain_id, list(gym.registry), n=3, cutoff=0.4)
        ours = [task.env_id for task in pbcrl_envs.TASKS.values()]
        module = env_id.rpartition(":")[0]
        near = [f"{module}:{name}" if module else name for name in near or ours]
        raise ValueError(
            f"--env-id must be a registered Gymnasium id, got {env_id!r} ({error}); "
            f"did you mean {' or '.join(near)}? For a custom env use 'module:Id-v0'"
        ) from error
    if spec.max_episode_steps is None:
        raise ValueError(
            f"episodes must end for their cost to be compared, but {env_id} has no time limit; "
            "register it with max_episode_steps"
        )
    entry: Any = spec.vector_entry_point
    if isinstance(entry, str):
        entry = load_env_creator(entry)
    takes = () if entry is None else inspect.signature(entry).parameters
    if "autoreset_mode" in takes:
        more: dict[str, Any] = {"num_threads": threads} if "num_threads" in takes else {}
        envs = gym.make_vec(plain_id, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **more)
    else:
        options = {"autoreset_mode": AutoresetMode.SAME_STEP}
        envs = gym.make_vec(
            plain_id,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs=options,
            wrappers=[NoteStart],
        )
    for name, space, wrapper in [
        ("observation", envs.single_observation_space, "gymnasium.wrappers.FlattenObservation"),
        ("action", envs.single_action_space, "gymnasium.wrappers.TransformAction"),
    ]:
        if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
            raise ValueError(
                f"the scripts need a flat Box {name} space, {env_id} has {space}; wrap the env, "
                f"for example with {wrapper}, and register that"
            )
    return envs


def import_env(env_id: str, *, by_user: bool) -> str:
    """Import the module of an env id, and return the id without it; see `registered`.

    Args:
        env_id: As `make_envs` takes it.
        by_user: It is from the command line, not from a file.
    """
    if ":" in env_id:
        # A script's path starts with its own folder: evaluate.py may hide a package of that name.
        # Where this package is installed, the folder above it is that of all packages, and stays.
        ours = Path(__file__).parents[1]
        if (ours / "ppo_lag_pbcrl.py").is_file():
            sys.path[:] = [path for path in sys.path if Path(path).resolve() != ours]
    return registered(env_id, by_user=by_user)


def start_episodes(envs: VectorEnv[Any, Any, Any], *, seed: int, num_steps: int) -> np.ndarray:
    """Reset all envs, and return their first observations.

    Where a rollout is shorter than an episode, they start out of step with each other, so that some
    episodes end in every iteration and λ moves in each.

    Args:
        envs: Of `make_envs`, maybe wrapped.
        seed: Of the first env.
        num_steps: Of a rollout.
    """
    base, horizon = envs.unwrapped, horizon_of(envs)
    stagger = num_steps < horizon
    batched = isinstance(base, BatchedEnv)
    obs, _ = envs.reset(seed=seed, options={"stagger": True} if stagger and batched else None)
    if stagger and isinstance(base, SyncVectorEnv):
        for i, env in enumerate(base.envs):
            assert isinstance(env, NoteStart)
            env.cut_first(-(-horizon * (i + 1) // envs.num_envs))
    first: np.ndarray = obs
    return first


def flat_dims(envs: VectorEnv[Any, Any, Any]) -> tuple[int, int]:
    """Return (obs_dim, act_dim) of envs from `make_envs`."""
    obs_shape, act_shape = envs.single_observation_space.shape, envs.single_action_space.shape
    assert obs_shape is not None
    assert act_shape is not None
    return obs_shape[0], act_shape[0]


class ActionBounds(NamedTuple):
    """Where the actions of an env lie, (act_dim,) each."""

    low: np.ndarray
    high: np.ndarray
    middle: np.ndarray
    """0 where there is no bound on either side."""
    half_range: np.ndarray
    """Half the range; 1 where there is no bound on either side."""


def action_bounds(envs: VectorEnv[Any, Any, Any]) -> ActionBounds:
    """Return the bounds of the actions of envs from `make_envs`."""
    space = envs.single_action_space
    assert isinstance(space, gym.spaces.Box)
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
    middle, half = np.zeros_like(low), np.ones_like(low)
    middle[bounded] = (low[bounded] + high[bounded]) / 2
    half[bounded] = (high[bounded] - low[bounded]) / 2
    return ActionBounds(low, high, middle, half_range=half)


def horizon_of(envs: VectorEnv[Any, Any, Any]) -> int:
    """Return the time limit of envs from `make_envs`, in steps."""
    assert envs.spec is not None
    assert envs.spec.max_episode_steps is not None
    return envs.spec.max_episode_steps


def resolve_cost_limit(env_id: str, given: float | None, *, needed: bool = True) -> float:
    """Return d: the one given, else the task's own; NaN if neither is known nor needed.

    An env of somebody's own is played for a step, so that no run begins that its first step ends.

    Raises:
        MissingCostError: If there is a limit, but the env has no cost that it could hold for.
        ValueError: If neither is known, but one is needed.
    """
    limit = pbcrl_envs.cost_limit(env_id) if given is None else given
    if limit is None:
        if not needed:
            return np.nan
        raise ValueError(
            f"no cost limit is known for {env_id}; give the highest episode cost that still "
            "counts as safe with --cost-limit, or have people label (--label-folder)"
        )
    if needed and math.isfinite(limit) and pbcrl_envs.cost_limit(env_id) is None:
        _check_cost(env_id)
    return limit


def _check_cost(env_id: str) -> None:
    envs = make_envs(env_id, 1)
    envs.reset(seed=0)
    _, _, terminated, truncated, infos = envs.step(envs.action_space.sample())
    envs.close()
    if step_costs(infos, 1, terminated | truncated) is None:
        raise MissingCostError(
            f"a limit holds for a cost, but {env_id} reports none; put a number into info['cost'] "
            "at every step of the env, or have people say what is safe: ppo_lag_pbcrl with "
            "--label-folder FOLDER and without --cost-limit (--cost-limit inf: no limit)"
        )


def outcomes(episodes: Sequence[Trajectory]) -> np.ndarray:
    """Return and true cost of recorded episodes, (E, 2); the cost is NaN where none is known."""
    rows = [
        (
            np.nan if one.rewards is None else float(one.rewards.sum(dtype=np.float64)),
            np.nan if one.costs is None else one.true_cost,
        )
        for one in episodes
    ]
    return np.array(rows, np.float64).reshape(-1, 2)
