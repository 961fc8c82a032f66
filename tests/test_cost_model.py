import itertools
import math
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from pbcrl.cost_model import MLP, CostModel
from pbcrl.ensemble import load_cost_model
from pbcrl.errors import (
    CorruptFileError,
    MismatchError,
    NonFiniteError,
    StorageError,
)
from pbcrl.storage import save_tensors
from pbcrl.trajectory import Trajectory, pad, padded_chunks

from .every_space import boxes


def episodes(*lengths, obs_dim=3, act_dim=2, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Trajectory(rng.normal(size=(length, obs_dim)), rng.normal(size=(length, act_dim)))
        for length in lengths
    ]


def random_model(obs_dim=3, act_dim=2, **options):
    """A model whose last layer is no longer zero, with costs of about 1 per step."""
    torch.manual_seed(0)
    model = CostModel(*boxes(obs_dim, act_dim), **{"output_scale": 1.0, **options})
    torch.nn.init.normal_(model.net[-1].weight)
    torch.nn.init.constant_(model.net[-1].bias, 0.3)
    return model


def linear_model(weights, *, bias=0.0, obs_dim=1, **options):
    """c(s, a) = weights · (s, a) + bias."""
    options = {"output_scale": 1.0, **options}
    model = CostModel(*boxes(obs_dim, len(weights) - obs_dim), hidden_sizes=(), **options)
    model.load_state_dict(
        {
            **model.state_dict(),
            "net.0.weight": torch.tensor([weights]),
            "net.0.bias": torch.tensor([bias]),
        }
    )
    return model


# -- Costs -----------------------------------------------------------------------------------


def test_an_untrained_model_puts_every_episode_exactly_on_the_limit():
    far = Trajectory(np.full((1000, 3), 1e30), np.full((1000, 2), -1e30))
    assert CostModel(*boxes(3, 2)).score([*episodes(1, 10, 1000), far]).tolist() == [0, 0, 0, 0]


def test_an_untrained_model_can_learn_although_its_last_layer_is_zero():
    model = CostModel(*boxes(3, 2))
    obs, actions, _ = pad(episodes(10))
    model.trajectory_cost(obs, actions).sum().backward()
    assert model.net[-1].weight.grad.abs().max() > 0


def test_a_linear_model_costs_what_its_weights_say():
    """c = 2 s - 3 a + 0.5: steps cost 2.5 and -7.5, the episode -5."""
    model = linear_model([2.0, -3.0], bias=0.5)
    episode = Trajectory(np.array([[1.0], [-1.0]]), np.array([[0.0], [2.0]]))
    assert model.step_cost(episode.obs, episode.actions).tolist() == [2.5, -7.5]
    assert model.score([episode]).tolist() == [-5.0]


def test_a_hidden_layer_is_a_relu():
    """c = 3 relu(2 s - a + 1) - 1: at (1, 0) 8, at (0, 5), where the unit is off, -1."""
    model = CostModel(*boxes(1, 1), hidden_sizes=(1,), output_scale=1.0)
    weights = {"net.0.weight": [[2.0, -1.0]], "net.0.bias": [1.0]}
    weights |= {"net.2.weight": [[3.0]], "net.2.bias": [-1.0]}
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    model.load_state_dict({**model.state_dict(), **tensors})
    assert model.step_cost(np.array([[1.0], [0.0]]), np.array([[0.0], [5.0]])).tolist() == [8, -1]


def test_the_output_scale_multiplies_every_step_cost():
    model = linear_model([2.0, -3.0], bias=0.5, output_scale=0.25)
    assert model.step_cost(np.array([[1.0]]), np.array([[0.0]])).tolist() == [0.625]


def test_the_paper_s_net_has_two_hidden_layers_of_64_and_an_output():
    shapes = [tuple(p.shape) for p in CostModel(*boxes(10, 2)).parameters()]
    assert shapes == [(64, 12), (64,), (64, 64), (64,), (1, 64), (1,)]


