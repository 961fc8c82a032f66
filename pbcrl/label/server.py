"""The labelling page's server: Python's own, for few people, on this machine alone by default.

Whoever has the link may see the questions and answer them: it carries a token in its fragment,
which browsers send to nobody. Other pages in the same browser are kept out by `Host`, `Origin` and
the token; nothing is loaded from anywhere else (Content-Security-Policy). Clips need no token but
their names, digests that only the token's owner is told. What is acknowledged is on disk.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
import webbrowser
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

import numpy as np

from pbcrl.data.label_log import label_to_json
from pbcrl.errors import LabelError, StorageError
from pbcrl.label.clips import (
    checked_clips,
    clip_of,
    missing,
    note_failure,
    open_clip,
    remove_leftovers,
)
from pbcrl.label.draw import command as draw_command
from pbcrl.label.export import agreement, disagreements
from pbcrl.label.standing import Question
from pbcrl.label.store import (
    ConflictError,
    LabelStore,
    checked_name,
    hold_folder,
    read_pairs_to_come,
)
from pbcrl.trajectory import AnyLabel, BatchLabel, GridLabel, Label, Stretches

_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_CLIP = re.compile(r"/clips/([0-9a-f]{32})\.mp4")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_MAX_BODY = 16_384  # bytes; an answer has some 300
_MAX_FIELDS = 8  # of an address; the page sends 3
_PART = 1 << 18  # bytes of a clip that are in memory at once
_MAX_CURVES, _MAX_POINTS = 12, 400
_LOOK_SECONDS = 5.0  # from one look for new questions to the next
_AGAIN_SECONDS = 60.0  # until a clip that failed is tried again, the first time
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(
    store: LabelStore,
    *,
    listen: str = "127.0.0.1",
    port: int = 0,
    annotator: str | None = None,
    env_ids: Sequence[str] = (),
    browse: bool = True,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        store: Its questions and answers.
        listen: The address to listen on.
        port: 0 takes a free one.
        annotator: Who answers; None lets the page ask.
        env_ids: "module:Id-v0" of envs whose module is not installed; it draws clips, too.
        browse: Open the page in a browser.

    Raises:
        OSError: If nothing can listen there.
    """
    server = LabelServer(store, listen=listen, port=port, annotator=annotator, env_ids=env_ids)
    print(f"the page: {server.url}", flush=True)
    if listen not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"warning: whoever reaches {listen} and has this link sees all questions and may "
            "answer; nothing is encrypted",
            flush=True,
        )
    print(f"{store.num_open()} open questions in {store.folder}; Ctrl-C ends", flush=True)
    if browse:
        threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.2)
    server.server_close()


