"""Records what Safety-Gymnasium 1.0.0 does, for `tests/envs/test_robotics_parity.py`.

Not a test, and not run with them: it needs Python 3.11 with safety-gymnasium 1.0.0, gymnasium
0.28.1, mujoco 2.3.3 and NumPy < 2, installed one by one without their dependencies' pins. Then

    python record_safety_gymnasium.py OUTPUT_FOLDER

writes one .npz per task, without pickle.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np


class _HashableArray(np.ndarray):
    """Python 3.11 refuses dataclass defaults without a hash, and upstream's are arrays."""

    __hash__ = object.__hash__


def _import_safety_gymnasium():
    package = Path(importlib.util.find_spec("numpy").origin).parents[1] / "safety_gymnasium"
    name = "safety_gymnasium.assets.color"
    spec = importlib.util.spec_from_file_location(name, package / "assets" / "color.py")
    color = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(color)
    color.COLOR.update({k: v.view(_HashableArray) for k, v in color.COLOR.items()})
    sys.modules[name] = color
    import safety_gymnasium

    return safety_gymnasium


def _layout(task):
    """Positions (1 + K, 2) and headings (1 + K,) of the agent and the objects, in drawing order."""
    config = task.world_info.world_config_dict
    parts = {**config["geoms"], **config["free_geoms"]}
    positions, headings = [], []
    for name in task.placements_conf.placements:
        positions.append(task.world_info.layout[name])
        if name == "agent":
            headings.append(config["agent_rot"])
        else:
            headings.append(parts[name + "obj" if name.startswith("gremlin") else name]["rot"])
    return np.array(positions), np.array(headings)


def _chase(task):
    """A clumsy drive towards the goal, so that goals are met and hazards are crossed."""
    ahead, left, _ = (task.goal.pos - task.agent.pos) @ task.agent.mat
    angle = np.arctan2(left, ahead)
    return np.array([0.06 if abs(angle) < 0.6 else 0.01, np.clip(2 * angle, -1, 1)])


def record(name, *, seeds, num_steps=40):
    """Two resets per seed, `num_steps` steps after each; arrays of shape (seeds, 2, ...)."""
    env = _import_safety_gymnasium().make(f"SafetyPoint{name}-v0")
    task = env.unwrapped.task
    episodes = []
    for seed in seeds:
        for first in (True, False):
            obs, _ = env.reset(seed=seed if first else None)
            positions, headings = _layout(task)
            episode = {"positions": positions, "headings": headings, "obs": [obs]}
            episode.update({key: [] for key in ("actions", "rewards", "costs")})
            for _ in range(num_steps):
                action = _chase(task)
                obs, reward, cost, _, _, _ = env.step(action)
                episode["actions"].append(action)
                episode["obs"].append(obs)
                episode["rewards"].append(reward)
                episode["costs"].append(cost)
            episodes.append(episode)
    arrays = {key: np.array([e[key] for e in episodes]) for key in episodes[0]}
    shaped = {key: a.reshape(len(seeds), 2, *a.shape[1:]) for key, a in arrays.items()}
    shaped["obs"] = shaped["obs"].astype(np.float32)
    return {"seeds": np.array(seeds), **shaped}


# Seeds whose first steps meet goals, cross hazards and touch buttons and gremlins.
SEEDS = {"Goal1": [4, 51, 113], "Button1": [10, 17, 38, 50]}

if __name__ == "__main__":
    for name, seeds in SEEDS.items():
        path = Path(sys.argv[1]) / f"safety_gymnasium_1.0.0_{name}.npz"
        np.savez_compressed(path, **record(name, seeds=seeds))
