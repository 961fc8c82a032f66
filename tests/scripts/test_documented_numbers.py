"""What a run writes is what docs/metrics.md and docs/llm.md say of it, key by key."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from .conftest import load
from .runs import rows, small_pbcrl, small_ppo_lag, small_rlsf

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """The tables under a heading of second level, as rows of cells without headings and rules."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    found = re.findall(r"(?:^\|.*\|\n)+", text.partition("\n## ")[0], re.MULTILINE)
    lines = [table.splitlines()[2:] for table in found]
    return [[re.split(r" *(?<!\\)\| *", line)[1:-1] for line in table] for table in lines]


def keys(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented(heading: str, script: str) -> set[str]:
    """Of the numbers of metrics.md, those that a script writes."""
    (table,) = tables("metrics.md", heading)
    groups = {"all", script, script.partition(" ")[0]}
    groups |= {"learners"} if script != "ppo_lag" else set()
    listed = [keys(key)[0] for key, who, *_ in table if who in groups]
    assert len(listed) == len(set(listed))
    return set(listed)


def written(folder: Path) -> tuple[set[str], set[str]]:
    """The keys of metrics.jsonl and of summary.json."""
    lines = {key for row in rows(folder) for key in row}
    return lines, stems(json.loads((folder / "summary.json").read_text()))


def stems(found: Iterable[str]) -> set[str]:
    """The keys without the suffixes that metrics.md explains once for all."""
    return {key.removesuffix("_interval").removesuffix("_stochastic") for key in found}


@pytest.mark.parametrize(
    "script", ["ppo_lag", "ppo_lag_pbcrl", "ppo_lag_pbcrl by marks", "ppo_lag_rlsf"]
)
def test_what_a_run_writes_is_documented_and_nothing_else_is(
    scripts, tmp_path, toy_dataset, script, capsys
):
    if script.endswith("by marks"):
        pytest.importorskip("lightgbm", reason="only trees are fitted to marks")
    asked = {"dataset": toy_dataset, "online_queries": 30}
    args = {
        "ppo_lag": lambda: small_ppo_lag(scripts, tmp_path),
        "ppo_lag_pbcrl": lambda: small_pbcrl(scripts, tmp_path, **asked),
        "ppo_lag_pbcrl by marks": lambda: small_pbcrl(
            scripts, tmp_path, **asked, cost_model="trees", marks=True
        ),
        "ppo_lag_rlsf": lambda: small_rlsf(scripts, tmp_path, hash_bits=16),
    }[script]()
    folder = getattr(scripts, script.partition(" ")[0]).train(args)
    lines, summary = written(folder)
    assert lines == documented("metrics.jsonl", script)
    assert summary == documented("summary.json", script)

    capsys.readouterr()
    scripts.evaluate.evaluate(scripts.evaluate.Args(str(folder), episodes=4, threads=1))
    printed = re.findall(r"^   (\w+) +\S", capsys.readouterr().out, re.MULTILINE)
    assert len(printed) > 5
    assert stems(printed) <= documented("evaluate.py", script) | documented("summary.json", script)


def test_what_a_run_on_tokens_writes_is_documented_and_nothing_else_is(tmp_path):
    pytest.importorskip("transformers", reason="ppo_lag_llm.py needs transformers")
    script = load("ppo_lag_llm")
    small = {"num_iterations": 2, "batch_size": 16, "minibatch_size": 8, "max_new_tokens": 6}
    small |= {"offline_queries": 30, "cost_epochs": 1, "eval_episodes": 16, "finetune_interval": 2}
    args = script.Args(
        **small, online_queries=8, task="announced", runs_dir=str(tmp_path), run_name="run"
    )
    lines, summary = written(script.train(args))
    of_lines, of_summary = (
        {key for row in table for key in keys(row[0])}
        for table in tables("llm.md", "What it writes")
    )
    assert lines == of_lines
    usual = documented("summary.json", "ppo_lag")  # the verdict, times and warnings
    assert stems(of_summary) <= summary <= stems(of_summary) | usual
