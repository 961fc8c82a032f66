"""The robotics tasks as Gymnasium environments: steps, seeds, episodes, errors."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from pbcrl_envs.robotics import SafetyPointEnv, SafetyPointVectorEnv
from pbcrl_envs.robotics.layout import LayoutStream
from pbcrl_envs.robotics.physics import build_model
from pbcrl_envs.robotics.simulation import NavigationSimulation
from pbcrl_envs.robotics.tasks import TASKS, Kind, Objects, Task

OBS_DIM = {
    **{"Goal0": 28, "Goal1": 60, "Goal2": 60},
    **{"Push0": 44, "Push1": 76, "Push2": 76},
    **{"Button0": 44, "Button1": 76, "Button2": 76},
}


def random_actions(steps, num_envs, *, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, num_envs, 2))


class PlainSimulation:
    """The same task, one copy, on a plain MjData: contacts from its list, lidars in a loop."""

    def __init__(self, name, seed):
        self.task, self.model = TASKS[name], build_model(TASKS[name])
        self.data, self.stream = mujoco.MjData(self.model), LayoutStream(TASKS[name], seed)
        positions, headings = self.stream.draw_layout()
        names = [f"{g.kind.value}{i}" for g in self.task.objects for i in range(g.num)]
        self.at = dict(zip(["agent", *names], positions, strict=True))
        turn = dict(zip(["agent", *names], headings, strict=True))
        self.data.qpos[:3] = *self.at["agent"], turn["agent"]
        free = [n for n in names if n.startswith(("vase", "box", "gremlin"))]
        heights = {"vase": 0.1 - 4e-5, "box": 0.2, "gremlin": 0.1, "button": 0.1, "pillar": 0.5}
        for k, n in enumerate(free):
            height = heights[n[:-1]]
            pose = *self.at[n], height, np.cos(turn[n] / 2), 0, 0, np.sin(turn[n] / 2)
            self.data.qpos[3 + 7 * k : 10 + 7 * k] = pose
        self.free, self.spawn = free, {n: self.at[n] for n in free}
        for n in (n for n in names if n.startswith(("pillar", "button", "gremlin"))):
            mocap = self.mocap(n + "target" if n.startswith("gremlin") else n)
            self.data.mocap_pos[mocap] = *self.at[n], heights[n[:-1]]
            self.data.mocap_quat[mocap] = np.cos(turn[n] / 2), 0, 0, np.sin(turn[n] / 2)
        # The first joints are the agent's.
        self.vases = [3 + k for k, n in enumerate(free) if n.startswith("vase")]
        self.timer = 0
        self.new_goal()
        mujoco.mj_forward(self.model, self.data)
        self.last = self.distances()

    def mocap(self, name):
        return self.model.body_mocapid[self.model.body(name).id]

    def new_goal(self):
        if self.task.has(Kind.BUTTON):
            self.button = f"button{self.stream.draw_index(4)}"
            self.at["goal0"] = self.at[self.button]
        else:
            self.at["goal0"] = self.stream.draw_goal(np.array(list(self.at.values())))

    def distances(self):
        """The rewarded distances: to the goal; with a box, to the box and from it to the goal."""
        if "box0" not in self.at:
            return [np.linalg.norm(self.at["agent"] - self.at["goal0"])]
        agent, goal = np.append(self.at["agent"], 0.1), np.append(self.at["goal0"], 0.16)
        box = self.data.body("box0").xpos
        return [np.linalg.norm(agent - box), np.linalg.norm(box - goal)]

    def touched(self):
        """Names of the bodies that a contact of MuJoCo's own list joins to the agent."""
        pairs = [
            {self.model.body(self.model.geom_bodyid[g]).name for g in contact.geom}
            for contact in self.data.contact[: self.data.ncon]
        ]
        return {n for pair in pairs if "agent" in pair for n in pair - {"agent"}}

    def step(self, action):
        self.data.ctrl[:] = np.clip(action, -1, 1)
        for _ in range(10):
            circle = 0.35 * np.array([np.sin(self.data.time), np.cos(self.data.time)])
            for n in (n for n in self.free if n.startswith("gremlin")):
                self.data.mocap_pos[self.mocap(n + "target")] = *(self.spawn[n] + circle), 0.2
            mujoco.mj_step(self.model, self.data)
        mujoco.mj_forward(self.model, self.data)
        self.stream.skip_steps(1)
        self.at["agent"] = self.data.qpos[:2].copy()
        for k, n in enumerate(self.free):
            self.at[n] = self.data.qpos[3 + 7 * k : 5 + 7 * k].copy()

        touched, kinds = self.touched(), {kind.value for kind in self.task.constrained}
        radius = 0.3 if "box0" in self.at else 0.2
        near = {n for n, xy in self.at.items() if np.linalg.norm(xy - self.at["agent"]) < radius}
        events = {n[:-1] for n in near if n.startswith("hazard")}
        events |= {n[:-1] for n in touched if n.startswith(("gremlin", "vase", "pillar"))}
        if self.task.has(Kind.BUTTON) and self.timer == 0:
            events |= {n[:-1] for n in touched if n.startswith("button") and n != self.button}
        if any(np.linalg.norm(self.data.joint(k).qvel[:3]) >= 1e-4 for k in self.vases):
            events.add("vase")
        events &= kinds
        cost = float(bool(events))

        now = self.distances()
        reached = self.button in touched if self.task.has(Kind.BUTTON) else now[-1] <= 0.3
        reward = sum(self.last) - sum(now) + reached
        self.timer = max(0, self.timer - 1)
        if reached:
            events.add("goal")
            self.new_goal()
            self.timer = 10
        self.last = self.distances()
        return self.obs(), reward, cost, events

    def obs(self):
        lidars = []
        heading = self.data.qpos[2]
        for group in self.task.objects:
            bins = np.zeros(16)
            for i in range(group.num):
                ego = complex(*(self.at[f"{group.kind.value}{i}"] - self.at["agent"]))
                ego *= np.exp(-1j * heading)
                position = np.angle(ego) % (2 * np.pi) / (2 * np.pi / 16)
                k, seen = int(position), max(0, 3 - abs(ego)) / 3
                for shift, share in ((0, 1), (1, position - k), (-1, 1 - position + k)):
                    bins[(k + shift) % 16] = max(bins[(k + shift) % 16], share * seen)
            hidden = group.kind is Kind.BUTTON and self.timer
            lidars.append(bins * (not hidden))
        return np.concatenate([self.data.sensordata[:12], *lidars])

    def chase(self):
        """A clumsy drive towards the goal, or to the far side of the box and then against it."""
        target = self.at["goal0"]
        if "box0" in self.at:
            away = self.at["box0"] - target
            away /= np.linalg.norm(away)
            offset = self.at["agent"] - self.at["box0"]
            behind, beside = offset @ away, offset @ [-away[1], away[0]]
            there = behind > 0.25 and abs(beside) < 0.15
            target = self.at["box0"] if there else self.at["box0"] + 0.55 * away
        dx, dy = target - self.at["agent"]
        angle = (np.arctan2(dy, dx) - self.data.qpos[2] + np.pi) % (2 * np.pi) - np.pi
        return np.array([0.06 if abs(angle) < 0.6 else 0.01, np.clip(2 * angle, -1, 1)])


