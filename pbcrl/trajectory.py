"""The data that flows through the package: trajectories, questions about them, answers.

A *trajectory* is one whole episode; a *query* shows two of them to an oracle; a *label* is its
answer. A *batch* shows many at once, and a *batch label* is its answer. Does not depend on
environments, models or losses.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pbcrl.errors import MissingCostError, NonFiniteError, require_in

FloatArray = NDArray[np.float32]
ObsArray = NDArray[np.float32] | NDArray[np.uint8]
NumberArray = NDArray[Any]  # of any dtype when it is given


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished episode of T >= 1 steps; the arrays share the leading axis T.

    The cost model reads (s_t, a_t) pairs only. Rewards, how the episode ended and its final
    observation are for other learners and their file formats: all three are there, or none. float32
    input is kept without a copy (so a memory-mapped array stays on disk), and so are uint8
    observations; other dtypes are cast to float32.

    Raises:
        TypeError: If an array does not hold numbers.
        ValueError: If the shapes do not fit each other, there is no step, a cost is negative, or
            only some of rewards, `terminated` and `final_obs` are there.
        NonFiniteError: If any entry is NaN or infinite, also after the cast to float32.
    """

    obs: NumberArray
    """s_t as the raw env returned it, before any normalisation: float32 or uint8 (T, *obs_shape),
    where obs_shape is (obs_dim,) for flat rows (`obs_rows`) and (H, W, C) for images."""
    actions: NumberArray
    """a_t as the env executed it, clipped to its bounds and flat (`action_rows`): float32 (T,
    act_dim)."""
    costs: NumberArray | None = None
    """True cost per step, >= 0. Only the oracle and the metrics may read it. float32 (T,)."""
    rewards: NumberArray | None = None
    """Reward per step, float32 (T,)."""
    terminated: bool | None = None
    """Whether the last step ended the episode in the env, as against cutting it off (a time limit,
    or the end of a segment)."""
    final_obs: NumberArray | None = None
    """s_T, what the last step led to, of the dtype of `obs`: (*obs_shape,)."""

    def __post_init__(self) -> None:
        obs = _checked_obs(self.obs)
        arrays = {"obs": obs, "actions": _as_float32("actions", self.actions, ndim=2)}
        for name in ("costs", "rewards"):
            if getattr(self, name) is not None:
                arrays[name] = _as_float32(name, getattr(self, name), ndim=1)
        if "costs" in arrays and (arrays["costs"] < 0).any():
            step = int(np.argmax(arrays["costs"] < 0))
            raise ValueError(
                f"a true cost must be >= 0, got {arrays['costs'][step]} at step {step} of a "
                "trajectory; count a bonus in the rewards instead"
            )
        if not len(obs) or {len(array) for array in arrays.values()} != {len(obs)}:
            found = ", ".join(f"{len(array)} of {name}" for name, array in arrays.items())
            raise ValueError(
                f"a trajectory has one row per step in each array, and at least one step: got "
                f"{found}; drop the final observation if you kept it, and skip empty episodes"
            )
        if self.final_obs is not None:
            arrays["final_obs"] = _checked_obs(np.asarray(self.final_obs)[None])[0]
        for name, array in arrays.items():
            object.__setattr__(self, name, array)
        self._check_outcome()

    def _check_outcome(self) -> None:
        outcome = self.rewards, self.terminated, self.final_obs
        if all(part is None for part in outcome):
            return
        if self.rewards is None or self.terminated is None or self.final_obs is None:
            raise ValueError(
                "a trajectory has rewards, terminated and final_obs, or none of them, got only "
                "some; give the others too"
            )
        last = self.final_obs
        if (last.shape, last.dtype) != (self.obs.shape[1:], self.obs.dtype):
            raise ValueError(
                "final_obs must be an observation like the others, "
                f"{self.obs.dtype} {self.obs.shape[1:]}, got {last.dtype} {last.shape}; give what "
                "the last step returned, flat if they are"
            )
        object.__setattr__(self, "terminated", bool(self.terminated))

    def __len__(self) -> int:
        """T, the number of steps."""
        return len(self.obs)

    @property
    def layout(self) -> tuple[tuple[int, ...], int, str]:
        """obs_shape, act_dim and the dtype of obs: what trajectories share that fit together."""
        return self.obs.shape[1:], self.actions.shape[1], self.obs.dtype.name

    @property
    def true_cost(self) -> float:
        """C(τ), the undiscounted sum of the true step costs, summed in float64.

        Raises:
            MissingCostError: If the trajectory was recorded without costs.
        """
        if self.costs is None:
            raise MissingCostError(
                "a true episode cost needs the true cost of every step, but this trajectory has "
                "costs=None; record an env that reports info['cost'], or have a person label it"
            )
        return float(self.costs.sum(dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Query:
    """One question to an oracle: which of two trajectories is safer, and is each of them safe."""

    first: Trajectory
    """τ_1."""
    second: Trajectory
    """τ_2."""


Stretches = tuple[tuple[int, int], ...]
"""Steps of a trajectory, each stretch from its first step to before its last number."""


@dataclass(frozen=True)
class Label:
    """The answer to one query; NaN stands for "not given", so `Label(1.0)` is a preference alone.

    Raises:
        TypeError: If an answer is no number.
        ValueError: If `preference` is outside [0, 1], a safety label is neither 0, 1 nor NaN, or
            stretches are reversed, overlap, touch or are out of order.
    """

    preference: float
    """μ in [0, 1]: probability that the first trajectory is the safer one; 0.5 is a tie."""
    first_safe: float = math.nan
    """ε of the first trajectory: 1 safe, 0 unsafe."""
    second_safe: float = math.nan
    """ε of the second trajectory: 1 safe, 0 unsafe."""
    first_unsafe: Stretches | None = None
    """Which steps of the first trajectory are marked as unsafe, all others as not; () if none is,
    None if nobody was asked to mark them."""
    second_unsafe: Stretches | None = None
    """Of the second trajectory."""

    @property
    def unsafe(self) -> tuple[Stretches | None, Stretches | None]:
        """What is marked in both."""
        return self.first_unsafe, self.second_unsafe

    def __post_init__(self) -> None:
        for marked in self.unsafe:
            if marked is not None:
                check_stretches(marked)
        for name in ("preference", "first_safe", "second_safe"):
            value = getattr(self, name)
            try:
                given = not math.isnan(value)
            except TypeError:
                raise TypeError(
                    f"a label is made of numbers, but {name} is {value!r}; use math.nan for an "
                    "answer that was not given"
                ) from None
            if given and not (0 <= value <= 1 if name == "preference" else value in (0, 1)):
                raise ValueError(
                    "a preference must lie in [0, 1], where 1 says that the first trajectory is "
                    "the safer one, and a safety label be 1 (safe) or 0 (unsafe); NaN is not "
                    f"given: got {name}={value}"
                )


class Marks(NamedTuple):
    """A trajectory in which single steps are marked."""

    trajectory: Trajectory
    """T steps."""
    unsafe: NDArray[Any]
    """1 unsafe, 0 not, NaN unknown, (T,)."""


def unsafe_stretches(unsafe: ArrayLike) -> Stretches:
    """Return the stretches of steps that are true, or not 0, (T,)."""
    edges = np.flatnonzero(
        np.diff(np.asarray(unsafe, np.bool_).astype(np.int8), prepend=0, append=0)
    )
    return tuple((start, end) for start, end in edges.reshape(-1, 2).tolist())


def unsafe_steps(stretches: Stretches, steps: int) -> NDArray[np.bool_]:
    """Return which of so many steps are in the stretches, (T,)."""
    unsafe = np.zeros(steps, np.bool_)
    for start, end in stretches:
        unsafe[start:end] = True
    return unsafe


def stretches_of(stored: Iterable[Iterable[int]] | None) -> Stretches | None:
    """Return stretches as a `Label` has them, of lists, as JSON has them; None stays None."""
    return None if stored is None else tuple((start, end) for start, end in stored)


def check_stretches(stretches: Stretches, *, steps: int | None = None) -> None:
    """Refuse stretches that are none, or lie outside of a trajectory.

    Args:
        stretches: In order, apart from each other.
        steps: Of the trajectory, if it is known.

    Raises:
        TypeError: If they are not made of pairs of integers.
        ValueError: If one is empty or reversed, or ends before the one before has ended, or at its
            end, or one lies outside.
    """
    try:
        numbers = [operator.index(number) for start, end in stretches for number in (start, end)]
    except (TypeError, ValueError):
        raise TypeError(
            "unsafe stretches are pairs of steps, the first one and that after the last, got "
            f"{stretches!r:.200}; give ((start, end), ...), () if no step is unsafe"
        ) from None
    end = math.inf if steps is None else steps
    if min([0, *numbers]) < 0 or max([0, *numbers]) > end:
        remedy = "cut off what is outside; steps count from 0, and the end is the first safe one"
    elif any(a >= b for a, b in zip(numbers[::2], numbers[1::2], strict=True)):
        remedy = "give the first unsafe step, and the one after the last"
    elif any(a >= b for a, b in pairwise(numbers)):
        remedy = "put them in order, and join those that touch or overlap"
    else:
        return
    raise ValueError(
        "unsafe stretches lie within their trajectory, one after the other and apart, each from a "
        f"step to a later one; got {stretches!r:.200}"
        f"{'' if steps is None else f' of {steps} steps'}; {remedy}"
    )


@dataclass(frozen=True)
class GridLabel:
    """The answer about a grid of trajectories: is each of them safe.

    Raises:
        TypeError: If an answer is no number.
        ValueError: If there is none, or one is neither 0, 1 nor NaN.
    """

    safe: tuple[float, ...]
    """Of each, in the grid's order: 1 safe, 0 unsafe, NaN not given."""

    def __post_init__(self) -> None:
        try:
            are_answers = all(math.isnan(one) or one in (0, 1) for one in self.safe)
        except TypeError:
            raise TypeError(
                f"the label of a grid is made of numbers, but safe is {self.safe!r}; use math.nan "
                "for an answer that was not given"
            ) from None
        if not (are_answers and self.safe):
            raise ValueError(
                "the label of a grid has 1 (safe), 0 (unsafe) or NaN (not given) for each of its "
                f"trajectories, got {self.safe}; give one of these for each"
            )


@dataclass(frozen=True)
class BatchLabel:
    """The answer about a batch of episodes: whether their mean cost is within the limit.

    Raises:
        TypeError: If the answer is no number.
        ValueError: If it is neither 0, 1 nor NaN.
    """

    safe: float
    """1 mean cost within the limit, 0 above it, NaN no answer."""

    def __post_init__(self) -> None:
        try:
            is_answer = math.isnan(self.safe) or self.safe in (0, 1)
        except TypeError:
            raise TypeError(
                f"a batch label is a number, but safe is {self.safe!r}; use math.nan for an answer "
                "that was not given"
            ) from None
        if not is_answer:
            raise ValueError(
                "the label of a batch must be 1 (mean cost within the limit), 0 (above it) or NaN "
                f"(not given), got {self.safe}"
            )


AnyLabel = Label | BatchLabel | GridLabel
"""What an oracle answers: about a pair, or about a batch."""


@dataclass(frozen=True, eq=False)
class PairBatch:
    """B labelled pairs over U unique trajectories, so that a shared one is scored once."""

    trajectories: Sequence[Trajectory]
    """The U unique trajectories."""
    pairs: Tensor
    """Indices into `trajectories`, first and second. int64 (B, 2)."""
    preference: Tensor
    """μ, NaN where not given. float32 (B,)."""
    safe: Tensor
    """ε of the first and the second member, NaN where not given. float32 (B, 2)."""
    numbers: Tensor
    """Positions of the trajectories in their buffer, so that one is known again. int64 (U,)."""

    def __len__(self) -> int:
        """B, the number of pairs."""
        return len(self.pairs)


def cut_segments(trajectories: Sequence[Trajectory], length: int) -> list[Trajectory]:
    """Cut trajectories into segments of equal length, which are compared like wholes.

    Every step is in one, since what nobody sees, nobody calls unsafe. They are consecutive, and the
    last one ends where its trajectory does, since the last steps may tell why it ended; what is
    left over at the start is shown by one more, which overlaps the next. A trajectory that is no
    longer than `length` is one segment. A person can judge a few seconds better than a whole
    episode. As a limit d is per episode, a segment is called safe if it keeps to its share of it,
    d · length / horizon; a model that learns from such labels has the horizon `length`, until it is
    prorated, or none, if its limit is 0.

    Args:
        trajectories: Whole ones, of any lengths.
        length: Steps of a segment, >= 1.

    Returns:
        Segments in order, which share the memory of their trajectories.

    Warns:
        UserWarning: If all trajectories are shorter than `length`, so that nothing is cut.

    Raises:
        ValueError: If `length` is below 1.
    """
    require_in("[1, inf)", length=length)
    longest = max(map(len, trajectories), default=length)
    if longest < length:
        warnings.warn(
            f"segments must not be longer than the episodes: got length={length}, but the longest "
            f"of {len(trajectories)} episodes has {longest} steps, so each stays whole; choose a "
            "shorter length",
            UserWarning,
            stacklevel=2,
        )
    return [
        _segment(whole, start, min(start + length, len(whole)))
        for whole in trajectories
        for start in _segment_starts(len(whole), length)
    ]


def _segment_starts(steps: int, length: int) -> list[int]:
    return [max(0, end - length) for end in range(steps, 0, -length)][::-1]


def _segment(whole: Trajectory, start: int, end: int) -> Trajectory:
    steps, is_last = slice(start, end), end == len(whole)
    return Trajectory(
        whole.obs[steps],
        whole.actions[steps],
        None if whole.costs is None else whole.costs[steps],
        None if whole.rewards is None else whole.rewards[steps],
        None if whole.terminated is None else whole.terminated and is_last,
        whole.final_obs if whole.final_obs is None or is_last else whole.obs[end],
    )


def require_outcomes(trajectories: Sequence[Trajectory], what: str) -> None:
    """Refuse trajectories that were recorded without rewards, or none at all.

    Raises:
        ValueError: If so.
    """
    bare = sum(one.rewards is None for one in trajectories)
    if bare or not trajectories:
        raise ValueError(
            f"{what} needs trajectories with rewards, ends and final observations, but {bare} of "
            f"{len(trajectories)} were recorded without them; add them: Trajectory(..., rewards=, "
            "terminated=, final_obs=)"
        )


def pad(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack trajectories of different lengths, padded with zeros to the longest of them.

    Args:
        trajectories: B >= 1 trajectories with equal obs_shape, dtype of obs, and act_dim.

    Returns:
        obs (B, T, *obs_shape), uint8 if theirs are, actions (B, T, act_dim), and the bool mask
        (B, T), true on real steps.

    Raises:
        ValueError: If the sizes or the dtypes differ.
    """
    layout = trajectories[0].layout
    for trajectory in trajectories:
        if trajectory.layout != layout:  # NumPy would broadcast a single column
            raise ValueError(
                "trajectories must have the same sizes to be scored together: the first has "
                f"(obs_shape, act_dim, dtype) = {layout}, got {trajectory.layout}; use one cost "
                "model per environment"
            )
    lengths = torch.tensor([len(t) for t in trajectories])
    horizon = int(lengths.max())
    obs_shape, act_dim, dtype = layout
    shape = (len(trajectories), horizon)
    obs = torch.empty(*shape, *obs_shape, dtype=torch.uint8 if dtype == "uint8" else torch.float32)
    actions = torch.empty(*shape, act_dim)
    for rows, name in [(obs.numpy(), "obs"), (actions.numpy(), "actions")]:  # views
        for row, trajectory in zip(rows, trajectories, strict=True):
            row[: len(trajectory)] = getattr(trajectory, name)
            row[len(trajectory) :] = 0
    return obs, actions, torch.arange(horizon) < lengths[:, None]


def padded_chunks(
    trajectories: Sequence[Trajectory], *, max_rows: int = 16_000
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield trajectories in order as padded (obs, actions, mask), about `max_rows` steps at a time.

    The mask is None where nothing is padded.
    """
    for part in chunks_of(trajectories, max_rows=max_rows):
        yield padded(trajectories[part])


def chunks_of(trajectories: Sequence[Trajectory], *, max_rows: int = 16_000) -> list[slice]:
    """Cut trajectories into parts of about `max_rows` steps when padded.

    Small enough for the activations to stay in the CPU's cache and for memory to stay constant,
    however many trajectories there are: fewer steps if one holds more than 250 numbers.
    """
    if trajectories:
        max_rows = min(max_rows, max(1, 4_000_000 // math.prod(trajectories[0].obs.shape[1:])))
    parts, start, longest = [], 0, 0
    for i, trajectory in enumerate(trajectories):
        longest = max(longest, len(trajectory))
        if i > start and longest * (i + 1 - start) > max_rows:
            parts.append(slice(start, i))
            start, longest = i, len(trajectory)
    return [*parts, slice(start, len(trajectories))] if trajectories else parts


def padded(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stack trajectories by `pad`, with None in place of a mask that is true throughout."""
    obs, actions, mask = pad(trajectories)
    return obs, actions, None if bool(mask.all()) else mask


def _checked_obs(array: object) -> ObsArray:
    given = np.asarray(array)
    if given.dtype == np.uint8 and given.ndim >= 2:
        return given
    return _as_float32("obs", given, ndim=max(given.ndim, 2))


def _as_float32(name: str, array: object, *, ndim: int) -> FloatArray:
    given = np.asarray(array)
    if given.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be an array of numbers, got dtype {given.dtype}")
    if given.ndim != ndim:
        shape, remedy = ("(T, dim)", "flatten each step to one row")
        if ndim == 1:
            shape, remedy = ("(T,)", "give one number per step")
        raise ValueError(
            f"{name} of a trajectory must have shape {shape}, got {given.shape}; {remedy}"
        )
    with np.errstate(over="ignore"):  # what overflows is refused just below
        cast: FloatArray = given.astype(np.float32, copy=False)
    if not np.isfinite(cast).all():
        raise NonFiniteError(
            f"{name} of a trajectory must be finite, got {int((~np.isfinite(cast)).sum())} NaN or "
            "infinite entries; find the step that produced them, or drop this episode"
        )
    return cast
