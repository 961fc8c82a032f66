"""Files on disk: checkpoints, trajectory datasets, label logs; versioned, checksummed, no pickle.

A checkpoint appears whole or not at all, and a label is on disk when `append` returns. Damage is
found when a file is opened, and no size that a file claims is believed before it is checked.

Knows nothing of models, environments or oracles: only tensors, trajectories and labels. Checksums
guard against accidents, not against somebody who forges a file together with its checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, final

import safetensors.torch
import torch
from torch import Tensor

from pbcrl.errors import CorruptFileError, FormatVersionError, MismatchError, StorageError
from pbcrl.trajectory import Label

_VERSION = 1
"""Of all three formats; rises when an older reader would misread a newer file."""


# -- Checkpoints: one safetensors file each --------------------------------------------------------

_CHECKPOINT_FORMAT = "pbcrl-checkpoint"


def save_tensors(
    path: str | os.PathLike[str],
    *,
    kind: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, object],
) -> None:
    """Write named tensors and their description to one safetensors file, whole or not at all.

    An existing file is replaced only once the new one is on disk; equal contents give equal bytes.
    Missing folders are made. NaN and infinities are stored as they are.

    Args:
        path: The file to write.
        kind: What the file holds, such as "cost_model"; `load_tensors` asks for it again.
        tensors: Any shapes and devices, every dtype that safetensors has.
        meta: What JSON can hold, under string keys; tuples come back as lists.

    Raises:
        TypeError: If an entry is no dense tensor of a storable dtype, or `meta` is not JSON.
        ValueError: If a tensor is called "__metadata__", which safetensors reserves.
        StorageError: If the file cannot be written; an older file at `path` is untouched.
    """
    if "__metadata__" in tensors:
        raise ValueError(
            "safetensors reserves the name '__metadata__', but a tensor has it; rename the tensor"
        )
    on_cpu = {name: _plain(name, tensors[name]) for name in sorted(tensors)}
    about = json.dumps(
        {"format": _CHECKPOINT_FORMAT, "version": _VERSION, "kind": kind, "meta": dict(meta)}
    )
    try:
        # One metadata entry: safetensors writes several in random order.
        data = safetensors.torch.save(on_cpu, {"pbcrl": f"{_sha256(about, on_cpu)} {about}"})
    except KeyError as error:
        raise TypeError(
            f"safetensors cannot hold {error.args[0]}, the dtype of a tensor for {path}; "
            "convert it first"
        ) from error
    _write_atomically(Path(path), data)


def load_tensors(
    path: str | os.PathLike[str], *, kind: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote.

    Args:
        path: The file to read.
        kind: What the file must hold.

    Returns:
        The tensors by name, on the CPU, and the `meta` that was saved with them.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If it is damaged, or no checkpoint of this package.
        FormatVersionError: If another version of the format wrote it.
        MismatchError: If it holds another kind.
    """
    data = _read(Path(path))
    try:
        # Checks every length and offset in the header against `data` before it makes a tensor.
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        sha256, _, text = header["__metadata__"]["pbcrl"].partition(" ")
        about = json.loads(text)
        found_format, version = about["format"], about["version"]
    except Exception as error:  # the bytes may be anything, and so may the parsers' complaints
        raise _corrupt(path, f"it is no checkpoint ({error!r})") from error
    _check_format(path, found_format, version, expected=_CHECKPOINT_FORMAT)
    if sha256 != _sha256(text, tensors):
        raise _corrupt(path, "its contents do not match its sha256")
    found_kind, meta = about["kind"], about["meta"]
    if found_kind != kind:
        raise MismatchError(
            f"a checkpoint must be of the kind that is asked for: {path} holds {found_kind!r}, "
            f"not {kind!r}; pass the file that holds {kind!r}, or load this one as {found_kind!r}"
        )
    return tensors, meta


