"""Learning does not depend on the units of reward, cost and action."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from pbcrl.errors import NonFiniteError
from pbcrl_envs.toy import PointHazardsEnv
from pbcrl_script_utils.policies import policy_of
from pbcrl_script_utils.scaling import SignalScale

from .runs import metrics, rows, small_ppo_lag, weights


class InUnits(gym.Wrapper):
    """The toy with other units of reward, cost and action."""

    def __init__(self, env, *, reward=1.0, cost=1.0, action=1.0, middle=0.0):
        super().__init__(env)
        self.units, self.middle = (reward, cost, action), middle
        self.action_space = Box(np.float32(middle - action), np.float32(middle + action), (2,))

    def step(self, action):
        of_reward, of_cost, of_action = self.units
        inner = (np.asarray(action, np.float64) - self.middle) / of_action
        obs, reward, *ends, info = self.env.step(inner)
        return obs, of_reward * reward, *ends, {**info, "cost": of_cost * info["cost"]}


@pytest.fixture
def learned(scripts, tmp_path):
    """Train in such a toy, and return the run's folder."""

    def run(name, *, limit=1.0, **units):
        env_id = f"{name}-v0"
        gym.register(
            env_id,
            entry_point=lambda **kw: InUnits(PointHazardsEnv(**kw), **units),
            max_episode_steps=100,
        )
        options = {"env_id": env_id, "cost_limit": limit, "run_name": name}
        try:
            return scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, **options))
        finally:
            del gym.registry[env_id]

    return run


def test_the_units_of_reward_and_of_cost_change_nothing(learned):
    """1,024 times as large, to the last bit; 1,000 times, which rounds otherwise, nearly."""
    plain = learned("Plain")
    for factor, tolerance in ((1024.0, 0.0), (1000.0, 1e-3)):
        for name in ("reward", "cost"):
            limit = factor if name == "cost" else 1.0
            other = learned(f"{name}{factor:.0f}", limit=limit, **{name: factor})
            for key, tensor in weights(plain).items():
                torch.testing.assert_close(weights(other)[key], tensor, rtol=0, atol=tolerance)
            prices = [[row["multiplier"] for row in rows(folder)] for folder in (plain, other)]
            assert prices[0] == pytest.approx(prices[1], rel=1e-6 if tolerance else 0)
    assert len(set(prices[0])) == 3


def test_the_bounds_of_actions_change_nothing(learned):
    """Actions of 64 times the range about 32; float32 rounds their middle otherwise."""
    plain, other = learned("Unit"), learned("Odd", action=64.0, middle=32.0)
    for key, tensor in weights(plain).items():
        torch.testing.assert_close(weights(other)[key], tensor, rtol=0, atol=1e-3)
    assert metrics(plain)[0]["episodes"] == metrics(other)[0]["episodes"]


def test_a_policy_for_the_env_acts_in_the_units_of_the_action(scripts, learned):
    folder = learned("Far", action=8.0, middle=-20.0)
    envs = gym.vector.SyncVectorEnv([lambda: InUnits(PointHazardsEnv(), action=8.0, middle=-20.0)])
    args = scripts.ppo_lag.Args(env_id="Far-v0", hidden_sizes=(16,))
    agent = scripts.ppo_lag.Agent(envs, args)
    agent.load_state_dict(weights(folder), strict=False)
    policy = policy_of(agent, "Far-v0")
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    assert policy is not None
    np.testing.assert_allclose(policy(obs), agent.act(obs).clip(-28, -12), rtol=1e-5)
    noisy = policy(obs[:1].repeat(4000, 0), rng=np.random.default_rng(0))
    # Half of a Gaussian lies within 0.6745 of its deviations, clipped at the bounds or not.
    expected = 0.6745 * 8 * agent.log_std.exp().detach().numpy()
    found = np.median(np.abs(noisy - policy(obs[:1])), axis=0)
    np.testing.assert_allclose(found, expected, rtol=0.1)


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
