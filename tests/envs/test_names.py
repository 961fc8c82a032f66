"""What the numbers of an observation are called: one name each, all different, and true."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v4 import HalfCheetahEnv
from gymnasium.envs.mujoco.humanoid_v4 import HumanoidEnv
from gymnasium.envs.mujoco.walker2d_v4 import Walker2dEnv

import pbcrl_envs  # noqa: F401 - registers the ids
from pbcrl.spaces import names_of
from pbcrl.trees import like_inputs
from pbcrl_envs.proving.envs import ALL
from pbcrl_envs.robotics import SafetyPointVectorEnv
from pbcrl_envs.robotics.physics import build_model
from pbcrl_envs.robotics.tasks import NUM_SENSORS, TASKS
from pbcrl_envs.robotics.velocity_simulation import TASKS as ROBOTS
from pbcrl_envs.toy import PointHazardsVectorEnv

ROAD, LANE_CHANGE = "DrivingBlockedRoad-v0", "DrivingLaneChange-v0"
IDS = ["PointHazards-v0", ROAD, LANE_CHANGE, *(f"SafetyPoint{task}-v0" for task in TASKS)]
IDS += [f"Safety{robot}Velocity-v1" for robot in ROBOTS]
IDS += [f"Proving{name}-v0" for name in ALL]
NAMES_OF_TOY = "x", "y", "goal_dx", "goal_dy"


@pytest.mark.parametrize("env_id", IDS)
def test_each_number_of_an_observation_has_a_name_of_its_own(env_id):
    env, envs = gym.make(env_id), gym.make_vec(env_id, num_envs=2)
    names = env.unwrapped.observation_names
    assert (len(names), len(set(names))) == (env.observation_space.shape[0],) * 2
    assert envs.unwrapped.observation_names == names
    assert names_of(env) == names_of(envs)
    assert names_of(env)[: len(names)] == names
    assert not any(name.startswith("obs[") for name in names)
    assert all(group.endswith(("_lidar", "range")) for group in like_inputs(names))


@pytest.mark.parametrize("angle", range(16))
def test_the_lidar_of_hazards_is_highest_in_the_bin_on_the_side_of_the_hazard(angle):
    envs = SafetyPointVectorEnv(1, task="Goal1", num_threads=1)
    envs.reset(seed=0)
    state = envs.state_dict()
    heading, distance = 0.7, 0.9
    turn = heading + (angle + 0.5) * np.pi / 8  # the middle of a bin
    state["qpos"][:, :3] = 0.2, -0.3, heading
    rows = slice(2, 10)  # after the agent and the goal
    state["positions"][:, rows] = 9.0  # out of sight
    state["positions"][:, 5] = 0.2 + distance * np.cos(turn), -0.3 + distance * np.sin(turn)
    envs.load_state_dict(state)
    obs = envs._simulation.observe(np.array([0]))[0]
    seen = {
        name: value
        for name, value in zip(envs.observation_names, obs, strict=True)
        if name.startswith("hazards_lidar")
    }
    assert len(seen) == 16
    assert max(seen, key=seen.get) == f"hazards_lidar[{angle}]"
    assert seen[f"hazards_lidar[{angle}]"] == pytest.approx((3 - distance) / 3)


@pytest.mark.parametrize("task", TASKS)
def test_sensors_have_the_names_that_the_physics_has_for_their_types(task):
    model = build_model(TASKS[task])
    types = [mujoco.mjtSensor(kind).name.removeprefix("mjSENS_") for kind in model.sensor_type[:4]]
    names = [f"{kind.lower()}[{axis}]" for kind in types for axis in range(3)]
    assert TASKS[task].observation_names[:NUM_SENSORS] == tuple(names)
    lidars = like_inputs(TASKS[task].observation_names)
    for group, lidar in zip(TASKS[task].objects, lidars, strict=True):
        assert group.kind.value in lidar


@pytest.mark.parametrize(
    ("robot", "make"),
    [("HalfCheetah", HalfCheetahEnv), ("Walker2d", Walker2dEnv), ("Humanoid", HumanoidEnv)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_robots_are_those_by_which_mujoco_finds_the_numbers(
    robot, make, tmp_path, monkeypatch
):
    """In Gymnasium's own env, whose observation is the same."""
    monkeypatch.chdir(tmp_path)  # where MuJoCo logs
    theirs = make()
    theirs.reset(seed=0)
    for _ in range(3):
        obs, *_ = theirs.step(theirs.action_space.sample())
    names = gym.make(f"Safety{robot}Velocity-v1").unwrapped.observation_names
    found = dict(zip(names, obs, strict=True))
    model, data = theirs.model, theirs.data
    shown = ROBOTS[robot].shown_velocity
    for i in range(model.njnt):
        joint = data.joint(model.joint(i).name)
        if model.jnt_type[i] == mujoco.mjtJoint.mjJNT_FREE:
            assert found["qpos.root.z"] == joint.qpos[2]
            assert found["qpos.root.qw"] == joint.qpos[3]
            assert found["qvel.root.vy"] == joint.qvel[1]
            assert found["qvel.root.wx"] == joint.qvel[3]
            continue
        hidden = i == 0  # where a robot in the plane is along it
        assert hidden or found[f"qpos.{joint.name}"] == joint.qpos[0]
        assert found[f"qvel.{joint.name}"] == np.clip(joint.qvel[0], -shown, shown)
        assert (f"qpos.{joint.name}" in found) == (not hidden)
    if robot != "Humanoid":
        return
    for name in ("torso", "left_foot", "right_lower_arm"):
        body = data.body(name)
        assert found[f"cinert.{name}.mass"] == pytest.approx(model.body(name).mass[0])
        assert found[f"cinert.{name}.ixx"] == body.cinert[0]
        assert found[f"cvel.{name}.wx"] == body.cvel[0]
        assert found[f"cvel.{name}.vz"] == body.cvel[5]
        assert found[f"cfrc_ext.{name}.fx"] == body.cfrc_ext[3]
    assert found["qfrc_actuator.right_knee"] == data.joint("right_knee").qfrc_actuator[0]
    assert found["qfrc_actuator.right_knee"] != 0


