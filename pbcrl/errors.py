"""The states that a caller may want to catch; wrong arguments are plain `ValueError`s.

Every message has three parts: the rule, what was found, what to do next.
"""


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
