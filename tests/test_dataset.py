import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from pbcrl.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.errors import CorruptFileError, FormatVersionError, MismatchError, StorageError
from pbcrl.trajectory import Trajectory, pad

from .damage import full_disk, read_only, with_flipped_bits


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


def dataset_on_full_disk(path: Path, *, full_from: int, file_bytes: int, seed: int = 0) -> None:
    """Write a dataset of at most 3 episodes to a disk that is full from one episode on."""
    with writer(path, capacity=3, rng=np.random.default_rng(seed)) as out:
        for number in range(full_from):
            out.add(episode(number, length=1 + number % 5))
        with full_disk(file_bytes):
            for number in range(full_from, 100):
                out.add(episode(number, length=1 + number % 5))


def assert_is_episode(trajectory: Trajectory, number: int, *, costs: bool = True) -> None:
    expected = episode(number, length=1 + number % 5, costs=costs)
    np.testing.assert_array_equal(trajectory.obs, expected.obs)
    np.testing.assert_array_equal(trajectory.actions, expected.actions)
    np.testing.assert_array_equal(trajectory.costs, expected.costs)


def rewrite_meta(path: Path, **changes: object) -> None:
    """Forge the description of a dataset, with a crc32 that fits."""
    top = json.loads((path / "meta.json").read_text())
    top["dataset"] |= changes
    top["crc32"] = zlib.crc32(json.dumps(top["dataset"]).encode())
    (path / "meta.json").write_text(json.dumps(top, indent=2) + "\n")


@pytest.mark.parametrize("n_episodes", [1, 3, 4])
def test_up_to_the_capacity_all_trajectories_are_kept_in_order(tmp_path, n_episodes):
    loaded = TrajectoryDataset(dataset(tmp_path / "made" / "data", n_episodes=n_episodes))
    assert len(loaded) == loaded.seen == n_episodes
    assert loaded.episodes.tolist() == list(range(n_episodes))
    assert loaded.lengths.tolist() == [1 + number % 5 for number in range(n_episodes)]
    for number, trajectory in enumerate(loaded):
        assert_is_episode(trajectory, number)


def test_rows_of_a_sample_are_exact_whatever_longer_row_was_there_before(tmp_path):
    loaded = TrajectoryDataset(dataset(tmp_path / "data", n_episodes=60))
    assert (len(loaded), loaded.seen) == (4, 60)
    assert loaded.episodes.max() > 3  # some were replaced
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))
    steps = np.load(tmp_path / "data" / "obs.npy")  # readable without this package
    lengths = np.load(tmp_path / "data" / "lengths.npy")
    assert steps.shape == (4, 5, 2)
    assert not steps[np.arange(5) >= lengths[:, None]].any()


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


def test_a_dataset_takes_no_more_space_than_its_trajectories(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2, capacity=10_000)
    assert (path / "obs.npy").stat().st_size == 256 + 2 * 5 * 2 * 4
    assert (path / "lengths.npy").stat().st_size == 256 + 2 * 8


def test_short_episodes_take_little_space_on_disk_and_end_in_zeros_all_the_same(tmp_path):
    """Falls end episodes after a few steps of a thousand; the rest of their rows is a hole."""
    path = dataset(tmp_path / "data", n_episodes=4, horizon=100_000)
    used = (path / "obs.npy").stat()
    assert used.st_size == 256 + 4 * 100_000 * 2 * 4
    assert used.st_blocks * 512 < used.st_size / 10
    steps = np.load(path / "obs.npy", mmap_mode="r")
    for number, trajectory in enumerate(TrajectoryDataset(path)):
        assert_is_episode(trajectory, number)
        assert not steps[number, len(trajectory) :].any()


def test_trajectories_are_read_only_views_of_the_files(tmp_path):
    loaded = TrajectoryDataset(dataset(tmp_path / "data"))
    for array in (loaded[2].obs, loaded[2].actions, loaded[2].costs):
        assert not array.flags.writeable
        while not isinstance(array, np.memmap):
            array = array.base  # None for a copy, which fails here
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
    assert not (tmp_path / "data" / "costs.npy").exists()
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
    assert np.load(tmp_path / "data" / "obs.npy").dtype == np.uint8
    for number, trajectory in zip(loaded.episodes.tolist(), loaded, strict=True):
        expected = image_episode(number, length=1 + number % 5)
        assert trajectory.obs.dtype == np.uint8
        np.testing.assert_array_equal(trajectory.obs, expected.obs)


