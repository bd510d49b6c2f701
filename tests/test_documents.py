"""The documents say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_drawing_of_the_rooms_is_what_the_import_law_and_the_rooms_say() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "rooms.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
