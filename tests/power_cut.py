"""A power cut without root: a folder as the disk would hold it if the machine stopped now.

    disk = PowerCut(tmp_path / "runs", scratch=tmp_path / "scratch")
    disk.run([sys.executable, "script.py", ...])          # undisturbed: disk.moments says how long
    disk.run([sys.executable, "script.py", ...], at=17)   # killed at its 17th moment
    lost = disk.cut(random.Random(0))                     # the folder is now what the disk held
    disk.run([sys.executable, "script.py", "--resume", ...])

`disk.fork(function, at=17)` does the same with a function of the test, without starting Python, and
`disk.held(rng, into)` makes one disk after another from the same moment.

A *moment* is a call of `os.fsync`, a rename, a removal or a truncating `open` below the folder, by
the process or by Python processes that it starts. A process that is started with `disk.env()` may
also be killed from outside at any time, before `disk.cut` is called.

What is modelled, by POSIX and not by the kinder habits of one file system:

- Of a file, what it held at its last `os.fsync` is there. Bytes appended since are there in whole,
  in part, as zeros, or not at all; a truncating `open` since may have emptied it. Where it was
  changed otherwise it may also be cut off, or be old and new by sectors of 512 bytes. A file that
  was never synced is an empty one of which everything was appended.
- Of a folder, the entries at its last `os.fsync` are there, and of the creations, renames and
  removals since, in their order, as many as the draw says. A rename is one step within a folder and
  two independent ones between folders. A new folder is an entry of the one above it.
- Folders and files are independent of each other: only a sync orders two of them.
- What the folder held when the object was made, and what a cut left, is on disk.

In half of the cuts nothing survives that was not synced, in the others each file and each folder
draws for itself. What other programs than Python write is never synced. Not modelled: `os.sync`,
`fdatasync`, `O_SYNC`, memory maps that are written to, renamed folders (they are refused), processes
in a session of their own, disks that lie. Nothing is really synced, so that this takes little time.

The recorder is loaded by a `sitecustomize` module on PYTHONPATH. It wraps `os.fsync` and listens to
Python's audit events; it copies a file when it is synced, and holds every file by a hard link, so
that no inode number is used twice. Both folders must therefore be on one file system. Linux only.
"""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

_VARIABLE = "PBCRL_POWER_CUT"
_FOLDER = "/"  # in the place of an inode number
_LINK = "->"
_SECTOR = 512


