"""The grid of the paper's experiments: what it starts, skips, resumes and refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro

from pbcrl import LagrangeMultiplier

from .paper import PAPER, load

TOY, GOAL, PUSH = "PointHazards-v0", "SafetyPointGoal1-v0", "SafetyPointPush1-v0"


@pytest.fixture(scope="module")
def benchmark():
    return load("benchmark")


@pytest.fixture(scope="module")
def presets():
    return load("presets")


def jobs(benchmark, *preset, **options):
    return benchmark.jobs_of(benchmark.Args(preset, **{"seeds": 1, **options}))


def every_job(benchmark, presets):
    """One seed of every run of every preset."""
    return [(name, job) for name in presets.TABLES for job in jobs(benchmark, name)]


# -- The grid ------------------------------------------------------------------------------


def test_every_command_of_every_preset_is_understood_by_its_script(benchmark, presets):
    seen = set()
    for name, job in every_job(benchmark, presets):
        # The options without what differs by folder alone.
        words = tuple(word for word in job.command[2:] if "/" not in word and "__" not in word)
        if words in seen:
            continue
        seen.add(words)
        args = tyro.cli(load(job.script.stem).Args, args=job.command[2:])
        for flag, value in job.options.items():
            assert getattr(args, flag.replace("-", "_")) == value, (name, flag)
    assert len(seen) > 50


def test_all_methods_of_a_table_may_buy_the_same_number_of_labels_save_those_with_500(
    benchmark, presets
):
    for name, job in every_job(benchmark, presets):
        bought = [int(str(job.options.get(flag, 0))) for flag in presets.QUERIES]
        budget = 100 if name == "smoke" else 20_000
        if job.name.split("__")[1].endswith("_500"):
            budget = 500
        assert sum(bought) == (0 if job.script.stem == "ppo_lag" else budget), job.name


def test_a_robots_500_queries_show_no_batches(presets):
    """500 queries in 60 to 80 rounds are six each; a batch of 50 episodes counts as 25."""
    for variant in ("trees_labels", "trees_labels_500", "trees_labels_online_500"):
        found = presets.options_of("trees", presets.GOAL, variant, episodes="-")
        few = variant.endswith("_500")
        assert found["constraint"] == ("rate" if few else "accept")
        assert ("accept-batch" in found) != few
        assert found.get("max-unsafe-rate") == (0.35 if few else None)


def test_a_run_comes_after_the_one_whose_episodes_it_learns_from(benchmark, presets):
    for name in presets.TABLES:
        listed = jobs(benchmark, name)
        names = [job.name for job in listed]
        assert len(names) == len(set(names))
        for job in listed:
            if job.needs is None:
                assert "save-trajectories" in job.options
            else:
                source = listed[names.index(job.needs)]
                assert source.options["save-trajectories"] == job.options["dataset"]
                assert names.index(job.needs) < names.index(job.name)


def test_a_run_that_two_tables_need_is_made_once(benchmark):
    both = [job.name for job in jobs(benchmark, "results", "navigation", "w2")]
    assert both == [job.name for job in jobs(benchmark, "results")]
    assert len(both) == 6 * 6


def test_a_uniform_limit_is_the_tasks_own_on_goal_and_another_run_elsewhere(benchmark):
    listed = {job.name: job for job in jobs(benchmark, "uniform", tasks=(GOAL, PUSH))}
    assert f"{GOAL}__pbcrl__0" in listed
    uniform = listed[f"{PUSH}__pbcrl_uniform__0"]
    assert uniform.options["cost-limit"] == 20
    # Its episodes come from the oracle of the same limit.
    assert uniform.needs == f"{PUSH}__ppo_lag_uniform__0"
    assert listed[uniform.needs].options["cost-limit"] == 20


def test_the_ablations_differ_from_pbcrl_as_the_paper_says(benchmark):
    def changed(table, variant, task=GOAL):
        found = {job.name: job.options for job in jobs(benchmark, table, tasks=(task,))}
        base = found[f"{task}__pbcrl__0"]
        other = found[f"{task}__{variant}__0"]
        return {k: v for k, v in other.items() if base.get(k) != v and k != "run-name"}

    assert changed("dead_zone", "dead_zone_0.1") == {"dead-zone": 0.1}
    assert changed("snr", "snr_1e-05") == {"snr-weight": 1e-5}
    assert changed("noise", "pbcrl_noise_30") == {"preference-noise": 0.3}
    plain = {"dead-zone": 0, "dead-zone-lr": 0, "snr-weight": 0}
    assert changed("offsets", "ppo_bt_limit_10") == {**plain, "cost-limit": 10}
    offline = {"offline-queries": 20_000, "online-queries": 0}
    assert changed("two_stage", "pbcrl_offline") == offline


def test_a_constant_multiplier_differs_from_that_of_labels_in_nothing_else(benchmark):
    block = "DrivingBlockedRoad-v0"
    found = {job.name: job.options for job in jobs(benchmark, "constant", tasks=(block,))}
    base = found.pop(f"{block}__pbcrl_rate__0")
    assert (base["offline-queries"], base["online-queries"]) == (18_000, 2_000)
    del found[f"{block}__ppo_lag__0"]
    for value in (0.3, 0.5, 1, 2, 5):
        options = found.pop(f"{block}__pbcrl_constant_{value}__0")
        changed = {k: v for k, v in options.items() if base.get(k) != v and k != "run-name"}
        constant = {"multiplier-lr": 0, "multiplier-initial": value, "multiplier-cap": value}
        assert options.items() >= constant.items()
        assert changed.items() <= constant.items()  # the recipe may have the same cap
        LagrangeMultiplier(lr=0, initial=value, cap=options["multiplier-cap"])  # is not refused
    assert not found


def test_unknown_names_are_refused_with_those_that_exist(benchmark):
    with pytest.raises(SystemExit, match=r"--preset must be of results, .*, got 'result'"):
        jobs(benchmark, "result")
    with pytest.raises(SystemExit, match=r"--variants must be of ppo_lag, .*, got 'ppo'"):
        jobs(benchmark, "results", variants=("ppo",))
    with pytest.raises(SystemExit, match=f"--tasks must be of {GOAL}, {PUSH}, .*, got '{TOY}'"):
        jobs(benchmark, "w2", tasks=(TOY,))
    with pytest.raises(SystemExit, match="--variants leave nothing of w2, which has pbcrl, rlsf"):
        jobs(benchmark, "w2", variants=("ppo_lag",))


# -- What is known of a run ------------------------------------------------------------------


def test_a_folder_of_other_settings_is_refused_and_they_are_named(benchmark, tmp_path):
    (job, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path / "a"))
    benchmark.claim(job)
    benchmark.claim(job)
    (other, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path / "a"), total_timesteps=7)
    with pytest.raises(SystemExit, match=r"total-timesteps \(1000000 there, 7 now\); use"):
        benchmark.claim(other)
    # A folder that was moved is the same.
    (tmp_path / "a").rename(tmp_path / "b")
    (moved, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path / "b"))
    benchmark.claim(moved)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\0" * 40], ids=repr)
def test_settings_that_cannot_be_read_are_refused_with_the_name_of_the_file(
    benchmark, tmp_path, content
):
    (job, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path))
    benchmark.claim(job)
    (job.folder / "options.json").write_text(content)
    with pytest.raises(SystemExit, match=r"ppo_lag__0/options.json is empty or damaged; delete"):
        benchmark.claim(job)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\0" * 40], ids=repr)
def test_a_run_whose_summary_cannot_be_read_is_not_finished(benchmark, tmp_path, content):
    (job, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path))
    summary = job.folder / "summary.json"
    assert not job.finished
    assert benchmark.set_aside_damaged_summary(job) == ""
    job.folder.mkdir()
    summary.write_text('{"return": 1.0}')
    assert job.finished
    assert benchmark.set_aside_damaged_summary(job) == ""
    summary.write_text(content)
    assert not job.finished
    said = benchmark.set_aside_damaged_summary(job)
    assert said.startswith(f"warning: {summary} is empty or damaged, so this run counts as not")
    assert not summary.exists()
    assert (job.folder / "summary.json.damaged").read_text() == content


@pytest.mark.parametrize(
    ("arguments", "resumed"), [(None, False), ("", False), ('{"script": "ppo_lag"}', True)]
)
def test_a_run_is_resumed_if_it_has_written_its_arguments(benchmark, tmp_path, arguments, resumed):
    (job, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path))
    job.folder.mkdir()
    if arguments is not None:
        (job.folder / "args.json").write_text(arguments)
    assert job.next_command == (job.resuming if resumed else job.command)
    assert ("--resume" in job.next_command) == resumed


def test_two_benchmarks_on_one_folder_are_refused(benchmark, tmp_path):
    with (
        benchmark.lock(tmp_path),
        pytest.raises(SystemExit, match=rf"in use by process {os.getpid()} of .*wait for it"),
    ):
        benchmark.lock(tmp_path)
    benchmark.lock(tmp_path).close()


def test_rates_are_those_of_the_newest_lines_and_torn_lines_are_not_read(benchmark, tmp_path):
    assert benchmark.recent_rows(tmp_path) == []
    lines = [{"env_steps": 100 * i, "wall_seconds": 5.0 + 2.0 * i} for i in range(1, 4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    torn = '{"env_steps": 4{"env_steps": 400}\n\0\0\n7\n{}\n'
    (tmp_path / "metrics.jsonl").write_text(torn + text + '{"env_steps": 4')
    assert benchmark.recent_rows(tmp_path) == lines
    assert benchmark.rate_of(lines) == 50.0
    assert benchmark.rate_of(lines[:1]) is None
    long = {"env_steps": 900, "wall_seconds": 9.0, "filling": "x" * 9_000}
    (tmp_path / "metrics.jsonl").write_text(text + 3 * (json.dumps(long) + "\n"))
    assert benchmark.recent_rows(tmp_path) == [long]
    assert benchmark.clock(3_725.9) == "1:02:05"


def test_the_live_table_has_rates_and_the_time_left_of_each_run_and_of_all(benchmark, tmp_path):
    listed = jobs(benchmark, "toy", runs_dir=str(tmp_path), variants=("pbcrl",))
    first, second = listed
    first.state, second.state = "running", "waiting"
    first.folder.mkdir()
    # 250,000 of 1,000,000 steps at 1,000 steps/s.
    lines = [
        {"env_steps": steps, "wall_seconds": steps / 1000, "true_cost": 4.321, "return": None}
        for steps in (200_000, 250_000)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (first.folder / "metrics.jsonl").write_text(text)
    console = benchmark.Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(benchmark.picture(listed))
    shown = console.export_text()
    assert "1 running, 1 waiting; about 0:29:10 left" in shown
    assert f"{first.name}" in shown
    assert second.name not in shown
    cells = [cell.strip() for cell in shown.split("│")]
    assert cells[cells.index(first.name) + 1 :][:5] == ["250,000", "1,000", "0:12:30", "", "4.32"]


def test_what_a_run_died_of_is_the_error_of_its_last_attempt(benchmark, tmp_path):
    (job, *_) = jobs(benchmark, "toy", runs_dir=str(tmp_path))
    job.folder.mkdir()
    assert benchmark.last_words(job) == ""
    (job.folder / "log.txt").write_text("error: the first time\n(see)\n")
    assert benchmark.last_words(job) == "error: the first time"
    job.log_start = (job.folder / "log.txt").stat().st_size
    with (job.folder / "log.txt").open("a") as log:
        log.write("\r 10%|##  | 3/9\r 20%|###  | 4/9\n\n")
    assert benchmark.last_words(job) == "20%|###  | 4/9"
    assert benchmark.reason(-9) == "killed by SIGKILL"
    assert benchmark.reason(0) == ""


def test_a_child_dies_with_the_process_that_started_it(tmp_path):
    if sys.platform != "linux":
        pytest.skip("other systems have no such signal")
    code = f"""
