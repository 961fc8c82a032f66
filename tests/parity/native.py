"""The native tasks' side: envs by the names of the plan, in states of the real package."""

import gymnasium
import numpy as np

import pbcrl_envs  # noqa: F401
from tests.parity.real_side import env_id


def make(task, num_envs, **kwargs):
    return gymnasium.make_vec(env_id(task), num_envs, autoreset_mode="SameStep", **kwargs)


def recorded_state(envs, rows, prefix, chosen):
    """A whole state from the recorded `rows`: what was not recorded is that of a reset."""
    state = envs.get_state()
    for key in state:
        if f"{prefix}{key}" in rows:
            state[key] = rows[f"{prefix}{key}"][chosen].astype(state[key].dtype)
    return state


def blocks(num_rows, size):
    """Row numbers in blocks of `size`; the last one begins anew to be full."""
    for start in range(0, num_rows, size):
        yield np.arange(start, start + size) % num_rows


def same_signs(qpos, like):
    """The positions with quaternions of the signs of `like`: both signs are one rotation."""
    qpos = qpos.copy()
    for start in range(3 + 3, qpos.shape[1], 7):
        flip = (qpos[:, start : start + 4] * like[:, start : start + 4]).sum(axis=1) < 0
        qpos[flip, start : start + 4] *= -1
    return qpos
