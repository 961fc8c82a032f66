"""States of the robotics tasks: going on from one, refusing others, and what divergence leaves."""

from dataclasses import replace

import numpy as np
import pytest

from pbcrl_envs.robotics import SafetyPointEnv, SafetyPointVectorEnv
from pbcrl_envs.robotics.tasks import TASKS, Kind

MODES = ("NextStep", "SameStep")


def make(task, num_envs=3, *, mode="NextStep", num_threads=1, max_episode_steps=9):
    return SafetyPointVectorEnv(
        num_envs,
        task=task,
        max_episode_steps=max_episode_steps,
        autoreset_mode=mode,
        num_threads=num_threads,
    )


def random_actions(steps, num_envs, *, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, num_envs, 2))


def everything(envs, actions):
    """All that the steps return, in one list of arrays."""
    told = []
    for action in actions:
        *arrays, infos = envs.step(action)
        told += [*arrays, *(infos[key] for key in sorted(infos))]
    return told


def assert_same(told, expected):
    assert len(told) == len(expected)
    for array, other in zip(told, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def assert_same_state(state, expected):
    assert list(state) == list(expected)
    assert_same(list(state.values()), list(expected.values()))


@pytest.fixture
def easy(monkeypatch):
    """Each task with goals so large that they are reached, and drawn again, all the time."""

    def name(task):
        objects = tuple(
            replace(group, size=1.2) if group.kind is Kind.GOAL else group
            for group in TASKS[task].objects
        )
        monkeypatch.setitem(TASKS, f"Easy{task}", replace(TASKS[task], objects=objects))
        return f"Easy{task}"

    return name


@pytest.mark.parametrize(
    ("task", "mode"),
    [(task, "SameStep") for task in TASKS] + [("Push1", "NextStep"), ("Button1", "NextStep")],
)
def test_going_on_from_a_state_is_not_having_stopped_bit_by_bit(task, mode, easy):
    """Over resets and new goals, in a fresh object, on another number of threads."""
    envs = make(easy(task), mode=mode)
    envs.reset(seed=3)
    actions = random_actions(26, 3)
    everything(envs, actions[:7])
    state = envs.state_dict()
    if task.startswith("Button"):  # beside the goal button of each copy
        buttons = state["positions"][np.arange(3), 1 + state["goal_button"]]
        state["qpos"][:, :2] = buttons + np.array([0.15, 0.1])
        envs.load_state_dict(state)
    expected = everything(envs, actions[7:])
    fresh = make(easy(task), mode=mode, num_threads=2)
    fresh.load_state_dict(state)
    assert_same(everything(fresh, actions[7:]), expected)
    assert_same_state(fresh.state_dict(), envs.state_dict())
    assert max(reward.max() for reward in expected if reward.dtype == float) > 0.9  # goals reached


@pytest.mark.parametrize("mode", MODES)
def test_a_state_taken_where_episodes_end_goes_on_with_the_reset(mode):
    envs, fresh = make("Goal1", mode=mode), make("Goal1", mode=mode)
    envs.reset(seed=0)
    actions = random_actions(20, 3)
    everything(envs, actions[:9])
    state = envs.state_dict()
    assert state["finished"].tolist() == [mode == "NextStep"] * 3
    fresh.load_state_dict(state)
    assert_same(everything(fresh, actions[9:]), everything(envs, actions[9:]))


def test_asking_for_a_state_changes_nothing():
    asked, left_alone = make("Push1"), make("Push1")
    asked.reset(seed=1)
    left_alone.reset(seed=1)
    actions = random_actions(25, 3)
    for action in actions:
        asked.state_dict()
        assert_same(everything(asked, [action]), everything(left_alone, [action]))


@pytest.mark.parametrize("task", ["Goal2", "Push2", "Button1"])
def test_copies_can_be_moved_to_other_places_of_other_batches_and_to_single_envs(task):
    envs, larger = make(task), make(task, 5, num_threads=2)
    envs.reset(seed=0)
    larger.reset(seed=50)
    everything(envs, random_actions(4, 3))
    states = envs.state_dict([2, 0])
    untouched = larger.state_dict([0, 2, 3])
    larger.load_state_dict(states, [1, 4])
    assert_same_state(larger.state_dict([1, 4]), envs.state_dict([2, 0]))
    assert_same_state(larger.state_dict([0, 2, 3]), untouched)

    single = SafetyPointEnv(task=task)
    single.load_state_dict({key: array[0] for key, array in states.items()})
    for action in random_actions(4, 1, seed=1)[:, 0]:
        obs, reward, *_, info = single.step(action)
        batch_obs, rewards, *_, infos = larger.step(np.tile(action, (5, 1)))
        expected, expected_rewards, *_ = envs.step(np.tile(action, (3, 1)))
        np.testing.assert_array_equal(obs, batch_obs[1])
        np.testing.assert_array_equal(batch_obs[[1, 4]], expected[[2, 0]])
        assert reward == rewards[1] == expected_rewards[2]
        assert info["cost"] == infos["cost"][1]
    row = {key: array[1] for key, array in larger.state_dict().items()}
    assert_same_state(single.state_dict(), row)
    single.reset()
    larger.load_state_dict({key: array[None] for key, array in single.state_dict().items()}, [3])


def spoiled(state, key, value):
    array = state[key].astype(np.float64)
    array.flat[0] = value
    return {**state, key: array}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s | {"task": s["task"] + 1}, "of SafetyPointPush1, but it is of another task"),
        (lambda s: {k: v for k, v in s.items() if k != "qvel"}, r"\['qvel'\] are missing and \[\]"),
        (lambda s: s | {"extra": s["qvel"]}, r"\[\] are missing and \['extra'\] unknown"),
        (lambda s: s | {"qpos": s["qpos"][:2]}, r"'qpos' .* must have shape \(3, 10\), got \(2, 1"),
        (lambda s: spoiled(s, "qvel", np.nan), "'qvel' .* must hold finite numbers"),
        (lambda s: spoiled(s, "positions", np.inf), "'positions' .* must hold finite numbers"),
        (lambda s: spoiled(s, "elapsed", -1), r"'elapsed' .* must be in \[0, inf\]"),
        (lambda s: spoiled(s, "elapsed", 0.5), "'elapsed' .* must fit into int64"),
        (lambda s: spoiled(s, "stream_words", -1), "'stream_words' .* must fit into uint32"),
        (lambda s: spoiled(s, "stream_position", 700), r"must be in \[0, 624\], got \[700"),
        (lambda s: spoiled(s, "goal_button", 1), r"'goal_button' .* must be in \[0, 0\]"),
        (lambda s: spoiled(s, "qvel", 1e300), "the physics can go on from, .*look for huge"),
    ],
)
def test_a_wrong_state_is_refused_by_name_and_changes_nothing(
    spoil, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a log file in the working folder
    envs, other = make("Push1"), make("Push1")
    envs.reset(seed=0)
    other.reset(seed=9)
    before = envs.state_dict()
    with pytest.raises(ValueError, match=message):
        envs.load_state_dict(spoil(other.state_dict()))
    assert_same_state(envs.state_dict(), before)
    actions = random_actions(3, 3)
    untouched = make("Push1")
    untouched.reset(seed=0)
    assert_same(everything(envs, actions), everything(untouched, actions))


def spinning(state, rows=...):
    """The state with some agents spinning faster than the physics can bear."""
    state["qvel"][rows, 2] = 1e7
    return state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", ["Goal1", "Push1", "Button1"])
def test_a_diverged_copy_ends_its_episode_alone_with_its_last_sound_observation(
    task, mode, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    envs, plain = make(task, mode=mode), make(task, mode=mode)
    for env in (envs, plain):
        env.reset(seed=0)
        before, *_ = everything(env, random_actions(1, 3))
    envs.load_state_dict(spinning(envs.state_dict(), [1]))
    actions = random_actions(6, 3, seed=1)
    with pytest.warns(RuntimeWarning, match=r"diverged in env\(s\) \[1\].*counted in num_diverged"):
        obs, rewards, terminated, truncated, infos = envs.step(actions[0])
    expected, expected_rewards, *_, expected_infos = plain.step(actions[0])
    assert infos["diverged"].tolist() == truncated.tolist() == [False, True, False]
    assert not terminated.any()
    assert (rewards[1], infos["cost"][1], envs.num_diverged) == (0, 0, 1)
    last = obs if mode == "NextStep" else infos["final_obs"]
    assert last[1, 8] == pytest.approx(1e7)  # the gyro before the step
    np.testing.assert_array_equal(last[1, 12:], before[1, 12:])  # and what the lidars saw
    others = [0, 2]
    for action in actions[1:]:
        np.testing.assert_array_equal(obs[others], expected[others])
        np.testing.assert_array_equal(rewards[others], expected_rewards[others])
        np.testing.assert_array_equal(infos["cost"][others], expected_infos["cost"][others])
        obs, rewards, terminated, truncated, infos = envs.step(action)
        expected, expected_rewards, *_, expected_infos = plain.step(action)
        assert "diverged" not in infos
        assert np.isfinite(obs).all()
        assert not truncated.any()
    # A reset has given the copy a new episode from its stream, where that was.
    steps = {"NextStep": 4, "SameStep": 5}[mode]
    assert envs.state_dict()["elapsed"].tolist() == [7, steps, 7]


def test_divergence_is_warned_of_once_and_counted_always(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    envs = make("Goal1")
    envs.reset(seed=0)
    sound = envs.state_dict()
    spun = spinning(envs.state_dict(), [0, 2])
    envs.load_state_dict(spun)
    with pytest.warns(RuntimeWarning, match=r"diverged in env\(s\) \[0, 2\]"):
        envs.step(np.zeros((3, 2)))
    envs.load_state_dict(spun)
    assert envs.step(np.zeros((3, 2)))[4]["diverged"].tolist() == [True, False, True]
    assert envs.num_diverged == 4
    # A sound state makes the copy as good as new.
    envs.load_state_dict(sound)
    assert "diverged" not in envs.step(np.zeros((3, 2)))[4]
    assert envs.num_diverged == 4


def test_a_diverged_single_env_ends_its_episode_with_its_last_sound_observation(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    env = SafetyPointEnv(task="Goal2")
    env.reset(seed=0)
    env.load_state_dict(spinning(env.state_dict()))
    with pytest.warns(RuntimeWarning, match=r"diverged in env\(s\) \[0\]"):
        obs, reward, terminated, truncated, info = env.step(np.zeros(2))
    assert (reward, terminated, truncated) == (0, False, True)
    assert info == {"cost": 0.0, "diverged": True}
    assert np.isfinite(obs).all()
    assert obs[8] == pytest.approx(1e7)  # the gyro before the step
    assert env.num_diverged == 1
    env.reset()
    assert env.step(np.zeros(2))[4] == {"cost": 0.0}
