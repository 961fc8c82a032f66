"""`diff` shows the method: what the scripts do not share is where a reader looks for it."""

import re
from difflib import unified_diff

import pytest

from .conftest import SCRIPTS

SHARED = "Net: edit me", "Agent", "Losses: edit me", "PPO", "1. Roll out", "5. Policy"
"""Sections that are the same in all scripts, word for word."""
OWN = "Args", "Method", "2. ", "3. ", "6. "
"""Beginnings of the names of sections in which a method shows."""


def source_of(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def sections_of(source: str) -> dict[str, list[str]]:
    """The lines of each section but blank ones; a section that comes twice goes on."""
    section, found = "Head", dict[str, list[str]]()
    for line in source.splitlines():
        if banner := re.fullmatch(r" *# -- (.+?) -+", line):
            section = banner[1]
        elif line.strip():
            found.setdefault(section, []).append(line)
    return found


def differing(first: list[str], second: list[str]) -> list[str]:
    """Lines that only one of two has."""
    return [
        line[1:].strip()
        for line in unified_diff(first, second, n=0, lineterm="")
        if line[0] in "+-" and not line.startswith(("---", "+++"))
    ]


@pytest.mark.parametrize("other", ["ppo_lag_pbcrl", "ppo_lag_rlsf"])
def test_scripts_share_all_that_is_not_their_method(other):
    first, second = sections_of(source_of("ppo_lag")), sections_of(source_of(other))
    for name in SHARED:
        assert differing(first[name], second[name]) == [], name
    # Where costs end is the method's, and the scale of advantages; nothing else is its own here.
    advantages = differing(first["4. Advantages"], second["4. Advantages"])
    own = "#", "ends = ", "spread_r, spread_c = adv_scale", "adv_c = adv_c * (spread_r / spread_c)"
    own += "adv_c = adv_c * (buffer.is_trainable", "if is_young:"
    own += ('if args.constraint != "accept" and not trainer.fits_marks:',)
    assert all(line.startswith(own) for line in advantages)
    setup = differing(first["Setup"], second["Setup"])
    assert not any(re.search(r"agent|optimizer|rollout|rng|noise", line) for line in setup)
    unshared = [name for name in second if name not in first]
    assert all(name.startswith(OWN) for name in unshared)


def test_scripts_share_the_defaults_of_all_arguments_that_they_share(scripts):
    defaults = [
        {name: field.default for name, field in script.Args.__dataclass_fields__.items()}
        for script in (scripts.ppo_lag, scripts.ppo_lag_pbcrl, scripts.ppo_lag_rlsf)
    ]
    for others in defaults[1:]:
        both = defaults[0].keys() & others.keys()
        assert len(both) > 25
        # λ moves by a learned cost; recipes are a script's own.
        differing = {name for name in both if defaults[0][name] != others[name]}
        assert differing <= {"multiplier_cap", "multiplier_lr", "recipes"}


def test_the_diff_with_the_flagship_can_be_read_in_one_sitting():
    first, second = (source_of(name).splitlines() for name in ("ppo_lag", "ppo_lag_pbcrl"))
    assert len(differing(first, second)) < 300


def test_a_difference_elsewhere_is_found():
    source = source_of("ppo_lag")
    assert source.count("clamp(-10, 10)") == 1
    changed = source.replace("clamp(-10, 10)", "clamp(-5, 5)")
    both = sections_of(source)["Agent"], sections_of(changed)["Agent"]
    assert [line.count("clamp") for line in differing(*both)] == [1, 1]
