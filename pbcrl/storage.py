"""Checkpoints on disk, and what all files of this package share: versioned, checksummed, no pickle.

A file appears whole or not at all, and one process at a time writes to a folder. Damage is found
when a file is opened, and no size that a file claims is believed before it is checked. Does not
depend on models, only on named tensors. Checksums guard against accidents, not against somebody who
forges a file together with its checksum.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, final
from weakref import WeakSet, finalize

import safetensors.torch
import torch
from filelock import lock_descriptor
from torch import Tensor

from pbcrl.errors import (
    CorruptFileError,
    FormatVersionError,
    MismatchError,
    NonFiniteError,
    PbcrlError,
    StorageError,
)

FORMAT_VERSION = 1
"""Of checkpoints and label logs; rises when an older reader would misread a newer one."""

_CHECKPOINT_FORMAT = "pbcrl-checkpoint"
# A hundred times what the largest run needs: a header takes twenty times its size to read, and a
# tensor a kilobyte, however empty.
_MAX_HEADER_BYTES, _MAX_TENSORS = 1 << 24, 50_000
_LEFTOVER = re.compile(r".+\.\d+\.partial")


def save_tensors(
    path: str | os.PathLike[str],
    *,
    kind: str,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, object],
    finite: bool = False,
) -> None:
    """Write named tensors and their description to one safetensors file, whole or not at all.

    An existing file is replaced only once the new one is on disk; equal contents give equal bytes.
    Missing folders are made.

    Args:
        path: The file to write.
        kind: What the file holds, such as "cost_model"; `load_tensors` asks for it again.
        tensors: Any shapes and devices, every dtype that safetensors has.
        meta: What JSON can hold, under string keys; tuples come back as lists.
        finite: Refuse NaN and infinities, so that weights that have diverged never replace sound
            ones; by default they are stored as they are.

    Raises:
        NonFiniteError: If `finite` and a tensor is not; an older file at `path` is untouched.
        TypeError: If an entry is no dense tensor of a storable dtype, or `meta` is not JSON.
        ValueError: If a tensor is called "__metadata__", which safetensors reserves, there are
            50,000 or more of them, or `meta` and their names take more than 16 MiB.
        StorageError: If the file cannot be written; an older file at `path` is untouched.
    """
    if "__metadata__" in tensors:
        raise ValueError(
            "safetensors reserves the name '__metadata__', but a tensor has it; rename the tensor"
        )
    if len(tensors) >= _MAX_TENSORS:
        raise ValueError(
            f"a checkpoint holds fewer than {_MAX_TENSORS} tensors, got {len(tensors)} for {path}; "
            "stack those of one shape"
        )
    on_cpu = {name: _plain(name, tensors[name]) for name in sorted(tensors)}
    if finite and (bad := _not_finite(on_cpu)):
        raise NonFiniteError(
            f"what {path} holds must be finite, but {bad}; nothing was written: lower the learning "
            "rate, or find the step at which they appeared"
        )
    about = json.dumps(
        {"format": _CHECKPOINT_FORMAT, "version": FORMAT_VERSION, "kind": kind, "meta": dict(meta)}
    )
    try:
        # One metadata entry: safetensors writes several in random order.
        data = safetensors.torch.save(on_cpu, {"pbcrl": f"{_sha256(about, on_cpu)} {about}"})
    except KeyError as error:
        raise TypeError(
            f"safetensors cannot hold {error.args[0]}, the dtype of a tensor for {path}; "
            "convert it first"
        ) from error
    if (header_bytes := int.from_bytes(data[:8], "little")) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"the names and the meta of a checkpoint take at most {_MAX_HEADER_BYTES} bytes, got "
            f"{header_bytes} for {path}; put long lists into tensors"
        )
    write_atomically(Path(path), data)


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
    try:
        with open_regular(Path(path)) as file:
            header, data = _read_checkpoint(file)
        # Checks every length and offset in the header against `data` before it makes a tensor.
        tensors = safetensors.torch.load(data)
        sha256, _, text = header["__metadata__"]["pbcrl"].partition(" ")
        about = json.loads(text)
        found_format, version = about["format"], about["version"]
    except OSError as error:
        raise unreadable(Path(path), error) from error
    except Exception as error:  # the bytes may be anything, and so may the parsers' complaints
        raise corrupt(path, f"it is no checkpoint ({type(error).__name__}: {error})") from error
    check_format(path, found_format, version, expected=_CHECKPOINT_FORMAT)
    if sha256 != _sha256(text, tensors):
        raise corrupt(path, "its contents do not match its sha256")
    try:
        found_kind, meta = str(about["kind"]), dict(about["meta"])
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(path, f"its description lacks kind or meta ({error!r})") from error
    if found_kind != kind:
        raise MismatchError(
            f"a checkpoint must be of the kind that is asked for: {path} holds {found_kind!r}, "
            f"not {kind!r}; pass the file that holds {kind!r}, or load this one as {found_kind!r}"
        )
    return tensors, meta


def check_finite(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are NaN or infinite: they would answer everything with NaN.

    Raises:
        CorruptFileError: If some are.
    """
    if bad := _not_finite(tensors):
        raise corrupt(path, bad)


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """What is NaN or infinite in the first tensor that is not finite, in words."""
    for name, tensor in tensors.items():
        if num_bad := int((~tensor.isfinite()).sum()):
            return f"{num_bad} of the {tensor.numel()} entries of {name!r} are NaN or infinite"
    return None


