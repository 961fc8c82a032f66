"""Exact resume: everything that a run's future depends on, on disk, whole or not at all.

A run that was killed at any moment goes on from its newest checkpoint and ends as if nothing had
happened: the same weights and the same metrics, to the last bit, on the same CPU. What lies in the
folder beyond the checkpoint is made again, labels excepted: those are never bought twice.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from pbcrl.errors import CorruptFileError, MismatchError, NonFiniteError, StorageError
from pbcrl.storage import load_tensors, save_tensors
from pbcrl_script_utils.resume import OF_LENGTH, SHOWN, is_finished, note_extension
from pbcrl_script_utils.run import Run

_NEWEST, _BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"
_MAY_DIFFER = {"resume", "runs_dir", "run_name", *SHOWN}  # a run's folder may have been moved


class Checkpoint:
    """The state of all parts of a run, in one file; the one before is kept in case of damage.

    Args:
        run: Whose folder it lies in; it is a part itself.
        args: The script's arguments; those of the run that a checkpoint is loaded into must be the
            same.
        keep: Writes what others read of the run, such as weights; also called if an error ends it.
    """

    def __init__(self, run: Run, args: Any, *, keep: Callable[[], None]) -> None:
        self._folder, self._run, self._keep = run.folder, run, keep
        self._args = {
            name: value
            for name, value in dataclasses.asdict(args).items()
            if name not in _MAY_DIFFER
        }
        self._parts: dict[str, Any] = {"run": run}
        self._is_damaged = False  # the newest one, since it was read
        run.on_error(self._keep_sound)

    def add(self, **parts: Any) -> None:
        """Save and load these as well.

        Args:
            parts: Whatever has state, by name: objects with `state_dict` and `load_state_dict`,
                generators of NumPy and PyTorch, dataclasses of numbers and arrays. One that is
                `None` has no state. Envs that offer no state stay as they are (`has_state`).
        """
        self._parts |= {name: part for name, part in parts.items() if part is not None}

    def after(self, iteration: int) -> None:
        """Refuse networks that have diverged; save and keep all, if it is time to.

        Raises:
            NonFiniteError, StorageError: As `save`.
        """
        self._check_networks()
        if self._run.is_checkpoint(iteration):
            self._keep()
            self.save()

    def _keep_sound(self) -> None:
        self._check_networks()  # files keep the weights from before
        self._keep()

    def _check_networks(self) -> None:
        check_weights(**{n: p for n, p in self._parts.items() if isinstance(p, nn.Module)})

    def save(self) -> None:
        """Write a checkpoint beside the one before.

        Raises:
            NonFiniteError: If a network or an optimizer holds NaN or an infinity; nothing is
                written then.
            StorageError: If it cannot be written.
        """
        self._check_networks()
        state = {name: _state_of(part) for name, part in self._parts.items()}
        tensors: dict[str, Tensor] = {}
        tree = _pack({"args": self._args, "parts": state}, "state", tensors)
        newest = self._folder / _NEWEST
        if newest.exists() and not self._is_damaged:  # or the one before is all that there is
            os.replace(newest, self._folder / _BEFORE)
        save_tensors(newest, kind="run", tensors=tensors, meta={"tree": tree})
        self._is_damaged = False

    def load(self) -> bool:
        """Put every part where the newest checkpoint has it; False if there is none yet.

        Raises:
            CorruptFileError: If there are checkpoints, and none is whole and finite.
            MismatchError: If it was written with other arguments, or has other parts.
            StorageError: If there is none, and a finished run is to be extended.
        """
        state = self._newest_state()
        if state is None and self._was_finished():
            raise StorageError(
                f"a run is extended from its last checkpoint, but {self._folder} has no {_NEWEST}; "
                "restore it from a copy, or start a new run"
            )
        if state is None:
            return False
        now = _unpack(_pack(self._args, "args", {}), {})
        is_extended = now.get("total_timesteps", 0) > state["args"].get("total_timesteps", 0)
        kept = set(now) - OF_LENGTH if is_extended else set(now)
        if differing := sorted(name for name in kept if state["args"].get(name) != now[name]):
            raise MismatchError(
                f"a run goes on with the arguments that it began with, but {', '.join(differing)} "
                f"in args.json of {self._folder} differ from those in its checkpoint: "
                f"{[now[name] for name in differing]} and "
                f"{[state['args'].get(name) for name in differing]}; restore that file"
            )
        if set(state["parts"]) != set(self._parts):
            raise MismatchError(
                f"the checkpoint in {self._folder} has the parts {sorted(state['parts'])}, the "
                f"script {sorted(self._parts)}; use the script that made the run"
            )
        for name, part in self._parts.items():
            _load_into(part, state["parts"][name])
        if is_extended:
            changed = {name: self._args[name] for name in OF_LENGTH & set(self._args)}
            note_extension(self._folder, changed)
        return True

    def _was_finished(self) -> bool:
        return is_finished(self._folder) or (self._folder / "summary_before.json").exists()

    def _newest_state(self) -> dict[str, Any] | None:
        damaged = None
        for name in (_NEWEST, _BEFORE):
            if not (self._folder / name).exists():
                continue
            try:
                tensors, meta = load_tensors(self._folder / name, kind="run")
                state: dict[str, Any] = _unpack(meta["tree"], tensors)
                for part in (n for n, p in self._parts.items() if isinstance(p, nn.Module)):
                    _check_finite(part, state["parts"][part])
            except (CorruptFileError, NonFiniteError) as error:
                print(f"warning: {self._folder / name}: {error}; trying the one before", flush=True)
                damaged = error
                self._is_damaged |= name == _NEWEST
                continue
            return state
        if damaged is not None:
            raise damaged
        return None


def check_weights(**modules: nn.Module) -> None:
    """Refuse networks that have diverged, before they are saved or learned from any further.

    Raises:
        NonFiniteError: If a weight or a buffer holds NaN or an infinity.
    """
    for name, module in modules.items():
        _check_finite(name, module.state_dict())


def _check_finite(name: str, state: Mapping[str, Tensor]) -> None:
    for key, tensor in state.items():
        if not tensor.isfinite().all():
            raise NonFiniteError(
                f"weights must be finite, but {key} of {name} holds NaN or an infinity; files keep "
                "the weights from before: look for huge rewards, costs or observations, or lower "
                "the learning rate"
            )


def has_state(envs: VectorEnv[Any, Any, Any]) -> bool:
    """Whether a checkpoint can put the envs back where they were, in mid-episode."""
    return hasattr(envs.unwrapped, "state_dict")


def _state_of(part: Any) -> Any:
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, VectorEnv) and not hasattr(part, "state_dict"):
        return None
    if not hasattr(part, "state_dict"):  # a dataclass
        return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return part.state_dict()


def _load_into(part: Any, state: Any) -> None:
    if isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    elif state is not None and not hasattr(part, "load_state_dict"):
        for name, value in state.items():
            setattr(part, name, value)
    elif state is not None:
        part.load_state_dict(state)


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of a nested state; tensors and arrays go to `tensors` and leave their names."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        return {"array": path}
    if isinstance(value, Mapping):
        # As pairs: the keys of an optimizer's state are numbers.
        return {"dict": [[k, _pack(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {path}, which is {type(value).__name__}")


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "dict":
        return {k: _unpack(v, tensors) for k, v in value}
    return [_unpack(v, tensors) for v in value]
