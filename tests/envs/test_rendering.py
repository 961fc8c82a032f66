"""Pictures of the robotics tasks show what is there, where it is, and change nothing."""

import ctypes
import os
import shutil
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled, ResetNeeded
from gymnasium.utils.env_checker import check_env

from pbcrl_envs.robotics import (
    SafetyPointEnv,
    SafetyPointVectorEnv,
    SafetyVelocityEnv,
    SafetyVelocityVectorEnv,
    opengl,
)
from pbcrl_envs.robotics.opengl import LIBRARIES, find_backend
from pbcrl_envs.robotics.scenery import CAMERAS, NavigationPainter
from pbcrl_envs.robotics.simulation import NavigationSimulation, Snapshot
from pbcrl_envs.robotics.tasks import TASKS, Kind


def missing_opengl():
    try:
        find_backend()
    except DependencyNotInstalled as error:
        return str(error)
    return ""


draws = pytest.mark.skipif(bool(missing_opengl()), reason=missing_opengl() or "OpenGL is there")
SIZE = 240


# -- An independent pinhole camera, and what colours look like ---------------------------------


def pixel(point, *, eye, up, reach):
    """Row and column where a camera at `eye` that looks at the origin sees a point.

    `reach` is how far it sees to each side at the distance of the origin.
    """
    eye, up = np.array(eye, float), np.array(up, float)
    forward = -eye / np.linalg.norm(eye)
    right = np.cross(forward, up)
    offset = np.array(point) - eye
    scale = np.linalg.norm(eye) / (offset @ forward) / reach
    column, row = offset @ right * scale, -(offset @ up) * scale
    return int((row + 1) / 2 * SIZE), int((column + 1) / 2 * SIZE)


def from_above(point, extent=1.5):
    return pixel(point, eye=(0, 0, 10), up=(0, 1, 0), reach=1.3 * extent)


def from_the_side(point):
    return pixel(point, eye=(0, -5, 5), up=np.array([0, 1, 1]) / 2**0.5, reach=1.95)


def is_green(rgb):
    red, green, blue = map(int, rgb)
    return green > max(red, blue) + 40


def is_blue(rgb):
    red, green, blue = map(int, rgb)
    return blue > max(red, green) + 60 and red < green + 20


def is_cyan(rgb):
    red, green, blue = map(int, rgb)
    return min(green, blue) > red + 80 and abs(green - blue) < 40


def is_orange(rgb):
    red, green, blue = map(int, rgb)
    return red > green + 40 and green > blue + 40


def is_purple(rgb):
    red, green, blue = map(int, rgb)
    return blue > red + 40 and red > green + 40


def is_red(rgb):
    red, green, blue = map(int, rgb)
    return red > max(green, blue) + 60


def is_lilac(rgb):
    red, green, blue = map(int, rgb)
    return blue > red + 40 and abs(red - green) < 20 and red > 80


def is_yellow(rgb):
    red, green, blue = map(int, rgb)
    return min(red, green) > blue + 80 and abs(red - green) < 20


def is_floor(rgb):
    return max(rgb) - min(map(int, rgb)) < 30 and min(rgb) > 120


COLOUR = {
    Kind.GOAL: (is_green, 0.3),
    Kind.HAZARD: (is_blue, 0.03),
    Kind.VASE: (is_cyan, 0.2),
    Kind.PILLAR: (is_lilac, 1.0),
    Kind.BOX: (is_yellow, 0.4),
    Kind.BUTTON: (is_orange, 0.2),
    Kind.GREMLIN: (is_purple, 0.3),
}
"""How each kind is recognised, and the height of its top."""


def rows_of(task, kind):
    kinds = [group.kind for group in TASKS[task].objects for _ in range(group.num)]
    return 1 + np.flatnonzero([k is kind for k in kinds])


def make(task="Goal1", **kwargs):
    sizes = {"width": SIZE, "height": SIZE}
    return SafetyPointEnv(task=task, render_mode="rgb_array", **{**sizes, **kwargs})


def put(env, name, index, value):
    """Change one entry of an env's state by hand."""
    state = env.state_dict()
    state[name][index] = value
    env.load_state_dict(state)


# -- What is there ---------------------------------------------------------------------------


