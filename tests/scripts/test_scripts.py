import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from gymnasium.error import DependencyNotInstalled

from pbcrl import LagrangeMultiplier, Query, Trajectory, TrajectoryDataset, load_cost_model
from pbcrl.data.label_log import read_labels
from pbcrl.errors import LabelError, MismatchError, MissingCostError, NonFiniteError, StorageError
from pbcrl.label.replay import Replay, replay_frames
from pbcrl.label.store import LabelStore
from pbcrl.storage import load_tensors
from pbcrl_envs.toy.point_hazards import HAZARD_RADIUS, HAZARDS

from ..people import answering, questions
from .conftest import SCRIPTS, SMALL, write_dataset
from .runs import metrics, resume, rows, small, small_pbcrl, small_ppo_lag, summary, weights

CONTRACT = """
    return true_cost learned_cost cost_limit bias accuracy balanced_accuracy base_rate pair_accuracy
    type_ii_rate w2_raw w2_scaled w2_zscored violation_gap dead_zone multiplier queries_used
    env_steps wall_seconds steps_per_second
"""


# Four evaluation episodes may all be safe.
@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_a_pbcrl_run_writes_the_summary_of_the_contract_and_can_be_evaluated(
    scripts, tmp_path, toy_dataset, capsys
):
    arguments = small_pbcrl(scripts, tmp_path, toy_dataset, capture_video=1)
    folder = scripts.ppo_lag_pbcrl.train(arguments)
    assert len(frames_of(folder / "videos" / "seed-1000000.mp4")) == 100
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= set(CONTRACT.split())
    assert summary["env_steps"] == 1200
    assert summary["queries_used"] == len(read_labels(folder / "labels.jsonl")) > 20
    assert summary["bias"] == pytest.approx(abs(summary["true_cost"] - 5))
    logged = rows(folder)
    assert [row["env_steps"] for row in logged] == [400, 800, 1200]
    assert all("violation_gap" in row for row in logged)  # each of the first K has a round
    assert logged[-1]["queries_used"] == summary["queries_used"]

    _, info = load_cost_model(folder / "cost_model.safetensors")
    assert info["env_id"] == "PointHazards-v0"
    assert info["dead_zone"] == summary["dead_zone"]
    capsys.readouterr()
    scripts.evaluate.evaluate(scripts.evaluate.Args(str(folder), episodes=4, threads=1))
    printed = dict(re.findall(r"^   (\w+) +(\S+)", capsys.readouterr().out, re.MULTILINE))
    # Two decimals are printed.
    assert float(printed["return"]) == pytest.approx(summary["return"], rel=0.02, abs=0.005)
    assert float(printed["learned_cost"]) == pytest.approx(summary["learned_cost"], rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
@pytest.mark.filterwarnings("always:episodes differ in length:UserWarning")
def test_episodes_that_end_early_are_collected_learned_from_and_trained_on(scripts, tmp_path):
    """Falls end episodes at any step; what is compared is the cost of all that there was."""
    collected = small_ppo_lag(
        scripts,
        tmp_path,
        env_id="TestToyFalling-v0",
        cost_limit=5,
        run_name="collect",
        total_timesteps=4000,
        save_trajectories=str(tmp_path / "episodes"),
    )
    scripts.ppo_lag.train(collected)
    episodes = TrajectoryDataset(tmp_path / "episodes")
    assert episodes.horizon == episodes.lengths.max() == 100
    assert episodes.lengths.min() < 50
    assert sum(row["episodes"] for row in rows(tmp_path / "collect")) == len(episodes) > 40
    small = small_pbcrl(
        scripts, tmp_path, tmp_path / "episodes", env_id="TestToyFalling-v0", cost_limit=5
    )
    net = replace(small, cost_model="net", run_name="net")
    (said,) = summary(scripts.ppo_lag_pbcrl.train(net))["warnings"]
    assert re.match(r"episodes differ in length, from \d+ to 100 steps", said)
    folder = scripts.ppo_lag_pbcrl.train(small)  # of trees no safe step pays for another
    found = summary(folder)
    assert found["queries_used"] > 20
    assert np.isfinite([found["return"], found["learned_cost"], found["true_cost"]]).all()
    ended = sum(row["episodes"] for row in rows(folder))
    assert ended > 1200 / 100  # more than fit in without an early end


def test_the_same_seed_twice_gives_identical_weights_and_metrics(scripts, tmp_path, toy_dataset):
    first, again, other = (
        scripts.ppo_lag_pbcrl.train(
            small_pbcrl(scripts, tmp_path, toy_dataset, run_name=name, seed=seed)
        )
        for name, seed in [("first", 0), ("again", 0), ("other", 1)]
    )
    assert metrics(first) == metrics(again)
    for file in ("agent.safetensors", "cost_model.safetensors"):
        assert (first / file).read_bytes() == (again / file).read_bytes()
        assert (first / file).read_bytes() != (other / file).read_bytes()


def test_the_phases_of_an_iteration_take_its_time(scripts, tmp_path, toy_dataset):
    plain = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, run_name="plain"))
    learner = scripts.ppo_lag_pbcrl.train(
        small_pbcrl(scripts, tmp_path, toy_dataset, run_name="learner")
    )
    for folder, phases in [
        (plain, {"rollout", "update"}),
        (learner, {"rollout", "update", "cost_model"}),
    ]:
        logged = rows(folder)
        for before, row in pairwise(logged):
            seconds = {k: v for k, v in row.items() if k.startswith("seconds_")}
            assert set(seconds) == {f"seconds_{phase}" for phase in phases}
            assert min(seconds.values()) >= 0
            assert sum(seconds.values()) < row["wall_seconds"] - before["wall_seconds"] + 0.002


