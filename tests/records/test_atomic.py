"""Files and folders appear whole or not at all, are on the disk before they have their name, and leave no drafts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evener.records.atomic import atomic_draft, atomic_write, remove_drafts


def full(*_: object) -> None:
    raise OSError("No space left on device")


def test_file_is_replaced_and_its_folder_created(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for data in (b"old", b"new"):
        atomic_write(path, data)
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.write_bytes"])
@pytest.mark.parametrize("private", [False, True])
def test_failed_write_leaves_the_old_file_and_nothing_else(
    function: str, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(function, full)
    with pytest.raises(OSError, match="No space left on device"):
        atomic_write(tmp_path / "file", b"new", private=private)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_private_file_has_user_permissions_from_the_first_byte(tmp_path: Path) -> None:
    with atomic_draft(tmp_path / "secret", private=True) as draft:
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600
        draft.write_bytes(b"secret")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.posix
def test_folder_appears_whole_after_all_of_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = [], os.fsync

    def note(handle: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, (tmp_path / "folder").exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", note)
    with atomic_draft(tmp_path / "folder") as draft:
        draft.mkdir()
        for name in ("a", "b"):
            (draft / name).write_bytes(b"data")
        assert not (tmp_path / "folder").exists()
    assert sorted(os.listdir(tmp_path / "folder")) == ["a", "b"]
    assert os.listdir(tmp_path) == ["folder"]
    assert sorted(synced) == sorted([("a", False), ("b", False), (draft.name, False), (tmp_path.name, True)])


def test_failed_folder_write_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_draft(tmp_path / "folder") as draft:
            draft.mkdir()
            (draft / "a").write_bytes(b"data")
            full()

    with pytest.raises(OSError, match="No space"):
        write()
    assert os.listdir(tmp_path) == []


def test_process_killed_during_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    code = (
        "import os, sys; from pathlib import Path; from evener.records.atomic import atomic_draft\n"
        "with atomic_draft(Path(sys.argv[1])) as draft: draft.write_bytes(b'n'); os._exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False).returncode == 3
    assert (tmp_path / "file").read_bytes() == b"old"


def test_threads_that_write_the_same_file_do_not_interfere(tmp_path: Path) -> None:
    texts = [bytes([65 + i]) * 4096 for i in range(4)]

    def write(text: bytes) -> None:
        for _ in range(10):
            atomic_write(tmp_path / "file", text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "file").exists():
            seen.add((tmp_path / "file").read_bytes())
    for thread in threads:
        thread.join()
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["file"]


def test_drafts_of_living_processes_are_not_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {pid: f".plan.json.{pid}.7" for pid in (os.getppid(), os.getpid(), ended.pid)}
    for name in names.values():
        (tmp_path / name).write_text("")
    remove_drafts(tmp_path, keep_living=True)
    assert [path.name for path in tmp_path.iterdir()] == [names[os.getppid()]]
    remove_drafts(tmp_path)
    assert list(tmp_path.iterdir()) == []
