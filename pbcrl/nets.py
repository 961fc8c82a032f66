"""The networks of a cost model: an MLP on flat steps, convolutions before it on images.

Their inputs are scaled already; what they put out becomes a cost in `CostModel`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Sequential):
    """ReLU layers on both inputs side by side; puts out exactly 0 until it is trained."""

    def __init__(self, num_inputs: int, hidden_sizes: Sequence[int]) -> None:
        sizes = [num_inputs, *hidden_sizes]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        last = nn.Linear(sizes[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(*layers, last)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:  # type: ignore[override]
        """Return one number per step: (..., obs_dim), (..., act_dim) -> (..., 1)."""
        output = torch.cat([obs, actions], dim=-1)
        for layer in self:
            output = layer(output)
        return output

    def layer_inputs(self, inputs: Tensor) -> list[Tensor]:
        """Return what each linear layer reads, and last what the network puts out.

        Args:
            inputs: Observations and actions side by side, (B, T, num_inputs), in the dtype to
                compute in.

        Returns:
            Of each linear layer (B, T, its inputs); then (B, T, 1).
        """
        *hidden, last = self._linear()
        values = [inputs]
        for layer in hidden:
            values.append(_linear(values[-1], layer).relu_())
        return [*values, _linear(values[-1], last)]

    def jacobian(self, layer_inputs: Sequence[Tensor], slope: Tensor) -> list[Tensor]:
        """Return Σ_t slope_t ∂z_t/∂ψ of each trajectory alone, where z_t is the output of a step.

        Backpropagation as ever, but that the last sum, over the trajectories, is left open.

        Args:
            layer_inputs: Of each linear layer, (B, T, its inputs), as `layer_inputs` has them.
            slope: (B, T).

        Returns:
            Of each of `parameters()`, in order, (B, *its shape).
        """
        *hidden, last = self._linear()
        top = layer_inputs[-1]
        gradients = [slope.sum(dim=1)[:, None], slope.to(top.dtype)[:, None] @ top]  # backwards
        grad = slope.to(top.dtype)[..., None] * last.weight.to(top.dtype)  # (B, T, width)
        between = [*zip(hidden, layer_inputs[:-1], layer_inputs[1:], strict=True)]
        for layer, reads, puts_out in reversed(between):
            # What autograd calls for a ReLU, without a mask in memory.
            torch.ops.aten.threshold_backward.grad_input(grad, puts_out, 0, grad_input=grad)
            gradients += [grad.sum(dim=1), grad.mT @ reads]
            if layer is not hidden[0]:
                grad = grad @ layer.weight.to(grad.dtype)
        return [gradient.to(slope.dtype) for gradient in reversed(gradients)]

    def _linear(self) -> list[nn.Linear]:
        return [layer for layer in self if isinstance(layer, nn.Linear)]


class ConvNet(nn.Module):
    """Three convolutions of an image, each halving its sides, then the MLP."""

    def __init__(
        self, obs_shape: tuple[int, ...], act_dim: int, hidden_sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self._channels_last = obs_shape[2] <= obs_shape[0]
        channels, *sides = (obs_shape[2], *obs_shape[:2]) if self._channels_last else obs_shape
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise([channels, 16, 32, 32]):
            layers += [nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        self._num_features = 32 * math.prod(math.ceil(side / 8) for side in sides)
        self.mlp = MLP(self._num_features + act_dim, hidden_sizes)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Return one number per step: (..., *obs_shape), (..., act_dim) -> (..., 1)."""
        images = obs.flatten(0, -4) if obs.ndim > 3 else obs[None]  # (B, *obs_shape)
        if self._channels_last:
            images = images.movedim(-1, 1)
        features = self.encoder(images).reshape(*obs.shape[:-3], self._num_features)
        output: Tensor = self.mlp(features, actions)
        return output


def _linear(values: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(values, layer.weight.to(values.dtype), layer.bias.to(values.dtype))