def test_discounting_weights_the_first_step_fully_and_later_ones_less():
    """c = 1 at discount 1/2: 1 + 1/2 + 1/4 in three steps, 1 in one step."""
    three, one = episodes(3, 1, obs_dim=1, act_dim=1)
    assert linear_model([0.0, 0.0], bias=1.0, discount=0.5).score([three, one]).tolist() == [
        1.75,
        1,
    ]
    assert linear_model([0.0, 0.0], bias=1.0).score([three, one]).tolist() == [3, 1]


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_cost_of_an_episode_is_the_discounted_sum_of_its_step_costs(discount):
    model, (episode,) = random_model(discount=discount), episodes(50)
    step_costs = model.step_cost(episode.obs, episode.actions).astype(np.float64)
    assert step_costs.shape == (50,)
    expected = (step_costs * discount ** np.arange(50)).sum()
    assert model.score([episode])[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("filler", [0.0, 1e6, math.nan])
def test_what_stands_in_the_padding_has_no_influence(filler, discount):
    model = random_model(discount=discount)
    (episode,) = episodes(7)
    obs, actions, mask = pad([episode, *episodes(20, seed=1)])
    obs[0, 7:], actions[0, 7:] = filler, filler
    padded = model.trajectory_cost(obs, actions, mask)[0].item()
    alone = model.trajectory_cost(*pad([episode])[:2])[0].item()
    assert padded == pytest.approx(alone, rel=1e-6)


def test_scores_depend_neither_on_the_company_nor_on_the_order_of_an_episode():
    """40 episodes of up to 1,000 steps are scored in more than one chunk."""
    model, rng = random_model(), np.random.default_rng(0)
    given = episodes(*rng.integers(1, 1000, size=40))
    assert len(list(padded_chunks(given))) > 1
    scores = model.score(given)
    assert scores.dtype == np.float64
    order = rng.permutation(40)
    np.testing.assert_allclose(model.score([given[i] for i in order]), scores[order], rtol=1e-5)
    alone = np.concatenate([model.score([episode]) for episode in given])
    np.testing.assert_allclose(alone, scores, rtol=1e-5)


def test_no_episodes_have_no_scores():
    scores = random_model().score([])
    assert scores.shape == (0,)
    assert scores.dtype == np.float64


def test_step_costs_of_a_rollout_keep_its_leading_axes():
    model = random_model()
    obs, actions = torch.randn(5, 4, 3), torch.randn(5, 4, 2)  # (T, N, ...)
    costs = model(obs, actions)
    assert costs.shape == (5, 4)
    torch.testing.assert_close(costs[2, 3], model(obs[2, 3], actions[2, 3]))


def test_steps_read_from_a_read_only_file_are_scored_without_a_warning(tmp_path):
    (episode,) = episodes(4)
    np.save(tmp_path / "obs.npy", episode.obs)
    on_disk = np.load(tmp_path / "obs.npy", mmap_mode="r")
    torch.set_warn_always(True)  # else PyTorch warns in the first test that asks only
    try:
        costs = random_model().step_cost(on_disk, episode.actions)
    finally:
        torch.set_warn_always(False)
    np.testing.assert_array_equal(costs, random_model().step_cost(episode.obs, episode.actions))


def test_scoring_leaves_no_gradients_behind():
    model = random_model()
    model.score(episodes(4))
    model.step_cost(np.zeros((1, 3)), np.zeros((1, 2)))
    assert all(parameter.grad is None for parameter in model.parameters())


# -- Limit -----------------------------------------------------------------------------------


def test_member_scores_of_a_single_model_are_its_costs_whose_limit_is_0():
    model, given = random_model(horizon=50), episodes(50, 20, 3)
    assert model.learned_limit == 0
    np.testing.assert_array_equal(model.member_scores(given), model.score(given)[None])
    assert model.member_scores([]).shape == (1, 0)


# -- Horizon ---------------------------------------------------------------------------------


def test_a_limit_learned_on_segments_does_not_judge_longer_episodes():
    model = CostModel(*boxes(3, 2), horizon=50)
    assert model.score(episodes(50, 10)).tolist() == [0, 0]
    message = (
        r"as many steps as it was learned on: 50, got a trajectory of 1000; .* prorate\(1000\)"
    )
    with pytest.raises(ValueError, match=message):
        model.score(episodes(50, 1000))
    with pytest.raises(ValueError, match="50, but episodes here have a time limit of 1000; train"):
        model.check_horizon(1000)
    model.check_horizon(50)


def test_without_a_horizon_every_length_is_judged():
    CostModel(*boxes(3, 2)).check_horizon(1000)
    CostModel(*boxes(3, 2)).check_length(10**6)


def test_a_prorated_model_judges_episodes_of_the_new_length():
    model = random_model(horizon=50)
    costs = model.score(episodes(50))
    model.prorate(1000)
    assert model.horizon == 1000
    assert model.score(episodes(50)) == costs
    model.score(episodes(1000))


def test_a_limit_that_holds_for_any_length_is_not_prorated():
    with pytest.raises(ValueError, match="from one number of steps to another, got None and 10"):
        CostModel(*boxes(1, 1), horizon=None).prorate(10)


@pytest.mark.parametrize("horizon", [0, -5])
def test_a_horizon_of_no_steps_is_refused(horizon):
    message = rf"horizon must lie in \[1, inf\), got {horizon}"
    with pytest.raises(ValueError, match=message):
        CostModel(*boxes(1, 1), horizon=horizon)
    with pytest.raises(ValueError, match=message):
        CostModel(*boxes(1, 1), horizon=10).prorate(horizon)


# -- Images ----------------------------------------------------------------------------------


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def image_model(obs_shape=(9, 12, 3), act_dim=2, **options):
    torch.manual_seed(0)
    model = CostModel(*boxes(obs_shape, act_dim), output_scale=1.0, **options)
    torch.nn.init.normal_(model.net.mlp[-1].weight)
    return model


def test_images_are_scored_step_by_step_whatever_the_leading_axes():
    model = image_model()
    obs, actions = torch.from_numpy(pixels(5, 4, 9, 12, 3)), torch.randn(5, 4, 2)
    costs = model(obs, actions)
    assert costs.shape == (5, 4)
    torch.testing.assert_close(costs[2, 3], model(obs[2, 3], actions[2, 3]))
    found = model.step_cost(obs[0].numpy(), actions[0].numpy())
    np.testing.assert_allclose(found, costs[0].detach(), rtol=1e-5)


def test_the_channels_of_an_image_may_come_first_or_last():
    last, first = image_model((9, 12, 3)), image_model((3, 9, 12))
    obs, actions = torch.from_numpy(pixels(6, 9, 12, 3)), torch.randn(6, 2)
    torch.testing.assert_close(last(obs, actions), first(obs.movedim(-1, 1), actions))


def test_pixels_are_read_as_fractions_of_255():
    seen = []

    class Look(torch.nn.Module):
        def forward(self, obs, actions):
            seen.append(obs)
            return actions.sum(dim=-1)

    model = CostModel(*boxes((2, 2, 1), 1), net=Look())
    model(torch.tensor([0, 51, 102, 255], dtype=torch.uint8).view(1, 2, 2, 1), torch.zeros(1, 1))
    assert seen[0].flatten().tolist() == pytest.approx([0, 0.2, 0.4, 1])


def test_an_untrained_image_model_lies_on_the_limit_and_can_learn():
    model = CostModel(*boxes((84, 84, 4), 1))
    costs = model(torch.from_numpy(pixels(3, 84, 84, 4)), torch.zeros(3, 1))
    assert costs.tolist() == [0, 0, 0]
    costs.sum().backward()
    assert model.net.mlp[-1].weight.grad.abs().max() > 0


def test_pixels_that_are_no_bytes_are_refused():
    with pytest.raises(TypeError, match="images are uint8, read as fractions of 255, got torch"):
        image_model()(torch.rand(1, 9, 12, 3), torch.zeros(1, 2))


def test_an_image_of_another_size_is_refused():
    message = r"\(obs_shape, act_dim\) = \(\(9, 12, 3\), 2\), got \(\(12, 9, 3\), 2\)"
    with pytest.raises(ValueError, match=message):
        image_model().step_cost(pixels(1, 12, 9, 3), np.zeros((1, 2)))


def test_a_saved_image_model_comes_back_with_equal_costs(tmp_path):
    model, obs, actions = image_model(), pixels(4, 9, 12, 3), np.ones((4, 2), np.float32)
    model.save(tmp_path / "model.safetensors")
    loaded, _ = CostModel.load(tmp_path / "model.safetensors")
    assert loaded.obs_shape == (9, 12, 3)
    np.testing.assert_array_equal(loaded.step_cost(obs, actions), model.step_cost(obs, actions))


# -- Spaces ----------------------------------------------------------------------------------

BYTES = spaces.Box(0, 255, (64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "sizes"),
    [
        (spaces.Box(-1, 1, (7,)), spaces.Box(-1, 1, (2,)), ((7,), 2)),
        (spaces.Box(-1, 1, (2, 3)), spaces.Discrete(5), ((6,), 5)),
        (BYTES, spaces.MultiDiscrete([2, 3]), ((64, 64, 3), 5)),
        (spaces.Box(0, 1, (64, 64, 3)), spaces.Discrete(2), ((64 * 64 * 3,), 2)),  # no bytes
        (spaces.Dict(a=BYTES, b=spaces.Discrete(3)), spaces.MultiBinary(4), ((12291,), 4)),
    ],
)
def test_a_model_is_made_to_fit_spaces(observation_space, action_space, sizes):
    model = CostModel(observation_space, action_space, hidden_sizes=(4,))
    assert (model.obs_shape, model.act_dim) == sizes
    assert model.hidden_sizes == (4,)


@pytest.mark.parametrize("given", [3, (84, 84, 4), None])
def test_sizes_in_place_of_spaces_are_refused(given):
    message = "made for the spaces of an env, got .*; pass env.observation_space and env.action_sp"
    with pytest.raises(TypeError, match=message):
        CostModel(given, spaces.Discrete(2))
    with pytest.raises(TypeError, match=message):
        CostModel(spaces.Discrete(2), given)


def test_a_model_for_an_env_has_its_spaces_and_its_time_limit():
    """Pendulum: three numbers, one action, 200 steps."""
    env = gym.make("Pendulum-v1")
    model = CostModel.for_env(env, hidden_sizes=(4,))
    assert (model.obs_shape, model.act_dim, model.horizon) == ((3,), 1, 200)
    assert (model.output_scale, model.hidden_sizes) == (200**-0.5, (4,))
    segments = CostModel.for_env(env, horizon=50, output_scale=1.0)
    assert (segments.horizon, segments.output_scale) == (50, 1)
    endless = CostModel.for_env(env.unwrapped, horizon=None)
    assert (endless.horizon, endless.output_scale) == (None, 0.03)


def test_a_model_for_an_env_needs_the_env_itself():
    with pytest.raises(TypeError, match=r"takes an env, .* got 'CartPole-v1'; make it first"):
        CostModel.for_env("CartPole-v1")


@pytest.mark.parametrize(("horizon", "scale"), [(None, 0.03), (25, 0.2), (10_000, 0.01)])
def test_the_output_scale_goes_by_the_root_of_the_horizon(horizon, scale):
    model = CostModel(*boxes(1, 1), horizon=horizon)
    assert model.output_scale == pytest.approx(scale)
    if horizon is not None:
        model.prorate(7)
        assert model.output_scale == pytest.approx(scale)


# -- Custom networks -------------------------------------------------------------------------


class Distance(torch.nn.Module):
    """A weight times the distance of the first two features from the origin."""

    def __init__(self, *, width=1, keep_axis=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), 2.0))
        self.keep_axis = keep_axis

    def forward(self, obs, actions):
        distance = self.weight[0] * obs[..., :2].norm(dim=-1) + actions.sum(dim=-1)
        return distance[..., None] if self.keep_axis else distance


