"""Masters that announce themselves to the local network, and nodes that find them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest

from evener.commands import discovery
from evener.commands.discovery import announced, choose_master, find_masters
from evener.records.errors import InvalidInput, MissingExtra, NodeLost
from evener.wire.identity import Address, Token

zeroconf = pytest.importorskip("zeroconf")
LOOPBACK = ["127.0.0.1"]
FIRST, SECOND = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce by a name that no process beside this one looks for."""
    monkeypatch.setattr(discovery, "_interfaces", lambda: LOOPBACK)
    monkeypatch.setattr(discovery, "SERVICE", f"_ev{os.getpid():x}._tcp.local.")


def at(port: int, fingerprint: bytes = FIRST) -> AbstractContextManager[None]:
    return announced(Address("127.0.0.1", port), fingerprint)


@contextmanager
def stranger(name: str, fingerprint: str) -> Iterator[None]:
    """Announce something else."""
    info = zeroconf.ServiceInfo(
        discovery.SERVICE,
        f"{name}.{discovery.SERVICE}",
        port=1,
        parsed_addresses=LOOPBACK,
        properties={"fingerprint": fingerprint},
    )
    with zeroconf.Zeroconf(interfaces=LOOPBACK) as service:
        service.register_service(info)
        yield


def test_announced_masters_are_found_with_address_and_fingerprint() -> None:
    with at(7001), at(7002, SECOND):
        found = find_masters()
    assert {(one.addresses, one.fingerprint) for one in found} == {
        (("127.0.0.1:7001",), FIRST),
        (("127.0.0.1:7002",), SECOND),
    }


def test_token_finds_its_own_master_without_a_question() -> None:
    with at(7001), at(7002, SECOND):
        assert choose_master(Token(secret=bytes(16), fingerprint=SECOND), None, lambda _: None) == "127.0.0.1:7002"


def test_user_without_a_token_is_asked() -> None:
    said: list[str] = []
    with at(7001):
        assert choose_master(None, lambda _: "1", said.append) == "127.0.0.1:7001"
        for answer in ("", "2", "yes"):
            with pytest.raises(InvalidInput):
                choose_master(None, partial(str.format, answer), said.append)
        with pytest.raises(InvalidInput):  # without a terminal
            choose_master(None, None, said.append)
    assert any(FIRST.hex()[:16] in line for line in said)


def test_other_announcements_are_ignored_and_names_are_printable() -> None:
    with stranger("short", "abcd"), stranger("red\u202e", SECOND.hex()):
        found = find_masters()
    assert [one.fingerprint for one in found] == [SECOND]
    assert found[0].name.isprintable()


@pytest.mark.parametrize("token", [None, Token(secret=bytes(16), fingerprint=SECOND)])
def test_missing_master_is_an_error(token: Token | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIND_SECONDS", 0.5)
    with at(7001), pytest.raises(NodeLost):
        choose_master(token or Token(secret=bytes(16), fingerprint=bytes(32)), None, lambda _: None)


def test_master_without_port_or_encryption_is_not_announced() -> None:
    for bound, fingerprint in ((Address(path="/tmp/x"), FIRST), (Address("127.0.0.1", 1), None)):
        with pytest.raises(InvalidInput), announced(bound, fingerprint):
            pass


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(MissingExtra):
        find_masters()


def test_stranger_with_the_fingerprint_of_the_master_does_not_hide_it() -> None:
    with stranger("aaa", SECOND.hex()), at(7002, SECOND):
        found = choose_master(Token(secret=bytes(16), fingerprint=SECOND), None, lambda _: None)
    assert "127.0.0.1:7002" in found.split(",")
