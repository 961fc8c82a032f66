"""Trajectories as a Minari dataset, and back. Needs the extra `minari`.

Minari's own format is written, HDF5 with one group per episode; the true cost of a step is in
`infos["cost"]`. What is read need not have been written here.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from pbcrl.errors import StorageError
from pbcrl.spaces import act_dim_of, action_rows, obs_rows, obs_shape_of
from pbcrl.storage import corrupt, described_by
from pbcrl.trajectory import Trajectory, require_outcomes

try:
    import h5py
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.storage import get_dataset_path

    from pbcrl.data._hdf5 import check_claims
except ImportError as error:
    remedy = "pip install 'pbcrl[minari]'"
    if sys.version_info < (3, 11):  # up to 0.5.3 it writes every image as a JPEG
        remedy = "Minari 0.5.4, the first that keeps images as they are, needs Python 3.11 or later"
    raise ImportError(
        f"Minari's datasets need minari, h5py and Pillow, but {error}; {remedy}"
    ) from error

_MAIN = "main_data.hdf5"
"""Minari's name for the episodes of a dataset in HDF5; those in Arrow have another."""
_MOST_NUMBERS = 1_000_000  # of a step; a space is one line of JSON, and may claim any


def to_minari(
    trajectories: Sequence[Trajectory],
    dataset_id: str,
    *,
    observation_space: Space[Any],
    action_space: Space[Any],
    **about: Any,
) -> Any:
    """Write trajectories as a new local Minari dataset, where `MINARI_DATASETS_PATH` says.

    Args:
        trajectories: With rewards, `terminated` and `final_obs`; with or without costs.
        dataset_id: Such as "walk/random-v0"; a dataset of that name must not be there.
        observation_space: Of one env; a `Box` of the shape of the observations that were recorded.
        action_space: Likewise of the actions.
        **about: As `minari.create_dataset_from_buffers` takes it: `env`, an id, an env or its spec,
            which `MinariDataset.recover_environment` then makes again; `author`, `description`,
            `code_permalink`, ...

    Returns:
        The `minari.MinariDataset`.

    Raises:
        ValueError: If there is no trajectory, one lacks its outcome, or the spaces do not fit.
    """
    require_outcomes(trajectories, "a Minari dataset")
    buffers = []
    for number, one in enumerate(trajectories):
        obs = np.concatenate([one.obs, np.asarray(one.final_obs)[None]])
        for name, rows, space in [
            ("observation", obs, observation_space),
            ("action", one.actions, action_space),
        ]:
            if space.shape != rows.shape[1:]:
                raise ValueError(
                    f"a trajectory holds {name}s as rows, here of shape {rows.shape[1:]}, and the "
                    f"space must have that shape, got {space}; give a Box that has it"
                )
        ends = np.zeros((2, len(one)), bool)  # terminations, truncations
        ends[0 if one.terminated else 1, -1] = True
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=obs,
                actions=one.actions,
                rewards=one.rewards,
                terminations=ends[0],
                truncations=ends[1],
                infos={} if one.costs is None else {"cost": one.costs},
            )
        )
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffers,
        observation_space=observation_space,
        action_space=action_space,
        data_format="hdf5",  # "arrow" cannot read back the costs, one number per step
        jpeg_encoding=False,  # images would come back as others
        requirements=[],
        **about,
    )


def open_minari(folder: str | os.PathLike[str]) -> Any:
    """Open a Minari dataset by its folder, after a look at how many episodes it claims.

    Args:
        folder: Of `metadata.json` and of the episodes, usually called "data".

    Returns:
        The `minari.MinariDataset`.

    Raises:
        StorageError: If there is none.
        CorruptFileError: If its description is damaged.
    """
    folder = Path(folder)
    if not (folder / "metadata.json").is_file():
        raise StorageError(
            f"a Minari dataset has a folder with metadata.json, but {folder} has none; download "
            "it, or correct the name"
        )
    with described_by(folder):
        episodes = json.loads((folder / "metadata.json").read_bytes())["total_episodes"]
        if (main := folder / _MAIN).exists():
            with h5py.File(main, "r") as file:
                if not 0 <= episodes <= len(file):
                    raise ValueError(f"{episodes} episodes, of which {len(file)} are there")
        return minari.MinariDataset(folder)


