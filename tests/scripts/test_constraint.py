"""What moves the multiplier: the learned cost, the rate of unsafe episodes, or judged batches."""

import gc
import json
import math

import pytest
import torch

from pbcrl import Acceptance, LagrangeMultiplier, LearnedLimit, UnsafeRate
from pbcrl.data.label_log import read_labels
from pbcrl.oracle import DelayedOracle
from pbcrl.storage import load_tensors
from pbcrl.trajectory import GridLabel
from pbcrl_script_utils.resume import stored_args

from .conftest import load

# So small runs leave measures undefined, and noisy labels contradict each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:labels of the same trajectories should agree"),
]

CONSTRAINTS = "learned", "rate", "accept"
ITERATIONS = 12
TINY = {
    "env_id": "PointHazards-v0",
    "seed": 1,
    "total_timesteps": 400 * ITERATIONS,
    "num_envs": 4,
    "num_steps": 100,
    "update_epochs": 1,
    "minibatch_size": 200,
    "hidden_sizes": (8,),
    "eval_episodes": 4,
    "threads": 1,
    "offline_queries": 100,
    "online_queries": 120,  # 60 in three rounds of 4 episodes, then 24, 19 and 17 of 12
    "safety_noise": 0.1,  # so that the oracle has a random stream
    "finetune_interval": 3,
    "accept_batch": 12,
}
BATCHES = 5, 8, 11  # rows of metrics.jsonl
ROUNDS = 0, 1, 2, *BATCHES  # the first three have too few episodes for a batch


@pytest.fixture
def script(monkeypatch):
    found = load("ppo_lag_pbcrl")
    monkeypatch.setattr(found.Args, "checkpoint_interval", 2)
    return found


@pytest.fixture
def make_args(script, tmp_path, toy_dataset):
    def make(name, **changes):
        place = {"runs_dir": str(tmp_path), "run_name": name, "dataset": str(toy_dataset)}
        return script.Args(**{**TINY, **place, **changes})

    return make


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    return {k: v for k, v in found.items() if "seconds" not in k and k != "steps_per_second"}


class Stop(BaseException):
    """As sudden as a kill, but in this process."""