@pytest.mark.parametrize("keep_axis", [False, True])
def test_a_custom_network_takes_the_place_of_the_mlp(keep_axis):
    model = CostModel(*boxes(3, 1), net=Distance(keep_axis=keep_axis), output_scale=0.5)
    costs = model.step_cost(np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 9.0]]), np.array([[1.0], [0.0]]))
    assert costs.tolist() == [5.5, 0.0]
    assert [name for name, _ in model.named_parameters()] == ["net.weight"]


class NoLess(MLP):
    """A network of ours, whose costs are none below 0."""

    def forward(self, obs, actions):
        return torch.relu(super().forward(obs, actions))


def test_a_network_that_extends_ours_is_its_own_whatever_the_number_of_steps(tmp_path):
    """A single step once went through a copy of the plain one, and so did a model from its file."""
    torch.manual_seed(0)
    model = CostModel(*boxes(3, 1), net=NoLess(4, (8,)))
    torch.nn.init.normal_(model.net[-1].weight)  # it is 0 until it is trained
    obs, actions = torch.randn(20, 3).numpy(), np.zeros((20, 1), np.float32)
    together = model.step_cost(obs, actions)
    assert (together >= 0).all()
    assert (together == 0).any()
    one_by_one = [model.step_cost(obs[i : i + 1], actions[i : i + 1])[0] for i in range(20)]
    np.testing.assert_allclose(one_by_one, together, atol=1e-6)
    model.save(tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match="NoLess"):
        CostModel.load(tmp_path / "model.safetensors")
    same, _ = CostModel.load(tmp_path / "model.safetensors", net=NoLess(4, (8,)))
    assert (same.step_cost(obs, actions) == together).all()


