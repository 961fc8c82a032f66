"""A program for Safety-Gymnasium runs with one import changed."""

import gymnasium as gym
import numpy as np
import pytest

from pbcrl_envs import safety_gymnasium

PROGRAM = """
import safety_gymnasium

env = safety_gymnasium.make("SafetyPointGoal1-v0", max_episode_steps=100)
obs, info = env.reset(seed=0)
env.action_space.seed(0)
terminated, truncated = False, False
ep_ret, ep_cost, steps = 0.0, 0.0, 0
while not (terminated or truncated):
    assert env.observation_space.contains(obs)
    action = env.action_space.sample()
    obs, reward, cost, terminated, truncated, info = env.step(action)
    ep_ret += reward
    ep_cost += cost
    steps += 1
env.close()
"""


def test_a_program_for_safety_gymnasium_sums_the_same_costs_after_one_changed_import():
    ours = PROGRAM.replace("import safety_gymnasium", "from pbcrl_envs import safety_gymnasium", 1)
    found = {}
    exec(ours, found)
    env = gym.make("SafetyPointGoal1-v0", max_episode_steps=100)
    env.reset(seed=0)
    env.action_space.seed(0)
    steps = [env.step(env.action_space.sample()) for _ in range(100)]
    assert found["steps"] == len(steps) == 100
    assert found["ep_ret"] == sum(step[1] for step in steps)
    assert found["ep_cost"] == sum(step[-1]["cost"] for step in steps)
    assert np.array_equal(found["obs"], steps[-1][0])


def test_an_unknown_task_is_named():
    with pytest.raises(gym.error.NameNotFound, match="SafetyPointGaol1"):
        safety_gymnasium.make("SafetyPointGaol1-v0")


def test_an_env_without_a_cost_is_named():
    env = safety_gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    with pytest.raises(KeyError, match=r"a step has a cost, but .*CartPole-v1.* has the keys \[\]"):
        env.step(0)
