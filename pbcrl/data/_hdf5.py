"""What an HDF5 file claims, checked before anything is allocated for it."""

from __future__ import annotations

import math
import os
from typing import Any

import h5py

from pbcrl.storage import corrupt

_LEAST, _TIMES = 1 << 26, 100
"""64 MiB, or a hundred times the file: what its arrays may take, since zeros compress well."""


def check_claims(path: str | os.PathLike[str], file: h5py.File) -> None:
    """Refuse a file whose arrays are larger than it can hold, or lie in another file.

    Args:
        path: Of the file, for the message.
        file: Open for reading.

    Raises:
        CorruptFileError: If one is.
    """
    most, claimed = max(_LEAST, _TIMES * os.stat(path).st_size), 0

    def look_at(name: str, item: Any) -> None:
        nonlocal claimed
        if not isinstance(item, h5py.Dataset):
            return
        if item.is_virtual or item.external:
            raise corrupt(path, f"its array {name} lies in another file")
        # A chunk is read whole, and nothing but the file says how large it is.
        chunk = math.prod(item.chunks or (0,)) * item.dtype.itemsize
        claimed += item.nbytes
        if max(claimed, chunk) > most:
            raise corrupt(
                path, f"with {name} its arrays claim {max(claimed, chunk)} bytes, of {most} at most"
            )

    file.visititems(look_at)  # what is linked from another file is not visited
