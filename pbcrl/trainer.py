"""Training of the cost model: offline pretraining and online fine-tuning (Eq. 10, `eq:finetune`).

Memory stays constant at any batch size: pair and variance terms need all costs of a batch together,
so a gradient step scores the trajectories in chunks, takes the gradient of the loss with respect to
those costs, and scores each chunk again to carry it to the weights: the exact gradient.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbcrl.buffer import PreferenceBuffer
from pbcrl.cost_model import LearnedCost, require_learned_cost
from pbcrl.dead_zone import DeadZone
from pbcrl.errors import require_in
from pbcrl.losses import pbci_loss
from pbcrl.trajectory import PairBatch, Trajectory, chunks_of, padded

# At ζ = 1e-3 the cross-entropies hold the unbounded variance term back up to sd(C) of about 22.
_RUNAWAY_STD = 20.0
_ROUNDS_IN_VAIN = 3


@dataclass(frozen=True)
class Evaluation:
    """What `CostModelTrainer.evaluate` measures over labelled pairs; NaN where undefined."""

    preference_loss: float
    """Eq. 4, nats per pair."""
    safety_loss: float
    """Eq. 8 with the current dead zone, nats per labelled member."""
    pair_accuracy: float
    """Share of the strict preferences that the learned costs order alike; a tie counts half."""
    safety_accuracy: float
    """Share of the safety labels that agree with the sign of the learned cost."""
    cost_std: float
    """sd(C_ψ) over the members of the pairs."""

    @property
    def selection_loss(self) -> float:
        """What early stopping minimises: never the total loss, which has no lower bound."""
        return self.preference_loss + self.safety_loss


class Trainer(ABC):
    """What trainers of every kind of cost model share: measuring, and the online round of Alg. 1.

    A training loop needs `pretrain`, `update`, `dead_zone` and the state.

    Args:
        model: Trained in place.
        dead_zone: δ of Eq. 8; a number is a fixed one, None is `DeadZone()`.
        snr_weight: ζ of Eq. 9.
        max_std: sd(C_ψ) at which the variance term stops pulling; None is the paper's bare Eq. 9.

    Raises:
        TypeError: If `model` is no `LearnedCost`.
        ValueError: If a number is out of range.
    """

    _reads_marks: ClassVar[bool] = False
    fits_marks: bool = False
    """Whether the newest fit was to marked steps alone, see `TreeTrainer`."""

    def __init__(
        self,
        model: LearnedCost,
        *,
        dead_zone: DeadZone | float | None,
        snr_weight: float,
        max_std: float | None,
    ) -> None:
        require_learned_cost(model)
        require_in("[0, inf)", snr_weight=snr_weight)
        require_in("(0, inf]", max_std=math.inf if max_std is None else max_std)
        self.model = model
        if dead_zone is None:
            dead_zone = DeadZone()
        elif not isinstance(dead_zone, DeadZone):
            dead_zone = DeadZone(dead_zone, lr=0.0, maximum=dead_zone)
        self.dead_zone = dead_zone
        self._snr_weight = snr_weight
        self._max_std = max_std
        self.steps = 0
        """Gradient steps, or trees, so far; 0 before any training."""
        self.num_untuned = 0
        """Newest pairs of the buffer of `update` that no training has taken as new yet."""
        self._warned: set[str] = set()
        self._rounds_in_vain = 0

    @abstractmethod
    def pretrain(
        self,
        train: PreferenceBuffer,
        valid: PreferenceBuffer,
        *,
        on_evaluation: Callable[[int, Evaluation], None] | None = None,
    ) -> list[Evaluation]:
        """Train until the held-out loss has stopped falling; keep what was best.

        The two buffers must share no trajectory: splitting by pairs would leak.

        Args:
            train: Pairs to learn from.
            valid: Pairs that decide when to stop, by `Evaluation.selection_loss`.
            on_evaluation: Called with `steps` so far and each evaluation.

        Returns:
            All evaluations, the first of them before any training.

        Raises:
            LabelError: If either buffer has no labels, or `train` has safe or unsafe ones only.
            ValueError: If the buffers share a trajectory.
        """

    @abstractmethod
    def update(self, buffer: PreferenceBuffer, new: NDArray[np.integer]) -> dict[str, float]:
        """Take one online round: move the dead zone (Eq. 11), then learn from the labels.

        The dead zone moves by the labels of the new pairs and by what the model predicts of them
        before it has seen them, once it has been trained at all. While all labels in the buffer are
        on one side of the limit nothing is trained, and these pairs are new in the next round too;
        after three such rounds a warning says so.

        Args:
            buffer: All labelled pairs, the newest last.
            new: Positions of the newly labelled pairs, the last ones of the buffer, int (B,).

        Returns:
            Empty if no pair is new. Else `violation_gap`, P̂ - P in [-1, 1], and `violation_rate`,
            P in [0, 1], both NaN if no new member has a safety label; and `finetune_loss`, mean
            total loss in nats, if the model was trained.

        Raises:
            ValueError: If `new` are not the last pairs.
        """

    def evaluate(self, buffer: PreferenceBuffer) -> Evaluation:
        """Score a buffer's labelled pairs without training."""
        batch = buffer.batch(np.arange(len(buffer)))
        return evaluation_of(self._excess(batch), batch, dead_zone=self.dead_zone.value)

    def violation_rates(
        self, buffer: PreferenceBuffer, indices: NDArray[np.integer]
    ) -> tuple[float, float]:
        """Return P̂ and P of the dead-zone update (Eq. 11) over the members of some pairs.

        Args:
            buffer: Labelled pairs.
            indices: Positions of the pairs to use, int (B,).

        Returns:
            Share that the model judges unsafe and share that was labelled so, over the members that
            have a safety label; both NaN if none has.
        """
        batch = buffer.batch(indices)
        labelled = ~batch.safe.isnan()
        cost = self._excess(batch)[batch.pairs]
        return _mean((cost > 0)[labelled]), _mean((batch.safe < 0.5)[labelled])

    def _check_new(self, buffer: PreferenceBuffer, new: NDArray[np.integer]) -> None:
        start = len(buffer) - len(new)
        if start < 0 or not np.array_equal(new, np.arange(start, len(buffer))):
            raise ValueError(
                f"new pairs are the last ones of the buffer, which has {len(buffer)}, got the "
                f"positions {np.asarray(new).tolist()!r:.200}; update after each labelling round"
            )

    def can_learn(self, buffer: PreferenceBuffer) -> bool:
        """Whether the labels say enough: whether there are some on both sides of the limit."""
        return buffer.is_trainable

    def _loss(self, cost: Tensor, batch: PairBatch) -> Tensor:
        first, second = cost[batch.pairs].unbind(dim=1)
        return pbci_loss(
            first,
            second,
            batch.preference,
            *batch.safe.unbind(dim=1),
            dead_zone=self.dead_zone.value,
            snr_weight=self._snr_weight,
            max_std=self._max_std,
        ).total

    def _excess(self, batch: PairBatch) -> Tensor:
        """C_ψ minus the learned limit of the unique trajectories, float64 (U,)."""
        # The members' mean: pessimism is a margin on purpose, not an error to be trained away.
        return torch.from_numpy(self.model.member_scores(batch.trajectories)).mean(dim=0)

    def _check_split(self, train: PreferenceBuffer, valid: PreferenceBuffer) -> None:
        shared = set(map(id, train.trajectories)) & set(map(id, valid.trajectories))
        if shared:
            raise ValueError(
                "the trajectories that decide when to stop must be new to the model, but "
                f"{len(shared)} of the {len(valid.trajectories)} to validate on are trained on, "
                "too; split the trajectories, not the pairs, into two buffers"
            )
        self._check_labels(train)
        self._warn_of_lengths(train)
        self._warn_of_marks(train)

    def _check_labels(self, buffer: PreferenceBuffer) -> None:
        if buffer.is_trainable or not self.can_learn(buffer):
            buffer.check_trainable()  # which warns of contradictions, too

    def _warn_of_one_side(self, buffer: PreferenceBuffer) -> None:
        """After a few rounds: a loop would otherwise go on without a learned cost, silently."""
        if self.can_learn(buffer):
            return
        self._rounds_in_vain += 1
        if self._rounds_in_vain < _ROUNDS_IN_VAIN:
            return
        num_safe, num_unsafe = buffer.num_safety_labels
        if num_safe + num_unsafe:
            side = "safe" if num_safe else "unsafe"
            found = f"all {num_safe + num_unsafe} safety labels of {len(buffer)} pairs are {side}"
        else:
            found = f"none of {len(buffer)} pairs has a safety label"
        self._warn_once(
            RuntimeWarning,
            f"a limit lies between safe and unsafe trajectories, but {found}, and nothing has been "
            f"learned in {self._rounds_in_vain} rounds; have episodes of both kinds labelled "
            "before training, or check by what limit they are called safe",
        )

    def _warn_of_marks(self, buffer: PreferenceBuffer) -> None:
        is_marked = any(one is not None for both in buffer.stretches for one in both)
        if is_marked and not self._reads_marks:
            self._warn_once(
                UserWarning,
                "single steps are marked as unsafe, but only trees learn from them, and this is a "
                "network: it learns from the other answers; take a TreeCost and a TreeTrainer",
            )

    def _warn_of_lengths(self, buffer: PreferenceBuffer) -> None:
        members, safe = buffer.labelled_pairs, buffer.labels[:, 1:]
        judged = np.unique(members[~np.isnan(safe)]).tolist()  # others set no limit
        if not judged:
            return
        lengths, horizon = [len(buffer.trajectories[i]) for i in judged], self.model.horizon
        shortest, longest = min(lengths), max(lengths)
        # Longer ones are refused when they are scored.
        if horizon is not None and shortest == longest < horizon:
            self._warn_once(
                RuntimeWarning,
                "a limit is learned for the steps that the labels are about, but all "
                f"{len(lengths)} trajectories have {longest} steps, and the model a horizon of "
                f"{horizon}; if they are segments, use a model with horizon={longest}, and "
                "prorate() when it is trained",
            )
        if shortest < longest and self._pays_for_length:
            self._warn_once(
                UserWarning,
                f"episodes differ in length, from {shortest} to {longest} steps, and a step may "
                "have a negative learned cost: an agent may then pay for unsafe steps by ending "
                "its episodes later, or avoid the limit by ending them early; if it can, fill "
                "up ended episodes to the time limit (docs/environments.md)",
            )

    @property
    def _pays_for_length(self) -> bool:
        """Whether harmless steps have a negative cost: then a longer episode is a safer one."""
        return self.model.learned_limit == 0

    def _warn_of_runaway(self, cost_std: float) -> None:
        # Above `max_std` the variance term has no gradient. Separable labels alone may spread the
        # costs further, but ever more slowly, and that is no fault.
        if self._max_std is None and self._snr_weight > 0 and cost_std > _RUNAWAY_STD:
            self._warn_once(
                RuntimeWarning,
                "the variance term has no lower bound, and the learned costs are running away: "
                f"sd(C) = {cost_std:.1f} is above {_RUNAWAY_STD:.0f}, and held-out labels gain "
                "nothing by it; set max_std, or lower snr_weight",
            )

    def _warn_once(self, category: type[Warning], message: str) -> None:
        kind = message.split(",")[0]  # before any number
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, category, stacklevel=4)