@draws
@pytest.mark.parametrize("task", TASKS)
def test_every_object_is_seen_in_its_colour_where_it_stands(task):
    env, looked_at = make(task, camera_name="overhead"), set()
    for seed in range(4):
        env.reset(seed=seed)
        for _ in range(20):  # until gremlins have risen to the height that they keep
            env.step(np.zeros(2))
        image, places = env.render(), env.state_dict()["positions"]
        (goal,) = places[rows_of(task, Kind.GOAL)]
        for group in TASKS[task].objects:
            recognise, top = COLOUR[group.kind]
            for x, y in places[rows_of(task, group.kind)]:
                distance = np.hypot(*(places - (x, y)).T)
                # By a neighbour, of which a pillar leans out a little, or by the agent's rings.
                covered = np.sort(distance)[1] < 0.45 or distance[0] < 0.55
                marked = group.kind is Kind.BUTTON and np.hypot(*(goal - (x, y))) < 0.01
                if covered and not marked:
                    continue
                seen = image[from_above((x, y, top), TASKS[task].extent)]
                assert is_green(seen) if marked else recognise(seen), (group.kind, seed, seen)
                looked_at.add(group.kind)
    env.close()
    kinds = {group.kind for group in TASKS[task].objects}
    hidden = {Kind.GOAL} if Kind.BUTTON in kinds else set()  # looked at as the marked button
    assert looked_at | hidden == kinds


@draws
def test_where_a_goal_was_the_floor_is_seen_again_when_it_has_moved():
    env = make("Goal1")
    env.reset(seed=0)
    (goal,) = rows_of("Goal1", Kind.GOAL)
    seen = []
    for place in [(1.0, -1.0), (-1.3, 1.2)]:
        put(env, "positions", goal, place)
        image = env.render()
        seen.append([image[from_the_side((*spot, 0.3))] for spot in [(1.0, -1.0), (-1.3, 1.2)]])
    assert is_green(seen[0][0])
    assert is_floor(seen[0][1])
    assert is_floor(seen[1][0])
    assert is_green(seen[1][1])


def scene(**changes):
    """A snapshot of Goal1 with everything far away but the agent, in the middle and at rest."""
    far = np.full((11, 2), 30.0)
    far[0] = 0
    vase = [30, 30, 0.1, 1, 0, 0, 0]
    state = {
        "physics": {"qpos": np.array([0, 0, 0, *vase]), "mocap_pos": np.zeros((0, 3))},
        "positions": far,
        "lidars": np.zeros((3, 16)),
        "cost": 0.0,
    }
    return Snapshot(**{**state, **changes})


@pytest.fixture
def painter():
    """Draws Goal1 from above."""
    simulation = NavigationSimulation("Goal1", num_envs=1, num_threads=1)
    made = NavigationPainter(
        simulation, mode="rgb_array", camera_name="overhead", width=SIZE, height=SIZE
    )
    yield made
    made.close()


@draws
def test_the_nose_points_along_the_heading(painter):
    for heading in (0.0, 1.0, 2.5, 4.0):
        snapshot = scene()
        snapshot.physics["qpos"][2] = heading
        image = painter.draw_snapshot(snapshot)
        ahead = 0.11 * np.array([np.cos(heading), np.sin(heading)])
        red, green, blue = map(int, image[from_above((*ahead, 0.15))])
        assert blue > red + 20, (red, green, blue)  # the nose
        assert max(red, green, blue) < 160
        assert is_floor(image[from_above((*-1.5 * ahead, 0.0))])
        assert is_red(image[from_above((*-0.5 * ahead, 0.15))])


@draws
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_lidar_reading_is_a_ball_in_the_colour_of_its_kind_in_the_direction_of_its_bin(
    painter, kind
):
    recognise = [is_green, is_blue, is_cyan][kind]
    heading, bin_ahead = 0.3, 2
    lidars = np.zeros((3, 16))
    lidars[kind, bin_ahead] = 1.0
    snapshot = scene(lidars=lidars)
    snapshot.physics["qpos"][2] = heading
    image = painter.draw_snapshot(snapshot).astype(int)
    snapshot.lidars[:] = 0
    change = np.abs(painter.draw_snapshot(snapshot) - image).sum(axis=-1)
    changed = []
    for k in range(16):
        angle = heading + (k + 0.5) * 2 * np.pi / 16
        at = from_above((0.15 * np.cos(angle), 0.15 * np.sin(angle), 0.6 + 0.06 * kind))
        changed.append(bool(change[at] > 100))
        assert k != bin_ahead or recognise(image[at]), image[at]
    assert changed == [k == bin_ahead for k in range(16)]


