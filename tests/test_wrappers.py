import copy
import multiprocessing
import pickle
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.spaces.utils import flatten
from gymnasium.wrappers import ClipAction, NormalizeObservation, TimeLimit

from pbcrl.cost_model import CostModel
from pbcrl.ensemble import CostModelEnsemble
from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl.recorder import discarded_envs, finished_trajectories
from pbcrl.wrappers import Autoreset, PreferenceCostWrapper

from .counters import NOT_REPORTED, Counter, linear_model, random_model
from .every_space import SPACE_IDS, SPACE_PAIRS, Wander, boxes, draw_actions, model_for


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
        assert again.cost_model is model
        assert gym.make(ClipAction(env).spec).env.cost_model is model
        assert len(play(again, [0.0] * 3)[-1]["trajectory"]) == 2
    finally:
        del gym.registry["pbcrl-test/Counter-v0"]


def test_a_deep_copy_shares_the_model_and_follows_its_fine_tuning():
    env = PreferenceCostWrapper(Counter(3), linear_model())
    env.reset(seed=0)
    copied = copy.deepcopy(env)
    assert copied.unwrapped is not env.unwrapped
    with torch.no_grad():
        env.cost_model.net[0].bias.fill_(100.0)
    costs = [one.step(act(0.5))[-1]["cost"] for one in (copied, copied, env)]
    assert costs == [104, 105, 104]  # t + 8 a + 100; the copy has steps of its own


def test_a_deep_copy_of_a_model_and_its_env_goes_by_the_model_that_was_copied():
    model = linear_model()
    copied_model, copied = copy.deepcopy((model, PreferenceCostWrapper(Counter(3), model)))
    assert copied.cost_model is copied_model is not model


def test_pickling_warns_that_the_copy_does_not_follow_fine_tuning():
    env = PreferenceCostWrapper(Counter(3), linear_model())
    with pytest.warns(UserWarning, match=r"holds a copy of the cost model.* env.cost_model = "):
        data = pickle.dumps(env)
    again = pickle.loads(data)
    assert again.cost_model is not env.cost_model
    assert [info["cost"] for info in play(again, [0.5, 0.0])] == [4, 1]


def wrap_and_send(pipe, model):
    """Sends what wrapping warns of: a model that came with the process, and one made in it."""
    found = []
    for scores in (model, linear_model()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PreferenceCostWrapper(Counter(3), scores)
        found.append([str(warning.message) for warning in caught])
    pipe.send(found)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_is_told_that_its_model_is_a_copy(method):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=wrap_and_send, args=(there, linear_model()))
    process.start()
    (message,), of_its_own = here.recv()
    process.join()
    assert "made in another process, and this worker process has a copy" in message
    assert "by PreferenceCostVectorWrapper around the vector env" in message
    assert of_its_own == []


def test_normalised_observations_are_refused_inside_and_taken_outside():
    with pytest.raises(
        ValueError, match=r"drift.* NormalizeObservation is inside.*put it outside of it"
    ):
        PreferenceCostWrapper(TimeLimit(NormalizeObservation(Counter()), 5), linear_model())
    env = NormalizeObservation(PreferenceCostWrapper(Counter(3), linear_model()))
    assert [info["cost"] for info in play(env, [0.5, 0.0])] == [4, 1]


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