@pytest.mark.parametrize(
    "options",
    [
        {"constraint": "rate", "cost_model": "trees", "marks": True},
        *(
            pytest.param({"constraint": one}, marks=() if one == "rate" else pytest.mark.nightly)
            for one in CONSTRAINTS
        ),
    ],
    ids=str,
)
def test_a_run_that_is_cut_off_ends_bit_identical(
    script, options, make_args, tmp_path, monkeypatch
):
    if "marks" in options:
        pytest.importorskip("lightgbm", reason="only trees are fitted to marks")
    whole = script.train(make_args("whole", **options))
    has_grids = any(isinstance(one, GridLabel) for one in read_labels(whole / "labels.jsonl"))
    assert has_grids == ("marks" in options)  # as soon as trees are fitted to them
    log, seen = script.utils.Run.log, []

    def log_and_stop(run, step, values):
        log(run, step, values)
        seen.append(step)
        if len(seen) == 6:  # after a labelling round that the newest checkpoint does not know
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(script.utils.Run, "log", log_and_stop)
        with pytest.raises(Stop):
            script.train(make_args("cut", **options))
    gc.collect()  # the run holds a lock that the end of its process would release
    cut = script.train(stored_args(script.Args, tmp_path / "cut", script="ppo_lag_pbcrl"))
    assert rows(cut) == rows(whole)
    assert summary(cut) == summary(whole)
    assert repr(read_labels(cut / "labels.jsonl")) == repr(read_labels(whole / "labels.jsonl"))
    for name, kind in [("agent", "agent"), ("cost_model", "cost-model")]:
        ours, theirs = (
            load_tensors(run / f"{name}.safetensors", kind=kind)[0] for run in (cut, whole)
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_every_constraint_costs_the_same_number_of_queries(script, constraint, make_args):
    folder = script.train(make_args("run", constraint=constraint))
    assert summary(folder)["queries_used"] == 100 + 120
    assert summary(folder)["warnings"] == []
    batches = len(BATCHES) if constraint == "accept" else 0
    assert len(read_labels(folder / "labels.jsonl")) == 220 - batches * (12 // 2 - 1)


def test_the_rate_moves_the_multiplier_by_labels_and_the_model(script, make_args):
    """In every iteration, after the first tenth."""
    folder = script.train(make_args("run", constraint="rate", max_unsafe_rate=0.3))
    multiplier, found = LagrangeMultiplier(dear=1.0), rows(folder)
    for number, row in enumerate(found):
        assert (row["unsafe_rate"] is not None) == (number in ROUNDS)
        assert (row["measured"] is not None) == (number >= 2)
        assert row["allowed"] == 0.3
        assert row["multiplier"] == multiplier.update(row["measured"], row["allowed"])


@pytest.mark.filterwarnings("ignore:a limit lies between safe and unsafe trajectories")
@pytest.mark.parametrize(("limit", "rejected"), [(1e3, 0.0), (0.0, 1.0)])
def test_a_judged_batch_moves_the_multiplier_all_the_way_up_or_down(
    script, make_args, limit, rejected
):
    """Nothing costs more than 1,000, and everything more than 0 here; then labels are one-sided.
    All or none of the batch is twice the limit of a half, or nothing of it: e = 1 or -1."""
    args = make_args(
        "run",
        constraint="accept",
        cost_limit=limit,
        safety_noise=0.0,
        offline_queries=0,
        dataset=None,
    )
    log, sign = 0.0, 1 if rejected else -1
    for number, row in enumerate(rows(script.train(args))):
        assert row["measured"] == (rejected if number in BATCHES else None)
        if number in BATCHES:
            log += sign * 0.1
        expected = min(math.exp(log + sign), 3.0) if number >= BATCHES[0] else 1.0
        assert row["multiplier"] == pytest.approx(expected)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_step_size_of_zero_is_a_constant_multiplier(script, make_args, constraint):
    options = {"multiplier_lr": 0.0, "multiplier_initial": 0.7, "constraint": constraint}
    assert {row["multiplier"] for row in rows(script.train(make_args("run", **options)))} == {0.7}


def test_the_constraint_is_that_of_the_flags(script, make_args):
    made = [
        script.make_constraint(make_args("run", constraint=one, max_unsafe_rate=0.2))
        for one in CONSTRAINTS
    ]
    assert made == [LearnedLimit(), UnsafeRate(0.2), Acceptance(12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_unsafe_rate": 0.0}, r"--max-unsafe-rate must be in \(0, 1\), got 0.0"),
        ({"max_unsafe_rate": 1.0}, r"--max-unsafe-rate must be in \(0, 1\), got 1.0"),
        ({"accept_batch": 9}, "--accept-batch must be at least 10, got 9"),
        ({"multiplier_lr": -0.1}, "--multiplier-lr must be >= 0 and finite, got -0.1"),
        (
            {"constraint": "rate", "online_queries": 0},
            "--constraint rate moves the multiplier by labels .* --online-queries is 0; raise it, "
            "or use --constraint learned",
        ),
        (
            {"constraint": "accept", "accept_batch": 80},
            "--accept-batch 80 counts as 40 queries, but only 17 are due in the last ",
        ),
        (
            {"offline_queries": 9},
            "a tenth of --offline-queries says when pretraining stops, so that 10 are the fewest",
        ),
        (
            {"label_folder": "questions", "marks": True},
            "--marks and --safety-noise would do nothing: about the simulated oracle, but people",
        ),
        (
            {"label_annotators": 3, "label_wait": 5.0},
            "--label-annotators and --label-wait would do nothing: about people, but the sim",
        ),
    ],
)
def test_a_constraint_that_cannot_be_is_refused_before_anything_is_made(
    script, make_args, tmp_path, options, message
):
    with pytest.raises(ValueError, match=message):
        script.train(make_args("run", **options))
    assert not (tmp_path / "run").exists()


def test_a_round_of_too_few_episodes_leaves_the_multiplier_alone_and_is_told_once(
    script, make_args
):
    folder = script.train(make_args("run", constraint="accept", accept_batch=14))
    assert {row["multiplier"] for row in rows(folder)} == {1.0}
    (warning,) = summary(folder)["warnings"]
    assert "fewer than 14 episodes were new or had an answer in a labelling round" in warning
    assert summary(folder)["queries_used"] == 220  # all on pairs


def test_where_nothing_was_asked_no_label_is_missed(script, make_args):
    """In the first 20 steps no whole episode of 100 has ended."""
    options = {"num_steps": 20, "minibatch_size": 80, "total_timesteps": 80 * 24}
    folder = script.train(make_args("run", constraint="rate", **options))
    assert rows(folder)[0]["queries_used"] == 100  # offline
    assert "no safety label" not in str(summary(folder)["warnings"])


@pytest.mark.filterwarnings("ignore:a limit lies between:RuntimeWarning")
def test_in_the_first_tenth_costs_have_no_price_before_there_are_labels_of_both_kinds(
    script, make_args
):
    """All episodes are called safe. Two iterations of twelve begin in the first tenth."""
    options = {"offline_queries": 0, "dataset": None, "cost_limit": 1e3, "safety_noise": 0.0}
    options |= {"constraint": "rate"}
    kls = []
    for price in (0.5, 3.0):
        folder = script.train(make_args(f"{price}", multiplier_initial=price, **options))
        kls.append([row["kl"] for row in rows(folder)])
    cheap, dear = kls
    assert cheap[:2] == dear[:2]
    assert cheap[2] != dear[2]


@pytest.mark.parametrize(
    ("constraint", "offline_queries", "resting"),
    [("rate", 0, 2), ("learned", 0, 2), ("accept", 0, 0), ("rate", 100, 2), ("learned", 100, 0)],
)
def test_lambda_rests_in_the_first_tenth_unless_batches_or_a_limit_of_offline_labels_move_it(
    script, make_args, constraint, offline_queries, resting
):
    """Two iterations of twelve begin in it. Each has a batch of twelve episodes."""
    options = {"offline_queries": offline_queries, "cost_limit": 1.0, "safety_noise": 0.0}
    options |= {"finetune_interval": 1, "num_steps": 300, "total_timesteps": 1_200 * ITERATIONS}
    if not offline_queries:
        options["dataset"] = None
    folder = script.train(make_args("run", constraint=constraint, **options))
    resting_rows, moved = rows(folder)[:resting], rows(folder)[resting:]
    assert all((row["measured"], row["multiplier"]) == (None, 1.0) for row in resting_rows)
    assert moved[0]["measured"] is not None
    assert moved[0]["multiplier"] != 1.0


@pytest.mark.filterwarnings("ignore:no labelled trajectory is safe:UserWarning")
@pytest.mark.parametrize(("queries", "has_price"), [(500, False), (501, True)])
def test_by_more_than_500_pairs_costs_have_a_price_where_no_episode_is_safe_yet(
    script, make_args, queries, has_price
):
    """One iteration of 40 episodes. On the blocked road all that a new policy plays are unsafe."""
    options = {"offline_queries": 0, "dataset": None, "constraint": "rate", "safety_noise": 0.0}
    options |= {"env_id": "DrivingBlockedRoad-v0", "num_envs": 20, "num_steps": 200}
    options |= {"total_timesteps": 4_000, "online_queries": queries}
    kls = set()
    for price in (0.5, 3.0):
        folder = script.train(make_args(f"{price}", multiplier_initial=price, **options))
        assert rows(folder)[0]["unsafe_rate"] == 1
        kls.add(rows(folder)[0]["kl"])
    assert len(kls) == 1 + has_price


def test_a_policy_under_batches_is_the_last_one_and_nothing_is_played_to_choose_it(
    script, make_args, monkeypatch
):
    monkeypatch.setattr("pbcrl_script_utils.policies.play", None)
    folder = script.train(make_args("run", constraint="accept"))
    assert summary(folder)["chosen_iteration"] == ITERATIONS


def test_what_is_due_before_the_first_episodes_can_have_ended_is_no_reason_to_warn(
    script, make_args
):
    """Four envs start out of step: in 300 steps they end fewer than 12 whole episodes of 100."""
    options = {"num_steps": 20, "minibatch_size": 80, "total_timesteps": 80 * 24}
    folder = script.train(make_args("run", constraint="accept", finetune_interval=15, **options))
    assert rows(folder)[14]["measured"] is None
    assert "fewer than" not in str(summary(folder)["warnings"])


# Batches cost some 15 on the mean, and each answer is flipped.
CALLED_SAFE = {
    "cost_limit": 10.0,
    "max_unsafe_rate": 0.9,
    "safety_noise": 1.0,
    "multiplier_initial": 0.5,
}


@pytest.mark.parametrize(("constraint", "asked", "answered"), [("rate", 0, 2), ("accept", 5, 8)])
def test_labels_that_come_a_round_late_move_the_multiplier_and_choose_no_policy(
    script, make_args, monkeypatch, constraint, asked, answered
):
    """In the round that asks nothing has come; then what was asked in the round before."""
    make_oracle = script.utils.make_oracle
    monkeypatch.setattr(
        script.utils, "make_oracle", lambda *a, **k: DelayedOracle(make_oracle(*a, **k), rounds=1)
    )
    # A batch stays open for a round, and the next one is shown in the round after that.
    folder = script.train(make_args("run", constraint=constraint, **CALLED_SAFE))
    warnings = str(summary(folder)["warnings"])
    assert "labels came late: λ follows the episodes of older policies" in warnings
    none = {"rate": "no safety label came in a labelling round", "accept": "had an answer in a"}
    assert none[constraint] in warnings
    assert rows(folder)[asked]["multiplier"] == 0.5
    assert rows(folder)[answered]["multiplier"] < 0.5


def test_the_same_labels_in_time_are_not_called_late(script, make_args):
    for constraint in ("rate", "accept"):
        folder = script.train(make_args(constraint, constraint=constraint, **CALLED_SAFE))
        assert "late" not in str(summary(folder)["warnings"])
