import json
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from pbcrl.errors import CorruptFileError, FormatVersionError, MismatchError, StorageError
from pbcrl.storage import (
    LabelLog,
    TrajectoryDataset,
    TrajectoryWriter,
    load_tensors,
    read_labels,
    save_tensors,
)
from pbcrl.trajectory import Label, Trajectory, pad


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """No file may grow past `file_bytes`; a write that would is cut off there."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- Checkpoints -----------------------------------------------------------------------------------

META = {"hidden_sizes": [64, 64], "dead_zone": 1.5, "env_id": "Toy-δ", "cap": math.inf}


def checkpoint(folder: Path, **changes: object) -> Path:
    path = folder / "model.safetensors"
    tensors = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor([7])}
    save_tensors(path, **{"kind": "cost_model", "tensors": tensors, "meta": META, **changes})
    return path


def edit_about(path: Path, **changes: object) -> None:
    """Rewrite entries of a checkpoint's description, leaving its tensors and checksum alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    sha256, _, text = header["__metadata__"]["pbcrl"].partition(" ")
    header["__metadata__"]["pbcrl"] = f"{sha256} {json.dumps(json.loads(text) | changes)}"
    path.write_bytes(safetensors_bytes(header, data[8 + length :]))


def safetensors_bytes(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
)
def test_tensors_come_back_with_their_values_dtypes_and_shapes(tmp_path, dtype):
    tensors = {
        "matrix": torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
    }
    loaded, meta = load_tensors(checkpoint(tmp_path, tensors=tensors), kind="cost_model")
    assert meta == META
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)  # dtype and shape too


def test_non_finite_tensors_come_back_as_they_were(tmp_path):
    strange = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    loaded, _ = load_tensors(checkpoint(tmp_path, tensors={"x": strange}), kind="cost_model")
    assert torch.equal(loaded["x"].view(torch.int32), strange.view(torch.int32))


def test_views_and_tensors_that_share_memory_come_back(tmp_path):
    base = torch.arange(6.0, requires_grad=True)
    tensors = {"base": base, "again": base, "transposed": base.reshape(2, 3).T}
    loaded, _ = load_tensors(checkpoint(tmp_path, tensors=tensors), kind="cost_model")
    assert torch.equal(loaded["again"], torch.arange(6.0))
    assert torch.equal(loaded["transposed"], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_a_loaded_tensor_can_be_written_to(tmp_path):
    loaded, _ = load_tensors(checkpoint(tmp_path), kind="cost_model")
    loaded["weight"] += 1
    assert loaded["weight"][0, 0] == 1


def test_equal_contents_give_equal_bytes_whatever_the_order(tmp_path):
    a, b = torch.ones(2), torch.zeros(3)
    first = checkpoint(tmp_path / "1", tensors={"a": a, "b": b}).read_bytes()
    second = checkpoint(tmp_path / "2", tensors={"b": b, "a": a}).read_bytes()
    assert first == second


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_detected(tmp_path):
    path = checkpoint(tmp_path)
    good = path.read_bytes()
    for bit in range(
        0, 8 * len(good), 3
    ):  # 3 and 8 share no factor: each bit of a byte has its turn
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises((CorruptFileError, FormatVersionError)):
            load_tensors(path, kind="cost_model")


def test_every_truncation_and_extension_is_detected(tmp_path):
    path = checkpoint(tmp_path)
    good = path.read_bytes()
    for damaged in [good[:length] for length in range(len(good))] + [good + b"\0", good + good]:
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match="damaged or not a file of this package"):
            load_tensors(path, kind="cost_model")


ABSURD_SHAPE = {"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    "content",
    [
        b"hello, this is a text file",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**20) + b"[" * 2**20,
        safetensors_bytes(ABSURD_SHAPE, bytes(4)),
        safetensors_bytes({}, b""),
    ],
    ids=["text", "header of 8 EiB", "nested header", "tensor of 4 TB", "foreign safetensors"],
)
def test_what_is_no_checkpoint_is_called_corrupt(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"file is damaged .*; restore it from a copy"):
        load_tensors(path, kind="cost_model")


