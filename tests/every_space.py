"""One space of every kind that the wrappers take, and an env that walks through any of them."""

import copy

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from pbcrl.cost_model import CostModel

OBS_SPACES = {
    "Box": Box(-1, 1, (3,), np.float32),
    "Box, float16": Box(-1, 1, (3,), np.float16),
    "Box, float64, unbounded": Box(-np.inf, np.inf, (3,), np.float64),
    "Box, int64": Box(-1000, 1000, (3,), np.int64),
    "Box, one number": Box(-1, 1, (), np.float32),
    "Box, two axes": Box(-1, 1, (3, 2), np.float32),
    "Box, four axes": Box(-1, 1, (2, 1, 3, 2), np.float32),
    "Box, bytes": Box(0, 255, (4,), np.uint8),
    "Box, RGB image": Box(0, 255, (36, 36, 3), np.uint8),
    "Discrete": Discrete(4),
    "Discrete, start 3": Discrete(4, start=3),
    "MultiDiscrete": MultiDiscrete([3, 2]),
    "MultiDiscrete, two axes": MultiDiscrete([[3, 2, 2], [2, 4, 2]]),
    "MultiBinary": MultiBinary(5),
    "MultiBinary, two axes": MultiBinary([2, 3]),
    "Dict": Dict(position=Box(-1, 1, (2,), np.float32), goal=Discrete(3)),
    "Tuple": Tuple([Box(-1, 1, (2,), np.float64), MultiBinary(2)]),
    "Dict, nested": Dict(
        camera=Box(0, 255, (2, 2, 3), np.uint8),
        body=Tuple([Dict(joints=Box(-1, 1, (2, 2), np.float32)), Discrete(2, start=1)]),
    ),
}
ACTION_SPACES = {
    name: space for name, space in OBS_SPACES.items() if not isinstance(space, Dict | Tuple)
}
IMAGES = ["Box, RGB image"]


class Wander(gym.Env):
    """Shows a random observation of its space at every step, and ends after `length` steps."""

    def __init__(self, obs_space, action_space, length):
        # Copies: a space holds the state of its random numbers.
        self.observation_space = copy.deepcopy(obs_space)
        self.action_space = copy.deepcopy(action_space)
        self.length, self.seen, self.received = length, [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.observation_space.seed(int(self.np_random.integers(1000)))
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.received.append(copy.deepcopy(action))
        self.t += 1
        return self.look(), 1.0, self.t >= self.length, False, {"cost": self.t / 2}

    def look(self):
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]


def boxes(obs_shape, act_dim):
    """Spaces of these sizes: an image if obs_shape has three axes."""
    if isinstance(obs_shape, tuple) and len(obs_shape) == 3:
        obs_space = Box(0, 255, obs_shape, np.uint8)
    else:
        obs_space = Box(-np.inf, np.inf, np.atleast_1d(obs_shape))
    return obs_space, Box(-1, 1, (act_dim,))


def model_for(obs_space, action_space):
    torch.manual_seed(0)
    model = CostModel(obs_space, action_space, hidden_sizes=(8,))
    with torch.no_grad():
        for weights in model.parameters():
            if not weights.any():  # the last layer starts at zero
                weights.normal_()
    return model


def draw_actions(space, steps, count):
    """`count` actions of `space` for each of `steps` steps."""
    space.seed(0)
    return [[space.sample() for _ in range(count)] for _ in range(steps)]


# Every space as observation, and every space as action.
SPACE_PAIRS = [(space, Discrete(3)) for space in OBS_SPACES.values()]
SPACE_PAIRS += [(Box(-1, 1, (2,), np.float32), space) for space in ACTION_SPACES.values()]
SPACE_IDS = [f"see {name}" for name in OBS_SPACES] + [f"do {name}" for name in ACTION_SPACES]
