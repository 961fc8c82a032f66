import math
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import tensor

from pbcrl.buffer import PreferenceBuffer, draw_pairs
from pbcrl.cost_model import CostModel, LearnedCost, padded_chunks
from pbcrl.dead_zone import DeadZone
from pbcrl.ensemble import CostModelEnsemble
from pbcrl.errors import LabelError
from pbcrl.losses import pbci_loss
from pbcrl.oracle import SyntheticOracle, Teacher
from pbcrl.trainer import CostModelTrainer, bootstrapped
from pbcrl.trajectory import Label, Trajectory, cut_segments, pad

from .every_space import boxes

NAN = math.nan
LN_2 = math.log(2)


def rng(seed=0):
    return np.random.default_rng(seed)


def softplus(x):
    """-log σ(-x): what a verdict "safe" loses at cost x."""
    return math.log1p(math.exp(x))


# -- A model with known costs ----------------------------------------------------------------


def identity_model():
    """c(s, a) = s, so that an episode costs the sum of its observations."""
    model = CostModel(*boxes(1, 1), hidden_sizes=(), output_scale=1.0)
    torch.nn.init.constant_(model.net[0].weight[:, :1], 1.0)
    return model


def buffer_of(costs, pairs, labels):
    """Episodes of one step that `identity_model` scores with these costs, and labelled pairs."""
    buffer = PreferenceBuffer()
    buffer.add_trajectories([Trajectory(np.array([[c]]), np.zeros((1, 1))) for c in costs])
    buffer.add_labels(np.array(pairs), labels)
    return buffer


def known_trainer(**options):
    return CostModelTrainer(identity_model(), rng=rng(), **{"snr_weight": 0.0, **options})


# -- A problem that can be learned -----------------------------------------------------------


def linear_episodes(num, *, seed, steps=10):
    """Episodes whose true step cost is 0.7 s_0 + 0.3 a_0; s_1 says nothing. Costs near 0 to 10."""
    random, made = rng(seed), []
    for level in random.uniform(size=num):
        rows = random.uniform(0.8, 1.2, size=(steps, 3)) * [level, 1.0, level]
        costs = 0.7 * rows[:, 0] + 0.3 * rows[:, 2]
        made.append(Trajectory(rows[:, :2], rows[:, 2:], costs))
    return made


def linear_buffer(num, *, seed, oracle=None, pairs_each=3, steps=10):
    buffer = PreferenceBuffer()
    buffer.add_trajectories(linear_episodes(num, seed=seed, steps=steps))
    pairs = draw_pairs(num, pairs_each * num, rng=rng(seed))
    oracle = SyntheticOracle(0.5 * steps) if oracle is None else oracle
    buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
    return buffer


def fresh_trainer(*, seed=0, obs_dim=2, **options):
    """The default output scale is for episodes of a thousand steps, these have ten or one."""
    torch.manual_seed(seed)
    model = CostModel(*boxes(obs_dim, 1), hidden_sizes=(16,), output_scale=1.0)
    return CostModelTrainer(model, rng=rng(seed), **{"lr": 1e-2, "batch_size": 64, **options})


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


# -- Gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("discount", [1.0, 0.999])
def test_the_streamed_gradient_is_autograd_s_over_the_whole_batch(dtype, tolerance, discount):
    """The reference scores every member of every pair on its own, without padding or sharing."""
    random = rng()
    buffer = PreferenceBuffer()
    for length in random.integers(100, 3000, size=24):
        buffer.add_trajectories(
            [Trajectory(random.normal(size=(length, 2)), random.normal(size=(length, 1)))]
        )
    pairs = draw_pairs(24, 30, rng=random)
    labels = [
        Label(random.choice([0, 0.5, 1, NAN]), random.choice([0, 1, NAN]), random.choice([0, 1]))
        for _ in pairs
    ]
    buffer.add_labels(pairs, labels)
    assert len(list(padded_chunks(buffer.trajectories))) >= 3

    torch.manual_seed(0)
    model = CostModel(*boxes(2, 1), hidden_sizes=(8,), discount=discount, output_scale=1.0)
    torch.nn.init.normal_(model.net[-1].weight, std=1e-2)
    model.to(dtype)

    def cost(index):
        steps = buffer.trajectories[index]
        obs, actions = (torch.from_numpy(x).to(dtype) for x in (steps.obs, steps.actions))
        weight = discount ** torch.arange(len(steps))
        return (weight * model(obs, actions)).sum()

    answers = tensor([(x.preference, x.first_safe, x.second_safe) for x in labels])
    first, second = (torch.stack([cost(i) for i in column]) for column in pairs.T)
    expected_loss = pbci_loss(first, second, *answers.T, dead_zone=0.7, snr_weight=0.01).total
    assert 0.1 < torch.cat([first, second]).std() < 5  # every term has a gradient
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))

    trainer = CostModelTrainer(model, rng=rng(), dead_zone=DeadZone(0.7), snr_weight=0.01)
    loss = trainer.gradient_step(buffer.batch(np.arange(30)))
    assert loss == pytest.approx(expected_loss.item(), rel=tolerance)
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    wanted = torch.cat([g.flatten() for g in expected])
    assert (got - wanted).norm() <= tolerance * wanted.norm()