def test_an_env_whose_step_returns_the_cost_as_a_sixth_value_is_named_with_the_remedy():
    class SixValues(Counter):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, info["cost"], terminated, truncated, info

    env = PreferenceCostWrapper(SixValues(), linear_model())
    env.reset()
    with pytest.raises(ValueError, match=r"returns 6 values; .* pbcrl_envs\.upstream\.make\(id\)"):
        env.step(act(1))


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
        ({"obs": {2: np.nan}}, "^obs must be finite, got nan at step 2 of an episode; fix the"),
        ({"obs": {3: np.nan}}, "^obs must be finite, got nan at step 3 of an episode; fix the"),
        ({"obs": {0: np.inf}}, "^obs must be finite, got inf at reset; fix the env"),
        ({"reward": {1: -np.inf}}, "^reward must be finite, got -inf at step 1 of an episode; fix"),
        (
            {"cost": {3: np.nan}},
            r"^cost must be finite, got nan at step 3 of an episode; fix the env's info\['cost'\]",
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


@pytest.mark.parametrize(
    ("cost", "remedy"),
    [
        (np.zeros(2), "sum several costs"),
        (np.zeros(1), "sum several costs"),
        ("high", "make it a float"),
    ],
)
def test_a_cost_that_is_not_one_number_is_refused(cost, remedy):
    env = PreferenceCostWrapper(Counter(cost={1: cost}), linear_model())
    with pytest.raises(ValueError, match=rf"info\['cost'\] must be one number .* {remedy}"):
        play(env, [0.0])


@pytest.mark.parametrize(
    ("reward", "found"), [(np.ones(1), r"shape \(1,\) and dtype float64"), (None, "dtype object")]
)
def test_a_reward_that_is_not_one_number_is_refused(reward, found):
    env = PreferenceCostWrapper(Counter(reward={2: reward}), linear_model())
    with pytest.raises(ValueError, match=f"a reward must be one number per step, got .*{found}"):
        play(env, [0.0, 0.0])


def test_any_scalar_as_a_reward_is_returned_as_a_float():
    env = PreferenceCostWrapper(Counter(1, reward={1: np.array(2)}), linear_model())
    env.reset(seed=0)
    assert type(env.step(act(0.0))[1]) is float


@pytest.mark.parametrize("cost", [-1.0, -(10**9)])
def test_a_negative_true_cost_is_refused(cost):
    env = PreferenceCostWrapper(Counter(cost={2: cost}), linear_model())
    message = r"a true cost must be >= 0, got info\['cost'\] = -1.*; pay for safety in the reward"
    with pytest.raises(ValueError, match=message):
        play(env, [0.0, 0.0])


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
    with pytest.raises(ValueError, match=r"obs must have the shape \(2,\) .*, got \(2, 1\); fix"):
        env.reset()


def test_a_space_that_changes_in_mid_episode_does_not_hide_an_observation_of_another_shape():
    class Grows(Counter):
        def step(self, action):
            self.observation_space = Box(-1, 1, (5,), np.float32)
            _, *rest = super().step(action)
            return np.zeros(5, np.float32), *rest

    env = PreferenceCostWrapper(Grows(), linear_model())
    with pytest.raises(
        ValueError, match=r"obs must have the shape \(2,\) of its space, got \(5,\)"
    ):
        play(env, [0.0])


# -- Episodes that never end -----------------------------------------------------------------


def test_a_time_limit_outside_the_wrapper_is_told_once():
    env = TimeLimit(PreferenceCostWrapper(Counter(99), linear_model()), 2)
    for _ in range(9):
        play(env, [0.0, 0.0])
    env.reset()
    env.step(act(0.0))
    with pytest.warns(RuntimeWarning, match="none has ended yet, and 10 were cut off .*TimeLimit"):
        env.reset()
    for _ in range(30):  # warnings are errors here: there is no second one
        play(env, [0.0, 0.0])


def test_resets_in_mid_episode_are_no_fault_once_an_episode_has_ended():
    env = PreferenceCostWrapper(Counter(2), linear_model())
    play(env, [0.0, 0.0])
    for _ in range(30):
        play(env, [0.0])


# -- Spaces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("obs_space", "action_space"), SPACE_PAIRS, ids=SPACE_IDS)
def test_an_env_of_any_spaces_is_scored_and_recorded(obs_space, action_space):
    model = model_for(obs_space, action_space)
    wander = Wander(obs_space, action_space, length=3)
    env = PreferenceCostWrapper(wander, model)
    actions = [action for (action,) in draw_actions(action_space, 3, 1)]
    given = [env.reset(seed=0)[0]]
    infos = []
    for action in actions:
        obs, *_, info = env.step(action)
        given.append(obs)
        infos.append(info)
    # Env and policy see each other as if there were no wrapper.
    for found, expected in ((given, wander.seen), (wander.received, actions)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one is other or (one == other if np.isscalar(one) else (one == other).all())
    (trajectory,) = finished_trajectories(infos[-1])
    for t in range(3):
        seen = flatten(obs_space, wander.seen[t]).astype(np.float32)
        np.testing.assert_array_equal(trajectory.obs[t].ravel(), seen)
        done = flatten(action_space, actions[t]).astype(np.float32)
        np.testing.assert_array_equal(trajectory.actions[t], done)
    is_bytes = isinstance(obs_space, Box) and obs_space.dtype == np.uint8
    assert trajectory.obs.dtype == (np.uint8 if is_bytes else np.float32)
    np.testing.assert_array_equal(trajectory.costs, [0.5, 1.0, 1.5])
    costs = model.step_cost(trajectory.obs, trajectory.actions)
    assert costs.std() > 0
    np.testing.assert_allclose([info["cost"] for info in infos], costs, rtol=1e-4, atol=1e-6)


def test_a_model_of_flat_rows_reads_an_image_flat():
    space = Box(0, 255, (4, 3, 2), np.uint8)
    env = PreferenceCostWrapper(Wander(space, Discrete(2), 1), CostModel(*boxes(24, 2)))
    obs, _ = env.reset(seed=0)
    trajectory = env.step(1)[-1]["trajectory"]
    assert trajectory.layout == ((24,), 2, "uint8")
    np.testing.assert_array_equal(trajectory.obs[0], obs.ravel())


def test_a_discrete_action_out_of_range_is_refused_and_the_episode_goes_on():
    space = Box(-1, 1, (2,), np.float32)
    wander = Wander(space, Discrete(2, start=5), 2)
    env = PreferenceCostWrapper(wander, model_for(space, wander.action_space))
    env.reset(seed=0)
    env.step(5)
    with pytest.raises(ValueError, match=r"must lie in Discrete\(2, start=5\), got 7 .*goes"):
        env.step(7)
    trajectory = env.step(6)[-1]["trajectory"]
    np.testing.assert_array_equal(trajectory.actions, [[1, 0], [0, 1]])
    assert wander.received == [5, 6]


def test_an_image_as_an_action_is_clipped_in_its_shape():
    space = Box(-1, 1, (2, 3), np.float32)
    wander = Wander(Discrete(2), space, 1)
    env = PreferenceCostWrapper(wander, model_for(Discrete(2), space))
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="clipped"):
        trajectory = env.step(np.full((2, 3), 9.0))[-1]["trajectory"]
    np.testing.assert_array_equal(wander.received, np.ones((1, 2, 3)))
    np.testing.assert_array_equal(trajectory.actions, np.ones((1, 6)))


FLAT = Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("obs", "action", "message"),
    [
        (Dict(a=FLAT, b=Text(9)), FLAT, r"observation\['b'\] is Text.*put TransformObservation in"),
        (FLAT, Tuple([FLAT]), r"^an action space must be a Box, .* got Tuple.*TransformAction"),
        (FLAT, FLAT, r"obs_shape=\(2,\) and act_dim=1, the env has \(2,\) and 2; use CostModel\.f"),
        (Box(0, 1, (3, 4)), FLAT, r"the env has \(12,\) and 2; use CostModel\.for_env"),
        (Box(0, 255, (9, 9, 3), np.uint8), FLAT, r"the env has \(9, 9, 3\) and 2"),
    ],
)
def test_spaces_that_the_model_cannot_read_are_refused_by_name(obs, action, message):
    with pytest.raises(ValueError, match=message):
        PreferenceCostWrapper(Wander(obs, action, 1), linear_model())


