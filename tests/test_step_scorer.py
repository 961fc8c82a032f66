"""The costs of one step of environments, read by NumPy, against the network itself."""

import copy
import pickle

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pbcrl import CostModel, NonFiniteError
from pbcrl.cost_model import Output

OBS_DIM, ACT_DIM = 5, 2


def trained_model(output: Output = "linear", *, seed: int = 0) -> CostModel:
    """A model whose weights and input scale are all different from those that it starts with."""
    model = CostModel(OBS_DIM, ACT_DIM, hidden_sizes=(8, 6), output=output, horizon=100)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), model.input_mean]:
            tensor.copy_(torch.from_numpy(rng.normal(size=tensor.shape)))
        model.input_scale.copy_(torch.from_numpy(rng.uniform(0.1, 2.0, OBS_DIM + ACT_DIM)))
    return model


def rows(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Observations, some of which are clipped once they are scaled, and actions."""
    rng = np.random.default_rng(1)
    obs = rng.normal(scale=5.0, size=(count, OBS_DIM)).astype(np.float32)
    return obs, rng.uniform(-1, 1, (count, ACT_DIM)).astype(np.float32)


def by_pytorch(model: CostModel, count: int = 64) -> NDArray[np.float32]:
    with torch.no_grad():
        cost: NDArray[np.float32] = model(*map(torch.from_numpy, rows(count))).numpy()
    return cost


@pytest.mark.parametrize("output", ["linear", "tanh", "softplus"])
@pytest.mark.parametrize("count", [0, 1, 64, 20_000])
def test_the_cost_of_few_rows_and_of_many_is_that_of_the_network(output, count):
    model = trained_model(output)
    cost = model.step_cost(*rows(count))
    assert cost.dtype == np.float32
    np.testing.assert_allclose(cost, by_pytorch(model, count), rtol=1e-4, atol=1e-5)


def test_a_gradient_step_changes_the_very_next_cost():
    model = trained_model()
    model.step_cost(*rows(64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(*map(torch.from_numpy, rows(64))).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(model.step_cost(*rows(64)), by_pytorch(model), rtol=1e-4, atol=1e-5)


def assign_state(model: CostModel) -> None:
    model.load_state_dict(trained_model(seed=7).state_dict(), assign=True)


def copy_state(model: CostModel) -> None:
    model.load_state_dict(trained_model(seed=7).state_dict())


def assign_vector(model: CostModel) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 2, model.parameters())


def replace_one_weight(model: CostModel) -> None:
    weight = next(model.parameters())
    weight.data = weight.data + 1


def replace_input_mean(model: CostModel) -> None:
    model.input_mean = model.input_mean + 1


def replace_net(model: CostModel) -> None:
    model.net = trained_model(seed=7).net


def replace_layer(model: CostModel) -> None:
    model.net[0] = trained_model(seed=7).net[0]


@pytest.mark.parametrize(
    "change",
    [
        assign_state,
        copy_state,
        assign_vector,
        replace_one_weight,
        replace_input_mean,
        replace_net,
        replace_layer,
    ],
)
def test_whatever_replaces_a_tensor_changes_the_very_next_cost(change):
    model = trained_model()
    before = model.step_cost(*rows(64))
    change(model)
    after = model.step_cost(*rows(64))
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, by_pytorch(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_reads_its_own_weights_and_leaves_the_original_alone(duplicate):
    model = trained_model()
    before = model.step_cost(*rows(64))
    copied = duplicate(model)
    np.testing.assert_array_equal(copied.step_cost(*rows(64)), before)
    copy_state(copied)
    np.testing.assert_array_equal(model.step_cost(*rows(64)), before)
    np.testing.assert_allclose(
        copied.step_cost(*rows(64)), by_pytorch(copied), rtol=1e-4, atol=1e-5
    )


def test_a_model_in_float64_is_scored_in_float64_and_rounded_once():
    model = trained_model().double()
    cost = model.step_cost(*rows(64))
    assert cost.dtype == np.float32
    with torch.no_grad():
        exact = model(*map(torch.from_numpy, rows(64)))
    assert exact.dtype == torch.float64
    np.testing.assert_array_equal(cost, exact.float().numpy())


@pytest.mark.parametrize("name", ["obs", "actions"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_a_number_that_float32_cannot_hold_is_refused_by_name(name, value):
    obs, actions = (part.astype(np.float64) for part in rows(64))
    {"obs": obs, "actions": actions}[name][3, 1] = value
    with pytest.raises(NonFiniteError, match=f"^{name} of a cost model must be finite"):
        trained_model().step_cost(obs, actions)


def test_scoring_leaves_the_rows_and_the_number_of_threads_as_they_were():
    given = rows(64)
    threads = torch.get_num_threads()
    for model in (trained_model(), trained_model().double()):
        model.step_cost(*given)
    for array, again in zip(given, rows(64), strict=True):
        np.testing.assert_array_equal(array, again)
    assert torch.get_num_threads() == threads
