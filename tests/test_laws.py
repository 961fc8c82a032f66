"""Laws that hold for every input, checked against the plainest implementation there is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.cost_model import CostModel
from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.data.label_log import LabelLog, read_labels
from pbcrl.losses import pbci_loss, preference_loss, safety_loss, snr_loss
from pbcrl.recorder import TrajectoryRecorder
from pbcrl.storage import load_tensors, save_tensors
from pbcrl.trajectory import Label, Trajectory, pad

from .every_space import boxes

law = settings(derandomize=True, deadline=None, max_examples=40)
law_on_disk = settings(
    law, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
costs = st.floats(-15, 15)
labels = st.builds(
    Label,
    st.floats(0, 1) | st.just(math.nan),
    st.sampled_from([0.0, 1.0, math.nan]),
    st.sampled_from([0.0, 1.0, math.nan]),
)


@st.composite
def trajectories(draw: st.DrawFn, *, obs_dim: int = 2, most: int = 6) -> Trajectory:
    steps = draw(st.integers(1, most))
    shapes = [(steps, obs_dim), (steps, 1), (steps,)]
    drawn = [draw(arrays(np.float32, shape, elements=numbers)) for shape in shapes]
    return Trajectory(*drawn[:2], np.abs(drawn[2]))


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- Losses ----------------------------------------------------------------------------------

pairs_of_costs = st.lists(st.tuples(costs, costs, st.floats(0, 1)), min_size=1, max_size=8)


@law
@given(pairs_of_costs)
def test_the_two_members_of_a_pair_are_pushed_apart_equally(rows):
    first, second, mu = (f64(column) for column in zip(*rows, strict=True))
    first.requires_grad_(), second.requires_grad_()
    preference_loss(first, second, mu).backward()
    torch.testing.assert_close(first.grad, -second.grad)


@law
@given(pairs_of_costs, st.randoms())
def test_the_order_of_the_pairs_does_not_matter(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    values = []
    for some in (rows, shuffled):
        first, second, mu = (f64(column) for column in zip(*some, strict=True))
        safe = mu.round()
        values.append(torch.stack(pbci_loss(first, second, mu, safe, 1 - safe)))
    torch.testing.assert_close(values[0], values[1])


@law
@given(pairs_of_costs, st.integers(2, 4))
def test_every_loss_is_a_mean_so_that_repeating_a_batch_changes_nothing(rows, times):
    first, second, mu = (f64(column) for column in zip(*rows, strict=True))
    safe = mu.round()
    once = torch.stack(pbci_loss(first, second, mu, safe, 1 - safe))
    repeated = [column.repeat(times) for column in (first, second, mu, safe, 1 - safe)]
    torch.testing.assert_close(torch.stack(pbci_loss(*repeated)), once)


@law
@given(st.lists(st.tuples(costs, costs, st.floats(0, 1)), min_size=2, max_size=8), st.data())
def test_the_cross_entropies_are_convex_in_the_costs(rows, data):
    """What makes early stopping by them sound: no bump between two sets of costs."""
    a, b, safe = (f64(column) for column in zip(*rows, strict=True))
    share, dead_zone = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 5))
    mixed = share * a + (1 - share) * b

    def loss(cost: Tensor) -> Tensor:
        half = len(cost) // 2
        pair = preference_loss(cost[:half], cost[half : 2 * half], safe[:half])
        return pair + safety_loss(cost, safe, dead_zone=dead_zone)

    assert loss(mixed) <= share * loss(a) + (1 - share) * loss(b) + 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_losses_of_other_precisions_agree_with_those_in_float32(dtype):
    """Ten thousand wrong labels by 40 nats: their sum passes float16's largest number."""
    first, second = torch.full((10_000,), 20.0), torch.full((10_000,), -20.0)
    mu, safe = torch.ones(10_000), torch.ones(10_000)
    mu[0] = 0.5
    expected = torch.stack(pbci_loss(first, second, mu, safe, safe, max_std=None))
    found = torch.stack(pbci_loss(first.to(dtype), second.to(dtype), mu, safe, safe, max_std=None))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_variance_of_low_precision_costs_does_not_overflow(dtype):
    cost = torch.tensor([-300.0, 300.0] * 50)  # variance 90,000
    mu = torch.tensor([0.0, 1.0] * 25)
    expected = snr_loss(cost, mu, max_std=None)
    torch.testing.assert_close(
        snr_loss(cost.to(dtype), mu, max_std=None).float(), expected, rtol=2e-2, atol=0
    )


