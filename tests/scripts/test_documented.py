"""What small runs write is what docs/metrics.md and docs/llm.md list, and nothing else."""

import json
from pathlib import Path

import pytest

from ..test_docs import names, read, rows, section
from .conftest import load
from .runs import rows as lines_of
from .runs import small_pbcrl, small_ppo_lag, small_rlsf

DOCS = Path(__file__).parents[2] / "docs"


def documented(heading, script):
    """The keys that a table of docs/metrics.md lists for a script."""
    table = rows(section(read(DOCS / "metrics.md"), heading))
    groups = {"all", script} | ({"learners"} if script != "ppo_lag" else set())
    listed = [names(key)[0] for key, who, *_ in table if who in groups]
    assert len(listed) == len(set(listed))
    return set(listed)


def summary_of(folder):
    return set(json.loads((folder / "summary.json").read_text()))


@pytest.fixture(params=["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_rlsf"])
def script_and_folder(request, scripts, tmp_path, toy_dataset):
    """A script, and a run of it."""
    args = {
        "ppo_lag": lambda: small_ppo_lag(scripts, tmp_path),
        "ppo_lag_pbcrl": lambda: small_pbcrl(scripts, tmp_path, toy_dataset),
        "ppo_lag_rlsf": lambda: small_rlsf(scripts, tmp_path),
    }[request.param]()
    return request.param, getattr(scripts, request.param).train(args)


@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
def test_the_numbers_of_a_run_are_documented(script_and_folder):
    script, folder = script_and_folder
    assert set().union(*lines_of(folder)) == documented("metrics.jsonl", script)
    assert summary_of(folder) == documented("summary.json", script)


def test_the_numbers_of_a_run_on_tokens_are_documented(tmp_path):
    pytest.importorskip("transformers", reason="pbcrl.llm.cost_head needs transformers")
    script = load("ppo_lag_llm")
    sizes = {"num_iterations": 4, "batch_size": 16, "minibatch_size": 8, "max_new_tokens": 6}
    labels = {"offline_queries": 30, "cost_epochs": 1, "constraint": "accept"}
    folder = script.train(
        script.Args(**sizes, **labels, task="announced", eval_episodes=16, runs_dir=str(tmp_path))
    )
    lines, summary = section(read(DOCS / "llm.md"), "What it writes").split("`summary.json`")
    keys = {name for row in rows(lines) for name in names(row[0])}
    # Not all of them: some stand in labelling rounds alone, others depend on the method.
    assert set().union(*lines_of(folder)) <= keys
    # The usual verdict, times and warnings are those of every run.
    usual = documented("summary.json", "ppo_lag")
    assert summary_of(folder) - usual <= {name for row in rows(summary) for name in names(row[0])}
