"""What a model card says: of labels counted by hand, and of what the cost follows."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from pbcrl import CostModel, Label, PreferenceBuffer, Trajectory
from pbcrl.card import main_effects, model_card

SPACES = Box(-1, 1, (4,)), Box(-1, 1, (2,))
NAMES = ["x", "y", "vx", "vy", "push[0]", "push[1]"]


class TooFarRight(torch.nn.Module):
    def forward(self, obs, actions):
        return (obs[..., 0] > 0.5).float() + 0.5 * (actions[..., 1] > 0.5)


def labelled():
    rng = np.random.default_rng(0)
    sizes = (100, 4), (100, 2)
    buffer = PreferenceBuffer(
        [Trajectory(*(rng.uniform(-1, 1, size) for size in sizes)) for _ in range(6)]
    )
    buffer.add_labels([(0, 1), (0, 2)], [Label(1.0, 1.0, 0.0), Label(1.0, 1.0, np.nan)])
    return buffer


def section(card, heading):
    """Its lines, without the empty ones around."""
    _, _, after = card.partition(f"## {heading}\n")
    return after.partition("\n## ")[0].strip().split("\n")


def test_a_card_lists_what_the_cost_follows_and_counts_the_labels():
    model, buffer = CostModel(*SPACES, net=TooFarRight(), output_scale=1.0), labelled()
    found = main_effects(model, buffer, names=NAMES)
    card = model_card(model, buffer, found=found)
    assert card.startswith("# Cost model\n")
    head, line, *rows, _, sentence = section(card, "What it learned")
    assert (head, line) == ("| input | share | effect |", "|---|---|---|")
    assert [row.split(" | ")[0] for row in rows] == ["| x", "| push[1]"]
    assert "cost rises above 0." in rows[0]
    assert sentence.startswith("The share is")
    assert "| limit | 0 for what was compared, of 100 steps |" in card
    said = "2 pairs of 3 episodes or segments; 1 of these were called safe, 1 unsafe"
    assert f"| labels | {said} |" in card
    assert model_card(model, buffer) == card.replace("| x |", "| obs[0] |").replace(
        "| push[1] |", "| action[1] |"
    )


def test_a_card_has_what_its_caller_adds():
    card = model_card(
        CostModel(*SPACES),
        labelled(),
        title="Mine",
        about={"env": "Walk"},
        sections={"Accuracy": ["good"]},
        warnings=["old"],
    )
    assert card.startswith("# Mine\n")
    assert "\n| env | Walk |\n" in card
    assert section(card, "Accuracy") == ["good"]
    assert section(card, "Warnings")[0] == "- old"
    headings = [line for line in card.split("\n") if line.startswith("## ")]
    assert headings == ["## What it learned", "## Accuracy", "## Warnings", "## Use"]


@pytest.mark.parametrize(
    ("space", "buffer", "said"),
    [
        (SPACES[0], labelled(), "Nothing: no input makes a difference to the cost."),
        (SPACES[0], PreferenceBuffer(), "Not known: it was trained on nothing."),
        (Box(0, 255, (8, 8, 3), np.uint8), PreferenceBuffer(), "It reads images, of which no "),
    ],
)
def test_a_card_says_where_nothing_can_be_listed(space, buffer, said):
    (line,) = section(model_card(CostModel(space, SPACES[1]), buffer), "What it learned")
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("horizon", "lengths", "said"),
    [
        (40, (40, 20), "0 per episode, of at most 40 steps"),
        (None, (20, 30, 1_000), "0 for what was compared, of 20 to 1,000 steps"),
        (None, (), "0 per episode, of any length"),
    ],
)
def test_a_card_says_of_what_the_limit_is(horizon, lengths, said):
    model = CostModel(*SPACES, horizon=horizon)
    shown = [Trajectory(np.zeros((length, 4)), np.zeros((length, 2))) for length in lengths]
    assert f"| limit | {said} |" in model_card(model, PreferenceBuffer(shown))


@pytest.mark.parametrize("found", [None, []])
def test_a_card_of_other_trajectories_is_refused(found):
    with pytest.raises(
        ValueError, match=r"made for: \(obs_dim, act_dim\) = \(3, 2\), got \(4, 2\)"
    ):
        model_card(CostModel(Box(-1, 1, (3,)), SPACES[1]), labelled(), found=found)