class BySight:
    """The simulated oracle, who sees hazards in the place of true costs."""

    def __init__(self, oracle):
        self.oracle = oracle

    def __getattr__(self, name):
        return getattr(self.oracle, name)

    def submit(self, queries):
        return self.oracle.submit([self.seen(query) for query in queries])

    def label(self, queries):
        return self.oracle.label([self.seen(query) for query in queries])

    def seen(self, query):
        return Query(
            *(Trajectory(t.obs, t.actions, in_hazard(t)) for t in (query.first, query.second))
        )


def test_true_costs_reach_the_learner_through_labels_only(
    scripts, tmp_path, toy_episodes, monkeypatch
):
    """The same labels where every true cost is another: not a bit may change."""
    script = scripts.ppo_lag_pbcrl
    make_oracle = script.utils.make_oracle
    monkeypatch.setattr(script.utils, "make_oracle", lambda *a, **k: BySight(make_oracle(*a, **k)))
    rewritten = [
        Trajectory(t.obs, t.actions, 3.0 * (t.obs[:, 0] > 0).astype(np.float32))
        for t in toy_episodes
    ]
    original = write_dataset(tmp_path / "original", "TestToy-v0", toy_episodes)
    changed = write_dataset(tmp_path / "changed", "TestToyOtherCost-v0", rewritten)
    options = {"env_id": "TestToy-v0", "cost_limit": 5.0}
    args = small_pbcrl(scripts, tmp_path, original, **options)
    other = {"env_id": "TestToyOtherCost-v0", "dataset": str(changed), "run_name": "other"}
    folders = [script.train(one) for one in (args, replace(args, **other))]
    costs, labels = ([f(folder) for folder in folders] for f in (last_cost, logged_labels))
    assert costs[0] != costs[1]
    assert labels[0] == labels[1]
    for name in ("agent", "cost_model"):
        first, second = (weights(folder, name) for folder in folders)
        assert first.keys() == second.keys()
        for key in first:
            assert torch.equal(first[key], second[key]), key


def last_cost(folder):
    return rows(folder)[-1]["true_cost"]


def logged_labels(folder):
    return repr(read_labels(folder / "labels.jsonl"))


def test_episodes_of_any_env_start_out_of_step_and_no_part_of_one_counts(
    scripts, tmp_path, toy_episodes
):
    """Four single envs of 100 steps, cut off after 25, 50, 75 and 100: the last one is whole."""
    env_id = "TestToy-v0"
    dataset = write_dataset(tmp_path / "toy", env_id, toy_episodes)
    options = {"env_id": env_id, "cost_limit": 5, "num_steps": 50, "total_timesteps": 1000}
    options["constraint"] = "learned"
    args = small_pbcrl(scripts, tmp_path, dataset, **options)
    logged = rows(scripts.ppo_lag_pbcrl.train(args))
    assert [row["episodes"] for row in logged] == [0, 1, 2, 2, 2]
    assert [row["discarded"] for row in logged] == [2, 1, 0, 0, 0]
    assert logged[0]["multiplier"] == args.multiplier_initial  # nothing ended: it stays
    assert logged[1]["multiplier"] != logged[0]["multiplier"]
    assert logged[0]["learned_cost"] is None
    assert all(row["queries_used"] >= logged[0]["queries_used"] for row in logged)


def test_the_scripts_multiplier_is_the_library_s(scripts, tmp_path):
    options = {"multiplier_lr": 0.05, "multiplier_initial": 0.5, "multiplier_cap": 5.0}
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, cost_limit=1.0, **options))
    multiplier = LagrangeMultiplier(lr=0.05, initial=0.5, cap=5.0)
    for row in rows(folder):
        assert row["multiplier"] == multiplier.update(row["true_cost"], 1.0)