import sys, time
sys.path.insert(0, {str(PAPER)!r})
from benchmark import open_child
print(open_child(["sleep", "inf"], {str(tmp_path / "log")!r}).pid, flush=True)
time.sleep(1e6)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    wait_until(lambda: not alive(child))


# -- Whole benchmarks on the toy ---------------------------------------------------------------


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, process=None):
    """As long as it takes on any machine; a process that has ended makes it true no more."""
    end = time.monotonic() + 600
    while not condition():
        assert process is None or process.poll() is None, "it ended before"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def is_stopped(pid):
    """Whether a process has come to a stop; until then it sees Ctrl-C before SIGSTOP."""
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()


def is_interrupted(pid):
    """Whether a process that is stopped will see Ctrl-C as soon as it goes on."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(pending, 16) >> (signal.SIGINT - 1) & 1)


def command(runs_dir, *options):
    script = str(PAPER / "benchmark.py")
    fixed = ["--preset", "smoke", "--seeds", "1", "--tasks", TOY, "--runs-dir", str(runs_dir)]
    return [sys.executable, script, *fixed, *options]


def finish(words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def failures(runs_dir):
    path = runs_dir / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder):
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line)["env_steps"] for line in lines]


def runs_process(folder):
    """The process that makes a run, found by its command line, if there is one."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if folder.name in words or str(folder) in words:
            return int(entry.name)
    return None


