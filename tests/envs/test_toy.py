"""PointHazards: hand-worked steps, the two autoreset modes, and one motion for both classes."""

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import pbcrl_envs  # noqa: F401 - registers the ids
from pbcrl_envs.toy import PointHazardsEnv, PointHazardsVectorEnv
from pbcrl_envs.toy.point_hazards import HAZARD_RADIUS, HAZARDS, SPAWN_MARGIN

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


def move_once(position, goal, action):
    """One step of a single point; returns (new position (2,), reward, cost, reached)."""
    env, goal = PointHazardsEnv(), np.array(goal, float)
    env.reset(seed=0)
    env.load_state_dict(env.state_dict() | {"position": np.array(position, float), "goal": goal})
    _, reward, _, _, info = env.step(np.array(action, float))
    state = env.state_dict()
    return state["position"], reward, info["cost"], bool((state["goal"] != goal).any())


def unit_speed(direction):
    """Scale directions (N, 2) so that the faster axis moves at full speed, slower near 0."""
    return direction / np.maximum(np.abs(direction).max(axis=1, keepdims=True), 0.1)


def drive_straight(obs):
    """Head for the goal, whatever lies in between. obs (N, 4) -> actions (N, 2)."""
    return unit_speed(obs[:, 2:])


def drive_around(obs, margin=0.06):
    """Head for the goal, or along the tangent of the first hazard on the way to it."""
    position, to_goal = obs[:, :2].astype(float), obs[:, 2:].astype(float)
    radius = HAZARD_RADIUS + margin
    distance = np.linalg.norm(to_goal, axis=1)
    ahead = to_goal / distance[:, None]
    to_hazard = HAZARDS - position[:, None]  # (N, 4, 2)
    along = (to_hazard * ahead[:, None]).sum(axis=2)
    across = ahead[:, None, 0] * to_hazard[..., 1] - ahead[:, None, 1] * to_hazard[..., 0]
    blocking = (along > 0) & (along < distance[:, None]) & (np.abs(across) < radius)
    row, first = np.arange(len(obs)), np.where(blocking, along, np.inf).argmin(axis=1)
    x, y = to_hazard[row, first].T
    side, gap = -np.sign(across[row, first]), np.hypot(x, y)
    steer = np.arcsin(np.minimum(radius / gap, 1)) + np.clip((radius - gap) * 5, 0, 0.6)
    angle = np.arctan2(y, x) + side * steer
    tangent = 0.1 * np.column_stack([np.cos(angle), np.sin(angle)])
    return unit_speed(np.where(blocking.any(axis=1)[:, None], tangent, to_goal))


def play(driver, *, num_envs):
    """Returns and episode costs, (N,) each, of one episode per env."""
    envs = PointHazardsVectorEnv(num_envs, autoreset_mode=SAME_STEP)
    obs, _ = envs.reset(seed=0)
    returns, costs = np.zeros(num_envs), np.zeros(num_envs)
    for _ in range(100):
        obs, rewards, _, truncations, infos = envs.step(driver(obs))
        returns += rewards
        costs += infos["cost"]
    assert truncations.all()
    return returns, costs


# -- One step --------------------------------------------------------------------------------------


def test_a_step_moves_by_a_tenth_of_the_action_and_pays_the_distance_gained():
    position, reward, cost, reached = move_once((0, 0), (0, 0.5), (0, 1))
    np.testing.assert_allclose(position, (0, 0.1))
    assert reward == pytest.approx(0.1)
    assert (cost, reached) == (0, False)


def test_reaching_the_goal_pays_one_more():
    _, reward, _, reached = move_once((0, 0), (0, 0.15), (0, 1))
    assert reward == pytest.approx(0.1 + 1)
    assert reached


def test_moving_away_costs_reward_but_no_cost():
    _, reward, cost, _ = move_once((0, 0), (0, 0.5), (0, -1))
    assert reward == pytest.approx(-0.1)
    assert cost == 0


@pytest.mark.parametrize(("x", "cost"), [(0.19, 0.0), (0.21, 1.0), (0.45, 1.0)])
def test_only_a_step_that_ends_inside_a_hazard_costs_one(x, cost):
    """The disc around (0.45, 0.45) reaches from x = 0.20 to x = 0.70."""
    assert move_once((x, 0.45), (0, 0), (0, 0))[2] == cost


def test_a_step_across_the_edge_of_a_hazard_is_judged_where_it_ends():
    assert move_once((0.15, 0.45), (0, 0), (1, 0))[2] == 1
    assert move_once((0.25, 0.45), (0, 0), (-1, 0))[2] == 0