def test_an_infinite_limit_is_unconstrained_ppo(scripts, tmp_path):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, cost_limit=float("inf")))
    assert [row["multiplier"] for row in rows(folder)] == [0.0] * 3
    assert json.loads((folder / "summary.json").read_text())["cost_limit"] is None


def test_pbcrl_collects_its_own_dataset_once_and_then_reuses_it(scripts, tmp_path, capsys):
    args = small_pbcrl(
        scripts,
        tmp_path,
        None,
        total_timesteps=4000,
        cost_limit=15.0,  # random drivers keep to it in some episodes and not in others
    )
    scripts.ppo_lag_pbcrl.train(args)
    (dataset,) = (tmp_path / "datasets").iterdir()
    before = (dataset / "manifest.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    scripts.ppo_lag_pbcrl.train(replace(args, run_name="again"))
    assert "using the episodes collected before" in capsys.readouterr().out
    assert (dataset / "manifest.safetensors").stat().st_mtime_ns == before


def test_an_extended_run_keeps_the_episodes_that_it_collected_or_collects_them_again(
    scripts, tmp_path, capsys
):
    """Its length was part of the name of its episodes, so that a longer run found none."""
    args = small_pbcrl(scripts, tmp_path, None, total_timesteps=4000, cost_limit=15.0)
    folder = scripts.ppo_lag_pbcrl.train(args)
    (dataset,) = (tmp_path / "datasets").iterdir()
    manifest = (dataset / "manifest.safetensors").read_bytes()
    capsys.readouterr()
    resume(scripts.ppo_lag_pbcrl, folder, total_timesteps=4400)
    assert "using the episodes collected before" in capsys.readouterr().out
    assert list((tmp_path / "datasets").iterdir()) == [dataset]
    shutil.rmtree(dataset)
    resume(scripts.ppo_lag_pbcrl, folder, total_timesteps=4800)
    assert (dataset / "manifest.safetensors").read_bytes() == manifest


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"env_id": "PointHazard-v0"}, ValueError, "did you mean .*PointHazards-v0"),
        ({"env_id": "CartPole-v1"}, ValueError, "flat Box action space"),
        ({"env_id": "Pendulum-v1"}, ValueError, "no cost limit is known for Pendulum-v1"),
        ({"env_id": "TestToyNoCost-v0", "cost_limit": 5.0}, MissingCostError, "reports none"),
        (
            {"env_id": "TestToyBroken-v0", "cost_limit": 5.0},
            NonFiniteError,
            "reward must .*step 3",
        ),
    ],
)
def test_ppo_lag_refuses_what_it_cannot_run(scripts, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, r"--gamma must be in \[0, 1\], got 1.5"),
        ({"gamma": float("nan")}, r"--gamma must be in \[0, 1\], got nan"),
        ({"lr_decay": 1.5}, r"--lr-decay must be in \[0, 1\], got 1.5"),
        ({"hidden_sizes": (16, 0)}, r"--hidden-sizes must be at least 1, got \(16, 0\)"),
        ({"num_envs": 0}, "--num-envs must be at least 1, got 0"),
        ({"minibatch_size": 500}, r"at most num_envs \* num_steps = 400, .* got 500"),
        ({"capture_video": -1}, "--capture-video must be >= 0, got -1"),
        ({"learning_rate": 0.0}, "--learning-rate must be > 0 and finite, got 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be > 0 and finite, got nan"),
        ({"cost_limit": -1.0}, "--cost-limit must be >= 0"),
        ({"cost_limit": float("nan")}, "--cost-limit must be >= 0"),
        ({"run_name": "../outside"}, r"the name of a folder in --runs-dir, got '\.\./outside'"),
        ({"run_name": ".."}, r"the name of a folder in --runs-dir, got '\.\.'"),
        ({"run_name": "/tmp/outside"}, "the name of a folder in --runs-dir"),
        ({"total_timesteps": "many"}, "--total-timesteps must be at least 1, got 'many'"),
        (
            {"multiplier_initial": 1.0, "multiplier_cap": 0.5},
            r"got 1 and 0\.5; give --multiplier-initial 0\.5, or raise",
        ),
        (
            {"multiplier_initial": 5.0, "multiplier_cap": 3.0},
            r"at most --multiplier-cap, got 5 and 3; give",
        ),
        ({"multiplier_initial": 0.0}, r"must be > 0 where it moves, .* by --multiplier-lr 0"),
    ],
)
@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_arguments_out_of_range_are_refused_before_a_folder_is_made(
    scripts, tmp_path, name, changes, message
):
    module = getattr(scripts, name)
    with pytest.raises(ValueError, match=message):
        module.train(small(module, tmp_path / "runs", **changes))
    assert not any(tmp_path.iterdir())


