"""The audit log of a master: one JSON object per line with action, name, address and time, for its user only.

    {"time": "2026-01-31T12:00:00.000+00:00", "what": "fault", "name": "attic", "address": "10.0.0.7, port 40122",
     "invitation": "9f86d081", "detail": ...}

The log keeps its last two files of a few megabytes, so that no peer can fill the disk. For one action of one host it
has a few entries a minute, and then one with the number of the others, so that no peer can push out older entries.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from evener.wire.identity import host_in

MAX_BYTES = 8 * 2**20
"""Size at which the log begins a new file."""
LINES_PER_MINUTE = 60
"""Limit of entries about one action of one host in a minute."""
_MINUTE_S = 60.0
_MAX_HOSTS = 1024
"""Limit of hosts and actions that are counted apart in a minute."""
OTHER_HOSTS = "other addresses"
_MAX_DETAIL_LENGTH = 8192
_MAX_WORD_LENGTH = 256


class AuditLog:
    """Appends to a file; if the disk fails, the user is warned once and the master continues.

    Args:
        path: file of the log; the previous file has `.1` appended to its name.
        notify: shows a message to the master's user.
        lines_per_minute: limit of entries about one action of one host in a minute.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        notify: Callable[[str], None],
        lines_per_minute: int = LINES_PER_MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._notify, self._lines_per_minute, self._clock = path, notify, lines_per_minute, clock
        self._is_failing = False
        self._counts: Counter[tuple[str, str]] = Counter()
        self._begun = clock()

    def write(
        self,
        what: str,
        *,
        name: str = "",
        address: str = "",
        invitation: str = "",
        detail: str = "",
        is_limited: bool = True,
    ) -> bool:
        """Append an entry, or count it if there were many of its kind in this minute; return whether it was appended.

        Args:
            what: action, one word or two.
            name: name of the node, or of the submitter.
            address: address of the peer.
            invitation: invitation with which it connected; empty if it used the token of a role.
            detail: details of the action.
            is_limited: whether the entry counts towards the limit of a minute; those of admins do not.
        """
        if is_limited:
            key = what, host_in(address)
            if key not in self._counts and len(self._counts) >= _MAX_HOSTS:
                key = what, OTHER_HOSTS
            self._counts[key] += 1
            if self._counts[key] > self._lines_per_minute:
                return False
        self._write(what, name, address, invitation, detail)
        return True

    def tick(self) -> list[tuple[str, str, int]]:
        """End a minute: append the numbers of entries that were left out; return them with action and host."""
        if self._clock() - self._begun < _MINUTE_S:
            return []
        most = self._lines_per_minute
        left_out = [(what, host, count - most) for (what, host), count in self._counts.items() if count > most]
        self._counts.clear()
        self._begun = self._clock()
        for what, host, count in left_out:
            self._write(what, "", host, "", f"{count} more within a minute")
        return left_out

    def _write(self, what: str, name: str, address: str, invitation: str, detail: str) -> None:
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