class SmallNet(torch.nn.Module):
    """A custom network."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, obs, actions):
        return self.layers(torch.cat([obs, actions], dim=-1))


def random_weights(model, *, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def model_kinds(**options):
    options = {"hidden_sizes": (8, 6), "output_scale": 1e-2, "discount": 0.9995, **options}
    return {
        "MLP": lambda: CostModel(*boxes(2, 1), **options),
        "own net": lambda: CostModel(*boxes(2, 1), net=SmallNet(), **options),
        "ensemble": lambda: CostModelEnsemble(
            [CostModel(*boxes(2, 1), **options) for _ in range(3)]
        ),
        "mixed ensemble": lambda: CostModelEnsemble(
            [CostModel(*boxes(2, 1), **options), CostModel(*boxes(2, 1), net=SmallNet(), **options)]
        ),
    }


def several_chunks_of(num_pairs=40, *, num=24, seed=0):
    """Episodes of unequal lengths, most of them in several pairs, and some labels missing."""
    random = rng(seed)
    buffer = PreferenceBuffer()
    for length in random.integers(100, 3000, size=num):
        obs, actions = random.normal(size=(length, 2)), random.normal(size=(length, 1))
        buffer.add_trajectories([Trajectory(obs, actions)])
    pairs = draw_pairs(num, num_pairs, rng=random)
    labels = [
        Label(random.choice([0, 0.5, 1, NAN]), random.choice([0, 1, NAN]), random.choice([0, 1]))
        for _ in pairs
    ]
    buffer.add_labels(pairs, labels)
    assert len(list(padded_chunks(buffer.trajectories))) >= 3
    return buffer.batch(np.arange(num_pairs))


def autograd_over_padded_pairs(model, batch, **options):
    """What one would write first: every member of every pair in one padded batch, one backward."""
    losses = []
    members = model.members if isinstance(model, CostModelEnsemble) else [model]
    for member, part in zip(members, bootstrapped(batch, len(members)), strict=True):
        rows = [batch.trajectories[i] for i in part.pairs.T.flatten().tolist()]
        cost = member.trajectory_cost(*pad(rows))
        first, second = cost.chunk(2)
        losses.append(pbci_loss(first, second, part.preference, *part.safe.T, **options).total)
    gradients = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    return torch.stack(losses).mean().item(), flat(gradients)


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", model_kinds())
@pytest.mark.parametrize("max_std", [None, 5.0, 1e-3])
def test_every_kind_of_model_has_the_gradient_of_autograd_over_padded_pairs(
    kind, dtype, tolerance, max_std
):
    batch, model = several_chunks_of(), random_weights(model_kinds()[kind]()).to(dtype)
    options = {"snr_weight": 0.05, "max_std": max_std}
    expected_loss, expected = autograd_over_padded_pairs(model, batch, dead_zone=0.7, **options)
    trainer = CostModelTrainer(model, rng=rng(), dead_zone=DeadZone(0.7), **options)
    assert trainer.gradient_step(batch) == pytest.approx(expected_loss, rel=tolerance)
    found = flat(p.grad for p in model.parameters())
    assert found.dtype == dtype
    assert (found - expected).norm() <= tolerance * expected.norm()


def test_a_network_that_members_share_gets_the_gradient_of_all():
    net = SmallNet()
    sharing = CostModelEnsemble(
        [CostModel(*boxes(2, 1), net=net, output_scale=1e-3) for _ in range(2)]
    )
    batch = several_chunks_of()
    _, expected = autograd_over_padded_pairs(random_weights(sharing).double(), batch)
    CostModelTrainer(sharing, rng=rng()).gradient_step(batch)
    found = flat(p.grad for p in sharing.parameters())
    assert (found - expected).norm() <= 1e-10 * expected.norm()


def test_frozen_weights_get_no_gradient():
    model, batch = random_weights(model_kinds()["MLP"]()), several_chunks_of()
    model.net[0].requires_grad_(False)
    before = model.net[0].weight.clone()
    CostModelTrainer(model, rng=rng()).gradient_step(batch)
    assert torch.equal(model.net[0].weight, before)
    assert model.net[0].weight.grad is None
    assert model.net[2].weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", model_kinds())
def test_the_gradient_in_bfloat16_points_where_that_in_float32_does(kind):
    batch, gradients, losses = several_chunks_of(), [], []
    for bf16 in (False, True):
        model = random_weights(model_kinds()[kind]())
        losses.append(CostModelTrainer(model, rng=rng(), bf16=bf16).gradient_step(batch))
        gradients.append(flat(p.grad for p in model.parameters()))
    assert gradients[1].dtype == torch.float32
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_images_are_learned_from_in_bfloat16_too():
    random, gradients = rng(), []
    buffer = PreferenceBuffer()
    for _ in range(6):
        images = random.integers(256, size=(200, 16, 16, 3), dtype=np.uint8)
        buffer.add_trajectories([Trajectory(images, random.normal(size=(200, 1)))])
    labels = [Label(1, 1, 0), Label(0, 0, 1), Label(1, NAN, NAN)]
    buffer.add_labels(np.array([[0, 1], [2, 3], [4, 5]]), labels)
    for bf16 in (False, True):
        model = random_weights(
            CostModel(*boxes((16, 16, 3), 1), hidden_sizes=(8,), output_scale=0.01)
        )
        CostModelTrainer(model, rng=rng(), bf16=bf16).gradient_step(buffer.batch(np.arange(3)))
        gradients.append(flat(p.grad for p in model.parameters()))
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_bfloat16_is_for_gradient_steps_only():
    """What is evaluated is what a policy will pay: the same weights score alike either way."""
    trainers, buffer = [fresh_trainer(), fresh_trainer(bf16=True)], linear_buffer(40, seed=1)
    for trainer in trainers:
        random_weights(trainer.model)
    assert trainers[0].evaluate(buffer) == trainers[1].evaluate(buffer)


def test_a_linear_cost_is_learned_in_bfloat16():
    trainer = fresh_trainer(bf16=True)
    trainer.pretrain(linear_buffer(200, seed=1), linear_buffer(60, seed=2), max_epochs=30)
    test = trainer.evaluate(linear_buffer(100, seed=3))
    assert test.pair_accuracy > 0.9
    assert test.safety_accuracy > 0.9


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak memory")
def test_a_step_on_512_pairs_of_1000_steps_takes_less_than_1_5_gb(tmp_path):
    """Of the whole process, PyTorch and the memory maps included; autograd takes 2.4 GB."""
    for name, width in [("obs", 60), ("actions", 2)]:  # holes in the file, which read as zeros
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (1024, 1000, width))
    code = f"""
import numpy as np
from gymnasium.spaces import Box
from pbcrl import CostModel, CostModelTrainer, Label, PreferenceBuffer, Trajectory

maps = [np.load(f"{tmp_path}/{{name}}.npy", mmap_mode="r") for name in ("obs", "actions")]
buffer = PreferenceBuffer()
buffer.add_trajectories([Trajectory(*rows) for rows in zip(*maps, strict=True)])
buffer.add_labels(np.arange(1024).reshape(-1, 2), [Label(1, 1, 0)] * 512)
model = CostModel(Box(-1, 1, (60,)), Box(-1, 1, (2,)), hidden_sizes=(256, 256))
CostModelTrainer(model, rng=np.random.default_rng(0)).gradient_step(buffer.batch(np.arange(512)))
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""
    # Two threads would wait for each other on a busy machine; the heap fragments at random
    # (docs/notebook/speed-cost-model.md).
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, check=True)
    assert 0.3e6 < int(done.stdout) < 1.5e6  # kB


