import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.cost_model import CostModel
from pbcrl.dead_zone import DeadZone
from pbcrl.errors import LabelError, MismatchError
from pbcrl.losses import pbci_loss, safety_loss
from pbcrl.metrics import spearman, step_auroc
from pbcrl.oracle import SyntheticOracle, Teacher
from pbcrl.trainer import CostModelTrainer, bootstrapped, poisson_counts
from pbcrl.trajectory import Label, Marks, Trajectory, cut_segments, unsafe_stretches
from pbcrl.tree_trainer import (
    Clip,
    Rows,
    TreeTrainer,
    _Loss,
    _thinned,
    balanced_limit,
    curvature,
)
from pbcrl.trees import TreeCost, Trees

from .every_space import boxes

lightgbm = pytest.importorskip("lightgbm")

NAN = math.nan
LN_2 = math.log(2)
law = settings(derandomize=True, deadline=None, max_examples=60)


def rng(seed=0):
    return np.random.default_rng(seed)


# -- A problem that can be learned -----------------------------------------------------------


def peaky_episodes(num, *, seed, steps=20, inputs=6, peaks=3):
    """A step costs 1 if and only if one of the first inputs is above 0.9; the last is the action.

    Episodes differ in how many of their steps do, from none to 40 %.
    """
    random, made = rng(seed), []
    for share in random.uniform(0, 0.4, size=num):
        rows = random.uniform(size=(steps, inputs)).astype(np.float32)
        rows[:, :peaks] *= 0.9
        costly = random.random(steps) < share
        rows[costly, random.integers(peaks, size=costly.sum())] = random.uniform(
            0.9, 1, size=costly.sum()
        )
        costs = (rows[:, :peaks].max(axis=1) > 0.9).astype(np.float32)
        made.append(Trajectory(rows[:, :-1], rows[:, -1:], costs))
    return made


def labelled(num, *, seed, oracle=None, pairs_each=1.0, steps=20, **sizes):
    """`num` episodes and `pairs_each` as many pairs; safe is what costs at most a fifth."""
    buffer = PreferenceBuffer(peaky_episodes(num, seed=seed, steps=steps, **sizes))
    pairs = draw_pairs(num, int(pairs_each * num), rng=rng(seed))
    oracle = SyntheticOracle(0.2 * steps) if oracle is None else oracle
    buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
    return buffer


def add_labelled(buffer, num, *, seed, limit=4, **sizes):
    """Online: more episodes, and `num` pairs of them; their positions."""
    new = buffer.add_trajectories(peaky_episodes(2 * num, seed=seed, **sizes))
    pairs = new.reshape(-1, 2)
    buffer.add_labels(pairs, SyntheticOracle(limit).label(buffer.queries(pairs)))
    return np.arange(len(buffer) - num, len(buffer))


def fresh_trainer(*, seed=0, inputs=6, steps=20, model=None, **options):
    options = {"rounds": 20, **options}
    sizes = {k: options.pop(k) for k in ("num_members", "discount", "horizon") if k in options}
    if model is None:
        model = TreeCost(*boxes(inputs - 1, 1), output_scale=steps**-0.5, **sizes)
    return TreeTrainer(model, rng=rng(seed), **options)


def assert_same_trees(ours, theirs, **tolerance):
    for name, one, other in zip(Trees._fields, ours.trees, theirs.trees, strict=True):
        if tolerance and name == "value":
            torch.testing.assert_close(one, other, **tolerance)
        else:
            assert torch.equal(one, other), name


def first_trees(model, count):
    """A copy that has them alone."""
    cut = copy.deepcopy(model)
    cut.set_trees(Trees(*(tensor[:, :count] for tensor in model.trees)))
    return cut


def total_loss(model, buffer, **options):
    """From scratch, of the scores of all trajectories."""
    cost = torch.from_numpy(model.score(buffer.trajectories))
    first, second = cost[torch.from_numpy(buffer.labelled_pairs)].unbind(1)
    answers = torch.from_numpy(buffer.labels).unbind(1)
    return float(pbci_loss(first, second, *answers, **options).total)


# -- Gradient and curvature ------------------------------------------------------------------

SETTINGS = {"dead_zone": 0.7, "snr_weight": 0.05, "max_std": 5.0}


class Problem:
    """Episodes of 1 to 12 steps, most of them in several pairs, some labels missing, and outputs.

    Clips, with one that has no label, and marked steps, some of them unknown, if there are any.
    """

    def __init__(self, *, seed=0, discount=1.0, scale=0.4, num_clips=0, num_marks=0, **options):
        random = rng(seed)
        self.settings = {**SETTINGS, **options}
        self.discount, self.scale = discount, scale

        def episode(most=12):
            steps = int(random.integers(1, most + 1))
            return Trajectory(random.normal(size=(steps, 3)), random.normal(size=(steps, 1)))

        buffer = PreferenceBuffer([episode() for _ in range(14)])
        pairs = draw_pairs(14, 25, rng=random)
        labels = [
            Label(
                random.choice([0, 0.2, 0.5, 1, NAN]),
                random.choice([0, 1, NAN]),
                random.choice([0, 1, NAN]),
            )
            for _ in pairs
        ]
        buffer.add_labels(pairs, labels)
        self.batch = buffer.batch(np.arange(25))
        safe = [NAN, 0.0, 1.0, 0.3]
        self.clips = [Clip(episode(3), safe[i % 4]) for i in range(num_clips)]
        marked = [episode() for _ in range(num_marks)]
        self.marks = [Marks(one, random.choice([0, 1, NAN], size=len(one))) for one in marked]
        model = TreeCost(*boxes(3, 1), discount=discount, output_scale=scale)
        self.trainer = TreeTrainer(model, rng=rng(), **self.settings)
        whole = [*self.batch.trajectories, *(clip.trajectory for clip in self.clips)]
        self.rows = Rows(model, whole, self.marks, max_rows=10**6, rng=rng())
        self.loss = _Loss(self.trainer, self.rows, self.batch, self.clips, self.marks)
        self.outputs = random.normal(size=len(self.rows.columns))
        self.random = random

    def total(self, outputs, shifts):
        """The loss by the outputs of all rows, from scratch: no code of the trainer's."""
        costs, start = [], 0
        for one in [*self.batch.trajectories, *(clip.trajectory for clip in self.clips)]:
            weight = self.discount ** torch.arange(len(one), dtype=torch.float64)
            costs.append(self.scale * (weight * outputs[start : start + len(one)]).sum())
            start += len(one)
        cost, clip_cost = torch.stack(costs).tensor_split([len(self.batch.trajectories)])
        first, second = cost[self.batch.pairs].unbind(1)
        loss = pbci_loss(
            first, second, self.batch.preference, *self.batch.safe.unbind(1), **self.settings
        ).total
        if self.clips:
            safe = torch.tensor([clip.safe for clip in self.clips]).double()
            loss = loss + safety_loss(clip_cost - shifts[-2], safe)
        if self.marks:
            unsafe = torch.from_numpy(np.concatenate([mark.unsafe for mark in self.marks]))
            loss = loss + safety_loss(outputs[start:] - shifts[-1], 1 - unsafe)
        return loss