def test_a_dataset_of_version_1_is_read_as_flat_float32(tmp_path):
    path = dataset(tmp_path / "data")
    about = json.loads((path / "meta.json").read_text())["dataset"]
    kept = ["act_dim", "horizon", "count", "seen", "has_costs", "crc32"]
    old = {"env_id": about["env_id"], "obs_dim": 2} | {name: about[name] for name in kept}
    top = {"format": "pbcrl-trajectories", "version": 1}
    top |= {"crc32": zlib.crc32(json.dumps(old).encode()), "dataset": old}
    (path / "meta.json").write_text(json.dumps(top, indent=2) + "\n")
    loaded = TrajectoryDataset(path)
    assert (loaded.obs_shape, loaded.act_dim) == ((2,), 1)
    for number, trajectory in enumerate(loaded):
        assert_is_episode(trajectory, number)
    (path / "meta.json").write_text(
        (path / "meta.json").read_text().replace('_dim": 2', '_dim": 3')
    )
    with pytest.raises(CorruptFileError, match="do not match its crc32"):
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
    for number, trajectory in enumerate(TrajectoryDataset(tmp_path / "data")):
        assert_is_episode(trajectory, number)
    assert f"2 trajectories are in {tmp_path / 'data'}" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_an_interrupted_run_without_an_episode_leaves_nothing_behind(tmp_path, caplog):
    with pytest.raises(KeyboardInterrupt):
        dataset_until(KeyboardInterrupt, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    assert "no dataset was written: a dataset needs at least one finished episode" in caplog.text


def test_a_run_without_an_episode_is_an_error_and_leaves_nothing_behind(tmp_path):
    out = writer(tmp_path / "data")
    with pytest.raises(StorageError, match=r"at least one finished episode, but none was added"):
        out.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_whole_trajectories(tmp_path, caplog):
    half_a_row = 256 + 5 * 2 * 4 // 2  # of observations
    with pytest.raises(StorageError, match="free disk space"):
        dataset_on_full_disk(tmp_path / "data", full_from=2, file_bytes=2 * 5 * 2 * 4 + half_a_row)
    loaded = TrajectoryDataset(tmp_path / "data")
    assert loaded.episodes.tolist() == [0, 1]
    assert_is_episode(loaded[1], 1)
    assert "2 trajectories are in" in caplog.text


@pytest.mark.parametrize("seed", range(6))
def test_a_replacement_that_a_full_disk_tears_costs_nothing(tmp_path, seed):
    """Whichever row it was to replace: that one stays until the new one is whole."""
    with pytest.raises(StorageError, match="free disk space"):
        dataset_on_full_disk(tmp_path / "data", full_from=3, file_bytes=256 + 10, seed=seed)
    loaded = TrajectoryDataset(tmp_path / "data")
    assert loaded.episodes.tolist() == [0, 1, 2]
    for number, trajectory in enumerate(loaded):
        assert_is_episode(trajectory, number)


def test_a_run_goes_on_without_the_trajectory_that_a_full_disk_tore(tmp_path):
    with writer(tmp_path / "data") as out:
        out.add(episode(0, length=1))
        with full_disk(256 + 5 * 2 * 4 + 10), pytest.raises(StorageError, match="free disk space"):
            out.add(episode(1, length=2))
        out.add(episode(2, length=3))
    loaded = TrajectoryDataset(tmp_path / "data")
    assert (loaded.episodes.tolist(), loaded.seen) == ([0, 2], 3)
    assert_is_episode(loaded[1], 2)


def test_while_a_dataset_is_being_written_it_is_not_at_its_path(tmp_path):
    out = writer(tmp_path / "data")
    out.add(episode(0, length=1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["data.partial"]
    out.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    out.close()  # a second call does nothing
    with pytest.raises(StorageError, match=r"data is closed; write a new one"):
        out.add(episode(1))


# -- What a killed run leaves ----------------------------------------------------------------


def killed_run(path: Path, *, n_episodes: int, **changes: object) -> Path:
    """A dataset that nobody closes, as SIGKILL leaves it: what was only in memory is lost."""
    out = writer(path, **changes)
    for number in range(n_episodes):
        out.add(episode(number, length=1 + number % 5))
    out._rows.close()  # the system does this
    return path


@pytest.mark.parametrize("n_episodes", [1, 4, 30])
def test_what_a_killed_run_collected_can_be_finished_and_opened(tmp_path, n_episodes):
    """The same sample as that of a run which ended well."""
    ended = TrajectoryDataset(dataset(tmp_path / "ended", n_episodes=n_episodes))
    loaded = TrajectoryDataset.recover(killed_run(tmp_path / "killed", n_episodes=n_episodes))
    assert loaded.episodes.tolist() == ended.episodes.tolist()
    assert loaded.seen == ended.seen == n_episodes
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ended", "killed"]


def test_opening_an_unfinished_dataset_says_how_to_finish_it(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=2)
    with pytest.raises(StorageError, match=r"is still data.partial; .*recover\('.*/data'\)"):
        TrajectoryDataset(path)


def test_another_run_does_not_replace_what_a_killed_one_left(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=3)
    with pytest.raises(StorageError, match=r"left 3 trajectories in .*data.partial, which a new"):
        writer(path)
    assert len(TrajectoryDataset.recover(path)) == 3


def test_a_killed_run_is_replaced_if_asked(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=3)
    assert TrajectoryDataset(dataset(path, n_episodes=1, overwrite=True)).seen == 1


@pytest.mark.parametrize("first", [0, 2, 3, 20])
def test_a_resumed_run_goes_on_where_it_was_killed(tmp_path, first):
    path = killed_run(tmp_path / "data", n_episodes=first)
    with writer(path, resume=True) as out:
        assert out.seen == first
        for number in range(first, 25):
            out.add(episode(number, length=1 + number % 5))
    loaded = TrajectoryDataset(path)
    assert (len(loaded), loaded.seen) == (4, 25)
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))
    steps = np.load(path / "obs.npy")
    assert not steps[np.arange(5) >= loaded.lengths[:, None]].any()


def test_with_its_generator_a_resumed_run_draws_the_sample_of_one_that_was_never_killed(tmp_path):
    found = []
    for stops in [(), (3,), (9, 10, 31)]:
        path, rng = tmp_path / str(len(stops)), np.random.default_rng(3)
        out = writer(path, rng=rng)
        for number in range(60):
            if number in stops:
                out._rows.close()  # the system does this
                out = writer(path, rng=rng, resume=True)
            out.add(episode(number, length=1 + number % 5))
        out.close()
        found.append(TrajectoryDataset(path).episodes.tolist())
    assert found[1] == found[2] == found[0]


def test_resuming_where_nothing_was_left_starts_afresh(tmp_path):
    assert len(TrajectoryDataset(dataset(tmp_path / "data", n_episodes=2, resume=True))) == 2


def test_a_run_is_resumed_with_its_own_arguments_only(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=2)
    with pytest.raises(
        MismatchError, match=r"horizon, capacity of .* differ .* \[5, 4\] and \[9, 8"
    ):
        writer(path, resume=True, horizon=9, capacity=8)
    with writer(path, resume=True) as out, pytest.raises(ValueError, match="have costs or none"):
        out.add(episode(2, costs=False))


def test_the_partial_folder_of_a_run_that_was_killed_without_an_episode_is_replaced(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=0)
    (tmp_path / "data.partial" / "obs.npy").write_bytes(b"x" * 10_000)  # half an episode
    with pytest.raises(StorageError, match="at least one finished episode"):
        TrajectoryDataset.recover(path)
    loaded = TrajectoryDataset(dataset(path, n_episodes=1))
    assert len(loaded) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_partial_folder_that_holds_anything_else_is_left_alone(tmp_path):
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match=r"alone in its folder, but .* holds thesis.tex; move"):
        writer(tmp_path / "data", overwrite=True)
    assert (tmp_path / "data.partial" / "thesis.tex").exists()


