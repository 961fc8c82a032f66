"""A run that was cut off at any moment, and goes on, ends as if nothing had happened."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pbcrl.data.dataset import TrajectoryDataset
from pbcrl.data.label_log import read_labels
from pbcrl.errors import CorruptFileError, MismatchError, NonFiniteError, StorageError
from pbcrl_script_utils.checkpoint import Checkpoint
from pbcrl_script_utils.run import Run

from ..power_cut import PowerCut
from .conftest import SMALL, load, load_edited, write_dataset
from .runs import (
    assert_same_dataset,
    assert_same_run,
    cut_off,
    metrics,
    resume,
    rows,
    small_pbcrl,
    small_ppo_lag,
    small_rlsf,
    summary,
)

# So small runs leave measures undefined, and noisy labels contradict each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:labels of the same trajectories should agree"),
]

RUN = {
    **SMALL,
    "env_id": "PointHazards-v0",
    "total_timesteps": 8_000,
}
ITERATIONS = RUN["total_timesteps"] // (RUN["num_envs"] * RUN["num_steps"])
PBCRL = {
    "offline_queries": 200,
    "online_queries": 60,
    "preference_noise": 0.1,  # so that the oracle has a random stream
    "finetune_interval": 3,
}
RLSF = {"classifier_steps": 5, "queries": 200}


# -- Kills and power cuts --------------------------------------------------------------------------


def forkserver():
    """Children start in a moment: the server has imported what takes long, and trained nothing."""
    context = multiprocessing.get_context("forkserver")
    # PyTorch's optimizers import torch._dynamo, which takes longer than these runs.
    names = "torch", "torch._dynamo", "torch.utils.tensorboard", "pbcrl", "pbcrl_envs.toy", "tyro"
    context.set_forkserver_preload(list(names))
    return context


def start(script, folder, options):
    """Run a script as a child of the server, in silence, with a checkpoint per iteration."""
    module = load(script)
    module.Args.checkpoint_interval = 1
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    go_on(module, folder, options)


def go_on(module, folder, options):
    """Continue a run, or begin it if there is none."""
    if (folder / "args.json").exists():
        resume(module, folder)
    else:
        place = {"runs_dir": str(folder.parent), "run_name": folder.name}
        module.train(module.Args(**options, **place))


def run_with_kills(script, options, folder, *, kills, seed):
    """Start a run, kill it at random moments all over it, and let it end.

    A run that ends before all kills have come was fast, and is as good as any other.
    """
    rng = np.random.default_rng(seed)
    for number in range(kills + 1):
        child = forkserver().Process(target=start, args=(script, folder, options))
        child.start()
        if number < kills:
            # From where the run is in its folder: before that, there is nothing to lose. By its
            # progress and not by the clock, or a fast machine would kill it less often.
            while child.is_alive() and progress(folder) < number * ITERATIONS // (kills + 1):
                time.sleep(0.005)
            child.join(timeout=rng.uniform(0.0, 0.3))
        else:
            child.join()
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        # After its last word it is finished, and there is nothing to go on with.
        if child.exitcode == 0 or (folder / "summary.json").exists():
            return


def progress(folder):
    """Iterations that a run has logged; below 0 as long as it has no folder."""
    log = folder / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else -1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "kills"),
    [
        ("ppo_lag_pbcrl", PBCRL, 2),
        pytest.param("ppo_lag_pbcrl", PBCRL, 20, marks=pytest.mark.nightly),
        pytest.param("ppo_lag", {}, 10, marks=pytest.mark.nightly),
        pytest.param("ppo_lag_rlsf", RLSF, 10, marks=pytest.mark.nightly),
    ],
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
        if script == "ppo_lag":
            options |= {"save_trajectories": str(tmp_path / f"{name}_episodes")}
            options |= {"max_trajectories": 30}
        run_with_kills(script, options, folder, kills=times, seed=0)
        folders.append(folder)
    assert_same_run(*folders)
    if script == "ppo_lag":
        assert_same_dataset(*(tmp_path / f"{f.name}_episodes" for f in folders))
        dataset = TrajectoryDataset(tmp_path / "killed_episodes")
        assert dataset.seen > len(dataset) == 30


TINY = {
    **SMALL,
    "env_id": "PointHazards-v0",
    "num_envs": 2,
    "update_epochs": 1,
    "hidden_sizes": (8,),
    "eval_episodes": 2,
    "total_timesteps": 1_200,
}
TINY_PBCRL = {
    "offline_queries": 40,
    "online_queries": 8,
    "preference_noise": 0.1,
    "finetune_interval": 1,
}


def cut_the_power(script, options, place, cuts):
    """In a child of the server: run once to the end, then again and again with a power cut.

    The folders are `place/whole` and `place/cut-NUMBER`, with the run and its dataset; those whose
    run does not go on have no summary.
    """
    module = load(script)
    module.Args.checkpoint_interval = 2
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.stderr = open(place / f"{cuts.start}.log", "w")  # noqa: SIM115

    def train(folder):
        if (folder / "run" / "summary.json").exists():
            return
        episodes = str(folder / "episodes")
        more = {"save_trajectories": episodes} if script == "ppo_lag" else {}
        go_on(module, folder / "run", {**options, **more})

    def disk(name):
        (place / name).mkdir()
        return PowerCut(place / name, scratch=place / f"scratch-{name}")

    whole = disk(f"whole-{cuts.start}")
    assert whole.fork(lambda: train(whole.folder)) == 0
    for number in cuts:
        rng = random.Random(number)
        cut = disk(f"cut-{number}")
        status = cut.fork(lambda: train(cut.folder), at=rng.randint(1, whole.moments))  # noqa: B023
        assert status in (-signal.SIGKILL, 0), status
        print("cut", number, cut.cut(rng), file=sys.stderr, flush=True)
        assert cut.fork(lambda: train(cut.folder)) == 0  # noqa: B023
    whole.folder.rename(place / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    [
        range(1),
        pytest.param(range(100, 117), marks=pytest.mark.nightly),
    ],
    ids=len,
)
@pytest.mark.parametrize(
    ("script", "options"),
    [("ppo_lag", {"max_trajectories": 6}), ("ppo_lag_pbcrl", TINY_PBCRL), ("ppo_lag_rlsf", RLSF)],
)
def test_a_run_goes_on_from_what_a_power_cut_leaves_and_ends_bit_identical(
    script, options, cuts, tmp_path, toy_dataset
):
    """At any moment, and with any of what was not synced on the disk or not."""
    options = {**TINY, **options}
    if script != "ppo_lag":
        options["dataset"] = str(toy_dataset)
    child = forkserver().Process(target=cut_the_power, args=(script, options, tmp_path, cuts))
    child.start()
    child.join()
    assert child.exitcode == 0, (tmp_path / f"{cuts.start}.log").read_text()
    for number in cuts:
        assert_same_run(tmp_path / f"cut-{number}" / "run", tmp_path / "whole" / "run")
        if script == "ppo_lag":
            assert_same_dataset(*(tmp_path / f / "episodes" for f in (f"cut-{number}", "whole")))


# -- In this process -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _checkpoint_per_iteration(save_every):
    save_every(1)


@pytest.fixture
def pbcrl_args(scripts, tmp_path, toy_dataset):
    def make(name, **changes):
        place = {"runs_dir": str(tmp_path), "run_name": name, "dataset": str(toy_dataset)}
        place["total_timesteps"] = 4_000
        return scripts.ppo_lag_pbcrl.Args(**{**RUN, **PBCRL, **place, **changes})

    return make


def test_a_pbcrl_run_goes_on_from_between_two_checkpoints(
    scripts, tmp_path, pbcrl_args, save_every, monkeypatch
):
    module = scripts.ppo_lag_pbcrl
    save_every(4)
    whole = module.train(pbcrl_args("whole"))
    cut_off(module, pbcrl_args("cut"), after=7, monkeypatch=monkeypatch)
    assert len(metrics(tmp_path / "cut")) == 7
    resume(module, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", whole)


def test_a_run_without_an_offline_stage_goes_on_too(scripts, tmp_path, pbcrl_args, monkeypatch):
    module = scripts.ppo_lag_pbcrl
    options = {"offline_queries": 0, "online_queries": 40, "dataset": None}
    whole = module.train(pbcrl_args("whole", **options))
    assert summary(whole)["queries_used"] == 40
    assert "pretrained_pair_accuracy" not in summary(whole)
    cut_off(module, pbcrl_args("cut", **options), after=4, monkeypatch=monkeypatch)
    resume(module, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", whole)


def test_a_run_that_was_moved_goes_on_in_its_new_place(scripts, tmp_path, monkeypatch):
    module = scripts.ppo_lag
    whole = module.train(small_ppo_lag(scripts, tmp_path, run_name="whole"))
    args = small_ppo_lag(scripts, tmp_path, run_name="cut")
    cut_off(module, args, after=2, monkeypatch=monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cut").rename(tmp_path / "elsewhere" / "moved")
    assert_same_run(resume(module, tmp_path / "elsewhere" / "moved"), whole)


def test_a_run_goes_on_from_within_its_folder(scripts, tmp_path, monkeypatch):
    module = scripts.ppo_lag
    cut_off(module, small_ppo_lag(scripts, tmp_path), after=2, monkeypatch=monkeypatch)
    monkeypatch.chdir(tmp_path / "run")
    resume(module, Path())
    assert summary(tmp_path / "run")["env_steps"] == 1200
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == []


def test_a_script_that_has_changed_in_between_is_said_and_kept(
    scripts, tmp_path, monkeypatch, capsys
):
    edited = load_edited("ppo_lag", tmp_path / "edited", ("nn.ReLU(inplace=True)", "nn.Tanh()"))
    args = small_ppo_lag(scripts, tmp_path)
    cut_off(scripts.ppo_lag, args, after=2, monkeypatch=monkeypatch)
    folder = resume(edited, tmp_path / "run")
    said = "ppo_lag.py has changed since the run began; it goes on with the new one"
    assert f"warning: {said}" in capsys.readouterr().out
    assert summary(folder)["warnings"] == [said]
    assert (folder / "ppo_lag.py").read_bytes() == Path(edited.__file__).read_bytes()


def test_a_net_that_draws_random_numbers_goes_on_with_the_same_ones(scripts, tmp_path, monkeypatch):
    dropout = "nn.Sequential(nn.ReLU(), nn.Dropout(0.1))"
    edited = load_edited("ppo_lag", tmp_path / "edited", ("nn.ReLU(inplace=True)", dropout))
    whole = edited.train(small_ppo_lag(scripts, tmp_path, run_name="whole"))
    args = small_ppo_lag(scripts, tmp_path, run_name="cut")
    cut_off(edited, args, after=2, monkeypatch=monkeypatch)
    assert_same_run(resume(edited, tmp_path / "cut"), whole)


def test_envs_whose_state_nobody_knows_begin_their_episodes_again(
    scripts, tmp_path, pbcrl_args, toy_episodes, monkeypatch
):
    module = scripts.ppo_lag_pbcrl
    dataset = str(write_dataset(tmp_path / "toy", "TestToy-v0", toy_episodes))
    args = pbcrl_args("cut", env_id="TestToy-v0", cost_limit=5.0, dataset=dataset)
    cut_off(module, args, after=6, monkeypatch=monkeypatch)
    before, known = read_labels(tmp_path / "cut" / "labels.jsonl"), metrics(tmp_path / "cut")[4]
    folder = resume(module, tmp_path / "cut")
    assert [row["env_steps"] for row in metrics(folder)] == list(range(400, 4_001, 400))
    # Every label of the log is of a query that the run knows; those of lost episodes lie beside it.
    assert summary(folder)["queries_used"] == len(read_labels(folder / "labels.jsonl"))
    # In iteration 6, after the newest checkpoint, more queries were asked.
    assert len(before) > known["queries_used"]
    unused = read_labels(folder / "labels_unused.jsonl")
    assert repr(unused) == repr(before[known["queries_used"] :])


def test_labels_of_lost_episodes_are_set_aside_by_rlsf_too(
    scripts, tmp_path, save_every, monkeypatch
):
    module = scripts.ppo_lag_rlsf
    save_every(2)
    args = small_rlsf(scripts, tmp_path, env_id="TestToy-v0", cost_limit=5.0, hash_bits=16)
    cut_off(module, args, after=3, monkeypatch=monkeypatch)
    folder = tmp_path / "run"
    before = read_labels(folder / "labels.jsonl")
    known = rows(folder)[1]["queries_used"]
    assert len(before) > known
    resume(module, folder)
    unused = read_labels(folder / "labels_unused.jsonl")
    assert repr(unused) == repr(before[known:])
    assert summary(folder)["queries_used"] == len(read_labels(folder / "labels.jsonl"))


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_an_extended_run_is_the_longer_run_to_the_last_bit(scripts, tmp_path, toy_dataset, name):
    """No schedule follows the length here, and its last labelling round is a regular one.

    Four times as long with twice the queries: those up to an iteration grow with its root.
    """
    module, folders = getattr(scripts, name), []
    for total in (800, 3200):
        changes = {"total_timesteps": total, "run_name": str(total), "lr_decay": 0.0}
        if name == "ppo_lag_pbcrl":
            changes |= {"online_queries": 12 if total == 800 else 24, "constraint": "learned"}
            args = small_pbcrl(scripts, tmp_path, toy_dataset, **changes)
        else:
            args = (small_rlsf if name == "ppo_lag_rlsf" else small_ppo_lag)(
                scripts, tmp_path, **changes
            )
        folders.append(module.train(args))
    extended = resume(module, folders[0], total_timesteps=3200)
    assert extended == folders[0]
    assert_same_run(extended, folders[1])
    stored, longer = (json.loads((f / "args.json").read_text()) for f in folders)
    assert {name for name in longer if stored[name] != longer[name]} <= {
        "made_by",
        "run_name",
    }


def test_a_run_that_cannot_be_extended_stays_finished(scripts, tmp_path):
    module = scripts.ppo_lag
    folder = module.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    for path in folder.glob("checkpoint*"):
        path.unlink()
    before = {name: (folder / name).read_bytes() for name in ("args.json", "summary.json")}
    with pytest.raises(StorageError, match=r"extended from its last checkpoint, but .* has no"):
        resume(module, folder, total_timesteps=800)
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_what_cannot_be_resumed_is_named(scripts, tmp_path):
    module = scripts.ppo_lag
    args = small_ppo_lag(scripts, tmp_path, total_timesteps=300)  # an iteration has 400
    folder = module.train(args)
    with pytest.raises(ValueError, match=r"was cut off, but .* is finished; extend it by a larger"):
        resume(module, folder)
    with pytest.raises(ValueError, match=r"has 400 already, got 350; give more"):
        resume(module, folder, total_timesteps=350)
    (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"but .* was cut off .*; finish it by --resume alone"):
        resume(module, folder, total_timesteps=800)
    differs = (
        r"but in .*/run --learning-rate is 0\.001, got 1\.0, and --num-envs is 4, got 7; leave"
    )
    with pytest.raises(ValueError, match=differs):
        resume(module, folder, learning_rate=1.0, num_envs=7)
    with pytest.raises(
        ValueError, match=r"--run-name is run, got another, and --runs-dir is .*, got"
    ):
        resume(module, folder, run_name="another", runs_dir=str(tmp_path / "elsewhere"))
    with pytest.raises(StorageError, match=r"takes a run of ppo_lag_pbcrl\.py"):
        resume(scripts.ppo_lag_pbcrl, folder)
    with pytest.raises(StorageError, match=r"holds args\.json, but .* has none that can be read"):
        resume(module, tmp_path)
    with pytest.raises(StorageError, match="go on with it by --resume"):
        module.train(args)


def test_an_error_keeps_all_episodes_and_a_resumed_run_makes_the_same_dataset(
    scripts, tmp_path, save_every, monkeypatch
):
    module = scripts.ppo_lag
    save_every(3)
    for name in ("whole", "cut"):
        place = {"runs_dir": str(tmp_path), "run_name": name, "total_timesteps": 4_000}
        place["save_trajectories"] = str(tmp_path / f"{name}_episodes")
        args = module.Args(**{**RUN, **place})
        if name == "cut":
            cut_off(module, args, after=5, monkeypatch=monkeypatch)
            assert len(TrajectoryDataset(place["save_trajectories"])) == 20
            resume(module, tmp_path / name)
        else:
            module.train(args)
    assert len(TrajectoryDataset(tmp_path / "whole_episodes")) == 40
    assert_same_dataset(tmp_path / "cut_episodes", tmp_path / "whole_episodes")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


# -- Checkpoints -----------------------------------------------------------------------------------


class Holding:
    """A part of a run with the state that it is given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture
