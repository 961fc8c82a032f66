"""From the steps of environments to whole episodes, single and vectorised, without a cost model.

Gymnasium returns the last step of an episode in different places, depending on how the envs
reset themselves; what reads `infos` here hides that. Does not depend on models, labels or training.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbcrl.errors import MissingCostError, NonFiniteError, require_in
from pbcrl.trajectory import FloatArray, Trajectory

BoolArray = NDArray[np.bool_]

RESET_FIRST = (
    "an episode starts with reset(), but step() was called before it or after an error "
    "within an episode; call reset()"
)
"""What a wrapper that records says before the first reset."""
CLIPPED = (
    "an action should lie within the bounds of the action space, got one outside; it is clipped, "
    "for the env too, so that what is recorded is what was executed, and later ones are clipped "
    "silently; put {module}.ClipAction outside this wrapper to clip on purpose"
)
"""What it warns of once; `module` is that of the kind of env."""
NOT_FIVE = (
    "step() returns (obs, reward, terminated, truncated, info), with the cost in info['cost'], but "
    "this env's returns {count} values; envs of the real Safety-Gymnasium are made by "
    "pbcrl_envs.upstream.make(id), others need a wrapper that puts the cost into the info"
)
"""What it says to an env that returns the cost as a value of its own."""
RECORDED_TWICE = (
    "an env takes one preference-cost wrapper, or one RecordTrajectories, but one inside it "
    "records already, so that its info['cost'] is no true cost; wrap the single envs or the vector "
    "env, not both"
)
"""What it says of envs that hand out trajectories already."""
NORMALISED = (
    "what is recorded and scored must be observations in a fixed scale, not one that drifts with "
    "running statistics, but {inside} is inside this wrapper; put {outside} outside of it"
)
"""What it says of envs that normalise observations inside it."""
_FIX = {
    "obs": "fix the env, or end its episode before this; call reset() to go on",
    "reward": "fix the env, or end its episode before this; call reset() to go on",
    "cost": "fix the env's info['cost']; call reset() to go on",
}
_FIRST_CAPACITY = 128
_ENDLESS = 100_000  # steps
_MANY_RESETS = 10


def finished_trajectories(infos: Mapping[str, Any]) -> list[Trajectory]:
    """Return the episodes that ended in this step, in the order of their environments.

    Takes what `step` of either wrapper returned, or a Gymnasium vector env over single wrappers in
    either autoreset mode, or of Gymnasium before 1.0; no episode gives an empty list.

    Args:
        infos: The info of a single env or of a vector env.
    """
    found: list[Trajectory] = []
    final = infos.get("final_info", ())
    # Gymnasium before 1.0 keeps an array of dicts, with None for envs whose episode goes on.
    for final_info in [final] if isinstance(final, Mapping) else final:
        if final_info is not None:
            found += finished_trajectories(final_info)
    entry = infos.get("trajectory")
    if isinstance(entry, Trajectory):
        found.append(entry)
    elif entry is not None:
        found += [trajectory for trajectory in entry if trajectory is not None]
    return found


def step_costs(
    infos: Mapping[str, Any], num_envs: int, done: ArrayLike, *, valid: ArrayLike | None = None
) -> FloatArray | None:
    """Return the environments' own cost of one vectorised step, wherever the infos hold it.

    With SAME_STEP autoreset, Gymnasium's vector envs move the last step of an episode into
    `infos["final_info"]`, since `infos["cost"]` then speaks of the reset. A batched env may keep
    every step in `infos["cost"]`; both are read. Report costs as floats: Gymnasium takes the type
    of the array from the first env that reports, and an int there truncates the others. So an
    array of integers with the mask `_cost` is refused, unless it is of one env.

    Args:
        infos: Infos of a vector env whose envs report `info["cost"]`, before any of our wrappers.
        num_envs: N.
        done: Which episodes ended in this step, bool (N,).
        valid: Which rows are real steps, bool (N,); false on the reset steps of NEXT_STEP
            autoreset. None if all are.

    Returns:
        True cost per step, (N,), 0 where not `valid`; None if no valid row reports one. All zero
        if all envs reset in this step, since none could report.

    Raises:
        MissingCostError: If some valid rows report a cost and others do not.
        ValueError: If a reported cost is not one number per env, or negative, or may have been
            truncated.
    """
    costs = np.zeros(num_envs, np.float32)
    reported = np.zeros(num_envs, np.bool_)
    final_info = infos.get("final_info", {})
    for batched in (infos, final_info):
        if "_cost" in batched and num_envs > 1:
            _require_whole(batched["cost"])
    if "cost" in infos:
        costs[:] = cost_array(infos["cost"], (num_envs,))
        reported[:] = infos.get("_cost", True)
    if "cost" in final_info:
        ended = np.asarray(done, np.bool_) & infos.get("_final_info", True)
        costs[ended] = cost_array(final_info["cost"], (num_envs,))[ended]
        reported[ended] = np.broadcast_to(final_info.get("_cost", True), (num_envs,))[ended]
    real = np.broadcast_to(np.asarray(True if valid is None else valid, np.bool_), (num_envs,))
    missing = real & ~reported
    reported &= real
    if real.any() and not reported.any():
        return None
    if missing.any():
        raise MissingCostError(
            "either every env reports a cost at every step or none does, but env(s) "
            f"{np.flatnonzero(missing).tolist()} of {num_envs} reported none; set info['cost'] in "
            "every step of the env, and mark the reset steps of NEXT_STEP autoreset by `valid`"
        )
    return np.where(reported, costs, np.float32(0))


def discarded_envs(infos: Mapping[str, Any], num_envs: int) -> BoolArray:
    """Return in which environments an episode ended in this step that counts as none.

    A diverged simulation cut it short, or it began in mid-course to put the envs out of step with
    each other: it is no shorter way through the task, so it is neither labelled nor compared. An
    env says so by `info["diverged"]` or `info["partial"]` on the last step, a batched one by masks.

    Args:
        infos: The info of a single env or of a vector env, before or after our wrappers.
        num_envs: N; 1 for a single env.

    Returns:
        Their mask, bool (N,); all false if the envs report no divergence.
    """
    discarded = np.zeros(num_envs, np.bool_)
    for found in (infos, infos.get("final_info", {})):
        for name in ("diverged", "partial"):
            if name in found:
                discarded |= np.asarray(found[name], np.bool_) & found.get(f"_{name}", True)
    return discarded


class TrajectoryRecorder:
    """Collects the rows of N environments that step together and returns finished episodes.

    The vector wrapper's memory, and usable without a cost model, to collect a dataset. Costs a few
    array writes per step for any N: an environment is looked at alone only when its episode ends.

    Args:
        num_envs: N. The sizes of the rows are those of the first step.

    Raises:
        ValueError: If `num_envs` is not positive.
    """

    lengths: NDArray[np.int64]
    """Steps so far of each unfinished episode, (N,). To be read only."""
    reports_costs: bool | None
    """Whether the episodes have costs, as of the last step; None before the first one."""

    def __init__(self, num_envs: int) -> None:
        require_in("[1, inf)", num_envs=num_envs)
        self.lengths = np.zeros(num_envs, np.int64)
        self.reports_costs = None
        self._all_rows = np.arange(num_envs)
        self._has_ended = False  # any episode so far
        self._num_dropped = 0  # resets in mid-episode
        self._has_warned = False  # of an endless episode
        self._has_rewards = False  # as of the first step
        self._seen: list[Any] | None = None  # shapes and types of a step that was found to fit
        self._allocate(obs_shape=(1,), act_dim=1, dtype=np.float32)

    def record(
        self,
        obs: NDArray[Any],
        actions: NDArray[Any],
        costs: NDArray[Any] | None,
        done: BoolArray,
        *,
        valid: BoolArray | None = None,
        discarded: BoolArray | None = None,
        rewards: NDArray[Any] | None = None,
        terminated: BoolArray | None = None,
        final_obs: NDArray[Any] | None = None,
    ) -> list[Trajectory]:
        """Add one step of every env; its arrays are copied.

        Without rewards, and without a final observation where an episode ends, its `Trajectory` has
        no outcome.

        Args:
            obs: s_t, from before the step, (N, *obs_shape): images, or flat rows as `obs_rows`
                makes them of any space. Bytes are kept as such, all else as float32.
            actions: a_t as executed, (N, act_dim), as `action_rows` makes them.
            costs: True cost of the step, (N,), or None if the envs report none.
            done: Episodes that ended with this step, terminated or truncated, bool (N,).
            valid: Which rows are real steps, bool (N,); false on the reset steps of NEXT_STEP
                autoreset, which are not recorded. None if all are.
            discarded: Which of the episodes that ended are dropped, bool (N,), as `discarded_envs`
                tells. None if none is.
            rewards: Of the step, (N,); None if they are not recorded.
            terminated: Which of `done` ended in the env, and not by a time limit, bool (N,).
            final_obs: s_{t+1} of the episodes that ended, (N, *obs_shape); other rows are not read.

        Returns:
            The episodes that ended and are kept, in the order of `np.flatnonzero(done)` over the
            valid rows.

        Raises:
            ValueError: If a shape is wrong, or bytes and other numbers are mixed.
            MissingCostError: If costs appear or vanish within an episode; nothing is recorded.
            NonFiniteError: If an episode that ends holds NaN or an infinity.
        """
        if self.reports_costs is None:  # first rows
            self._has_rewards = rewards is not None
            self._allocate(
                obs_shape=obs.shape[1:] or (1,),
                act_dim=actions.shape[1] if actions.ndim == 2 else 1,
                dtype=np.uint8 if obs.dtype == np.uint8 else np.float32,
            )
        arrays = {"costs": costs, "done": done, "valid": valid, "discarded": discarded}
        arrays |= {"rewards": rewards, "terminated": terminated, "obs": obs, "actions": actions}
        self._check_step(arrays)
        done = done.astype(np.bool_, copy=False)  # as an integer it would index
        rows = self._all_rows if valid is None or valid.all() else np.flatnonzero(valid)
        if len(rows) == 0:
            return []
        has_costs = costs is not None
        if has_costs is not self.reports_costs:
            if self.lengths.any():
                raise MissingCostError(
                    "an episode has a true cost at every step or at none, but costs were "
                    f"{'reported' if has_costs else 'missing'} at this step and "
                    f"{'missing' if has_costs else 'reported'} at the one before; "
                    "set info['cost'] in every step of the env"
                )
            self.reports_costs = has_costs
        steps = self.lengths[rows]
        if steps.max() == self._costs.shape[1]:
            self._grow()
        if steps.max() == _ENDLESS and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an episode has gone on for {_ENDLESS} steps, and its rows are kept in memory "
                "until it ends; give the env a time limit, by gymnasium.wrappers.TimeLimit inside "
                "the wrapper that records",
                RuntimeWarning,
                stacklevel=3,
            )
        if len(rows) < len(self.lengths):
            obs, actions = obs[rows], actions[rows]
            costs = None if costs is None else costs[rows]
            rewards = None if rewards is None else rewards[rows]
        self._obs[rows, steps] = obs
        self._actions[rows, steps] = actions
        if costs is not None:
            self._costs[rows, steps] = costs
        if self._has_rewards:
            self._rewards[rows, steps] = rewards
        self.lengths[rows] += 1
        if not done.any():
            return []
        self._has_ended = True
        if discarded is not None:
            self.lengths[done & discarded] = 0
            done = done & ~discarded
        ended = rows[done[rows]].tolist()
        if not self._has_rewards or terminated is None or final_obs is None:
            return [self._take(row) for row in ended]
        return [self._take(row, bool(terminated[row]), final_obs[row].copy()) for row in ended]

    def drop_unfinished(self) -> None:
        """Forget the rows of all unfinished episodes, as after a reset.

        Warns once if that is all that ever happens: no episode would be returned.
        """
        self._num_dropped += bool(self.lengths.any())
        self.lengths[:] = 0
        if self._num_dropped == _MANY_RESETS and not self._has_ended:
            self._num_dropped += 1
            warnings.warn(
                "an episode is returned when it ends, but none has ended yet, and "
                f"{_MANY_RESETS} were cut off by reset(); step until terminated or truncated, and "
                "put TimeLimit inside the wrapper that records, not outside",
                RuntimeWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """The rows of all unfinished episodes, for `load_state_dict` of an equal recorder."""
        steps = int(self.lengths.max())
        return {
            "lengths": self.lengths.copy(),
            "obs": self._obs[:, :steps].copy(),
            "actions": self._actions[:, :steps].copy(),
            "costs": self._costs[:, :steps].copy(),
            "rewards": self._rewards[:, :steps].copy() if self._has_rewards else None,
            "reports_costs": self.reports_costs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: If the state is one of another number of environments.
        """
        if state["lengths"].shape != self.lengths.shape:
            raise ValueError(
                f"a recorder's state is for as many envs as it has, {len(self.lengths)}, got one "
                f"for {len(state['lengths'])}; make as many envs as were saved"
            )
        steps = state["obs"].shape[1]
        self._allocate(
            obs_shape=state["obs"].shape[2:],
            act_dim=state["actions"].shape[2],
            dtype=np.uint8 if state["obs"].dtype == np.uint8 else np.float32,
        )
        self._has_rewards = state["rewards"] is not None
        while self._costs.shape[1] < steps:
            self._grow()
        self._obs[:, :steps] = state["obs"]
        self._actions[:, :steps] = state["actions"]
        self._costs[:, :steps] = state["costs"]
        if self._has_rewards:
            self._rewards[:, :steps] = state["rewards"]
        self.lengths[:] = state["lengths"]
        self.reports_costs = state["reports_costs"]

    def _take(
        self, row: int, terminated: bool | None = None, final_obs: NDArray[Any] | None = None
    ) -> Trajectory:
        steps = int(self.lengths[row])
        self.lengths[row] = 0
        return Trajectory(
            self._obs[row, :steps].copy(),
            self._actions[row, :steps].copy(),
            self._costs[row, :steps].copy() if self.reports_costs else None,
            None if terminated is None else self._rewards[row, :steps].copy(),
            terminated,
            final_obs,
        )

    def _allocate(
        self, *, obs_shape: tuple[int, ...], act_dim: int, dtype: type[np.float32 | np.uint8]
    ) -> None:
        self._seen = None
        rows = (len(self.lengths), _FIRST_CAPACITY)
        self._obs: NDArray[Any] = np.empty((*rows, *obs_shape), dtype)
        self._actions = np.empty((*rows, act_dim), np.float32)
        self._costs = np.empty(rows, np.float32)
        self._rewards = np.empty(rows, np.float32)

    def _grow(self) -> None:
        # Doubling: the copies of a whole episode cost less than writing its rows did.
        self._obs = np.concatenate([self._obs, np.empty_like(self._obs)], axis=1)
        self._actions = np.concatenate([self._actions, np.empty_like(self._actions)], axis=1)
        self._costs = np.concatenate([self._costs, np.empty_like(self._costs)], axis=1)
        self._rewards = np.concatenate([self._rewards, np.empty_like(self._rewards)], axis=1)

    def _check_step(self, arrays: Mapping[str, NDArray[Any] | None]) -> None:
        """Refuse what is unlike the first step; NumPy would broadcast, cast or leave garbage."""
        seen = [None if array is None else (array.shape, array.dtype) for array in arrays.values()]
        if seen == self._seen:
            return
        shapes = {"obs": self._obs.shape[2:], "actions": self._actions.shape[2:]}
        for name, array in arrays.items():
            shape = (*self.lengths.shape, *shapes.get(name, ()))
            if array is None:
                fits = name != "rewards" or not self._has_rewards
            else:
                is_image = array.dtype == np.uint8, self._obs.dtype == np.uint8
                fits = array.shape == shape and (name != "obs" or len(set(is_image)) == 1)
            if not fits:
                found = None if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(
                    f"{name} must have one row per env, shape {shape}, and be there, and obs be "
                    f"uint8, in every step or in none, got {found}; pass the arrays of the vector "
                    "env as they are"
                )
        self._seen = seen


