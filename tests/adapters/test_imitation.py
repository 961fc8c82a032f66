"""`imitation` under a learned cost, against the library itself: `make test-imitation`."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from pbcrl import (
    CostModel,
    FunctionOracle,
    Label,
    LagrangeMultiplier,
    SyntheticOracle,
    TreeCost,
)
from pbcrl.adapters.imitation import OracleGatherer, PricedReward, trajectory_of
from pbcrl.errors import LabelError

pytest.importorskip("imitation", reason="has an environment of its own: `make test-imitation`")
pytestmark = pytest.mark.filterwarnings("default")

from imitation.algorithms.preference_comparisons import PreferenceDataset  # noqa: E402
from imitation.data.rollout import (  # noqa: E402
    generate_trajectories,
    make_sample_until,
)
from imitation.data.types import TrajectoryWithRew  # noqa: E402
from imitation.rewards.reward_wrapper import RewardVecEnvWrapper  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402

import pbcrl_envs  # noqa: E402, F401

TOY = "PointHazards-v0"
ENV = gym.make(TOY)
SPACES = {"observation_space": ENV.observation_space, "action_space": ENV.action_space}


def random_model():
    torch.manual_seed(0)
    model = CostModel.for_env(ENV)
    torch.nn.init.normal_(model.net[-1].weight)
    return model


def fragments(count):
    """Whole episodes of a random policy, as imitation collects them."""
    rng = np.random.default_rng(0)
    venv = make_vec_env(TOY, 2, seed=0)
    venv.action_space.seed(0)
    found = generate_trajectories(None, venv, make_sample_until(min_episodes=count), rng=rng)
    return [fragment for fragment in found if len(fragment) == 100][:count]


def test_the_reward_wrapper_reports_a_reward_minus_the_priced_cost():
    model = random_model()
    reward_fn = PricedReward(
        model,
        LagrangeMultiplier(initial=2.0),
        reward_fn=lambda _state, _action, next_state, done: next_state[:, 0] + done,
        **SPACES,
    )
    envs = RewardVecEnvWrapper(make_vec_env(TOY, 3, seed=0), reward_fn)
    obs, rng = envs.reset(), np.random.default_rng(0)
    for _ in range(150):  # across a reset
        actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        before = obs.copy()
        obs, rewards, dones, infos = envs.step(actions)
        ends = [info.get("terminal_observation", row) for info, row in zip(infos, obs, strict=True)]
        expected = np.array(ends)[:, 0] + dones - 2.0 * model.step_cost(before, actions)
        np.testing.assert_allclose(rewards, expected, atol=1e-5)


def test_without_a_reward_it_is_the_priced_cost_alone():
    model, multiplier = random_model(), LagrangeMultiplier(initial=2.0)
    obs = np.zeros((5, 4), np.float32)
    far = PricedReward(model, multiplier, **SPACES)(obs, np.full((5, 2), 9.0), obs, np.zeros(5))
    np.testing.assert_allclose(far, -2.0 * model.step_cost(obs, np.ones((5, 2))), atol=1e-6)
    assert far.dtype == np.float32


def test_trees_before_training_price_nothing():
    price = PricedReward(TreeCost.for_env(ENV), LagrangeMultiplier(initial=2.0), **SPACES)
    obs = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(price(obs, np.ones((5, 2)), obs, np.zeros(5)), np.zeros(5))


def test_the_preferences_of_an_oracle_go_into_a_dataset_of_imitation():
    pairs = [(first, second) for first, second in zip(*[iter(fragments(8))] * 2, strict=True)]
    assert all(isinstance(first, TrajectoryWithRew) for first, _ in pairs)
    preferences = OracleGatherer(SyntheticOracle(5.0), **SPACES)(pairs)
    dataset = PreferenceDataset()
    dataset.push(pairs, preferences)
    assert len(dataset) == 4
    for (first, second), preference in zip(pairs, preferences, strict=True):
        costs = [sum(info["cost"] for info in one.infos) for one in (first, second)]
        assert preference == (np.sign(costs[1] - costs[0]) + 1) / 2
    assert len(set(preferences.tolist())) > 1


def test_a_fragment_is_a_trajectory_without_its_last_observation():
    (fragment,) = fragments(1)
    found = trajectory_of(fragment, **SPACES)
    np.testing.assert_array_equal(found.obs, fragment.obs[:-1])
    np.testing.assert_array_equal(found.actions, fragment.acts)
    np.testing.assert_array_equal(found.costs, [info["cost"] for info in fragment.infos])


def test_the_oracle_never_sees_a_learned_cost():
    (fragment,) = fragments(1)
    true_costs = [info["cost"] for info in fragment.infos]
    infos = [{"cost": -1.0, "true_cost": cost} for cost in true_costs]
    found = trajectory_of(replace(fragment, infos=np.array(infos)), **SPACES)
    np.testing.assert_array_equal(found.costs, true_costs)
    costless = [{"cost": -1.0}] * 99 + [{"cost": -1.0, "trajectory": found}]
    found = trajectory_of(replace(fragment, infos=np.array(costless)), **SPACES)
    assert found.costs is None


def test_an_oracle_without_an_answer_is_refused(tmp_path):
    def silent(query):  # noqa: ARG001
        return Label(float("nan"), 1.0, 1.0)

    gatherer = OracleGatherer(FunctionOracle(silent, tmp_path / "log.jsonl"), **SPACES)
    with pytest.raises(LabelError, match=r"but the oracle has none about 1 of 1; pass one that"):
        gatherer([tuple(fragments(2))])


def test_fragments_of_another_env_are_refused():
    gatherer = OracleGatherer(
        SyntheticOracle(5.0),
        observation_space=gym.spaces.Box(-1, 1, (3,)),
        action_space=ENV.action_space,
    )
    with pytest.raises(ValueError, match=r"obs must have the shape \(100, 3\) of its space"):
        gatherer([tuple(fragments(2))])
