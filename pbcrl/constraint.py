"""What moves λ: a number that a constraint measures in each iteration, and the highest allowed.

Three constraints: on the mean learned cost (the paper), on the share of fresh episodes that are
labelled unsafe, and on the answers about batches of them. Each returns what
`LagrangeMultiplier.update` takes: λ rises while the first number is above the second, and stays if
the first is None. Does not depend on environments, and computes no cost itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, final

import numpy as np
from numpy.typing import NDArray

from pbcrl.feedback import Answers


class Constraint(Protocol):
    """What a training loop needs of whatever moves λ."""

    @property
    def batch(self) -> int:
        """Episodes of the batch that a labelling round shows, for `FeedbackLoop.round`; 0: none."""
        ...

    @property
    def by_labels(self) -> bool:
        """Whether it measures labels of fresh episodes, and not learned costs."""
        ...

    def measure(
        self,
        answers: Answers,
        learned_costs: NDArray[np.float64],
        learned_limit: float,
        *,
        by_marks: bool = False,
    ) -> tuple[float | None, float]:
        """Return what an iteration measured and what is allowed, for `LagrangeMultiplier.update`.

        Args:
            answers: Of the iteration's labelling round; `Answers()` if there was none.
            learned_costs: Ĉ(τ) of the episodes that ended in it, (N,); N may be 0.
            learned_limit: The limit of the cost model, in units of these.
            by_marks: Whether it was fitted to marks (`Trainer.fits_marks`), so that learned costs
                tell how much an episode costs, and not only which cost more.

        Returns:
            The measure, None if nothing was measured; the highest one allowed.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that its measures will depend on, as plain numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        ...


class _Stateless:
    """What remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as before."""


@final
@dataclass(frozen=True)
class LearnedLimit(_Stateless):
    """The mean learned cost must not exceed the learned limit: the constraint of the paper.

    It is measured in every iteration in which an episode ends.
    """

    batch: ClassVar[int] = 0  # it needs pairs alone
    by_labels: ClassVar[bool] = False

    def measure(
        self,
        answers: Answers,  # noqa: ARG002 - the cost model has learned from them
        learned_costs: NDArray[np.float64],
        learned_limit: float,
        *,
        by_marks: bool = False,  # noqa: ARG002
    ) -> tuple[float | None, float]:
        """The mean learned cost of the episodes, None without any; and the learned limit."""
        return float(learned_costs.mean()) if len(learned_costs) else None, learned_limit