def test_there_must_be_something_to_recover(tmp_path):
    with pytest.raises(StorageError, match=r"journal.jsonl: No such file or directory; check the"):
        TrajectoryDataset.recover(tmp_path / "data")


def test_rows_that_a_power_cut_kept_from_the_disk_are_left_out_with_a_warning(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=3)
    with open(tmp_path / "data.partial" / "actions.npy", "r+b") as file:
        file.truncate(256 + 5 * 4 + 7)  # in the middle of the second row
    with pytest.warns(UserWarning, match=r"2 of 3 in .*data.partial do not match their checksum"):
        loaded = TrajectoryDataset.recover(path)
    assert (loaded.episodes.tolist(), loaded.seen) == ([0], 3)
    assert_is_episode(loaded[0], 0)


def test_what_is_wholly_damaged_is_refused_and_left_as_it_is(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=3)
    (tmp_path / "data.partial" / "obs.npy").write_bytes(b"")
    with pytest.raises(CorruptFileError, match="none of its trajectories matches its checksum"):
        TrajectoryDataset.recover(path)
    assert (tmp_path / "data.partial" / "actions.npy").stat().st_size > 0


def test_a_run_that_was_killed_while_it_finished_can_be_finished(tmp_path):
    """It leaves a half-written meta.json under a temporary name."""
    path = killed_run(tmp_path / "data", n_episodes=3)
    (tmp_path / "data.partial" / "meta.json.123.partial").write_text("{")
    assert len(TrajectoryDataset.recover(path)) == 3
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)


