"""What a run says of its policy and of its learned cost: numbers, and their meaning in words."""

import json
import math
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pbcrl import (
    Answers,
    CostModel,
    FeedbackLoop,
    LearnedCost,
    LearnedLimit,
    PreferenceBuffer,
    SyntheticOracle,
    Trajectory,
    TreeCost,
    metrics,
)
from pbcrl.effects import Effect, Threshold
from pbcrl_envs.toy import PointHazardsEnv
from pbcrl_envs.toy.point_hazards import HAZARD_RADIUS, HAZARDS
from pbcrl_script_utils import evaluation, verdict
from pbcrl_script_utils.monitor import LabelMonitor, LabelWatch
from pbcrl_script_utils.run import Run

from .conftest import SCRIPTS
from .runs import cut_off, resume, small_ppo_lag
from .runs import summary as summary_of

TOY = "PointHazards-v0"


@pytest.fixture(scope="module", params=[TreeCost, CostModel])
def cost_model(request) -> LearnedCost:
    env = PointHazardsEnv()
    return request.param(env.observation_space, env.action_space)


class Driver:
    """A policy that drives to the upper right, with noise if it gets a generator."""

    def act(self, obs, noise=None):
        drift = np.tile([0.8, 0.5], (len(obs), 1)).astype(np.float32)
        if noise is None:
            return drift
        rng = np.random.default_rng(noise.initial_seed())
        return (drift + rng.normal(size=drift.shape)).astype(np.float32)


@dataclass(frozen=True)
class Args:
    """What a run and an evaluation read of a script's arguments."""

    runs_dir: str
    run_name: str = "run"
    env_id: str = TOY
    seed: int = 0
    resume: str | None = None
    eval_episodes: int = 8
    capture_video: int = 0
    threads: int = 1
    batch_size: int = 100
    num_iterations: int = 1
    checkpoint_interval: int = 10


@dataclass
class Progress:
    iteration: int = 0


# -- Numbers -----------------------------------------------------------------------------------


def test_of_10_14_12_the_mean_is_known_to_2_26():
    """Standard deviation 2, over the root of 3, times 1.96."""
    assert verdict.interval([10.0, 14.0, 12.0]) == pytest.approx(1.96 * 2 / math.sqrt(3))
    assert math.isnan(verdict.interval([10.0]))


def test_a_report_has_the_step_auroc_of_all_steps_at_once(cost_model, toy_episodes):
    obs, actions = (
        np.concatenate([getattr(e, name) for e in toy_episodes]) for name in ("obs", "actions")
    )
    costly = np.concatenate([episode.costs for episode in toy_episodes])
    assert 0 < (costly > 0).mean() < 1
    expected = metrics.auroc(cost_model.step_cost(obs, actions), costly, 0)
    report = evaluation.Judge.of(cost_model).report(toy_episodes, 5.0)
    assert report["step_auroc"] == pytest.approx(expected, abs=1e-4)
    assert set(report) == {"step_auroc", *metrics.REPORT}


def test_what_episodes_leave_undefined_is_nan_without_a_warning(toy_episodes):
    judge = evaluation.Judge(lambda episodes: np.ones(len(episodes)), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = judge.report(toy_episodes, 1e6)
    assert all(
        math.isnan(report[key]) for key in ("balanced_accuracy", "true_cost_at_limit", "step_auroc")
    )


def test_a_finished_run_says_what_its_policy_costs_and_how_sure_that_is(
    tmp_path, capsys, cost_model, toy_episodes
):
    args, judge = Args(str(tmp_path)), evaluation.Judge.of(cost_model)
    with Run(args, script=str(SCRIPTS / "ppo_lag.py")) as run:
        for _ in run.iterations(Progress()):
            run.log(100, {"return": 1.0})
        (run.folder / "agent.safetensors").write_bytes(b"a policy")  # there is one to play again
        found = evaluation.evaluate(
            run, Driver(), args, 5.0, np.ones((10, 2)), judge, toy_episodes[:30]
        )
        run.finish(found)
    printed = capsys.readouterr().out.splitlines()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())

    played = {}
    for suffix, deterministic in [("", True), ("_stochastic", False)]:
        returns, episodes = evaluation.play(
            Driver(), TOY, episodes=8, seed=1_000_000, deterministic=deterministic
        )
        true = np.array([episode.true_cost for episode in episodes])
        assert summary[f"return{suffix}_interval"] == pytest.approx(verdict.interval(returns))
        assert summary[f"true_cost{suffix}"] == pytest.approx(true.mean())
        half = 1.96 * true.std(ddof=1) / math.sqrt(8)
        assert summary[f"true_cost{suffix}_interval"] == pytest.approx(half)
        assert summary[f"violation_rate{suffix}"] == np.mean(true > 5)
        assert summary[f"bias{suffix}"] == pytest.approx(abs(true.mean() - 5))
        learned = cost_model.score(episodes).mean()
        assert summary[f"learned_cost{suffix}"] == pytest.approx(learned, abs=1e-6)
        played[suffix] = episodes
    latest = [*played[""], *played["_stochastic"]]
    auroc = metrics.step_auroc(cost_model.step_cost, latest)
    assert summary["step_auroc_evaluation"] == pytest.approx(auroc)
    assert summary["test_episodes"] == 30
    assert summary["eval_episodes"] == 8

    assert summary["verdict"] == verdict.verdict(found)
    begin = printed.index("== verdict") + 1
    assert printed[begin].strip() == summary["verdict"][0]
    assert [line[3:] for line in printed if line.startswith("-- ")] == [
        "policy",
        "learned cost",
        "cost model on test episodes",
        "run",
    ]
    assert printed[-4:-2] == summary["verdict"][:2]
    assert [line.split(":")[0] for line in printed[-2:]] == ["play it again", "curves"]
    assert not any(line.endswith(("  -", "nan", "None")) for line in printed)

    board = EventAccumulator(str(tmp_path / "run"))
    board.Reload()
    (event,) = board.Scalars("evaluation/true_cost_stochastic_interval")
    assert event.step == 100
    assert event.value == pytest.approx(summary["true_cost_stochastic_interval"])


