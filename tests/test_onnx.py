"""A cost model exported to ONNX gives the same costs to a program without pbcrl and PyTorch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pbcrl import CostModel, CostModelEnsemble, Trajectory

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnxruntime

from pbcrl.export.onnx import OPSET, export_onnx

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


@pytest.mark.parametrize("make", [trained, ensemble])
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


def test_the_opset_in_the_file_is_the_documented_one(tmp_path):
    import onnx

    export_onnx(trained(), tmp_path / "cost.onnx")
    proto = onnx.load(tmp_path / "cost.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert [(one.domain, one.version) for one in proto.opset_import] == [("", OPSET)]


def test_what_is_no_cost_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="must be a CostModel or another LearnedCost"):
        export_onnx(torch.nn.Linear(2, 1), tmp_path / "cost.onnx")