def test_a_damaged_journal_is_refused_with_its_line(tmp_path):
    path = killed_run(tmp_path / "data", n_episodes=3)
    journal = tmp_path / "data.partial" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], lines[3].replace(b"1", b"2", 1), *lines[4:]]))
    with pytest.raises(CorruptFileError, match=r"journal.jsonl is damaged .*: line 4 does not"):
        TrajectoryDataset.recover(path)


def test_a_second_writer_is_refused_while_the_first_is_at_work(tmp_path):
    path = tmp_path / "data"
    with writer(path) as out:
        out.add(episode(0, length=1))
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(StorageError, match=r"one writer at a time, but another one has"):
                writer(path, **options)
        with pytest.raises(StorageError, match=r"one writer at a time"):
            TrajectoryDataset.recover(path)
        out.add(episode(1, length=2))
    assert TrajectoryDataset(path).episodes.tolist() == [0, 1]


def test_an_existing_dataset_is_not_replaced_unless_asked(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2)
    with pytest.raises(StorageError, match=r"data exists; choose another path, remove it, or pass"):
        writer(path)
    assert len(TrajectoryDataset(path)) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_overwriting_keeps_the_old_dataset_until_the_new_one_is_whole(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2)
    with pytest.raises(KeyboardInterrupt):
        dataset_until(KeyboardInterrupt, path)
    assert len(TrajectoryDataset(path)) == 2
    dataset(path, n_episodes=4, overwrite=True)
    assert len(TrajectoryDataset(path)) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_overwriting_refuses_a_folder_that_holds_anything_else(tmp_path):
    path = dataset(tmp_path / "data")
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match=r"replaces a dataset and nothing else.*thesis.tex"):
        writer(path, overwrite=True)
    assert (path / "thesis.tex").exists()


def test_a_dataset_below_a_file_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="must be writable"):
        writer(tmp_path / "file" / "data")


def test_a_dataset_in_a_read_only_folder_is_read_and_none_is_written_there(tmp_path):
    (tmp_path / "folder").mkdir()
    dataset(tmp_path / "folder" / "data")
    killed_run(tmp_path / "folder" / "killed", n_episodes=2)
    with read_only(tmp_path / "folder") as folder:
        assert len(TrajectoryDataset(folder / "data")) == 3
        for attempt in (
            lambda: writer(folder / "other"),
            lambda: writer(folder / "data", overwrite=True),
            lambda: TrajectoryDataset.recover(folder / "killed"),
        ):
            with pytest.raises(StorageError, match=r"must be writable, but: Permission denied"):
                attempt()
        assert sorted(entry.name for entry in folder.iterdir()) == ["data", "killed.partial"]