def test_the_true_cost_at_the_learned_limit_is_of_all_episodes_of_the_evaluation(tmp_path):
    """A learned cost that is half the true one, with its limit at 5 true units, is never wrong."""

    def half_the_true(episodes: list[Trajectory]) -> np.ndarray:
        return np.array([episode.true_cost / 2 for episode in episodes])

    args = Args(str(tmp_path))
    judge = evaluation.Judge(half_the_true, 2.5)
    with Run(args, script=str(SCRIPTS / "ppo_lag.py")) as run:
        found = evaluation.evaluate(run, Driver(), args, 5.0, np.ones((0, 2)), judge)
    assert found["true_cost_at_limit_evaluation"] == pytest.approx(5.0)
    assert math.isnan(found["step_auroc_evaluation"])
    assert found["test_episodes"] == 16


# -- Verdicts ----------------------------------------------------------------------------------


def policy(cost: float, half: float, limit: float | None, rate: float | None = 0.5) -> dict:
    """What evaluate.py knows of a policy after 50 episodes."""
    return {
        "policy": "stochastic",
        "episodes": 50,
        "true_cost": cost,
        "true_cost_interval": half,
        "cost_limit": limit,
        "violation_rate": rate,
    }


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            policy(84.3, 9.03, 40, 0.92),
            "limit violated: true cost 84.3 +- 9.0 > 40 "
            "(stochastic policy, 50 episodes, 92% of them above it: at most 97.3% are, at 95 %)",
        ),
        (
            policy(12.34, 4.2, 20, 0.1),
            "limit met: true cost 12.3 +- 4.2 <= 20 "
            "(stochastic policy, 50 episodes, 10% of them above it: at most 19.9% are, at 95 %)",
        ),
        (
            policy(18.9, 4.2, 20, 0.38),
            "limit met, within the noise: true cost 18.9 +- 4.2 <= 20 "
            "(stochastic policy, 50 episodes, 38% of them above it: at most 50.7% are, at 95 %)",
        ),
        (
            policy(20.7, 3.1, 20),
            "limit violated, within the noise: true cost 20.7 +- 3.1 > 20 "
            "(stochastic policy, 50 episodes, 50% of them above it: at most 62.4% are, at 95 %)",
        ),
        (
            policy(3.0, math.nan, 20) | {"episodes": 1},  # its interval is no number
            "too few episodes to tell: true cost 3, limit 20 (stochastic policy, 1 episode); play "
            "50 with --eval-episodes 50",
        ),
        (
            policy(84.3, 12.0, math.inf, None),
            "no limit: true cost 84 +- 12 (stochastic policy, 50 episodes)",
        ),
    ],
)
def test_a_limit_is_met_or_violated_as_far_as_the_episodes_can_tell(found, said):
    assert verdict.verdict(found) == [said]


def test_fifty_episodes_without_a_violation_do_not_exclude_one_in_twenty():
    """0.95 of the time, a rate of 5.8 % shows at least once: 0.942 ** 50 = 0.05."""
    assert verdict.verdict(policy(0.0, 0.0, 0.1, 0.0)) == [
        "limit met: true cost 0 +- 0 <= 0.1 "
        "(stochastic policy, 50 episodes, none above it: at most 5.9% are, at 95 %)"
    ]


def rare(costly: int, episodes: int, limit: float, *, size: float = 1.0) -> list[str]:
    """What is said of a policy of whose episodes few cost anything, and those `size` each."""
    costs = np.zeros(episodes)
    costs[:costly] = size
    found = policy(costs.mean(), verdict.interval(costs), limit, float(np.mean(costs > limit)))
    more = {"episodes": episodes, "costly_episodes": costly, "costly_episode_cost": size}
    return verdict.verdict(found | more)


