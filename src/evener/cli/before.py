"""What a command says and refuses before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from evener.errors import MissingFile, TrainingFailed

STARTING = "starting: loading what is needed"


def tell(line: str, as_json: bool, *, quiet: bool = False) -> None:
    """Print a sign of life; of several ranks that torchrun starts on a machine, the first one does."""
    number_here = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if quiet or "torch" in sys.modules or number_here != "0":
        return
    stream = sys.stderr if as_json else sys.stdout
    stream.write(line + "\n")
    stream.flush()


def require_program(script: Path) -> None:
    """Raise MissingFile or TrainingFailed unless there is a program of Python's there."""
    if not script.is_file():
        raise MissingFile(f"{script} is not there: name the file of your program")
    try:
        compile(script.read_bytes(), script, "exec")
    except SyntaxError as error:
        raise TrainingFailed(f"{script} line {error.lineno}: SyntaxError: {error.msg}") from error
