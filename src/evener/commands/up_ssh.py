"""`evener up --ssh`: nodes on machines that the system's ssh reaches; they end with the master, however that ends.

    here: ssh HOST 'evener join ADDRESS --token-stdin'     there: evener join
      stdin of it: the token, then nothing          ->       its stdin: the token, then nothing
      closed, for the master has ended, by whatever ->       closed: the node leaves, and ends

The token is on no command line, neither here nor there. Who may log in is for OpenSSH and its configuration to say.
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
    """Machines as ssh knows them, of `gpu1,me@gpu2`. Raises InvalidValue."""
    hosts = [host.strip() for host in text.split(",")]
    is_good = all(_HOST.fullmatch(host) for host in hosts) and len(set(hosts)) == len(hosts)
    require(is_good, "--ssh", text, "machines with commas between, each once, such as gpu1,me@gpu2")
    return hosts


def require_ssh() -> str:
    """The path of the system's ssh. Raises InvalidInput: there is none."""
    found = shutil.which("ssh")
    if found is None:
        raise InvalidInput("--ssh needs OpenSSH's client: apt install openssh-client")
    return found


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
    """A node on each of `hosts`, from now on until the block is left.

    Args:
        hosts: as ssh knows them.
        address: of the master, for each of them.
        token: of nodes.
        tell: takes what the nodes say, and how they end.
        join: what is typed there; address and `--token-stdin` are put behind.
        config: of OpenSSH; None for the user's own.

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
    """At which `host` finds a master that listens at `bound`: of the interface that leads there, if it has several."""
    is_everywhere = bound.host in ("", "0.0.0.0", "::")
    return Address(own_address(host.rpartition("@")[2]), bound.port) if is_everywhere else bound


_LONGEST_LINE = 4096


class _RemoteNode:
    """A process of ssh, and the thread that reads what is said there."""

    def __init__(self, client: Sequence[str], host: str, words: str, token: str, tell: Callable[[str], None]) -> None:
        self._host, self._tell, self._is_leaving = host, tell, False
        self._process = subprocess.Popen(
            [*client, host, words],
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
        """Have the node leave, in its own time."""
        self._is_leaving = True
        self._stdin.close()

    def end(self) -> None:
        """Return when ssh has ended; it is ended if it does not."""
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
            for line in iter(lambda: said.readline(_LONGEST_LINE), ""):
                last = shown(line).removeprefix("evener: ") or last
                if line.strip():
                    self._tell(f"{self._host}: {last}")
        code = self._process.wait()
        if not self._is_leaving:
            self._tell(f"{self._host}: {_ending(self._host, code)}")


def _ending(host: str, code: int) -> str:
    """How a node ended by itself, and what to do."""
    if code == _CANNOT_REACH:
        return (
            f"ssh cannot reach it, or has lost it; try `ssh {shlex.quote(host)} evener version`, which must ask nothing"
        )
    if code == _NOT_FOUND:
        return "there is no evener there: name its path with --ssh-join '~/venv/bin/evener join'"
    return "the node has left" if code == 0 else f"the node has ended with exit code {code}"
