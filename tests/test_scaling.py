"""The scale of rewards and costs, in numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from pbcrl import SignalScale
from pbcrl.errors import NonFiniteError


def test_the_scale_is_the_root_mean_square_of_discounted_sums():
    """γ = .5; rewards 4, 2 | 8: sums 4, 4 and, anew, 8: sqrt((16 + 16 + 64) / 3)."""
    scale = SignalScale(1, 0.5)
    signals = torch.tensor([[[4.0], [2.0], [8.0]], [[0.0], [0.0], [0.0]]])
    done = torch.tensor([[False], [True], [False]])
    found = scale.update(signals, done)
    assert found.shape == (2, 1, 1)
    assert found[0].item() == pytest.approx(32**0.5)
    assert found[1].item() == 1.0  # nothing has cost anything
    # The sum of 8 goes on: 4 + 6, then as much weight on the second rollout as on the first.
    second = scale.update(torch.tensor([[[6.0]], [[0.0]]]), torch.tensor([[True]]))
    assert second[0].item() == pytest.approx(((32 + 100) / 2) ** 0.5)


def test_without_a_discount_sums_are_the_single_steps():
    """Advantages 3, -4 of reward and 0, 2 of cost: sqrt((9 + 16) / 2) and sqrt(4 / 2)."""
    advantages = torch.tensor([[[3.0], [-4.0]], [[0.0], [2.0]]])
    found = SignalScale(1, 0.0).update(advantages, torch.tensor([[False], [False]]))
    assert found.flatten().tolist() == pytest.approx([12.5**0.5, 2**0.5])


def test_the_scale_forgets_and_goes_on_from_its_state():
    scale, rng = SignalScale(3, 0.9), np.random.default_rng(0)
    never = torch.zeros((5, 3), dtype=torch.bool)
    for _ in range(30):
        scale.update(torch.from_numpy(100 * rng.normal(size=(2, 5, 3))), never)
    again = SignalScale(3, 0.9)
    again.load_state_dict(scale.state_dict())
    for _ in range(800):
        signals = torch.from_numpy(rng.normal(size=(2, 5, 3)))
        found = scale.update(signals, never)
        assert torch.equal(found, again.update(signals, never))
    assert found.flatten().tolist() == pytest.approx([2.3, 2.3], rel=0.3)  # 1 / sqrt(1 - .9²)


def test_rewards_from_which_nothing_can_be_learned_are_refused():
    with pytest.raises(NonFiniteError, match=r"must be finite in float32, got sums of 1\.0e"):
        SignalScale(1, 0.9).update(torch.tensor([[[1e19]], [[0.0]]]), torch.tensor([[False]]))


NEVER = torch.zeros((5, 4), dtype=torch.bool)


@pytest.mark.parametrize(
    ("shape", "done", "found"),
    [
        ((2, 5, 3), NEVER[:, :3], r"\(2, 5, 3\) and torch.bool \(5, 3\)"),
        ((2, 5, 1), NEVER[:, :1], r"\(2, 5, 1\) and torch.bool \(5, 1\)"),  # is not broadcast
        ((2, 5, 4), NEVER[:3], r"\(2, 5, 4\) and torch.bool \(3, 4\)"),
        ((5, 4), NEVER, r"\(5, 4\) and torch.bool \(5, 4\)"),
        ((2, 0, 4), NEVER[:0], r"T >= 1, got \(2, 0, 4\)"),
        ((2, 5, 4), NEVER.float(), r"torch.float32 \(5, 4\); stack .* a done of numbers with 0"),
    ],
)
def test_a_rollout_of_another_shape_is_refused(shape, done, found):
    with pytest.raises(ValueError, match=rf"a rollout of 4 envs has .*{found}"):
        SignalScale(4, 0.9).update(torch.ones(shape), done)


@pytest.mark.parametrize(
    ("which", "number", "message"),
    [
        (0, math.nan, "got a reward of nan in step 2 of env 3; find"),
        (1, -math.inf, "got a cost of -inf in step 2 of env 3; find"),
        (1, 1e25, "got sums of "),
    ],
)
def test_a_rollout_that_is_refused_changes_nothing(which, number, message):
    scale, untouched = SignalScale(4, 0.9), SignalScale(4, 0.9)
    for one in (scale, untouched):
        one.update(torch.ones((2, 5, 4)), NEVER)
    bad = torch.ones((2, 5, 4))
    bad[which, 2, 3] = number
    with pytest.raises(NonFiniteError, match=message):
        scale.update(bad, NEVER)
    again = [one.update(torch.ones((2, 5, 4)), NEVER) for one in (scale, untouched)]
    assert torch.equal(*again)


def test_after_a_reset_the_sums_begin_again():
    """γ = .5: 4 and, anew, 8, though no episode ended: sqrt((16 + 64) / 2)."""
    scale, never = SignalScale(1, 0.5), torch.tensor([[False]])
    scale.update(torch.tensor([[[4.0]], [[0.0]]]), never)
    scale.reset()
    found = scale.update(torch.tensor([[[8.0]], [[0.0]]]), never)
    assert found[0].item() == pytest.approx(40**0.5)


def test_all_rollouts_count_alike_until_the_newest_would_count_less_than_forget():
    """Squares 4, 16, 100: means 4, 10 and 10 + (100 - 10) / 2, since 1/3 is less than 1/2."""
    scale, ended = SignalScale(1, 0.5, forget=0.5), torch.tensor([[True]])
    found = [
        scale.update(torch.tensor([[[r]], [[-r]]]), ended).flatten().tolist()
        for r in (2.0, 4.0, 10.0)
    ]
    assert found == [pytest.approx([square**0.5] * 2) for square in (4, 10, 55)]


@pytest.mark.parametrize(
    ("name", "value"), [("num_envs", 0), ("gamma", 1.5), ("forget", 0.0), ("forget", 2.0)]
)
def test_arguments_out_of_range_are_named(name, value):
    good = {"num_envs": 1, "gamma": 0.9, "forget": 0.02}
    with pytest.raises(ValueError, match=rf"{name} must lie in .*, got {value}"):
        SignalScale(**{**good, name: value})