@pytest.mark.slow
def test_what_cannot_be_made_is_noted_with_its_reason_and_stops_what_needs_it(tmp_path):
    # Somebody's file lies where the episodes shall go.
    (tmp_path / "smoke" / "episodes").mkdir(parents=True)
    (tmp_path / "smoke" / "episodes" / f"{TOY}__ppo_lag__0").write_text("mine")
    status, said = finish(command(tmp_path, "--variants", "pbcrl", "rlsf"))
    assert status == 1
    first, second = failures(tmp_path)
    assert (first["run"], first["attempt"]) == (f"smoke/{TOY}__ppo_lag__0", 1)
    assert "exit status 1: error: " in first["error"]
    assert "must be writable, but: Not a directory" in first["error"]
    assert second["attempt"] == 2
    assert "0 of 3 runs are done" in said
    for variant in ("pbcrl", "rlsf"):
        reason = f"it needs the episodes of smoke/{TOY}__ppo_lag__0"
        assert f"impossible: smoke/{TOY}__{variant}__0: {reason}" in said


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_and_the_same_command_goes_on_with_them(tmp_path):
    words = command(tmp_path, "--variants", "ppo_lag", "--total-timesteps", "100000")
    folder = tmp_path / "smoke" / f"{TOY}__ppo_lag__0"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: runs_process(folder), process)
        child = runs_process(folder)
        wait_until(lambda: len(steps_of(folder)) > 1, process)
        os.kill(child, signal.SIGSTOP)  # or it might end before Ctrl-C comes
        try:
            wait_until(lambda: is_stopped(child), process)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: is_interrupted(child), process)
        finally:
            os.kill(child, signal.SIGCONT)
        assert "the same command resumes them" in process.communicate()[0]
    assert process.returncode == 130
    assert not alive(child)
    assert not (folder / "summary.json").exists()
    status, said = finish(words)
    assert status == 0, said
    assert "1 runs, 0 done before" in said
    assert not failures(tmp_path)
    assert "going on after iteration" in (folder / "log.txt").read_text()
    assert steps_of(folder) == list(range(2_000, 100_001, 2_000))


