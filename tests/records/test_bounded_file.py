"""Files that users name are read up to a limit, and with the byte order mark that editors on Windows write."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from evener.commands.join import given_token
from evener.config.config_file import usual_options
from evener.records.bounded_file import read_bounded
from evener.records.errors import InvalidFile
from evener.records.profile import ClusterProfile
from evener.records.schema import read_noun
from support.refusals import refused

BOM = b"\xef\xbb\xbf"


def test_byte_order_mark_is_stripped(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(BOM + b"{}")
    assert read_bounded(file, 10) == b"{}"
    assert given_token(None, file, {}) == "{}"


def test_file_at_the_limit_is_read_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(2**20))
    assert len(read_bounded(file, 2**20)) == 2**20
    (tmp_path / "larger").write_bytes(bytes(2**20 + 1))
    with refused(InvalidFile):
        read_bounded(tmp_path / "larger", 2**20)


@pytest.mark.timeout(30)
def test_endless_device_is_refused() -> None:
    with refused(InvalidFile):
        read_noun(Path("/dev/zero"), ClusterProfile)
    with refused(InvalidFile):
        given_token(None, Path("/dev/zero"), {})


@pytest.mark.parametrize("start", [b"", BOM])
def test_windows_config_file_is_read(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "evener.toml").write_bytes(start + b"epochs = 7\r\nbatch_size = 3\r\n")
    (tmp_path / "own.py").write_text("")
    with usual_options({"task": str(tmp_path / "own.py"), "option": {}}, ()) as options:
        assert (options["epochs"], options["batch_size"]) == (7, 3)


@pytest.mark.posix
def test_pipe_is_read_with_a_writer_and_refused_without(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with refused(InvalidFile):
        read_bounded(pipe, 10)
    writer = threading.Timer(0.2, pipe.write_bytes, (b"token",))
    writer.start()
    assert read_bounded(pipe, 10) == b"token"
    writer.join()
