"""The labelling page's server: who is let in, what is acknowledged, and that it survives kills."""

import http.client
import importlib.util
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import ExitStack, closing, contextmanager

import gymnasium as gym
import numpy as np
import pytest

import pbcrl_envs  # noqa: F401 registers
from pbcrl.data.label_log import trajectory_digest
from pbcrl.errors import CorruptFileError, LabelError, StorageError
from pbcrl.label import draw
from pbcrl.label import server as label_server
from pbcrl.label.clips import clip_of, draw_frames, draw_replay
from pbcrl.label.folder_oracle import FolderOracle
from pbcrl.label.replay import Replay, drawn_how, replay_frames
from pbcrl.label.server import LabelServer
from pbcrl.label.store import LabelStore
from pbcrl.trajectory import BatchLabel, GridLabel, Label, Query, Trajectory

needs_ffmpeg = pytest.mark.skipif(
    importlib.util.find_spec("imageio_ffmpeg") is None, reason="clips need the extra `label`"
)


def episode(value):
    return Trajectory(np.full((3, 2), value), np.full((3, 1), -value), np.ones(3))


def asked(folder, count):
    store = LabelStore(folder, create=True)
    store.ask([("pair", (episode(2 * i), episode(2 * i + 1))) for i in range(count)])
    return store


class Page:
    """What the page in a browser sends."""

    def __init__(self, port, token, *, annotator="Ada", tab="1"):
        self.host, self.token = f"127.0.0.1:{port}", token
        self.person = f"annotator={annotator}&tab={tab}"
        self.annotator = annotator
        self.port = port

    def request(self, method, path, *, body=None, **headers):
        """Status, headers and body; a header that is None is left out."""
        sent = {
            "Host": self.host,
            "Origin": f"http://{self.host}",
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json",
        }
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None and "Content-Length" not in sent:
                sent["Content-Length"] = str(len(body))
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path):
        status, _, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def send(self, **event):
        body = json.dumps({"annotator": self.annotator} | event).encode()
        status, _, found = self.request("POST", "/api/events", body=body)
        return status, json.loads(found)

    def next(self):
        return self.get(f"/api/next?{self.person}")

    def answer(self, number, answer, *, token, replaces=None, seconds=1.0):
        return self.send(
            kind="answer",
            question=number,
            answer=answer,
            token=token,
            replaces=replaces,
            seconds=seconds,
        )


