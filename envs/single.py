"""One copy of a task as a Gymnasium env; the base of all single envs but those of highway-env."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import (
    State,
    check_render_mode,
    checked_actions,
    refuse_options,
    require_render_mode,
)
from pbcrl_envs.episodes import Episodes
from pbcrl_envs.simulation import Image, Painter, Simulation


class SingleEnv(gymnasium.Env[NDArray[Any], NDArray[Any]]):
    """One copy of a task; a subclass chooses the simulation.

    `info["cost"]` is the cost of the step just taken. There is no time limit: `gymnasium.make` adds
    the one of the registered id. If the physics diverges, the episode is truncated: the last step
    repeats the last sound observation with reward and cost 0, and `info["diverged"]` is true. The
    first time there is a warning; `num_diverged` counts. `observation_names`, (obs_dim,), says what
    the numbers of an observation are.

    Args:
        simulation: One copy of the task.
        render_mode: None; "rgb_array": `render()` returns a picture; "human", where the class
            offers it: every step and reset is shown in a window, in real time.
        painter: Makes what draws, given the mode; only called if there is one.

    Raises:
        ValueError: If the render mode is not among those of the class.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        render_mode: str | None,
        painter: Callable[[str], Painter],
    ) -> None:
        modes = tuple(type(self).metadata["render_modes"])
        check_render_mode(render_mode, modes=modes, env=simulation.name)
        self.render_mode = render_mode
        self.metadata = {**type(self).metadata, "render_fps": simulation.render_fps}
        self.observation_space = simulation.observation_space
        self.observation_names = simulation.observation_names
        self.action_space = simulation.action_space
        self._simulation = simulation
        self._episodes = Episodes(simulation)
        self._only = np.zeros(1, dtype=np.intp)
        self._painter = None if render_mode is None else painter(render_mode)

    @property
    def num_diverged(self) -> int:
        """Episodes that a diverged simulation ended, since construction."""
        return self._episodes.num_diverged

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin a new episode; without a seed, the random stream runs on.

        Returns:
            The observation, (obs_dim,), and an info with a cost of 0.

        Raises:
            ValueError: If `options` holds anything.
        """
        refuse_options(options, env=self._simulation.name)
        super().reset(seed=seed)
        self._simulation.seed([seed])
        self._episodes.begin(self._only)
        if self.render_mode == "human":
            self.render()
        return self._simulation.observe(self._only)[0], {"cost": 0.0}

    def step(self, action: NDArray[Any]) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Advance by one step.

        Args:
            action: (act_dim,), clipped to the bounds of the action space.

        Raises:
            ValueError: If the action has another shape, or holds NaN or an infinity.
            ResetNeeded: If there was neither a reset nor a state loaded.
        """
        simulation = self._simulation
        space = simulation.action_space
        checked = checked_actions(
            action, shape=space.shape, axes=simulation.action_axes, low=space.low, high=space.high
        )
        self._episodes.check_begun(self._only)
        result = self._episodes.step(self._only, checked[None])
        terminated, diverged = bool(result.terminated[0]), bool(result.diverged[0])
        self._episodes.finished[0] = terminated or diverged
        if self.render_mode == "human":
            self.render()
        info: dict[str, Any] = {"cost": float(result.cost[0])}
        if diverged:
            info["diverged"] = True
        obs = simulation.observe(self._only)[0]
        return obs, float(result.reward[0]), terminated, diverged, info

    def state_dict(self) -> State:
        """Return all that the future depends on: one row of the batch's `state_dict`.

        The steps that a `TimeLimit` around the env counts are not part of it.

        Raises:
            ResetNeeded: If there was neither a reset nor a state loaded.
        """
        rows = self._episodes.state_dict(self._only)
        return {key: np.asarray(row[0]) for key, row in rows.items()}

    def load_state_dict(self, state: Mapping[str, ArrayLike]) -> None:
        """Go on from a state of `state_dict`, or from one row of the batch's.

        Raises:
            ValueError: If the state is of another task, or its keys, shapes or numbers are wrong;
                the env is left as it was.
        """
        rows = {key: np.asarray(value)[None] for key, value in state.items()}
        self._episodes.load_state_dict(rows, self._only)

    def render(self) -> Image | None:
        """Draw the state: uint8 (height, width, 3); None in a window.

        Raises:
            ValueError: If `render_mode` is None.
            ResetNeeded: If there was neither a reset nor a state loaded.
        """
        require_render_mode(self.render_mode)
        self._episodes.check_begun(self._only)
        assert self._painter is not None
        return self._painter.draw(0)

    def close(self) -> None:
        """Close the window and release what drawing holds."""
        if self._painter is not None:
            self._painter.close()
