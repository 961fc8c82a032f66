"""The states that a caller may want to catch; wrong arguments are plain `ValueError`s.

`require_in` and `require_whole` check the commonest of them, numbers.

Every message has three parts: the rule, what was found, what to do next.
"""

import operator


class PbcrlError(Exception):
    """Base of all errors of this package, to catch any of them at once."""


class MissingCostError(PbcrlError):
    """A true cost was needed where none was reported: no `info["cost"]`, or no recorded costs."""


class NonFiniteError(PbcrlError):
    """An environment, an action or a trajectory holds NaN or an infinity."""


class BudgetError(PbcrlError):
    """An oracle was asked for more queries than its budget has left; nothing was labelled."""


class UnsupportedError(PbcrlError):
    """A kind of question that an oracle, or of network that a policy file, cannot take yet."""


class LabelError(PbcrlError):
    """Labels that cannot train a cost model: none, one-sided, or not fitting their queries."""


class StorageError(PbcrlError):
    """Base of the errors of files on disk."""


class CorruptFileError(StorageError):
    """A file is truncated, damaged, or not one of ours."""


class FormatVersionError(StorageError):
    """A file was written by another version of the format."""


class MismatchError(StorageError):
    """A file is sound but belongs to something else: another environment, spaces or kind."""


def require_whole(low: int, *, remedy: str = "", **numbers: int) -> None:
    """Refuse what is no integer, or lies below a bound.

    Args:
        low: The bound.
        remedy: What to do next, if the bound does not tell.
        **numbers: By the name of the argument.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is below `low`.
    """
    for name, number in numbers.items():
        try:
            operator.index(number)
        except TypeError as error:
            raise TypeError(f"{name} is a whole number, got {number!r}; round it") from error
        if number < low:
            hint = f"; {remedy}" if remedy else ""
            raise ValueError(f"{name} must lie in [{low}, inf), got {number}{hint}")


def require_in(interval: str, *, remedy: str = "", **numbers: float) -> None:
    """Refuse numbers that lie outside of an interval; NaN lies in none.

    Args:
        interval: Such as "(0, 1]" or "[0, inf)"; a round bracket leaves its end out.
        remedy: What to do next, if the interval does not tell.
        **numbers: By the name of the argument.

    Raises:
        ValueError: If one lies outside.
    """
    low, high = map(float, interval[1:-1].split(","))
    for name, number in numbers.items():
        above = number >= low if interval[0] == "[" else number > low
        below = number <= high if interval[-1] == "]" else number < high
        if not (above and below):
            hint = f"; {remedy}" if remedy else ""
            raise ValueError(f"{name} must lie in {interval}, got {number}{hint}")
