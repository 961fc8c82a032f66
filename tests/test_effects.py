"""What a learned cost has learned: exact on trees by hand, found on rules, by label, in words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from pbcrl import CostModel, CostModelEnsemble, Trajectory, TreeCost
from pbcrl.effects import Threshold, effects, telling
from pbcrl.trees import Trees

LIDAR = tuple(f"lidar[{i}]" for i in range(6))


def stumps(*splits, names=None, obs_dim=3, pooled=True, spaces=None):
    """A model whose step costs `height` for each (column, threshold, height) that it is above."""
    spaces = spaces or (Box(0, 1, (obs_dim,)), Box(-1, 1, (1,)))
    model = TreeCost(*spaces, output_scale=1.0, names=names, pooled=pooled)
    trees = [torch.zeros(1, len(splits), 7) for _ in range(4)] + [torch.zeros(1, len(splits), 8)]
    trees[2:4] = torch.full((2, 1, len(splits), 7), -128.0)
    for r, (column, threshold, height) in enumerate(splits):
        place = column if isinstance(column, int) else model.read_names.index(column)
        trees[0][0, r, 0], trees[1][0, r, 0], trees[4][0, r, 1] = place, threshold, height
        trees[2][0, r, 0], trees[3][0, r, 0] = -1, -2
    types = torch.int32, torch.float32, torch.int8, torch.int8, torch.float32
    model.set_trees(Trees(*(part.to(dtype) for part, dtype in zip(trees, types, strict=True))))
    return model


def drives(obs_dim=3, *, episodes=20, steps=100, act_dim=1, seed=0):
    """Episodes of independent uniform numbers in [0, 1]."""
    rng = np.random.default_rng(seed)
    return [
        Trajectory(
            *(rng.uniform(0, 1, (steps, dim)).astype(np.float32) for dim in (obs_dim, act_dim))
        )
        for _ in range(episodes)
    ]


def measured(model, trajectories, *, seed=0, **kwargs):
    """Effects by name."""
    found = effects(model, trajectories, rng=np.random.default_rng(seed), **kwargs)
    assert [e.importance for e in found] == sorted((e.importance for e in found), reverse=True)
    return {effect.name: effect for effect in found}


class Rule(torch.nn.Module):
    """A network that is a rule."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, obs, actions):
        return self.rule(obs, actions)


def network(rule, obs_dim=3):
    spaces = Box(0, 1, (obs_dim,)), Box(-1, 1, (1,))
    return CostModel(*spaces, net=Rule(rule), output_scale=1.0)


# -- Single inputs ---------------------------------------------------------------------------------


def test_a_tree_of_one_split_has_its_threshold_and_its_step_and_nothing_else_counts():
    found = measured(stumps((1, 0.3, 2.0)), drives())
    assert list(found) == ["obs[1]", "obs[0]", "obs[2]", "action[0]"]
    effect = found["obs[1]"]
    assert effect.threshold.at == np.float32(0.3)
    assert effect.threshold.change == pytest.approx(2)
    np.testing.assert_array_equal(effect.costs, [0, 2])
    np.testing.assert_allclose(effect.edges, [0.01, 0.3, 0.99], atol=0.01)
    assert effect.importance == pytest.approx(1, abs=0.05)
    assert effect.spread == pytest.approx(1)
    assert effect.rule == "cost rises above 0.30 (+2 per step)"
    assert effect.shown_threshold == "0.30"
    for name in ("obs[0]", "obs[2]", "action[0]"):
        assert (found[name].importance, found[name].spread) == (0, 0)
        assert found[name].threshold is None
        assert found[name].rule == "no effect"
        assert found[name].shown_threshold == ""


def test_a_cost_that_falls_rises_below_its_threshold():
    found = measured(stumps((3, 0.25, -0.5)), drives())["action[0]"]
    assert found.threshold.change == pytest.approx(-0.5)
    assert found.rule == "cost rises below 0.25 (+0.5 per step)"


def test_of_several_splits_that_of_the_largest_step_is_the_threshold():
    found = measured(stumps((0, 0.2, 0.3), (0, 0.6, 1.0), (0, 0.8, 0.3)), drives())["obs[0]"]
    assert found.threshold.at == np.float32(0.6)
    np.testing.assert_allclose(found.costs, [0, 0.3, 1.3, 1.6], rtol=1e-6)


