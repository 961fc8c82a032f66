"""Small runs of the scripts, read and compared."""

import dataclasses
import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pbcrl.data.dataset import TrajectoryDataset
from pbcrl.data.label_log import read_labels
from pbcrl.storage import load_tensors
from pbcrl_script_utils.resume import resumed, stored_args
from pbcrl_script_utils.run import Run

from .conftest import SMALL

TOY = {"env_id": "PointHazards-v0", "total_timesteps": 1200, "run_name": "run"}
PBCRL = {
    "offline_queries": 200,
    "online_queries": 12,
    "finetune_interval": 2,
}
RLSF = {"classifier_steps": 5, "queries": 200}


def small(script, tmp_path, **changes):
    return script.Args(**{**SMALL, **TOY, "runs_dir": str(tmp_path), **changes})


def small_ppo_lag(scripts, tmp_path, **changes):
    return small(scripts.ppo_lag, tmp_path, **changes)


def small_pbcrl(scripts, tmp_path, dataset, **changes):
    options = {**PBCRL, "dataset": dataset and str(dataset), **changes}
    if not options["online_queries"]:  # no label moves λ
        options.setdefault("constraint", "learned")
    return small(scripts.ppo_lag_pbcrl, tmp_path, **options)


def small_rlsf(scripts, tmp_path, **changes):
    return small(scripts.ppo_lag_rlsf, tmp_path, **{**RLSF, **changes})


def rows(folder):
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(folder):
    """The same, without what a clock decides."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(folder)]


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    return {k: v for k, v in found.items() if "seconds" not in k and k != "steps_per_second"}


def weights(folder, name="agent"):
    return load_tensors(folder / f"{name}.safetensors", kind=name.replace("_", "-"))[0]


def assert_same_run(folder, other):
    """All but the clock is the same, to the last bit."""
    assert metrics(folder) == metrics(other)
    assert summary(folder) == summary(other)
    path = "policy.safetensors"
    assert (folder / path).exists() == (other / path).exists()
    if (folder / path).exists():
        assert (folder / path).read_bytes() == (other / path).read_bytes()
    for name in ("agent", "cost_model", "classifier"):
        path = f"{name}.safetensors"
        assert (folder / path).exists() == (other / path).exists()
        if (folder / path).exists():
            ours, theirs = weights(folder, name), weights(other, name)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert (folder / "labels.jsonl").exists() == (other / "labels.jsonl").exists()
    if (folder / "labels.jsonl").exists():
        ours, theirs = (read_labels(f / "labels.jsonl") for f in (folder, other))
        assert repr(ours) == repr(theirs)  # as many, and in the same order


def assert_same_dataset(path, other):
    ours, theirs = TrajectoryDataset(path), TrajectoryDataset(other)
    assert (ours.seen, ours.finished) == (theirs.seen, theirs.finished)
    np.testing.assert_array_equal(ours.episodes, theirs.episodes)
    for one, another in zip(ours, theirs, strict=True):
        for name in ("obs", "actions", "costs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(another, name))


class Stop(BaseException):
    """As sudden as a kill, but in this process."""


def cut_off(module, args, *, after, monkeypatch):
    """Train, and stop when `after` iterations have been logged."""
    log, seen = Run.log, []

    def log_and_stop(run, step, values):
        log(run, step, values)
        seen.append(step)
        if len(seen) == after:
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(Run, "log", log_and_stop)
        with pytest.raises(Stop):
            module.train(args)


def resume(module, folder, **changes):
    """Go on with a run as `--resume` does; `changes` are what else is on the command line."""
    gc.collect()  # a run that an error ended holds locks that the end of its process would release
    stored = stored_args(module.Args, folder, script=Path(module.__file__).stem)
    return module.train(resumed(stored, dataclasses.replace(stored, **changes)))