def test_what_else_is_refused_before_a_folder_is_made(scripts, tmp_path, toy_dataset):
    missing = small_pbcrl(scripts, tmp_path / "runs", tmp_path / "none")
    with pytest.raises(
        ValueError, match=r"--dataset names a folder of episodes, .* but .*/none does"
    ):
        scripts.ppo_lag_pbcrl.train(missing)
    for other in (toy_dataset.parent, Path(__file__)):
        args = small_pbcrl(scripts, tmp_path / "runs", other)
        with pytest.raises(ValueError, match=r"--dataset names .* is none of these; correct"):
            scripts.ppo_lag_pbcrl.train(args)
    with pytest.raises(ValueError, match="did you mean"):
        scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path / "runs", env_id="Nowhere-v0"))
    # A run with a folder could be resumed, and a resumed run takes its dataset for its own.
    taken = small_ppo_lag(scripts, tmp_path / "runs", save_trajectories=str(toy_dataset))
    with pytest.raises(ValueError, match=r"--save-trajectories names a new folder, but .* holds"):
        scripts.ppo_lag.train(taken)
    assert not any(tmp_path.iterdir())


def test_a_run_says_what_made_it(tmp_path):
    script = SCRIPTS / "ppo_lag.py"
    numbers = {"num-envs": 4, "num-steps": 100, "total-timesteps": 400, "minibatch-size": 200}
    numbers |= {"hidden-sizes": 8, "eval-episodes": 2, "threads": 1}
    words = [f"--{name}={number}" for name, number in numbers.items()]
    words += ["--env-id", "PointHazards-v0"]
    words += ["--runs-dir", str(tmp_path / "runs"), "--run-name", "it's"]
    subprocess.run([sys.executable, script, *words], check=True, cwd=tmp_path, capture_output=True)
    made_by = json.loads((tmp_path / "runs" / "it's" / "args.json").read_text())["made_by"]
    command = shlex.split(made_by["command"])
    assert command[:2] == ["python", str(script)]
    assert command[-4:] == ["--runs-dir", "runs", "--run-name", "it's"]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=SCRIPTS, capture_output=True, text=True)
    if git.returncode == 0:
        assert git.stdout.startswith(made_by["commit"].removesuffix("-dirty"))
    assert made_by["torch"] == torch.__version__
    assert made_by["hardware"].endswith(f", {os.cpu_count()} cores")


def test_a_task_brings_its_recipe_which_the_command_line_overrules(scripts):
    found = []
    words = ["--env-id", "DrivingLaneChange-v0", "--num-envs", "7"]
    for module in (scripts.ppo_lag, scripts.ppo_lag_pbcrl, scripts.ppo_lag_rlsf):
        module.utils.main(found.append, module.Args, words)
    assert {(one.num_envs, one.total_timesteps) for one in found} == {(7, 3_000_000)}
    assert (found[1].constraint, found[1].max_unsafe_rate) == ("rate", 0.02)


@pytest.mark.parametrize(("word", "steps"), [("1e6", 10**6), ("2.5E+5", 250_000), ("300", 300)])
def test_steps_may_be_counted_as_people_write_them(scripts, word, steps):
    found = []
    command = ["--env-id", "Mine-v0", "--total-timesteps", word, "--learning-rate", "1e-3"]
    scripts.ppo_lag.utils.main(found.append, scripts.ppo_lag.Args, command)
    assert (found[0].total_timesteps, found[0].learning_rate) == (steps, 1e-3)


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
@pytest.mark.parametrize(
    ("decay", "rates"), [(0.0, [0.8] * 4), (0.5, [0.8, 0.7, 0.6, 0.5]), (1.0, [0.8, 0.6, 0.4, 0.2])]
)
@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_the_step_size_falls_linearly_by_the_share_that_is_asked_for(
    scripts, tmp_path, monkeypatch, name, decay, rates
):
    module, used = getattr(scripts, name), []

    def listening(*args):
        used.append(args[1].param_groups[0]["lr"])
        return {}

    monkeypatch.setattr(module, "update", listening)
    options = {"total_timesteps": 350, "num_envs": 2, "num_steps": 50, "minibatch_size": 100}
    options |= {"learning_rate": 0.8, "lr_decay": decay}
    if name == "ppo_lag_pbcrl":
        options |= {"offline_queries": 0, "online_queries": 0, "constraint": "learned"}
    module.train(small(module, tmp_path, **options))
    assert used == pytest.approx(rates)