def _plain(name: str, tensor: object) -> Tensor:
    """A dense CPU copy, since safetensors refuses views and tensors that share memory."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise TypeError(
            f"a checkpoint holds dense tensors, but {name!r} is {type(tensor).__name__}; "
            "convert it, or put it into meta if it is a plain number or text"
        )
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _sha256(about: str, tensors: Mapping[str, Tensor]) -> str:
    """Digest of everything that a reader relies on, in an order that the file does not decide."""
    names = sorted(tensors)
    listing = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([about, listing]).encode())
    for name in names:
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- Label logs: one JSON line per label -----------------------------------------------------------

_LABEL_FORMAT = "pbcrl-labels"
_LABEL_HEADER = json.dumps({"format": _LABEL_FORMAT, "version": _VERSION}) + "\n"
_LABEL_FIELDS = ("preference", "first_safe", "second_safe")


@final
class LabelLog:
    """A file to which labels are added as they are bought, so that a crash loses none.

    Each line is one label as JSON, NaN as null, with the crc32 of the rest of the line; the first
    line says what the file is. An existing log is continued.

    Args:
        path: The file; missing folders are made.

    Raises:
        StorageError: If the file cannot be written.
        CorruptFileError, FormatVersionError: As `read_labels`; a damaged log is not continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        _, intact_bytes = _parse_labels(self.path)
        try:
            os.truncate(self.path, intact_bytes)
            if intact_bytes == 0:
                self._write(_LABEL_HEADER)
            _sync_folder(self.path.parent)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def append(self, labels: Sequence[Label]) -> None:
        """Add labels at the end; they are on disk when this returns.

        Raises:
            StorageError: If they cannot be written; then none of them is in the log.
        """
        try:
            self._write("".join(_label_line(label) for label in labels))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _write(self, text: str) -> None:
        with open(self.path, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, text.encode())
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # the next label must not continue half a line
                raise


def read_labels(path: str | os.PathLike[str]) -> list[Label]:
    """Read a label log, in the order in which the labels were added.

    A crash while writing leaves a last line without its end; it is dropped with one warning.

    Raises:
        StorageError: If the file is missing or unreadable.
        CorruptFileError: If a finished line is damaged; the message has its number, from 1.
        FormatVersionError: If another version of the format wrote it.
    """
    labels, _ = _parse_labels(Path(path))
    return labels


def _parse_labels(path: Path) -> tuple[list[Label], int]:
    """The labels of a log and the number of bytes up to the end of its last finished line."""
    *lines, torn = _read(path).split(b"\n")
    if not lines and not _LABEL_HEADER.encode().startswith(torn):
        raise _corrupt(path, "it does not begin as a label log does")
    if torn:
        warnings.warn(
            f"a label log ends with a finished line, but the last {len(torn)} bytes of {path} are "
            "half a line, as a crash leaves them; they are dropped: ask for that label again",
            stacklevel=3,
        )
    labels = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number > 1:
                labels.append(Label(**{name: _label_value(entry[name]) for name in _LABEL_FIELDS}))
                intact = _label_line(labels[-1]).encode() == line + b"\n"
            else:
                found_format, version = entry["format"], entry["version"]
                intact = True
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _corrupt(path, f"line {number} is not what it should be ({error!r})") from error
        if number == 1:
            _check_format(path, found_format, version, expected=_LABEL_FORMAT)
        if not intact:
            raise _corrupt(path, f"line {number} does not match its crc32")
    return labels, sum(len(line) + 1 for line in lines)


def _label_line(label: Label) -> str:
    values = {name: float(getattr(label, name)) for name in _LABEL_FIELDS}
    body = {name: None if math.isnan(value) else value for name, value in values.items()}
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body).encode())}) + "\n"


def _label_value(value: float | None) -> float:
    return math.nan if value is None else float(value)


# -- Shared by the formats -------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"a file must exist and be readable to be loaded: {path}: {error.strerror}; "
            "check the path, or make the file first"
        ) from error


def _write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: a reader or a crash sees the old file or the new."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # after the replacement there is none
            partial.unlink()


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write without a buffer, whose rest would surface at some later write or at the closing."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows cannot open folders and does without."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_format(
    path: str | os.PathLike[str], found: object, version: object, *, expected: str
) -> None:
    if found != expected:
        raise _corrupt(path, f"its format is {found!r}, not {expected!r}")
    if version != _VERSION:
        raise FormatVersionError(
            f"this pbcrl reads version {_VERSION} of {expected}, but {path} has version "
            f"{version!r}; use the pbcrl that wrote it, or make the file again"
        )


def _corrupt(path: str | os.PathLike[str], finding: str) -> CorruptFileError:
    return CorruptFileError(
        f"a file must be read as it was written: {path} is damaged or not a file of this "
        f"package: {finding}; restore it from a copy, or make it again"
    )


def _unwritable(path: str | os.PathLike[str], error: OSError) -> StorageError:
    return StorageError(
        f"{path} must be writable, but: {error.strerror}; free disk space, check the folder's "
        "permissions, or choose another path"
    )
