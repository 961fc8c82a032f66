"""The simulated power cut itself, and what the library promises after one."""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.errors import StorageError
from pbcrl.storage import FolderLock, load_tensors, save_tensors, sync_folder, write_atomically
from pbcrl.trajectory import Trajectory

from .power_cut import PowerCut

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and hard links"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture
def disk(tmp_path) -> PowerCut:
    (tmp_path / "disk").mkdir()
    return PowerCut(tmp_path / "disk", scratch=tmp_path / "scratch")


def held(disk: PowerCut, tmp_path: Path, *, draws: int = 60) -> Iterator[Path]:
    """Disks that a cut at this moment may leave."""
    for draw in range(draws):
        disk.held(random.Random(draw), tmp_path / f"held-{draw}")
        yield tmp_path / f"held-{draw}"


def contents(disk: PowerCut, tmp_path: Path, name: str) -> Counter[str | None]:
    """What the disks hold under a name, None for nothing, and how often."""
    paths = [folder / name for folder in held(disk, tmp_path)]
    return Counter(path.read_text() if path.exists() else None for path in paths)


def write(path: Path, text: str, *, sync: bool, mode: str = "w") -> None:
    with open(path, mode) as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())


# -- The tool --------------------------------------------------------------------------------------


def test_a_file_that_was_never_synced_may_be_lost_empty_torn_or_whole(disk, tmp_path):
    text = "text" * 100

    def work():
        write(disk.folder / "synced", text, sync=True)
        write(disk.folder / "loose", text, sync=False)
        sync_folder(disk.folder)
        write(disk.folder / "late", text, sync=True)  # and its folder is not

    assert disk.fork(work) == 0
    assert contents(disk, tmp_path / "a", "synced") == {text: 60}
    loose = contents(disk, tmp_path / "b", "loose")
    assert {"", text} < loose.keys()
    assert any(text.startswith(found) for found in loose.keys() - {"", text})  # cut off
    assert any(found.endswith("\0") for found in loose)
    assert loose[""] > 20
    assert contents(disk, tmp_path / "c", "late").keys() == {None, text}


def test_lines_after_the_last_sync_may_be_lost_and_those_before_may_not(disk, tmp_path):
    def work():
        write(disk.folder / "log", "1\n2\n", sync=True)
        sync_folder(disk.folder)
        write(disk.folder / "log", "3\n", sync=False, mode="a")

    assert disk.fork(work) == 0
    found = contents(disk, tmp_path, "log")
    assert all(text.startswith("1\n2\n") for text in found)
    assert {"1\n2\n", "1\n2\n3", "1\n2\n3\n"} <= found.keys()


def test_rewriting_a_file_in_place_may_lose_the_old_contents_too(disk, tmp_path):
    write(disk.folder / "file", "old", sync=False)
    disk = PowerCut(disk.folder, scratch=tmp_path / "scratch")  # what is there now, is on disk
    assert disk.fork(lambda: write(disk.folder / "file", "new", sync=False)) == 0
    assert {"old", "", "new"} <= contents(disk, tmp_path, "file").keys()


@pytest.mark.parametrize("synced", [False, True])
def test_a_rename_is_on_disk_once_its_folder_is_synced(disk, tmp_path, synced):
    def work():
        for text in ("old", "new"):
            write(disk.folder / "draft", text, sync=True)
            os.replace(disk.folder / "draft", disk.folder / "file")
            if synced or text == "old":
                sync_folder(disk.folder)

    assert disk.fork(work) == 0
    expected = {"new"} if synced else {"old", "new"}
    assert contents(disk, tmp_path, "file").keys() == expected


def test_between_two_renames_the_first_may_be_on_disk_alone(disk, tmp_path):
    def work():
        for name in ("before", "newest", "draft"):
            write(disk.folder / name, name, sync=True)
        sync_folder(disk.folder)
        os.replace(disk.folder / "newest", disk.folder / "before")
        os.replace(disk.folder / "draft", disk.folder / "newest")

    assert disk.fork(work) == 0
    found = Counter()
    for folder in held(disk, tmp_path):
        found[" ".join(f"{path.name}={path.read_text()}" for path in sorted(folder.iterdir()))] += 1
    assert found.keys() == {
        "before=before draft=draft newest=newest",
        "before=newest draft=draft",
        "before=newest newest=draft",
    }


