"""How a process ends in which a thread of Gloo may crash an ordinary exit of the interpreter."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def exit_now(code: int) -> NoReturn:
    """Do what a program, or a library of its, has registered for its exit (`atexit`), then end at once.

    Without that, loggers would lose their last lines, and Python would warn of locks of `multiprocessing`, of which a
    progress bar has one, as leaked.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
