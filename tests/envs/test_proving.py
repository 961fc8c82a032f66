"""The proving ground: its contract, its scripted policies, and one motion alone and in a batch."""

import subprocess
import sys
from functools import partial
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from pbcrl.spaces import names_of
from pbcrl.trees import like_inputs
from pbcrl_envs import check_cost_env, check_cost_vector_env, cost_limit
from pbcrl_envs.proving import DEVELOPMENT, GROUND, SEALED, ProvingEnv, ProvingVectorEnv
from pbcrl_envs.proving.envs import ALL
from pbcrl_envs.tasks import PROVING

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
HIGHWAY = ["Merge", "Highway"]
each_mode = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
each_batched = pytest.mark.parametrize("name", ALL)
each_own = pytest.mark.parametrize("name", PROVING)


class Played(NamedTuple):
    returns: np.ndarray
    costs: np.ndarray


def play(name, policy, *, episodes):
    """Returns and costs, (episodes,) each, of one episode per seed, each in an env of its own."""
    entry = GROUND[name]
    envs = [gymnasium.make(entry.env_id) for _ in range(episodes)]
    obs = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(envs)])
    returns, costs, alive = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        actions = policy(obs).astype(np.float32)
        for i in np.flatnonzero(alive):
            obs[i], reward, terminated, truncated, info = envs[i].step(actions[i])
            returns[i] += reward
            costs[i] += info["cost"]
            alive[i] = not (terminated or truncated)
    return Played(returns, costs)


def play_batch(name, policy, *, episodes):
    """The same of a batch."""
    entry = GROUND[name]
    envs = gymnasium.make_vec(entry.env_id, episodes, autoreset_mode=SAME_STEP)
    obs, _ = envs.reset(seed=0)
    returns, costs, alive = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, bool)
    for _ in range(entry.horizon):
        obs, rewards, terminations, truncations, infos = envs.step(policy(obs))
        returns += alive * rewards
        costs += alive * infos["cost"]
        alive &= ~(terminations | truncations)
    assert not alive.any()
    return Played(returns, costs)


def check_costs(name, player, *, episodes):
    """Keeping the limit clearly, and breaking it several times over."""
    entry = GROUND[name]
    safe = player(name, entry.safe, episodes=episodes)
    reckless = player(name, entry.reckless, episodes=episodes)
    assert safe.costs.mean() <= 0.75 * entry.limit
    assert reckless.costs.mean() > 4 * entry.limit
    return safe, reckless


def check_policies(name, player, *, episodes):
    """The same, for more return."""
    safe, reckless = check_costs(name, player, episodes=episodes)
    assert reckless.returns.mean() > safe.returns.mean()
    return safe, reckless


# -- The table -------------------------------------------------------------------------------------


def test_each_task_has_one_limit_and_one_horizon_wherever_they_stand():
    for name, entry in GROUND.items():
        assert gymnasium.spec(entry.env_id).max_episode_steps == entry.horizon
        assert cost_limit(entry.env_id) == entry.limit
        if name not in HIGHWAY:
            assert (entry.horizon, entry.limit) == PROVING[name]


def test_half_of_the_ground_is_sealed():
    sealed = {name for name, entry in GROUND.items() if entry.sealed}
    assert sealed == {*SEALED, "Ice", "Highway"}
    assert set(GROUND) - sealed == {*DEVELOPMENT, "Merge"}


def test_the_table_is_listed_without_highway_env():
    listing = (
        "import sys; sys.modules['highway_env'] = None; "
        "from pbcrl_envs.proving import GROUND; print(len(GROUND))"
    )
    run = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True)
    assert run.stdout.strip() == str(len(GROUND)), run.stderr


# -- The trade-off ---------------------------------------------------------------------------------


@each_batched
def test_scripted_policies_keep_the_limit_and_break_it_for_more_return(name):
    safe, reckless = check_policies(name, play_batch, episodes=100)
    # Not by chance: the difference is many standard errors.
    spread = np.std(reckless.returns - safe.returns) / 10
    assert np.mean(reckless.returns - safe.returns) > 5 * spread


def test_those_of_the_plain_env_do_so_too():
    safe, reckless = check_policies("Ice", play, episodes=100)
    assert (reckless.returns > safe.returns).all()
    assert set(reckless.costs) == {0.0, 1.0}  # a catastrophe, at most once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Merge", pytest.param("Highway", marks=pytest.mark.nightly)])