@contextmanager
def serving(folder, **options):
    store = LabelStore(folder)
    server = LabelServer(store, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Page(server.server_port, server.token)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        store.close()


@pytest.fixture
def page(tmp_path):
    asked(tmp_path / "folder", 3).close()
    (tmp_path / "secret.txt").write_text("not for the page")
    with serving(tmp_path / "folder") as page:
        yield page


# -- Who is let in -----------------------------------------------------------------------------


def test_the_page_is_served_to_this_machine_alone_with_a_strict_policy(page):
    status, headers, body = page.request("GET", "/", Authorization=None, Origin=None)
    assert (status, b"Which one is safer?" in body) == (200, True)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    others = {info[4][0] for info in found}
    for address in others - {"127.0.0.1", "::1", "127.0.1.1"}:
        with socket.socket() as other:
            other.settimeout(5)
            assert other.connect_ex((address, page.port)) != 0


def test_no_file_of_the_page_asks_for_anything_elsewhere(page):
    for path in ("/", "/page.css", "/page.js", "/icon.svg"):
        status, _, body = page.request("GET", path, Authorization=None)
        assert status == 200
        addresses = set(re.findall(rb"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", body))
        assert addresses <= {b"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    ("method", "path", "changes", "status"),
    [
        ("GET", "/", {"Host": "evil.example"}, 403),  # its name was made to point here
        ("GET", "/api/next?annotator=Ada", {"Host": "evil.example"}, 403),
        ("GET", "/", {"Host": None}, 403),
        ("GET", "/api/next?annotator=Ada", {"Origin": "http://evil.example"}, 403),
        ("GET", "/api/next?annotator=Ada", {"Origin": "null"}, 403),
        ("GET", "/api/next?annotator=Ada", {"Authorization": None}, 401),
        ("GET", "/api/next?annotator=Ada", {"Authorization": "Bearer wrong"}, 401),
        ("GET", "/api/next?annotator=Ada", {"Authorization": "Bearer é"}, 401),
        ("GET", "/../secret.txt", {}, 404),
        ("GET", "/clips/../../secret.txt", {}, 404),
        ("GET", "/clips/%2e%2e/%2e%2e/secret.txt", {}, 404),
        ("GET", "//etc/passwd", {}, 404),
        ("GET", "/labels.sqlite", {}, 404),
        ("GET", "/clips/" + "0" * 32 + ".mp4", {}, 404),
        ("GET", "/api/next", {}, 400),
        ("GET", "/api/next?annotator=A&annotator=B", {}, 400),
        ("GET", "/api/next?annotator=%1b%5b2J", {}, 422),
        ("GET", "/api/question?annotator=Ada&id=99", {}, 422),
        ("GET", "/api/question?annotator=Ada&id=1;DROP", {}, 400),
        ("GET", f"/api/question?annotator=Ada&id={2**64}", {}, 400),
        ("GET", "/api/question?annotator=Ada&id=" + "9" * 5000, {}, 400),
        ("GET", "/api/next?annotator=Ada" + "&a=b" * 20, {}, 400),
        ("GET", "/api/clip?digest=../../secret", {}, 400),
        ("GET", "/api/clip?digest=" + "0" * 32, {}, 404),
        ("POST", "/api/events", {"Origin": None}, 403),
        ("POST", "/api/events", {"Origin": "http://evil.example"}, 403),
        ("POST", "/api/events", {"Authorization": None}, 401),
        ("POST", "/api/events", {"Content_Type": "text/plain"}, 415),
        ("POST", "/api/events", {"Content_Length": "100000000"}, 413),
        ("POST", "/api/events", {"Content_Length": "-1"}, 413),
        ("POST", "/api/events", {"Content_Length": "many"}, 411),
        ("POST", "/api/other", {}, 404),
        ("PUT", "/api/events", {}, 501),
        ("DELETE", "/api/events", {}, 501),
        ("OPTIONS", "/api/events", {"Origin": "http://evil.example"}, 501),
        ("TRACE", "/", {}, 501),
    ],
)
def test_a_hostile_request_is_refused_and_changes_nothing(
    page, tmp_path, method, path, changes, status
):
    body = b"{}" if method == "POST" else None
    found, headers, text = page.request(method, path, body=body, **changes)
    assert found == status
    assert b"not for the page" not in text
    assert "Access-Control-Allow-Origin" not in headers
    assert LabelStore(tmp_path / "folder").num_events == 0
    assert page.next()["answered"] == 0  # and it serves on


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 10_000,
        b'{"kind": "answer"}',
        b'{"kind": "drop", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1, "answer": [7, 1, 1]}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1, "answer": [true, 1, 1]}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1.5, "replaces": null, '
        b'"seconds": 1, "answer": [1, 1, 1]}',
        b'{"kind": "answer", "annotator": ["Ada"], "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1, "answer": [1, 1, 1]}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": NaN, "answer": [1, 1, 1]}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1%s, "answer": [1, 1, 1]}' % (b"0" * 400),
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": true, "answer": [1, 1, 1]}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": "1", "answer": [1, 1, 1]}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1, "answer": [1%s, 1, 1]}' % (b"0" * 400),
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1, "answer": [1, 1, 1], "more": 1}',
        b'{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        b'"seconds": 1, "answer": [1, 0, 1]}',
    ],
)
def test_a_body_that_is_no_event_is_refused_and_changes_nothing(page, tmp_path, body):
    status, _, text = page.request("POST", "/api/events", body=body)
    assert status in (400, 422)
    assert json.loads(text)["error"]
    assert LabelStore(tmp_path / "folder").num_events == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("[NaN, 1, 1]", "the body is no JSON, which has null for what has no answer, and no NaN"),
        ('{"safe": [NaN]}', "the body is no JSON, which has null"),
        ('{"answers": [1, 1, 0], "unsafe": [null, [[0, 1, 2]]]}', "a mark has two steps"),
        ('{"answers": [1, 1, 0], "unsafe": [null, 7]}', "a mark has two steps"),
        ('{"answers": 7, "unsafe": [null, null]}', "a marked pair has 3 answers and 2 lists"),
        ("7", "an answer about a pair has three numbers, got 7"),
    ],
)
def test_what_is_no_answer_is_refused_in_words(page, answer, said):
    body = (
        '{"kind": "answer", "annotator": "Ada", "token": "t", "question": 1, "replaces": null, '
        f'"seconds": 1, "answer": {answer}}}'
    )
    status, _, text = page.request("POST", "/api/events", body=body.encode())
    assert status in (400, 422)
    assert said in json.loads(text)["error"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/question?annotator=Ada&id=abc", "id= is the number of a question"),
        ("/api/question?annotator=Ada&id=%C2%B2", "id= is the number of a question"),
        ("/api/next?annotator=Ada" + "&a=b" * 20, "an address has at most 8 fields"),
        (f"/api/clip?digest={'0' * 32}", "there is no such clip"),
    ],
)
def test_an_address_that_names_nothing_is_refused_in_words(page, path, said, capsys):
    _, _, text = page.request("GET", path)
    assert json.loads(text)["error"] == said
    assert capsys.readouterr().out == ""  # nor is the store called damaged


def test_a_body_without_an_end_holds_up_nobody(page):
    """Its connection waits; others are served beside it."""
    with socket.create_connection(("127.0.0.1", page.port)) as slow:
        head = f"POST /api/events HTTP/1.1\r\nHost: {page.host}\r\nOrigin: http://{page.host}\r\n"
        head += f"Authorization: Bearer {page.token}\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert page.next()["left"] == 3