KINDS = {
    "pairs": {},
    "discounted": {"discount": 0.9},
    "no dead zone, no variance term": {"dead_zone": 0.0, "snr_weight": 0.0},
    "variance above its maximum": {"max_std": 0.1},
    "variance without a maximum": {"max_std": None},
    "with clips": {"num_clips": 9, "discount": 0.9},
    "with marks": {"num_marks": 4},
    "with both": {"num_clips": 9, "num_marks": 4},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_gradient_of_every_row_is_that_of_autograd_over_its_output(kind):
    for seed in range(5):
        problem = Problem(seed=seed, **kind)
        found, _ = problem.loss.gradient(problem.outputs)
        outputs = torch.from_numpy(problem.outputs).requires_grad_()
        (expected,) = torch.autograd.grad(problem.total(outputs, problem.loss.shifts), outputs)
        scale = problem.loss.scale
        np.testing.assert_allclose(found / scale, expected, rtol=1e-6, atol=1e-9)
        assert np.abs(found).max() / scale > 1e-3


@pytest.mark.parametrize("kind", [k for k in KINDS if "without" not in k])
def test_the_loss_lies_below_the_parabola_of_its_gradient_and_its_curvature_bound(kind):
    """L(f + Δ) <= L(f) + g Δ + ½ Σ h Δ², for small and for large Δ, along rows and along sums."""
    for seed in range(3):
        problem = Problem(seed=seed, **{**KINDS[kind], "snr_weight": 0.0})
        scale, at = problem.loss.scale, 3 * problem.outputs
        grad, hess = (x / scale for x in problem.loss.gradient(at))
        shifts = list(problem.loss.shifts)
        assert (hess >= 0).all()
        start = float(problem.total(torch.from_numpy(at), shifts))
        for size in (1e-2, 0.3, 1, 3, 10, 100):
            for _ in range(20):
                step = size * problem.random.normal(size=len(at))
                if problem.random.random() < 0.5:  # all steps of a trajectory alike
                    of_row = np.searchsorted(problem.rows.starts, np.arange(len(at)), "right")
                    step = step[of_row - 1] + 0.0
                found = float(problem.total(torch.from_numpy(at + step), shifts))
                assert found <= start + grad @ step + hess @ step**2 / 2 + 1e-9


def test_the_bound_is_tight_where_a_single_safe_episode_costs_0():
    """softplus has the curvature 1/4 there, and one step of weight s moves its cost by s Δ."""
    model = TreeCost(*boxes(1, 1), output_scale=0.5)
    buffer = PreferenceBuffer([Trajectory(np.full((1, 1), x), np.zeros((1, 1))) for x in (0.0, 1)])
    buffer.add_labels([(0, 1)], [Label(NAN, 1, NAN)])
    batch = buffer.batch(np.array([0]))
    rows = Rows(model, batch.trajectories, (), max_rows=9, rng=rng())
    loss = _Loss(TreeTrainer(model, rng=rng()), rows, batch, (), ())
    bound, _ = loss._curvature_bounds(torch.zeros(2).double(), torch.zeros(0).double())
    assert bound.tolist() == pytest.approx([1 / 4, 0])
    grad, hess = loss.gradient(np.zeros(2))
    assert grad.tolist() == pytest.approx([0.5 / 2, 0])
    assert hess.tolist() == pytest.approx([0.25 / 4, 0])


def test_the_curvature_at_0_is_the_second_derivative_of_the_logistic_loss():
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.softplus(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert curvature(x).item() == pytest.approx(second.item()) == pytest.approx(1 / 4)


@law
@given(st.floats(-50, 50), st.floats(-50, 50))
def test_the_curvature_bounds_the_logistic_loss_everywhere(x, y):
    """Jaakkola and Jordan's parabola touches softplus at x, and at -x again."""
    bound = curvature(torch.tensor(x, dtype=torch.float64)).item()
    parabola = np.logaddexp(0, x) + (y - x) / (1 + math.exp(-x)) + bound * (y - x) ** 2 / 2
    assert np.logaddexp(0, y) <= parabola + 1e-9
    mirrored = np.logaddexp(0, x) - 2 * x / (1 + math.exp(-x)) + bound * (2 * x) ** 2 / 2
    assert np.logaddexp(0, -x) == pytest.approx(mirrored, abs=1e-6)


@pytest.mark.parametrize("kind", [k for k in KINDS if "without" not in k])
def test_the_line_search_finds_the_minimum_along_a_direction(kind):
    """Against a grid; nothing is gained uphill, and no cost moves by more than 10."""
    for seed in range(3):
        problem = Problem(seed=seed, **{**KINDS[kind], "snr_weight": 0.0})
        grad, hess = problem.loss.gradient(problem.outputs)
        shifts = list(problem.loss.shifts)
        down = -grad / np.maximum(hess, 1e-3)

        def value(step, problem=problem, down=down, shifts=shifts):
            return float(problem.total(torch.from_numpy(problem.outputs + step * down), shifts))

        found = problem.loss.best_step(problem.outputs, down)
        lowest = min(map(value, np.linspace(0, 2 * found, 101)))
        assert found > 0
        assert value(found) <= lowest + 1e-2 * (value(0) - lowest)
        assert problem.loss.best_step(problem.outputs, -down) == 0
        moved = np.abs(problem.rows.costs(found * down)).max()
        assert moved <= 10 + 1e-9 or problem.marks


def test_a_loss_that_falls_without_end_is_followed_ten_units_of_cost_far():
    buffer = PreferenceBuffer([Trajectory(np.full((1, 1), x), np.zeros((1, 1))) for x in (0.0, 1)])
    buffer.add_labels([(0, 1)], [Label(1, 1, 0)])
    batch, model = buffer.batch(np.array([0])), TreeCost(*boxes(1, 1), output_scale=0.5)
    rows = Rows(model, batch.trajectories, (), max_rows=9, rng=rng())
    loss = _Loss(TreeTrainer(model, rng=rng()), rows, batch, (), ())
    assert loss.best_step(np.zeros(2), np.array([-1.0, 1.0])) == 20  # half of it in cost


# -- Boosting --------------------------------------------------------------------------------


@pytest.mark.parametrize("learning_rate", [0.1, 1.0])
@pytest.mark.parametrize("snr_weight", [0.0, 0.05])
def test_every_tree_lowers_the_training_loss(learning_rate, snr_weight):
    buffer = labelled(60, seed=1, pairs_each=1.5)
    trainer = fresh_trainer(
        learning_rate=learning_rate, snr_weight=snr_weight, dead_zone=0.5, rounds=30
    )
    loss = trainer.fit(buffer)
    options = {"dead_zone": 0.5, "snr_weight": snr_weight}
    losses = [total_loss(first_trees(trainer.model, n), buffer, **options) for n in range(31)]
    assert losses[0] == pytest.approx(2 * LN_2 + (math.log1p(math.exp(0.5)) - LN_2) * 0.5, abs=0.1)
    assert (np.diff(losses) < 1e-6).all()
    assert losses[-1] < 0.5 * losses[0]
    assert loss == pytest.approx(losses[-1], abs=1e-5)


@pytest.mark.parametrize(
    ("num_episodes", "rate"), [(600, 0.1), (1_000, 0.1), (4_000, 0.2), (9_000, 0.3), (10_000, 0.3)]
)
def test_trees_go_further_by_the_root_of_the_number_of_episodes(num_episodes, rate):
    buffer = labelled(0, seed=1)
    add_labelled(buffer, num_episodes // 2, seed=2, limit=0, steps=2)
    by_default, given = (
        fresh_trainer(steps=2, rounds=3, **more) for more in ({}, {"learning_rate": rate})
    )
    by_default.fit(buffer)
    given.fit(buffer)
    assert by_default.model.num_trees == 3
    assert_same_trees(by_default.model, given.model)


def test_swapping_the_members_of_all_pairs_and_their_labels_gives_the_same_trees():
    given = labelled(40, seed=1)
    swapped = PreferenceBuffer(given.trajectories)
    labels = [Label(1 - mu, second, first) for mu, first, second in given.labels.tolist()]
    swapped.add_labels(given.labelled_pairs[:, ::-1], labels)
    models = []
    for buffer in (given, swapped):
        trainer = fresh_trainer()
        trainer.fit(buffer)
        models.append(trainer.model)
    assert_same_trees(*models, rtol=1e-5, atol=1e-7)


def test_the_order_of_the_pairs_does_not_matter():
    given = labelled(40, seed=1)
    shuffled, order = PreferenceBuffer(given.trajectories), rng().permutation(len(given))
    labels = [Label(*row) for row in given.labels[order].tolist()]
    shuffled.add_labels(given.labelled_pairs[order], labels)
    models = []
    for buffer in (given, shuffled):
        trainer = fresh_trainer()
        trainer.fit(buffer)
        models.append(trainer.model)
    assert_same_trees(*models, rtol=1e-5, atol=1e-7)


def test_the_same_seed_grows_the_same_trees():
    """Of 20 inputs each tree sees some."""

    def grown(seed):
        trainer, sizes = fresh_trainer(seed=seed, inputs=20, rounds=8), {"inputs": 20}
        buffer = labelled(40, seed=1, **sizes)
        trainer.pretrain(buffer, labelled(20, seed=2, **sizes))
        trainer.update(buffer, add_labelled(buffer, 20, seed=3, **sizes))
        return trainer.model

    first = grown(0)
    assert first.num_trees > 1
    assert_same_trees(grown(0), first)
    assert not torch.equal(grown(1).feature[:, :1], first.feature[:, :1])


def test_two_threads_grow_the_same_trees_as_one():
    models = []
    for threads in (1, 2):
        trainer = fresh_trainer(threads=threads, rounds=4)
        trainer.fit(labelled(40, seed=1))
        models.append(trainer.model)
    assert_same_trees(*models)


def test_true_costs_reach_the_trees_through_labels_only():
    given = labelled(40, seed=1)
    blind = PreferenceBuffer([Trajectory(t.obs, t.actions) for t in given.trajectories])
    blind.add_labels(given.labelled_pairs, [Label(*row) for row in given.labels.tolist()])
    trainers = [fresh_trainer(), fresh_trainer()]
    for trainer, buffer in zip(trainers, (given, blind), strict=True):
        trainer.fit(buffer)
    assert_same_trees(*(trainer.model for trainer in trainers))


def test_a_fit_replaces_the_trees_that_were_there():
    trainer, buffer = fresh_trainer(rounds=5), labelled(40, seed=1)
    trainer.fit(buffer)
    trainer.fit(buffer)
    assert trainer.model.num_trees == 5
    assert trainer.steps == 10


def test_bytes_are_learned_from_as_numbers():
    trainers, buffers = [], []
    for dtype in (np.uint8, np.float32):
        episodes = [
            Trajectory((255 * t.obs).astype(np.uint8).astype(dtype), t.actions)
            for t in peaky_episodes(40, seed=1)
        ]
        buffers.append(PreferenceBuffer(episodes))
        given = labelled(40, seed=1)
        labels = [Label(*row) for row in given.labels.tolist()]
        buffers[-1].add_labels(given.labelled_pairs, labels)
        trainers.append(fresh_trainer())
        trainers[-1].fit(buffers[-1])
    assert_same_trees(*(trainer.model for trainer in trainers))


@pytest.mark.parametrize("discount", [1.0, 0.97])
def test_labels_of_new_episodes_are_predicted(discount):
    trainer = fresh_trainer(rounds=60, discount=discount)
    trainer.fit(labelled(150, seed=1))
    test = trainer.evaluate(labelled(100, seed=2))
    assert test.pair_accuracy > 0.8
    assert test.safety_accuracy > 0.8


def test_episodes_of_different_lengths_are_learned_from():
    """Costs of a step, not of an episode, carry over to others of another length."""
    whole = peaky_episodes(100, seed=1, steps=40)
    random = rng()
    buffer = PreferenceBuffer(
        [
            Trajectory(t.obs[:n], t.actions[:n], t.costs[:n])
            for t in whole
            for n in [random.integers(1, 41)]
        ]
    )
    pairs = draw_pairs(100, 150, rng=random)
    buffer.add_labels(pairs, SyntheticOracle(3).label(buffer.queries(pairs)))
    trainer = fresh_trainer(rounds=60)
    with pytest.warns(UserWarning, match="episodes differ in length, from 1 to"):
        trainer.fit(buffer)
    assert step_auroc(trainer.model.step_cost, peaky_episodes(40, seed=2)) > 0.9


def test_two_episodes_of_one_step_are_enough_not_to_fail():
    buffer = PreferenceBuffer([Trajectory(np.full((1, 5), x), np.zeros((1, 1))) for x in (0.0, 1)])
    buffer.add_labels([(0, 1)], [Label(1, 1, 0)])
    trainer = fresh_trainer()
    assert trainer.fit(buffer) <= 2 * LN_2 + 1e-6


@pytest.mark.parametrize("num_members", [1, 3])
def test_few_and_short_episodes_are_learned_from(num_members):
    """Of six steps each; LightGBM would put no step at all on a side, and end with an error."""
    for seed in range(8):
        buffer = labelled(12, seed=seed, steps=6, pairs_each=3)
        trainer = fresh_trainer(seed=seed, steps=6, num_members=num_members)
        trainer.fit(buffer)
        assert trainer.model.num_trees > 0


def test_a_tree_with_fewer_leaves_is_finite_too():
    """Else a checkpoint would take it for a model that has diverged."""
    obs = rng().integers(2, size=(40, 20, 2))
    episodes = [Trajectory(one, np.zeros((20, 1)), one[:, 0]) for one in obs]
    buffer, pairs = PreferenceBuffer(episodes), draw_pairs(40, 40, rng=rng())
    buffer.add_labels(pairs, SyntheticOracle(10).label(buffer.queries(pairs)))
    trainer = fresh_trainer(inputs=3)
    trainer.fit(buffer)
    assert (trainer.model.left == -128).any()
    assert all(tensor.isfinite().all() for tensor in trainer.model.trees)


def test_which_steps_cost_is_found_from_150_pairs_of_whole_episodes():
    """20 inputs, of which the largest of 8 decides. The network tells steps apart little better
    than a coin, whose AUROC is 0.5: measured on three seeds, trees 0.99, the network 0.5 to 0.65.
    """
    sizes = {"steps": 50, "inputs": 20, "peaks": 8}
    train, valid = (labelled(2 * n, seed=n, pairs_each=0.5, **sizes) for n in (135, 15))
    test = peaky_episodes(60, seed=3, **sizes)
    trees = fresh_trainer(inputs=20, steps=50, rounds=150)
    trees.pretrain(train, valid)
    assert step_auroc(trees.model.step_cost, test) > 0.95
    torch.manual_seed(0)
    net = CostModel(*boxes(19, 1), output_scale=50**-0.5)
    net.fit_input_scale(train.trajectories)
    CostModelTrainer(net, rng=rng()).pretrain(train, valid, max_epochs=50)
    assert step_auroc(net.step_cost, test) < 0.75


def test_inputs_that_hardly_ever_change_do_not_end_the_growth():
    """38 inputs of 40 are 1 in three steps of 800; a tree that sees them alone has no split."""
    buffer, random = PreferenceBuffer(), rng()
    rare = np.zeros((800, 38), np.float32)
    for column in rare.T:
        column[random.permutation(800)[:3]] = 1
    for one, more in zip(
        peaky_episodes(40, seed=1, inputs=2, peaks=1), np.split(rare, 40), strict=True
    ):
        buffer.add_trajectories([Trajectory(np.c_[one.obs, more], one.actions, one.costs)])
    pairs = draw_pairs(40, 40, rng=rng())
    buffer.add_labels(pairs, SyntheticOracle(4).label(buffer.queries(pairs)))
    sizes = []
    for seed in range(3):
        trainer = fresh_trainer(seed=seed, inputs=40, rounds=20)
        trainer.fit(buffer)
        sizes.append(trainer.model.num_trees)
    assert sizes == [20] * 3


def test_every_tree_goes_down_its_own_gradient_where_the_first_has_no_split():
    """LightGBM keeps a first tree without a split; the next ones were then read one too early."""
    random, buffer = rng(4), PreferenceBuffer()
    for i in range(60):
        obs = np.zeros((50, 40), np.float32)
        obs[random.integers(50), min(i + 1, 39)] = 1  # what a tree that sees it alone cannot split
        obs[:, 0] = costly = random.random(50) < (0.02 if i % 2 else 0.4)
        buffer.add_trajectories([Trajectory(obs, np.zeros((50, 1)), costly.astype(np.float32))])
    pairs = draw_pairs(60, 60, rng=random)
    buffer.add_labels(pairs, SyntheticOracle(5).label(buffer.queries(pairs)))
    for seed in range(6):
        model = TreeCost(*boxes(40, 1), horizon=50)
        TreeTrainer(model, rng=rng(seed), rounds=8).fit(buffer)
        assert model.num_trees
        assert (model.value != 0).any(dim=-1).all()  # of each tree


# -- Clips and marks -------------------------------------------------------------------------


def judged_clips(num, *, seed, length=4, **sizes):
    """One of each episode, unsafe if a step of it costs, as it does in about half of them."""
    clips = cut_segments(peaky_episodes(num, seed=seed, **sizes), length)[:: 20 // length]
    return [Clip(clip, float(clip.true_cost == 0)) for clip in clips]


def marked(num, *, seed, **sizes):
    """Every other step has a mark."""
    episodes = peaky_episodes(num, seed=seed, **sizes)
    return [Marks(t, np.where(np.arange(len(t)) % 2, t.costs, NAN)) for t in episodes]


def test_clips_and_marked_steps_tell_more_of_steps_than_pairs_alone():
    """Measured on three seeds: 0.72 to 0.83 of pairs, 0.91 with clips, 0.96 with marks."""
    sizes = {"inputs": 20, "peaks": 8}
    buffer, test = labelled(24, seed=1, **sizes), peaky_episodes(60, seed=2, **sizes)
    clips, marks = judged_clips(100, seed=3, **sizes), marked(20, seed=4, **sizes)
    found = {}
    for kind, more in {
        "pairs": {},
        "clips": {"clips": clips},
        "marks": {"marks": marks},
        "both": {"clips": clips, "marks": marks},
    }.items():
        trainer = fresh_trainer(inputs=20, rounds=60)
        trainer.fit(buffer, **more)
        found[kind] = step_auroc(trainer.model.step_cost, test)
    assert found["clips"] > found["pairs"] + 0.05
    assert found["marks"] > found["pairs"] + 0.1
    assert found["both"] > found["clips"]


# -- Where most episodes are marked ----------------------------------------------------------


def marked_pairs(num, *, seed, marks=True, limit=4, **sizes):
    """`num` episodes, each in one pair or more, by whoever marks the steps that cost."""
    oracle = SyntheticOracle(limit, marks=marks)
    return labelled(num, seed=seed, oracle=oracle, pairs_each=2.0, **sizes)


@pytest.mark.parametrize("num_members", [1, 2])
def test_marks_of_most_episodes_are_fitted_by_least_squares(num_members):
    """As LightGBM does it, in the order of the labels, whatever these say.

    The second of two members has each episode as often as it is drawn, each time it was marked.
    Each exact mark is shared with the steps beside it; all are learned so well that none is moved.
    An episode of which nothing is known tells nothing.
    """
    buffer = marked_pairs(30, seed=1, peaks=1)
    trainer = fresh_trainer(rounds=120, horizon=20, num_members=num_members)
    trainer.fit(buffer, marks=[Marks(peaky_episodes(1, seed=3)[0], np.full(20, NAN))])
    every = [one for pair in buffer.labelled_pairs for one in pair]  # each time it was marked
    steps = [np.c_[one.obs, one.actions] for one in map(buffer.trajectories.__getitem__, every)]
    costs = [np.pad(buffer.trajectories[one].costs, 1, mode="edge") for one in every]
    target = np.concatenate([np.convolve(one, np.ones(3) / 3, "valid") for one in costs])
    options = {"objective": "l2", "num_leaves": 8, "learning_rate": 0.1, "min_data_in_leaf": 10}
    options |= {"lambda_l2": 0.1, "min_sum_hessian_in_leaf": 0, "feature_pre_filter": False}
    times = np.ones(30)
    if num_members > 1:
        times = poisson_counts(1, 32)[[list(dict.fromkeys(every)).index(i) for i in range(30)]]
    data = lightgbm.Dataset(
        np.concatenate(steps),
        target,
        weight=np.repeat(times[every], 20),
        params=options | {"verbose": -1},
    )
    theirs = lightgbm.train(options | {"verbose": -1, "num_threads": 1}, data, 120)
    test = peaky_episodes(20, seed=2, peaks=1)
    obs, actions = (np.concatenate([getattr(t, x) for t in test]) for x in ("obs", "actions"))
    inputs = torch.from_numpy(obs), torch.from_numpy(actions)
    ours = trainer.model._member_costs(*inputs)[-1].numpy() * 20**0.5
    np.testing.assert_allclose(ours, theirs.predict(np.c_[obs, actions]), atol=1e-5)
    assert step_auroc(trainer.model.step_cost, test) > 0.99


def styled_episodes(num, *, seed):
    """What costs is a peak, in unsafe episodes alone; all steps of these have a style, too."""
    random, episodes = rng(seed), []
    for i in range(num):
        obs = random.uniform(0, 0.8, size=(40, 3)).astype(np.float32)
        obs[:, 1] += 0.5 * (i % 2)
        costs = (random.random(40) < 0.2) * (i % 2)
        obs[costs == 1, 0] = 1
        episodes.append(Trajectory(obs, np.zeros((40, 1)), costs))
    return episodes


@pytest.mark.parametrize("is_marked", [True, False])
def test_the_style_of_unsafe_episodes_costs_what_marks_are_shared_and_no_more(is_marked):
    """Judged where the two come apart: peaks without the style, and the style without peaks.

    The steps beside a peak are not like it here, as they are where time is continuous: so marks
    blame the style, by what they are shared, and more than losses do without marks (0.23, 0.03).
    """
    buffer = PreferenceBuffer(styled_episodes(40, seed=1))
    pairs = draw_pairs(40, 60, rng=rng(2))
    buffer.add_labels(pairs, SyntheticOracle(0, marks=is_marked).label(buffer.queries(pairs)))
    trainer = fresh_trainer(inputs=4, steps=40, horizon=40, rounds=60)
    trainer.fit(buffer)
    obs = np.full((3, 3), 0.4, np.float32)
    obs[1, 0], obs[2, 1] = 1, 0.9  # nothing, a peak, the style
    none, peak, style = trainer.model.step_cost(obs, np.zeros((3, 1), np.float32))
    assert peak > none
    assert not style - none < 0.02 * (peak - none)
    # A fifth of the steps are peaks: so their neighbours get 2/3 · 1/5, and they 1/3 + 2/3 · 1/5.
    assert style - none < (2 / 7 if is_marked else 0.1) * (peak - none)


def test_the_limit_by_marks_tells_safe_episodes_from_unsafe_ones():
    trainer = fresh_trainer(rounds=60, horizon=20)
    trainer.fit(marked_pairs(60, seed=1))
    test = peaky_episodes(200, seed=2)
    is_unsafe = np.array([one.costs.sum() > 4 for one in test])
    called = trainer.model.score(test) > trainer.model.learned_limit
    assert (called == is_unsafe).mean() > 0.9
    # A cost is about the chance of a mark, so C, without its scale, counts the steps that cost.
    assert 4 < trainer.model.learned_limit * 20**0.5 < 5


@pytest.mark.filterwarnings("ignore:all 1200 marked steps are safe:UserWarning")
@pytest.mark.parametrize(
    ("change", "is_by_marks"),
    [
        ({}, True),
        ({"horizon": None}, False),  # no limit holds for all lengths
        ({"clips": [Clip(peaky_episodes(1, seed=3)[0], 0.0)]}, False),  # by another standard
        ({"num_unmarked": 30}, True),
        ({"num_unmarked": 31}, False),
        ({"unsafe": 0.5}, True),
        ({"unsafe": 0.55}, False),  # who marks most steps tells little
        ({"unsafe": 0.0}, False),
        ({"unsafe": NAN}, False),
        ({"unsafe": 0.05, "num_unsafe": 20}, True),
        ({"unsafe": 0.05, "num_unsafe": 19}, False),  # one step of each
    ],
    ids=str,
)
def test_marks_alone_decide_if_at_least_half_of_the_episodes_have_any_that_tell(
    change, is_by_marks
):
    episodes = peaky_episodes(60, seed=1)
    buffer = PreferenceBuffer(episodes)
    pairs = np.arange(60).reshape(-1, 2)
    buffer.add_labels(pairs, SyntheticOracle(4).label(buffer.queries(pairs)))
    unsafe = np.arange(20) < 20 * np.nan_to_num(change.get("unsafe", 0.1))
    unsafe = np.full(20, NAN) if np.isnan(change.get("unsafe", 0.1)) else unsafe.astype(float)
    shown = episodes[change.get("num_unmarked", 0) :]
    marks = [
        Marks(one, unsafe if i < change.get("num_unsafe", 60) else 0 * unsafe)
        for i, one in enumerate(shown)
    ]
    trainer = fresh_trainer(rounds=5, horizon=change.get("horizon", 20))
    trainer.fit(buffer, marks=marks, clips=change.get("clips", ()))
    # By losses a twentieth of the steps costs nothing; else costs are as many as there are marks.
    mean = np.mean(np.concatenate([trainer.model.step_cost(t.obs, t.actions) for t in episodes]))
    share = np.mean([mark.unsafe for mark in marks])
    assert (mean == pytest.approx(share / 20**0.5, rel=0.05)) == is_by_marks
    again, state = fresh_trainer(rounds=5), trainer.state_dict()
    if "clips" not in change:
        again.marks = trainer.marks
        again.load_state_dict(state)
        assert again.fits_marks == trainer.fits_marks == is_by_marks
        del state["fits_marks"]  # as before there were any
        again.load_state_dict(state)
        assert not again.fits_marks


def passing_episodes(num, *, seed, steps=100, above=0.99):
    """It comes near and goes, some five times, and costs while it is there; by default a step."""
    random, made = rng(seed), []
    for _ in range(num):
        phase = np.cumsum(random.uniform(0.2, 0.4, size=steps)) + random.uniform(0, 6)
        near = np.cos(phase)
        costs = (near > above).astype(float)
        obs = np.stack([near, np.sin(phase), random.normal(size=steps)], 1).astype(np.float32)
        made.append(Trajectory(obs, np.zeros((steps, 1), np.float32), costs))
    return made


def test_marks_that_are_off_by_two_steps_find_what_costs_nearly_as_exact_ones_do():
    """Share of the pairs of a costly and a free step that are ordered wrongly; seen: 0.4, 0.8 %."""
    episodes, test = passing_episodes(40, seed=1), passing_episodes(40, seed=2)
    pairs, wrong = np.arange(40).reshape(-1, 2), {}
    for off in (0.0, 0.02):
        oracle = SyntheticOracle(4, marks=True, teacher=Teacher(mark_error=off), rng=rng(3))
        buffer = PreferenceBuffer(episodes)
        buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
        trainer = fresh_trainer(inputs=4, steps=100, horizon=100, rounds=60)
        trainer.fit(buffer)
        wrong[off] = 1 - step_auroc(trainer.model.step_cost, test)
    # A fit to the marks as they are, which finds steps around what costs as dear; seen: 5.6 %.
    target = np.concatenate([mark.unsafe for mark in buffer.marks])
    steps = np.concatenate([mark.trajectory.obs for mark in buffer.marks])
    options = {"objective": "l2", "num_leaves": 8, "min_data_in_leaf": 10, "verbose": -1}
    plain = lightgbm.train(options, lightgbm.Dataset(steps, target), 60)
    wrong["plain"] = 1 - step_auroc(lambda obs, _: plain.predict(obs), test)
    assert wrong[0.0] < 0.01
    assert wrong[0.02] < wrong["plain"] / 3


@pytest.mark.parametrize("lag", [0.0, 0.03])
def test_marks_that_all_are_late_are_taken_back(lag):
    """Step AUROC seen: 1.000 either way; by marks 3 steps late as they are, 0.803."""
    episodes, test = (passing_episodes(40, seed=seed, above=0.7) for seed in (1, 2))
    pairs, teacher = np.arange(40).reshape(-1, 2), Teacher(mark_error=0.02, mark_lag=lag)
    oracle = SyntheticOracle(25, marks=True, teacher=teacher, rng=rng(3))
    buffer = PreferenceBuffer(episodes)
    buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
    trainer = fresh_trainer(inputs=4, steps=100, horizon=100, rounds=60)
    trainer.fit(buffer)
    assert trainer.marks_late == (3 if lag else 0)
    assert step_auroc(trainer.model.step_cost, test) > 0.999


def test_how_late_marks_are_is_found_anew_of_half_as_many_again():
    episodes = passing_episodes(30, seed=1, above=0.7)
    pairs = np.arange(20).reshape(-1, 2)
    oracle = SyntheticOracle(25, marks=True, teacher=Teacher(mark_lag=0.03))
    labels = oracle.label(PreferenceBuffer(episodes).queries(pairs))
    trainer, found = fresh_trainer(inputs=4, steps=100, horizon=100, rounds=60), []
    for num in (4, 5, 6, 10):
        buffer = PreferenceBuffer(episodes)
        buffer.add_labels(pairs[:num], labels[:num])
        trainer.fit(buffer)
        found.append((trainer.marks_late, trainer.state_dict()["marks_late"][1]))
    assert found == [(3, 8), (3, 8), (3, 12), (3, 20)]
    goes_on = fresh_trainer(inputs=4, steps=100, horizon=100, rounds=60)
    assert goes_on.update(buffer, np.arange(5, 10))["marks_late"] == 3
    goes_on.load_state_dict(trainer.state_dict())
    assert goes_on.state_dict() == trainer.state_dict()


def test_members_see_other_marked_episodes_each_and_disagree_where_there_are_none():
    model = TreeCost(*boxes(5, 1), output_scale=20**-0.5, horizon=20, num_members=4)
    trainer = fresh_trainer(model=model, rounds=20)
    trainer.fit(marked_pairs(20, seed=1))
    assert len({tuple(member.ravel().tolist()) for member in model.value}) == 4
    assert len(set(model.limit.tolist())) > 1
    assert step_auroc(model.step_cost, peaky_episodes(60, seed=2)) > 0.95


def test_pretraining_by_marks_reports_what_it_has_come_to():
    told = []
    trainer = fresh_trainer(rounds=20, horizon=20)
    valid = marked_pairs(30, seed=2)
    (found,) = trainer.pretrain(
        marked_pairs(30, seed=1), valid, on_evaluation=lambda *words: told.append(words)
    )
    assert told == [(20, found)]
    assert found == trainer.evaluate(valid)


def test_marks_are_fitted_by_all_trees_after_a_pretraining_that_kept_few():
    trainer = fresh_trainer(rounds=60, horizon=20)
    trainer.pretrain(labelled(30, seed=1), labelled(30, seed=2), patience=3)
    assert trainer.model.num_trees < 60
    trainer.fit(marked_pairs(30, seed=3))
    assert trainer.model.num_trees == 60


def of_labels(safe):
    """A batch of pairs with these safety labels, one of each trajectory."""
    buffer = PreferenceBuffer(peaky_episodes(len(safe), seed=1))
    pairs = np.arange(len(safe)).reshape(-1, 2)
    labels = np.asarray(safe, float).reshape(-1, 2)
    buffer.add_labels(pairs, [Label(NAN, *both) for both in labels])
    return buffer.batch(np.arange(len(pairs)))


def test_the_balanced_limit_by_hand():
    """Costs 1, 2, 3, 4: safe, safe, unsafe, unsafe; then all safe, which tells nothing."""
    costs = np.array([1.0, 2.0, 3.0, 4.0])
    assert balanced_limit(costs, of_labels([1, 1, 0, 0])) == 2.5
    assert balanced_limit(np.array([1.0, 2.0, 2.5, 40.0]), of_labels([1, 1, 0, 0])) == 2.25
    assert balanced_limit(costs, of_labels([1, 1, 1, 1])) == 1


def test_one_wrong_label_far_from_the_balanced_limit_does_not_move_it():
    costs, safe = np.arange(40.0), np.arange(40) < 20
    for wrong in (2, 5, 36):
        told = safe.copy()
        told[wrong] = not told[wrong]
        assert balanced_limit(costs, of_labels(told)) == 19.5


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_balanced_limit_is_midway_whatever_the_share_of_safe_ones(share):
    """Costs N(-1, 1) of safe ones and N(1, 1) of unsafe ones; one label in twenty by chance."""
    random = rng(0)
    safe = random.random(4_000) < share
    costs = random.normal(np.where(safe, -1, 1))
    safe[random.random(4_000) < 0.025] = True
    safe[random.random(4_000) < 0.025] = False
    assert abs(balanced_limit(costs, of_labels(safe))) < 0.2


@law
@given(st.integers(0, 10**6), st.floats(0.1, 10), st.floats(-5, 5))
def test_the_balanced_limit_follows_the_unit_of_the_costs_and_their_zero(seed, unit, zero):
    random = rng(seed)
    costs, safe = random.uniform(size=12), random.integers(2, size=12)
    safe[:2] = 0, 1
    batch = of_labels(safe)
    found = balanced_limit(unit * costs + zero, batch)
    assert found == pytest.approx(unit * balanced_limit(costs, batch) + zero)


def test_clips_and_marks_help_in_pretraining_too():
    sizes = {"inputs": 20, "peaks": 8}
    train, valid = labelled(24, seed=1, **sizes), labelled(20, seed=5, **sizes)
    more = {
        "clips": judged_clips(100, seed=3, **sizes),
        "marks": marked(20, seed=4, **sizes),
    }
    trainer = fresh_trainer(inputs=20, rounds=60)
    trainer.pretrain(train, valid, **more)
    assert step_auroc(trainer.model.step_cost, peaky_episodes(60, seed=2, **sizes)) > 0.93


def test_clips_are_judged_by_a_standard_of_their_own():
    """All of them unsafe: they say nothing of where the limit of episodes is."""
    buffer = labelled(40, seed=1)
    trainer = fresh_trainer(rounds=60)
    with pytest.warns(UserWarning, match="all 40 labelled clips are unsafe"):
        trainer.fit(buffer, clips=[Clip(t, 0.0) for t in peaky_episodes(40, seed=3)])
    assert trainer.evaluate(buffer).safety_accuracy > 0.9


def test_clips_that_are_all_alike_are_told_of_and_what_has_no_answer_counts_for_nothing():
    trainer, buffer = fresh_trainer(rounds=2), labelled(40, seed=1)
    clips = [Clip(t, 1.0) for t in peaky_episodes(3, seed=3)] + [Clip(buffer.trajectories[0], NAN)]
    with pytest.warns(UserWarning, match="all 3 labelled clips are safe, .* have unsafe ones"):
        trainer.fit(buffer, clips=clips)


@pytest.mark.parametrize(("mark", "message"), [(1, "unsafe, .* safe"), (0, "safe, .* unsafe")])
def test_marks_that_are_all_alike_are_told_of(mark, message):
    trainer, buffer = fresh_trainer(rounds=2), labelled(40, seed=1)
    marks = [Marks(t, np.full(len(t), float(mark))) for t in peaky_episodes(3, seed=3)]
    with pytest.warns(UserWarning, match=f"all 60 marked steps are {message} ones, too"):
        trainer.fit(buffer, marks=marks)


def test_clips_without_pairs_of_episodes_are_refused():
    clips = [Clip(t, float(i % 2)) for i, t in enumerate(peaky_episodes(4, seed=3))]
    with pytest.raises(LabelError, match="beside 4 of them a fit needs labelled episodes"):
        fresh_trainer().fit(PreferenceBuffer(), clips=clips)


def test_more_trees_than_a_file_may_hold_are_not_grown():
    with pytest.raises(ValueError, match="20,000 trees at most, got rounds=20,001"):
        fresh_trainer(rounds=20_001)


def test_clips_and_marks_without_an_answer_have_no_gradient():
    without, blank = Problem(), Problem(num_clips=1, num_marks=1)  # the first clip has none
    blank.marks[0].unsafe[:] = NAN
    loss = _Loss(blank.trainer, blank.rows, blank.batch, blank.clips, blank.marks)
    start = len(without.rows.columns)
    outputs = np.r_[without.outputs, np.ones(len(blank.rows.columns) - start)]
    for ours, theirs in zip(
        loss.gradient(outputs), without.loss.gradient(without.outputs), strict=True
    ):
        assert (ours[start:] == 0).all()
        np.testing.assert_allclose(ours[:start] / loss.scale, theirs / without.loss.scale)


@pytest.mark.parametrize("lengths", [(19, 20), (21, 20), (19, 21)])
def test_marks_that_are_not_one_per_step_are_refused(lengths):
    """19 and 21 are together as many as the steps of both."""
    marks = [Marks(t, np.zeros(n)) for t, n in zip(peaky_episodes(2, seed=3), lengths, strict=True)]
    with pytest.raises(ValueError, match=r"each step is marked .* of 20 steps got \((19|21),\)"):
        fresh_trainer(rounds=2).fit(labelled(20, seed=1), marks=marks)


@pytest.mark.parametrize(
    "more",
    [
        {"clips": [Clip(Trajectory(np.zeros((2, 5)), np.zeros((2, 1))), 2.0)]},
        {"marks": [Marks(Trajectory(np.zeros((2, 5)), np.zeros((2, 1))), np.array([0, 3]))]},
    ],
    ids=["clip", "mark"],
)
def test_a_probability_above_1_is_refused(more):
    with pytest.raises(
        ValueError, match=r"probability in \[0, 1\], .*safe=2|marked 1 .*among them \[0\.0, 3\.0\]"
    ):
        fresh_trainer(rounds=2).fit(labelled(20, seed=1), **more)


def test_clips_of_other_sizes_are_refused():
    clip = Clip(Trajectory(np.zeros((2, 3)), np.zeros((2, 3))), 1.0)
    with pytest.raises(ValueError, match=r"\(obs_dim, act_dim\) = \(5, 1\), got \(3, 3\)"):
        fresh_trainer().fit(labelled(20, seed=1), clips=[clip])


# -- Pretraining -----------------------------------------------------------------------------


def noisy(limit=4):
    return SyntheticOracle(
        limit, teacher=Teacher(preference_noise=0.3, safety_noise=0.3), rng=rng()
    )


@pytest.mark.filterwarnings("ignore:labels of the same trajectories should agree")
def test_early_stopping_keeps_as_many_trees_as_were_best():
    train, valid = labelled(40, seed=1, oracle=noisy()), labelled(60, seed=2)
    trainer, seen = fresh_trainer(rounds=150, dead_zone=0.3), []
    history = trainer.pretrain(
        train, valid, patience=30, on_evaluation=lambda size, found: seen.append((size, found))
    )
    best = trainer.model.num_trees
    assert 0 < best < 150
    assert seen == [(10 * i, found) for i, found in enumerate(history)]
    assert len(history) == (best + 30) // 10 + 1  # it stopped thirty trees later
    assert trainer.steps == best
    losses = []
    for size in range(best + 1):
        part = fresh_trainer(model=first_trees(trainer.model, size), dead_zone=0.3)
        found = part.evaluate(valid)
        losses.append(found.selection_loss)
        if size % 10 == 0:
            assert history[size // 10].selection_loss == pytest.approx(losses[-1], abs=1e-5)
            assert history[size // 10].pair_accuracy == pytest.approx(found.pair_accuracy)
    assert min(losses[:-1]) > losses[-1]
    assert min(found.selection_loss for found in history) > losses[-1] - 1e-6


def test_the_first_evaluation_is_that_of_a_coin():
    trainer, calls = fresh_trainer(), []
    history = trainer.pretrain(
        labelled(40, seed=1),
        labelled(20, seed=2),
        on_evaluation=lambda size, found: calls.append((size, found.preference_loss)),
    )
    assert calls[0] == (0, pytest.approx(LN_2))
    assert history[0].pair_accuracy == 0.5
    assert history[0].cost_std == 0


def test_training_that_never_helps_leaves_no_tree():
    opposite = SyntheticOracle(4, teacher=Teacher(preference_noise=1, safety_noise=1), rng=rng())
    trainer = fresh_trainer()
    history = trainer.pretrain(
        labelled(40, seed=1), labelled(20, seed=2, oracle=opposite), patience=10
    )
    assert trainer.model.num_trees == 0
    assert trainer.steps == 0
    assert len(history) == 2


def test_a_few_held_out_pairs_do_not_stop_growth():
    """By 3 of 33 pairs a run once had one tree from beginning to end."""
    opposite = SyntheticOracle(4, teacher=Teacher(preference_noise=1, safety_noise=1), rng=rng())
    trainer, buffer = fresh_trainer(rounds=30), labelled(40, seed=1)
    history = trainer.pretrain(buffer, labelled(19, seed=2, oracle=opposite), patience=5)
    assert len(history) == 4
    assert trainer.model.num_trees == 30
    trainer.update(buffer, add_labelled(buffer, 20, seed=3))
    assert trainer.model.num_trees == 30


def test_later_fits_have_as_many_trees_as_pretraining_found_best():
    trainer, buffer = fresh_trainer(rounds=100), labelled(40, seed=1)
    trainer.pretrain(buffer, labelled(40, seed=2), patience=5)
    best = trainer.model.num_trees
    assert 10 < best < 100
    trainer.update(buffer, add_labelled(buffer, 20, seed=3))
    assert trainer.model.num_trees == best
    assert trainer.steps == 2 * best


@pytest.mark.parametrize("wrong", ["opposite", "all_safe"])
def test_held_out_labels_that_tell_nothing_do_not_keep_later_fits_small(wrong):
    """By 30 held-out pairs a trainer once had one tree for good, with 400 pairs to learn from."""
    oracles = {
        "opposite": SyntheticOracle(
            4, teacher=Teacher(preference_noise=1, safety_noise=1), rng=rng()
        ),
        "all_safe": SyntheticOracle(1000),
    }
    trainer, buffer = fresh_trainer(rounds=100), labelled(40, seed=1)
    trainer.pretrain(buffer, labelled(30, seed=2, oracle=oracles[wrong]), patience=5)
    trainer.update(buffer, add_labelled(buffer, 60, seed=3))
    assert trainer.model.num_trees >= 10
    assert trainer.evaluate(labelled(60, seed=4)).safety_accuracy > 0.85


def test_clips_and_marks_of_pretraining_are_learned_from_in_later_fits():
    """An update once forgot them."""
    episodes = peaky_episodes(12, seed=5)
    clips = [Clip(one, float(i % 2)) for i, one in enumerate(episodes)]
    scores = []
    for more in ({}, {"clips": clips}):
        trainer, buffer = fresh_trainer(rounds=30), labelled(30, seed=1)
        trainer.pretrain(buffer, labelled(9, seed=2), **more)
        trainer.update(buffer, add_labelled(buffer, 20, seed=3))
        scores.append(trainer.model.score(episodes))
    assert np.abs(scores[0] - scores[1]).max() > 0.1
    before = trainer.state_dict()
    with pytest.raises(ValueError, match=r"clips and marks that it had, \(12, 0\), got \(0, 0\)"):
        fresh_trainer().load_state_dict(before)
    trainer.load_state_dict(before)


@pytest.mark.parametrize("clip", [("t", 1.0), Clip("t", 1.0), Clip(None, "1"), Clip(None, None)])
def test_what_is_no_clip_is_refused_before_anything_is_grown(clip):
    trainer, buffer = fresh_trainer(rounds=5), labelled(20, seed=1)
    if isinstance(clip, Clip) and clip.trajectory is None:
        clip = clip._replace(trajectory=buffer.trajectories[0])
    with pytest.raises(TypeError, match="a clip is"):
        trainer.fit(buffer, clips=[clip])
    assert trainer.steps == trainer.model.num_trees == 0


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"rng": 0}, "rng is a NumPy generator"),
        ({"rounds": 2.5}, "rounds is a whole number, got 2.5"),
        ({"max_rows": 10.5}, "max_rows is a whole number"),
        ({"threads": 1.5}, "threads is a whole number"),
    ],
)
def test_options_of_another_kind_are_refused_at_once(option, match):
    with pytest.raises(TypeError, match=match):
        TreeTrainer(fresh_trainer().model, **{"rng": rng(), **option})


def test_a_fit_that_learns_nothing_says_so():
    """Two episodes of the same steps in another order cost the same by any trees."""
    (one,) = peaky_episodes(1, seed=1)
    other = Trajectory(one.obs[::-1].copy(), one.actions[::-1].copy())
    buffer = PreferenceBuffer([one, other])
    buffer.add_labels([(0, 1)], [Label(1.0, 1.0, 0.0)])
    trainer = fresh_trainer(rounds=5)
    with pytest.warns(RuntimeWarning, match="no tree lowers the loss"):
        trainer.fit(buffer)
    assert trainer.model.num_trees == 0


def test_a_member_whose_resample_has_one_kind_alone_learns_from_all():
    """Of few safe episodes some resamples have none, and no limit."""
    buffer = labelled(20, seed=1)
    few = PreferenceBuffer(buffer.trajectories)
    safest = np.argsort([one.costs.sum() for one in buffer.trajectories])[:2]
    is_safe = np.isin(buffer.labelled_pairs, safest).astype(float)
    few.add_labels(buffer.labelled_pairs, [Label(NAN, *row) for row in is_safe.tolist()])
    trainer = fresh_trainer(rounds=10, num_members=8)
    batch = few.batch(np.arange(len(few)))
    assert not all((part.safe == 1).any() for part in bootstrapped(batch, 8))
    trainer.fit(few)
    scores = trainer.model.member_scores(few.trajectories)
    others = np.delete(scores, safest, axis=1)
    assert (scores[:, safest].mean(axis=1) < others.mean(axis=1)).all()


def test_pretraining_without_labels_is_refused():
    blank = PreferenceBuffer(peaky_episodes(2, seed=3))
    blank.add_labels([(0, 1)], [Label(NAN, NAN, NAN)])
    for empty, found in [(PreferenceBuffer(), "the buffer's 0 pairs"), (blank, "buffer's 1 pairs")]:
        with pytest.raises(LabelError, match=found):
            fresh_trainer().pretrain(empty, labelled(20, seed=2))


def test_held_out_pairs_that_nobody_could_tell_leave_all_trees():
    """A person who says "I can't tell" of each of them once ended the run, resumed or not."""
    blank = PreferenceBuffer(peaky_episodes(60, seed=3))
    blank.add_labels(draw_pairs(60, 30, rng=rng()), [Label(NAN, NAN, NAN)] * 30)
    trainer = fresh_trainer(rounds=12)
    trainer.pretrain(labelled(20, seed=1), blank)
    assert trainer.model.num_trees == 12


def test_training_on_one_sided_labels_is_refused():
    all_safe = labelled(20, seed=1, oracle=SyntheticOracle(1000))
    for train in (fresh_trainer().fit, lambda b: fresh_trainer().pretrain(b, labelled(9, seed=2))):
        with pytest.raises(LabelError, match="got 40 safe and 0 unsafe"):
            train(all_safe)
    with pytest.raises(LabelError, match="the buffer's 0 pairs have none"):
        fresh_trainer().fit(PreferenceBuffer())


def test_three_rounds_of_one_side_are_said_unless_the_safest_sets_the_limit():
    """With a horizon, unsafe labels and preferences are learned from; safe ones teach nothing."""
    for limit in (0, 1000):
        buffer, trainer = PreferenceBuffer(), fresh_trainer()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(3):
                trainer.update(buffer, add_labelled(buffer, 8, seed=seed, limit=limit))
        said = [str(one.message) for one in caught if "in 3 rounds" in str(one.message)]
        assert len(said) == (limit == 1000)
        assert (trainer.steps > 0) == (limit == 0)
    assert "all 48 safety labels of 24 pairs are safe, and nothing has been learned" in said[0]


def test_of_unsafe_labels_alone_the_limit_is_the_cost_of_the_safest():
    """No label says where the limit is, but preferences say what is nearer to it."""
    known = labelled(60, seed=1)
    buffer = PreferenceBuffer(known.trajectories)
    buffer.add_labels(known.labelled_pairs, [Label(row[0], 0, 0) for row in known.labels])
    trainer = fresh_trainer(horizon=20)
    with pytest.warns(UserWarning, match="no labelled trajectory is safe, so that the limit is"):
        trainer.fit(buffer)
    costs = trainer.model.score(buffer.trajectories)
    assert trainer.model.learned_limit == pytest.approx(costs.min(), abs=1e-4)
    true = np.array([t.costs.sum() for t in buffer.trajectories])
    assert spearman(true, costs) > 0.8


def test_preferences_that_several_people_give_in_part_are_preferences():
    known = labelled(60, seed=1)
    buffer = PreferenceBuffer(known.trajectories)
    graded = [Label(1 / 3 + row[0] / 3, 0, 0) for row in known.labels]  # two of three say so
    buffer.add_labels(known.labelled_pairs, graded)
    assert fresh_trainer(horizon=20).can_learn(buffer)


@pytest.mark.parametrize("preference", [0.5, NAN])
def test_unsafe_labels_without_any_preference_are_refused(preference):
    buffer = PreferenceBuffer(peaky_episodes(2, seed=3))
    buffer.add_labels([(0, 1)], [Label(preference, 0, 0)])
    with pytest.raises(LabelError, match="got 0 safe and 2 unsafe"):
        fresh_trainer(horizon=20).fit(buffer)


def test_validation_on_what_is_trained_on_is_refused():
    buffer, partly = labelled(20, seed=1), labelled(20, seed=2)
    partly.add_trajectories(buffer.trajectories[:3])
    with pytest.raises(ValueError, match="20 of the 20 to validate on are trained on, too; split"):
        fresh_trainer().pretrain(buffer, buffer)
    with pytest.raises(ValueError, match="must be new to the model, but 3 of the 23 to validate"):
        fresh_trainer().pretrain(buffer, partly)


def test_inputs_that_never_change_are_refused():
    buffer = PreferenceBuffer([Trajectory(np.ones((4, 5)), np.zeros((4, 1))) for _ in range(2)])
    buffer.add_labels([(0, 1)], [Label(1, 1, 0)])
    with pytest.raises(LabelError, match="but all 6 inputs are the same in all 8 steps; check wha"):
        fresh_trainer().fit(buffer)


def test_episodes_beyond_the_horizon_are_refused_and_the_trees_stay():
    trainer, buffer = fresh_trainer(horizon=10), labelled(20, seed=1)
    message = "learned on: 10, got a trajectory of 20"
    with pytest.raises(ValueError, match=message):
        trainer.fit(buffer)
    assert trainer.model.num_trees == 0
    with pytest.raises(ValueError, match=message):
        trainer.pretrain(buffer, labelled(20, seed=2))


def test_episodes_that_all_fall_short_of_the_horizon_are_suspected_to_be_segments():
    trainer, buffer = fresh_trainer(horizon=50, rounds=2), labelled(20, seed=1)
    with pytest.warns(RuntimeWarning, match="have 20 steps, and the model a horizon of 50"):
        trainer.fit(buffer)
    trainer.fit(buffer)  # it warns once


# -- Variance term ---------------------------------------------------------------------------


def test_a_strong_variance_term_without_a_bound_is_reported_as_running_away():
    trainer, buffer = fresh_trainer(snr_weight=1.0, max_std=None, rounds=150), labelled(20, seed=1)
    with pytest.warns(RuntimeWarning, match=r"sd\(C\) = .* is above 20, .*; set max_std") as caught:
        trainer.fit(buffer)
    assert len(caught) == 1
    trainer.fit(buffer)  # it warns once


def test_a_strong_variance_term_without_a_bound_is_reported_in_pretraining_too():
    trainer = fresh_trainer(snr_weight=1.0, max_std=None, rounds=150)
    with pytest.warns(RuntimeWarning, match=r"sd\(C\) = .* is above 20, .*; set max_std"):
        trainer.pretrain(labelled(20, seed=1), labelled(20, seed=2), patience=150)


def test_a_bounded_variance_term_does_not_run_away():
    trainer, buffer = fresh_trainer(snr_weight=1.0, max_std=5.0, rounds=150), labelled(20, seed=1)
    trainer.fit(buffer)
    assert trainer.evaluate(buffer).cost_std < 20


# -- Members ---------------------------------------------------------------------------------


def test_each_member_fits_its_own_resample_of_the_trajectories_best():
    buffer = labelled(60, seed=1, pairs_each=2)
    trainer = fresh_trainer(num_members=3, snr_weight=0.0, dead_zone=0.0)
    trainer.fit(buffer)
    trees = trainer.model.trees
    assert trees.feature.shape == (3, 20, 7)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(trees.value[i], trees.value[j])
    batch = buffer.batch(np.arange(len(buffer)))
    excess = torch.from_numpy(trainer.model.member_scores(batch.trajectories))
    losses = np.empty((3, 3))  # of a member on a resample
    for part, on in zip(bootstrapped(batch, 3), losses.T, strict=True):
        first, second = part.pairs.T
        for m in range(3):
            on[m] = pbci_loss(
                excess[m][first],
                excess[m][second],
                part.preference,
                *part.safe.unbind(1),
                dead_zone=0.0,
                snr_weight=0.0,
            ).total
    assert losses.argmin(axis=0).tolist() == [0, 1, 2]


def test_members_of_different_sizes_are_stopped_each_where_it_was_best():
    trainer = fresh_trainer(num_members=3, rounds=100)
    calls = []
    history = trainer.pretrain(
        labelled(40, seed=1),
        labelled(40, seed=2),
        patience=10,
        on_evaluation=lambda size, _: calls.append(size),
    )
    assert calls[: len(history)] == [10 * i for i in range(len(history))]
    used = (trainer.model.value != 0).any(dim=2)  # a smaller member is followed by nothing
    sizes = used.sum(dim=1).tolist()
    assert trainer.model.num_trees == max(sizes) < 100
    assert len(set(sizes)) > 1
    assert [used[m, :n].all().item() for m, n in enumerate(sizes)] == [True] * 3


# -- Many steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [1.0, 0.98])
def test_costs_estimated_from_every_tenth_step_are_right_on_average(discount):
    """40 episodes of 50 to 150 steps; the mean over 300 draws, within five standard errors."""
    random = rng()
    given = [
        Trajectory(random.normal(size=(n, 2)), np.zeros((n, 1)))
        for n in random.integers(50, 151, size=40)
    ]
    model = TreeCost(*boxes(2, 1), output_scale=0.1, discount=discount)
    true = [0.1 * (t.obs[:, 0] * discount ** np.arange(len(t))).sum() for t in given]
    found = []
    for _ in range(300):
        rows = Rows(model, given, (), max_rows=sum(map(len, given)) // 10 + 1, rng=random)
        assert 0.09 * sum(map(len, given)) < len(rows.columns) < 0.12 * sum(map(len, given))
        found.append(rows.costs(rows.columns[:, 0].astype(np.float64)))
    error = np.std(found, axis=0) / 300**0.5
    assert (np.abs(np.mean(found, axis=0) - true) < 5 * error + 0.02 * np.abs(true)).all()


def test_all_steps_are_taken_if_there_are_not_too_many():
    given = peaky_episodes(5, seed=1)
    model = TreeCost(*boxes(5, 1), output_scale=0.5)
    random = rng()
    rows = Rows(model, given, (), max_rows=100, rng=random)
    assert random.random() == rng().random()  # none was drawn
    np.testing.assert_array_equal(rows.columns[:, :5], np.concatenate([t.obs for t in given]))
    np.testing.assert_array_equal(rows.columns[:, 5:], np.concatenate([t.actions for t in given]))
    assert rows.weight.tolist() == [0.5] * 100
    assert rows.starts.tolist() == [0, 20, 40, 60, 80, 100]
    assert rows.costs(np.arange(100.0)).tolist() == [95, 295, 495, 695, 895]


def test_marked_steps_beyond_the_most_are_thinned_with_their_marks():
    """30 episodes of 20 steps in place of 100 in all; what a step is and its mark go together."""
    marks = [Marks(t, t.costs) for t in peaky_episodes(30, seed=2)]
    kept = _thinned(marks, 100, rng=rng())
    assert 90 <= sum(len(one.trajectory) for one in kept) <= 110
    for mark in kept:
        peaks = np.c_[mark.trajectory.obs, mark.trajectory.actions][:, :3].max(axis=1)
        np.testing.assert_array_equal(mark.unsafe, peaks > 0.9)
    assert _thinned(marks, 600, rng=rng()) is marks
    trainer = fresh_trainer(rounds=60, max_rows=1000)
    trainer.fit(
        labelled(20, seed=1), marks=[Marks(t, t.costs) for t in peaky_episodes(300, seed=2)]
    )
    assert step_auroc(trainer.model.step_cost, peaky_episodes(60, seed=3)) > 0.9


def test_marked_steps_are_taken_in_whole_however_many_there_are():
    given, marks = peaky_episodes(5, seed=1), marked(2, seed=2)
    rows = Rows(TreeCost(*boxes(5, 1)), given, marks, max_rows=50, rng=rng())
    assert (rows.num_steps, len(rows.columns)) == (50, 90)
    np.testing.assert_array_equal(rows.columns[50:70, :5], marks[0].trajectory.obs)


def test_a_third_of_the_steps_is_enough_to_learn_from():
    trainer = fresh_trainer(rounds=60, max_rows=2000)
    trainer.fit(labelled(300, seed=1))  # 6,000 steps
    assert step_auroc(trainer.model.step_cost, peaky_episodes(60, seed=2)) > 0.9
    trainer = fresh_trainer(rounds=60, max_rows=2000)
    trainer.pretrain(labelled(300, seed=1), labelled(60, seed=3))
    assert step_auroc(trainer.model.step_cost, peaky_episodes(60, seed=2)) > 0.9


# -- Online rounds ---------------------------------------------------------------------------


def sign_trainer(**options):
    """A step costs -1 where s <= 0, else 1, and an episode of one step as much."""
    model = TreeCost(*boxes(1, 1), output_scale=1.0)
    nothing = torch.full((1, 1, 7), -128, dtype=torch.int8)
    left, right = nothing.clone(), nothing.clone()
    left[..., 0], right[..., 0] = -1, -2
    value = torch.zeros(1, 1, 8)
    value[..., 0], value[..., 1] = -1, 1
    feature, threshold = torch.zeros(1, 1, 7, dtype=torch.int32), torch.zeros(1, 1, 7)
    model.set_trees(Trees(feature, threshold, left, right, value))
    return TreeTrainer(model, rng=rng(), rounds=5, **options)


def buffer_of(states, pairs, labels):
    buffer = PreferenceBuffer([Trajectory(np.array([[s]]), np.zeros((1, 1))) for s in states])
    buffer.add_labels(np.array(pairs), labels)
    return buffer


def test_a_round_moves_the_dead_zone_and_fits_with_it():
    """New members are judged safe, unsafe, unsafe, unsafe: three of four; two are labelled so.

    The dead zone falls by 2 · 0.5 · (3/4 - 2/4) = 0.25 to 0.75 before the loss is taken.
    """
    labels = [Label(1, 1, 0), Label(1, 1, 1), Label(1, 0, 0)]
    buffer = buffer_of([-1.0, 2.0, 0.0, 3.0, 4.0], [[0, 1], [2, 3], [4, 1]], labels)
    trainer = sign_trainer(dead_zone=DeadZone(1.0, lr=0.5))
    trainer.steps = 1
    found = trainer.update(buffer, np.array([1, 2]))
    assert trainer.dead_zone.value == 0.75
    assert found == {
        "violation_gap": 1 / 4,
        "violation_rate": 1 / 2,
        "finetune_loss": pytest.approx(total_loss(trainer.model, buffer, dead_zone=0.75), abs=1e-6),
    }
    assert trainer.num_untuned == 0


def test_before_the_first_training_the_dead_zone_stays():
    trainer, buffer = fresh_trainer(dead_zone=DeadZone(1.0, lr=0.5)), labelled(20, seed=1)
    found = trainer.update(buffer, np.arange(20))
    assert found["violation_gap"] == -found["violation_rate"] < 0
    assert trainer.dead_zone.value == 1
    assert (trainer.steps, trainer.model.num_trees) == (20, 20)
    found = trainer.update(buffer, add_labelled(buffer, 6, seed=2, limit=0))
    assert found["violation_gap"] < 0
    assert trainer.dead_zone.value == 1 - found["violation_gap"]


@pytest.mark.parametrize(("num", "more"), [(10, 1), (40, 1), (70, 3), (100, 5), (250, 25)])
def test_fits_wait_until_the_labels_have_grown_by_a_tenth_or_less(num, more):
    """70 and 100 wait for 70² / 2,000 = 2.45 and for 5, 250 for a tenth."""
    trainer, buffer = fresh_trainer(rounds=2), labelled(num, seed=1)
    assert "finetune_loss" in trainer.update(buffer, np.arange(num))
    steps = trainer.steps
    if more > 1:
        found = trainer.update(buffer, add_labelled(buffer, more - 1, seed=2))
        assert set(found) == {"violation_gap", "violation_rate"}
        assert (trainer.steps, trainer.num_untuned) == (steps, more - 1)
    found = trainer.update(buffer, add_labelled(buffer, 1, seed=3))
    assert "finetune_loss" in found
    assert (trainer.steps, trainer.num_untuned) == (steps + 2, 0)


def test_when_a_fit_has_waited_the_dead_zone_moves_by_all_pairs_since_the_last_one():
    """Two episodes are judged unsafe and called safe, and later one of each is judged rightly: of
    all four, the model says unsafe of 3/4, the labels of 1/4. δ: 1 - 2 · 0.5 · (3/4 - 1/4) = 0.5.
    """
    labels = [Label(1, 1, 0)] * 60 + [Label(0.5, 1, 1)]
    buffer = buffer_of([-1.0, 2.0, 3.0, 4.0], [[0, 1]] * 60 + [[2, 3]], labels)
    trainer = sign_trainer(dead_zone=DeadZone(1.0, lr=0.5))
    trainer.load_state_dict({**trainer.state_dict(), "steps": 1, "num_fitted": 60})
    found = trainer.update(buffer, np.array([60]))
    assert found == {"violation_gap": 1, "violation_rate": 0}
    assert (trainer.dead_zone.value, trainer.num_untuned) == (1, 1)
    buffer.add_labels([[0, 1]], [Label(1, 1, 0)])
    found = trainer.update(buffer, np.array([61]))
    assert (found["violation_gap"], found["violation_rate"]) == (0, 1 / 2)
    assert (trainer.dead_zone.value, trainer.num_untuned) == (0.5, 0)


def test_online_pairs_count_up_to_ten_times_to_be_as_many_as_those_of_pretraining():
    """40 pairs from before; of 4 new ones each is there ten times, and of 16 twice."""
    for num_new, copies in ((4, 10), (16, 2)):
        online, buffer = fresh_trainer(dead_zone=0.3), labelled(40, seed=1)
        online.pretrain(buffer, labelled(40, seed=2), patience=5)
        by_hand = fresh_trainer(dead_zone=0.3, rounds=online.model.num_trees)
        by_hand._rng.bit_generator.state = online._rng.bit_generator.state
        found = online.update(buffer, add_labelled(buffer, num_new, seed=3))
        repeated = PreferenceBuffer(buffer.trajectories)
        order = np.r_[np.arange(40), np.tile(np.arange(40, 40 + num_new), copies)]
        labels = [Label(*row) for row in buffer.labels[order].tolist()]
        repeated.add_labels(buffer.labelled_pairs[order], labels)
        assert by_hand.fit(repeated) == found["finetune_loss"]
        assert_same_trees(by_hand.model, online.model)


@pytest.mark.parametrize(("num", "copies"), [(500, 1), (504, 3)])
def test_without_pretraining_the_newest_quarter_of_more_than_500_pairs_counts_thrice(num, copies):
    trainer, by_hand = (fresh_trainer(dead_zone=0.3, rounds=5) for _ in range(2))
    buffer = labelled(60, seed=1, pairs_each=num / 60)
    found = trainer.update(buffer, np.arange(num))
    repeated = PreferenceBuffer(buffer.trajectories)
    order = np.r_[np.arange(num), np.tile(np.arange(num - num // 4, num), copies - 1)]
    labels = [Label(*row) for row in buffer.labels[order].tolist()]
    repeated.add_labels(buffer.labelled_pairs[order], labels)
    assert by_hand.fit(repeated) == found["finetune_loss"]
    assert_same_trees(by_hand.model, trainer.model)


@pytest.mark.parametrize(("num", "sees_all"), [(500, False), (501, True)])
def test_of_24_inputs_a_tree_sees_all_by_more_than_500_pairs_so_that_nothing_is_left_to_chance(
    num, sees_all
):
    buffer = labelled(60, seed=1, pairs_each=num / 60 + 1e-6, inputs=24)
    first, second = (fresh_trainer(inputs=24, rounds=3, seed=seed) for seed in (0, 1))
    for trainer in (first, second):
        trainer.fit(buffer)
    assert len(buffer) == num
    assert torch.equal(first.model.feature, second.model.feature) == sees_all


def test_fits_after_pretraining_wait_for_half_more_online_labels_or_enough_of_all():
    """150 offline pairs, then one a round: at 8 it waits for 12, at 41 for 62 or 191² / 2,000."""
    trainer, buffer = fresh_trainer(rounds=5), labelled(150, seed=1)
    trainer.pretrain(buffer, labelled(20, seed=2))
    fits = []
    for online in range(1, 62):
        found = trainer.update(buffer, add_labelled(buffer, 1, seed=10 + online))
        if "finetune_loss" in found:
            fits.append(online)
    assert fits == [2, 3, 5, 8, 12, 18, 27, 41, 60]


def test_one_sided_labels_train_nothing_and_stay_new():
    trainer = fresh_trainer()
    buffer = labelled(6, seed=1, oracle=SyntheticOracle(1000))
    found = trainer.update(buffer, np.arange(6))
    assert found == {"violation_gap": 0, "violation_rate": 0}
    assert (trainer.steps, trainer.num_untuned, trainer.model.num_trees) == (0, 6, 0)
    found = trainer.update(buffer, add_labelled(buffer, 1, seed=2, limit=0))
    assert "finetune_loss" in found
    assert (trainer.steps > 0, trainer.num_untuned) == (True, 0)


def test_a_round_without_new_labels_changes_nothing():
    trainer, buffer = fresh_trainer(), labelled(20, seed=1)
    assert trainer.update(buffer, np.empty(0, np.int64)) == {}
    assert (trainer.steps, trainer.num_untuned, trainer.model.num_trees) == (0, 0, 0)


@pytest.mark.parametrize("new", [[0], [0, 1, 2, 3], [2, 1], [3]])
def test_new_pairs_that_are_not_the_last_ones_are_refused(new):
    with pytest.raises(ValueError, match=r"the last ones of the buffer, which has 3, got the pos"):
        fresh_trainer().update(labelled(3, seed=1), np.array(new))


@pytest.mark.parametrize("num_members", [1, 2])
def test_training_goes_on_exactly_where_a_state_was_taken(num_members):
    options = {
        "num_members": num_members,
        "max_rows": 900,  # so that steps are drawn, too
        "dead_zone": DeadZone(0.5, lr=0.3),
        "rounds": 30,
    }

    def start():
        trainer = fresh_trainer(**copy.deepcopy(options))
        buffer = labelled(40, seed=1)
        trainer.pretrain(buffer, labelled(30, seed=2), patience=5)
        for i in range(3):  # the last one waits
            trainer.update(buffer, add_labelled(buffer, (8, 8, 1)[i], seed=3 + i))
        return trainer, buffer

    def go_on(trainer, buffer):
        found = trainer.update(buffer, add_labelled(buffer, 2, seed=9))
        return [found, trainer.update(buffer, add_labelled(buffer, 20, seed=10))]

    whole, buffer = start()
    expected = go_on(whole, buffer)
    assert "finetune_loss" in expected[1]

    before, buffer = start()
    assert before.num_untuned == 1
    state, trees = before.state_dict(), before.model.state_dict()
    after = fresh_trainer(seed=99, **copy.deepcopy(options))
    after._rng.bit_generator.state = before._rng.bit_generator.state
    after.load_state_dict(state)
    after.model.load_state_dict(trees)
    assert go_on(after, buffer) == expected
    assert_same_trees(after.model, whole.model)
    assert after.state_dict() == whole.state_dict()


# -- Arguments -------------------------------------------------------------------------------


def test_a_network_is_refused_in_favour_of_its_own_trainer():
    with pytest.raises(TypeError, match=r"(?s)of a TreeCost, got CostModel\(.*CostModelTrainer"):
        TreeTrainer(CostModel(*boxes(1, 1)), rng=rng())
    with pytest.raises(TypeError, match=r"trees of a TreeCost, got 'model.safetensors'"):
        TreeTrainer("model.safetensors", rng=rng())


def test_trees_are_refused_by_the_trainer_of_networks_by_name():
    with pytest.raises((TypeError, ValueError), match="TreeTrainer"):
        CostModelTrainer(TreeCost(*boxes(1, 1)), rng=rng())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"rounds": 0}, r"rounds must lie in \[1, inf\), got 0"),
        ({"max_rows": 0}, r"max_rows must lie in \[1, inf\), got 0"),
        ({"threads": 0}, r"threads must lie in \[1, inf\), got 0"),
        ({"learning_rate": 0.0}, r"learning_rate must lie in \(0, 1\], got 0.0"),
        ({"learning_rate": 1.5}, r"learning_rate must lie in \(0, 1\], got 1.5"),
        ({"snr_weight": -1.0}, r"snr_weight must lie in \[0, inf\), got -1.0"),
        ({"max_std": 0.0}, r"max_std must lie in \(0, inf\], got 0.0"),
        ({"dead_zone": -1.0}, "a dead zone needs 0 <= initial"),
    ],
)
def test_numbers_out_of_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        fresh_trainer(**option)
    with pytest.raises(ValueError, match=r"patience must lie in \[1, inf\), got 0"):
        fresh_trainer().pretrain(labelled(20, seed=1), labelled(20, seed=2), patience=0)


def test_a_number_is_a_fixed_dead_zone_and_none_is_one_of_0_that_moves():
    fixed, moving = fresh_trainer(dead_zone=12), fresh_trainer()
    assert fixed.dead_zone.update(1.0, 0.0) == 12
    assert moving.dead_zone.value == 0
    assert moving.dead_zone.update(0.0, 0.5) > 0


def test_a_machine_without_lightgbm_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr("pbcrl.tree_trainer.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"LightGBM, which is not installed; .*pbcrl\[trees\]"):
        fresh_trainer()


@pytest.mark.parametrize("version", ["4.4.0", "3.3.5", "4.4.0.99"])
def test_a_lightgbm_that_is_too_old_is_refused(monkeypatch, version):
    monkeypatch.setattr(lightgbm, "__version__", version)
    with pytest.raises(ImportError, match=rf"4\.5 or newer, got {version}; .*pbcrl\[trees\]"):
        fresh_trainer()


@pytest.mark.parametrize("version", ["4.5.0", "4.10.1", "5.0.0rc1", "4.6.0.99"])
def test_a_lightgbm_that_is_new_enough_is_taken(monkeypatch, version):
    monkeypatch.setattr(lightgbm, "__version__", version)
    fresh_trainer()


# -- A limit of its own ----------------------------------------------------------------------


def uneven_episodes(num, *, seed):
    """Of 5 to 50 steps; a step costs 1 if its first input is above 0.9, and half never have one."""
    random, made = rng(seed), []
    for i in range(num):
        rows = random.uniform(size=(int(random.integers(5, 51)), 3)).astype(np.float32)
        rows[:, 0] *= 0.9
        if i % 2:
            rows[random.integers(len(rows), size=3), 0] = random.uniform(0.91, 1, size=3)
        made.append(Trajectory(rows[:, :2], rows[:, 2:], (rows[:, 0] > 0.9).astype(np.float32)))
    return made


def fitted_to_uneven(*, horizon, seed=0, **options):
    buffer = PreferenceBuffer(uneven_episodes(200, seed=seed))
    pairs = draw_pairs(200, 400, rng=rng(seed))
    buffer.add_labels(pairs, SyntheticOracle(0.5).label(buffer.queries(pairs)))
    model = TreeCost(*boxes(2, 1), horizon=horizon, output_scale=50**-0.5, **options)
    trainer = TreeTrainer(model, rng=rng(seed), rounds=60)
    if horizon is None:
        with pytest.warns(UserWarning, match="a step may have a negative learned cost"):
            trainer.fit(buffer)
    else:
        trainer.fit(buffer)
    return trainer, buffer


def test_with_a_horizon_the_limit_is_where_the_safety_loss_is_lowest():
    trainer, buffer = fitted_to_uneven(horizon=50)
    batch = buffer.batch(np.arange(len(buffer)))
    excess = torch.from_numpy(trainer.model.member_scores(batch.trajectories))[0]
    losses = [
        float(safety_loss((excess + shift)[batch.pairs].flatten(), batch.safe.flatten().double()))
        for shift in (-0.02, 0.0, 0.02)
    ]
    assert losses[1] == min(losses)
    assert trainer.model.learned_limit > 0.5


def test_a_harmless_step_costs_about_nothing_with_a_horizon_and_less_than_nothing_without():
    """Else a safe episode would be safer, the longer it is: a policy would learn to dawdle."""
    shares = []
    for horizon in (50, None):
        trainer, _ = fitted_to_uneven(horizon=horizon)
        new = uneven_episodes(200, seed=9)
        steps = np.concatenate([trainer.model.step_cost(one.obs, one.actions) for one in new])
        costly = np.concatenate([one.costs > 0 for one in new])
        harmless, harmful = np.median(steps[~costly]), np.median(steps[costly])
        assert harmful > 0
        shares.append(harmless / harmful)
    assert 0 <= shares[0] < 0.05
    assert shares[1] < -0.01


def test_of_all_steps_learned_from_a_twentieth_cost_less_than_nothing():
    trainer, buffer = fitted_to_uneven(horizon=50)
    obs, actions = (
        np.concatenate([getattr(one, name) for one in buffer.trajectories])
        for name in ("obs", "actions")
    )
    costs = trainer.model.step_cost(obs, actions)
    # Many steps may cost the same, and those at the bound cost 0.
    assert 0.03 < (costs < -1e-6).mean() <= 0.051
    assert (costs < 1e-6).mean() >= 0.049


def test_a_limit_travels_with_its_trees_and_is_prorated(tmp_path):
    trainer, _ = fitted_to_uneven(horizon=50, num_members=2)
    model, new = trainer.model, uneven_episodes(20, seed=9)
    assert len(set(model.limit.tolist())) == 2
    assert model.learned_limit == pytest.approx(model.limit.mean().item())
    model.save(tmp_path / "model.safetensors")
    other = TreeCost(*boxes(2, 1), horizon=50, output_scale=50**-0.5, num_members=2)
    other.load_state_dict(model.state_dict())
    for found in (TreeCost.load(tmp_path / "model.safetensors")[0], other, copy.deepcopy(model)):
        np.testing.assert_array_equal(found.member_scores(new), model.member_scores(new))
        assert found.learned_limit == model.learned_limit
    costs, limit = model.score(new), model.learned_limit
    np.testing.assert_allclose(model.member_scores(new).mean(axis=0), costs - limit, atol=1e-5)
    model.prorate(100)
    assert model.learned_limit == pytest.approx(2 * limit)
    np.testing.assert_array_equal(model.score(new), costs)


@pytest.mark.parametrize(
    "limit",
    [
        torch.zeros(2),
        torch.tensor([NAN]),
        torch.tensor([math.inf]),
        torch.tensor([1e300], dtype=torch.float64),  # infinite as float32: all would be safe
        torch.tensor([1]),
    ],
)
def test_a_limit_that_is_none_is_refused(limit):
    model = fresh_trainer().model
    with pytest.raises(
        MismatchError, match="each of 1 members has a finite limit, in float32, got"
    ):
        model.set_trees(model.trees, limit)
    assert model.learned_limit == 0


def test_without_a_horizon_the_limit_is_0():
    trainer, _ = fitted_to_uneven(horizon=None)
    assert trainer.model.learned_limit == 0


def test_marks_in_the_buffer_are_learned_from_as_those_that_are_given():
    one, other = labelled(24, seed=1), labelled(24, seed=1)
    marks = [Marks(t, (t.costs > 0).astype(float)) for t in one.trajectories]
    models = []
    pairs, labels = one.labelled_pairs, one.labels
    marked = PreferenceBuffer(one.trajectories)
    for pair, label in zip(pairs, labels.tolist(), strict=True):
        unsafe = [unsafe_stretches(one.trajectories[i].costs > 0) for i in pair]
        marked.add_labels(pair[None], [Label(*label, *unsafe)])
    order = [i for pair in pairs.tolist() for i in pair]
    for buffer, more in ((marked, []), (other, [marks[i] for i in order])):
        trainer = fresh_trainer(rounds=5)
        trainer.fit(buffer, marks=more)
        models.append(trainer.model.score(one.trajectories))
    np.testing.assert_array_equal(*models)


def test_one_step_per_episode_is_found():
    """One collision makes an episode unsafe: 35 rows of 16,000 tell, by 100 exact pairs."""

    def drives(count, seed):
        draw = rng(seed)
        found = []
        for _ in range(count):
            obs = draw.normal(size=(200, 4)).astype(np.float32)
            obs[:, 3] = 0
            if draw.random() < 0.5:
                obs[draw.integers(200), 3] = 1
            cost = obs[:, 3].astype(np.float64)
            found.append(Trajectory(obs, draw.normal(size=(200, 1)), costs=cost))
        return found

    buffer, test = PreferenceBuffer(drives(80, 1)), drives(100, 2)
    pairs = draw_pairs(80, 100, rng=rng(3))
    buffer.add_labels(pairs, SyntheticOracle(0).label(buffer.queries(pairs)))
    trainer = fresh_trainer(inputs=5, steps=200, horizon=200, rounds=40)
    trainer.fit(buffer)
    called_safe = trainer.model.score(test) <= trainer.model.learned_limit
    is_safe = np.array([one.costs.sum() == 0 for one in test])
    assert (called_safe == is_safe).mean() > 0.95
