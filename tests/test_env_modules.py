"""Which modules the id of an env imports: none that lies with the data that names it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pbcrl.data.label_log import trajectory_digest
from pbcrl.env_modules import env_id_flag, registered
from pbcrl.label import draw
from pbcrl.label.clips import clip_of
from pbcrl.label.replay import Replay
from pbcrl.label.store import LabelStore
from pbcrl.trajectory import Trajectory

CLI = Path(__file__).parents[1] / "cleanrl_scripts" / "cli.py"


@pytest.fixture(autouse=True)
def _imports_end_with_the_test(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory, with nothing in it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def code(path):
    """A module that says whether it was executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("from pathlib import Path\nPath(__file__ + '.executed').touch()\n")


def executed(folder):
    return [path.name for path in folder.rglob("*.executed")]


def runs_folder(folder):
    code(folder / "helper.py")
    code(folder / "package" / "__init__.py")
    (folder / "args.json").write_text("{}")
    return folder


@pytest.mark.parametrize("by_user", [False, True])
@pytest.mark.parametrize(
    "env_id",
    ["helper:X-v0", "package:X-v0", "run.helper:X-v0", "run.package:X-v0", "link.helper:X-v0"],
)
@pytest.mark.parametrize("place", ["around", "within", "path around", "path within"])
def test_nothing_in_a_folder_of_data_is_imported_however_it_is_reached(
    work, env_id, place, by_user
):
    run = runs_folder(work / "run")
    (work / "link").symlink_to(run)
    if place == "within":
        os.chdir(run)
    if place.startswith("path"):
        sys.path.append(str(work if place == "path around" else run))
        os.chdir(work.parent)
    with pytest.raises(ValueError, match=r"no code is imported from|installed (modules|package)"):
        registered(env_id, by_user=by_user)
    assert executed(work) == []


def test_nor_is_what_a_link_names_in_it(work):
    runs_folder(work / "run")
    libraries = work.parent / "libraries"
    libraries.mkdir()
    (libraries / "helper.py").symlink_to(work / "run" / "helper.py")
    (libraries / "package").symlink_to(work / "run" / "package")
    sys.path.append(str(libraries))
    for name in ("helper", "package"):
        with pytest.raises(
            ValueError, match=rf"no code is imported .* lies in {work / 'run'}, which"
        ):
            registered(f"{name}:X-v0")
    (work / "run" / "outside.py").symlink_to(work.parent / "outside.py")
    code(work.parent / "outside.py")
    os.chdir(work / "run")
    with pytest.raises(ValueError, match="no code is imported from a folder of data, but outside"):
        registered("outside:X-v0", by_user=True)
    assert executed(work.parent) == []


@pytest.mark.parametrize("mark", ["args.json", "labels.sqlite", "manifest.safetensors"])
def test_a_package_is_data_too_if_its_folder_holds_a_run_labels_or_a_dataset(work, mark):
    code(work / "data" / "__init__.py")
    (work / "data" / mark).touch()
    sys.path.append(str(work))
    os.chdir(work.parent)
    for by_user in (False, True):
        with pytest.raises(
            ValueError, match=r"data of 'data:X-v0' lies in .*/data, which holds a run"
        ):
            registered("data:X-v0", by_user=by_user)
    assert executed(work) == []


def test_a_module_of_the_working_directory_is_imported_if_the_user_names_it(work):
    code(work / "mine.py")
    code(work / "bare" / "envs.py")  # no __init__.py
    said = r"names none \(.*\); if the module is your own, say so in its folder: --env-id mine:X-v0"
    with pytest.raises(ValueError, match=said):
        registered("mine:X-v0")
    assert executed(work) == []
    assert registered("mine:X-v0", by_user=True) == "X-v0"
    assert registered("mine:X-v0") == "X-v0"  # its code has run already
    assert registered("bare.envs:Y-v0", by_user=True) == "Y-v0"
    assert sorted(executed(work)) == ["envs.py.executed", "mine.py.executed"]


def test_a_folder_without_init_on_the_path_is_no_installed_package(work):
    code(work / "bare" / "envs.py")
    sys.path.append(str(work))
    os.chdir(work.parent)
    with pytest.raises(ValueError, match=r"bare is a folder without an __init__\.py"):
        registered("bare.envs:X-v0")
    assert executed(work) == []


