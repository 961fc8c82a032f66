"""Ten thousand damaged, hostile and misplaced files: refused by name, or read as they were written.

A case is an honest file, damaged as drawn. To be refused is to raise a `StorageError`; any other
exception fails the test, and so does memory that grows with what a file claims.
"""

import io
import json
import math
import os
import pickle
import re
import shutil
import sqlite3
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pbcrl.cost_model import CostModel
from pbcrl.data.dataset import TrajectoryDataset, TrajectoryWriter
from pbcrl.data.label_log import LabelLog, read_labels
from pbcrl.data.label_log import _line as _label_line
from pbcrl.dead_zone import DeadZone
from pbcrl.ensemble import CostModelEnsemble, load_cost_model
from pbcrl.errors import StorageError
from pbcrl.label.store import STORE, LabelStore
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.storage import load_tensors, save_tensors
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Trajectory
from pbcrl.trees import UNUSED, TreeCost, Trees

from .damage import little_memory
from .every_space import boxes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS, FIFOs, /dev/zero")

HOSTILE = [
    "-1",
    "0",
    "1e999",
    "NaN",
    "null",
    "[]",
    "{}",
    '"x"',
    "true",
    "2.5",
    str(2**63),
    "9" * 30,
]
HOSTILE_VALUES = [-1, 0, 1e999, None, [], {}, "x", True, 2.5, 2**63, 10**30, 10**9, [1] * 1000]
Content = dict[object, object]
"""What a reader made of a file, by parts; a part is missing or equal, never different."""


# -- Honest files ----------------------------------------------------------------------------


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 6, 6)
    return [Trajectory(*rng.normal(size=(2, n, 2)), rng.exponential(size=n)) for n in sizes]


def write_dataset(path: Path) -> None:
    """Of three shards."""
    with TrajectoryWriter(
        path,
        env_id="Toy-v0",
        obs_shape=(2,),
        act_dim=2,
        horizon=5,
        capacity=4,
        rng=np.random.default_rng(0),
    ) as out:
        for number, trajectory in enumerate(trajectories()):
            out.add(trajectory)
            if number % 2 == 1:
                out.flush()


def write_cost_model(path: Path) -> None:
    torch.manual_seed(0)
    CostModel(*boxes(2, 1), hidden_sizes=(3,)).save(path, env_id="Toy-v0", dead_zone=1.5)


def write_ensemble(path: Path) -> None:
    torch.manual_seed(0)
    members = [CostModel(*boxes(2, 1), hidden_sizes=(3,)) for _ in range(2)]
    CostModelEnsemble(members, pessimism=1.0).save(path, env_id="Toy-v0")


def write_trees(path: Path) -> None:
    """Two trees of one split each, in each of two members."""
    model = TreeCost(*boxes(2, 1), num_members=2)
    feature, threshold = torch.zeros(2, 2, 7, dtype=torch.int32), torch.zeros(2, 2, 7)
    child = torch.full((2, 2, 7), UNUSED, dtype=torch.int8)
    left, right = child.clone(), child.clone()
    left[..., 0], right[..., 0] = -1, -2
    value = torch.arange(32.0).reshape(2, 2, 8)
    model.set_trees(Trees(feature, threshold, left, right, value), torch.tensor([0.5, 1.5]))
    model.save(path, env_id="Toy-v0")


def write_agent(path: Path) -> None:
    multiplier = LagrangeMultiplier()
    multiplier.update(3.0)
    meta = {"multiplier": multiplier.state_dict(), "dead_zone": 1.5}
    save_tensors(path, kind="agent", tensors={"mean": torch.arange(9.0)}, meta=meta)


def write_labels(path: Path) -> None:
    with LabelLog(path) as log:
        log.append([Label(n / 9, float(n % 2), float("nan")) for n in range(9)])
        log.append([BatchLabel(1.0), Label(0.0, 0.0, 1.0, ((0, 2), (3, 4)), ())])


def write_queries(path: Path) -> None:
    with LabelLog(path) as log:
        log.ask(list("abcdef"))
        for digest in "abc":
            log.answer(digest, Label(1.0, 1.0, 0.0))