class CostModelTrainer(Trainer):
    """Adam on the PbCI loss (Eq. 5) of labelled pairs, for a `CostModel` or several of them.

    The members of an ensemble are trained side by side, each on its own bootstrap resample of the
    trajectories: a member has each of them as often as a Poisson variable of mean 1 says, once for
    all. What is measured is the mean of the members, since pessimism is a margin and no error.

    Args:
        model: Trained in place.
        dead_zone: δ of Eq. 8; fixed in pretraining, moved by `update` online. A number is a fixed
            one; None is `DeadZone()`.
        snr_weight: ζ of Eq. 9.
        max_std: sd(C_ψ) at which the variance term stops pulling; None is the paper's bare Eq. 9.
        lr: Adam's step size.
        batch_size: Pairs per gradient step.
        bf16: Whether gradient steps compute the network in bfloat16. Sums over time, losses,
            weights and Adam keep the weights' own precision, and so does all scoring without
            training: `evaluate`, metrics, and the wrapper that charges a policy afterwards.
        rng: Order of the pairs.

    Raises:
        TypeError: If `model` is no `LearnedCost`.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        model: LearnedCost,
        *,
        rng: np.random.Generator,
        dead_zone: DeadZone | float | None = None,
        snr_weight: float = 1e-3,
        max_std: float | None = 5.0,
        lr: float = 3e-3,
        batch_size: int = 128,
        bf16: bool = False,
    ) -> None:
        super().__init__(model, dead_zone=dead_zone, snr_weight=snr_weight, max_std=max_std)
        if not list(model.parameters()):
            raise TypeError(
                f"Adam trains weights, but a {type(model).__name__} has none; trees are grown by a "
                "TreeTrainer"
            )
        require_in("[1, inf)", batch_size=batch_size)
        require_in("[0, inf)", lr=lr)
        self._batch_size = batch_size
        self._bf16 = bf16
        self._lr = lr
        self._optimizer = self._new_optimizer()
        self._rng = rng

    def gradient_step(self, batch: PairBatch) -> float:
        """Take one Adam step on a batch; return the total loss before it, in nats.

        Of an ensemble, the mean of its members' losses, each over its resample.
        """
        cost, backward = self._scored(batch.trajectories)
        cost.requires_grad_()  # (M, U)
        resamples = bootstrapped(batch, self.model.num_members)
        losses = [self._loss(*member) for member in zip(cost, resamples, strict=True)]
        loss = torch.stack(losses).sum()  # each member has the gradient of its own
        (cost_grad,) = torch.autograd.grad(loss, cost)
        self._optimizer.zero_grad(set_to_none=True)
        backward(cost_grad)
        self._optimizer.step()
        self.steps += 1
        return loss.item() / len(cost)

    def pretrain(
        self,
        train: PreferenceBuffer,
        valid: PreferenceBuffer,
        *,
        max_epochs: int = 200,
        patience: int = 10,
        on_evaluation: Callable[[int, Evaluation], None] | None = None,
    ) -> list[Evaluation]:
        """Train until the held-out loss has stopped falling; restore the best weights.

        That loss is evaluated ten times per epoch, though not more often than every ten steps.
        The two buffers must share no trajectory: splitting by pairs would leak. Ctrl-C ends the
        training early, and the best weights so far are kept.

        Args:
            train: Pairs to learn from.
            valid: Pairs that decide when to stop, by `Evaluation.selection_loss`.
            max_epochs: Passes over `train` at most.
            patience: Evaluations without a new best before training stops.
            on_evaluation: Called with the number of gradient steps so far and each evaluation.

        Returns:
            All evaluations, the first of them before any training.

        Raises:
            LabelError: If either buffer has no labels, or `train` has safe or unsafe ones only.
            ValueError: If `patience` is below 1, or the buffers share a trajectory.
        """
        require_in("[1, inf)", patience=patience)
        self._check_split(train, valid)
        valid.check_labelled()
        best = self.evaluate(valid)
        history, best_weights, since_best, steps = [best], self._weights(), 0, 0
        if on_evaluation is not None:
            on_evaluation(steps, best)
        try:
            for _ in range(max_epochs):
                order = self._rng.permutation(len(train))
                batches = np.array_split(order, math.ceil(len(order) / self._batch_size))
                for indices in batches:
                    self.gradient_step(train.batch(indices))
                    steps += 1
                    last = steps == max_epochs * len(batches)
                    if steps % max(10, len(batches) // 10) and not last:
                        continue
                    evaluation = self.evaluate(valid)
                    history.append(evaluation)
                    # Kept before it is reported: the callback may be where Ctrl-C arrives.
                    if evaluation.selection_loss < best.selection_loss:
                        best, best_weights, since_best = evaluation, self._weights(), 0
                    else:
                        since_best += 1
                        self._warn_of_runaway(evaluation.cost_std)
                    if on_evaluation is not None:
                        on_evaluation(steps, evaluation)
                    if since_best >= patience:
                        return history
            return history
        finally:
            self.model.load_state_dict(best_weights)
            # The moments belong to the steps after the best, which have just been undone.
            self._optimizer = self._new_optimizer()

    def update(
        self,
        buffer: PreferenceBuffer,
        new: NDArray[np.integer],
        *,
        epochs: int = 5,
        lr: float | None = None,
        balanced: bool = False,
    ) -> dict[str, float]:
        """Take one online round: move the dead zone (Eq. 11), then fine-tune (Eq. 10).

        The dead zone moves by the labels of the new pairs and by what the model predicts of them
        before it has seen them, once it has been trained at all. While all labels in the buffer are
        on one side of the limit nothing is trained, and these pairs are new in the next round too;
        after three such rounds a warning says so. A trainer that has taken no gradient step fits
        the input scale first, on all trajectories of the buffer.

        Args:
            buffer: All labelled pairs, the newest last.
            new: Positions of the newly labelled pairs, the last ones of the buffer, int (B,).
            epochs: As of `finetune`.
            lr: As of `finetune`.
            balanced: As of `finetune`.

        Returns:
            Empty if no pair is new. Else `violation_gap`, P̂ - P in [-1, 1], and `violation_rate`,
            P in [0, 1], both NaN if no new member has a safety label; and `finetune_loss`, mean
            total loss in nats, if the model was trained.

        Raises:
            ValueError: If `new` are not the last pairs, or `lr` is out of range.
        """
        self._check_new(buffer, new)
        if not len(new):
            return {}
        if not self.steps and not self.model.has_input_scale:
            self.model.fit_input_scale(buffer.trajectories)
        self.num_untuned += len(new)
        predicted, labelled = self.violation_rates(buffer, new)
        if self.steps and math.isfinite(labelled):
            self.dead_zone.update(predicted, labelled)
        measured = {"violation_gap": predicted - labelled, "violation_rate": labelled}
        self._warn_of_one_side(buffer)
        if buffer.is_trainable:
            measured["finetune_loss"] = self.finetune(
                buffer, num_new=self.num_untuned, epochs=epochs, lr=lr, balanced=balanced
            )
            self.num_untuned = 0
        return measured

    def finetune(
        self,
        buffer: PreferenceBuffer,
        *,
        num_new: int,
        epochs: int = 5,
        lr: float | None = None,
        balanced: bool = False,
    ) -> float:
        """Train on the newest labels, each batch half new and half old ones, or on all of them.

        Args:
            buffer: All labelled pairs, the newest last.
            num_new: How many of the last pairs are new, at least 1.
            epochs: Passes over the new pairs.
            lr: Adam's step size in these steps; None is the trainer's.
            balanced: Whether each batch is drawn from all pairs instead, new and old, so that safe
                and unsafe members are equally frequent (`PreferenceBuffer.balanced_weights`):
                where the new ones are nearly all safe, the few unsafe ones of this and of earlier
                rounds say which steps cost. There are as many batches as otherwise.

        Returns:
            Mean total loss of the gradient steps, in nats; NaN if there are none.

        Raises:
            LabelError: If the buffer has no labels, or safe or unsafe ones only.
            ValueError: If `num_new` is not within the buffer, or `lr` is out of range.
        """
        lr = self._lr if lr is None else lr
        require_in("[0, inf)", lr=lr)
        buffer.check_trainable()
        self._warn_of_lengths(buffer)
        self._warn_of_marks(buffer)
        if not 1 <= num_new <= len(buffer):
            raise ValueError(f"num_new must lie in 1..{len(buffer)} (the buffer), got {num_new}")
        num_old = len(buffer) - num_new
        num_batches = min(
            math.ceil(2 * num_new / self._batch_size), num_new
        )  # no batch without a new pair
        weights = buffer.balanced_weights(len(buffer)) if balanced else None
        losses = []
        self._set_lr(lr)
        try:
            for _ in range(epochs):
                new = num_old + self._rng.permutation(num_new)
                for part in np.array_split(new, num_batches):
                    if weights is not None:
                        pairs = self._rng.choice(len(buffer), size=2 * len(part), p=weights)
                    else:
                        old = self._rng.integers(num_old, size=len(part) if num_old else 0)
                        pairs = np.concatenate([part, old])
                    losses.append(self.gradient_step(buffer.batch(pairs)))
        finally:
            self._set_lr(self._lr)
        return float(np.mean(losses)) if losses else math.nan

    def state_dict(self) -> dict[str, Any]:
        """What training has changed besides the model: Adam's moments, the counts, δ.

        The generator is the caller's, and so is the model; save their states beside this one.
        """
        return {
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "num_untuned": self.num_untuned,
            "dead_zone": self.dead_zone.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, with the model as it was then.

        Raises:
            ValueError: If the state is that of another model's trainer.
        """
        self._optimizer.load_state_dict(state["optimizer"])
        self._lr = self._optimizer.param_groups[0]["lr"]
        self.steps, self.num_untuned = state["steps"], state["num_untuned"]
        self.dead_zone.value = state["dead_zone"]

    def _scored(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Costs above the limit (M, U), and what carries their gradient, alike, to the weights."""
        chunks = chunks_of(trajectories)
        if len(chunks) <= 1:
            graph = self._member_excess(trajectories)
            return graph.detach().cpu(), lambda grad: _backward(graph, grad)
        with torch.no_grad():
            costs = [self._member_excess(trajectories[chunk]) for chunk in chunks]

        def score_again(grad: Tensor) -> None:
            for chunk in chunks:
                _backward(self._member_excess(trajectories[chunk]), grad[:, chunk])

        return torch.cat(costs, dim=1).cpu(), score_again

    def _member_excess(self, trajectories: Sequence[Trajectory]) -> Tensor:
        device = next(self.model.parameters()).device.type
        # Without a cache, which within a caller's autocast would outlive the step and its weights.
        with torch.autocast(device, torch.bfloat16, self._bf16, cache_enabled=False):
            return self.model.member_excess(*padded(trajectories))

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self._lr)

    def _set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def evaluation_of(cost: Tensor, batch: PairBatch, *, dead_zone: float) -> Evaluation:
    """Hold costs above the limit, float64 (U,), of a batch's trajectories against its labels."""
    cost = cost[batch.pairs]  # (B, 2)
    first, second = cost.unbind(dim=1)
    terms = pbci_loss(
        first,
        second,
        batch.preference,
        *batch.safe.unbind(dim=1),
        dead_zone=dead_zone,
        snr_weight=0.0,
    )
    strict = ~batch.preference.isnan() & (batch.preference != 0.5)
    agreement = (torch.sign(second - first) * torch.sign(batch.preference - 0.5) + 1) / 2
    labelled = ~batch.safe.isnan()
    judged = (cost <= 0) == (batch.safe > 0.5)
    return Evaluation(
        preference_loss=float(terms.preference),
        safety_loss=float(terms.safety),
        pair_accuracy=_mean(agreement[strict]),
        safety_accuracy=_mean(judged[labelled]),
        cost_std=float(cost.std(unbiased=False)) if len(cost) else math.nan,
    )


def bootstrapped(batch: PairBatch, num_members: int) -> list[PairBatch]:
    """A resample of the pairs for each member; the batch itself if there is only one.

    What is resampled are the trajectories, which are far fewer than the pairs: of resampled pairs
    every member would see nearly all trajectories nearly equally often, and the members would agree
    where they should not. How often a member has a trajectory is Poisson distributed with mean 1,
    and follows from the trajectory's position in its buffer, so that it stays the same; a pair
    counts as often as its first times its second.
    """
    if num_members == 1:
        return [batch]
    size = 1 << int(batch.numbers.max()).bit_length()
    resamples = []
    for member in range(num_members):
        copies = torch.from_numpy(poisson_counts(member, size))[batch.numbers]
        count = copies[batch.pairs].prod(dim=1)
        rows = torch.repeat_interleave(torch.arange(len(batch)), count)
        resamples.append(
            PairBatch(
                trajectories=batch.trajectories,
                pairs=batch.pairs[rows],
                preference=batch.preference[rows],
                safe=batch.safe[rows],
                numbers=batch.numbers,
            )
        )
    return resamples


@lru_cache(maxsize=64)
def poisson_counts(member: int, size: int) -> NDArray[np.int64]:
    """How often a member has each trajectory, (size,).

    A longer array begins with a shorter one, since the draws are made one after another.
    """
    counts: NDArray[np.int64] = np.random.default_rng([0xB007, member]).poisson(1.0, size)
    return counts


def _backward(cost: Tensor, grad: Tensor) -> None:
    cost.backward(grad.to(cost.device))


def _mean(shares: Tensor) -> float:
    return float(shares.double().mean()) if len(shares) else math.nan
