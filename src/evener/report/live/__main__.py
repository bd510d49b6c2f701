"""The process that serves the live page beside a run, and ends shortly after the run's leading process.

python -m evener.report.live FOLDER PORT       PORT as for `evener.report.live.access.listen`

The run writes the token to stdin, and closes stdin when it ends. The process writes a line of JSON to stdout: the port
on which it listens, or why it cannot.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from evener.records.errors import EvenerError
from evener.report.live.access import listen

_CLOSING_DELAY_S = 2.0
"""Seconds in which open pages still receive the end of the run."""


def main() -> None:
    """Serve the page until the run is over."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    try:
        listening = listen(port)
    except EvenerError as error:
        _answer(str(error))
        return
    _answer(listening.getsockname()[1])
    _be_nice()
    from evener.report.live.feed import Sources
    from evener.report.live.server import LivePage  # loaded here: the run waits for the line above

    sources = Sources([folder], beside=[folder.parent])
    page = LivePage(sources, listening, sys.stdin.readline().strip())

    def end_with_run() -> None:
        sys.stdin.read()
        sources.abandon()
        time.sleep(_CLOSING_DELAY_S)
        page.stop()

    threading.Thread(target=end_with_run, daemon=True).start()
    page.serve()


def _answer(port_or_reason: int | str) -> None:
    sys.stdout.write(f"{json.dumps(port_or_reason)}\n")
    sys.stdout.flush()


def _be_nice() -> None:
    """Let training come first."""
    if hasattr(os, "nice"):
        os.nice(10)
    else:  # Windows
        with suppress(psutil.Error):
            psutil.Process().nice(getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 0))


main()
