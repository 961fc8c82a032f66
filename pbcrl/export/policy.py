"""A trained policy as one file, and as a function of observations, without the script it is from.

Raw observations in, actions within their bounds out: the statistics that standardise observations,
the layers by name and the bounds are in the file. Nothing in it is code. Does not depend on
environments or training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from pbcrl.errors import NonFiniteError, StorageError, UnsupportedError
from pbcrl.storage import check_finite, described_by, load_tensors, save_tensors
from pbcrl.trajectory import FloatArray

POLICY_FILE = "policy.safetensors"
"""Of a run's folder: its policy; at the end the one that it chose."""

_KIND = "policy"
_LAYERS: dict[str, type[nn.Module]] = {
    "Linear": nn.Linear,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "Tanh": nn.Tanh,
}
_BUFFERS = "obs_mean", "obs_var", "log_std", "low", "high"


@final
class Policy:
    """A Gaussian policy on standardised observations; `load_policy` reads one from a file.

    It computes what the agents of the scripts do: the mean is net(clip((obs - obs_mean) /
    sqrt(obs_var + 1e-8), -10, 10)), the standard deviation exp(log_std), and an action is clipped
    to [low, high].

    Args:
        net: Layers of `torch.nn` in a `Sequential`, nested ones too: `Linear`, `ReLU`, `SiLU` and
            `Tanh`. (..., obs_dim) -> (..., act_dim). It is not copied.
        obs_mean: Of the observations, (obs_dim,).
        obs_var: Likewise.
        log_std: Of the action, in its own units, (act_dim,).
        low: Lowest action, (act_dim,).
        high: Likewise the highest.
        env_id: Gymnasium id of the env that it was trained in.

    Raises:
        UnsupportedError: If the network has other layers.
        ValueError: If the sizes do not fit each other, `low` is above `high`, or `obs_var` is
            negative.
    """

    def __init__(
        self,
        net: nn.Sequential,
        *,
        obs_mean: Tensor,
        obs_var: Tensor,
        log_std: Tensor,
        low: Tensor,
        high: Tensor,
        env_id: str,
    ) -> None:
        self._net = nn.Sequential(*_layers(net))
        given = obs_mean, obs_var, log_std, low, high
        self._buffers = {n: t.detach() for n, t in zip(_BUFFERS, given, strict=True)}
        linear = [layer for layer in self._net if isinstance(layer, nn.Linear)]
        if not linear:
            raise ValueError("a policy needs at least one Linear layer, got none")
        self.obs_dim, self.act_dim = linear[0].in_features, linear[-1].out_features
        self.env_id = env_id
        for name, tensor in self._buffers.items():
            size = self.obs_dim if name.startswith("obs") else self.act_dim
            if tensor.shape != (size,):
                raise ValueError(
                    f"{name} must have the shape {(size,)} that the network has, got "
                    f"{tuple(tensor.shape)}; give the one that it was trained with"
                )
        if not (low <= high).all() or not (obs_var >= 0).all():
            raise ValueError(
                "a policy needs low <= high and obs_var >= 0, none of them NaN, got "
                f"low={low.tolist()}, high={high.tolist()}, obs_var={obs_var.tolist()}; give those "
                "that it was trained with"
            )

    @torch.no_grad()
    def __call__(self, obs: ArrayLike, *, rng: np.random.Generator | None = None) -> FloatArray:
        """Return the action for an observation as the env returns it.

        Args:
            obs: (obs_dim,), or (N, obs_dim) of N envs; raw, of any dtype.
            rng: Draws the action; None, the default, takes the mean.

        Returns:
            float32 (act_dim,) or (N, act_dim), within the bounds. No rows in, no rows out.

        Raises:
            ValueError: If the shape is another one.
            NonFiniteError: If a number is NaN or infinite, also after the cast to float32.
        """
        with np.errstate(over="ignore"):  # what overflows is refused just below
            rows = np.asarray(obs, np.float32)
        if rows.ndim not in (1, 2) or rows.shape[-1] != self.obs_dim:
            raise ValueError(
                f"a policy reads observations (obs_dim,) or (N, obs_dim) with obs_dim = "
                f"{self.obs_dim}, those of {self.env_id}, got {rows.shape}; pass what that env "
                "returns, as it is"
            )
        if not np.isfinite(rows).all():
            raise NonFiniteError(
                "observations must be finite, got NaN or an infinity in float32; find the step "
                "that produced it"
            )
        mean, var, log_std, low, high = (self._buffers[name] for name in _BUFFERS)
        x = torch.tensor(rows, device=mean.device)
        action: Tensor = self._net(((x - mean) / (var + 1e-8).sqrt()).clamp(-10, 10))
        if rng is not None:
            noise = rng.standard_normal(action.shape, np.float32)
            action = action + log_std.exp() * torch.from_numpy(noise).to(mean.device)
        executed: FloatArray = action.clamp(low, high).cpu().numpy()
        return executed

    def state_dict(self) -> dict[str, Any]:
        """Everything that it depends on: `tensors` by name, which share its memory, and `meta`."""
        weights = {f"net.{name}": tensor for name, tensor in self._net.state_dict().items()}
        # Bounds may be infinite, which tensors in a file must not be.
        bounds = {name: self._buffers[name].tolist() for name in ("low", "high")}
        rest = {name: t for name, t in self._buffers.items() if name not in bounds}
        layers = [type(layer).__name__ for layer in self._net]
        return {
            "tensors": {**rest, **weights},
            "meta": {"env_id": self.env_id, "layers": layers, **bounds},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Policy:
        """Make the policy that `state_dict` describes, which shares the memory of its tensors."""
        tensors, meta = state["tensors"], state["meta"]
        # Sizes are those of the tensors: none that is merely claimed takes memory.
        layers = []
        for i, name in enumerate(meta["layers"]):
            size = tuple(tensors[f"net.{i}.weight"].shape[::-1]) if name == "Linear" else ()
            options = {"bias": f"net.{i}.bias" in tensors} if name == "Linear" else {}
            with torch.device("meta"):
                layers.append(_LAYERS[name](*size, **options))
        net = nn.Sequential(*layers)
        weights = {k.removeprefix("net."): t for k, t in tensors.items() if k.startswith("net.")}
        net.load_state_dict(weights, assign=True)
        low, high = (torch.tensor(meta[name], dtype=torch.float32) for name in ("low", "high"))
        rest = {name: tensors[name] for name in ("obs_mean", "obs_var", "log_std")}
        return cls(net, **rest, low=low, high=high, env_id=str(meta["env_id"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file, atomically.

        Raises:
            NonFiniteError: If a weight is NaN or infinite; an older file is untouched.
            StorageError: If the file cannot be written.
        """
        save_tensors(path, kind=_KIND, finite=True, **self.state_dict())


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read the policy of a run, or any file that `Policy.save` wrote.

    The policy is a function: `action = load_policy("runs/NAME")(obs)`.

    Args:
        path: A run's folder, or a file.

    Raises:
        StorageError: If there is no such file, it is damaged, of another version or kind, or a
            weight in it is NaN or infinite.
    """
    path = Path(path)
    if path.is_dir():
        folder, path = path, path / POLICY_FILE
        if not path.exists():
            raise StorageError(
                f"a run keeps its policy in {POLICY_FILE}, but {folder} has none; give the folder "
                "of a run with a checkpoint. One whose agent was edited to have layers other "
                f"than {', '.join(_LAYERS)}, or to act in another way, is played by evaluate.py"
            )
    tensors, meta = load_tensors(path, kind=_KIND)
    with described_by(path):
        check_finite(path, tensors)
        return Policy.from_state({"tensors": tensors, "meta": meta})


def _layers(net: nn.Sequential) -> Iterator[nn.Module]:
    for layer in net:
        if isinstance(layer, nn.Sequential):
            yield from _layers(layer)
        elif type(layer) in _LAYERS.values():
            yield layer
        else:
            raise UnsupportedError(
                f"a policy file names the layers of its network, which may be {', '.join(_LAYERS)},"
                f" got {layer}; use those, or add it to `_LAYERS` here"
            )
