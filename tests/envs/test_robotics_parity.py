"""The robotics tasks against recordings of Safety-Gymnasium 1.0.0 on MuJoCo 2.3.3.

`recordings/record_safety_gymnasium.py` made them: per task a few seeds, two resets each, 40 steps
after each reset. Actions were recorded, so both sides run open loop. Stick and slip of the agent on
the floor and bumps between boxes amplify rounding, the accelerometer most of all; hence the two
tolerances.
"""

from pathlib import Path

import numpy as np
import pytest

from pbcrl_envs.robotics import SafetyPointEnv
from pbcrl_envs.robotics.layout import LayoutStream
from pbcrl_envs.robotics.tasks import TASKS

RECORDINGS = Path(__file__).parent / "recordings"
QUIET = {("Goal1", 51, 0), ("Goal1", 113, 0), ("Button1", 10, 1), ("Button1", 50, 1)}
"""Episodes (task, seed, reset) in which rounding is not amplified."""


def recording(task):
    with np.load(RECORDINGS / f"safety_gymnasium_1.0.0_{task}.npz", allow_pickle=False) as file:
        return dict(file)


def replay(task):
    """Each recorded episode with what ours does: (key, recorded, obs, rewards, costs)."""
    recorded = recording(task)
    env = SafetyPointEnv(task=task)
    for i, seed in enumerate(recorded["seeds"].tolist()):
        for reset in range(2):
            episode = {k: a[i, reset] for k, a in recorded.items() if k != "seeds"}
            obs, rewards, costs = [env.reset(seed=seed if reset == 0 else None)[0]], [], []
            for action in episode["actions"]:
                step_obs, reward, terminated, truncated, info = env.step(action)
                assert not terminated
                assert not truncated
                obs.append(step_obs)
                rewards.append(reward)
                costs.append(info["cost"])
            yield (task, seed, reset), episode, np.array(obs), np.array(rewards), np.array(costs)


@pytest.fixture(scope="module", params=sorted(TASKS))
def episodes(request):
    return list(replay(request.param))


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_draws_upstreams_layout_to_the_last_bit(task):
    recorded = recording(task)
    for i, seed in enumerate(recorded["seeds"].tolist()):
        stream = LayoutStream(TASKS[task], seed)
        positions, headings = stream.draw_layout()
        if task == "Goal1":  # a reset replaces the layout's own goal
            positions[1] = stream.draw_goal(positions)
        np.testing.assert_array_equal(positions, recorded["positions"][i, 0])
        np.testing.assert_array_equal(headings, recorded["headings"][i, 0])


def test_resets_show_upstreams_observation_also_after_steps_and_new_goals(episodes):
    for _, recorded, obs, _, _ in episodes:
        np.testing.assert_allclose(obs[0], recorded["obs"][0], rtol=0, atol=1e-6)  # float32


def test_every_step_costs_what_it_costs_upstream(episodes):
    for _, recorded, _, _, costs in episodes:
        np.testing.assert_array_equal(costs, recorded["costs"])
    assert sum(costs.sum() for *_, costs in episodes) > 0


def test_every_step_is_rewarded_as_upstream_goals_included(episodes):
    for _, recorded, _, rewards, _ in episodes:
        np.testing.assert_allclose(rewards, recorded["rewards"], rtol=0, atol=1e-3)
    assert max(rewards.max() for _, _, _, rewards, _ in episodes) > 1


def test_lidars_and_compass_follow_upstreams_through_all_bumps(episodes):
    for _, recorded, obs, _, _ in episodes:
        np.testing.assert_allclose(obs[:, 9:], recorded["obs"][:, 9:], rtol=0, atol=0.03)


def test_undisturbed_episodes_agree_in_all_they_report(episodes):
    quiet = [episode for episode in episodes if episode[0] in QUIET]
    assert len(quiet) == 2
    for _, recorded, obs, rewards, _ in quiet:
        np.testing.assert_allclose(obs, recorded["obs"], rtol=0, atol=2e-6)  # float32
        np.testing.assert_allclose(rewards, recorded["rewards"], rtol=0, atol=1e-11)


def test_the_recorded_steps_contain_goals_and_costs_to_compare():
    goal, button = recording("Goal1"), recording("Button1")
    assert (goal["rewards"] > 0.9).sum() == 2
    assert (button["rewards"] > 0.9).sum() == 1
    assert goal["costs"].sum() == 3
    assert button["costs"].sum() == 5