@final
@dataclass
class UnsafeRate:
    r"""The share of fresh episodes that are unsafe must not exceed p*, by labels of some of them.

    A few labels tell a share badly; a model judges every episode, and errs. So its judgement of all
    that ended in an iteration is corrected by how often it was right, and how often it missed what
    is unsafe, among labelled ones, before it learned from them (post-stratification). With s the
    share that it calls unsafe, Ĉ > b:

    .. math::
        P = s \frac{found + 1}{found + false\ alarms + 1}
        + (1 - s) \frac{missed}{missed + called\ safe\ rightly + 3}

    Found and false alarms were called unsafe, and labels said unsafe and safe. The counts are of
    recent labels: a weight fades in some fifty iterations, and while twenty newer labels come, or
    2 / p* where that is more, as a small share takes more labels to tell. One label more finds the
    model right in what it calls unsafe, and `PRIOR` more in what it calls safe, so that the first
    labels do not say more than they can. The fewer labels, the more P leans on the model. While no
    model has judged labelled episodes, P is their share, in labelling rounds alone. An unsafe label
    that surprised the model counts once a second look confirmed it (`FeedbackLoop`): or P could not
    fall below the share of labels that are wrong.

    Where episodes are alike, P is 0 or 1, and a price that follows it swings a policy between
    haste and standing still. So λ falls no faster than learned costs are below their limit b, but
    at least half as fast as P asks. With Q the learned cost that at most p* of the episodes
    exceed, the measure is

    .. math:: p^* (1 + \max(e, \min(g, e / 2))), \quad e = P / p^* - 1, \quad g = Q / b - 1

    where e is negative and b positive, and P elsewhere: a network's limit is 0.

    A share says nothing of how bad unsafe episodes are, and a policy that may be unsafe in one
    episode of twenty can cost many times the limit in the mean. By marks it is known how bad: then
    the mean learned cost must be within b, too: with m its ratio to b - 1, the measure is at least
    p* (1 + m), and p* (1 + m / 5) where that is more than p*. The model alone says so, and while it
    does not know what is unsafe a price that it raises is of no use.

    Args:
        max_rate: p*, in (0, 1).

    Raises:
        ValueError: If it is out of range.
    """

    max_rate: float
    judged: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((2, 2)), init=False, repr=False, compare=False
    )
    """As `Answers.judged`, by weight."""
    batch: ClassVar[int] = 0  # it needs pairs alone
    by_labels: ClassVar[bool] = True
    KEPT: ClassVar[float] = 0.98  # of the weight of a label, an iteration later
    PRIOR: ClassVar[float] = 3.0  # labels

    def __post_init__(self) -> None:
        if not 0 < self.max_rate < 1:
            raise ValueError(
                f"the highest share of unsafe episodes lies in (0, 1), got {self.max_rate}; at 0 λ "
                "would rise for ever, at 1 never"
            )

    def measure(
        self,
        answers: Answers,
        learned_costs: NDArray[np.float64],
        learned_limit: float,
        *,
        by_marks: bool = False,
    ) -> tuple[float | None, float]:
        """What stands for P, with late labels, None if no episode tells; and p*."""
        memory = max(20, 2 / self.max_rate)
        kept = self.KEPT * math.exp(-answers.judged.sum() / memory)
        self.judged = kept * self.judged + answers.judged
        if not self.judged.any():
            return answers.unsafe_rate, self.max_rate
        if not len(learned_costs):
            return None, self.max_rate
        (called_safe, missed), (false_alarms, found) = self.judged.tolist()
        right = (found + 1) / (false_alarms + found + 1)
        wrong = missed / (called_safe + missed + self.PRIOR)
        called_unsafe = float((learned_costs > learned_limit).mean())
        excess = (called_unsafe * right + (1 - called_unsafe) * wrong) / self.max_rate - 1
        if excess < 0 < learned_limit:
            cost = float(np.quantile(learned_costs, 1 - self.max_rate, method="higher"))
            excess = max(excess, min(cost / learned_limit - 1, excess / 2))
        if by_marks and learned_limit > 0:
            mean_excess = float(learned_costs.mean()) / learned_limit - 1
            excess = max(excess, mean_excess / 5 if mean_excess > 0 else mean_excess)
        return self.max_rate * (1 + excess), self.max_rate

    def state_dict(self) -> dict[str, Any]:
        """How the model's judgements and the labels agreed."""
        return {"judged": self.judged.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.judged = np.array(state.get("judged", np.zeros((2, 2))))  # older: none


@final
@dataclass(frozen=True)
class Acceptance(_Stateless):
    """The mean cost of a batch of fresh episodes must be within the limit, as whoever labels says.

    The measure is 1 if the batch was rejected and 0 if it was accepted, against 0.5. So λ settles
    where both come equally often: where the mean true cost is at the limit. It is measured in the
    labelling rounds in which an answer comes.

    Args:
        batch: Episodes in a batch, at least 10, since the mean of fewer says little about a policy.

    Raises:
        ValueError: If it is smaller.
    """

    batch: int
    by_labels = True

    def __post_init__(self) -> None:
        if self.batch < 10:
            raise ValueError(
                "a batch that stands for a policy has at least 10 episodes, got "
                f"batch={self.batch}; take 10 or more, or constrain by UnsafeRate"
            )

    def measure(
        self,
        answers: Answers,
        learned_costs: NDArray[np.float64],  # noqa: ARG002 - labels alone count
        learned_limit: float,  # noqa: ARG002
        *,
        by_marks: bool = False,  # noqa: ARG002
    ) -> tuple[float | None, float]:
        """1 rejected, 0 accepted, None without an answer, a late one included; and 0.5."""
        if answers.batch is None or math.isnan(answers.batch.safe):
            return None, 0.5
        return 1.0 - answers.batch.safe, 0.5
