"""The paper's two driving tasks: on highway-env (`highway`), and the same as arrays (`twin`).

`costs` puts a cost on highway-env's own envs. Only `highway` and `costs` import highway-env.
"""

from pbcrl_envs.driving.scenario import SCENARIOS, Car, Scenario
from pbcrl_envs.driving.twin import DrivingVectorEnv

__all__ = ["SCENARIOS", "Car", "DrivingVectorEnv", "Scenario"]
