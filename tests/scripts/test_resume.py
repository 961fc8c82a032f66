"""A run that was cut off at any moment, and goes on, ends as if nothing had happened."""

import json
import math
import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch

from pbcrl import (
    CorruptFileError,
    Label,
    LabelLog,
    StorageError,
    TrajectoryDataset,
    load_tensors,
    read_labels,
)

from .conftest import SCRIPTS, SMALL, load, write_dataset

# So small runs leave measures undefined, and noisy labels contradict each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:labels of the same trajectories should agree"),
]

RUN = {
    **SMALL,
    "env_id": "PointHazards-v0",
    "total_timesteps": 8_000,
    "checkpoint_interval": 1,
}
ITERATIONS = RUN["total_timesteps"] // (RUN["num_envs"] * RUN["num_steps"])
PBCRL = {
    "offline_queries": 200,
    "online_queries": 60,
    "pretrain_epochs": 5,
    "cost_hidden_sizes": (16,),
    "preference_noise": 0.1,  # so that the oracle has a random stream
    "finetune_interval": 3,
}
RLSF = {"classifier_steps": 5, "queries": 200}


def start(script, options):
    """Run a script as a child of the server, in silence."""
    sys.path.insert(0, str(SCRIPTS))
    module = __import__(script)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    module.train(module.Args(**options))