def test_the_walls_stop_the_point_and_the_bounds_the_action():
    np.testing.assert_array_equal(move_once((0.95, 0), (0, 0), (1, 0))[0], (1, 0))
    env = PointHazardsEnv()
    start, _ = env.reset(seed=1)  # clear of the walls
    moved = env.step(np.array([50, -50], np.float32))[0]
    np.testing.assert_allclose(moved[:2] - start[:2], (0.1, -0.1), atol=1e-6)


def test_starts_and_goals_keep_their_distance_from_hazards_and_fill_the_arena():
    obs, _ = PointHazardsVectorEnv(2000).reset(seed=0)
    for points in (obs[:, :2], obs[:, :2] + obs[:, 2:]):
        gap = np.linalg.norm(points[:, None] - HAZARDS, axis=2)
        assert gap.min() >= HAZARD_RADIUS + SPAWN_MARGIN - 1e-6
        assert (points.min() < -0.99, points.max() > 0.99) == (True, True)
        np.testing.assert_allclose(points.mean(axis=0), 0, atol=0.06)


# -- The trade-off ---------------------------------------------------------------------------------


def test_driving_straight_exceeds_twice_the_limit():
    returns, costs = play(drive_straight, num_envs=300)
    assert costs.mean() > 4 * 5
    assert returns.mean() == pytest.approx(21.5, abs=0.3)


def test_driving_around_keeps_most_of_the_return_at_no_cost():
    straight, _ = play(drive_straight, num_envs=300)
    returns, costs = play(drive_around, num_envs=300)
    assert costs.max() == 0
    assert returns.mean() > 0.85 * straight.mean()


# -- Single and batched ----------------------------------------------------------------------------


def test_the_single_env_satisfies_gymnasiums_own_checker():
    check_env(gymnasium.make("PointHazards-v0", render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_env_i_of_a_batch_moves_as_the_single_env_seeded_with_s_plus_i(mode):
    """Bit for bit, over three episodes, whose later starts come from the same streams."""
    num_envs, seed, rng = 3, 7, np.random.default_rng(0)
    envs = gymnasium.make_vec("PointHazards-v0", num_envs=num_envs, autoreset_mode=mode)
    singles = [gymnasium.make("PointHazards-v0") for _ in range(num_envs)]
    obs, _ = envs.reset(seed=seed)
    for i, single in enumerate(singles):
        np.testing.assert_array_equal(obs[i], single.reset(seed=seed + i)[0])
    for _ in range(3):
        for _ in range(100):
            # Half the way straight, so that goals are reached and redrawn.
            actions = drive_straight(obs) + rng.uniform(-0.5, 0.5, (num_envs, 2))
            actions = actions.astype(np.float32).clip(-1, 1)
            obs, rewards, terminations, truncations, infos = envs.step(actions)
            for i, single in enumerate(singles):
                step_obs, reward, terminated, truncated, info = single.step(actions[i])
                last = infos["final_obs"][i] if truncated and mode is SAME_STEP else obs[i]
                np.testing.assert_array_equal(last, step_obs)
                assert (rewards[i], infos["cost"][i]) == (reward, info["cost"])
                assert (terminations[i], truncations[i]) == (terminated, truncated)
        assert truncations.all()
        if mode is NEXT_STEP:
            obs, *_ = envs.step(actions)
        for i, single in enumerate(singles):
            np.testing.assert_array_equal(obs[i], single.reset()[0])


def test_a_batch_is_repeated_by_its_seed_and_its_envs_differ():
    envs = PointHazardsVectorEnv(4)
    first, _ = envs.reset(seed=3)
    again, _ = envs.reset(seed=3)
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first, axis=0)) == 4
    assert not np.array_equal(envs.reset()[0], first)


# -- Autoreset -------------------------------------------------------------------------------------


def test_in_next_step_mode_the_step_after_an_end_only_resets():
    envs = PointHazardsVectorEnv(2, max_episode_steps=2)
    envs.reset(seed=0)
    still, moving = np.zeros((2, 2)), np.ones((2, 2))
    ends = [envs.step(still)[3].all() for _ in range(2)]
    obs, rewards, _, truncations, infos = envs.step(moving)
    assert ends == [False, True]
    np.testing.assert_array_equal(rewards, 0)
    np.testing.assert_array_equal(infos["cost"], 0)
    assert not truncations.any()
    assert set(infos) == {"cost", "_cost"}
    # The reset step does not count: the next episode has two full steps, from this start.
    np.testing.assert_array_equal(envs.step(still)[0], obs)
    assert envs.step(still)[3].all()


