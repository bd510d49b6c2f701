"""The web server of the live page, on the loopback only: static files and one stream of Server-Sent Events.

GET /                the page
GET /static/NAME     files that the page loads
GET /events?run=R    Server-Sent Events: first the whole run, then what is new, at most four times a second
GET /compare?run=R&run=S    the named runs as they are compared, and the names of all runs, as JSON
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

_POLL_INTERVAL_S = 0.25
_KEEP_ALIVE_INTERVAL_S = 15.0
_STREAM = "text/event-stream"
_FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class _PageServer(uvicorn.Server):
    """A uvicorn server that ends on the signals that end every other command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let the first signal end the server gracefully."""
        with first_request(self._end):
            yield

    def _end(self) -> None:
        self.should_exit = True


class LivePage:
    """The page on a socket of the loopback, which `serve` runs.

    Args:
        sources: runs that the page shows.
        listening: listening socket, from `access.listen`.
        token: secret that opens the page.
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
        """Answer requests until `stop` or Ctrl-C."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `serve` return; any thread may call this."""
        self._server.should_exit = True

    def _app(self) -> Starlette:
        files = {
            path.name: (path.read_bytes(), _MEDIA_TYPES.get(path.suffix, "text/plain")) for path in _FOLDER.iterdir()
        }
        files["page.css"] = (PAGE_STYLE.encode(), _MEDIA_TYPES[".css"])

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

        async def compare(request: Request) -> Response:
            names = request.query_params.getlist("run")
            return Response(await asyncio.to_thread(self._compare, names), media_type="application/json")

        return Starlette(
            routes=[
                Route("/", page),
                Route("/static/{name}", page),
                Route("/events", events),
                Route("/compare", compare),
            ]
        )

    def _compare(self, names: list[str]) -> bytes:
        with self._lock:
            return msgspec.json.encode(self._sources.compare(names))

    async def _stream(self, name: str) -> AsyncIterator[bytes]:
        """Yield new messages as long as the page is open, and a comment while nothing happens."""
        cursor: Cursor | None = None
        quiet = 0.0
        yield b"retry: 1000\n\n"
        while not self._server.should_exit:
            cursor, data = await asyncio.to_thread(self._next, name, cursor)
            quiet = 0.0 if data or quiet >= _KEEP_ALIVE_INTERVAL_S else quiet + _POLL_INTERVAL_S
            if data:
                yield b"data: " + data + b"\n\n"
            elif quiet == 0.0:
                yield b": nothing new\n\n"
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _next(self, name: str, cursor: Cursor | None) -> tuple[Cursor | None, bytes]:
        """Return what a page does not have yet of the run that it shows."""
        with self._lock:
            if (source := self._sources.find(name)) is None:
                return None, b""
            source.poll()
            cursor = cursor if cursor is not None and cursor.source is source else Cursor(source)
            message = cursor.next(self._sources.names())
            return cursor, msgspec.json.encode(message) if message else b""


class Guard:
    """Passes a request on to `app` if `access` allows it.

    Every response carries headers that keep other sites from using the page.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        answer = self._access.refusal(scope["method"], scope["path"], query, headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                security_headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *security_headers]}
            await send(message)

        app = self._app if answer is None else Response(status_code=answer.status, headers=answer.headers)
        await app(scope, receive, send_with_headers)
