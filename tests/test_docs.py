"""The README and the pages in docs/ name what exists, list what is written, and their code runs."""

import ast
import re
import runpy
import sys
import warnings
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from .every_space import ACTION_SPACES, OBS_SPACES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = ROOT / "cleanrl_scripts"
NOTEBOOK = sorted((ROOT / "docs" / "notebook").glob("*.md"))
SHOW_VECTOR_ENVS = [
    "adapters.md",
    "driving.md",
    "environments.md",
    "robotics.md",
    "runs.md",
    "scripts.md",
    "your-env.md",
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """The text between a heading of second level and the next one."""
    (found,) = re.findall(
        rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL
    )
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, headings and rules left out."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    ruled = [i for i, line in enumerate(lines) if set(line) <= set("-|")]
    kept = [line for i, line in enumerate(lines) if i not in ruled and i + 1 not in ruled]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in kept]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


# -- Equations -------------------------------------------------------------------------------

EQUATIONS = rows(section(read(ROOT / "docs" / "paper.md"), "Equations"))


def test_every_numbered_equation_of_the_method_is_in_the_table():
    listed = set()
    for cell, *_ in EQUATIONS:
        for first, last in re.findall(r"\b(\d+)(?:-(\d+))?\b(?!\.)", re.sub("`.*?`", "", cell)):
            listed |= set(range(int(first), int(last or first) + 1))
    assert listed >= set(range(1, 46))


@pytest.mark.parametrize("name", sorted({name for row in EQUATIONS for name in names(row[2])}))
def test_what_computes_an_equation_exists(name):
    if "::" not in name:
        assert callable(resolve_name(f"pbcrl.{name}"))
        return
    file, part = name.split("::")
    is_section = re.search(rf"^ *#\W+{re.escape(part)}\b", read(SCRIPTS / file), re.MULTILINE)
    assert is_section or part in functions(SCRIPTS / file)


@pytest.mark.parametrize("node", sorted({name for row in EQUATIONS for name in names(row[3])}))
def test_a_test_that_holds_an_equation_exists(node):
    file, name = node.split("::")
    assert name in functions(ROOT / "tests" / file)


# -- Arguments -------------------------------------------------------------------------------

BENCHMARKS = sorted((ROOT / "tests" / "benchmarks").glob("bench_*.py"))


def arguments(script: Path) -> dict[str, Any]:
    """Name and default of each argument of a script, those of `RunArgs` included."""
    pytest.importorskip("gymnasium", "1.1", reason="the scripts need vector envs of Gymnasium 1.1")
    return {field.name: field.default for field in fields(args_of(script))}


@cache
def args_of(script: Path) -> type[Any]:
    for folder in (SCRIPTS / "paper", SCRIPTS, script.parent):  # scripts import their neighbours
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    args: type[Any] = import_module(script.stem).Args
    return args


def test_the_settings_that_are_compared_with_the_paper_are_the_defaults():
    page = read(ROOT / "docs" / "paper.md")
    table = rows(section(page, "Settings"))
    assert len(table) > 10
    defaults = arguments(SCRIPTS / "ppo_lag_pbcrl.py")
    for name, value, _ in table:
        assert ast.literal_eval(names(value)[0]) == defaults[names(name)[0]]


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_every_flag_that_a_page_names_is_an_argument_of_a_script(page):
    trainers = ("ppo_lag.py", "ppo_lag_pbcrl.py", "ppo_lag_rlsf.py", "ppo_lag_llm.py")
    scripts = (
        *trainers,
        "evaluate.py",
        "certify.py",
        "demo.py",
        "paper/benchmark.py",
        "paper/report.py",
    )
    paths = [*(SCRIPTS / script for script in scripts), *BENCHMARKS]
    defaults = [item for path in paths for item in arguments(path).items()]
    known = {"help", "logdir", "no-deps", *(name.replace("_", "-") for name, _ in defaults)}
    known |= {f"no-{name.replace('_', '-')}" for name, default in defaults if default is True}
    known |= set(re.findall(r'"--([a-z-]+)"', read(ROOT / "pbcrl" / "label" / "__main__.py")))
    assert set(re.findall(r"(?<!-)--([a-z][a-z0-9-]+)", read(page))) <= known


