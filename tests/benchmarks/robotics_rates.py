"""One measurement of `bench_robotics.py`, in a separate process; prints one line of JSON.

    python robotics_rates.py native ENV_ID NUM_THREADS SECONDS
    python robotics_rates.py real ENV_ID SKY SECONDS

`native` steps 64 environments of this repository; `real` steps one environment of Safety-Gymnasium,
with the sky that it ships (SKY is 1) or without, and runs under the Python of `make parity-env`.
Actions are uniform, and rates count whole episodes with their resets.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from typing import Any

import numpy as np

NUM_ENVS = 64
NUM_RESETS = 200
"""Resets of a single environment, for the 99th percentile."""


class TimedBatch:
    """A batch of MuJoCo that adds up the seconds spent in its physics."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._batch, name)
        if name not in ("step", "rollout", "forward"):
            return attribute

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return attribute(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def native(env_id: str, num_threads: int, seconds: float) -> dict[str, float]:
    import gymnasium

    import pbcrl_envs  # noqa: F401 - registers the tasks

    # The same environment once, so that what is added by 64 is not what the first import costs.
    single: Any = gymnasium.make(env_id)
    reset_times = []
    for seed in range(NUM_RESETS):
        start = time.perf_counter()
        single.reset(seed=seed)
        reset_times.append(time.perf_counter() - start)
    single.close()
    before = _resident_megabytes()
    envs: Any = gymnasium.make_vec(env_id, num_envs=NUM_ENVS, num_threads=num_threads)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (100, NUM_ENVS, *envs.single_action_space.shape))
    envs.reset(seed=0)
    owner = envs.unwrapped._simulation
    owner = getattr(owner, "physics", owner)
    owner._batch = batch = TimedBatch(owner._batch)
    steps, spent = 0, 0.0
    while spent < seconds:
        start = time.perf_counter()
        for t in range(1000):  # navigation: one whole episode and its reset
            envs.step(actions[t % 100])
        spent += time.perf_counter() - start
        steps += 1000 * NUM_ENVS
    return {
        "rate": steps / spent,
        "physics_share": batch.seconds / spent,
        "megabytes": _resident_megabytes() - before,
        "reset_p99": float(np.percentile(reset_times, 99)),
    }


def real(env_id: str, sky: bool, seconds: float) -> dict[str, float]:
    from pbcrl_envs import upstream

    env = upstream.make(env_id)
    if sky:  # as it is shipped: what `upstream.make` leaves out is put back
        vars(sys.modules["safety_gymnasium.world"])["yaml"] = importlib.import_module("yaml")
    assert env.action_space.shape is not None
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (100, *env.action_space.shape))
    env.reset(seed=0)  # loads what is loaded once
    steps, spent = 0, 0.0
    while spent < seconds:
        start = time.perf_counter()
        env.reset()
        for t in range(1000):
            _, _, terminated, truncated, _ = env.step(actions[t % 100])
            steps += 1
            if terminated or truncated:
                break
        spent += time.perf_counter() - start
    return {"rate": steps / spent}


def _resident_megabytes() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    side, env_id, number, seconds = sys.argv[1:]
    if side == "native":
        print(json.dumps(native(env_id, int(number), float(seconds))))
    else:
        print(json.dumps(real(env_id, number == "1", float(seconds))))
