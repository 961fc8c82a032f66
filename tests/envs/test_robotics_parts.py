"""Lidar, layouts and physics of the robotics tasks, each on its own."""

import mujoco
import numpy as np
import pytest

from pbcrl_envs.robotics.layout import LayoutStream
from pbcrl_envs.robotics.lidar import lidar
from pbcrl_envs.robotics.physics import build_model
from pbcrl_envs.robotics.simulation import NavigationSimulation
from pbcrl_envs.robotics.tasks import AGENT_KEEPOUT, TASKS, Kind, Objects, Task

BIN = 2 * np.pi / 16


def one_lidar(*offsets, heading=0.0):
    groups = np.zeros(len(offsets), dtype=np.intp)
    return lidar(np.array([offsets]), np.array([heading]), groups, num_bins=16)[0]


def polar(distance, angle):
    return distance * np.cos(angle), distance * np.sin(angle)


def test_an_object_in_the_middle_of_a_bin_shows_half_as_strongly_in_both_neighbours():
    values = one_lidar(polar(1.5, 2.5 * BIN))
    expected = np.zeros(16)
    expected[[1, 2, 3]] = 0.25, 0.5, 0.25  # (3 - 1.5) / 3 = 0.5
    np.testing.assert_allclose(values, expected, atol=1e-12)


def test_an_object_straight_ahead_is_in_the_first_bin_and_fully_in_the_last():
    values = one_lidar((0.75, 0.0))
    expected = np.zeros(16)
    expected[[0, 15]] = 0.75
    np.testing.assert_allclose(values, expected, atol=1e-12)


def test_angles_are_counted_from_the_agents_nose():
    np.testing.assert_allclose(
        one_lidar(polar(1, 1.3), heading=1.3 - 0.7 * BIN),
        one_lidar(polar(1, 0.7 * BIN)),
        atol=1e-12,
    )


def test_the_nearest_object_of_a_bin_hides_the_others():
    near, far = polar(0.6, 4.5 * BIN), polar(2.4, 4.5 * BIN)
    np.testing.assert_array_equal(one_lidar(far, near), one_lidar(near))


def test_an_object_three_metres_away_is_out_of_sight():
    assert not one_lidar((3.0, 0.0), (0.0, -7.0)).any()


def test_an_angle_that_rounds_up_to_a_full_turn_stays_in_the_last_bin():
    values = one_lidar((1.5, -1e-17))
    assert values[15] == pytest.approx(0.5)
    assert values[0] == pytest.approx(0.5)
    assert not values[1:15].any()


def test_groups_of_objects_have_lidars_of_their_own():
    offsets = np.array([[polar(1.5, 0.5 * BIN), polar(0.3, 8.5 * BIN), polar(1.5, 0.5 * BIN)]])
    values = lidar(offsets, np.zeros(1), np.array([0, 1, 2]), num_bins=16)[0].reshape(3, 16)
    np.testing.assert_array_equal(values[0], values[2])
    assert values[0].argmax() == 0
    assert values[1].argmax() == 8
    assert values[1, 8] == pytest.approx(0.9)


class PlainStream:
    """Layouts drawn by NumPy alone."""

    def __init__(self, task, seed):
        self.rng = np.random.RandomState(seed)
        self.extent = task.extent
        kinds = [group.kind for group in task.objects for _ in range(group.num)]
        self.goal = 1 + kinds.index(Kind.GOAL)
        self.keepouts = [AGENT_KEEPOUT]
        self.keepouts += [group.keepout for group in task.objects for _ in range(group.num)]

    def draw(self, keepout, others):
        bound = self.extent - keepout
        place = np.array([self.rng.uniform(-bound, bound), self.rng.uniform(-bound, bound)])
        free = all(np.sqrt(np.sum(np.square(place - xy))) >= k + keepout for xy, k in others)
        return place if free else None

    def draw_layout(self):
        while True:
            placed = []
            for keepout in self.keepouts:
                tries = (self.draw(keepout, placed) for _ in range(100))
                place = next((p for p in tries if p is not None), None)
                if place is None:
                    break
                placed.append((place, keepout))
            else:
                headings = [self.rng.uniform(0, 2 * np.pi) for _ in placed]
                return np.array([xy for xy, _ in placed]), np.array(headings)

    def draw_goal(self, positions):
        others = list(zip(positions, self.keepouts, strict=True))
        del others[self.goal]
        tries = (self.draw(self.keepouts[self.goal], others) for _ in range(10_000))
        return next(p for p in tries if p is not None)


