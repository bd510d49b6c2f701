"""Locks of folders."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from evener.system.file_lock import shared_folder


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_folder_without_locks_is_used_and_never_cleaned(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with shared_folder(tmp_path / "cache", lambda: pytest.fail("others may use it")):
        assert (tmp_path / "cache").is_dir()


def test_error_of_cleaning_is_raised(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)), shared_folder(tmp_path, fail):
        pass


def test_other_errors_of_locks_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="error"), shared_folder(tmp_path, lambda: None):
        pass
