"""Where labelled pairs are kept: each trajectory once, pairs as indices into them.

It does not depend on models. Trajectories are kept by reference, so those of a memory-mapped
dataset stay on disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pbcrl.errors import LabelError
from pbcrl.trajectory import (
    Label,
    Marks,
    PairBatch,
    Query,
    Stretches,
    Trajectory,
    check_stretches,
    unsafe_steps,
)

Pairs = NDArray[np.int64]


def draw_pairs(num_trajectories: int, num_pairs: int, *, rng: np.random.Generator) -> Pairs:
    """Draw distinct pairs of trajectories, each in random order.

    What limits a cost model is the number of different trajectories, not of pairs, so every one is
    used before any is used again, unless more than half of all pairs are drawn: pairs are cut from
    one random permutation after another.
    Random order matters too: with the safer one always first, the label entropy of Eq. 9 is 0.

    Args:
        num_trajectories: How many there are to choose from, at least 2.
        num_pairs: How many pairs to draw, at most n (n - 1) / 2.
        rng: Source of randomness.

    Returns:
        Indices, int64 (num_pairs, 2); no pair occurs twice, in either order.

    Raises:
        TypeError: If `rng` is no generator.
        ValueError: If there are not as many different pairs.
    """
    check_generator(rng)
    possible = num_trajectories * (num_trajectories - 1) // 2
    if not 0 <= num_pairs <= possible:
        raise ValueError(
            f"the pairs must be distinct: {num_trajectories} trajectories make {possible} pairs, "
            f"{num_pairs} were asked; draw fewer or collect more trajectories"
        )
    if 2 * num_pairs > possible:  # dense: rejection sampling would be slow
        first, second = np.triu_indices(num_trajectories, k=1)
        chosen = rng.permutation(possible)[:num_pairs]
        pairs = np.stack([first[chosen], second[chosen]], axis=1)
        return rng.permuted(pairs, axis=1).astype(np.int64)
    drawn: dict[tuple[int, int], tuple[int, int]] = {}  # insertion-ordered, keyed by sorted pair
    while len(drawn) < num_pairs:
        order = rng.permutation(num_trajectories)
        for first, second in zip(order[0::2].tolist(), order[1::2].tolist(), strict=False):
            drawn.setdefault((min(first, second), max(first, second)), (first, second))
    return np.array(list(drawn.values())[:num_pairs], dtype=np.int64).reshape(-1, 2)


def check_generator(rng: object) -> None:
    """Refuse a source of randomness that is none, such as a seed.

    Raises:
        TypeError: If so.
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng is a NumPy generator, got {rng!r}; pass np.random.default_rng(seed), the same "
            "one to all calls"
        )


def check_trajectories(trajectories: object) -> None:
    """Refuse anything but a sequence of trajectories.

    Raises:
        TypeError: If so.
    """
    wrong = [trajectories]
    if isinstance(trajectories, Sequence):
        wrong = [found for found in trajectories if not isinstance(found, Trajectory)]
    if wrong:
        raise TypeError(
            f"trajectories come as a sequence of Trajectory, got {type(wrong[0]).__name__}; pass a "
            "list, as `finished_trajectories` returns it"
        )


