import copy
import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl.cost_model import CostModel
from pbcrl.ensemble import CostModelEnsemble, load_cost_model
from pbcrl.errors import CorruptFileError, MismatchError, NonFiniteError, StorageError
from pbcrl.recorder import finished_trajectories
from pbcrl.storage import save_tensors
from pbcrl.trajectory import Trajectory, pad
from pbcrl.tree_trainer import _stacked, _Tree
from pbcrl.trees import TreeCost, Trees, check_trees, floor32, like_inputs
from pbcrl.wrappers import PreferenceCostVectorWrapper, PreferenceCostWrapper

from .counters import Counter
from .every_space import boxes

law = settings(derandomize=True, deadline=None, max_examples=60)
UNUSED = -128


def leaf(k):
    """The child that is leaf k."""
    return -1 - k


def trees_of(*members):
    """Trees of each member, each by its nodes (feature, threshold, left, right) and its leaves."""
    shape = len(members), len(members[0])
    feature = torch.zeros(*shape, 7, dtype=torch.int32)
    threshold = torch.full((*shape, 7), math.inf)
    left, right = torch.full((2, *shape, 7), UNUSED, dtype=torch.int8)
    value = torch.zeros(*shape, 8)
    for m, member in enumerate(members):
        for r, (nodes, leaves) in enumerate(member):
            for j, node in enumerate(nodes):
                feature[m, r, j], threshold[m, r, j], left[m, r, j], right[m, r, j] = node
            value[m, r, : len(leaves)] = torch.tensor(leaves)
    return Trees(feature, threshold, left.clone(), right.clone(), value)


def model_of(*members, obs_dim=1, act_dim=1, **options):
    options = {"output_scale": 1.0, "num_members": len(members), **options}
    model = TreeCost(*boxes(obs_dim, act_dim), **options)
    model.set_trees(trees_of(*members))
    return model


def constant(cost):
    """A tree that is one leaf."""
    return ([], [cost])


def stump(low, high, *, feature=0, at=0.5):
    """`low` where the input is at most `at`, else `high`."""
    return ([(feature, at, leaf(0), leaf(1))], [low, high])


def random_tree(rng, num_inputs, *, most=7):
    """Grown as LightGBM does it: a leaf becomes a node, and its right child is the next leaf."""
    nodes, leaves = [], {0: None}  # leaf: (its parent, its side)
    for new in range(rng.integers(most + 1)):
        old = int(rng.choice(list(leaves)))
        if leaves[old] is not None:
            parent, side = leaves[old]
            nodes[parent][side] = new
        threshold = float(np.float32(rng.normal()))
        nodes.append([int(rng.integers(num_inputs)), threshold, leaf(old), leaf(new + 1)])
        leaves[old], leaves[new + 1] = (new, 2), (new, 3)
    return [tuple(node) for node in nodes], rng.normal(size=len(leaves)).tolist()


def random_model(*, num_trees=12, obs_dim=3, act_dim=2, seed=0, **options):
    rng = np.random.default_rng(seed)
    members = [
        [random_tree(rng, obs_dim + act_dim) for _ in range(num_trees)]
        for _ in range(options.get("num_members", 1))
    ]
    return model_of(*members, obs_dim=obs_dim, act_dim=act_dim, **options)


def walk(trees, row, *, member=0):
    """The plainest way: from each root down to a leaf; float64 sum."""
    total = 0.0
    for r in range(trees.feature.shape[1]):
        left, right = trees.left[member, r].tolist(), trees.right[member, r].tolist()
        node = 0 if left[0] != UNUSED else leaf(0)
        while node >= 0:
            goes_left = row[int(trees.feature[member, r, node])] <= trees.threshold[member, r, node]
            node = left[node] if goes_left else right[node]
        total += float(trees.value[member, r, -1 - node])
    return total


def episodes(*lengths, obs_dim=3, act_dim=2, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Trajectory(rng.normal(size=(length, obs_dim)), rng.normal(size=(length, act_dim)))
        for length in lengths
    ]


def costs_of(model, *rows):
    """Of steps by their observation; the action is 0."""
    obs = np.array(rows, np.float32).reshape(len(rows), -1)
    return model.step_cost(obs, np.zeros((len(rows), model.act_dim))).tolist()


# -- Costs -----------------------------------------------------------------------------------


def test_a_step_goes_left_where_its_input_is_at_most_the_threshold():
    assert costs_of(model_of([stump(1.0, 3.0)]), 0.4, 0.5, 0.6, -1e30) == [1, 1, 3, 1]


def test_the_neighbours_of_a_threshold_lie_on_its_two_sides():
    at = np.float32(0.1)
    below, above = np.nextafter(at, np.float32(-1)), np.nextafter(at, np.float32(1))
    model = model_of([stump(1.0, 3.0, at=float(at))])
    assert costs_of(model, below, at, above) == [1, 1, 3]


def test_two_nodes_have_three_leaves():
    """s <= 0 costs 1; above it, an action of at most 0.5 costs 2, and of more 4."""
    tree = ([(0, 0.0, leaf(0), 1), (1, 0.5, leaf(1), leaf(2))], [1.0, 2.0, 4.0])
    obs, actions = np.array([[-1.0], [-1.0], [1.0], [1.0]]), np.array([[0.0], [1.0], [0.0], [1.0]])
    assert model_of([tree]).step_cost(obs, actions).tolist() == [1, 1, 2, 4]