@pytest.mark.parametrize("changes", [{"meta": {"dead_zone": 2.0}}, {"kind": "ppo"}, {"meta": []}])
def test_the_checksum_covers_meta_and_kind(tmp_path, changes):
    path = checkpoint(tmp_path)
    edit_about(path, **changes)
    with pytest.raises(CorruptFileError, match="do not match its sha256"):
        load_tensors(path, kind="ppo")


def test_another_format_version_names_both_versions(tmp_path):
    path = checkpoint(tmp_path)
    edit_about(path, version=2)
    with pytest.raises(FormatVersionError, match=r"reads version 1 .* has version 2; use the"):
        load_tensors(path, kind="cost_model")


def test_another_kind_names_both_kinds(tmp_path):
    with pytest.raises(MismatchError, match=r"holds 'cost_model', not 'ppo_lag'; pass the file"):
        load_tensors(checkpoint(tmp_path), kind="ppo_lag")


def test_a_missing_checkpoint_says_so(tmp_path):
    with pytest.raises(StorageError, match=r"none: No such file or directory; check the path"):
        load_tensors(tmp_path / "none", kind="cost_model")


def test_a_save_that_fails_at_the_start_leaves_the_old_file_and_no_other(tmp_path):
    path = checkpoint(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint(tmp_path, meta={"bad": object()})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_at_the_last_step_leaves_the_old_entry_and_no_other(tmp_path):
    inside = tmp_path / "model.safetensors" / "inside"
    inside.mkdir(parents=True)  # a folder cannot be replaced by a file
    with pytest.raises(StorageError, match=r"model.safetensors must be writable, but: Is a dir"):
        checkpoint(tmp_path)
    assert list(tmp_path.rglob("*")) == [inside.parent, inside]


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_old_one_and_no_other(tmp_path):
    path = checkpoint(tmp_path)
    before = path.read_bytes()
    with full_disk(4096), pytest.raises(StorageError, match="File too large; free disk space"):
        checkpoint(tmp_path, tensors={"x": torch.ones(10_000)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"must be writable, but: .*; free disk space, check"):
        checkpoint(tmp_path / "file" / "below")


@pytest.mark.parametrize("value", [3.0, np.ones(2), torch.ones(2).to_sparse()])
def test_only_dense_tensors_are_stored(tmp_path, value):
    with pytest.raises(TypeError, match="holds dense tensors, but 'x' is"):
        checkpoint(tmp_path, tensors={"x": value})


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"safetensors cannot hold torch.complex128"):
        checkpoint(tmp_path, tensors={"x": torch.ones(2, dtype=torch.complex128)})


def test_the_reserved_tensor_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reserves the name '__metadata__'"):
        checkpoint(tmp_path, tensors={"__metadata__": torch.ones(1)})


# -- Label logs ------------------------------------------------------------------------------------

LABELS = [Label(1.0, 1.0, 0.0), Label(0.5, math.nan, 0.0), Label(math.nan, 0.0, 1.0)]


def label_log(path: Path) -> Path:
    LabelLog(path).append(LABELS)
    return path


def test_labels_come_back_in_order_with_nan_where_none_was_given(tmp_path):
    log = LabelLog(tmp_path / "made" / "labels.jsonl")
    assert read_labels(log.path) == []
    log.append(LABELS[:1])
    log.append([])
    log.append(LABELS[1:])
    assert repr(read_labels(log.path)) == repr(LABELS)  # NaN equals itself only in print


def test_a_label_line_is_readable_json(tmp_path):
    header, _, second, _ = label_log(tmp_path / "log").read_text().splitlines()
    assert json.loads(header) == {"format": "pbcrl-labels", "version": 1}
    entry = json.loads(second)
    assert entry.pop("crc32") > 0
    assert entry == {"preference": 0.5, "first_safe": None, "second_safe": 0.0}


def test_an_existing_log_is_continued(tmp_path):
    path = label_log(tmp_path / "log")
    LabelLog(path).append([Label(0.25, 0.0, 0.0)])
    assert repr(read_labels(path)) == repr([*LABELS, Label(0.25, 0.0, 0.0)])


def test_a_torn_last_line_is_dropped_with_a_warning_wherever_it_tore(tmp_path):
    path = label_log(tmp_path / "log")
    good = path.read_bytes()
    last_line = good.rindex(b"\n", 0, -1) + 1
    for length in range(last_line + 1, len(good)):
        path.write_bytes(good[:length])
        with pytest.warns(UserWarning, match=rf"last {length - last_line} bytes .* are dropped"):
            assert repr(read_labels(path)) == repr(LABELS[:2])


def test_continuing_a_torn_log_first_removes_the_half_line(tmp_path):
    path = label_log(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="half a line"):
        log = LabelLog(path)
    log.append(LABELS[2:])
    assert repr(read_labels(path)) == repr(LABELS)


def test_a_log_that_tore_in_its_first_line_starts_afresh(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"format": "pb')
    with pytest.warns(UserWarning, match="half a line"):
        log = LabelLog(path)
    log.append(LABELS[:1])
    assert read_labels(path) == LABELS[:1]


def test_a_flipped_bit_before_the_last_line_break_is_detected(tmp_path):
    path = label_log(tmp_path / "log")
    good = path.read_bytes()
    for bit in range(0, 8 * (len(good) - 1), 3):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises((CorruptFileError, FormatVersionError)):
            read_labels(path)


@pytest.mark.parametrize(
    "line", [b"{}", b"", b"[1]", b"\xff", b"null", b'{"preference": 2}', b"[" * 10**5]
)
def test_damage_inside_a_log_names_the_line_and_stops_appending_too(tmp_path, line):
    path = label_log(tmp_path / "log")
    lines = path.read_bytes().split(b"\n")
    lines[2] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(CorruptFileError, match=r"log is damaged .*: line 3 "):
        read_labels(path)
    with pytest.raises(CorruptFileError, match="line 3"):
        LabelLog(path)


def test_another_file_is_not_continued_as_a_label_log(tmp_path):
    path = tmp_path / "notes"
    path.write_text('{"format": "diary", "version": 1}\n')
    with pytest.raises(CorruptFileError, match="its format is 'diary', not 'pbcrl-labels'"):
        LabelLog(path)
    assert path.read_text().startswith('{"format": "diary"')


def test_a_text_without_a_line_break_is_not_taken_for_a_torn_label_log(tmp_path):
    path = tmp_path / "notes"
    path.write_text("one precious line")
    with pytest.raises(CorruptFileError, match="does not begin as a label log does"):
        LabelLog(path)
    assert path.read_text() == "one precious line"


def test_labels_that_do_not_fit_on_the_disk_leave_the_log_as_it_was(tmp_path):
    log = LabelLog(label_log(tmp_path / "log"))
    before = log.path.read_bytes()
    with full_disk(len(before) + 100), pytest.raises(StorageError, match="free disk space"):
        log.append(LABELS)
    assert log.path.read_bytes() == before
    log.append(LABELS)
    assert repr(read_labels(log.path)) == repr(LABELS + LABELS)


def test_a_label_log_of_another_version_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"format": "pbcrl-labels", "version": 7}\nwhatever\n')
    with pytest.raises(FormatVersionError, match=r"version 1 of pbcrl-labels, but .* version 7"):
        read_labels(path)


def test_a_label_log_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="must be writable"):
        LabelLog(tmp_path / "file" / "log")


