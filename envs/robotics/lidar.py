"""The pseudo-lidar: closeness of point objects in bins around the agent, for all envs at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

MAX_DISTANCE = 3.0
"""Metres at which an object stops being seen."""


def lidar(
    offsets: FloatArray, heading: FloatArray, groups: NDArray[np.intp], *, num_bins: int
) -> FloatArray:
    """Closeness in [0, 1] of the nearest object in each bin, one lidar per group of objects.

    An object at distance d and angle φ, measured counter-clockwise from the agent's nose, puts
    s = max(0, 3 - d) / 3 into the bin that holds φ. To tell where in its bin an object is, the next
    bin gets a·s and the previous one (1 - a)·s, with a in [0, 1] the position inside the bin. A bin
    keeps the largest of its values; an empty one is 0.

    Args:
        offsets: World-frame vectors from the agent to the K objects in metres, (N, K, 2).
        heading: Agents' headings in radians, (N,).
        groups: Group of each object, 0 <= group < G, (K,).
        num_bins: Bins of one group's lidar.

    Returns:
        The lidars of each env side by side, (N, G * num_bins).
    """
    num_envs, num_groups = len(offsets), int(groups.max()) + 1
    cos, sin = np.cos(heading)[:, None], np.sin(heading)[:, None]
    # Contiguous copies: NumPy may round strided and contiguous arrays differently in arctan2.
    dx, dy = np.ascontiguousarray(offsets[..., 0]), np.ascontiguousarray(offsets[..., 1])
    forward, left = dx * cos + dy * sin, dy * cos - dx * sin  # (N, K)
    closeness = np.maximum(0.0, MAX_DISTANCE - np.hypot(forward, left)) / MAX_DISTANCE
    bin_size = 2 * np.pi / num_bins
    position = np.arctan2(left, forward) % (2 * np.pi) / bin_size
    # The remainder can round up to a full turn, which would be one bin too many.
    bins = np.minimum(position.astype(np.intp), num_bins - 1)
    inside = position - bins
    values = np.zeros(num_envs * num_groups * num_bins)
    first_bin = num_bins * (num_groups * np.arange(num_envs)[:, None] + groups)  # (N, K)
    np.maximum.at(values, first_bin + bins, closeness)
    np.maximum.at(values, first_bin + (bins + 1) % num_bins, inside * closeness)
    np.maximum.at(values, first_bin + (bins - 1) % num_bins, (1 - inside) * closeness)
    return values.reshape(num_envs, num_groups * num_bins)
