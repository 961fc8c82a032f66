"""A cost model as an ONNX file, for a controller that has neither this package nor PyTorch.

The graph holds the weights and the scale of the inputs, or the trees; the limit and what else a
reader needs to judge a whole episode are in its metadata. Needs the extra `onnx`.
"""

from __future__ import annotations

import copy
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pbcrl
from pbcrl.cost_model import LearnedCost, require_learned_cost
from pbcrl.storage import write_atomically
from pbcrl.trees import UNUSED, TreeCost, Trees

OPSET = 18
"""Version of ONNX's operators; every ONNX Runtime since 1.14 has them."""
TREES_OPSET = 3
"""Version of the operators of its domain ai.onnx.ml, which holds the trees; likewise."""
_FILE_VERSION = 8  # the newest that ONNX Runtime 1.14 reads


def export_onnx(
    model: LearnedCost,
    path: str | os.PathLike[str],
    *,
    env_id: str = "",
    image: bool | None = None,
) -> None:
    """Write a cost model as ONNX, atomically.

    Inputs: `obs` (steps, *obs_shape), raw, float32 or, of an image, uint8; `actions` (steps,
    act_dim), as executed, float32. Output: `cost` (steps,), float32, what `step_cost` returns; NaN
    where an input is. The reader checks its inputs: nothing here refuses them.

    Metadata, as text: `learned_limit`, `horizon` (empty for any), `discount`, `env_id`, `pbcrl`. An
    episode is judged safe if the sum of discount^t * cost_t is at most `learned_limit`; it must
    have no more steps than `horizon`.

    Args:
        model: A `TreeCost`, which does not need onnxscript; a `CostModel`, also with a custom
            network that `torch.onnx` takes; or an ensemble.
        path: File to write.
        env_id: Gymnasium id of the env whose steps it reads.
        image: Whether observations are images of bytes; default: if they have three axes, as those
            of every network but your own that reads floats in that shape.

    Raises:
        ImportError: If the extra is missing.
        TypeError: If `model` is no `LearnedCost`.
        StorageError: If the file cannot be written.
    """
    require_learned_cost(model)
    needed = ("onnx",) if isinstance(model, TreeCost) else ("onnx", "onnxscript")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ImportError(
            f"an export to ONNX needs {' and '.join(needed)}, {' and '.join(missing)} cannot be "
            "imported; pip install 'pbcrl[onnx]'"
        )
    proto = _written(model) if isinstance(model, TreeCost) else _traced(model, image)
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


def _traced(model: LearnedCost, image: bool | None) -> Any:
    """The graph of any PyTorch module, as PyTorch writes it."""
    is_image = len(model.obs_shape) == 3 if image is None else image
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
    return program.model_proto


def _written(model: TreeCost) -> Any:
    """The graph of trees, node by node: ONNX has an operator for them, which PyTorch never uses."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants = [], []

    def constant(name: str, value: Any, dtype: Any) -> str:
        constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(op: str, inputs: list[str], output: str, **options: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], **options))
        return output

    axis = constant("axis", [1], np.int64)
    columns = ["obs", "actions"]
    for name, (start, stop) in model.groups.items():
        bounds = [
            constant(f"start {name}", [start], np.int64),
            constant(f"stop {name}", [stop], np.int64),
        ]
        group = add("Slice", ["obs", *bounds, axis], f"group {name}")
        columns.append(add("ReduceMax", [group, axis], f"max {name}", keepdims=1))
        columns.append(add("ReduceMin", [group, axis], f"min {name}", keepdims=1))
        wide = add("Cast", [group], f"group64 {name}", to=TensorProto.DOUBLE)
        mean = add("ReduceMean", [wide, axis], f"mean64 {name}", keepdims=1)
        columns.append(add("Cast", [mean], f"mean {name}", to=TensorProto.FLOAT))
    add("Concat", columns, "columns", axis=1)
    trees = _ensemble(model.trees)
    add("TreeEnsembleRegressor", ["columns"], "sums", domain="ai.onnx.ml", **trees)
    scale = constant("output_scale", model.output_scale, np.float32)
    cost = add("Mul", ["sums", scale], "costs")  # (steps, M)
    if model.num_members > 1:
        cost = add("ReduceMean", ["costs", axis], "mean", keepdims=1)
        if model.pessimism != 0:
            add("Sub", ["costs", "mean"], "deviations")
            add("ReduceL2", ["deviations", axis], "norm", keepdims=1)  # √M standard deviations
            price = constant("price", model.pessimism * model.num_members**-0.5, np.float32)
            cost = add("Add", ["mean", add("Mul", ["norm", price], "margin")], "pessimistic")
    # NaN is above no threshold, so that trees would take it for a number.
    found = add("Cast", [add("IsNaN", ["columns"], "unknown")], "found", to=TensorProto.FLOAT)
    one = add("ReduceMax", [found, axis], "one", keepdims=1)
    is_unknown = add("Cast", [one], "is_unknown", to=TensorProto.BOOL)
    unknown = constant("nan", [np.nan], np.float32)
    add("Squeeze", [add("Where", [is_unknown, unknown, cost], "known"), axis], "cost")

    def rows(name: str, *sizes: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["steps", *sizes])

    inputs = [rows("obs", model.obs_dim), rows("actions", model.act_dim)]
    graph = helper.make_graph(nodes, "cost_model", inputs, [rows("cost")], constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", TREES_OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_FILE_VERSION)


def _ensemble(trees: Trees) -> dict[str, Any]:
    """The attributes of a TreeEnsembleRegressor with one target per member.

    Node i keeps its number, and leaf k has the k-th after those.
    """
    nodes: list[tuple[Any, ...]] = []
    targets: list[tuple[Any, ...]] = []
    tree_id = 0
    for member, arrays in enumerate(zip(*trees, strict=True)):
        grown = list(zip(*(array.tolist() for array in arrays), strict=True))
        # There must be a tree for each target, if only one that adds nothing.
        for feature, threshold, left, right, value in grown or [([], [], [], [], [0.0])]:
            size = sum(child != UNUSED for child in left)
            for i in range(size):
                sides = [c if c >= 0 else size - 1 - c for c in (left[i], right[i])]
                nodes.append((tree_id, i, "BRANCH_LEQ", feature[i], threshold[i], *sides))
            for k in range(size + 1):
                nodes.append((tree_id, size + k, "LEAF", 0, 0.0, 0, 0))
                targets.append((tree_id, size + k, member, value[k]))
            tree_id += 1
    of_nodes = ["treeids", "nodeids", "modes", "featureids", "values", "truenodeids"]
    columns = zip([*of_nodes, "falsenodeids"], *nodes, strict=True)
    weights = zip(["treeids", "nodeids", "ids", "weights"], *targets, strict=True)
    return {
        "n_targets": len(trees.feature),
        **{f"nodes_{name}": values for name, *values in columns},
        **{f"target_{name}": values for name, *values in weights},
    }
