"""TorchRL under a learned cost, against the library itself."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from pbcrl import CostModel, TreeCost
from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl.trees import Trees

pytest.importorskip("torchrl", reason="needs the extra `torchrl`")
pytestmark = pytest.mark.filterwarnings("default")

from tensordict import TensorDict  # noqa: E402
from torchrl.data import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import (  # noqa: E402
    GymEnv,
    GymWrapper,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    default_info_dict_reader,
)

import pbcrl_envs  # noqa: E402, F401
from pbcrl.adapters.torchrl import PreferenceCost, TrueCost  # noqa: E402

TOY = "PointHazards-v0"


def random_model(env_id):
    torch.manual_seed(0)
    model = CostModel.for_env(gym.make(env_id))
    torch.nn.init.normal_(model.net[-1].weight)
    return model


@pytest.mark.parametrize("env_id", [TOY, "CartPole-v1", "Pendulum-v1"])
def test_the_specs_of_an_env_with_the_transform_hold(env_id):
    check_env_specs(TransformedEnv(GymEnv(env_id), PreferenceCost(random_model(env_id))))


def test_the_specs_of_a_batch_of_envs_with_other_transforms_hold():
    env = TransformedEnv(SerialEnv(3, lambda: GymEnv(TOY)), PreferenceCost(random_model(TOY)))
    env.append_transform(StepCounter(50))
    check_env_specs(env)
    assert env.rollout(60, break_when_any_done=False)["next", "cost"].shape == (3, 60, 1)


def test_every_step_is_priced_by_the_observation_before_it_across_resets():
    model = random_model(TOY)
    env = TransformedEnv(GymEnv(TOY), PreferenceCost(model))
    env.set_seed(0)
    rollout = env.rollout(250, break_when_any_done=False)  # across two resets
    expected = model.step_cost(rollout["observation"].numpy(), rollout["action"].numpy())
    torch.testing.assert_close(rollout["next", "cost"].squeeze(-1), torch.from_numpy(expected))
    assert rollout["next", "cost"].std() > 0
    resets = rollout["next", "done"].squeeze(-1).nonzero().squeeze(-1)
    assert resets.tolist() == [99, 199]


def test_a_sampled_batch_is_scored_by_the_present_weights():
    model = random_model(TOY)
    transform = PreferenceCost(model)
    rollout = TransformedEnv(GymEnv(TOY), transform).rollout(100)
    replay = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=32)
    replay.append_transform(PreferenceCost(model))
    replay.extend(rollout)
    torch.nn.init.zeros_(model.net[-1].weight)
    batch = replay.sample()
    assert batch["next", "cost"].shape == (32, 1)
    assert (batch["next", "cost"] == 0).all()
    assert (rollout["next", "cost"] != 0).any()
    assert (transform(rollout)["next", "cost"] == 0).all()


def test_trees_are_scored_as_they_are_now():
    """A step that moves to the right costs 1; a retrained tree, with 2 there, counts at once."""
    model = TreeCost.for_env(gym.make(TOY), output_scale=1.0)
    env = TransformedEnv(GymEnv(TOY), PreferenceCost(model))
    check_env_specs(env)
    feature = torch.full((1, 1, 7), 4, dtype=torch.int32)  # the action's first number
    left, right = (torch.full((1, 1, 7), -128, dtype=torch.int8) for _ in range(2))
    left[..., 0], right[..., 0] = -1, -2
    for cost in (1.0, 2.0):
        values = torch.tensor([[[0, cost, 0, 0, 0, 0, 0, 0]]])
        model.set_trees(Trees(feature, torch.zeros(1, 1, 7), left, right, values))
        rollout = env.rollout(60)
        expected = cost * (rollout["action"][:, :1] > 0)
        assert 0 < expected.sum() < 60 * cost
        torch.testing.assert_close(rollout["next", "cost"], expected)
        torch.testing.assert_close(PreferenceCost(model)(rollout)["next", "cost"], expected)


def test_the_specs_hold_whatever_the_default_precision():
    torch.set_default_dtype(torch.float64)
    try:
        check_env_specs(TransformedEnv(GymEnv(TOY), PreferenceCost(random_model(TOY))))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_cost_of_the_env_is_read_under_another_name():
    class Noted(gym.Wrapper):
        def step(self, action):
            *step, info = self.env.step(action)
            noted.append(info["cost"])
            return *step, info

    noted = []
    inner = GymWrapper(Noted(gym.make(TOY)))
    inner.set_info_dict_reader(TrueCost())
    env = TransformedEnv(inner, PreferenceCost(random_model(TOY)))
    check_env_specs(env)
    noted.clear()
    env.set_seed(0)
    rollout = env.rollout(250, break_when_any_done=False)  # across two resets
    assert rollout["next", "true_cost"].squeeze(-1).tolist() == noted
    assert 0 < sum(noted) < 250
    assert len(rollout["next", "cost"].unique()) > 2


def test_a_step_without_a_cost_is_refused_by_the_reader():
    env = GymEnv("Pendulum-v1")
    env.set_info_dict_reader(TrueCost())
    assert env.reset()["true_cost"].tolist() == [0]
    with pytest.raises(
        MissingCostError, match=r"in info\['cost'\], but the env reported only \[\]"
    ):
        env.rand_step()


def test_a_cost_of_the_env_under_the_name_of_the_learned_one_is_refused():
    class ArrayCost(gym.Wrapper):
        """TorchRL's own reader of infos takes arrays only."""

        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            return obs, {"cost": np.float32(info["cost"])}

        def step(self, action):
            *step, info = self.env.step(action)
            return *step, {"cost": np.float32(info["cost"])}

    env = GymWrapper(ArrayCost(gym.make(TOY)))
    env.set_info_dict_reader(default_info_dict_reader(["cost"]))
    with pytest.raises(ValueError, match=r"must not report 'cost', .*rename the env's cost"):
        TransformedEnv(env, PreferenceCost(random_model(TOY))).observation_spec  # noqa: B018
    env = TransformedEnv(env, RenameTransform(["cost"], ["true_cost"]))
    env.append_transform(PreferenceCost(random_model(TOY)))
    rollout = env.rollout(100)
    assert set(np.unique(rollout["next", "true_cost"].numpy())) <= {0.0, 1.0}
    assert len(rollout["next", "cost"].unique()) > 2


