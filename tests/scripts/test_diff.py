"""`diff` shows the method: what the scripts do not share is where a reader looks for it."""

import ast
import re
from difflib import SequenceMatcher

import pytest

from .conftest import SCRIPTS

MARKS = "# PbCRL", "# RLSF", "# true cost"
SECTIONS = "Docstring", "Method", "2. ", "3. ", "6. ", "Net: edit me", "Losses: edit me"
"""Beginnings of the names of sections that may differ: by the method, or as somebody wants it."""


def lines_of(source: str) -> list[tuple[str, str]]:
    """All lines but blank ones, each with the section that it lies in."""
    last = ast.parse(source).body[0].end_lineno
    section, found = "Docstring", []
    for number, line in enumerate(source.splitlines(), 1):
        if number == last + 1:
            section = "Imports"
        if banner := re.fullmatch(r" *# -- (.+?) -+", line):
            section = banner[1]
        if line.strip():
            found.append((section, line))
    return found


def unmarked_differences(first: str, second: str) -> list[str]:
    """Lines that only one of two sources has, where they should not differ."""
    both = lines_of(first), lines_of(second)
    matcher = SequenceMatcher(None, *([line for _, line in lines] for lines in both), False)
    return [
        f"{section}: {line}"
        for _, *spans in (code for code in matcher.get_opcodes() if code[0] != "equal")
        for lines, (start, end) in zip(both, (spans[:2], spans[2:]), strict=True)
        for section, line in lines[start:end]
        if not section.startswith(SECTIONS) and not any(mark in line for mark in MARKS)
    ]


@pytest.mark.parametrize("other", ["ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_scripts_differ_in_their_method_and_in_marked_lines_only(other):
    first, second = ((SCRIPTS / f"{name}.py").read_text() for name in ("ppo_lag", other))
    assert unmarked_differences(first, second) == []
    sections = [section for section, _ in lines_of(first)]
    assert [s for s in dict.fromkeys(sections) if s[0].isdigit()] == [
        "1. Roll out",
        "4. Advantages",
        "5. Policy",
        "6. Dual ascent",
        "7. Log",
    ]


def test_a_difference_elsewhere_is_found():
    source = (SCRIPTS / "ppo_lag.py").read_text()
    changes = [("clamp(-10, 10)", "clamp(-5, 5)"), ("loss.backward()", "pass  # RLSF")]
    changed = source
    for old, new in changes:
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    # The marked line is none, the line that it replaces is not marked.
    assert [line.split(":")[0] for line in unmarked_differences(source, changed)] == [
        *("Agent", "Agent", "PPO")
    ]
