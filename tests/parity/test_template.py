"""Rung (d): the native model, whose layouts are state, against a model compiled for one layout.

Both run on the engine of the native tasks, so that what differs is the model alone.
"""

import mujoco
import numpy as np
import pytest

from pbcrl_envs.robotics.velocity_physics import Physics, load_model
from pbcrl_envs.robotics.velocity_simulation import TASKS
from tests.parity import native, plan, policies, real_side

STEPS = 300


class Original:
    """A model of the package on the current engine, moved as the package moves it."""

    def __init__(self, xml, names, positions, headings):
        self.names = list(names)
        self.model = mujoco.MjModel.from_xml_string(str(xml))
        self.data = mujoco.MjData(self.model)
        self.initial = positions[0], headings[0]
        self.spawn = {
            name: (positions[i], headings[i])
            for i, name in enumerate(self.names)
            if name.startswith("gremlin")
        }
        for name in self.spawn:
            # MuJoCo 2.3.3 scaled all rows of a weld by this one; see physics.py.
            body = self.model.body(name + "obj").id
            self.model.body_invweight0[body, 1] = self.model.body_invweight0[body, 0]
        mujoco.mj_forward(self.model, self.data)

    def state(self):
        return real_side.physics(self.model, self.data, self.names, self.initial, self.spawn)

    def step(self, action):
        """Advance by one step of the env; return the worst contact on the way."""
        self.data.ctrl[:] = np.clip(action, -1, 1)
        worst = 0
        for _ in range(10):
            phase = self.data.time
            for name in self.spawn:
                mocap = self.model.body(name + "mocap").mocapid[0]
                self.data.mocap_pos[mocap] = 0.35 * np.sin(phase), 0.35 * np.cos(phase), 0.1
            mujoco.mj_step(self.model, self.data)
            worst = max(worst, real_side.worst_contact(self.model, self.data))
        mujoco.mj_forward(self.model, self.data)
        return worst


def row_of_errors(task, contact, errors):
    return {
        "task": task,
        "contact": contact,
        "steps": len(errors),
        "median, qvel": f"{np.median(errors):.0e}",
        "max, qvel": f"{errors.max():.0e}",
        "above 1e-6": f"{100 * (errors > 1e-6).mean():.1f} %",
    }


@pytest.mark.parametrize("task", plan.chosen(plan.NAVIGATION))
def test_the_native_model_moves_as_the_packages_own_does(task, real, report):
    made = real(**plan.models_job(task))
    columns = (made[key] for key in ("xml", "names", "positions", "headings"))
    originals = [Original(*row) for row in zip(*columns, strict=True)]
    envs = native.make(task, len(originals))
    envs.reset(seed=0)
    simulation = envs.unwrapped._simulation
    errors, contacts = [], []
    for step in range(STEPS):
        rows = real_side.stacked([original.state() for original in originals])
        envs.load_state_dict({**envs.state_dict(), **rows})
        obs = simulation.observe(np.arange(len(originals)))
        actions = policies.bump(obs, step)
        contacts += [o.step(action) for o, action in zip(originals, actions, strict=True)]
        envs.step(actions)
        reached = envs.state_dict()
        expected = real_side.stacked([original.state() for original in originals])
        errors += list(np.abs(reached["qvel"] - expected["qvel"]).max(axis=1))
    errors, contacts = np.array(errors), np.array(contacts)
    for number, contact in enumerate(real_side.CONTACTS):
        if (contacts == number).any():
            report("d", **row_of_errors(task, contact, errors[contacts == number]))
    assert np.median(errors) < 1e-10
    assert (errors > 1e-6).mean() < 0.01


def with_numbers_of_the_package(model, numbers):
    """A robot's model with what the package compiles in place of the native numbers."""
    for name, values in numbers.items():
        if name.startswith("opt."):
            setattr(model.opt, name.removeprefix("opt."), values)
        else:
            getattr(model, name)[:] = values
    # MuJoCo 2.3.3 took the larger margin of two geoms, its successors add them.
    model.geom_margin[:] /= 2
    return model


@pytest.mark.parametrize("task", plan.chosen(plan.VELOCITY))
def test_a_robot_moves_as_with_the_numbers_that_the_package_compiles(task, real, report):
    rows = real(**plan.steps_job(task, plan.VELOCITY[task]))
    robot = TASKS[task.removesuffix("Velocity")]
    own, theirs = load_model(robot.model_file), load_model(robot.model_file)
    with_numbers_of_the_package(theirs, real(**plan.models_job(task)))
    reached, everyone = [], np.arange(len(rows["reward"]))
    for model in (own, theirs):
        physics = Physics(model, num_envs=len(everyone), num_threads=0)
        physics.reset(everyone, rows["before_qpos"], rows["before_qvel"])
        physics.step(everyone, rows["action"], substeps=robot.substeps)
        reached.append(physics.qvel.copy())
    errors = np.abs(reached[0] - reached[1]).max(axis=1)
    report("d", **row_of_errors(task, "floor", errors))
    assert np.median(errors) < 1e-10
    assert (errors > 1e-6).mean() < 0.01
