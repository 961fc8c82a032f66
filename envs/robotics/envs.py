"""The point agent's navigation tasks as Gymnasium environments, one or many at a time."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from pbcrl_envs.batched import BatchedEnv
from pbcrl_envs.robotics.scenery import NavigationPainter
from pbcrl_envs.robotics.simulation import NavigationSimulation
from pbcrl_envs.single import SingleEnv


class SafetyPointVectorEnv(BatchedEnv):
    """N copies of one navigation task; `BatchedEnv` says what all batches have in common.

    Observations are float64 (N, obs_dim), actions (N, 2): thrust and turn, clipped to [-1, 1].
    `infos["cost"]` is 0 or 1. Layouts are those of Safety-Gymnasium 1.0.0 for the same seed.

    Args:
        num_envs: N >= 1.
        task: One of the names in `TASKS`, as "Goal1".
        max_episode_steps: Steps after which an episode is truncated, >= 1.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        num_threads: Physics threads; 0 takes one per CPU. Results do not depend on it.
        render_mode: None, or "rgb_array": `render()` returns one picture per copy.
        camera_name: "fixedfar", "fixednear", "overhead", "track" or "vision".
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws is missing.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        task: str = "Goal1",
        max_episode_steps: int = 1000,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        num_threads: int = 0,
        render_mode: str | None = None,
        camera_name: str = "fixedfar",
        width: int = 480,
        height: int = 480,
    ) -> None:
        simulation = NavigationSimulation(task, num_envs=num_envs, num_threads=num_threads)
        super().__init__(
            simulation,
            max_episode_steps=max_episode_steps,
            autoreset_mode=autoreset_mode,
            render_mode=render_mode,
            painter=lambda mode: NavigationPainter(
                simulation, mode=mode, camera_name=camera_name, width=width, height=height
            ),
        )


class SafetyPointEnv(SingleEnv):
    """One navigation task of Safety-Gymnasium; `info["cost"]` is the cost of the step, 0 or 1.

    `reset(seed=s)` gives the layout that Safety-Gymnasium 1.0.0 gives for seed s.

    Args:
        task: One of the names in `TASKS`, as "Goal1".
        render_mode: None; "rgb_array": `render()` returns a picture; "human": every step and reset
            is shown in a window, in real time.
        camera_name: "fixedfar", "fixednear", "overhead", "track" or "vision".
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.
        overlays: Draw the lidars' rings and the red halo of a step that costs, too.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws, or for a
            window the display, is missing.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["human", "rgb_array"],
        # People who judge see what the robot does, and nothing of its sensors or its true cost.
        "labelling": {"camera_name": "overhead", "overlays": False},
    }

    def __init__(
        self,
        *,
        task: str = "Goal1",
        render_mode: str | None = None,
        camera_name: str = "fixedfar",
        width: int = 480,
        height: int = 480,
        overlays: bool = True,
    ) -> None:
        simulation = NavigationSimulation(task, num_envs=1, num_threads=1)
        super().__init__(
            simulation,
            render_mode=render_mode,
            painter=lambda mode: NavigationPainter(
                simulation,
                mode=mode,
                camera_name=camera_name,
                width=width,
                height=height,
                overlays=overlays,
            ),
        )
