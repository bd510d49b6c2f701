"""The process of the page beside a run: it is given a socket, and ends a moment after the process that leads the run.

python -m evener.report.live FOLDER HANDLE       the token comes on stdin, whose end is that of the run
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from evener.report.live.feed import Sources
from evener.report.live.server import LivePage

_LAST_WORDS = 2.0
"""Seconds in which open pages get the end of the run."""


def main() -> None:
    """Serve the page until the run is over."""
    folder, handle = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(10)  # training comes first
    sources = Sources([folder])
    page = LivePage(sources, socket.socket(fileno=handle), sys.stdin.readline().strip())

    def end_with_run() -> None:
        sys.stdin.read()
        sources.abandon()
        time.sleep(_LAST_WORDS)
        page.stop()

    threading.Thread(target=end_with_run, daemon=True).start()
    page.serve()


main()