# -- Spaces and versions ---------------------------------------------------------------------


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def versions_tested() -> list[str]:
    """Of Gymnasium: those that the Makefile puts before the pinned one, and the pinned one."""
    (older,) = re.findall(r"^GYMNASIUMS := (.*)$", read(ROOT / "Makefile"), re.MULTILINE)
    pins = read(ROOT / ".ci" / "constraints.txt")
    return [*older.split(), *re.findall(r"^gymnasium==(.*)$", pins, re.MULTILINE)]


def test_the_table_of_spaces_and_versions_is_what_ci_runs():
    page = section(read(ROOT / "docs" / "environments.md"), "What is tested on which Gymnasium")
    single, *vector = versions_tested()
    assert [numbers(version) < (1, 1) for version in (single, *vector)] == [True, False, False]
    assert (
        f"with the single wrapper on {single}, and with the single and the vector wrappers on "
        f"{' and '.join(vector)}:" in page
    )
    alone = "; ".join(name for name in OBS_SPACES if name not in ACTION_SPACES)
    assert rows(page) == [["observation, action", "; ".join(ACTION_SPACES)], ["observation", alone]]


def commands(name: str) -> list[str]:
    """The lines of a script in .ci."""
    return read(ROOT / ".ci" / name).splitlines()


def test_both_ends_of_the_range_of_gymnasium_are_tested():
    pins = re.findall(r'"gymnasium>=([\d.]+),<(\d+)"', read(ROOT / "pyproject.toml"))
    ((oldest, excluded),) = pins
    assert versions_tested()[0] == oldest
    assert numbers(versions_tested()[-1])[0] == int(excluded) - 1
    assert f"make test-gymnasium-{oldest}" in commands("run")
    assert "make test-gymnasium" in commands("nightly")


@pytest.mark.parametrize("name", ["run", "nightly"])
def test_what_ci_makes_is_in_the_makefile(name):
    made = {word for line in commands(name) for word in re.findall(r"\bmake ([a-z-]+[a-z])", line)}
    (known,) = re.findall(r"^\.PHONY: (.*)$", read(ROOT / "Makefile"), re.MULTILINE)
    assert made - {"test-gymnasium"} <= set(known.split())
    assert len(made) >= 4


def test_every_preset_is_in_the_table_with_the_number_of_its_runs():
    table = rows(read(ROOT / "docs" / "benchmark.md"))
    listed = {
        name: int(count)
        for cell, _, _, counts in (row for row in table if len(row) == 4)
        for name, count in zip(names(cell), counts.split(", "), strict=True)
    }
    pytest.importorskip("gymnasium", "1.1", reason="the scripts need vector envs of Gymnasium 1.1")
    from .scripts.paper import load

    benchmark = load("benchmark")
    presets = load("presets").TABLES
    made = {name: benchmark.jobs_of(benchmark.Args((name,), seeds=1)) for name in presets}
    assert listed == {name: len(jobs) for name, jobs in made.items()}


# -- Code and links --------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    """The examples are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@each_page
@pytest.mark.usefixtures("one_thread")
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """Top to bottom in one namespace; `<!-- not run: why -->` above a block leaves it out."""
    if page.name in SHOW_VECTOR_ENVS:
        pytest.importorskip("gymnasium", "1.1", reason="autoreset modes came with Gymnasium 1.1")
    if page.name == "cost-models.md":
        pytest.importorskip("gymnasium", "1.0", reason="TransformAction came with Gymnasium 1.0")
    if page.name == "llm.md":
        pytest.importorskip("transformers", reason="pbcrl.llm.cost_head needs transformers")
    if page.name == "adapters.md":  # TorchRL's collectors, of themselves
        warnings.filterwarnings("ignore", message="Creating .* WeightUpdaterBase")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    block = re.compile(r"(<!-- not run: .+ -->\n+)?^```python\n(.*?)^```$", re.M | re.S)
    for skipped, source in block.findall(read(page)):
        if not skipped:
            exec(compile(source, page.name, "exec"), namespace)


@each_page
def test_the_lines_that_a_diff_changes_are_in_a_training_script(page):
    for diff in re.findall(r"^```diff\n(.*?)^```$", read(page), re.M | re.S):
        kept = [line[1:] for line in diff.splitlines() if line[0] in " -"]
        assert kept
        scripts = "ppo_lag.py", "ppo_lag_pbcrl.py", "ppo_lag_rlsf.py"
        # In one at least: whoever changes another must not have to change the page.
        assert any("\n".join(kept) in read(SCRIPTS / script) for script in scripts)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOK], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(linked), target


