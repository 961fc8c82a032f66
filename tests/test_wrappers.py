import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import Autoreset, ClipAction, FlattenObservation, TimeLimit

from pbcrl.cost_model import CostModel
from pbcrl.ensemble import CostModelEnsemble
from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl.recorder import diverged_envs, finished_trajectories
from pbcrl.wrappers import PreferenceCostVectorWrapper, PreferenceCostWrapper

from .counters import ACTIONS, LENGTHS, MODES, Counter, counters

NOT_REPORTED = dict.fromkeys(range(1, 5))


class BatchedCounter(VectorEnv):
    """`Counter` as arrays with SAME_STEP autoreset, and the cost of every step in infos["cost"]."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.num_envs = len(lengths)
        self.single_observation_space = Counter.observation_space
        self.single_action_space = Counter.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed=None, options=None):
        assert options is None
        self.envs = [Counter() for _ in self.lengths]
        self.rows = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])
        return self.rows, {}

    def step(self, actions):
        self.rows[:, 0] += 1  # in place, as a fast env would
        done = self.rows[:, 0] >= self.lengths
        infos = {"cost": np.abs(actions[:, 0])}
        if done.any():
            infos["final_obs"] = self.rows.copy()
            for i in np.flatnonzero(done):
                self.rows[i] = self.envs[i].reset()[0]
        return self.rows, np.ones(self.num_envs), done, np.zeros_like(done), infos


def linear_model(bias=0.0):
    """c(s, a) = t + 8 a + bias, where that is positive."""
    model = CostModel(2, 1, hidden_sizes=(1,), output_scale=1.0)
    hidden, last = model.net[0], model.net[-1]
    with torch.no_grad():
        hidden.weight.copy_(torch.tensor([[1.0, 0.0, 8.0]]))
        hidden.bias.fill_(bias)
        last.weight.fill_(1.0)
    return model


def random_model():
    torch.manual_seed(0)
    model = CostModel(2, 1, hidden_sizes=(8,))
    torch.nn.init.normal_(model.net[-1].weight)
    return model


def act(value):
    return np.array([value], np.float32)


def play(env, values):
    """Reset, then step until the episode ends or the values do; return the infos."""
    env.reset(seed=0)
    infos = []
    for value in values:
        *_, terminated, truncated, info = env.step(act(value))
        infos.append(info)
        if terminated or truncated:
            break
    return infos


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.obs, other.obs)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.costs, other.costs)


# -- The single wrapper --------------------------------------------------------------------------


def test_each_step_reports_its_learned_and_its_true_cost():
    env = PreferenceCostWrapper(Counter(3), linear_model())
    infos = play(env, [0.5, 0.0, 0.25])
    # t + 8 a, with t from before the step
    assert [info["cost"] for info in infos] == [0 + 4, 1 + 0, 2 + 2]
    assert [info["true_cost"] for info in infos] == [0.5, 0.0, 0.25]


def test_the_last_step_hands_out_the_episode_without_its_final_observation():
    infos = play(PreferenceCostWrapper(Counter(3), linear_model()), [0.5, 0.0, -0.25])
    assert ["trajectory" in info for info in infos] == [False, False, True]
    (trajectory,) = finished_trajectories(infos[-1])
    np.testing.assert_array_equal(trajectory.obs[:, 0], [0, 1, 2])
    np.testing.assert_array_equal(trajectory.actions, [[0.5], [0.0], [-0.25]])
    np.testing.assert_array_equal(trajectory.costs, [0.5, 0.0, 0.25])


def test_an_env_without_costs_is_scored_and_recorded_without_true_costs():
    infos = play(PreferenceCostWrapper(Counter(2, cost=NOT_REPORTED), linear_model()), [1, 1])
    assert [info["cost"] for info in infos] == [8, 9]
    assert all("true_cost" not in info for info in infos)
    assert infos[-1]["trajectory"].costs is None


def test_a_time_limit_ends_a_trajectory():
    env = PreferenceCostWrapper(TimeLimit(Counter(100), 4), linear_model())
    infos = play(env, [0.0] * 100)
    assert len(infos) == 4
    assert len(infos[-1]["trajectory"]) == 4


def test_an_episode_longer_than_the_first_buffer_is_whole():
    actions = np.linspace(-1, 1, 1000, dtype=np.float32)
    infos = play(PreferenceCostWrapper(Counter(1000), random_model()), actions)
    trajectory = infos[-1]["trajectory"]
    np.testing.assert_array_equal(trajectory.obs[:, 0], np.arange(1000))
    np.testing.assert_array_equal(trajectory.actions[:, 0], actions)
    np.testing.assert_array_equal(trajectory.costs, np.abs(actions))


def test_fine_tuning_in_place_changes_the_next_cost():
    model = linear_model()
    env = PreferenceCostWrapper(Counter(3), model)
    env.reset(seed=0)
    assert env.step(act(0.5))[-1]["cost"] == 4.0
    with torch.no_grad():
        model.net[-1].weight.mul_(10)
    assert env.step(act(0.5))[-1]["cost"] == 50.0


def test_an_env_made_again_from_its_spec_shares_the_model():
    gym.register("pbcrl-test/Counter-v0", Counter, max_episode_steps=2)
    try:
        model = linear_model()
        env = PreferenceCostWrapper(gym.make("pbcrl-test/Counter-v0"), model)
        again = gym.make(env.spec)
        assert again.get_wrapper_attr("cost_model") is model
        assert len(play(again, [0.0] * 3)[-1]["trajectory"]) == 2
    finally:
        del gym.registry["pbcrl-test/Counter-v0"]


def test_an_action_out_of_bounds_is_clipped_for_the_env_and_the_record_with_one_warning():
    counter = Counter(3)
    env = PreferenceCostWrapper(counter, linear_model())
    env.reset(seed=0)
    with pytest.warns(UserWarning, match=r"bounds .* clipped, .* gymnasium.wrappers.ClipAction"):
        assert env.step(act(1.5))[-1]["cost"] == 8.0
    env.step(act(-7.0))  # warnings are errors here: there is no second one
    trajectory = env.step(act(0.5))[-1]["trajectory"]
    np.testing.assert_array_equal(trajectory.actions[:, 0], [1.0, -1.0, 0.5])
    np.testing.assert_array_equal(np.concatenate(counter.received), [1.0, -1.0, 0.5])
    np.testing.assert_array_equal(trajectory.costs, [1.0, 1.0, 0.5])


def test_clip_action_outside_the_wrapper_clips_without_a_warning():
    env = ClipAction(PreferenceCostWrapper(Counter(1), linear_model()))
    assert play(env, [3.0])[-1]["trajectory"].actions[0, 0] == 1.0


class ReusesItsArrays(Counter):
    def __init__(self, length):
        super().__init__(length)
        self.info, self.row = {}, np.zeros(2, np.float32)

    def step(self, action):
        action *= 0.5
        next_obs, reward, terminated, truncated, info = super().step(action)
        self.row[:] = next_obs
        self.info.update(info)
        return self.row, reward, terminated, truncated, self.info


def test_an_env_may_reuse_its_arrays_and_its_info():
    infos = play(PreferenceCostWrapper(ReusesItsArrays(3), linear_model()), [0.5, 0.5, 0.5])
    assert [info["cost"] for info in infos] == [4.0, 5.0, 6.0]
    assert [info["true_cost"] for info in infos] == [0.25] * 3
    np.testing.assert_array_equal(infos[-1]["trajectory"].obs[:, 0], [0, 1, 2])
    np.testing.assert_array_equal(infos[-1]["trajectory"].actions[:, 0], [0.5] * 3)


def test_reset_in_mid_episode_drops_the_unfinished_rows():
    env = PreferenceCostWrapper(Counter(3), linear_model())
    play(env, [1.0, 1.0])
    trajectory = play(env, [0.0, 0.5, 0.25])[-1]["trajectory"]
    np.testing.assert_array_equal(trajectory.costs, [0.0, 0.5, 0.25])


def test_a_step_after_the_end_is_passed_on_but_never_recorded():
    counter = Counter(2)
    env = PreferenceCostWrapper(counter, linear_model())
    play(env, [0.0, 0.0])
    info = env.step(act(0.5))[-1]
    assert len(counter.received) == 3
    assert finished_trajectories(info) == []
    np.testing.assert_array_equal(play(env, [0.25, 0.75])[-1]["trajectory"].costs, [0.25, 0.75])


def test_a_step_before_any_reset_is_refused():
    env = PreferenceCostWrapper(Counter(), linear_model())
    with pytest.raises(ResetNeeded, match=r"an episode starts with reset\(\).*; call reset\(\)"):
        env.step(act(0.0))


def test_after_an_error_in_the_env_a_reset_makes_the_wrapper_usable_again():
    counter = Counter(3, raises_at=2)
    env = PreferenceCostWrapper(counter, linear_model())
    env.reset(seed=0)
    env.step(act(1.0))
    with pytest.raises(RuntimeError, match="fell over"):
        env.step(act(1.0))
    with pytest.raises(ResetNeeded, match="after an error"):
        env.step(act(1.0))
    counter.raises_at = None
    np.testing.assert_array_equal(play(env, [0.0] * 3)[-1]["trajectory"].costs, [0.0] * 3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_action_is_refused_and_the_episode_goes_on(value):
    counter = Counter(2)
    env = PreferenceCostWrapper(counter, linear_model())
    env.reset(seed=0)
    env.step(act(0.5))
    with pytest.raises(NonFiniteError, match=f"action must be finite, got {value}; check the pol"):
        env.step(act(value))
    assert len(counter.received) == 1
    assert len(env.step(act(0.5))[-1]["trajectory"]) == 2


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"obs": {2: np.nan}}, "^obs must be finite, got nan at step 2 of an episode; mend the"),
        ({"obs": {3: np.nan}}, "^obs must be finite, got nan at step 3 of an episode; mend the"),
        ({"obs": {0: np.inf}}, "^obs must be finite, got inf at reset; mend the env"),
        ({"reward": {1: -np.inf}}, "^reward must be finite, got -inf at step 1 of an episode; me"),
        (
            {"cost": {3: np.nan}},
            r"^cost must be finite, got nan at step 3 of an episode; mend the env's info\['cost'\]",
        ),
        ({"cost": {1: 1e300}}, "^cost must be finite, got inf at step 1 of an episode"),
    ],
)
def test_non_finite_output_of_an_env_is_named_with_its_step(broken, message):
    env = PreferenceCostWrapper(Counter(**broken), linear_model())
    with pytest.raises(NonFiniteError, match=message):
        play(env, [0.0] * 3)


def test_a_diverged_cost_model_is_named():
    env = PreferenceCostWrapper(Counter(), linear_model(bias=float("nan")))
    with pytest.raises(NonFiniteError, match=r"learned cost must be finite, .* has diverged"):
        play(env, [0.0])


@pytest.mark.parametrize("missing_at", [1, 2, 3])
def test_a_cost_at_some_steps_of_an_episode_only_is_refused(missing_at):
    env = Counter(3, cost={missing_at: None})
    with pytest.raises(MissingCostError, match=r"at every step or at none, .* set info\['cost'\]"):
        play(PreferenceCostWrapper(env, linear_model()), [0.0] * 3)


@pytest.mark.parametrize("cost", [np.zeros(2), "high", np.zeros(1)])
def test_a_cost_that_is_not_one_number_is_refused(cost):
    env = PreferenceCostWrapper(Counter(cost={1: cost}), linear_model())
    with pytest.raises(ValueError, match=r"info\['cost'\] must be one number .* sum several costs"):
        play(env, [0.0])


def test_an_action_of_another_shape_is_not_broadcast():
    env = PreferenceCostWrapper(Counter(), linear_model())
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"shape \(1,\) of its space, got \(\)"):
        env.step(0.5)


def test_an_observation_of_another_shape_than_its_space_is_refused():
    class Column(Counter):
        def obs(self):
            return super().obs()[:, None]

    env = PreferenceCostWrapper(Column(), linear_model())
    with pytest.raises(ValueError, match=r"obs must have the shape \(2,\) .*, got \(2, 1\); mend"):
        env.reset()


class Spaces(gym.Env):
    def __init__(self, obs, action):
        self.observation_space, self.action_space = obs, action


FLAT = Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("obs", "action", "message"),
    [
        (Box(0, 1, (3, 4)), FLAT, r"observation space .* 1-D Box, got Box.*wrappers.FlattenObs"),
        (Dict(a=FLAT), FLAT, r"observation space .* 1-D Box, got Dict.*put gymnasium.wrappers.Fl"),
        (FLAT, Discrete(3), r"action space must be a 1-D Box, got Discrete\(3\).*TransformAction"),
        (FLAT, FLAT, r"obs_dim=2 and act_dim=1, the env has 2 and 2; use CostModel\(2, 2\)"),
    ],
)
def test_spaces_that_the_model_cannot_read_are_refused_by_name(obs, action, message):
    with pytest.raises(ValueError, match=message):
        PreferenceCostWrapper(Spaces(obs, action), linear_model())


def test_flatten_observation_is_the_remedy_for_a_dict():
    class Nested(Counter):
        observation_space = Dict(a=Counter.observation_space)

        def obs(self):
            return {"a": super().obs()}

    infos = play(PreferenceCostWrapper(FlattenObservation(Nested(2)), linear_model()), [0.0, 0.0])
    np.testing.assert_array_equal(infos[-1]["trajectory"].obs[:, 0], [0, 1])


def test_wrapping_twice_is_refused():
    env = TimeLimit(PreferenceCostWrapper(Counter(), linear_model()), 5)
    with pytest.raises(ValueError, match=r"takes one preference-cost wrapper, .* not both"):
        PreferenceCostWrapper(env, linear_model())


@pytest.mark.parametrize("mode", MODES)
def test_wrapping_the_single_envs_and_the_vector_env_is_refused(mode):
    envs = SyncVectorEnv(
        [lambda: PreferenceCostWrapper(Counter(1), linear_model())], autoreset_mode=mode
    )
    vector = PreferenceCostVectorWrapper(envs, linear_model())
    vector.reset(seed=0)
    with pytest.raises(ValueError, match=r"takes one preference-cost wrapper, .* not both"):
        vector.step(np.zeros((1, 1), np.float32))


def test_an_env_that_resets_itself_is_refused():
    with pytest.raises(ValueError, match="put Autoreset outside this wrapper"):
        PreferenceCostWrapper(Autoreset(Counter()), linear_model())


# -- The vector wrapper --------------------------------------------------------------------------


def by_single_wrapper(model, row, mode):
    """What the single wrapper records of one env for the actions that a vector env gives it."""
    env = PreferenceCostWrapper(TimeLimit(Counter(99), LENGTHS[row]), model)
    env.reset(seed=row)
    found, costs, done = [], [], False
    for action in ACTIONS[:, row]:
        if done:
            env.reset()
            if mode is AutoresetMode.NEXT_STEP:  # this action is spent on the reset
                costs.append((0.0, 0.0))
                done = False
                continue
        *_, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        found += finished_trajectories(info)
        costs.append((info["cost"], info["true_cost"]))
    return found, costs


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (counters, MODES[0]),
        (counters, MODES[1]),
        (lambda mode: counters(mode, copy=False), MODES[0]),
        (lambda mode: counters(mode, copy=False), MODES[1]),
        (lambda _: BatchedCounter(LENGTHS), MODES[1]),
    ],
    ids=["next-step", "same-step", "next-step-in-place", "same-step-in-place", "batched"],
)
def test_the_vector_wrapper_agrees_with_single_wrappers(make, mode):
    model = random_model()
    envs = PreferenceCostVectorWrapper(make(mode), model)
    envs.reset(seed=0)
    found = [[] for _ in LENGTHS]
    costs = [[] for _ in LENGTHS]
    for actions in ACTIONS:
        *_, terminated, truncated, infos = envs.step(actions)
        assert infos["cost"].dtype == infos["true_cost"].dtype == np.float32
        for row in range(len(LENGTHS)):
            costs[row].append((infos["cost"][row], infos["true_cost"][row]))
        ended = np.flatnonzero(terminated | truncated)
        assert ("trajectory" in infos) == (len(ended) > 0)
        assert finished_trajectories(infos) == [infos["trajectory"][row] for row in ended]
        for row in ended:
            assert infos["_trajectory"][row]
            found[row].append(infos["trajectory"][row])
    for row in range(len(LENGTHS)):
        expected, expected_costs = by_single_wrapper(model, row, mode)
        assert len(expected) >= 4
        assert_same(found[row], expected)
        np.testing.assert_allclose(costs[row], expected_costs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_learned_costs_are_those_of_the_recorded_rows(mode):
    model = random_model()
    envs = PreferenceCostVectorWrapper(counters(mode), model)
    envs.reset(seed=0)
    infos = [envs.step(actions)[-1] for actions in ACTIONS[:4]]
    trajectory = infos[-1]["trajectory"][2]
    expected = model.step_cost(trajectory.obs, trajectory.actions)
    assert expected.std() > 0
    np.testing.assert_allclose([i["cost"][2] for i in infos], expected, rtol=1e-5, atol=1e-6)


def test_worker_processes_give_the_same_trajectories():
    found = []
    for make in (SyncVectorEnv, AsyncVectorEnv):
        envs = PreferenceCostVectorWrapper(counters(AutoresetMode.SAME_STEP, make), random_model())
        envs.reset(seed=0)
        found.append([t for a in ACTIONS[:6] for t in finished_trajectories(envs.step(a)[-1])])
        envs.close()
    assert len(found[0]) == 9  # 2 of three steps, 6 of one, 1 of four
    assert_same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_single_wrappers_in_a_vector_env_are_read_by_the_same_helper(mode):
    model = linear_model()
    envs = SyncVectorEnv(
        [lambda length=length: PreferenceCostWrapper(Counter(length), model) for length in (1, 2)],
        autoreset_mode=mode,
    )
    envs.reset(seed=0)
    per_step = [
        [len(t) for t in finished_trajectories(envs.step(np.zeros((2, 1), np.float32))[-1])]
        for _ in range(4)
    ]
    if mode is AutoresetMode.NEXT_STEP:
        assert per_step == [[1], [2], [1], []]
    else:
        assert per_step == [[1], [1, 2], [1], [1, 2]]


def test_a_reset_step_is_no_transition():
    envs = PreferenceCostVectorWrapper(counters(AutoresetMode.NEXT_STEP), linear_model(bias=1.0))
    envs.reset(seed=0)
    ones = np.ones((3, 1), np.float32)
    envs.step(ones)  # env 1 ends
    infos = envs.step(ones)[-1]
    np.testing.assert_array_equal(infos["_cost"], [True, False, True])
    np.testing.assert_array_equal(infos["cost"], [1 + 8 + 1, 0, 1 + 8 + 1])
    np.testing.assert_array_equal(infos["true_cost"], [1, 0, 1])
    infos = envs.step(ones)[-1]  # env 1 ends again, one real step later
    np.testing.assert_array_equal(infos["trajectory"][1].obs[:, 0], [0])


def test_true_costs_stay_when_all_envs_reset_in_the_same_step():
    envs = SyncVectorEnv([lambda: Counter(1), lambda: Counter(1)])
    envs = PreferenceCostVectorWrapper(envs, linear_model())
    envs.reset(seed=0)
    ones = np.ones((2, 1), np.float32)
    infos = [envs.step(ones)[-1] for _ in range(3)]
    np.testing.assert_array_equal([i["true_cost"] for i in infos], [[1, 1], [0, 0], [1, 1]])
    assert [len(finished_trajectories(i)) for i in infos] == [2, 0, 2]


def test_the_true_cost_of_a_last_step_does_not_pass_for_the_learned_one():
    envs = SyncVectorEnv([lambda: Counter(1)], autoreset_mode=AutoresetMode.SAME_STEP)
    envs = PreferenceCostVectorWrapper(envs, linear_model())
    envs.reset(seed=0)
    final_info = envs.step(np.full((1, 1), 0.5, np.float32))[-1]["final_info"]
    assert final_info["cost"][0] == 4.0
    assert final_info["true_cost"][0] == 0.5


def test_vector_envs_without_costs_have_no_true_cost():
    envs = SyncVectorEnv([lambda: Counter(2, cost=NOT_REPORTED)] * 2)
    envs = PreferenceCostVectorWrapper(envs, linear_model())
    envs.reset(seed=0)
    infos = [envs.step(np.zeros((2, 1), np.float32))[-1] for _ in range(4)]
    assert all("true_cost" not in info for info in infos)
    assert [t.costs for t in infos[1]["trajectory"]] == [None, None]


def test_the_vector_wrapper_follows_fine_tuning():
    model = linear_model()
    envs = PreferenceCostVectorWrapper(counters(AutoresetMode.SAME_STEP), model)
    envs.reset(seed=0)
    with torch.no_grad():
        model.net[-1].weight.mul_(10)
    infos = envs.step(np.full((3, 1), 0.5, np.float32))[-1]
    np.testing.assert_array_equal(infos["cost"], [40.0] * 3)


def test_vector_actions_out_of_bounds_are_clipped_with_one_warning():
    envs = PreferenceCostVectorWrapper(counters(AutoresetMode.SAME_STEP), linear_model())
    envs.reset(seed=0)
    with pytest.warns(UserWarning, match=r"clipped, .*gymnasium.wrappers.vector.ClipAction"):
        infos = envs.step(np.array([[2.0], [-3.0], [0.5]], np.float32))[-1]
    np.testing.assert_array_equal(infos["true_cost"], [1.0, 1.0, 0.5])
    np.testing.assert_array_equal(infos["trajectory"][1].actions, [[-1.0]])
    envs.step(np.full((3, 1), 5.0, np.float32))  # warnings are errors: there is no second one


def test_a_reset_of_all_envs_drops_what_is_unfinished():
    envs = PreferenceCostVectorWrapper(counters(AutoresetMode.NEXT_STEP), random_model())
    runs = []
    for _ in range(2):  # the second one starts while env 1 waits for its automatic reset
        envs.reset(seed=0)
        runs.append([t for a in ACTIONS[:5] for t in finished_trajectories(envs.step(a)[-1])])
    assert len(runs[0]) == 5  # 1 of three steps, 3 of one, 1 of four
    assert_same(*runs)


def test_resetting_some_of_the_envs_is_refused():
    envs = PreferenceCostVectorWrapper(counters(AutoresetMode.NEXT_STEP), linear_model())
    with pytest.raises(ValueError, match=r"for all of them at once, .*reset_mask.*leave it out"):
        envs.reset(options={"reset_mask": np.array([True, False, False])})


def test_disabled_autoreset_is_refused():
    with pytest.raises(ValueError, match=r"got AutoresetMode.DISABLED; make them with .*NEXT_STEP"):
        PreferenceCostVectorWrapper(counters(AutoresetMode.DISABLED), linear_model())


def test_an_unknown_autoreset_mode_is_refused():
    envs = counters(AutoresetMode.NEXT_STEP)
    del envs.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match=r"'autoreset_mode'\] of .* not set; set it to Autoreset"):
        PreferenceCostVectorWrapper(envs, linear_model())


def test_vector_spaces_are_refused_with_the_remedy_for_vector_envs():
    class Image(Counter):
        observation_space = Box(0, 1, (3, 4))

    with pytest.raises(ValueError, match=r"gymnasium.wrappers.vector.FlattenObservation inside"):
        PreferenceCostVectorWrapper(SyncVectorEnv([Image]), linear_model())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"obs": {2: np.nan}}, "^obs must be finite, got nan at step 2 of an episode in env 1; m"),
        ({"obs": {3: np.nan}}, "^obs must be finite, got nan at step 3 of an episode in env 1; m"),
        ({"obs": {0: np.inf}}, "^obs must be finite, got inf at reset in env 1; mend"),
        ({"reward": {3: np.inf}}, "^reward must be finite, got inf at step 3 of an episode in env"),
        (
            {"cost": {3: np.nan}},
            "^cost must be finite, got nan at step 3 of an episode in env 1; mend",
        ),
    ],
)
def test_a_broken_env_among_many_is_named(mode, broken, message):
    envs = SyncVectorEnv([Counter, lambda: Counter(**broken)], autoreset_mode=mode)
    envs = PreferenceCostVectorWrapper(envs, linear_model())
    with pytest.raises(NonFiniteError, match=message):  # noqa: PT012 - it may be at any step
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ResetNeeded, match="after an error"):
        envs.step(np.zeros((2, 1), np.float32))


class BadSecondReset(Counter):
    def reset(self, *, seed=None, options=None):
        self.bad_obs = {0: np.nan} if self.received else {}
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_observation_of_an_automatic_reset_is_told_from_one_of_a_step(mode):
    envs = SyncVectorEnv([Counter, lambda: BadSecondReset(1)], autoreset_mode=mode)
    envs = PreferenceCostVectorWrapper(envs, linear_model())
    envs.reset(seed=0)
    zeros = np.zeros((2, 1), np.float32)
    if mode is AutoresetMode.NEXT_STEP:
        envs.step(zeros)
    with pytest.raises(NonFiniteError, match="got nan at reset in env 1"):
        envs.step(zeros)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("silent_at", [1, 3])
def test_costs_from_some_envs_only_are_refused(mode, silent_at):
    envs = SyncVectorEnv(
        [Counter, lambda: Counter(cost={silent_at: None})],
        autoreset_mode=mode,
    )
    envs = PreferenceCostVectorWrapper(envs, linear_model())
    envs.reset(seed=0)
    zeros = np.zeros((2, 1), np.float32)
    for _ in range(silent_at - 1):
        envs.step(zeros)
    with pytest.raises(MissingCostError, match=r"env\(s\) \[1\] of 2 reported none; set info"):
        envs.step(zeros)


def test_an_episode_that_a_diverged_simulation_cut_short_is_not_handed_out():
    env = PreferenceCostWrapper(Counter(3, diverges_at=2), random_model())
    lengths = []
    for _ in range(2):
        env.reset(seed=0)
        done = False
        while not done:
            *_, terminated, truncated, info = env.step(act(0.5))
            done = terminated or truncated
        lengths.append([len(t) for t in finished_trajectories(info)])
        assert diverged_envs(info, 1).tolist() == [not lengths[-1]]
    assert lengths == [[], [3]]


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_env_hands_out_whole_episodes_and_none_that_diverged(mode):
    """Env 0 diverges in its second step; env 1, beside it, ends an episode in every step."""
    envs = SyncVectorEnv(
        [lambda: Counter(3, diverges_at=2), lambda: Counter(1)], autoreset_mode=mode
    )
    wrapped = PreferenceCostVectorWrapper(envs, random_model())
    wrapped.reset(seed=0)
    lengths, diverged = [], []
    for _ in range(6):
        *_, infos = wrapped.step(np.full((2, 1), 0.5, np.float32))
        handed_out = infos.get("trajectory", [None, None])
        lengths.append([None if t is None else len(t) for t in handed_out])
        diverged.append(diverged_envs(infos, 2).tolist())
        if "final_info" in infos:  # the true cost, 0.5, does not pass for the learned one
            assert (infos["final_info"]["cost"][infos["_final_info"]] != 0.5).all()
    assert diverged == [[t == 1, False] for t in range(6)]
    if mode is AutoresetMode.SAME_STEP:
        assert [own for own, _ in lengths] == [None, None, None, None, 3, None]
        assert [other for _, other in lengths] == [1] * 6
    else:
        assert [own for own, _ in lengths] == [None, None, None, None, None, 3]
        assert [other for _, other in lengths] == [1, None] * 3


# -- Horizon and ensembles -------------------------------------------------------------------


def test_an_env_of_another_time_limit_than_the_learned_limit_s_is_refused():
    env = Counter()
    env.spec = EnvSpec("Counter-v0", max_episode_steps=20)
    with pytest.raises(ValueError, match="learned on: 10, but episodes here have a time limit of"):
        PreferenceCostWrapper(env, CostModel(2, 1, horizon=10))
    envs = BatchedCounter([3, 3])
    envs.spec = env.spec
    with pytest.raises(ValueError, match="learned on: 10, but episodes here have a time limit of"):
        PreferenceCostVectorWrapper(envs, CostModel(2, 1, horizon=10))
    PreferenceCostWrapper(env, CostModel(2, 1, horizon=20))


def test_an_episode_that_passes_the_horizon_is_found_out_in_the_step_that_does():
    """Where no env tells its time limit; every env counts for itself."""
    env = PreferenceCostWrapper(Counter(9), CostModel(2, 1, horizon=2))
    env.reset()
    for _ in range(2):
        env.step(act(0.5))
    with pytest.raises(ValueError, match=r"learned on: 2, got a trajectory of 3; .* prorate\(3\)"):
        env.step(act(0.5))
    envs = PreferenceCostVectorWrapper(BatchedCounter([1, 9]), CostModel(2, 1, horizon=2))
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="learned on: 2, got a trajectory of 3"):
        envs.step(np.zeros((2, 1), np.float32))


def test_episodes_that_end_before_the_horizon_are_judged():
    env = PreferenceCostWrapper(Counter(3), CostModel(2, 1, horizon=50))
    for _ in range(20):
        infos = play(env, [0.5] * 9)
    assert len(finished_trajectories(infos[-1])[0]) == 3


def test_the_step_costs_of_an_ensemble_sum_to_the_score_of_its_episode():
    torch.manual_seed(0)
    members = [CostModel(2, 1, hidden_sizes=(8,)) for _ in range(3)]
    for member in members:
        torch.nn.init.normal_(member.net[-1].weight)
    ensemble = CostModelEnsemble(members, pessimism=1.0)
    infos = play(PreferenceCostWrapper(Counter(4), ensemble), [0.5, -0.5, 0.1, 0.2])
    total = sum(info["cost"] for info in infos)
    assert ensemble.score(finished_trajectories(infos[-1]))[0] == pytest.approx(total, rel=1e-5)
    assert total > CostModelEnsemble(members).score(finished_trajectories(infos[-1]))[0]
