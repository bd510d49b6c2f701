"""A process that has loaded all that recipes need, and forks ranks when asked to: a world starts in milliseconds.

python -m exact.nursery ADDRESS        connects there; every message (rank, size, port) makes a rank, which does, too
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Client

import msgspec

from exact.recipe import KINDS
from exact.worlds import serve

_LOADED = ("torch._dynamo", "exact.drawn", "exact.kinds.planted", *(f"exact.kinds.{kind}" for kind in KINDS))
"""The compiler among them, which optimisers load when they are made: that takes seconds."""


def main(address: str) -> None:
    for name in _LOADED:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks leave nothing behind
    ours, theirs = os.pipe()
    with Client(address) as line:
        while True:
            try:
                rank, size, port = msgspec.json.decode(line.recv_bytes())
            except EOFError:
                return
            if not os.fork():
                line.close()
                os.close(theirs)
                threading.Thread(target=_end_with_nursery, args=(ours,), daemon=True).start()
                _run(address, rank, size, port)


def _run(address: str, rank: int, size: int, port: int) -> None:
    """What a rank does, which ends with it."""
    try:
        with Client(address) as pipe:
            pipe.send_bytes(str(os.getpid()).encode())
            serve(rank, size, port, pipe)
    finally:
        os._exit(0)


def _end_with_nursery(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