def test_sixty_people_who_open_the_page_at_once_are_all_served(tmp_path):
    asked(tmp_path, 1).close()
    store = LabelStore(tmp_path)
    server = LabelServer(store)  # it listens, and nobody is let in yet
    with ExitStack() as stack:
        stack.callback(store.close)
        stack.callback(server.server_close)
        address = "127.0.0.1", server.server_port
        people = [socket.create_connection(address, timeout=60) for _ in range(60)]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        for one in people:
            with one:
                one.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n\r\n".encode())
                assert one.recv(15) == b"HTTP/1.1 200 OK"


def test_links_in_the_folder_show_nothing_from_outside(page, tmp_path):
    folder, digest = tmp_path / "folder", "0" * 32
    (folder / "clips").mkdir()
    (tmp_path / "about.json").write_text('{"error": "not for the page"}')
    (folder / "intro.md").symlink_to(tmp_path / "secret.txt")
    (folder / "clips" / f"{digest}.mp4").symlink_to(tmp_path / "secret.txt")
    (folder / "clips" / f"{digest}.json").symlink_to(tmp_path / "about.json")
    for path, status, said in [
        ("/api/session", 507, b"intro.md: it is a link, a folder, a pipe or a device"),
        (f"/clips/{digest}.mp4", 404, b"there is no such clip"),
    ]:
        found, _, text = page.request("GET", path)
        assert (found, said in text, b"not for the page" in text) == (status, True, False)
    assert clip_of(folder, digest) is None
    for damaged in ("7", "[" * 10_000, "[]", '{"fps": 3}'):
        (folder / "clips" / f"{'1' * 32}.json").write_text(damaged)
        assert clip_of(folder, "1" * 32) is None


def test_a_folder_of_clips_that_is_a_link_is_refused(tmp_path):
    asked(tmp_path / "folder", 1).close()
    (tmp_path / "outside").mkdir()
    (tmp_path / "folder" / "clips").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match=r"holds its clips itself, but .*clips is a link to"):
        LabelServer(LabelStore(tmp_path / "folder"))
    with pytest.raises(StorageError, match="is a link to"):
        draw_frames(tmp_path / "folder", "0" * 32, NOISE, steps=12)
    assert list((tmp_path / "outside").iterdir()) == []


# -- A session ---------------------------------------------------------------------------------


def test_a_batch_is_answered_by_one_number_and_a_pair_by_three(page, tmp_path):
    store = LabelStore(tmp_path / "folder")
    (number,) = store.ask([("batch", [episode(1), episode(2), episode(3)])])
    status, found = page.answer(number, [1, 1, 0], token="a")
    assert (status, "is about a batch and answered by a BatchLabel" in found["error"]) == (
        422,
        True,
    )
    status, found = page.answer(1, [1], token="b")
    assert status == 422
    assert "is about a pair and answered by a Label" in found["error"]
    assert page.answer(number, [0], token="c")[0] == 200
    assert page.get(f"/api/question?{page.person}&id={number}")["answer"] == [0]
    assert [row["answer"] for row in page.get(f"/api/answers?{page.person}")] == [[0]]
    assert store.labels() == {number: BatchLabel(0)}


def test_a_grid_is_answered_by_a_list(page, tmp_path):
    store = LabelStore(tmp_path / "folder")
    (number,) = store.ask([("grid", [episode(1), episode(2)])])
    for wrong in ([1, 0], {"safe": [1]}, {"safe": 1}, {"safe": [1, 2]}, {"all": [1, 0]}):
        status, found = page.answer(number, wrong, token="a")
        assert status in (400, 422), found
    assert store.num_events == 0
    assert page.answer(number, {"safe": [0, None]}, token="c")[0] == 200
    assert page.get(f"/api/question?{page.person}&id={number}")["answer"] == {"safe": [0, None]}
    assert repr(store.labels()) == repr({number: GridLabel((0.0, float("nan")))})


def test_marked_steps_come_with_the_answers_about_a_pair(page, tmp_path):
    store = LabelStore(tmp_path / "folder")
    steps = len(store.trajectory(store.question(1).members[1]))
    given = {"answers": [1, 1, 0], "unsafe": [None, [[0, steps]]]}
    for wrong in (
        given | {"unsafe": [[[0, steps + 1]], None]},
        given | {"unsafe": [[[1, 0]], None]},
        given | {"unsafe": [[[0, 1], [0, 1]], None]},
        given | {"unsafe": [[[0.5, 1]], None]},
        given | {"unsafe": [None]},
        given | {"answers": [1]},
        given | {"unsafe": [[], []]},
        {"unsafe": [None, None]},
    ):
        status, found = page.answer(1, wrong, token="a")
        assert status in (400, 422), found
    assert page.answer(1, given, token="c")[0] == 200
    assert page.get(f"/api/question?{page.person}&id=1")["answer"] == given