def run_with_kills(script, options, folder, *, kills, seed):
    """Start a run, kill it at random moments all over it, and let it end; return its exit status.

    As many as `kills`, but that the last may come too late.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "torch.utils.tensorboard"])
    rng = np.random.default_rng(seed)
    for number in range(kills + 1):
        cut_off = (folder / "args.json").exists()
        again = {"resume": str(folder)} if cut_off else options
        child = context.Process(target=start, args=(script, again))
        child.start()
        if number < kills:
            # From where the run is in its folder: before that, there is nothing to lose. By its
            # progress and not by the clock, or a fast machine would kill it less often.
            while child.is_alive() and progress(folder) < number * ITERATIONS // (kills + 1):
                time.sleep(0.005)
            child.join(timeout=rng.uniform(0.0, 0.3))
        else:
            child.join()
        ended = child.exitcode
        if ended is None:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            # After its last word it is finished, and there is nothing to go on with.
            ended = 0 if (folder / "summary.json").exists() else None
        if ended is not None:
            assert ended != 0 or number >= kills - 2
            return ended
    raise AssertionError("unreachable")


def progress(folder):
    """Iterations that a run has logged; below 0 as long as it has no folder."""
    log = folder / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else -1


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    return {k: v for k, v in found.items() if "seconds" not in k and k != "steps_per_second"}


def assert_same_run(folder, other):
    assert metrics(folder) == metrics(other)
    assert summary(folder) == summary(other)
    for name, kind in [
        ("agent", "agent"),
        ("cost_model", "cost-model"),
        ("classifier", "classifier"),
    ]:
        path = folder / f"{name}.safetensors"
        assert path.exists() == (other / path.name).exists()
        if path.exists():
            ours, theirs = (load_tensors(f / path.name, kind=kind)[0] for f in (folder, other))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    if (folder / "labels.jsonl").exists():
        ours, theirs = (read_labels(f / "labels.jsonl") for f in (folder, other))
        assert repr(ours) == repr(theirs)  # as many, and in the same order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "kills"),
    [("ppo_lag_pbcrl", PBCRL, 20), ("ppo_lag", {}, 5), ("ppo_lag_rlsf", RLSF, 5)],
)
def test_a_run_killed_at_random_moments_ends_bit_identical(
    script, options, kills, tmp_path, toy_dataset
):
    options = {**RUN, **options}
    if script != "ppo_lag":
        options["dataset"] = str(toy_dataset)
    folders = []
    for name, times in [("whole", 0), ("killed", kills)]:
        folder = tmp_path / name
        place = {"runs_dir": str(tmp_path), "run_name": name}
        if script == "ppo_lag":
            place |= {"save_trajectories": str(tmp_path / f"{name}_episodes")}
            place |= {"max_trajectories": 30}
        assert run_with_kills(script, {**options, **place}, folder, kills=times, seed=0) == 0
        folders.append(folder)
    assert_same_run(*folders)
    if script == "ppo_lag":
        ours, theirs = (TrajectoryDataset(tmp_path / f"{f.name}_episodes") for f in folders)
        assert ours.seen == theirs.seen > len(ours) == len(theirs) == 30
        np.testing.assert_array_equal(ours.episodes, theirs.episodes)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.obs, other.obs)


class Stop(BaseException):
    """As sudden as a kill, but in this process."""


def cut_off(module, args, *, after, monkeypatch):
    """Train, and stop when `after` iterations have been logged."""
    log, seen = module.Run.log, []

    def log_and_stop(run, step, values):
        log(run, step, values)
        seen.append(step)
        if len(seen) == after:
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(module.Run, "log", log_and_stop)
        with pytest.raises(Stop):
            module.train(args)


@pytest.fixture
def pbcrl_args(scripts, tmp_path, toy_dataset):
    def make(name, **changes):
        place = {"runs_dir": str(tmp_path), "run_name": name, "dataset": str(toy_dataset)}
        return scripts.ppo_lag_pbcrl.Args(**{**RUN, **PBCRL, **place, **changes})

    return make


def resume(module, folder):
    return module.train(module.Args(resume=str(folder)))


def test_a_pbcrl_run_goes_on_from_between_two_checkpoints(
    scripts, tmp_path, pbcrl_args, monkeypatch
):
    module = scripts.ppo_lag_pbcrl
    whole = module.train(pbcrl_args("whole", checkpoint_interval=4, label_delay=1))
    args = pbcrl_args("cut", checkpoint_interval=4, label_delay=1)
    cut_off(module, args, after=11, monkeypatch=monkeypatch)
    assert len(metrics(tmp_path / "cut")) == 11
    resume(module, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", whole)


def test_a_run_in_bfloat16_repeats_itself_and_goes_on(scripts, tmp_path, monkeypatch):
    module = scripts.ppo_lag
    options = {**RUN, "total_timesteps": 2_000, "bf16": True, "runs_dir": str(tmp_path)}
    whole, again = (
        module.train(module.Args(**options, run_name=name)) for name in ("whole", "again")
    )
    assert_same_run(again, whole)
    cut_off(module, module.Args(**options, run_name="cut"), after=3, monkeypatch=monkeypatch)
    resume(module, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", whole)


def test_a_run_without_an_offline_stage_goes_on_too(scripts, tmp_path, pbcrl_args, monkeypatch):
    module = scripts.ppo_lag_pbcrl
    options = {"offline_queries": 0, "online_queries": 80, "dataset": None}
    whole = module.train(pbcrl_args("whole", **options))
    assert summary(whole)["queries_used"] == 80
    assert summary(whole)["pretrained_pair_accuracy"] is None
    cut_off(module, pbcrl_args("cut", **options), after=7, monkeypatch=monkeypatch)
    resume(module, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", whole)


def test_envs_whose_state_nobody_knows_begin_their_episodes_anew(
    scripts, tmp_path, pbcrl_args, toy_episodes, monkeypatch
):
    module = scripts.ppo_lag_pbcrl
    dataset = str(write_dataset(tmp_path / "toy", "TestToy-v0", toy_episodes))
    args = pbcrl_args("cut", env_id="TestToy-v0", cost_limit=5.0, dataset=dataset)
    cut_off(module, args, after=6, monkeypatch=monkeypatch)
    folder = resume(module, tmp_path / "cut")
    assert [row["env_steps"] for row in metrics(folder)] == list(range(400, 8_001, 400))
    # Every label of the log is of a query that the run knows; those of lost episodes lie beside it.
    assert summary(folder)["queries_used"] == len(read_labels(folder / "labels.jsonl"))
    assert len(read_labels(folder / "labels_unused.jsonl")) == 60 * 2 // 7 - 60 // 7


def test_labels_of_episodes_that_a_kill_has_lost_are_kept_beside_the_log(tmp_path):
    path, labels = tmp_path / "labels.jsonl", [Label(0.0, 1.0, 0.0), Label(1.0, math.nan, 1.0)]
    with LabelLog(path) as log:
        log.append([labels[0], *labels])
    load("checkpoints").cut_labels(path, keep=2)
    assert repr(read_labels(path)) == repr([labels[0], labels[0]])
    assert repr(read_labels(tmp_path / "labels_unused.jsonl")) == repr(labels[1:])


def test_a_torn_checkpoint_gives_way_to_the_one_before(
    scripts, tmp_path, pbcrl_args, monkeypatch, capsys
):
    module, folder = scripts.ppo_lag_pbcrl, tmp_path / "cut"
    whole = module.train(pbcrl_args("whole"))
    cut_off(module, pbcrl_args("cut"), after=9, monkeypatch=monkeypatch)
    newest, before = folder / "checkpoint.safetensors", folder / "checkpoint.before.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    resume(module, folder)
    assert "checkpoint.safetensors is damaged" in capsys.readouterr().out
    assert_same_run(folder, whole)
    (folder / "summary.json").unlink()
    for path in (newest, before):
        path.write_bytes(b"nothing")
    with pytest.raises(CorruptFileError, match="is damaged"):
        resume(module, folder)


def test_what_cannot_be_resumed_is_named(scripts, tmp_path):
    module = scripts.ppo_lag
    place = {"runs_dir": str(tmp_path), "run_name": "run"}
    folder = module.train(module.Args(**{**RUN, **place, "total_timesteps": 400}))
    with pytest.raises(ValueError, match=r"was cut off, but .* is finished"):
        resume(module, folder)
    (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match="keeps its arguments, but lr, num_envs differ"):
        module.train(module.Args(resume=str(folder), lr=1.0, num_envs=7))
    with pytest.raises(StorageError, match=r"takes a run of ppo_lag_pbcrl\.py"):
        resume(scripts.ppo_lag_pbcrl, folder)
    with pytest.raises(StorageError, match=r"has no readable args\.json"):
        resume(module, tmp_path)
    with pytest.raises(StorageError, match="go on with it by --resume"):
        module.train(module.Args(**{**RUN, **place}))


def test_ctrl_c_finishes_the_dataset_and_a_resumed_run_takes_it_up(scripts, tmp_path, monkeypatch):
    module = scripts.ppo_lag
    kept = {}
    for name in ("whole", "cut"):
        place = {"runs_dir": str(tmp_path), "run_name": name, "total_timesteps": 4_000}
        place["save_trajectories"] = str(tmp_path / f"{name}_episodes")
        args = module.Args(**{**RUN, "checkpoint_interval": 3, **place})
        if name == "cut":
            cut_off(module, args, after=5, monkeypatch=monkeypatch)
            assert len(TrajectoryDataset(place["save_trajectories"])) == 20
            resume(module, tmp_path / name)
        else:
            module.train(args)
        kept[name] = [t.obs for t in TrajectoryDataset(place["save_trajectories"])]
    assert len(kept["whole"]) == 40
    np.testing.assert_array_equal(kept["cut"], kept["whole"])
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_checkpoint_gives_back_what_was_put_in(tmp_path):
    checkpoints = load("checkpoints")
    state = {
        "numbers": [1, 2.5, None, True, "text", float("inf")],
        "by number": {3: np.arange(4, dtype=np.uint32), 7: {"deep": torch.ones(2, 3)}},
        "stream": np.random.default_rng(0).bit_generator.state,
        "empty": np.zeros((0, 2)),
    }
    checkpoints.save_checkpoint(tmp_path, state)
    found = checkpoints.load_checkpoint(tmp_path)
    assert found["numbers"] == state["numbers"]
    assert found["stream"] == state["stream"]
    np.testing.assert_array_equal(found["by number"][3], state["by number"][3])
    assert found["by number"][3].dtype == np.uint32
    assert torch.equal(found["by number"][7]["deep"], torch.ones(2, 3))
    assert found["empty"].shape == (0, 2)
    with pytest.raises(TypeError, match="cannot hold state/odd, which is set"):
        checkpoints.save_checkpoint(tmp_path, {"odd": {1}})


def test_a_run_without_a_checkpoint_yet_has_none(tmp_path):
    assert load("checkpoints").load_checkpoint(tmp_path) is None