def test_fifty_episodes_without_a_catastrophe_cannot_tell_about_a_limit_of_one_in_twenty():
    """0.942 ** 50 = 0.05 as above, and 0.95 ** 59 = 0.0485: 59 can. In thousandths as well."""
    assert rare(0, 50, 0.05) == [
        "too few episodes to tell: true cost 0, limit 0.05 (stochastic policy, 50 episodes, none "
        "of which cost anything: at 95 % the mean lies in 0 to 0.058); --eval-episodes 59 would "
        "tell if none of them costs anything"
    ]
    assert rare(0, 59, 0.05)[0].startswith("limit met: true cost 0 +- 0 <= 0.05")
    assert "--eval-episodes 59" in rare(0, 50, 50.0, size=1000.0)[0]
    assert "limit met" in rare(0, 50, 0.05, size=0.8)[0]  # at most 0.058 * 0.8 = 0.047
    assert "limit met" in rare(0, 50, 0.05, size=math.nan)[0]  # training had no cost either


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(0, 50, 0.0, 0.0582), (1, 50, 0.0005, 0.1065), (2, 50, 0.0049, 0.1371), (4, 4, 0.3976, 1.0)],
)
def test_the_interval_of_a_rare_event_is_clopper_and_pearsons(count, total, low, high):
    """Of published tables; of 4 in 4 the lower end is 0.025 ** (1 / 4)."""
    assert verdict.rare_interval(count, total) == pytest.approx((low, high), abs=1e-4)


def test_few_catastrophes_tell_about_a_limit_outside_of_their_exact_interval():
    """The normal interval of 2 in 50, 0.04 +- 0.055, would have excluded a limit of 0.12."""
    assert rare(2, 50, 0.12) == [
        "too few episodes to tell: true cost 0.04, limit 0.12 (stochastic policy, 50 episodes, 2 "
        "of which cost anything: at 95 % the mean lies in 0.0049 to 0.14); --eval-episodes 130 may "
        "tell"
    ]
    assert rare(2, 50, 0.2) == [
        "limit met: true cost 0.04, at 95 % in 0.0049 to 0.14, <= 0.2 "
        "(stochastic policy, 50 episodes, 4% of them above it: at most 12.1% are, at 95 %)"
    ]
    assert rare(2, 50, 0.004)[0].startswith("limit violated: true cost 0.04, at 95 % in 0.0049")
    assert rare(2, 50, 0.04)[0].endswith("so near to the limit no number of episodes tells")
    assert rare(5, 50, 0.12)[0].startswith("limit met, within the noise: true cost 0.100 +- 0.084")


def test_no_number_of_episodes_shows_that_a_cost_is_never_above_0():
    assert rare(0, 50, 0.0)[0].startswith("limit met: true cost 0 +- 0 <= 0 (")
    assert rare(1, 50, 0.0)[0].startswith("limit violated: true cost 0.02")


# -- The multiplier ----------------------------------------------------------------------------


LONGER = "--total-timesteps 2000000"


def said_of(values, *, cap=10.0, is_kept=False):
    return verdict.multiplier_verdict(values, cap=cap, is_kept=is_kept, longer=LONGER)


@pytest.mark.parametrize(
    ("is_kept", "said"),
    [
        (
            False,
            "λ was at its cap of 10 in the last fifth of the run, and cost above the limit: train "
            "longer, --total-timesteps 2000000, give a learned cost more labels, or raise "
            "--multiplier-cap; if no policy can keep the limit, raise the limit",
        ),
        (
            None,
            "λ was at its cap of 10 in the last fifth of the run: where the limit is not kept, "
            "train longer, --total-timesteps 2000000, give a learned cost more labels, or raise "
            "--multiplier-cap; if no policy can keep the limit, raise the limit",
        ),
        (
            True,
            "λ was at its cap of 10 in the last fifth of the run, which was enough: cost was "
            "within the limit",
        ),
    ],
)
def test_a_multiplier_at_its_cap_is_an_alarm_if_the_limit_is_not_kept(is_kept, said):
    at_cap = [*np.linspace(1, 10, 80), *[10.0] * 10, *[9.0] * 10]
    assert said_of(at_cap, is_kept=is_kept) == said
    assert said_of([*at_cap[:-1], 9.0, 9.0], is_kept=is_kept) is None  # 9 of 20 are no half
    assert said_of(at_cap, cap=math.inf) is None


def test_a_policy_that_earns_less_than_at_first_was_stopped_by_the_cost():
    """The first three iterations of 100 have 1, 3 and 2, their mean 2 +- 1.13."""
    start, middle = [1.0, 3.0, 2.0], [50.0] * 77
    stopped = verdict.standstill_verdict([*start, *middle, *[0.5, 1.0] * 10])
    assert stopped is not None
    assert stopped.startswith(
        "the policy earns less than in its first episodes, 0.75 to 2: the cost has"
    )
    assert verdict.standstill_verdict([*start, *middle, *[1.1, 1.3] * 10]) is None  # the noise of 3
    assert verdict.standstill_verdict([*start, *middle, *[2.0, 9.0] * 10]) is None
    assert verdict.standstill_verdict([9.0] * 2 + [1.0] * 37) is None  # of so few nothing is said
    told = verdict.standstill_verdict([*start, *middle, *[0.5, 1.0] * 10], by_labels=False)
    assert told is not None
    assert told.endswith("If a safe policy can earn more, raise the limit")
    # It hovers from the fourth iteration on, so as not to crash.
    assert verdict.standstill_verdict([2.2, -0.15, -28.5, *[-40.0] * 247]) is not None