def test_a_session_of_answers_a_skip_an_undo_and_a_correction(page, tmp_path):
    found = page.next()
    assert (found["question"]["id"], found["left"], found["run_is_active"]) == (1, 3, False)
    assert page.answer(1, [1, 1, 0], token="a", seconds=2.0)[0] == 200
    assert page.answer(1, [1, 1, 0], token="a", seconds=2.0)[0] == 200  # sent twice
    assert page.send(kind="skip", question=2, token="b", replaces=None, seconds=1.0)[0] == 200
    assert page.answer(3, [None, 1, None], token="c", seconds=4.0)[0] == 200
    found = page.next()
    assert (found["answered"], found["skipped"], found["median_seconds"]) == (2, 1, 3.0)
    assert found["question"]["id"] == 2  # put off
    assert page.send(kind="undo", token="d") == (200, {"undone": 3})
    again = page.get(f"/api/question?{page.person}&id=1")
    assert again["answer"] == [1, 1, 0]
    assert page.answer(1, [0, 0, 1], token="e", replaces=again["replaces"])[0] == 200
    rows = page.get(f"/api/answers?{page.person}")
    assert [(row["question"], row["skipped"]) for row in rows] == [(1, False), (2, True)]
    assert LabelStore(tmp_path / "folder").labels() == {1: Label(0, 0, 1)}


def test_a_question_that_was_put_off_counts_until_somebody_else_has_answered_it(page, tmp_path):
    for number in (1, 2):
        page.send(kind="skip", question=number, token=f"s{number}", replaces=None, seconds=1.0)
    found = page.next()
    assert (found["skipped"], found["left"]) == (2, 3)
    LabelStore(tmp_path / "folder").answer(1, Label(1, 1, 0), annotator="Bob")
    found = page.next()
    assert (found["skipped"], found["left"], found["asked"]) == (1, 2, 3)


def test_a_second_window_is_told_of_an_answer_that_it_did_not_know(page):
    page.answer(1, [1, 1, 0], token="a")
    status, found = page.answer(1, [0, 0, 1], token="b")
    assert (status, "elsewhere in the meantime" in found["error"]) == (409, True)


def test_the_page_says_whether_a_run_may_ask_more(page, tmp_path):
    for budget, to_come in ((None, None), (20, 17)):  # three are asked
        oracle = FolderOracle(tmp_path / "folder", budget=budget)
        assert (page.next()["run_is_active"], page.next()["to_come"]) == (True, to_come)
        oracle.close()
        assert (page.next()["run_is_active"], page.next()["to_come"]) == (False, 0)


def test_the_task_s_own_words_are_read_from_the_folder(page, tmp_path):
    (tmp_path / "folder" / "intro.md").write_text("# Walk\nFalling is *unsafe*.", encoding="utf-8")
    assert page.get("/api/session")["intro"] == "# Walk\nFalling is *unsafe*."


def test_of_a_huge_intro_the_page_shows_the_first_64_kib_and_says_so(page, tmp_path):
    with open(tmp_path / "folder" / "intro.md", "wb") as file:
        file.write(b"x" * 65_536)
        file.truncate(1 << 40)  # a terabyte of zeros, which takes no space
    found = page.get("/api/session")["intro"]
    assert found == "x" * 65_536 + "\n\n**Here intro.md is cut off, after 65536 bytes.**\n"


def test_an_answer_after_the_store_was_replaced_is_not_acknowledged_and_no_earlier_one_is_lost(
    page, tmp_path
):
    folder = tmp_path / "folder"
    asked(tmp_path / "backup", 3).close()
    assert page.answer(1, [1, 1, 0], token="a")[0] == 200
    os.replace(tmp_path / "backup" / "labels.sqlite", folder / "labels.sqlite")
    status, found = page.answer(2, [1, 1, 0], token="b")
    assert (status, "was removed or replaced" in found["error"]) == (507, True)
    (saved,) = folder.glob("labels-*.sqlite")
    os.replace(saved, folder / "labels.sqlite")
    with serving(folder) as again:
        assert again.next()["answered"] == 1
        assert again.answer(2, [1, 1, 0], token="b")[0] == 200  # sent again
    assert LabelStore(folder).labels() == {1: Label(1, 1, 0), 2: Label(1, 1, 0)}


def test_people_agree_or_not_on_the_page_too(page):
    page.answer(1, [1, 1, 0], token="a")
    page.annotator = "Bob"
    page.answer(1, [1, 1, 1], token="b")
    found = page.get("/api/agreement")
    assert [name[:6] for name in found["disagreements"]] == ["000001"]
    assert found["measures"]["kappa_safety_Ada_Bob"] == pytest.approx(0)


