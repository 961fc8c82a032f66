"""A learned cost in OmniSafe: a Gymnasium env under a name there, its `info["cost"]` as the cost.

OmniSafe trains on what its registry of `CMDP`s holds, which is Safety-Gymnasium's tasks; here an
env that `PreferenceCostWrapper` wraps joins them. Does not depend on cost models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from pbcrl.errors import MissingCostError

try:
    from omnisafe.envs.core import CMDP, env_register, support_envs
except ImportError as error:
    raise ImportError(
        f"pbcrl.adapters.omnisafe needs OmniSafe, but {error}; its pins ask for an environment of "
        "their own, where `pip install omnisafe` goes first (docs/adapters.md)"
    ) from error


def register_env(env_id: str, make_env: Callable[..., gym.Env[Any, Any]]) -> None:
    """Make an env known to `omnisafe.Agent(algo, env_id)`, which reads `info["cost"]` as its cost.

    The limit is a setting of OmniSafe's, and not read from the model: give the algorithm the
    model's `learned_limit`, as `{"lagrange_cfgs": {"cost_limit": model.learned_limit}}` for PPOLag.
    OmniSafe resets the env at the start of an epoch: let `steps_per_epoch` be a multiple of the
    episode's length, or the episode under way is lost.

    Args:
        env_id: Name of the env there; none that OmniSafe has.
        make_env: Returns the env, with a `TimeLimit` and `PreferenceCostWrapper` outside of it;
            called twice per agent, for training and evaluation, with OmniSafe's `env_cfgs` as
            keywords. Both spaces must be a `Box` with one axis, the action's with finite bounds.

    Raises:
        ValueError: If OmniSafe has an env of that name; when an agent is made, if a space is
            another one, or if it wants several envs.
        MissingCostError: In a step whose info has no `cost`.
    """
    if env_id in support_envs():
        raise ValueError(
            f"an env needs a name of its own, but OmniSafe has {env_id}; choose another"
        )
    # The registry knows classes by their name, hence one each.
    env_register(
        type(f"_{env_id}", (_GymnasiumEnv,), {"_support_envs": [env_id], "_make": make_env})
    )


class _GymnasiumEnv(CMDP):  # type: ignore[misc]
    """A single Gymnasium env; see `register_env`."""

    need_time_limit_wrapper = False  # it has its own
    need_auto_reset_wrapper = True
    _support_envs: ClassVar[list[str]]
    _make: ClassVar[Callable[..., gym.Env[Any, Any]]]

    def __init__(
        self, env_id: str, *, num_envs: int = 1, device: Any = "cpu", **env_cfgs: Any
    ) -> None:
        super().__init__(env_id)
        if num_envs != 1:
            raise ValueError(
                f"one env at a time is stepped here, got vector_env_nums={num_envs}; leave it at "
                "1, or train with parallel processes"
            )
        self._env = type(self)._make(**env_cfgs)
        for name in ("observation_space", "action_space"):
            space = getattr(self._env, name)
            flat = isinstance(space, Box) and len(space.shape) == 1
            if not flat or (name == "action_space" and not space.is_bounded()):
                raise ValueError(
                    "OmniSafe takes a Box with one axis as each space, the action's with finite "
                    f"bounds, but the {name} of {env_id} is {space}; wrap the env, inside of "
                    "PreferenceCostWrapper"
                )
        self._num_envs, self._device = num_envs, torch.device(device)
        self._observation_space = self._env.observation_space
        self._action_space = action_space = self._env.action_space
        assert isinstance(action_space, Box)
        self._bounds = action_space.low, action_space.high
        self._metadata = self._env.metadata

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        # Rounding may carry a scaled action past its bounds.
        executed = np.clip(action.detach().cpu().numpy(), *self._bounds)
        obs, reward, terminated, truncated, info = self._env.step(executed)
        if "cost" not in info:
            raise MissingCostError(
                f"OmniSafe needs the cost of every step, but {self._support_envs[0]} reports the "
                f"keys {sorted(info)}; wrap it in PreferenceCostWrapper"
            )
        return (
            self._tensor(obs),
            self._tensor(reward),
            self._tensor(info["cost"]),
            self._tensor(terminated),
            self._tensor(truncated),
            info,
        )

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        obs, info = self._env.reset(seed=seed, options=options)
        return self._tensor(obs), info

    def set_seed(self, seed: int) -> None:
        self.reset(seed=seed)

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self._device)
