"""What a node that was killed left in its cache goes when the next one comes, unless other nodes use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.ps.protocol.config import StateDir, node_cache

LEFT = ("blobs/.0123456789abcdef.x/stream", "ranks/run/1/checkpoints/step-00000001/model.safetensors")
KEPT = ("blobs/aa/file", "profiles/p.json", "key")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Of a node that was killed."""
    for name in (*LEFT, *KEPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_first_node_removes_files_of_a_killed_one(cache: Path) -> None:
    with node_cache(cache):
        assert [name for name in (*LEFT, *KEPT) if (cache / name).exists()] == list(KEPT)


def test_second_node_leaves_files_that_another_may_use(cache: Path) -> None:
    with node_cache(cache):
        (cache / LEFT[1]).parent.mkdir(parents=True)
        (cache / LEFT[1]).touch()
        with node_cache(cache):
            assert (cache / LEFT[1]).exists()
        assert (cache / LEFT[1]).exists()


def test_master_removes_temporary_files_of_its_last_start(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    left = [home.blobs / ".draft" / "stream", home.blobs / ".file", home.tokens / ".admin.7.140000000000001"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with home.occupied():
        assert [path for path in left if path.exists()] == []
