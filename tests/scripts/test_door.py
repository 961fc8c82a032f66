"""What a task is warned of, or refused for, before the first iteration, or in it."""

import dataclasses
import math
import os
import re
import sys

import gymnasium as gym
import numpy as np
import pytest

from pbcrl.errors import MissingCostError, NonFiniteError
from pbcrl_envs.toy import PointHazardsEnv
from pbcrl_script_utils.args import slow_multiplier
from pbcrl_script_utils.door import constant_reward, endless_episodes, unmeasurable_limit
from pbcrl_script_utils.envs import import_env, make_envs
from pbcrl_script_utils.rollout import Rollout

from .conftest import SCRIPTS, Faulty
from .runs import rows, small_pbcrl, small_ppo_lag, small_rlsf, summary

pytestmark = pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")


class Constant(gym.Wrapper):
    """The toy with a reward that is the same in every step."""

    def __init__(self, env, reward):
        super().__init__(env)
        self.reward = reward

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, self.reward, terminated, truncated, info


FAULTS = [(what, number) for what in ("obs", "reward", "cost") for number in (math.nan, math.inf)]
ENVS = {
    f"Faulty-{what}-{number}-v0": lambda what=what, number=number, **kw: Faulty(
        PointHazardsEnv(**kw), what, number, episode=1, step=50
    )
    for what, number in FAULTS
}


class Uncosted(gym.Wrapper):
    """The toy without its cost."""

    def step(self, action):
        return *self.env.step(action)[:4], {}


class Brief(gym.Wrapper):
    """The toy, over after 30 steps, long before its time limit."""

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self.time += 1
        obs, reward, _, truncated, info = self.env.step(action)
        return obs, reward, self.time == 30, truncated, info


ENVS["Brief-v0"] = lambda **kw: Brief(PointHazardsEnv(**kw))
ENVS["Uncosted-v0"] = lambda **kw: Uncosted(PointHazardsEnv(**kw))
ENVS |= {f"Constant{r}-v0": lambda r=r, **kw: Constant(PointHazardsEnv(**kw), r) for r in (0, 1)}


@pytest.fixture(autouse=True, scope="module")
def _envs():
    for env_id, make in ENVS.items():
        gym.register(env_id, entry_point=make, max_episode_steps=100)
    yield
    for env_id in ENVS:
        del gym.registry[env_id]


def small_run(scripts, tmp_path, name, **changes):
    options = {"cost_limit": 5.0, **changes}
    if name == "ppo_lag_pbcrl":
        return small_pbcrl(scripts, tmp_path, None, offline_queries=0, **options)
    return {"ppo_lag": small_ppo_lag, "ppo_lag_rlsf": small_rlsf}[name](
        scripts, tmp_path, **options
    )


# -- Numbers that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl"])
@pytest.mark.parametrize(("what", "number"), FAULTS)
def test_a_number_that_is_not_finite_is_an_error_that_names_it_and_its_step(
    scripts, tmp_path, name, what, number
):
    """Rollouts of 40 steps: it is found when it comes, and not when its episode ends."""
    env_id, fix = f"Faulty-{what}-{number}-v0", "info['cost']" if what == "cost" else "env"
    args = small_run(scripts, tmp_path, name, env_id=env_id, num_steps=40, minibatch_size=80)
    said = rf"{what} must be finite, got {number} at step 50 of an episode in env \d; fix the .*"
    with pytest.raises(NonFiniteError, match=said + re.escape(fix)):
        getattr(scripts, name).train(args)


# -- Rewards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_a_reward_that_never_differs_is_warned_of_once(scripts, tmp_path, name):
    """400 steps per iteration, three iterations."""
    args = small_run(scripts, tmp_path, name, env_id="Constant0-v0")
    found = summary(getattr(scripts, name).train(args))["warnings"]
    assert [text for text in found if "rewards" in text] == [
        "a policy learns from rewards that differ, but all 400 of the first iteration are 0; check "
        "the env's reward, or let it say, too, how near the goal is"
    ]


