"""How fast the labelling page is: to its first question, to acknowledge an answer, clips in step.

And to the next question where many were answered before.

Clips are drawn in the background all the while, as when somebody begins to answer. The players are
read in Chromium through Playwright, if both are there; their offset is in seconds as people see
them, so at 4 times the speed a quarter of what the clips' own clocks say. On a busy machine the
time of the processor that the server has used says more than the seconds that passed.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import tyro

import pbcrl_envs  # noqa: F401 - registers the tasks
from pbcrl import FolderOracle, Query, Trajectory
from pbcrl.data.label_log import trajectory_digest
from pbcrl.label.clips import draw_replay
from pbcrl.label.replay import Replay
from pbcrl.label.store import LabelStore, _insert

_OFFSETS = """async (seconds) => {
    const videos = [...document.querySelectorAll('video')], found = [];
    const end = performance.now() + 1000 * seconds;
    while (performance.now() < end) {
        await new Promise(requestAnimationFrame);
        const [a, b] = videos.map((video) => video.currentTime);
        if (!videos.some((video) => video.seeking)) found.push(Math.abs(a - b));
    }
    return found;
}"""


@dataclass(frozen=True)
class Args:
    questions: int = 200
    """questions in the folder, about two episodes each"""
    steps: int = 60
    """of an episode"""
    answers: int = 100_000
    """given before the next question is timed, in another folder"""
    starts: int = 5
    """times that the command is started"""
    seconds: float = 5.0
    """that the players are read for, at each speed"""
    chromium: str | None = os.environ.get("PBCRL_CHROMIUM") or shutil.which("chromium")
    """the browser; without one the players are left out"""


def random_episodes(count: int, steps: int) -> tuple[list[Trajectory], dict[str, Replay]]:
    """Episodes of random actions, and how each is drawn."""
    env = gymnasium.make("PointHazards-v0")
    rng, episodes, replays = np.random.default_rng(0), [], {}
    for seed in range(count):
        obs, _ = env.reset(seed=seed)
        rows, actions = [], rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
        for action in actions:
            rows.append(obs)
            obs, *_ = env.step(action)
        episodes.append(Trajectory(np.array(rows), actions))
        replays[trajectory_digest(episodes[-1])] = Replay("pbcrl_envs:PointHazards-v0", seed=seed)
    return episodes, replays


def draw(folder: Path, episodes: list[Trajectory], replays: dict[str, Replay]) -> None:
    """Make the clips of `random_episodes`, which any label folder may have a copy of."""
    for episode in episodes:
        digest = trajectory_digest(episode)
        draw_replay(folder, digest, replays[digest], episode)


def ask(folder: Path, args: Args) -> None:
    """Put questions about random episodes into the folder."""
    episodes, replays = random_episodes(2 * args.questions, args.steps)
    oracle = FolderOracle(folder, show=lambda one: replays[trajectory_digest(one)])
    oracle.submit([Query(*episodes[i : i + 2]) for i in range(0, len(episodes), 2)])
    oracle.close()


class Page:
    """The command in a process of its own, and what a page sends to it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "pbcrl.label", str(folder), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        host, self.token = self.url.removeprefix("http://").split("/#token=")
        self.connection = http.client.HTTPConnection(host, timeout=120)
        self.headers = {"Origin": f"http://{host}", "Authorization": f"Bearer {self.token}"}

    def get(self, path: str) -> Any:
        self.connection.request("GET", path, headers=self.headers)
        return self._found()

    def post(self, event: dict[str, Any]) -> Any:
        headers = {**self.headers, "Content-Type": "application/json"}
        self.connection.request("POST", "/api/events", json.dumps(event), headers)
        return self._found()

    def _found(self) -> Any:
        response = self.connection.getresponse()
        found = json.loads(response.read())
        assert response.status == 200, found
        return found

    def next(self) -> Any:
        return self.get("/api/next?annotator=Ada&tab=1")

    def processor_seconds(self) -> float:
        """What the server has used so far, all its threads together; Linux only."""
        ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.communicate()