def test_leaves_may_stand_in_any_order():
    tree = ([(0, 0.0, 1, leaf(2)), (0, -1.0, leaf(1), leaf(0))], [1.0, 2.0, 4.0])
    assert costs_of(model_of([tree]), -2, -0.5, 3) == [2, 1, 4]


def test_seven_nodes_cut_a_line_into_eight_pieces():
    """A complete tree of thresholds 1 to 7: s costs the number of thresholds below it."""
    nodes = [
        *((0, 4.0, 1, 2), (0, 2.0, 3, 4), (0, 6.0, 5, 6)),
        *((0, 2 * k + 1.0, leaf(2 * k), leaf(2 * k + 1)) for k in range(4)),
    ]
    model = model_of([(nodes, [float(k) for k in range(8)])])
    assert costs_of(model, *np.arange(0.5, 8)) == list(range(8))


def test_a_chain_of_seven_nodes_cuts_a_line_into_eight_pieces():
    nodes = [(0, 7.0 - k, k + 1 if k < 6 else leaf(7), leaf(k)) for k in range(7)]
    model = model_of([(nodes, [float(k) for k in range(8)])])
    assert costs_of(model, *np.arange(0.5, 8)) == list(range(7, -1, -1))


def test_a_tree_without_nodes_is_its_leaf_0():
    tree = ([], [2.5, 7.0, 7.0])
    assert costs_of(model_of([tree]), -1, 0, 1) == [2.5] * 3


def test_trees_add_up_and_the_output_scale_multiplies_their_sum():
    model = model_of([stump(1.0, 3.0), constant(4.0)], output_scale=0.25)
    assert costs_of(model, 0, 1) == [1.25, 1.75]


def test_an_untrained_model_puts_every_episode_exactly_on_the_limit():
    model = TreeCost(*boxes(3, 2), num_members=2, pessimism=3.0)
    far = Trajectory(np.full((1000, 3), 1e30), np.full((1000, 2), -1e30))
    assert model.score([*episodes(1, 1000), far]).tolist() == [0, 0, 0]
    assert (model.learned_limit, model.num_trees) == (0, 0)


@law
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_costs_are_those_of_walking_from_every_root_to_a_leaf(seed, num_trees):
    model, rng = random_model(num_trees=num_trees, seed=seed), np.random.default_rng(seed)
    obs, actions = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))
    rows = np.concatenate([obs, actions], axis=1).astype(np.float32)
    expected = [walk(model.trees, row) for row in rows]
    np.testing.assert_allclose(model.step_cost(obs, actions), expected, atol=1e-5)


def test_discounting_weights_the_first_step_fully_and_later_ones_less():
    """c = 1 at discount 1/2: 1 + 1/2 + 1/4 in three steps, 1 in one step."""
    given = episodes(3, 1, obs_dim=1, act_dim=1)
    model = model_of([constant(1.0)], discount=0.5)
    assert model.score(given).tolist() == [1.75, 1]
    assert model.member_scores(given).tolist() == [[1.75, 1]]
    assert model_of([constant(1.0)]).score(given).tolist() == [3, 1]


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_cost_of_an_episode_is_the_discounted_sum_of_its_step_costs(discount):
    model, (episode,) = random_model(discount=discount), episodes(50)
    step_costs = model.step_cost(episode.obs, episode.actions).astype(np.float64)
    expected = (step_costs * discount ** np.arange(50)).sum()
    assert model.score([episode])[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("filler", [0.0, 1e6, math.nan])
def test_what_stands_in_the_padding_has_no_influence(filler, discount):
    model = random_model(discount=discount, num_members=2)
    (episode,) = episodes(7)
    obs, actions, mask = pad([episode, *episodes(20, seed=1)])
    obs[0, 7:], actions[0, 7:] = filler, filler
    alone = pad([episode])[:2]
    torch.testing.assert_close(
        model.trajectory_cost(obs, actions, mask)[0], model.trajectory_cost(*alone)[0]
    )
    torch.testing.assert_close(
        model.member_excess(obs, actions, mask)[:, 0], model.member_excess(*alone)[:, 0]
    )


def test_scores_depend_neither_on_the_company_nor_on_the_order_of_an_episode():
    model, rng = random_model(), np.random.default_rng(0)
    given = episodes(*rng.integers(1, 1000, size=40))
    scores, order = model.score(given), rng.permutation(40)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(model.score([given[i] for i in order]), scores[order], atol=1e-3)
    alone = np.concatenate([model.score([episode]) for episode in given])
    np.testing.assert_allclose(alone, scores, atol=1e-3)
    assert model.score([]).shape == (0,)
    assert model.member_scores([]).shape == (1, 0)


@pytest.mark.parametrize("count", [0, 1, 64, 5_000])
def test_scores_of_a_batch_in_parts_are_those_of_the_whole(count):
    """200 trees have 1,400 thresholds: 2^20 comparisons are 748 steps at a time."""
    model, rng = random_model(num_trees=100, num_members=2), np.random.default_rng(0)
    obs = rng.normal(size=(count, 3)).astype(np.float32)
    actions = rng.normal(size=(count, 2)).astype(np.float32)
    whole = model.step_cost(obs, actions)
    assert whole.shape == (count,)
    assert whole.dtype == np.float32
    parts = [model.step_cost(obs[i : i + 7], actions[i : i + 7]) for i in range(0, count, 7)]
    np.testing.assert_allclose(np.concatenate([*parts, np.empty(0)]), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("members", [1, 3])
def test_one_row_alone_costs_what_it_costs_among_others(members):
    """A single row goes another way, without PyTorch."""
    names = [*(f"lidar[{i}]" for i in range(5)), "speed", "push"]
    rng = np.random.default_rng(0)
    model = TreeCost(*boxes(6, 1), names=names, pooled=True, num_members=members, pessimism=0.5)
    num_inputs = len(model.read_names)
    trees = [[random_tree(rng, num_inputs) for _ in range(20)] for _ in range(members)]
    model.set_trees(trees_of(*trees))
    obs, actions = rng.normal(size=(200, 6)), rng.uniform(-1, 1, (200, 1))
    alone = [model.step_cost(obs[i : i + 1], actions[i : i + 1]) for i in range(200)]
    assert {(part.dtype, part.shape) for part in alone} == {(np.dtype(np.float32), (1,))}
    np.testing.assert_allclose(np.concatenate(alone), model.step_cost(obs, actions), atol=1e-5)
    with pytest.raises(ValueError, match=r"\(obs_dim, act_dim\) = \(6, 1\), got \(5, 1\)"):
        model.step_cost(obs[:1, :5], actions[:1])
    with pytest.raises(ValueError, match=r"those of the same steps, got \(1, 6\) and \(2, 1\)"):
        model.step_cost(obs[:1], actions[:2])
    with pytest.raises(NonFiniteError, match="obs of a cost model must be finite"):
        model.step_cost(obs[:1] * np.nan, actions[:1])
    cost = model.step_cost(obs[:1], actions[:1])
    model.set_trees(trees_of(*([random_tree(rng, num_inputs)] * 20 for _ in range(members))))
    assert model.step_cost(obs[:1], actions[:1]) != cost  # the new ones


def test_step_costs_of_a_rollout_keep_its_leading_axes():
    model = random_model()
    obs, actions = torch.randn(5, 4, 3), torch.randn(5, 4, 2)
    costs = model(obs, actions)
    assert costs.shape == (5, 4)
    torch.testing.assert_close(costs[2, 3], model(obs[2, 3], actions[2, 3]))


def test_a_cost_has_neither_parameters_nor_a_gradient():
    model = random_model()
    assert list(model.parameters()) == []
    obs = torch.randn(4, 3, requires_grad=True)
    assert not model(obs, torch.zeros(4, 2)).requires_grad


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8, np.bool_])
def test_rows_of_every_dtype_cost_what_their_float32_values_cost(dtype):
    model = random_model()
    obs, actions = np.array([[1, 0, 1]], dtype), np.array([[0, 1]], dtype)
    expected = model.step_cost(obs.astype(np.float32), actions.astype(np.float32)).tolist()
    assert model.step_cost(obs, actions).tolist() == expected
    assert model(torch.from_numpy(obs), torch.from_numpy(actions)).tolist() == expected


