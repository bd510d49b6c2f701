"""No peer can push older entries out of the audit log, or flood the terminal of the master's user."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from evener.ps.master.access import audit
from evener.ps.master.access.audit import OTHER_HOSTS, AuditLog
from support.master_in_threads import plane, wait_until
from support.strangers import log_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entries(path: Path) -> list[tuple[str, str]]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["address"], line["detail"]) for line in lines]


def test_repeated_actions_of_a_host_become_one_number_a_minute(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "audit.jsonl"
    log = AuditLog(path, print, lines_per_minute=2, clock=clock)
    written = [log.write("joined", address=f"10.0.0.7, port {port}", detail=str(port)) for port in range(1000)]
    assert written == [True] * 2 + [False] * 998
    assert log.write("joined", address="10.0.0.8, port 1", detail="another host")
    assert log.write("refused", address="10.0.0.7, port 1", detail="another action")
    clock.now = 59.0
    assert log.tick() == []
    clock.now = 61.0
    assert log.tick() == [("joined", "10.0.0.7", 998)]
    assert log.tick() == []
    assert log.write("joined", address="10.0.0.7, port 1", detail="later")
    assert entries(path)[2:] == [
        ("10.0.0.8, port 1", "another host"),
        ("10.0.0.7, port 1", "another action"),
        ("10.0.0.7", "998 more within a minute"),
        ("10.0.0.7, port 1", "later"),
    ]


def test_entries_of_admins_are_all_written(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", print, lines_per_minute=2)
    assert all(log.write("invited", address="10.0.0.7, port 1", is_limited=False) for _ in range(10))


def test_hosts_that_are_counted_apart_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_MAX_HOSTS", 3)
    clock = Clock()
    log = AuditLog(tmp_path / "audit.jsonl", print, lines_per_minute=1, clock=clock)
    for number in range(100):
        log.write("turned away", address=f"fd00::{number:x}, port 1")
    clock.now = 61.0
    assert log.tick() == [("turned away", OTHER_HOSTS, 96)]


def test_strangers_are_not_in_the_audit_log() -> None:
    with plane() as ps:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(ps.address.path)
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        wait_until(lambda: not ps.master.server._acceptor._pending)
        wait_until(ps.home.refusals.exists)
        ps.ask()
        assert [said for said in ps.said if said.startswith("turned away")] == ps.said
        assert len(ps.said) == 1
        assert len(entries(ps.home.refusals)) == 1
        assert log_of(ps) == []