def test_a_falling_step_size_moves_the_second_iteration_and_not_the_first(scripts, tmp_path):
    constant, falling = (
        rows(
            scripts.ppo_lag.train(
                small_ppo_lag(scripts, tmp_path, run_name=f"decay-{decay}", lr_decay=decay)
            )
        )
        for decay in (0.0, 1.0)
    )
    assert len(constant) >= 2
    assert constant[0]["kl"] == falling[0]["kl"]
    assert constant[1]["kl"] > falling[1]["kl"]


def test_pbcrl_refuses_a_dataset_of_another_env(scripts, tmp_path, toy_dataset):
    args = small_pbcrl(scripts, tmp_path, toy_dataset, env_id="TestToy-v0", cost_limit=5.0)
    with pytest.raises(MismatchError, match=r"PointHazards-v0.*TestToy-v0|TestToy-v0.*PointHaz"):
        scripts.ppo_lag_pbcrl.train(args)


@pytest.mark.filterwarnings("ignore:a limit lies between safe and unsafe trajectories")
def test_of_labels_that_are_all_on_one_side_pbcrl_learns_online_alone(
    scripts, tmp_path, toy_dataset, capsys
):
    args = small_pbcrl(scripts, tmp_path, toy_dataset, cost_limit=1000.0)
    folder = scripts.ppo_lag_pbcrl.train(args)
    said, *_ = json.loads((folder / "summary.json").read_text())["warnings"]
    assert said.startswith("labels of the offline episodes are all safe, or all unsafe: no limit")
    number = summary(folder)["safe_labels"]
    assert number > 20
    said = f"no limit was learned: all {number} safety labels are safe"
    assert said in summary(folder)["verdict"]
    assert f"- {said}\n" in (folder / "cost_model.md").read_text()
    capsys.readouterr()
    scripts.evaluate.evaluate(scripts.evaluate.Args(str(folder), episodes=2, threads=1))
    assert f"{said}\n" in capsys.readouterr().out
    assert {row["learned_cost"] for row in rows(folder)} <= {0.0, None}


def test_pbcrl_refuses_labels_that_are_all_on_one_side_if_no_more_are_to_come(
    scripts, tmp_path, toy_dataset
):
    args = small_pbcrl(scripts, tmp_path, toy_dataset, cost_limit=1000.0, online_queries=0)
    with pytest.raises(LabelError, match="both labels must occur"):
        scripts.ppo_lag_pbcrl.train(args)
    assert len(read_labels(tmp_path / "run" / "labels.jsonl")) > 0  # bought, so kept


