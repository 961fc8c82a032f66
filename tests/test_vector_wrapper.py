import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

# Asked before the imports that older ones lack.
pytest.importorskip(
    "gymnasium", "1.1", reason="vector envs say when they reset themselves since Gymnasium 1.1"
)

from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers import NormalizeObservation, TimeLimit
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeVectorObservation

from pbcrl.cost_model import CostModel
from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl.recorder import discarded_envs, finished_trajectories, step_costs
from pbcrl.vector_recorder import RecordTrajectories
from pbcrl.wrappers import PreferenceCostVectorWrapper, PreferenceCostWrapper

from .counters import NOT_REPORTED, Counter, assert_same, linear_model, random_model
from .every_space import SPACE_IDS, SPACE_PAIRS, Wander, boxes, draw_actions, model_for

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
LENGTHS = [3, 1, 4]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (20, len(LENGTHS), 1)).astype(np.float32)


def counters(mode, make=SyncVectorEnv, **options):
    fns = [lambda length=length: TimeLimit(Counter(99), length) for length in LENGTHS]
    return make(fns, autoreset_mode=mode, **options)


def with_model(envs):
    return PreferenceCostVectorWrapper(envs, linear_model())


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


@pytest.mark.parametrize("mode", MODES)
def test_wrapping_the_single_envs_and_the_vector_env_is_refused(mode):
    envs = SyncVectorEnv(
        [lambda: PreferenceCostWrapper(Counter(1), linear_model())], autoreset_mode=mode
    )
    vector = PreferenceCostVectorWrapper(envs, linear_model())
    vector.reset(seed=0)
    with pytest.raises(ValueError, match=r"takes one preference-cost wrapper, .* not both"):
        vector.step(np.zeros((1, 1), np.float32))


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


def test_a_deep_copy_shares_the_model_and_a_pickled_one_warns_that_it_does_not():
    envs = PreferenceCostVectorWrapper(counters(MODES[0]), linear_model())
    envs.reset(seed=0)
    copied = copy.deepcopy(envs)
    with torch.no_grad():
        envs.cost_model.net[0].bias.fill_(100.0)
    for one in (copied, envs):
        assert one.step(np.full((3, 1), 0.5))[-1]["cost"].tolist() == [104, 104, 104]
    with pytest.warns(UserWarning, match="holds a copy of the cost model"):
        envs.__getstate__()


@pytest.mark.parametrize("make", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("wrap", [RecordTrajectories, with_model], ids=["recorded", "scored"])
def test_normalised_observations_are_refused_inside(make, wrap):
    normal = lambda: TimeLimit(NormalizeObservation(Counter(9)), 4)  # noqa: E731
    plain = lambda: TimeLimit(Counter(9), 4)  # noqa: E731
    for inner in (make([normal, normal]), NormalizeVectorObservation(make([plain, plain]))):
        with pytest.raises(ValueError, match=r"drift.* NormalizeObservation is inside"):
            wrap(inner)
        inner.close()
    envs = NormalizeVectorObservation(wrap(make([plain, plain])))
    envs.reset(seed=0)
    found = [len(t) for _ in range(4) for t in finished_trajectories(envs.step(ACTIONS[0, :2])[-1])]
    assert found == [4, 4]
    envs.close()


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


class CostAtReset(gym.Wrapper):
    """Reports the int 0 at a reset, as the tasks of `pbcrl_envs` report 0.0."""

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs, info | {"cost": 0}


@pytest.mark.parametrize("mode", MODES)
def test_learned_costs_of_single_wrappers_are_whole_where_another_env_resets(mode):
    """Gymnasium takes the type of the array from env 0, which ends in every step."""
    model = linear_model()
    singles = [lambda n=n: PreferenceCostWrapper(CostAtReset(Counter(n)), model) for n in (1, 99)]
    envs = SyncVectorEnv(singles, autoreset_mode=mode)
    _, infos = envs.reset(seed=0)
    assert infos["cost"].dtype == np.float64
    for t in range(4):
        *_, infos = envs.step(np.full((2, 1), 0.0625, np.float32))
        assert infos["cost"][1] == t + 0.5  # t + 8 a


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
    with pytest.raises(ValueError, match=r"is AutoresetMode.DISABLED; set it to .*NEXT_STEP"):
        PreferenceCostVectorWrapper(counters(AutoresetMode.DISABLED), linear_model())


def test_an_unknown_autoreset_mode_is_refused():
    envs = counters(AutoresetMode.NEXT_STEP)
    del envs.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match=r"'autoreset_mode'\] of .* not set; set it to Autoreset"):
        PreferenceCostVectorWrapper(envs, linear_model())