def checkpoint(scripts, tmp_path):
    args = small_ppo_lag(scripts, tmp_path)
    with Run(args, script=scripts.ppo_lag.__file__) as run:

        def make(**parts):
            one = Checkpoint(run, args, keep=lambda: None)
            one.add(**parts)
            return one

        yield make


def test_a_checkpoint_gives_back_what_was_put_in(checkpoint):
    state = {
        "numbers": [1, 2.5, None, True, "text", float("inf")],
        "by number": {3: np.arange(4, dtype=np.uint32), 7: {"deep": torch.ones(2, 3)}},
        "empty": np.zeros((0, 2)),
    }
    rng, noise = np.random.default_rng(0), torch.Generator().manual_seed(0)
    checkpoint(part=Holding(state), rng=rng, noise=noise, left_out=None).save()
    drawn = rng.normal(), torch.randn(3, generator=noise).tolist()
    part, rng, noise = Holding(None), np.random.default_rng(9), torch.Generator()
    assert checkpoint(part=part, rng=rng, noise=noise).load()
    assert (rng.normal(), torch.randn(3, generator=noise).tolist()) == drawn
    assert part.state["numbers"] == state["numbers"]
    np.testing.assert_array_equal(part.state["by number"][3], state["by number"][3])
    assert part.state["by number"][3].dtype == np.uint32
    assert torch.equal(part.state["by number"][7]["deep"], torch.ones(2, 3))
    assert part.state["empty"].shape == (0, 2)