def test_a_model_of_another_env_is_refused():
    env = TransformedEnv(GymEnv("Pendulum-v1"), PreferenceCost(random_model(TOY)))
    with pytest.raises(ValueError, match=r"\(obs_dim, act_dim\) = \(4, 2\), got \(3, 1\)"):
        env.rollout(2)


def test_an_observation_of_another_name_is_asked_for():
    env = TransformedEnv(GymEnv(TOY), RenameTransform(["observation"], ["state"]))
    env.append_transform(PreferenceCost(random_model(TOY)))
    with pytest.raises(ValueError, match=r"reads, 'observation', .*'?state'?.*pass observation="):
        env.observation_spec  # noqa: B018
    env = TransformedEnv(GymEnv(TOY), RenameTransform(["observation"], ["state"]))
    check_env_specs(env.append_transform(PreferenceCost(random_model(TOY), observation="state")))


def test_what_is_no_cost_model_is_refused():
    with pytest.raises(TypeError, match="a cost model must be a CostModel or another LearnedCost"):
        PreferenceCost(torch.nn.Linear(4, 1))


def test_costs_of_images_are_those_of_the_model():
    space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    model = CostModel(space, gym.spaces.Box(-1, 1, (2,)))
    torch.nn.init.normal_(model.net.mlp[-1].weight)
    images = torch.randint(256, (2, 5, 16, 16, 3), dtype=torch.uint8)
    batch = TensorDict({"pixels": images, "action": torch.rand(2, 5, 2)}, batch_size=(2, 5))
    cost = PreferenceCost(model, observation="pixels")(batch)["next", "cost"]
    expected = model(images, batch["action"]).detach()
    torch.testing.assert_close(cost.squeeze(-1), expected)


@pytest.mark.parametrize("key", ["observation", "action"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_refused_by_its_key(key, number):
    batch = TensorDict(
        {"observation": torch.zeros(5, 4), "action": torch.zeros(5, 2)}, batch_size=5
    )
    batch[key][3, 1] = number
    message = f"must be finite, got 1 NaN or infinite entries of .* under '{key}'; find the step"
    with pytest.raises(NonFiniteError, match=message):
        PreferenceCost(random_model(TOY))(batch)


def test_an_env_that_returns_nan_is_refused_at_the_next_step():
    class Breaks(gym.ObservationWrapper):
        def observation(self, obs):
            self.calls = getattr(self, "calls", 0) + 1
            return obs * np.float32(np.nan) if self.calls == 5 else obs

    env = TransformedEnv(GymWrapper(Breaks(gym.make(TOY))), PreferenceCost(random_model(TOY)))
    with pytest.raises(NonFiniteError, match=r"got 4 NaN .* of 4 under 'observation'"):
        env.rollout(100)