def test_fitting_the_input_scale_changes_nothing():
    model, (episode,) = random_model(), episodes(20)
    before = model.score([episode])
    model.fit_input_scale([episode])
    assert model.score([episode]) == before


def test_a_copy_has_trees_of_its_own():
    model = model_of([stump(1.0, 3.0)])
    copied = copy.deepcopy(model)
    model.set_trees(trees_of([constant(9.0)]))
    assert costs_of(copied, 0, 1) == [1, 3]
    assert costs_of(model, 0, 1) == [9, 9]


# -- LightGBM --------------------------------------------------------------------------------


def test_costs_are_lightgbm_s_own_predictions():
    """On its training data, on thresholds, on their neighbours, and far outside."""
    lightgbm = pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 5)).astype(np.float32)
    rows[:, 3] = rng.integers(3, size=2000)
    target = np.sin(3 * rows[:, 0]) + rows[:, 3] * (rows[:, 1] > 0.3) + 0.1 * rng.normal(size=2000)
    options = {"num_leaves": 8, "verbose": -1, "deterministic": True, "num_threads": 1}
    booster = lightgbm.train(options, lightgbm.Dataset(rows, target), num_boost_round=40)
    trees = [_Tree.read(booster.dump_model(1, start_iteration=i)) for i in range(40)]
    model = TreeCost(*boxes(4, 1), output_scale=0.5)
    model.set_trees(_stacked([trees]))

    at = np.array([rng.choice(t.threshold[: (t.left != UNUSED).sum()], 5) for t in trees])
    near = [np.nextafter(at, np.float32(x)) for x in (-np.inf, np.inf)]
    far = 100 * rng.normal(size=(500, 5))
    tried = np.concatenate([rows, at, *near, far]).astype(np.float32)
    expected = booster.predict(tried)
    found = model.step_cost(tried[:, :4], tried[:, 4:]) / 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    outputs = sum(tree.outputs(tried) for tree in trees)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-12)


def test_lightgbm_s_tree_of_one_leaf_is_a_constant():
    tree = _Tree.read({"tree_info": [{"tree_structure": {"leaf_value": 1.5}}]})
    assert tree.outputs(np.zeros((3, 2), np.float32)).tolist() == [1.5] * 3
    model = TreeCost(*boxes(1, 1), output_scale=1.0)
    model.set_trees(_stacked([[tree]]))
    assert costs_of(model, 0, 1) == [1.5, 1.5]


floats32 = st.floats(width=32, allow_nan=False)
FAR = [0.0, -0.0, 1e-60, -1e-60, 1e300, -1e300, math.inf, -math.inf, 3.4028235e38, -3.4028235e38]


