"""A node's departure: when it gives notice, when its time is over, and how `evener leave` finds it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.ps.node import departure
from evener.ps.node.departure import Departure, ask_to_leave, leave_request, running_nodes
from evener.ps.protocol.messages import Header, Leave, Notice
from support.command_cluster import wait_until

SYSTEM_CALL = "fcntl.flock" if hasattr(os, "fork") else "msvcrt.locking"


class Node:
    """A node with a departure, and what happens to it."""

    def __init__(self, seconds: float, request: Path | None = None) -> None:
        self.sent: list[Header] = []
        self.is_needed, self.was_noticed = True, False
        self.is_connected, self.log_fails = True, False
        self.departure = Departure(
            seconds,
            request,
            self.sent.append,
            lambda: self.is_needed,
            lambda: self.is_connected,
            self._on_notice,
            self._log,
        )

    def _log(self, _: str) -> None:
        if self.log_fails:
            raise BrokenPipeError

    def _on_notice(self) -> None:
        self.was_noticed = True


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    event = threading.Event()
    monkeypatch.setattr(departure, "interrupt_main_thread", event.set)
    return event  # type: ignore[return-value]


def test_first_signal_gives_notice_and_the_second_interrupts(interrupted: threading.Event) -> None:
    node = Node(30.0)
    node.departure.on_signal()
    wait_until(lambda: node.sent, "that the notice is sent")
    (notice,) = node.sent
    assert isinstance(notice, Notice)
    assert 29 < notice.seconds <= 30
    assert node.was_noticed
    node.departure.on_signal()  # a service manager sends it twice
    time.sleep(1.1)
    with pytest.raises(KeyboardInterrupt):
        node.departure.on_signal()
    node.departure.repeat()
    assert len(node.sent) == 2
    assert not interrupted.is_set()
    node.departure.close()


def test_request_of_the_master_gives_notice_once_and_ends_without_an_error(interrupted: threading.Event) -> None:
    node = Node(0.0)
    node.departure.request(30.0, "an admin releases it")
    node.departure.request(0.0, "again")
    wait_until(lambda: node.sent, "that the notice is sent")
    (notice,) = node.sent
    assert isinstance(notice, Notice)
    assert 29 < notice.seconds <= 30
    assert (notice.reason, node.departure.is_requested) == ("an admin releases it", True)
    assert not interrupted.is_set()
    node.departure.close()


@pytest.mark.parametrize(("seconds", "is_needed", "notices"), [(0.0, True, 0), (30.0, False, 0), (0.2, True, 1)])
def test_node_ends_without_work_and_when_its_time_is_over(
    seconds: float, is_needed: bool, notices: int, interrupted: threading.Event
) -> None:
    node = Node(seconds)
    node.is_needed = is_needed
    node.departure.on_signal()
    assert interrupted.wait(5)
    assert len(node.sent) == notices
    node.departure.close()


def test_node_ends_once_its_work_is_over_or_its_connection_lost(interrupted: threading.Event) -> None:
    node = Node(30.0)
    node.departure.on_signal()
    wait_until(lambda: node.sent, "that the notice is sent")
    assert not interrupted.is_set()
    node.is_needed = False
    assert interrupted.wait(5)
    node.departure.close()


def test_node_ends_if_its_connection_stays_broken(
    interrupted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departure, "_BROKEN_SECONDS", 0.5)
    node = Node(30.0)
    node.departure.on_signal()
    wait_until(lambda: node.sent, "that the notice is sent")
    node.is_connected = False
    time.sleep(0.3)
    node.is_connected = True
    time.sleep(0.3)
    assert not interrupted.is_set()
    node.is_connected = False
    assert interrupted.wait(5)
    node.departure.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_node_that_cannot_log_ends_after_its_notice(interrupted: threading.Event) -> None:
    node = Node(30.0)
    node.log_fails = True
    node.departure.on_signal()
    assert interrupted.wait(5)
    assert len(node.sent) == 1
    node.departure.close()


def test_process_that_cannot_be_interrupted_ends(interrupted: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(departure, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(departure, "exit_now", codes.append)
    node = Node(0.0)
    node.departure.on_signal()
    wait_until(lambda: codes == [130], "that the process ends")
    assert isinstance(node.sent[-1], Leave)
    node.departure.close()


def test_command_finds_running_nodes_and_asks_them(tmp_path: Path, interrupted: threading.Event) -> None:
    assert running_nodes(tmp_path) == []
    with leave_request(tmp_path, "attic") as request, leave_request(tmp_path, "../under the stairs"):
        node = Node(30.0, request)
        assert sorted(running_nodes(tmp_path)) == ["../under the stairs", "attic"]
        ask_to_leave(tmp_path, "attic")
        wait_until(lambda: node.sent, "that the notice is sent")
        assert node.departure.is_requested
        node.departure.close()
    assert running_nodes(tmp_path) == []
    assert not [file for file in (tmp_path / "leaving").rglob("*") if file.is_file()]


def test_old_request_and_dead_node_are_forgotten(tmp_path: Path) -> None:
    with leave_request(tmp_path, "attic") as request:
        assert request is not None
    request.touch()
    request.with_suffix(".node").touch()
    assert running_nodes(tmp_path) == []
    with leave_request(tmp_path, "attic") as again:
        assert again == request
        assert not request.exists()
        with leave_request(tmp_path, "attic") as other:  # a second process, which the master sends away
            assert other is None
        assert running_nodes(tmp_path) == ["attic"]


def test_command_finds_nodes_without_locks_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(SYSTEM_CALL, refuse)
    with leave_request(tmp_path, "attic") as request:
        assert request is not None
        assert running_nodes(tmp_path) == ["attic"]
        node = request.with_suffix(".node")
        process, name = node.read_text().split("\n")
        node.write_text(f"{process.split()[0]} 1.0\n{name}")  # another process has this number now
        assert running_nodes(tmp_path) == []


def test_nodes_of_other_machines_with_the_same_cache_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with leave_request(tmp_path, "attic"):
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        assert running_nodes(tmp_path) == []
