"""SIGKILL at random moments: what was written before it is there, whole and equal.

A forked child counts in shared memory what it has finished; its parent kills it at a random moment
after a random count, and looks at what is on disk.
"""

import mmap
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.data.label_log import LabelLog, read_labels
from pbcrl.storage import load_tensors, save_tensors
from pbcrl.trajectory import Label, Trajectory

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
CAPACITY, HORIZON, EPISODES = 5, 20, 16


def kills(most: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kills", [4, pytest.param(most, marks=pytest.mark.nightly)])


def counts_of_a_killed_child(
    work: Callable[[], Iterator[tuple[int, int]]], rng: np.random.Generator, *, most: int
) -> tuple[int, int]:
    """Run `work` in a child until it is killed; return the last pair of counts that it yielded."""
    shared = mmap.mmap(-1, 16)
    pid = os.fork()
    if pid == 0:
        try:
            total = 0
            for total, (first, second) in enumerate(work(), start=1):
                shared[:16] = struct.pack("<2i2i", first, second, total, 0)
        finally:
            os._exit(total == 0)
    try:
        enough = int(rng.integers(most))
        while struct.unpack("<4i", shared[:16])[2] < enough:
            assert os.waitpid(pid, os.WNOHANG)[0] == 0, "the child ended by itself"
            time.sleep(1e-4)
        time.sleep(float(rng.uniform(0, 2e-3)))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return struct.unpack("<4i", shared[:16])[:2]


def episode(number: int) -> Trajectory:
    """Any content that tells which episode it is, of 1 to 20 steps."""
    rng = np.random.default_rng(number)
    steps = int(rng.integers(1, HORIZON + 1))
    return Trajectory(*(rng.normal(size=(steps, dim)) for dim in (7, 3)), rng.random(steps))


def sample(seen: int, seed: int) -> list[int]:
    """Algorithm R on the serial numbers alone."""
    rng, kept = np.random.default_rng(seed), []
    for number in range(seen):
        place = number if number < CAPACITY else int(rng.integers(number + 1))
        if place < CAPACITY:
            kept[place : place + 1] = [number]
    return kept


@kills(100)
def test_a_dataset_survives_sigkill_at_any_moment(tmp_path, kills):
    """Every flushed trajectory is there, in the very sample of an undisturbed run."""
    rng = np.random.default_rng(0)

    def work(folder: Path) -> Iterator[tuple[int, int]]:
        for part in range(1000):
            options = {"obs_shape": (7,), "act_dim": 3, "horizon": HORIZON, "capacity": CAPACITY}
            options |= {"env_id": "Toy-v0", "rng": np.random.default_rng(part)}
            yield part, 0
            with TrajectoryWriter(folder / str(part), **options) as out:
                for number in range(0, EPISODES, 2):
                    out.add(episode(number))
                    out.add(episode(number + 1))
                    out.flush()
                    yield part, number + 2

    for kill in range(kills):
        folder = tmp_path / str(kill)
        part, flushed = counts_of_a_killed_child(lambda: work(folder), rng, most=2 * EPISODES)  # noqa: B023
        for earlier in range(part):
            finished = TrajectoryDataset(folder / str(earlier))
            assert (finished.seen, finished.finished) == (EPISODES, True)
        path = folder / str(part)
        if flushed == 0 and not (path / "manifest.safetensors").exists():
            continue
        loaded = TrajectoryDataset(path)
        assert loaded.seen in (flushed, flushed + 2)  # the flush that the kill hit, or not
        assert loaded.episodes.tolist() == sample(loaded.seen, seed=part)
        for number, trajectory in zip(loaded.episodes, loaded, strict=True):
            expected = episode(int(number))
            np.testing.assert_array_equal(trajectory.obs, expected.obs)
            np.testing.assert_array_equal(trajectory.actions, expected.actions)
            np.testing.assert_array_equal(trajectory.costs, expected.costs)


@kills(40)
def test_a_label_log_survives_sigkill_at_any_moment(tmp_path, kills):
    rng = np.random.default_rng(1)

    def work(path: Path) -> Iterator[tuple[int, int]]:
        log = LabelLog(path)
        for number in range(100_000):
            log.append([Label(number / 100_000, 1.0, 0.0, second_unsafe=((0, number + 1),))])
            yield 0, number + 1

    for kill in range(kills):
        path = tmp_path / f"{kill}.jsonl"
        _, added = counts_of_a_killed_child(lambda: work(path), rng, most=20)  # noqa: B023
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # half a line
            labels = read_labels(path) if path.exists() else []
            LabelLog(path).close()  # the lock of a dead process blocks nobody
        assert len(labels) in (added, added + 1)
        assert [label.preference for label in labels] == [n / 100_000 for n in range(len(labels))]
        assert [label.second_unsafe for label in labels] == [
            ((0, n + 1),) for n in range(len(labels))
        ]


@kills(40)
def test_a_checkpoint_survives_sigkill_at_any_moment(tmp_path, kills):
    rng = np.random.default_rng(2)

    def work(path: Path) -> Iterator[tuple[int, int]]:
        for number in range(100_000):
            tensors = {"x": torch.full((1000,), float(number))}
            save_tensors(path, kind="test", tensors=tensors, meta={"number": number})
            yield 0, number + 1

    for kill in range(kills):
        path = tmp_path / str(kill) / "model.safetensors"
        _, saved = counts_of_a_killed_child(lambda: work(path), rng, most=20)  # noqa: B023
        if saved or path.exists():
            tensors, meta = load_tensors(path, kind="test")
            assert meta["number"] in (saved - 1, saved)
            assert (tensors["x"] == meta["number"]).all()