@settings(law, max_examples=500)
@given(floats32, st.floats(allow_nan=False) | floats32 | st.sampled_from(FAR))
def test_float32_numbers_compare_with_a_threshold_as_with_the_float32_below_it(x, threshold):
    """In whole: for all x and t, x <= t if and only if x <= floor32(t)."""
    floor = floor32(np.array([threshold]))
    assert floor.dtype == np.float32
    for number in (x, float(floor[0])):
        assert (number <= threshold) == (np.float32(number) <= floor[0])


@settings(law, max_examples=200)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-1, 1))
def test_thresholds_between_neighbours_keep_them_apart(x, share):
    with np.errstate(over="ignore"):
        above = float(np.nextafter(np.float32(x), np.float32(math.inf)))
    threshold = x + (0.5 + 0.4 * share) * (above - x) if math.isfinite(above) else x
    (floor,) = floor32(np.array([threshold]))
    assert np.float32(x) <= floor
    assert (np.float32(above) <= floor) == (above <= threshold)


# -- Members ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("pessimism", "cost"), [(0.0, 2.0), (1.0, 3.0), (-0.5, 1.5)])
def test_a_step_costs_the_mean_plus_kappa_deviations_of_its_members(pessimism, cost):
    """Members say 1, 3, 1 and 3: mean 2, deviation 1."""
    model = model_of(*([constant(c)] for c in (1.0, 3.0, 1.0, 3.0)), pessimism=pessimism)
    given = episodes(5, 2, obs_dim=1, act_dim=1)
    assert costs_of(model, 0, 7) == [cost, cost]
    assert model.score(given).tolist() == [5 * cost, 2 * cost]
    assert model.member_scores(given).tolist() == [[5, 2], [15, 6], [5, 2], [15, 6]]


def test_pessimism_of_a_single_member_is_nothing():
    assert costs_of(model_of([constant(2.0)], pessimism=5.0), 0) == [2]


def test_a_member_of_trees_costs_what_its_trees_cost_alone():
    together = random_model(num_members=3, discount=0.9)
    given = episodes(30, 4, 11)
    scores = together.member_scores(given)
    for m, member in enumerate(scores):
        alone = TreeCost(*boxes(3, 2), output_scale=1.0, discount=0.9)
        alone.set_trees(Trees(*(tensor[m : m + 1] for tensor in together.trees)))
        np.testing.assert_allclose(alone.score(given), member, atol=1e-5)
    np.testing.assert_allclose(scores.mean(axis=0), together.score(given), atol=1e-5)


def test_step_costs_sum_to_the_cost_of_an_episode_under_pessimism():
    model, (episode,) = random_model(num_members=3, pessimism=0.7), episodes(50)
    steps = model.step_cost(episode.obs, episode.actions)
    assert model.score([episode])[0] == pytest.approx(steps.sum(dtype=np.float64), rel=1e-5)


# -- Pooled inputs ---------------------------------------------------------------------------

LIDAR = Dict(lidar=Box(0, 1, (4,)), speed=Box(-1, 1, (2,)))


def test_like_inputs_are_pooled_by_their_highest_lowest_and_mean():
    model = TreeCost(LIDAR, Box(-1, 1, (1,)))
    assert model.read_names == (
        *("lidar[0]", "lidar[1]", "lidar[2]", "lidar[3]", "speed[0]", "speed[1]", "action[0]"),
        *("max lidar", "min lidar", "mean lidar"),
    )
    columns = model.columns(torch.tensor([[1.0, 0.0, 4.0, 3.0, 9.0, -9.0]]), torch.tensor([[7.0]]))
    assert columns.tolist() == [[1, 0, 4, 3, 9, -9, 7, 4, 0, 2]]


def test_a_tree_may_read_a_pooled_input():
    """3 where the highest of four is above 0.5, wherever it is."""
    model = TreeCost(LIDAR, Box(-1, 1, (1,)), output_scale=1.0)
    model.set_trees(trees_of([stump(1.0, 3.0, feature=model.read_names.index("max lidar"))]))
    assert costs_of(model, [0, 0, 0.9, 0, 9, 9], [0.5, 0, 0.5, 0.1, 9, 9]) == [3, 1]


def test_no_input_is_pooled_if_that_is_asked_for():
    model = TreeCost(LIDAR, Box(-1, 1, (1,)), pooled=False)
    assert model.read_names == model.names
    assert model.columns(torch.zeros(2, 6), torch.zeros(2, 1)).shape == (2, 7)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a[0]", "a[1]", "a[2]", "a[3]"], {"a": (0, 4)}),
        (["a[0]", "a[1]", "a[2]"], {}),  # fewer than four
        (["x", *(f"a[{i}]" for i in range(5)), "y"], {"a": (1, 6)}),
        (["a[0]", "a[1]", "b", "a[2]", "a[3]"], {}),  # no neighbours
        ([f"obs[{i}]" for i in range(9)], {}),  # nobody named them
        ([f"{part}[{i}]" for part in "ab" for i in range(4)], {"a": (0, 4), "b": (4, 8)}),
        (["gear=0", "gear=1", "gear=2", "gear=3"], {}),
        ([f"cam[{i}][{j}]" for i in range(2) for j in range(4)], {"cam[0]": (0, 4)}),
        ([], {}),
    ],
)
def test_four_neighbours_whose_names_differ_in_their_last_index_are_a_group(names, groups):
    found = like_inputs(names)
    assert {name: found[name] for name in groups} == groups
    assert len(found) == len(groups) + any("cam[1]" in name for name in names)


def test_groups_that_lie_apart_are_groups_of_their_own():
    names = [*(f"a[{i}]" for i in range(4)), "x", *(f"a[{i}]" for i in range(4, 8))]
    assert sorted(like_inputs(names).values()) == [(0, 4), (5, 9)]


