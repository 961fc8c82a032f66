"""What can happen to a file: a full disk, a folder that takes nothing, flipped bits, no memory."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """No file may grow past `file_bytes`; a write that would is cut off there."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def with_flipped_bits(good: bytes, *, step: int) -> Iterator[bytes]:
    """`good` with one bit flipped, for every `step`-th bit."""
    assert step % 2 == 1, "each bit of a byte must have its turn"
    for bit in range(0, 8 * len(good), step):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A copy of `folder` that nobody may write to, not even root: it becomes somebody else."""
    if not hasattr(os, "geteuid"):
        pytest.skip("needs POSIX permissions")
    user, base = os.geteuid(), Path(tempfile.mkdtemp())  # not below pytest's, which is root's alone
    copy = base / folder.name
    try:
        shutil.copytree(folder, copy)
        for path in (base, copy, *copy.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        if user == 0:
            try:
                os.seteuid(65534)
            except OSError:
                pytest.skip("root may become nobody else here")
        yield copy
    finally:
        if user == 0:
            os.seteuid(user)
        for path in (base, copy, *copy.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(base)


@contextmanager
def little_memory(megabytes: int) -> Iterator[None]:
    """No more than so much beyond what this process has; Linux only."""
    resource = pytest.importorskip("resource")
    used = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1024 * used + megabytes * 2**20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
