"""`python -m evener.experiments.following WORDS`: `evener WORDS`, which ends when its standard input does.

The other end of that pipe is held by whoever started it: so nothing is left running, however that one ended.
"""

from __future__ import annotations

import os
import runpy
import threading

from evener.errors import NodeLost


def _follow() -> None:
    while os.read(0, 1):  # without Python's buffer, whose lock would be held when the interpreter ends
        pass
    os._exit(NodeLost.exit_code)


if __name__ == "__main__":
    threading.Thread(target=_follow, name="evener-parent", daemon=True).start()
    runpy.run_module("evener", run_name="__main__")