def test_what_a_checkpoint_cannot_hold_is_named(checkpoint):
    with pytest.raises(TypeError, match="cannot hold state/parts/part/odd, which is set"):
        checkpoint(part=Holding({"odd": {1}})).save()


def test_a_run_without_a_checkpoint_yet_has_none(checkpoint):
    assert not checkpoint(part=Holding(None)).load()


def test_a_checkpoint_of_other_parts_is_refused(checkpoint):
    checkpoint(one=Holding({})).save()
    with pytest.raises(
        MismatchError, match=r"has the parts \['one', 'run'\], the script \[.* 'two'\]"
    ):
        checkpoint(one=Holding({}), two=Holding({})).load()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    scripts, tmp_path, pbcrl_args, monkeypatch, capsys
):
    module, folder = scripts.ppo_lag_pbcrl, tmp_path / "cut"
    whole = module.train(pbcrl_args("whole"))
    cut_off(module, pbcrl_args("cut"), after=5, monkeypatch=monkeypatch)
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


def test_a_damaged_checkpoint_never_takes_the_place_of_the_one_before(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """A disk that is full often leaves the first, and refuses the next."""
    for number in (1, 2):
        checkpoint(one=Holding({"number": number})).save()
    newest = tmp_path / "run" / "checkpoint.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    part = Holding({})
    one = checkpoint(one=part)
    assert one.load()
    assert part.state == {"number": 1}
    with monkeypatch.context() as patch:
        patch.setattr("pbcrl_script_utils.checkpoint.save_tensors", full)
        with pytest.raises(StorageError, match="full"):
            one.save()
    assert checkpoint(one=part).load()
    part.state = {"number": 3}
    one.save()
    newest.write_bytes(b"")
    assert checkpoint(one=part).load()
    assert part.state == {"number": 1}
    assert capsys.readouterr().out.count("checkpoint.safetensors is damaged") == 3


def full(*_, **__):
    raise StorageError("the disk is full")


def test_a_checkpoint_that_is_not_finite_is_not_written_and_gives_way_if_it_was(
    checkpoint, tmp_path, capsys, monkeypatch
):
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 1.0)
    checkpoint(net=net).save()
    path = tmp_path / "run" / "checkpoint.safetensors"
    sound = path.read_bytes()
    nn.init.constant_(net.weight, torch.nan)
    with pytest.raises(NonFiniteError, match="weights must be finite, but weight of net holds"):
        checkpoint(net=net).save()
    assert path.read_bytes() == sound
    # As older scripts wrote them:
    monkeypatch.setattr("pbcrl_script_utils.checkpoint.check_weights", lambda **_: None)
    checkpoint(net=net).save()
    assert checkpoint(net=net).load()
    assert net.weight.item() == 1.0
    assert "weight of net holds NaN or an infinity" in capsys.readouterr().out


