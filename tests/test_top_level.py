"""The top level of `pbcrl` has the names that one needs, each of them explained."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pbcrl

SCRIPTS = Path(__file__).parents[1] / "cleanrl_scripts"


def test_the_docstring_of_the_top_level_lists_its_names():
    assert sorted(pbcrl.__all__) == sorted(set(pbcrl.__all__))
    assert [name for name in pbcrl.__all__ if f"`{name}`" not in pbcrl.__doc__] == []


@pytest.mark.parametrize("name", pbcrl.__all__)
def test_a_name_of_the_top_level_has_a_docstring(name):
    doc = inspect.getdoc(getattr(pbcrl, name))
    assert doc
    assert not doc.startswith(f"{name}(")  # what a dataclass makes up


def test_no_other_name_of_a_module_is_at_the_top_level():
    """Seen from a fresh process: other tests import more modules."""
    code = "import pbcrl, types; pbcrl.metrics; print(*(n for n, v in vars(pbcrl).items() if "
    code += "n[0] != '_' and not isinstance(v, types.ModuleType)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(run.stdout.split()) == sorted(pbcrl.__all__)


def test_asking_for_the_version_or_for_help_does_not_wait_for_pytorch():
    for words in (["--version"], ["--help"], ["label", "--help"]):
        command = [sys.executable, "-X", "importtime", str(SCRIPTS / "cli.py"), *words]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.startswith(("pbcrl 0.", "usage: pbcrl"))
        imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
        assert "pathlib" in imported
        assert imported.isdisjoint({"torch", "numpy", "gymnasium"})


def test_a_name_that_the_top_level_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'pbcrl' has no attribute 'CostModle'"):
        pbcrl.CostModle  # noqa: B018
    assert {"CostModel", "metrics", "losses"} <= set(dir(pbcrl))


def test_measures_are_at_hand_after_a_plain_import():
    code = "import pbcrl; print(pbcrl.metrics.accuracy([-1.0], [2.0], 1.5))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "0.0\n"