def test_a_network_reads_inputs_at_the_scale_of_the_data():
    """The deviation of 0, 8 is 4, the mean is 4: (8, 4) is read as (1, 0)."""
    model = CostModel(*boxes(2, 1), net=Distance(), output_scale=1.0)
    model.fit_input_scale([Trajectory(np.array([[0.0, 4.0], [8.0, 4.0]]), np.zeros((2, 1)))])
    assert model.step_cost(np.array([[8.0, 4.0]]), np.zeros((1, 1))).tolist() == [2]


def test_a_network_that_returns_more_than_a_number_per_step_is_refused():
    class Wide(torch.nn.Module):
        def forward(self, obs, actions):
            return obs + actions

    with pytest.raises(ValueError, match=r"per step, \(4,\) or \(4, 1\), got \(4, 3\); .* Wide"):
        CostModel(*boxes(3, 1), net=Wide())(torch.zeros(4, 3), torch.zeros(4, 1))


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(3)])
def test_a_network_that_looks_beyond_the_step_is_refused(layer):
    with pytest.raises(ValueError, match=r"on that step alone, .* got (Dropout|BatchNorm1d)"):
        CostModel(*boxes(3, 1), net=torch.nn.Sequential(layer))


def test_a_custom_network_reads_a_box_in_its_own_shape(tmp_path):
    class Spread(torch.nn.Module):
        def forward(self, obs, actions):
            return obs.std(dim=(-2, -1)) + actions[..., 0]

    path, table = tmp_path / "model.safetensors", torch.tensor([[[0.0, 2.0]] * 5])
    assert CostModel(*boxes((5, 2), 1)).obs_shape == (10,)
    CostModel(*boxes((5, 2), 1), net=Spread(), output_scale=1.0).save(path)
    model, _ = CostModel.load(path, net=Spread())
    assert model.obs_shape == (5, 2)
    assert model(table, torch.ones(1, 1)).tolist() == pytest.approx([1 + (10 / 9) ** 0.5])


