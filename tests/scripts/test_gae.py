import numpy as np
import torch

from .runs import small_pbcrl


def test_exact_values_have_zero_advantage_across_a_time_limit(scripts):
    """A truncated episode bootstraps V(s'); only termination ends the sum."""
    gamma, shape = 0.99, (6, 1)
    value = torch.full(shape, 1 / (1 - gamma))  # reward 1 for ever
    never = torch.zeros(shape, dtype=torch.bool)
    done = torch.tensor([[0], [0], [1], [0], [0], [1]], dtype=torch.bool)
    advantage = scripts.ppo_lag.gae(
        torch.ones(shape), value, value, never, done, gamma=gamma, lam=0.95
    )
    torch.testing.assert_close(advantage, torch.zeros(shape), atol=1e-4, rtol=0)


def test_a_terminated_episode_is_worth_nothing_afterwards(scripts):
    """r = 1, V = V' = 10, γ = 0.5: going on is worth 1 + 5 - 10 = -4, dying 1 - 10 = -9."""
    ones = torch.ones(1, 1)
    going_on, dying = (
        scripts.ppo_lag.gae(
            ones, 10 * ones, 10 * ones, terminated, torch.ones(1, 1) > 0, gamma=0.5, lam=0.9
        )
        for terminated in (ones < 0, ones > 0)
    )
    assert going_on.item() == -4
    assert dying.item() == -9


def test_what_ends_reward_may_go_on_costing(scripts):
    """The same numbers as reward, which ends, and as cost, which does not."""
    ones, ended = torch.ones(2, 1, 1), torch.tensor([True, False])[:, None, None]
    reward, cost = scripts.ppo_lag_pbcrl.gae(
        ones, 10 * ones, 10 * ones, ended, torch.ones(1, 1) > 0, gamma=0.5, lam=0.9
    )
    assert (reward.item(), cost.item()) == (-9, -4)


def test_a_crash_ends_the_reward_and_saves_no_learned_cost(scripts, tmp_path, monkeypatch):
    seen, real = [], scripts.ppo_lag_pbcrl.gae

    def gae(signals, values, next_values, terminated, done, **options):
        seen.append((terminated.clone(), done))
        return real(signals, values, next_values, terminated, done, **options)

    monkeypatch.setattr(scripts.ppo_lag_pbcrl, "gae", gae)
    crash = {"env_id": "ProvingCrash-v0", "online_queries": 4, "offline_queries": 0}
    scripts.ppo_lag_pbcrl.train(small_pbcrl(scripts, tmp_path, None, **crash))
    (reward_ends, cost_ends), done = seen[0][0], seen[0][1]
    assert reward_ends.any()
    assert not cost_ends.any()
    assert done[reward_ends].all()


def test_with_lambda_one_an_advantage_is_the_discounted_return_minus_the_value(scripts):
    rng = np.random.default_rng(0)
    rewards, values = (torch.from_numpy(rng.normal(size=(5, 3))) for _ in range(2))
    last = torch.from_numpy(rng.normal(size=(1, 3)))
    never = torch.zeros(5, 3, dtype=torch.bool)
    advantage = scripts.ppo_lag.gae(
        rewards, values, torch.cat([values[1:], last]), never, never, gamma=0.9, lam=1.0
    )
    expected = last[0]
    for t in reversed(range(5)):
        expected = rewards[t] + 0.9 * expected
        torch.testing.assert_close(advantage[t], expected - values[t])


def test_an_advantage_does_not_leak_over_the_end_of_an_episode(scripts):
    rewards = torch.tensor([[1.0], [100.0]])
    zeros, done = torch.zeros(2, 1), torch.tensor([[True], [False]])
    advantage = scripts.ppo_lag.gae(rewards, zeros, zeros, zeros > 0, done, gamma=0.9, lam=0.9)
    assert advantage.flatten().tolist() == [1.0, 100.0]
