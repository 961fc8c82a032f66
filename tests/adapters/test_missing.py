"""What an adapter says where its library is not installed."""

import importlib
import re
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "library", "remedy"),
    [
        ("sb3", "stable_baselines3", "pip install 'pbcrl[sb3]'"),
        ("torchrl", "torchrl", "pip install 'pbcrl[torchrl]'"),
        ("omnisafe", "omnisafe", "an environment of their own"),
    ],
)
def test_an_adapter_without_its_library_says_what_to_install(monkeypatch, adapter, library, remedy):
    for name in [*sys.modules]:
        if name.startswith(f"{library}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"pbcrl.adapters.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"adapters\.{adapter} needs .*{re.escape(remedy)}"):
        importlib.import_module(f"pbcrl.adapters.{adapter}")
