"""The native tasks' side: envs by the names of the plan, in states of the real package."""

import gymnasium
import numpy as np

import pbcrl_envs  # noqa: F401
from tests.parity.real_side import env_id


def make(task, num_envs, **kwargs):
    return gymnasium.make_vec(env_id(task), num_envs, autoreset_mode="SameStep", **kwargs)


def recorded_state(envs, rows, prefix, chosen):
    """A whole state from the recorded `rows`: what was not recorded is that of a reset."""
    state = envs.state_dict()
    for key in state:
        if f"{prefix}{key}" in rows:
            state[key] = rows[f"{prefix}{key}"][chosen].astype(state[key].dtype)
    return state


def place(envs, rows, prefix, chosen):
    """Put the copies into recorded states, one each."""
    envs.load_state_dict(recorded_state(envs, rows, prefix, chosen))
    if f"{prefix}positions" not in rows:  # a robot, whose state is packed
        physics = envs.unwrapped._simulation.physics
        for array, key in [
            (physics.qpos, "qpos"),
            (physics.qvel, "qvel"),
            (physics._time, "time"),
            (physics._warm_start, "qacc_warmstart"),
        ]:
            array[:] = rows[f"{prefix}{key}"][chosen]


def blocks(num_rows, size):
    """Row numbers in blocks of `size`; the last one is filled up from the start."""
    for start in range(0, num_rows, size):
        yield np.arange(start, start + size) % num_rows
