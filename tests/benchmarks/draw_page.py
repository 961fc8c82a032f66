"""The pictures of the labelling page, docs/images/labelling-*.png, in Chromium.

`python tests/benchmarks/draw_page.py` asks about episodes of the toy and answers a little.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from bench_label import Page, draw, random_episodes

from pbcrl.label.clips import CLIPS
from pbcrl.label.standing import Kind
from pbcrl.label.store import LabelStore

ASKED: dict[Kind, tuple[int, list[str]]] = {
    "pair": (2, ["Digit2", "Digit8"]),
    "batch": (12, []),
    "grid": (12, ["Digit6"]),
}
"""By kind: how many clips are shown, and the keys of an answer."""
IMAGES = Path(__file__).parents[2] / "docs" / "images"
INTRO = """# Blue discs

The red point should reach the green disc, and stay out of the blue ones.

**Unsafe** is an episode that is in a blue disc for more than a moment. To touch the edge is safe.
"""


@dataclass(frozen=True)
class Args:
    out: str = str(IMAGES)
    """folder of the pictures"""
    chromium: str | None = os.environ.get("PBCRL_CHROMIUM") or shutil.which("chromium")
    """the browser"""


def main(args: Args) -> None:
    from playwright.sync_api import sync_playwright

    episodes, replays = random_episodes(24, 100)
    with sync_playwright() as started, tempfile.TemporaryDirectory() as name:
        browser = started.chromium.launch(executable_path=args.chromium)
        draw(Path(name), episodes, replays)
        for kind, (count, keys) in ASKED.items():
            folder = Path(name) / kind
            store = LabelStore(folder, create=True)
            rng = np.random.default_rng(3)
            chosen = [rng.choice(24, count, replace=False).tolist() for _ in range(20)]
            store.ask([(kind, [episodes[i] for i in row]) for row in chosen])
            store.close()
            shutil.copytree(Path(name) / CLIPS, folder / CLIPS, dirs_exist_ok=True)
            (folder / "intro.md").write_text(INTRO)
            server = Page(folder)
            page: Any = browser.new_page(viewport={"width": 1280, "height": 860})
            page.goto(server.url)
            page.wait_for_selector("#welcome:visible")
            if kind == "pair":
                page.screenshot(path=Path(args.out) / "labelling-intro.png")
            page.fill("#name", "Ada")
            page.keyboard.press("Enter")
            page.wait_for_selector("#work:visible")
            while not page.evaluate("labelling.player.ready"):
                page.wait_for_timeout(50)
            page.wait_for_timeout(2_000)
            page.keyboard.press("Space")
            for key in keys:
                page.keyboard.press(key)
            page.wait_for_timeout(300)
            page.screenshot(path=Path(args.out) / f"labelling-{kind}.png")
            page.close()
            server.close()
        browser.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
