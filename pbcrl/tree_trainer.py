"""Growing the trees of a `TreeCost` by LightGBM, under the paper's losses (Eq. 5).

Boosting in the space of trajectory costs: each tree is grown along the gradient of the loss by the
outputs of single steps, where a step has that of its trajectory; how far it is gone is found by a
line search on the loss itself. LightGBM chooses the splits, and knows nothing of preferences.
Where most episodes have their unsafe steps marked, trees are fitted to the marks instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbcrl._marks import LATE, OFF, earlier, moved, shared, steps_off
from pbcrl.buffer import PreferenceBuffer, check_buffer, check_generator
from pbcrl.dead_zone import DeadZone
from pbcrl.errors import LabelError, require_in, require_whole
from pbcrl.losses import safety_loss, snr_loss
from pbcrl.trainer import Evaluation, Trainer, bootstrapped, evaluation_of, poisson_counts
from pbcrl.trajectory import Marks, PairBatch, Trajectory
from pbcrl.trees import MOST_TREES, NUM_LEAVES, UNUSED, TreeCost, Trees, floor32, require_trees

Outputs = NDArray[np.float64]

_NODES = NUM_LEAVES - 1
_TRIES = 20
_FREE_SHARE = 0.05  # of the steps, with a horizon: they cost at most 0
_FEWEST_HELD_OUT = 20  # pairs that tell when to stop
_FEWEST_MARKED = 20  # unsafe steps that tell which ones are
_TELLS = 2.0  # times as likely as others is a marked step to cost, by the marks of the others
_FOLDS = 4  # of marked trajectories: the others tell where the marks of one belong
_BY_CHANCE = 0.05  # of safety labels, whatever the cost
_SLOPES = 2.0 ** np.arange(9)  # of the chance that one is safe, in standard deviations of C
_MOST_LIMITS = 200  # that are compared
_LONGEST_STEP = 10.0  # in units of C, before shrinkage: separable labels would have no end


class Clip(NamedTuple):
    """A few steps, called safe or unsafe by a standard of their own, such as "any unsafe step"."""

    trajectory: Trajectory
    """The steps, for example of `cut_segments`."""
    safe: float
    """1 safe, 0 unsafe, between them a probability of safe; NaN is not given."""


class TreeTrainer(Trainer):
    r"""Boosting of the PbCI loss of labelled pairs, for a `TreeCost`.

    With outputs f_t of the trees so far, C(τ) = s · Σ_t γ^t f_t. A tree is grown on the gradient of
    the loss by each f_t and on a bound of its curvature,

    .. math:: g_t = s γ^t dL/dC, \quad h_t = s² γ^t (Σ_u γ^u) κ(C)

    where κ sums the tightest quadratic bounds of the logistic losses, twice for pairs, in which two
    costs move (Cauchy-Schwarz). Then its leaves are scaled by the exact minimum of L along them,
    times `learning_rate`.

    With a horizon the model has a limit b of its own, and C - b stands in the losses. b is where
    the safety loss is lowest, found anew whenever C has changed (so the line search is one of the
    profile, min_b L); if no label says safe, it is the lowest C. Each tree is moved so that a
    twentieth of all steps cost less than 0.

    With a horizon, if at least half of the labelled trajectories are marked, and at least 20 steps
    and at most half of them as unsafe, marks alone tell which steps cost: trees are fitted to them
    by least squares, so that f_t is about the chance that a step is marked. Preferences and safety
    labels would spread costs over all that unsafe trajectories do. Whoever marks is late by the
    time that a hand takes, and a few steps off besides. So all marks are taken earlier, by at most
    4 % of the horizon, as long as the trajectories then foretell each other's better
    (`marks_late`). Then a marked stretch begins and ends, at most 2 % of the trajectory from where
    it did, where fits to the other trajectories say that it costs, and each step shares its mark
    with its neighbours. b is where either label is as likely (`balanced_limit`). Clips are not
    marks: where there are some, losses decide.

    Members of several are grown on bootstrap resamples of the trajectories, as those of an
    ensemble of networks. Each tree sees a quarter of the inputs, but 8 or more, or 24 or more by
    many pairs (`PreferenceBuffer.has_many`).

    Args:
        model: Its trees are replaced.
        rng: Seeds the choice of inputs of each tree, and that of steps.
        dead_zone: δ of Eq. 8; fixed in pretraining, moved by `update` online. A number is a fixed
            one; None is `DeadZone(0)`: nothing is underestimated by design.
        snr_weight: ζ of Eq. 9.
        max_std: sd(C) at which the variance term stops pulling; None is the paper's bare Eq. 9.
        rounds: Most trees.
        learning_rate: Share of the best step that each tree goes. None is 0.1 by up to 1,000
            labelled trajectories, and rises as the root of their number, to 0.3 by 9,000: of few
            labels small steps make more, of many they end before what is rare is learned. Marks are
            fitted with 0.1 by default.
        max_rows: Steps that are learned from at most, and as many that are marked. Of more, every
            k-th of each trajectory is taken, from a random one on, and counts k times.
        threads: Of LightGBM.

    Raises:
        ImportError: If LightGBM is missing or too old.
        TypeError: If `model` is no `TreeCost`, `rng` no generator, or a count no integer.
        ValueError: If a number is out of range.
    """

    model: TreeCost
    _reads_marks = True

    def __init__(
        self,
        model: TreeCost,
        *,
        rng: np.random.Generator,
        dead_zone: DeadZone | float | None = None,
        snr_weight: float = 1e-3,
        max_std: float | None = 5.0,
        rounds: int = 300,
        learning_rate: float | None = None,
        max_rows: int = 500_000,
        threads: int = 1,
    ) -> None:
        require_trees(model)
        dead_zone = DeadZone(0.0) if dead_zone is None else dead_zone
        super().__init__(model, dead_zone=dead_zone, snr_weight=snr_weight, max_std=max_std)
        require_whole(1, rounds=rounds, max_rows=max_rows, threads=threads)
        if rounds * model.num_members > MOST_TREES:
            raise ValueError(
                f"a model has {MOST_TREES:,} trees at most, got rounds={rounds:,} of each of "
                f"{model.num_members} members; give fewer, and a larger learning_rate"
            )
        if learning_rate is not None:
            require_in("(0, 1]", learning_rate=learning_rate)
        check_generator(rng)
        self._lightgbm = _imported()
        self._rng = rng
        self._most_rounds = self._rounds = rounds
        self._learning_rate = learning_rate
        self._max_rows = max_rows
        self._threads = threads
        self.clips: tuple[Clip, ...] = ()
        """Learned from in each fit beside the labels of the buffer, see `pretrain`."""
        self.marks: tuple[Marks, ...] = ()
        """Likewise."""
        self.marks_late = 0
        """Steps by which all marks were found to be late, in the newest fit to them."""
        self._num_timed = 0  # trajectories that were marked when that was found
        self._num_fitted = 0  # pairs, in the newest fit
        self._num_offline: int | None = None  # pairs, before the first round; None until then

    def pretrain(
        self,
        train: PreferenceBuffer,
        valid: PreferenceBuffer,
        *,
        patience: int = 40,
        clips: Sequence[Clip] = (),
        marks: Sequence[Marks] = (),
        on_evaluation: Callable[[int, Evaluation], None] | None = None,
    ) -> list[Evaluation]:
        """Grow trees until the held-out loss has stopped falling; keep as many as were best.

        Later fits of `update`, of more labels, have that many, but a tenth of `rounds` or more.
        Fewer than 20 held-out pairs with a label, or safety labels of one kind alone, tell nothing:
        then all trees are grown. See `Trainer.pretrain`.

        Args:
            train: Pairs to learn from.
            valid: Pairs that decide when to stop, by `Evaluation.selection_loss`.
            patience: Trees without a new best before growing stops.
            clips: More to learn from, in `update` too: they become `self.clips`.
            marks: More to learn from, in `update` too: they become `self.marks`.
            on_evaluation: Called with the number of trees and an evaluation, every ten.

        Raises:
            LabelError: If the labels of `train` are not enough (`can_learn`), or no input ever
                changes.
            TypeError: If `clips` or `marks` are something else.
            ValueError: If the buffers share a trajectory, or a clip or mark is out of range.
        """
        require_whole(1, patience=patience)
        self._check_split(train, valid)
        self._warn_of_unsafe_alone(train)
        self._keep(clips, marks)
        self._rounds = self._most_rounds
        self._num_offline = len(train)
        tells = not np.isnan(valid.labels).all()  # "I can't tell" does not
        return self._grow(train, valid if tells else None, patience, on_evaluation)[1]

    def fit(
        self,
        buffer: PreferenceBuffer,
        *,
        clips: Sequence[Clip] = (),
        marks: Sequence[Marks] = (),
    ) -> float:
        """Grow all trees anew on all labels; return the total loss that is left, in nats.

        Args:
            buffer: Labelled pairs; a pair may have no preference, or one member no safety label.
                What is marked in them is learned from, too.
            clips: More to learn from, in `update` too: they become `self.clips`.
            marks: More to learn from, in `update` too: they become `self.marks`.

        Raises:
            LabelError: If the buffer has no labels, or not enough (`can_learn`), or no input ever
                changes.
            TypeError: If `clips` or `marks` are something else.
            ValueError: If a clip or mark is out of range.
        """
        check_buffer(buffer)
        if clips and not len(buffer):
            raise LabelError(
                "clips tell which steps cost, and not what an episode may cost: beside "
                f"{len(clips)} of them a fit needs labelled episodes, and the buffer has no pair; "
                "label some pairs of episodes, or take clips as the members of pairs, by a model "
                "with their length as its horizon"
            )
        self._warn_of_unsafe_alone(buffer)
        self._keep(clips, marks)
        return self._fit(buffer)

    def update(self, buffer: PreferenceBuffer, new: NDArray[np.integer]) -> dict[str, float]:
        """Take one online round: see `Trainer.update`.

        The trees are grown anew, and the dead zone is moved before, as soon as all N labels are a
        tenth more than at the last time, or the online ones half as many again: the first ones say
        most about how a policy lives on errors. Below 200, N² / 2,000 more are enough (one up to
        44, five at 100): so few say much each. So all fits together take ten to twenty-five times
        as long as the last, however small rounds are.

        Where marks were fitted, `marks_late` is returned, too, in steps.
        """
        self._check_new(buffer, new)
        if not len(new):
            return {}
        self.num_untuned += len(new)
        predicted, labelled = self.violation_rates(buffer, new)
        measured = {"violation_gap": predicted - labelled, "violation_rate": labelled}
        self._warn_of_one_side(buffer)
        if self._num_offline is None:
            self._num_offline = len(buffer) - len(new)
        num, fitted = len(buffer), self._num_fitted
        online, before = num - self._num_offline, fitted - self._num_offline
        enough = min(fitted / 10, fitted**2 / 2_000)
        is_due = num - fitted >= enough or 2 * online >= 3 * max(before, 1)
        if self.can_learn(buffer) and is_due:
            if self.num_untuned > len(new):
                unseen = np.arange(len(buffer) - self.num_untuned, len(buffer))
                predicted, labelled = self.violation_rates(buffer, unseen)
            if self.steps and math.isfinite(labelled):
                self.dead_zone.update(predicted, labelled)
            measured["finetune_loss"] = self._fit(buffer)
            self.num_untuned = 0
            if self.fits_marks:
                measured["marks_late"] = float(self.marks_late)
        return measured

    def state_dict(self) -> dict[str, Any]:
        """What training has changed besides the model: the counts, δ.

        The generator is the caller's, and so are the model, clips and marks: save them beside it.
        """
        return {
            "steps": self.steps,
            "num_untuned": self.num_untuned,
            "dead_zone": self.dead_zone.value,
            "rounds": self._rounds,
            "num_offline": self._num_offline,
            "num_fitted": self._num_fitted,
            "fits_marks": self.fits_marks,
            "marks_late": [self.marks_late, self._num_timed],
            "num_clips": len(self.clips),
            "num_marks": len(self.marks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, with the model as it was then.

        Raises:
            ValueError: If `clips` and `marks`, which are not in the state, are not as many as then.
        """
        before, found = (state["num_clips"], state["num_marks"]), (len(self.clips), len(self.marks))
        if before != found:
            raise ValueError(
                f"a trainer goes on with the clips and marks that it had, {before}, got {found}; "
                "set its `clips` and `marks` before"
            )
        self.steps, self.num_untuned = state["steps"], state["num_untuned"]
        self.dead_zone.value = state["dead_zone"]
        self._rounds, self._num_fitted = state["rounds"], state["num_fitted"]
        self._num_offline = state["num_offline"]
        self.fits_marks = state.get("fits_marks", False)  # older checkpoints have none of both
        self.marks_late, self._num_timed = state.get("marks_late", [0, 0])

    def can_learn(self, buffer: PreferenceBuffer) -> bool:
        """Whether there are labels on both sides of the limit, or what stands for them.

        With a horizon, unsafe ones and preferences between them are enough: the limit is then the
        cost of the safest labelled trajectory; a policy that becomes as safe shows safer ones.
        """
        return buffer.is_trainable or (
            self.model.horizon is not None
            and bool((buffer.labels[:, 1:] == 0).any())
            and bool((np.abs(buffer.labels[:, 0] - 0.5) > 0).any())  # NaN is not given
        )

    @property
    def _pays_for_length(self) -> bool:
        return self.model.horizon is None

    def _warn_of_unsafe_alone(self, buffer: PreferenceBuffer) -> None:
        if self.can_learn(buffer) and not buffer.is_trainable:
            self._warn_once(
                UserWarning,
                "no labelled trajectory is safe, so that the limit is the learned cost of the "
                "safest one, until one is; show safer behaviour, too, if there is some",
            )

    def _keep(self, clips: Sequence[Clip], marks: Sequence[Marks]) -> None:
        _check_clips(clips)
        _check_marks(marks)
        self.clips, self.marks = tuple(clips), tuple(marks)
        are_safe = [clip.safe > 0.5 for clip in clips if not math.isnan(clip.safe)]
        if len(are_safe) > 1 and len(set(are_safe)) == 1:
            kind, other = ("safe", "unsafe") if are_safe[0] else ("unsafe", "safe")
            self._warn_once(
                UserWarning,
                f"all {len(are_safe)} labelled clips are {kind}, which tells no step from another; "
                f"have {other} ones labelled, too, or shorter ones",
            )
        steps = np.concatenate([np.zeros(0), *(np.asarray(one.unsafe, float) for one in marks)])
        known = steps[~np.isnan(steps)]
        if len(known) and (known == known[0]).all():
            kind, other = ("unsafe", "safe") if known[0] else ("safe", "unsafe")
            self._warn_once(
                UserWarning,
                f"all {len(known)} marked steps are {kind}, which tells no step from another; mark "
                f"trajectories with {other} ones, too",
            )

    def _fit(self, buffer: PreferenceBuffer) -> float:
        self._check_labels(buffer)
        self._warn_of_lengths(buffer)
        return self._grow(buffer)[0]

    def _grow(
        self,
        buffer: PreferenceBuffer,
        valid: PreferenceBuffer | None = None,
        patience: int = 0,
        on_evaluation: Callable[[int, Evaluation], None] | None = None,
    ) -> tuple[float, list[Evaluation]]:
        """Return the total loss of the first member, and its evaluations.

        Without `valid` there are none, and no patience is needed.
        """
        batch = buffer.batch(self._weighted(buffer))
        if not buffer.is_trainable:
            batch = _without_safety(batch)
        for trajectory in batch.trajectories:
            self.model.check_length(len(trajectory))
        marks = _thinned([*self.marks, *buffer.marks], self._max_rows, rng=self._rng)
        self.fits_marks = self._marks_suffice(buffer, batch)
        if self.fits_marks:
            return self._grow_by_marks(buffer, batch, marks, valid, on_evaluation)
        rows = Rows(
            self.model,
            [*batch.trajectories, *(clip.trajectory for clip in self.clips)],
            marks,
            max_rows=self._max_rows,
            rng=self._rng,
        )
        dataset, options = self._dataset(rows, least_inputs=24 if buffer.has_many else 8)
        held_out = None
        if valid is not None:
            its_batch = valid.batch(np.arange(len(valid)))
            if not buffer.is_trainable:
                its_batch = _without_safety(its_batch)
            # Fewer labels, fewer steps.
            few = max(self._max_rows // 5, 1)
            held_out = (
                its_batch,
                Rows(self.model, its_batch.trajectories, (), max_rows=few, rng=self._rng),
            )
        rate = self._learning_rate
        if rate is None:
            rate = 0.1 * math.sqrt(min(max(len(batch.trajectories) / 1_000, 1), 9))
        members, histories = [], []
        for part in bootstrapped(batch, self.model.num_members):
            if not _has_both_kinds(part) and _has_both_kinds(batch):
                part = batch  # a resample without one kind would have no limit
            options["seed"] = int(self._rng.integers(2**31))
            loss = _Loss(self, rows, part, self.clips, marks)
            booster = _Boosting(self._lightgbm.Booster(options, dataset), rows, loss)
            members.append(booster)
            report = on_evaluation if len(members) == 1 else None
            histories.append(self._boost(booster, held_out, patience, report, rate))
        limits = torch.tensor([member.limits[-1] for member in members], dtype=torch.float32)
        self.model.set_trees(_stacked([member.trees for member in members]), limits)
        self.steps += self.model.num_trees
        self._num_fitted = len(buffer)
        if held_out is not None:
            self._rounds = max(self._most_rounds // 10, self.model.num_trees)
        if not self.model.num_trees and held_out is None:
            self._warn_once(
                RuntimeWarning,
                "no tree lowers the loss of the labels, so that every step costs 0; see whether "
                "they contradict each other, and whether the inputs can tell what is unsafe",
            )
        self._warn_of_runaway(float(members[0].costs.std(unbiased=False)))
        return members[0].loss, histories[0]

    def _marks_suffice(self, buffer: PreferenceBuffer, batch: PairBatch) -> bool:
        unsafe = [(one, np.asarray(of, float)) for one, of in [*self.marks, *buffer.marks]]
        known = {one for one, of in unsafe if not np.isnan(of).all()}
        num_marked = sum(one in known for one in batch.trajectories)
        are_most = 2 * num_marked >= len(batch.trajectories)
        if self.model.horizon is None or self.clips or not known or not are_most:
            return False
        steps = np.concatenate([of for _, of in unsafe])
        return bool(np.nansum(steps) >= _FEWEST_MARKED and np.nanmean(steps) <= 0.5)

    def _grow_by_marks(
        self,
        buffer: PreferenceBuffer,
        batch: PairBatch,
        marks: Sequence[Marks],
        valid: PreferenceBuffer | None,
        on_evaluation: Callable[[int, Evaluation], None] | None,
    ) -> tuple[float, list[Evaluation]]:
        """As `_grow`, with `rounds` trees: nothing was gained by fewer."""
        marks = [one for one in marks if not np.isnan(np.asarray(one.unsafe, np.float64)).all()]
        unsafe = [np.asarray(of, np.float64) for _, of in marks]
        steps = [np.flatnonzero(~np.isnan(of)) for of in unsafe]
        columns = np.concatenate(
            [_columns(self.model, one, rows) for (one, _), rows in zip(marks, steps, strict=True)]
        )
        lengths = np.array([len(rows) for rows in steps])
        known = [of[rows] for of, rows in zip(unsafe, steps, strict=True)]
        options = {
            **self._options(columns),
            "objective": "regression",
            "boost_from_average": True,
            "learning_rate": self._learning_rate or 0.1,
            "min_data_in_leaf": min(10, max(1, len(columns) // 200)),
        }
        # The same one marked again has the same number, as long as all before are given, too.
        numbers = {one: i for i, one in enumerate(dict.fromkeys(one for one, _ in marks))}
        number = np.array([numbers[one] for one, _ in marks])
        most_off = np.array([steps_off(OFF, len(one)) for one, _ in marks])
        fold = np.repeat(number % _FOLDS, lengths)
        target = np.concatenate(
            [shared(of) for of in self._located(known, most_off, fold, columns, options)]
        )
        members = []
        for member in range(self.model.num_members):
            options["seed"] = int(self._rng.integers(2**31))
            weight = np.ones(len(target))
            if self.model.num_members > 1:
                times = poisson_counts(member, 1 << len(numbers).bit_length())[number]
                weight = np.repeat(times, lengths).astype(np.float64)
                if not 0 < target @ weight < weight.sum():
                    weight[:] = 1
            data = self._lightgbm.Dataset(columns, target, weight=weight, params=options)
            booster = self._lightgbm.train(options, data, self._most_rounds)
            found = booster.dump_model()["tree_info"]
            members.append([_Tree.read({"tree_info": [tree]}) for tree in found])
        self.model.set_trees(_stacked(members))
        costs = self.model.member_scores(batch.trajectories)
        limits = torch.tensor([balanced_limit(cost, batch) for cost in costs])
        self.model.set_trees(self.model.trees, limits.to(torch.float32))
        self.steps += self.model.num_trees
        self._num_fitted = len(buffer)
        loss = float(self._loss(torch.from_numpy(costs[0]) - limits[0], batch))
        if valid is None:
            return loss, []
        found = self.evaluate(valid)
        if on_evaluation is not None:
            on_evaluation(self.model.num_trees, found)
        return loss, [found]

    def _located(
        self,
        known: list[Outputs],
        most_off: NDArray[np.int64],
        fold: NDArray[np.int64],
        columns: NDArray[np.float32],
        options: dict[str, Any],
    ) -> list[Outputs]:
        """Return what is known of each one's steps, with marks where the others say that it costs.

        Who marks is late, and a few steps off (`_marks`). How late is found anew of half as many
        marked ones again. Where marks of others tell little, all stay.

        Args:
            known: Of M marked trajectories, 1 where a step is marked, 0 elsewhere.
            most_off: How many steps the marks of each may be moved by themselves, (M,).
            fold: Of each of all these steps, one trajectory below the other; those of the other
                folds tell.
            columns: What trees compare of these steps.
            options: Of LightGBM.
        """

        @cache
        def told(late: int) -> tuple[list[Outputs], Outputs]:
            marks = [earlier(of, late) for of in known]
            return marks, self._chances(marks, fold, columns, options)

        if 2 * len(known) >= 3 * self._num_timed or len(known) < self._num_timed:
            self.marks_late, self._num_timed = self._how_late(told), len(known)
        marks, chance = told(self.marks_late)
        target = np.concatenate(marks)
        if chance[target == 1].mean() <= _TELLS * chance[target == 0].mean():
            self.marks_late = 0
            return known
        chances = np.split(chance, np.cumsum([len(of) for of in marks])[:-1])
        return [
            moved(of, its_chance, most=most_of_it)
            for of, its_chance, most_of_it in zip(marks, chances, most_off.tolist(), strict=True)
        ]

    def _how_late(self, told: Callable[[int], tuple[list[Outputs], Outputs]]) -> int:
        """Return by how many steps all marks are late, 0 if that is not told by a standard error.

        Later and later is tried, until twice none was better.

        Args:
            told: Marks as they are if late by so many steps, and their chance by other marks.
        """
        assert self.model.horizon is not None  # else marks do not suffice
        step, most = (steps_off(share, self.model.horizon) for share in (OFF / 4, LATE))
        best, errors = 0, {0: _errors(*told(0))}
        for late in range(step, most + 1, step):
            errors[late] = _errors(*told(late))
            if errors[late].sum() < errors[best].sum():
                best = late
            elif late >= best + 2 * step:
                break
        gain = errors[0] - errors[best]
        return best if gain.mean() > gain.std() / math.sqrt(len(gain)) else 0

    def _chances(
        self,
        marks: list[Outputs],
        fold: NDArray[np.int64],
        columns: NDArray[np.float32],
        options: dict[str, Any],
    ) -> Outputs:
        """Return the chance that each step is marked, by the marks of the other folds."""
        target = np.concatenate(marks)
        chance = np.zeros(len(target))
        for its_fold in np.unique(fold):
            its_own = fold == its_fold
            if target[~its_own].any():
                data = self._lightgbm.Dataset(columns[~its_own], target[~its_own], params=options)
                booster = self._lightgbm.train(options, data, max(1, self._most_rounds // 3))
                chance[its_own] = booster.predict(columns[its_own], num_threads=self._threads)
        return chance

    def _weighted(self, buffer: PreferenceBuffer) -> NDArray[np.int64]:
        """All pairs; online ones up to ten times, to be as many as those of pretraining (Eq. 10).

        They are about the policy as it is, and few: in pretraining nobody has seen how it errs.
        Without pretraining, the newest quarter of many counts as much as the others.
        """
        pairs, num_offline = np.arange(len(buffer)), self._num_offline or 0
        if self._num_offline == 0 and buffer.has_many:
            newest = pairs[-(len(pairs) // 4) :]
            return np.concatenate([pairs, newest, newest])
        copies = min(10, max(1, num_offline // max(1, len(pairs) - num_offline)))
        return np.concatenate([pairs, np.tile(pairs[num_offline:], copies - 1)])

    def _boost(
        self,
        booster: _Boosting,
        held_out: tuple[PairBatch, Rows] | None,
        patience: int,
        on_evaluation: Callable[[int, Evaluation], None] | None,
        learning_rate: float,
    ) -> list[Evaluation]:
        """Grow one member; with held-out labels, cut it back to where they were best."""
        history: list[Evaluation] = []
        if held_out is None:
            for _ in range(self._rounds):
                if not booster.grow(learning_rate):
                    break
            return history
        batch, rows = held_out
        given = ~torch.column_stack([batch.preference, batch.safe]).isnan()
        tells = int(given.any(dim=1).sum()) >= _FEWEST_HELD_OUT and _has_both_kinds(batch)
        outputs, best, best_size = np.zeros(len(rows.columns)), math.inf, 0
        for size in range(self._rounds + 1):
            if size and not booster.grow(learning_rate):
                break
            if size:
                outputs += booster.newest.outputs(rows.columns)
            cost = torch.from_numpy(rows.costs(outputs) - booster.limits[-1])
            found = evaluation_of(cost, batch, dead_zone=self.dead_zone.value)
            if found.selection_loss < best or not tells:
                best, best_size = found.selection_loss, size
            if size % 10 == 0:
                history.append(found)
                if on_evaluation is not None:
                    on_evaluation(size, found)
            if size - best_size >= patience:
                break
        booster.cut(best_size)
        return history

    def _dataset(self, rows: Rows, *, least_inputs: int) -> tuple[Any, dict[str, Any]]:
        size, width = rows.columns.shape
        # Labels are of trajectories: what one in twenty shows once, such as a collision, is found.
        smallest = min(max(20, (len(rows.starts) - 1) // 20), 200)
        options: dict[str, Any] = {
            **self._options(rows.columns),
            "objective": "none",
            "learning_rate": 1.0,
            # Of many inputs each tree sees some: else all follow the few that tell unsafe episodes.
            "feature_fraction": min(1.0, max(0.25, least_inputs / width)),
            "min_data_in_leaf": max(1, min(size // 200, smallest)),
            "boost_from_average": False,
        }
        dataset = self._lightgbm.Dataset(rows.columns, params=options, free_raw_data=False)
        return dataset.construct(), options

    def _options(self, columns: NDArray[np.float32]) -> dict[str, Any]:
        """Of LightGBM, whatever trees are grown by; and see to it that something changes."""
        if (columns == columns[0]).all():
            size, width = columns.shape
            raise LabelError(
                f"a cost depends on something that changes, but all {width} inputs are the same in "
                f"all {size} steps; check what the env returns as observations"
            )
        return {
            "num_leaves": NUM_LEAVES,
            # It counts steps by their curvature: with 0 it tries sides without any, and raises.
            "min_sum_hessian_in_leaf": 1e-9,
            "lambda_l2": 0.1,
            "feature_pre_filter": False,
            "use_missing": False,
            "deterministic": True,
            "force_col_wise": True,
            "num_threads": self._threads,
            "verbose": -1,
        }


class Rows:
    """The steps of trajectories one below the other, and how their outputs make up costs.

    Args:
        model: Whose inputs they are.
        trajectories: U of them, whose costs count.
        marks: Further ones, of which single steps count; their rows come last.
        max_rows: How many steps of trajectories to take at most.
        rng: Which, if there are more.
    """

    def __init__(
        self,
        model: TreeCost,
        trajectories: Sequence[Trajectory],
        marks: Sequence[Marks],
        *,
        max_rows: int,
        rng: np.random.Generator,
    ) -> None:
        total = sum(map(len, trajectories))
        every = -(-total // max_rows)
        chosen, weights = [], []
        for trajectory in trajectories:
            steps = len(trajectory)
            rows = np.arange(rng.integers(min(every, steps)) if every > 1 else 0, steps, every)
            chosen.append(rows)
            weights.append(steps / len(rows) * model.discount**rows)
        self.starts = np.cumsum([0, *map(len, chosen)])
        """Of each trajectory, and the end of the last, int (U + 1,)."""
        self.weight = model.output_scale * np.concatenate(weights)
        """dC/df of each of these rows, float64 (N,)."""
        arrays = [(t, rows) for t, rows in zip(trajectories, chosen, strict=True)]
        arrays += [(mark.trajectory, np.arange(len(mark.trajectory))) for mark in marks]
        ends = np.cumsum([0, *(len(rows) for _, rows in arrays)])
        by_input = np.empty((len(model.read_names), ends[-1]), np.float32)
        for (trajectory, rows), start, end in zip(arrays, ends[:-1], ends[1:], strict=True):
            by_input[:, start:end] = _columns(model, trajectory, rows).T
        self.columns = by_input.T  # in this order a tree reads few of them, each in one go
        """What trees compare, float32 (N + those of marks, num_inputs)."""

    @property
    def num_steps(self) -> int:
        """N, without those of marks."""
        return int(self.starts[-1])

    def costs(self, outputs: Outputs) -> Outputs:
        """C of each trajectory, (U,), by the outputs of all rows."""
        return np.add.reduceat(self.weight * outputs[: self.num_steps], self.starts[:-1])

    def spread(self, values: Outputs) -> Outputs:
        """Repeat a number per trajectory for each of its rows, (N,)."""
        return np.repeat(values, np.diff(self.starts))


class _Safety:
    """The mean safety loss of labels, gathered by what they are about: many are about the same.

    Args:
        about: Index of what each label is about, (K,).
        safe: ε of each, NaN where not given, (K,).
        size: Of what they are about, U.
        dead_zone: δ.
    """

    def __init__(
        self, about: NDArray[Any], safe: NDArray[Any], *, size: int, dead_zone: float = 0.0
    ) -> None:
        given = ~np.isnan(safe)
        about, label = about[given], safe[given].astype(np.float64)
        each = np.stack([np.bincount(about, x, size) for x in (label, 1 - label)])
        self._safe, self._unsafe = torch.from_numpy(each / max(1, len(label)))
        self._either, self._all_unsafe = self._safe + self._unsafe, float(self._unsafe.sum())
        self._dead_zone = dead_zone
        self.is_given = bool(len(label))
        self.shift = 0.0
        """b: what costs more is unsafe."""

    def gradient(self, costs: Tensor) -> Tensor:
        """By each cost, (U,)."""
        above = torch.sigmoid(costs - self.shift)
        if not self._dead_zone:
            return torch.addcmul(-self._unsafe, self._either, above)
        below = torch.sigmoid(self.shift + self._dead_zone - costs)
        return torch.addcmul(self._safe * above, self._unsafe, below, value=-1)

    def curvature_bound(self, costs: Tensor) -> Tensor:
        """By each cost, (U,)."""
        above = costs - self.shift
        if not self._dead_zone:
            return curvature(above).mul_(self._either)
        below = curvature(above - self._dead_zone)
        return torch.addcmul(self._safe * curvature(above), self._unsafe, below)

    def centre(self, costs: Tensor) -> None:
        """Put the shift where the loss is lowest, by Newton's method from where it is."""
        for _ in range(20 if self.is_given else 0):
            slope, curve = self._slope(costs)
            move = slope / (curve + 1e-4)
            self.shift += min(max(move, -1.0), 1.0)
            if abs(move) < 1e-4:
                break

    def _slope(self, costs: Tensor) -> tuple[float, float]:
        """How much the loss falls if the shift rises, and the curvature.

        In as few passes as can be: with marks there are tens of thousands of costs, and a fit comes
        here some ten thousand times.
        """
        above = torch.sigmoid(costs - self.shift)
        if not self._dead_zone:  # below is 1 - above
            weighed = self._either * above
            total = float(weighed.sum())
            return total - self._all_unsafe, total - float(weighed @ above)
        below = torch.sigmoid(self.shift + self._dead_zone - costs)
        safe, unsafe = self._safe * above, self._unsafe * below
        totals = float(safe.sum()), float(unsafe.sum())
        spread = float(safe @ above), float(unsafe @ below)
        return totals[0] - totals[1], sum(totals) - sum(spread)


class _Loss:
    """The loss by the outputs of all rows: pairs, clips, marks; each a mean, all of weight 1.

    Its gradient is written out here, since a fit needs it some thousand times: labels are gathered
    by the trajectories and pairs that they are about. `value` is that of `pbcrl.losses`.
    """

    def __init__(
        self,
        trainer: TreeTrainer,
        rows: Rows,
        batch: PairBatch,
        clips: Sequence[Clip],
        marks: Sequence[Marks],
    ) -> None:
        self._trainer, self._rows, self._batch = trainer, rows, batch
        self._num_pair_costs = len(batch.trajectories)
        self._clip_safe = np.array([clip.safe for clip in clips], np.float64)
        unsafe = [np.asarray(mark.unsafe, np.float64) for mark in marks]
        self._unmarked = 1 - np.concatenate([np.empty(0), *unsafe])
        members = batch.pairs.numpy()
        self._safety = (
            _Safety(
                members.ravel(),
                batch.safe.numpy().ravel(),
                size=self._num_pair_costs,
                dead_zone=trainer.dead_zone.value,
            ),
            _Safety(np.arange(len(clips)), self._clip_safe, size=len(clips)),
            _Safety(np.arange(len(self._unmarked)), self._unmarked, size=len(self._unmarked)),
        )
        self._gather_preferences(members, batch.preference.numpy().astype(np.float64))
        # Losses are means; trees are grown by sums, whose size decides what a leaf is worth.
        self.scale = float(max(1, len(batch) + len(clips) + len(marks)))
        # Σ_u of the weights of each trajectory: how much its cost moves if all its rows do.
        self._total = np.add.reduceat(rows.weight, rows.starts[:-1])
        self.has_limit = trainer.model.horizon is not None

    def _gather_preferences(self, members: NDArray[Any], preference: Outputs) -> None:
        size, given = self._num_pair_costs, ~np.isnan(preference)
        keys, which = np.unique(members[given] @ np.array([size, 1]), return_inverse=True)
        count = max(1, given.sum())
        self._first, self._second = (torch.from_numpy(x) for x in np.divmod(keys, size))
        self._times = torch.from_numpy(np.bincount(which, minlength=len(keys)) / count)
        self._safer = torch.from_numpy(np.bincount(which, preference[given], len(keys)) / count)
        # Each member counts in the variance, with a preference or not; its entropy is of labels.
        self._share = torch.from_numpy(np.bincount(members.ravel(), minlength=size) / members.size)
        self._snr = 0.0
        if given.any():
            unit = torch.tensor([0.0, 1.0], dtype=torch.float64)  # of variance 1/4
            mean = torch.full((1,), float(preference[given].mean()), dtype=torch.float64)
            weight = self._trainer._snr_weight
            self._snr = 4 * float(snr_loss(unit, mean, snr_weight=weight, max_std=None))

    @property
    def limit(self) -> float:
        """b, as of the newest `centre`; 0 without a horizon."""
        return self._safety[0].shift

    @property
    def shifts(self) -> list[float]:
        """Where trajectories, clips and steps turn unsafe."""
        return [part.shift for part in self._safety]

    def value(self, costs: Tensor, steps: Tensor) -> Tensor:
        """Of all costs (U,) and of the outputs of marked steps, 0-d."""
        loss = self._trainer._loss(costs[: self._num_pair_costs] - self.limit, self._batch)
        for values, safe, part in (
            (costs[self._num_pair_costs :], self._clip_safe, self._safety[1]),
            (steps, self._unmarked, self._safety[2]),
        ):
            if len(values):
                loss = loss + safety_loss(values - part.shift, torch.from_numpy(safe))
        return loss

    def gradient(self, outputs: Outputs) -> tuple[Outputs, Outputs]:
        """The gradient by the output of each row and the bound of its curvature, times `scale`."""
        costs = torch.from_numpy(self._rows.costs(outputs))
        steps = torch.from_numpy(outputs[self._rows.num_steps :].copy())
        self.centre(costs, steps)
        cost_grad, step_grad = (grad.numpy() for grad in self._grads(costs, steps))
        cost_bound, step_bound = (bound.numpy() for bound in self._curvature_bounds(costs, steps))
        weight, spread = self._rows.weight, self._rows.spread
        grad, hess = weight * spread(cost_grad), weight * spread(self._total * cost_bound)
        return (
            self.scale * np.concatenate([grad, step_grad]),
            self.scale * np.concatenate([hess, step_bound]),
        )

    def best_step(self, outputs: Outputs, direction: Outputs) -> float:
        """The step along a direction, >= 0, at which the loss is lowest."""
        costs, move = (torch.from_numpy(self._rows.costs(x)) for x in (outputs, direction))
        start = self._rows.num_steps
        steps, step_move = (torch.from_numpy(x[start:].copy()) for x in (outputs, direction))

        def slope(size: float) -> float:
            moved = costs + size * move, steps + size * step_move
            self.centre(*moved)
            grads = self._grads(*moved)
            return float(grads[0] @ move + grads[1] @ step_move)

        free = move - move.mean() if self.has_limit else move  # what b does not take back
        longest = max(map(float, [x.abs().max() for x in (free, step_move) if len(x)]))
        low, slope_at_0 = 0.0, slope(0.0)
        at_low = slope_at_0
        if longest == 0 or at_low >= 0:
            return 0.0
        high = _LONGEST_STEP / longest
        at_high = slope(high)
        if at_high <= 0:
            return high
        for _ in range(8):  # regula falsi (Illinois): the slope only rises
            size = (low * at_high - high * at_low) / (at_high - at_low)
            found = slope(size)
            if abs(found) < 0.02 * abs(slope_at_0):
                return size
            if found > 0:
                high, at_high, at_low = size, found, at_low / 2
            else:
                low, at_low, at_high = size, found, at_high / 2
        return (low + high) / 2

    def _grads(self, costs: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """By each cost, (U,), and by the output of each marked step."""
        cost, clip_cost = costs.tensor_split([self._num_pair_costs])
        parts = zip(self._safety, (cost, clip_cost, steps), strict=True)
        grad, clip_grad, step_grad = (safety.gradient(values) for safety, values in parts)
        gap = cost[self._second] - cost[self._first]
        pull = self._times * torch.sigmoid(gap) - self._safer
        grad.index_add_(0, self._second, pull).index_add_(0, self._first, pull, alpha=-1)
        centred = cost - self._share @ cost
        max_std = self._trainer._max_std
        if max_std is None or self._share @ centred.square() <= max_std**2:
            grad += 2 * self._snr * self._share * centred
        return torch.cat([grad, clip_grad]), step_grad

    def _curvature_bounds(self, costs: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the curvature by each cost, (U,), and by the output of each marked step, alone.

        L(C + Δ) <= L(C) + g · Δ + ½ Σ_i κ_i Δ_i² for all Δ. The difference of two costs moves by at
        most (Δ_i - Δ_j)² <= 2 Δ_i² + 2 Δ_j². The variance term is concave below `max_std`, so its
        tangent bounds it.
        """
        cost, clip_cost = costs.tensor_split([self._num_pair_costs])
        parts = zip(self._safety, (cost, clip_cost, steps), strict=True)
        bound, clip_bound, step_bound = (part.curvature_bound(values) for part, values in parts)
        pair = 2 * self._times * curvature(cost[self._second] - cost[self._first])
        bound.index_add_(0, self._first, pair).index_add_(0, self._second, pair)
        return torch.cat([bound, clip_bound]), step_bound

    def centre(self, costs: Tensor, steps: Tensor) -> None:
        """Put each shift where its loss is lowest."""
        cost, clip_cost = costs.tensor_split([self._num_pair_costs])
        for k, values in enumerate((cost, clip_cost, steps)):
            if k or self.has_limit:
                self._safety[k].centre(values)
        if self.has_limit and not self._safety[0].is_given:
            self._safety[0].shift = float(cost.min())


def _has_both_kinds(batch: PairBatch) -> bool:
    """Whether some are called safe and some unsafe; or nobody calls any so, and there are pairs."""
    safe = batch.safe[~batch.safe.isnan()]
    if not len(safe):
        return len(batch) > 0
    return bool((safe > 0.5).any() and (safe < 0.5).any())


def _without_safety(batch: PairBatch) -> PairBatch:
    """With preferences alone: safety labels that are all alike tell no trajectory from another."""
    return replace(batch, safe=torch.full_like(batch.safe, math.nan))


def curvature(x: Tensor) -> Tensor:
    """Return tanh(x / 2) / (2 x), 1/4 at 0: of the parabola above the logistic loss that touches x.

    It lies above it everywhere (Jaakkola and Jordan).
    """
    size = x.abs().clamp(min=1e-6)
    return torch.tanh(size / 2) / (2 * size)


def balanced_limit(cost: Outputs, batch: PairBatch) -> float:
    r"""Return the cost at which safe and unsafe are as likely, were there as many of both.

    b, with the slope k, by which labels are likeliest: of a trajectory that costs C, drawn from as
    many that are called safe as unsafe, one label in twenty, η, is given by chance, and half of
    these are wrong whatever it costs,

    .. math::
        P = \frac{q / s}{q / s + (1 - q) / (1 - s)},
        \quad q = η / 2 + (1 - η) σ(k (b - C) + \ln \frac{s'}{1 - s'}),

    where q is the chance that it is called safe, s the share of those that are, and s' the share
    that is safe, so that s = η / 2 + (1 - η) s'. All labels near b tell where it lies, and a wrong
    one far from it hardly does. b is midway between two costs.

    Args:
        cost: C of each trajectory, (U,).
        batch: Labelled pairs of them; a label between 0 and 1 counts for both kinds in part.

    Returns:
        b; the lowest cost if not both kinds of labels are there.
    """
    members, safe = batch.pairs.numpy().ravel(), batch.safe.numpy().astype(np.float64).ravel()
    given = ~np.isnan(safe)
    safe, (values, place) = safe[given], np.unique(cost[members[given]], return_inverse=True)
    share = float(safe.mean()) if len(safe) else 0.0
    if len(values) < 2 or not 0 < share < 1:
        return float(cost.min())
    limits = (values[1:] + values[:-1]) / 2
    limits = limits[np.unique(np.linspace(0, len(limits) - 1, _MOST_LIMITS).round().astype(int))]
    is_safe, is_unsafe = (np.bincount(place, x) / x.sum() for x in (safe, 1 - safe))
    spread = np.sqrt(np.cov(values, aweights=is_safe + is_unsafe, ddof=0))
    fewest = 1 / len(safe)
    are_safe = min(max((share - _BY_CHANCE / 2) / (1 - _BY_CHANCE), fewest), 1 - fewest)
    odds = math.log(are_safe / (1 - are_safe))
    likelihoods = []
    for slope in _SLOPES / spread:
        logit = np.clip(slope * (limits[:, None] - values) + odds, -50, 50)
        called_safe = _BY_CHANCE / 2 + (1 - _BY_CHANCE) / (1 + np.exp(-logit))
        ratio = called_safe * (1 - share) / ((1 - called_safe) * share)
        likelihoods.append(-np.log1p(1 / ratio) @ is_safe - np.log1p(ratio) @ is_unsafe)
    return float(limits[np.max(likelihoods, axis=0).argmax()])


class _Tree(NamedTuple):
    """One tree, as in `Trees`."""

    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    left: NDArray[np.int8]
    right: NDArray[np.int8]
    value: NDArray[np.float64]

    @classmethod
    def read(cls, model: Mapping[str, Any]) -> _Tree:
        """From LightGBM's own description of a model with one tree."""
        (about,) = model["tree_info"]
        feature, threshold = np.zeros(_NODES, np.int32), np.zeros(_NODES)
        left, right = np.full((2, _NODES), UNUSED, np.int8)
        value = np.zeros(NUM_LEAVES)

        def place(node: Mapping[str, Any]) -> int:
            if "leaf_value" in node:
                index = node.get("leaf_index", 0)
                value[index] = node["leaf_value"]
                return int(-1 - index)
            index = node["split_index"]
            feature[index], threshold[index] = node["split_feature"], node["threshold"]
            left[index], right[index] = place(node["left_child"]), place(node["right_child"])
            return int(index)

        place(about["tree_structure"])
        return cls(feature, floor32(threshold), left, right, value)

    def outputs(self, columns: NDArray[np.float32]) -> Outputs:
        """Its output for each row of (N, num_inputs), float64 (N,)."""
        reachable = np.full(len(columns), 255, np.uint8)  # leaves, as bits
        for node, (if_left, if_right) in enumerate(self._leaves_kept()):
            above = columns[:, self.feature[node]] > self.threshold[node]
            reachable &= if_left ^ (above * (if_left ^ if_right))
        lowest = [(bits & -bits).bit_length() - 1 for bits in range(256)]
        outputs: Outputs = self.value[lowest][reachable]
        return outputs

    def _leaves_kept(self) -> list[tuple[np.uint8, np.uint8]]:
        """The leaves that each node leaves, if its input is at most, and above, its threshold."""
        below = [[0, 0] for _ in range(_NODES)]
        for node in reversed(range(_NODES)):  # children come after their parent
            for side, child in enumerate((int(self.left[node]), int(self.right[node]))):
                if child != UNUSED:
                    below[node][side] = sum(below[child]) if child >= 0 else 1 << (-1 - child)
        return [(np.uint8(255 - right), np.uint8(255 - left)) for left, right in below]


class _Boosting:
    """One member while it grows."""

    def __init__(self, booster: Any, rows: Rows, loss: _Loss) -> None:
        self._booster, self._rows, self._loss = booster, rows, loss
        self._outputs = np.zeros(len(rows.columns))
        self.trees: list[_Tree] = []
        self.limits = [0.0]
        """After each number of trees; the last one is the limit now."""

    @property
    def newest(self) -> _Tree:
        """The last tree, scaled."""
        return self.trees[-1]

    @property
    def costs(self) -> Tensor:
        """C of all trajectories, (U,), before any cut."""
        return torch.from_numpy(self._rows.costs(self._outputs))

    @property
    def loss(self) -> float:
        """Of all terms, in nats."""
        return float(self._loss.value(self.costs, self._marked))

    def grow(self, learning_rate: float) -> bool:
        """Add a tree; return whether there was one that lowers the loss."""
        gradient = self._loss.gradient(self._outputs)
        for _ in range(_TRIES):  # the inputs that a tree sees may have no split
            if not self._booster.update(fobj=lambda *_: gradient):
                break
        else:
            return False
        newest = self._booster.num_trees() - 1  # a first one without a split counts, too
        tree = _Tree.read(self._booster.dump_model(1, start_iteration=newest))
        direction = tree.outputs(self._rows.columns)
        step = learning_rate * self._loss.best_step(self._outputs, direction)
        self._outputs += step * direction
        floor = 0.0
        if self._loss.has_limit:
            some = self._outputs[:: -(-len(self._outputs) // 20_000)]
            floor = float(np.quantile(some, _FREE_SHARE))
        self._outputs -= floor
        self.trees.append(tree._replace(value=step * tree.value - floor))
        self._loss.centre(self.costs, self._marked)
        self.limits.append(self._loss.limit)
        return True

    def cut(self, size: int) -> None:
        """Keep the first trees alone."""
        del self.trees[size:], self.limits[size + 1 :]

    @property
    def _marked(self) -> Tensor:
        return torch.from_numpy(self._outputs[self._rows.num_steps :].copy())


def _stacked(members: Sequence[Sequence[_Tree]]) -> Trees:
    """Trees of all members; those of smaller ones are followed by trees that add nothing."""
    size = max(map(len, members))
    nothing = _Tree.read({"tree_info": [{"tree_structure": {"leaf_value": 0.0}}]})
    rows = [tree for member in members for tree in [*member, *[nothing] * (size - len(member))]]
    arrays = [np.stack(part) for part in zip(*rows, strict=True)] if rows else []
    if not arrays:
        return Trees.none(len(members))
    tensors = [torch.from_numpy(x.reshape(len(members), size, -1)) for x in arrays]
    feature, threshold, left, right, value = tensors
    return Trees(feature, threshold, left, right, value.to(torch.float32))


def _check_clips(clips: Sequence[Clip]) -> None:
    for clip in clips:
        if not (isinstance(clip, Clip) and isinstance(clip.trajectory, Trajectory)):
            raise TypeError(f"a clip is a Clip(trajectory, safe), got {clip!r:.80}")
        if not isinstance(clip.safe, int | float | np.number):
            raise TypeError(f"a clip is safe with a probability, got safe={clip.safe!r:.80}")
        if not (0 <= clip.safe <= 1 or math.isnan(clip.safe)):
            raise ValueError(
                f"a clip is safe with a probability in [0, 1], or NaN, got safe={clip.safe}"
            )


def _thinned(marks: list[Marks], most: int, *, rng: np.random.Generator) -> list[Marks]:
    """Keep every k-th step of each, so that some `most` are left, and one of each at least."""
    every = -(-sum(len(mark.trajectory) for mark in marks) // most)
    if every <= 1:
        return marks
    kept = []
    for one, unsafe in marks:
        steps = len(one)
        rows = slice(int(rng.integers(min(every, steps))), steps, every)
        part = Trajectory(one.obs[rows], one.actions[rows])
        kept.append(Marks(part, np.asarray(unsafe)[rows]))
    return kept


def _errors(marks: list[Outputs], chance: Outputs) -> Outputs:
    """How badly others foretell each one's marks: squares, in variances of all marks, (M,)."""
    target = np.concatenate(marks)
    starts = np.cumsum([0, *(len(of) for of in marks[:-1])])
    return np.asarray(np.add.reduceat(np.square(chance - target), starts) / target.var())


def _check_marks(marks: Sequence[Marks]) -> None:
    for mark in marks:
        if not (isinstance(mark, Marks) and isinstance(mark.trajectory, Trajectory)):
            raise TypeError(f"marks are Marks(trajectory, unsafe), got {mark!r:.80}")
        unsafe = np.asarray(mark.unsafe, np.float64)
        known = unsafe[~np.isnan(unsafe)]
        if unsafe.shape != (len(mark.trajectory),) or not np.isin(known, (0, 1)).all():
            raise ValueError(
                "each step is marked 1 (unsafe), 0 (not) or NaN (unknown): a trajectory of "
                f"{len(mark.trajectory)} steps got {unsafe.shape} marks, among them "
                f"{np.unique(known)[:4].tolist()}; mark every step"
            )


def _columns(model: TreeCost, trajectory: Trajectory, rows: NDArray[np.int64]) -> Any:
    model._check_sizes(trajectory.obs.shape[1:], trajectory.actions.shape[1])
    obs = torch.from_numpy(np.ascontiguousarray(trajectory.obs[rows]))
    actions = torch.from_numpy(np.ascontiguousarray(trajectory.actions[rows]))
    return model.columns(obs, actions).numpy()


def _imported() -> Any:
    """LightGBM, of a version that is known to do."""
    remedy = "pip install 'pbcrl[trees]'; scoring a model that is trained needs none"
    if find_spec("lightgbm") is None:
        raise ImportError(f"trees are grown by LightGBM, which is not installed; {remedy}")
    import lightgbm

    found = re.match(r"(\d+)\.(\d+)", lightgbm.__version__)  # of "4.6rc1" too
    if found is None or tuple(map(int, found.groups())) < (4, 5):
        raise ImportError(
            f"trees are grown by LightGBM 4.5 or newer, got {lightgbm.__version__}; {remedy}"
        )
    return lightgbm