@draws
def test_a_cost_is_a_red_halo_around_the_agent(painter):
    ring = [0.22 * np.array([np.cos(a), np.sin(a)]) for a in np.arange(0.5, 6, 0.7)]
    free, costly = painter.draw_snapshot(scene()), painter.draw_snapshot(scene(cost=1.0))
    for place in ring:
        assert is_floor(free[from_above((*place, 0.1))])
        assert is_red(costly[from_above((*place, 0.1))])


@draws
def test_the_halo_is_there_after_a_step_that_costs_and_gone_after_a_reset():
    env = make(camera_name="overhead")

    def red():
        image = env.render().astype(int)
        return (image[..., 0] > image[..., 1:].max(axis=-1) + 60).sum()

    env.reset(seed=0)
    body = red()
    (hazard, *_) = rows_of("Goal1", Kind.HAZARD)
    put(env, "qpos", slice(2), env.state_dict()["positions"][hazard])
    *_, info = env.step(np.zeros(2))
    assert info["cost"] == 1
    assert red() > 3 * body
    env.reset(seed=0)
    assert red() == body
    env.close()


@draws
def test_people_who_judge_do_not_see_the_true_cost():
    env = make(**SafetyPointEnv.metadata["labelling"])
    env.reset(seed=0)
    (hazard, *_) = rows_of("Goal1", Kind.HAZARD)
    put(env, "qpos", slice(2), env.state_dict()["positions"][hazard])
    *_, info = env.step(np.zeros(2))
    assert info["cost"] == 1
    costly = env.render()
    env.load_state_dict(env.state_dict())  # which says nothing of the cost of the step before
    np.testing.assert_array_equal(env.render(), costly)
    env.close()


@draws
def test_the_tracking_camera_keeps_the_agent_in_the_middle():
    env = make(camera_name="track")
    env.reset(seed=0)
    for place in [(0.0, 0.0, 0.0), (1.2, -0.7, 2.0), (-6.0, 3.0, 4.0)]:
        put(env, "qpos", slice(3), place)
        image = env.render()
        # Looked at is a point 0.1 above the agent's middle.
        assert is_red(image[SIZE // 2 + 8, SIZE // 2])
    env.close()


@draws
def test_the_agents_own_camera_sees_what_is_ahead_and_not_what_is_behind():
    env = make(camera_name="vision")
    env.reset(seed=0)
    goal, *_ = rows_of("Goal1", Kind.GOAL)
    put(env, "positions", slice(1, None), 30)
    put(env, "positions", goal, (0, 1))
    green = []
    for heading in (np.pi / 2, -np.pi / 2):
        put(env, "qpos", slice(3), (0, 0, heading))
        image = env.render().astype(int)
        green.append((image[..., 1] > image[..., [0, 2]].max(axis=-1) + 40).mean())
    assert green[0] > 0.03
    assert green[1] == 0
    env.close()


@draws
@pytest.mark.parametrize("task", ["HalfCheetah", "Walker2d", "Humanoid"])
def test_a_running_robot_stays_in_the_picture_and_glows_while_it_is_too_fast(task):
    env = SafetyVelocityEnv(task=task, render_mode="rgb_array", width=SIZE, height=SIZE)
    env.reset(seed=0)
    still = env.render().astype(int)
    state = env.state_dict()
    # Where it is, after MuJoCo's time: far beyond the floor of Gymnasium's model.
    put(env, "physics", 1, state["physics"][1] + 300.0)
    far = env.render().astype(int)
    left, right = (slice(None), slice(0, 40)), (slice(None), slice(200, SIZE))
    for side in (left, right):  # there still is a checked floor, black and white
        assert far[side][-40:].max() > 150 > 50 > far[side][-40:].min()
    env.load_state_dict(state)
    put(env, "location", 0, state["location"][0] - 1.0)  # as if it ran a metre in this step
    *_, info = env.step(np.zeros(env.action_space.shape))
    assert info["cost"] == 1
    fast = env.render().astype(int)

    def red(image):
        return (image[..., 0] > image[..., 1:].max(axis=-1) + 90).sum()

    assert red(fast) > red(still) + 500
    env.close()


@draws
def test_a_batch_of_robots_draws_what_the_single_ones_draw():
    size = {"width": 80, "height": 60}
    envs = SafetyVelocityVectorEnv(
        2, task="Walker2d", num_threads=1, render_mode="rgb_array", **size
    )
    envs.reset(seed=1)
    envs.step(np.ones((2, 6)))
    for i, image in enumerate(envs.render()):
        env = SafetyVelocityEnv(task="Walker2d", render_mode="rgb_array", **size)
        env.reset(seed=1 + i)
        env.step(np.ones(6))
        np.testing.assert_array_equal(image, env.render())
        env.close()
    assert envs.metadata["render_fps"] == 125  # a step is 8 ms
    envs.close()


# -- What it leaves alone --------------------------------------------------------------------


@draws
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (SafetyPointEnv, "Goal2"),
        (SafetyPointEnv, "Push1"),
        (SafetyPointEnv, "Button1"),
        (SafetyVelocityEnv, "HalfCheetah"),
        (SafetyVelocityEnv, "Humanoid"),
    ],
)
def test_a_trajectory_is_the_same_to_the_last_bit_with_and_without_rendering(kind, task):
    plain, drawn = kind(task=task), kind(task=task, render_mode="rgb_array", width=48, height=48)
    drawn.action_space.seed(0)
    plain.reset(seed=5)
    drawn.reset(seed=5)
    for _ in range(25):
        drawn.render()
        action = drawn.action_space.sample()
        for left, right in zip(plain.step(action), drawn.step(action), strict=True):
            np.testing.assert_equal(left, right)
    for key, array in plain.state_dict().items():
        np.testing.assert_array_equal(drawn.state_dict()[key], array)
    drawn.close()


