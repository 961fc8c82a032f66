"""An MLP of PyTorch, read by NumPy: for the few rows of one step of environments.

PyTorch's calls take several times as long as sums of this size, the more so as the environments
have just filled the CPU's caches, and a second thread that it wakes then spins for a while, on a
core that the physics needs. Knows nothing of costs or limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# More multiplications in one product, and NumPy's BLAS wakes its threads, too.
_FEW_PRODUCTS = 2**18


@final
class StepScorer:
    """ReLU layers after an input scale, in NumPy; follows what is done to the tensors in place.

    Args:
        mean: Of the inputs, float32 (num_inputs,), on a CPU as all others.
        scale: Of the inputs, (num_inputs,).
        layers: The linear layers; a ReLU follows each but the last, which has one output.
        clip: Largest size of a scaled input.
    """

    def __init__(
        self, mean: Tensor, scale: Tensor, layers: Sequence[nn.Module], *, clip: float
    ) -> None:
        tensors = _tensors(mean, scale, layers)
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        views = [tensor.detach().numpy() for tensor in tensors]
        self._mean, self._scale = views[0][:, None], views[1][:, None]
        self._weights, self._biases = views[2::2], [bias[:, None] for bias in views[3::2]]
        self._most_products = max(weight.size for weight in self._weights)
        self._clip = clip

    @staticmethod
    def can_read(tensor: Tensor) -> bool:
        """Tell whether NumPy can read a tensor in place, and computes as PyTorch does."""
        return tensor.is_cpu and tensor.dtype == torch.float32

    def reads(self, mean: Tensor, scale: Tensor, layers: Sequence[nn.Module]) -> bool:
        """Tell whether these are still the tensors that it reads; a move or a load replaces them.

        While it lives their memory cannot become another's.
        """
        tensors = _tensors(mean, scale, layers)
        return self._pointers == [tensor.data_ptr() for tensor in tensors]

    def outputs(self, obs: NDArray[Any], actions: NDArray[Any]) -> NDArray[np.float32] | None:
        """Return one output per row, (N, obs_dim), (N, act_dim) -> (N,).

        None if there are too many rows, or if a number is infinite in float32 or NaN.
        """
        if len(obs) * self._most_products > _FEW_PRODUCTS:
            return None
        with np.errstate(over="ignore"):  # what overflows becomes infinite
            values = np.concatenate([obs.T, actions.T], dtype=np.float32)  # (num_inputs, N)
        if not np.isfinite(values).all():
            return None
        # In columns, since a product of two matrices that lie in memory by rows is the fastest.
        values -= self._mean
        values /= self._scale
        np.minimum(np.maximum(values, -self._clip, out=values), self._clip, out=values)
        last = len(self._weights) - 1
        for i, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            values = weight @ values
            values += bias
            if i < last:
                np.maximum(values, 0, out=values)
        outputs: NDArray[np.float32] = values[0]
        return outputs


def _tensors(mean: Tensor, scale: Tensor, layers: Sequence[nn.Module]) -> list[Any]:
    tensors: list[Any] = [mean, scale]
    for layer in layers:
        tensors += [layer.weight, layer.bias]
    return tensors
