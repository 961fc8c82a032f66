"""What an installation holds, and what importing each of its two packages loads."""

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = {"pbcrl": "pbcrl", "envs": "pbcrl_envs", "cleanrl_scripts": "pbcrl_scripts"}
"""The packages' folders, and the names that they install as."""
UTILS = "pbcrl_script_utils"
"""A folder of the scripts' that is a package by itself, so that they find it wherever they lie."""


def run_python(code, *, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def packages_on_disk():
    """The folders with an `__init__.py`, under the names they install as."""
    inits = [init for top in INSTALLED for init in (ROOT / top).rglob("__init__.py")]
    names = ([*init.parent.relative_to(ROOT).parts] for init in inits)
    found = {".".join([INSTALLED[top], *below]) for top, *below in names}
    return {name.removeprefix("pbcrl_scripts.") if UTILS in name else name for name in found}


def packages_listed():
    # Read without tomllib, which Python 3.10 lacks.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^packages = \[$(.*?)^\]$", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r'"([\w.]+)"', block)


def test_every_folder_with_an_init_file_is_listed_as_a_package_once():
    listed = packages_listed()
    assert sorted(listed) == sorted(packages_on_disk())


def test_a_remedy_that_names_an_extra_names_one_that_exists_and_installs_what_is_missing():
    """Who lacks pyarrow need not install a language model's libraries, nor twice the same thing."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = dict(re.findall(r"^(\w+) = (\[.*?\])", text, flags=re.MULTILINE | re.DOTALL))
    files = [path for top in INSTALLED for path in (ROOT / top).rglob("*.py")]
    found = {
        extra
        for path in files
        for names in re.findall(r"pbcrl\[([\w,]+)\]'", path.read_text(encoding="utf-8"))
        for extra in names.split(",")
    }
    assert len(found) > 8
    assert found <= set(extras)
    assert extras["parquet"] == '["pyarrow>=16.1"]'


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
        (
            "pbcrl",
            "filelock, numpy, torch, gymnasium.vector, gymnasium.wrappers, safetensors.torch",
        ),
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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel, built from the source distribution, and the names in both."""
    tmp_path = tmp_path_factory.mktemp("built")
    # From a copy: setuptools leaves a build folder behind, and would pack what an older one holds.
    for name in INSTALLED:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "src" / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "src")
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path / "src")
    released = {**os.environ, "GITHUB_REPOSITORY": "who/pbcrl", "GITHUB_REF_NAME": "v7"}
    source = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('..')"]
    subprocess.run(source, cwd=tmp_path / "src", env=released, capture_output=True, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    wheel = [sys.executable, "-m", "pip", "wheel", *offline, "-w", tmp_path, sdist]
    build = subprocess.run(wheel, env=released, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        files = {Path(name) for name in archive.namelist()}
    return path, {file for file in files if not file.parts[0].endswith(".dist-info")}


needs_setuptools = pytest.mark.skipif(
    find_spec("setuptools") is None or find_spec("pip") is None,
    reason="a wheel is built offline with the setuptools and pip of this environment",
)


@pytest.mark.slow
@needs_setuptools
def test_the_wheel_owns_exactly_its_four_packages(built):
    _, files = built
    assert {file.parts[0] for file in files} == {*INSTALLED.values(), UTILS}
    folders = {".".join(file.parts[:-1]) for file in files}
    assert folders == packages_on_disk()
    assert {Path("pbcrl/py.typed"), Path("pbcrl_envs/py.typed")} <= files
    scripts = {path.relative_to(ROOT) for path in (ROOT / "cleanrl_scripts").rglob("*.py")}
    wanted = {Path(*path.parts[1 if UTILS in path.parts else 0 :]) for path in scripts}
    assert {Path(str(path).replace("cleanrl_scripts", "pbcrl_scripts")) for path in wanted} <= files


@pytest.mark.slow
@needs_setuptools
@needs_1_1
def test_a_training_script_of_the_wheel_runs_by_its_command(built, tmp_path):
    """Unpacked before everything else on the path, with the libraries of this environment."""
    path, _ = built
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    flags = "--env-id PointHazards-v0 --total-timesteps 4000 --num-envs 4 --eval-episodes 2"
    flags += " --hidden-sizes 8 --minibatch-size 200 --threads 1 --cost-limit 15 --run-name"
    # Without a dataset it has ppo_lag.py collect one.
    labels = "--offline-queries 50 --online-queries 0 --constraint learned"
    code = "from pbcrl_scripts.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for words, said in [
        (["train", "ppo_lag", *flags.split(), "run"], "play it again: pbcrl evaluate runs/run"),
        (["train", "ppo_lag_pbcrl", *labels.split(), *flags.split(), "own"], "evaluate runs/own"),
        (["evaluate", "runs/run", "--episodes", "2"], "-- policy"),
        (["certify", "runs/run", "--episodes", "2"], "certified: "),
    ]:
        run = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert said in run.stdout
    assert (tmp_path / "runs" / "run" / "ppo_lag.py").exists()


# -- The page on PyPI ------------------------------------------------------------------------------


def page_of(repository):
    page = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["page"]
    return page((ROOT / "README.md").read_text(encoding="utf-8"), repository=repository, ref="v7")


needs_renderer = pytest.mark.skipif(
    find_spec("markdown_it") is None, reason="the page is rendered with markdown-it"
)


def rendered(markdown):
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark").enable("table").render(markdown)
    return re.findall(r'(?:href|src)="([^"]+)"', html), re.findall(r"<code[^>]*>(.*?)</code>", html)


@needs_renderer
def test_every_link_and_picture_of_the_page_on_pypi_leads_to_a_file_of_the_release():
    home, (found, _) = "https://github.com/who/pbcrl/", rendered(page_of("who/pbcrl"))
    assert f"{home}raw/v7/docs/images/demo.png" in found
    assert f"{home}blob/v7/docs/constraint.md#from-people-alone" in found
    assert len(found) > 10
    for link in found:
        kind, ref, file = link.partition("#")[0].removeprefix(home).split("/", 2)
        assert (kind in ("raw", "blob"), ref) == (True, "v7")
        assert (ROOT / file).is_file()


@needs_renderer
def test_a_page_that_knows_no_repository_has_no_link_into_it_and_says_the_same():
    (found, code), (_, with_links) = rendered(page_of(None)), rendered(page_of("who/pbcrl"))
    assert found == []
    assert code == with_links
    assert "| eleven small tasks, five seeds |" in page_of(None)


def test_who_reads_the_page_on_pypi_installs_by_name():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert '\npip install ".[scripts,label]"\n' in readme
    assert '\npip install "pbcrl[scripts,label]"\n' in page_of(None)


@pytest.mark.slow
@needs_setuptools
def test_a_release_says_who_made_it_where_it_lies_and_on_which_pythons_it_runs(built):
    path, _ = built
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(name))
    assert about["Author"] == "The pbcrl authors"
    assert about["Requires-Python"] == "<3.14,>=3.10"
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
    assert pythons <= set(about.get_all("Classifier"))
    assert "Source, https://github.com/who/pbcrl" in about.get_all("Project-URL")
    assert "(https://github.com/who/pbcrl/raw/v7/docs/images/demo.png)" in about.get_payload()