def test_actions_are_not_pooled():
    model = TreeCost(Box(-1, 1, (1,)), Box(-1, 1, (6,)))
    assert model.groups == {}


# -- Limit and horizon -----------------------------------------------------------------------


def test_trees_learned_on_segments_do_not_judge_longer_episodes():
    model = TreeCost(*boxes(3, 2), horizon=50)
    assert model.score(episodes(50, 10)).tolist() == [0, 0]
    message = r"learned on: 50, got a trajectory of 1000; .* prorate\(1000\)"
    with pytest.raises(ValueError, match=message):
        model.score(episodes(50, 1000))
    with pytest.raises(ValueError, match=message):
        model.member_scores(episodes(50, 1000))
    with pytest.raises(ValueError, match="50, but episodes here have a time limit of 1000; train"):
        model.check_horizon(1000)
    model.check_horizon(50)
    TreeCost(*boxes(3, 2)).check_length(10**6)


def test_prorated_trees_judge_episodes_of_the_new_length_and_step_costs_stay():
    model = random_model(horizon=50, output_scale=None)
    before = model.score(episodes(50))
    model.prorate(1000)
    assert (model.horizon, model.output_scale) == (1000, 50**-0.5)
    assert model.score(episodes(50)) == before
    model.score(episodes(1000))
    with pytest.raises(ValueError, match="from one number of steps to another, got None and 10"):
        TreeCost(*boxes(1, 1)).prorate(10)
    with pytest.raises(ValueError, match=r"horizon must lie in \[1, inf\), got 0"):
        model.prorate(0)


@pytest.mark.parametrize(("horizon", "scale"), [(None, 0.03), (25, 0.2), (10_000, 0.01)])
def test_the_output_scale_goes_by_the_root_of_the_horizon(horizon, scale):
    assert TreeCost(*boxes(1, 1), horizon=horizon).output_scale == pytest.approx(scale)


# -- Spaces and arguments --------------------------------------------------------------------


def test_trees_for_an_env_have_its_spaces_its_time_limit_and_its_names():
    """Pendulum: three numbers, one action, 200 steps."""
    env = gym.make("Pendulum-v1")
    model = TreeCost.for_env(env, num_members=2)
    assert (model.obs_shape, model.act_dim, model.horizon) == ((3,), 1, 200)
    assert (model.output_scale, model.num_members) == (200**-0.5, 2)
    assert model.names == ("obs[0]", "obs[1]", "obs[2]", "action[0]")
    named = TreeCost.for_env(env, names=["cos", "sin", "speed", "torque"], horizon=None)
    assert named.names == ("cos", "sin", "speed", "torque")
    assert (named.horizon, named.output_scale) == (None, 0.03)
    with pytest.raises(TypeError, match=r"takes an env, .* got 'CartPole-v1'; make it first"):
        TreeCost.for_env("CartPole-v1")


def test_images_are_refused_in_favour_of_the_network():
    message = r"got images \(8, 8, 3\): .*; use CostModel, whose network has convolutions"
    with pytest.raises(ValueError, match=message):
        TreeCost(*boxes((8, 8, 3), 1))


@pytest.mark.parametrize(
    ("names", "found"),
    [(["a"], "got 1"), (["a", "b", "c"], "got 3"), (["a", "a"], "got 2"), ([], "got 0")],
)
def test_names_that_are_missing_or_doubled_are_refused(names, found):
    with pytest.raises(ValueError, match=rf"names of inputs are one per number, .*: 2, {found}"):
        TreeCost(*boxes(1, 1), names=names)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_members": 0}, r"num_members must lie in \[1, .*, got 0"),
        ({"pessimism": math.nan}, r"pessimism must lie in \(-inf, inf\), got nan; 0 is the plain"),
        ({"pessimism": math.inf}, r"pessimism must lie in \(-inf, inf\), got inf"),
        ({"discount": 1.1}, r"discount must lie in \(0, 1\], got 1.1"),
        ({"output_scale": 0.0}, r"output_scale must lie in \(0, inf\), got 0.0"),
        ({"horizon": 0}, r"horizon must lie in \[1, inf\), got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        TreeCost(*boxes(1, 1), **option)


@pytest.mark.parametrize("given", [3, (84, 84, 4), None])
def test_sizes_in_place_of_spaces_are_refused(given):
    with pytest.raises(TypeError, match=r"got .*, or use TreeCost\.for_env\(env\)"):
        TreeCost(given, Discrete(2))


@pytest.mark.parametrize(("obs_dim", "act_dim"), [(2, 3), (3, 1), (6, 2)])
def test_an_episode_of_other_sizes_is_refused_even_if_their_sum_is_the_same(obs_dim, act_dim):
    model, other = random_model(), episodes(4, obs_dim=obs_dim, act_dim=act_dim)
    message = rf"act_dim\) = \(3, 2\), got \({obs_dim}, {act_dim}\)"
    with pytest.raises(ValueError, match=message):
        model.score(other)
    with pytest.raises(ValueError, match=message):
        model.step_cost(other[0].obs, other[0].actions)
    with pytest.raises(ValueError, match=message):
        model.member_scores(other)


@pytest.mark.parametrize("leading", [((5,), (4,)), ((2, 3), (3, 2)), ((6,), (2, 3))])
def test_observations_and_actions_of_different_leading_axes_are_refused(leading):
    """(2, 3) and (3, 2) are six steps each, but not the same ones."""
    obs, actions = (torch.zeros(*axes, dim) for axes, dim in zip(leading, (3, 2), strict=True))
    with pytest.raises(ValueError, match=r"."):
        random_model()(obs, actions)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e300])
