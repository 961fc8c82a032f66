"""Safety-Gymnasium's navigation tasks of the point agent, batched on current MuJoCo.

Importing this package imports MuJoCo; `import pbcrl_envs` alone does not.
"""

from pbcrl_envs.robotics.envs import SafetyPointEnv, SafetyPointVectorEnv

__all__ = ["SafetyPointEnv", "SafetyPointVectorEnv"]