def test_vector_spaces_that_the_model_cannot_read_are_refused_by_name():
    wander = Wander(Dict(a=Text(9)), Discrete(2), 1)
    envs = SyncVectorEnv([lambda: wander])
    with pytest.raises(ValueError, match=r"observation\['a'\] is Text.*put TransformObservation"):
        PreferenceCostVectorWrapper(envs, linear_model())


def played_alone(env, actions, mode):
    """The trajectories and costs of one env, whose actions a vector env in `mode` would pass on."""
    env.reset(seed=env.unwrapped.length)
    found, costs, done = [], [], False
    for action in actions:
        if done:
            env.reset()
            if mode is AutoresetMode.NEXT_STEP:  # this action is spent on the reset
                costs.append(0.0)
                done = False
                continue
        *_, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        found += finished_trajectories(info)
        costs.append(info["cost"])
    return found, costs


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("obs_space", "action_space"), SPACE_PAIRS, ids=SPACE_IDS)
def test_a_vector_env_of_any_spaces_agrees_with_single_wrappers(obs_space, action_space, mode):
    model, lengths = model_for(obs_space, action_space), [2, 3]
    actions = draw_actions(action_space, 7, len(lengths))
    envs = SyncVectorEnv(
        [lambda length=length: Wander(obs_space, action_space, length) for length in lengths],
        autoreset_mode=mode,
    )
    envs = PreferenceCostVectorWrapper(envs, model)
    envs.reset(seed=lengths)
    infos = []
    for row in actions:
        batch = concatenate(action_space, row, create_empty_array(action_space, len(row)))
        obs, *_, info = envs.step(batch)
        assert envs.observation_space.contains(obs)
        infos.append(info)
    for i, length in enumerate(lengths):
        env = PreferenceCostWrapper(Wander(obs_space, action_space, length), model)
        expected, costs = played_alone(env, [row[i] for row in actions], mode)
        assert len(expected) >= 2
        found = [t for info in infos for t in finished_trajectories(info) if len(t) == length]
        assert_same(found, expected)
        assert found[0].layout == expected[0].layout
        np.testing.assert_allclose([info["cost"][i] for info in infos], costs, rtol=1e-4, atol=1e-6)