def test_a_safe_policy_that_earns_less_than_unsafe_ones_is_not_called_stopped():
    said = verdict.standstill_verdict([320.0] * 12 + [291.0] * 238, were_unsafe=True)
    assert said is not None
    assert said.startswith(
        "the policy earns less than in its first episodes, which were unsafe, 291 to 320: that may "
        "be the price of safety"
    )


def test_where_the_share_of_unsafe_episodes_binds_it_is_named_instead_of_the_mean():
    """λ is 0.1 on average in the last fifth, and cost below half of 2."""
    options = {"limit": 2.0, "unsafe_rate": 0.05}
    said = verdict.share_verdict([*[0.03] * 80, *[0.05, 0.15] * 10], cost=0.99, **options)
    assert said is not None
    assert said.startswith(
        "cost was 0.99 in the last fifth, far within 2: what binds is that 5% of"
    )
    assert "--max-unsafe-rate" in said
    assert verdict.share_verdict([*[3.0] * 80, *[0.05] * 20], cost=0.99, **options) is None
    assert verdict.share_verdict([1.0] * 100, cost=1.0, **options) is None
    assert verdict.share_verdict([1.0] * 100, cost=math.nan, **options) is None
    assert verdict.share_verdict([], cost=0.1, **options) is None


def test_an_interval_that_is_nothing_beside_its_mean_has_one_digit():
    assert verdict.plus_minus(7.6137430167, 2.9e-9) == "7.614 +- 3e-09"


def test_a_multiplier_that_climbs_to_the_end_says_so():
    """1, 2, .. 300: the means of iterations 241 to 260 and of 281 to 300 are 250.5 and 290.5."""
    climbing = np.arange(1, 301) / 100
    assert said_of(climbing) == (
        "λ was still rising in the last fifth of the run, from 2.5 to 2.9, and cost above the "
        "limit: train longer, --total-timesteps 2000000"
    )
    assert said_of(climbing, is_kept=True).endswith(", while cost was within the limit")
    assert said_of(climbing, is_kept=None).split(": ")[1].startswith("where the limit is not kept")
    assert said_of(climbing[:14]) is None  # whatever it does in so few iterations


@pytest.mark.parametrize(
    "values",
    [
        2 * np.ones(300),
        2 + np.sin(np.arange(300) / 10),
        np.exp(-0.01 * np.arange(300)),
        3 - np.exp(-0.02 * np.arange(300)),  # has settled: less than a tenth higher
        [*np.linspace(1, 4, 200), *np.linspace(1, 4, 100)],  # rises to where it has just been
    ],
)
def test_a_multiplier_that_swings_or_rests_or_falls_is_not_worth_a_word(values):
    assert said_of(np.asarray(values)) is None


def test_a_multiplier_that_wanders_about_its_place_is_rarely_called_rising():
    """By proportional and integral control it swings by a factor, with a memory of some updates."""
    rng, called = np.random.default_rng(0), 0
    for _ in range(300):
        noise, log_value = rng.normal(size=250), np.zeros(250)
        for t in range(1, 250):
            log_value[t] = 0.9 * log_value[t - 1] + 0.2 * noise[t]
        called += said_of(np.exp(log_value)) is not None
    assert called / 300 < 1 / 30


def test_a_finished_run_says_that_its_multiplier_was_at_its_cap_resumed_or_not(
    scripts, tmp_path, monkeypatch, save_every
):
    """λ is 1 in all 43 iterations, which is the cap, and no policy costs less than 0.

    The last verdict is on λ, and the same when the first part was another process. Of six
    iterations, three before the first episode is over, it is that they are too few, and nothing
    else about λ.
    """
    save_every(1)
    options = {"cost_limit": 0.001, "multiplier_cap": 1.0, "num_steps": 25}
    options |= {"minibatch_size": 100, "total_timesteps": 4300}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, whole, **options))
    found = summary_of(folder)
    assert found["true_cost_last_fifth"] > 0.001
    assert [line for line in found["verdict"] if "λ" in line] == [
        "λ was at its cap of 1 in the last fifth of the run, and cost above the limit: train "
        "longer, --total-timesteps 8600, give a learned cost more labels, or raise "
        "--multiplier-cap; if no policy can keep the limit, raise the limit",
    ]
    short = small_ppo_lag(scripts, tmp_path / "short", **{**options, "total_timesteps": 600})
    of_short = summary_of(scripts.ppo_lag.train(short))["verdict"]
    assert [line for line in of_short if "λ" in line] == [
        "λ could move in 3 of 6 iterations, and needs 40 moves or more to find its place; give "
        "--total-timesteps 4300, or fewer --num-steps",
    ]
    args = small_ppo_lag(scripts, cut, **options)
    cut_off(scripts.ppo_lag, args, after=5, monkeypatch=monkeypatch)
    assert summary_of(resume(scripts.ppo_lag, cut / "run"))["verdict"] == found["verdict"]