def test_a_reset_right_after_an_end_is_followed_by_a_real_step():
    envs = PointHazardsVectorEnv(1, max_episode_steps=1)
    envs.reset(seed=0)
    envs.step(np.zeros((1, 2)))
    start, _ = envs.reset(seed=0)
    obs, _, _, truncations, _ = envs.step(-np.sign(start[:, :2]))
    np.testing.assert_allclose(np.abs(obs[0, :2] - start[0, :2]), 0.1, atol=1e-6)
    assert truncations.all()


def test_in_same_step_mode_the_last_observation_is_kept_and_the_reset_one_returned():
    envs = PointHazardsVectorEnv(2, max_episode_steps=2, autoreset_mode="SameStep")
    start, _ = envs.reset(seed=0)
    still = np.zeros((2, 2))
    assert set(envs.step(still)[4]) == {"cost", "_cost"}
    obs, _, _, truncations, infos = envs.step(still)
    assert truncations.all()
    np.testing.assert_array_equal(infos["final_obs"], start)
    np.testing.assert_array_equal(infos["_final_obs"], [True, True])
    assert not np.array_equal(obs, start)
    np.testing.assert_array_equal(envs.step(still)[0], obs)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_the_last_step_of_an_episode_reports_its_cost(mode):
    envs = PointHazardsVectorEnv(200, max_episode_steps=8, autoreset_mode=mode)
    obs, _ = envs.reset(seed=0)
    for _ in range(8):
        obs, _, _, truncations, infos = envs.step(unit_speed(HAZARDS[0] - obs[:, :2]))
    assert truncations.all()
    last = infos["final_obs"] if mode is SAME_STEP else obs
    inside = np.linalg.norm(last[:, None, :2] - HAZARDS, axis=2).min(axis=1) < HAZARD_RADIUS
    assert 0 < inside.sum() < 200
    np.testing.assert_array_equal(infos["cost"], inside)
    if mode is NEXT_STEP:  # a point that ended inside does not pay again for being reset
        np.testing.assert_array_equal(envs.step(np.zeros((200, 2)))[4]["cost"], 0)


# -- Registry and refusals -------------------------------------------------------------------------


def test_make_vec_gives_the_batch_its_horizon_and_passes_arguments_through():
    envs = gymnasium.make_vec("PointHazards-v0", num_envs=3)
    assert isinstance(envs, PointHazardsVectorEnv)
    assert (envs.num_envs, envs.max_episode_steps) == (3, 100)
    assert envs.metadata["autoreset_mode"] is NEXT_STEP
    short = gymnasium.make_vec(
        "PointHazards-v0", num_envs=1, max_episode_steps=7, autoreset_mode="SameStep"
    )
    assert (short.max_episode_steps, short.metadata["autoreset_mode"]) == (7, SAME_STEP)
    assert envs.metadata["autoreset_mode"] is NEXT_STEP


def test_the_single_env_refuses_what_it_cannot_do():
    env = PointHazardsEnv()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="actions must be finite, got 1 NaN or infinite of 2"):
        env.step(np.array([np.nan, 0], np.float32))
    with pytest.raises(ValueError, match=r"must have shape \(2,\), got \(1, 2\)"):
        env.step(np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match=r"PointHazards has no reset options, got \['goal'\]"):
        env.reset(options={"goal": (0, 0)})
    with pytest.raises(ResetNeeded, match=r"env\(s\) \[0\] saw neither; call reset"):
        PointHazardsEnv().step(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="must be one of 'rgb_array', None, got 'depth'"):
        PointHazardsEnv(render_mode="depth")
    with pytest.raises(ValueError, match='is None; make the env with render_mode="rgb_array"'):
        env.render()


# -- Pictures --------------------------------------------------------------------------------------


def pixel(image, place):
    """The colour where (x, y) of the arena is drawn: x to the right, y upwards."""
    x, y = place
    return image[int((1 - y) * len(image) / 2), int((1 + x) * len(image) / 2)].tolist()


def test_a_picture_shows_hazards_goal_and_point_where_they_are():
    env = PointHazardsEnv(render_mode="rgb_array")
    obs, _ = env.reset(seed=1)
    image = env.render()
    assert image.shape == (240, 240, 3)
    assert image.dtype == np.uint8
    for hazard in HAZARDS:
        assert pixel(image, hazard) == [120, 118, 230]
        assert pixel(image, hazard + 0.65 * HAZARD_RADIUS) == [120, 118, 230]
    assert pixel(image, obs[:2]) == [189, 11, 47]
    assert pixel(image, obs[:2] + obs[2:]) == [60, 220, 60]
    assert pixel(image, (0, 0)) == [221, 217, 208]


