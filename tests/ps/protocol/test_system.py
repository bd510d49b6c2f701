"""A system description: who may join from where, who is missing, and how fast each is."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.commands.train_by_agreement import parts_of
from evener.config.run_config import RunConfig
from evener.ps.protocol.status import NodeStatus
from evener.ps.protocol.system import System, read_system
from evener.records.errors import InvalidFile, InvalidInput, MissingFile
from evener.records.profile import ClusterProfile, DeviceProfile, Throughput
from evener.records.schema import write_noun
from support.refusals import refused


def device(node: str, address: str = "", gflops: float | None = None) -> DeviceProfile:
    speeds = () if gflops is None else (Throughput(precision="fp32", matmul_flops=gflops * 1e9),)
    return DeviceProfile(
        node=node,
        device="cpu",
        model="a CPU",
        cores=2,
        memory_bytes=8,
        usable_memory_bytes=8,
        throughputs=speeds,
        address=address,
    )


@pytest.fixture
def system(tmp_path: Path) -> System:
    """Of two nodes: one at an address, with a speed, and one without either."""
    file = tmp_path / "machines.json"
    write_noun(ClusterProfile(devices=(device("ada", "127.0.0.1", 300.0), device("bob"))), file)
    return read_system(file)


def test_nodes_may_join_from_their_addresses_in_the_file(system: System) -> None:
    assert system.why_not("ada", "127.0.0.1, port 40001") == ""
    assert system.why_not("bob", "10.9.8.7, port 1") == ""
    assert system.why_not("ada", "10.9.8.7, port 1") == (
        "machines.json says that node ada is at 127.0.0.1, and this one is at 10.9.8.7"
    )
    assert system.why_not("eve", "127.0.0.1, port 1") == (
        "machines.json describes no node eve, but ada, bob: choose one with --name"
    )


def test_host_name_stands_for_its_addresses(tmp_path: Path) -> None:
    write_noun(ClusterProfile(devices=(device("ada", "localhost"),)), tmp_path / "m.json")
    assert read_system(tmp_path / "m.json").why_not("ada", "127.0.0.1, port 5") == ""


def test_missing_nodes_are_listed(system: System) -> None:
    assert system.missing([]) == ["ada", "bob"]
    assert system.missing(["bob", "eve"]) == ["ada"]


def test_file_speeds_divide_the_data_before_measured_ones(system: System) -> None:
    here = [status("ada", 100.0), status("bob", 100.0)]
    assert parts_of("measured", here, 400, system) == (("ada", 300), ("bob", 100))
    assert parts_of("measured", here, 400) == (("ada", 200), ("bob", 200))
    assert parts_of("1,3", here, 400, system) == (("ada", 100), ("bob", 300))


def status(name: str, score: float) -> NodeStatus:
    return NodeStatus(
        name=name,
        address="",
        device="cpu",
        score=score,
        state="present",
        reason="",
        seconds=None,
        doing="",
        samples=0,
        samples_per_second=0.0,
        bytes_sent=0,
        bytes_received=0,
    )


def test_invalid_system_file_raises_a_sentence(tmp_path: Path) -> None:
    with refused(MissingFile):
        read_system(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with refused(InvalidFile):
        read_system(tmp_path / "list.json")
    for address in ("nowhere.invalid", "a..b", "x" * 100):
        write_noun(ClusterProfile(devices=(device("ada", address),)), tmp_path / "m.json")
        with refused(InvalidInput):
            read_system(tmp_path / "m.json")


def test_system_option_requires_a_master() -> None:
    with refused(InvalidInput):
        RunConfig(task="digits", system=Path("m.json"))
    with refused(InvalidInput):
        RunConfig(task="digits", system=Path("m.json"), agreement="average", local_nodes="1,1")
