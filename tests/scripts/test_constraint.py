"""What moves the multiplier: the learned cost, the rate of unsafe episodes, or judged batches."""

import json
import math
from itertools import islice

import numpy as np
import pytest
import torch

from pbcrl.data.dataset import TrajectoryDataset
from pbcrl.data.label_log import read_labels
from pbcrl.oracle import DelayedOracle
from pbcrl.storage import load_tensors

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
    "torch_threads": 1,
    "offline_queries": 100,
    "online_queries": 120,  # 30 in each of 4 rounds of 12 episodes
    "pretrain_epochs": 40,
    "cost_lr": 0.03,
    "cost_hidden_sizes": (8,),
    "safety_noise": 0.1,  # so that the oracle has a random stream
    "finetune_interval": 3,
    "accept_batch": 12,
    "checkpoint_interval": 2,
}
ROUNDS = range(2, ITERATIONS, 3)  # rows of metrics.jsonl


@pytest.fixture(scope="module")
def script():
    return load("ppo_lag_pbcrl")


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
        *({"constraint": one} for one in CONSTRAINTS),
        {"segment_length": 25, "offline_queries": 200},
        {"segment_length": 30, "constraint": "rate"},
        {"segment_length": 30, "constraint": "accept"},
    ],
    ids=str,
)
def test_a_run_that_is_cut_off_ends_bit_identical(
    script, options, make_args, tmp_path, monkeypatch
):
    whole = script.train(make_args("whole", **options))
    log, seen = script.Run.log, []

    def log_and_stop(run, step, values):
        log(run, step, values)
        seen.append(step)
        if len(seen) == 6:  # after a labelling round that the newest checkpoint does not know
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(script.Run, "log", log_and_stop)
        with pytest.raises(Stop):
            script.train(make_args("cut", **options))
    cut = script.train(script.Args(resume=str(tmp_path / "cut")))
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
    batches = len(ROUNDS) if constraint == "accept" else 0
    assert len(read_labels(folder / "labels.jsonl")) == 220 - batches * (12 // 2 - 1)


def test_the_rate_moves_the_multiplier_by_twice_its_excess_in_labelling_rounds(script, make_args):
    folder = script.train(make_args("run", constraint="rate", max_unsafe_rate=0.3))
    expected = 0.01
    for number, row in enumerate(rows(folder)):
        assert (row["unsafe_rate"] is not None) == (number in ROUNDS)
        if row["unsafe_rate"] is not None:
            expected = max(0.0, expected + 2 * (row["unsafe_rate"] - 0.3))
        assert row["multiplier"] == pytest.approx(expected)


@pytest.mark.parametrize(("limit", "rejected"), [(1e3, 0.0), (0.0, 1.0)])
def test_a_judged_batch_moves_the_multiplier_by_a_step_of_006_down_to_its_floor(
    script, make_args, limit, rejected
):
    """Nothing costs more than 1,000, and everything more than 0 here; then labels are one-sided."""
    args = make_args(
        "run",
        constraint="accept",
        cost_limit=limit,
        multiplier_initial=0.1,
        multiplier_floor=0.05,
        safety_noise=0.0,
        offline_queries=0,
        dataset=None,
    )
    expected = 0.1
    for number, row in enumerate(rows(script.train(args))):
        assert row["rejected"] == (rejected if number in ROUNDS else None)
        if number in ROUNDS:
            expected = max(0.05, expected + (0.06 if rejected else -0.06))
        assert row["multiplier"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "rule", "step"),
    [
        ({}, "LagrangeMultiplier", 0.05),
        ({"multiplier_rule": "pid"}, "PIDMultiplier", None),
        ({"constraint": "rate"}, "AscentMultiplier", 2.0),
        ({"constraint": "accept"}, "AscentMultiplier", 0.12),
        ({"constraint": "rate", "multiplier_rule": "adam"}, "LagrangeMultiplier", 0.05),
        ({"constraint": "accept", "multiplier_lr": 0.5}, "AscentMultiplier", 0.5),
        # Of ln(1 + e^x), from 0.01 on; the steps of three iterations at once where labels move it.
        (
            {"multiplier_rule": "softplus"},
            "SoftplusMultiplier",
            math.log1p(math.expm1(0.01) * math.exp(0.12)) - 0.01,
        ),
        (
            {"multiplier_rule": "softplus", "constraint": "accept", "finetune_interval": 3},
            "SoftplusMultiplier",
            math.log1p(math.expm1(0.01) * math.exp(0.36)) - 0.01,
        ),
    ],
)
def test_rule_and_step_size_suit_the_constraint_unless_they_are_given(script, options, rule, step):
    """The first step against an excess of 1: lr by Adam, lr per unit by ascent."""
    multiplier = script.make_multiplier(script.Args(**options))
    assert type(multiplier).__name__ == rule
    if step is not None:
        assert multiplier.update(2.0, 1.0) == pytest.approx(0.01 + step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_unsafe_rate": 0.0}, r"--max-unsafe-rate must be in \(0, 1\), got 0.0"),
        ({"max_unsafe_rate": 1.0}, r"--max-unsafe-rate must be in \(0, 1\), got 1.0"),
        ({"accept_batch": 9}, "--accept-batch must be at least 10, got 9"),
        ({"multiplier_floor": -0.1}, "--multiplier-floor must be >= 0 and finite, got -0.1"),
        ({"multiplier_floor": 0.05}, r"initial must be at least floor, got 0\.01 and 0\.05"),
        (
            {"multiplier_anti_windup": True, "multiplier_rule": "pid"},
            "anti_windup acts at the cap, and cap is inf; give a finite cap, or turn it off",
        ),
        (
            {"segment_length": 0},
            "--segment-length must be at least 1, got 0",
        ),
        (
            {"segment_length": 10, "constraint": "rate", "cost_output": "softplus"},
            "which only a linear output can take, got --cost-output softplus; leave one of them",
        ),
        ({"segment_length": 101}, r"--segment-length must lie in 1\.\.100, .* got 101"),
        (
            {"segment_length": 10, "offline_queries": 95},
            "an eighth of the queries shows batches of 12 episodes .* --offline-queries is 95; rai",
        ),
        (
            {"segment_length": 10, "replay_labels": "somewhere"},
            "--segment-length shows batches of episodes, which --replay-labels cannot",
        ),
        ({"finetune_lr": 0.0}, "--finetune-lr must be > 0 and finite, got 0.0"),
        (
            {"constraint": "rate", "online_queries": 0},
            "--constraint rate moves the multiplier by labels .* --online-queries is 0; raise it",
        ),
        (
            {"constraint": "accept", "accept_batch": 80},
            "--accept-batch 80 counts as 40 queries, but only 30 are due per labelling round; rai",
        ),
        (
            {"constraint": "accept", "replay_labels": "somewhere"},
            "which --replay-labels cannot yet; use --constraint rate",
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
    assert {row["multiplier"] for row in rows(folder)} == {0.01}
    (warning,) = summary(folder)["warnings"]
    assert "fewer than 14 episodes were new or had an answer in a labelling round" in warning
    assert summary(folder)["queries_used"] == 220  # all on pairs


def test_what_is_due_before_the_first_episodes_can_have_ended_is_no_reason_to_warn(
    script, make_args
):
    """Four envs start out of step: in 300 steps they end fewer than 12 whole episodes of 100."""
    options = {"num_steps": 20, "minibatch_size": 80, "total_timesteps": 80 * 24}
    folder = script.train(make_args("run", constraint="accept", finetune_interval=15, **options))
    assert rows(folder)[14]["rejected"] is None
    assert "fewer than" not in str(summary(folder)["warnings"])


# Batches cost some 15 on the mean, and each answer is flipped.
CALLED_SAFE = {
    "cost_limit": 10.0,
    "max_unsafe_rate": 0.9,
    "safety_noise": 1.0,
    "multiplier_initial": 0.5,
}


@pytest.mark.parametrize("constraint", ["rate", "accept"])
def test_labels_that_come_a_round_late_move_the_multiplier_and_choose_no_policy(
    script, make_args, monkeypatch, constraint
):
    """In the first round nothing has come; then what was asked in the round before."""
    make_oracle = script.make_oracle
    monkeypatch.setattr(
        script, "make_oracle", lambda *a, **k: DelayedOracle(make_oracle(*a, **k), rounds=1)
    )
    # A batch stays open for a round, and the next one is shown in the round after that.
    folder = script.train(make_args("run", constraint=constraint, **CALLED_SAFE))
    found, warnings = summary(folder), str(summary(folder)["warnings"])
    assert "labels came late: λ follows the episodes of older policies" in warnings
    none = {"rate": "no safety label came in a labelling round", "accept": "had an answer in a"}
    assert none[constraint] in warnings
    assert rows(folder)[ROUNDS[0]]["multiplier"] == 0.5
    assert rows(folder)[ROUNDS[1]]["multiplier"] < 0.5
    assert found["safe_policy_iteration"] is None
    assert not (folder / "policy_safe.safetensors").exists()


def test_the_same_labels_in_time_choose_a_policy(script, make_args):
    for constraint in ("rate", "accept"):
        folder = script.train(make_args(constraint, constraint=constraint, **CALLED_SAFE))
        found = summary(folder)
        assert found["safe_policy_iteration"] is not None
        assert "late" not in str(found["warnings"])


def test_a_fine_tuning_of_its_own_changes_the_cost_model(script, make_args):
    losses = [
        [row.get("finetune_loss") for row in rows(script.train(make_args(name, **options)))]
        for name, options in [
            ("plain", {}),
            ("same", {"finetune_lr": 0.03}),
            ("slow", {"finetune_lr": 1e-4}),
            ("balanced", {"finetune_balanced": True}),
        ]
    ]
    assert losses[0] == losses[1]
    assert len({str(one) for one in losses}) == 3


def test_segments_are_compared_and_batches_of_episodes_set_the_limit(script, make_args, capsys):
    folder = script.train(make_args("run", segment_length=25, offline_queries=200))
    labels = read_labels(folder / "labels.jsonl")
    # An eighth of 200 queries shows 4 batches of 12 episodes, as 24; 17 of 176 validate.
    offline, batches, online = labels[:176], labels[176:180], labels[180:]
    assert len(online) == 120
    assert all(math.isnan(one.first_safe) and not math.isnan(one.preference) for one in offline)
    assert all(math.isnan(one.preference) and one.first_safe in (0, 1) for one in batches)
    assert summary(folder)["queries_used"] == 320
    said = capsys.readouterr().out
    assert "159 + 17 queries over" in said
    assert "different segments for training + validation, and 4 batches of episodes" in said


def test_with_a_rate_every_query_shows_segments_and_these_are_safe_within_their_share(
    script, make_args
):
    """30 steps of 100 and d = 5: a segment is unsafe above 1.5, and λ follows their share."""
    options = {"segment_length": 30, "constraint": "rate", "safety_noise": 0.0}
    folder = script.train(make_args("run", cost_limit=5.0, **options))
    labels = read_labels(folder / "labels.jsonl")
    assert len(labels) == summary(folder)["queries_used"] == 220
    assert not any(math.isnan(x) for one in labels for x in (one.first_safe, one.second_safe))
    found = rows(folder)
    for number, row in enumerate(ROUNDS, 1):
        shown = TrajectoryDataset(folder / "online" / f"{number:04d}")
        assert {len(one) for one in shown} == {30}
        unsafe = [one.true_cost > 1.5 for one in shown]
        assert found[row]["unsafe_rate"] == pytest.approx(np.mean(unsafe))
    assert any(0 < found[row]["unsafe_rate"] < 1 for row in ROUNDS)
    recorded = str(folder / "labels.jsonl")
    again = script.train(make_args("again", cost_limit=5.0, **options, replay_labels=recorded))
    assert rows(again) == found


def test_with_accept_pairs_show_segments_and_batches_whole_episodes_under_the_limit_itself(
    script, make_args
):
    """30 steps of 100 and d = 5: a segment is unsafe above 1.5, and a batch above 5."""
    options = {"segment_length": 30, "constraint": "accept", "safety_noise": 0.0}
    folder = script.train(make_args("run", cost_limit=5.0, **options))
    assert summary(folder)["queries_used"] == 220
    found, online = rows(folder), iter(read_labels(folder / "labels.jsonl")[100:])
    for number, row in enumerate(ROUNDS, 1):
        judged, *pairs = islice(online, 25)  # 12 episodes count as 6 queries of 30
        assert math.isnan(judged.preference)
        assert found[row]["rejected"] == 1 - judged.first_safe
        shown = TrajectoryDataset(folder / "online" / f"{number:04d}")
        assert {len(one) for one in shown} == {30}
        safe = {x for one in pairs for x in (one.first_safe, one.second_safe)}
        assert safe == {float(one.true_cost <= 1.5) for one in shown}
    assert not list(online)


@pytest.mark.parametrize("limit", [0.0, 1e3])
def test_batches_on_one_side_put_the_limit_at_the_nearest_and_too_few_are_refused(
    script, make_args, limit
):
    one_sided = {"segment_length": 25, "offline_queries": 200, "cost_limit": limit}
    found = summary(script.train(make_args("run", **one_sided)))["warnings"]
    assert any("all 4 batches of episodes were on one side of the limit" in one for one in found)
    with pytest.raises(ValueError, match=r"at least 2 batches of 1000 episodes, but there are \d+"):
        script.train(make_args("few", segment_length=25, accept_batch=1000, offline_queries=9000))