def _read_checkpoint(file: BufferedReader) -> tuple[dict[str, Any], bytes]:
    """The header and all bytes of a safetensors file.

    The header must account for every byte before the rest is read: a sparse file may claim a
    terabyte and hold none.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < header_bytes <= min(file_bytes - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {header_bytes} bytes in a file of {file_bytes}")
    header = json.loads(file.read(header_bytes))
    if len(header) > _MAX_TENSORS:
        raise ValueError(f"{len(header)} tensors, of {_MAX_TENSORS} that it may have")
    ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
    if 8 + header_bytes + max(ends, default=0) != file_bytes:
        raise ValueError(f"tensors that end at {max(ends, default=0)} in a file of {file_bytes}")
    file.seek(0)
    return header, file.read()


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


# -- Shared by all files of this package -----------------------------------------------------------


@contextmanager
def described_by(path: str | os.PathLike[str]) -> Iterator[None]:
    """Where a sound file's description is made into an object: what fails there is the file's.

    A description may be anything, and so may the complaint about it.

    Raises:
        CorruptFileError: For any exception that has no name of ours yet.
    """
    try:
        yield
    except PbcrlError:
        raise
    except Exception as error:
        finding = f"its description makes no sense ({type(error).__name__}: {error})"
        raise corrupt(path, finding) from error


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a file for reading; what is none, such as a pipe that would block, is an `OSError`.

    Args:
        path: The file.
        follow_links: Whether a link to a file counts as one. In a folder that somebody else may
            have made it should not, where what is read is shown: it may lead anywhere.
    """
    if not stat.S_ISREG(path.stat(follow_symlinks=follow_links).st_mode):
        link = "" if follow_links else "a link, "
        raise OSError(f"it is {link}a folder, a pipe or a device, not a regular file")
    return open(path, "rb")


def read_bytes(path: Path, *, max_bytes: int = 1 << 30) -> bytes:
    """All of a file, or a `StorageError` that names it; more than `max_bytes` is not even read."""
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes <= max_bytes:
                return file.read()
    except OSError as error:
        raise unreadable(path, error) from error
    raise corrupt(path, f"it has {file_bytes} bytes, more than the {max_bytes} it may have")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: a kill or a power cut leaves the old file or the new.

    Missing folders are made. A process that is killed while it writes leaves `NAME.PID.partial`
    behind, which `remove_leftovers` removes.

    Raises:
        StorageError: If it cannot be written; an older file at `path` is untouched.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        make_folder(path.parent)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):  # after the replacement there is none
            partial.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of their writes; only who has the folder's lock may ask.

    Raises:
        StorageError: If one cannot be removed.
    """
    try:
        for entry in folder.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                entry.unlink()
    except OSError as error:
        raise unwritable(folder, error) from error


@final
class FolderLock:
    """Admits one writer to a folder: a second one is refused, in this process or in another.

    The lock is the system's, on the file `.lock` in the folder. It is released with the process, so
    that a killed one blocks nobody, and it is not inherited by child processes. File systems that
    have no locks go without.

    Args:
        folder: The folder; it is made if it is missing.

    Raises:
        StorageError: If another writer is at work there, or the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            make_folder(self.folder)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        self.release = finalize(self, os.close, descriptor)
        """Admit another writer; a second call does nothing."""
        try:
            self._lock(descriptor)
        except BaseException:
            self.release()
            raise
        _locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock: until `release`."""
        return self.release.alive

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, descriptor: int) -> None:
        try:
            is_free = lock_descriptor(descriptor, blocking=False)
        except OSError:  # some network file systems
            return
        if not is_free:
            raise StorageError(
                f"a folder has one writer at a time, but another one is at work in {self.folder}; "
                "wait until it has finished, end it, or choose another folder"
            )


_locks: WeakSet[FolderLock] = WeakSet()


def _release_in_child() -> None:
    """A forked env worker that outlives its parent would hold the lock: it closes its copy."""
    for lock in list(_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, so that a power cut does not take them back."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write without a buffer, whose rest would surface at some later write or at the closing."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows cannot open folders and does without."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_format(
    path: str | os.PathLike[str],
    found: object,
    version: object,
    *,
    expected: str,
    versions: Sequence[int] = (FORMAT_VERSION,),
) -> None:
    """Refuse a file of another format, or of a version of the expected one that is not read."""
    if found != expected:
        raise corrupt(path, f"its format is {found!r}, not {expected!r}")
    if version not in versions:
        raise FormatVersionError(
            f"this pbcrl reads version {' or '.join(map(str, versions))} of {expected}, but {path} "
            f"has version {version!r}; use the pbcrl that wrote it, or make the file again"
        )


def corrupt(path: str | os.PathLike[str], finding: str) -> CorruptFileError:
    """The error for a file that can be read and makes no sense; `finding` says what was found."""
    return CorruptFileError(
        f"a file must be read as it was written: {path} is damaged or not a file of this "
        f"package: {finding}; restore it from a copy, or make it again"
    )


def unreadable(path: Path, error: OSError) -> StorageError:
    """The error for a file that the system does not hand out."""
    return StorageError(
        f"a file must exist and be readable to be loaded: {path}: {error.strerror or error}; "
        "check the path, or make the file first"
    )


def unwritable(path: str | os.PathLike[str], error: OSError) -> StorageError:
    """The error for a file or a folder that the system does not take."""
    remedy = "free disk space, check the folder's permissions, or choose another path"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close files, or raise the limit (ulimit -n)"
    return StorageError(f"{path} must be writable, but: {error.strerror or error}; {remedy}")