def test_a_new_folder_is_on_disk_once_the_one_above_is_synced(disk, tmp_path):
    def work():
        for name in ("synced", "loose"):
            (disk.folder / name).mkdir()
            if name == "synced":
                sync_folder(disk.folder)
            write(disk.folder / name / "file", "text", sync=True)
            sync_folder(disk.folder / name)

    assert disk.fork(work) == 0
    assert contents(disk, tmp_path / "a", "synced/file") == {"text": 60}
    assert contents(disk, tmp_path / "b", "loose/file").keys() == {None, "text"}


def test_a_removal_that_was_not_synced_may_be_undone(disk, tmp_path):
    (disk.folder / "folder").mkdir()
    write(disk.folder / "folder" / "file", "text", sync=False)
    disk = PowerCut(disk.folder, scratch=tmp_path / "scratch")
    assert disk.fork((disk.folder / "folder" / "file").unlink) == 0
    assert contents(disk, tmp_path, "folder/file").keys() == {None, "text"}


def test_a_script_and_its_children_are_recorded_and_cut_off_at_any_moment(disk, tmp_path):
    """Three moments each: the truncating open, the sync of the file, and that of the folder."""
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        "folder, name = sys.argv[1:]\n"
        "with open(f'{folder}/{name}', 'w') as file:\n"
        "    file.write(name)\n"
        "    file.flush()\n"
        "    os.fsync(file.fileno())\n"
        "above = os.open(folder, os.O_RDONLY)\n"
        "os.fsync(above)\n"
        "print(name, flush=True)\n"
        "if name == 'parent':\n"
        "    subprocess.run([sys.executable, sys.argv[0], folder, 'child'])\n"
        "    input()\n"
    )
    command = [sys.executable, str(tmp_path / "script.py"), str(disk.folder)]
    assert disk.run([*command, "child"]).stdout == "child\n"
    assert disk.moments == 3
    assert disk.cut(random.Random(0)) == []
    assert disk.moments == 0
    ended = disk.run([*command, "parent"], at=5)
    assert (ended.returncode, ended.stdout) == (-9, "parent\n")
    # The child, killed with its parent, had emptied its file again, and not yet synced it.
    found = contents(disk, tmp_path, "child")
    assert {"", "child"} <= found.keys()
    assert contents(disk, tmp_path / "b", "parent") == {"parent": 60}


def test_a_renamed_folder_is_refused_as_it_is_not_modelled(disk):
    (disk.folder / "a").mkdir()
    assert disk.fork(lambda: (disk.folder / "a").rename(disk.folder / "b")) == 0
    with pytest.raises(NotImplementedError, match=r"a folder was renamed: .*/a"):
        disk.cut(random.Random(0))


# -- The library -----------------------------------------------------------------------------------


def at_every_moment(
    disk: PowerCut, tmp_path: Path, work: Callable[[], object], *, draws: int
) -> Iterator[tuple[Path, int]]:
    """Cut `work` off at each of its moments; yield disks, and how many bytes it acknowledged."""
    acknowledged = tmp_path / "acknowledged"
    for at in range(1, 1000):
        acknowledged.write_bytes(b"")
        status = disk.fork(work, at=at)
        for folder in held(disk, tmp_path / f"at-{at}", draws=draws):
            yield folder, acknowledged.stat().st_size
        if status == 0:
            return
        assert status == -9
        disk = PowerCut(emptied(disk.folder), scratch=tmp_path / "scratch")


def emptied(folder: Path) -> Path:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return folder


def acknowledge(tmp_path: Path) -> None:
    with open(tmp_path / "acknowledged", "ab", buffering=0) as file:
        file.write(b".")


