"""The audit log of a master: one JSON object per line with action, name, address and time, for its user only.

    {"time": "2026-01-31T12:00:00.000+00:00", "what": "fault", "name": "attic", "address": "10.0.0.7, port 40122",
     "invitation": "9f86d081", "detail": ...}

The log keeps its last two files of a few megabytes, so that no peer can fill the disk.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

MAX_BYTES = 8 * 2**20
"""Size at which the log begins a new file."""
_MAX_DETAIL_LENGTH = 8192
_MAX_WORD_LENGTH = 256


class AuditLog:
    """Appends to a file; if the disk fails, the user is warned once and the master continues.

    Args:
        path: file of the log; the previous file has `.1` appended to its name.
        notify: shows a message to the master's user.
    """

    def __init__(self, path: Path, notify: Callable[[str], None]) -> None:
        self._path, self._notify = path, notify
        self._is_failing = False

    def write(self, what: str, *, name: str = "", address: str = "", invitation: str = "", detail: str = "") -> None:
        """Append an entry.

        Args:
            what: action, one word or two.
            name: name of the node, or of the submitter.
            address: address of the peer.
            invitation: invitation with which it connected; empty if it used the token of a role.
            detail: details of the action.
        """
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "what": what,
            "name": name[:_MAX_WORD_LENGTH],
            "address": address[:_MAX_WORD_LENGTH],
            "invitation": invitation[:_MAX_WORD_LENGTH],
            "detail": detail[:_MAX_DETAIL_LENGTH],
        }
        try:
            self._append(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._is_failing:
                self._notify(f"warning: the audit log {self._path} cannot be written: {error.strerror}")
            self._is_failing = True
        else:
            self._is_failing = False

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line)
            is_full = os.fstat(handle).st_size > MAX_BYTES
        finally:
            os.close(handle)
        if is_full:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))


def trace_of(error: BaseException) -> str:
    """Return the end of an error's traceback, as much as an entry of the log holds."""
    return "".join(traceback.format_exception(error))[-_MAX_DETAIL_LENGTH:]
