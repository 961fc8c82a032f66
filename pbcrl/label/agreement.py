"""How far people agree: Krippendorff's alpha for any number of them, Cohen's kappa for two.

Both are 1 for perfect agreement and 0 for what chance would give; below 0 is systematic
disagreement. A missing rating ("can't tell", or not asked) is NaN.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike


def krippendorff_alpha(
    ratings: ArrayLike, *, distance: Literal["nominal", "interval"] = "nominal"
) -> float:
    """Return Krippendorff's alpha, 1 - observed / expected disagreement.

    Args:
        ratings: One row per annotator, one column per item, (A, I); NaN is no rating. Items with
            fewer than two ratings say nothing about agreement and are left out.
        distance: Between two ratings: "nominal" is 0 or 1, "interval" the squared difference.

    Returns:
        Alpha; NaN if no item has two ratings, or all ratings are equal.

    Raises:
        ValueError: If `ratings` is not a table.
    """
    table = np.asarray(ratings, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"ratings have shape (annotators, items), got {table.shape}")
    table = table[:, (~np.isnan(table)).sum(axis=0) >= 2]
    values, counts = _counts(table)
    if len(values) < 2:
        return math.nan
    apart = np.subtract.outer(values, values) ** 2
    if distance == "nominal":
        apart = (apart > 0).astype(np.float64)
    per_item = counts.sum(axis=1)  # (I,)
    # Pairs of ratings within an item; those of an item of m ratings weigh 1 / (m - 1).
    observed = float((np.einsum("iv,iw,vw->i", counts, counts, apart) / (per_item - 1)).sum())
    totals = counts.sum(axis=0)  # (V,)
    expected = float(totals @ apart @ totals) / (totals.sum() - 1)
    return float(1 - observed / expected)


def cohen_kappa(first: ArrayLike, second: ArrayLike) -> float:
    """Return Cohen's kappa of two annotators, (observed - expected) / (1 - expected) agreement.

    Args:
        first: Ratings of one, (I,); NaN is no rating. Items that both have rated count.
        second: Those of the other, (I,).

    Returns:
        Kappa; NaN if there is no such item, or both give the same rating throughout.

    Raises:
        ValueError: If the shapes differ.
    """
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != other.shape or one.ndim != 1:
        raise ValueError(f"both rate the same items, (I,), got {one.shape} and {other.shape}")
    both = ~(np.isnan(one) | np.isnan(other))
    one, other = one[both], other[both]
    if len(one) == 0:
        return math.nan
    values = np.unique(np.concatenate([one, other]))
    by_chance = float(sum((one == v).mean() * (other == v).mean() for v in values))
    return (
        math.nan if by_chance == 1 else float(((one == other).mean() - by_chance) / (1 - by_chance))
    )


def _counts(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ratings, (V,), and how often each item got each of them, (I, V)."""
    values = np.unique(table[~np.isnan(table)])
    return values, (table.T[:, :, None] == values).sum(axis=1).astype(np.float64)