class PreferenceBuffer:
    """Labelled pairs of trajectories, in the order in which the labels were bought.

    Its length is the number of labelled pairs.

    Args:
        trajectories: The first ones, as of `add_trajectories`.

    Raises:
        TypeError, ValueError: As `add_trajectories`.
    """

    def __init__(self, trajectories: Sequence[Trajectory] = ()) -> None:
        self.trajectories: list[Trajectory] = []
        """Every trajectory once; pairs index this list."""
        self._pairs = np.empty((0, 2), dtype=np.int64)
        self._labels = np.empty((0, 3), dtype=np.float32)  # preference, first safe, second safe
        self._unsafe: list[tuple[Stretches | None, Stretches | None]] = []  # of each pair
        self._has_warned = False
        self.add_trajectories(trajectories)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def labelled_pairs(self) -> Pairs:
        """The labelled pairs in order, as indices into `trajectories`, int64 (len(self), 2)."""
        return self._pairs.copy()

    @property
    def labels(self) -> NDArray[np.float32]:
        """μ and the two ε of each labelled pair, NaN where not given, (len(self), 3)."""
        return self._labels.copy()

    @property
    def stretches(self) -> list[tuple[Stretches | None, Stretches | None]]:
        """What was marked as unsafe in both members of each labelled pair; None if nothing was."""
        return list(self._unsafe)

    @property
    def marks(self) -> list[Marks]:
        """The trajectories of which somebody marked the unsafe steps, once for each time."""
        members = zip(self._pairs.tolist(), self._unsafe, strict=True)
        return [
            Marks(one, unsafe_steps(marked, len(one)).astype(np.float64))
            for pair, both in members
            for one, marked in zip((self.trajectories[i] for i in pair), both, strict=True)
            if marked is not None
        ]

    @property
    def num_compared(self) -> int:
        """Number of different trajectories that occur in a labelled pair."""
        return len(np.unique(self._pairs))

    @property
    def num_contradictions(self) -> int:
        """Pairs that were preferred both ways, and trajectories called both safe and unsafe."""
        in_order = self._pairs[:, 0] < self._pairs[:, 1]
        preference = np.where(in_order, self._labels[:, 0], 1 - self._labels[:, 0])
        pairs = np.sort(self._pairs, axis=1)
        one_way, other_way = (
            set(map(tuple, pairs[chosen].tolist()))
            for chosen in (preference > 0.5, preference < 0.5)
        )
        members, safe = self._pairs.ravel(), self._labels[:, 1:].ravel()
        return len(one_way & other_way) + len(
            np.intersect1d(members[safe == 1], members[safe == 0])
        )

    @property
    def safe_shares(self) -> NDArray[np.float64]:
        """Mean ε of each trajectory, in [0, 1], (len(trajectories),); NaN if nobody gave one."""
        shares = np.full(len(self.trajectories), np.nan)
        labelled, unsafe = self.unsafe_shares(np.arange(len(self)))
        shares[labelled] = 1 - unsafe
        return shares

    def unsafe_shares(
        self, positions: NDArray[np.integer]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Which trajectories in some labelled pairs, int (B,), are labelled unsafe.

        Returns:
            Indices of those that have a safety label, int64 (N,), in order, each once. The share of
            its labels in these pairs that say unsafe, in [0, 1], (N,).
        """
        members, safe = self._pairs[positions].ravel(), self._labels[positions, 1:].ravel()
        is_labelled = ~np.isnan(safe)
        found, place = np.unique(members[is_labelled], return_inverse=True)
        unsafe = np.bincount(place, weights=1 - safe[is_labelled], minlength=len(found))
        return found, unsafe / np.maximum(np.bincount(place, minlength=len(found)), 1)

    def balanced_weights(self, num_pairs: int) -> NDArray[np.float64]:
        """Probabilities with which to draw the first pairs so that labels are balanced.

        Of all distributions whose expected numbers of safe and unsafe members are equal, it is the
        one nearest to uniform: a pair with d more unsafe than safe members has a weight of t^d. If
        no pair has more unsafe members, or none more safe ones, those with as many of both are
        drawn; without both labels, all pairs alike.

        Args:
            num_pairs: How many, at least 1.

        Returns:
            They sum to 1, float64 (num_pairs,).
        """
        safe = self._labels[:num_pairs, 1:]
        surplus = (safe == 0).sum(axis=1) - (safe == 1).sum(axis=1)  # d
        weights = np.ones(num_pairs)
        if not {0.0, 1.0} <= set(safe.flat):
            pass
        elif surplus.min() >= 0 or surplus.max() <= 0:
            weights = (surplus == 0).astype(np.float64)
        else:
            low, high = -20.0, 20.0  # of ln t; the surplus rises with it
            for _ in range(60):
                middle = (low + high) / 2
                weights = np.exp(middle * surplus)
                low, high = (middle, high) if surplus @ weights < 0 else (low, middle)
        weights /= weights.sum()
        return weights

    def add_trajectories(self, trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
        """Keep trajectories by reference; return their indices, int64 (len(trajectories),).

        Raises:
            TypeError: If one is no trajectory; none is added then.
            ValueError: If their obs_shape, dtype or act_dim differs from those in the buffer; none
                is added then.
        """
        check_trajectories(trajectories)
        known = (self.trajectories or list(trajectories))[:1]
        for trajectory in trajectories:
            found, expected = trajectory.layout, known[0].layout
            if found != expected:
                raise ValueError(
                    "all trajectories of a buffer must have the same sizes: it holds (obs_shape, "
                    f"act_dim, dtype) = {expected}, got {found}; use one buffer per environment"
                )
        start = len(self.trajectories)
        self.trajectories += trajectories
        return np.arange(start, len(self.trajectories))

    def queries(self, pairs: ArrayLike) -> list[Query]:
        """Return the queries to show to an oracle for index pairs, (B, 2)."""
        rows = self._checked(pairs)
        return [Query(self.trajectories[i], self.trajectories[j]) for i, j in rows.tolist()]

    def add_labels(self, pairs: ArrayLike, labels: Sequence[Label]) -> None:
        """Keep the oracle's answers to `queries(pairs)`.

        Raises:
            TypeError: If a label is no `Label`; nothing is added then.
            ValueError: If a pair is out of range or compares a trajectory with itself, or what is
                marked lies outside of its trajectory; nothing is added then.
            LabelError: If there is not one label per pair; nothing is added then.
        """
        rows = self._checked(pairs)
        for label in labels:
            if not isinstance(label, Label):
                raise TypeError(
                    f"labels must be Label objects, got {label!r}; make them by Label(preference, "
                    "first_safe, second_safe)"
                )
        if len(rows) != len(labels):
            raise LabelError(
                f"each pair needs its label: got {len(rows)} pairs and {len(labels)} labels; an "
                "oracle that has no answer returns Label(nan, nan, nan)"
            )
        marked = [label.unsafe for label in labels]
        for pair, both in zip(rows.tolist(), marked, strict=True):
            for i, stretches in zip(pair, both, strict=True):
                if stretches is not None:
                    check_stretches(stretches, steps=len(self.trajectories[i]))
        self._unsafe += marked
        values = [(label.preference, label.first_safe, label.second_safe) for label in labels]
        self._pairs = np.concatenate([self._pairs, rows])
        self._labels = np.concatenate(
            [self._labels, np.array(values, dtype=np.float32).reshape(-1, 3)]
        )

    def batch(self, indices: NDArray[np.integer]) -> PairBatch:
        """Return labelled pairs by position, int (B,), over the unique trajectories in them."""
        unique, inverse = np.unique(self._pairs[indices], return_inverse=True)
        labels = torch.from_numpy(self._labels[indices])
        return PairBatch(
            trajectories=[self.trajectories[i] for i in unique.tolist()],
            pairs=torch.from_numpy(inverse.reshape(-1, 2)),
            preference=labels[:, 0],
            safe=labels[:, 1:],
            numbers=torch.from_numpy(unique),
        )

    def check_labelled(self) -> None:
        """Refuse a buffer whose loss would be 0 for want of labels.

        Raises:
            LabelError: If there is no pair, or no pair has any label.
        """
        if np.isnan(self._labels).all():
            raise LabelError(
                f"training needs labels, but the buffer's {len(self)} pairs have none; label some "
                "pairs first (`draw_pairs`, `queries`, `add_labels`)"
            )

    @property
    def num_safety_labels(self) -> tuple[int, int]:
        """Labels that say safe, and labels that say unsafe; uncertain ones are neither."""
        safe = self._labels[:, 1:]
        return int((safe == 1).sum()), int((safe == 0).sum())

    @property
    def is_trainable(self) -> bool:
        """Whether there are labels on both sides of the limit."""
        return {0.0, 1.0} <= set(self._labels[:, 1:].flat)

    @property
    def has_many(self) -> bool:
        """Whether there are more than 500 labelled pairs, as people hardly give.

        So many tell which steps cost before an episode is known to be safe, and forget old ones
        without harm (`TreeTrainer`).
        """
        return len(self) > 500

    def check_trainable(self) -> None:
        """Refuse a set of labels from which no limit can be learned; warn once of contradictions.

        Raises:
            LabelError: If there is no label, or safe or unsafe ones are missing altogether.
        """
        self.check_labelled()
        num_safe, num_unsafe = self.num_safety_labels
        if not num_safe + num_unsafe:
            raise LabelError(
                "a limit is learned from safety labels, but there are preferences alone, "
                f"{len(self)} pairs without first_safe and second_safe; ask whether each "
                "trajectory is safe, too: Label(preference, first_safe, second_safe)"
            )
        if not self.is_trainable:
            raise LabelError(
                "a limit lies between safe and unsafe trajectories, so both labels must occur: "
                f"got {num_safe} safe and {num_unsafe} unsafe; add trajectories of the other kind, "
                "or check the limit by which they are called safe"
            )
        if not self._has_warned and (num := self.num_contradictions):
            self._has_warned = True
            warnings.warn(
                f"labels of the same trajectories should agree, but of {num} pairs or trajectories "
                "the labels contradict each other; the loss weighs them evenly, which suits "
                "a noisy teacher: of a sure one, check that answers stand in the order of queries",
                stacklevel=2,
            )

    def _checked(self, pairs: ArrayLike) -> Pairs:
        rows = np.asarray(pairs)
        if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind not in "iu":
            raise ValueError(
                f"pairs must be integers of shape (B, 2), got {rows.dtype} {rows.shape}"
            )
        outside = (rows < 0) | (rows >= len(self.trajectories))
        wrong = rows[outside.any(axis=1) | (rows[:, 0] == rows[:, 1])]
        if len(wrong):
            raise ValueError(
                f"a pair must name two different trajectories of {len(self.trajectories)}, "
                f"got {wrong[0].tolist()}; "
                "give their numbers in the buffer, from 0 on"
                f"{'' if len(self.trajectories) > 1 else ', and two trajectories or more'}"
            )
        return rows.astype(np.int64)


def check_buffer(buffer: object) -> None:
    """Refuse what is no buffer.

    Raises:
        TypeError: If so.
    """
    if not isinstance(buffer, PreferenceBuffer):
        raise TypeError(
            f"labels go into a PreferenceBuffer, got {type(buffer).__name__}; make one, and put "
            "the trajectories into it"
        )