def test_the_env_that_an_action_out_of_range_goes_to_is_named_and_the_episodes_go_on():
    space = Box(-1, 1, (2,), np.float32)
    wanderers = [Wander(space, Discrete(2), 2) for _ in range(2)]
    envs = SyncVectorEnv([lambda env=env: env for env in wanderers])
    envs = PreferenceCostVectorWrapper(envs, model_for(space, Discrete(2)))
    envs.reset(seed=0)
    envs.step(np.array([0, 1]))
    with pytest.raises(ValueError, match=r"lie in Discrete\(2\), got 2 \(int64\) in env 1; check"):
        envs.step(np.array([0, 2]))
    first, second = finished_trajectories(envs.step(np.array([0, 0]))[-1])
    np.testing.assert_array_equal(first.actions, [[1, 0], [1, 0]])
    np.testing.assert_array_equal(second.actions, [[0, 1], [1, 0]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"obs": {2: np.nan}}, "^obs must be finite, got nan at step 2 of an episode in env 1"),
        ({"obs": {3: np.nan}}, "^obs must be finite, got nan at step 3 of an episode in env 1"),
        ({"obs": {0: np.inf}}, "^obs must be finite, got inf at reset in env 1; fix"),
        ({"reward": {3: np.inf}}, "^reward must be finite, got inf at step 3 of an episode in env"),
        (
            {"cost": {3: np.nan}},
            "^cost must be finite, got nan at step 3 of an episode in env 1",
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
        diverged.append(discarded_envs(infos, 2).tolist())
        if "final_info" in infos:  # the true cost, 0.5, does not pass for the learned one
            assert (infos["final_info"]["cost"][infos["_final_info"]] != 0.5).all()
    assert diverged == [[t == 1, False] for t in range(6)]
    if mode is AutoresetMode.SAME_STEP:
        assert [own for own, _ in lengths] == [None, None, None, None, 3, None]
        assert [other for _, other in lengths] == [1] * 6
    else:
        assert [own for own, _ in lengths] == [None, None, None, None, None, 3]
        assert [other for _, other in lengths] == [1, None] * 3


@pytest.mark.parametrize("mode", MODES)
def test_step_costs_reads_gymnasiums_vector_envs_in_both_modes(mode):
    envs = counters(mode)
    envs.reset(seed=0)
    valid = np.ones(3, bool)
    for actions in ACTIONS:
        *_, terminated, truncated, infos = envs.step(actions)
        done = terminated | truncated
        costs = step_costs(infos, 3, done, valid=valid)
        np.testing.assert_array_equal(costs, np.abs(actions[:, 0]) * valid)
        if mode is AutoresetMode.NEXT_STEP:
            valid = ~done


def test_a_vector_env_of_another_time_limit_than_the_learned_limit_s_is_refused():
    envs = BatchedCounter([3, 3])
    envs.spec = EnvSpec("Counter-v0", max_episode_steps=20)
    with pytest.raises(ValueError, match="learned on: 10, but episodes here have a time limit of"):
        PreferenceCostVectorWrapper(envs, CostModel(*boxes(2, 1), horizon=10))


def test_every_env_counts_its_own_steps_up_to_the_horizon():
    envs = PreferenceCostVectorWrapper(BatchedCounter([1, 9]), CostModel(*boxes(2, 1), horizon=2))
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="learned on: 2, got a trajectory of 3"):
        envs.step(np.zeros((2, 1), np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapper_goes_on_where_another_was(mode):
    def play(envs, actions):
        return [episode for a in actions for episode in finished_trajectories(envs.step(a)[-1])]

    model, singles = random_model(), counters(mode)
    whole = PreferenceCostVectorWrapper(counters(mode), model)
    whole.reset(seed=0)
    expected = play(whole, ACTIONS)
    before = PreferenceCostVectorWrapper(singles, model)
    with pytest.raises(ResetNeeded):
        before.state_dict()
    before.reset(seed=0)
    found = play(before, ACTIONS[:9])
    after = PreferenceCostVectorWrapper(singles, model)
    state = before.state_dict()
    assert state["envs"] is None  # the envs cannot tell it; they themselves just go on
    after.load_state_dict(state)
    found += play(after, ACTIONS[9:])
    assert len(expected) > 5
    assert_same(found, expected)


class SavedCounter(BatchedCounter):
    """A `BatchedCounter` that can tell its state and take it over."""

    def state_dict(self):
        return {"rows": self.rows.copy(), "draws": [env.np_random for env in self.envs]}

    def load_state_dict(self, state):
        self.envs, self.rows = [Counter() for _ in self.lengths], state["rows"].copy()
        for env, draws in zip(self.envs, copy.deepcopy(state["draws"]), strict=True):
            env.np_random = draws


def test_the_state_of_envs_that_can_tell_it_is_part_of_the_wrapper_s():
    def play(envs, actions):
        return [episode for a in actions for episode in finished_trajectories(envs.step(a)[-1])]

    whole, other, plain = (
        PreferenceCostVectorWrapper(make(LENGTHS), random_model())
        for make in (SavedCounter, SavedCounter, BatchedCounter)
    )
    assert [envs.restores_envs for envs in (whole, plain)] == [True, False]
    whole.reset(seed=0)
    play(whole, ACTIONS[:9])
    state = copy.deepcopy(whole.state_dict())
    expected = play(whole, ACTIONS[9:])
    other.load_state_dict(state)  # never reset
    assert_same(play(other, ACTIONS[9:]), expected)
    assert len(expected) > 5
    with pytest.raises(ValueError, match="needs envs with state_dict and load_state_dict, got"):
        plain.load_state_dict(state)


def test_a_state_without_that_of_the_envs_leaves_them_to_a_reset():
    envs = PreferenceCostVectorWrapper(BatchedCounter(LENGTHS), random_model())
    envs.reset(seed=0)
    envs.step(ACTIONS[0])
    again = PreferenceCostVectorWrapper(BatchedCounter(LENGTHS), random_model())
    again.load_state_dict(envs.state_dict())
    again.reset(seed=5)
    infos = [again.step(actions)[-1] for actions in ACTIONS[:4]]
    assert [len(infos[-1]["trajectory"][2])] == [4]  # no rows of before


def test_a_model_for_a_vector_env_is_that_for_each_of_its_envs():
    model = CostModel.for_env(gym.make_vec("CartPole-v1", 2))
    assert (model.obs_shape, model.act_dim, model.horizon) == ((4,), 2, 500)


@pytest.mark.parametrize("mode", MODES)
def test_finished_episodes_have_rewards_how_they_ended_and_the_true_final_observation(mode):
    """Not the first observation of the next episode, in either autoreset mode."""
    limits = [lambda: TimeLimit(Counter(99), 3), lambda: Counter(2), lambda: Counter(4)]
    envs = PreferenceCostVectorWrapper(SyncVectorEnv(limits, autoreset_mode=mode), linear_model())
    envs.reset(seed=0)
    found, rewards = [], np.zeros((12, 3), np.float32)
    for t in range(12):
        _, rewards[t], _, _, infos = envs.step(ACTIONS[t])
        found += finished_trajectories(infos)
    assert {(len(one), one.terminated, float(one.final_obs[0])) for one in found} == {
        (3, False, 3.0),
        (2, True, 2.0),
        (4, True, 4.0),
    }
    first = {len(one): one for one in reversed(found)}
    for column, steps in enumerate([3, 2, 4]):
        assert (first[steps].rewards == rewards[:steps, column]).all()