# -- The site --------------------------------------------------------------------------------------

API = sorted((ROOT / "docs" / "api").glob("*.md"))
DOCUMENTED = {name for page in API for name in re.findall(r"^::: ([\w.]+)$", read(page), re.M)}
INTERNAL = {
    "agreement",
    "arrays",
    "clips",
    "database",
    "draw",
    "export",
    "server",
    "terminal",
}
"""Modules of the labelling page, which no program imports."""


def test_every_module_of_the_library_has_a_page():
    paths = [path.relative_to(ROOT) for path in (ROOT / "pbcrl").rglob("[a-z]*.py")]
    modules = {".".join(path.with_suffix("").parts) for path in paths}
    assert modules - {f"pbcrl.label.{name}" for name in INTERNAL} <= DOCUMENTED


@pytest.mark.parametrize("package", ["pbcrl", "pbcrl_envs"])
def test_every_public_name_has_a_page(package):
    """A page has the module that defines the name, and the name a docstring to show there."""
    if package == "pbcrl_envs":
        pytest.importorskip("gymnasium", "1.1", reason="the batched tasks need Gymnasium 1.1")
    public = resolve_name(package)
    for name in public.__all__:
        thing = getattr(public, name)
        if hasattr(thing, "__module__"):
            assert thing.__module__ in DOCUMENTED, name
    table = read(ROOT / "docs" / "api" / "index.md")
    assert package != "pbcrl" or [n for n in public.__all__ if f"`{n}`" not in table] == []


def in_nav() -> dict[str, list[str]]:
    """The pages of mkdocs.yml by part, read without YAML, in which it has a tag of its own."""
    nav = read(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    parts = re.split(r"^  - ([\w-]+):", nav, flags=re.MULTILINE)[1:]
    return {
        part: re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)
        for part, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_page_is_in_one_of_the_four_parts():
    parts = in_nav()
    assert list(parts) == ["Home", "Tutorials", "How-to", "Reference", "Explanation"]
    listed = sorted(page for pages in parts.values() for page in pages)
    written = [*PAGES[1:], *API]
    assert listed == sorted(["flags.md", *(str(p.relative_to(ROOT / "docs")) for p in written)])


def test_the_site_links_to_the_notebook_once():
    linked = [read(page).count("](notebook/") for page in PAGES[1:]]
    assert sum(linked) == 1
    index = read(ROOT / "docs" / "notebook" / "README.md")
    assert [page.name for page in NOTEBOOK if f"]({page.name})" not in index] == ["README.md"]


@pytest.mark.parametrize(
    "script", ["ppo_lag_pbcrl.py", "ppo_lag_llm.py", "evaluate.py", "certify.py", "demo.py"]
)
def test_the_page_of_flags_has_every_argument_with_its_meaning(script):
    expected = arguments(SCRIPTS / script)
    listed = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["flags"](script)
    names = [flag.removeprefix("--").replace("-", "_").lower() for flag, *_ in listed]
    assert sorted(names) == sorted(expected)
    assert all(meaning for *_, meaning in listed)


def make_tables() -> dict[str, Any]:
    """What docs/make_tables.py defines, which takes its bound of certificates from the scripts."""
    pytest.importorskip("gymnasium", "1.1", reason="the scripts need vector envs of Gymnasium 1.1")
    return runpy.run_path(str(ROOT / "docs" / "make_tables.py"))


def test_the_tables_of_results_are_what_the_runs_say():
    made = make_tables()
    for page in made["PAGES"]:
        assert made["with_tables"](read(page)) == read(page), "run python docs/make_tables.py"


def test_an_interval_is_by_students_t_over_seeds():
    """1, 2, 3 have the standard error 1 / √3, and t with 2 degrees of freedom has 4.303."""
    made = make_tables()
    assert made["interval"]([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert made["interval"]([7.0], 1) == "7.0"


def test_the_last_fifth_of_training_is_a_mean_over_its_episodes():
    made = make_tables()
    points = [(80, 100, 9.0), (90, 3, 1.0), (95, 0, ""), (100, 1, 5.0)]
    names = "env_steps", "episodes", "true_cost"
    rows = [dict(zip(names, map(str, point), strict=True)) for point in points]
    assert made["last_fifth"](rows) == 2.0
