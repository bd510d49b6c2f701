"""Errors that tests expect: the class in the test, the wording in `tests/messages.json`.

    with refused(InvalidInput) as error:      like pytest.raises; the file must have the whole message for this test
        ...
    assert error.value.name == "shares"

`EVENER_WRITE_MESSAGES=1 pytest ...` adds the messages of the tests that run. Remove a test's old ones by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)
MESSAGES = Path(__file__).parents[1] / "messages.json"
VARIABLE = (
    (re.compile(re.escape(str(Path(__file__).parents[2]))), "REPOSITORY"),
    (re.compile(r"(?<=\.py, line )\d+"), "LINE"),
    (re.compile(r"/[^\s'\",:;()]*pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?[^/\s'\",:;()]+"), "TMP"),
    (re.compile(re.escape(tempfile.gettempdir()) + r"/(tmp|evener-)\w+"), "TMP"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d{4,5}|(?<=localhost:)\d{4,5}"), "PORT"),
    (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
    (re.compile(r"\d+(?= updates so far)"), "N"),  # it trains on while another run is refused
)


class refused(Generic[E]):
    """Expect an error of class `kind` with the message that the file has for this test.

    This is no generator: its frame would be in the traceback of the error, and keep the error alive.
    """

    def __init__(self, kind: type[E] | tuple[type[E], ...]) -> None:
        self._raises = pytest.raises(kind)
        self._raised: pytest.ExceptionInfo[E] | None = None

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        self._raised = self._raises.__enter__()
        return self._raised

    def __exit__(self, *error: Any) -> bool:
        is_expected = bool(self._raises.__exit__(*error))
        if is_expected:
            assert self._raised is not None
            _compare(plain(str(self._raised.value)))
        self._raised = None
        return is_expected


def _compare(message: str) -> None:
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" (")[0].partition("[")[0]
    if os.environ.get("EVENER_WRITE_MESSAGES"):
        _write(test, message)
    assert message in messages().get(test, []), f"EVENER_WRITE_MESSAGES=1 writes it into {MESSAGES.name}, for {test}"


def plain(message: str) -> str:
    """Replace paths, ports, addresses and the progress of this run in a message."""
    for pattern, name in VARIABLE:
        message = pattern.sub(name, message)
    return message


def messages() -> dict[str, list[str]]:
    """Return the messages of every test, sorted."""
    with MESSAGES.open() as file:
        _lock(file, is_shared=True)  # another process may write it
        found: dict[str, list[str]] = json.load(file)
    return found


def _write(test: str, message: str) -> None:
    with MESSAGES.open("r+") as file:
        _lock(file, is_shared=False)
        known = json.load(file)
        known[test] = sorted({*known.get(test, []), message})
        file.seek(0)
        file.truncate()
        json.dump(dict(sorted(known.items())), file, indent=1, ensure_ascii=False)
        file.write("\n")


def _lock(file: IO[str], *, is_shared: bool) -> None:
    """Lock an open file, where other processes of the same run of tests may use it, too."""
    with contextlib.suppress(ImportError):  # on Windows the tests run in one process
        import fcntl

        fcntl.flock(file, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
