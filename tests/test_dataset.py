import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.errors import CorruptFileError, FormatVersionError, MismatchError, StorageError
from pbcrl.storage import load_tensors, save_tensors
from pbcrl.trajectory import Trajectory, pad

from .damage import full_disk, read_only, with_flipped_bits


def sample(seen: int, *, capacity: int) -> list[int]:
    """Algorithm R on the serial numbers alone, with seed 0."""
    rng, kept = np.random.default_rng(0), []
    for number in range(seen):
        place = number if number < capacity else int(rng.integers(number + 1))
        if place < capacity:
            kept[place : place + 1] = [number]
    return kept


def episode(number: int, *, length: int = 3, costs: bool = True) -> Trajectory:
    """Rows that say which episode and which step they are: obs (number, t), action -number."""
    steps = np.arange(length, dtype=np.float32)
    return Trajectory(
        obs=np.stack([np.full_like(steps, number), steps], axis=1),
        actions=np.full((length, 1), -number, np.float32),
        costs=steps / 2 if costs else None,
    )


def writer(path: Path, **changes: object) -> TrajectoryWriter:
    sizes = {"obs_shape": (2,), "act_dim": 1, "horizon": 5, "capacity": 4}
    options = {"env_id": "Toy-v0", "rng": np.random.default_rng(0), **sizes, **changes}
    return TrajectoryWriter(path, **options)


def dataset(path: Path, *, n_episodes: int = 3, **changes: object) -> Path:
    with writer(path, **changes) as out:
        for number in range(n_episodes):
            out.add(episode(number, length=1 + number % 5))
    return path


def dataset_until(stop: type[BaseException], path: Path, *, n_episodes: int = 0) -> None:
    """Write a dataset until `stop` ends the run."""
    with writer(path, overwrite=True) as out:
        for number in range(n_episodes):
            out.add(episode(number, length=1 + number % 5))
        raise stop


def fill(out: TrajectoryWriter, *, until: int, flush_every: int = 7) -> None:
    """Add episodes from where the writer is, with a flush after every few of them."""
    for number in range(out.seen, until):
        out.add(episode(number, length=1 + number % 5))
        if number % flush_every == flush_every - 1:
            out.flush()


def shards(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("0*.safetensors"))


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


def assert_is_episode(trajectory: Trajectory, number: int, *, costs: bool = True) -> None:
    expected = episode(number, length=1 + number % 5, costs=costs)
    np.testing.assert_array_equal(trajectory.obs, expected.obs)
    np.testing.assert_array_equal(trajectory.actions, expected.actions)
    np.testing.assert_array_equal(trajectory.costs, expected.costs)


def rewrite_manifest(path: Path, rows: object = None, **changes: object) -> None:
    """Forge the manifest of a dataset, with a checksum that fits."""
    tensors, meta = load_tensors(path / "manifest.safetensors", kind="trajectories")
    if rows is not None:
        tensors["rows"] = torch.tensor(rows)
    save_tensors(
        path / "manifest.safetensors", kind="trajectories", tensors=tensors, meta=meta | changes
    )


@pytest.mark.parametrize("n_episodes", [1, 3, 4])
def test_up_to_the_capacity_all_trajectories_are_kept_in_order(tmp_path, n_episodes):
    loaded = TrajectoryDataset(dataset(tmp_path / "made" / "data", n_episodes=n_episodes))
    assert len(loaded) == loaded.seen == n_episodes
    assert loaded.episodes.tolist() == list(range(n_episodes))
    assert loaded.lengths.tolist() == [1 + number % 5 for number in range(n_episodes)]
    for number, trajectory in enumerate(loaded):
        assert_is_episode(trajectory, number)


@pytest.mark.parametrize("flush_every", [1, 7, 1000])
def test_a_sample_is_the_same_in_however_many_flushes_it_was_written(tmp_path, flush_every):
    with writer(tmp_path / "data") as out:
        fill(out, until=60, flush_every=flush_every)
    loaded = TrajectoryDataset(tmp_path / "data")
    assert (len(loaded), loaded.seen) == (4, 60)
    assert loaded.episodes.tolist() == sample(60, capacity=4)
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))