@pytest.mark.parametrize("model", ["model.safetensors", Path("a"), torch.nn.Linear(3, 1), None])
def test_what_is_no_cost_model_is_refused_with_what_would_be_one(model):
    message = "must be a CostModel or another LearnedCost, got .*; read a file by load_cost_model"
    with pytest.raises(TypeError, match=message):
        PreferenceCostWrapper(Counter(), model)


def test_wrapping_twice_is_refused():
    env = TimeLimit(PreferenceCostWrapper(Counter(), linear_model()), 5)
    with pytest.raises(ValueError, match=r"takes one preference-cost wrapper, .* not both"):
        PreferenceCostWrapper(env, linear_model())


def test_an_env_that_resets_itself_is_refused():
    with pytest.raises(ValueError, match="put Autoreset outside this wrapper"):
        PreferenceCostWrapper(Autoreset(Counter()), linear_model())


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
        assert discarded_envs(info, 1).tolist() == [not lengths[-1]]
    assert lengths == [[], [3]]


# -- Horizon and ensembles -------------------------------------------------------------------


def test_an_env_of_another_time_limit_than_the_learned_limit_s_is_refused():
    env = Counter()
    env.spec = EnvSpec("Counter-v0", max_episode_steps=20)
    with pytest.raises(ValueError, match="learned on: 10, but episodes here have a time limit of"):
        PreferenceCostWrapper(env, CostModel(*boxes(2, 1), horizon=10))
    PreferenceCostWrapper(env, CostModel(*boxes(2, 1), horizon=20))


def test_an_episode_that_passes_the_horizon_is_found_out_in_the_step_that_does():
    """Where no env tells its time limit."""
    env = PreferenceCostWrapper(Counter(9), CostModel(*boxes(2, 1), horizon=2))
    env.reset()
    for _ in range(2):
        env.step(act(0.5))
    with pytest.raises(ValueError, match=r"learned on: 2, got a trajectory of 3; .* prorate\(3\)"):
        env.step(act(0.5))


def test_episodes_that_end_before_the_horizon_are_judged():
    env = PreferenceCostWrapper(Counter(3), CostModel(*boxes(2, 1), horizon=50))
    for _ in range(20):
        infos = play(env, [0.5] * 9)
    assert len(finished_trajectories(infos[-1])[0]) == 3


def test_the_step_costs_of_an_ensemble_sum_to_the_score_of_its_episode():
    torch.manual_seed(0)
    members = [CostModel(*boxes(2, 1), hidden_sizes=(8,)) for _ in range(3)]
    for member in members:
        torch.nn.init.normal_(member.net[-1].weight)
    ensemble = CostModelEnsemble(members, pessimism=1.0)
    infos = play(PreferenceCostWrapper(Counter(4), ensemble), [0.5, -0.5, 0.1, 0.2])
    total = sum(info["cost"] for info in infos)
    assert ensemble.score(finished_trajectories(infos[-1]))[0] == pytest.approx(total, rel=1e-5)
    assert total > CostModelEnsemble(members).score(finished_trajectories(infos[-1]))[0]
