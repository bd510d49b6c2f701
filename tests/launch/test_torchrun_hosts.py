"""Ranks of a launcher's on two hosts, between which the line is cut: those on either side end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hosts import Host, Hosts, Process, fixture
from hosts.fixture import Build
from support.commands import TINY

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE = 6.0
ENDLESS = str(Path(TINY).with_name("endless.py"))
PLACE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "EVENER_SECRET": "0123456789abcdef",
    "GLOO_SOCKET_IFNAME": "eth0",
    "PYTHONUNBUFFERED": "1",
}


def start_ranks(hosts: Hosts, folder: Path, *words: str) -> list[Process]:
    """A rank on each host, all of which train until they are stopped; the first one's host has the store."""
    first = next(iter(hosts.values())).address
    place = PLACE | {"MASTER_ADDR": first, "MASTER_PORT": "29555", "WORLD_SIZE": str(len(hosts))}
    command = [sys.executable, "-m", "evener", "train", ENDLESS, "--patience", str(PATIENCE), *words]
    ranks = []
    for rank, name in enumerate(hosts):
        own = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        output = ["--output", str(folder / name)]
        ranks.append(hosts[name].start([*command, *output], environment=place | own, cwd=folder))
    ranks[0].wait_for("step [1-9]", 120)
    return ranks


@pytest.mark.parametrize("victim", ["one", "two"])
def test_ranks_on_both_sides_of_a_cut_end_within_the_patience(build_hosts: Build, tmp_path: Path, victim: str) -> None:
    with build_hosts(Host(name="one"), Host(name="two")) as hosts:
        ranks = start_ranks(hosts, tmp_path, "--shares", "1,1")
        hosts[victim].cut()
        until = time.monotonic() + PATIENCE + 6
        codes = [rank.wait(until - time.monotonic()) for rank in ranks]
        assert codes == [4, 4]


def test_all_ranks_end_if_two_cannot_reach_each_other(build_hosts: Build, tmp_path: Path) -> None:
    with build_hosts(Host(name="one"), Host(name="two"), Host(name="three")) as hosts:
        ranks = start_ranks(hosts, tmp_path, "--shares", "1,1,1")
        hosts["two"].cut_from(hosts["three"])
        until = time.monotonic() + PATIENCE + 6
        codes = [rank.wait(until - time.monotonic()) for rank in ranks]
        assert codes == [4, 4, 4]
        for rank in ranks:
            assert "two/0 (rank 1)" in rank.text
            assert "three/0 (rank 2)" in rank.text
