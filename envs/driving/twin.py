"""The driving tasks as arrays: N episodes at once, step for step what the highway-env version does.

No highway-env here: the road is straight and the cars are few, so that a step of all N is some
fifty array operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from pbcrl_envs.checks import (
    State,
    check_at_least_one,
    check_begun,
    check_render_mode,
    checked_actions,
    checked_autoreset_mode,
    checked_ids,
    refuse_options,
    require_render_mode,
    seed_per_env,
)
from pbcrl_envs.driving.rules import (
    Cars,
    Floats,
    Mask,
    Obs,
    advance,
    draw_start,
    judge,
    observe,
    start_cars,
)
from pbcrl_envs.driving.scenario import UNIT, as_config, changed, find_scenario
from pbcrl_envs.driving.state import pack, unpack

AXES = "(throttle, steering)"


class DrivingVectorEnv(VectorEnv[Obs, NDArray[np.float32], NDArray[Any]]):
    """N copies of a driving task, each with its own traffic and random stream.

    Env i seeded with s lives through what `DrivingEnv` seeded with s + i does. Reaching the goal, a
    collision and leaving the frame terminate; `max_episode_steps` truncates.

    Every step reports, float64 (N,), `infos["cost"]`: the cost of the step just taken, 0 or 1, also
    where it ended an episode; and as bool (N,) what it was for: `infos["proximity"]`,
    `infos["speeding"]`, `infos["off_road"]`, `infos["backward"]`, `infos["out_of_frame"]`,
    `infos["collision"]`; and `infos["goal"]`. What follows an end depends on the mode:

    - NEXT_STEP: the next step of that env ignores its action and returns the reset observation
      with reward 0 and cost 0. It is no transition.
    - SAME_STEP: the returned row is already the reset observation; the true last one stands in
      `infos["final_obs"]`, float32 (N, obs_dim), where the mask `infos["_final_obs"]` is true. Both
      keys exist only if some episode ended.

    Args:
        num_envs: N >= 1.
        task: "BlockedRoad" or "LaneChange".
        config: Fields of `Scenario` to change. What only highway-env has (other observations,
            traffic that reacts) is refused.
        max_episode_steps: Steps after which an episode is truncated, >= 1.
        autoreset_mode: NEXT_STEP or SAME_STEP, as the member or as its value ("NextStep").
        render_mode: None or "rgb_array"; frames are drawn by highway-env.

    Raises:
        ValueError: If an argument is out of its range, or the mode is DISABLED.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        task: str = "BlockedRoad",
        config: Mapping[str, Any] | None = None,
        max_episode_steps: int = 100,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        check_at_least_one("num_envs", num_envs)
        check_at_least_one("max_episode_steps", max_episode_steps)
        check_render_mode(render_mode, modes=("rgb_array",), env=f"a batch of Driving{task}")
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.render_mode = render_mode
        self.autoreset_mode = checked_autoreset_mode(autoreset_mode)
        self.scenario = changed(find_scenario(task), config or {})
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": self.scenario.policy_frequency,
            "autoreset_mode": self.autoreset_mode,
        }
        self.single_observation_space = Box(-np.inf, np.inf, (self.scenario.obs_dim,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._schedule = self.scenario.steering_schedule()  # (C - 1, F)
        num_cars = 1 + len(self.scenario.traffic)
        self._task = task
        self._rngs: list[np.random.Generator | None] = [None] * num_envs  # None: never reset
        self._cars = Cars(*np.zeros((4, num_cars, num_envs)))
        self._acceleration = np.zeros((num_cars, num_envs))
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._finished = np.zeros(num_envs, dtype=np.bool_)  # on the last step, not yet reset
        self._painter: Any = None  # a DrivingEnv, made on the first frame

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Obs, dict[str, Any]]:
        """Start a new episode in every env.

        Args:
            seed: An int s seeds env i with s + i; a sequence gives one seed per env; None, there or
                as the whole, lets a stream run on.
            options: None or empty.

        Returns:
            obs (N, obs_dim) and an empty info.

        Raises:
            ValueError: If there is not one seed per env, or `options` holds anything.
        """
        refuse_options(options, env="DrivingVectorEnv")
        for i, env_seed in enumerate(seed_per_env(seed, num_envs=self.num_envs)):
            if env_seed is not None or self._rngs[i] is None:
                self._rngs[i], _ = seeding.np_random(env_seed)
        self._start_episodes(np.arange(self.num_envs))
        self._finished[:] = False
        return observe(self.scenario, self._cars, self._acceleration), {}

    def step(self, actions: NDArray[np.float32]) -> tuple[Obs, Floats, Mask, Mask, dict[str, Any]]:
        """Drive every env on by one step; see the class for what happens where an episode ends.

        Args:
            actions: (N, 2): throttle and steering, clipped to [-1, 1]; right is positive.

        Returns:
            obs (N, obs_dim), rewards (N,), terminations (N,), truncations (N,), infos.

        Raises:
            RuntimeError: If the envs were never reset.
            ValueError: If the actions have another shape, or hold NaN or an infinity.
        """
        check_begun(None not in self._rngs)
        checked = checked_actions(actions, shape=(self.num_envs, 2), axes=AXES)
        resetting = self._finished  # (N,); in SAME_STEP only where set_state brought it
        longitudinal_before = self._cars.longitudinal[0]
        self._drive(checked)
        self._elapsed += 1
        verdict = judge(self.scenario, self._cars, longitudinal_before)
        reward, cost, terminated, goal, components = verdict
        if resetting.any():
            self._start_episodes(np.flatnonzero(resetting))
            for values in (reward, cost, terminated, goal, *components.values()):
                values[resetting] = 0
        obs = observe(self.scenario, self._cars, self._acceleration)
        truncated = self._elapsed >= self.max_episode_steps
        done = terminated | truncated
        infos: dict[str, Any] = {"cost": cost, "goal": goal, **components}
        self._finished = np.zeros_like(done)
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._finished = done.copy()
        elif done.any():
            infos |= {"final_obs": obs, "_final_obs": done}
            rows = np.flatnonzero(done)
            self._start_episodes(rows)
            fresh = Cars(*(values[:, rows] for values in self._cars))
            obs = obs.copy()
            obs[rows] = observe(self.scenario, fresh, self._acceleration[:, rows])
        return obs, reward, terminated, truncated, infos

    def get_state(self, ids: ArrayLike | None = None) -> State:
        """Return all that the future of the chosen envs depends on, one row each.

        Args:
            ids: Indices of envs; default: all.

        Raises:
            RuntimeError: If the envs were never reset.
        """
        chosen = checked_ids(ids, num_envs=self.num_envs)
        check_begun(all(self._rngs[i] is not None for i in chosen.tolist()))
        return pack(
            self._task,
            Cars(*(values[:, chosen] for values in self._cars)),
            self._acceleration[:, chosen],
            elapsed=self._elapsed[chosen],
            finished=self._finished[chosen],
            rngs=[self._rng(i) for i in chosen.tolist()],
        )

    def set_state(self, state: Mapping[str, ArrayLike], ids: ArrayLike | None = None) -> None:
        """Go on from a state of `get_state`, of this env or another of the same task.

        Args:
            state: One row per chosen env.
            ids: Indices of envs; default: all.

        Raises:
            ValueError: If it is not a state of this task; the envs are left as they were.
        """
        chosen = checked_ids(ids, num_envs=self.num_envs)
        num_cars = len(self._acceleration)
        cars, rest, rngs = unpack(state, task=self._task, num_envs=len(chosen), num_cars=num_cars)
        for values, given in zip(self._cars, cars, strict=True):
            values[:, chosen] = given
        self._acceleration[:, chosen] = rest["acceleration"].T
        self._elapsed[chosen] = rest["elapsed"]
        self._finished[chosen] = rest["finished"]
        for i, rng in zip(chosen.tolist(), rngs, strict=True):
            self._rngs[i] = rng

    def render(self) -> tuple[NDArray[np.uint8], ...]:
        """Return one frame per env, uint8 (height, width, 3).

        Raises:
            ValueError: If the batch was made without a render mode.
        """
        require_render_mode(self.render_mode)
        if self._painter is None:
            from pbcrl_envs.driving.highway import DrivingEnv  # highway-env, only for pictures

            self._painter = DrivingEnv(
                as_config(self.scenario), render_mode="rgb_array", task=self._task
            )
        state = self.get_state()
        frames = []
        for i in range(self.num_envs):
            self._painter.set_state({name: values[i] for name, values in state.items()})
            frames.append(self._painter.render())
        return tuple(frames)

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002 - Gymnasium's signature
        """Close the renderer, if there is one."""
        if self._painter is not None:
            self._painter.close()
            self._painter = None

    def _drive(self, actions: Floats) -> None:
        """Move all cars for one env step."""
        # highway-env maps [-1, 1] to the range of a command in this way, rounding included.
        throttle, steer = (actions.T + 1.0) - 1.0
        speed_before = self._cars.speed
        acceleration, steering = np.zeros_like(speed_before), np.zeros_like(speed_before)
        steering[0] = steer
        last = self._schedule.shape[1] - 1
        for frame in range(self.scenario.frames):
            now = np.minimum(self._elapsed * self.scenario.frames + frame, last)
            steering[1:] = self._schedule[:, now]
            acceleration[0] = UNIT * throttle - self._cars.speed[0]
            dt = 1 / self.scenario.simulation_frequency
            self._cars = advance(self._cars, acceleration, steering, dt)
        self._acceleration = (self._cars.speed - speed_before) * self.scenario.policy_frequency

    def _start_episodes(self, rows: NDArray[np.intp]) -> None:
        starts = [draw_start(self.scenario, self._rng(i)) for i in rows.tolist()]
        lanes = [lane for lane, _ in starts]
        speeds = np.stack([speeds for _, speeds in starts], axis=1)
        fresh = start_cars(self.scenario, lanes, speeds)
        for values, start in zip(self._cars, fresh, strict=True):
            values[:, rows] = start
        self._acceleration[:, rows] = 0.0
        self._elapsed[rows] = 0

    def _rng(self, i: int) -> np.random.Generator:
        rng = self._rngs[i]
        assert rng is not None  # reset() and set_state() have filled the list
        return rng
