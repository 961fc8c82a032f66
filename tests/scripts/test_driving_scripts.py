"""The scripts on driving tasks, whose episodes end early: the twin, and highway-env's own envs."""

import json

import numpy as np
import pytest

from pbcrl import TrajectoryDataset

from .conftest import SMALL
from .runs import rows


# Twenty random episodes may all be unsafe.
@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:episodes differ in length:UserWarning")
def test_episodes_of_any_length_are_collected_labelled_and_learned_from(scripts, tmp_path):
    options = {"env_id": "DrivingLaneChange-v0", "runs_dir": str(tmp_path), **SMALL}
    options["cost_limit"] = 15.0  # hardly a random episode keeps to the task's own
    collecting = scripts.ppo_lag.Args(
        **options, total_timesteps=2400, save_trajectories=str(tmp_path / "episodes")
    )
    folder = scripts.ppo_lag.train(collecting)
    episodes = TrajectoryDataset(tmp_path / "episodes")
    lengths = [len(episodes[i]) for i in range(len(episodes))]
    assert min(lengths) < max(lengths) <= 100
    logged = rows(folder)
    assert sum(row["episodes"] for row in logged) == len(episodes)
    assert sum(lengths) <= 2400
    learning = scripts.ppo_lag_pbcrl.Args(
        **options,
        total_timesteps=1200,
        offline_queries=20,
        online_queries=6,
        finetune_interval=2,
        dataset=str(tmp_path / "episodes"),
    )
    summary = json.loads((scripts.ppo_lag_pbcrl.train(learning) / "summary.json").read_text())
    assert np.isfinite(summary["return"])
    assert summary["queries_used"] == 26


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*is undefined:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:episodes differ in length")  # some drivers crash
def test_the_method_runs_on_an_env_of_highway_env_by_its_id(scripts, tmp_path):
    options = {
        "env_id": "DrivingMerge-v0",
        "cost_limit": 99.0,  # beginners leave the road, and cost in all 100 steps
        "runs_dir": str(tmp_path),
        **(SMALL | {"num_envs": 2, "eval_episodes": 1}),
    }
    episodes = str(tmp_path / "episodes")
    collecting = scripts.ppo_lag.Args(**options, total_timesteps=1000, save_trajectories=episodes)
    folder = scripts.ppo_lag.train(collecting)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["env_steps"] == 1000
    assert summary["true_cost"] > 0
    learning = scripts.ppo_lag_pbcrl.Args(
        **options,
        total_timesteps=400,
        offline_queries=20,
        online_queries=2,
        finetune_interval=1,
        dataset=episodes,
    )
    folder = scripts.ppo_lag_pbcrl.train(learning)
    assert np.isfinite(json.loads((folder / "summary.json").read_text())["learned_cost"])
