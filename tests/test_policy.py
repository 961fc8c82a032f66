"""A policy read from a file acts as the network that was saved, and says what it cannot read."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from pbcrl import load_policy
from pbcrl.errors import (
    CorruptFileError,
    MismatchError,
    NonFiniteError,
    StorageError,
    UnsupportedError,
)
from pbcrl.export.policy import Policy
from pbcrl.storage import save_tensors


def doubling(net=None, **changes):
    """Two numbers in, their standardised double out; bounds -1 and infinity."""
    if net is None:
        net = nn.Sequential(nn.Sequential(), nn.Linear(2, 2, bias=True))
        with torch.no_grad():
            net[1].weight.copy_(2 * torch.eye(2))
            net[1].bias.zero_()
    options = {
        "obs_mean": torch.tensor([10.0, 0.0]),
        "obs_var": torch.tensor([4.0, 1.0]),
        "log_std": torch.zeros(2),
        "low": torch.tensor([-1.0, -1.0]),
        "high": torch.tensor([torch.inf, 1.5]),
        "env_id": "Walk",
    }
    return Policy(net, **{**options, **changes})


def test_the_mean_action_is_the_net_of_the_standardised_observation_within_the_bounds():
    policy = doubling()
    # (14 - 10) / 2 = 2, doubled; 0.5 doubled
    np.testing.assert_allclose(policy([14, 0.5]), [4.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(policy([0.0, 3.0]), [-1.0, 1.5])  # -10 and 6 are out of bounds
    # ten standard deviations at most
    np.testing.assert_allclose(policy([1e6, 0.0]), [20.0, 0.0])


def test_a_batch_is_its_rows_and_no_rows_give_no_actions():
    policy, rows = doubling(), np.array([[14, 0.5], [11, -0.2], [9, 0.1]])
    actions = policy(rows)
    assert (actions.dtype, actions.shape) == (np.float32, (3, 2))
    np.testing.assert_allclose(actions, [policy(row) for row in rows], rtol=1e-6)
    assert policy(np.zeros((0, 2))).shape == (0, 2)


def test_drawn_actions_have_the_mean_and_the_deviation_of_the_policy():
    policy = doubling(
        log_std=torch.tensor([0.5, 0.25]).log(),
        low=torch.full((2,), -torch.inf),
        high=torch.full((2,), torch.inf),
    )
    drawn = policy(np.tile([14, 0.5], (20_000, 1)), rng=np.random.default_rng(0))
    np.testing.assert_allclose(drawn.mean(axis=0), [4.0, 1.0], atol=0.02)
    np.testing.assert_allclose(drawn.std(axis=0), [0.5, 0.25], rtol=0.02)
    again = policy(np.tile([14, 0.5], (20_000, 1)), rng=np.random.default_rng(0))
    assert (drawn == again).all()


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.Tanh(), nn.SiLU()])
def test_a_policy_read_from_its_file_acts_the_same_to_the_last_bit(tmp_path, activation):
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(2, 16), activation, nn.Linear(16, 16), activation)
    policy = doubling(nn.Sequential(hidden, nn.Linear(16, 2)))
    policy.save(tmp_path / "policy.safetensors")
    obs = np.random.default_rng(0).normal(size=(100, 2))
    for path in (tmp_path, tmp_path / "policy.safetensors"):
        same = load_policy(path)
        assert (same(obs) == policy(obs)).all()
        assert (same.env_id, same.obs_dim, same.act_dim) == ("Walk", 2, 2)


def test_a_layer_without_a_bias_is_read_as_it_was(tmp_path):
    policy = doubling(nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)))
    policy.save(tmp_path / "policy.safetensors")
    obs = np.random.default_rng(0).normal(size=(10, 2))
    assert (load_policy(tmp_path)(obs) == policy(obs)).all()


def test_observations_that_are_not_those_of_the_env_are_refused():
    policy = doubling()
    for obs in (np.zeros(3), np.zeros((4, 3)), 1.0, np.zeros((2, 2, 2))):
        with pytest.raises(ValueError, match="with obs_dim = 2, those of Walk, got"):
            policy(obs)
    for bad in (np.nan, np.inf, 1e300):
        with pytest.raises(NonFiniteError, match="observations must be finite"):
            policy([bad, 0.0])


def test_other_layers_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="Linear, ReLU, SiLU, Tanh, got Dropout"):
        doubling(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    with pytest.raises(ValueError, match="at least one Linear"):
        doubling(nn.Sequential(nn.Tanh()))
    with pytest.raises(ValueError, match=r"log_std must have the shape \(2,\)"):
        doubling(log_std=torch.zeros(3))


def test_weights_that_have_diverged_replace_no_file(tmp_path):
    doubling().save(tmp_path / "policy.safetensors")
    before = (tmp_path / "policy.safetensors").read_bytes()
    with pytest.raises(NonFiniteError, match="'obs_mean' are NaN"):
        doubling(obs_mean=torch.tensor([torch.nan, 0])).save(tmp_path / "policy.safetensors")
    assert (tmp_path / "policy.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"obs_mean": torch.tensor([math.nan, 0])},
            "1 of the 2 entries of 'obs_mean' are NaN",
        ),
        ({"net.0.weight": torch.full((2, 2), math.inf)}, "4 of the 4 entries of 'net.0.weight'"),
        ({"obs_var": torch.tensor([1.0, -1.0])}, r"needs low <= high and obs_var >= 0, .*-1\.0\]"),
        ({"low": [math.nan, -1.0]}, "needs low <= high"),
        ({"low": [-1.0, 9.0]}, "needs low <= high"),
    ],
)
def test_a_file_whose_policy_would_answer_nan_is_refused(tmp_path, change, said):
    path, state = tmp_path / "policy.safetensors", doubling().state_dict()
    for name, value in change.items():
        state["meta" if name == "low" else "tensors"][name] = value
    save_tensors(path, kind="policy", **state)
    with pytest.raises(CorruptFileError, match=said):
        load_policy(path)


def test_what_is_no_policy_is_refused_by_its_path(tmp_path):
    with pytest.raises(StorageError, match=f"but {tmp_path} has none; give the folder"):
        load_policy(tmp_path)
    path = tmp_path / "policy.safetensors"
    save_tensors(path, kind="agent", tensors={}, meta={})
    with pytest.raises(MismatchError, match="holds 'agent', not 'policy'"):
        load_policy(path)
    state = doubling().state_dict()
    state["meta"]["layers"] = ["Linear", "Linear"]  # a layer that has no weights
    save_tensors(path, kind="policy", **state)
    with pytest.raises(CorruptFileError, match="makes no sense"):
        load_policy(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="damaged"):
        load_policy(path)