# -- The command -----------------------------------------------------------------------------------


def pbcrl_command(*words, cwd=ROOT):
    command = [sys.executable, str(ROOT / "cleanrl_scripts" / "cli.py"), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_lists_its_commands_and_the_version():
    shown = pbcrl_command("--help").stdout
    assert all(
        f"\n  {name} " in shown for name in ("demo", "train", "label", "evaluate", "certify")
    )
    assert "ppo_lag, ppo_lag_llm, ppo_lag_pbcrl, ppo_lag_rlsf" in shown
    import pbcrl

    assert pbcrl_command("--version").stdout == f"pbcrl {pbcrl.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["fly"],
            "a command is demo, train, label, evaluate, certify, report, benchmark, got 'fly'",
        ),
        (
            ["train"],
            "runs ppo_lag, ppo_lag_llm, ppo_lag_pbcrl, ppo_lag_rlsf or a .py file, got ",
        ),
        (["train", "ppo"], "or a .py file, got 'ppo'; pbcrl train ppo_lag_pbcrl --help"),
        (["train", "nosuch.py"], "or a .py file, got 'nosuch.py'"),
        (["label", "nosuch"], "there is no folder nosuch; a run makes the one that"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_by_name(words, said):
    run = pbcrl_command(*words)
    assert run.returncode == 1
    assert said in run.stderr
    assert "Traceback" not in run.stderr


@needs_1_1
def test_a_copy_of_a_script_anywhere_is_trained_by_the_command(tmp_path):
    pytest.importorskip("tyro", reason="the flags need tyro")
    shutil.copy(ROOT / "cleanrl_scripts" / "ppo_lag.py", tmp_path / "mine.py")
    run = pbcrl_command("train", "mine.py", "--help", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "--total-timesteps" in run.stdout


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_library")
    run = pbcrl_command("train", "mine.py", cwd=tmp_path)
    assert "pbcrl train needs no_such_library, which is not installed" in run.stderr
    assert "pip install 'pbcrl[scripts]'" in run.stderr


def test_the_language_models_script_names_the_extra_that_it_needs(tmp_path):
    (tmp_path / "ppo_lag_llm.py").write_text("import no_such_library")
    run = pbcrl_command("train", "ppo_lag_llm.py", cwd=tmp_path)
    assert "pip install 'pbcrl[scripts,llm]'" in run.stderr


@needs_1_1
def test_the_help_of_a_command_names_it_as_it_was_typed():
    pytest.importorskip("tyro", reason="the flags need tyro")
    run = pbcrl_command("evaluate", "--help", cwd=ROOT)
    assert run.stdout.startswith("usage: python cleanrl_scripts/evaluate.py ")


@needs_1_1
def test_who_typed_pbcrl_is_told_to_type_pbcrl_in_a_checkout_too(tmp_path):
    """As pip writes the command of an editable installation: a file of that name."""
    pytest.importorskip("tyro", reason="the flags need tyro")
    scripts = str(ROOT / "cleanrl_scripts")
    code = f"import sys; sys.path.insert(0, {scripts!r}); from cli import main; main()"
    (tmp_path / "pbcrl").write_text(code)
    command = [sys.executable, str(tmp_path / "pbcrl"), "evaluate", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("usage: pbcrl evaluate ")


def test_the_readme_has_no_type_errors_for_its_reader(tmp_path):
    """The library's annotations, as whoever pastes the example into a checked file sees them."""
    pytest.importorskip("mypy", reason="the types are checked with mypy")
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("the annotations are those of NumPy 2 and the Gymnasium that goes with it")
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    code += "pbcrl.Trajectory(np.zeros((5, 3)), np.zeros((5, 1)), np.zeros(5))\n"  # any dtype
    (tmp_path / "reader.py").write_text(code)
    cache = ("--cache-dir", str(ROOT / ".mypy_cache"))
    command = [sys.executable, "-m", "mypy", *cache, str(tmp_path / "reader.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("Success: "), run.stdout


def test_the_version_of_the_citation_and_the_changelog_is_that_of_the_package():
    import pbcrl

    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {pbcrl.__version__}\n" in cited
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {pbcrl.__version__}" in changes
