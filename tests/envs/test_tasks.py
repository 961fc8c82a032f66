"""The task table against the paper, and the registry against the table."""

import importlib
import subprocess
import sys
import warnings

import gymnasium
import pytest

import pbcrl_envs
from pbcrl_envs import TASKS, cost_limit


@pytest.mark.parametrize(
    ("env_id", "limit", "horizon"),
    [
        ("SafetyPointGoal1-v0", 20, 1000),
        ("SafetyPointPush1-v0", 35, 1000),
        ("SafetyPointButton1-v0", 40, 1000),
        ("SafetyHalfCheetahVelocity-v1", 5, 1000),
        ("SafetyWalker2dVelocity-v1", 5, 1000),
        ("SafetyHumanoidVelocity-v1", 5, 1000),
        ("PointHazards-v0", 5, 100),
        ("DrivingBlockedRoad-v0", 0.1, 100),
        ("DrivingLaneChange-v0", 0.1, 100),
    ],
)
def test_the_table_holds_the_limits_and_horizons_of_the_paper(env_id, limit, horizon):
    (task,) = (task for task in TASKS.values() if task.env_id == env_id)
    assert (task.threshold, task.horizon) == (limit, horizon)
    assert cost_limit(env_id) == cost_limit(f"pbcrl_envs:{env_id}") == limit


def test_an_env_outside_the_table_has_no_known_limit():
    assert cost_limit("CartPole-v1") is None


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_is_registered_alone_and_batched_with_its_horizon(task):
    spec = gymnasium.spec(task.env_id)
    assert spec.entry_point is not None
    assert spec.vector_entry_point is not None
    assert spec.max_episode_steps == task.horizon


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("goal", ["Goal", "Push", "Button"])
def test_all_levels_of_navigation_are_registered_and_only_level_1_has_a_limit(goal, level):
    env_id = f"SafetyPoint{goal}{level}-v0"
    spec = gymnasium.spec(env_id)
    assert spec.entry_point == "pbcrl_envs.robotics:SafetyPointEnv"
    assert spec.vector_entry_point == "pbcrl_envs.robotics:SafetyPointVectorEnv"
    assert (spec.kwargs, spec.max_episode_steps) == ({"task": f"{goal}{level}"}, 1000)
    assert (cost_limit(env_id) is not None) == (level == 1)


def test_registering_twice_neither_warns_nor_changes_the_registry():
    before = dict(gymnasium.registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(pbcrl_envs)
    assert dict(gymnasium.registry) == before


@pytest.mark.parametrize(
    ("module", "env_id", "extra"),
    [
        ("mujoco", "SafetyWalker2dVelocity-v1", "robotics"),
        ("numba", "SafetyPointGoal1-v0", "robotics"),
        ("highway_env", "DrivingLaneChange-v0", "driving"),
        ("highway_env", "DrivingMerge-v0", "driving"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(module, env_id, extra):
    make_without = (
        f"import sys; sys.modules[{module!r}] = None; import gymnasium, pbcrl_envs; "
        f"gymnasium.make({env_id!r})"
    )
    run = subprocess.run([sys.executable, "-c", make_without], capture_output=True, text=True)
    assert "gymnasium.error.DependencyNotInstalled: the " + extra in run.stderr
    assert f'there is no module {module}; run `pip install "pbcrl[{extra}]"`' in run.stderr


def test_an_id_that_another_package_registered_first_is_taken_over_with_a_warning():
    other_first = (
        "import gymnasium; gymnasium.register('SafetyPointGoal1-v0', entry_point='other:Env'); "
        "import pbcrl_envs; print(gymnasium.spec('SafetyPointGoal1-v0').entry_point)"
    )
    run = subprocess.run(
        [sys.executable, "-c", other_first], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "pbcrl_envs.robotics:SafetyPointEnv"
    assert "Overriding environment SafetyPointGoal1-v0" in run.stderr