def test_what_is_not_finite_in_float32_is_refused(bad):
    with pytest.raises(NonFiniteError, match="obs of a cost model must be finite, got NaN or an "):
        random_model().step_cost(np.array([[0, bad, 0]]), np.zeros((1, 2)))
    with pytest.raises(NonFiniteError, match="actions of a cost model must be finite"):
        random_model().step_cost(np.zeros((1, 3)), np.array([[0, bad]]))


# -- Envs ------------------------------------------------------------------------------------


def late_steps_cost():
    """Of a `Counter`: 3 from the third step on, whose t is 2, before that 1."""
    return model_of([stump(1.0, 3.0, at=1.5)], obs_dim=2)


def test_the_wrapper_reports_the_cost_of_trees():
    model = late_steps_cost()
    env = PreferenceCostWrapper(TimeLimit(Counter(99), 4), model)
    env.reset(seed=0)
    infos = [env.step(np.array([0.5], np.float32))[-1] for _ in range(4)]
    assert [info["cost"] for info in infos] == [1, 1, 3, 3]
    assert [info["true_cost"] for info in infos] == [0.5] * 4
    assert model.score(finished_trajectories(infos[-1])).tolist() == [8]


def test_the_wrapper_of_vector_envs_reports_the_cost_of_trees():
    vector = pytest.importorskip("gymnasium", "1.1").vector
    envs = vector.SyncVectorEnv([lambda n=n: TimeLimit(Counter(99), n) for n in (2, 3)])
    model = late_steps_cost()
    envs = PreferenceCostVectorWrapper(envs, model)
    envs.reset(seed=0)
    infos = [envs.step(np.zeros((2, 1), np.float32))[-1] for _ in range(3)]
    assert [info["cost"].tolist() for info in infos] == [[1, 1], [1, 1], [0, 3]]  # a reset step
    ended = [finished_trajectories(info) for info in infos]
    assert [model.score(one).tolist() for one in ended] == [[], [2], [5]]


# -- State -----------------------------------------------------------------------------------


def test_a_state_is_taken_over_whatever_the_number_of_trees():
    few, many = random_model(num_trees=2, seed=1), random_model(num_trees=30, seed=2)
    none = TreeCost(*boxes(3, 2), output_scale=1.0)
    given = episodes(20)
    for target in (random_model(num_trees=7, seed=3), TreeCost(*boxes(3, 2), output_scale=1.0)):
        for source in (few, many, none):
            target.load_state_dict(source.state_dict())
            assert target.num_trees == source.num_trees
            assert target.score(given).tolist() == source.score(given).tolist()


def test_a_state_survives_what_its_model_becomes_later():
    model, given = random_model(), episodes(20)
    state, before = copy.deepcopy(model.state_dict()), model.score(given)
    model.set_trees(trees_of([constant(1.0)]))
    model.load_state_dict(state)
    assert model.score(given) == before


def test_a_state_that_lacks_something_or_makes_no_sense_is_refused():
    model = model_of([stump(1.0, 3.0)])
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"left"'):
        model.load_state_dict({k: v for k, v in state.items() if k != "left"})
    with pytest.raises(RuntimeError, match="a child does not come after its parent"):
        model.load_state_dict({**state, "left": changed(state["left"], (0, 0, 0), 0)})
    with pytest.raises(RuntimeError, match=r"of 2 x 1 trees must be .*got .*\(1, 1, 7\)"):
        model_of([constant(0.0)], [constant(0.0)]).load_state_dict(state)
    assert costs_of(model, 0, 1) == [1, 3]


def test_a_state_with_something_else_in_it_is_refused():
    model = random_model()
    with pytest.raises(RuntimeError, match="junk"):
        model.load_state_dict({**model.state_dict(), "junk": torch.zeros(1)})


# -- Files -----------------------------------------------------------------------------------