def test_those_of_highway_env_keep_the_limit_and_break_it(name):
    pytest.importorskip("highway_env")
    check_costs(name, play, episodes=4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", HIGHWAY)
def test_those_of_highway_env_do_so_for_more_return(name):
    """Highway's differ by a tenth only, which four episodes do not show."""
    pytest.importorskip("highway_env")
    check_policies(name, play, episodes=20)


@each_own
def test_what_is_played_is_within_the_bounds_of_the_actions(name):
    entry = GROUND[name]
    env = gymnasium.make(entry.env_id)
    obs = np.random.default_rng(0).normal(size=(500, *env.observation_space.shape))
    for policy in entry.safe, entry.reckless:
        actions = policy(obs.astype(np.float32)).astype(np.float32)
        assert actions.shape == (500, *env.action_space.shape)
        assert (actions >= env.action_space.low).all()
        assert (actions <= env.action_space.high).all()


def test_a_picture_is_refused_at_the_door():
    for make in (ProvingEnv, partial(ProvingVectorEnv, 2)):
        with pytest.raises(ValueError, match=r"render_mode of .* must be one of None, got"):
            make(task="Cruise", render_mode="rgb_array")


# -- The contract ----------------------------------------------------------------------------------


@each_own
def test_each_single_env_keeps_the_contract(name):
    check_cost_env(gymnasium.make(GROUND[name].env_id))


@each_batched
@each_mode
def test_each_batch_keeps_the_contract(name, mode):
    check_cost_vector_env(gymnasium.make_vec(GROUND[name].env_id, 3, autoreset_mode=mode))


@each_batched
@each_mode
def test_env_i_of_a_batch_does_what_the_single_env_with_its_seed_does(name, mode):
    """Bit for bit, over ends and resets; under the reckless policy, in part, to meet costs."""
    num_envs, steps, rng = 5, 450, np.random.default_rng(0)
    env_id, reckless = GROUND[name].env_id, GROUND[name].reckless
    envs = gymnasium.make_vec(env_id, num_envs, autoreset_mode=mode)
    singles = [gymnasium.make(env_id) for _ in range(num_envs)]
    obs, _ = envs.reset(seed=7)
    for i, single in enumerate(singles):
        np.testing.assert_array_equal(obs[i], single.reset(seed=7 + i)[0])
    low, high = envs.single_action_space.low, envs.single_action_space.high
    ended, costs = np.zeros(num_envs, bool), 0.0
    for number in range(steps):
        random = rng.uniform(low, high, (num_envs, len(low)))
        mixed = np.where(number % 4 == 0, random, reckless(obs)).astype(np.float32)
        actions = mixed.clip(low, high)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        costs += infos["cost"].sum()
        for i, single in enumerate(singles):
            if ended[i] and mode is NEXT_STEP:
                np.testing.assert_array_equal(obs[i], single.reset()[0])
                continue
            step_obs, reward, terminated, truncated, info = single.step(actions[i])
            done = terminated or truncated
            last = infos["final_obs"][i] if done and mode is SAME_STEP else obs[i]
            np.testing.assert_array_equal(last, step_obs)
            assert (rewards[i], infos["cost"][i]) == (reward, info["cost"])
            assert (terminations[i], truncations[i]) == (terminated, truncated)
            if done and mode is SAME_STEP:
                np.testing.assert_array_equal(obs[i], single.reset()[0])
        ended = terminations | truncations
    assert costs > 0


@each_batched
def test_going_on_from_a_state_is_not_having_stopped(name):
    """Bit by bit, over resets, and in another order of the copies."""
    envs, fresh = (
        gymnasium.make_vec(GROUND[name].env_id, 6, max_episode_steps=20) for _ in range(2)
    )
    order = [3, 0, 5, 4, 1, 2]
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(15):
        envs.step(envs.action_space.sample())
    fresh.load_state_dict(envs.state_dict(order))
    for _ in range(30):
        actions = envs.action_space.sample()
        *expected, expected_infos = envs.step(actions)
        *found, infos = fresh.step(actions[order])
        for array, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, other[order])
        np.testing.assert_array_equal(infos["cost"], expected_infos["cost"][order])


# -- Single tasks ----------------------------------------------------------------------------------


