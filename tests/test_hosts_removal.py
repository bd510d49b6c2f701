"""Nothing of the hosts that tests build is left, whichever way they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from hosts import Host, fixture
from hosts.fixture import Build
from hosts.measure import PROBE, probe
from hosts.names import PREFIX, dead_runs, new_run, started
from hosts.removal import names, processes_of

build_hosts = fixture.build_hosts

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}


def script(folder: Path, lines: str) -> str:
    """A program that runs `lines` with two hosts."""
    return (
        "import os, signal, sys\nfrom pathlib import Path\nfrom hosts import Host, Hosts\nprint('begins')\n"
        "two = [Host(name='a', cores=0.5), Host(name='b')]\n"
        f"with Hosts.build(two, Path({str(folder)!r})) as hosts:\n{lines}"
    )


def left_behind() -> list[str]:
    """Names of namespaces and groups that belong to this process."""
    return names(f"{PREFIX}{os.getpid()}-")


@pytest.mark.parametrize("trouble", [RuntimeError("a test fails"), KeyboardInterrupt(), None], ids=repr)
def test_hosts_are_removed_however_the_block_ends(build_hosts: Build, trouble: BaseException | None) -> None:
    daemon = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, {PROBE!r}, 'sleep', '60'], start_new_session=True)"
    )
    pids: set[int] = set()
    with (
        pytest.raises(type(trouble)) if trouble else nullcontext() as raised,
        build_hosts(Host(name="a", cores=0.5, memory_bytes=1 << 30, mbit=10), Host(name="b")) as hosts,
    ):
        probe(hosts["b"], "sleep", "60").wait_for("ready", 10)
        assert hosts["a"].start([sys.executable, "-c", daemon]).wait(10) == 0
        run = left_behind()[0].rpartition(".")[0]
        pids = processes_of(f"{run}.")
        if trouble:
            raise trouble
    assert len(pids) == 2
    assert left_behind() == []
    assert [pid for pid in pids if started(pid)] == []
    if raised:
        assert any("sleep 60 on host b (running)" in note for note in raised.value.__notes__)
        assert any("on host a (exit code 0)" in note for note in raised.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
def test_ctrl_c_at_any_moment_removes_the_hosts(build_hosts: Build, tmp_path: Path, seconds: float) -> None:
    endless = f"    hosts['a'].start([sys.executable, {PROBE!r}, 'sleep', '60']).wait(60)"
    with subprocess.Popen(
        [sys.executable, "-c", script(tmp_path, endless)], env=ENVIRONMENT, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"begins\n"
        time.sleep(seconds)
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == -signal.SIGINT
        mine = f"{PREFIX}{run.pid}-"
    assert names(mine) == []


def test_partially_built_hosts_are_removed(build_hosts: Build) -> None:
    with pytest.raises(RuntimeError, match="File exists"), build_hosts(Host(name="a"), Host(name="a")):
        pytest.fail("two hosts of one name")
    assert left_behind() == []


def test_next_run_removes_hosts_of_a_killed_one(build_hosts: Build, tmp_path: Path) -> None:
    start = f"    hosts['a'].start([sys.executable, {PROBE!r}, 'sleep', '60']).wait_for('ready', 10)\n"
    die = "    os.kill(os.getpid(), signal.SIGKILL)\n"
    command = [sys.executable, "-c", script(tmp_path, start + die)]
    killed = subprocess.run(command, env=ENVIRONMENT, timeout=30, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    runs = dead_runs(names(PREFIX))
    assert runs
    orphans = {pid for run in runs for pid in processes_of(f"{run}.")}
    assert orphans
    with build_hosts(Host(name="a")) as hosts:
        assert dead_runs(names(PREFIX)) == set()
        assert len(left_behind()) == 2
        assert [pid for pid in orphans if started(pid)] == []
        assert hosts["a"].address == "10.73.0.1"


def test_dead_runs_exclude_a_running_process() -> None:
    mine = f"{new_run()}.a"
    pid, start = mine.removeprefix(PREFIX).split("-")[:2]
    of_a_process_with_the_same_id = f"{PREFIX}{pid}-{int(start) + 1}-1.a"
    of_nobody = f"{PREFIX}4194305-1-1.a"
    assert dead_runs([mine, "somebody-elses", of_a_process_with_the_same_id, of_nobody]) == {
        of_a_process_with_the_same_id.removesuffix(".a"),
        of_nobody.removesuffix(".a"),
    }