def test_the_stochastic_policy_comes_first_since_it_is_the_one_that_was_trained():
    found = {"eval_episodes": 50, "cost_limit": 20}
    for suffix, cost in [("", 10.0), ("_stochastic", 30.0)]:
        found |= {f"true_cost{suffix}": cost, f"true_cost{suffix}_interval": 2.0}
        found[f"violation_rate{suffix}"] = 0.5
    first, second = verdict.verdict(found)
    assert first.startswith("limit violated: true cost 30.0 +- 2.0 > 20 (stochastic policy")
    assert second.startswith("limit met: true cost 10.0 +- 2.0 <= 20 (deterministic policy")


def cost_model_of(**changes: float) -> dict:
    """A policy within its limit; a good cost model, tested on 50 safe and 50 unsafe episodes."""
    return {
        **policy(10.0, 1.0, 20),
        "learned_cost": -1.5,
        "learned_limit": 0.0,
        "balanced_accuracy": 0.81,
        "base_rate": 0.5,
        "auroc": 0.9,
        "step_auroc": 0.7,
        "test_episodes": 100,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            ["the cost model tells safe from unsafe: balanced accuracy 0.81 on 100 test episodes"],
        ),
        (
            {"balanced_accuracy": 0.38, "auroc": 0.4},
            [
                "the cost model is no better than guessing: balanced accuracy 0.38 on 100 test "
                "episodes; more episodes or queries"
            ],
        ),
        (  # Of 50 + 50 guesses the share of right ones is 0.5 with a standard deviation of 0.05.
            {"balanced_accuracy": 0.59, "auroc": 0.6},
            [
                "the cost model may be no better than guessing: balanced accuracy 0.59 on 100 test "
                "episodes, where guessing gives 0.500 +- 0.098; more episodes or queries"
            ],
        ),
        (
            {"balanced_accuracy": 0.5, "auroc": 0.93},
            [
                "the cost model orders episodes, but its limit is misplaced: balanced accuracy "
                "0.50 on 100 test episodes, and AUROC 0.93"
            ],
        ),
        (
            {"balanced_accuracy": math.nan, "auroc": math.nan, "base_rate": 1.0},
            ["the cost model cannot be judged: 100 test episodes are on one side of the limit"],
        ),
        (  # 5 of 150: of 4 right ones, guessing gets as many or more in 19 % of all cases.
            {"balanced_accuracy": 0.8, "base_rate": 145 / 150, "test_episodes": 150},
            [
                "too few episodes to judge the cost model by: balanced accuracy 0.80 on 150 test "
                "episodes, only 5 of them on one side of the limit"
            ],
        ),
        (
            {"balanced_accuracy": 0.8, "base_rate": 0.9},
            ["the cost model tells safe from unsafe: balanced accuracy 0.80 on 100 test episodes"],
        ),
        (
            {"step_auroc": 0.57},
            [
                "the cost model tells safe from unsafe: balanced accuracy 0.81 on 100 test "
                "episodes",
                "the cost model hardly knows which steps cost: step AUROC 0.57, guessing gives 0.5",
            ],
        ),
    ],
)
def test_a_cost_model_is_compared_with_guessing(changes, said):
    assert verdict.verdict(cost_model_of(**changes))[1:] == said


@pytest.mark.parametrize(
    ("learned", "said"),
    [
        (-0.312, "the learned cost says that the limit holds: -0.312 <= 0"),
        (
            0.8,
            "the learned cost is above its limit, too: 0.8 > 0; train longer",
        ),
    ],
)
def test_where_the_limit_is_violated_it_says_whether_the_learned_cost_knows(learned, said):
    found = cost_model_of(learned_cost=learned, true_cost=84.0)
    assert verdict.verdict(found)[1] == said


@pytest.mark.parametrize(
    ("safe", "unsafe", "said"),
    [
        (40, 0, "all 40 safety labels are safe"),
        (0, 8, "all 8 safety labels are unsafe"),
        (0, 0, "no label says whether an episode is safe"),
    ],
)
def test_where_labels_tell_no_limit_no_cost_is_called_within_it(safe, unsafe, said):
    labels = {"safe_labels": safe, "unsafe_labels": unsafe}
    unknown = {"true_cost": math.nan, "cost_limit": math.nan, "learned_cost": 0.0}
    said = f"no limit was learned: {said}"
    assert verdict.cost_model_verdicts(cost_model_of(**unknown, **labels)) == [said]
    known = {"learned_cost": 0.0, "true_cost": 84.0}
    first, second = verdict.cost_model_verdicts(cost_model_of(**known, **labels))
    assert (first, second.split(":")[0]) == (said, "the cost model tells safe from unsafe")


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (18.94, 4.22, "18.9 +- 4.2"),
        (20.034, 0.061, "20.034 +- 0.061"),
        (1234.5, 123.4, "1,234 +- 123"),
        (0.0, 0.0, "0 +- 0"),
        (5.25, math.nan, "5.25"),
    ],
)
def test_a_mean_is_shown_to_two_digits_of_its_interval(mean, half, text):
    assert verdict.plus_minus(mean, half) == text