def test_the_cost_of_haste_in_the_channel_is_proportional_to_the_excess():
    rows = np.tile([np.pi / 2, 0.0, 0.0, 0.0, 1.0], (3, 1))  # in the middle of a bend
    rows[:, 4] = 0.4, 0.8, 1.2
    cost = ALL["Channel"].advance(rows, np.full((3, 2), [0.5, 0.4])).cost
    # 0.9 of the speed and 0.1 of 1.0 that the throttle asks for; 0.5 is allowed.
    np.testing.assert_allclose(cost, [0.0, 0.32, 0.68], atol=1e-3)


def test_a_broken_cable_ends_the_tow_and_takes_ten():
    rows = np.array([[8.0, 8.0, stretch, 0, 0, 0, 0, 0, 0] for stretch in (4.9, 7.0)])
    step = ALL["Tow"].advance(rows, np.array([[36.0, 0.0125]] * 2))
    assert step.terminated.tolist() == [False, True]
    assert step.cost.tolist() == [1.0, 1.0]
    assert step.reward[0] - step.reward[1] == pytest.approx(10, abs=0.1)


def test_rewards_and_costs_of_the_storage_differ_by_seven_orders_of_magnitude():
    played = play_batch("Storage", GROUND["Storage"].reckless, episodes=20)
    assert played.returns.mean() > 1e6
    assert played.costs.max() < 0.4


def test_rays_of_the_thicket_are_one_group_and_tell_how_far_a_bush_is():
    env = gymnasium.make("ProvingThicket-v0").unwrapped
    env.reset(seed=0)
    state = env.state_dict()
    row = state["rows"].copy()
    row[:4] = 0.0
    row[25:43] = np.tile([9.0, 9.0], 9)  # out of sight
    row[25:27] = 0.0, -0.7  # a bush below, of radius 0.15
    env.load_state_dict(state | {"rows": row})
    obs = env._simulation.observe(np.array([0]))[0]
    assert set(like_inputs(names_of(env))) == {"range"}
    ranges = {name: x for name, x in zip(names_of(env), obs, strict=False) if "range" in name}
    assert min(ranges, key=ranges.get) == "range[24]"  # three quarters of a turn
    assert ranges["range[24]"] == pytest.approx(0.55)
    assert ranges["range[8]"] == 1.0


def test_the_gauges_of_the_thicket_move_whatever_is_done():
    envs = gymnasium.make_vec("ProvingThicket-v0", 2)
    envs.reset(seed=[3, 3])
    for _ in range(20):
        obs, *_ = envs.step(np.array([[1.0, 0.0], [-1.0, 0.5]]))
    np.testing.assert_array_equal(obs[0, 36:], obs[1, 36:])
    assert (obs[0, :4] != obs[1, :4]).all()


# -- The plain env ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*A Box observation space m.* value is:UserWarning")
def test_the_plain_env_satisfies_gymnasiums_own_checker_and_has_names():
    env = gymnasium.make("ProvingIce-v0")
    check_env(env.unwrapped, skip_render_check=True)
    assert gymnasium.spec("ProvingIce-v0").vector_entry_point is None
    assert len(names_of(env)) == 7 + 2
    assert names_of(gymnasium.make_vec("ProvingIce-v0", 2)) == names_of(env)


def test_whoever_broke_in_goes_on_and_pays_no_more():
    env = gymnasium.make("ProvingIce-v0")
    obs, _ = env.reset(seed=0)
    costs, ways = [], []
    for _ in range(100):
        obs, way, *_, info = env.step(np.array([1.0, 0.0], np.float32))
        costs.append(info["cost"])
        ways.append(way)
        assert obs[-1] == sum(costs)
    assert sum(costs) == 1
    after = costs.index(1.0) + 1
    assert ways[after] == pytest.approx(0.1 * 0.2 * 1.5)  # from a standstill
    assert ways[-1] == pytest.approx(0.15, abs=1e-3)


def test_the_plain_env_begins_with_a_reset():
    with pytest.raises(ResetNeeded, match=r"an episode begins with reset\(\)"):
        gymnasium.make("ProvingIce-v0").unwrapped.step(np.zeros(2, np.float32))


def test_the_plain_env_refuses_an_action_that_is_no_number():
    """Nothing was ever costly again after one."""
    env = gymnasium.make("ProvingIce-v0").unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match="actions must be finite"):
        env.step(np.array([np.nan, 0.0]))