def write_store(path: Path) -> None:
    store = LabelStore(path, create=True)
    first, second, *_ = trajectories()
    store.ask([("pair", (first, second)), ("pair", (second, first)), ("batch", (first, second))])
    store.ask([("grid", (first, second))])
    unsafe = ((0, 1),)  # marked
    store.answer(1, Label(0.25, 1.0, 0.0, second_unsafe=unsafe), annotator="Ada", seconds=2.0)
    store.answer(4, GridLabel((1.0, math.nan)), annotator="Ada")
    store.answer(2, Label(1.0, 1.0, 1.0), annotator="Bob")
    store.undo(annotator="Bob")
    store.answer(3, BatchLabel(0.0), annotator="Bob")
    store.close()
    (path / ".store.lock").unlink()


def read_store(path: Path) -> Content:
    """A damaged one may be refused when it is opened, or as soon as what is damaged is read."""
    store = LabelStore(path)
    try:
        found: Content = {("label", n): repr(label) for n, label in store.labels().items()}
        for question in store.questions():
            for digest in question.members:
                one = store.trajectory(digest)
                found[digest] = (one.obs.tolist(), one.actions.tolist())
        return found | {"questions": len(store.questions()), "events": store.num_events}
    finally:
        store.close()


def read_cost_model(path: Path) -> Content:
    model, info = load_cost_model(path)
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()} | info


def read_agent(path: Path) -> Content:
    tensors, meta = load_tensors(path, kind="agent")
    multiplier = LagrangeMultiplier()
    multiplier.load_state_dict(meta["multiplier"])
    tensors |= {"value": torch.tensor([multiplier.value, DeadZone(meta["dead_zone"]).value])}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def read_label_log(path: Path) -> Content:
    """Nothing marks the end: a log that lost its last lines is a shorter log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half a line
        return {number: repr(label) for number, label in enumerate(read_labels(path))}


def read_query_log(path: Path) -> Content:
    """What lost its answer with the last lines is unanswered again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half a line
        log = LabelLog(path)
    log.close()
    return {digest: str(label) for digest, label in log.answers.items() if label is not None}


def contents(loaded: TrajectoryDataset) -> Content:
    pairs = zip(loaded.episodes.tolist(), loaded, strict=True)
    return {n: (t.obs.tolist(), t.actions.tolist(), str(t.costs)) for n, t in pairs}


def read_dataset(path: Path) -> Content:
    loaded = TrajectoryDataset(path)
    return contents(loaded) | {"about": (loaded.env_id, loaded.horizon, loaded.seen)}


@dataclass(frozen=True)
class Target:
    """A kind of file or folder, and how it is written and read."""

    write: Callable[[Path], None]
    read: Callable[[Path], Content]
    at: str
    """What `write` leaves, relative to the folder; of a folder, one file is damaged per case."""


TARGETS = {
    "cost model": Target(write_cost_model, read_cost_model, "file"),
    "ensemble": Target(write_ensemble, read_cost_model, "file"),
    "trees": Target(write_trees, read_cost_model, "file"),
    "agent": Target(write_agent, read_agent, "file"),
    "labels": Target(write_labels, read_label_log, "file"),
    "query log": Target(write_queries, read_query_log, "file"),
    "label store": Target(write_store, read_store, "file"),
    "dataset": Target(write_dataset, read_dataset, "file"),
}