@pytest.mark.slow
def test_a_run_that_is_killed_is_resumed_and_the_reason_kept(tmp_path):
    words = command(tmp_path, "--variants", "ppo_lag", "--total-timesteps", "100000")
    folder = tmp_path / "smoke" / f"{TOY}__ppo_lag__0"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: runs_process(folder), process)
        child = runs_process(folder)
        wait_until(lambda: len(steps_of(folder)) > 1, process)
        os.kill(child, signal.SIGKILL)
        said, _ = process.communicate()
    assert process.returncode == 0, said
    (failure,) = failures(tmp_path)
    assert failure["run"] == f"smoke/{TOY}__ppo_lag__0"
    assert failure["error"].startswith("killed by SIGKILL")
    assert "going on after iteration" in (folder / "log.txt").read_text()
    assert steps_of(folder) == list(range(2_000, 100_001, 2_000))
    status, said = finish(words)
    assert status == 0
    assert "1 runs, 1 done before" in said


# -- Ray -----------------------------------------------------------------------------------


# In a separate process: Ray leaves files and processes to be closed when Python ends.
CLUSTER = """
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
second = cluster.add_node(**node)
print("address", cluster.address, flush=True)
input()
cluster.remove_node(second, allow_graceful=False)
input()
cluster.shutdown()
"""


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of a real Ray cluster here, one processor each; a line kills the second."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], text=True, **pipes) as process:
        yield process
        process.communicate("\n\n")


@pytest.mark.nightly
def test_on_a_ray_cluster_a_run_whose_node_dies_goes_on_on_another(cluster, tmp_path):
    address = next(line.split()[1] for line in cluster.stdout if line.startswith("address"))
    words = command(tmp_path, "--engine", "ray", "--ray-address", address, "--seeds", "2")
    words += ["--variants", "ppo_lag", "--total-timesteps", "80000"]
    folders = [tmp_path / "smoke" / f"{TOY}__ppo_lag__{seed}" for seed in range(2)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: all(len(steps_of(folder)) > 11 for folder in folders), process)
        print(file=cluster.stdin, flush=True)
        said, _ = process.communicate()
    assert process.returncode == 0, said
    (failure,) = failures(tmp_path)
    (cut_off,) = [folder for folder in folders if failure["run"] == f"smoke/{folder.name}"]
    assert "Error" in failure["error"]
    assert "going on after iteration" in (cut_off / "log.txt").read_text()
    for folder in folders:
        assert steps_of(folder) == list(range(2_000, 80_001, 2_000))
        assert (folder / "summary.json").exists()


@pytest.mark.nightly
def test_every_method_runs_on_a_ray_cluster_of_two_nodes(cluster, tmp_path):
    address = next(line.split()[1] for line in cluster.stdout if line.startswith("address"))
    script = str(PAPER / "benchmark.py")
    words = [sys.executable, script, "--preset", "smoke", "--seeds", "1", "--engine", "ray"]
    status, said = finish([*words, "--ray-address", address, "--runs-dir", str(tmp_path)])
    assert status == 0, said
    assert not failures(tmp_path)
    assert len(list((tmp_path / "smoke").glob("*__0/summary.json"))) == 14
    assert "14 of 14 runs are done" in said


@pytest.mark.parametrize("name", ["seeds", "workers", "threads"])
def test_a_benchmark_that_would_run_nothing_is_refused(benchmark, name):
    """Without workers it waited for ever."""
    with pytest.raises(SystemExit, match=f"--{name} must be at least 1, got 0"):
        benchmark.main(benchmark.Args(preset=("toy",), **{name: 0}))