# -- Trajectory datasets ---------------------------------------------------------------------------


def episode(number: int, *, length: int = 3, costs: bool = True) -> Trajectory:
    """Rows that say which episode and which step they are: obs (number, t), action -number."""
    steps = np.arange(length, dtype=np.float32)
    return Trajectory(
        obs=np.stack([np.full_like(steps, number), steps], axis=1),
        actions=np.full((length, 1), -number, np.float32),
        costs=steps / 2 if costs else None,
    )


def writer(path: Path, **changes: object) -> TrajectoryWriter:
    sizes = {"obs_dim": 2, "act_dim": 1, "horizon": 5, "capacity": 4}
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


def test_every_episode_of_a_run_is_equally_likely_to_be_kept(tmp_path):
    """Algorithm R: 3 of 8 episodes, 200 runs; chi-square with 7 degrees of freedom."""
    rng, kept = np.random.default_rng(0), np.zeros(8)
    episodes = [episode(number, length=1) for number in range(8)]
    for _ in range(200):
        with writer(tmp_path / "data", capacity=3, horizon=1, rng=rng, overwrite=True) as out:
            for trajectory in episodes:
                out.add(trajectory)
        kept[TrajectoryDataset(tmp_path / "data").episodes] += 1
    expected = 200 * 3 / 8
    # Drawing 3 of 8 without replacement shrinks the variance of each count by 5/8 * 8/7.
    assert ((kept - expected) ** 2 / (expected * 5 / 7)).sum() < 18.5  # 99 % quantile


