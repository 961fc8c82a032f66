"""Trajectories as bytes, without their true costs: NumPy's archives, which are no pickles here."""

from __future__ import annotations

import io
import math
import zipfile

import numpy as np

from pbcrl.trajectory import Trajectory

_MAX_BYTES = 1 << 28  # of an archive's arrays: 256 MiB, however small the file


def to_npz(trajectory: Trajectory) -> bytes:
    """Observations and actions, compressed."""
    file = io.BytesIO()
    np.savez_compressed(file, obs=trajectory.obs, actions=trajectory.actions)
    return file.getvalue()


def from_npz(data: bytes) -> Trajectory:
    """The inverse; sizes are checked before anything is allocated for them.

    Args:
        data: An archive; may be anything.

    Raises:
        Exception: Whatever Python and NumPy say of bytes that are no such archive.
    """
    check_claims(data)
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return Trajectory(arrays["obs"], arrays["actions"])


def check_claims(data: bytes) -> None:
    """Refuse an archive whose arrays are larger than 256 MiB, or than what it holds of them.

    Raises:
        Exception: Whatever Python and NumPy say of bytes that are no such archive.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MAX_BYTES:
            raise ValueError(f"its arrays have more than the {_MAX_BYTES} bytes they may have")
        for info in archive.infolist():
            with archive.open(info) as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if math.prod(shape) * dtype.itemsize > info.file_size:
                raise ValueError(f"{info.filename} claims the shape {shape}")