def test_the_point_glows_while_it_costs():
    env = PointHazardsEnv(render_mode="rgb_array")
    env.reset(seed=0)
    for position, cost in [(HAZARDS[0], 1), (np.zeros(2), 0)]:
        env.load_state_dict(env.state_dict() | {"position": position})
        *_, info = env.step(np.zeros(2, np.float32))
        assert info["cost"] == cost
        halo = pixel(env.render(), position + np.array([0.06, 0])) == [255, 120, 110]
        assert halo == bool(cost)


def test_a_batch_draws_what_the_single_envs_draw():
    envs = PointHazardsVectorEnv(2, render_mode="rgb_array")
    envs.reset(seed=4)
    envs.step(np.ones((2, 2), np.float32))
    images = envs.render()
    assert isinstance(images, tuple)
    for i, image in enumerate(images):
        env = PointHazardsEnv(render_mode="rgb_array")
        env.reset(seed=4 + i)
        env.step(np.ones(2, np.float32))
        np.testing.assert_array_equal(image, env.render())


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("steps", [3, 5, 14])
def test_going_on_from_a_state_is_not_having_stopped_bit_by_bit(mode, steps):
    """Also where episodes have just ended, and over resets and new goals; in a fresh object."""

    def told(envs, actions):
        answers = [envs.step(action) for action in actions]
        return [x for *arrays, infos in answers for x in (*arrays, *infos.values())]

    envs, fresh = (
        PointHazardsVectorEnv(50, max_episode_steps=5, autoreset_mode=mode) for _ in range(2)
    )
    envs.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps + 20, 50, 2))
    told(envs, actions[:steps])
    state = envs.state_dict()
    expected = told(envs, actions[steps:])
    fresh.load_state_dict(state)
    for array, other in zip(told(fresh, actions[steps:]), expected, strict=True):
        np.testing.assert_array_equal(array, other)
    assert max(array.max() for array in expected) > 1  # goals were reached


def test_a_row_of_a_batchs_state_goes_on_in_a_single_env_and_elsewhere_in_a_batch():
    envs, other, env = PointHazardsVectorEnv(4), PointHazardsVectorEnv(2), PointHazardsEnv()
    envs.reset(seed=1)
    state = envs.state_dict([3, 2])
    env.load_state_dict({key: array[0] for key, array in state.items()})
    other.load_state_dict(state)
    for action in np.random.default_rng(0).uniform(-1, 1, (200, 2)):
        expected, rewards, *_ = envs.step(np.tile(action, (4, 1)))
        obs, reward, *_ = env.step(action)
        batch_obs, *_ = other.step(np.tile(action, (2, 1)))
        if envs.state_dict()["elapsed"][0] == 100:
            break
        np.testing.assert_array_equal(obs, expected[3])
        np.testing.assert_array_equal(batch_obs, expected[[3, 2]])
        assert reward == rewards[3]
    row = {key: array[0] for key, array in other.state_dict([0]).items()}
    for key, array in env.state_dict().items():
        assert array.dtype == row[key].dtype
        if key != "finished":  # a single env has no time limit
            np.testing.assert_array_equal(array, row[key])
    env.reset()
    other.load_state_dict({key: array[None] for key, array in env.state_dict().items()}, [1])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("task", 1, "must be one of PointHazards, but it is of another task; pass what state_dict"),
        ("goal", np.nan, "'goal' of a state of PointHazards must hold finite numbers"),
        ("position", 1.5, r"'position' .* must be in \[-1, 1\], got"),
        ("elapsed", -1, r"'elapsed' .* must be in \[0, inf\], got"),
        ("stream", 0.5, "'stream' .* must fit into uint64, got"),
    ],
)
def test_a_wrong_state_is_refused_by_name_and_changes_nothing(key, value, message):
    envs, env = PointHazardsVectorEnv(2), PointHazardsEnv()
    envs.reset(seed=0)
    env.reset(seed=0)
    state = envs.state_dict()
    wrong = {**state, key: np.full_like(state[key], value, dtype=np.float64)}
    with pytest.raises(ValueError, match=message):
        envs.load_state_dict(wrong)
    with pytest.raises(ValueError, match=message):
        env.load_state_dict({name: array[0] for name, array in wrong.items()})
    for name, array in envs.state_dict().items():
        np.testing.assert_array_equal(array, state[name])
        np.testing.assert_array_equal(env.state_dict()[name], state[name][0])