# -- Damage ----------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def spans(data: bytes, rng: np.random.Generator, count: int) -> list[int]:
    return sorted(rng.integers(0, len(data) + 1, 2 * count).tolist())


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes that a crash, a bad disk or an editor may have made of `data`."""
    a, b, c, d = spans(data, rng, 2)
    kind = rng.integers(9)
    if kind == 0:
        return data[:a]
    if kind == 1:
        return data + rng.bytes(int(rng.integers(1, 2000)))
    if kind == 2:
        bits = np.unpackbits(np.frombuffer(data, np.uint8))
        bits[rng.integers(0, len(bits), int(rng.integers(1, 9)))] ^= 1
        return np.packbits(bits).tobytes()
    if kind == 3:
        return data[:a] + rng.bytes(b - a) + data[b:]
    if kind == 4:
        return data[:a] + bytes([rng.choice([0, 32, 255])]) * (b - a) + data[b:]
    if kind == 5:
        return data[:a] + data[b:]
    if kind == 6:
        return data[:b] + data[a:]
    if kind == 7:
        return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]
    numbers = [m.span() for m in re.finditer(rb"-?\d+(\.\d+)?", data)] or [(a, b)]
    a, b = numbers[rng.integers(len(numbers))]
    return data[:a] + str(rng.choice(HOSTILE)).encode() + data[b:]


def misplaced(folder: Path, others: list[bytes], rng: np.random.Generator) -> bytes:
    """Bytes that have no business here at all."""
    length = int(rng.integers(1, 3000))
    return [
        b"",
        rng.bytes(length),
        bytes(length),
        pickle.dumps(Bomb(folder / "executed")),
        b"[" * 100_000,
        b'{"a":' * 20_000,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (9,)}",
        b"PK\x03\x04" + rng.bytes(length),
        others[rng.integers(len(others))],
    ][rng.integers(11)]


def put_something_else(path: Path, rng: np.random.Generator) -> None:
    """In the place of a file: what is none, or one that claims a terabyte."""
    kind = rng.integers(7)
    if kind == 0:
        os.truncate(path, 2**40)
        return
    if kind == 1:
        path.write_bytes(b"")
        os.truncate(path, 2**40)
        return
    path.unlink()
    if kind == 2:
        path.mkdir()
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to("/dev/zero")
    elif kind == 5:
        path.symlink_to(path)
    else:
        path.symlink_to(path.with_name("nowhere"))


def refused(read: Callable[[Path], Content], path: Path, good: Content) -> bool:
    """Whether a file is refused by name; if not, nothing that was read from it is new."""
    try:
        with little_memory(300):
            found = read(path)
    except StorageError as error:
        refusal = error
    else:
        assert all(part in good and good[part] == found[part] for part in found)
        return False
    assert str(path.parent) in str(refusal)
    assert not isinstance(refusal.__cause__, MemoryError)
    return True


def files_of(path: Path) -> dict[str, bytes]:
    """The bytes of a file, under the name "", or of the files in a folder."""
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.name != ".lock"]
        return {file.name: file.read_bytes() for file in files}
    return {"": path.read_bytes()}


@pytest.mark.parametrize("cases", [80, pytest.param(1850, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", TARGETS)
def test_a_file_that_was_not_written_so_is_refused_or_read_as_it_was_written(tmp_path, name, cases):
    target, rng = TARGETS[name], np.random.default_rng([*name.encode()])
    target.write(tmp_path / "file")
    honest = files_of(tmp_path / target.at)
    good = target.read(tmp_path / "file")
    write_labels(tmp_path / "labels")
    write_agent(tmp_path / "agent")
    foreign = [path.read_bytes() for path in (tmp_path / "labels", tmp_path / "agent")]
    num_refused = 0
    for case in range(cases):
        folder = tmp_path / str(case)
        for part, data in honest.items():
            (folder / target.at / part).parent.mkdir(parents=True, exist_ok=True)
            (folder / target.at / part).write_bytes(data)
        part = list(honest)[rng.integers(len(honest))]
        victim, draw = folder / target.at / part, rng.random()
        if draw < 0.75:
            victim.write_bytes(damaged(honest[part], rng))
        elif draw < 0.9:
            victim.write_bytes(misplaced(tmp_path, [*honest.values(), *foreign], rng))
        else:
            put_something_else(victim, rng)
        num_refused += refused(target.read, folder / "file", good)
        shutil.rmtree(folder)
    assert not (tmp_path / "executed").exists()
    print(f"\n{name}: {num_refused} of {cases} refused, the others read as they were written")
    assert num_refused > cases / 3


# -- Forgeries -------------------------------------------------------------------------------


def forged(value: object, rng: np.random.Generator) -> object:
    """A JSON value with one part of it replaced, removed or added."""
    parts = (
        list(value) if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    )
    if len(parts) == 0 or rng.random() < 0.1:
        return HOSTILE_VALUES[rng.integers(len(HOSTILE_VALUES))]
    part = parts[rng.integers(len(parts))]
    changed = value.copy()
    if rng.random() < 0.8:
        changed[part] = forged(value[part], rng)
    elif rng.random() < 0.5:
        del changed[part]
    elif isinstance(changed, dict):
        changed["unknown"] = 1
    else:
        changed += [7] * int(rng.integers(1, 50))
    return changed


def forge_cost_model(path: Path, rng: np.random.Generator) -> None:
    write = (write_ensemble, write_cost_model, write_trees)[rng.integers(3)]
    write(path)
    tensors, meta = load_tensors(path, kind="cost-model")
    chosen = str(rng.choice(["config", "info"], p=[0.9, 0.1]))
    save_tensors(
        path, kind="cost-model", tensors=tensors, meta={**meta, chosen: forged(meta[chosen], rng)}
    )


def forge_dataset(path: Path, rng: np.random.Generator) -> None:
    write_dataset(path)
    manifest = path / "manifest.safetensors"
    tensors, meta = load_tensors(manifest, kind="trajectories")
    if rng.random() < 0.3:
        rows = tensors["rows"]
        rows[rng.integers(len(rows)), rng.integers(4)] = int(rng.choice([-1, 9, 2**40, 2**63 - 1]))
    else:
        meta = forged(meta, rng)
    if isinstance(meta, dict):
        save_tensors(manifest, kind="trajectories", tensors=tensors, meta=meta)


def forge_log(path: Path, rng: np.random.Generator) -> None:
    """With every crc32 as it should be."""
    header, *lines = path.read_bytes().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    entries = [{name: entry[name] for name in entry if name != "crc32"} for entry in entries]
    chosen = int(rng.integers(len(entries)))
    entries[chosen] = forged(entries[chosen], rng)
    if isinstance(entries[chosen], dict):
        forgery, crc32 = [header], zlib.crc32(header)
        for entry in entries:
            line, crc32 = _label_line(entry, crc32)
            forgery.append(line)
        path.write_bytes(b"".join(forgery))


def forge_labels(path: Path, rng: np.random.Generator) -> None:
    write_labels(path)
    forge_log(path, rng)


def forge_queries(path: Path, rng: np.random.Generator) -> None:
    write_queries(path)
    forge_log(path, rng)


def put_arrays(path: Path, archive: bytes) -> None:
    """Put an archive in the place of every trajectory of a label store."""
    with closing(sqlite3.connect(path / STORE)) as db, db:
        db.execute("UPDATE trajectories SET arrays = ?", (archive,))


def forge_store(path: Path, rng: np.random.Generator) -> None:
    """Hostile sizes in the header of an array, inside of an archive that is sound."""
    write_store(path)
    shape = (int(rng.choice([0, 1, 2**20, 2**40, 2**62])), int(rng.choice([1, 2, 2**30])))
    about = {"descr": str(rng.choice(["<f4", "|u1", "|O"])), "shape": shape}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, about | {"fortran_order": False})
    forged_npz = io.BytesIO()
    with zipfile.ZipFile(forged_npz, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("obs", "actions"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(int(rng.choice([0, 100]))))
    put_arrays(path, forged_npz.getvalue())


@pytest.mark.parametrize("cases", [15, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("name", "forge"),
    [
        ("cost model", forge_cost_model),
        ("dataset", forge_dataset),
        ("labels", forge_labels),
        ("query log", forge_queries),
        ("label store", forge_store),
    ],
)
def test_absurd_claims_under_a_checksum_that_fits_take_no_memory(tmp_path, name, forge, cases):
    """Checksums are no proof against a forger, who may change what is read, but not stop us."""
    rng = np.random.default_rng([*name.encode()])
    num_refused = 0
    for case in range(cases):
        path = tmp_path / str(case)
        forge(path, rng)
        try:
            with little_memory(300):
                TARGETS[name].read(path)
        except StorageError as error:
            refusal = error
        else:
            continue
        num_refused += 1
        assert not isinstance(refusal.__cause__, MemoryError)
    assert num_refused > cases / 3


@pytest.mark.slow
def test_a_small_trajectory_that_would_blow_up_to_gigabytes_is_refused_unread(tmp_path):
    write_store(tmp_path / "folder")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("obs", "actions"):
            with archive.open(f"{name}.npy", "w") as file:
                for _ in range(9):
                    file.write(bytes(2**25))
    assert len(bomb.getvalue()) < 1e7
    put_arrays(tmp_path / "folder", bomb.getvalue())
    with little_memory(300), pytest.raises(StorageError, match="more than the 268435456 bytes"):
        read_store(tmp_path / "folder")
