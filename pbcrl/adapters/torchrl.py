"""The learned cost in TorchRL: a transform that writes it beside the reward.

`PreferenceCost` scores steps while an env is stepped, and batches of a replay buffer again after
fine-tuning. `TrueCost` reads the env's own cost. What prices a cost is the loss of whoever uses it.
Does not record episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from pbcrl.cost_model import LearnedCost, require_learned_cost, warn_of_a_copy
from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl.recorder import cost_array

try:
    from tensordict import NestedKey, TensorDictBase
    from torchrl.data import Composite, TensorSpec, Unbounded
    from torchrl.envs import Transform
    from torchrl.envs.gym_like import BaseInfoDictReader
except ImportError as error:
    raise ImportError(
        f"pbcrl.adapters.torchrl needs TorchRL, but {error}; pip install 'pbcrl[torchrl]'"
    ) from error


@final
class PreferenceCost(Transform):  # type: ignore[misc]
    """Writes ("next", "cost"): c_ψ(s_t, a_t), float32 (*batch, 1), shaped like the reward.

    At a reset "cost" is 0. Call it on a batch that has been sampled, or append it to a replay
    buffer, to score the steps by the model's present weights: costs noted while stepping are stale
    after fine-tuning.

    Put it outside `ParallelEnv`, whose workers would keep copies of the weights (and warn), and
    before transforms that change observations. An env under it clips actions silently, and the
    model would score what was not executed: use a bounded policy, such as `TanhNormal`.

    Args:
        cost_model: Scores the steps; it is not copied, so that fine-tuning has effect here.
        observation: Key of s_t: flat rows, or images as the env returns them.
        action: Key of a_t; one-hot if discrete, as `GymEnv` has it by default.
        out_key: Key of the learned cost.

    Raises:
        TypeError: If `cost_model` is no `LearnedCost`.
        ValueError: If the env has an `out_key` already, or no `observation`; when a step is scored,
            if its sizes are not those of the model.
        NonFiniteError: When a step is scored, if it holds NaN or an infinity.
    """

    def __init__(
        self,
        cost_model: LearnedCost,
        *,
        observation: NestedKey = "observation",
        action: NestedKey = "action",
        out_key: NestedKey = "cost",
    ) -> None:
        require_learned_cost(cost_model)
        warn_of_a_copy(cost_model)
        super().__init__(in_keys=[observation, action], out_keys=[out_key])
        self.cost_model = cost_model

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Add the cost, of any size and sign, to what the env reports."""
        assert isinstance(observation_spec, Composite)
        (observation, _), (out_key,) = self.in_keys, self.out_keys
        keys = observation_spec.keys(True, True)
        if out_key in keys or observation not in keys:
            raise ValueError(
                f"the env must report the observation that the model reads, {observation!r}, and "
                f"must not report {out_key!r}, the learned cost, but it reports "
                f"{sorted(map(str, keys))}; pass observation= or out_key=, or rename the env's "
                "cost by RenameTransform before this"
            )
        shape = (*observation_spec.shape, 1)
        observation_spec[out_key] = Unbounded(
            shape=shape, dtype=torch.float32, device=observation_spec.device
        )
        return observation_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the cost of steps that lie in memory, under "next", by the present weights."""
        (out_key,) = self.out_keys
        key = out_key if isinstance(out_key, tuple) else (out_key,)
        return tensordict.set(("next", *key), self._cost(tensordict))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set(self.out_keys[0], self._cost(tensordict))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        del tensordict
        shape, device = (*tensordict_reset.shape, 1), tensordict_reset.device
        zeros = torch.zeros(shape, dtype=torch.float32, device=device)
        return tensordict_reset.set(self.out_keys[0], zeros)

    @torch.no_grad()
    def _cost(self, tensordict: TensorDictBase) -> Tensor:
        observation, action = (tensordict.get(key) for key in self.in_keys)
        for key, rows in zip(self.in_keys, (observation, action), strict=True):
            if num_bad := int((~rows.isfinite()).sum()):  # else NaN as a cost, and as a loss
                raise NonFiniteError(
                    f"what a cost model scores must be finite, got {num_bad} NaN or infinite "
                    f"entries of {rows.numel()} under {key!r}; find the step that produced them"
                )
        cost: Tensor = self.cost_model(observation, action.float())
        return cost.float().unsqueeze(-1).to(observation.device)


@final
class TrueCost(BaseInfoDictReader):  # type: ignore[misc]
    """Reads the env's own `info["cost"]` as ("next", "true_cost"), float32 (*batch, 1).

    TorchRL's own reader takes arrays, while a cost is a float in Gymnasium's infos. At a reset the
    cost is 0 if the env reports none. Give it to `GymWrapper.set_info_dict_reader`. With
    `frame_skip`, TorchRL has the infos of the last frame alone, so that costs of others are lost.

    Raises:
        MissingCostError: At a step without `info["cost"]`.
        ValueError: At a step, if the cost is negative or not one number per env.
    """

    @property
    def info_spec(self) -> Mapping[str, TensorSpec]:
        """What is read, of a single env."""
        return {"true_cost": Unbounded(shape=(1,), dtype=torch.float32)}

    def __call__(self, info_dict: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the cost of a step."""
        is_reset = "reward" not in tensordict
        if "cost" not in info_dict and not is_reset:
            raise MissingCostError(
                "the true cost of a step is in info['cost'], but the env reported only "
                f"{sorted(info_dict)}; let it report a cost in every step, or leave TrueCost out"
            )
        cost = cost_array(info_dict.get("cost", 0.0), tuple(tensordict.shape))
        return tensordict.set("true_cost", torch.from_numpy(cost.reshape(*cost.shape, 1)))
