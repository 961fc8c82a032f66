"""The proving ground: small tasks on which an algorithm shows whether it keeps a limit by itself.

Each takes seconds to minutes to learn, and comes with its limit, a scripted policy that keeps it
and one that does not. Half of them are for development; the others are for results alone.
"""

from pbcrl_envs.proving.base import ProvingTask
from pbcrl_envs.proving.envs import DEVELOPMENT, SEALED, ProvingEnv, ProvingVectorEnv
from pbcrl_envs.proving.ground import GROUND, Entry
from pbcrl_envs.proving.ice import Ice

__all__ = [
    "DEVELOPMENT",
    "GROUND",
    "SEALED",
    "Entry",
    "Ice",
    "ProvingEnv",
    "ProvingTask",
    "ProvingVectorEnv",
]
