"""What mkdocs calls: a page of flags from the scripts' dataclasses, and formulas in docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import tyro

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "pbcrl train ppo_lag_pbcrl": "ppo_lag_pbcrl.py",
    "pbcrl train ppo_lag": "ppo_lag.py",
    "pbcrl train ppo_lag_rlsf": "ppo_lag_rlsf.py",
    "pbcrl train ppo_lag_llm": "ppo_lag_llm.py",
    "pbcrl evaluate": "evaluate.py",
    "pbcrl certify": "certify.py",
    "pbcrl report": "paper/report.py",
    "pbcrl benchmark": "paper/benchmark.py",
    "pbcrl demo": "demo.py",
}

INTRO = """# Flags of the scripts

Made from the `Args` of each script. A Boolean flag is given as `--flag` or `--no-flag`. A task of
this package has a recipe, values in place of these defaults; `--env-id TASK --help` lists it.
`pbcrl label --help` lists the flags of the labelling page.
"""


def args_of(script: str) -> type[Any]:
    """Import a script and return its `Args`."""
    for folder in ("paper", "."):  # scripts import their neighbours
        if str(ROOT / "cleanrl_scripts" / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / "cleanrl_scripts" / folder))
    args: type[Any] = importlib.import_module(Path(script).stem).Args
    return args


def flags(script: str) -> list[tuple[str, str, str, str]]:
    """Return flag, type, default and meaning of each argument, what all scripts share last."""
    args = args_of(script)
    hints, plain = get_type_hints(args, include_extras=True), get_type_hints(args)
    meanings = {name: text for base in args.__mro__ for name, text in _meanings(base).items()}
    found = []
    for field in sorted(fields(args), key=lambda field: field.name not in args.__annotations__):
        flag = f"--{field.name.replace('_', '-')}"
        if tyro.conf.Positional in getattr(hints[field.name], "__metadata__", ()):
            flag = field.name.upper()
        found.append((flag, _type(plain[field.name]), _default(field), meanings[field.name]))
    return found


def _meanings(base: type[Any]) -> dict[str, str]:
    """The string below each field of a class, which only its source has."""
    if not is_dataclass(base):
        return {}
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
    assert isinstance(node, ast.ClassDef)
    return {
        ast.unparse(one.target): " ".join(ast.literal_eval(text.value).split())
        for one, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _type(hint: Any) -> str:
    """As one writes it: `int | None`, `tuple[float, ...]`."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_type, get_args(hint)))
    if hint is type(None):
        return "None"
    return (
        hint.__name__
        if isinstance(hint, type) and not get_args(hint)
        else (str(hint).replace("typing.", ""))
    )


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return ""
    value = field.default
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def flags_page() -> str:
    """Return the page, in Markdown."""
    parts = [INTRO]
    for command, script in SCRIPTS.items():
        parts.append(f"## {command}\n")
        for flag, kind, default, meaning in flags(script):
            shown = f", default `{default}`" if default else ""
            parts.append(f"- **`{flag}`** (`{kind}`{shown}): {meaning}")
        parts.append("")
    return "\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Add the page of flags."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "flags.md", content=flags_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Drop comments for tests and scripts; let links to files outside the site lead to them.

    To the repository if `repo_url` is set, or else to this checkout; from pages at the top alone.
    """
    inside = config["docs_dir"]
    docs = (
        f"{config['repo_url']}/blob/main/docs"
        if config["repo_url"]
        else os.path.relpath(inside, config["site_dir"])
    )

    def outside(found: re.Match[str]) -> str:
        file = files.get_file_from_path(found[2])
        if "/" in page.file.src_uri or file is None or not file.inclusion.is_excluded():
            return found[0]
        return f'<a href="{docs}/{found[2]}">{found[1]}</a>'

    markdown = re.sub(r"\[([^\]]+)\]\(([\w/.-]+\.md)\)", outside, markdown)
    unread = "<!-- not run", "<!-- table", "<!-- end of table"
    return "\n".join(line for line in markdown.splitlines() if not line.startswith(unread))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Docstrings hold formulas in Unicode, after `.. math::`: they get a block of their own."""
    formula = re.compile(r"<p>\.\. math::\s*(.*?)</p>", re.DOTALL)
    return formula.sub(
        lambda found: f'<p class="formula">{found[1].replace(chr(92) * 2, "<br>")}</p>', html
    )


def on_post_page(html: str, page: Any, config: Any) -> str:  # noqa: ARG001
    """Give the search, a dialog, the name that the theme leaves out."""
    return re.sub(
        r'(<div class="md-search"[^>]*role="dialog")(?! aria-label)',
        r'\1 aria-label="Search"',
        html,
    )
