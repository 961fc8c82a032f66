"""`evaluate.py --upstream` from the native task to the real package and back."""

import os
import re

import pytest

from tests.scripts.conftest import load
from tests.scripts.test_play_upstream import small_run


@pytest.fixture
def evaluate(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    module = load("evaluate")
    return lambda run, **given: module.evaluate(
        module.Args(
            str(run),
            upstream=True,
            upstream_python=os.environ["PBCRL_PARITY_PYTHON"],
            threads=1,
            **given,
        )
    )


def test_a_policy_is_played_on_both_sides_and_compared(evaluate, tmp_path, capsys):
    run = small_run(tmp_path / "run", env_id="SafetyWalker2dVelocity-v1")
    evaluate(run, episodes=20)
    rows = re.findall(r"^   (\w+) +(\S+) \+- (\S+)$", capsys.readouterr().out, re.MULTILINE)
    shown = {name: (float(mean), float(interval)) for name, mean, interval in rows}
    ours, theirs = shown["return"][0], shown["upstream_return"][0]
    assert ours == pytest.approx(theirs, rel=0.01)
    difference, interval = shown["return_difference"]
    assert difference == pytest.approx(ours - theirs, abs=0.1)
    assert 0 < interval < 0.5 * ours
    assert shown["true_cost_difference"][0] == pytest.approx(
        shown["true_cost"][0] - shown["upstream_true_cost"][0], abs=0.1
    )


def test_a_task_that_the_real_package_lacks_is_refused_in_its_words(evaluate, tmp_path):
    run = small_run(tmp_path / "run", env_id="PointHazards-v0")
    with pytest.raises(RuntimeError, match="id must be one of Safety-Gymnasium's, got 'PointHaz"):
        evaluate(run, episodes=2)