# -- Warning while training --------------------------------------------------------------------


def warned(rounds: list[tuple[float | None, float | None]], limit: float = 0.0) -> list[bool]:
    watch = LabelWatch()
    return [watch.update(rate, learned, limit) is not None for rate, learned in rounds]


def test_five_rounds_of_mostly_unsafe_labels_under_a_learned_cost_within_its_limit_are_warned_of():
    assert warned([(0.6, -1.0)] * 6) == [False] * 4 + [True] * 2


def test_half_of_the_labels_or_a_learned_cost_above_its_limit_is_no_contradiction():
    assert not any(warned([(0.5, -1.0)] * 6))
    assert not any(warned([(0.9, 1.0)] * 6))
    assert not any(warned([(0.9, -1.0), (0.9, -1.0), (0.4, -1.0)] * 3))
    assert warned([(0.9, 1.0)] * 5, limit=2.0)[-1]


def test_iterations_without_labels_or_episodes_are_passed_over():
    rounds = [(None, -1.0), (math.nan, -1.0), (0.6, None), (0.6, -1.0)]
    assert warned(rounds * 5) == [False] * 19 + [True]


def test_the_warning_says_what_contradicts_what_and_what_to_do():
    watch = LabelWatch()
    *_, said = (watch.update(0.8, -1.0, 0.0) for _ in range(5))
    assert said == (
        "labels say that the constraint is broken, the learned cost says that it holds: in each of "
        "5 labelling rounds more than half of the labels were unsafe, while the mean learned cost "
        "was within its limit; ask more --online-queries"
    )


@dataclass(frozen=True)
class NoRound(Args):
    """Of a run that buys no labels."""

    def is_round(self, _: int) -> bool:
        return False


def test_a_rare_catastrophe_with_a_large_learned_cost_is_no_runaway(
    tmp_path, cost_model, toy_episodes
):
    """One episode in 20 at 100 has a standard deviation of 22; separable labels lead there.

    What runs away is a variance term without a bound, of which the trainer warns (`max_std=None`).
    Of ten good runs of 20,000 queries in docs/results/trees.csv, eight were once warned of.
    """
    args = NoRound(str(tmp_path))
    loop = FeedbackLoop(SyntheticOracle(5.0), PreferenceBuffer(()), rng=np.random.default_rng(0))
    learned = np.array([100.0, *np.zeros(19)])
    with Run(args, script=str(SCRIPTS / "ppo_lag.py")) as run:
        monitor = LabelMonitor(run, args, cost_model, loop, LearnedLimit(), horizon=100, limit=5.0)
        logged = monitor.update(1, Answers(), toy_episodes[:20], learned, 5.0)
        assert run.state_dict()["warnings"] == []
    assert logged["learned_cost_std"] == pytest.approx(100 * math.sqrt(0.05 * 0.95))


def test_a_resumed_run_warns_where_the_uninterrupted_one_does():
    watch, resumed = LabelWatch(), LabelWatch()
    assert all(watch.update(0.8, -1.0, 0.0) is None for _ in range(4))
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.update(0.8, -1.0, 0.0) == watch.update(0.8, -1.0, 0.0) is not None


@pytest.mark.filterwarnings("always:all is")
def test_what_the_library_warns_of_while_it_runs_is_the_run_s_and_has_no_line_of_code(
    tmp_path, capsys
):
    with Run(Args(str(tmp_path)), script=str(SCRIPTS / "ppo_lag.py")) as run:
        for _ in range(2):
            warnings.warn_explicit("all is safe", UserWarning, str(SCRIPTS / "ppo_lag.py"), 7)
        warnings.warn_explicit("all is numbers", UserWarning, "/elsewhere/numbers.py", 7)
        assert run.state_dict()["warnings"] == ["all is safe"]
    assert capsys.readouterr().out.count("   warning: all is safe\n") == 1


def test_what_a_run_has_warned_of_is_still_in_its_summary_after_a_resume(tmp_path):
    args = Args(str(tmp_path))
    with Run(args, script=str(SCRIPTS / "ppo_lag.py")) as run:
        run.warn("the sky falls")
        state = run.state_dict()
    again = Args(str(tmp_path), resume=str(tmp_path / "run"))
    with Run(again, script=str(SCRIPTS / "ppo_lag.py")) as run:
        run.load_state_dict(state)
        assert list(run.iterations(Progress())) == [1]
        found = {**policy(1.0, 0.1, 2), "multiplier": 0.0}
        run.finish(found)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"] == [
        "the sky falls"
    ]


# -- What a run shows ------------------------------------------------------------------------------


