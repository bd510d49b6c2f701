"""Thin workers on hosts with a part of a core and 1 GB of memory: the asynchronous server is not what limits them.

The quota is a fraction of a core so that a machine of two cores can give it to three workers at once and has as much
left for the master. Each worker stays on one core: a process that moves loses what is left of its quota on the other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from hosts import Host, Hosts, fixture
from hosts.fixture import Build

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUOTA, MEMORY_BYTES = 0.2, 10**9
UPDATES = 2000
EVENER = [sys.executable, "-m", "evener"]
PROGRAM = str(Path(__file__).with_name("thin_run.py"))
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many images as MNIST has, of noise: what they show does not matter to their speed."""
    folder = tmp_path_factory.mktemp("mnist")
    random = np.random.default_rng(0)
    for name, shape, top in (("images-idx3", (60_000, 28, 28), 256), ("labels-idx1", (60_000,), 10)):
        head = bytes([0, 0, 8, len(shape)]) + np.asarray(shape, ">u4").tobytes()
        values = random.integers(0, top, shape, np.uint8)
        (folder / f"train-{name}-ubyte").write_bytes(head + values.tobytes())
    return folder


def updates_per_second(build_hosts: Build, digits: Path, folder: Path, workers: int) -> float:
    names = [f"thin-{number}" for number in range(workers)]
    thin = [Host(name=name, cores=QUOTA, memory_bytes=MEMORY_BYTES) for name in names]
    with build_hosts(Host(name="master"), *thin) as hosts:
        address, token = up(hosts, folder / f"home-{workers}")
        for number, name in enumerate(names):
            words = ["join", address, "--token", token, "--thin", "--name", name]
            paths = ["--data", str(digits), "--cache", str(folder / f"cache-{name}")]
            hosts[name].start(["taskset", "-c", str(number % 2), *EVENER, *words, *paths], environment=ONE_THREAD)
        words = [address, token, str(digits), str(workers), str(UPDATES * workers)]
        run = hosts["master"].start([sys.executable, PROGRAM, *words], environment=ONE_THREAD)
        assert run.wait(200) == 0, run.transcript()
        return float(run.text.split()[0])


def up(hosts: Hosts, home: Path) -> tuple[str, str]:
    """Start the master; its address and token."""
    where = f"{hosts['master'].address}:0"
    words = ["up", "--home", str(home), "--listen", where, "--json"]
    process = hosts["master"].start([*EVENER, *words], environment={"COLUMNS": "160", **ONE_THREAD})
    said = json.loads(process.wait_for(r"\{.*\}", 60)[0])
    return said["address"], said["token"]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="master and workers need two cores")
def test_three_thin_workers_make_almost_three_times_the_updates(
    build_hosts: Build, digits: Path, tmp_path: Path
) -> None:
    one = updates_per_second(build_hosts, digits, tmp_path, 1)
    three = updates_per_second(build_hosts, digits, tmp_path, 3)
    assert three > 2.7 * one, f"one makes {one:.0f} updates/s, three {three:.0f}"
