"""A cost model as an ONNX file, for a controller that has neither this package nor PyTorch.

The graph holds the weights and the scale of the inputs; the limit and what else a reader needs to
judge a whole episode are in its metadata. Needs the extra `onnx`.
"""

from __future__ import annotations

import copy
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import pbcrl
from pbcrl.cost_model import LearnedCost, require_learned_cost
from pbcrl.storage import write_atomically

OPSET = 18
"""Version of ONNX's operators; every ONNX Runtime since 1.14 has them."""


def export_onnx(model: LearnedCost, path: str | os.PathLike[str], *, env_id: str = "") -> None:
    """Write a cost model as ONNX, atomically.

    Inputs: `obs` (steps, *obs_shape), raw, float32 or, of an image, uint8; `actions` (steps,
    act_dim), as executed, float32. Output: `cost` (steps,), float32, what `step_cost` returns. The
    reader checks its inputs: nothing here refuses NaN.

    Metadata, as text: `learned_limit`, `horizon` (empty for any), `discount`, `env_id`, `pbcrl`. An
    episode is judged safe if the sum of discount^t * cost_t is at most `learned_limit`; it must
    have no more steps than `horizon`.

    Args:
        model: A `CostModel`, also with a custom network that `torch.onnx` takes, or an ensemble.
        path: File to write.
        env_id: Gymnasium id of the env whose steps it reads.

    Raises:
        ImportError: If the extra is missing.
        TypeError: If `model` is no `LearnedCost`.
        StorageError: If the file cannot be written.
    """
    require_learned_cost(model)
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ImportError(
            f"an export to ONNX needs onnx and onnxscript, {' and '.join(missing)} cannot be "
            "imported; pip install 'pbcrl[onnx]'"
        )
    is_image = len(model.obs_shape) == 3
    example = (
        torch.zeros(3, *model.obs_shape, dtype=torch.uint8 if is_image else torch.float32),
        torch.zeros(3, model.act_dim),
    )
    steps = {0: torch.export.Dim("steps")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        program = torch.onnx.export(
            copy.deepcopy(model).cpu().eval(),
            example,
            input_names=["obs", "actions"],
            output_names=["cost"],
            dynamic_shapes={"obs": steps, "actions": steps},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    about = {
        "learned_limit": np.format_float_positional(model.learned_limit, trim="0"),
        "horizon": "" if model.horizon is None else str(model.horizon),
        "discount": str(model.discount),
        "env_id": env_id,
        "pbcrl": pbcrl.__version__,
    }
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value)
    write_atomically(Path(path), proto.SerializeToString())