def test_a_reward_per_step_until_an_episode_ends_by_itself_is_something_to_learn():
    rollout = Rollout(10, make_envs("Constant1-v0", 2))
    rollout.rewards[:] = -1.0
    assert "all 20 of the first iteration are -1" in constant_reward(rollout, 1)
    assert constant_reward(rollout, 2) is None
    rollout.terminated[4, 0] = True
    assert constant_reward(rollout, 1) is None
    rollout.rewards[:] = 0.0
    assert "are 0" in constant_reward(rollout, 1)
    rollout.rewards[3, 1] = 1.0
    assert constant_reward(rollout, 1) is None


# -- Horizons --------------------------------------------------------------------------------------


def args_of(scripts, **changes):
    options = {"num_envs": 4, "num_steps": 50, "minibatch_size": 100, "total_timesteps": 400}
    return scripts.ppo_lag.Args(env_id="TestToy-v0", cost_limit=5.0, **options | changes)


def test_a_run_in_which_no_episode_can_be_over_is_warned_of(scripts):
    """400 steps are 100 for each of four envs."""
    args = args_of(scripts)
    assert endless_episodes(args, 101) == (
        "an episode lasts up to 101 steps, but each of the 4 envs plays 100 in this run: λ may "
        "never move, and nothing may be labelled; give --total-timesteps 8400, or fewer --num-envs"
    )
    for horizon in (1, 20, 50, 100):  # shorter than the rollout, too
        assert endless_episodes(args, horizon) is None


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl"])
@pytest.mark.parametrize("env_id", ["TestToy-v0", "PointHazards-v0"])
def test_no_episode_is_over_in_a_run_that_is_warned_of_and_one_is_in_the_next_longer(
    scripts, tmp_path, name, env_id
):
    """In plain envs as in batched ones, whose first episodes are cut, but for one."""
    options = {"env_id": env_id, "num_steps": 25, "minibatch_size": 100}
    for steps in (300, 400):
        args = small_run(
            scripts, tmp_path, name, total_timesteps=steps, run_name=f"{steps}", **options
        )
        found = summary(getattr(scripts, name).train(args))
        is_short = steps == 300
        assert any("λ may never move" in text for text in found["warnings"]) == is_short
        assert (found["return_last_fifth"] is None) == is_short


def test_where_an_iteration_is_a_part_of_an_episode_there_are_as_many_moves_as_episodes(scripts):
    """100 iterations of 100 steps are 10 episodes of 1,000; there must be 400 iterations."""
    args = args_of(scripts, num_envs=1, num_steps=100, total_timesteps=10_000)
    assert slow_multiplier(args, 100) is None
    assert slow_multiplier(args, 1_000) == (
        "λ will move some 10 times, once per episode, and needs 40 moves or more to find its "
        "place; give --total-timesteps 40000, or fewer --num-steps"
    )
    assert slow_multiplier(dataclasses.replace(args, total_timesteps=40_000), 1_000) is None
    for steps, said in ((1_900, "once, and"), (900, "never, and")):
        short = dataclasses.replace(args, total_timesteps=steps)
        assert f"λ will move {said} needs 40" in slow_multiplier(short, 1_000)


def test_after_a_run_moves_are_counted_and_the_advice_is_that_of_its_start(
    scripts, tmp_path, capsys
):
    """Ten steps of four envs each: the toy's episodes of 100 end in iterations 10, 13 and 15.

    Those of the other env end early, and so in more of them.
    """
    moved = {}
    for name in ("TestToy", "Brief"):
        options = {"num_steps": 10, "minibatch_size": 40, "total_timesteps": 600}
        options |= {"eval_episodes": 1, "run_name": name}
        folder = scripts.ppo_lag.train(
            small_ppo_lag(scripts, tmp_path, env_id=f"{name}-v0", cost_limit=5.0, **options)
        )
        advice = "and needs 40 moves or more to find its place; give --total-timesteps 4320"
        said = capsys.readouterr().out
        assert f"note: λ will move some 3 times, once per episode, {advice}" in said
        moved[name] = sum(row["true_cost"] is not None for row in rows(folder))
        assert f"λ could move in {moved[name]} of 15 iterations, {advice}" in said
    assert moved["TestToy"] == 3 < moved["Brief"]


