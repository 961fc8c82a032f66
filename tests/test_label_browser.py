"""The labelling page in a real browser: Chromium, driven by Playwright.

Skipped where there is no Chromium or no Playwright. `PBCRL_CHROMIUM` names the browser if it is not
on the PATH; screenshots are kept in `PBCRL_SCREENSHOTS`, if that is set.
"""

import json
import math
import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pbcrl.data.label_log import trajectory_digest
from pbcrl.label.clips import draw_frames
from pbcrl.label.folder_oracle import FolderOracle
from pbcrl.label.server import LabelServer
from pbcrl.label.store import LabelStore
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory

pytest.importorskip("imageio_ffmpeg", reason="the clips need the extra `label`")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

NAMES = "chromium", "chromium-browser", "google-chrome"
CHROMIUM = os.environ.get("PBCRL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; PBCRL_CHROMIUM names one"),
]
FPS, SIZE = 15, 48
WIDE = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
VIEWS = {
    "wide": WIDE,
    "dark": WIDE | {"color_scheme": "dark"},
    "zoomed to 200 %": {"viewport": {"width": 640, "height": 430}, "device_scale_factor": 2},
    "phone": PHONE,
}
RULES = "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice", "experimental"
TASK = "# The task\n\nGreen is **safe**.\n\n- red is not\n"


def episode(value, steps=90):
    """Each picture tells its number and its episode by its colours."""
    return Trajectory(np.full((steps, 2), value, np.float32), np.zeros((steps, 1)))


def frames(one):
    pictures = np.zeros((len(one) + 1, SIZE, SIZE, 3), np.uint8)
    pictures[..., 0] = (np.arange(len(one) + 1) * 2)[:, None, None]
    pictures[..., 1] = int(one.obs[0, 0] * 9) % 256
    return pictures


@pytest.fixture(scope="session")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@contextmanager
def serving(folder):
    store = LabelStore(folder)
    server = LabelServer(store)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        store.close()


def fill(folder, pairs, *, batch=0, grid=0, steps=90, draw=True):
    oracle = FolderOracle(folder)
    values = range(2 * pairs)
    for value in values if draw else ():
        one = episode(value, steps)
        digest = trajectory_digest(one)
        draw_frames(folder, digest, frames(one), steps=len(one), fps=FPS)
    episodes = [episode(value, steps) for value in values]
    oracle.submit([Query(*episodes[i : i + 2]) for i in range(0, len(episodes), 2)])
    if batch:
        oracle.submit_batch(episodes[:batch])
    if grid:
        oracle.store.ask([("grid", episodes[:grid])])
    oracle.close()