def test_the_first_step_of_adam_moves_every_weight_by_lr_against_its_gradient():
    """Adam divides the first gradient by its own size, so only its sign is left."""
    buffer = buffer_of([1.0, 3.0], [[0, 1]], [Label(0, 1, 0)])
    trainer = known_trainer(lr=0.25)
    before = weights_of(trainer)
    trainer.gradient_step(buffer.batch(np.array([0])))
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(weights_of(trainer), before - 0.25 * gradient.sign())


# -- Evaluation ------------------------------------------------------------------------------


def test_evaluation_of_known_costs_is_what_a_pocket_calculator_gives():
    """Costs -1, 2, 0, 3, with δ = 1; of the four preferences one is a tie and one is wrong."""
    buffer = buffer_of(
        [-1.0, 2.0, 0.0, 3.0],
        [[0, 1], [3, 2], [1, 3], [0, 2]],
        [Label(1, 1, 0), Label(1, 0, 1), Label(0.5, NAN, 1), Label(NAN, NAN, NAN)],
    )
    found = known_trainer(dead_zone=DeadZone(1.0)).evaluate(buffer)
    pair_losses = [softplus(-3), softplus(3), (softplus(1) + softplus(-1)) / 2]
    assert found.preference_loss == pytest.approx(sum(pair_losses) / 3)
    safe, unsafe = [-1.0, 0.0, 3.0], [2.0, 3.0]
    verdict_losses = [softplus(c) for c in safe] + [softplus(1 - c) for c in unsafe]
    assert found.safety_loss == pytest.approx(sum(verdict_losses) / 5)
    assert found.selection_loss == pytest.approx(found.preference_loss + found.safety_loss)
    assert found.pair_accuracy == 1 / 2  # the tie and the missing one do not count
    assert found.safety_accuracy == 4 / 5  # cost 0 is safe; cost 3 was called safe once
    members = [-1.0, 2.0, 3.0, 0.0, 2.0, 3.0, -1.0, 0.0]
    assert found.cost_std == pytest.approx(np.std(members))


def test_an_untrained_model_evaluates_to_a_coin_toss():
    """Costs 0: two coin tosses of ln 2 nats at δ = 0; equal costs order a pair half right."""
    buffer = buffer_of([1.0, 2.0, 3.0], [[0, 1], [2, 0], [1, 2]], [Label(1, 1, 0)] * 3)
    found = fresh_trainer(obs_dim=1, dead_zone=DeadZone(0.0)).evaluate(buffer)
    assert found.preference_loss == pytest.approx(LN_2)
    assert found.safety_loss == pytest.approx(LN_2)
    assert found.pair_accuracy == 0.5
    assert found.safety_accuracy == 0.5  # 0 is safe, and half of the labels say so
    assert found.cost_std == 0


def test_what_no_label_defines_evaluates_to_nan():
    empty = known_trainer().evaluate(PreferenceBuffer())
    assert math.isnan(empty.pair_accuracy)
    assert math.isnan(empty.safety_accuracy)
    assert math.isnan(empty.cost_std)
    ties = known_trainer().evaluate(buffer_of([1.0, 2.0], [[0, 1]], [Label(0.5, NAN, NAN)]))
    assert math.isnan(ties.pair_accuracy)
    assert math.isnan(ties.safety_accuracy)


def test_violation_rates_count_members_with_a_label_only():
    """Labelled members cost -1, 2, 0, 3, 2: three above 0; two of the five are labelled unsafe."""
    buffer = buffer_of(
        [-1.0, 2.0, 0.0, 3.0],
        [[0, 1], [2, 3], [1, 3]],
        [Label(NAN, 1, 0), Label(1, 1, 1), Label(1, 0, NAN)],
    )
    trainer = known_trainer()
    assert trainer.violation_rates(buffer, np.arange(3)) == (3 / 5, 2 / 5)
    assert trainer.violation_rates(buffer, np.array([1])) == (1 / 2, 0)


def test_violation_rates_over_no_labels_are_nan():
    buffer = buffer_of([1.0, 2.0], [[0, 1]], [Label(1, NAN, NAN)])
    assert all(math.isnan(rate) for rate in known_trainer().violation_rates(buffer, np.array([0])))


# -- Pretraining -----------------------------------------------------------------------------


def test_a_linear_cost_is_learned_from_its_labels():
    trainer, valid = fresh_trainer(), linear_buffer(60, seed=2)
    history = trainer.pretrain(linear_buffer(200, seed=1), valid, max_epochs=30)
    assert history[0].pair_accuracy == pytest.approx(0.5)
    test = trainer.evaluate(linear_buffer(100, seed=3))
    assert test.pair_accuracy > 0.9
    assert test.safety_accuracy > 0.9


@pytest.mark.filterwarnings("ignore:labels of the same trajectories should agree")
def test_early_stopping_restores_the_best_weights():
    """Twenty episodes with a third of the labels wrong: the held-out loss soon rises."""
    oracle = SyntheticOracle(5, teacher=Teacher(preference_noise=0.3, safety_noise=0.3), rng=rng())
    train, valid = linear_buffer(20, seed=1, oracle=oracle), linear_buffer(30, seed=2)
    trainer = fresh_trainer()
    history = trainer.pretrain(train, valid, max_epochs=200, patience=4)
    losses = [evaluation.selection_loss for evaluation in history]
    assert len(history) < 200
    assert len(losses) - 1 - int(np.argmin(losses)) == 4  # it stopped four evaluations later
    assert losses[-1] > min(losses)
    assert trainer.evaluate(valid).selection_loss == min(losses)


def test_training_that_never_helps_gives_back_the_weights_it_got():
    train = linear_buffer(20, seed=1)
    opposite = SyntheticOracle(5, teacher=Teacher(preference_noise=1, safety_noise=1), rng=rng())
    trainer = fresh_trainer()
    before = weights_of(trainer)
    history = trainer.pretrain(train, linear_buffer(20, seed=2, oracle=opposite), patience=3)
    assert len(history) == 4
    torch.testing.assert_close(weights_of(trainer), before, rtol=0, atol=0)


def test_evaluations_are_counted_in_gradient_steps():
    """60 pairs in batches of 10 are 6 steps per epoch; the last step is always evaluated."""
    steps = []
    history = fresh_trainer(batch_size=10).pretrain(
        linear_buffer(20, seed=1),
        linear_buffer(20, seed=2),
        max_epochs=2,
        on_evaluation=lambda step, _: steps.append(step),
    )
    assert steps == [0, 10, 12]
    assert len(history) == 3