@draws
def test_a_state_that_was_taken_before_can_be_drawn_later_by_another_env():
    env = make("Push1")
    env.reset(seed=0)
    for _ in range(10):
        env.step(np.array([1.0, 0.4]))
    state, image = env.state_dict(), env.render()
    for _ in range(10):
        env.step(np.array([1.0, 0.4]))
    assert (env.render() != image).any()
    other = make("Push1")
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.render(), image)
    env.close()
    other.close()


@draws
def test_a_batch_draws_what_the_single_envs_draw():
    envs = SafetyPointVectorEnv(
        2, task="Button1", num_threads=1, render_mode="rgb_array", width=SIZE, height=SIZE
    )
    envs.reset(seed=3)
    for _ in range(5):
        envs.step(np.ones((2, 2)))
    images = envs.render()
    assert isinstance(images, tuple)
    for i, image in enumerate(images):
        single = make("Button1")
        single.reset(seed=3 + i)
        for _ in range(5):
            single.step(np.ones(2))
        np.testing.assert_array_equal(image, single.render())
        single.close()
    assert (images[0] != images[1]).any()
    envs.close()


@draws
def test_a_picture_has_the_size_that_was_asked_for():
    env = make(width=200, height=120)
    env.reset(seed=0)
    assert env.render().shape == (120, 200, 3)
    assert env.render().dtype == np.uint8
    env.close()
    assert env.render().shape == (120, 200, 3)  # closing is not the end
    env.close()


@draws
@pytest.mark.parametrize("kind", [SafetyPointEnv, SafetyVelocityEnv])
def test_a_picture_does_not_depend_on_the_one_before(kind):
    env = kind(render_mode="rgb_array", width=64, height=64)
    env.reset(seed=0)
    images = [env.render(), env.render()]
    env.reset(seed=1)
    env.render()
    env.reset(seed=0)
    images.append(env.render())
    np.testing.assert_array_equal(images[0], images[1])
    np.testing.assert_array_equal(images[0], images[2])
    env.close()


@draws
def test_two_envs_draw_in_turns():
    first, second = make(camera_name="overhead"), make("Button1", width=100)
    first.reset(seed=0)
    second.reset(seed=0)
    before = first.render()
    assert second.render().shape == (SIZE, 100, 3)
    second.close()
    np.testing.assert_array_equal(first.render(), before)
    first.close()


@draws
def test_gymnasiums_check_and_its_makers_draw_too():
    env = gym.make("SafetyPointButton1-v0", render_mode="rgb_array", width=64, height=64)
    with pytest.warns(UserWarning, match="minimum value is -infinity|maximum value is infinity"):
        check_env(make("Button1", width=64, height=64), skip_render_check=True)
    env.reset(seed=0)
    assert env.render().shape == (64, 64, 3)
    env.close()
    envs = gym.make_vec("SafetyPointGoal1-v0", 2, render_mode="rgb_array", width=64, height=64)
    envs.reset(seed=0)
    assert [image.shape for image in envs.render()] == [(64, 64, 3)] * 2
    envs.close()


