"""How many seconds a question takes on the labelling page by keys, looking not counted.

A script, not a person, answers so many questions of each kind in Chromium, one key every `--pause`
seconds, as soon as the clips are there. It looks at nothing and thinks of nothing: what it needs is
the handling, to which a person adds the time of looking. The kinds are those of `bench_minutes.py`,
whose table of seconds this is held against, and a single clip:

- `pairs`: two safety answers, and a preference where both are alike;
- `marks`: the same, with one unsafe moment of half a second held in both: two marked episodes;
- `grids`: which of twelve clips are unsafe, three of them;
- `clips`: a grid of one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from bench_label import Page, draw, random_episodes

from pbcrl.label.clips import CLIPS
from pbcrl.label.standing import Kind
from pbcrl.label.store import LabelStore
from pbcrl.trajectory import Trajectory

ASKED: dict[str, tuple[Kind, int]] = {
    "pairs": ("pair", 2),
    "marks": ("pair", 2),
    "grids": ("grid", 12),
    "clips": ("grid", 1),
}
"""By kind: what the store calls it, and how many clips it shows."""
KEYS = [f"Digit{n}" for n in (*range(1, 10), 0)] + ["Minus", "Equal"]
HELD = 0.5  # seconds; of a moment's key


@dataclass(frozen=True)
class Args:
    questions: int = 60
    """of each kind"""
    pause: float = 0.25
    """seconds from one key to the next"""
    episodes: int = 60
    """that the questions are about"""
    steps: int = 60
    """of an episode"""
    chromium: str | None = os.environ.get("PBCRL_CHROMIUM") or shutil.which("chromium")
    """the browser"""


def ask(folder: Path, kind: str, episodes: Sequence[Trajectory], args: Args) -> None:
    """Put questions about these episodes into the folder."""
    rng, (name, count) = np.random.default_rng(0), ASKED[kind]
    if count == 1:
        chosen = [[i % len(episodes)] for i in range(args.questions)]
    else:
        chosen = [
            rng.choice(len(episodes), count, replace=False).tolist() for _ in range(args.questions)
        ]
    store = LabelStore(folder, create=True)
    store.ask([(name, [episodes[i] for i in row]) for row in chosen])
    store.close()


def keys_of(kind: str, rng: np.random.Generator) -> list[tuple[str, float]]:
    """The keys of one answer, each with the seconds that it is held."""
    if kind == "clips":
        return [(KEYS[0], 0.0)] * int(rng.integers(2))
    if kind == "grids":
        return [(KEYS[i], 0.0) for i in rng.choice(12, 3, replace=False)]
    first, second = rng.integers(2, size=2)
    keys = [(KEYS[first], 0.0), (KEYS[7 + second], 0.0)]
    if first == second:
        keys.append((str(rng.choice(["ArrowLeft", "ArrowUp", "ArrowRight"])), 0.0))
    return [("x", HELD), ("m", HELD), *keys] if kind == "marks" else keys


def answered(folder: Path, kind: str, args: Args) -> tuple[list[float], float]:
    """Seconds from each question's being there to the next one's, and keys per question."""
    from playwright.sync_api import sync_playwright

    rng, server = np.random.default_rng(1), Page(folder)
    seconds, pressed = [], 0
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=args.chromium)
        page: Any = browser.new_page()
        page.goto(server.url)
        page.fill("#name", "a script")
        page.keyboard.press("Enter")
        page.wait_for_selector("#work:visible")
        begun = time.perf_counter()
        for count in range(1, args.questions + 1):
            while not page.evaluate("labelling.player.ready"):
                time.sleep(0.01)
            keys = [*keys_of(kind, rng), ("Enter", 0.0)]
            while len(keys) == 1 and page.evaluate("labelling.player.seconds < 0.5"):
                time.sleep(0.01)  # the page takes no grid as safe that nobody can have seen
            for key, held in keys:
                time.sleep(args.pause)
                page.keyboard.down(key)
                time.sleep(held)
                page.keyboard.up(key)
            said = f"document.getElementById('told').textContent.startsWith('{count} answered')"
            while not page.evaluate(said):
                time.sleep(0.01)
            seconds.append(time.perf_counter() - begun)
            begun, pressed = time.perf_counter(), pressed + len(keys)
        browser.close()
    server.close()
    return seconds, pressed / args.questions


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    episodes, replays = random_episodes(args.episodes, args.steps)
    with tempfile.TemporaryDirectory() as name:
        draw(Path(name), episodes, replays)
        for kind in ASKED:
            folder = Path(name) / kind
            shutil.copytree(Path(name) / CLIPS, folder / CLIPS)
            ask(folder, kind, episodes, args)
            seconds, keys = answered(folder, kind, args)
            given = LabelStore(folder)
            assert len(given.labels()) == args.questions
            given.close()
            middle, most = np.quantile(seconds, (0.5, 0.95))
            print(
                f"{kind}: mean {np.mean(seconds):.2f} s per question, median {middle:.2f}, "
                f"95 % within {most:.2f}; {keys:.1f} keys, {keys * args.pause:.2f} s of pauses",
                flush=True,
            )


if __name__ == "__main__":
    main()
