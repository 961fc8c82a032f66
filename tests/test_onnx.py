"""A cost model exported to ONNX gives the same costs to a program without pbcrl and PyTorch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pbcrl import CostModel, CostModelEnsemble, Trajectory, TreeCost
from pbcrl.trees import Trees

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnxruntime

from pbcrl.export.onnx import OPSET, TREES_OPSET, export_onnx

SPACES = Box(-np.inf, np.inf, (5,)), Box(-1, 1, (2,))


def steps(count, *, seed=0):
    rng = np.random.default_rng(seed)
    obs = rng.normal([0, 10, -5, 0, 1], [1, 3, 0.1, 5, 2], (count, 5))
    return obs.astype(np.float32), rng.uniform(-1, 1, (count, 2)).astype(np.float32)


def trained(**options):
    """Random weights, and the input scale of data."""
    model = CostModel(*SPACES, horizon=50, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.fit_input_scale([Trajectory(*steps(500))])
    return model


def ensemble():
    members = [trained(hidden_sizes=(16,)) for _ in range(3)]
    return CostModelEnsemble(members, pessimism=0.5)


def trees(*, obs=None, spaces=SPACES, num_trees=50, **options):
    """Random trees of four shapes, whose thresholds are inputs of random steps."""
    model = TreeCost(*spaces, horizon=50, **options)
    rng = np.random.default_rng(0)
    columns = model.columns(*map(torch.from_numpy, steps(500) if obs is None else obs)).numpy()
    grid = model.num_members, num_trees
    feature = rng.integers(columns.shape[1], size=(*grid, 7))
    threshold = columns[rng.integers(len(columns), size=feature.shape), feature]
    children = np.full((*grid, 7, 2), -128)
    shape = rng.integers(len(CHILDREN), size=grid)
    for place, kind in np.ndenumerate(shape):
        children[place][: len(CHILDREN[kind])] = CHILDREN[kind]
    model.set_trees(
        Trees(
            torch.tensor(feature, dtype=torch.int32),
            torch.from_numpy(threshold),
            *torch.tensor(children, dtype=torch.int8).unbind(-1),
            torch.tensor(rng.normal(0, 0.2, (*grid, 8)), dtype=torch.float32),
        ),
        limit=torch.tensor(rng.normal(size=model.num_members), dtype=torch.float32),
    )
    return model


CHILDREN = [
    np.empty((0, 2)),  # a tree without nodes is its leaf 0, which is -1
    [(-2, -1)],
    [(1, -1), (-2, 2), (-3, -4)],
    [(1, 2), (3, 4), (5, 6), (-1, -2), (-3, -4), (-5, -6), (-7, -8)],
]
"""Of each node, the left and the right one."""


def members():
    return trees(num_members=3, pessimism=0.7)


@pytest.mark.parametrize("make", [trained, ensemble, trees, members])
def test_the_exported_costs_are_ours_to_1e_6_on_10_000_steps(tmp_path, make):
    torch.manual_seed(0)
    model = make()
    export_onnx(model, tmp_path / "cost.onnx", env_id="Walk")
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    obs, actions = steps(10_000, seed=1)
    (cost,) = session.run(None, {"obs": obs, "actions": actions})
    ours = model.step_cost(obs, actions)
    assert ours.std() > 0.01
    np.testing.assert_allclose(cost, ours, rtol=0, atol=1e-6)
    about = session.get_modelmeta().custom_metadata_map
    assert float(about["learned_limit"]) == model.learned_limit
    assert (about["horizon"], about["discount"], about["env_id"]) == ("50", "1.0", "Walk")


@pytest.mark.parametrize("make", [trained, ensemble, trees, members])
def test_a_step_with_an_unknown_input_has_an_unknown_cost_here_and_there(tmp_path, make):
    model = make()
    export_onnx(model, tmp_path / "cost.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    obs, actions = steps(9)
    known = model(torch.from_numpy(obs), torch.from_numpy(actions))
    obs[3, -1] = actions[5, 0] = np.nan
    ours = model(torch.from_numpy(obs), torch.from_numpy(actions))
    (cost,) = session.run(None, {"obs": obs, "actions": actions})
    assert np.isnan(cost).nonzero()[0].tolist() == ours.isnan().nonzero()[:, 0].tolist() == [3, 5]
    rest = ~np.isnan(cost)
    np.testing.assert_allclose(cost[rest], known[rest].detach(), rtol=0, atol=1e-6)


def test_an_image_model_is_exported_with_bytes_as_input(tmp_path):
    torch.manual_seed(0)
    model = CostModel(Box(0, 255, (17, 12, 3), np.uint8), Discrete(3))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    export_onnx(model, tmp_path / "cost.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    obs = np.random.default_rng(0).integers(0, 256, (40, 17, 12, 3), np.uint8)
    actions = np.eye(3, dtype=np.float32)[np.arange(40) % 3]
    (cost,) = session.run(None, {"obs": obs, "actions": actions})
    # Not to 1e-6: convolutions are summed in another order.
    np.testing.assert_allclose(cost, model.step_cost(obs, actions), rtol=0, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["horizon"] == ""


class Sum(torch.nn.Module):
    def forward(self, obs, actions):
        return obs.flatten(-3).sum(-1) + actions.sum(-1)


def test_floats_of_three_axes_are_read_as_such_if_they_are_said_to_be_no_image(tmp_path):
    model = CostModel(Box(-1, 1, (2, 3, 4)), Box(-1, 1, (1,)), net=Sum())
    export_onnx(model, tmp_path / "cost.onnx", image=False)
    obs = np.random.default_rng(0).uniform(-1, 1, (5, 2, 3, 4)).astype(np.float32)
    actions = np.zeros((5, 1), np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    (costs,) = session.run(None, {"obs": obs, "actions": actions})
    np.testing.assert_allclose(costs, model.step_cost(obs, actions), rtol=1e-5)


def test_a_controller_judges_an_episode_without_pbcrl_and_pytorch(tmp_path):
    torch.manual_seed(0)
    model = trained()
    export_onnx(model, tmp_path / "cost.onnx")
    obs, actions = steps(50)
    np.savez(tmp_path / "episode.npz", obs=obs, actions=actions)
    code = """