def test_tensorboard_has_groups_a_limit_line_and_the_hyperparameters(scripts, tmp_path):
    args = small_ppo_lag(scripts, tmp_path, capture_video=1)
    folder = scripts.ppo_lag.train(args)
    board = EventAccumulator(str(folder))
    board.Reload()
    tags = board.Tags()
    assert {"policy/return", "policy/true_cost", "update/kl", "seconds/seconds_rollout"} <= set(
        tags["scalars"]
    )
    assert [event.value for event in board.Scalars("policy/cost_limit")] == [5.0] * 3
    assert tags["images"] == ["films/seed-1000000"]
    assert board.Images("films/seed-1000000")[0].encoded_image_string.startswith(b"GIF89a")
    (text,) = board.Tensors("hyperparameters/text_summary")
    assert b"| learning_rate | 0.001 |" in text.tensor_proto.string_val[0]


def test_a_run_that_is_resumed_may_be_tracked(
    scripts, tmp_path, save_every, monkeypatch, stand_in_for_wandb
):
    save_every(1)
    cut_off(scripts.ppo_lag, small_ppo_lag(scripts, tmp_path), after=2, monkeypatch=monkeypatch)
    resume(scripts.ppo_lag, tmp_path / "run", track=True)
    assert {row["env_steps"] for row in stand_in_for_wandb.rows[:-1]} == {800, 1200}


@pytest.fixture
def stand_in_for_wandb(monkeypatch):
    """Keeps what it is given."""
    kept = SimpleNamespace(rows=[], axes={}, films=[], began=[])
    tracked = SimpleNamespace(
        log=kept.rows.append,
        define_metric=lambda name, *, step_metric: kept.axes.update({name: step_metric}),
        finish=lambda *, exit_code: kept.rows.append({"exit_code": exit_code}),
    )
    module = ModuleType("wandb")
    module.init = lambda **how: kept.began.append((how["id"], how["resume"])) or tracked
    module.Video = lambda path, **how: kept.films.append((path, how))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("pbcrl_script_utils.args.find_spec", lambda _: True)
    return kept


def test_tracking_sends_what_tensorboard_has_once(scripts, tmp_path, stand_in_for_wandb):
    rows = stand_in_for_wandb.rows
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, track=True, capture_video=1))
    board = EventAccumulator(str(folder))
    board.Reload()
    assert stand_in_for_wandb.axes == {"*": "env_steps", "pretraining/*": "pretraining/steps"}
    assert rows.pop() == {"exit_code": 0}
    for tag in board.Tags()["scalars"]:
        points = [(row["env_steps"], row[tag]) for row in rows if tag in row]
        assert points == [
            (event.step, pytest.approx(event.value, rel=1e-6)) for event in board.Scalars(tag)
        ]
    film = str(folder / "videos" / "seed-1000000.mp4")
    assert stand_in_for_wandb.films == [(film, {"format": "mp4"})]
    resume(scripts.ppo_lag, folder, total_timesteps=1_600)
    assert stand_in_for_wandb.began == [((folder / "wandb_id").read_text(), "allow")] * 2


def test_tracking_without_wandb_is_refused_before_anything_is_made(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr("pbcrl_script_utils.args.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="--track logs to Weights & Biases, but wandb is not"):
        scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, track=True))
    assert not any(tmp_path.iterdir())


# -- Pictures --------------------------------------------------------------------------------------


def test_the_map_of_a_cost_that_is_the_true_one_lies_on_the_hazards():
    plots = pytest.importorskip("pbcrl_script_utils.plots", reason="the pictures need Matplotlib")

    class InsideAHazard:
        """Learned perfectly: 1 where the toy costs 1."""

        def step_cost(self, obs, _):
            distances = np.linalg.norm(obs[:, None, :2] - HAZARDS, axis=-1)
            return (distances < HAZARD_RADIUS).any(axis=1).astype(np.float32)

    true, learned, half = plots.cost_over_plane(TOY, InsideAHazard(), seed=0, views=2)
    np.testing.assert_array_equal(true, learned)
    assert half == 1.0
    area = 4 * math.pi * HAZARD_RADIUS**2 / 4  # of the discs, as a share of the square
    assert true.mean() == pytest.approx(area, rel=0.1)
    assert plots.cost_over_plane("CartPole-v1", InsideAHazard(), seed=0) is None


def test_the_tail_is_the_share_of_episodes_that_cost_at_least_as_much():
    plots = pytest.importorskip("pbcrl_script_utils.plots", reason="the pictures need Matplotlib")
    true = np.array([0.0, 4.0, 1.0, 3.0])
    (axis,) = plots.tail(true, true, 2.0, 2.0).axes
    line = axis.get_lines()[0]
    assert line.get_drawstyle() == "steps-pre"  # a share holds up to its cost, from the one before
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 3, 4])
    np.testing.assert_array_equal(line.get_ydata(), [(true >= c).mean() for c in (0, 1, 3, 4)])