def test_two_servers_on_one_folder_are_refused(tmp_path):
    asked(tmp_path, 1).close()
    with started(tmp_path):
        second = run_label(tmp_path)
        assert second.returncode == 1
        assert "one annotator at a time, but another one is at work" in second.stderr


# -- Clips -------------------------------------------------------------------------------------


def pictures(path):
    """What a clip shows, (F, H, W, 3), as ffmpeg itself says."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24"]
    found = subprocess.run([*command, "-"], capture_output=True, check=True)
    width, height = map(int, re.search(rb"Video: h264.*, (\d+)x(\d+)", found.stderr).groups())
    return np.frombuffer(found.stdout, np.uint8).reshape(-1, height, width, 3)


NOISE = np.random.default_rng(0).integers(0, 255, (12, 61, 41, 3), dtype=np.uint8)


@needs_ffmpeg
def test_recorded_frames_become_a_clip_of_even_size_that_is_sent_in_parts(tmp_path):
    oracle = FolderOracle(tmp_path, show=lambda one: NOISE if one.obs[0, 0] == 1 else None)
    oracle.submit([Query(episode(1), episode(2))])
    digest = trajectory_digest(episode(1))
    assert pictures(tmp_path / "clips" / f"{digest}.mp4").shape == (12, 62, 42, 3)
    whole = (tmp_path / "clips" / f"{digest}.mp4").read_bytes()
    with serving(tmp_path) as page:
        left, right = page.next()["question"]["members"]
        assert (left["clip"], left["frames"]) == (f"/clips/{digest}.mp4", 12)
        assert [curve["name"] for curve in right["curves"]] == ["observation 0", "observation 1"]
        for given, status, part in [
            (None, 200, whole),
            ("bytes=0-99", 206, whole[:100]),
            ("bytes=100-", 206, whole[100:]),
            ("bytes=-7", 206, whole[-7:]),
            (f"bytes=5-{10**9}", 206, whole[5:]),
            (f"bytes={len(whole)}-", 416, b""),
            ("bytes=9-3", 416, b""),
            ("bytes=-", 200, whole),
            ("lines=1-2", 200, whole),
        ]:
            found, headers, body = page.request("GET", left["clip"], Range=given)
            assert (found, body, headers["Accept-Ranges"]) == (status, part, "bytes")
            if status == 206:
                start = whole.index(part)
                end = start + len(part) - 1
                assert headers["Content-Range"] == f"bytes {start}-{end}/{len(whole)}"


def test_of_a_huge_clip_only_the_part_that_is_asked_for_is_read(page, tmp_path):
    path = tmp_path / "folder" / "clips" / f"{'0' * 32}.mp4"
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.write(b"first")
        file.truncate((1 << 40) - 4)  # a terabyte, which takes no space
        file.seek(0, os.SEEK_END)
        file.write(b"last")
    for given, part in [("bytes=0-4", b"first"), ("bytes=-6", b"\0\0last")]:
        status, headers, body = page.request("GET", f"/clips/{path.name}", Range=given)
        assert (status, body) == (206, part)
        assert headers["Content-Range"].endswith(f"/{1 << 40}")


@needs_ffmpeg
@pytest.mark.parametrize("channels", [1, 4])
def test_frames_that_are_not_rgb_are_refused(tmp_path, channels):
    """ffmpeg was sent them as if they were, and people would have judged the noise."""
    frames = [np.repeat(frame[..., :1], channels, axis=-1) for frame in NOISE]
    with pytest.raises(LabelError, match=r"frames are uint8 \(H, W, 3\) of one size, got"):
        draw_frames(tmp_path, "0" * 32, frames, steps=len(frames))


def test_what_an_env_prints_is_no_answer_of_what_draws(tmp_path):
    """A line without an end stopped all clips, and a byte that is no UTF-8 their thread."""
    (tmp_path / "loud.py").write_text(
        "import os, gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "class Loud(PendulumEnv):\n"
        "    def reset(self, **options):\n"
        "        print('.', end='', flush=True)\n"
        "        os.write(1, b'\\xe9')\n"
        "        return super().reset(**options)\n"
        "gymnasium.register('Loud-v0', entry_point=Loud, max_episode_steps=3)\n"
    )
    trajectory = Trajectory(np.zeros((3, 3)), np.zeros((3, 1)))
    oracle = FolderOracle(tmp_path / "folder", show=lambda _: Replay("Loud-v0", seed=0))
    oracle.submit([Query(trajectory, episode(2))])
    digest = trajectory_digest(trajectory)
    done = subprocess.run(
        draw.command(tmp_path / "folder", ["loud:Loud-v0"]),
        input=f"{digest}\n".encode(),
        capture_output=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout == f"{digest}\n".encode()
    assert b".\xe9" in done.stderr


@needs_ffmpeg
def test_frames_of_several_sizes_are_refused(tmp_path):
    with pytest.raises(Exception, match=r"frames are uint8 \(H, W, 3\) of one size, got"):
        draw_frames(tmp_path, "0" * 32, [NOISE[0], NOISE[1][:-2]], steps=2)


def test_without_ffmpeg_people_are_told_what_to_install_and_nothing_of_it_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)  # as if it were not installed
    with pytest.raises(LabelError, match=r"but it is missing .*; install the extra: pip install"):
        draw_frames(tmp_path, "0" * 32, NOISE, steps=12)
    trajectory, replay = episode(1), Replay("CartPole-v1", seed=1)
    oracle = FolderOracle(tmp_path, show=lambda _: replay)
    oracle.submit([Query(trajectory, episode(2))])
    with serving(tmp_path) as page:
        left, _ = page.next()["question"]["members"]
    assert "pip install 'pbcrl[label]'" in left["why"]
    assert left["curves"]
    assert clip_of(tmp_path, trajectory_digest(trajectory)) is None


def until(found, *, seconds=300):
    """Wait until something is so: a process imports the env and its libraries first."""
    deadline = time.monotonic() + seconds
    while not found() and time.monotonic() < deadline:
        time.sleep(0.1)
    return found()


def still(folder):
    """A question about two episodes of an env that always looks the same."""
    trajectory, replay = played("PointHazards-v0", 4, begin=from_seed)
    oracle = FolderOracle(folder, show=lambda one: replay if len(one) == 4 else None)
    oracle.submit([Query(trajectory, episode(2))])
    oracle.close()
    return trajectory_digest(trajectory)


@needs_ffmpeg
def test_clips_are_made_as_soon_as_ffmpeg_can_be_found(tmp_path, monkeypatch):
    digest = still(tmp_path)
    monkeypatch.setattr(label_server, "_LOOK_SECONDS", 0.1)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)  # as if it were not installed
    with serving(tmp_path) as page:
        assert "pip install" in page.get(f"/api/clip?digest={digest}")["why"]
        monkeypatch.undo()
        assert until(lambda: "clip" in page.get(f"/api/clip?digest={digest}"))


@needs_ffmpeg
def test_a_clip_over_which_ffmpeg_was_killed_is_made_later(tmp_path, monkeypatch):
    import imageio_ffmpeg

    script = tmp_path / "ffmpeg"
    script.write_text(
        f"""#!/bin/sh