def test_a_long_epoch_is_evaluated_ten_times():
    """180 pairs one by one are 180 steps: one evaluation after 18 of them."""
    steps = []
    fresh_trainer(batch_size=1).pretrain(
        linear_buffer(20, seed=1, pairs_each=9),
        linear_buffer(20, seed=2),
        max_epochs=1,
        on_evaluation=lambda step, _: steps.append(step),
    )
    assert steps == list(range(0, 181, 18))


def test_ctrl_c_keeps_the_best_weights_so_far():
    """Pressed while the best evaluation is being reported, which counts already."""
    trainer, valid, seen = fresh_trainer(), linear_buffer(20, seed=2), []

    def press_at_step_50(step, evaluation):
        seen.append(evaluation.selection_loss)
        if step == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.pretrain(
            linear_buffer(20, seed=1, pairs_each=3), valid, on_evaluation=press_at_step_50
        )
    assert len(seen) == 6
    assert min(seen) == seen[-1]
    assert trainer.evaluate(valid).selection_loss == min(seen)


def test_the_same_seed_trains_to_bit_identical_weights():
    def trained(seed):
        trainer = fresh_trainer(seed=seed)
        trainer.pretrain(linear_buffer(30, seed=1), linear_buffer(20, seed=2), max_epochs=3)
        trainer.finetune(linear_buffer(30, seed=3), num_new=10, epochs=2)
        return weights_of(trainer)

    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


def test_true_costs_reach_the_model_through_labels_only():
    """The labels of one run, replayed over episodes without true costs, train the same model."""
    train = linear_buffer(30, seed=1)
    pairs = draw_pairs(30, 90, rng=rng(1))
    recorded = SyntheticOracle(5).label(train.queries(pairs))
    blind = PreferenceBuffer()
    blind.add_trajectories([Trajectory(t.obs, t.actions) for t in train.trajectories])
    blind.add_labels(pairs, recorded)
    weights = []
    for buffer in (train, blind):
        trainer = fresh_trainer()
        trainer.pretrain(buffer, linear_buffer(20, seed=2), max_epochs=3)
        weights.append(weights_of(trainer))
    assert torch.equal(*weights)


@pytest.mark.parametrize("which", ["train", "valid"])
def test_pretraining_without_labels_is_refused(which):
    buffers = {"train": linear_buffer(20, seed=1), "valid": linear_buffer(20, seed=2)}
    for empty, found in [
        (PreferenceBuffer(), "the buffer's 0 pairs have none"),
        (buffer_of([1.0, 2.0], [[0, 1]], [Label(NAN, NAN, NAN)]), "the buffer's 1 pairs have none"),
    ]:
        with pytest.raises(LabelError, match=found):
            fresh_trainer(obs_dim=1).pretrain(**{**buffers, which: empty})


def test_pretraining_on_one_sided_labels_is_refused():
    all_safe = linear_buffer(20, seed=1, oracle=SyntheticOracle(1000))
    with pytest.raises(LabelError, match="got 120 safe and 0 unsafe"):
        fresh_trainer().pretrain(all_safe, linear_buffer(20, seed=2))


def test_pretraining_that_could_never_keep_what_it_learned_is_refused():
    with pytest.raises(ValueError, match=r"patience must lie in \[1, inf\), got 0"):
        fresh_trainer().pretrain(linear_buffer(20, seed=1), linear_buffer(20, seed=2), patience=0)


def test_validation_on_what_is_trained_on_is_refused():
    buffer, partly = linear_buffer(20, seed=1), linear_buffer(20, seed=2)
    partly.add_trajectories(buffer.trajectories[:3])
    with pytest.raises(ValueError, match="20 of the 20 to validate on are trained on, too; split"):
        fresh_trainer().pretrain(buffer, buffer)
    with pytest.raises(ValueError, match="must be new to the model, but 3 of the 23 to validate"):
        fresh_trainer().pretrain(buffer, partly)


@pytest.mark.parametrize(
    ("model", "found"), [("model.safetensors", "'model.saf"), (torch.nn.Linear(2, 1), "Linear")]
)
def test_what_is_no_cost_model_is_refused(model, found):
    with pytest.raises(TypeError, match=rf"or another LearnedCost, got {found}.*load_cost_model\("):
        CostModelTrainer(model, rng=rng())


def test_a_number_is_a_fixed_dead_zone():
    trainer = known_trainer(dead_zone=12)
    assert trainer.dead_zone.update(1.0, 0.0) == 12
    with pytest.raises(ValueError, match="a dead zone needs 0 <= initial"):
        known_trainer(dead_zone=-1.0)


def test_a_batch_of_no_pairs_is_refused():
    with pytest.raises(ValueError, match=r"batch_size must lie in \[1, inf\), got 0"):
        fresh_trainer(batch_size=0)


# -- A limit other than 0 --------------------------------------------------------------------


class Limited(LearnedCost):
    """c(s, a) = s, and a limit that is learned, b."""

    def __init__(self, limit):
        super().__init__()
        self.obs_shape, self.act_dim, self.discount, self.horizon = (1,), 1, 1.0, None
        self.num_members = 1
        self.limit = torch.nn.Parameter(tensor(limit))

    @property
    def learned_limit(self):
        return self.limit.item()

    def forward(self, obs, _):
        return obs[..., 0]

    def member_excess(self, obs, actions, mask=None):
        return (self.trajectory_cost(obs, actions, mask) - self.limit)[None]

    def prorate(self, horizon):
        raise NotImplementedError

    def fit_input_scale(self, trajectories):
        pass

    def save(self, path, **info):
        raise NotImplementedError


def test_safety_labels_move_a_learned_limit_as_a_pocket_calculator_says():
    """One safe episode of cost 2 with a limit of 1.5 and δ = 0: Eq. 8 loses softplus(0.5), whose
    slope is σ(0.5) = 0.62246, and which falls as the limit rises. The other has no label."""
    buffer = buffer_of([2.0, 0.0], [[0, 1]], [Label(NAN, 1, NAN)])
    trainer = CostModelTrainer(Limited(1.5), rng=rng(), dead_zone=0.0, snr_weight=0.0, lr=0.1)
    loss = trainer.gradient_step(buffer.batch(np.array([0])))
    assert loss == pytest.approx(softplus(0.5))
    assert trainer.model.limit.grad.item() == pytest.approx(-0.62246, abs=1e-5)
    assert trainer.model.limit.item() == pytest.approx(1.6)  # Adam's first step: up


