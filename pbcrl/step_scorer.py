"""An MLP of PyTorch, read by NumPy: for the few rows of one step of environments.

PyTorch's calls take several times as long as sums of this size, the more so as the environments
have just filled the CPU's caches, and a second thread that it wakes then spins for a while, on a
core that the physics needs. Knows nothing of costs or limits.
"""

from __future__ import annotations

import math
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
        model: Has the buffers `input_mean` and `input_scale`, float32 (num_inputs,), on a CPU as
            all others.
        net: Linear layers, the last with one output, and a ReLU between each two.
        clip: Largest size of a scaled input.
    """

    def __init__(self, model: nn.Module, net: nn.Sequential, *, clip: float) -> None:
        self._model, self._net = model, net
        tensors = self._tensors()
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        views = [tensor.detach().numpy() for tensor in tensors]
        self._mean, self._scale = views[0][:, None], views[1][:, None]
        self._layers = [
            (weight, bias[:, None]) for weight, bias in zip(views[2::2], views[3::2], strict=True)
        ]
        self._most_products = max(weight.size for weight in views[2::2])
        self._clip = clip

    @staticmethod
    def can_read(tensor: Tensor) -> bool:
        """Tell whether NumPy can read a tensor in place, and computes as PyTorch does."""
        return tensor.is_cpu and tensor.dtype == torch.float32

    def reads(self, net: nn.Module) -> bool:
        """Tell whether these are still the tensors that it reads; a move or a load replaces them.

        As long as this lives, their memory cannot become another's.
        """
        if net is not self._net:
            return False
        return self._pointers == [tensor.data_ptr() for tensor in self._tensors()]

    def outputs(self, obs: NDArray[Any], actions: NDArray[Any]) -> NDArray[np.float32] | None:
        """Return one output per row, (N, obs_dim), (N, act_dim) -> (N,).

        None if there are too many rows, or if a number is not finite in float32, or so large that
        its square is not.
        """
        if len(obs) * self._most_products > _FEW_PRODUCTS:
            return None
        if obs.dtype == actions.dtype == np.float32:
            values = np.concatenate([obs.T, actions.T])  # (num_inputs, N)
        else:
            with np.errstate(over="ignore"):  # what overflows becomes infinite
                values = np.concatenate([obs.T, actions.T], dtype=np.float32)
        flat = values.ravel()
        if not np.dot(flat, flat) < math.inf:  # the fastest way to see NaN and infinities
            return None
        # In columns, since a product of two matrices that lie in memory by rows is the fastest.
        values -= self._mean
        values /= self._scale
        np.minimum(np.maximum(values, -self._clip, out=values), self._clip, out=values)
        last = self._layers[-1]
        for layer in self._layers:
            weight, bias = layer
            values = weight @ values
            values += bias
            if layer is not last:
                np.maximum(values, 0, out=values)
        outputs: NDArray[np.float32] = values[0]
        return outputs

    def _tensors(self) -> list[Any]:
        # From the dictionaries that PyTorch itself looks them up in: by its own way to them, that
        # would take as long as all the sums.
        buffers = self._model._buffers
        tensors: list[Any] = [buffers["input_mean"], buffers["input_scale"]]
        for layer in [*self._net._modules.values()][::2]:
            assert layer is not None
            tensors += [layer._parameters["weight"], layer._parameters["bias"]]
        return tensors
