"""Lines that masters, nodes and relays print on their user's terminal while they run. Imports no NumPy."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path


def print_notice(sentence: str) -> None:
    """Print a message to the user of a master or a node."""
    try:
        sys.stderr.write(f"evener: {sentence}\n")
        sys.stderr.flush()
    except BrokenPipeError:  # the reader of a pipe has ended; this process may still have something to finish
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def warn_of_readers(secret: Path) -> None:
    """Warn if other users of this machine can read or change a file with a secret, with the command to type."""
    with suppress(OSError):  # reading the file later reports the error
        mode = secret.stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            print_notice(
                f"warning: {secret} holds a secret, and other users of this machine can read it "
                f"(its mode is {stat.S_IMODE(mode):o}): type `chmod 600 {secret}`"
            )