@pytest.mark.parametrize("name", TASKS)
def test_compiling_changes_no_draw(name):
    fast, plain = LayoutStream(TASKS[name], 3), PlainStream(TASKS[name], 3)
    for steps in (0, 701):
        fast.skip_steps(steps)
        plain.rng.random_sample(steps)
        (positions, headings), (expected, expected_headings) = (
            fast.draw_layout(),
            plain.draw_layout(),
        )
        np.testing.assert_array_equal(positions, expected)
        np.testing.assert_array_equal(headings, expected_headings)
        for _ in range(3):
            assert fast.draw_index(4) == plain.rng.choice(4)
            if not TASKS[name].has(Kind.BUTTON):  # they leave hardly any room for a second goal
                np.testing.assert_array_equal(fast.draw_goal(positions), plain.draw_goal(positions))


@pytest.mark.parametrize("name", TASKS)
def test_a_layout_keeps_its_distances_and_stays_inside_the_square(name):
    task = TASKS[name]
    keepouts = [AGENT_KEEPOUT]
    keepouts += [group.keepout for group in task.objects for _ in range(group.num)]
    positions, _ = LayoutStream(task, 0).draw_layout()
    for i in range(len(positions)):
        assert np.abs(positions[i]).max() <= task.extent - keepouts[i]
        for j in range(i):
            assert np.linalg.norm(positions[i] - positions[j]) >= keepouts[i] + keepouts[j]


def test_no_goal_is_drawn_where_the_agent_leaves_no_room():
    objects = (Objects(Kind.GOAL, num=1, size=0.1, keepout=0.3),)
    stream = LayoutStream(Task(extent=0.5, objects=objects, constrained=frozenset()), 0)
    # The goal's centre is at most 0.29 from the middle of the square, and 0.7 are needed.
    assert stream.draw_goal(np.zeros((2, 2))) is None


def test_an_impossible_layout_says_so():
    objects = (Objects(Kind.GOAL, num=1, size=0.1, keepout=0.3),)
    with pytest.raises(RuntimeError, match="give the task a larger extent or smaller keepouts"):
        LayoutStream(Task(extent=0.5, objects=objects, constrained=frozenset()), 0).draw_layout()


def test_a_push_box_weighs_its_cube_and_its_four_corner_blocks():
    model = build_model(TASKS["Push1"])
    assert model.body("box0").mass[0] == pytest.approx(0.001 * (0.4**3 + 4 * 0.2**2 * 0.4))
    assert model.body_geomnum[model.body("box0").id] == 5


def test_the_agent_weighs_what_its_sphere_and_its_nose_weigh():
    model = build_model(TASKS["Goal1"])
    sphere, nose = 4 / 3 * np.pi * 0.1**3, 0.1**3  # density 1
    assert model.body("agent").mass[0] == pytest.approx(sphere + nose)
    assert model.body("agent").ipos[0] == pytest.approx(0.1 * nose / (sphere + nose))
    assert model.body("vase0").mass[0] == pytest.approx(0.2**3 * 0.001)


def test_the_arena_of_a_simulation_is_not_upstreams_half_gigabyte():
    assert build_model(TASKS["Button1"]).narena < 32 * 2**20


def test_a_weld_resists_turning_no_more_than_shifting():
    model = build_model(TASKS["Button1"])
    for i in range(4):
        shift, turn = model.body_invweight0[model.body(f"gremlin{i}").id]
        assert shift == turn > 0


def test_gremlins_end_up_circling_their_starting_points_above_the_floor():
    simulation = NavigationSimulation("Button1", num_envs=1, num_threads=1)
    only = np.zeros(1, dtype=np.intp)
    simulation.seed([2])
    simulation.reset(only)
    start = simulation.state_dict(only)["positions"][0]
    agent, gremlins = start[:1], start[-4:]
    for _ in range(100):
        simulation.step(only, np.zeros((1, 2)))
    phase = 100 * 0.02
    offset = 0.35 * np.array([np.sin(phase), np.cos(phase)])
    # The welds are springs: they trail their targets a little.
    state = simulation.state_dict(only)
    np.testing.assert_allclose(state["positions"][0, -4:], gremlins + offset, atol=0.03)
    np.testing.assert_allclose(state["qpos"][0, 5::7], 0.2, atol=0.01)
    np.testing.assert_allclose(state["positions"][0, :1], agent, atol=0.1)


