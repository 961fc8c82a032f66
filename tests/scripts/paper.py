"""Imports the files of `cleanrl_scripts/paper` under the names that they import each other by."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "cleanrl_scripts"
PAPER = SCRIPTS / "paper"


def load(name: str) -> ModuleType:
    """Import one of these files, or a training script."""
    for folder in (str(SCRIPTS), str(PAPER)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return import_module(name)