# -- Padding ---------------------------------------------------------------------------------


@law
@given(st.lists(trajectories(), min_size=1, max_size=5), st.integers(0, 5))
def test_what_stands_in_the_padding_has_no_influence_on_a_cost(given, more):
    torch.manual_seed(0)
    model = CostModel(*boxes(2, 1), hidden_sizes=(4,))
    torch.nn.init.normal_(model.net[-1].weight)
    obs, actions, mask = pad(given)
    expected = model.trajectory_cost(obs, actions, mask)
    junk = torch.full((len(given), more, 3), 7e8)
    obs = torch.where(mask[..., None], obs, 1e9)
    obs, actions = torch.cat([obs, junk[..., :2]], 1), torch.cat([actions, junk[..., :1]], 1)
    longer = torch.cat([mask, torch.zeros(len(given), more, dtype=torch.bool)], 1)
    torch.testing.assert_close(model.trajectory_cost(obs, actions, longer), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cost_model_reads_inputs_of_any_precision(dtype):
    torch.manual_seed(0)
    model = CostModel(*boxes(2, 1), hidden_sizes=(4,))
    torch.nn.init.normal_(model.net[-1].weight)
    obs, actions = torch.randn(2, 3, 5, 2).to(dtype), torch.randn(3, 5, 1).to(dtype)
    expected = model(obs[0].float(), actions.float())
    torch.testing.assert_close(model(obs[0], actions).float(), expected, rtol=1e-2, atol=1e-4)
    found = model.step_cost(obs[0, 0].numpy(), actions[0].numpy())
    np.testing.assert_allclose(found, expected[0].detach().numpy(), rtol=1e-5)


# -- Buffer ----------------------------------------------------------------------------------


@law
@given(st.integers(2, 12), st.lists(st.lists(labels, max_size=4), max_size=5), st.data())
def test_a_buffer_is_a_list_of_pairs_with_their_labels(num, bought, data):
    buffer, naive = PreferenceBuffer(), []
    rows = [Trajectory(np.full((1, 1), i), np.zeros((1, 1))) for i in range(num)]
    buffer.add_trajectories(rows[: num // 2])
    buffer.add_trajectories(rows[num // 2 :])
    for answers in bought:
        pair = st.lists(st.integers(0, num - 1), min_size=2, max_size=2, unique=True)
        pairs = [data.draw(pair) for _ in answers]
        buffer.add_labels(np.array(pairs, np.int64).reshape(-1, 2), answers)
        naive += zip(pairs, answers, strict=True)
    assert len(buffer) == len(naive)
    chosen = data.draw(st.lists(st.integers(0, len(naive) - 1), max_size=8)) if naive else []
    batch = buffer.batch(np.array(chosen, np.int64))
    assert len({id(t) for t in batch.trajectories}) == len(batch.trajectories)
    for k, position in enumerate(chosen):
        (first, second), label = naive[position]
        assert batch.trajectories[batch.pairs[k, 0]] is rows[first]
        assert batch.trajectories[batch.pairs[k, 1]] is rows[second]
        found = [batch.preference[k].item(), *batch.safe[k].tolist()]
        expected = [label.preference, label.first_safe, label.second_safe]
        np.testing.assert_array_equal(found, np.float32(expected))


@law
@given(st.integers(0, 30), st.integers(0, 2**32), st.data())
def test_drawn_pairs_are_different_for_every_number_of_trajectories(num, seed, data):
    possible = num * (num - 1) // 2
    wanted = data.draw(st.integers(0, possible))
    pairs = draw_pairs(num, wanted, rng=np.random.default_rng(seed))
    assert pairs.shape == (wanted, 2)
    assert len({frozenset(pair) for pair in pairs.tolist()}) == wanted
    assert all(0 <= i < num for i in pairs.ravel())


# -- Files -----------------------------------------------------------------------------------

texts = st.text('a7δ"\\\n\0 é\ud7ff', max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
dtypes = st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool"])
tensor_arrays = dtypes.flatmap(lambda dtype: arrays(dtype, st.lists(st.integers(0, 3), max_size=3)))


@law_on_disk
@given(st.dictionaries(texts, tensor_arrays, max_size=4), st.dictionaries(texts, json_values))
def test_any_tensors_and_any_description_come_back_bit_by_bit(tmp_path, given, meta):
    path = tmp_path / "file"
    tensors = {name: torch.from_numpy(array.copy()) for name, array in given.items()}
    save_tensors(path, kind="any", tensors=tensors, meta=meta)
    loaded, found = load_tensors(path, kind="any")
    assert found == meta
    assert {name: t.numpy().tobytes() for name, t in loaded.items()} == {
        name: array.tobytes() for name, array in given.items()
    }
    assert all(loaded[n].numpy().dtype == given[n].dtype for n in given)
    assert all(loaded[n].shape == given[n].shape for n in given)


@law_on_disk
@given(st.lists(st.lists(labels, max_size=4), max_size=4))
def test_any_labels_come_back_however_they_were_bought(tmp_path, bought):
    path = tmp_path / "labels"
    path.unlink(missing_ok=True)
    for answers in bought:
        with LabelLog(path) as log:
            log.append(answers)
    expected = [label for answers in bought for label in answers]
    assert repr(read_labels(path) if bought else []) == repr(expected)


@law_on_disk
@given(st.lists(trajectories(), min_size=1, max_size=9), st.integers(1, 9), st.data())
def test_any_trajectories_come_back_bit_by_bit_also_from_a_killed_run(
    tmp_path, given, capacity, data
):
    options = {"env_id": "δ", "obs_shape": (2,), "act_dim": 1, "horizon": 6, "capacity": capacity}
    path, saved_after = tmp_path / "data", data.draw(st.integers(0, len(given)))
    killed_after = data.draw(st.integers(saved_after, len(given)))
    options |= {"rng": np.random.default_rng(0), "overwrite": True}
    out = TrajectoryWriter(path, **options)
    for trajectory in given[:saved_after]:
        out.add(trajectory)
    state = out.state_dict()
    for trajectory in given[saved_after:killed_after]:
        out.add(trajectory)
    del out  # and its lock, which the system does for a dead process
    with TrajectoryWriter(path, **options) as out:
        out.load_state_dict(state)
        for trajectory in given[saved_after:]:
            out.add(trajectory)
    loaded = TrajectoryDataset(path)
    assert (len(loaded), loaded.seen) == (min(capacity, len(given)), len(given))
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        for name in ("obs", "actions", "costs"):
            expected = getattr(given[number], name)
            assert getattr(trajectory, name).tobytes() == expected.tobytes()


# -- Recorder and wrapper --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:an episode is returned when it ends")
@law
@given(st.integers(1, 4), st.booleans(), st.data())
def test_the_recorder_splits_any_interleaving_as_a_list_per_env_does(num_envs, has_costs, data):
    recorder = TrajectoryRecorder(num_envs)
    naive: list[list[tuple[float, ...]]] = [[] for _ in range(num_envs)]
    mask = st.lists(st.booleans(), min_size=num_envs, max_size=num_envs).map(np.array)
    for step in range(data.draw(st.integers(1, 20))):
        valid, done = data.draw(mask), data.draw(mask)
        discarded = data.draw(mask) & done & valid
        if data.draw(st.integers(0, 9)) == 0:
            recorder.drop_unfinished()
            naive = [[] for _ in range(num_envs)]
        obs = np.arange(2 * num_envs).reshape(-1, 2) + 100.0 * step
        actions, cost = -obs[:, :1], obs[:, 1] / 2
        found = recorder.record(
            obs, actions, cost if has_costs else None, done, valid=valid, discarded=discarded
        )
        expected = []
        for i in np.flatnonzero(valid):
            naive[i].append((*obs[i], *actions[i], cost[i]))
            if done[i]:
                expected += [] if discarded[i] else [np.float32(naive[i])]
                naive[i] = []
        assert len(found) == len(expected)
        for trajectory, rows in zip(found, expected, strict=True):
            np.testing.assert_array_equal(trajectory.obs, rows[:, :2])
            np.testing.assert_array_equal(trajectory.actions, rows[:, 2:3])
            if has_costs:
                np.testing.assert_array_equal(trajectory.costs, rows[:, 3])
            else:
                assert trajectory.costs is None
        assert recorder.lengths.tolist() == [len(rows) for rows in naive]
