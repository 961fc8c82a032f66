"""One space of every kind that the wrappers take, and an env that walks through any of them."""

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

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
