"""`evener up --ssh` starts nodes elsewhere and ends them: over a real sshd of this user's on the loopback."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.commands.up_ssh import address_for, nodes_by_ssh, parse_hosts
from evener.config.options import JoinConfig, UpConfig
from evener.records.errors import InvalidInput
from evener.wire.identity import Address
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import processes_of
from support.refusals import refused
from support.sockets import free_port

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@pytest.fixture
def ssh_config(tmp_path: Path) -> Iterator[Path]:
    """The configuration with which ssh reaches `near` and `far`, both this machine, by a key made for the test."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no OpenSSH server here: apt install openssh-server")
    for name in ("host", "own"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True, timeout=30)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    port, server, client = free_port(), tmp_path / "sshd_config", tmp_path / "ssh_config"
    server.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path / 'host'}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path / 'own.pub'}\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    client.write_text(
        f"Host near far\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n"
        f" IdentityFile {tmp_path / 'own'}\n StrictHostKeyChecking no\n LogLevel ERROR\n"
        f" UserKnownHostsFile {tmp_path / 'known'}\n"
    )
    with subprocess.Popen([SSHD, "-D", "-e", "-f", str(server)], stderr=subprocess.PIPE) as daemon:
        assert daemon.stderr is not None
        while b"Server listening" not in daemon.stderr.readline():
            assert daemon.poll() is None
        yield client
        daemon.terminate()


def words_of(folder: Path, config: Path, marker: str) -> list[str]:
    """The options with which the nodes are started; they can be told by the marker in their environment."""
    path = shlex.quote(os.environ.get("PYTHONPATH", ""))
    join = f"env PYTHONPATH={path} {marker} {sys.executable} -m evener join --thin --cache {shlex.quote(str(folder))}"
    return ["--ssh", "near,far", "--ssh-config", str(config), "--ssh-join", join]


def is_up(ps: Cluster, count: int) -> bool:
    return sum(node.state == "present" and node.score is not None for node in ps.ask().nodes) == count


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["down", "ctrl-c", "killed"])
def test_nodes_started_by_ssh_train_and_end_with_the_master(ending: str, tmp_path: Path, ssh_config: Path) -> None:
    marker = f"EVENER_SSH_TEST={tmp_path.name}-{os.getpid()}"
    with cluster(*words_of(tmp_path, ssh_config, marker)) as ps:
        wait_until(lambda: is_up(ps, 2), "that both nodes join")
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in processes_of(marker)]
        assert len(lines) >= 2
        assert not any(ps.token in line for line in lines)
        if ending == "down":
            record = ps.train("digits", "--agreement", "average", "--epochs", "1", has_torch=False)
            assert len(record["nodes"]) == 2
            ps.down()
        else:
            ps.master.send_signal(signal.SIGINT if ending == "ctrl-c" else signal.SIGKILL)
        wait_until(lambda: not processes_of(marker), "that the nodes end with the master")


@pytest.mark.slow
def test_unreachable_machine_or_missing_evener_is_reported(ssh_config: Path) -> None:
    with cluster("--ssh", "near,gone.invalid", "--ssh-config", str(ssh_config), "--ssh-join", "nothere join") as ps:
        wait_until(lambda: "near: there is no evener there: name its path" in ps.said("up.json"), "that one is told")
        wait_until(lambda: "gone.invalid: ssh cannot reach it" in ps.said("up.json"), "that the other is told")
        ps.down()


@pytest.mark.parametrize("text", ["", "a,,b", "-oProxyCommand=x", "a,a", "a b"])
def test_invalid_host_list_is_rejected(text: str) -> None:
    with refused(InvalidInput):
        parse_hosts(text)


def test_hosts_retain_their_ssh_names() -> None:
    assert parse_hosts("gpu1, me@gpu2.example.org") == ["gpu1", "me@gpu2.example.org"]


def test_address_for_a_host_is_that_of_the_interface_to_it() -> None:
    assert str(address_for(Address("0.0.0.0", 7117), "me@127.0.0.1")) == "127.0.0.1:7117"
    assert str(address_for(Address("10.0.0.1", 7117), "127.0.0.1")) == "10.0.0.1:7117"


def test_missing_ssh_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    nodes = nodes_by_ssh(["a"], lambda _: Address("127.0.0.1", 1), "token", print, join="evener join")
    with refused(InvalidInput), nodes:
        pass


@pytest.mark.parametrize(
    "words", [{"ssh_join": "x join"}, {"ssh_config": Path("x")}, {"ssh": "a", "listen": "unix:/x"}]
)
def test_inconsistent_ssh_options_are_rejected(words: dict[str, Any]) -> None:
    with refused(InvalidInput):
        UpConfig(**words)


def test_two_token_sources_are_rejected() -> None:
    with refused(InvalidInput):
        JoinConfig(address="a:1", token="t", token_stdin=True)
