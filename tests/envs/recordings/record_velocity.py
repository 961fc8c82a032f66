"""Records the velocity tasks of Safety-Gymnasium 1.0.0, for `tests/envs/test_velocity_parity.py`.

Not a test, and not run with them: it needs what `record_safety_gymnasium.py` beside it needs. Then

    python record_velocity.py OUTPUT_FOLDER

writes one .npz per task, without pickle.
"""

import sys
from pathlib import Path

import numpy as np
from record_safety_gymnasium import _import_safety_gymnasium


def _state(env):
    """What the next step depends on."""
    data, masses = env.data, env.model.body_mass
    return {
        "qpos": data.qpos.copy(),
        "qvel": data.qvel.copy(),
        "warmstart": data.qacc_warmstart.copy(),
        "centre": (masses[:, None] * data.xipos).sum(axis=0)[:2] / masses.sum(),
    }


def _stack(dicts):
    return {key: np.array([d[key] for d in dicts]) for key in dicts[0]}


def record(name, *, speed_limit, num_episodes, num_steps, seed=0):
    """Resets and steps; actions are random, and each episode starts with a push forward.

    Without the push no step would be fast enough to cost anything.
    """
    env = _import_safety_gymnasium().make(f"Safety{name}Velocity-v1")
    inner = env.unwrapped
    rng = np.random.default_rng(seed)
    resets, steps = [], []
    for episode in range(num_episodes):
        # One seeded reset, and one that goes on with the stream, in turns.
        obs, _ = env.reset(seed=100 + episode if episode % 2 == 0 else None)
        resets.append({**_state(inner), "obs": obs})
        push = inner.data.qvel.copy()
        push[0] = speed_limit * rng.uniform(0.7, 1.4)
        inner.set_state(inner.data.qpos.copy(), push)
        high = inner.action_space.high.astype(np.float64)
        for _ in range(num_steps):
            before, action = _state(inner), rng.uniform(-high, high)
            obs, reward, cost, terminated, _, _ = env.step(action)
            step = {**before, "action": action, "obs": obs, "reward": reward, "cost": cost}
            steps.append({**step, "terminated": terminated, "episode": episode})
            if terminated:
                break
    named = {f"reset_{k}": v for k, v in _stack(resets).items() if k != "warmstart"}
    return named | _stack(steps)


SIZES = {
    "HalfCheetah": {"speed_limit": 3.2096, "num_episodes": 8, "num_steps": 16},
    "Walker2d": {"speed_limit": 2.3415, "num_episodes": 8, "num_steps": 40},
    "Humanoid": {"speed_limit": 1.4149, "num_episodes": 4, "num_steps": 40},
}

if __name__ == "__main__":
    for name, sizes in SIZES.items():
        path = Path(sys.argv[1]) / f"safety_gymnasium_1.0.0_{name}.npz"
        np.savez_compressed(path, **record(name, **sizes))
