"""The velocity tasks as Gymnasium environments, one or many at a time."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from pbcrl_envs.batched import BatchedEnv
from pbcrl_envs.robotics.velocity_scenery import VelocityPainter
from pbcrl_envs.robotics.velocity_simulation import VelocitySimulation
from pbcrl_envs.single import SingleEnv


class SafetyVelocityVectorEnv(BatchedEnv):
    """N copies of one velocity task; `BatchedEnv` says what all batches have in common.

    Observations are float64 (N, obs_dim), actions (N, act_dim), clipped to their bounds:
    HalfCheetah and Walker2d have 17 and 6 in [-1, 1], Humanoid has 376 and 17 in [-0.4, 0.4].
    `infos["cost"]` is 1 if the robot was faster in the step just taken than its limit, else 0.
    Episodes terminate when Walker2d or Humanoid falls: they differ in length. They start where
    those of Safety-Gymnasium 1.0.0 do.

    Args:
        num_envs: N >= 1.
        task: "HalfCheetah", "Walker2d" or "Humanoid".
        max_episode_steps: Steps after which an episode is truncated, >= 1.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        num_threads: Physics threads; 0 takes one per CPU. Results do not depend on it.
        render_mode: None, or "rgb_array": `render()` returns one picture per copy.
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
        task: str = "HalfCheetah",
        max_episode_steps: int = 1000,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        num_threads: int = 0,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
    ) -> None:
        simulation = VelocitySimulation(task, num_envs=num_envs, num_threads=num_threads)
        super().__init__(
            simulation,
            max_episode_steps=max_episode_steps,
            autoreset_mode=autoreset_mode,
            render_mode=render_mode,
            painter=lambda mode: VelocityPainter(simulation, mode=mode, width=width, height=height),
        )


class SafetyVelocityEnv(SingleEnv):
    """One velocity task of Safety-Gymnasium; `info["cost"]` is the cost of the step, 0 or 1.

    Args:
        task: "HalfCheetah", "Walker2d" or "Humanoid".
        render_mode: None; "rgb_array": `render()` returns a picture; "human": every step and reset
            is shown in a window, in real time.
        width: Of a picture, in pixels.
        height: Of a picture, in pixels.
        overlays: Draw the red halo of a step that costs, too.

    Raises:
        ValueError: If an argument is not one of those above.
        DependencyNotInstalled: If pictures are asked for and the library that draws, or for a
            window the display, is missing.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["human", "rgb_array"],
        # People who judge see what the robot does, and nothing of its sensors or its true cost.
        "labelling": {"overlays": False},
    }

    def __init__(
        self,
        *,
        task: str = "HalfCheetah",
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
        overlays: bool = True,
    ) -> None:
        simulation = VelocitySimulation(task, num_envs=1, num_threads=1)
        super().__init__(
            simulation,
            render_mode=render_mode,
            painter=lambda mode: VelocityPainter(
                simulation, mode=mode, width=width, height=height, overlays=overlays
            ),
        )