def test_saved_trees_come_back_with_equal_costs_and_their_info(tmp_path):
    path, given = tmp_path / "new folder" / "model.safetensors", episodes(10, 40)
    options = {"discount": 0.99, "output_scale": 0.5, "horizon": 40, "pessimism": 0.3}
    model = random_model(num_members=3, **options)
    info = {"env_id": "Toy-v0", "dead_zone": 0.75, "epochs": 12, "note": None}
    model.save(path, **info)
    for loaded, loaded_info in (TreeCost.load(path), load_cost_model(path)):
        assert isinstance(loaded, TreeCost)
        assert loaded_info == info
        assert (loaded.obs_shape, loaded.act_dim, loaded.num_members) == ((3,), 2, 3)
        assert {name: getattr(loaded, name) for name in options} == options
        np.testing.assert_array_equal(loaded.score(given), model.score(given))
        for ours, theirs in zip(loaded.trees, model.trees, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pooled", [True, False])
def test_names_and_groups_come_back(tmp_path, pooled):
    path = tmp_path / "model.safetensors"
    model = TreeCost(LIDAR, Box(-1, 1, (1,)), pooled=pooled)
    model.save(path)
    loaded, _ = TreeCost.load(path)
    assert (loaded.read_names, loaded.groups) == (model.read_names, model.groups)
    assert loaded.score(episodes(3, obs_dim=6, act_dim=1)).tolist() == [0]


def test_equal_models_make_equal_files(tmp_path):
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path in paths[:2]:
        random_model(num_members=2).save(path, note="x")
    TreeCost.load(paths[0])[0].save(paths[2], note="x")
    assert len({path.read_bytes() for path in paths}) == 1


@pytest.mark.parametrize("num_members", [1, 64, 65])
def test_as_many_members_as_can_be_made_can_be_saved_and_read(tmp_path, num_members):
    path, members = tmp_path / "model.safetensors", [[constant(float(i))] for i in range(65)]
    try:
        model = model_of(*members[:num_members])
    except ValueError:  # before anything is trained
        assert num_members > 64
        return
    model.save(path)
    assert TreeCost.load(path)[0].num_members == num_members


def test_a_file_of_more_trees_than_any_training_grows_is_refused():
    """Each takes a kilobyte when it is read, a tenth of which is in the file."""
    with pytest.raises(MismatchError, match="20,000 trees at most, got 1 x 20,001"):
        model_of([constant(0.0)] * 20_001)


def test_trees_networks_and_ensembles_are_not_read_as_each_other(tmp_path):
    trees, net, several = (tmp_path / f"{name}.safetensors" for name in ("trees", "net", "several"))
    random_model().save(trees)
    CostModel(*boxes(3, 2)).save(net)
    CostModelEnsemble([CostModel(*boxes(3, 2)), CostModel(*boxes(3, 2))]).save(several)
    with pytest.raises(MismatchError, match=r"trees\.safetensors holds trees, .*TreeCost\.load"):
        CostModel.load(trees)
    with pytest.raises(MismatchError, match=r"trees\.safetensors"):
        CostModelEnsemble.load(trees)
    for path in (net, several):
        with pytest.raises(MismatchError, match=rf"{path.name} holds a network.*load_cost_model"):
            TreeCost.load(path)
    assert isinstance(load_cost_model(net)[0], CostModel)
    assert isinstance(load_cost_model(several)[0], CostModelEnsemble)


def test_an_ensemble_that_is_asked_to_read_trees_says_that_they_are_trees(tmp_path):
    random_model().save(tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"holds trees|TreeCost|load_cost_model"):
        CostModelEnsemble.load(tmp_path / "model.safetensors")


def test_trees_are_read_and_scored_where_lightgbm_cannot_be_imported(tmp_path):
    path, (episode,) = tmp_path / "model.safetensors", episodes(20)
    model = random_model()
    model.save(path)
    np.savez(tmp_path / "rows.npz", obs=episode.obs, actions=episode.actions)
    code = f"""
import sys
sys.modules["lightgbm"] = None
import numpy as np, pbcrl
from pbcrl.ensemble import load_cost_model
rows = np.load({str(tmp_path / "rows.npz")!r})
model, _ = load_cost_model({str(path)!r})
try:
    pbcrl.TreeTrainer(model, rng=np.random.default_rng(0))
except ImportError as error:
    assert "pbcrl[trees]" in str(error), error
else:
    raise AssertionError
print(model.score([pbcrl.Trajectory(rows["obs"], rows["actions"])])[0].hex())
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, check=True, text=True
    )
    assert float.fromhex(done.stdout.strip()) == model.score([episode])[0]


# -- Hostile files ---------------------------------------------------------------------------


@contextmanager
def little_time_and_memory():
    resource = pytest.importorskip("resource")
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.perf_counter() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def write(path, model, *, tensors=None, **config):
    about = {
        "kind": "trees",
        "obs_shape": list(model.obs_shape),
        "act_dim": model.act_dim,
        "discount": model.discount,
        "output_scale": model.output_scale,
        "horizon": model.horizon,
        "num_members": model.num_members,
        "pessimism": model.pessimism,
        "pooled": model.pooled,
        "names": list(model.names),
        **config,
    }
    save_tensors(
        path,
        kind="cost-model",
        tensors={**model.state_dict(), **(tensors or {})},
        meta={"config": about, "info": {}},
    )


def two_nodes():
    """s <= 0 goes to leaf 0; what is above it, to the second node."""
    return model_of([([(0, 0.0, leaf(0), 1), (1, 0.5, leaf(1), leaf(2))], [1.0, 2.0, 4.0])])


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def test_what_write_writes_is_what_a_model_saves(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    write(one, two_nodes())
    two_nodes().save(other)
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("name", "place", "value", "finding"),
    [
        ("right", 0, 0, "a child does not come after its parent"),  # the root is its own child
        ("left", 1, 0, "a child does not come after its parent"),  # a cycle
        ("left", 1, 1, "a child does not come after its parent"),
        ("left", 0, 1, "has not one parent"),  # the second node is used twice
        ("right", 0, leaf(0), "has not one parent"),  # leaf 0 twice, the second node nowhere
        ("right", 1, leaf(1), "has not one parent"),
        ("right", 1, leaf(3), "has not one parent"),  # two nodes have three leaves
        ("right", 0, 2, "has not one parent"),  # a node that is not used
        ("right", 0, 7, "a child does not come after its parent"),
        ("right", 0, 127, "a child does not come after its parent"),
        ("right", 1, leaf(8), "a child is no leaf"),
        ("right", 1, -127, "a child is no leaf"),
        ("right", 1, UNUSED, "an unused node .* has a child"),
        ("left", 2, leaf(3), "an unused node .* has a child"),
        ("feature", 0, 2, "a node reads an input beyond the 2 that there are"),
        ("feature", 1, -1, "a node reads an input beyond the 2"),
        ("feature", 6, 2**31 - 1, "a node reads an input beyond the 2"),
        ("threshold", 0, math.nan, "a leaf or a threshold is not finite"),
        ("value", 0, math.nan, "a leaf or a threshold is not finite"),
        ("value", 7, math.inf, "a leaf or a threshold is not finite"),
    ],
)
def test_arrays_that_make_no_tree_are_refused(tmp_path, name, place, value, finding):
    path, model = tmp_path / "model.safetensors", two_nodes()
    bad = changed(getattr(model, name), (0, 0, place), value)
    write(path, model, tensors={name: bad})
    with little_time_and_memory(), pytest.raises(MismatchError, match=f"{path}: .*{finding}"):
        TreeCost.load(path)
    with pytest.raises(MismatchError, match=finding):
        model.set_trees(model.trees._replace(**{name: bad}))
    assert costs_of(model, -1, 1) == [1, 2]  # as it was


def test_an_unused_node_between_used_ones_is_refused():
    trees = trees_of(
        [([(0, 0.0, leaf(0), 2), (0, 0, UNUSED, UNUSED), (0, 1.0, leaf(1), leaf(2))], [0.0] * 8)]
    )
    with pytest.raises(MismatchError, match="an unused node lies between used ones"):
        check_trees(trees, num_members=1, num_inputs=2)


@pytest.mark.parametrize("name", Trees._fields)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.long(),
        lambda x: x[..., :-1].contiguous(),
        lambda x: x[0],
        lambda x: x[None],
        lambda x: torch.cat([x, x]),  # a member more
        lambda x: torch.cat([x, x], dim=1),  # a tree more than the others
        lambda x: x.flatten(),
        lambda x: x.sum(),
        lambda x: x[:, :0],
    ],
)
def test_arrays_of_another_dtype_or_shape_are_refused(tmp_path, name, change):
    path, model = tmp_path / "model.safetensors", two_nodes()
    write(path, model, tensors={name: change(getattr(model, name))})
    with pytest.raises(MismatchError, match=rf"{path}: .* of 1 x -?\d+ trees must be torch\."):
        TreeCost.load(path)


def test_a_file_with_another_array_or_without_one_is_refused(tmp_path):
    path, model = tmp_path / "model.safetensors", two_nodes()
    write(path, model, tensors={"more": torch.zeros(1)})
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        TreeCost.load(path)
    config = {"obs_shape": [1], "act_dim": 1, "num_members": 1, "names": ["a", "b"]}
    meta = {"config": {"kind": "trees", **config}, "info": {}}
    save_tensors(path, kind="cost-model", tensors={"left": model.left}, meta=meta)
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        TreeCost.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["a"]},
        {"names": ["a", "a"]},
        {"names": ["a", "b", "c"]},
        {"names": None},
        {"names": 2},
        {"names": [1, 2]},
        {"names": [["a"], ["b"]]},
        {"num_members": 10**9},
        {"num_members": 0},
        {"num_members": -1},
        {"num_members": None},
        {"num_members": 1.5},
        {"num_members": 2},
        {"obs_shape": [10**9]},
        {"obs_shape": [10**12, 10**12]},
        {"obs_shape": [2, 2, 3]},
        {"obs_shape": []},
        {"obs_shape": [0], "names": ["a"]},
        {"obs_shape": [-1], "act_dim": 3},
        {"obs_shape": None},
        {"act_dim": 10**9},
        {"act_dim": None},
        {"act_dim": 0, "names": ["a"]},
        {"discount": 2.0},
        {"output_scale": math.nan},
        {"horizon": "long"},
        {"pessimism": math.inf},
        {"more": 1},
    ],
    ids=str,
)
def test_a_description_that_makes_no_model_is_refused(tmp_path, change):
    path = tmp_path / "model.safetensors"
    write(path, two_nodes(), **change)
    for load in (TreeCost.load, load_cost_model):
        with little_time_and_memory(), pytest.raises(StorageError, match=r"model\.safetensors"):
            load(path)


@pytest.mark.parametrize("meta", [{}, {"config": {}}, {"config": [1], "info": {}}])
def test_a_description_that_describes_nothing_is_refused(tmp_path, meta):
    path = tmp_path / "model.safetensors"
    save_tensors(path, kind="cost-model", tensors=two_nodes().state_dict(), meta=meta)
    for load in (TreeCost.load, load_cost_model):
        with pytest.raises(StorageError, match=r"model\.safetensors"):
            load(path)


def test_a_damaged_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        TreeCost.load(path)
    two_nodes().save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="damaged or not a file of this package"):
        TreeCost.load(path)
    save_tensors(path, kind="agent", tensors=two_nodes().state_dict(), meta={})
    with pytest.raises(MismatchError, match="holds 'agent', not 'cost-model'"):
        TreeCost.load(path)


@settings(law, max_examples=300)
@given(st.integers(0, 10**6), st.lists(st.integers(-10, 8) | st.just(UNUSED), max_size=4))
def test_what_is_accepted_as_a_tree_is_scored_as_one(seed, values):
    """Some children of a sound tree are replaced; if it still passes, walking it ends."""
    rng = np.random.default_rng(seed)
    trees = trees_of([random_tree(rng, 2)])
    for value in values:
        side = trees.left if rng.random() < 0.5 else trees.right
        side[0, 0, rng.integers(7)] = value
    model = TreeCost(*boxes(1, 1), output_scale=1.0)
    try:
        model.set_trees(trees)
    except MismatchError:
        assert values  # sound ones pass
        return
    rows = rng.normal(size=(20, 2)).astype(np.float32)
    expected = [walk(trees, row) for row in rows]
    np.testing.assert_allclose(model.step_cost(rows[:, :1], rows[:, 1:]), expected, atol=1e-6)