@pytest.mark.parametrize(
    ("splits", "thresholds", "rule"),
    [
        (
            [(0, 0.2, -1.0), (0, 0.8, 0.5)],
            {0.2: -1.0, 0.8: 0.5},
            "cost rises below 0.20 (+1 per step) and above 0.80 (+0.5 per step)",
        ),
        (
            [(0, 0.3, 1.0), (0, 0.7, -1.5)],
            {0.7: -1.5, 0.3: 1.0},
            "cost rises above 0.30 (+1 per step) and falls above 0.70 (-1.5 per step)",
        ),
        ([(0, 0.3, 1.0), (0, 0.7, -0.3)], {0.3: 1.0}, "cost rises above 0.30 (+1 per step)"),
    ],
)
def test_a_valley_and_a_hill_have_two_thresholds_if_both_matter(splits, thresholds, rule):
    found = measured(stumps(*splits), drives())["obs[0]"]
    assert {round(t.at, 6): round(t.change, 5) for t in found.thresholds} == thresholds
    assert found.threshold == found.thresholds[0]
    assert found.rule == rule


def test_a_small_step_near_the_end_is_not_mistaken_for_the_large_one_beside_it():
    found = measured(stumps((0, 0.04, -0.2), (0, 0.1, -0.6)), drives())["obs[0]"]
    assert found.threshold.at == np.float32(0.1)
    assert found.threshold.change < -0.6


def test_two_inputs_that_count_alike_have_an_importance_of_the_root_of_a_half():
    found = measured(stumps((0, 0.5, 1.0), (2, 0.5, 1.0)), drives(episodes=40))
    for name in ("obs[0]", "obs[2]"):
        assert found[name].importance == pytest.approx(0.5**0.5, abs=0.04)
        assert found[name].spread == pytest.approx(0.5**0.5, abs=0.04)


def test_an_interaction_counts_in_the_importance_and_not_in_the_spread():
    """The sign of a product: neither input says anything by itself."""
    model = network(lambda obs, _: torch.sign((obs[..., 0] - 0.5) * (obs[..., 1] - 0.5)))
    found = measured(model, drives(episodes=40))
    for name in ("obs[0]", "obs[1]"):
        assert found[name].importance == pytest.approx(1, abs=0.06)
        assert found[name].spread < 0.15


@pytest.mark.parametrize("pessimism", [0.0, 1.0])
def test_the_curve_is_the_mean_over_the_steps_with_one_input_set(pessimism):
    torch.manual_seed(0)
    model = CostModel(Box(0, 1, (3,)), Box(-1, 1, (1,)), hidden_sizes=(8,))
    members = [model, CostModel(Box(0, 1, (3,)), Box(-1, 1, (1,)), hidden_sizes=(8,))]
    for parameter in (p for member in members for p in member.parameters()):
        torch.nn.init.normal_(parameter)
    model = CostModelEnsemble(members, pessimism=pessimism)
    trajectories = drives(episodes=3, steps=20)
    obs = np.concatenate([trajectory.obs for trajectory in trajectories])
    actions = np.concatenate([trajectory.actions for trajectory in trajectories])
    found = measured(model, trajectories)["obs[2]"]
    assert (found.edges[0], found.edges[-1]) == pytest.approx(np.percentile(obs[:, 2], [1, 99]))
    for middle, cost in zip((found.edges[1:] + found.edges[:-1]) / 2, found.costs, strict=True):
        moved = obs.copy()
        moved[:, 2] = middle
        assert cost == pytest.approx(model.step_cost(moved, actions).mean(), rel=1e-5)


def test_the_threshold_of_a_network_is_as_fine_as_its_curve():
    model = network(lambda obs, _: (obs[..., 1] > 0.3).float())
    found = measured(model, drives())["obs[1]"]
    assert len(found.costs) == 24
    assert found.threshold.at == pytest.approx(0.3, abs=0.5 / 24)
    assert found.threshold.change == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("kind", ["trees", "network"])
def test_switches_have_two_values_and_constants_no_effect(kind):
    trajectories = [
        Trajectory(
            np.float32(one.obs * [1, 0, 0] + [0, 7, 0] + (one.obs > 0.9) * [0, 0, 1]), one.actions
        )
        for one in drives()
    ]
    if kind == "trees":
        model = stumps((2, 1e-35, 1.0), (1, 6.0, 1.0))
    else:
        model = network(lambda obs, _: obs[..., 2] + (obs[..., 1] > 6))
    found = measured(model, trajectories)
    np.testing.assert_allclose(found["obs[2]"].costs, [1, 2])
    assert found["obs[2]"].threshold.change == pytest.approx(1)
    assert found["obs[1]"].threshold is None
    assert found["obs[1]"].costs.tolist() == pytest.approx([1.1], abs=0.05)


@pytest.mark.parametrize("value", [1e16, -1e17, 3e38, 0])
def test_a_constant_that_is_huge_has_no_effect_either(value):
    """Such as what stands for "nothing in sight"; a run once stopped at its card."""
    trajectories = [
        Trajectory(np.float32(one.obs * [1, 0, 1] + [0, value, 0]), one.actions) for one in drives()
    ]
    found = measured(stumps((0, 0.5, 1.0)), trajectories)["obs[1]"]
    assert found.threshold is None
    assert {kind: share.sum() for kind, share in found.shares.items()} == {"all": pytest.approx(1)}


