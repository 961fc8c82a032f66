"""A small env whose every number can be worked out, alone and in Gymnasium's vector envs."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
LENGTHS = [3, 1, 4]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (20, len(LENGTHS), 1)).astype(np.float32)


class Counter(gym.Env):
    """s_t = (t, offset); the cost of an action is |a_0|; ends after `length` steps.

    The offset is drawn at each reset, so that a trajectory tells from which episode it comes.
    `obs`, `reward` and `cost` replace values at single steps; a cost of None is not reported.
    The first episode diverges at step `diverges_at`.
    """

    observation_space = Box(-1000, 1000, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(
        self, length=3, *, obs=None, reward=None, cost=None, raises_at=None, diverges_at=0
    ):
        self.diverges_at = diverges_at
        self.length, self.raises_at = length, raises_at
        self.bad_obs, self.bad_reward, self.bad_cost = obs or {}, reward or {}, cost or {}
        self.received = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.t = 0
        self.offset = float(self.np_random.integers(100, 900))
        return self.obs(), {}

    def step(self, action):
        self.received.append(np.array(action))
        self.t += 1
        if self.t == self.raises_at:
            raise RuntimeError("the simulator fell over")
        cost = self.bad_cost.get(self.t, abs(float(action[0])))
        info = {} if cost is None else {"cost": cost}
        if self.t == self.diverges_at:
            self.diverges_at = 0
            return self.obs(), 0.0, False, True, info | {"diverged": True}
        return self.obs(), self.bad_reward.get(self.t, 1.0), self.t >= self.length, False, info

    def obs(self):
        return np.array([self.bad_obs.get(self.t, self.t), self.offset], np.float32)


def counters(mode, make=SyncVectorEnv, **options):
    fns = [lambda length=length: TimeLimit(Counter(99), length) for length in LENGTHS]
    return make(fns, autoreset_mode=mode, **options)
