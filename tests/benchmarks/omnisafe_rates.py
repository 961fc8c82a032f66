"""PPOLag of OmniSafe 0.5.0, timed; one measurement of `bench_omnisafe.py`, in a separate process.

    python omnisafe_rates.py '{"env_id": ..., "steps": ..., ...}'

Runs under the Python of `make parity-env` and prints one line of JSON. What OmniSafe plots,
uploads and downloads with need not be installed: its imports find empty modules.
"""

from __future__ import annotations

import csv
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSED = (
    "gdown",
    "matplotlib",
    "matplotlib.pyplot",
    "moviepy",
    "moviepy.video.io.ImageSequenceClip",
    "pandas",
    "seaborn",
    "torch.utils.tensorboard",
    "torch.utils.tensorboard.writer",
    "wandb",
)
"""Modules that OmniSafe imports and PPOLag, without plots and TensorBoard, never calls."""


class UnusedModule(ModuleType):
    """Has whatever is imported from it, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_omnisafe(env_id: str, *, sky: bool) -> Any:
    """Import OmniSafe on Python 3.10 and 3.11, which Safety-Gymnasium does not know yet."""
    from pbcrl_envs import upstream

    upstream.make(env_id).close()  # as a module that is in sys.modules it is found by OmniSafe
    if sky:  # as it is shipped: what `upstream.make` leaves out is put back
        vars(sys.modules["safety_gymnasium.world"])["yaml"] = importlib.import_module("yaml")
    return import_without(UNUSED, "omnisafe")


def import_without(unused: Sequence[str], name: str) -> Any:
    """Import a library while modules that it never calls are empty ones."""
    stand_ins = {unused_name: UnusedModule(unused_name) for unused_name in unused}
    sys.modules.update(stand_ins)
    library = importlib.import_module(name)
    for stand_in in stand_ins:  # what looks for these packages later finds that they are not there
        del sys.modules[stand_in]
    return library


def rates(job: dict[str, Any]) -> dict[str, float]:
    """Train; return the rate from the second iteration on, and how its time is divided."""
    omnisafe = import_omnisafe(job["env_id"], sky=job["sky"])
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "seed": 0,
            "train_cfgs": {
                "total_steps": job["steps"] * job["iterations"],
                "vector_env_nums": job["num_envs"],
                "torch_threads": job["threads"],
            },
            "algo_cfgs": {
                "steps_per_epoch": job["steps"],
                "update_iters": job["update_epochs"],
                "batch_size": job["minibatch_size"],
                "kl_early_stop": False,
            },
            "model_cfgs": {
                "actor": {"hidden_sizes": job["hidden_sizes"]},
                "critic": {"hidden_sizes": job["hidden_sizes"]},
            },
            "logger_cfgs": {"use_wandb": False, "use_tensorboard": False, "log_dir": folder},
        }
        agent = omnisafe.Agent("PPOLag", job["env_id"], custom_cfgs=config)
        agent.learn()
        (path,) = Path(folder).glob("**/progress.csv")
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    assert len(rows) == job["iterations"]
    assert all(float(row["Train/StopIter"]) == job["update_epochs"] for row in rows)
    first, last = rows[0], rows[-1]
    steps = float(last["TotalEnvSteps"]) - float(first["TotalEnvSteps"])
    counted = rows[1:]
    return {
        "rate": steps / (float(last["Time/Total"]) - float(first["Time/Total"])),
        "seconds_rollout": sum(float(row["Time/Rollout"]) for row in counted),
        "seconds_update": sum(float(row["Time/Update"]) for row in counted),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(rates(json.loads(sys.argv[1]))))
