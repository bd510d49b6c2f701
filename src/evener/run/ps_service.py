"""How a command that stays, a master or a node, speaks to its user."""

from __future__ import annotations

import sys


def say(sentence: str) -> None:
    """Tell the user of a master or node what happens."""
    sys.stderr.write(f"evener: {sentence}\n")
    sys.stderr.flush()
