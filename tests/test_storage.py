import json
import math
import os
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch

from pbcrl.errors import (
    CorruptFileError,
    FormatVersionError,
    MismatchError,
    NonFiniteError,
    StorageError,
)
from pbcrl.storage import (
    FolderLock,
    load_tensors,
    remove_leftovers,
    save_tensors,
    write_atomically,
)

from .damage import full_disk, little_memory, read_only, with_flipped_bits

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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_never_replace_finite_ones(tmp_path, bad):
    path = checkpoint(tmp_path, finite=True)
    before = path.read_bytes()
    tensors = {"weight": torch.ones(2, 3), "bias": torch.tensor([0.0, bad, 1.0])}
    with pytest.raises(NonFiniteError, match=r"1 of the 3 entries of 'bias' are NaN .*; nothing w"):
        checkpoint(tmp_path, tensors=tensors, finite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
    for damaged in with_flipped_bits(path.read_bytes(), step=13):
        path.write_bytes(damaged)
        with pytest.raises((CorruptFileError, FormatVersionError)):
            load_tensors(path, kind="cost_model")


def test_a_truncated_or_extended_checkpoint_is_detected(tmp_path):
    path = checkpoint(tmp_path)
    good = path.read_bytes()
    lengths = [*range(0, len(good), 7), len(good) - 1]
    for damaged in [good[:length] for length in lengths] + [good + b"\0", good + good]:
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


def test_a_file_of_a_terabyte_that_holds_nothing_is_refused_before_it_is_read(tmp_path):
    path = checkpoint(tmp_path)
    os.truncate(path, 2**40)
    with pytest.raises(
        CorruptFileError, match=r"tensors that end at 32 in a file of 1099511627776"
    ):
        load_tensors(path, kind="cost_model")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_folder_or_a_pipe_is_no_checkpoint_and_does_not_block(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(StorageError, match=rf"{name}: it is a folder, a pipe or a device"):
            load_tensors(tmp_path / name, kind="cost_model")


def test_a_checkpoint_in_a_read_only_folder_is_read_and_not_replaced(tmp_path):
    checkpoint(tmp_path / "folder")
    with read_only(tmp_path / "folder") as folder:
        _, meta = load_tensors(folder / "model.safetensors", kind="cost_model")
        assert meta == META
        with pytest.raises(StorageError, match=r"must be writable, but: Permission denied; free"):
            checkpoint(folder)
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]


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


# -- One writer per folder -------------------------------------------------------------------------


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    with (
        FolderLock(tmp_path / "made" / "run") as lock,
        pytest.raises(StorageError, match=r"one writer at a time, .* at work in .*run; wait u"),
    ):
        FolderLock(lock.folder)
    FolderLock(tmp_path / "made" / "run").release()
    assert [file.name for file in lock.folder.iterdir()] == [".lock"]


def test_a_lock_that_nobody_holds_any_more_is_released(tmp_path):
    FolderLock(tmp_path)
    FolderLock(tmp_path).release()


LOCKED = """
import os, sys, time
from pbcrl.storage import FolderLock
lock = FolderLock(sys.argv[1])
if sys.argv[2] == "fork":
    parent, child = os.pipe()
    if os.fork() == 0:
        os.close(1)
        os.write(child, b".")
        time.sleep(1e6)
    os.read(parent, 1)  # else the kill may come before the child closed its copy of the lock
print("locked", flush=True)
time.sleep(1e6)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and flock")
@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_lock_is_released_with_its_process_even_if_a_forked_child_lives_on(tmp_path, how):
    command = [sys.executable, "-c", LOCKED, str(tmp_path), how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            with pytest.raises(StorageError, match="one writer at a time"):
                FolderLock(tmp_path)
            process.kill()
            process.wait()
            FolderLock(tmp_path).release()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_hold_the_lock_and_leaves_it_to_its_parent_when_it_ends(tmp_path):
    code = """
import multiprocessing, sys
from pbcrl.storage import FolderLock
lock = FolderLock(sys.argv[1])
def child(): print(lock.held, flush=True); lock.release()
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join()
print(lock.held, process.exitcode, flush=True)
try: FolderLock(sys.argv[1])
except Exception as error: print(type(error).__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "0", "StorageError"]


def test_the_lock_is_that_of_filelock_which_windows_has_too(tmp_path):
    """Taken by the library alone, it is taken."""
    with (
        filelock.FileLock(tmp_path / ".lock"),
        pytest.raises(StorageError, match="one writer at a time"),
    ):
        FolderLock(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_pipe_in_the_place_of_the_lock_does_not_block(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    FolderLock(tmp_path).release()


def test_a_read_only_folder_has_no_writer(tmp_path):
    (tmp_path / "folder").mkdir()
    with (
        read_only(tmp_path / "folder") as folder,
        pytest.raises(StorageError, match=r"folder must be writable, but: Permission denied"),
    ):
        FolderLock(folder)


def test_what_killed_writes_left_is_removed_and_nothing_else(tmp_path):
    kept = ["agent.safetensors", "notes.partial", "data.12.partial.txt", "12.partial"]
    for name in [*kept, "agent.safetensors.12.partial", "args.json.4194304.partial"]:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(kept)


def test_a_kill_in_the_middle_of_a_write_leaves_what_remove_leftovers_removes(tmp_path):
    write_atomically(tmp_path / "args.json", b"{}")
    code = (
        "import os, sys; from pathlib import Path; from pbcrl.storage import write_atomically\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "write_atomically(Path(sys.argv[1]), b'{1}')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "args.json")], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"{}"]


def test_a_header_of_a_million_tensors_takes_little_memory(tmp_path):
    """An empty tensor is 60 bytes of a header, and was two kilobytes of memory."""
    path = tmp_path / "many.safetensors"
    for count in (200_000, 1_200_000):
        about = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        header = "{" + ",".join(f'"{i}":{about}' for i in range(count)) + "}"
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
        del header
        with (
            pytest.raises(CorruptFileError, match=r"200000 tensors|a header of"),
            little_memory(512),
        ):
            load_tensors(path, kind="agent")


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "agent.safetensors"
    with pytest.raises(ValueError, match="fewer than 50000 tensors, got 50000 for"):
        save_tensors(path, kind="agent", tensors=dict.fromkeys(map(str, range(50_000))), meta={})
    with pytest.raises(ValueError, match="take at most 16777216 bytes, got 2"):
        save_tensors(path, kind="agent", tensors={}, meta={"log": "x" * 2 * 10**7})
    assert not path.exists()