def test_of_two_episodes_each_is_as_likely_to_be_the_one_kept(tmp_path):
    rng, kept = np.random.default_rng(0), []
    for _ in range(24):
        path = dataset(tmp_path / "data", n_episodes=2, capacity=1, rng=rng, overwrite=True)
        kept += TrajectoryDataset(path).episodes.tolist()
    assert 5 <= sum(kept) <= 19  # 99.7 % of fair coins


def test_every_part_of_a_long_run_is_equally_likely_to_be_kept(tmp_path):
    """Algorithm R: 100 of 1,600 episodes, by eighths of the run; chi-square with 7 degrees."""
    path = dataset(tmp_path / "data", n_episodes=1600, capacity=100)
    kept = np.bincount(TrajectoryDataset(path).episodes // 200, minlength=8)
    # Drawing without replacement shrinks the variance of each count by the share not drawn.
    assert ((kept - 12.5) ** 2 / (12.5 * 1500 / 1599)).sum() < 18.5  # 99 % quantile


def test_a_shard_holds_its_steps_without_padding_and_safetensors_alone_reads_it(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=3, horizon=10**12)
    (name,) = shards(path)
    arrays = safetensors.numpy.load_file(path / name)
    assert {key: array.shape for key, array in arrays.items()} == {
        "obs": (1 + 2 + 3, 2),
        "actions": (1 + 2 + 3, 1),
        "costs": (1 + 2 + 3,),
    }
    assert arrays["obs"][:, 0].tolist() == [0, 1, 1, 2, 2, 2]
    assert sum(len(data) for data in files(path).values()) < 5_000


def test_what_replacements_leave_on_disk_grows_with_the_logarithm_of_the_run(tmp_path):
    """About 20 (1 + ln 50) = 98 of 1,000 episodes are ever written for a sample of 20."""
    with writer(tmp_path / "data", capacity=20) as out:
        fill(out, until=1000, flush_every=1)
    steps = [
        len(safetensors.numpy.load_file(file)["costs"])
        for file in (tmp_path / "data").glob("0*.safetensors")
    ]
    assert len(steps) == pytest.approx(20 * (1 + math.log(50)), abs=30)


def mapped(folder: Path) -> list[tuple[int, int]]:
    """Where in memory the files of a folder are mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    lines = [line for line in maps.read_text().splitlines() if str(folder) in line]
    return [tuple(int(one, 16) for one in line.split()[0].split("-")) for line in lines]


def test_trajectories_are_read_only_views_of_the_files(tmp_path):
    loaded = TrajectoryDataset(dataset(tmp_path / "data"))
    for array in (loaded[2].obs, loaded[2].actions, loaded[2].costs):
        assert not array.flags.writeable
        address = array.__array_interface__["data"][0]
        assert any(start <= address < end for start, end in mapped(tmp_path / "data"))
    assert np.shares_memory(loaded[2].obs, loaded[2].obs)


def test_a_dataset_is_a_sequence(tmp_path):
    loaded = TrajectoryDataset(dataset(tmp_path / "data"))
    assert [len(t) for t in loaded[1:]] == [2, 3]
    assert_is_episode(loaded[-1], 2)
    with pytest.raises(IndexError):
        loaded[3]
    obs, _, mask = pad(loaded)
    assert obs.shape == (3, 3, 2)
    assert mask.sum() == 1 + 2 + 3


def test_a_dataset_without_costs_gives_trajectories_without_costs(tmp_path):
    with writer(tmp_path / "data") as out:
        out.add(episode(0, length=1, costs=False))
    loaded = TrajectoryDataset(tmp_path / "data")
    assert not loaded.has_costs
    assert loaded[0].costs is None


def test_a_dataset_says_what_it_holds(tmp_path):
    loaded = TrajectoryDataset(dataset(tmp_path / "data", n_episodes=9), env_id="Toy-v0")
    found = (loaded.env_id, loaded.obs_shape, loaded.act_dim, loaded.horizon, loaded.seen)
    assert found == ("Toy-v0", (2,), 1, 5, 9)
    assert loaded.has_costs


def image_episode(number: int, *, length: int) -> Trajectory:
    rng = np.random.default_rng(number)
    frames = rng.integers(256, size=(length, 4, 3, 3), dtype=np.uint8)
    return Trajectory(frames, np.zeros((length, 2), np.float32))


def test_images_are_kept_as_bytes_in_their_shape(tmp_path):
    with writer(tmp_path / "data", obs_shape=(4, 3, 3), act_dim=2) as out:
        for number in range(20):  # of which 4 are kept
            out.add(image_episode(number, length=1 + number % 5))
    loaded = TrajectoryDataset(tmp_path / "data")
    assert loaded.obs_shape == (4, 3, 3)
    for number, trajectory in zip(loaded.episodes.tolist(), loaded, strict=True):
        expected = image_episode(number, length=1 + number % 5)
        assert trajectory.obs.dtype == np.uint8
        np.testing.assert_array_equal(trajectory.obs, expected.obs)


def test_an_added_trajectory_is_kept_as_it_was_when_it_was_added(tmp_path):
    buffer = np.zeros((3, 2), np.float32)
    with writer(tmp_path / "data") as out:
        for number in range(2):
            buffer[:] = number
            out.add(Trajectory(buffer, buffer[:, :1], buffer[:, 0]))
    assert [t.obs[0, 0] for t in TrajectoryDataset(tmp_path / "data")] == [0, 1]


def test_a_dataset_of_a_later_version_is_refused(tmp_path):
    path = dataset(tmp_path / "data")
    rewrite_manifest(path, version=5)
    with pytest.raises(FormatVersionError, match=r"version 3 or 4 of traj.* version 5; use"):
        TrajectoryDataset(path)


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (
            Trajectory(np.zeros((2, 3)), np.zeros((2, 1)), np.zeros(2)),
            r"have obs_shape \(2,\) and act_dim 1, got \(3,\) and 1",
        ),
        (
            Trajectory(np.zeros((2, 2)), np.zeros((2, 4)), np.zeros(2)),
            r"have obs_shape \(2,\) and act_dim 1, got \(2,\) and 4",
        ),
        (
            Trajectory(np.zeros((2, 2), np.uint8), np.zeros((2, 1)), np.zeros(2)),
            "observations of one dtype, but this one has uint8 and the first had float32",
        ),
        (episode(0, length=6), "have at most 5 steps, got 6; open the writer with a longer"),
        (episode(0, costs=False), "have costs or none has, but this one differs"),
    ],
    ids=["obs_shape", "act_dim", "dtype", "too long", "no costs"],
)
def test_a_trajectory_that_does_not_fit_is_refused_and_costs_nothing(tmp_path, trajectory, message):
    with writer(tmp_path / "data") as out:
        out.add(episode(0, length=1))
        with pytest.raises(ValueError, match=message):
            out.add(trajectory)
        out.add(episode(1, length=2))
    assert TrajectoryDataset(tmp_path / "data").episodes.tolist() == [0, 1]


def test_sizes_below_one_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"sizes of at least 1, got obs_shape=\(2,\), act_dim=0, hor"
    ):
        writer(tmp_path / "data", act_dim=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interrupted_run_keeps_what_it_collected_and_says_where(tmp_path, caplog, interrupt):
    with pytest.raises(interrupt):
        dataset_until(interrupt, tmp_path / "data", n_episodes=2)
    loaded = TrajectoryDataset(tmp_path / "data")
    assert not loaded.finished
    for number, trajectory in enumerate(loaded):
        assert_is_episode(trajectory, number)
    assert f"2 trajectories are in {tmp_path / 'data'}" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_an_interrupted_run_without_an_episode_leaves_nothing_behind(tmp_path, caplog):
    with pytest.raises(KeyboardInterrupt):
        dataset_until(KeyboardInterrupt, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    assert "nothing more was written: a dataset needs at least one finished episode" in caplog.text


def test_a_run_without_an_episode_is_an_error_and_leaves_nothing_behind(tmp_path):
    out = writer(tmp_path / "data")
    with pytest.raises(StorageError, match=r"at least one finished episode, but none was added"):
        out.close()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_without_an_episode_keeps_the_dataset_that_it_was_to_replace(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2)
    with pytest.raises(KeyboardInterrupt):
        dataset_until(KeyboardInterrupt, path)
    assert len(TrajectoryDataset(path)) == 2


def test_a_flush_that_a_full_disk_tears_costs_nothing_and_a_later_one_succeeds(tmp_path):
    with writer(tmp_path / "data") as out:
        fill(out, until=3)
        out.flush()
        before = files(tmp_path / "data")
        out.add(episode(3, length=4))
        with full_disk(100), pytest.raises(StorageError, match="free disk space"):
            out.flush()
        assert files(tmp_path / "data") == before
        fill(out, until=20)
    loaded = TrajectoryDataset(tmp_path / "data")
    assert (len(loaded), loaded.seen) == (4, 20)
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))


def test_an_interrupted_run_on_a_full_disk_says_so_and_keeps_what_was_flushed(tmp_path, caplog):
    def run() -> None:
        with writer(tmp_path / "data") as out:
            fill(out, until=2)
            out.flush()
            out.add(episode(2))
            with full_disk(100):
                out.__exit__(KeyboardInterrupt)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert TrajectoryDataset(tmp_path / "data").seen == 2
    assert "interrupted, and nothing more was written" in caplog.text
    assert "free disk space" in caplog.text


def test_what_is_added_does_not_fill_the_memory(tmp_path):
    """Beyond 64 MiB it is flushed: with the 16th trajectory of a little more than 4 MiB."""
    with writer(tmp_path / "data", obs_shape=(2**20,), capacity=100) as out:
        for _ in range(18):
            out.add(Trajectory(np.zeros((1, 2**20)), np.zeros((1, 1))))
        assert TrajectoryDataset(out.path).seen == 16


def test_a_closed_dataset_is_finished_and_takes_no_more(tmp_path):
    out = writer(tmp_path / "data")
    out.add(episode(0, length=1))
    out.flush()
    assert not TrajectoryDataset(tmp_path / "data").finished
    out.close()
    assert TrajectoryDataset(tmp_path / "data").finished
    out.close()  # a second call does nothing
    for call in (lambda: out.add(episode(1)), out.flush):
        with pytest.raises(StorageError, match=r"data is closed; write a new one"):
            call()


def test_flushing_twice_writes_once(tmp_path):
    with writer(tmp_path / "data") as out:
        fill(out, until=2)
        out.flush()
        before = (tmp_path / "data" / "manifest.safetensors").stat().st_mtime_ns
        out.flush()
        assert (tmp_path / "data" / "manifest.safetensors").stat().st_mtime_ns == before
        assert len(shards(tmp_path / "data")) == 1


# -- What a killed run leaves, and how it goes on --------------------------------------------------


def killed_run(path: Path, *, n_episodes: int, **changes: object) -> Path:
    """A dataset that nobody closes, as SIGKILL leaves it: what was only in memory is lost.

    Its lock goes with the last reference to the writer, as it does with a process.
    """
    fill(writer(path, **changes), until=n_episodes)
    return path


def test_a_killed_run_leaves_what_it_had_flushed(tmp_path):
    loaded = TrajectoryDataset(killed_run(tmp_path / "data", n_episodes=19))
    assert (len(loaded), loaded.seen, loaded.finished) == (4, 14, False)
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))


def test_a_dataset_of_which_nothing_was_flushed_is_refused(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=3)
    with pytest.raises(StorageError, match=r"data has no manifest.safetensors; wait for its writ"):
        TrajectoryDataset(path)
    assert len(TrajectoryDataset(dataset(path, n_episodes=2))) == 2  # nothing is in the way


@pytest.mark.parametrize("end", ["killed", "interrupted", "closed"])
@pytest.mark.parametrize(("kept", "reached"), [(0, 9), (3, 3), (3, 30), (30, 41), (59, 60)])
def test_a_run_goes_on_to_the_same_dataset_bit_by_bit(tmp_path, end, kept, reached):
    """From its state after `kept` episodes, whatever came after it, and however that ended."""
    with writer(tmp_path / "undisturbed", capacity=6) as out:
        fill(out, until=kept)
        out.state_dict()
        fill(out, until=60)
    path, rng = tmp_path / "data", np.random.default_rng(0)
    out = writer(path, capacity=6, rng=rng)
    fill(out, until=kept)
    state, drawn = out.state_dict(), rng.bit_generator.state
    fill(out, until=reached)
    if end == "killed":
        del out
    elif end == "interrupted":
        out.__exit__(KeyboardInterrupt)
    else:
        out.close()
    with writer(path, capacity=6, rng=rng, overwrite=True) as out:
        out.load_state_dict(state)
        rng.bit_generator.state = drawn
        assert out.seen == kept
        assert len(shards(path)) == len(state["shards"])
        fill(out, until=60)
    assert files(path) == files(tmp_path / "undisturbed")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    expected = files(dataset(tmp_path / "undisturbed", n_episodes=9))
    path = killed_run(tmp_path / "data", n_episodes=30)
    assert files(dataset(path, n_episodes=9, overwrite=True)) == expected


def test_a_state_is_small(tmp_path):
    with writer(tmp_path / "data", capacity=1000) as out:
        fill(out, until=1000, flush_every=100)
        state = out.state_dict()
    assert state.pop("rows").nbytes == 1000 * 32
    assert len(json.dumps(state)) < 600


def test_a_state_of_another_dataset_is_refused(tmp_path):
    with writer(tmp_path / "one") as out:
        fill(out, until=2)
        state = out.state_dict()
    message = r"horizon of the state for .*two is 5, not 9; repeat the first run's"
    with writer(tmp_path / "two", horizon=9) as out:
        fill(out, until=1)
        with pytest.raises(MismatchError, match=message):
            out.load_state_dict(state)
    assert len(TrajectoryDataset(tmp_path / "two")) == 1


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_state_that_knows_more_than_the_disk_is_refused_and_nothing_is_changed(tmp_path, damage):
    path = tmp_path / "data"
    with writer(path) as out:
        fill(out, until=2)
        out.flush()
        fill(out, until=4)
        state = out.state_dict()
    last = path / shards(path)[-1]
    if damage == "gone":
        last.unlink()
    else:
        last.write_bytes(next(with_flipped_bits(last.read_bytes(), step=1)))
    before = files(path)
    with writer(path, overwrite=True) as out:
        with pytest.raises(StorageError, match=rf"{last.name}"):
            out.load_state_dict(state)
        assert files(path) == before
        fill(out, until=1)


@pytest.mark.parametrize(
    "change",
    [{"seen": -1}, {"shards": [[1]]}, {"rows": np.ones((2, 3))}, {"surprise": 1}, {"seen": 1}],
)
def test_a_state_that_makes_no_sense_is_called_damaged(tmp_path, change):
    with writer(tmp_path / "data") as out:
        fill(out, until=3)
        state = out.state_dict()
        with pytest.raises(CorruptFileError, match=r"data is damaged .*its description makes no"):
            out.load_state_dict(state | change)


def test_what_a_kill_left_of_a_write_is_removed_by_the_next_writer(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=10)
    for name in ("manifest.safetensors.123.partial", "000001-12345678.safetensors.123.partial"):
        (path / name).write_bytes(b"x" * 1000)
    writer(path, overwrite=True)
    assert sorted(file.name for file in path.iterdir() if file.suffix == ".partial") == []
    assert TrajectoryDataset(path).seen == 7


def test_a_second_writer_is_refused_while_the_first_is_at_work(tmp_path):
    path = tmp_path / "data"
    with writer(path) as out:
        out.add(episode(0, length=1))
        for overwrite in (False, True):
            with pytest.raises(StorageError, match=r"one writer at a time, but another one is at"):
                writer(path, overwrite=overwrite)
        out.add(episode(1, length=2))
    assert TrajectoryDataset(path).episodes.tolist() == [0, 1]


def test_an_existing_dataset_is_not_replaced_unless_asked(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2)
    with pytest.raises(StorageError, match=r"data holds one; choose another path, remove it, or"):
        writer(path)
    assert len(TrajectoryDataset(path)) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_overwriting_keeps_the_old_dataset_until_the_first_flush(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2)
    with writer(path, overwrite=True) as out:
        fill(out, until=4)
        assert len(TrajectoryDataset(path)) == 2
        out.flush()
        assert len(TrajectoryDataset(path)) == 4
    assert len(shards(path)) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path, overwrite):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match=r"alone in its folder, but .* holds thesis.tex; move"):
        writer(tmp_path / "data", overwrite=overwrite)
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["thesis.tex"]


def test_replays_stay_in_the_folder_and_make_no_dataset_foreign(tmp_path):
    """Also those beside which no trajectory was flushed; with nothing to replay they go, too."""
    path = tmp_path / "data"
    path.mkdir()
    (path / "replays.bin").write_bytes(b"how to play")
    with writer(path) as out:
        fill(out, until=3)
    with writer(path, overwrite=True) as out:
        fill(out, until=2)
    assert len(TrajectoryDataset(path)) == 2
    assert (path / "replays.bin").read_bytes() == b"how to play"
    empty = tmp_path / "empty"
    out = writer(empty)
    (empty / "replays.bin").touch()
    with pytest.raises(StorageError, match="none was added"):
        out.close()
    assert not empty.exists()


def test_whoever_adds_a_trajectory_is_told_whether_it_is_in_the_sample(tmp_path):
    with writer(tmp_path / "data", capacity=2) as out:
        told = [out.add(episode(number)) for number in range(20)]
    kept = [number for number in range(20) if number in sample(number + 1, capacity=2)]
    assert [number for number, was_kept in enumerate(told) if was_kept] == kept


def test_a_dataset_below_a_file_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="must be writable"):
        writer(tmp_path / "file" / "data")


def test_a_dataset_in_a_read_only_folder_is_read_and_none_is_written_there(tmp_path):
    (tmp_path / "folder").mkdir()
    dataset(tmp_path / "folder" / "data")
    with read_only(tmp_path / "folder") as folder:
        assert len(TrajectoryDataset(folder / "data")) == 3
        for attempt in (
            lambda: writer(folder / "other"),
            lambda: writer(folder / "data", overwrite=True),
        ):
            with pytest.raises(StorageError, match=r"must be writable, but: Permission denied"):
                attempt()
        assert [entry.name for entry in folder.iterdir()] == ["data"]


def test_another_env_names_both_envs(tmp_path):
    path = dataset(tmp_path / "data")
    with pytest.raises(MismatchError, match=r"on 'Toy-v0', not on 'Goal1'; record one on 'Goal1'"):
        TrajectoryDataset(path, env_id="Goal1")


def test_a_missing_dataset_says_so(tmp_path):
    with pytest.raises(StorageError, match=r"manifest.safetensors: No such file or directory; ch"):
        TrajectoryDataset(tmp_path / "none")


def test_a_flipped_bit_in_any_file_is_detected_and_the_file_named(tmp_path):
    path = dataset(tmp_path / "data")
    for name in ("manifest.safetensors", *shards(path)):
        good = (path / name).read_bytes()
        for damaged in with_flipped_bits(good, step=41):
            (path / name).write_bytes(damaged)
            with pytest.raises((CorruptFileError, FormatVersionError), match=name):
                TrajectoryDataset(path)
        (path / name).write_bytes(good)


def test_a_truncated_or_extended_file_is_detected_and_named(tmp_path):
    path = dataset(tmp_path / "data")
    for name in ("manifest.safetensors", *shards(path)):
        good = (path / name).read_bytes()
        for damaged in (b"", good[:100], good[:-1], good + b"\0"):
            (path / name).write_bytes(damaged)
            with pytest.raises(CorruptFileError, match=rf"{name} is damaged"):
                TrajectoryDataset(path)
        (path / name).write_bytes(good)


def test_a_file_that_is_gone_is_named(tmp_path):
    path = dataset(tmp_path / "data")
    (name,) = shards(path)
    (path / name).unlink()
    with pytest.raises(StorageError, match=rf"{name}: No such file"):
        TrajectoryDataset(path)


def test_a_shard_of_another_dataset_has_another_name(tmp_path):
    (one,) = shards(dataset(tmp_path / "one", n_episodes=2))
    (other,) = shards(dataset(tmp_path / "other", n_episodes=3))
    (tmp_path / "other" / other).replace(tmp_path / "one" / one)
    with pytest.raises(CorruptFileError, match=rf"{one} is damaged"):
        TrajectoryDataset(tmp_path / "one")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seen": -3}, "describe no trajectories"),
        ({"seen": True}, "describe no trajectories"),
        ({"obs_shape": [2.0]}, "describe no trajectories"),
        ({"obs_shape": [1] * 70 + [2]}, "describe no trajectories"),
        ({"obs_shape": []}, "describe no trajectories"),
        ({"obs_shape": 2}, "its description makes no sense"),
        ({"obs_dtype": "O"}, "describe no trajectories"),
        ({"obs_dtype": ["<f4"]}, "describe no trajectories"),
        ({"obs_dim": 2}, "unexpected keyword argument 'obs_dim'"),
        ({"horizon": 2}, "rows do not lie in its shards"),
        ({"capacity": 2}, "rows do not lie in its shards"),
        ({"seen": 2}, "rows do not lie in its shards"),
        ({"shards": [[5, 9, 9]]}, "rows do not lie in its shards"),
        ({"shards": []}, "rows do not lie in its shards"),
        ({"shards": [[6, 9]]}, "no steps, bytes and crc32|cannot reshape"),
        ({"shards": [[0, 9, 9]]}, "no steps, bytes and crc32"),
        ({"shards": [[2**70, 9, 9]]}, "its description makes no sense"),
        ({"rows": [[0, 0, 9, 0]]}, "rows do not lie in its shards"),
        ({"rows": [[0, 2**63 - 1, 1, 0]]}, "rows do not lie in its shards"),
        ({"rows": [[0, 0, 1, 0], [0, 1, 1, 0]]}, "rows do not lie in its shards"),
        ({"rows": [[0.0, 0, 1, 0]]}, "no table of int64"),
        ({"rows": [0, 0, 1, 0]}, "no table of int64"),
        ({"obs_shape": [10**30]}, "0[.]safetensors is damaged|000000-.*makes no sense"),
        ({"obs_shape": [3]}, "000000-.*its description makes no sense"),
        ({"obs_dtype": "uint8"}, "000000-.*its description makes no sense"),
    ],
)
def test_absurd_claims_of_the_manifest_are_refused(tmp_path, changes, message):
    path = dataset(tmp_path / "data")
    rewrite_manifest(path, **changes)
    with pytest.raises(CorruptFileError, match=message):
        TrajectoryDataset(path)


def test_a_shard_of_a_terabyte_that_holds_nothing_is_refused_before_it_is_read(tmp_path):
    path = dataset(tmp_path / "data")
    os.truncate(path / shards(path)[0], 2**40)
    with pytest.raises(CorruptFileError, match=r"it has 1099511627776 bytes, not \d{3};"):
        TrajectoryDataset(path)


def test_a_pickle_in_the_place_of_a_shard_is_not_executed(tmp_path):
    path = dataset(tmp_path / "data")
    np.save(path / "array.npy", np.array([print], dtype=object), allow_pickle=True)
    (path / "array.npy").replace(path / shards(path)[0])
    with pytest.raises(CorruptFileError, match=r"000000-.*safetensors is damaged"):
        TrajectoryDataset(path)


def ended(seed, steps, *, terminated, dtype=np.float32):
    """A trajectory with rewards, how it ended and its final observation."""
    rng = np.random.default_rng(seed)
    obs = rng.integers(0, 200, (steps + 1, 2)).astype(dtype)
    actions, costs, rewards = rng.normal(size=(steps, 1)), rng.random(steps), rng.normal(size=steps)
    return Trajectory(obs[:-1], actions, costs, rewards, terminated, obs[-1])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_rewards_ends_and_final_observations_are_read_as_written(tmp_path, dtype):
    """Also where a shard holds trajectories that are no longer in the sample."""
    written = [ended(i, 1 + i % 3, terminated=i % 2 == 0, dtype=dtype) for i in range(12)]
    options = {"env_id": "Walk", "obs_shape": (2,), "act_dim": 1, "horizon": 3, "capacity": 5}
    with TrajectoryWriter(tmp_path, **options, rng=np.random.default_rng(0)) as writer:
        for i, trajectory in enumerate(written):
            writer.add(trajectory)
            if i % 4 == 3:
                writer.flush()
    found = TrajectoryDataset(tmp_path)
    assert found.has_outcomes
    assert any(found.episodes != np.arange(5))
    for number, one in zip(found.episodes, found, strict=True):
        for name in ("obs", "actions", "costs", "rewards", "terminated", "final_obs"):
            ours, theirs = getattr(one, name), getattr(written[number], name)
            assert np.array_equal(ours, theirs)
        assert one.final_obs.dtype == dtype


def test_a_dataset_has_outcomes_in_every_trajectory_or_in_none(tmp_path):
    options = {"env_id": "Walk", "obs_shape": (2,), "act_dim": 1, "horizon": 3}
    with TrajectoryWriter(tmp_path, **options, rng=np.random.default_rng(0)) as writer:
        writer.add(ended(0, 2, terminated=True))
        with pytest.raises(ValueError, match="rewards, terminated and final_obs or none has"):
            writer.add(Trajectory(np.zeros((2, 2)), np.zeros((2, 1)), np.zeros(2)))
