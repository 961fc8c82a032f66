"""Episodes to learn from offline: ours, Minari's and DSRL's, checked against the env and split."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from pbcrl import Trajectory, TrajectoryDataset
from pbcrl.errors import LabelError, MismatchError, MissingCostError, StorageError
from pbcrl_script_utils.envs import flat_dims, horizon_of

Split = tuple[list[Trajectory], list[Trajectory], list[Trajectory]]
"""Episodes to test on, which are never labelled; to validate on; and to train on."""


def minari_folder(dataset: str | Path) -> Path | None:
    """Return the folder of a local Minari dataset, named by that folder or by its id, if any."""
    root = os.environ.get("MINARI_DATASETS_PATH", Path.home() / ".minari" / "datasets")
    for folder in (Path(dataset), Path(root) / dataset):
        if (folder / "data" / "metadata.json").is_file():
            return folder
    return None


def open_dataset(
    dataset: str | Path,
    env_id: str,
    envs: VectorEnv[Any, Any, Any],
    *,
    rng: np.random.Generator,
    warn: Callable[[str], None],
    needs_costs: bool = True,
) -> Split:
    """Split a dataset by trajectory, since splitting by pair would leak.

    Args:
        dataset: A folder of `TrajectoryWriter`, a folder or local id of Minari, or a file of DSRL.
        env_id: Of the env that the episodes are from.
        envs: Of `make_envs`, that env.
        rng: Draws the split.
        warn: Told what is left out.
        needs_costs: Whether the true costs decide what is safe.

    Returns:
        A tenth to test on, a tenth to validate on, the others to train on; each in the order in
        which they were played, if the dataset has all of its run.

    Raises:
        LabelError: If there are fewer than 10 episodes.
        MismatchError: If they are from another env or have another time limit.
        MissingCostError: If there are no costs, but they are needed.
        StorageError: If they cannot be read, or the extra that their format needs is missing.
    """
    episodes: Sequence[Trajectory]
    horizon = horizon_of(envs)
    folder = minari_folder(dataset)
    if folder is not None or Path(dataset).is_file():
        episodes = _foreign(dataset, folder, env_id, envs, warn)
    else:
        episodes = ours = TrajectoryDataset(dataset, env_id=env_id)
        if ours.horizon != horizon:
            raise _other_horizon(dataset, ours.horizon, env_id, horizon)
    if needs_costs and len(episodes) and episodes[0].costs is None:
        raise MissingCostError(
            f"the simulated oracle needs the true cost of every step, but {dataset} has none; give "
            "a dataset with costs, or let people answer (--label-folder)"
        )
    if len(episodes) < 10:
        raise LabelError(
            f"10 episodes or more are needed to split them, {dataset} has {len(episodes)}; collect "
            "more (--total-timesteps)"
        )
    order = rng.permutation(len(episodes))
    size = max(2, len(episodes) // 10)
    parts = order[:size], order[size : 2 * size], order[2 * size :]
    test, valid, train = ([episodes[i] for i in np.sort(part)] for part in parts)
    return test, valid, train


def _foreign(
    dataset: str | Path,
    folder: Path | None,
    env_id: str,
    envs: VectorEnv[Any, Any, Any],
    warn: Callable[[str], None],
) -> list[Trajectory]:
    """Read Minari's or DSRL's, which do not say which time limit their episodes had."""
    try:
        if folder is not None:
            from pbcrl.data.minari import from_minari, open_minari

            read = open_minari(folder / "data")
            found, spec = from_minari(read), read.spec.env_spec
            ended = [bool(one.terminated) for one in found]
            if spec is not None and spec.id != env_id.rpartition(":")[2]:
                # Said only: an env with a cost often has another id than the one without.
                warn(f"{dataset} says that its episodes are from {spec.id}, not from {env_id}")
        else:
            from pbcrl.data.dsrl import read_dsrl

            found, ended = read_dsrl(dataset)
    except ImportError as error:
        raise StorageError(f"{dataset} cannot be read: {error}") from error
    horizon, dims = horizon_of(envs), flat_dims(envs)
    for one in found:
        if (one.obs.shape[1:], one.actions.shape[1]) != ((dims[0],), dims[1]):
            raise MismatchError(
                f"episodes must be of {env_id}, whose steps have (obs_dim, act_dim) = {dims}, but "
                f"{dataset} has observations {one.obs.shape[1:]} and actions "
                f"{one.actions.shape[1:]}; name the env that they are from"
            )
    longest = max((len(one) for one in found), default=horizon)
    if longest > horizon or (longest < horizon and not any(ended)):
        raise _other_horizon(dataset, longest, env_id, horizon)
    pairs = zip(found, ended, strict=True)
    whole = [one for one, is_over in pairs if is_over or len(one) == horizon]
    if len(whole) < len(found):
        warn(
            f"{len(found) - len(whole)} of {len(found)} episodes of {dataset} were cut off before "
            f"the time limit of {horizon} steps, and are left out"
        )
    return whole


def _other_horizon(
    dataset: str | Path, found: int, env_id: str, horizon: int | None
) -> MismatchError:
    return MismatchError(
        f"episodes compare by their summed cost, so they must have one time limit: {dataset} has "
        f"a horizon of {found} steps, {env_id} one of {horizon}; collect a dataset for this env"
    )
