"""Loaded by a fork server: imports the modules that its processes need, and keeps the error of one that cannot be.

The processes then fail with that error. A second attempt could abort them, since a part of PyTorch is already loaded.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

NAMES = "_EVENER_PRELOAD"
"""Variable of the environment of a fork server: names of the modules, separated by commas."""
error: Exception | None = None

try:
    for name in filter(None, os.environ.pop(NAMES, "").split(",")):
        with suppress(ImportError):  # the process that needs it says what is missing
            import_module(name)
except Exception as raised:
    error = raised
