"""What all batches have in common: staggered episodes, states, refusals; one task of each kind.

Of the proving ground it is all tasks: its simulations share their code, but not their numbers.
"""

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

import pbcrl_envs  # noqa: F401 - registers the ids
from pbcrl_envs.proving.envs import ALL

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
each_task = pytest.mark.parametrize(
    "env_id",
    [
        "PointHazards-v0",
        "SafetyPointGoal1-v0",
        "SafetyWalker2dVelocity-v1",
        "DrivingLaneChange-v0",
        *(f"Proving{name}-v0" for name in ALL),
    ],
)
each_mode = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])


def make(env_id, num_envs=2, *, mode=NEXT_STEP, **options):
    return gymnasium.make_vec(env_id, num_envs=num_envs, autoreset_mode=mode, **options)


def still(envs):
    return np.zeros(envs.action_space.shape)


def ends(envs, steps):
    """Numbers of the steps, from 1, in which each env was truncated, and marked as partial."""
    truncated, partial = [[] for _ in range(envs.num_envs)], [[] for _ in range(envs.num_envs)]
    for number in range(1, steps + 1):
        *_, truncations, infos = envs.step(still(envs))
        for found, mask in ((truncated, truncations), (partial, infos.get("partial", []))):
            for i in np.flatnonzero(mask):
                found[i].append(number)
    return truncated, partial


# -- Staggered episodes ----------------------------------------------------------------------------


@each_task
@each_mode
def test_staggered_first_episodes_end_after_their_share_of_the_limit_and_later_ones_in_full(
    env_id, mode
):
    """Of 10 steps a third rounds up to 4, two thirds to 7; the last env has a whole episode."""
    envs = make(env_id, 3, mode=mode, max_episode_steps=10)
    envs.reset(seed=0, options={"stagger": True})
    truncated, partial = ends(envs, 27)
    next_after = 10 if mode is SAME_STEP else 11  # NEXT_STEP spends a step on the reset
    assert truncated == [list(range(first, 28, next_after)) for first in (4, 7, 10)]
    assert partial == [[4], [7], []]
    # The next reset is an ordinary one.
    envs.reset(seed=0)
    assert ends(envs, 10) == ([[10]] * 3, [[]] * 3)


def test_a_staggered_episode_has_at_least_one_step():
    envs = make("PointHazards-v0", 5, max_episode_steps=2, mode=SAME_STEP)
    envs.reset(seed=0, options={"stagger": True})
    assert ends(envs, 2) == ([[1], [1], [2], [2], [2]], [[1], [1], [], [], []])


@each_task
@each_mode
def test_a_staggered_episode_is_an_ordinary_one_cut_short(env_id, mode):
    """The same steps; the end is a truncation with the last observation where it always is."""
    envs, plain = (make(env_id, mode=mode, max_episode_steps=6) for _ in range(2))
    envs.reset(seed=3, options={"stagger": True})
    plain.reset(seed=3)
    actions = np.random.default_rng(0).uniform(-0.3, 0.3, (3, *envs.action_space.shape))
    for number, action in enumerate(actions, start=1):
        obs, rewards, terminations, truncations, infos = envs.step(action)
        expected, expected_rewards, *_, expected_infos = plain.step(action)
        ended = number == 3
        last = infos["final_obs"] if ended and mode is SAME_STEP else obs
        np.testing.assert_array_equal(last, expected)
        np.testing.assert_array_equal(rewards, expected_rewards)
        np.testing.assert_array_equal(infos["cost"], expected_infos["cost"])
        assert not terminations.any()
        assert truncations.tolist() == [ended, False]
    assert infos["partial"].tolist() == [True, False]
    if mode is SAME_STEP:
        assert infos["_final_obs"].tolist() == [True, False]


def test_an_episode_that_the_task_ends_before_the_shortened_limit_is_a_whole_one():
    envs = make("DrivingLaneChange-v0", mode=SAME_STEP)
    envs.reset(seed=0, options={"stagger": True})
    for _ in range(49):  # hard to the right, off the road
        _, _, terminations, truncations, infos = envs.step(np.ones((2, 2)))
        assert "partial" not in infos
        if terminations.any():
            break
    assert terminations.all()
    assert not truncations.any()


@each_task
def test_a_state_holds_the_stagger(env_id):
    envs, fresh = (make(env_id, 3, max_episode_steps=9, mode=SAME_STEP) for _ in range(2))
    envs.reset(seed=0, options={"stagger": True})
    ends(envs, 4)
    state = envs.state_dict()
    assert state["cut"].tolist() == [0, 3, 0]  # of limits 3, 6 and 9 the first has passed
    fresh.load_state_dict(state)
    assert ends(fresh, 6) == ends(envs, 6) == ([[], [2], [5]], [[], [2], []])


