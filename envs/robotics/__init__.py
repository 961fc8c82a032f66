"""Safety-Gymnasium's tasks of the point agent and of running robots, batched on current MuJoCo.

Importing this package imports MuJoCo; `import pbcrl_envs` alone does not.
"""

from pbcrl_envs.checks import needs_extra
from pbcrl_envs.robotics.opengl import import_mujoco

with needs_extra("robotics"):
    import_mujoco()  # says what is missing
    from pbcrl_envs.robotics.envs import SafetyPointEnv, SafetyPointVectorEnv
    from pbcrl_envs.robotics.velocity import SafetyVelocityEnv, SafetyVelocityVectorEnv

__all__ = [
    "SafetyPointEnv",
    "SafetyPointVectorEnv",
    "SafetyVelocityEnv",
    "SafetyVelocityVectorEnv",
]