def require_finite(quantity: str, rows: NDArray[Any], step: NDArray[np.int64]) -> None:
    """Refuse NaN and infinities by name and place.

    Args:
        quantity: "obs", "reward" or "cost".
        rows: Of N envs, (N, ...).
        step: Which step of its episode each row belongs to, from 1; 0 is a reset. (N,).

    Raises:
        NonFiniteError: If there is one.
    """
    if rows.dtype == np.uint8 or (finite := np.isfinite(rows)).all():
        return
    row = int(np.argwhere(~finite)[0, 0])
    where = f"step {step[row]} of an episode" if step[row] else "reset"
    if len(rows) > 1:
        where += f" in env {row}"
    raise NonFiniteError(
        f"{quantity} must be finite, got {rows[~finite][0]} at {where}; {_FIX[quantity]}"
    )


def is_number(reported: Any) -> bool:
    """Whether an env reported one real number as `info["cost"]`, of whatever type."""
    return isinstance(reported, int | float | np.generic | np.ndarray) and (
        np.shape(reported) == () and np.asarray(reported).dtype.kind in "fiub"
    )


def _require_whole(batched: Any) -> None:
    dtype = np.asarray(batched).dtype
    if dtype.kind in "iub" or dtype == np.float16:
        raise ValueError(
            "the costs of single envs must be batched as float32 or float64, or they may have been "
            f"cut off to the type of the first env that reported, got infos['cost'] as {dtype} "
            "with the mask '_cost'; report float(cost) in every step of the env, and at its reset"
        )


def cost_array(reported: Any, shape: tuple[int, ...]) -> FloatArray:
    """What an env reported as `info["cost"]`, as float32 of `shape`: (N,), or () for a single env.

    What float32 cannot hold becomes infinite; the caller, which can name the step, refuses that.

    Raises:
        ValueError: If it is not one number per env, or one is negative.
    """
    costs = np.asarray(reported)
    if costs.shape != shape or costs.dtype.kind not in "fiub":
        several = costs.shape != shape
        raise ValueError(
            "info['cost'] must be one number per env and step, got "
            f"shape {costs.shape[len(shape) :]} and dtype {costs.dtype}; "
            f"{'sum several costs to one float in the env' if several else 'make it a float'}"
        )
    if (costs < 0).any():
        raise ValueError(
            f"a true cost must be >= 0, got info['cost'] = {costs[costs < 0][0]}; pay for safety "
            "in the reward instead"
        )
    with np.errstate(over="ignore"):
        return costs.astype(np.float32)
