"""Small programs that tests run on hosts: to send, to receive, to compute, to be there.

    probe.py receive            -> `port N`, `first bytes`; when its one connection ends, `MBIT Mbit/s`
    probe.py send HOST PORT N   -> sends N bytes as fast as it can
    probe.py burn S             -> computes for S seconds; `CORES cores, CORES in the best fifth of a second`
    probe.py sleep S            -> `ready`, then waits

They import nothing but the standard library, and start in a few hundredths of a second.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable


def say(words: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def receive() -> None:
    """Measure the rate of one connection, from its first bytes to its last."""
    with socket.create_server(("", 0)) as server:
        say(f"port {server.getsockname()[1]}")
        peer, _ = server.accept()
        with peer:
            peer.recv(1 << 20)
            start, received = time.monotonic(), 0
            say("first bytes")
            while data := peer.recv(1 << 20):
                received += len(data)
    say(f"{received * 8e-6 / (time.monotonic() - start):.2f} Mbit/s")


def send(host: str, port: str, count: str) -> None:
    """Send that many bytes, then close the connection."""
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        peer.sendall(bytes(int(float(count))))


def burn(seconds: str) -> None:
    """Measure the processor time that computing gets; in the best moment others want least of it."""
    rates = [_burn(0.2) for _ in range(round(float(seconds) / 0.2))]
    say(f"{sum(rates) / len(rates):.3f} cores, {max(rates):.3f} in the best fifth of a second")


def _burn(seconds: float) -> float:
    start, used = time.monotonic(), time.process_time()
    while time.monotonic() < start + seconds:
        sum(range(1000))
    return (time.process_time() - used) / (time.monotonic() - start)


def sleep(seconds: str) -> None:
    """Be there."""
    say("ready")
    time.sleep(float(seconds))


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {"receive": receive, "send": send, "burn": burn, "sleep": sleep}
    programs[sys.argv[1]](*sys.argv[2:])
