"""The hosts that other tests build: their links, processors and memory are what was asked for, and theirs alone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hosts import Host, Machine, fixture, groups, network, why_not
from hosts.fixture import Build
from hosts.measure import best_of_three, mbit_between, probe

build_hosts = fixture.build_hosts


def mbit(sender: Machine, receiver: Machine, wanted: float, seconds: float = 0.7) -> float:
    """Megabits a second that go through."""
    return best_of_three(lambda: mbit_between(sender, receiver, wanted, seconds), wanted)


def test_links_have_the_requested_rate_each_way(build_hosts: Build) -> None:
    with build_hosts(Host(name="a", mbit=80, up_mbit=20), Host(name="b"), Host(name="c", mbit=50)) as hosts:
        assert mbit(hosts["a"], hosts["b"], 20) == pytest.approx(20, rel=0.1)
        assert mbit(hosts["b"], hosts["a"], 80) == pytest.approx(80, rel=0.1)
        hosts["c"].limit(mbit=10)
        assert mbit(hosts["b"], hosts["c"], 10) == pytest.approx(10, rel=0.1)
        hosts["c"].limit(mbit=None)
        assert mbit_between(hosts["b"], hosts["c"], 400, seconds=0.5) > 200


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1, 5, 100, 300])
def test_link_rates_from_1_to_300_mbit_are_accurate(build_hosts: Build, rate: float) -> None:
    with build_hosts(Host(name="a", up_mbit=rate), Host(name="b", mbit=rate)) as hosts:
        assert mbit(hosts["a"], hosts["b"], rate, seconds=3) == pytest.approx(rate, rel=0.1)


@pytest.mark.slow
def test_two_senders_share_the_link_of_the_receiver(build_hosts: Build) -> None:
    with build_hosts(Host(name="master", mbit=40), Host(name="a"), Host(name="b")) as hosts:
        receiving = [probe(hosts["master"], "receive") for _ in range(2)]
        ports = [one.wait_for(r"port (\d+)", 10)[1] for one in receiving]
        for sender, port in zip(("a", "b"), ports, strict=True):
            probe(hosts[sender], "send", hosts["master"].address, port, str(2.5e6))
        start = time.monotonic()
        for one in receiving:
            one.wait_for("Mbit/s", 20)
        assert 5e6 * 8e-6 / (time.monotonic() - start) == pytest.approx(40, rel=0.15)


def test_quota_gives_a_host_its_cores(build_hosts: Build) -> None:
    with build_hosts(Host(name="thin", cores=0.2), Host(name="half", cores=0.5)) as hosts:
        thin, half = [probe(hosts[name], "burn", "2") for name in ("thin", "half")]
        assert float(thin.wait_for(r"([\d.]+) in the best", 20)[1]) == pytest.approx(0.2, rel=0.12)
        assert float(half.wait_for(r"([\d.]+) in the best", 20)[1]) == pytest.approx(0.5, rel=0.12)


@pytest.mark.slow
def test_processes_of_a_host_share_its_quota(build_hosts: Build) -> None:
    with build_hosts(Host(name="thin", cores=0.3)) as hosts:
        both = [probe(hosts["thin"], "burn", "3") for _ in range(2)]
        assert 0.15 < sum(float(one.wait_for(r"([\d.]+) cores", 20)[1]) for one in both) < 0.3 * 1.1


def test_host_cannot_exceed_its_memory(build_hosts: Build) -> None:
    with build_hosts(Host(name="small", memory_bytes=64 << 20)) as hosts:
        small = hosts["small"].start([sys.executable, "-c", "x = bytearray(16 << 20); print('fits')"])
        assert small.wait(20) == 0
        large = hosts["small"].start([sys.executable, "-c", "x = bytearray(256 << 20); print('fits')"])
        assert large.wait(20) == -signal.SIGKILL
        assert "fits" not in large.text


def test_cut_link_is_silent_and_resumes_after_joining(build_hosts: Build) -> None:
    with build_hosts(Host(name="a"), Host(name="b", mbit=20)) as hosts:
        receiving = probe(hosts["b"], "receive")
        port = receiving.wait_for(r"port (\d+)", 10)[1]
        sending = probe(hosts["a"], "send", hosts["b"].address, port, str(16e6 / 8))
        receiving.wait_for("first bytes", 10)
        hosts["b"].cut()
        with pytest.raises(AssertionError, match="has not written"):
            receiving.wait_for("Mbit/s", 0.8)
        assert receiving.is_running
        assert sending.is_running
        hosts["b"].join()
        seconds = 16 / float(receiving.wait_for(r"([\d.]+) Mbit/s", 20)[1])
        assert seconds > 0.8 + 0.5
        assert sending.wait(5) == 0


def test_hosts_have_their_own_loopback_and_name(build_hosts: Build) -> None:
    connect = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=2)"
    listen = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
        "print('name', socket.gethostname()); time.sleep(60)"
    )
    with socket.socket() as taken, build_hosts(Host(name="a"), Host(name="b")) as hosts:
        taken.bind(("127.0.0.1", 0))  # here nobody listens at this port, whatever else goes on
        port = str(taken.getsockname()[1])
        server = hosts["a"].start([sys.executable, "-c", listen, port])
        assert server.wait_for(r"name (\w+)", 10)[1] == "a"
        assert hosts["a"].start([sys.executable, "-c", connect, port]).wait(10) == 0
        outsider = hosts["b"].start([sys.executable, "-c", connect, port])
        assert outsider.wait(10) == 1
        assert "ConnectionRefusedError" in outsider.text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=2)
    assert socket.gethostname() != "a"


def test_stopped_process_pauses_and_continues(build_hosts: Build) -> None:
    count = "import time\nfor i in range(10**6):\n    print(i, flush=True)\n    time.sleep(0.01)"
    with build_hosts(Host(name="a")) as hosts:
        process = hosts["a"].start([sys.executable, "-c", count])
        process.wait_for("5\n", 10)
        process.stop()
        time.sleep(0.1)
        before = process.text
        time.sleep(0.3)
        assert process.text == before
        process.cont()
        process.wait_for(f"\n{len(before.split()) + 5}\n", 10)
        process.kill()
        assert process.wait(0) == -signal.SIGKILL


def test_test_is_skipped_with_the_reason_if_hosts_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(fixture, "_why_not", lambda: "building hosts needs root")
    with pytest.raises(pytest.skip.Exception, match="building hosts needs root"):
        request.getfixturevalue("build_hosts")


def test_reason_against_building_hosts_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "building hosts needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == (
        "building hosts needs the commands ip, tc, nsenter, unshare (packages iproute2 and util-linux)"
    )


def test_missing_kernel_feature_is_named_as_the_reason(build_hosts: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PROBE", "ip link add name switch type no-such-kind")
    assert "building hosts needs namespaces, veth, bridge and tbf of the kernel: " in str(why_not())
    monkeypatch.undo()
    monkeypatch.setattr(groups, "controllers", list)
    assert why_not() == "building hosts needs control groups for cpu and memory that can be written"


@pytest.mark.parametrize("bad", ["", "a.b", "-a", "a b", "../a"])
def test_invalid_host_names_are_rejected(bad: str) -> None:
    with pytest.raises(AssertionError, match="not a host's name"):
        Host(name=bad)


def test_both_cgroup_versions_are_found_and_written(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:cpu,cpuacct:/user\n0::/user\n")
    (tmp_path / "cpu,cpuacct").mkdir()
    old = groups.find("cpu", tmp_path, membership)
    assert old == ("cpu", 1, tmp_path / "cpu,cpuacct")
    assert groups.find("memory", tmp_path, membership) is None

    membership.write_text("0::/user\n")
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    new = groups.find("cpu", tmp_path, membership)
    assert new == ("cpu", 2, tmp_path)

    assert old is not None
    assert new is not None
    assert _files(old.make("a", 0.5)) == {
        "cpu.shares": "262144",
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "5000",
    }
    assert _files(new.make("b", 1.5)) == {"cpu.weight": "10000", "cpu.max": "15000 10000"}
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert _files(new._replace(name="memory").make("c", 1 << 20)) == {"memory.max": "1048576"}


def _files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}
