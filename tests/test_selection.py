from collections import Counter

import numpy as np
import pytest
import torch

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.selection import SELECTIONS, disagreement, entropy, near_threshold, novelty, uniform
from pbcrl.trajectory import Label, Trajectory
from pbcrl.trees import TreeCost, Trees

from .every_space import boxes

each_selection = pytest.mark.parametrize("select", SELECTIONS.values(), ids=list(SELECTIONS))


class Members:
    """What a selection needs of a model: each member's cost above the limit, here written down.

    Trajectory i of `pool` costs `scores[m][i]` by member m.
    """

    def __init__(self, *scores):
        self.num_members = len(scores)
        self.scores = np.array(scores, float)

    def member_scores(self, trajectories):
        return self.scores[:, [int(t.obs[0, 0]) for t in trajectories]]


def episode(i, value=0.0):
    """Episode number i: a first observation that says so, and the rest."""
    obs = np.full((4, 2), value)
    obs[0, 0] = i
    return Trajectory(obs, np.zeros((4, 1)))


def pool_of(size):
    return [episode(i) for i in range(size)]


def rng(seed=0):
    return np.random.default_rng(seed)


def sets(pairs):
    return {frozenset(pair) for pair in pairs.tolist()}


def labelled(pool, pairs):
    buffer = PreferenceBuffer()
    buffer.add_trajectories(pool)
    buffer.add_labels(np.array(pairs).reshape(-1, 2), [Label(1, 1, 0)] * len(pairs))
    return buffer


# -- What all of them keep to ----------------------------------------------------------------


@each_selection
def test_pairs_are_distinct_and_were_not_asked_before(select):
    pool = pool_of(8)
    model = Members(rng(1).normal(size=8), rng(2).normal(size=8))
    asked = labelled(pool, [(i, j) for i in range(8) for j in range(i)][:20])
    pairs = select(pool, 8, asked=asked, model=model, rng=rng())
    assert pairs.shape == (8, 2)
    assert pairs.dtype == np.int64
    assert len(sets(pairs)) == 8  # all that were left
    assert not sets(pairs) & sets(asked.labelled_pairs)
    with pytest.raises(ValueError, match="the pairs must be distinct"):
        select(pool, 9, asked=asked, model=model, rng=rng())


@each_selection
def test_no_trajectory_comes_twice_while_there_are_others(select):
    pool = pool_of(200)
    model = Members(rng(1).normal(size=200), rng(2).normal(size=200))
    asked = labelled([episode(i, 3.0) for i in range(10)], [(0, 1), (2, 3)])
    pairs = select(pool, 40, asked=asked, model=model, rng=rng())
    assert max(Counter(pairs.flatten().tolist()).values()) == 1


@each_selection
def test_either_member_may_come_first(select):
    """Were the safer one always first, the entropy of Eq. 9 would be 0."""
    pool, scores = pool_of(100), rng(1).normal(size=100)
    model = Members(scores, scores + 0.1 * rng(2).normal(size=100))
    asked = labelled([episode(i) for i in range(4)], [(0, 1)])
    pairs = select(pool, 45, asked=asked, model=model, rng=rng())
    first_is_safer = np.mean(scores[pairs[:, 0]] < scores[pairs[:, 1]])
    assert 0.25 < first_is_safer < 0.75


@each_selection
def test_the_same_seed_chooses_the_same_pairs(select):
    pool = pool_of(30)
    model = Members(rng(1).normal(size=30), rng(2).normal(size=30))
    asked = labelled([episode(i) for i in range(4)], [(0, 1)])
    chosen = [select(pool, 5, asked=asked, model=model, rng=rng(s)) for s in (3, 3, 4)]
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert not np.array_equal(chosen[0], chosen[2])


# -- What each of them looks for -------------------------------------------------------------


def test_uniform_is_draw_pairs_while_nothing_of_the_pool_was_asked():
    asked = labelled(pool_of(5), [(0, 1), (2, 3)])
    chosen = uniform(pool_of(20), 8, asked=asked, rng=rng(7))
    np.testing.assert_array_equal(chosen, draw_pairs(20, 8, rng=rng(7)))


