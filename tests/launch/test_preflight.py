"""Machines look at each other before a run: here threads are their first ranks, and the store is a real one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from evener.doctor.finding import Finding
from evener.doctor.peers import PeerFacts
from evener.doctor.probe import probe
from evener.launch import preflight
from evener.launch.nodes import NodeSpec
from evener.launch.preflight import first_ranks, require_fit
from evener.launch.rank_environment import RankEnvironment
from evener.launch.store import connect_store, keep_store, new_secret
from evener.records.errors import EvenerError, InvalidInput, NodeLost
from support.machine_facts import SOUND, interface

ADDRESSES = {"ada": "127.0.0.2", "bob": "127.0.0.3"}


def facts_of(env: RankEnvironment) -> PeerFacts:
    """Of a sound machine whose interface has the address of a loopback that the tests can use."""
    eth0 = interface("eth0", env.address, "10.0.0.5")
    network = replace(SOUND.network, interfaces=(eth0,), host_addresses=("10.0.0.5",), route_address="10.0.0.5")
    return PeerFacts(machine=env.node.host, evener="1", python="3.12.1", torch="2.13.0", ahead=0.0, network=network)


def look(hosts: list[str], is_wanted: bool = True) -> list[list[Finding] | EvenerError]:
    """What every rank concludes."""
    secret = new_secret()
    kept, port = keep_store("127.0.0.1", 0, secret)
    nodes = [NodeSpec(name=f"{host}/{i}", host=host) for i, host in enumerate(hosts)]

    def one(rank: int) -> list[Finding] | EvenerError:
        store = connect_store("127.0.0.1", port, secret, patience=30)
        env = RankEnvironment(
            rank=rank, nodes=nodes, device=torch.device("cpu"), patience=30, notify=lambda _: None, store=store
        )
        env.address = ADDRESSES[hosts[rank]]
        try:
            return require_fit(env, is_wanted=is_wanted if rank == 0 else True)
        except EvenerError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        found = list(pool.map(one, range(len(hosts))))
    del kept
    return found


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What bob says otherwise."""
    words: dict[str, Any] = {}

    def told(env: RankEnvironment) -> PeerFacts:
        return replace(facts_of(env), **(words if env.node.host == "bob" else {}))

    monkeypatch.setattr(preflight, "own_facts", told)
    return words


def test_first_rank_of_each_machine_runs_the_preflight() -> None:
    assert first_ranks(["ada", "ada", "bob", "ada", "bob"]) == [0, 2]


def test_sound_machines_with_several_ranks_pass(planted: dict[str, Any]) -> None:
    assert look(["ada", "ada", "bob"]) == [[], [], []]


def test_every_rank_reports_another_version(planted: dict[str, Any]) -> None:
    planted["evener"] = "2"
    first, second = look(["ada", "bob"])
    assert str(first) == str(second)
    assert isinstance(first, InvalidInput)
    assert str(first).startswith("bob: it runs Evener 2, ada 1; install the same version on both (--no-preflight")
    assert look(["ada", "bob"], is_wanted=False) == [[], []]


def test_warning_does_not_end_the_run(planted: dict[str, Any]) -> None:
    planted["torch"] = "2.11.0"
    first, second = look(["ada", "bob"])
    assert first == second
    assert isinstance(first, list)
    assert [finding.what for finding in first] == ["versions"]


def test_unreachable_machine_is_named_with_address_port_and_remedy(
    planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(address: str, port: int, until: float) -> float | str:
        return "no answer" if address == ADDRESSES["bob"] else probe(address, port, until)

    monkeypatch.setattr(preflight, "probe", blocked)
    first, second = look(["ada", "bob"])
    assert isinstance(first, NodeLost)
    assert str(first) == str(second)
    assert "ada cannot connect to bob at 127.0.0.3, port " in str(first)
    assert "(no answer); let the firewall of bob pass TCP from ada to all ports" in str(first)
    assert "bob cannot connect" not in str(first)


def test_clock_an_hour_off_gives_a_warning(planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "probe", lambda address, *_: 3600.0 if address == ADDRESSES["ada"] else -3600.0)
    first, _ = look(["ada", "bob"])
    assert isinstance(first, list)
    assert [finding.words for finding in first] == [
        "bob: its clock is 3600 s behind that of ada; let both follow NTP: `timedatectl set-ntp true`"
    ]


def test_single_machine_needs_no_preflight(planted: dict[str, Any]) -> None:
    planted["evener"] = "2"
    assert look(["bob", "bob"]) == [[], []]