def test_a_dataset_takes_no_more_space_than_its_trajectories(tmp_path):
    path = dataset(tmp_path / "data", n_episodes=2, capacity=10_000)
    assert (path / "obs.npy").stat().st_size == 256 + 2 * 5 * 2 * 4
    assert (path / "lengths.npy").stat().st_size == 256 + 2 * 8


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
    found = (loaded.env_id, loaded.obs_dim, loaded.act_dim, loaded.horizon, loaded.seen)
    assert found == ("Toy-v0", 2, 1, 5, 9)
    assert loaded.has_costs


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (
            Trajectory(np.zeros((2, 3)), np.zeros((2, 1)), np.zeros(2)),
            "have obs_dim 2 and act_dim 1, got 3 and 1",
        ),
        (
            Trajectory(np.zeros((2, 2)), np.zeros((2, 4)), np.zeros(2)),
            "have obs_dim 2 and act_dim 1, got 2 and 4",
        ),
        (episode(0, length=6), "have at most 5 steps, got 6; open the writer with a longer"),
        (episode(0, costs=False), "have costs or none has, but this one differs"),
    ],
    ids=["obs_dim", "act_dim", "too long", "no costs"],
)
def test_a_trajectory_that_does_not_fit_is_refused_and_costs_nothing(tmp_path, trajectory, message):
    with writer(tmp_path / "data") as out:
        out.add(episode(0, length=1))
        with pytest.raises(ValueError, match=message):
            out.add(trajectory)
        out.add(episode(1, length=2))
    assert TrajectoryDataset(tmp_path / "data").episodes.tolist() == [0, 1]


def test_sizes_below_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sizes of at least 1, got obs_dim=2, act_dim=0, horizon"):
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
def test_a_row_whose_replacement_failed_is_left_out(tmp_path, seed):
    """The first replacement fails, whichever row it hits; the last row takes its place."""
    with pytest.raises(StorageError, match="free disk space"):
        dataset_on_full_disk(tmp_path / "data", full_from=3, file_bytes=256 + 10, seed=seed)
    loaded = TrajectoryDataset(tmp_path / "data")
    assert len(loaded) == 2
    for number, trajectory in zip(loaded.episodes, loaded, strict=True):
        assert_is_episode(trajectory, int(number))


def test_while_a_dataset_is_being_written_it_is_not_at_its_path(tmp_path):
    out = writer(tmp_path / "data")
    out.add(episode(0, length=1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["data.partial"]
    out.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    out.close()  # a second call does nothing
    with pytest.raises(StorageError, match=r"data is closed; write a new one"):
        out.add(episode(1))


def test_the_partial_folder_of_a_killed_run_is_replaced(tmp_path):
    killed = tmp_path / "data.partial"
    killed.mkdir()
    (killed / "obs.npy").write_bytes(b"x" * 10_000)
    loaded = TrajectoryDataset(dataset(tmp_path / "data", n_episodes=1))
    assert len(loaded) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


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
    meta.write_text(meta.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(FormatVersionError, match=r"version 1 of pbcrl-trajectories, .* version 2"):
        TrajectoryDataset(path)


FILES = ["obs.npy", "actions.npy", "costs.npy", "lengths.npy", "episodes.npy", "meta.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_file_is_detected_and_the_file_named(tmp_path, name):
    path = dataset(tmp_path / "data")
    good = (path / name).read_bytes()
    for bit in range(0, 8 * len(good), 5):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
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
        ({"obs_dim": 2.0}, "not all positive integers"),
        ({"count": True}, "not all positive integers"),
        ({"horizon": 4, "obs_dim": 2}, "obs.npy is damaged"),
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
