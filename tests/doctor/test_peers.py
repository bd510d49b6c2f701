"""What is wrong between machines, by what each says of itself; and what a connection tries."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from msgspec.structs import replace

from evener.doctor.finding import faults
from evener.doctor.interface_checks import gloo_interface
from evener.doctor.peers import DataFacts, Link, PeerFacts, Unreached, check_peers
from evener.doctor.probe import Listeners, measure_link, probe
from support.machine_facts import SOUND, interface

ADA = PeerFacts(machine="ada", evener="0.2.0", python="3.12.1", torch="2.13.0", ahead=0.0, network=SOUND.network)
BOB = replace(ADA, machine="bob", python="3.12.9", torch="2.13.1", ahead=0.4)
OTHER = replace(
    SOUND.network, route_address="10.0.0.6", interfaces=(interface("lo", "127.0.0.1"), interface("eth0", "10.0.0.6"))
)
SMALL = replace(SOUND.network, interfaces=(interface("lo", "127.0.0.1"), interface("ens3", "10.0.0.5", mtu=1000)))


@pytest.mark.parametrize(
    ("planted", "what", "severity", "words"),
    [
        ({"evener": "0.3.0"}, "versions", "error", "bob: it runs Evener 0.3.0, ada 0.2.0; install the same"),
        ({"torch": "2.11.0"}, "versions", "warning", "bob: it runs PyTorch 2.11, ada 2.13"),
        ({"torch": ""}, "versions", "warning", "bob: it runs PyTorch (none), ada 2.13"),
        ({"ahead": 3600.0}, "clock", "warning", "bob: its clock is 3600 s ahead of that of ada; let both follow NTP"),
        ({"ahead": -5.0}, "clock", "warning", "bob: its clock is 5 s behind that of ada"),
        (
            {"network": replace(SMALL, host_addresses=("10.0.0.5",))}, "MTU", "warning",
            "bob: ens3 sends packets of 1000 bytes, eth0 of ada of 1500; give both the same",
        ),
        (
            {"network": replace(OTHER, gloo_interfaces="lo")}, "interface", "error",
            "bob: Gloo would take the loopback there: $GLOO_SOCKET_IFNAME says so; set GLOO_SOCKET_IFNAME=eth0 on it",
        ),
        (
            {"unreached": (Unreached(machine="ada", address="10.0.0.5", port=4711, reason="no answer"),)},
            "port", "error", "bob cannot connect to ada at 10.0.0.5, port 4711 (no answer); let the firewall of ada",
        ),
        (
            {"is_rank": False, "unreached": (Unreached(machine="ada", address="::1", port=4711, reason="no answer"),)},
            "port", "warning", "(no answer); a run with --agreement needs no such link, ranks do: let the",
        ),
        (
            {"data": DataFacts(samples=60, fingerprint="NumPy:1")}, "data", "error",
            "bob: its training data are not those of ada: 60 samples, and there 50; give both the same files",
        ),
        (
            {"data": DataFacts(samples=50, fingerprint="NumPy:1")}, "data", "error",
            "bob: its training data are not those of ada: other samples; give both the same files",
        ),
    ],
)  # fmt: skip
def test_fault_between_machines_is_named(planted: dict[str, Any], what: str, severity: str, words: str) -> None:
    first = replace(ADA, data=DataFacts(samples=50, fingerprint="NumPy:0"))
    [fault] = faults(check_peers([first, replace(BOB, **planted)]))
    assert (fault.what, fault.severity) == (what, severity)
    assert words in fault.words
    assert fault.cure


def test_matching_machines_have_no_faults() -> None:
    assert faults(check_peers([ADA, BOB, replace(BOB, machine="eve")])) == []
    by_nccl = replace(BOB, uses_gloo=False, network=replace(SOUND.network, host_addresses=()))
    assert faults(check_peers([ADA, by_nccl])) == []


@pytest.mark.parametrize("host_addresses", [("127.0.1.1",), (), ("10.9.9.9",)])
def test_host_name_without_an_interface_uses_that_of_the_route(host_addresses: tuple[str, ...]) -> None:
    network = replace(OTHER, host_addresses=host_addresses)
    assert gloo_interface(network) == OTHER.named("eth0")
    assert faults(check_peers([ADA, replace(BOB, network=network)])) == []


def test_ranks_on_one_machine_may_use_loopback() -> None:
    own = replace(SOUND.network, gloo_interfaces="lo")
    assert faults(check_peers([replace(ADA, network=own), replace(ADA, machine="ada-2", network=own)])) == []


def test_data_read_by_different_libraries_are_not_compared() -> None:
    by = {name: DataFacts(samples=50, fingerprint=f"{name}:0") for name in ("NumPy", "PyTorch")}
    thin = replace(BOB, torch="", is_rank=False, data=by["NumPy"])
    assert faults(check_peers([replace(ADA, is_rank=False, data=by["PyTorch"]), thin])) == []


@pytest.mark.parametrize(
    ("rate", "words"), [(117.5e6, ", and 940 Mbit/s came"), (1.19e9, ", and 9.52 Gbit/s came"), (0.0, "")]
)
def test_links_are_reported_with_latency_and_rate(rate: float, words: str) -> None:
    link = Link(machine="bob", seconds=0.0004, bytes_per_second=rate)
    [finding] = [one for one in check_peers([replace(ADA, links=(link,)), BOB]) if one.what == "link"]
    assert (finding.machine, finding.severity) == ("ada, bob", "ok")
    assert finding.sentence == f"ada reaches bob in 0.4 ms{words}"


def test_link_measurement_returns_latency_and_rate() -> None:
    with Listeners(("127.0.0.1",)) as listeners:
        [(address, port)] = listeners.places
        found = measure_link("bob", address, port, time.monotonic() + 20, seconds=0.05)
    assert isinstance(found, Link)
    assert (found.machine, found.seconds > 0, found.bytes_per_second > 1e5) == ("bob", True, True)
    assert measure_link("bob", address, port, time.monotonic() + 20, 0.05) == "Connection refused"


def test_probe_returns_the_clock_difference() -> None:
    with Listeners(("127.0.0.1", "192.0.2.77")) as listeners:
        [(address, port)] = listeners.places  # the other address is not of this machine
        found = probe(address, port, time.monotonic() + 20)
    assert isinstance(found, float)
    assert abs(found) < 20
    assert probe(address, port, time.monotonic() + 20) == "Connection refused"


def test_silence_differs_from_lost_large_packets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe("127.0.0.1", port, time.monotonic() + 0.2) == "no answer"
        silent, _ = server.accept()
        silent.close()
        with socket.create_server(("127.0.0.1", 0)) as other:
            import threading

            def answer_little() -> None:
                sock, _ = other.accept()
                with sock:
                    sock.sendall(bytes(8))
                    sock.recv(1)

            thread = threading.Thread(target=answer_little)
            thread.start()
            found = probe("127.0.0.1", other.getsockname()[1], time.monotonic() + 1.0)
            thread.join()
    assert found == "large packets do not arrive, small ones do: an MTU on the way is smaller"