def test_an_installed_module_is_not_shadowed_by_the_working_directory(work):
    """colorsys is one that nothing imports."""
    code(work / "colorsys.py")
    assert registered("colorsys:X-v0") == "X-v0"
    del sys.modules["colorsys"]
    with pytest.raises(
        ValueError, match=r"must have one meaning, but colorsys of .* is both .*work"
    ):
        registered("colorsys:X-v0", by_user=True)
    (work / "colorsys.py").unlink()
    (work / "colorsys").mkdir()  # any folder is a package of a kind
    assert registered("colorsys:X-v0", by_user=True) == "X-v0"
    assert executed(work) == []


@pytest.mark.parametrize("env_id", ["nowhere:X-v0", "pbcrl.nowhere:X-v0", "json.:X-v0", "..:X-v0"])
@pytest.mark.usefixtures("work")
def test_a_module_that_is_not_there_is_a_value_error(env_id):
    for by_user in (False, True):
        with pytest.raises(ValueError, match="installed"):
            registered(env_id, by_user=by_user)


def test_sys_path_stays_as_it_was_unless_the_user_names_a_module_there(work):
    code(work / "mine.py")
    before = sys.path[:]
    registered("colorsys:X-v0")
    assert sys.path == before
    registered("mine:X-v0", by_user=True)
    assert sys.path[0] == str(Path.cwd())


def test_a_command_names_the_env_only_if_its_module_is_not_installed(work):
    code(work / "mine.py")
    assert env_id_flag("mine:X-v0") == ["--env-id", "mine:X-v0"]
    registered("mine:X-v0", by_user=True)
    assert env_id_flag("mine:X-v0") == ["--env-id", "mine:X-v0"]
    assert env_id_flag("pbcrl_envs:PointHazards-v0") == env_id_flag("PointHazards-v0") == []


# -- Processes -------------------------------------------------------------------------------------


def label_folder(folder, env_id):
    """A folder of questions, whose clips are drawn by an env of that id; and a clip's name."""
    one, other = (Trajectory(np.full((2, 9), x), np.zeros((2, 2)), np.zeros(2)) for x in (0.0, 1.0))
    store, digest = LabelStore(folder, create=True), trajectory_digest(one)
    replays = {digest: Replay(env_id, seed=0).to_bytes()}
    store.ask([("pair", (one, other))], run="", replays=replays)
    store.close()
    return digest


def drawn(command, digest):
    """Ask the process that draws for a clip."""
    subprocess.run(command, input=f"{digest}\n", capture_output=True, text=True, check=True)


def hide_libraries(folder):
    for name in ("argparse", "getpass", "json", "numpy", "os", "typing", "torch", "gymnasium"):
        code(folder / f"{name}.py")


@pytest.mark.slow
def test_what_draws_clips_imports_nothing_from_the_label_folder(tmp_path, monkeypatch):
    digest = label_folder(tmp_path / "questions", "questions.helper:PointHazards-v0")
    code(tmp_path / "questions" / "helper.py")
    code(tmp_path / "helper.py")
    hide_libraries(tmp_path / "questions")
    for place, folder in ((tmp_path, "questions"), (tmp_path / "questions", ".")):
        monkeypatch.chdir(place)
        drawn(draw.command(Path(folder), []), digest)
        assert "--env-id questions.helper:PointHazards-v0" in clip_of(Path(folder), digest)["error"]
    drawn(draw.command(Path(), ["helper:PointHazards-v0"]), digest)  # named, but in the folder
    assert "no code is imported from a folder of data" in clip_of(Path(), digest)["error"]
    assert executed(tmp_path) == []


@pytest.mark.slow
def test_what_draws_clips_imports_a_module_that_was_named(tmp_path, monkeypatch):
    digest = label_folder(tmp_path / "questions", "mine:Nothing-v0")
    code(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    drawn(draw.command(Path("questions"), []), digest)
    assert executed(tmp_path) == []
    drawn(draw.command(Path("questions"), ["mine:Nothing-v0"]), digest)
    assert executed(tmp_path) == ["mine.py.executed"]
    assert "`Nothing` doesn't exist" in clip_of(tmp_path / "questions", digest)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["-P"]])
def test_libraries_are_not_looked_for_in_the_label_folder(tmp_path, monkeypatch, option):
    if option and sys.version_info < (3, 11):
        pytest.skip("new in Python 3.11")
    label_folder(tmp_path, "helper:X-v0")
    hide_libraries(tmp_path)
    monkeypatch.chdir(tmp_path)
    for program in (["-m", "pbcrl.label"], [str(CLI), "label"]):
        if option and program[0] != "-m":
            continue  # a checkout's scripts need their own folder
        command = [sys.executable, *option, *program, ".", "--agreement"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("alpha_preference ")
    assert executed(tmp_path) == []
