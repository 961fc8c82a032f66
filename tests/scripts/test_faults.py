"""What goes wrong from outside is survived, or refused by name, and never costs what was good."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import pytest
import torch

from pbcrl.data.label_log import LabelLog, read_labels
from pbcrl.errors import NonFiniteError, StorageError
from pbcrl.storage import FolderLock, load_tensors, save_tensors
from pbcrl_envs.toy import PointHazardsEnv
from pbcrl_script_utils import main
from pbcrl_script_utils.envs import import_env
from pbcrl_script_utils.launch import parse

from ..damage import little_memory
from .conftest import SCRIPTS, load, load_edited
from .runs import (
    assert_same_run,
    cut_off,
    metrics,
    resume,
    small_pbcrl,
    small_ppo_lag,
    small_rlsf,
    summary,
    weights,
)

# So small runs leave measures undefined.
pytestmark = pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")


@pytest.fixture(autouse=True)
def _checkpoint_per_iteration(save_every):
    save_every(1)


# -- Logs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(scripts, tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return scripts.ppo_lag.train(small_ppo_lag(scripts, folder))


def lines(text):
    return text.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda text: text[:0], []),
        (lambda text: "".join(lines(text)[:-1]), [1]),
        (lambda text: text[:-20], [1]),
        (lambda text: lines(text)[0] + "\0" * 100 + "\n", [1]),
        (lambda text: lines(text)[0][:-20] + "\n" + lines(text)[1], [2]),
    ],
    ids=["emptied", "a line short", "torn", "zeros", "torn in the middle"],
)
def test_lines_that_are_missing_or_torn_are_a_warning_and_the_run_goes_on(
    scripts, tmp_path, whole, monkeypatch, capsys, damage, kept
):
    args = small_ppo_lag(scripts, tmp_path)
    cut_off(scripts.ppo_lag, args, after=3, monkeypatch=monkeypatch)
    log = tmp_path / "run" / "metrics.jsonl"
    text = "".join(lines(log.read_text())[:2])  # the third is not in a checkpoint yet
    log.write_text(damage(text))
    folder = resume(scripts.ppo_lag, tmp_path / "run")
    assert f"has {len(kept)} whole lines, but the checkpoint knows of 2" in capsys.readouterr().out
    assert metrics(folder) == [metrics(whole)[k - 1] for k in [*kept, 3]]
    assert summary(folder) == summary(whole)
    ours, theirs = weights(folder), weights(whole)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_an_empty_summary_is_no_finished_run(scripts, tmp_path, whole, monkeypatch):
    args = small_ppo_lag(scripts, tmp_path)
    cut_off(scripts.ppo_lag, args, after=3, monkeypatch=monkeypatch)
    (tmp_path / "run" / "summary.json").touch()
    assert_same_run(resume(scripts.ppo_lag, tmp_path / "run"), whole)


def test_what_killed_writes_left_is_removed_when_the_run_goes_on(scripts, tmp_path, monkeypatch):
    args = small_ppo_lag(scripts, tmp_path)
    cut_off(scripts.ppo_lag, args, after=2, monkeypatch=monkeypatch)
    left = tmp_path / "run" / "checkpoint.safetensors.4711.partial"
    left.write_bytes(b"half")
    folder = resume(scripts.ppo_lag, tmp_path / "run")
    assert not left.exists()
    assert not list(folder.glob("*.partial"))


# -- Labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_lag_pbcrl", "ppo_lag_rlsf"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_label_log_that_is_shorter_than_the_checkpoint_knows_is_refused(
    scripts, tmp_path, toy_dataset, monkeypatch, name, share
):
    module = getattr(scripts, name)
    options = {"total_timesteps": 1600}
    if name == "ppo_lag_rlsf":
        args = small_rlsf(scripts, tmp_path, hash_bits=16, **options)
    else:
        args = small_pbcrl(scripts, tmp_path, toy_dataset, **options)
    cut_off(module, args, after=3, monkeypatch=monkeypatch)
    path = tmp_path / "run" / "labels.jsonl"
    text = path.read_text()
    found = len(read_labels(path))
    path.write_text("".join(lines(text)[: int(share * found) + 1]))
    with pytest.raises(StorageError, match=rf"every label .* \d+ were in .*{int(share * found)} "):
        resume(module, tmp_path / "run")
    path.write_text(text)
    assert summary(resume(module, tmp_path / "run"))["queries_used"] >= found


# -- Weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_a_reward_of_1e38_destroys_nothing_and_the_run_goes_on_with_the_env_mended(
    scripts, tmp_path, monkeypatch, capsys, name
):
    """The second rollout has it; what the first one taught is on disk, and stays there."""
    module, folder = getattr(scripts, name), tmp_path / "run"
    options = {"env_id": "TestToyHuge-v0", "cost_limit": 5.0}
    args = {
        "ppo_lag": lambda: small_ppo_lag(scripts, tmp_path, **options),
        "ppo_lag_pbcrl": lambda: small_pbcrl(
            scripts, tmp_path, None, offline_queries=0, finetune_interval=1, **options
        ),
        "ppo_lag_rlsf": lambda: small_rlsf(scripts, tmp_path, hash_bits=16, **options),
    }[name]()
    with pytest.raises(NonFiniteError, match=r"must be finite.*huge rewards"):
        module.train(args)
    printed = capsys.readouterr().out
    assert "stopped (NonFiniteError): kept agent.safetensors" in printed
    assert f"{name}.py --resume {folder}" in printed
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())
    state, _ = load_tensors(folder / "checkpoint.safetensors", kind="run")
    networks = [t for key, t in state.items() if key.startswith("state/parts/agent")]
    assert len(networks) > 10
    assert all(tensor.isfinite().all() for tensor in networks)
    monkeypatch.setattr(gym.registry["TestToyHuge-v0"], "entry_point", PointHazardsEnv)
    assert [row["env_steps"] for row in metrics(resume(module, folder))] == [400, 800, 1200]


def test_weights_that_diverge_by_the_learning_rate_never_replace_finite_ones(scripts, tmp_path):
    args = small_ppo_lag(scripts, tmp_path, learning_rate=1e30, target_kl=1e30)
    with pytest.raises(NonFiniteError, match="lower the learning rate"):
        scripts.ppo_lag.train(args)
    for file in ("agent", "checkpoint", "checkpoint.before"):
        path = tmp_path / "run" / f"{file}.safetensors"
        if path.exists():
            tensors, _ = load_tensors(path, kind="agent" if file == "agent" else "run")
            assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_cost_model_that_diverges_is_not_written(scripts, tmp_path, toy_dataset, capsys):
    change = "CostModelTrainer(net, **", "CostModelTrainer(net, lr=1e30, **"
    module = load_edited("ppo_lag_pbcrl", tmp_path / "diverging", change)
    args = small_pbcrl(scripts, tmp_path, toy_dataset, cost_model="net")
    with pytest.raises(NonFiniteError):
        module.train(module.Args(**vars(args)))
    path = tmp_path / "run" / "cost_model.safetensors"
    if path.exists():
        assert all(t.isfinite().all() for t in weights(tmp_path / "run", "cost_model").values())
    assert "labels.jsonl" in capsys.readouterr().out  # which are still there
    assert len(read_labels(tmp_path / "run" / "labels.jsonl")) >= 200


# -- Processes -------------------------------------------------------------------------------------


def test_a_second_process_on_a_runs_folder_is_refused(scripts, tmp_path, monkeypatch):
    module, folder = scripts.ppo_lag, tmp_path / "run"
    args = small_ppo_lag(scripts, tmp_path)
    cut_off(module, args, after=1, monkeypatch=monkeypatch)
    with FolderLock(folder):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(StorageError, match=r"one writer at a time, .* at work in .*/run"):
            resume(module, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with (
        FolderLock(tmp_path / "same-name"),
        pytest.raises(StorageError, match=r"one writer at a time, .* at work in .*/same-name"),
    ):
        module.train(replace(args, run_name="same-name"))
    resume(module, folder)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None
        time.sleep(0.05)


def is_running(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def is_locked(folder):
    try:
        FolderLock(folder).release()
    except StorageError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends children with their parent")
def test_a_collecting_child_ends_with_its_parent(tmp_path):
    command = [sys.executable, str(SCRIPTS / "ppo_lag_pbcrl.py"), "--env-id", "PointHazards-v0"]
    command += ["--runs-dir", str(tmp_path), "--run-name", "run", "--num-envs", "4"]
    command += ["--num-steps", "100", "--hidden-sizes", "16", "--threads", "1"]
    command += ["--minibatch-size", "200", "--offline-queries", "18000"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "run" / "collect" / "metrics.jsonl"
    try:
        wait_for(lambda: log.exists() and log.stat().st_size > 0, parent)
        (child,) = children_of(parent.pid)
        assert is_running(child)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    folder, deadline = tmp_path / "run" / "collect", time.monotonic() + 600
    # Its threads take a moment to end; the lock goes with the last of them, and then the process.
    while is_locked(folder) or is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_env_that_raises_is_one_line_with_the_name_of_the_error(scripts, tmp_path, monkeypatch):
    monkeypatch.delenv("PBCRL_TRACEBACK", raising=False)
    command = ["--env-id", "TestToyRaising-v0", "--cost-limit", "5", "--runs-dir", str(tmp_path)]
    command += ["--num-envs", "2", "--num-steps", "100", "--minibatch-size", "100"]
    with pytest.raises(SystemExit, match=r"^error: KeyError: 'wind'\n\(PBCRL_TRACEBACK=1 shows"):
        main(scripts.ppo_lag.train, scripts.ppo_lag.Args, command)


def test_a_run_that_is_finished_while_another_process_waits_for_it_stays_as_it_is(
    scripts, tmp_path, monkeypatch
):
    module, folder = scripts.ppo_lag, tmp_path / "run"
    cut_off(module, small_ppo_lag(scripts, tmp_path), after=1, monkeypatch=monkeypatch)
    waiting = parse(module.Args, ["--resume", str(folder)])
    resume(module, folder)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for _ in range(2):  # and the lock is free again
        with pytest.raises(ValueError, match=f"cut off, but {folder} is finished; extend it by"):
            module.train(waiting)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("sizes", [[10**9], [10**5, 10**5], [1e9], [-1]])
def test_layers_that_args_json_claims_take_no_memory(scripts, tmp_path, monkeypatch, sizes):
    module, folder = scripts.ppo_lag, tmp_path / "run"
    cut_off(module, small_ppo_lag(scripts, tmp_path), after=1, monkeypatch=monkeypatch)
    stored = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(stored | {"hidden_sizes": sizes}))
    for use in (
        lambda: resume(module, folder),
        lambda: scripts.evaluate.evaluate(scripts.evaluate.Args(str(folder), threads=1)),
    ):
        with (
            pytest.raises(StorageError, match=r"restore (args\.json|that file)"),
            little_memory(512),
        ):
            use()


# -- Code ------------------------------------------------------------------------------------------


EXECUTED = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


def forge(folder, env_id):
    """What somebody may hand over as a run: code beside it, and files that name that code."""
    (folder / "helper.py").write_text(EXECUTED)
    args = json.loads((folder / "args.json").read_text()) | {"env_id": env_id, "cost_limit": 5.0}
    (folder / "args.json").write_text(json.dumps(args))
    for file, kind in [("agent.safetensors", "agent"), ("policy.safetensors", "policy")]:
        tensors, meta = load_tensors(folder / file, kind=kind)
        save_tensors(folder / file, kind=kind, tensors=tensors, meta=meta | {"env_id": env_id})


@pytest.mark.parametrize(
    ("env_id", "place"),
    [
        ("helper:PointHazards-v0", "run"),
        ("run.helper:PointHazards-v0", "."),
        ("helper:PointHazards-v0", "/"),
    ],
)
def test_no_command_imports_code_that_lies_in_a_runs_folder(
    scripts, tmp_path, monkeypatch, env_id, place
):
    module, folder = scripts.ppo_lag, tmp_path / "run"
    cut_off(module, small_ppo_lag(scripts, tmp_path), after=1, monkeypatch=monkeypatch)
    forge(folder, env_id)
    monkeypatch.chdir(tmp_path / place)
    monkeypatch.setattr(sys, "path", [str(tmp_path / place), *sys.path])  # as python -m has it
    evaluate, certify = scripts.evaluate, load("certify")

    def certified():
        (folder / "summary.json").write_text("[0]")  # else it is refused as one that was cut off
        certify.certify(certify.Args(str(folder), cost_limit=5.0, threads=1))

    for use in (
        lambda: resume(module, folder),
        lambda: resume(module, Path(os.path.relpath(folder))),
        lambda: evaluate.evaluate(evaluate.Args(str(folder), cost_limit=5.0, threads=1)),
        certified,
    ):
        with pytest.raises(
            ValueError, match=rf"from a file imports installed .* --env-id {env_id}"
        ):
            use()
    assert not list(folder.glob("executed*"))


@pytest.mark.slow
def test_a_module_of_ones_own_is_named_again_to_go_on_with_a_run_and_to_play_it(
    scripts, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_env.py").write_text("import pbcrl_envs\n" + EXECUTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    env_id, module = "own_env:PointHazards-v0", scripts.ppo_lag
    args = small_ppo_lag(scripts, tmp_path, env_id=env_id, cost_limit=5.0)
    with pytest.raises(ValueError, match=f"say so in its folder: --env-id {env_id}"):
        module.train(args)
    import_env(env_id, by_user=True)  # as a command line has it
    (tmp_path / "executed").unlink()
    cut_off(module, args, after=1, monkeypatch=monkeypatch)
    assert f"--resume {tmp_path / 'run'} --env-id {env_id}\n" in capsys.readouterr().out
    for command in (
        ["ppo_lag.py", "--resume", "run"],
        ["evaluate.py", "run", "--episodes", "2"],
        ["certify.py", "run", "--episodes", "2"],
    ):
        for more in ([], ["--env-id", env_id]):
            script, *words = command
            done = subprocess.run(
                [sys.executable, str(SCRIPTS / script), *words, *more],
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode == 0) == bool(more), done.stderr[-2000:]
            assert Path("executed").exists() == bool(more)
        Path("executed").unlink()
        if script == "ppo_lag.py":
            said = done.stdout
            assert f"evaluate.py run --env-id {env_id}\n" in said
            assert f"certify.py run --env-id {env_id}\n" in said


def test_an_interpreter_in_a_runs_folder_is_not_run(scripts, tmp_path, monkeypatch):
    """By default --upstream takes one below the working directory."""
    python = tmp_path / ".venv-parity" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "args.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no program that lies with data"):
        scripts.evaluate.play_upstream(scripts.evaluate.Args("."), None, "SafetyPointGoal1-v0")


def test_a_script_that_differs_in_one_byte_is_not_executed_unless_it_is_trusted(
    scripts, tmp_path, monkeypatch
):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    monkeypatch.chdir(tmp_path)
    with (folder / "ppo_lag.py").open("a") as script:
        script.write("\nopen('executed', 'w').close()\n")
    args = scripts.evaluate.Args(str(folder), episodes=2, threads=1)
    with pytest.raises(StorageError, match=r"--trust-script runs that copy: look at it first"):
        scripts.evaluate.evaluate(args)
    assert not Path("executed").exists()
    scripts.evaluate.evaluate(replace(args, trust_script=True))
    assert Path("executed").exists()
    (folder / "ppo_lag.py").unlink()
    with pytest.raises(StorageError, match=r"holds the script that made it, .* has no ppo_lag\.py"):
        scripts.evaluate.evaluate(args)


@pytest.mark.slow
def test_modules_in_a_runs_folder_do_not_stand_in_for_installed_ones(scripts, tmp_path):
    folder = scripts.ppo_lag.train(small_ppo_lag(scripts, tmp_path, total_timesteps=400))
    for name in ("numpy", "pbcrl_script_utils", "tyro", "json"):
        (folder / f"{name}.py").write_text("open('executed', 'w')")
    command = [sys.executable, str(SCRIPTS / "evaluate.py"), ".", "--episodes", "2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "true_cost" in done.stdout
    assert not (folder / "executed").exists()


def test_a_lock_of_labels_is_released_with_the_run(scripts, tmp_path, toy_dataset):
    folder = scripts.ppo_lag_pbcrl.train(
        small_pbcrl(scripts, tmp_path, toy_dataset, total_timesteps=400)
    )
    LabelLog(folder / "labels.jsonl").close()
