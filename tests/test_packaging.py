"""What an installation holds, and what importing each of its two packages loads."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import pytest

ROOT = Path(__file__).parents[1]


def run_python(code, *, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def packages_on_disk():
    """The folders with an `__init__.py`, under the names they install as."""
    inits = [init for top in ("pbcrl", "envs") for init in (ROOT / top).rglob("__init__.py")]
    names = (".".join(init.parent.relative_to(ROOT).parts) for init in inits)
    return {re.sub(r"^envs\b", "pbcrl_envs", name) for name in names}


def packages_listed():
    # Read without tomllib, which Python 3.10 lacks.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^packages = \[$(.*?)^\]$", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r'"([\w.]+)"', block)


def test_every_folder_with_an_init_file_is_listed_as_a_package_once():
    listed = packages_listed()
    assert sorted(listed) == sorted(packages_on_disk())


needs_1_1 = pytest.mark.skipif(
    not hasattr(gymnasium.vector, "AutoresetMode"),
    reason="the batched tasks need the autoreset modes of Gymnasium 1.1",
)


def packages_loaded_by(imports):
    """The packages outside the standard library that a fresh process has after these imports."""
    run = run_python(f"import sys, {imports}; print(*sys.modules)")
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in run.stdout.split()} - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("package", "needs"),
    [
        ("pbcrl", "numpy, torch, gymnasium.vector, gymnasium.wrappers, safetensors.torch"),
        ("pbcrl_envs", "numpy, gymnasium.vector"),
        pytest.param("pbcrl_envs.toy", "numpy, gymnasium.vector", marks=needs_1_1),
        pytest.param("pbcrl_envs.driving", "numpy, gymnasium.vector", marks=needs_1_1),
    ],
)
def test_importing_a_package_loads_nothing_beyond_itself_and_what_it_depends_on(package, needs):
    # Against a process with the dependencies alone, which may load any package that they find.
    added = packages_loaded_by(f"{needs}, {package}") - packages_loaded_by(needs)
    assert added == {package.partition(".")[0]}


def test_envs_is_refused_under_the_name_of_its_folder():
    run = run_python("import envs")
    assert run.returncode == 1
    assert "ImportError: this package is imported as `pbcrl_envs`, not as `envs`" in run.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("setuptools") is None or find_spec("pip") is None,
    reason="a wheel is built offline with the setuptools and pip of this environment",
)
def test_the_wheel_owns_exactly_pbcrl_and_pbcrl_envs(tmp_path):
    # From a copy: setuptools leaves a build folder behind, and would pack what an older one holds.
    for name in ("pbcrl", "envs"):
        shutil.copytree(ROOT / name, tmp_path / "src" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "src")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "-w", tmp_path, tmp_path / "src"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {Path(name) for name in archive.namelist()}
    modules = {file for file in files if not file.parts[0].endswith(".dist-info")}
    assert {file.parts[0] for file in modules} == {"pbcrl", "pbcrl_envs"}
    assert {".".join(file.parts[:-1]) for file in modules} == packages_on_disk()
    assert {Path("pbcrl/py.typed"), Path("pbcrl_envs/py.typed")} <= modules
