"""Films of episodes as mp4: the env drawn step by step, its numbers written under each picture.

What `--capture-video` needs: the extra `video`, and an env with render mode "rgb_array".
"""

from __future__ import annotations

import importlib
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import DependencyNotInstalled

from pbcrl import LearnedCost

Policy = Callable[[np.ndarray], np.ndarray]
"""From one observation (obs_dim,) to the action that is executed (act_dim,)."""

_MOST_FPS = 25
_STRIP, _TEXT, _COLUMN = 26, 13, 110  # pixels: of a line, of its letters, of its longest text
_INK, _ALARM, _PAPER = (30, 30, 30), (200, 0, 0), (245, 245, 245)


def check_film(env_id: str) -> None:
    """Draw and encode one picture, so that what is missing shows before any training.

    Raises:
        DependencyNotInstalled: If the extra `video`, or a library that draws, is missing.
        ValueError: If the env has no render mode "rgb_array".
    """
    _import("imageio_ffmpeg").get_ffmpeg_exe()
    _import("imageio.v2")
    _import("PIL.ImageFont")
    env = _make(env_id)
    env.reset(seed=0)
    env.render()
    env.close()


def film(
    env_id: str,
    policy: Policy,
    *,
    episodes: int,
    seed: int,
    folder: Path,
    cost_model: LearnedCost | None = None,
) -> list[Path]:
    """Film one episode in each of `episodes` seeded envs.

    Under each picture stand the step, the return and the costs so far; the true cost is red in a
    step that costs. Pictures are left out to stay within 25 a second, so a film runs in real time.

    Args:
        env_id: As `make_envs` takes it; `make_envs` must have been called with it.
        policy: What acts.
        episodes: How many, >= 1.
        seed: Of the first; episode i gets seed + i.
        folder: Of the films; it is made.
        cost_model: Of the learned cost, if it is to be shown too.

    Returns:
        The files, `seed-SEED.mp4`.
    """
    imageio = _import("imageio.v2")
    folder.mkdir(parents=True, exist_ok=True)
    env = _make(env_id)
    fps = env.metadata.get("render_fps", 30)
    every = -(-fps // _MOST_FPS)
    files = []
    for i in range(episodes):
        path = folder / f"seed-{seed + i}.mp4"
        with imageio.get_writer(path, fps=fps / every, macro_block_size=2) as writer:
            obs, _ = env.reset(seed=seed + i)
            steps, total, true_cost, learned_cost, over = 0, 0.0, 0.0, 0.0, False
            while not over:
                action = policy(obs)
                if cost_model is not None:
                    learned_cost += float(cost_model.step_cost(obs[None], action[None])[0])
                obs, reward, terminated, truncated, info = env.step(action)
                cost = float(info.get("cost", 0.0))
                steps, total, true_cost = steps + 1, total + float(reward), true_cost + cost
                over = terminated or truncated
                if steps % every == 0 or over:
                    texts = [f"step {steps}", f"return {total:.1f}", f"cost {true_cost:g}"]
                    if cost_model is not None:
                        texts.append(f"learned {learned_cost:.1f}")
                    image = env.render()
                    assert isinstance(image, np.ndarray)
                    writer.append_data(_captioned(image, texts, alarm=cost > 0))
        files.append(path)
    env.close()
    return files


def _make(env_id: str) -> gym.Env[Any, Any]:
    plain_id = env_id.rpartition(":")[-1]
    env = gym.make(plain_id, disable_env_checker=True)
    modes = env.metadata.get("render_modes") or []
    env.close()
    if "rgb_array" not in modes:
        raise ValueError(
            f'a film needs an env with render mode "rgb_array", {env_id} has {modes or "none"}; '
            "leave out --capture-video"
        )
    return gym.make(plain_id, render_mode="rgb_array", disable_env_checker=True)


def animated(path: Path) -> tuple[bytes, int, int]:
    """Return the first 20 seconds of a film as an animated GIF, with its height and width."""
    ffmpeg = _import("imageio_ffmpeg").get_ffmpeg_exe()
    command = [ffmpeg, "-v", "error", "-t", "20", "-i", str(path), "-vf", "fps=5", "-f", "gif", "-"]
    gif = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    ).stdout
    width, height = struct.unpack("<HH", gif[6:10])
    return gif, height, width


def _captioned(image: np.ndarray, texts: list[str], *, alarm: bool) -> np.ndarray:
    """Put the texts under the picture, as many side by side as it has room for.

    The third one is red under an alarm.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width = image.shape[:2]
    columns = min(len(texts), max(1, width // _COLUMN))
    lines = -(-len(texts) // columns)
    # Even sizes: the encoder halves the resolution of colours.
    size = width + width % 2, height + height % 2 + lines * _STRIP
    page = Image.new("RGB", size, _PAPER)
    page.paste(Image.fromarray(image))
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(_TEXT)
    for k, text in enumerate(texts):
        ink = _ALARM if alarm and k == 2 else _INK
        line, column = divmod(k, columns)
        place = (
            6 + column * (width - 6) / columns,
            height + line * _STRIP + (_STRIP - _TEXT) / 2 - 1,
        )
        draw.text(place, text, fill=ink, font=font)
    return np.asarray(page)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DependencyNotInstalled(
            f"films are written with imageio, its ffmpeg and Pillow, but {name} is missing "
            f"({error}); install the extra: pip install 'pbcrl[video]', or leave out "
            "--capture-video"
        ) from error