def test_a_model_that_has_learned_nothing_has_no_effects():
    found = measured(stumps(), drives())
    assert {effect.importance for effect in found.values()} == {0}
    assert telling(list(found.values())) == []


# -- Groups ----------------------------------------------------------------------------------------


def test_a_rule_on_the_highest_of_a_group_is_found_at_the_split_of_the_trees():
    names = ("speed", *LIDAR, "push")
    model = stumps(("max lidar", 0.93, 1.0), names=names, obs_dim=7)
    found = measured(model, drives(7))
    assert {"max lidar", "min lidar"} < set(found)
    assert len(found) == len(names) + 2
    effect = found["max lidar"]
    assert (effect.threshold.at, effect.group) == (np.float32(0.93), "lidar")
    assert effect.threshold.change == pytest.approx(1)
    assert effect.importance == pytest.approx(1, abs=0.05)
    assert found["speed"].importance == 0
    assert found["lidar[2]"].importance < 0.7
    (only,) = telling(list(found.values()))
    assert only is effect


@pytest.mark.parametrize("how", ["max", "min"])
def test_a_rule_on_an_extreme_is_found_in_a_network_by_names(how):
    def rule(obs, _):
        part = obs[..., 1:7]
        return (part.amax(-1) > 0.9).float() if how == "max" else (part.amin(-1) < 0.1).float()

    found = measured(network(rule, 8), drives(8), names=("speed", *LIDAR, "gear", "push"))
    first, *others = telling(list(found.values()))
    assert (first.name, others) == (f"{how} lidar", [])
    assert first.threshold.at == pytest.approx(0.9 if how == "max" else 0.1, abs=0.02)
    assert np.sign(first.threshold.change) == (1 if how == "max" else -1)
    assert first.spread > 0.9


def test_trees_that_split_single_inputs_tell_their_extreme_at_one_of_their_splits():
    splits = [(i, 0.8 + 0.01 * i, 1.0) for i in range(6)]
    found = measured(stumps(*splits, names=(*LIDAR, "push"), obs_dim=6, pooled=False), drives(6))
    assert found["max lidar"].threshold.at in {np.float32(threshold) for _, threshold, _ in splits}
    assert [effect.name for effect in telling(list(found.values()))] == ["max lidar"]


def test_a_group_of_which_one_input_counts_is_told_by_that_one():
    found = measured(stumps((3, 0.5, 1.0), names=(*LIDAR, "push"), obs_dim=6), drives(6))
    assert [effect.name for effect in telling(list(found.values()))] == ["lidar[3]"]


def test_what_comes_with_a_group_by_chance_is_not_its_effect():
    """Steps near a wall are fast here, and only speed costs: mean costs by lidar would differ."""
    trajectories = [
        Trajectory(np.float32(np.concatenate([d.obs, d.obs.max(1, keepdims=True)], 1)), d.actions)
        for d in drives(6)
    ]
    model = stumps((6, 0.9, 1.0), names=(*LIDAR, "speed", "push"), obs_dim=7)
    found = measured(model, trajectories)
    assert found["speed"].threshold.at == np.float32(0.9)
    assert (found["max lidar"].importance, found["max lidar"].threshold) == (0, None)


def test_parts_of_a_dict_space_have_their_keys_as_names():
    spaces = Dict(lidar=Box(0, 1, (5,)), speed=Box(0, 1, (1,))), Box(-1, 1, (1,))
    model = stumps(("min lidar", 0.05, -1.0), ("speed", 0.7, 1.0), spaces=spaces)
    found = measured(model, drives(6))
    assert set(found) == {
        *(f"lidar[{i}]" for i in range(5)),
        *("max lidar", "min lidar", "speed", "action[0]"),
    }
    assert [effect.rule for effect in telling(list(found.values()))] == [
        "cost rises above 0.70 (+1 per step)",
        "cost rises below 0.05 (+1 per step)",
    ]


# -- Data, labels, and what is told ----------------------------------------------------------------


def test_steps_are_counted_by_the_label_of_their_episode_and_unlabelled_ones_left_out():
    slow, fast, unknown = drives(episodes=10), drives(episodes=2, seed=1), drives(episodes=2)
    slow = [replace(drive, obs=drive.obs / 2) for drive in slow]
    fast = [replace(drive, obs=drive.obs / 2 + 0.5) for drive in fast]
    unknown = [replace(drive, obs=drive.obs + 100) for drive in unknown]
    safe = [1.0] * 10 + [0.0, 0.25] + [np.nan, 0.5]
    found = measured(stumps((0, 0.5, 1.0)), [*slow, *fast, *unknown], safe=safe, num_steps=400)
    effect = found["obs[0]"]
    assert set(effect.shares) == {"safe", "unsafe"}
    middle = np.searchsorted(effect.bins, 0.5)
    for kind, here in (("safe", slice(None, middle)), ("unsafe", slice(middle - 1, None))):
        assert effect.shares[kind].shape == (30,)
        assert effect.shares[kind].sum() == pytest.approx(1)
        assert effect.shares[kind][here].sum() == pytest.approx(1)
    assert effect.edges[-1] < 1
    assert len(effect.bins) == 31
    # As many steps of two unsafe episodes as of ten safe ones: half of all are above.
    assert effect.edges[0] < 0.1
    assert measured(stumps((0, 0.5, 1.0)), slow, safe=[1.0] * 10)["obs[0]"].shares.keys() == {
        "safe"
    }


