"""N copies of a task as one Gymnasium vector env; the base of all batches of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import (
    State,
    check_at_least_one,
    check_render_mode,
    checked_actions,
    checked_autoreset_mode,
    checked_ids,
    require_render_mode,
    seed_per_env,
    wants_stagger,
)
from pbcrl_envs.episodes import Episodes
from pbcrl_envs.simulation import BoolArray, FloatArray, Image, IndexArray, Painter, Simulation


class BatchedEnv(VectorEnv[NDArray[Any], NDArray[Any], NDArray[Any]]):
    """N copies of one task, stepped together; a subclass chooses the simulation.

    The copy with seed s lives through exactly what the single env does with seed s.

    `infos["cost"]`, float64 (N,), is the cost of the step just taken, also where it ended an
    episode; `infos["_cost"]` is Gymnasium's mask. An episode ends by the task's own rules
    (terminated) or after `max_episode_steps` (truncated). What follows depends on the mode:

    - NEXT_STEP: the next step of that copy ignores its action and returns the reset observation
      with reward 0 and cost 0. It is no transition.
    - SAME_STEP: the returned row is already the reset observation; the last one of the episode is
      in `infos["final_obs"]`, (N, obs_dim), where the mask `infos["_final_obs"]` is true. Both keys
      exist only if some episode ended.

    If the physics of a copy diverges, its episode is truncated: the last step repeats the last
    sound observation with reward and cost 0, and `infos["diverged"]`, bool (N,), is true there. The
    first time there is a warning; `num_diverged` counts. The key is absent otherwise.

    `reset(options={"stagger": True})` puts the episodes out of step with each other, so that some
    of them end in every rollout, however short: the first episode of copy i is truncated after
    `max_episode_steps * (i + 1) / N` steps, rounded up; later ones have full length. Where an
    episode ends in this way `infos["partial"]`, bool (N,), is true, as its return and cost are not
    those of a whole one. The key is absent otherwise, and where the task itself ends the episode
    earlier.

    `observation_names`, (obs_dim,), says what the numbers of an observation are.

    Args:
        simulation: N copies of the task.
        max_episode_steps: Steps after which an episode is truncated, >= 1.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        render_mode: None, or "rgb_array": `render()` returns one picture per copy.
        painter: Makes what draws, given the mode; only called if there is one.

    Raises:
        ValueError: If an argument is out of its range, or the mode is DISABLED.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        simulation: Simulation,
        *,
        max_episode_steps: int,
        autoreset_mode: AutoresetMode | str,
        render_mode: str | None,
        painter: Callable[[str], Painter],
    ) -> None:
        check_at_least_one("max_episode_steps", max_episode_steps)
        modes = tuple(type(self).metadata["render_modes"])
        check_render_mode(render_mode, modes=modes, env=f"a batch of {simulation.name}")
        self.num_envs = simulation.num_envs
        self.max_episode_steps = max_episode_steps
        self.autoreset_mode = checked_autoreset_mode(autoreset_mode)
        self.render_mode = render_mode
        self.metadata = {
            **type(self).metadata,
            "render_fps": simulation.render_fps,
            "autoreset_mode": self.autoreset_mode,
        }
        self.single_observation_space = simulation.observation_space
        self.single_action_space = simulation.action_space
        self.observation_names = simulation.observation_names
        self.observation_space = batch_space(simulation.observation_space, self.num_envs)
        self.action_space = batch_space(simulation.action_space, self.num_envs)
        self._simulation = simulation
        self._episodes = Episodes(simulation)
        self._all = np.arange(self.num_envs)
        self._painter = None if render_mode is None else painter(render_mode)

    @property
    def num_diverged(self) -> int:
        """Episodes that a diverged simulation ended, since construction."""
        return self._episodes.num_diverged

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin a new episode in every copy.

        Args:
            seed: An int s seeds copy i with s + i; a sequence gives one seed per copy; None, there
                or as the whole, lets a random stream run on.
            options: None, or {"stagger": bool}; see the class.

        Returns:
            The observations, (N, obs_dim), and infos with a cost of 0.

        Raises:
            ValueError: If there is not one seed per copy, or `options` holds anything else.
        """
        stagger = wants_stagger(options, env=f"a batch of {self._simulation.name}")
        seeds = seed_per_env(seed, num_envs=self.num_envs)
        super().reset(seed=int(seed) if isinstance(seed, int | np.integer) else None)
        self._simulation.seed(seeds)
        self._episodes.begin(self._all)
        if stagger:
            first_limits = -(-self.max_episode_steps * (self._all + 1) // self.num_envs)
            self._episodes.cut[:] = self.max_episode_steps - first_limits
        return self._simulation.observe(self._all), self._infos(np.zeros(self.num_envs))

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[NDArray[Any], FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Advance every copy by one step; under NEXT_STEP, finished ones are reset instead.

        Args:
            actions: (N, act_dim), clipped to the bounds of the action space.

        Returns:
            obs (N, obs_dim), rewards (N,), terminations (N,), truncations (N,), infos.

        Raises:
            ValueError: If the actions have another shape, or hold NaN or an infinity.
            ResetNeeded: If a copy was never reset and has had no state loaded.
        """
        simulation, episodes = self._simulation, self._episodes
        space = simulation.action_space
        checked = checked_actions(
            actions,
            shape=(self.num_envs, *space.shape),
            axes=simulation.action_axes,
            low=space.low,
            high=space.high,
        )
        episodes.check_begun(self._all)
        # Under SAME_STEP only a state that was loaded can have left a copy finished.
        renewed, stepped = np.flatnonzero(episodes.finished), np.flatnonzero(~episodes.finished)
        result = episodes.step(stepped, checked[stepped])
        if len(renewed):
            episodes.begin(renewed)
        reward, cost, terminated, diverged = (
            self._spread(values, stepped) for values in result[:4]
        )
        out_of_time = simulation.elapsed >= self.max_episode_steps - episodes.cut
        truncated = out_of_time | diverged
        done = terminated | truncated
        obs = simulation.observe(self._all)
        infos = self._infos(cost)
        for name, values in result.extras.items():
            infos[name] = self._spread(values, stepped)
        partial = out_of_time & ~terminated & (episodes.cut > 0)
        for name, marked in (("diverged", diverged), ("partial", partial)):
            if marked.any():
                infos[name] = marked
        episodes.finished[:] = done
        if self.autoreset_mode is AutoresetMode.SAME_STEP and done.any():
            infos["final_obs"], infos["_final_obs"] = obs, done
            ended = np.flatnonzero(done)
            episodes.begin(ended)
            obs = obs.copy()
            obs[ended] = simulation.observe(ended)
        return obs, reward, terminated, truncated, infos

    def state_dict(self, ids: ArrayLike | None = None) -> State:
        """Return all that the future of some copies depends on, actions aside.

        Whatever loads it goes on bit by bit as this env would: any copy of an env of the same task,
        whatever its number of copies or threads, in this process or another.

        Args:
            ids: Which copies, n different indices in any order; None takes all.

        Returns:
            Arrays of numbers by name, one row per copy, (n, ...); a row is a state of the single
            env.

        Raises:
            ValueError: If `ids` are not different indices of copies.
            ResetNeeded: If one of the copies was never reset.
        """
        return self._episodes.state_dict(checked_ids(ids, num_envs=self.num_envs))

    def load_state_dict(self, state: Mapping[str, ArrayLike], ids: ArrayLike | None = None) -> None:
        """Put some copies into a state of `state_dict`; they are then ready to step.

        Args:
            state: Arrays by name, (n, ...).
            ids: Which copies take its rows, in that order; None means all.

        Raises:
            ValueError: If the state is of another task, or its keys, shapes or numbers are wrong,
                or `ids` are not different indices; all copies are left as they were.
        """
        self._episodes.load_state_dict(state, checked_ids(ids, num_envs=self.num_envs))

    def render(self) -> tuple[Image, ...]:
        """Draw every copy: N pictures, uint8 (height, width, 3).

        Raises:
            ValueError: If `render_mode` is None.
            ResetNeeded: If a copy was never reset and has had no state loaded.
        """
        require_render_mode(self.render_mode)
        self._episodes.check_begun(self._all)
        assert self._painter is not None
        images = [self._painter.draw(i) for i in range(self.num_envs)]
        return tuple(image for image in images if image is not None)

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002 - Gymnasium's signature
        """Release what drawing holds."""
        if self._painter is not None:
            self._painter.close()

    def _infos(self, cost: FloatArray) -> dict[str, Any]:
        return {"cost": cost, "_cost": np.ones(self.num_envs, dtype=np.bool_)}

    def _spread(self, values: NDArray[Any], ids: IndexArray) -> NDArray[Any]:
        """The values of the copies `ids`, (n,), as one per copy, (N,); the others have 0."""
        if len(ids) == self.num_envs:
            return values
        spread = np.zeros(self.num_envs, values.dtype)
        spread[ids] = values
        return spread
