"""A process that ends with the one that started it, however that went: nothing of a run is left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading

from evener.errors import NodeLost


def end_with_parent() -> None:
    """From now on, end this process as soon as its parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(NodeLost.exit_code)

    threading.Thread(target=follow, name="evener-parent", daemon=True).start()