def test_the_picture_of_what_a_cost_follows_has_a_curve_and_the_data_of_each_input():
    plots = pytest.importorskip("pbcrl_script_utils.plots", reason="the pictures need Matplotlib")

    def effect(name, thresholds):
        costs, bins = np.array([0.0, 0.0, 1.0]), np.linspace(0, 1, 31)
        shares = {"safe": np.full(30, 1 / 30), "unsafe": np.full(30, 1 / 30)}
        edges = np.array([0, 0.5, 0.93, 1.0])
        return Effect(name, None, 0.5, 0.5, edges, costs, thresholds, bins, shares)

    seen = effect("max hazards_lidar", (Threshold(0.93, 1.0),))
    figure = plots.effects([seen, effect("flat", (Threshold(0.5, 0.01),))], "TITLE", "NOTE")
    curve, data, flat, _ = figure.axes
    assert curve.get_title(loc="left") == "max hazards_lidar"
    assert curve.get_title(loc="right") == "share 50%"
    assert [text.get_text() for text in curve.texts] == ["0.93"]
    assert [line.get_xdata()[0] for axis in (curve, data) for line in axis.lines] == [0.93, 0.93]
    assert len(data.patches) == 2
    assert list(flat.lines) == []  # what cannot be seen is not marked
    assert flat.get_ylim() == curve.get_ylim()
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "NOTE"
    assert [text.get_text() for text in legend.get_texts()] == [
        *("threshold", "steps of safe episodes", "steps of unsafe episodes")
    ]
    assert plots.effects([], "TITLE", "NOTE") is None
    plots.plt.close(figure)


def test_evaluate_draws_the_learned_cost(scripts, tmp_path, cost_model, capsys):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    arguments = scripts.evaluate.Args(str(folder), episodes=12, plots=True, threads=1)
    with pytest.raises(ValueError, match=r"--plots draws a learned cost, but .* has none"):
        scripts.evaluate.evaluate(arguments)
    cost_model.save(folder / "cost_model.safetensors", env_id=TOY)
    scripts.evaluate.evaluate(arguments)
    assert not (folder / "plots" / "effects.png").exists()  # it has learned nothing yet
    env = PointHazardsEnv()
    trained = CostModel(env.observation_space, env.action_space)
    for weights in trained.parameters():
        torch.nn.init.normal_(weights)
    trained.save(folder / "cost_model.safetensors", env_id=TOY)
    scripts.evaluate.evaluate(arguments)
    drawn = {path.name for path in (folder / "plots").iterdir()}
    assert {"steps.png", "plane.png", "effects.png", "calibration.png"} <= drawn
    assert f"drawn {folder / 'plots' / 'plane.png'}" in capsys.readouterr().out


def test_points_of_the_calibration_lie_apart_also_where_nearly_all_episodes_are_safe():
    """990 episodes by 0.01 and 10 by 0.5: a tenth of them each would lie at 0.01 nine times."""
    plots = pytest.importorskip("pbcrl_script_utils.plots", reason="the pictures need Matplotlib")
    probability = np.r_[np.full(990, 0.01), np.full(10, 0.5)]
    true = np.r_[np.zeros(990), np.full(5, 9.0), np.zeros(5)]
    figure = plots.calibration(true, np.log(probability / (1 - probability)), 5.0, 0.0)
    (axis,) = figure.axes
    (points,) = (c for c in axis.collections if type(c).__name__ == "PathCollection")
    np.testing.assert_allclose(points.get_offsets(), [[0.01, 0.0], [0.5, 0.5]], atol=1e-9)
    (bars,) = (c for c in axis.collections if type(c).__name__ == "LineCollection")
    # Of 0 of 990: 1 - 0.05^(1/990). Of 5 of 10 as tabulated (Clopper and Pearson).
    expected = [[[0.01, 0], [0.01, 0.00302]], [[0.5, 0.1871], [0.5, 0.8129]]]
    np.testing.assert_allclose(bars.get_segments(), expected, atol=1e-4)
    assert axis.get_xlim()[1] == pytest.approx(0.525)
    small, large = sorted(points.get_sizes())
    assert large > 5 * small
    plots.plt.close(figure)


def test_the_tail_ends_at_zero():
    """Costs of 0 to 9 and learned ones of -9 to 9: half of their spread is moved by 2, to -2.5."""
    plots = pytest.importorskip("pbcrl_script_utils.plots", reason="the pictures need Matplotlib")
    learned = np.linspace(-9, 9, 10)
    (axis,) = plots.tail(np.arange(10.0), learned, 2.0, 0.0).axes
    assert min(np.min(line.get_xdata()) for line in axis.get_lines()) == 0
    assert axis.get_xlim()[0] == pytest.approx(-0.03 * 9)  # what costs nothing is a line, at 0
    plots.plt.close(axis.figure)


@pytest.mark.parametrize(
    ("costs", "shown"),
    [(None, ["learned cost"]), (np.zeros(3), ["true cost", "learned cost"])],
)
def test_the_steps_of_an_episode_without_a_true_cost_are_drawn_without_an_empty_half(costs, shown):
    plots = pytest.importorskip("pbcrl_script_utils.plots", reason="the pictures need Matplotlib")
    box = Box(-1, 1, (2,)), Box(-1, 1, (1,))
    model = CostModel(*box)
    figure = plots.step_costs(Trajectory(np.zeros((3, 2)), np.zeros((3, 1)), costs), model)
    assert [axis.get_ylabel() for axis in figure.axes] == shown
    plots.plt.close(figure)
