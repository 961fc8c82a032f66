"""The driving tasks as arrays: N episodes at once, step for step what the highway-env version does.

No highway-env here: the road is straight and the cars are few, so that a step of all N is some
fifty array operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from pbcrl_envs.batched import BatchedEnv
from pbcrl_envs.checks import State
from pbcrl_envs.driving.rules import Cars, Obs, advance, draw_start, judge, observe, start_cars
from pbcrl_envs.driving.scenario import UNIT, Scenario, as_config, changed, find_scenario
from pbcrl_envs.simulation import FloatArray, Image, IndexArray, Simulation, StepResult
from pbcrl_envs.streams import Streams


class DrivingVectorEnv(BatchedEnv):
    """N copies of a driving task; `BatchedEnv` says what all batches have in common.

    Env i seeded with s lives through what `DrivingEnv` seeded with s + i does. Reaching the goal, a
    collision and leaving the frame terminate.

    `infos["cost"]` is 0 or 1, and bools (N,) tell what it was for: `infos["proximity"]`,
    `infos["speeding"]`, `infos["off_road"]`, `infos["backward"]`, `infos["out_of_frame"]`,
    `infos["collision"]`; `infos["goal"]` is true where the goal was reached. Observations are
    float32 (N, obs_dim), actions (N, 2): throttle and steering, clipped to [-1, 1]; right is
    positive.

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
        self.scenario = changed(find_scenario(task), config or {})
        super().__init__(
            DrivingSimulation(task, self.scenario, num_envs=num_envs),
            max_episode_steps=max_episode_steps,
            autoreset_mode=autoreset_mode,
            render_mode=render_mode,
            painter=lambda _: _HighwayPainter(self, task),
        )


class DrivingSimulation(Simulation):
    """N scenes of one scenario, as arrays.

    Args:
        task: Its name, for states and messages.
        scenario: What the task is made of.
        num_envs: N.
    """

    action_space = Box(-1.0, 1.0, (2,), np.float32)
    action_axes = "(throttle, steering)"
    cars: Cars
    """(C, N) each."""
    acceleration: FloatArray
    """Of the last step, (C, N)."""

    def __init__(self, task: str, scenario: Scenario, *, num_envs: int) -> None:
        super().__init__(num_envs)
        self.name = f"Driving{task}"
        self.scenario = scenario
        self.render_fps = scenario.policy_frequency
        self.observation_space = Box(-np.inf, np.inf, (scenario.obs_dim,), np.float32)
        self.observation_names = scenario.observation_names
        num_cars = 1 + len(scenario.traffic)
        self.cars = Cars(*np.zeros((4, num_cars, num_envs)))
        self.acceleration = np.zeros((num_cars, num_envs))
        self.streams = Streams(num_envs)
        self._schedule = scenario.steering_schedule()  # (C - 1, F)

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Restart the random stream of each copy; None lets a stream run on."""
        self.streams.seed(seeds)

    def reset(self, ids: IndexArray) -> None:
        """Draw the ego's lane and the traffic's speeds of some copies."""
        starts = [draw_start(self.scenario, self.streams[i]) for i in ids.tolist()]
        lanes = [lane for lane, _ in starts]
        speeds = np.stack([speeds for _, speeds in starts], axis=1)
        self._put(ids, start_cars(self.scenario, lanes, speeds), 0.0)

    def step(self, ids: IndexArray, actions: FloatArray) -> StepResult:
        """Move all cars of some copies for one env step; see `rules.judge` for what it brings."""
        before = self._cars_of(ids)
        # highway-env maps [-1, 1] to the range of a command in this way, rounding included.
        throttle, steer = (actions.T + 1.0) - 1.0
        cars = before
        acceleration, steering = np.zeros_like(before.speed), np.zeros_like(before.speed)
        steering[0] = steer
        last = self._schedule.shape[1] - 1
        for frame in range(self.scenario.frames):
            now = np.minimum(self.elapsed[ids] * self.scenario.frames + frame, last)
            steering[1:] = self._schedule[:, now]
            acceleration[0] = UNIT * throttle - cars.speed[0]
            cars = advance(cars, acceleration, steering, 1 / self.scenario.simulation_frequency)
        verdict = judge(self.scenario, cars, before.longitudinal[0])
        gained = (cars.speed - before.speed) * self.scenario.policy_frequency
        self._put(self._rows(ids), cars, gained)
        never = np.zeros(len(ids), dtype=np.bool_)
        extras = {"goal": verdict.goal, **verdict.components}
        return StepResult(verdict.reward, verdict.cost, verdict.terminated, never, extras)

    def observe(self, ids: IndexArray) -> Obs:
        """Return what the egos of some copies see, float32 (n, obs_dim)."""
        return observe(self.scenario, self._cars_of(ids), self.acceleration[:, self._rows(ids)])

    def state_dict(self, ids: IndexArray) -> State:
        """Return cars, (n, C) each, and random streams of some copies."""
        return {
            **{name: values.T[ids] for name, values in self.cars._asdict().items()},
            "acceleration": self.acceleration.T[ids],
            "stream": self.streams.words(ids),
        }

    def load_state_dict(self, state: State, ids: IndexArray) -> None:
        """Put some copies into a state of `state_dict`."""
        self._put(ids, Cars(*(state[name].T for name in Cars._fields)), state["acceleration"].T)
        self.streams.set_words(ids, state["stream"])

    def _rows(self, ids: IndexArray) -> IndexArray | slice:
        """Sorted indices, or a slice if they are all, which copies nothing."""
        return slice(None) if len(ids) == self.num_envs else ids

    def _cars_of(self, ids: IndexArray) -> Cars:
        return Cars(*(values[:, self._rows(ids)] for values in self.cars))

    def _put(self, rows: IndexArray | slice, cars: Cars, acceleration: FloatArray | float) -> None:
        for values, given in zip(self.cars, cars, strict=True):
            values[:, rows] = given
        self.acceleration[:, rows] = acceleration


class _HighwayPainter:
    """Draws the copies of a batch with highway-env, which it imports for the first picture."""

    def __init__(self, envs: DrivingVectorEnv, task: str) -> None:
        self._envs, self._task = envs, task
        self._env: Any = None

    def draw(self, i: int) -> Image | None:
        if self._env is None:
            from pbcrl_envs.driving.highway import DrivingEnv

            config = as_config(self._envs.scenario)
            self._env = DrivingEnv(config, render_mode="rgb_array", task=self._task)
        state = self._envs.state_dict([i])
        self._env.load_state_dict({name: values[0] for name, values in state.items()})
        image: Image | None = self._env.render()
        return image

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