@each_task
@pytest.mark.parametrize("options", [{"stager": True}, {"stagger": 0.5}, {"stagger": True, "x": 1}])
def test_other_reset_options_are_refused(env_id, options):
    with pytest.raises(ValueError, match=r"only reset option of a batch of .* is stagger"):
        make(env_id).reset(options=options)


# -- States ----------------------------------------------------------------------------------------


@each_task
def test_a_copy_that_was_loaded_as_finished_is_reset_once_also_in_same_step_mode(env_id):
    late, envs = (
        make(env_id, max_episode_steps=3),
        make(env_id, max_episode_steps=3, mode=SAME_STEP),
    )
    late.reset(seed=0)
    ends(late, 3)
    envs.load_state_dict(late.state_dict())
    assert ends(envs, 4)[0] == [[4], [4]]  # a reset, then three steps


@each_task
def test_a_batch_steps_when_every_copy_was_reset_or_loaded(env_id):
    envs, other = make(env_id), make(env_id, 1)
    with pytest.raises(
        ResetNeeded, match=r"begins with reset\(\) .* env\(s\) \[0, 1\] saw neither"
    ):
        envs.state_dict()
    other.reset(seed=0)
    envs.load_state_dict(other.state_dict(), ids=[1])
    with pytest.raises(ResetNeeded, match=r"env\(s\) \[0\] saw neither; call reset\(\)"):
        envs.step(still(envs))
    envs.load_state_dict(other.state_dict(), ids=[0])
    obs, *_ = envs.step(still(envs))
    np.testing.assert_array_equal(obs[0], obs[1])


@each_task
@pytest.mark.parametrize("ids", [[0, 0], [2], [-1], [0.5], [[0]]])
def test_copies_are_chosen_by_different_indices(env_id, ids):
    envs = make(env_id)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"different integers in \[0, 2\), got .*leave ids out"):
        envs.state_dict(ids)
    with pytest.raises(ValueError, match=r"different integers in \[0, 2\), got .*leave ids out"):
        envs.load_state_dict(envs.state_dict(), ids)


@each_task
def test_a_state_survives_a_file_without_pickle(env_id, tmp_path):
    envs = make(env_id)
    envs.reset(seed=0)
    np.savez(tmp_path / "state.npz", **envs.state_dict())
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        envs.load_state_dict(dict(file))


# -- Arguments -------------------------------------------------------------------------------------


@each_task
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1, got 0"),
        ({"mode": AutoresetMode.DISABLED}, "one of NextStep, SameStep, got .*DISABLED"),
        ({"mode": "sometimes"}, "autoreset_mode must be one of NextStep, SameStep"),
        ({"render_mode": "human"}, "must be one of 'rgb_array', None, got 'human'; with None"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(env_id, options, message):
    if env_id.startswith("Proving"):  # which draw nothing
        message = message.replace("'rgb_array', None", "None")
    with pytest.raises(ValueError, match=message):
        make(env_id, **options)


@each_task
def test_seeds_count_up_from_one_int_and_none_lets_the_streams_run_on(env_id):
    envs = make(env_id)
    first, _ = envs.reset(seed=8)
    second, _ = envs.reset()
    np.testing.assert_array_equal(envs.reset(seed=np.array([8, 9]))[0], first)
    np.testing.assert_array_equal(envs.reset()[0], second)
    assert (first != second).any()
    assert (first[0] != first[1]).any()
    np.testing.assert_array_equal(envs.reset(seed=[None, 9])[0][1], first[1])  # one seeded alone
    with pytest.raises(ValueError, match="one entry per env, got 3 seeds for 2 envs"):
        envs.reset(seed=[1, 2, 3])


@each_task
def test_wrong_actions_are_refused_and_move_nothing(env_id):
    envs, plain = make(env_id), make(env_id)
    for e in (envs, plain):
        e.reset(seed=0)
    broken = still(envs)
    broken[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"1 NaN or infinite .* envs \[1\]; look for the update"):
        envs.step(broken)
    with pytest.raises(ValueError, match=r"must have shape \(2, \d\), got \(2,\); each action is"):
        envs.step(np.zeros(2))
    np.testing.assert_array_equal(envs.step(still(envs))[0], plain.step(still(plain))[0])


@each_task
def test_returned_arrays_stay_as_they_are_when_the_envs_move_on(env_id):
    envs = make(env_id)
    envs.reset(seed=0)
    obs, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
    returned = obs, rewards, terminations, truncations, *infos.values()
    state = envs.state_dict()
    copies = [array.copy() for array in (*returned, *state.values())]
    for _ in range(3):
        envs.step(envs.action_space.sample())
    for array, copy in zip((*returned, *state.values()), copies, strict=True):
        np.testing.assert_array_equal(array, copy)