@contextmanager
def opened(browser, url, *, name="Ada", refusal="nothing is refused", **options):
    context = browser.new_context(**(WIDE | options))
    page = context.new_page()
    found = []
    page.on("console", lambda m: found.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    ours = url.split("/#")[0]
    page.on("request", lambda r: None if r.url.startswith(ours) else found.append(r.url))
    page.goto(url)
    page.fill("#name", name)
    page.keyboard.press("Enter")
    page.wait_for_selector("#work:visible, #idle:visible")
    try:
        yield page
    finally:
        context.close()
    # Nothing to complain of but the refusal, and no request to anywhere else.
    assert [one for one in found if refusal not in one] == []


def until(page, true):
    """Wait for a JavaScript expression, or for a function of ours to be true.

    The page's policy lets it evaluate no expression by itself.
    """
    deadline = time.monotonic() + 300
    while not (true() if callable(true) else page.evaluate(true)):
        assert time.monotonic() < deadline, true
        page.wait_for_timeout(20)


def ready(page):
    until(page, "document.querySelectorAll('video').length > 0 && labelling.player.ready")


def answered(page, count):
    until(page, f"document.getElementById('told').textContent.startsWith('{count} answered')")


def shot(page, name):
    if folder := os.environ.get("PBCRL_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def test_a_session_of_20_questions_by_keys_with_undo_reload_and_skip(browser, tmp_path):
    fill(tmp_path, 20)
    (tmp_path / "intro.md").write_text(TASK)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        shot(page, "pair")
        keys = {1: "ArrowLeft", 0.5: "ArrowUp", 0: "ArrowRight"}
        for number in range(1, 21):
            preference = [1, 0.5, 0][number % 3]
            first, second = (1, 2) if preference == 1 else (2, 1) if preference == 0 else (1, 1)
            ready(page)
            # Where only one is safe, it is the safer one.
            needed = [keys[preference]] if first == second else []
            for key in (str(first), str(second + 7), *needed, "Enter"):
                page.keyboard.press(key)
            answered(page, number)
            if number == 7:
                for left in (6, 5):
                    page.keyboard.press("u")
                    answered(page, left)
                ready(page)
                assert page.locator("[aria-pressed=true][data-group]").count() == 3  # as it was
                for count in (6, 7):
                    ready(page)
                    page.keyboard.press("Enter")
                    answered(page, count)
                page.keyboard.press("2")  # a half answer
                before = page.locator("#announce").text_content()
                page.reload()
                page.wait_for_selector("#work:visible")
                answered(page, 7)
                assert page.locator("#announce").text_content() == before  # the same question
                assert page.locator("[aria-pressed=true][data-group]").count() == 1
        page.wait_for_selector("#idle:visible")
        assert "All is answered" in page.inner_text("#idle")
        page.keyboard.press("r")
        page.wait_for_selector("#review:visible")
        assert page.locator("#review-rows tr").count() == 20
        shot(page, "review")
        page.locator("#review-rows button").nth(19).click()
        page.wait_for_selector("#work:visible")
        ready(page)
        page.keyboard.press("ArrowUp")
        page.keyboard.press("1")
        page.keyboard.press("8")
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
        store = LabelStore(tmp_path)
        labels = store.labels()
        assert labels[1] == Label(0.5, 1, 1)  # corrected
        assert labels[2] == Label(0, 0, 1)
        assert labels[20] == Label(0, 0, 1)
        assert len(labels) == 20
        seconds = [event.seconds for event in store.events()]  # 0: within one picture of the screen
        assert min(seconds) >= 0


def test_a_contradiction_and_a_missing_answer_are_asked_back(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url, refusal="status of 422") as page:
        ready(page)
        page.keyboard.press("Enter")
        assert "“The left one is” has no answer yet" in page.inner_text("#notice")
        for key in ("2", "8", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#notice:visible")
        assert "left is safer, yet it is unsafe and right is safe" in page.inner_text("#notice")
        assert LabelStore(tmp_path).num_events == 0
        shot(page, "contradiction")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        answered(page, 1)
        assert LabelStore(tmp_path).labels() == {1: Label(0, 0, 1)}


def test_what_an_earlier_run_has_left_comes_last_and_is_counted_apart(browser, tmp_path):
    fill(tmp_path, 2)
    later = FolderOracle(tmp_path, run="later")
    later.submit([Query(episode(3), episode(0))])  # drawn, but no question yet
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        told = page.inner_text("#told")
        assert told == "0 answered · 1 left · 2 open questions of another run"
        for key in ("1", "8", "ArrowUp", "Enter"):
            page.keyboard.press(key)
        answered(page, 1)
        assert "· 0 left ·" in page.inner_text("#told")
        assert page.inner_text("#title") == "Question 1"  # after the third
        # The run is at work, and may ask more.
        later.submit([Query(episode(2), episode(0))])
        page.keyboard.press("k")
        until(page, "document.getElementById('title').textContent === 'Question 4'")
        assert "about 1 min to go if the run asks no more · 2 open" in page.inner_text("#told")
        assert len(later.collect()) == 1


def test_the_minutes_of_what_the_run_may_still_ask_are_told_too(browser, tmp_path):
    oracle = FolderOracle(tmp_path, budget=1_000)
    oracle.submit([Query(episode(1), episode(0)), Query(episode(2), episode(0))])
    for number in (1, 2):
        oracle.store.answer(number, Label(0.5, 1, 1), annotator="Ada", seconds=6.0)
    oracle.submit([Query(episode(3), episode(0))])
    with serving(tmp_path) as url, opened(browser, url) as page:
        told = "2 answered · 1 left · 6.0 s each · about 1 min to go, 100 with the 997 to come"
        until(page, f"document.getElementById('told').textContent === '{told}'")
        assert page.evaluate("document.getElementById('progress').max") == 1_000
    oracle.close()


def test_two_tabs_of_one_person_and_another_person_get_different_questions(browser, tmp_path):
    fill(tmp_path, 4)
    with serving(tmp_path) as url, opened(browser, url) as first:
        second = first.context.new_page()
        second.goto(url)
        second.click("#name-form button")
        second.wait_for_selector("#work:visible")
        with opened(browser, url, name="Bob") as third:
            pages = (first, second, third)
            asked = {page.locator("#announce").text_content() for page in pages}
            assert len(asked) == 3
            for page in pages:
                ready(page)
                for key in ("1", "8", "ArrowUp", "Enter"):
                    page.keyboard.press(key)
            answered(third, 1)
            until(first, lambda: len(LabelStore(tmp_path).labels()) == 3)
        assert [event.annotator for event in LabelStore(tmp_path).events()].count("Ada") == 2
        assert len(LabelStore(tmp_path).labels()) == 3


@pytest.mark.parametrize("apart", [0.1, 0.5])
@pytest.mark.parametrize(
    "speed", [1, *(pytest.param(speed, marks=pytest.mark.nightly) for speed in (0.5, 4))]
)
def test_a_clip_that_is_out_of_step_is_soon_within_20_ms_again(browser, tmp_path, speed, apart):
    """In seconds of the clip: a small difference is caught up, a large one set right at once."""
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        page.evaluate(f"localStorage.setItem('speed', {speed})")
        page.reload()
        page.wait_for_selector("#work:visible")
        ready(page)
        times = "[...document.querySelectorAll('video')].map(video => video.currentTime)"
        offset = f"(([a, b]) => Math.abs(a - b))({times})"
        before = page.evaluate(
            f"""() => {{
                labelling.player.seek(15);
                document.querySelectorAll('video')[1].currentTime += {apart};
                return {offset};
            }}"""
        )
        assert before == pytest.approx(apart, abs=0.01)
        until(page, f"{offset} <= {0.02 * max(1, speed)}")


def test_single_pictures_and_the_slider_show_the_picture_that_they_name(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        page.keyboard.press(" ")
        shown = """() => {
            const video = document.querySelector('video');
            const canvas = document.createElement('canvas');
            const draw = canvas.getContext('2d');
            canvas.width = canvas.height = 8;
            draw.drawImage(video, 0, 0, 8, 8);
            return draw.getImageData(4, 4, 1, 1).data[0];
        }"""
        for wanted in (40, 41, 42, 41):
            current = page.evaluate("labelling.player.frame()")
            for _ in range(abs(wanted - current)):
                page.keyboard.press("." if wanted > current else ",")
            until(page, f"document.getElementById('step').innerText === 'step {wanted} / 90'")
            # The red of a picture is twice its number, within what H.264 rounds.
            until(page, f"Math.abs(({shown})() - {2 * wanted}) <= 3")


def test_unsafe_moments_are_marked_by_held_keys_and_on_the_time_line(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        page.keyboard.press(" ")
        page.evaluate("labelling.player.seek(40)")
        until(page, "document.getElementById('step').innerText === 'step 40 / 90'")
        # Picture by picture there is no reaction to take back: what led to pictures 40 to 43.
        page.keyboard.down("x")
        for _ in range(3):
            page.keyboard.press(".")
        until(page, "document.getElementById('step').innerText === 'step 43 / 90'")
        page.keyboard.up("x")
        assert page.locator("#announce").text_content() == "Left: 1 unsafe moment"
        bar = page.locator(".right .bar").bounding_box()
        where = lambda share: bar["x"] + 1 + share * (bar["width"] - 2)  # noqa: E731
        for begin, end in ((0.1, 0.2), (0.5, 0.7), (0.6, 0.8), (0.15, 0.15)):
            page.mouse.move(where(begin), bar["y"] + 5)
            page.mouse.down()
            page.mouse.move(where(end), bar["y"] + 5, steps=4)
            page.mouse.up()
        # The second and the third overlap; the click took the first back.
        assert page.locator("#announce").text_content() == "Right: 1 unsafe moment"
        shot(page, "pair-moments")
        for key in ("2", "9", "ArrowUp"):
            page.keyboard.press(key)
        until(page, "document.querySelectorAll('.bar i').length === 2")
        page.reload()
        page.wait_for_selector("#work:visible")
        ready(page)
        until(page, "document.querySelectorAll('.bar i').length === 2")  # a draft is kept
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
        assert LabelStore(tmp_path).labels() == {1: Label(0.5, 0, 0, ((39, 43),), ((45, 72),))}
        page.keyboard.press("r")
        page.wait_for_selector("#review-rows:visible")
        assert "left unsafe, right unsafe; 2 unsafe moments" in page.inner_text("#review-rows")
        page.click("text=Look again")
        page.wait_for_selector("#work:visible")
        ready(page)
        until(page, "document.querySelectorAll('.bar i').length === 2")
        # Without its mark nothing is known of the right one's steps, until it is called safe.
        for key, label in (
            ("9", Label(0.5, 0, 0, ((39, 43),), None)),
            ("8", Label(0.5, 0, 1, ((39, 43),), ())),
        ):
            if page.is_visible("#idle"):
                page.keyboard.press("r")
                page.click("text=Look again")
                page.wait_for_selector("#work:visible")
                ready(page)
            page.keyboard.press("Shift+M")
            page.keyboard.press(key)
            page.keyboard.press("Enter")
            page.wait_for_selector("#idle:visible")
            assert LabelStore(tmp_path).labels() == {1: label}


def test_of_a_moment_marked_while_it_plays_the_reaction_is_taken_back(browser, tmp_path):
    fill(tmp_path, 1, steps=600)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        until(page, "labelling.player.frame() > 30")
        page.keyboard.down("m")
        pressed = page.evaluate("labelling.player.frame()")
        until(page, f"labelling.player.frame() >= {pressed + 30}")
        page.keyboard.up("m")
        released = page.evaluate("labelling.player.frame()")
        for key in ("1", "9", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#idle:visible")
        ((start, end),) = LabelStore(tmp_path).labels()[1].second_unsafe
        late = round(0.25 * FPS)
        assert pressed - late - 1 - 3 <= start <= pressed - late - 1  # up to three pictures later
        assert released - late - 3 <= end <= released - late


def test_a_moment_whose_key_is_still_held_is_in_the_answer(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        page.keyboard.press(" ")
        page.evaluate("labelling.player.seek(40)")
        until(page, "document.getElementById('step').innerText === 'step 40 / 90'")
        for key in ("2", "8", "ArrowRight"):
            page.keyboard.press(key)
        page.keyboard.down("x")
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
        page.keyboard.up("x")
        assert LabelStore(tmp_path).labels() == {1: Label(0, 0, 1, ((39, 40),), ())}


def test_moments_are_marked_on_a_phone_by_touch(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url, **PHONE) as page:
        ready(page)
        page.locator(".left .hold").tap()
        until(page, "document.querySelectorAll('.left .bar i').length === 1")
        page.locator(".left .bar").tap(position={"x": 1, "y": 5})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shot(page, "phone-moments")


def test_a_batch_is_a_grid_that_one_key_answers(browser, tmp_path):
    fill(tmp_path, 6, batch=12)
    for number in range(1, 7):
        LabelStore(tmp_path).answer(number, Label(0.5, 1, 1), annotator="Bob")
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        assert page.locator("#clips video").count() == 12
        assert "in these episodes, taken together" in page.inner_text("#answers")
        shot(page, "batch")
        page.keyboard.press("2")
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
        page.keyboard.press("r")
        page.wait_for_selector("#review-rows:visible")
        assert "not acceptable" in page.inner_text("#review-rows")
    assert LabelStore(tmp_path).labels()[7] == BatchLabel(0)


def test_in_a_grid_the_unsafe_ones_are_marked_by_mouse_and_keys(browser, tmp_path):
    fill(tmp_path, 6, grid=12)
    for number in range(1, 7):
        LabelStore(tmp_path).answer(number, Label(0.5, 1, 1), annotator="Bob")
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        assert page.locator("#clips video").count() == 12
        assert "Mark the unsafe ones" in page.inner_text("#answers")
        page.locator("#clips figure video").nth(2).click()
        page.keyboard.press("5")
        page.keyboard.press("5")
        page.keyboard.press("=")
        for _ in range(3):  # unsafe, can't tell, safe
            page.keyboard.press("1")
        marks = page.locator("#clips .mark")
        names = [marks.nth(i).text_content() for i in range(12)]
        assert [name for name in names if ": Safe" not in name] == [
            "Clip 3: Unsafe 3",
            "Clip 5: Can’t tell 5",
            "Clip 12: Unsafe =",
        ]
        shot(page, "grid")
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
        page.keyboard.press("r")
        page.wait_for_selector("#review-rows:visible")
        assert "2 of 12 unsafe, 1 can’t tell" in page.inner_text("#review-rows")
        safe = [1.0] * 12
        safe[2] = safe[11] = 0.0
        safe[4] = math.nan
        assert repr(LabelStore(tmp_path).labels()[7]) == repr(GridLabel(tuple(safe)))
        page.click("text=Look again")
        ready(page)
        assert marks.nth(11).text_content() == "Clip 12: Unsafe ="
        marks.nth(11).focus()
        page.keyboard.press("Enter")  # the button that has the focus, not the question
        page.keyboard.press("Space")
        assert marks.nth(11).text_content() == "Clip 12: Safe ="
        page.click("#done")
        page.wait_for_selector("#idle:visible")
    assert LabelStore(tmp_path).labels()[7].safe[11] == 1


def test_a_second_enter_does_not_call_the_next_grid_safe_unseen(browser, tmp_path):
    """Certificates come from these answers."""
    fill(tmp_path, 6, grid=12)
    store = LabelStore(tmp_path)
    for number in range(1, 7):
        store.answer(number, Label(0.5, 1, 1), annotator="Bob")
    store.ask([("grid", [store.trajectory(d) for d in store.questions()[6].members[:6]])])
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        page.keyboard.press("3")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('#clips figure').length === 6")
        ready(page)
        page.evaluate("labelling.player.seconds = 0")
        page.keyboard.press("Enter")
        time.sleep(0.2)
        assert list(store.labels()) == [1, 2, 3, 4, 5, 6, 7]
        page.evaluate("labelling.player.seconds = 1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
    assert store.labels()[8].safe == (1.0,) * 6


def test_a_key_for_each_clip_and_a_film_that_ends_under_one(browser, tmp_path):
    """Both are unsafe at once; then the right one until its last step."""
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        page.evaluate("labelling.player.hold(4)")
        page.keyboard.down("x")
        page.evaluate("labelling.player.hold(8)")
        page.keyboard.down("m")
        page.evaluate("labelling.player.hold(10)")
        page.keyboard.up("m")
        page.evaluate("labelling.player.hold(12)")
        page.keyboard.up("x")
        marks = "JSON.stringify(chosen.unsafe)"
        left, right = json.loads(page.evaluate(marks))
        (every,) = {page.evaluate("labelling.player.every()")}
        assert left == [[3 * every, 12 * every]]
        assert right == [[7 * every, 10 * every]]
        page.keyboard.down("m")
        page.evaluate("labelling.player.loop = false")
        page.evaluate("labelling.player.play()")
        until(page, "!labelling.player.playing")
        page.keyboard.up("m")
        assert json.loads(page.evaluate(marks))[1][-1][1] == 90


def test_a_grid_is_marked_on_a_phone_by_touch(browser, tmp_path):
    fill(tmp_path, 6, grid=12)
    for number in range(1, 7):
        LabelStore(tmp_path).answer(number, Label(0.5, 1, 1), annotator="Bob")
    with serving(tmp_path) as url, opened(browser, url, **PHONE) as page:
        ready(page)
        page.locator("#clips figure").nth(1).tap()
        assert page.locator("#clips .unsafe").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shot(page, "grid-phone")
        page.tap("#done")
        page.wait_for_selector("#idle:visible")
    assert LabelStore(tmp_path).labels()[7].safe[:3] == (1, 0, 1)


def test_what_cannot_be_drawn_is_shown_as_curves(browser, tmp_path):
    fill(tmp_path, 1, draw=False)
    with serving(tmp_path) as url, opened(browser, url) as page:
        page.wait_for_selector("canvas")
        assert page.locator("canvas[role=img][aria-label*='curves of 2 observations']").count() == 2
        shot(page, "curves")


def test_the_page_fits_a_phone_and_everything_has_a_name_for_screen_readers(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url, **PHONE) as page:
        ready(page)
        shot(page, "phone")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, input, video, canvas, [role=group]')].filter(
                one => !(one.textContent.trim() || one.getAttribute('aria-label')
                         || one.labels?.length)).length"""
        )
        assert nameless == 0
        for text in ("Safe", "Unsafe", "Left is safer", "Next"):
            page.locator(f"#work button:has-text('{text}')").last.tap()
        # The last buttons of these names are those of the right one.
        assert "has no answer yet" in page.inner_text("#notice")


def test_the_keyboard_alone_reaches_everything_and_the_focus_is_seen(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.textContent.trim().split(' ')[0]"))
            if page.evaluate("document.activeElement.tagName") != "BODY":
                style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style in ("solid", "auto")
        assert {"Safe", "Unsafe", "Left", "Undo", "Later", "Next", "Help"} <= reached


def test_a_link_without_its_token_shows_no_question(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url.split("#")[0])
        page.wait_for_selector("#notice:visible")
        assert "use the link that the command printed last" in page.inner_text("#notice")
        assert page.locator("video").count() == 0
        context.close()


# -- Any size, any eye ---------------------------------------------------------------------------


def questions(folder, kind):
    """A question of such a kind after others that were answered; "none" is left of them."""
    many = kind in ("batch", "grid")
    fill(folder, 6, **({kind: 12} if many else {}), draw=kind != "curves")
    (folder / "intro.md").write_text(TASK)
    store = LabelStore(folder)
    for number in range(1, 7 if many or kind == "none" else 2):
        label = Label(1, 1, 0, (), ((3, 9),))
        store.answer(number, label, annotator="Ada", seconds=4.2)
    store.close()


@contextmanager
def asking(browser, folder, view):
    with serving(folder) as url, opened(browser, url, **VIEWS[view]) as page:
        until(page, "labelling.player.ready || !document.getElementById('idle').hidden")
        yield page


def findings(page):
    """What axe complains of: each rule with the elements that break it."""
    options = {"runOnly": {"type": "tag", "values": RULES}}
    broken = axe.Axe().run(page, options=options).response["violations"]
    return [(rule["id"], [node["target"] for node in rule["nodes"]]) for rule in broken]


@pytest.mark.parametrize("kind", ["pair", "curves", "batch", "grid", "none"])
def test_axe_finds_nothing(browser, tmp_path, kind):
    questions(tmp_path, kind)
    keys = {"pair": ["x", "Enter"], "grid": ["2", "3", "3"], "none": ["r"]}.get(kind, [])
    for view in VIEWS:
        with asking(browser, tmp_path, view) as page:
            assert (view, findings(page)) == (view, [])
            shot(page, f"{kind} {view}")
            for key in keys:
                page.keyboard.press(key)
            if kind == "none":
                page.wait_for_selector("#review:visible")
            assert (view, findings(page)) == (view, [])
            shot(page, f"{kind} {view} after keys")
            page.keyboard.press("h")
            page.wait_for_selector("#welcome:visible")
            assert (view, findings(page)) == (view, [])


@pytest.mark.parametrize("kind", ["pair", "batch", "grid"])
def test_all_of_a_question_is_seen_without_scrolling(browser, tmp_path, kind):
    questions(tmp_path, kind)
    for view in VIEWS:
        with asking(browser, tmp_path, view) as page:
            outside = page.evaluate(
                """[...document.querySelectorAll('header *, #work *')].filter(one => {
                    if (one.closest('#rule-text') || one.closest('.for-readers')) return false;
                    const { top, bottom, left, right } = one.getBoundingClientRect();
                    return top < 0 || left < 0 || bottom > innerHeight || right > innerWidth;
                }).map(one => one.outerHTML)"""
            )
            assert (view, outside) == (view, [])
            lowest = page.evaluate(
                "Math.min(...[...document.querySelectorAll('video')].map(one => one.clientHeight))"
            )
            assert lowest >= (120 if kind == "pair" else 60), view


@pytest.mark.parametrize("view", ["wide", "zoomed to 200 %", "phone"])
def test_what_is_wrong_is_said_over_no_button_and_no_count(browser, tmp_path, view):
    questions(tmp_path, "pair")
    with asking(browser, tmp_path, view) as page:
        page.keyboard.press("Enter")
        page.wait_for_selector("#notice:visible")
        covered = page.evaluate(
            """(() => {
                const box = document.getElementById('notice').getBoundingClientRect();
                return [...document.querySelectorAll('button, #told, #step')].filter(one => {
                    const { top, bottom, left, right } = one.getBoundingClientRect();
                    return right > box.left && left < box.right && bottom > box.top
                        && top < box.bottom;
                }).map(one => one.id);
            })()"""
        )
        assert covered == []


# -- While one answers ---------------------------------------------------------------------------


def test_what_counts_as_unsafe_is_seen_while_one_answers(browser, tmp_path):
    questions(tmp_path, "pair")
    with asking(browser, tmp_path, "wide") as page:
        rule = page.locator("#rule-text")
        assert rule.inner_text().split() == [
            "The",
            "task",
            "Green",
            "is",
            "safe.",
            "red",
            "is",
            "not",
        ]
        page.keyboard.press("t")
        assert not rule.is_visible()
        page.reload()
        page.wait_for_selector("#work:visible")
        assert not rule.is_visible()
        page.click("#rule-key")
        assert rule.is_visible()
        page.keyboard.press(" ")  # the player's, not of what was clicked
        assert rule.is_visible()


def test_of_a_pair_the_only_one_that_is_safe_is_safer_unless_something_else_is_chosen(
    browser, tmp_path
):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        ready(page)
        pressed = page.locator("#answers .middle [aria-pressed=true]")
        for keys, found in [
            ("1", []),
            ("9", ["Left is safer ←"]),
            ("8", []),  # both are safe
            ("2", ["Right is safer →"]),
            ("3", []),  # it is not known
            ("2", ["Right is safer →"]),
        ]:
            page.keyboard.press(keys)
            assert pressed.all_inner_texts() == found
        page.keyboard.press("ArrowUp")
        assert pressed.all_inner_texts() == ["About the same ↑"]
        page.keyboard.press("Enter")
        page.wait_for_selector("#idle:visible")
        assert LabelStore(tmp_path).labels() == {1: Label(0.5, 0, 1)}


def test_nothing_is_answered_before_its_clips_are_there(browser, tmp_path):
    fill(tmp_path, 1)
    with serving(tmp_path) as url, opened(browser, url) as page:
        page.route("**/clips/*", lambda _: None)  # they never come
        page.reload()
        page.wait_for_selector("#work:visible")
        for key in ("1", "9", "Enter"):
            page.keyboard.press(key)
        assert "Not all clips are here yet" in page.inner_text("#notice")
        assert LabelStore(tmp_path).num_events == 0
        page.unroute("**/clips/*")
        page.reload()
        ready(page)
        page.keyboard.press("Enter")  # the draft
        answered(page, 1)
        assert LabelStore(tmp_path).labels() == {1: Label(1, 1, 0)}


def test_before_anything_was_asked_nothing_is_called_answered(browser, tmp_path):
    oracle = FolderOracle(tmp_path)
    with serving(tmp_path) as url, opened(browser, url) as page:
        assert "Nothing has been asked yet. A training run is at work" in page.inner_text("#idle")
        oracle.close()
        page.reload()
        page.wait_for_selector("#idle:visible")
        assert "asked yet, and no training run is at work" in page.inner_text("#idle")
