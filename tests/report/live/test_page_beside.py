"""The page beside a run, asked over its socket: what it answers to whom, and that it ends with the run."""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.commands.dashboard import page_beside
from evener.records.errors import EvenerError, InvalidInput
from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import RunEvent
from evener.report.live.access import listen
from support.fake_runs import fake_run
from support.refusals import refused

pytest.importorskip("uvicorn", reason="the live page needs evener[dashboard]")
pytest.importorskip("starlette", reason="the live page needs evener[dashboard]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has begun."""
    folder = tmp_path / "run"
    folder.mkdir()
    record = fake_run(num_steps=30)
    log = EventLog(folder / EVENTS_FILE, pytest.fail)
    events: list[RunEvent] = [record.plan, *record.steps, *record.validations, *record.events]
    for event in events:
        log.add(event)
    log.close()
    return folder


class Client:
    """Asks the page at an address."""

    def __init__(self, address: str) -> None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", address)
        assert found is not None
        self.port, self.token = int(found[1]), found[2]
        self.host = f"127.0.0.1:{self.port}"
        self._open: list[http.client.HTTPConnection] = []

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self._open.append(connection)
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"host": self.host, **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        if path.startswith("/events") and answer.status == 200 and method == "GET":
            return answer.status, answer
        answer.read()
        connection.close()
        return answer.status, answer

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    @property
    def cookie(self) -> str:
        return f"evener-{self.port}={self.token}"


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    command = [sys.executable, "-m", "evener", "dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with closing(Client(process.stdout.readline())) as client:
            yield client
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def message_of(answer: http.client.HTTPResponse) -> Any:
    """The first one of a stream."""
    while not (line := answer.readline()).startswith(b"data: "):
        assert line
    return msgspec.json.decode(line.removeprefix(b"data: "))


def test_token_opens_the_page_and_becomes_a_cookie(client: Client) -> None:
    status, answer = client.ask(f"/?token={client.token}")
    assert (status, answer.getheader("location")) == (303, "/")
    cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
    for path in ("/", "/static/live.js", "/static/uPlot.iife.min.js", "/static/page.css"):
        status, answer = client.ask(path, cookie=cookie)
        assert status == 200
        assert "default-src 'self'" in (answer.getheader("content-security-policy") or "")
    assert client.ask("/static/../server.py", cookie=cookie)[0] == 404
    assert client.ask("/static/%2e%2e%2fserver.py", cookie=cookie)[0] == 404


def test_stream_starts_with_the_whole_run(client: Client, folder: Path) -> None:
    status, answer = client.ask("/events", cookie=client.cookie)
    message = message_of(answer)
    assert (status, answer.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
    assert (message["is_whole"], message["picture"]["run"], message["picture"]["step"]) == (True, folder.name, 30)
    assert str(folder.parent) not in msgspec.json.encode(message).decode()
    answer.close()


def test_runs_are_compared_as_json(client: Client, folder: Path) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)) as connection:
        connection.request("GET", f"/compare?run={folder.name}&run=x", headers={"cookie": client.cookie})
        answer = connection.getresponse()
        found = msgspec.json.decode(answer.read())
    assert (answer.status, answer.getheader("content-type")) == (200, "application/json")
    assert (found["choices"], [run["samples"] for run in found["runs"]]) == ([folder.name], [3000])


def test_requests_without_the_token_are_rejected(client: Client) -> None:
    draw = random.Random(7)
    methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]
    paths = [
        "/",
        "/events",
        "/events?run=x",
        "/compare?run=x",
        "/static/live.js",
        "/nothing",
        "/?token=",
        "//",
        "/static/%00",
    ]
    hosts = [client.host, "evil.example", f"localhost:{client.port}", "", "127.0.0.1"]
    origins = ["", "null", "http://evil.example", f"http://{client.host}"]
    tokens = ["", "x" * 43, client.token[:-1], client.token + "0", client.token.swapcase()]
    for _ in range(300):
        headers = {"host": draw.choice(hosts), "cookie": f"evener-{client.port}={draw.choice(tokens)}"}
        if origin := draw.choice(origins):
            headers["origin"] = origin
        assert client.ask(draw.choice(paths), draw.choice(methods), **headers)[0] == 403
    for method in methods[2:]:
        assert client.ask("/", method, cookie=client.cookie)[0] == 405
    assert client.ask("/", cookie=client.cookie, host="evil.example")[0] == 403
    assert client.ask("/", cookie=client.cookie, origin="http://evil.example")[0] == 403


def test_page_of_a_run_ends_with_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / EVENTS_FILE, pytest.fail)
    log.add(fake_run(num_steps=1).plan)
    with page_beside(tmp_path, 0):
        client = Client(capfd.readouterr().err)
        _, answer = client.ask("/events", cookie=client.cookie)
        assert message_of(answer)["picture"]["phase"] == "starting"
    log.close()
    with closing(client), closing(answer):
        assert message_of(answer)["picture"]["detail"] == "the process that led the run is gone"
        with pytest.raises(ConnectionRefusedError):
            client.ask("/")


def test_port_that_is_taken_is_refused_before_the_run(tmp_path: Path) -> None:
    with listen(0) as taken, refused(InvalidInput), page_beside(tmp_path, taken.getsockname()[1]):
        pytest.fail("the run began")


def test_page_that_cannot_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EvenerError), page_beside(tmp_path, 0):
        pytest.fail("the run began")


def test_page_is_shown_beside_a_run_without_posix(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(
        "from support.foreign_system import leave_posix\n"
        "leave_posix()\n"
        "import sys\n"
        "from pathlib import Path\n"
        "from evener.commands.dashboard import page_beside\n"
        f"with page_beside(Path({str(folder)!r}), 0):\n"
        "    sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, str(page)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with closing(Client(process.stderr.readline())) as client:
            _, answer = client.ask("/events", cookie=client.cookie)
            assert message_of(answer)["picture"]["step"] == 30
            process.stdin.close()
            assert process.wait(20) == 0