def answer(folder: Path, args: Args) -> None:
    """Put questions into the folder that are answered, and open ones, about few episodes."""
    episodes = [Trajectory(np.full((2, 1), i), np.zeros((2, 1))) for i in range(1000)]
    pairs = list(itertools.islice(itertools.combinations(episodes, 2), args.answers + 300))
    store = LabelStore(folder, create=True)
    numbers = store.ask([("pair", pair) for pair in pairs])
    with store._db.transaction() as db:  # one sync for all of them
        for number in numbers[: args.answers]:
            _insert(db, (f"t{number}", number, "Ada", "answer", 0.5, 1.0, 1.0, None, 2.0), None)
    store.close()


def next_question(folder: Path) -> tuple[list[float], float]:
    """Seconds to the next question, and of the processor on average."""
    page, seconds = Page(folder), []
    page.next()
    before = page.processor_seconds()
    for _ in range(100):
        start = time.perf_counter()
        assert page.next()["left"] == 300
        seconds.append(time.perf_counter() - start)
    used = page.processor_seconds() - before
    page.close()
    return seconds, used / len(seconds)


def first_question(folder: Path) -> tuple[float, float]:
    """Seconds from the command to the first question, and of the processor."""
    start = time.perf_counter()
    page = Page(folder)
    assert page.next()["question"] is not None
    seconds = time.perf_counter() - start, page.processor_seconds()
    page.close()
    return seconds


def acknowledged(folder: Path) -> tuple[list[float], float]:
    """Seconds until each question's answer is acknowledged, and of the processor for all."""
    page, seconds = Page(folder), []
    page.next()
    before = page.processor_seconds()
    while (found := page.next()["question"]) is not None:
        who: dict[str, Any] = {"kind": "answer", "annotator": "Ada", "token": f"t{found['id']}"}
        what = {"question": found["id"], "answer": [0.5, 1, 1], "replaces": None, "seconds": 1.0}
        start = time.perf_counter()
        assert "event" in page.post(who | what)
        seconds.append(time.perf_counter() - start)
    used = page.processor_seconds() - before
    page.close()
    return seconds, used


def apart(folder: Path, args: Args) -> dict[float, list[float]]:
    """Seconds between the two clips with every picture of the screen, by speed."""
    from playwright.sync_api import sync_playwright

    def until(true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    server, found = Page(folder), {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=args.chromium)
        page = browser.new_page()
        page.goto(server.url)
        page.fill("#name", "Bob")
        page.keyboard.press("Enter")
        for speed in (1.0, 4.0):
            until(lambda: page.evaluate("labelling.player.playing"))
            page.evaluate(f"labelling.player.speed = {speed}; labelling.player.faster(0)")
            page.wait_for_timeout(1000)
            offsets = page.evaluate(_OFFSETS, args.seconds)
            found[speed] = [offset / speed for offset in offsets]
        browser.close()
    server.close()
    return found


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ask(folder, args)
        starts, used = zip(*[first_question(folder) for _ in range(args.starts)], strict=True)
        print(
            f"first of {args.questions} questions: {_told(starts, 's')}; of the processor:", end=" "
        )
        print(_told(used, "s"), flush=True)
        offsets = apart(folder, args) if args.chromium else {}
        answers, processor = acknowledged(folder)
        told = _told([1000 * one for one in answers], "ms")
        each = 1000 * processor / len(answers)
        print(f"an answer acknowledged: {told}, of {len(answers)}; ", end="")
        print(f"with the next question {each:.1f} ms of the processor", flush=True)
        answer(folder / "many", args)
        times, used_each = next_question(folder / "many")
        told = _told([1000 * one for one in times], "ms")
        print(f"the next question after {args.answers} answers: {told};", end=" ")
        print(f"{1000 * used_each:.1f} ms of the processor", flush=True)
        for speed, found in offsets.items():
            told = _told([1000 * one for one in found], "ms")
            print(f"clips apart at {speed:g} times: {told}, of {len(found)}", flush=True)


def _told(values: Sequence[float], unit: str) -> str:
    middle, most = np.quantile(values, 0.5), np.quantile(values, 0.95)
    return f"median {middle:.1f} {unit}, 95 % within {most:.1f} {unit}, at most {max(values):.1f}"


if __name__ == "__main__":
    main()
