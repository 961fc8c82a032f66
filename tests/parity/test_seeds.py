"""Rung (a): a seed gives the real package's layouts, goals and first observations, bit by bit."""

import numpy as np
import pytest

from tests.parity import native, plan


@pytest.mark.parametrize(("task", "row"), plan.sizes(plan.NAVIGATION))
def test_a_seed_draws_the_layouts_and_goals_of_the_real_package(task, row, real, report):
    expected = real(**plan.layout_job(task, row))
    envs = native.make(task, 1)
    for i in range(2 * row.layouts):
        envs.reset(seed=None if i % 2 else i // 2)
        state = envs.state_dict()
        np.testing.assert_array_equal(state["positions"][0], expected["positions"][i])
        assert state["qpos"][0, 2] == expected["headings"][i, 0]
        if "goal_button" in expected:
            assert state["goal_button"][0] == expected["goal_button"][i]
        for _ in range(7):
            envs.step(np.zeros((1, 2)))
    report("a", task=task, seeds=row.layouts, resets=2 * row.layouts, different=0)


@pytest.mark.parametrize(("task", "row"), plan.sizes(plan.VELOCITY))
def test_a_seed_starts_a_robot_as_in_the_real_package(task, row, real, report):
    expected = real(**plan.layout_job(task, row))["obs"]
    envs = native.make(task, 1)
    shown = []
    for i in range(2 * row.layouts):
        shown.append(envs.reset(seed=None if i % 2 else i // 2)[0][0])
        envs.step(np.zeros(envs.action_space.shape))
    np.testing.assert_allclose(np.array(shown), expected, rtol=0, atol=1e-9)
    report("a", task=task, seeds=row.layouts, resets=2 * row.layouts, different=0)
