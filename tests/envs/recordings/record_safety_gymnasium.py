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
    from safety_gymnasium import world

    # Decoding the skybox takes a second per reset, and nothing but pictures depends on it.
    load = world.yaml.load

    def load_without_skybox(*args, **kwargs):
        config = load(*args, **kwargs)
        if "skybox" in config.get("textures", {}):
            config["textures"]["skybox"] = {
                "@type": "skybox",
                "@builtin": "flat",
                "@width": "8",
                "@height": "8",
            }
        return config

    world.yaml.load = load_without_skybox
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


def _state(task):
    """What the task is in, in the world's frame: upstream's joints start at the agent's pose."""
    data, turned = task.data, task.world_info.world_config_dict["agent_rot"]
    cos, sin = np.cos(turned), np.sin(turned)
    along, across = data.qvel[:2]
    velocity = cos * along - sin * across, sin * along + cos * across
    buttons = getattr(task, "buttons", None)
    return {
        "time": data.time,
        "qpos": np.array([*task.agent.pos[:2], turned + data.qpos[2], *data.qpos[3:]]),
        "qvel": np.array([*velocity, *data.qvel[2:]]),
        "goal": task.goal.pos[:2],
        "goal_button": buttons.goal_button if buttons else 0,
        "button_timer": buttons.timer if buttons else 0,
    }


def chase(agent, heading, goal, box=None):
    """A clumsy drive towards the goal, or to a box's far side and then against it.

    So goals are met and hazards are crossed. All in the plane: positions (2,), heading in radians.
    """
    target = goal
    if box is not None:
        away = (box - goal) / np.linalg.norm(box - goal)
        behind, beside = (agent - box) @ away, (agent - box) @ [-away[1], away[0]]
        target = box if behind > 0.25 and abs(beside) < 0.15 else box + 0.55 * away
    dx, dy = target - agent
    angle = (np.arctan2(dy, dx) - heading + np.pi) % (2 * np.pi) - np.pi
    return np.array([0.06 if abs(angle) < 0.6 else 0.01, np.clip(2 * angle, -1, 1)])


def record(name, *, seeds, num_steps):
    """Two resets per seed, `num_steps` steps after each; arrays of shape (seeds, 2, ...)."""
    env = _import_safety_gymnasium().make(f"SafetyPoint{name}-v0")
    task = env.unwrapped.task
    episodes = []
    for seed in seeds:
        for first in (True, False):
            obs, _ = env.reset(seed=seed if first else None)
            positions, headings = _layout(task)
            state = _state(task)
            episode = {"positions": positions, "headings": headings, "obs": [obs]}
            episode.update({key: [value] for key, value in state.items()})
            episode.update({key: [] for key in ("actions", "rewards", "costs", "goal_met")})
            for _ in range(num_steps):
                box = task.push_box.pos[:2] if name.startswith("Push") else None
                action = chase(task.agent.pos[:2], state["qpos"][2], task.goal.pos[:2], box)
                obs, reward, cost, _, _, info = env.step(action)
                state = _state(task)
                step = {"actions": action, "rewards": reward, "costs": cost, "obs": obs, **state}
                for key, value in step.items():
                    episode[key].append(value)
                episode["goal_met"].append(info.get("goal_met", False))
            episodes.append(episode)
    arrays = {key: np.array([e[key] for e in episodes]) for key in episodes[0]}
    shaped = {key: a.reshape(len(seeds), 2, *a.shape[1:]) for key, a in arrays.items()}
    return {"seeds": np.array(seeds), **shaped}


# Seeds whose first steps meet goals, cross hazards and touch whatever can be touched.
SEEDS = {
    "Goal0": [2, 17],
    "Goal1": [4, 51, 113],
    "Goal2": [15, 78, 96],
    "Push0": [8, 0],
    "Push1": [2, 74],
    "Push2": [46, 53],
    "Button0": [1, 16],
    "Button1": [10, 17, 38, 50],
    "Button2": [25, 38],
}

if __name__ == "__main__":
    for name in sys.argv[2:] or SEEDS:
        path = Path(sys.argv[1]) / f"safety_gymnasium_1.0.0_{name}.npz"
        num_steps = 80 if name.startswith("Push") else 40
        np.savez_compressed(path, **record(name, seeds=SEEDS[name], num_steps=num_steps))