@pytest.mark.parametrize("env_id", [ROAD, LANE_CHANGE])
def test_names_of_cars_are_true_on_highway_envs_road_and_in_the_twin(env_id):
    env, envs = gym.make(env_id).unwrapped, gym.make_vec(env_id, num_envs=1)
    env.reset(seed=3)
    envs.reset(seed=3)
    for _ in range(4):
        action = np.array([0.9, 0.1], np.float32)
        obs, *_ = env.step(action)
        rows, *_ = envs.step(action[None])
    found = dict(zip(env.observation_names, obs, strict=True))
    np.testing.assert_array_equal(rows[0], obs)
    ego, *others = env.road.vehicles
    across = ego.position[1] - 4.0  # from the middle lane's middle
    velocity = [car.speed * np.array([np.cos(car.heading), np.sin(car.heading)]) for car in others]
    own = ego.speed * np.array([np.cos(ego.heading), np.sin(ego.heading)])
    expected = {"ego.x": ego.position[0] / 50, "ego.y": across / 4, "ego.speed": ego.speed / 10}
    expected["ego.heading"] = ego.heading
    for k, car in enumerate(others, start=1):
        dx, dy = car.position - ego.position
        dvx, dvy = velocity[k - 1] - own
        expected |= {f"vehicle{k}.dx": dx / 50, f"vehicle{k}.dy": dy / 4}
        expected |= {f"vehicle{k}.dvx": dvx / 10, f"vehicle{k}.dvy": dvy / 10}
        expected |= {f"vehicle{k}.heading": car.heading, f"vehicle{k}.acceleration": 0.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert set(found) - set(expected) == {"ego.acceleration"}
    assert found["ego.acceleration"] != 0


def test_observations_that_are_highway_envs_own_go_by_their_place():
    env = gym.make(ROAD, config={"observation": {"type": "Kinematics"}})
    assert env.unwrapped.observation_names is None
    assert names_of(env)[0] == "obs[0]"


def test_a_road_with_fewer_cars_has_fewer_names():
    one_car = {"traffic": [{"lane": 0, "position": 1.0, "speed": 0.2}]}
    names = gym.make(ROAD, config=one_car).unwrapped.observation_names
    assert names[-1] == "vehicle1.acceleration"
    assert gym.make_vec(ROAD, 1, config=one_car).unwrapped.observation_names == names


def test_names_of_the_toy_are_its_place_and_the_way_to_the_goal():
    envs = PointHazardsVectorEnv(5)
    obs, _ = envs.reset(seed=0)
    state = envs.state_dict()
    x, y, goal_dx, goal_dy = (obs[:, envs.observation_names.index(name)] for name in NAMES_OF_TOY)
    np.testing.assert_allclose(np.stack([x, y], 1), state["position"], atol=1e-6)
    away = np.stack([x + goal_dx, y + goal_dy], 1)
    np.testing.assert_allclose(away, state["goal"], atol=1e-6)
