"""Which pairs to ask about: one function type, and five ways to fill it.

All but `uniform` draw ten candidates for each pair that is asked, score them, and keep the best, no
trajectory twice while there are others: what limits a cost model is the number of different
trajectories. What each is worth was measured: `docs/labels.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pbcrl.buffer import Pairs, PreferenceBuffer, draw_pairs
from pbcrl.cost_model import LearnedCost
from pbcrl.trajectory import Trajectory

Scores = NDArray[np.float64]

_CANDIDATES = 10  # per pair that is asked, as B-Pref has it
_NEIGHBOURS = 5


class Selection(Protocol):
    """Chooses pairs of a pool of trajectories, none of which was labelled before."""

    def __call__(
        self,
        pool: Sequence[Trajectory],
        num_pairs: int,
        *,
        asked: PreferenceBuffer,
        model: LearnedCost | None,
        rng: np.random.Generator,
    ) -> Pairs:
        """Choose pairs.

        Args:
            pool: What to choose from; may be `asked.trajectories`.
            num_pairs: How many pairs, at most `num_new_pairs(pool, asked)`.
            asked: The pairs that have been labelled so far.
            model: What has been learned so far; None suits those that do not look at it.
            rng: Source of chance.

        Returns:
            Indices into `pool`, int64 (num_pairs, 2), in random order within each pair.

        Raises:
            ValueError: If there are not as many pairs.
        """
        ...


def uniform(
    pool: Sequence[Trajectory],
    num_pairs: int,
    *,
    asked: PreferenceBuffer,
    model: LearnedCost | None = None,  # noqa: ARG001 - chance needs none
    rng: np.random.Generator,
) -> Pairs:
    """Choose by chance, as `draw_pairs`."""
    known = _known_pairs(pool, asked)
    pairs = draw_pairs(len(pool), num_pairs + len(known), rng=rng)
    new = [frozenset(pair) not in known for pair in pairs.tolist()]
    chosen: Pairs = pairs[np.array(new, dtype=bool)][:num_pairs]
    return chosen


def disagreement(
    pool: Sequence[Trajectory],
    num_pairs: int,
    *,
    asked: PreferenceBuffer,
    model: LearnedCost | None,
    rng: np.random.Generator,
) -> Pairs:
    """Choose pairs on whose preference the members of a model differ most.

    The score is the variance over the members of σ(Ĉ_2 - Ĉ_1) (Christiano et al. 2017).

    Raises:
        ValueError: If there is no model, it has a single member, or there are not as many pairs.
    """
    if _required(model).num_members < 2:
        raise ValueError(
            "disagreement needs members that can disagree, got a model with one; use a TreeCost "
            "with num_members=5, a CostModelEnsemble, or another selection"
        )
    pairs = _candidates(pool, num_pairs, asked=asked, rng=rng)
    return _best(pairs, _preferences(model, pool, pairs).var(axis=0), num_pairs)


def entropy(
    pool: Sequence[Trajectory],
    num_pairs: int,
    *,
    asked: PreferenceBuffer,
    model: LearnedCost | None,
    rng: np.random.Generator,
) -> Pairs:
    """Choose pairs whose predicted preference, the members' mean, is nearest to 0.5."""
    pairs = _candidates(pool, num_pairs, asked=asked, rng=rng)
    undecided = -np.abs(_preferences(model, pool, pairs).mean(axis=0) - 0.5)
    return _best(pairs, undecided, num_pairs)


def near_threshold(
    pool: Sequence[Trajectory],
    num_pairs: int,
    *,
    asked: PreferenceBuffer,
    model: LearnedCost | None,
    rng: np.random.Generator,
) -> Pairs:
    """Choose pairs of trajectories that are judged to lie near the learned limit, both of them."""
    pairs = _candidates(pool, num_pairs, asked=asked, rng=rng)
    distance = np.abs(_required(model).member_scores(pool).mean(axis=0))  # (len(pool),)
    return _best(pairs, -distance[pairs].sum(axis=1), num_pairs)