# -- Threads ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of this process in /proc")
@pytest.mark.parametrize("env_id", ["SafetyPointGoal1-v0", "SafetyHalfCheetahVelocity-v1"])
@pytest.mark.parametrize("threads", [1, 3])
def test_physics_takes_the_threads_that_a_script_is_given(env_id, threads):
    """The calling one is one of them. That they do not change what comes out: tests/envs."""
    first = make_envs(env_id, 1)  # libraries start a thread of their own, once
    first.reset(seed=0)
    first.close()
    before = set(os.listdir("/proc/self/task"))  # of which some may end
    envs = make_envs(env_id, 4, threads=threads)
    envs.reset(seed=0)
    envs.step(np.zeros(envs.action_space.shape, np.float32))
    assert len(set(os.listdir("/proc/self/task")) - before) == threads - 1
    envs.close()


# -- Limits ----------------------------------------------------------------------------------------


def test_a_limit_that_an_iteration_cannot_measure_is_named(scripts):
    """Two episodes per iteration: one that costs 1 is a mean of 0.5, ten times a limit of 0.05.

    λ counts at most six times the limit, for which 1 / (6 * 0.05) = 3.3 episodes are needed.
    """
    args = args_of(scripts)
    assert unmeasurable_limit(args, 100, 0.05) == (
        "by a limit of 0.05, one in 20 episodes may cost 1, but an iteration has about 2 of them: "
        "λ, which follows the mean of some 5 iterations, hardly sees such costs; give --num-steps "
        "84 or more, or more --num-envs, and as many more --total-timesteps"
    )
    assert unmeasurable_limit(dataclasses.replace(args, num_steps=84), 100, 0.05) is None
    for limit in (0.1, 1.0, 25.0, math.inf, math.nan):
        assert unmeasurable_limit(args, 100, limit) is None
    learned = scripts.ppo_lag_pbcrl.Args(env_id="TestToy-v0", num_envs=4, num_steps=50)
    assert unmeasurable_limit(learned, 100, 0.05) is None  # its cost has another scale


def test_a_limit_of_0_is_possible_and_explained(scripts, tmp_path, capsys):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, cost_limit=0.0))
    assert (
        "note: by a limit of 0 no episode may cost anything: λ never falls below where it started, "
        "and ends at its cap if costs go on; where a little cost is acceptable, give it as "
        "--cost-limit, or set a price by --multiplier-lr 0 and --multiplier-initial"
    ) in capsys.readouterr().out
    assert summary(folder)["multiplier"] > 1


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_an_env_without_a_cost_is_refused_under_a_limit_before_anything_is_collected(
    scripts, tmp_path, name
):
    args = small_run(scripts, tmp_path, name, env_id="Uncosted-v0")
    with pytest.raises(MissingCostError, match=r"Uncosted-v0 reports none; .* --label-folder"):
        getattr(scripts, name).train(args)
    assert not (tmp_path / args.run_name).exists()


def test_an_installed_package_stays_on_the_path_when_an_env_s_module_is_imported(
    tmp_path, monkeypatch
):
    """There the folder above it is that of all packages, and in a checkout that of the scripts."""
    (tmp_path / "yard.py").write_text("")
    installed = tmp_path / "site-packages"
    for folder, stays in ((installed, True), (SCRIPTS, False)):
        monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path), *sys.path])
        where = folder / "pbcrl_script_utils" / "envs.py"
        monkeypatch.setattr("pbcrl_script_utils.envs.__file__", str(where))
        import_env("yard:Yard-v0", by_user=True)
        assert (str(folder) in sys.path) == stays


def test_a_near_id_of_a_module_is_proposed_with_the_module(tmp_path, monkeypatch):
    """As it can be typed: the id alone would not be found."""
    (tmp_path / "parking_lot.py").write_text(
        "import gymnasium as gym\n"
        "from pbcrl_envs.toy import PointHazardsEnv\n"
        "gym.register('Parking-v0', PointHazardsEnv, max_episode_steps=9)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        import_env("parking_lot:Parkin-v0", by_user=True)  # as a command line has it
        with pytest.raises(ValueError, match=r"did you mean parking_lot:Parking-v0"):
            make_envs("parking_lot:Parkin-v0", 1)
    finally:
        gym.registry.pop("Parking-v0", None)
