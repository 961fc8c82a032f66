"""A small env and a small model whose every number can be worked out."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box

from pbcrl.cost_model import CostModel

from .every_space import boxes

NOT_REPORTED = dict.fromkeys(range(1, 5))


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


def linear_model(bias=0.0):
    """c(s, a) = t + 8 a + bias, where that is positive."""
    model = CostModel(*boxes(2, 1), hidden_sizes=(1,), output_scale=1.0)
    hidden, last = model.net[0], model.net[-1]
    with torch.no_grad():
        hidden.weight.copy_(torch.tensor([[1.0, 0.0, 8.0]]))
        hidden.bias.fill_(bias)
        last.weight.fill_(1.0)
    return model


def random_model():
    torch.manual_seed(0)
    model = CostModel(*boxes(2, 1), hidden_sizes=(8,))
    torch.nn.init.normal_(model.net[-1].weight)
    return model


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.obs, other.obs)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.costs, other.costs)
