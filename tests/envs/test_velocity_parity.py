"""The velocity tasks against recordings of Safety-Gymnasium 1.0.0 on MuJoCo 2.3.3.

`recordings/record_velocity.py` made them: resets with and without a seed, and random actions after
a push forward. Every step is compared alone, from the recorded state before it (teacher forcing).
"""

from pathlib import Path

import mujoco
import numpy as np
import pytest

from pbcrl_envs.robotics import SafetyVelocityEnv, SafetyVelocityVectorEnv
from pbcrl_envs.robotics.velocity_physics import load_model
from pbcrl_envs.robotics.velocity_simulation import TASKS

RECORDINGS = Path(__file__).parent / "recordings"
each_task = pytest.mark.parametrize("task", TASKS)


def recording(task):
    with np.load(RECORDINGS / f"safety_gymnasium_1.0.0_{task}.npz", allow_pickle=False) as file:
        return dict(file)


def teacher_forced(task):
    """One step from every recorded state, each in a separate copy."""
    recorded = recording(task)
    count = len(recorded["action"])
    envs = SafetyVelocityVectorEnv(count, task=task, num_threads=1)
    envs.reset(seed=0)
    state, model = envs.state_dict(), load_model(TASKS[task].model_file)
    data, spec = mujoco.MjData(model), mujoco.mjtState.mjSTATE_INTEGRATION.value
    for i in range(count):
        data.qpos[:], data.qvel[:] = recorded["qpos"][i], recorded["qvel"][i]
        data.qacc_warmstart[:] = recorded["warmstart"][i]
        mujoco.mj_getState(model, data, state["physics"][i], spec)
    planar = recorded["qpos"][:, :1]
    state["location"] = recorded["centre"] if task == "Humanoid" else planar
    envs.load_state_dict(state)
    obs, rewards, terminated, truncated, infos = envs.step(recorded["action"])
    assert not truncated.any()
    return recorded, obs, rewards, terminated, infos["cost"]


@each_task
def test_resets_start_where_upstream_starts_to_the_last_bit(task):
    """Also those without a seed, which go on with the random stream."""
    recorded = recording(task)
    env = SafetyVelocityEnv(task=task)
    for i in range(len(recorded["reset_qpos"])):
        obs, _ = env.reset(seed=100 + i if i % 2 == 0 else None)
        state, expected = env.state_dict(), [recorded["reset_qpos"][i], recorded["reset_qvel"][i]]
        bodies = state["physics"][1 : 1 + sum(map(len, expected))]  # after MuJoCo's time
        np.testing.assert_array_equal(bodies, np.concatenate(expected))
        np.testing.assert_allclose(obs, recorded["reset_obs"][i], rtol=0, atol=1e-13)
        centre = recorded["reset_centre"][i]
        if task == "Humanoid":
            np.testing.assert_allclose(state["location"], centre, rtol=0, atol=1e-15)


@each_task
def test_every_step_costs_and_ends_what_it_costs_and_ends_upstream(task):
    recorded, _, _, terminated, costs = teacher_forced(task)
    np.testing.assert_array_equal(costs, recorded["cost"])
    np.testing.assert_array_equal(terminated, recorded["terminated"])
    assert 0 < costs.sum() < len(costs)
    assert terminated.sum() == {"HalfCheetah": 0, "Walker2d": 8, "Humanoid": 4}[task]


@each_task
def test_every_step_is_rewarded_as_upstream(task):
    recorded, _, rewards, _, _ = teacher_forced(task)
    tolerance = {"HalfCheetah": 1e-12, "Walker2d": 1e-12, "Humanoid": 1e-5}[task]
    np.testing.assert_allclose(rewards, recorded["reward"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("task", ["HalfCheetah", "Walker2d"])
def test_planar_robots_move_as_upstream_contacts_included(task):
    recorded, obs, _, _, _ = teacher_forced(task)
    np.testing.assert_allclose(obs, recorded["obs"], rtol=0, atol=1e-11)


def test_the_humanoid_moves_as_upstream_in_the_air_and_nearly_so_on_the_ground():
    """On the ground two solvers stop at the same tolerance, but not at the same number."""
    recorded, obs, rewards, _, _ = teacher_forced("Humanoid")
    error = np.abs(obs - recorded["obs"])
    grounded = recorded["obs"][:, -84:].any(axis=1)
    assert 10 < grounded.sum() < len(grounded) - 50
    quiet = error[~grounded].max(axis=1)
    assert np.median(quiet) < 1e-13
    assert (quiet < 1e-9).mean() > 0.9  # the rest touched the ground within the step, or a limit
    assert quiet.max() < 1e-4
    reward_error = np.abs(rewards - recorded["reward"])
    assert np.quantile(reward_error[~grounded], 0.9) < 1e-10
    positions, velocities, forces = error[grounded, :22], error[grounded, 22:45], error[:, -84:]
    assert positions.max() < 1e-5
    assert velocities.max() < 1e-3
    largest = np.abs(recorded["obs"][:, -84:]).max()
    assert largest > 1000  # newtons
    assert forces.max() < 1e-4 * largest
