"""Ranks of a launcher's on two hosts, between which the line is cut: those on either side end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hosts import Host, fixture
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


@pytest.mark.parametrize("victim", ["one", "two"])
def test_the_ranks_on_both_sides_of_a_cut_end_within_the_patience(
    build_hosts: Build, tmp_path: Path, victim: str
) -> None:
    with build_hosts(Host(name="one"), Host(name="two")) as hosts:
        place = PLACE | {"MASTER_ADDR": hosts["one"].address, "MASTER_PORT": "29555", "WORLD_SIZE": "2"}
        words = [sys.executable, "-m", "evener", "train", ENDLESS, "--patience", str(PATIENCE), "--shares", "1,1"]
        ranks = []
        for rank, name in enumerate(("one", "two")):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            output = ["--output", str(tmp_path / name)]
            ranks.append(hosts[name].start([*words, *output], environment=place | own, cwd=tmp_path))
        ranks[0].wait_for("step [1-9]", 120)
        hosts[victim].cut()
        until = time.monotonic() + PATIENCE + 6
        codes = [rank.wait(until - time.monotonic()) for rank in ranks]
        assert codes == [4, 4]
