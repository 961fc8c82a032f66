"""What can happen to a file: a disk that is full, bits that flip."""

from collections.abc import Iterator
from contextlib import contextmanager

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
