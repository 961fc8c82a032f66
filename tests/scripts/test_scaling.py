"""Learning does not depend on the units of reward, cost and action."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from pbcrl_envs.toy import PointHazardsEnv
from pbcrl_script_utils.policies import policy_of

from .runs import metrics, rows, small_pbcrl, small_ppo_lag, weights


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

    def run(name, *, limit=1.0, labels=False, **units):
        env_id = f"{name}-v0"
        gym.register(
            env_id,
            entry_point=lambda **kw: InUnits(PointHazardsEnv(**kw), **units),
            max_episode_steps=100,
        )
        options = {"env_id": env_id, "cost_limit": limit, "run_name": name}
        try:
            if labels:
                budget = {"offline_queries": 0, "online_queries": 60, "finetune_interval": 1}
                args = small_pbcrl(scripts, tmp_path, None, **options, **budget)
                return scripts.ppo_lag_pbcrl.train(args)
            args = small_ppo_lag(scripts, tmp_path, multiplier_cap=9.0, **options)
            return scripts.ppo_lag.train(args)
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


def test_the_units_change_nothing_under_a_learned_cost(learned):
    """Labels have none; rewards are 1,024 times as large, to the last bit."""
    plain = learned("Plain", labels=True)
    assert len({row["learned_limit"] for row in rows(plain)}) > 2  # it learns
    for name in ("reward", "cost"):
        limit = 1024.0 if name == "cost" else 1.0
        other = learned(name, limit=limit, labels=True, **{name: 1024.0})
        for part in ("agent", "cost_model"):
            for key, tensor in weights(plain, part).items():
                torch.testing.assert_close(weights(other, part)[key], tensor, rtol=0, atol=0)


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
