"""The page's web server, on this machine alone: files of its own, and one stream of Server-Sent Events.

GET /                the page
GET /static/NAME     what it is made of
GET /events?run=R    Server-Sent Events: first all that there is, then what is new, four times a second at most
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener.report.live.access import Access
from evener.report.live.feed import Cursor, Sources
from evener.report.style import PAGE_STYLE
from evener.system.signals import first_request

_PAUSE = 0.25
_ALIVE = 15.0
_STREAM = "text/event-stream"
_FOLDER = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class _PageServer(uvicorn.Server):
    """uvicorn's server, which ends by the signals that end any other command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside, the first signal has the server end in its own time."""
        with first_request(self._end):
            yield

    def _end(self) -> None:
        self.should_exit = True


class LivePage:
    """The page on a socket of the loopback; `serve` it.

    Args:
        sources: runs.
        listening: see `access.listen`.
        token: that opens the page.
    """

    def __init__(self, sources: Sources, listening: socket.socket, token: str) -> None:
        self._sources, self._socket, self._lock = sources, listening, threading.Lock()
        app = Guard(self._app(), Access(token, listening.getsockname()[1]))
        self._server = _PageServer(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=1
            )
        )

    def serve(self) -> None:
        """Answer until `stop`, or Ctrl-C."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Have `serve` return; from any thread."""
        self._server.should_exit = True

    def _app(self) -> Starlette:
        files = {path.name: (path.read_bytes(), _KINDS.get(path.suffix, "text/plain")) for path in _FOLDER.iterdir()}
        files["page.css"] = (PAGE_STYLE.encode(), _KINDS[".css"])

        async def page(request: Request) -> Response:
            name = request.path_params.get("name", "page.html")
            if name not in files:
                return Response(status_code=404)
            body, kind = files[name]
            return Response(body, media_type=kind)

        async def events(request: Request) -> Response:
            if request.method == "HEAD":
                return Response(media_type=_STREAM)
            return StreamingResponse(self._stream(request.query_params.get("run", "")), media_type=_STREAM)

        return Starlette(routes=[Route("/", page), Route("/static/{name}", page), Route("/events", events)])

    async def _stream(self, name: str) -> AsyncIterator[bytes]:
        """What a page lacks, as long as it is open; a comment where nothing happens."""
        cursor: Cursor | None = None
        quiet = 0.0
        yield b"retry: 1000\n\n"
        while not self._server.should_exit:
            cursor, data = await asyncio.to_thread(self._next, name, cursor)
            quiet = 0.0 if data or quiet >= _ALIVE else quiet + _PAUSE
            if data:
                yield b"data: " + data + b"\n\n"
            elif quiet == 0.0:
                yield b": nothing new\n\n"
            await asyncio.sleep(_PAUSE)

    def _next(self, name: str, cursor: Cursor | None) -> tuple[Cursor | None, bytes]:
        """What a page lacks of the run that it looks at."""
        with self._lock:
            if (source := self._sources.find(name)) is None:
                return None, b""
            source.poll()
            cursor = cursor if cursor is not None and cursor.source is source else Cursor(source)
            message = cursor.next(self._sources.names())
            return cursor, msgspec.json.encode(message) if message else b""


class Guard:
    """Lets a request through to `app` if `access` allows it; every answer has headers that keep the page to itself."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        answer = self._access.refusal(scope["method"], scope["path"], query, headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        app = self._app if answer is None else Response(status_code=answer.status, headers=answer.headers)
        await app(scope, receive, send_with_headers)