def test_the_solver_settings_are_those_that_the_tasks_were_tuned_on():
    option = build_model(TASKS["Goal1"]).opt
    assert (option.timestep, option.iterations, option.tolerance) == (0.002, 100, 1e-8)
    assert option.integrator == mujoco.mjtIntegrator.mjINT_EULER
    assert option.solver == mujoco.mjtSolver.mjSOL_NEWTON
    assert option.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL


@pytest.mark.parametrize(("task", "share"), [("Goal1", 0.6), ("Push1", 0.5), ("Push2", 0.3)])
def test_leaving_resting_objects_out_moves_the_agent_the_same_to_the_last_bit(task, share):
    """As long as the agent has not come near anything; a thing at rest moves by noise alone."""
    num_envs, every = 16, np.arange(16)
    usual, complete = (
        NavigationSimulation(task, num_envs=num_envs, num_threads=1) for _ in range(2)
    )
    for simulation in (usual, complete):
        simulation.seed(range(num_envs))
        simulation.reset(every)
    kinds = [group.kind for group in TASKS[task].objects for _ in range(group.num)]
    objects = [1 + i for i, kind in enumerate(kinds) if kind in (Kind.VASE, Kind.PILLAR, Kind.BOX)]
    alone, at_rest = np.ones(num_envs, dtype=np.bool_), {usual: [], complete: []}
    before = usual.state_dict(every)
    for actions in np.random.default_rng(0).uniform(-1, 1, (100, num_envs, 2)):
        # Who has lain still for no step yet takes part.
        state = complete.state_dict(every)
        complete.load_state_dict(state | {"still_steps": 0 * state["still_steps"]}, every)
        for simulation in (usual, complete):
            simulation.step(every, actions)
        after, expected = (simulation.state_dict(every) for simulation in (usual, complete))
        offsets = after["positions"][:, objects] - after["positions"][:, :1]
        alone &= np.linalg.norm(offsets, axis=2).min(axis=1) > 0.7
        for field in ("qpos", "qvel"):
            np.testing.assert_array_equal(after[field][alone, :3], expected[field][alone, :3])
        sensors = [simulation.observe(every)[alone, :12] for simulation in (usual, complete)]
        np.testing.assert_array_equal(*sensors)
        moved = np.abs(after["qpos"][alone, 3:] - expected["qpos"][alone, 3:])
        assert moved.max() < 1e-9
        for simulation, now, then in [(usual, after, before), (complete, expected, state)]:
            at_rest[simulation].append((now["qpos"][:, 3:] == then["qpos"][:, 3:]).all(axis=1))
        before = after
    assert alone.sum() >= 4
    assert np.mean(at_rest[complete]) < 0.01
    assert np.mean(at_rest[usual]) > share


def test_a_resting_object_takes_part_again_once_it_moves_or_the_agent_comes_near():
    simulation, only = NavigationSimulation("Push0", num_envs=1, num_threads=1), np.arange(1)
    simulation.seed([0])
    simulation.reset(only)
    for _ in range(60):
        simulation.step(only, np.zeros((1, 2)))
    resting = simulation.state_dict(only)
    box = resting["qpos"][0, 3:10]
    simulation.step(only, np.zeros((1, 2)))
    np.testing.assert_array_equal(simulation.state_dict(only)["qpos"][0, 3:10], box)  # left out

    moving = {name: array.copy() for name, array in resting.items()}
    moving["qvel"][0, 3] = 1.0
    simulation.load_state_dict(moving, only)
    simulation.step(only, np.zeros((1, 2)))
    assert simulation.state_dict(only)["qpos"][0, 3] - box[0] > 0.001

    charged = {name: array.copy() for name, array in resting.items()}
    charged["qpos"][0, :3] = box[0] - 0.55, box[1], 0.0  # the nose points at the box
    charged["qvel"][0, 0] = 10.0
    simulation.load_state_dict(charged, only)
    simulation.step(only, np.zeros((1, 2)))
    assert simulation.state_dict(only)["qpos"][0, 3] - box[0] > 0.001