def test_preferences_and_variance_do_not_move_a_limit():
    buffer = buffer_of([2.0, 0.0], [[0, 1]], [Label(0, NAN, NAN)])
    trainer = CostModelTrainer(Limited(1.5), rng=rng(), snr_weight=0.1)
    trainer.gradient_step(buffer.batch(np.array([0])))
    assert trainer.model.limit.grad.item() == pytest.approx(0, abs=1e-7)


def test_verdicts_are_relative_to_the_learned_limit():
    buffer = buffer_of([1.5, 2.0, 1.0], [[0, 1], [1, 2]], [Label(1, 1, 0), Label(0, 0, 1)])
    trainer = CostModelTrainer(Limited(1.5), rng=rng())
    assert trainer.evaluate(buffer).safety_accuracy == 1
    assert trainer.violation_rates(buffer, np.arange(2)) == (1 / 2, 1 / 2)


# -- Ensembles -------------------------------------------------------------------------------


def fresh_ensemble_trainer(num=3, *, pessimism=0.0, **options):
    torch.manual_seed(0)
    members = [CostModel(*boxes(2, 1), hidden_sizes=(16,), output_scale=1.0) for _ in range(num)]
    model = CostModelEnsemble(members, pessimism=pessimism)
    return CostModelTrainer(model, rng=rng(), **{"lr": 1e-2, "batch_size": 64, **options})


def members_of(part):
    """The pairs of a resample, as positions of their members in the buffer."""
    return [tuple(pair) for pair in part.numbers[part.pairs].tolist()]


def test_a_pair_counts_for_a_member_as_often_as_its_trajectories_say():
    """However the pair is drawn: alone, among others, or from a buffer that has grown since."""
    buffer = linear_buffer(40, seed=1)
    whole = bootstrapped(buffer.batch(np.arange(120)), 5)
    assert [len(part) for part in whole] != [120] * 5
    for position in (0, 7, 119):
        pair = tuple(buffer.labelled_pairs[position].tolist())
        alone = bootstrapped(buffer.batch(np.array([position])), 5)
        for part, one in zip(whole, alone, strict=True):
            assert len(one) == members_of(part).count(pair)
    start = len(buffer.trajectories)
    buffer.add_trajectories(linear_buffer(40, seed=2).trajectories)
    buffer.add_labels(np.array([[start, start + 1]]), [Label(1, 1, 0)])
    for part, other in zip(whole, bootstrapped(buffer.batch(np.arange(121)), 5), strict=True):
        assert [pair for pair in members_of(other) if max(pair) < start] == members_of(part)


def test_what_is_resampled_are_the_trajectories():
    """Poisson of mean 1: a member lacks 1/e of the trajectories, and of pairs all that have one.

    Its weight of a pair is a product of two such numbers, whose variance is 2 * 2 - 1 = 3. Of
    resampled pairs, ten to a trajectory, hardly any trajectory would be missing.
    """
    buffer = linear_buffer(300, seed=1, pairs_each=10, steps=1)
    parts = bootstrapped(buffer.batch(np.arange(3000)), 20)
    present = [{i for pair in members_of(part) for i in pair} for part in parts]
    assert np.mean([len(one) for one in present]) / 300 == pytest.approx(1 - 1 / math.e, abs=0.02)
    assert np.mean([len(set(members_of(part))) for part in parts]) / 3000 == pytest.approx(
        (1 - 1 / math.e) ** 2, abs=0.02
    )
    pairs = list(map(tuple, buffer.labelled_pairs.tolist()))
    counts = [Counter(members_of(part)) for part in parts]
    weights = np.array([[count[pair] for pair in pairs] for count in counts])
    assert weights.mean() == pytest.approx(1, abs=0.1)
    assert weights.var() == pytest.approx(3, abs=0.5)


def test_a_single_model_sees_every_pair_once():
    batch = linear_buffer(10, seed=1).batch(np.arange(30))
    assert bootstrapped(batch, 1) == [batch]


