"""Tasks with costs, registered with Gymnasium by `import pbcrl_envs`.

Every env reports the cost of a step in `info["cost"]`. Importing this package loads no simulator:
the entry points are strings that Gymnasium resolves on `make`. The tasks need Gymnasium 1.1; under
an older one nothing is registered, and `pbcrl_envs.upstream` has the real Safety-Gymnasium.
"""

if __name__ != "pbcrl_envs":
    raise ImportError(
        f"this package is imported as `pbcrl_envs`, not as `{__name__}`: its folder is named envs/ "
        "in the repository alone; install the project, then `import pbcrl_envs`"
    )

from typing import Any

import gymnasium

from pbcrl_envs.tasks import PROVING, TASKS, Task, cost_limit
from pbcrl_envs.testing import CostEnvError, check_cost_env, check_cost_vector_env

__all__ = [
    "TASKS",
    "CostEnvError",
    "Task",
    "check_cost_env",
    "check_cost_vector_env",
    "cost_limit",
]

_SUPPORTED = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 1)


def _register(
    env_id: str, horizon: int, /, *, env: str, vector_env: str | None = None, **kwargs: Any
) -> None:
    if not _SUPPORTED:
        return
    known = gymnasium.registry.get(env_id)
    if known is not None and known.entry_point == env:
        return  # a reload of this module; an id that someone else took is overridden with a warning
    gymnasium.register(
        env_id,
        entry_point=env,
        vector_entry_point=vector_env,
        max_episode_steps=horizon,
        kwargs=kwargs,
    )


_register(
    TASKS["toy"].env_id,
    TASKS["toy"].horizon,
    env="pbcrl_envs.toy:PointHazardsEnv",
    vector_env="pbcrl_envs.toy:PointHazardsVectorEnv",
)
for _layout in (f"{_goal}{_level}" for _goal in ("Goal", "Push", "Button") for _level in range(3)):
    _register(
        f"SafetyPoint{_layout}-v0",
        1000,
        env="pbcrl_envs.robotics:SafetyPointEnv",
        vector_env="pbcrl_envs.robotics:SafetyPointVectorEnv",
        task=_layout,
    )
for _robot in ("HalfCheetah", "Walker2d", "Humanoid"):
    _register(
        f"Safety{_robot}Velocity-v1",
        1000,
        env="pbcrl_envs.robotics:SafetyVelocityEnv",
        vector_env="pbcrl_envs.robotics:SafetyVelocityVectorEnv",
        task=_robot,
    )
for _scenario in ("BlockedRoad", "LaneChange"):
    _register(
        f"Driving{_scenario}-v0",
        100,
        env="pbcrl_envs.driving.highway:DrivingEnv",
        vector_env="pbcrl_envs.driving:DrivingVectorEnv",
        task=_scenario,
    )
for _name, (_horizon, _) in PROVING.items():
    if _name == "Ice":  # a plain env: `SyncVectorEnv` makes the batch
        _register(f"Proving{_name}-v0", _horizon, env="pbcrl_envs.proving:Ice")
        continue
    _register(
        f"Proving{_name}-v0",
        _horizon,
        env="pbcrl_envs.proving:ProvingEnv",
        vector_env="pbcrl_envs.proving:ProvingVectorEnv",
        task=_name,
    )
# highway-env's own envs with a cost; two have a limit, as part of the proving ground.
for _name, _horizon in (("highway", 200), ("merge", 100), ("roundabout", 55), ("intersection", 65)):
    _register(
        f"Driving{_name.title()}-v0",
        _horizon,
        env="pbcrl_envs.driving.costs:make_highway_env",
        name=_name,
    )
