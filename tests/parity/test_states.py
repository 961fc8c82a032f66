"""Rungs (b) and (c): what is computed from a recorded state, and one step onwards from it."""

import numpy as np
import pytest
from scipy.stats import binom

from pbcrl_envs.robotics.tasks import TASKS, Kind
from tests.parity import native, plan
from tests.parity.real_side import CONTACTS

BLOCK = 100
NAVIGATION = pytest.mark.parametrize(("task", "row"), plan.sizes(plan.NAVIGATION))


@NAVIGATION
def test_lidar_reward_cost_and_goal_are_the_same_functions_of_a_state(task, row, real, report):
    rows = real(**plan.steps_job(task, row))
    envs = native.make(task, BLOCK)
    envs.reset(seed=0)
    simulation, everyone = envs.unwrapped._simulation, np.arange(BLOCK)
    errors = {"lidar": 0.0, "reward": 0.0}
    for chosen in native.blocks(len(rows["reward"]), BLOCK):
        before = native.recorded_state(envs, rows, "before_", chosen)
        after = native.recorded_state(envs, rows, "after_", chosen)
        # The world after the step, judged by the goal, the timer and the distances before it.
        envs.load_state_dict(before)
        distances = simulation._distances.copy()
        moved = {key: after[key] for key in ("time", "qpos", "qvel", "qacc_warmstart", "mocap_pos")}
        spent = {
            "stream_words": before["stream_words"],
            "stream_position": before["stream_position"],
        }
        envs.load_state_dict({**before, **moved, **spent})
        simulation._distances[:] = distances
        simulation._steps_to_skip += 1
        reward, cost, terminated = simulation._judge(everyone)
        judged = envs.state_dict()

        errors["reward"] = max(errors["reward"], np.abs(reward - rows["reward"][chosen]).max())
        np.testing.assert_array_equal(cost, rows["cost"][chosen])
        np.testing.assert_array_equal(reward > 0.9, rows["goal_met"][chosen])
        np.testing.assert_array_equal(terminated, rows["terminated"][chosen])
        goal = simulation._goal_row
        np.testing.assert_array_equal(judged["positions"][:, goal], after["positions"][:, goal])
        for key in ("goal_button", "stream_words", "stream_position"):
            np.testing.assert_array_equal(judged[key], after[key], err_msg=key)
        if task.startswith("Button"):
            np.testing.assert_array_equal(judged["button_timer"], after["button_timer"])

        envs.load_state_dict(after)
        lidar = simulation.observe(everyone)[:, 12:]
        errors["lidar"] = max(errors["lidar"], np.abs(lidar - rows["obs"][chosen, 12:]).max())
    report(
        "b",
        task=task,
        states=len(rows["reward"]),
        goals=int(rows["goal_met"].sum()),
        **{"unsafe steps": int(rows["cost"].sum())},
        lidar=f"{errors['lidar']:.0e}",
        reward=f"{errors['reward']:.0e}",
        **{"costs that differ": 0},
    )
    assert rows["goal_met"].any()
    assert max(errors.values()) < 1e-9


def one_step_errors(task, rows):
    """Largest error of each row one native step on, by what it is in, and the costs."""
    envs = native.make(task, BLOCK)
    envs.reset(seed=0)
    simulation = envs.unwrapped._simulation
    found = {key: np.zeros(len(rows["reward"])) for key in ("qvel", "obs", "reward")}
    cost = np.zeros(len(rows["reward"]))
    for chosen in native.blocks(len(cost), BLOCK):
        native.place(envs, rows, "before_", chosen)
        obs, reward, terminated, truncated, infos = envs.step(rows["action"][chosen])
        ended = terminated | truncated
        qvel = simulation._qvel if task in plan.NAVIGATION else simulation.physics.qvel
        error = np.abs(qvel - rows["after_qvel"][chosen]).max(axis=1)
        found["qvel"][chosen] = np.where(ended, 0, error)  # what ended is reset already
        shown = np.where(ended[:, None], infos.get("final_obs", obs), obs)
        found["obs"][chosen] = np.abs(shown - rows["obs"][chosen]).max(axis=1)
        found["reward"][chosen] = np.abs(reward - rows["reward"][chosen])
        cost[chosen] = infos["cost"]
        np.testing.assert_array_equal(terminated, rows["terminated"][chosen])
    return found, cost


def row_of_errors(task, contact, errors, different_costs):
    return {
        "task": task,
        "contact": contact,
        "steps": len(different_costs),
        **{
            f"{name}, {key}": f"{statistic(errors[key]):.0e}"
            for key in ("qvel", "obs")
            for name, statistic in (("median", np.median), ("max", np.max))
        },
        "costs that differ": int(different_costs.sum()),
    }


LIMITS = {
    "floor": (1e-9, 1e-3),
    "sphere": (1e-5, 1e-1),
    "cylinder": (1e-1, 1.0),
    "box": (1.0, 20.0),
}
"""Median and largest error in velocity that is allowed, by the worst contact of the step."""
DIFFERENT_COSTS = 0.01
"""Share of the contacts with a cylinder or a box whose cost may be another one."""
TOUCHED = {Kind.VASE: "box", Kind.BOX: "box", Kind.PILLAR: "cylinder", Kind.BUTTON: "sphere"}
"""The contact that must occur where there are things of a kind."""


def kinds(task):
    return {group.kind for group in TASKS[task].objects}


@NAVIGATION
def test_a_step_from_a_recorded_state_differs_only_as_contacts_between_boxes_do(
    task, row, real, report
):
    rows = real(**plan.steps_job(task, row))
    errors, cost = one_step_errors(task, rows)
    occurred = {CONTACTS[number] for number in rows["contact"]}
    assert occurred >= {"floor"} | {TOUCHED[kind] for kind in kinds(task) if kind in TOUCHED}
    for number, contact in enumerate(CONTACTS):
        if contact not in occurred:
            continue
        of_class = rows["contact"] == number
        errors_of_class = {key: values[of_class] for key, values in errors.items()}
        different = (cost != rows["cost"])[of_class]
        report("c", **row_of_errors(task, contact, errors_of_class, different))
        median, largest = LIMITS[contact]
        assert np.median(errors["qvel"][of_class]) < median
        assert errors["qvel"][of_class].max() < largest
        share = DIFFERENT_COSTS if contact in ("cylinder", "box") else 0.0
        # As far as so many contacts tell: a lower share exceeds this once in a thousand tests.
        assert different.sum() <= binom.ppf(0.999, len(different), share)


ROBOT_LIMITS = {
    "HalfCheetahVelocity": (1e-12, 1e-6, 1e-7),
    "Walker2dVelocity": (1e-12, 1e-6, 1e-7),
    "HumanoidVelocity": (1e-4, 1e-2, 1e-4),
}
"""Median and largest error in velocity, and largest in reward, that are allowed."""


@pytest.mark.parametrize(("task", "row"), plan.sizes(plan.VELOCITY))
def test_a_step_of_a_robot_is_that_of_the_real_package(task, row, real, report):
    rows = real(**plan.steps_job(task, row))
    errors, cost = one_step_errors(task, rows)
    report("c", **row_of_errors(task, "floor", errors, cost != rows["cost"]))
    np.testing.assert_array_equal(cost, rows["cost"])
    median, largest, reward = ROBOT_LIMITS[task]
    assert np.median(errors["qvel"]) < median
    assert errors["qvel"].max() < largest
    assert errors["reward"].max() < reward