if mkdir {tmp_path}/first 2> /dev/null; then kill -9 $$; fi
exec {imageio_ffmpeg.get_ffmpeg_exe()} "$@"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(script))
    monkeypatch.setattr(label_server, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(label_server, "_AGAIN_SECONDS", 1.0)
    digest = still(tmp_path / "folder")
    with serving(tmp_path / "folder") as page:
        assert until(lambda: "clip" in page.get(f"/api/clip?digest={digest}"))
    assert (tmp_path / "first").exists()


def played(env_id, steps, *, begin):
    """An episode, and how to play it again."""
    pytest.importorskip("gymnasium", "1.1", reason="the toy needs Gymnasium 1.1")
    env = gym.make(env_id)
    replay, obs = begin(env)
    rng = np.random.default_rng(1)
    rows, actions = [], []
    for _ in range(steps):
        action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        rows.append(obs)
        actions.append(action)
        obs, *_ = env.step(action)
    env.close()
    return Trajectory(np.array(rows), np.array(actions)), replay


def from_seed(env):
    return Replay(f"pbcrl_envs:{env.spec.id}", seed=3), env.reset(seed=3)[0]


def from_state(env):
    env.reset(seed=4)
    obs, *_ = env.step(np.ones(env.action_space.shape, np.float32))
    return Replay(f"pbcrl_envs:{env.spec.id}", state=env.unwrapped.state_dict()), obs


def from_generator(env):
    env.reset(seed=5)
    rng = env.unwrapped.np_random.bit_generator.state
    return Replay(env.spec.id, rng=rng), env.reset()[0]


@pytest.mark.parametrize(
    ("env_id", "begin"),
    [
        ("PointHazards-v0", from_seed),
        ("PointHazards-v0", from_state),
        ("Pendulum-v1", from_generator),
    ],
)
def test_an_episode_is_drawn_by_playing_it_again_from_wherever_it_began(env_id, begin):
    trajectory, replay = played(env_id, 20, begin=begin)
    again = Replay.from_bytes(replay.to_bytes())
    frames = [frame for frame, _ in replay_frames(again, trajectory)]
    assert len(frames) == 21
    part = Trajectory(trajectory.obs[8:14], trajectory.actions[8:14])
    segment = Replay.from_bytes(again.segment(trajectory.actions, 8).to_bytes())
    cut = [frame for frame, _ in replay_frames(segment, part)]
    np.testing.assert_array_equal(cut, frames[8:15])


def test_a_small_replay_that_would_blow_up_to_gigabytes_is_refused_unread():
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("about", *(f"state/{i}" for i in range(8))):
            with archive.open(f"{name}.npy", "w") as file:
                file.write(bytes(2**25))
    assert len(bomb.getvalue()) < 2e6
    with pytest.raises(CorruptFileError, match="more than the 268435456 bytes they may have"):
        Replay.from_bytes(bomb.getvalue())


def test_what_could_not_be_read_again_is_refused_when_it_is_written():
    large = np.broadcast_to(np.float32(0), (2**26 + 1, 1))  # takes no memory
    with pytest.raises(ValueError, match="at most 268435456 bytes of arrays, got 268435"):
        Replay("CartPole-v1", state={"x": large}).to_bytes()
    with pytest.raises(ValueError, match="have at most 65536 bytes, got 9"):
        Replay("CartPole-v1", rng={"state": "x" * 90_000}).to_bytes()


class Scene(gym.Env):
    """Shows people another picture than everybody else."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (2,))
    metadata = {  # noqa: RUF012
        "render_modes": ["rgb_array"],
        "render_fps": 20,
        "labelling": {"grey": 200},
    }

    def __init__(self, render_mode=None, grey=0):
        self.render_mode, self.grey = render_mode, grey

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"caption": f"{action[0]:.0f} m/s"}

    def render(self):
        return np.full((4, 4, 3), self.grey, np.uint8)


def test_an_env_says_by_its_metadata_what_people_see_of_it():
    gym.register("Scene-v0", Scene)
    still = Trajectory(np.zeros((3, 2)), np.ones((3, 2)))
    found = list(replay_frames(Replay("Scene-v0", seed=0), still))
    assert [int(frame.max()) for frame, _ in found] == [200] * 4
    assert [caption for _, caption in found] == ["", "1 m/s", "1 m/s", "1 m/s"]
    assert drawn_how("Scene-v0") == (20, {"grey": 200})


class Painted(Scene):
    """Shows its pictures in turn."""

    def __init__(self, render_mode=None, pictures=()):
        self.render_mode, self.pictures = render_mode, list(pictures)

    def render(self):
        return self.pictures.pop(0)


STILL = Trajectory(np.zeros((1, 2)), np.ones((1, 2)))


def painted(*pictures):
    metadata = Scene.metadata | {"labelling": {"pictures": pictures}}
    gym.register("Painted-v0", type("Painted", (Painted,), {"metadata": metadata}))
    drawn_how.cache_clear()
    return Replay("Painted-v0", seed=0)


@pytest.fixture
def _forgotten():
    yield
    del gym.registry["Painted-v0"]
    drawn_how.cache_clear()


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize(
    ("picture", "found"),
    [
        (np.full((4, 4, 3), 0.75), "float64 from 0.75 to 0.75"),
        (np.full((4, 4, 3), 200.0), "float64 from 200.0 to 200.0"),
        (np.full((4, 4, 3), 256), "int64 from 256 to 256"),
        (np.full((4, 4, 3), -1), "int64 from -1 to -1"),
        (np.ones((4, 4, 3), bool), "bool from True to True"),
    ],
)
def test_pictures_whose_numbers_are_no_bytes_are_refused_rather_than_shown_black(picture, found):
    with pytest.raises(ValueError, match=rf"render\(\) returns .* 0 to 255.*, got {found}; return"):
        list(replay_frames(painted(picture, picture), STILL))


@pytest.mark.usefixtures("_forgotten")
def test_integers_that_are_bytes_are_shown_as_they_are():
    replay = painted(np.full((4, 4, 3), 200), np.full((4, 4, 4), 7, np.uint8))
    frames = [frame for frame, _ in replay_frames(replay, STILL)]
    assert [(frame.dtype, frame.shape, frame.max()) for frame in frames] == [
        (np.uint8, (4, 4, 3), 200),
        (np.uint8, (4, 4, 3), 7),
    ]


@needs_ffmpeg
@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("second", [(6, 4, 3), (4, 2, 3)])
def test_pictures_that_change_their_size_are_refused_with_both(tmp_path, second):
    replay = painted(np.zeros((4, 4, 3), np.uint8), np.zeros(second, np.uint8))
    with pytest.raises(LabelError, match=rf"of one size, got \(4, 4\) and then \({second[0]}, "):
        draw_replay(tmp_path, "0" * 32, replay, STILL)
    assert clip_of(tmp_path, "0" * 32) is None
    assert list((tmp_path / "clips").iterdir()) == []


def test_what_would_be_another_episode_is_not_shown():
    trajectory, _ = played("PointHazards-v0", 20, begin=from_seed)
    with pytest.raises(StorageError, match="at step 0 the env shows other observations than were"):
        list(replay_frames(Replay("pbcrl_envs:PointHazards-v0", seed=99), trajectory))


@needs_ffmpeg
@pytest.mark.slow
def test_clips_are_made_while_somebody_answers_and_a_failure_shows_curves_with_its_reason(tmp_path):
    good, replay = played("PointHazards-v0", 20, begin=from_seed)
    bad, _ = played("PointHazards-v0", 20, begin=from_state)
    shown = {trajectory_digest(good): replay, trajectory_digest(bad): replay}
    oracle = FolderOracle(tmp_path, show=lambda one: shown[trajectory_digest(one)])
    oracle.submit([Query(good, bad)])
    with serving(tmp_path) as page:
        left, right = page.next()["question"]["members"]
        assert left["waiting"]
        assert right["waiting"]
        deadline = time.monotonic() + 300  # a process imports the env and its libraries first
        while any(one.get("waiting") for one in (left, right)) and time.monotonic() < deadline:
            time.sleep(0.1)
            left, right = (page.get(f"/api/clip?digest={one}") for one in shown)
        assert (left["frames"], left["steps"]) == (21, 20)
        assert "the env shows other observations than were recorded" in right["why"]
        assert right["curves"]
    assert clip_of(tmp_path, trajectory_digest(good))["fps"] == 10


# -- Kills -------------------------------------------------------------------------------------


def command(folder, *options):
    return [sys.executable, "-m", "pbcrl.label", str(folder), "--no-browser", *options]


def run_label(folder):
    return subprocess.run(command(folder), capture_output=True, text=True, check=False)


@contextmanager
def started(folder):
    """The command in a process of its own."""
    process = subprocess.Popen(command(folder), stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        port, token = re.fullmatch(
            r"the page: http://127.0.0.1:(\d+)/#token=(\S+)\n", line
        ).groups()
        yield process, Page(int(port), token)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


SERVE = """
import os, sys
from pbcrl.label.server import LabelServer
from pbcrl.label.store import LabelStore
while True:  # a fork per start: Python itself would take seconds
    pid = os.fork()
    if pid == 0:
        server = LabelServer(LabelStore(sys.argv[1]))
        print(os.getpid(), server.server_port, server.token, flush=True)
        server.serve_forever()
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize(
    ("answers", "kills"), [(60, 8), pytest.param(1000, 200, marks=pytest.mark.nightly)]
)
def test_every_acknowledged_answer_is_there_once_however_often_the_server_is_killed(
    tmp_path, answers, kills
):
    """Two people answer through the page's requests, and send again what was not acknowledged.

    Of three questions one is a pair, one a pair whose unsafe steps are marked, and one a grid.
    """
    with closing(LabelStore(tmp_path, create=True)) as store:
        for i in range(answers):
            one, other = episode(2 * i), episode(2 * i + 1)
            store.ask([("grid", (one, other, one)) if i % 3 == 2 else ("pair", (one, other))])
    children = subprocess.Popen(
        [sys.executable, "-c", SERVE, tmp_path], stdout=subprocess.PIPE, text=True
    )
    rng, acknowledged, now = random.Random(0), [], {}

    def start():
        pid, port, token = children.stdout.readline().split()
        now.update(pid=int(pid), port=int(port), token=token)

    def until_it_is_acknowledged(request, name):
        while True:
            try:
                return request(Page(now["port"], now["token"], annotator=name, tab=name))
            except (OSError, http.client.HTTPException, AssertionError):
                time.sleep(0.002)

    def person(name):
        while question := until_it_is_acknowledged(Page.next, name)["question"]:
            number, preference = question["id"], [0, 0.5, 1][question["id"] % 7 % 3]
            event = {"token": f"{name}-{number}", "replaces": question["replaces"]}
            given, label = [preference, 1, 1], Label(preference, 1, 1)
            if number % 3 == 2:
                given = {"answers": given, "unsafe": [[[1, 2]], None]}
                label = Label(preference, 1, 1, first_unsafe=((1, 2),))
            if question["kind"] == "grid":
                given, label = {"safe": [1, 0, 1]}, GridLabel((1, 0, 1))

            def answer(page, number=number, given=given, event=event):
                status, found = page.answer(number, given, **event)
                assert status == 200, found

            until_it_is_acknowledged(answer, name)
            acknowledged.append((number, name, label))

    start()
    people = [threading.Thread(target=person, args=(name,)) for name in ("Ada", "Bob")]
    try:
        for thread in people:
            thread.start()
        for kill in range(1, kills + 1):
            while len(acknowledged) < kill * answers // (kills + 1):
                assert any(thread.is_alive() for thread in people)
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(now["pid"], signal.SIGKILL)
            start()
        for thread in people:
            thread.join()
    finally:
        children.kill()
        os.kill(now["pid"], signal.SIGKILL)
        children.wait()
        children.stdout.close()
    store = LabelStore(tmp_path)
    found = [(event.query, event.annotator, event.label) for event in store.events()]
    assert sorted(found, key=lambda one: one[0]) == sorted(acknowledged, key=lambda one: one[0])
    assert store.num_events == len(found) == answers  # each is there once, and none besides
    assert {name for _, name, _ in found} == {"Ada", "Bob"}