@pytest.mark.parametrize(
    ("task", "seeds", "expected"),
    [
        ("Goal0", [2, 17], {"goal"}),
        ("Goal1", [4, 49, 113, 277], {"hazard", "goal"}),
        ("Goal2", [15, 78, 96], {"hazard", "vase", "goal"}),
        ("Push0", [8], {"goal"}),
        ("Push1", [2, 21], {"hazard"}),
        ("Push2", [46, 53], {"hazard", "pillar"}),
        ("Button0", [16, 23], {"goal"}),
        ("Button1", [10, 38, 50, 76, 121], {"hazard", "gremlin", "button", "goal"}),
        ("Button2", [25, 38], {"hazard", "gremlin"}),
    ],
)
def test_the_batch_does_what_a_loop_over_plain_simulations_does(task, seeds, expected):
    """Also: the costs and presses it reports are those of MuJoCo's own contact list.

    Plain ones never leave a resting object out of the physics. Its place then differs by 1e-12,
    which bumps of vases against vases amplify without bounds, so Goal2 leaves none out here.
    """
    envs = SafetyPointVectorEnv(len(seeds), task=task, num_threads=1)
    plain = [PlainSimulation(task, seed) for seed in seeds]
    obs, _ = envs.reset(seed=seeds)
    np.testing.assert_allclose(obs, [p.obs() for p in plain], atol=1e-12)
    seen = set()
    for _ in range(80 if task.startswith("Push") else 60):
        actions = np.array([p.chase() for p in plain])
        if task == "Goal2":
            awake = np.zeros_like(envs.state_dict()["still_steps"])
            envs.load_state_dict(envs.state_dict() | {"still_steps": awake})
        obs, rewards, _, _, infos = envs.step(actions)
        for i, simulation in enumerate(plain):
            plain_obs, reward, cost, events = simulation.step(actions[i])
            np.testing.assert_allclose(obs[i], plain_obs, rtol=1e-9, atol=1e-9)
            assert rewards[i] == pytest.approx(reward, abs=1e-10)
            assert infos["cost"][i] == cost
            seen |= events
    assert seen == expected


