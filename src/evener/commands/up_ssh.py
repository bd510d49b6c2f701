"""`evener up --ssh`: nodes on other machines through the system's ssh; they end with the master, however it ends.

    here: ssh HOST 'evener join ADDRESS --token-stdin'     there: evener join
      stdin of it: the token, then nothing          ->       its stdin: the token, then nothing
      closed when the master ends                   ->       closed: the node leaves, and ends

The token is on no command line, neither here nor there. OpenSSH and its configuration decide on logins.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from evener.records.errors import InvalidInput, require
from evener.records.schema import shown
from evener.system.host import own_address
from evener.wire.identity import Address

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
_END_SECONDS = 10.0
_CANNOT_REACH, _NOT_FOUND = 255, 127


def parse_hosts(text: str) -> list[str]:
    """Return the ssh hosts of `gpu1,me@gpu2`. Raise InvalidValue for a bad name."""
    hosts = [host.strip() for host in text.split(",")]
    is_good = all(_HOST.fullmatch(host) for host in hosts) and len(set(hosts)) == len(hosts)
    require(is_good, "--ssh", text, "machines with commas between, each once, such as gpu1,me@gpu2")
    return hosts


def require_ssh() -> str:
    """Return the path of the system's ssh. Raise InvalidInput if there is none."""
    path = shutil.which("ssh")
    if path is None:
        raise InvalidInput("--ssh needs OpenSSH's client: apt install openssh-client")
    return path


@contextmanager
def nodes_by_ssh(
    hosts: Sequence[str],
    address: Callable[[str], Address],
    token: str,
    tell: Callable[[str], None],
    *,
    join: str,
    config: Path | None = None,
) -> Iterator[None]:
    """Run a node on each of `hosts` during the block.

    Args:
        hosts: as ssh knows them.
        address: of the master, for each of them.
        token: of nodes.
        tell: takes the nodes' output, and how they end.
        join: the command on each host; address and `--token-stdin` are appended.
        config: of OpenSSH; the default is the user's.

    Raises:
        InvalidInput: there is no ssh here.
    """
    client = [require_ssh(), *_OPTIONS, *(("-F", str(config)) if config else ())]
    nodes: list[_RemoteNode] = []
    try:
        nodes += (_RemoteNode(client, host, f"{join} {address(host)} --token-stdin", token, tell) for host in hosts)
        yield
    finally:
        for node in nodes:
            node.leave()
        for node in nodes:
            node.end()


def address_for(bound: Address, host: str) -> Address:
    """Return the address at which `host` reaches a master that listens at `bound`."""
    return Address(own_address(host.rpartition("@")[2]), bound.port) if bound.is_everywhere else bound


_MAX_LINE_CHARS = 4096


class _RemoteNode:
    """An ssh process, and the thread that reads its output."""

    def __init__(self, client: Sequence[str], host: str, command: str, token: str, tell: Callable[[str], None]) -> None:
        self._host, self._tell, self._is_leaving = host, tell, False
        self._process = subprocess.Popen(
            [*client, host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the master, which then has them leave
        )
        self._write(f"{token}\n")
        self._thread = threading.Thread(target=self._relay, name=f"evener-ssh-{host}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Have the node leave after its current work."""
        self._is_leaving = True
        self._stdin.close()

    def end(self) -> None:
        """Wait for the end of ssh; kill it after a timeout."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._tell(f"{self._host}: the node there does not leave within {_END_SECONDS:g} s; ssh is ended")
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_SECONDS)

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _write(self, text: str) -> None:
        try:
            self._stdin.write(text)
            self._stdin.flush()
        except BrokenPipeError:
            return  # ssh has ended already; the thread says how

    def _relay(self) -> None:
        assert self._process.stdout is not None
        last = ""
        with self._process.stdout as said:
            for line in iter(lambda: said.readline(_MAX_LINE_CHARS), ""):
                last = shown(line).removeprefix("evener: ") or last
                if line.strip():
                    self._tell(f"{self._host}: {last}")
        code = self._process.wait()
        if not self._is_leaving:
            self._tell(f"{self._host}: {_ending(self._host, code)}")


def _ending(host: str, code: int) -> str:
    """Return how a node ended by itself, and what to do."""
    if code == _CANNOT_REACH:
        return (
            f"ssh cannot reach it, or has lost it; try `ssh {shlex.quote(host)} evener version`, which must ask nothing"
        )
    if code == _NOT_FOUND:
        return "there is no evener there: name its path with --ssh-join '~/venv/bin/evener join'"
    return "the node has left" if code == 0 else f"the node has ended with exit code {code}"