def novelty(
    pool: Sequence[Trajectory],
    num_pairs: int,
    *,
    asked: PreferenceBuffer,
    model: LearnedCost | None = None,  # noqa: ARG001 - it looks at trajectories alone
    rng: np.random.Generator,
) -> Pairs:
    """Choose pairs of trajectories far from all that were labelled.

    A trajectory stands for its mean (s, a), each coordinate divided by its spread; far is the mean
    distance to the five nearest labelled ones. While nothing is labelled, all are equally new.
    """
    pairs = _candidates(pool, num_pairs, asked=asked, rng=rng)
    compared = [asked.trajectories[i] for i in np.unique(asked.labelled_pairs)]
    if not compared:
        return pairs[:num_pairs]
    features = np.stack([_features(trajectory) for trajectory in [*pool, *compared]])
    spread = features.std(axis=0)
    features /= np.where(spread > 0, spread, 1.0)
    new, old = features[: len(pool)], features[len(pool) :]
    square = (new**2).sum(axis=1)[:, None] + (old**2).sum(axis=1) - 2 * new @ old.T
    distance = np.sqrt(np.maximum(square, 0.0))
    nearest = np.sort(distance, axis=1)[:, :_NEIGHBOURS].mean(axis=1)  # (len(pool),)
    return _best(pairs, nearest[pairs].sum(axis=1), num_pairs)


SELECTIONS: dict[str, Selection] = {
    "uniform": uniform,
    "disagreement": disagreement,
    "entropy": entropy,
    "near_threshold": near_threshold,
    "novelty": novelty,
}
"""The ways to choose, by name."""


def num_new_pairs(pool: Sequence[Trajectory], asked: PreferenceBuffer) -> int:
    """How many pairs of a pool have not been labelled yet."""
    return len(pool) * (len(pool) - 1) // 2 - len(_known_pairs(pool, asked))


def _known_pairs(pool: Sequence[Trajectory], asked: PreferenceBuffer) -> set[frozenset[int]]:
    """The labelled pairs of which both members are in the pool, as indices into it."""
    place = {id(trajectory): i for i, trajectory in enumerate(pool)}
    places = [place.get(id(trajectory), -1) for trajectory in asked.trajectories]
    known = {frozenset((places[i], places[j])) for i, j in asked.labelled_pairs.tolist()}
    return {pair for pair in known if -1 not in pair}


def _candidates(
    pool: Sequence[Trajectory],
    num_pairs: int,
    *,
    asked: PreferenceBuffer,
    rng: np.random.Generator,
) -> Pairs:
    """Ten times as many new pairs as are asked, or all there are."""
    count = max(num_pairs, min(_CANDIDATES * num_pairs, num_new_pairs(pool, asked)))
    return uniform(pool, count, asked=asked, rng=rng)


def _required(model: LearnedCost | None) -> LearnedCost:
    if model is None:
        raise ValueError(
            "this selection looks at what has been learned, but there is no model; pass model=, or "
            "select by `uniform` or `novelty`"
        )
    return model


def _preferences(model: LearnedCost | None, pool: Sequence[Trajectory], pairs: Pairs) -> Scores:
    """Each member's probability that the first of a pair is the safer one, (M, len(pairs))."""
    first, second = np.moveaxis(_required(model).member_scores(pool)[:, pairs], -1, 0)
    probability: Scores = 0.5 + 0.5 * np.tanh((second - first) / 2)  # σ, without overflow
    return probability


def _best(pairs: Pairs, scores: Scores, num_pairs: int) -> Pairs:
    """The pairs with the highest scores, no trajectory twice while there are others."""
    chosen: list[list[int]] = []
    spare: list[list[int]] = []
    used: set[int] = set()
    for pair in pairs[np.argsort(-scores, kind="stable")].tolist():
        if used.isdisjoint(pair):
            chosen.append(pair)
            used.update(pair)
        else:
            spare.append(pair)
    return np.array((chosen + spare)[:num_pairs], dtype=np.int64).reshape(-1, 2)


def _features(trajectory: Trajectory) -> Scores:
    obs = trajectory.obs.reshape(len(trajectory), -1)
    return np.concatenate(
        [rows.mean(axis=0, dtype=np.float64) for rows in (obs, trajectory.actions)]
    )