def _episodes(dataset: Any, folder: Path) -> Iterator[Any]:
    """The episodes of a dataset, whose files may be anything."""
    with described_by(folder):
        if (main := folder / _MAIN).exists():
            with h5py.File(main, "r") as file:
                check_claims(main, file)
        yield from dataset.iterate_episodes()


def from_minari(dataset: Any) -> list[Trajectory]:
    """Read a Minari dataset; observations and actions become rows, as by `pbcrl.spaces`.

    Minari records actions as they were passed to `step`, and a Trajectory holds what was executed:
    Box actions outside of their bounds are clipped to them, as the wrappers do it, with a warning.

    Args:
        dataset: A `minari.MinariDataset`, or the id of a local one.

    Returns:
        Its episodes in order; with costs if their `infos` have `cost`, one per step, or one more,
        whose first is then the reset's.

    Raises:
        ValueError: If a space has no fixed length, costs are not one number per step, or some
            episodes have costs and others none.
        StorageError: If there is no such dataset.
        CorruptFileError: If its files are damaged, claim more memory than files of their size can
            hold, or an episode does not fit its space.
        NonFiniteError: If a number is NaN or infinite.
    """
    if isinstance(dataset, str):
        dataset = open_minari(get_dataset_path(dataset) / "data")
    folder = Path(dataset.storage.data_path)
    obs_space, action_space = dataset.observation_space, dataset.action_space
    shape, found, num_clipped = obs_shape_of(obs_space), [], 0
    most = max(math.prod(shape), act_dim_of(action_space))
    if most > _MOST_NUMBERS:
        raise corrupt(folder, f"its spaces claim {most} numbers per step")
    for episode in _episodes(dataset, folder):
        with described_by(folder):
            steps = len(episode.rewards)
            rows = obs_rows(obs_space, episode.observations, num_envs=steps + 1)
            obs = rows.reshape(-1, *shape)
            actions = action_rows(action_space, episode.actions, num_envs=steps)
            terminated = bool(np.ravel(episode.terminations)[-1])
        infos = episode.infos or {}
        costs: NDArray[Any] | None = None
        if "cost" in infos:
            costs = np.asarray(infos["cost"])
            if costs.size != len(costs) or len(costs) not in (steps, steps + 1):
                raise ValueError(
                    "infos['cost'] of an episode must be one number per step, or one more, whose "
                    f"first is the reset's, but one of {dataset.id} has {steps} steps and costs of "
                    f"shape {costs.shape}; sum or split them to the steps"
                )
            costs = costs.ravel()[-steps:]
        if isinstance(action_space, Box):
            low, high = (
                bound.ravel().astype(np.float32) for bound in (action_space.low, action_space.high)
            )
            # An infinity stays one, for Trajectory to refuse.
            outside = ((actions < low) | (actions > high)) & np.isfinite(actions)
            actions = np.where(outside, np.clip(actions, low, high), actions)
            num_clipped += int(outside.any(axis=1).sum())
        with described_by(folder):
            found.append(Trajectory(obs[:-1], actions, costs, episode.rewards, terminated, obs[-1]))
    if len({one.costs is None for one in found}) > 1:
        raise ValueError(
            "all episodes of a dataset have costs or none has, but in "
            f"{dataset.id} only some have infos['cost']; filter_episodes chooses"
        )
    if num_clipped:
        warnings.warn(
            f"a trajectory holds actions as the env executes them, but {num_clipped} of "
            f"{sum(map(len, found))} actions of {dataset.id} lie outside of {action_space}, and "
            "were clipped to it; filter this warning if the env that was recorded clips, too",
            stacklevel=2,
        )
    return found
