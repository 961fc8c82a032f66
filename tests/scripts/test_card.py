"""What a model card says of what the cost model follows."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

import pbcrl_envs  # noqa: F401 - registers the ids
from pbcrl import CostModel, Label, PreferenceBuffer, Trajectory
from pbcrl.errors import StorageError
from pbcrl_script_utils.card import EFFECTS, _effects, _learned, read_effects


class TooFarRight(torch.nn.Module):
    def forward(self, obs, actions):
        return (obs[..., 0] > 0.5).float() + 0.5 * (actions[..., 1] > 0.5)


@pytest.fixture
def envs():
    envs = gym.make_vec("PointHazards-v0", num_envs=2)
    yield envs
    envs.close()


def listed(model, buffer, envs):
    return _learned(model, _effects(model, buffer, envs))


def labelled():
    rng = np.random.default_rng(0)
    sizes = (100, 4), (100, 2)
    buffer = PreferenceBuffer(
        [Trajectory(*(rng.uniform(-1, 1, size) for size in sizes)) for _ in range(6)]
    )
    buffer.add_labels([(0, 1)], [Label(1.0, 1.0, 0.0)])
    return buffer


def test_the_card_lists_what_the_cost_follows_by_the_names_of_the_env(envs):
    spaces = envs.single_observation_space, envs.single_action_space
    model = CostModel(*spaces, net=TooFarRight(), output_scale=1.0)
    head, line, *rows, _, sentence = listed(model, labelled(), envs)
    assert (head, line) == ("| input | share | effect |", "|---|---|---|")
    assert [row.split(" | ")[0] for row in rows] == ["| x", "| action[1]"]
    assert "cost rises above 0." in rows[0]
    assert sentence.startswith("The share is")


def test_the_card_says_where_nothing_can_be_listed(envs):
    model = CostModel(envs.single_observation_space, envs.single_action_space)
    assert listed(model, labelled(), envs) == ["Nothing: no input makes a difference to the cost."]
    assert listed(model, PreferenceBuffer(), envs) == ["Not known: it was trained on nothing."]
    images = CostModel(Box(0, 255, (8, 8, 3), np.uint8), envs.single_action_space)
    (said,) = listed(images, PreferenceBuffer(), envs)
    assert said.startswith("It reads images")


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '[{"name": "x"}]', '[{"shares": []}]'])
def test_effects_of_a_run_that_cannot_be_read_are_refused(tmp_path, text):
    assert read_effects(tmp_path) is None
    (tmp_path / EFFECTS).write_text(text)
    with pytest.raises(StorageError, match=r"effects\.json .* cannot be read: .*; delete it"):
        read_effects(tmp_path)
