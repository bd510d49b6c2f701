"""The process that serves the live page beside a run, and ends shortly after the run's leading process.

python -m evener.report.live FOLDER HANDLE       HANDLE is the listening socket's file descriptor

The run writes the token to stdin and closes stdin when it ends.
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

_CLOSING_DELAY_S = 2.0
"""Seconds in which open pages still receive the end of the run."""


def main() -> None:
    """Serve the page until the run is over."""
    folder, handle = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(10)  # training comes first
    sources = Sources([folder], beside=[folder.parent])
    page = LivePage(sources, socket.socket(fileno=handle), sys.stdin.readline().strip())

    def end_with_run() -> None:
        sys.stdin.read()
        sources.abandon()
        time.sleep(_CLOSING_DELAY_S)
        page.stop()

    threading.Thread(target=end_with_run, daemon=True).start()
    page.serve()


main()