def test_a_flipped_digit_in_the_arguments_is_refused(scripts, tmp_path, monkeypatch):
    module, folder = scripts.ppo_lag, tmp_path / "run"
    args = small_ppo_lag(scripts, tmp_path)
    cut_off(module, args, after=2, monkeypatch=monkeypatch)
    path = folder / "args.json"
    text = path.read_text()
    path.write_text(text.replace('"learning_rate": 0.001', '"learning_rate": 0.0007'))
    assert json.loads(path.read_text()) != json.loads(text)
    with pytest.raises(MismatchError, match=r"but learning_rate in args\.json .*\[0\.0007\] and"):
        resume(module, folder)
    path.write_text(text)
    resume(module, folder)


def test_arguments_that_are_no_arguments_are_refused(scripts, tmp_path, monkeypatch):
    module, folder = scripts.ppo_lag, tmp_path / "run"
    cut_off(module, small_ppo_lag(scripts, tmp_path), after=1, monkeypatch=monkeypatch)
    stored = json.loads((folder / "args.json").read_text())
    for text in ("", "[]", "null", json.dumps(stored | {"num_envs": "4"})):
        Path(folder / "args.json").write_text(text)
        with pytest.raises((StorageError, ValueError), match=r"args\.json|num_envs|--num-envs"):
            resume(module, folder)