@pytest.mark.parametrize("safe", [None, [np.nan] * 20])
def test_without_labels_all_steps_are_counted(safe):
    effect = measured(stumps((0, 0.5, 1.0)), drives(), safe=safe)["obs[0]"]
    assert set(effect.shares) == {"all"}
    assert effect.shares["all"].sum() == pytest.approx(1)


def test_the_same_generator_gives_the_same_numbers():
    model = stumps((0, 0.5, 1.0), (1, 0.2, 0.5))
    one, same = (measured(model, drives(), seed=3, num_steps=100) for _ in range(2))
    other = measured(model, drives(), seed=4, num_steps=100)
    assert [e.importance for e in one.values()] == [e.importance for e in same.values()]
    assert [e.importance for e in one.values()] != [e.importance for e in other.values()]


def test_of_many_inputs_no_more_steps_are_scored_than_take_a_second(monkeypatch):
    names = (*(f"{kind}[{i}]" for kind in "abcd" for i in range(16)), "x", "y")
    rng = np.random.default_rng(0)
    splits = [(int(rng.integers(66)), rng.uniform(), 1.0) for _ in range(150)]
    model = stumps(*splits, names=names, obs_dim=65)
    scored = []
    score = model.step_cost
    monkeypatch.setattr(
        model, "step_cost", lambda obs, actions: scored.append(len(obs)) or score(obs, actions)
    )
    found = measured(model, drives(65))
    assert len(found) == 66 + 2 * 4
    assert sum(scored) < 220_000


def test_the_most_telling_come_first_and_no_more_than_asked_for():
    model = stumps((0, 0.5, 3.0), (1, 0.5, 2.0), (2, 0.5, 1.0), (3, 0.5, 0.05))
    found = list(measured(model, drives()).values())
    assert [effect.name for effect in telling(found)] == ["obs[0]", "obs[1]", "obs[2]"]
    assert [effect.name for effect in telling(found, most=2)] == ["obs[0]", "obs[1]"]
    assert len(telling(found, least=0.0)) == 4


@pytest.mark.parametrize(
    ("at", "extent", "shown"),
    [
        (0.9312, 0.3, "0.93"),
        (-0.0001, 2.0, "0.00"),
        (1234.56, 900, "1230"),
        (0.00123, 0.01, "0.0012"),
    ],
)
def test_a_threshold_is_shown_as_finely_as_its_range_deserves(at, extent, shown):
    effect = measured(stumps((0, 0.5, 1.0)), drives())["obs[0]"]
    effect = replace(effect, edges=np.array([0.0, extent]))
    assert effect.shown(Threshold(at, 1.0)) == shown


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trajectories": []}, ValueError, "got no trajectory; pass those that the model was"),
        ({"trajectories": [np.zeros(3)]}, TypeError, "a sequence of Trajectory, got ndarray"),
        ({"trajectories": drives(4)}, ValueError, r"= \(3, 1\), got \(4, 1\)"),
        ({"safe": [1.0]}, ValueError, r"got 20 trajectories and labels of shape \(1,\)"),
        (
            {"names": ["a", "b"]},
            ValueError,
            "names of inputs are one per number, .*: 4, got 2, 2 of them",
        ),
        ({"names": ["a", "b", "b", "c"]}, ValueError, "got 4, 3 of them different"),
        ({"rng": 0}, TypeError, "rng is a NumPy generator, got 0"),
        ({"num_steps": 1}, ValueError, "num_steps"),
        (
            {"model": CostModel(Box(0, 255, (8, 8, 3), np.uint8), Box(-1, 1, (1,)))},
            ValueError,
            "images",
        ),
    ],
)
def test_what_has_no_effects_is_refused(arguments, error, message):
    usual = {"model": stumps((0, 0.5, 1.0)), "trajectories": drives()}
    given = {**usual, "rng": np.random.default_rng(0), **arguments}
    with pytest.raises(error, match=message):
        effects(given.pop("model"), given.pop("trajectories"), **given)


def test_at_least_one_effect_is_told():
    with pytest.raises(ValueError, match="most"):
        telling([], most=0)