import json, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession("cost.onnx")
limit = float(session.get_modelmeta().custom_metadata_map["learned_limit"])
(cost,) = session.run(None, dict(np.load("episode.npz")))
assert not {"pbcrl", "torch"} & set(sys.modules)
print(json.dumps([float(cost.sum(dtype=np.float64)), limit]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    cost, limit = json.loads(run.stdout)
    assert cost == pytest.approx(model.score([Trajectory(obs, actions)])[0], rel=1e-6)
    assert limit == model.learned_limit


@pytest.mark.parametrize("options", [{}, {"num_members": 3}, {"num_members": 2, "pessimism": -1}])
def test_inputs_that_lie_on_a_threshold_go_left_in_the_file_too(tmp_path, options):
    """Four numbers are a group: their means are rounded alike, or some would pass a threshold."""
    spaces = Box(-9, 9, (8,)), Box(-1, 1, (2,))
    names = [*(f"lidar[{i}]" for i in range(6)), "speed", "heading", "turn", "push"]
    rng = np.random.default_rng(0)
    rows = rng.random((5000, 8), np.float32), rng.random((5000, 2), np.float32)
    few = tuple(x[:100] for x in rows)
    model = trees(obs=few, spaces=spaces, names=names, num_trees=200, **options)
    assert model.read_names[10:] == ("max lidar", "min lidar", "mean lidar")
    export_onnx(model, tmp_path / "cost.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    for obs, actions in (few, rows, tuple(x[:1] for x in rows)):
        (cost,) = session.run(None, {"obs": obs, "actions": actions})
        np.testing.assert_allclose(cost, model.step_cost(obs, actions), rtol=0, atol=1e-6)


def test_a_step_at_the_threshold_costs_the_left_leaf_and_one_just_above_the_right(tmp_path):
    model = TreeCost(*SPACES, output_scale=1.0)
    at = np.float32(0.1)
    children = torch.full((2, 1, 1, 7), -128, dtype=torch.int8)
    children[:, 0, 0, 0] = torch.tensor([-1, -2])
    threshold = torch.full((1, 1, 7), float(at))
    feature, value = torch.full((1, 1, 7), 6, dtype=torch.int32), torch.arange(8.0)[None, None]
    model.set_trees(Trees(feature, threshold, *children, value))
    export_onnx(model, tmp_path / "cost.onnx")
    actions = np.zeros((3, 2), np.float32)
    actions[:, 1] = np.nextafter(at, np.float32(-1)), at, np.nextafter(at, np.float32(1))
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    (cost,) = session.run(None, {"obs": np.zeros((3, 5), np.float32), "actions": actions})
    assert cost.tolist() == [0, 0, 1]
    assert session.get_modelmeta().custom_metadata_map["horizon"] == ""


@pytest.mark.parametrize("options", [{}, {"num_members": 2, "pessimism": 1.0}])
@pytest.mark.parametrize("num_trees", [0, 5])
def test_no_steps_have_no_costs_and_without_trees_every_step_costs_0(tmp_path, options, num_trees):
    export_onnx(trees(num_trees=num_trees, **options), tmp_path / "cost.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "cost.onnx")
    for count in (0, 4):
        obs, actions = steps(count)
        (cost,) = session.run(None, {"obs": obs, "actions": actions})
        assert cost.shape == (count,)
        assert (cost == 0).all() == (num_trees == 0 or count == 0)


def test_trees_are_exported_where_onnxscript_is_missing_and_networks_are_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    export_onnx(trees(), tmp_path / "cost.onnx")
    with pytest.raises(ImportError, match="needs onnx and onnxscript, onnxscript cannot be"):
        export_onnx(trained(), tmp_path / "cost.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"needs onnx, onnx cannot be imported; .*pbcrl\[onnx\]"):
        export_onnx(trees(), tmp_path / "cost.onnx")


TREE_OPSETS = [("", OPSET), ("ai.onnx.ml", TREES_OPSET)]


@pytest.mark.parametrize(
    ("make", "opsets"), [(trained, [("", OPSET)]), (trees, TREE_OPSETS), (members, TREE_OPSETS)]
)
def test_the_opsets_in_the_file_are_the_documented_ones(tmp_path, make, opsets):
    import onnx

    export_onnx(make(), tmp_path / "cost.onnx")
    proto = onnx.load(tmp_path / "cost.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert [(one.domain, one.version) for one in proto.opset_import] == opsets


def test_what_is_no_cost_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="must be a CostModel or another LearnedCost"):
        export_onnx(torch.nn.Linear(2, 1), tmp_path / "cost.onnx")