def test_disagreement_asks_where_the_members_prefer_opposite_trajectories():
    """0 or 1? The members disagree. 2 or 3? They agree, and so on any other pair."""
    model = Members([0.0, 1.0, 5.0, 9.0], [1.0, 0.0, 5.0, 9.0])
    pairs = disagreement(pool_of(4), 1, asked=PreferenceBuffer(), model=model, rng=rng())
    assert sets(pairs) == {frozenset((0, 1))}


def test_disagreement_asks_where_the_members_of_one_tree_cost_differ():
    """Steps above 0.5 cost 2 by one member and 0 by the other; above 1.5, both add 10."""
    unused = [-128] * 6
    left = torch.tensor([[[-1, *unused]] * 2] * 2, dtype=torch.int8)  # two members, two trees
    right = torch.tensor([[[-2, *unused]] * 2] * 2, dtype=torch.int8)
    threshold = torch.tensor([[[0.5] * 7, [1.5] * 7]] * 2)
    value = torch.zeros(2, 2, 8)
    value[0, 0, 1], value[:, 1, 1] = 2.0, 10.0
    model = TreeCost(*boxes(2, 1), output_scale=1.0, num_members=2)
    feature = torch.ones(2, 2, 7, dtype=torch.int32)
    model.set_trees(Trees(feature, threshold, left, right, value))
    pool = [episode(i, value) for i, value in enumerate([0.0, 1.0, 2.0])]
    assert model.member_scores(pool).tolist() == [[0, 8, 48], [0, 0, 40]]
    pairs = disagreement(pool, 1, asked=PreferenceBuffer(), model=model, rng=rng())
    assert sets(pairs) == {frozenset((0, 1))}


def test_disagreement_needs_several_members():
    with pytest.raises(ValueError, match="members that can disagree, got a model with one; use"):
        disagreement(pool_of(4), 1, asked=PreferenceBuffer(), model=Members([0.0] * 4), rng=rng())


@pytest.mark.parametrize("select", [disagreement, entropy, near_threshold])
def test_what_looks_at_a_model_says_so_if_there_is_none(select):
    with pytest.raises(ValueError, match=r"there is no model; pass model=, or select by `uniform`"):
        select(pool_of(4), 1, asked=PreferenceBuffer(), model=None, rng=rng())


def test_entropy_asks_about_the_pair_that_is_hardest_to_order():
    model = Members([-3.0, 0.0, 0.4, 3.0])
    pairs = entropy(pool_of(4), 1, asked=PreferenceBuffer(), model=model, rng=rng())
    assert sets(pairs) == {frozenset((1, 2))}


def test_near_threshold_asks_about_the_two_that_are_judged_nearest_to_the_limit():
    model = Members([-0.3, -5.0, 0.2, 5.1])  # the last two of 1 and 3 are far, if alike
    pairs = near_threshold(pool_of(4), 1, asked=PreferenceBuffer(), model=model, rng=rng())
    assert sets(pairs) == {frozenset((0, 2))}


def test_novelty_asks_about_what_is_unlike_all_that_was_asked():
    known = [episode(0, value) for value in (0.0, 0.1, 0.2)]
    pool = [episode(0, value) for value in (0.1, 0.05, 4.0, 5.0)]
    asked = labelled(known, [(0, 1), (1, 2)])
    pairs = novelty(pool, 1, asked=asked, rng=rng())
    assert sets(pairs) == {frozenset((2, 3))}


def test_the_unit_of_a_coordinate_changes_nothing_about_novelty():
    places = rng(1).normal(size=(30, 2))

    def chosen(unit):
        found = [Trajectory(np.tile(p * [unit, 1], (3, 1)), np.zeros((3, 1))) for p in places]
        asked = labelled(found[:10], [(0, 1), (2, 3), (4, 5)])
        return novelty(found[10:], 3, asked=asked, rng=rng())

    np.testing.assert_array_equal(chosen(1.0), chosen(1024.0))


def test_while_nothing_was_asked_novelty_is_chance():
    pool = pool_of(20)
    pairs = novelty(pool, 4, asked=PreferenceBuffer(), rng=rng())
    np.testing.assert_array_equal(pairs, draw_pairs(20, 40, rng=rng())[:4])
