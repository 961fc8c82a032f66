"""Draws the pictures of docs/*.md into docs/images: all, or those that are named.

`make pictures` runs it; `demo.png` is what `make demo` draws. Needs the extras `robotics`,
`driving` and `video`; the robots need OpenGL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
from PIL import Image

import pbcrl_envs  # noqa: F401 - registers the ids

FOLDER = Path(__file__).parent / "images"
WIDE = {"width": 480, "height": 360}


def navigation(
    env_id: str,
    *,
    seed: int,
    place: tuple[float, float, float],
    camera_name: str = "fixedfar",
    steps: int = 25,
) -> np.ndarray:
    """Put the agent at a place (x, y, heading) of a seeded layout and let it drive slowly.

    The steps before let gremlins rise to their height.
    """
    env = gym.make(env_id, render_mode="rgb_array", camera_name=camera_name, **WIDE)
    raw = env.unwrapped
    env.reset(seed=seed)
    for _ in range(steps):
        env.step(np.zeros(2))
    state = raw.state_dict()
    state["qpos"][:3] = place
    state["qvel"][:3] = 0
    raw.load_state_dict(state)
    env.step(np.array([0.02, 0.0]))
    image = env.render()
    env.close()
    return image


def velocity(env_id: str, *, seed: int, steps: int) -> np.ndarray:
    """Let a robot stumble for some steps."""
    env = gym.make(env_id, render_mode="rgb_array", width=320, height=320)
    env.action_space.seed(seed)
    env.reset(seed=seed)
    for _ in range(steps):
        env.step(env.action_space.sample())
    image = env.render()
    env.close()
    return image


def driving(
    env_id: str, *, seed: int, throttle: float, steps: tuple[int, ...], height: int
) -> np.ndarray:
    """Drive straight on and stack the pictures of some steps."""
    size = {"screen_width": 640, "screen_height": height}
    view = {"scaling": 8.0, "centering_position": [0.3, 0.5], **size}
    env = gym.make(env_id, render_mode="rgb_array", config=view)
    env.reset(seed=seed)
    images = []
    for step in range(max(steps) + 1):
        if step in steps:
            images.append(np.pad(env.render(), ((0, 6), (0, 0), (0, 0)), constant_values=255))
        env.step(np.array([throttle, 0.0]))
    env.close()
    return np.concatenate(images)[:-6]


PICTURES: dict[str, Callable[[], np.ndarray]] = {
    "goal": lambda: navigation("SafetyPointGoal1-v0", seed=0, place=(-0.1, 0.1, 0.8)),
    "push": lambda: navigation("SafetyPointPush1-v0", seed=2, place=(-1.0, -0.2, 0.9)),
    "button": lambda: navigation("SafetyPointButton1-v0", seed=1, place=(0.2, 0.2, 1.8)),
    "lidar": lambda: navigation(
        "SafetyPointButton1-v0", seed=1, place=(0.5, -0.9, 2.0), camera_name="track"
    ),
    "halfcheetah": lambda: velocity("SafetyHalfCheetahVelocity-v1", seed=0, steps=12),
    "walker2d": lambda: velocity("SafetyWalker2dVelocity-v1", seed=0, steps=12),
    "humanoid": lambda: velocity("SafetyHumanoidVelocity-v1", seed=0, steps=12),
    "blocked_road": lambda: driving(
        "DrivingBlockedRoad-v0", seed=1, throttle=0.3, steps=(0, 12), height=180
    ),
    "lane_change": lambda: driving(
        "DrivingLaneChange-v0", seed=0, throttle=0.5, steps=(0, 8, 16), height=130
    ),
}


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all of them."""
    if unknown := set(names) - set(PICTURES):
        raise SystemExit(
            f"error: a picture is {', '.join(PICTURES)}, got {', '.join(sorted(unknown))}"
        )
    for name in names or PICTURES:
        path = FOLDER / f"{name}.png"
        # The pictures have few colours, and a palette makes them small.
        Image.fromarray(PICTURES[name]()).quantize(256).save(path, optimize=True)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
