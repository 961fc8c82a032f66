"""What mkdocs calls: a page of flags from the scripts' dataclasses, and formulas in docstrings."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "pbcrl train ppo_lag_pbcrl": "ppo_lag_pbcrl.py",
    "pbcrl train ppo_lag": "ppo_lag.py",
    "pbcrl train ppo_lag_rlsf": "ppo_lag_rlsf.py",
    "pbcrl train ppo_lag_llm": "ppo_lag_llm.py",
    "pbcrl evaluate": "evaluate.py",
    "pbcrl report": "paper/report.py",
    "pbcrl benchmark": "paper/benchmark.py",
    "pbcrl demo": "demo.py",
}

INTRO = """# Flags of the scripts

Made from the `Args` of each script. A Boolean flag is given as `--flag` or `--no-flag`. A task of
this package brings settings of its own, which `--env-id TASK --help` shows. `pbcrl label --help`
lists the flags of the labelling page.
"""


def flags(script: str) -> list[tuple[str, str, str, str]]:
    """Return flag, type, default and meaning of each argument, as the source has them."""
    tree = ast.parse((ROOT / "cleanrl_scripts" / script).read_text(encoding="utf-8"))
    (args,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    found = []
    for field, doc in zip(args.body, args.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            name = ast.unparse(field.target)
            kind = ast.unparse(field.annotation)
            positional = "Positional" in kind
            kind = kind.removeprefix("Annotated[").partition(",")[0] if positional else kind
            default = "" if field.value is None else ast.unparse(field.value)
            flag = name.upper() if positional else f"--{name.replace('_', '-')}"
            meaning = " ".join(ast.literal_eval(doc.value).split())
            found.append((flag, kind, default, meaning))
    return found


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
