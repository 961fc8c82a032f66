"""Safety-Gymnasium's tasks of the point agent and of running robots, batched on current MuJoCo.

Importing this package imports MuJoCo; `import pbcrl_envs` alone does not.
"""

from pbcrl_envs.robotics.opengl import import_mujoco

import_mujoco()  # with a word on what is missing

from pbcrl_envs.robotics.envs import SafetyPointEnv, SafetyPointVectorEnv  # noqa: E402
from pbcrl_envs.robotics.velocity import (  # noqa: E402
    SafetyVelocityEnv,
    SafetyVelocityVectorEnv,
)

__all__ = [
    "SafetyPointEnv",
    "SafetyPointVectorEnv",
    "SafetyVelocityEnv",
    "SafetyVelocityVectorEnv",
]