def test_people_label_through_a_folder_and_a_second_run_asks_only_what_is_new(
    scripts, tmp_path, toy_dataset, capsys
):
    """Here a thread looks into the folder and answers by a rule on what is seen."""
    folder = tmp_path / "questions"
    args = small_pbcrl(
        scripts,
        tmp_path,
        toy_dataset,
        offline_queries=20,
        online_queries=4,
        label_folder=str(folder),
        label_wait=math.inf,
    )
    with answering(folder, hazard_steps, limit=5):
        first = scripts.ppo_lag_pbcrl.train(args)
        assert len(questions(folder)) == 24
        # Another run has a budget of its own, and knows the answers to the same offline questions.
        second = scripts.ppo_lag_pbcrl.train(replace(args, run_name="again"))
    assert 24 <= len(questions(folder)) <= 28
    assert summary(first)["queries_used"] == summary(second)["queries_used"] == 24
    with open(first / "labels.jsonl") as one, open(second / "labels.jsonl") as other:
        assert one.readlines()[:21] == other.readlines()[:21]
    said = capsys.readouterr().out
    # The 2 that validate and the 18 that train were there at once.
    page = f"the page: python -m pbcrl.label {folder}"
    times = r"about \d min to go, \d with the 4 questions to come"
    waiting = rf"waiting for people: 0 of 20 answered, {times}; {re.escape(page)}"
    assert re.search(waiting, said)
    assert "does not say how to play its episodes again: people will see curves" in said


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_a_limit_on_costs_that_no_env_reports_holds_up_neither_people_nor_evaluation(
    scripts, tmp_path, capsys
):
    folder = tmp_path / "questions"
    args = small_pbcrl(
        scripts,
        tmp_path,
        None,
        env_id="TestToyNoCost-v0",
        cost_limit=5.0,
        offline_queries=0,
        online_queries=8,
        label_folder=str(folder),
        label_wait=math.inf,
    )
    with answering(folder, hazard_steps, limit=5):
        run = scripts.ppo_lag_pbcrl.train(args)
    found = summary(run)
    assert (found["cost_limit"], found["true_cost"], found["violation_rate"]) == (5, None, None)
    scripts.evaluate.evaluate(scripts.evaluate.Args(str(run), episodes=2, threads=1))
    assert "no true cost is known" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraint",
    ["accept", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("learned", "rate"))],
)
def test_an_env_without_a_cost_is_trained_from_people_alone_and_what_they_see_can_be_drawn(
    tmp_path, constraint
):
    """A toy of a module beside the run, which reports no cost and has no known limit."""
    (tmp_path / "nocost.py").write_text(NO_COST)
    folder = tmp_path / "questions"
    options = ["--env-id", "nocost:NoCost-v0", "--label-folder", folder, "--label-wait", "inf"]
    options += ["--constraint", constraint, "--accept-batch", 10, "--runs-dir", tmp_path]
    options += ["--total-timesteps", 6000]
    options += ["--offline-queries", 30, "--online-queries", 40]
    small = SMALL | {"hidden_sizes": 16}
    for name, value in (small | {"run_name": "run"}).items():
        options += [f"--{name.replace('_', '-')}", value]
    with answering(folder, hazard_steps, limit=5):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "ppo_lag_pbcrl.py"), *map(str, options)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), *PATHS])},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    found = summary(tmp_path / "run")
    assert "collect episodes by the reward alone" in done.stdout
    assert (found["true_cost"], found["cost_limit"], found["balanced_accuracy"]) == (None,) * 3
    rates = [row["unsafe_rate"] for row in rows(tmp_path / "run") if row["unsafe_rate"] is not None]
    assert found["labelled_unsafe_rate"] == pytest.approx(np.mean(rates[-5:]))
    assert found["verdict"][0] == (
        "no true cost is known, nor whether this policy keeps the limit; of what was judged of the "
        f"policies before it, in the last labelling rounds, {np.mean(rates[-5:]):.0%} was called "
        "unsafe"
    )
    _, *of_multiplier, of_cost = found["verdict"]
    assert of_multiplier[0].startswith("λ could move in ")  # too seldom, in so short a run
    assert all(line.startswith("λ ") for line in of_multiplier)
    assert "learned cost is" in of_cost
    assert math.isfinite(found["learned_cost"])
    assert {row["true_cost"] for row in rows(tmp_path / "run")} == {None}
    store = LabelStore(folder)
    kinds = [question.kind for question in store.questions()]
    # Each of the first five iterations compares its episodes, too few for a batch.
    assert kinds.count("batch") == (2 if constraint == "accept" else 0)
    assert kinds[:30] == ["pair"] * 30
    assert store.num_open() == 0
    # Offline or online, what is shown is what was played: the frames are made by playing it again.
    sys.path.insert(0, str(tmp_path))
    try:
        for question in (store.question(1), store.questions()[-1]):
            for digest in question.members[:2]:
                replay = Replay.from_bytes(store.replay(digest))
                frames = list(replay_frames(replay, store.trajectory(digest), every=50))
                # One every 50 steps, and the last.
                assert [frame.shape for frame, _ in frames] == [(240, 240, 3)] * 3
    finally:
        sys.path.remove(str(tmp_path))
        gym.registry.pop("NoCost-v0", None)
        sys.modules.pop("nocost", None)


NO_COST = """
import gymnasium as gym
from pbcrl_envs.toy import PointHazardsEnv


class NoCost(gym.Wrapper):
    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options=options)[0], {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, reward, terminated, truncated, {}


gym.register("NoCost-v0", lambda **kw: NoCost(PointHazardsEnv(**kw)), max_episode_steps=100)
"""
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def in_hazard(trajectory):
    """Whether each step of an episode of the toy begins in a hazard: a rule on what can be seen."""
    position = trajectory.obs[:, None, :2]
    return (np.linalg.norm(position - HAZARDS, axis=-1) < HAZARD_RADIUS).any(1).astype(np.float32)


def hazard_steps(trajectory):
    return float(in_hazard(trajectory).sum())


def test_an_env_without_a_time_limit_is_refused(scripts, tmp_path):
    args = small_ppo_lag(scripts, tmp_path, env_id="TestToyEndless-v0", cost_limit=5.0)
    with pytest.raises(ValueError, match="has no time limit; register it with max_episode_steps"):
        scripts.ppo_lag.train(args)