def test_the_members_of_an_ensemble_learn_as_each_would_alone_on_its_resample():
    """The first step of Adam, against autograd over each member's pairs alone."""
    buffer, together = linear_buffer(30, seed=1), fresh_ensemble_trainer(dead_zone=DeadZone(0.7))
    for member in together.model.members:
        torch.nn.init.normal_(member.net[-1].weight)
    batch = buffer.batch(np.arange(90))
    parts, losses = bootstrapped(batch, 3), []
    for member, part in zip(together.model.members, parts, strict=True):
        cost = torch.stack([member.trajectory_cost(*pad([t])[:2])[0] for t in batch.trajectories])
        first, second = cost[part.pairs].T
        loss = pbci_loss(first, second, part.preference, *part.safe.T, dead_zone=0.7).total
        losses.append(loss.item())
        loss.backward()
    expected = [p.grad.clone() for p in together.model.parameters()]
    assert together.gradient_step(batch) == pytest.approx(np.mean(losses), rel=1e-5)
    for parameter, gradient in zip(together.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_an_ensemble_learns_a_linear_cost_and_its_members_differ():
    trainer, train = fresh_ensemble_trainer(), linear_buffer(200, seed=1)
    trainer.model.fit_input_scale(train.trajectories)
    trainer.pretrain(train, linear_buffer(60, seed=2), max_epochs=20)
    test = linear_buffer(100, seed=3)
    assert trainer.evaluate(test).pair_accuracy > 0.9
    assert trainer.evaluate(test).safety_accuracy > 0.9
    assert trainer.model.member_scores(test.trajectories).std(axis=0).min() > 1e-3


def test_pessimism_changes_what_a_policy_pays_and_not_what_is_measured_in_training():
    """Otherwise δ, which follows the violations that the model predicts, would undo it."""
    plain, charged = fresh_ensemble_trainer(), fresh_ensemble_trainer(pessimism=2.0)
    train, valid = linear_buffer(60, seed=1), linear_buffer(40, seed=2)
    for trainer in (plain, charged):
        trainer.pretrain(train, valid, max_epochs=3)
    assert plain.evaluate(valid) == charged.evaluate(valid)
    assert plain.violation_rates(valid, np.arange(9)) == charged.violation_rates(
        valid, np.arange(9)
    )
    assert (charged.model.score(valid.trajectories) > plain.model.score(valid.trajectories)).all()


def test_an_ensemble_whose_members_miss_a_whole_batch_goes_on():
    """A batch of one pair is in about 63 % of the resamples."""
    buffer, trainer = linear_buffer(10, seed=1), fresh_ensemble_trainer(8)
    sizes = [len(part) for part in bootstrapped(buffer.batch(np.array([0])), 8)]
    assert 0 in sizes
    assert max(sizes) > 0
    assert math.isfinite(trainer.gradient_step(buffer.batch(np.array([0]))))
    assert all(p.isfinite().all() for p in trainer.model.parameters())


# -- Segments --------------------------------------------------------------------------------


def test_a_cost_learned_on_segments_judges_episodes_once_its_limit_is_prorated():
    """Episodes of 40 steps in segments of 10; a segment is safe below a quarter of the limit."""
    torch.manual_seed(0)
    model = CostModel(*boxes(2, 1), hidden_sizes=(16,), horizon=10, output_scale=1.0)
    trainer = CostModelTrainer(model, rng=rng(), lr=1e-2, batch_size=64)
    buffers = []
    for num, seed in [(100, 1), (30, 2)]:
        whole = linear_episodes(num, seed=seed, steps=40)
        buffer = PreferenceBuffer()
        buffer.add_trajectories(cut_segments(whole, 10))
        pairs = draw_pairs(len(buffer.trajectories), 3 * num, rng=rng(seed))
        oracle = SyntheticOracle(20 * 10 / 40)
        buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
        buffers.append(buffer)
    model.fit_input_scale(buffers[0].trajectories)
    trainer.pretrain(*buffers, max_epochs=30)
    episodes = linear_episodes(100, seed=3, steps=40)
    with pytest.raises(ValueError, match=r"10, got a trajectory of 40; .* call prorate\(40\)"):
        model.score(episodes)
    model.prorate(40)
    safe = np.array([episode.true_cost <= 20 for episode in episodes])
    assert ((model.score(episodes) <= model.learned_limit) == safe).mean() > 0.9


def test_trajectories_that_all_fall_short_of_the_horizon_are_suspected_to_be_segments():
    """Ones that end early end at different steps."""
    train, valid = linear_buffer(20, seed=1, steps=5), linear_buffer(20, seed=2, steps=5)
    torch.manual_seed(0)
    trainer = CostModelTrainer(CostModel(*boxes(2, 1), hidden_sizes=(4,), horizon=50), rng=rng())
    with pytest.warns(RuntimeWarning, match="all 20 trajectories have 5 steps, .* horizon of 50"):
        trainer.pretrain(train, valid, max_epochs=1)
    trainer.finetune(train, num_new=5, epochs=1)  # it warns once


# -- Terms -----------------------------------------------------------------------------------


def test_a_dead_zone_lifts_the_costs_of_unsafe_episodes():
    """Theorem 3.2, with Adam in place of gradient descent: one safe and one unsafe episode."""
    buffer = buffer_of([-1.0, 1.0], [[0, 1]], [Label(1, 1, 0)])
    costs = {}
    for dead_zone in (0.0, 1.0):
        trainer = fresh_trainer(obs_dim=1, dead_zone=DeadZone(dead_zone), snr_weight=0.0)
        for _ in range(200):
            trainer.gradient_step(buffer.batch(np.array([0])))
        costs[dead_zone] = trainer.model.score(buffer.trajectories)
    shift_of_safe, shift_of_unsafe = costs[1.0] - costs[0.0]
    assert 0.5 < shift_of_unsafe <= 1
    assert abs(shift_of_safe) < 0.05


def test_a_strong_variance_term_without_a_bound_is_reported_as_running_away():
    """Once, although it is seen in many evaluations and again in fine-tuning."""
    trainer, train = fresh_trainer(snr_weight=1.0, max_std=None, lr=0.05), linear_buffer(20, seed=1)
    with pytest.warns(RuntimeWarning, match=r"sd\(C\) = .* is above 20, .*; set max_std") as caught:
        history = trainer.pretrain(train, linear_buffer(20, seed=2), max_epochs=60, patience=60)
    assert sum(evaluation.cost_std > 20 for evaluation in history) > 1
    assert len(caught) == 1
    trainer.finetune(train, num_new=10)  # another warning would fail the test


def test_a_bounded_variance_term_does_not_run_away():
    """The same training but for `max_std`: without it the costs spread by 800 in the end."""
    trainer = fresh_trainer(snr_weight=1.0, max_std=5.0, lr=0.05)
    history = trainer.pretrain(
        linear_buffer(20, seed=1), linear_buffer(20, seed=2), max_epochs=60, patience=60
    )
    assert history[-1].cost_std < 30


def test_costs_that_well_separated_labels_spread_are_no_runaway():
    """The default variance term has long been saturated; a warning would fail the test."""
    trainer, valid = fresh_trainer(lr=0.05), linear_buffer(60, seed=2)
    history = trainer.pretrain(linear_buffer(100, seed=1), valid, max_epochs=40, patience=40)
    assert history[-1].cost_std > 20
    assert any(a.selection_loss < b.selection_loss for a, b in pairwise(history[10:]))
    assert trainer.evaluate(valid).safety_accuracy > 0.95


# -- Fine-tuning -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:labels of the same trajectories should agree")
@pytest.mark.parametrize("batch_size", [1, 2, 4, 512])
def test_each_batch_is_half_new_and_half_old(batch_size):
    """At lr = 0 the mean loss tells the shares: old preferences are right, new ones wrong.

    Drawn by number, the 8 old pairs would weigh four times as much as the 2 new ones.
    """
    labels = [Label(1, 1, 0)] * 8 + [Label(0, 1, 0)] * 2
    buffer = buffer_of([0.0, 2.0], [[0, 1]] * 10, labels)
    trainer = known_trainer(dead_zone=DeadZone(0.0), lr=0.0, batch_size=batch_size)
    loss = trainer.finetune(buffer, num_new=2, epochs=3)
    verdict_loss = (softplus(0) + softplus(-2)) / 2
    assert loss == pytest.approx((softplus(-2) + softplus(2)) / 2 + verdict_loss)


def test_fine_tuning_on_one_sided_labels_is_refused():
    buffer = buffer_of([0.0, 2.0], [[0, 1]], [Label(1, 1, 1)])
    with pytest.raises(LabelError, match="got 2 safe and 0 unsafe"):
        known_trainer().finetune(buffer, num_new=1)


def test_without_old_labels_fine_tuning_uses_the_new_ones_alone():
    buffer = buffer_of([0.0, 2.0], [[0, 1]] * 3, [Label(1, 1, 0)] * 3)
    loss = known_trainer(dead_zone=DeadZone(0.0), lr=0.0).finetune(buffer, num_new=3)
    assert loss == pytest.approx(softplus(-2) + (softplus(0) + softplus(-2)) / 2)


def test_fine_tuning_moves_the_model_towards_the_new_labels():
    """The oracle's limit falls from 7 to 3: episodes in between become unsafe."""
    trainer, strict = fresh_trainer(), SyntheticOracle(3)
    buffer = linear_buffer(100, seed=1, oracle=SyntheticOracle(7))
    trainer.pretrain(buffer, linear_buffer(30, seed=2, oracle=SyntheticOracle(7)), max_epochs=15)
    test = linear_buffer(60, seed=3, oracle=strict)
    before = trainer.evaluate(test)
    new = buffer.add_trajectories(linear_episodes(20, seed=4))
    pairs = new[draw_pairs(20, 40, rng=rng(4))]
    buffer.add_labels(pairs, strict.label(buffer.queries(pairs)))
    trainer.finetune(buffer, num_new=40, epochs=30)
    after = trainer.evaluate(test)
    assert after.safety_accuracy > before.safety_accuracy
    assert after.safety_loss < before.safety_loss


def test_fine_tuning_with_a_step_size_of_its_own_is_that_of_a_trainer_with_it():
    """Adam's first step is lr per weight, and the next training has the trainer's own again."""
    buffer = linear_buffer(20, seed=1)
    moved = []
    for lr, own in ((1e-2, 1e-3), (1e-3, None)):
        trainer = fresh_trainer(lr=lr)
        before = weights_of(trainer)
        trainer.finetune(buffer, num_new=60, epochs=1, lr=own)
        moved.append(weights_of(trainer) - before)
        assert trainer.state_dict()["optimizer"]["param_groups"][0]["lr"] == lr
    assert torch.equal(*moved)


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_fine_tuning_refuses_a_step_size_that_is_none(lr):
    with pytest.raises(ValueError, match=r"lr must lie in \[0, inf\), got"):
        fresh_trainer().finetune(linear_buffer(20, seed=1), num_new=5, lr=lr)


def test_balanced_fine_tuning_draws_as_many_unsafe_as_safe_members():
    """Safe ones cost 0 and lose ln 2, unsafe ones 30 and lose nothing. Half of the new pairs, and
    1 % of all, are unsafe; balanced, half of all members that are drawn are."""
    buffer = buffer_of([0.0, 0.0, 30.0, 30.0], [[0, 1]] * 990, [Label(NAN, 1, 1)] * 990)
    buffer.add_labels(np.array([[0, 1], [2, 3]] * 5), [Label(NAN, 1, 1), Label(NAN, 0, 0)] * 5)
    even, balanced = (
        known_trainer(lr=0.0, dead_zone=0.0).finetune(
            buffer, num_new=10, epochs=100, balanced=chosen
        )
        for chosen in (False, True)
    )
    assert even == pytest.approx(0.75 * LN_2, rel=0.02)
    assert balanced == pytest.approx(0.5 * LN_2, rel=0.05)


def test_balanced_fine_tuning_takes_as_many_steps_as_the_other():
    buffer = buffer_of([0.0, 2.0], [[0, 1]] * 100, [Label(1, 1, 0)] * 100)
    steps = []
    for balanced in (False, True):
        trainer = known_trainer(lr=0.0, batch_size=32)
        trainer.finetune(buffer, num_new=30, epochs=3, balanced=balanced)
        steps.append(trainer.steps)
    assert steps == [6, 6]


def test_no_epochs_of_fine_tuning_leave_the_weights_alone():
    trainer, buffer = fresh_trainer(), linear_buffer(20, seed=1)
    before = weights_of(trainer)
    assert math.isnan(trainer.finetune(buffer, num_new=5, epochs=0))
    assert torch.equal(weights_of(trainer), before)


@pytest.mark.parametrize("num_new", [0, -1, 61])
def test_the_new_labels_must_lie_within_the_buffer(num_new):
    with pytest.raises(ValueError, match=rf"must lie in 1\.\.60 \(the buffer\), got {num_new}"):
        fresh_trainer().finetune(linear_buffer(20, seed=1), num_new=num_new)


def test_training_goes_on_exactly_where_a_state_was_taken():
    buffer = linear_buffer(20, seed=0)
    whole, before = fresh_trainer(batch_size=8), fresh_trainer(batch_size=8)
    for trainer in (whole, before):
        trainer.finetune(buffer, num_new=20, epochs=3)
        trainer.dead_zone.update(0.5, 0.1)
    model = CostModel(*boxes(2, 1), hidden_sizes=(16,), output_scale=1.0)
    model.load_state_dict(before.model.state_dict())
    after = CostModelTrainer(model, batch_size=8, rng=before._rng)
    after.load_state_dict(before.state_dict())
    for trainer in (whole, after):
        trainer.finetune(buffer, num_new=20, epochs=3)
    assert (after.steps, after.dead_zone.value) == (whole.steps, whole.dead_zone.value)
    ours, theirs = after.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# -- Online rounds ---------------------------------------------------------------------------------


def online_buffer():
    """Costs -1 to 4; one pair from before, two new ones."""
    labels = [Label(1, 1, 0), Label(1, 1, 1), Label(1, 0, 0)]
    return buffer_of([-1.0, 2.0, 0.0, 3.0, 4.0], [[0, 1], [2, 3], [4, 1]], labels)


def test_a_round_moves_the_dead_zone_and_fine_tunes_with_it():
    """New members cost 0, 3, 4, 2: three of four are judged unsafe, two are labelled so.

    The dead zone falls by 2 · 0.5 · (3/4 - 2/4) = 0.25 to 0.75 before the loss is taken. At lr = 0
    that is, over the two new pairs and two times the old one:
    """
    buffer, trainer = online_buffer(), known_trainer(dead_zone=DeadZone(1.0, lr=0.5), lr=0.0)
    trainer.steps = 1
    found = trainer.update(buffer, np.array([1, 2]), epochs=1)
    assert trainer.dead_zone.value == 0.75
    old = softplus(-3) + (softplus(-1) + softplus(0.75 - 2)) / 2
    first = softplus(-3) + (softplus(0) + softplus(3)) / 2
    second = softplus(2) + (softplus(0.75 - 4) + softplus(0.75 - 2)) / 2
    assert found == {
        "violation_gap": 1 / 4,
        "violation_rate": 1 / 2,
        "finetune_loss": pytest.approx((2 * old + first + second) / 4),
    }
    assert (trainer.steps, trainer.num_untuned) == (2, 0)


def test_a_model_that_was_trained_before_keeps_its_input_scale_under_a_new_trainer():
    """Another one made it another function, though the step size is 0."""
    buffer, model = online_buffer(), known_trainer(lr=0.0).model
    model.fit_input_scale([Trajectory(np.array([[0.0], [10.0]]), np.zeros((2, 1)))])
    before = model.score(buffer.trajectories)
    CostModelTrainer(model, rng=rng(), lr=0.0).update(buffer, np.arange(3), epochs=1)
    assert (model.score(buffer.trajectories) == before).all()


def test_before_the_first_training_the_dead_zone_stays_and_the_input_scale_is_fitted():
    """The observations -1, 2, 0, 3, 4 have mean 1.6 and variance 3.44."""
    buffer, trainer = online_buffer(), known_trainer(dead_zone=DeadZone(1.0, lr=0.5), lr=0.0)
    found = trainer.update(buffer, np.arange(3), epochs=1)
    assert trainer.dead_zone.value == 1
    assert trainer.model.input_mean[0].item() == pytest.approx(1.6)
    assert trainer.model.input_scale[0].item() == pytest.approx(math.sqrt(3.44))
    assert found["violation_gap"] == pytest.approx(4 / 6 - 3 / 6)  # 2, 3, 4, 2 are above the mean
    assert trainer.steps == 1
    buffer.add_trajectories([Trajectory(np.array([[99.0]]), np.zeros((1, 1)))])
    buffer.add_labels(np.array([[0, 5]]), [Label(1, 1, 0)])
    trainer.update(buffer, np.array([3]), epochs=1)
    assert trainer.model.input_mean[0].item() == pytest.approx(1.6)  # once, before training


@pytest.mark.parametrize(
    ("label", "found"),
    [
        (Label(1, 1, 1), "6 safety labels of 3 pairs are safe"),
        (Label(1, 0, 0), "6 safety labels of 3 pairs are unsafe"),
        (Label(1), "none of 3 pairs has a safety label"),
    ],
)
def test_three_rounds_in_which_nothing_could_be_learned_are_said_once(label, found):
    trainer = known_trainer()
    buffer = buffer_of([0.0, 1.0, 2.0], [[0, 1]], [label])
    trainer.update(buffer, np.array([0]))
    trainer.update(buffer, np.empty(0, np.int64))  # nothing was answered
    buffer.add_labels(np.array([[1, 2]]), [label])
    trainer.update(buffer, np.array([1]))
    buffer.add_labels(np.array([[0, 2]]), [label])
    with pytest.warns(RuntimeWarning, match=f"{found}, and nothing has been learned in 3 rounds"):
        trainer.update(buffer, np.array([2]))
    buffer.add_labels(np.array([[0, 1]]), [label])
    trainer.update(buffer, np.array([3]))
    assert trainer.steps == 0


def test_one_sided_labels_train_nothing_and_stay_new():
    """At lr = 0: all three pairs weigh alike in the end, where half would go to the last one if
    the first two were old."""
    buffer = buffer_of([-1.0, 2.0, -2.0, 3.0], [[0, 1]] * 2, [Label(1, 1, 1)] * 2)
    trainer = known_trainer(dead_zone=0.0, lr=0.0)
    trainer.steps = 1  # no new input scale
    assert trainer.update(buffer, np.arange(2)) == {"violation_gap": 1 / 2, "violation_rate": 0}
    assert (trainer.steps, trainer.num_untuned) == (1, 2)
    buffer.add_labels(np.array([[2, 3]]), [Label(1, 1, 0)])
    found = trainer.update(buffer, np.array([2]), epochs=1)
    preference = (2 * softplus(-3) + softplus(-5)) / 3
    safety = (2 * (softplus(-1) + softplus(2)) + softplus(-2) + softplus(-3)) / 6
    assert found["finetune_loss"] == pytest.approx(preference + safety)
    assert (trainer.steps, trainer.num_untuned) == (2, 0)


def test_a_round_without_new_labels_changes_nothing():
    trainer, buffer = known_trainer(), online_buffer()
    before = weights_of(trainer)
    assert trainer.update(buffer, np.empty(0, np.int64)) == {}
    assert torch.equal(weights_of(trainer), before)
    assert (trainer.steps, trainer.num_untuned) == (0, 0)


def test_new_preferences_without_a_safety_label_leave_the_dead_zone_alone():
    buffer, trainer = online_buffer(), known_trainer(dead_zone=DeadZone(1.0, lr=0.5), lr=0.0)
    trainer.steps = 1
    buffer.add_labels(np.array([[0, 2]]), [Label(1, NAN, NAN)])
    found = trainer.update(buffer, np.array([3]), epochs=1)
    assert trainer.dead_zone.value == 1
    assert math.isnan(found["violation_gap"])
    assert math.isnan(found["violation_rate"])
    assert "finetune_loss" in found


def test_a_round_is_the_dead_zone_s_step_and_then_that_of_fine_tuning():
    """Bit by bit: no other random number is drawn."""
    buffer, trainers = linear_buffer(20, seed=1), [fresh_trainer(), fresh_trainer()]
    for trainer in trainers:
        trainer.finetune(buffer, num_new=60, epochs=1)
    by_round, by_hand = trainers
    by_round.update(buffer, np.arange(40, 60), epochs=3, lr=1e-3)
    by_hand.dead_zone.update(*by_hand.violation_rates(buffer, np.arange(40, 60)))
    by_hand.finetune(buffer, num_new=20, epochs=3, lr=1e-3)
    assert by_round.dead_zone.value == by_hand.dead_zone.value
    assert torch.equal(weights_of(by_round), weights_of(by_hand))


def test_what_is_untuned_is_part_of_the_state():
    buffer = buffer_of([-1.0, 2.0], [[0, 1]], [Label(1, 1, 1)])
    before, after = known_trainer(), known_trainer()
    before.update(buffer, np.array([0]))
    after.load_state_dict(before.state_dict())
    assert after.num_untuned == before.num_untuned == 1


@pytest.mark.parametrize("new", [[0], [0, 1, 2, 3], [2, 1], [3]])
def test_new_pairs_that_are_not_the_last_ones_are_refused(new):
    with pytest.raises(ValueError, match=r"the last ones of the buffer, which has 3, got the pos"):
        known_trainer().update(online_buffer(), np.array(new))
