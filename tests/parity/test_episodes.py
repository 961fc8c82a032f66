"""Rung (e): whole episodes of a fixed policy, each seed played natively and in the real package.

Both begin alike and stay alike until a contact amplifies the engines' rounding, so the difference
is taken seed by seed: that is an interval of the same mean, and a tighter one.
"""

import numpy as np
import pytest

from tests.parity import native, plan, policies

BLOCK = 100


def native_episodes(task, *, num_episodes, horizon):
    """Return, cost and length of the first episode of each seed."""
    policy = policies.POLICIES[plan.policy_of(task)]
    totals = np.zeros((3, num_episodes))
    for start in range(0, num_episodes, BLOCK):
        count = min(BLOCK, num_episodes - start)
        envs = native.make(task, count, max_episode_steps=horizon)
        obs, _ = envs.reset(seed=start)
        running, step = np.ones(count, dtype=bool), 0
        while running.any():
            obs, rewards, terminated, truncated, infos = envs.step(policy(obs, step))
            totals[:, start : start + count] += running * [rewards, infos["cost"], np.ones(count)]
            running &= ~(terminated | truncated)
            step += 1
        envs.close()
    return totals


def interval(values):
    """Mean, and half-width of its normal 95 % interval."""
    return values.mean(), 1.96 * values.std(ddof=1) / np.sqrt(len(values))


TASKS = {**plan.chosen(plan.NAVIGATION), **plan.chosen(plan.VELOCITY)}


@pytest.mark.nightly
@pytest.mark.parametrize(("task", "row"), [pair for pair in TASKS.items() if pair[1].episodes])
def test_episodes_bring_the_return_and_the_cost_of_the_real_package(task, row, real, report):
    jobs = [real(**job) for job in plan.episode_jobs(task, row)]
    theirs = {key: np.concatenate([job[key] for job in jobs]) for key in jobs[0]}
    returns, costs, lengths = native_episodes(task, num_episodes=row.episodes, horizon=row.horizon)
    by_return, return_width = interval(returns - theirs["returns"])
    by_cost, cost_width = interval(costs - theirs["costs"])
    scale = abs(theirs["returns"].mean())
    report(
        "e",
        task=task,
        episodes=len(returns),
        **{
            "real return": f"{theirs['returns'].mean():.2f}",
            "native": f"{returns.mean():.2f}",
            "difference, %": f"{100 * by_return / scale:+.2f} ± {100 * return_width / scale:.2f}",
            "real cost": f"{theirs['costs'].mean():.2f}",
            "native ": f"{costs.mean():.2f}",
            "difference": f"{by_cost:+.2f} ± {cost_width:.2f}",
            "real length": f"{theirs['lengths'].mean():.0f}",
            "native  ": f"{lengths.mean():.0f}",
        },
    )
    assert abs(by_return) + return_width < 0.05 * scale
    assert abs(by_cost) + cost_width < 2
