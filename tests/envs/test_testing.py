"""`check_cost_env` against sound envs, and against one small env per broken rule."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import pbcrl_envs  # noqa: F401 - registers the ids
from pbcrl_envs.testing import CostEnvError, check_cost_env, check_cost_vector_env
from pbcrl_envs.toy import PointHazardsVectorEnv

from ..every_space import SPACE_IDS, SPACE_PAIRS, Wander


class Sound(gymnasium.Env):
    """A random walk of ten steps, cost 1 right of 0; a broken env changes one thing of it."""

    observation_space = Box(-10.0, 10.0, (1,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002 - Gymnasium's signature
        super().reset(seed=seed)
        self.elapsed = 0
        self.x = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.x, {}

    def step(self, action):
        self.elapsed += 1
        self.x = np.clip(self.x + action, -10, 10)
        return self.x, -1.0, False, self.elapsed == 10, {"cost": float(self.x[0] > 0)}


class Changed(Sound):
    """Passes the answer of step number `elapsed` through `change`."""

    def step(self, action):
        return self.change(*super().step(action))

    def change(self, *answer):
        return answer


def changed(change):
    """An env whose `step` answers what `change` makes of a sound answer."""
    env = Changed()
    env.change = change
    return env


def with_cost(value):
    return changed(lambda obs, reward, end, late, _: (obs, reward, end, late, {"cost": value}))


def with_obs(value):
    return changed(lambda _, *rest: (value, *rest))


def test_sound_envs_pass_and_are_seen_to_end():
    env = Sound()
    check_cost_env(env)
    assert env.elapsed == 10
    check_cost_env(gymnasium.make("PointHazards-v0"))


def test_integer_and_numpy_costs_are_numbers():
    for cost in (0, 2, np.float32(0.5), np.int64(3)):
        check_cost_env(with_cost(cost))


class Typed(Sound):
    """Costs by the step of the episode, and of the reset; later steps repeat the last."""

    def __init__(self, *costs, at_reset=None):
        self.costs, self.at_reset = costs, at_reset

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs, info if self.at_reset is None else {"cost": self.at_reset}

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"cost": self.costs[min(self.elapsed, len(self.costs)) - 1]}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Typed(0, 0, 0.7), "got int64 on step 0 and float64 on step 2"),
        (Typed(False, 1), "got bool on step 0 and int64 on step 1"),
        (Typed(np.float32(0), 0.7), "got float32 on step 0 and float64 on step 1"),
        (Typed(0.7, 0.7, 0), "got float64 on step 0 and int64 on step 2"),
        (Typed(0.7, at_reset=0), "got int64 on reset and float64 on step 0"),
    ],
)
def test_costs_that_change_their_type_are_refused(env, message):
    with pytest.raises(CostEnvError, match=rf"must have one type.* {message}; report float"):
        check_cost_env(env)


def test_costs_of_one_type_pass():
    check_cost_env(Typed(0, np.int64(3), at_reset=0))
    check_cost_env(Typed(0.0, np.float64(0.7), at_reset=0.0))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (with_cost(-0.5), "a true cost must be >= 0, got -0.5 on step 0"),
        (with_cost(np.nan), r"info\['cost'\] of step 0 must be finite, got nan"),
        (with_cost(None), r"info\['cost'\] of step 0 must be a number, got None of NoneType"),
        (with_cost(np.zeros(1)), r"info\['cost'\] of step 0 must be a number, got array"),
        (with_obs(np.zeros(2, np.float32)), r"must be arrays of shape \(1,\), got an array of sh"),
        (with_obs([0.0]), r"must be arrays of shape \(1,\), got list on step 0"),
        (with_obs(np.array([np.nan], np.float32)), "the observation of step 0 must be finite"),
        (with_obs(np.array([99], np.float32)), "must lie in the observation space"),
        (with_obs(np.zeros(1)), "got .* of dtype float64 on step 0"),
        (changed(lambda obs, _, *rest: (obs, np.inf, *rest)), "the reward of step 0 must be fin"),
        (changed(lambda obs, _, *rest: (obs, "1", *rest)), "the reward of step 0 must be a number"),
        (
            changed(lambda *answer: (*answer[:2], 0, *answer[3:])),
            "terminated must be a bool",
        ),
        (changed(lambda obs, r, *rest: (obs, r, 0.0, *rest)), r"step must return .* a tuple of 6"),
        (changed(lambda *answer: answer[:4]), "step must return .* a tuple of 4"),
    ],
)
def test_a_step_that_breaks_a_rule_is_named_with_the_rule(env, message):
    with pytest.raises(CostEnvError, match=message):
        check_cost_env(env)


def test_a_cost_missing_on_the_last_step_alone_is_found():
    env = changed(lambda *answer: (*answer[:4], {} if answer[3] else answer[4]))
    with pytest.raises(CostEnvError, match="info has no 'cost' on step 9, only"):
        check_cost_env(env)


def test_an_episode_without_an_end_is_found():
    endless = changed(lambda obs, reward, _, __, info: (obs, reward, False, False, info))
    with pytest.raises(CostEnvError, match=r"50 random steps saw neither .*TimeLimit"):
        check_cost_env(endless, max_steps=50)
    with pytest.raises(CostEnvError, match="an episode must end, but 9 random steps"):
        check_cost_env(Sound(), max_steps=9)
    check_cost_env(Sound(), max_steps=10)


class UnseededStart(Sound):
    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        _, info = super().reset(seed=seed)
        self.x = np.random.default_rng().uniform(-1, 1, 1).astype(np.float32)
        return self.x, info


class LastingState(Sound):
    odometer = 0.0

    def step(self, action):
        obs, _, *rest = super().step(action)
        self.odometer += 1
        return obs, self.odometer, *rest


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (UnseededStart(), r"same seed .* the first observation was .* self\.np_random"),
        (LastingState(), r"reward of step 0 was 1\.0 and then 11\.0; .* let reset clear all state"),
    ],
)
def test_an_env_that_its_seed_does_not_repeat_is_found(env, message):
    with pytest.raises(CostEnvError, match=message):
        check_cost_env(env)


class OldReset(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0]


def test_a_reset_without_info_is_found():
    with pytest.raises(CostEnvError, match=r"must return \(obs, info\) .*, got an array of shape"):
        check_cost_env(OldReset())


@pytest.mark.parametrize(("obs_space", "action_space"), SPACE_PAIRS, ids=SPACE_IDS)
def test_every_space_that_the_wrappers_take_passes(obs_space, action_space):
    check_cost_env(Wander(obs_space, action_space, length=4))


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (Discrete(3), 3, r"must lie in the observation space Discrete\(3\), got 3 of dtype int64"),
        (
            Dict(a=Discrete(3)),
            {"b": 1},
            r"must be dicts with the keys \['a'\], got \['b'\] on reset",
        ),
        (Dict(a=Discrete(3)), 1, r"must be dicts with the keys \['a'\], got int on reset"),
        (Dict(a=Discrete(3)), {"a": 7}, r"got 7 of dtype int64 on reset, part 'a'"),
        (Tuple([Box(0, 1)]), (), r"must be tuples of 1, got a tuple of 0: \(\) on reset"),
        (Tuple([Box(0, 1)]), (np.array([np.nan]),), "observation of reset, part 0 must be finite"),
    ],
)
def test_an_observation_that_is_not_of_its_space_is_named_with_its_part(space, value, message):
    env = Wander(space, Discrete(2), length=4)
    env.look = lambda: value
    with pytest.raises(CostEnvError, match=message):
        check_cost_env(env)


@pytest.mark.parametrize("name", ["observation", "action"])
def test_a_space_without_a_fixed_length_is_refused(name):
    env = Sound()
    setattr(env, f"{name}_space", Dict(a=Sequence(Discrete(3))))
    with pytest.raises(CostEnvError, match=rf"the {name} space must be made of Box, .*Sequence"):
        check_cost_env(env)


def test_an_action_of_several_parts_is_refused():
    env = Sound()
    env.action_space = Tuple([Discrete(3)])
    with pytest.raises(CostEnvError, match="the action space must be a Box, Discrete, MultiDisc"):
        check_cost_env(env)


@pytest.mark.parametrize("check", [check_cost_env, check_cost_vector_env])
def test_a_check_of_no_steps_is_refused(check):
    with pytest.raises(ValueError, match="max_steps must be >= 1, got 0"):
        check(Sound(), max_steps=0)


# -- Batches ---------------------------------------------------------------------------------------


class ChangedBatch(PointHazardsVectorEnv):
    """Passes every answer through `change`, episodes of five steps."""

    def __init__(self, change, mode):
        super().__init__(2, max_episode_steps=5, autoreset_mode=mode)
        self.change = change

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        return self.change(obs, rewards, terminations, truncations, infos)


def without(key):
    def change(*answer):
        return *answer[:4], {name: value for name, value in answer[4].items() if name != key}

    return change


def always_rewarded(obs, rewards, *rest):
    return obs, rewards + 1, *rest


def one_cost_for_all(*answer):
    return *answer[:4], {**answer[4], "cost": 0.0}


def negative_costs(*answer):
    return *answer[:4], {**answer[4], "cost": answer[4]["cost"] - 1}


def whole_costs(*answer):
    return *answer[:4], {**answer[4], "cost": answer[4]["cost"].astype(int)}


def short_costs_at_an_end(obs, rewards, terminations, truncations, infos):
    dtype = np.float32 if (terminations | truncations).any() else np.float64
    return obs, rewards, terminations, truncations, infos | {"cost": infos["cost"].astype(dtype)}


def endless(obs, rewards, terminations, truncations, infos):
    return obs, rewards, terminations, np.zeros_like(truncations), infos


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_batched_toy_passes_in_both_modes(mode):
    check_cost_vector_env(PointHazardsVectorEnv(3, autoreset_mode=mode))
    check_cost_vector_env(PointHazardsVectorEnv(3, max_episode_steps=1, autoreset_mode=mode))


@pytest.mark.parametrize(
    ("change", "mode", "message"),
    [
        (without("cost"), "NextStep", "info has no 'cost' on step 0"),
        (one_cost_for_all, "NextStep", r"of shape \(2,\), got float"),
        (negative_costs, "SameStep", "a true cost must be >= 0, got"),
        (whole_costs, "NextStep", r"must be floats.* got int64 on step 0 with the mask '_cost'"),
        (
            short_costs_at_an_end,
            "SameStep",
            "one type.* got float64 on step 0 and float32 on step 4",
        ),
        (always_rewarded, "NextStep", "on step 5 env 0 has reward 1.0, cost 0.0, ended False"),
        (without("final_obs"), "SameStep", r"infos\['final_obs'\] must hold .* on step 4"),
        (without("_final_obs"), "SameStep", r"ended \[ True  True\], got mask \[False False\]"),
        (endless, "NextStep", "within 50 steps of the batch, but 2 of 2 did not"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_named_with_the_rule(change, mode, message):
    with pytest.raises(CostEnvError, match=message):
        check_cost_vector_env(ChangedBatch(change, mode), max_steps=50)


def test_a_batch_that_does_not_reset_its_envs_is_refused():
    envs = SyncVectorEnv([Sound, Sound], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(CostEnvError, match="got <AutoresetMode"):
        check_cost_vector_env(envs)


def test_gymnasiums_own_batch_leaves_the_cost_out_where_every_env_resets():
    with pytest.raises(CostEnvError, match="info has no 'cost' on step 10"):
        check_cost_vector_env(SyncVectorEnv([Sound, Sound]))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_batch_of_dicts_is_checked_part_by_part(mode):
    class Parts(PointHazardsVectorEnv):
        """The batched toy, with its observations under a name."""

        factor = 1.0

        def __init__(self):
            super().__init__(2, max_episode_steps=5, autoreset_mode=mode)
            self.single_observation_space = Dict(all=self.single_observation_space)
            self.observation_space = Dict(all=self.observation_space)

        def reset(self, **options):
            obs, infos = super().reset(**options)
            return {"all": obs}, infos

        def step(self, actions):
            obs, *rest, infos = super().step(actions)
            if "final_obs" in infos:
                infos = infos | {"final_obs": {"all": infos["final_obs"] * self.factor}}
            return {"all": obs}, *rest, infos

    envs = Parts()
    check_cost_vector_env(envs)
    if mode is AutoresetMode.SAME_STEP:
        envs.factor = np.nan
        with pytest.raises(CostEnvError, match="final_obs'] of env 0, part 'all' must be finite"):
            check_cost_vector_env(envs)