def test_the_weights_of_a_network_come_back_with_its_code_only(tmp_path):
    path, model = tmp_path / "model.safetensors", CostModel(*boxes(3, 1), net=Distance())
    torch.nn.init.constant_(model.net.weight, 7.0)
    model.save(path, env_id="Toy-v0")
    loaded, info = CostModel.load(path, net=Distance())
    assert loaded.net.weight.tolist() == [7]
    assert info == {"env_id": "Toy-v0"}
    with pytest.raises(MismatchError, match="has those of Distance, got net=none; pass net="):
        CostModel.load(path)
    with pytest.raises(MismatchError, match=r"must fit the network, Distance: .*size mismatch"):
        CostModel.load(path, net=Distance(width=2))


def test_a_network_is_not_given_the_weights_of_an_mlp(tmp_path):
    CostModel(*boxes(3, 1)).save(tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match="those of the MLP of this package, got net=Distance"):
        CostModel.load(tmp_path / "model.safetensors", net=Distance())


# -- Numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8, np.bool_])
def test_rows_of_every_dtype_cost_what_their_float32_values_cost(dtype):
    model = random_model()
    obs, actions = np.array([[1, 0, 1]], dtype), np.array([[0, 1]], dtype)
    expected = model.step_cost(obs.astype(np.float32), actions.astype(np.float32))
    np.testing.assert_array_equal(model.step_cost(obs, actions), expected)
    # One row costs by NumPy in step_cost, which may round otherwise than torch.
    tensors = torch.from_numpy(obs), torch.from_numpy(actions)
    assert torch.equal(model(*tensors), model(*(tensor.float() for tensor in tensors)))
    assert model(*tensors).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e300])
def test_what_is_not_finite_in_float32_is_refused(bad):
    with pytest.raises(NonFiniteError, match="obs of a cost model must be finite, got NaN or an "):
        random_model().step_cost(np.array([[0, bad, 0]]), np.zeros((1, 2)))
    with pytest.raises(NonFiniteError, match="actions of a cost model must be finite"):
        random_model().step_cost(np.zeros((1, 3)), np.array([[0, bad]]))