@final
class LabelServer(http.server.ThreadingHTTPServer):
    """The server of one label folder; it listens as soon as it is made.

    Args:
        store: Its questions and answers.
        listen: The address to listen on.
        port: 0 takes a free one.
        annotator: Who answers; None lets the page ask.
        env_ids: "module:Id-v0" of envs whose module is not installed; it draws clips, too.
    """

    daemon_threads = True
    request_queue_size = 128  # a page loads several files and clips at once, and so do many people

    def __init__(
        self,
        store: LabelStore,
        *,
        listen: str = "127.0.0.1",
        port: int = 0,
        annotator: str | None = None,
        env_ids: Sequence[str] = (),
    ) -> None:
        checked_clips(store.folder)
        self.address_family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        super().__init__((listen, port), _Handler)
        self.store = store
        self.annotator = annotator
        self.token = secrets.token_urlsafe(24)
        """Whoever has it may see the questions and answer."""
        host = f"[{listen}]" if ":" in listen else listen
        if listen in ("0.0.0.0", "::"):
            host = socket.gethostname()
        self.url = f"http://{host}:{self.server_port}/#token={self.token}"
        """The link to the page."""
        names = {host, "127.0.0.1", "localhost", "[::1]"}
        if listen in ("0.0.0.0", "::"):
            names |= set(socket.gethostbyname_ex(host)[2])
        # A name of somebody else's that resolves to this machine is none of these.
        self.hosts = {f"{name.lower()}:{self.server_port}" for name in names}
        if self.server_port == 80:  # which a browser leaves out
            self.hosts |= {name.lower() for name in names}
        self.clips = _ClipMaker(store, env_ids)

    def server_close(self) -> None:
        """Close the socket, and end the process that draws."""
        super().server_close()
        self.clips.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no error; all else is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Refused(Exception):  # noqa: N818, it is an answer
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "pbcrl", ""
    timeout = 60  # seconds; of a connection on which nothing comes
    disable_nagle_algorithm = True  # or an answer's body may wait 40 ms for its head's receipt
    server: LabelServer

    # -- Requests ----------------------------------------------------------------------------------

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_POST(self) -> None:
        self._handle(self._post)

    def _handle(self, respond: Callable[[], None]) -> None:
        try:
            if self.headers.get("Host", "").lower() not in self.server.hosts:
                raise _Refused(HTTPStatus.FORBIDDEN, "this Host is not the page's; use its link")
            origin = self.headers.get("Origin")
            if origin is not None and urlsplit(origin).netloc.lower() not in self.server.hosts:
                raise _Refused(HTTPStatus.FORBIDDEN, "requests come from the page itself only")
            respond()
        except _Refused as refused:
            self._json({"error": str(refused)}, refused.status)
        except ConflictError as error:
            self._json({"error": str(error)}, HTTPStatus.CONFLICT)
        except (LabelError, ValueError) as error:
            self._json({"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        except StorageError as error:
            print(f"error: {error}", flush=True)
            self._json({"error": str(error)}, HTTPStatus.INSUFFICIENT_STORAGE)
        except (ConnectionError, TimeoutError):
            raise  # nobody is there to be told
        except Exception as error:
            traceback.print_exc()
            why = f"the server failed ({type(error).__name__}: {error}); its terminal says where"
            self._json({"error": why}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _get(self) -> None:
        path = urlsplit(self.path).path
        if path in _PAGE:
            name, kind = _PAGE[path]
            self._send(Path(__file__).with_name(name).read_bytes(), kind)
        elif clip := _CLIP.fullmatch(path):
            self._send_clip(clip[1])
        elif path in (views := self._views()):
            self._authorise()
            self._json(views[path]())
        else:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self) -> None:
        if self.headers.get("Origin") is None:
            raise _Refused(HTTPStatus.FORBIDDEN, "requests come from the page itself only")
        self._authorise()
        if self.headers.get_content_type() != "application/json":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "bodies are JSON")
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "a body has a Content-Length") from None
        if not 0 <= length <= _MAX_BODY:
            self.close_connection = True  # what is sent is not read
            why = f"a body has at most {_MAX_BODY} bytes"
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        try:
            body = json.loads(self.rfile.read(length), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            why = "the body is no JSON, which has null for what has no answer, and no NaN"
            raise _Refused(HTTPStatus.BAD_REQUEST, why) from None
        if not isinstance(body, dict):
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body is a JSON object")
        if urlsplit(self.path).path != "/api/events":
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        self._json(self._add(body))

    def _authorise(self) -> None:
        given = self.headers.get("Authorization", "")
        if not secrets.compare_digest(
            given.encode("latin-1", "replace"), f"Bearer {self.server.token}".encode()
        ):
            raise _Refused(
                HTTPStatus.UNAUTHORIZED,
                "the link has no token, or one of an earlier start; use the link that the command "
                "printed last",
            )

    # -- What the page asks for --------------------------------------------------------------------

    def _views(self) -> dict[str, Callable[[], Any]]:
        return {
            "/api/session": self._session,
            "/api/next": self._next,
            "/api/question": self._one_question,
            "/api/answers": self._answers,
            "/api/clip": self._clip_state,
            "/api/agreement": self._agreement,
        }

    def _query(self, name: str, default: str | None = None) -> str:
        try:
            found = parse_qs(urlsplit(self.path).query, max_num_fields=_MAX_FIELDS).get(name, [])
        except ValueError:
            why = f"an address has at most {_MAX_FIELDS} fields"
            raise _Refused(HTTPStatus.BAD_REQUEST, why) from None
        if len(found) == 1:
            return found[0]
        if default is not None and not found:
            return default
        raise _Refused(HTTPStatus.BAD_REQUEST, f"the address lacks {name}=")

    def _session(self) -> Any:
        return {
            "annotator": self.server.annotator,
            "intro": self.server.store.intro(),
            "folder": self.server.store.folder.resolve().name,
        }

    def _next(self) -> Any:
        store, name = self.server.store, checked_name(self._query("annotator"))
        tab = self._query("tab", "")[:64]
        question = store.next_for(name, tab=tab)
        progress = store.progress(name, tab=tab, most=4)
        upcoming = [q for q in progress.upcoming if question is None or q.id != question.id][:3]
        self.server.clips.want([d for q in (question, *upcoming) if q for d in q.members])
        return {
            "question": question and self._shown(question, name),
            "upcoming": [digest for q in upcoming[:1] for digest in q.members],
            "answered": progress.answered,
            "skipped": progress.skipped,
            "left": progress.left,
            "of_others": progress.of_others,
            "median_seconds": progress.median_seconds,
            "asked": store.num_questions,
            "run_is_active": (is_active := self._run_is_active()),
            "to_come": read_pairs_to_come(store.folder) if is_active else 0,
            "open_for_others": store.num_open(),
        }

    def _run_is_active(self) -> bool:
        """Whether a training run has the folder open, and may ask more."""
        try:
            hold_folder(self.server.store.folder, by="oracle", patience=0).close()
        except StorageError:
            return True
        return False

    def _one_question(self) -> Any:
        name = checked_name(self._query("annotator"))
        given = self._query("id")
        if not re.fullmatch(r"[0-9]{1,15}", given):
            raise _Refused(HTTPStatus.BAD_REQUEST, "id= is the number of a question")
        question = self.server.store.question(int(given))
        self.server.store.claim(question.id, name, tab=self._query("tab", "")[:64])
        self.server.clips.want(list(question.members))
        return self._shown(question, name)

    def _shown(self, question: Question, name: str) -> dict[str, Any]:
        store = self.server.store
        mine = store.event_of(question.id, name)
        return {
            "id": question.id,
            "name": question.name,
            "kind": question.kind,
            "members": [self._member(digest) for digest in question.members],
            "replaces": mine and mine.id,
            "answer": _label_json(mine.label) if mine and mine.kind == "answer" else None,
        }

    def _member(self, digest: str) -> dict[str, Any]:
        store = self.server.store
        clip = clip_of(store.folder, digest)
        if clip is None and not store.has_replay(digest):
            clip = {"error": ""}  # nobody said how to draw it
        if clip is None and self.server.clips.missing is not None:
            clip = {"error": self.server.clips.missing}
        if clip is None:
            return {"digest": digest, "waiting": True}
        if "error" in clip:
            return {"digest": digest, **self._curves(digest), "why": clip["error"]}
        return {"digest": digest, **clip, "clip": f"/clips/{digest}.mp4"}

    def _curves(self, digest: str) -> dict[str, Any]:
        """The observations that change most, each scaled to [0, 1]."""
        trajectory = self.server.store.trajectory(digest)
        rows = trajectory.obs.reshape(len(trajectory), -1).astype(np.float64)
        spread = rows.std(axis=0)
        chosen = np.sort(np.argsort(-spread, kind="stable")[:_MAX_CURVES])
        points = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MAX_POINTS)).astype(int))
        low, high = rows.min(axis=0), rows.max(axis=0)
        curves = [
            {
                "name": f"observation {column}",
                "low": float(low[column]),
                "high": float(high[column]),
                "values": (
                    (rows[points, column] - low[column]) / ((high[column] - low[column]) or 1.0)
                )
                .round(4)
                .tolist(),
            }
            for column in chosen.tolist()
        ]
        return {"curves": curves, "steps": len(trajectory), "points": points.tolist()}

    def _clip_state(self) -> Any:
        digest = self._query("digest")
        if not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise _Refused(HTTPStatus.BAD_REQUEST, "a digest has 32 hex digits")
        if not self.server.store.has_trajectory(digest):
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such clip")
        return self._member(digest)

    def _answers(self) -> Any:
        name = checked_name(self._query("annotator"))
        names = {question.id: question for question in self.server.store.questions()}
        return [
            {
                "event": event.id,
                "question": event.query,
                "name": names[event.query].name,
                "kind": names[event.query].kind,
                "skipped": event.kind == "skip",
                "answer": _label_json(event.label),
                "seconds": event.seconds,
                "time": event.time,
            }
            for event in reversed(self.server.store.events(annotator=name))
        ]

    def _agreement(self) -> Any:
        store = self.server.store
        return {
            "measures": {
                name: None if math.isnan(value) else value
                for name, value in agreement(store).items()
            },
            "disagreements": [name for name, _ in disagreements(store)],
        }

    # -- What the page sends -----------------------------------------------------------------------

    def _add(self, body: dict[str, Any]) -> Any:
        store = self.server.store
        try:
            kind, name, token = body.pop("kind"), body.pop("annotator"), body.pop("token")
            options: dict[str, Any] = {"annotator": name, "token": token}
            if not (isinstance(name, str) and isinstance(token, str)):
                raise TypeError("annotator and token are text")
            if kind == "undo":
                number = None
            else:
                number = _whole(body.pop("question"))
                replaces, seconds = body.pop("replaces"), body.pop("seconds")
                options["replaces"] = None if replaces is None else _whole(replaces)
                options["seconds"] = None if seconds is None else _number(seconds)
            label = _label(body.pop("answer")) if kind == "answer" else None
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"the page sends whole events, but this one is not: {error!r}"
            ) from error
        if kind not in ("answer", "skip", "undo") or body:
            raise ValueError(
                f"an event is an answer, a skip or an undo, got {kind!r} with {list(body)}"
            )
        if number is None:
            return {"undone": store.undo(**options)}
        if label is None:
            return {"event": store.skip(number, **options)}
        return {"event": store.answer(number, label, **options)}

    # -- Responses ---------------------------------------------------------------------------------

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        data = json.dumps(value, allow_nan=False).encode()
        self._send(data, "application/json; charset=utf-8", status)

    def _send(
        self,
        data: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._send_head(len(data), kind, status, headers)
        self.wfile.write(data)

    def _send_head(
        self,
        num_bytes: int,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(num_bytes))
        if status >= 400:
            self.close_connection = True  # a body may be left unread
            self.send_header("Connection", "close")
        self.end_headers()

    def _send_clip(self, digest: str) -> None:
        """A clip, or the part that is asked for: without parts a browser cannot seek."""
        try:
            file = open_clip(self.server.store.folder, digest)
        except OSError:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such clip") from None
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            start, end, status = 0, num_bytes - 1, HTTPStatus.OK
            # A clip is named by its contents and never changes.
            headers = {"Accept-Ranges": "bytes", "Cache-Control": "private, max-age=86400"}
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            if wanted is not None and wanted[0] != "bytes=-":
                first, last = wanted.groups()
                start = int(first) if first else max(0, num_bytes - int(last))
                end = min(int(last), end) if first and last else end
                if start > end:
                    headers["Content-Range"] = f"bytes */{num_bytes}"
                    refusal = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                    self._send(b"", "video/mp4", refusal, headers)
                    return
                headers["Content-Range"] = f"bytes {start}-{end}/{num_bytes}"
                status = HTTPStatus.PARTIAL_CONTENT
            self._send_head(end + 1 - start, "video/mp4", status, headers)
            file.seek(start)
            while start <= end and (part := file.read(min(_PART, end + 1 - start))):
                self.wfile.write(part)
                start += len(part)
            if start <= end:  # it was cut off meanwhile
                self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the base class's name
        """Say nothing: a person labels in front of it."""


def _no_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads beside JSON."""
    raise ValueError(name)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise TypeError(f"a number of a question or an event is whole, got {value!r}")
    return value


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"an answer is a number or null, and seconds are one, got {value!r}")
    return float(value)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _label(values: Any) -> AnyLabel:
    """What the page sends: three numbers about a pair, one about a batch, a list about a grid.

    About a pair with marked steps, an object: `answers`, and `unsafe`, the stretches of both or
    null.
    """
    if isinstance(values, dict) and list(values) == ["answers", "unsafe"]:
        answers, unsafe = values["answers"], values["unsafe"]
        if not (_is_list(unsafe, 2) and _is_list(answers, 3)):
            raise TypeError(f"a marked pair has 3 answers and 2 lists of stretches, got {values}")
        first, second = map(_stretches, unsafe)
        preference, *safe = map(_number, answers)
        return Label(preference, safe[0], safe[1], first, second)
    if isinstance(values, dict):
        if list(values) != ["safe"] or not isinstance(values["safe"], list):
            raise TypeError(f"an answer about a grid has a list, safe, alone, got {list(values)}")
        return GridLabel(tuple(_number(value) for value in values["safe"]))
    if not (_is_list(values, 1) or _is_list(values, 3)):
        raise TypeError(f"an answer about a pair has three numbers, got {values}")
    given = [_number(value) for value in values]
    return BatchLabel(given[0]) if len(given) == 1 else Label(given[0], given[1], given[2])


def _stretches(values: Any) -> Stretches | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(_is_list(mark, 2) for mark in values):
        raise TypeError(f"a mark has two steps, its first and that after its last, got {values}")
    return tuple((_whole(start), _whole(end)) for start, end in values)


def _label_json(label: AnyLabel) -> list[float | None] | dict[str, Any]:
    """The inverse of `_label`."""
    if isinstance(label, GridLabel):
        return {"safe": label_to_json(label)["grid_safe"]}
    values = list(label_to_json(label).values())
    if isinstance(label, Label) and label.unsafe != (None, None):
        return {"answers": values[:3], "unsafe": label.unsafe}
    return values[:3]


class _ClipMaker:
    """Makes clips in the background: first what somebody waits for, then all others in order.

    Another process draws, at low priority. If it dies over a trajectory, that one is shown as
    curves, and a new process goes on with the next. What failed is tried again after a minute, and
    then after ever longer: ffmpeg, or memory, may be there again.
    """

    def __init__(self, store: LabelStore, env_ids: Sequence[str]) -> None:
        self._store, self._env_ids = store, env_ids
        self.missing = missing()
        """What must be installed before anything is drawn; None if it is."""
        self._wanted: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._newest = 0  # the last trajectory that was put into the next one
        self._unseen: deque[str] = deque()
        self._again: dict[str, tuple[float, float]] = {}  # of what failed: when, and the pause
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def want(self, digests: list[str]) -> None:
        """Make these next."""
        self._wanted.put(digests)

    def close(self) -> None:
        """End the process that draws."""
        self._closed = True
        self._wanted.put([])
        if (process := self._process) is not None:
            process.kill()
        self._thread.join(10)
        self._end(process)

    def _work(self) -> None:
        remove_leftovers(self._store.folder)
        first: list[str] = []
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                while True:
                    first = self._wanted.get_nowait()  # the newest wish counts
            with contextlib.suppress(StorageError):  # a store that was closed, a disk that is full
                if (digest := self._next(first)) is not None:
                    self._make(digest)
                    continue
            with contextlib.suppress(queue.Empty):
                first = self._wanted.get(timeout=_LOOK_SECONDS)

    def _next(self, first: list[str]) -> str | None:
        """What to draw now, if anything."""
        if self.missing is not None:
            self.missing = missing()  # it may have been installed, or could not start just then
        if self.missing is not None:
            return None
        for digest in (*first, *self._again):
            if self._is_due(digest):
                return digest
        while self._wanted.empty():
            if self._unseen:
                digest = self._unseen.popleft()
                if self._is_due(digest):
                    return digest
                continue
            if not (rows := self._store.trajectories(after=self._newest)):
                break
            self._newest = rows[-1][0]
            self._unseen.extend(digest for _, digest, can_be_drawn in rows if can_be_drawn)
        return None

    def _is_due(self, digest: str) -> bool:
        when, _ = self._again.get(digest, (-math.inf, 0.0))
        if time.monotonic() < when or not self._store.has_replay(digest):
            return False
        return "error" in (clip_of(self._store.folder, digest) or {"error": "none yet"})

    def _make(self, digest: str) -> None:
        _, pause = self._again.get(digest, (0.0, _AGAIN_SECONDS / 2))
        self._again[digest] = time.monotonic() + 2 * pause, 2 * pause
        try:
            self._draw(digest)
        except OSError as error:
            note_failure(self._store.folder, digest, f"drawing cannot start: {error}")
        if "error" not in (clip_of(self._store.folder, digest) or {"error": "none yet"}):
            del self._again[digest]

    def _draw(self, digest: str) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                draw_command(self._store.folder, self._env_ids),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{digest}\n")
            process.stdin.flush()
            if process.stdout.readline() or self._closed:  # it answers by the digest alone
                return
        if not self._closed:
            status = process.wait()
            self._end(process)
            note_failure(self._store.folder, digest, f"drawing ended with status {status}")

    def _end(self, process: subprocess.Popen[str] | None) -> None:
        """Close the pipes of a process that has ended."""
        self._process = None
        if process is not None:
            with contextlib.suppress(OSError), process:
                pass
