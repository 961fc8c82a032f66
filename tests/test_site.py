"""The documentation site in a real browser, as axe sees it: light, dark, and on a phone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")

NAMES = "chromium", "chromium-browser", "google-chrome"
CHROMIUM = os.environ.get("PBCRL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; PBCRL_CHROMIUM names one"),
]
ROOT = Path(__file__).parents[1]
VIEWS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
RULES = "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"
# The theme's own templates give several <nav> one name.
OPTIONS = {
    "runOnly": {"type": "tag", "values": RULES},
    "rules": {"landmark-unique": {"enabled": False}},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    return folder


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_on_the_site(site, view):
    with playwright.sync_playwright() as started:
        page = started.chromium.launch(executable_path=CHROMIUM).new_page(**VIEWS[view])
        for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
            name = path.relative_to(site).as_posix()
            page.goto(path.as_uri())
            broken = axe.Axe().run(page, options=OPTIONS).response["violations"]
            found = [(rule["id"], [node["target"] for node in rule["nodes"]]) for rule in broken]
            assert (name, found) == (name, [])
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
