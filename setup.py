"""The README as the package's page shows it, away from the repository that its links lead into.

All else about the package is in pyproject.toml. Where the repository lies is known to the workflow
that publishes, and to no file here: GitHub says it in `GITHUB_REPOSITORY`, and which tag is
released in `GITHUB_REF_NAME`. Built elsewhere, the page has no links into it, and no dead ones.
"""

import os
import re
from pathlib import Path


def page(readme: str, *, repository: str | None, ref: str) -> str:
    """Lead relative links and pictures into the repository; without one, leave their words alone.

    Who reads it there has no checkout, and installs by name.
    """

    def led(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        if repository is None:
            return f"*{text}*" if mark else text
        kind = "raw" if mark else "blob"
        return f"{mark}[{text}](https://github.com/{repository}/{kind}/{ref}/{target})"

    by_name = readme.replace('pip install ".[', 'pip install "pbcrl[')
    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", led, by_name)


def urls(repository: str | None, *, ref: str) -> dict[str, str]:
    """Return the links beside the page."""
    if repository is None:
        return {}
    home = f"https://github.com/{repository}"
    return {
        "Source": home,
        "Documentation": f"{home}/blob/{ref}/docs/index.md",
        "Changelog": f"{home}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


if __name__ == "__main__":
    from setuptools import setup

    where = os.environ.get("GITHUB_REPOSITORY")
    ref = os.environ.get("GITHUB_REF_NAME", "main")
    setup(
        long_description=page(Path("README.md").read_text("utf-8"), repository=where, ref=ref),
        long_description_content_type="text/markdown",
        project_urls=urls(where, ref=ref),
    )