def test_episodes_of_a_diverged_simulation_are_counted_and_used_for_nothing(
    scripts, tmp_path, toy_dataset
):
    """Each of 4 envs: 30 steps cut short, a whole episode, 30, a whole one, 30: 290 of 300."""
    changes = {"env_id": "TestToyDiverging-v0", "cost_limit": 5.0}
    collected = small_ppo_lag(
        scripts, tmp_path, **changes, save_trajectories=str(tmp_path / "episodes")
    )
    folders = [scripts.ppo_lag.train(collected)]
    dataset = TrajectoryDataset(tmp_path / "episodes")
    assert [len(episode) for episode in dataset] == [100] * 8

    args = small_pbcrl(scripts, tmp_path, None, run_name="pbcrl", **changes)
    toy = TrajectoryDataset(toy_dataset)
    own = write_dataset(tmp_path / "own", "TestToyDiverging-v0", list(toy))
    folders.append(scripts.ppo_lag_pbcrl.train(replace(args, dataset=str(own))))
    for folder in folders:
        assert sum(row["discarded"] for row in rows(folder)) == 12
        assert sum(row["episodes"] for row in rows(folder)) == 8
    assert rows(folders[1])[-1]["queries_used"] > 200

    class Still:
        def act(self, obs, _):
            return np.zeros((len(obs), 2), np.float32)

    returns, episodes = scripts.evaluate.play(
        Still(), "TestToyDiverging-v0", episodes=3, seed=0, deterministic=True
    )
    assert [len(episode) for episode in episodes] == [100] * 3
    assert np.isfinite(returns).all()


def test_online_episodes_do_not_repeat_those_of_a_dataset_of_the_same_seed(
    scripts, tmp_path, monkeypatch
):
    collected = small_ppo_lag(
        scripts, tmp_path, total_timesteps=4000, save_trajectories=str(tmp_path / "episodes")
    )
    scripts.ppo_lag.train(collected)
    dataset = TrajectoryDataset(tmp_path / "episodes")
    starts = {episode.obs[0].tobytes() for episode in dataset}
    envs = scripts.ppo_lag.utils.make_envs("PointHazards-v0", SMALL["num_envs"])
    first_of_collection, _ = envs.reset(seed=collected.seed)
    assert {obs.tobytes() for obs in first_of_collection} <= starts  # so the check can fail

    online: list[bytes] = []
    pbcrl = scripts.ppo_lag_pbcrl.pbcrl
    original = pbcrl.finished_trajectories

    def listening(infos):
        found = original(infos)
        online.extend(episode.obs[0].tobytes() for episode in found)
        return found

    monkeypatch.setattr(pbcrl, "finished_trajectories", listening)
    args = small_pbcrl(scripts, tmp_path, tmp_path / "episodes", run_name="pbcrl", cost_limit=15.0)
    scripts.ppo_lag_pbcrl.train(args)
    assert len(online) == 12
    assert not starts & set(online)


def test_an_error_in_mid_run_keeps_the_agent(scripts, tmp_path, capsys):
    args = small_ppo_lag(scripts, tmp_path, env_id="TestToyBroken-v0", cost_limit=5.0)
    with pytest.raises(NonFiniteError):
        scripts.ppo_lag.train(args)
    load_tensors(tmp_path / "run" / "agent.safetensors", kind="agent")
    printed = capsys.readouterr().out
    assert "stopped (NonFiniteError): kept agent.safetensors" in printed
    assert f"ppo_lag.py --resume {tmp_path / 'run'}\n" in printed


def test_a_run_folder_that_cannot_be_written_is_named_with_the_remedy(scripts, tmp_path):
    (tmp_path / "file").write_text("")
    args = small_ppo_lag(scripts, tmp_path, runs_dir=str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"file/run must be writable, but: .*another path"):
        scripts.ppo_lag.train(args)


