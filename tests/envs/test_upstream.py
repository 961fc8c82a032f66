"""The real Safety-Gymnasium where it cannot be had; where it can, `make parity` tests it."""

import re
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import pytest

from pbcrl_envs import upstream

absent = pytest.mark.skipif(
    find_spec("safety_gymnasium") is not None, reason="the real Safety-Gymnasium is installed"
)


@absent
def test_a_missing_package_is_named_with_what_to_build():
    with pytest.raises(ImportError, match=r"gymnasium is not installed; install it in"):
        upstream.make("SafetyPointGoal1-v0")


def test_what_to_install_is_what_the_comparisons_are_pinned_to():
    pinned = (Path(__file__).parents[2] / ".ci" / "parity-requirements.txt").read_text().split()
    named = re.findall(r"\S+==[\d.]+\d", upstream.INSTALL)
    assert len(named) == 4
    assert set(named) <= set(pinned)


@absent
def test_a_gymnasium_that_does_not_fit_is_named_with_its_version(tmp_path, monkeypatch):
    # An installation's metadata are all that is looked at before the package is imported.
    metadata = tmp_path / "safety_gymnasium-1.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: safety-gymnasium\nVersion: 1.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = f"needs gymnasium 0.28 or 0.29, got gymnasium {gymnasium.__version__}; install "
    with pytest.raises(ImportError, match=found):
        upstream.make("SafetyPointGoal1-v0")