def python(code, *, command=(sys.executable,), **env):
    chosen = ("MUJOCO_GL", "PYOPENGL_PLATFORM")  # MuJoCo sets the second one when it draws
    variables = {name: value for name, value in os.environ.items() if name not in chosen}
    return subprocess.run(
        [*command, "-c", code],
        env={**variables, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_env_that_draws_nothing_loads_no_opengl():
    done = python(
        "import sys; from pbcrl_envs.robotics import SafetyPointEnv; env = SafetyPointEnv(); "
        "env.reset(seed=0); env.step([1, 1]); "
        "print([name for name in ('OpenGL', 'mujoco.egl', 'mujoco.viewer') if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


PRINT_GREEN = """
import numpy as np
from pbcrl_envs.robotics import SafetyPointEnv
env = SafetyPointEnv(render_mode="rgb_array", width=120, height=120)
env.reset(seed=0)
image = env.render().astype(int)
print((image[..., 1] > image[..., [0, 2]].max(axis=-1) + 40).sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", LIBRARIES)
def test_each_library_draws_the_goal(backend):
    try:
        ctypes.CDLL(LIBRARIES[backend][0])
    except OSError:
        pytest.skip(f"{LIBRARIES[backend][0]} is not installed")
    done = python(PRINT_GREEN, MUJOCO_GL=backend)
    assert done.stderr == ""
    assert 100 < int(done.stdout) < 2000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("xvfb-run") is None, reason="xvfb-run is not installed")
def test_a_window_opens_keeps_time_and_closes():
    done = python(
        "import time; from pbcrl_envs.robotics import SafetyPointEnv; "
        "env = SafetyPointEnv(render_mode='human'); env.reset(seed=0); start = time.time(); "
        "[env.step([1, 1]) for _ in range(25)]; took = time.time() - start; env.close(); "
        "assert env.render() is None; env.close(); print(took)",
        command=("xvfb-run", "-a", sys.executable),
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.45  # 25 steps are half a second


# -- What is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"camera_name": "behind"}, f"camera_name must be one of {', '.join(CAMERAS)}, got 'beh"),
        ({"width": 0}, "width must be between 1 and 8192 pixels, got 0"),
        ({"height": 10_000}, "height must be between 1 and 8192 pixels, got 10000"),
        ({"render_mode": "depth"}, "must be one of 'human', 'rgb_array', None, got 'depth'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SafetyPointEnv(**{"render_mode": "rgb_array", **kwargs})


def test_a_batch_has_no_window():
    with pytest.raises(ValueError, match="must be one of 'rgb_array', None, got 'human'"):
        SafetyPointVectorEnv(2, render_mode="human")


def test_an_env_that_was_made_to_draw_nothing_says_so():
    env = SafetyPointEnv()
    env.reset(seed=0)
    with pytest.raises(ValueError, match='is None; make the env with render_mode="rgb_array"'):
        env.render()


def test_the_first_picture_needs_a_reset():
    with pytest.raises(ResetNeeded, match="call reset"):
        make().render()


@pytest.mark.skipif(sys.platform != "linux", reason="MuJoCo draws through the window system here")
def test_a_missing_library_is_named_with_the_package_that_has_it(monkeypatch):
    nowhere = {"egl": ("libEGL-nowhere.so", "libegl1"), "osmesa": ("libOSMesa-no.so", "libosmesa6")}
    monkeypatch.setattr(opengl, "LIBRARIES", nowhere)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    both = r"install libegl1 \(libEGL-nowhere.so\) or libosmesa6 \(libOSMesa-no.so\)"
    with pytest.raises(DependencyNotInstalled, match=both):
        SafetyPointEnv(render_mode="rgb_array")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(DependencyNotInstalled, match=r"libOSMesa-no.so, which is missing; `apt"):
        SafetyPointVectorEnv(2, render_mode="rgb_array")


def test_rendering_that_is_switched_off_is_not_switched_on(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disable")
    with pytest.raises(ValueError, match="MUJOCO_GL=disable switches it off; unset MUJOCO_GL"):
        SafetyPointEnv(render_mode="rgb_array")


@pytest.mark.skipif(sys.platform != "linux", reason="there is always a display here")
def test_a_window_without_a_display_is_refused(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(DependencyNotInstalled, match="neither DISPLAY nor WAYLAND_DISPLAY is set"):
        SafetyPointEnv(render_mode="human")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is always a display here")
def test_a_display_that_cannot_be_opened_is_refused():
    done = python(
        "from pbcrl_envs.robotics import SafetyPointEnv; "
        "SafetyPointEnv(render_mode='human').reset(seed=0)",
        DISPLAY=":987",
        WAYLAND_DISPLAY="",
    )
    assert "GLFW could not open one on what DISPLAY or WAYLAND_DISPLAY names" in done.stderr