def test_a_finished_run_says_how_to_play_it_again(scripts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(SCRIPTS.parent)
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    *_, play, certify, curves = capsys.readouterr().out.splitlines()
    assert play == f"play it again: python cleanrl_scripts/evaluate.py {folder}"
    says = "how often is it unsafe, at most"
    assert certify == f"{says}: python cleanrl_scripts/certify.py {folder}"
    assert curves == f"curves: tensorboard --logdir {tmp_path}"


def test_a_run_never_writes_over_another(scripts, tmp_path):
    args = small_ppo_lag(scripts, tmp_path, total_timesteps=400)
    scripts.ppo_lag.train(args)
    with pytest.raises(StorageError, match="holds one already"):
        scripts.ppo_lag.train(args)


def test_evaluating_a_folder_without_a_run_says_what_is_missing(scripts, tmp_path):
    with pytest.raises(StorageError, match=r"args\.json"):
        scripts.evaluate.evaluate(scripts.evaluate.Args(str(tmp_path)))


def test_a_user_error_is_one_line_and_no_traceback(scripts):
    with pytest.raises(SystemExit, match="error: --env-id must be a registered Gymnasium id"):
        scripts.evaluate.main(
            scripts.ppo_lag.train, scripts.ppo_lag.Args, ["--env-id", "SafetyPointGaol1-v0"]
        )


@pytest.mark.slow
def test_ctrl_c_keeps_the_checkpoint_and_the_labels_and_names_them(tmp_path, toy_dataset):
    command = [sys.executable, str(SCRIPTS / "ppo_lag_pbcrl.py"), "--env-id", "PointHazards-v0"]
    command += ["--dataset", str(toy_dataset), "--runs-dir", str(tmp_path), "--run-name", "run"]
    command += ["--offline-queries", "100", "--num-envs", "4"]
    command += ["--num-steps", "100", "--hidden-sizes", "16", "--threads", "1"]
    command += ["--minibatch-size", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "stopped (interrupted): kept agent.safetensors, cost_model.safetensors" in output
    assert f"ppo_lag_pbcrl.py --resume {tmp_path / 'run'}\n" in output
    load_tensors(tmp_path / "run" / "agent.safetensors", kind="agent")
    load_cost_model(tmp_path / "run" / "cost_model.safetensors")
    assert len(read_labels(tmp_path / "run" / "labels.jsonl")) >= 100


@pytest.mark.slow
def test_a_module_in_the_working_folder_brings_its_own_env(tmp_path):
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\n"
        "from pbcrl_envs.toy import PointHazardsEnv\n"
        "gymnasium.register('Mine-v0', entry_point=PointHazardsEnv, max_episode_steps=50)\n"
    )
    command = [sys.executable, str(SCRIPTS / "ppo_lag.py"), "--env-id", "my_envs:Mine-v0"]
    command += ["--cost-limit", "5", "--total-timesteps", "200", "--num-envs", "2"]
    command += ["--num-steps", "100", "--hidden-sizes", "8", "--eval-episodes", "2"]
    command += ["--minibatch-size", "200"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (summary,) = (tmp_path / "runs").glob("Mine-v0__ppo_lag__0__*/summary.json")
    assert json.loads(summary.read_text())["env_steps"] == 200


@pytest.mark.slow
def test_ctrl_c_while_collecting_keeps_the_episodes_and_says_where(tmp_path):
    command = [sys.executable, str(SCRIPTS / "ppo_lag_pbcrl.py"), "--env-id", "PointHazards-v0"]
    command += ["--runs-dir", str(tmp_path), "--run-name", "run", "--num-envs", "4"]
    command += ["--num-steps", "100", "--hidden-sizes", "16", "--threads", "1"]
    command += ["--minibatch-size", "200", "--offline-queries", "18000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "run" / "collect" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the child as well
    output, _ = process.communicate()
    assert process.returncode == 130
    folder = str(tmp_path / "run")  # it goes on with the child, too
    assert f"stopped (interrupted): kept collected in {folder}\n" in output
    assert re.findall(r"^go on with: python .*--resume (.*)", output, re.M) == [folder]
    assert len(TrajectoryDataset(tmp_path / "run" / "collected")) >= 4


# -- Films -----------------------------------------------------------------------------------------


def frames_of(film):
    """The pictures of a film of the toy, (frames, height, width, 3)."""
    to_pixels = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(film), *to_pixels]
    pixels = subprocess.run(ffmpeg, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return np.frombuffer(pixels.stdout, dtype=np.uint8).reshape(
        -1, 240 + 2 * 26, 240, 3
    )  # two lines


def test_a_run_and_its_evaluation_film_what_was_asked_for(scripts, tmp_path, capsys):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, capture_video=2))
    films = sorted((folder / "videos").iterdir())
    assert [film.name for film in films] == ["seed-1000000.mp4", "seed-1000001.mp4"]
    first, *_, last = frames = frames_of(films[0]).astype(int)
    assert len(frames) == 100  # every step of an episode, as there are only 10 a second
    for part in (slice(0, 240), slice(240, None)):  # the point has moved, the numbers have changed
        assert (np.abs(first[part] - last[part]).max(axis=-1) > 50).any()
    scripts.evaluate.evaluate(
        scripts.evaluate.Args(str(folder), episodes=2, seed=7, capture_video=1, threads=1)
    )
    assert f"filmed {folder / 'videos' / 'seed-7.mp4'}" in capsys.readouterr().out
    assert (folder / "videos" / "seed-7.mp4").stat().st_size > 1000


def test_without_the_extra_a_film_is_refused_before_anything_is_trained(
    scripts, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)  # as if it were not installed
    with pytest.raises(DependencyNotInstalled, match=r"pip install 'pbcrl\[video\]', or leave out"):
        scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, capture_video=1))
    assert not any(tmp_path.iterdir())


def test_an_env_that_cannot_be_drawn_is_refused_before_training(scripts, tmp_path):
    with pytest.raises(ValueError, match='needs an env with render mode "rgb_array"'):
        scripts.ppo_lag.train(
            small_ppo_lag(
                scripts, tmp_path, env_id="TestToyBlind-v0", cost_limit=5, capture_video=1
            )
        )