def test_another_env_names_both_envs(tmp_path):
    path = dataset(tmp_path / "data")
    with pytest.raises(MismatchError, match=r"on 'Toy-v0', not on 'Goal1'; record one on 'Goal1'"):
        TrajectoryDataset(path, env_id="Goal1")


def test_a_missing_dataset_says_so(tmp_path):
    with pytest.raises(StorageError, match=r"meta.json: No such file or directory; check the path"):
        TrajectoryDataset(tmp_path / "none")


def test_a_dataset_of_another_version_is_refused(tmp_path):
    path = dataset(tmp_path / "data")
    meta = path / "meta.json"
    meta.write_text(meta.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(FormatVersionError, match=r"version 1 or 2 of pbcrl-traj.* version 3; use"):
        TrajectoryDataset(path)


FILES = ["obs.npy", "actions.npy", "costs.npy", "lengths.npy", "episodes.npy", "meta.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_file_is_detected_and_the_file_named(tmp_path, name):
    path = dataset(tmp_path / "data")
    for damaged in with_flipped_bits((path / name).read_bytes(), step=41):
        (path / name).write_bytes(damaged)
        with pytest.raises((CorruptFileError, FormatVersionError), match=name):
            TrajectoryDataset(path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_extended_file_is_detected_and_named(tmp_path, name):
    path = dataset(tmp_path / "data")
    good = (path / name).read_bytes()
    for damaged in (b"", good[:100], good[:-1], good + b"\0"):
        (path / name).write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=rf"{name} is damaged"):
            TrajectoryDataset(path)


def test_a_file_that_is_gone_is_named(tmp_path):
    path = dataset(tmp_path / "data")
    (path / "costs.npy").unlink()
    with pytest.raises(StorageError, match=r"costs.npy: No such file"):
        TrajectoryDataset(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"count": 10**15},
            r"obs.npy is damaged .* is not the <f4 array of shape \(1000000000000000",
        ),
        ({"horizon": 10**30}, "obs.npy is damaged"),
        ({"count": -3}, "not all positive integers"),
        ({"obs_shape": [2.0]}, "not all positive integers"),
        ({"count": True}, "not all positive integers"),
        ({"horizon": 4, "obs_shape": [2]}, "obs.npy is damaged"),
        ({"obs_shape": [1] * 70 + [2]}, "obs_shape is no list of 1 to 8 sizes"),
        ({"obs_shape": []}, "obs_shape is no list of 1 to 8 sizes"),
        ({"obs_shape": 2}, "obs_shape is no list of 1 to 8 sizes"),
        ({"obs_shape": [[2]]}, "not all positive integers"),
        ({"obs_dtype": "O"}, "obs_dtype is not one of <f4, |u1"),
        ({"obs_dtype": ["<f4"]}, "obs_dtype is not one of <f4, |u1"),
        ({"obs_dtype": "|u1"}, "obs.npy is damaged"),
        ({"obs_dim": 2}, "describes no dataset"),
    ],
)
def test_absurd_sizes_in_the_description_are_refused_before_anything_is_read(
    tmp_path, changes, message
):
    path = dataset(tmp_path / "data")
    rewrite_meta(path, **changes)
    with pytest.raises(CorruptFileError, match=message):
        TrajectoryDataset(path)


def test_a_pickle_in_the_place_of_an_array_is_not_executed(tmp_path):
    path = dataset(tmp_path / "data")
    np.save(path / "obs.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptFileError, match=r"obs\.npy is damaged"):
        TrajectoryDataset(path)


def test_lengths_beyond_the_horizon_are_refused(tmp_path):
    path = dataset(tmp_path / "data")
    data = (path / "lengths.npy").read_bytes()[:256] + np.array([1, 2, 6], "<i8").tobytes()
    (path / "lengths.npy").write_bytes(data)
    crc32 = json.loads((path / "meta.json").read_text())["dataset"]["crc32"]
    rewrite_meta(path, crc32=crc32 | {"lengths": zlib.crc32(data)})
    with pytest.raises(CorruptFileError, match=r"its lengths are not all in \[1, 5\]"):
        TrajectoryDataset(path)