@pytest.mark.parametrize("task", TASKS)
def test_one_env_lives_through_exactly_what_its_copy_in_a_batch_does(task):
    envs, env = SafetyPointVectorEnv(3, task=task, num_threads=1), SafetyPointEnv(task=task)
    batch_obs, _ = envs.reset(seed=5)
    obs, info = env.reset(seed=7)
    np.testing.assert_array_equal(obs, batch_obs[2])
    assert info == {"cost": 0.0}
    for actions in random_actions(25, 3):
        batch_obs, rewards, _, _, infos = envs.step(actions)
        obs, reward, terminated, truncated, info = env.step(actions[2])
        np.testing.assert_array_equal(obs, batch_obs[2])
        assert (reward, info) == (rewards[2], {"cost": infos["cost"][2]})
        assert not terminated
        assert not truncated


@pytest.mark.parametrize("task", TASKS)
def test_results_do_not_depend_on_the_number_of_threads(task):
    one, three = (SafetyPointVectorEnv(5, task=task, num_threads=n) for n in (1, 3))
    np.testing.assert_array_equal(one.reset(seed=0)[0], three.reset(seed=0)[0])
    for actions in random_actions(20, 5):
        for a, b in zip(one.step(actions)[:2], three.step(actions)[:2], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("task", TASKS)
def test_both_autoreset_modes_see_the_same_transitions(task):
    """NEXT_STEP spends one more step per episode, which is no transition."""
    actions = random_actions(12, 2)
    same = SafetyPointVectorEnv(
        2, task=task, max_episode_steps=4, autoreset_mode="SameStep", num_threads=1
    )
    late = SafetyPointVectorEnv(2, task=task, max_episode_steps=4, num_threads=1)
    assert same.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert late.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    np.testing.assert_array_equal(same.reset(seed=1)[0], late.reset(seed=1)[0])
    for t in range(12):
        obs, rewards, terminated, truncated, infos = same.step(actions[t])
        late_obs, late_rewards, late_terminated, late_truncated, late_infos = late.step(actions[t])
        np.testing.assert_array_equal(rewards, late_rewards)
        np.testing.assert_array_equal(infos["cost"], late_infos["cost"])
        np.testing.assert_array_equal(terminated, late_terminated)
        np.testing.assert_array_equal(truncated, late_truncated)
        assert truncated.tolist() == [t % 4 == 3] * 2
        if not truncated.any():
            assert "final_obs" not in infos
            np.testing.assert_array_equal(obs, late_obs)
            continue
        np.testing.assert_array_equal(infos["final_obs"], late_obs)
        assert infos["_final_obs"].tolist() == [True, True]
        assert "final_obs" not in late_infos
        # The action of the step that resets is ignored, and nothing of the reset is rewarded.
        late_obs, *outcome, late_infos = late.step(np.full((2, 2), 1.0))
        np.testing.assert_array_equal(obs, late_obs)
        assert not np.any(outcome)
        assert late_infos["cost"].tolist() == [0, 0]


def test_copies_whose_episodes_end_apart_are_reset_apart():
    """A copy that terminates early is reset alone; its neighbours lose no step."""
    envs = SafetyPointVectorEnv(3, max_episode_steps=6, num_threads=1)
    plain = SafetyPointVectorEnv(3, max_episode_steps=100, num_threads=1)
    obs, _ = envs.reset(seed=0)
    plain.reset(seed=0)
    state = envs.state_dict()
    state["elapsed"][1] = 4  # as if it had begun earlier
    envs.load_state_dict(state)
    actions = random_actions(4, 3)
    for t in range(4):
        obs, rewards, _, truncated, _ = envs.step(actions[t])
        expected, expected_rewards, *_ = plain.step(actions[t])
        np.testing.assert_array_equal(obs[[0, 2]], expected[[0, 2]])
        np.testing.assert_array_equal(rewards[[0, 2]], expected_rewards[[0, 2]])
        assert truncated.tolist() == [False, t == 1, False]
        if t == 2:
            assert rewards[1] == 0
            np.testing.assert_array_equal(obs[1, 3:9], np.zeros(6))  # at rest again


def test_an_episode_has_the_length_that_was_asked_for():
    envs = SafetyPointVectorEnv(2, max_episode_steps=3, num_threads=1)
    envs.reset(seed=0)
    ends = [envs.step(np.zeros((2, 2)))[3].tolist() for _ in range(8)]
    assert [end[0] for end in ends] == [False, False, True, False, False, False, True, False]


@pytest.mark.parametrize("task", TASKS)
def test_spaces_hold_what_the_envs_return(task):
    envs = SafetyPointVectorEnv(2, task=task, num_threads=1)
    obs, infos = envs.reset(seed=0)
    assert envs.observation_space.shape == obs.shape == (2, OBS_DIM[task])
    assert envs.action_space.shape == (2, 2)
    assert obs in envs.observation_space
    assert infos["cost"].tolist() == [0, 0]
    obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
    assert obs in envs.observation_space
    assert obs.dtype == rewards.dtype == infos["cost"].dtype == np.float64
    assert terminated.dtype == truncated.dtype == infos["_cost"].dtype == np.bool_


def test_the_single_env_passes_gymnasiums_own_check():
    env = gym.wrappers.TimeLimit(SafetyPointEnv(task="Button1"), 5)
    with pytest.warns(UserWarning, match="minimum value is -infinity|maximum value is infinity"):
        check_env(env.unwrapped, skip_render_check=True)


def test_thrust_beyond_a_twentieth_changes_nothing():
    """The force is limited to 0.05 before the gear, so 0.05, 1 and 7 push alike."""
    envs = SafetyPointVectorEnv(3, num_threads=1)
    envs.reset(seed=[0, 0, 0])
    for _ in range(5):
        obs, *_ = envs.step(np.array([[0.05, 0.0], [1.0, 0.0], [7.0, 0.0]]))
    np.testing.assert_array_equal(obs[0], obs[1])
    np.testing.assert_array_equal(obs[1], obs[2])
    assert obs[0, 3] > 0.01  # it does move forward


def test_an_agent_at_rest_feels_gravity_and_nothing_else():
    obs, _ = SafetyPointEnv().reset(seed=0)
    np.testing.assert_allclose(obs[:9], [0, 0, 9.81, 0, 0, 0, 0, 0, 0], atol=1e-9)
    assert np.linalg.norm(obs[9:12]) == pytest.approx(0.5)  # the magnetic field


def test_a_goal_that_cannot_be_placed_again_ends_the_episode(monkeypatch):
    """In this square only corners are 0.7 apart: from the middle there is no room for a goal."""
    anywhere = Objects(Kind.GOAL, num=1, size=9.0, keepout=0.3)  # every step reaches it
    task = Task(extent=0.65, objects=(anywhere,), constrained=frozenset())
    monkeypatch.setitem(TASKS, "Tiny", task)
    envs = SafetyPointVectorEnv(2, task="Tiny", num_threads=1)
    envs.reset(seed=0)
    state = envs.state_dict()
    state["qpos"][1, :2] = 0
    envs.load_state_dict(state)
    _, rewards, terminated, truncated, _ = envs.step(np.zeros((2, 2)))
    assert terminated.tolist() == [False, True]
    assert not truncated.any()
    assert rewards[0] == pytest.approx(1, abs=0.01)
    _, rewards, terminated, _, _ = envs.step(np.zeros((2, 2)))
    assert rewards[1] == 0
    assert not terminated.any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_threads": -1}, "num_threads must be >= 0, got -1; 0 takes one thread per CPU"),
        ({"task": "Gaol1"}, "one of Goal0, .*, Button2, got 'Gaol1'; did you mean 'Goal1'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SafetyPointVectorEnv(**{"num_envs": 2, **kwargs})


def test_stepping_some_copies_leaves_the_others_alone():
    simulation = NavigationSimulation("Button1", num_envs=3, num_threads=1)
    simulation.seed([0, 1, 2])
    simulation.reset(np.arange(3))
    before = simulation.observe(np.arange(3))
    simulation.step(np.array([1]), np.ones((1, 2)))
    after = simulation.observe(np.arange(3))
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert (after[1] != before[1]).any()