def test_a_small_file_is_old_or_new_and_there_once_it_was_written(disk, tmp_path):
    def work():
        for number in range(3):
            write_atomically(disk.folder / "made" / "args.json", bytes([number]) * 1000)
            acknowledge(tmp_path)

    found = Counter()
    for folder, acknowledged in at_every_moment(disk, tmp_path, work, draws=10):
        path = folder / "made" / "args.json"
        number = path.read_bytes()[0] if path.exists() else -1
        assert number == -1 or path.read_bytes() == bytes([number]) * 1000
        assert acknowledged - 1 <= number <= acknowledged
        found[number - acknowledged] += 1
    assert found[-1] > 50
    assert found[0] > 10


def test_a_checkpoint_is_old_or_new_and_there_once_it_was_saved(disk, tmp_path):
    def work():
        for number in range(3):
            tensors = {"x": torch.full((1000,), float(number))}
            save_tensors(disk.folder / "model", kind="test", tensors=tensors, meta={"n": number})
            acknowledge(tmp_path)

    for folder, acknowledged in at_every_moment(disk, tmp_path, work, draws=10):
        if acknowledged or (folder / "model").exists():
            tensors, meta = load_tensors(folder / "model", kind="test")
            assert meta["n"] in (acknowledged - 1, acknowledged)
            assert (tensors["x"] == meta["n"]).all()


def episode(number: int) -> Trajectory:
    rng = np.random.default_rng(number)
    steps = int(rng.integers(1, 6))
    return Trajectory(*rng.normal(size=(2, steps, 2)), rng.random(steps))


OPTIONS = {"env_id": "Toy-v0", "obs_shape": (2,), "act_dim": 2, "horizon": 5, "capacity": 6}


def fill(path: Path, *, until: int, acknowledge: Callable[[], object] = lambda: None) -> None:
    """A run of flushes of three episodes each, with a checkpoint after each, that is resumable."""
    rng = np.random.default_rng(0)
    checkpoint = path.parent / "checkpoint"
    with TrajectoryWriter(path, **OPTIONS, rng=rng, overwrite=True) as out:
        if checkpoint.exists():
            tensors, meta = load_tensors(checkpoint, kind="test")
            out.load_state_dict(meta["writer"] | tensors)
            rng.bit_generator.state = meta["rng"]
        while out.seen < until:
            for number in range(out.seen, out.seen + 3):
                out.add(episode(number))
            state = out.state_dict()
            tensors = {"rows": torch.from_numpy(state.pop("rows"))}
            meta = {"writer": state, "rng": rng.bit_generator.state}
            save_tensors(checkpoint, kind="test", tensors=tensors, meta=meta)
            acknowledge()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("draws", [1, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_dataset_is_after_a_power_cut_what_a_flush_made_it_and_goes_on_to_the_same_end(
    disk, tmp_path, draws
):
    (tmp_path / "undisturbed").mkdir()
    fill(tmp_path / "undisturbed" / "data", until=12)
    expected = files(tmp_path / "undisturbed" / "data")
    num_disks = 0
    work = lambda: fill(  # noqa: E731
        disk.folder / "data", until=12, acknowledge=lambda: acknowledge(tmp_path)
    )
    for folder, acknowledged in at_every_moment(disk, tmp_path, work, draws=draws):
        try:
            loaded = TrajectoryDataset(folder / "data")
        except StorageError:
            assert acknowledged == 0
        else:
            assert loaded.seen in (3 * acknowledged, 3 * acknowledged + 3)
            for number, trajectory in zip(loaded.episodes.tolist(), loaded, strict=True):
                np.testing.assert_array_equal(trajectory.obs, episode(number).obs)
        fill(folder / "data", until=12)
        assert files(folder / "data") == expected
        num_disks += 1
    assert num_disks > 40 * draws


def test_a_lock_does_not_survive(disk):
    assert disk.fork(lambda: FolderLock(disk.folder)) == 0
    disk.cut(random.Random(0))
    FolderLock(disk.folder).release()