@pytest.mark.parametrize("count", [0, 1, 64, 20_000])
def test_few_rows_and_many_cost_the_same_and_keep_the_threads(count):
    model, rng = random_model(), np.random.default_rng(0)
    obs, actions = rng.normal(size=(count, 3)), rng.normal(size=(count, 2))
    torch.set_num_threads(2)
    try:
        found = model.step_cost(obs, actions)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    expected = model(*(torch.from_numpy(rows).float() for rows in (obs, actions)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_network_in_bfloat16_sums_its_steps_in_float32():
    """1001 steps of cost 1: bfloat16 knows 1000 and 1004 only."""
    model = linear_model([1.0, 0.0])
    steps = torch.ones(1, 1001, 1), torch.zeros(1, 1001, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.trajectory_cost(*steps).tolist() == [1001]


# -- Chunks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "max_rows", "sizes"),
    [
        ([4, 4, 4, 4], 8, [2, 2]),
        ([1, 1, 9, 1], 10, [2, 1, 1]),  # padded to 9 rows each, two of them would be 18
        ([50], 8, [1]),  # one that is longer than the bound still has to be scored
        ([], 8, []),
    ],
)
def test_a_chunk_holds_at_most_max_rows_of_padded_steps(lengths, max_rows, sizes):
    chunks = list(padded_chunks(episodes(*lengths), max_rows=max_rows))
    assert [len(obs) for obs, _, _ in chunks] == sizes


def test_only_a_chunk_with_padding_has_a_mask():
    (_, _, equal), (_, _, unequal) = padded_chunks(episodes(3, 3, 2, 1), max_rows=6)
    assert equal is None
    assert unequal.tolist() == [[True, True], [True, False]]


# -- Input scale -----------------------------------------------------------------------------


def test_the_input_scale_is_numpy_s_mean_and_deviation_in_float64():
    """One feature sits at a million: its squares cancel all of float32, and half of float64."""
    rng = np.random.default_rng(0)
    offset, spread = np.array([1e6, 0.0, -30.0, 1e-3]), np.array([1.0, 1.0, 1e-2, 50.0])
    data = [
        Trajectory(offset[:3] + spread[:3] * rng.normal(size=(n, 3)), 50 * rng.normal(size=(n, 1)))
        for n in (300, 1, 700)
    ]
    model = CostModel(*boxes(3, 1))
    model.fit_input_scale(data)
    rows = np.concatenate([np.concatenate([t.obs, t.actions], axis=1) for t in data])
    rows = rows.astype(np.float64)
    np.testing.assert_allclose(model.input_mean, rows.mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(model.input_scale, rows.std(axis=0), rtol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 5.0, 1e6, -0.1])
def test_a_feature_that_never_varies_is_centred_and_keeps_scale_1(constant):
    model = CostModel(*boxes(1, 1))
    model.fit_input_scale([Trajectory(np.full((9, 1), constant), np.arange(9.0)[:, None])])
    assert model.input_mean[0].item() == np.float32(constant)
    assert model.input_scale[0].item() == 1


def test_a_fitted_model_reads_deviations_from_the_mean():
    """The mean of 1, 3 is 2, the deviation 1: s = 5 is read as 3."""
    model = linear_model([1.0, 0.0])
    model.fit_input_scale([Trajectory(np.array([[1.0], [3.0]]), np.zeros((2, 1)))])
    assert model.step_cost(np.array([[5.0]]), np.zeros((1, 1))).tolist() == [3]


def test_a_spike_beyond_ten_deviations_counts_as_ten():
    assert linear_model([1.0, 0.0]).step_cost(
        np.array([[9.5], [11.0], [-1e9]]), np.zeros((3, 1))
    ).tolist() == [9.5, 10, -10]


def test_the_input_scale_is_no_parameter_and_travels_in_the_state():
    model = CostModel(*boxes(2, 1))
    assert {"input_mean", "input_scale"} <= model.state_dict().keys()
    assert {name for name, _ in model.named_parameters()}.isdisjoint({"input_mean", "input_scale"})


def test_an_input_scale_needs_data():
    with pytest.raises(ValueError, match="the input scale needs at least one trajectory, got none"):
        CostModel(*boxes(1, 1)).fit_input_scale([])


# -- Files -----------------------------------------------------------------------------------


def test_a_saved_model_comes_back_with_equal_costs_and_its_info(tmp_path):
    model, given = (
        random_model(hidden_sizes=(8, 5), discount=0.99, output_scale=0.5),
        episodes(10, 300, 40),
    )
    model.fit_input_scale(given)
    info = {"env_id": "Toy-v0", "dead_zone": 0.75, "epochs": 12, "note": None}
    model.save(tmp_path / "new folder" / "model.safetensors", **info)
    loaded, loaded_info = CostModel.load(tmp_path / "new folder" / "model.safetensors")
    assert loaded_info == info
    assert (loaded.obs_dim, loaded.act_dim) == (3, 2)
    assert (loaded.hidden_sizes, loaded.discount, loaded.output_scale) == ((8, 5), 0.99, 0.5)
    np.testing.assert_array_equal(loaded.score(given), model.score(given))


@pytest.mark.parametrize("horizon", [None, 40])
def test_a_horizon_comes_back(tmp_path, horizon):
    path = tmp_path / "model.safetensors"
    CostModel(*boxes(3, 2), horizon=horizon).save(path)
    assert CostModel.load(path)[0].horizon == horizon


def test_loading_draws_no_random_numbers(tmp_path):
    CostModel(*boxes(3, 2)).save(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    CostModel.load(tmp_path / "model.safetensors")
    assert torch.rand(1) == expected


def test_sizes_that_a_file_claims_are_not_believed(tmp_path):
    """A layer of 10^12 numbers would not fit into memory."""
    path, model = tmp_path / "model.safetensors", CostModel(*boxes(1, 1))
    config = {**model.config(), "hidden_sizes": [10**6, 10**6]}
    save_tensors(
        path,
        kind="cost-model",
        tensors=model.state_dict(),
        meta={"config": config, "info": {}},
    )
    with pytest.raises(MismatchError, match=r"the weights in .* must fit the network, MLP: "):
        CostModel.load(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("read", [CostModel.load, load_cost_model])
def test_a_file_whose_weights_are_not_finite_is_refused(tmp_path, bad, read):
    path, model = tmp_path / "model.safetensors", CostModel(*boxes(1, 1), hidden_sizes=(3,))
    tensors, meta = model.state_dict(), {"config": model.config(), "info": {}}
    tensors["net.0.bias"] = torch.tensor([0.0, bad, bad])
    save_tensors(path, kind="cost-model", tensors=tensors, meta=meta)
    with pytest.raises(
        CorruptFileError, match=r"2 of the 3 entries of 'net\.0\.bias' are NaN or inf"
    ):
        read(path)
    tensors["net.0.bias"], tensors["input_scale"] = torch.zeros(3), torch.tensor([1.0, 0.0])
    save_tensors(path, kind="cost-model", tensors=tensors, meta=meta)
    with pytest.raises(CorruptFileError, match=r"smallest_input_scale must lie in \(0, inf\)"):
        read(path)


def test_a_model_that_has_diverged_says_so_and_not_that_an_input_is_at_fault():
    model, given = CostModel(*boxes(3, 2)), episodes(5)
    with torch.no_grad():
        model.net[0].weight.fill_(1e38)
        model.net[-1].weight.fill_(1.0)
    for judge in (model.score, lambda given: model.step_cost(given[0].obs + 9, given[0].actions)):
        with pytest.raises(NonFiniteError, match="the model has diverged; lower the learning rate"):
            judge(given)


def test_weights_that_have_diverged_replace_no_file(tmp_path):
    path, model = tmp_path / "model.safetensors", CostModel(*boxes(1, 1))
    model.save(path)
    before = path.read_bytes()
    with torch.no_grad():
        model.net[-1].bias.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"1 of the 1 entries of 'net.* are NaN or infinite"):
        model.save(path)
    assert path.read_bytes() == before


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "agent.safetensors"
    save_tensors(path, kind="agent", tensors=CostModel(*boxes(1, 1)).state_dict(), meta={})
    with pytest.raises(MismatchError, match="holds 'agent', not 'cost-model'"):
        CostModel.load(path)


@pytest.mark.parametrize(
    "change",
    [{"output": "tanh"}, {"discount": 2.0}, {"horizon": "long"}, {"act_dim": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_description_that_makes_no_model_is_refused(tmp_path, change):
    path, model = tmp_path / "model.safetensors", CostModel(*boxes(1, 1))
    meta = {"config": {**model.config(), **change}, "info": {}}
    save_tensors(path, kind="cost-model", tensors=model.state_dict(), meta=meta)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors .* its description makes no"):
        CostModel.load(path)


def test_a_damaged_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        CostModel.load(path)
    CostModel(*boxes(1, 1)).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="damaged or not a file of this package"):
        CostModel.load(path)


# -- Sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_sizes", [(0,), (4, -1)])
def test_sizes_that_are_not_positive_are_refused(hidden_sizes):
    with pytest.raises(ValueError, match=r"hidden_sizes must lie in \[1, inf\)"):
        CostModel(*boxes(3, 2), hidden_sizes=hidden_sizes)


@pytest.mark.parametrize("sizes", [{"obs_shape": [10**12]}, {"obs_shape": [10**6] * 3}])
def test_spaces_that_a_file_claims_take_no_memory(tmp_path, sizes):
    path, model = tmp_path / "model.safetensors", CostModel(*boxes(1, 1))
    meta = {"config": {**model.config(), **sizes}, "info": {}}
    save_tensors(path, kind="cost-model", tensors=model.state_dict(), meta=meta)
    with pytest.raises(MismatchError, match=r"the weights in .* must fit the network"):
        CostModel.load(path)


@pytest.mark.parametrize("discount", [0.0, -0.5, 1.01, math.nan])
def test_a_discount_outside_0_to_1_is_refused(discount):
    with pytest.raises(ValueError, match=rf"discount must lie in \(0, 1\], got {discount}; 1 is"):
        CostModel(*boxes(1, 1), discount=discount)


@pytest.mark.parametrize("output_scale", [0.0, -1.0, math.nan, math.inf])
def test_an_output_scale_that_would_flatten_or_turn_the_costs_is_refused(output_scale):
    with pytest.raises(ValueError, match=rf"must lie in \(0, inf\), got {output_scale}; 1 is the"):
        CostModel(*boxes(1, 1), output_scale=output_scale)


@pytest.mark.parametrize(("obs_dim", "act_dim"), [(2, 3), (3, 1), (6, 2)])
def test_an_episode_of_other_sizes_is_refused_even_if_their_sum_is_the_same(obs_dim, act_dim):
    model, other = random_model(3, 2), episodes(4, obs_dim=obs_dim, act_dim=act_dim)
    message = rf"act_dim\) = \(3, 2\), got \({obs_dim}, {act_dim}\)"
    with pytest.raises(ValueError, match=message):
        model.score(other)
    with pytest.raises(ValueError, match=message):
        model.step_cost(other[0].obs, other[0].actions)
    with pytest.raises(ValueError, match=message):
        model.fit_input_scale(other)


def test_one_row_alone_costs_what_it_costs_among_others():
    """A single row goes through NumPy, as in a single env; the weights may change in between."""
    rng = np.random.default_rng(0)
    model = random_model(obs_dim=5, act_dim=2, hidden_sizes=(8, 4))
    obs, actions = rng.normal(0, 30, (50, 5)), rng.normal(size=(50, 2)).astype(np.float32)

    def check(model):
        alone = [model.step_cost(obs[i : i + 1], actions[i : i + 1]) for i in range(50)]
        assert alone[0].dtype == np.float32
        expected = model.step_cost(obs, actions)
        rounding = 1e-6 * np.abs(expected).max()  # of sums in which large terms cancel, too
        np.testing.assert_allclose(np.concatenate(alone), expected, rtol=1e-5, atol=rounding)
        return expected

    seen = [check(model)]
    with torch.no_grad():
        model.net[0].weight.add_(1.0)  # as an optimiser does
    seen.append(check(model))
    model.net[0].weight = torch.nn.Parameter(torch.ones(8, 7))
    seen.append(check(model))
    model.net[0].weight.data = torch.full((8, 7), 2.0)
    seen.append(check(model))
    model.load_state_dict(random_model(obs_dim=5, act_dim=2, hidden_sizes=(8, 4)).state_dict())
    seen.append(check(model))
    model.input_mean = model.input_mean + 7
    seen.append(check(model))
    seen.append(check(model.half().float()))
    copied = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        copied.net[-1].bias.add_(100.0)
    assert (check(copied) > check(model)).all()
    assert all((a != b).any() for a, b in itertools.pairwise(seen[:-1]))
