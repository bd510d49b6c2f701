"""`--dashboard` and `evener dashboard`: the live page, in a process beside a run or in this one."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from evener.records.decoding import decode_json
from evener.records.errors import EvenerError, InvalidInput, MissingExtra
from evener.records.version import pip_install
from evener.report.live.access import ADDRESS, listen
from evener.report.live.feed import Sources

_END_TIMEOUT_S = 10.0


@contextmanager
def page_beside(folder: Path, port: int | None) -> Iterator[None]:
    """Serve the live page of `folder` in another process during the block; do nothing without a port.

    Args:
        folder: of a run, or of runs.
        port: 0 for the usual port, or the next free one.

    Raises:
        MissingExtra: the web server is not installed.
        InvalidInput: the port is taken.
        EvenerError: the other process ended.
    """
    if port is None:
        yield
        return
    require_dashboard()
    token = secrets.token_urlsafe(32)
    command = [sys.executable, "-m", "evener.report.live", str(folder), str(port)]
    page = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches the run alone; ignored on Windows
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )
    assert page.stdin is not None
    assert page.stdout is not None
    try:
        with suppress(OSError):  # it has ended; what it wrote tells why
            page.stdin.write(f"{token}\n".encode())
            page.stdin.flush()
        _print_address(sys.stderr, address_of(_listening_port(page.stdout.readline()), token))
        yield
    finally:
        page.stdout.close()
        with suppress(OSError):
            page.stdin.close()
        try:
            page.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()


def dashboard(runs: Sequence[Path], port: int) -> None:
    """`evener dashboard`: serve the live page of current and past runs until Ctrl-C.

    Raises:
        MissingExtra: the web server is not installed.
        InvalidInput: there is no run, or the port is taken.
    """
    require_dashboard()
    for path in runs:
        if not path.is_dir():
            raise InvalidInput(f"{path} is no folder: name the folder of a run, or of runs")
    sources = Sources(runs)
    if not sources.names():
        raise InvalidInput(f"no run has written into {', '.join(map(str, runs))}")
    from evener.report.live.server import LivePage

    token = secrets.token_urlsafe(32)
    with listen(port) as listening:
        _print_address(sys.stdout, address_of(listening.getsockname()[1], token))
        with suppress(KeyboardInterrupt):  # the usual end
            LivePage(sources, listening, token).serve()


def address_of(port: int, token: str) -> str:
    """Return the address to open in a browser."""
    return f"http://{ADDRESS}:{port}/?token={token}"


def _listening_port(line: bytes) -> int:
    """Return the port that the page's process wrote; raise InvalidInput with the reason that it wrote instead."""
    if not line:
        raise EvenerError("the process of the live page ended at once: see what it wrote, or leave --dashboard out")
    answer = decode_json(line, int | str)
    if isinstance(answer, str):
        raise InvalidInput(answer)
    return answer


def _print_address(stream: TextIO, address: str) -> None:
    stream.write(f"live page: {address}\n")
    stream.flush()


def require_dashboard() -> None:
    """Raise MissingExtra unless the web server is installed: before a long run, not during it."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise MissingExtra(f"the live page needs Starlette and uvicorn: {pip_install('dashboard')}")
