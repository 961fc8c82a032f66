"""Arrays as bytes: NumPy's archives, which are no pickles here, of a size that is bounded.

Trajectories are kept without their true costs.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping

import numpy as np

from pbcrl.trajectory import Trajectory

_MAX_BYTES = 1 << 28  # of an archive's arrays: 256 MiB, however small the file
_HEADERS = 1 << 16  # bytes, of all of them


def to_npz(trajectory: Trajectory) -> bytes:
    """Observations and actions, compressed; raises as `pack`."""
    return pack({"obs": trajectory.obs, "actions": trajectory.actions})


def from_npz(data: bytes) -> Trajectory:
    """The inverse; raises as `unpack`."""
    arrays = unpack(data)
    return Trajectory(arrays["obs"], arrays["actions"])


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays by name, compressed.

    Raises:
        ValueError: If they are too large to be read again.
    """
    num_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes > _MAX_BYTES:
        raise ValueError(
            f"what people see of a trajectory has at most {_MAX_BYTES} bytes of arrays, got "
            f"{num_bytes}; ask about segments of it"
        )
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """The inverse of `pack`; sizes are checked before anything is allocated for them.

    Args:
        data: An archive; may be anything.

    Raises:
        Exception: Whatever Python and NumPy say of bytes that are no such archive.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MAX_BYTES + _HEADERS:
            raise ValueError(f"its arrays have more than the {_MAX_BYTES} bytes they may have")
        for info in archive.infolist():
            with archive.open(info) as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if math.prod(shape) * dtype.itemsize > info.file_size:
                raise ValueError(f"{info.filename} claims the shape {shape}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays}