class PowerCut:
    """A folder whose disk loses power.

    Args:
        folder: What is on the disk; must exist.
        scratch: A folder of this object's own, on the same file system; made new.
    """

    def __init__(self, folder: Path, *, scratch: Path) -> None:
        self.folder, self._scratch = folder.resolve(), scratch.resolve()
        self._begin()

    @property
    def moments(self) -> int:
        """Moments since the object was made, or since the last cut."""
        return (self._scratch / "moments").stat().st_size

    def env(self, *, at: int | None = None, kill_group: bool = False) -> dict[str, str]:
        """An environment for `python` that records; it kills itself before moment `at`, from 1."""
        told = self._told(at, kill_group=kill_group)
        paths = [str(self._scratch / "site"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        return {**os.environ, "PYTHONPATH": path, _VARIABLE: json.dumps(told)}

    def run(
        self, command: Sequence[str], *, at: int | None = None, timeout: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, in a session of its own, to its end or until moment `at`."""
        process = subprocess.Popen(
            command,
            env=self.env(at=at, kill_group=True),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return subprocess.CompletedProcess(command, process.returncode, *output)

    def fork(self, work: Callable[[], object], *, at: int | None = None) -> int:
        """Run a function in a forked child; return its status: 0, 1 if it raised, -9 if killed."""
        told = self._told(at, kill_group=False)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _start(told)
                work()
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def cut(self, rng: random.Random) -> list[str]:
        """Make the folder what the disk may hold; return what differs from what was written."""
        disk = self._scratch / "disk"
        lost = self.held(rng, disk)
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for entry in disk.iterdir():
            entry.rename(self.folder / entry.name)
        self._begin()
        return lost

    def held(self, rng: random.Random, disk: Path) -> list[str]:
        """Write what the disk may hold to a new folder `disk`, as `cut`; nothing else changes."""
        recorder = _Recorder(self.folder, self._scratch)
        states: dict[str, list[dict[str, str]]] = {}  # of each folder, from its last sync on
        synced: dict[str, str] = {}  # the copy of each file at its last sync, by inode
        emptied: set[str] = set()  # by a truncating open since then
        for event in self._events():
            if "renamed folder" in event:
                raise NotImplementedError(f"a folder was renamed: {event['renamed folder']}")
            if "names" in event:
                before = [] if event["synced"] else states.get(event["folder"], [{}])
                states[event["folder"]] = [*before, event["names"]]
            elif "removed" in event:
                states[event["removed"]] = [{}]
            elif "copy" in event:
                synced[event["file"]] = event["copy"]
                emptied.discard(event["file"])
            else:
                emptied.add(event["emptied"])
        there = {recorder.relative(folder) for folder, _, _ in os.walk(self.folder)}
        for name in there | states.keys():
            now = recorder.look(self.folder / name) if name in there else {}
            states[name] = [*states.get(name, [{}]), now]

        only_synced = rng.random() < 0.5
        lost = []

        def content(inode: str) -> bytes:
            now = (self._scratch / "inodes" / inode).read_bytes()
            kept = b"" if inode not in synced else Path(synced[inode]).read_bytes()
            return kept if only_synced else _on_disk(kept, now, emptied=inode in emptied, rng=rng)

        def build(name: str) -> None:
            (disk / name).mkdir(parents=True)
            names = states[name][0] if only_synced else rng.choice(states[name])
            lost.extend(f"{Path(name, gone)}: gone" for gone in states[name][-1].keys() - names)
            for entry, what in sorted(names.items()):
                path = Path(name, entry)
                if what == _FOLDER:
                    states.setdefault(str(path), [{}])
                    build(str(path))
                elif what.startswith(_LINK):
                    (disk / path).symlink_to(what.removeprefix(_LINK))
                else:
                    (disk / path).write_bytes(content(what))
                    if states[name][-1].get(entry) != what:
                        lost.append(f"{path}: as it was before a rename or a removal")
                    elif (disk / path).read_bytes() != (self.folder / path).read_bytes():
                        lost.append(f"{path}: not as it was written last")

        build(".")
        return sorted(lost)

    def _told(self, at: int | None, *, kill_group: bool) -> dict[str, object]:
        at = at if at is None else at + self.moments
        folders = {"folder": str(self.folder), "scratch": str(self._scratch)}
        return folders | {"at": at, "kill_group": kill_group}

    def _begin(self) -> None:
        """Take what is in the folder for what is on disk."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        for name in ("inodes", "copies", "site"):
            (self._scratch / name).mkdir(parents=True)
        (self._scratch / "moments").touch()
        (self._scratch / "site" / "sitecustomize.py").write_text(
            "import importlib.util\n"
            f"spec = importlib.util.spec_from_file_location('_power_cut', {__file__!r})\n"
            "module = importlib.util.module_from_spec(spec)\n"
            "spec.loader.exec_module(module)\n"
            "module.record()\n"
        )
        recorder = _Recorder(self.folder, self._scratch)
        for folder, _, files in os.walk(self.folder):
            recorder.note_folder(folder, synced=True)
            for name in files:
                if not Path(folder, name).is_symlink():
                    recorder.note_synced(os.path.join(folder, name))

    def _events(self) -> list[dict[str, object]]:
        lines = (self._scratch / "events.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a kill tears the last


def _on_disk(kept: bytes, now: bytes, *, emptied: bool, rng: random.Random) -> bytes:
    """What may be there of a file that holds `now` and held `kept` when it was last synced."""
    if emptied:
        if rng.random() < 0.3:
            return kept
        kept = b""
    common = len(os.path.commonprefix([kept, now]))
    end = rng.randint(common, len(now))
    if common == len(kept):  # only appended to
        part = now[:end]
        return rng.choice([kept, now, part, part + bytes(len(now) - end)])
    sectors = -(-end // _SECTOR) * _SECTOR
    return rng.choice([kept, now, now[:common], now[:sectors] + kept[sectors:]])


# -- In the process that is cut off ----------------------------------------------------------------


class _Recorder:
    """Notes what certainly reached the disk, as lines of a file that all processes add to."""

    def __init__(
        self, folder: object, scratch: object, at: int | None = None, kill_group: bool = False
    ) -> None:
        self.root, self.scratch, self.at = str(folder), str(scratch), at
        self.kill_group = kill_group
        self.lock = threading.RLock()
        self.num_copies = 0
        self.fsync = os.fsync

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def inside(self, path: object, dir_fd: int = -1) -> str | None:
        """The path, without links in its folder, if that is in the root; None if it is not."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd != -1:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        folder = os.path.realpath(folder)
        within = folder == self.root or folder.startswith(self.root + os.sep)
        return os.path.join(folder, name) if within else None

    def moment(self) -> None:
        descriptor = os.open(f"{self.scratch}/moments", os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, b".")
        moment = os.fstat(descriptor).st_size
        os.close(descriptor)
        if moment == self.at:
            victim = 0 if self.kill_group else os.getpid()
            (os.killpg if self.kill_group else os.kill)(victim, signal.SIGKILL)

    def note(self, **event: object) -> None:
        line = (json.dumps(event) + "\n").encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(f"{self.scratch}/events.jsonl", flags, 0o666)
        os.write(descriptor, line)
        os.close(descriptor)

    def look(self, folder: object) -> dict[str, str]:
        """The entries of a folder; each new file is held by a hard link."""
        names = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    names[entry.name] = _LINK + os.readlink(entry.path)
                elif entry.is_dir():
                    names[entry.name] = _FOLDER
                elif entry.is_file() and self.hold(entry.path, entry.inode()):
                    names[entry.name] = str(entry.inode())
        return names

    def hold(self, path: str, inode: int) -> bool:
        held = f"{self.scratch}/inodes/{inode}"
        if not os.path.exists(held):
            try:
                os.link(path, held)
            except FileExistsError:  # another process was faster
                pass
            except FileNotFoundError:  # another process has removed it
                return False
        return True

    def note_folder(self, folder: str, *, synced: bool) -> None:
        self.note(folder=self.relative(folder), names=self.look(folder), synced=synced)

    def note_synced(self, path: str) -> None:
        self.num_copies += 1
        copy = f"{self.scratch}/copies/{os.getpid()}-{self.num_copies}"
        with open(path, "rb") as source, open(copy, "wb") as target:
            inode = os.fstat(source.fileno()).st_ino
            shutil.copyfileobj(source, target)
        self.note(file=str(inode), copy=copy)

    def on_fsync(self, file: object) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        # The root itself is in its parent, and is synced all the same.
        if path != self.root and self.inside(path) is None:
            self.fsync(descriptor)
            return
        with self.lock:
            self.moment()
            if is_folder:
                self.note_folder(path, synced=True)
            else:
                self.note_synced(f"/proc/self/fd/{descriptor}")

    def on_event(self, event: str, args: tuple[object, ...]) -> None:
        """Before Python does it; what it does then is seen at the next event, or at the cut."""
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & os.O_TRUNC and (where := self.inside(path)):
                with self.lock:
                    self.moment()
                    if os.path.isfile(where):
                        self.note(emptied=str(os.stat(where).st_ino))
        elif event in ("os.remove", "os.rmdir"):
            if where := self.inside(*args):
                with self.lock:
                    self.moment()
                    self.note_folder(os.path.dirname(where), synced=False)
                    if event == "os.rmdir":
                        self.note(removed=self.relative(where))
        elif event == "os.rename":
            source, target, source_fd, target_fd = args
            paths = [self.inside(source, source_fd), self.inside(target, target_fd)]
            folders = {os.path.dirname(path) for path in paths if path}
            if folders:
                with self.lock:
                    self.moment()
                    for folder in sorted(folders):
                        self.note_folder(folder, synced=False)
                    if os.path.isdir(source):
                        self.note(**{"renamed folder": str(source)})


def record() -> None:
    """Record in this process, as the environment tells; called by `sitecustomize`."""
    if _VARIABLE in os.environ:
        _start(json.loads(os.environ[_VARIABLE]))


def _start(told: dict[str, object]) -> None:
    recorder = _Recorder(**told)
    os.fsync = recorder.on_fsync
    sys.addaudithook(
        lambda event, args: (
            recorder.on_event(event, args)
            if event in ("open", "os.remove", "os.rmdir", "os.rename")
            else None
        )
    )
