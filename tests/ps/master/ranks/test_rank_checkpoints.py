"""Checkpoints of ranks come to the master from the node that has them, and to whoever goes on from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.ps.master.ranks.rank_checkpoints import RankCheckpoints
from evener.ps.master.ranks.rank_journal import Saved
from evener.ps.node.blob_fetcher import BlobFetcher
from evener.ps.node.checkpoint_sender import CHECKPOINTS, CheckpointSender, link_files
from evener.ps.protocol.blob_transfer import BlobSender
from evener.ps.protocol.messages import FetchBlob
from evener.ps.protocol.rank_messages import RankPiece, RankSaved

WEIGHTS = bytes(range(256)) * 10_000
"""Of more than two pieces."""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    one = Scene(tmp_path)
    yield one
    one.master.close()


def write(folder: Path, step: int, weights: bytes = WEIGHTS) -> None:
    """What a rank writes."""
    place = folder / CHECKPOINTS / f"step-{step:08d}"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(weights)
    (place / "state.json").write_text(f'{{"step": {step}}}')


class Scene:
    """A node with a rank, and its master; nothing is sent before it is carried."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.blobs = 0.0, folder / "rank", folder / "blobs"
        self.folder.mkdir()
        self.to_master: list[tuple[Any, Sequence[Any]]] = []
        self.to_node: list[Any] = []
        self.kept: list[Any] = []
        self.warnings: list[str] = []
        self.node: Any = SimpleNamespace(name="a", peer=1)
        self.sender = CheckpointSender("r", 3, self.folder, self._put, self.warnings.append, lambda: self.now)
        self.master = RankCheckpoints(self.blobs, self._send, self.kept.append, self.warnings.append)

    def _put(self, header: Any, *buffers: Any) -> None:
        self.to_master.append((header, buffers))

    def _send(self, peer: int | None, header: Any, buffers: Sequence[Any] = ()) -> None:
        assert peer == self.node.peer
        self.to_node.append(header)

    def carry(self, most: int = 1000) -> None:
        """Whatever waits, both ways, until nothing does; at most so many messages to the master."""
        while (self.to_master or self.to_node) and most:
            if self.to_node:
                fetch = self.to_node.pop(0)
                assert isinstance(fetch, FetchBlob)
                self.sender.give(fetch)
            else:
                most -= 1
                header, buffers = self.to_master.pop(0)
                if isinstance(header, RankSaved):
                    self.master.offered(self.node, header)
                else:
                    assert isinstance(header, RankPiece)
                    self.master.piece(self.node, header, memoryview(buffers[0]))
        self.settle()

    def settle(self) -> None:
        """The disk has what came."""
        deadline = time.monotonic() + 10
        while self.master.is_busy and time.monotonic() < deadline:
            self.master.tick()


def test_newest_checkpoint_replaces_the_one_before(scene: Scene) -> None:
    for step in (10, 20):
        write(scene.folder, step)
        scene.now += 10.0
        scene.sender.written()
        scene.carry()
        assert scene.master.last.step == step
        assert scene.master.weights() == WEIGHTS
    assert [saved.step for saved in scene.kept] == [10, 20]
    assert [path.name for path in scene.blobs.iterdir()] == [scene.kept[1].digest]
    assert scene.warnings == []
    scene.master.forget()
    assert list(scene.blobs.iterdir()) == []


def test_checkpoint_that_the_ranks_began_from_is_kept_for_late_nodes(scene: Scene) -> None:
    bases = list[str]()
    for step in (10, 20, 30):
        write(scene.folder, step)
        scene.now += 10.0
        scene.sender.written()
        scene.carry()
        if step < 30:
            bases.append(scene.master.begin_from_last())
            assert bases[-2:-1] == [path.name for path in scene.blobs.iterdir() if path.name != bases[-1]]
            scene.master.drop_previous_base()
        assert scene.master.base == bases[-1]
        assert {path.name for path in scene.blobs.iterdir()} == {bases[-1], scene.master.last.digest}
    assert bases[1] != scene.master.last.digest
    scene.master.forget()
    assert list(scene.blobs.iterdir()) == []


def test_only_one_checkpoint_is_sent_at_a_time(scene: Scene) -> None:
    write(scene.folder, 10)
    scene.sender.written()
    write(scene.folder, 20)
    scene.now += 10.0
    scene.sender.written()
    assert len(scene.to_master) == 1
    scene.carry()
    write(scene.folder, 30)
    scene.now += 10.0
    scene.sender.written()
    scene.carry()
    assert [saved.step for saved in scene.kept] == [10, 30]


def test_checkpoint_deleted_during_its_transfer_arrives_complete(scene: Scene) -> None:
    write(scene.folder, 10)
    scene.sender.written()
    scene.carry(most=2)
    for path in (scene.folder / CHECKPOINTS / "step-00000010").iterdir():
        path.unlink()
    scene.carry()
    assert scene.master.weights() == WEIGHTS


def test_lost_sender_leaves_the_last_complete_checkpoint(scene: Scene) -> None:
    write(scene.folder, 10)
    scene.sender.written()
    scene.carry()
    write(scene.folder, 20)
    scene.now += 10.0
    scene.sender.written()
    scene.carry(most=2)
    scene.master.disconnected(scene.node)
    assert scene.master.last.step == 10
    other_folder = scene.folder / "other"
    other_folder.mkdir()
    other = Scene(other_folder)
    other.master, other.node = scene.master, SimpleNamespace(name="b", peer=1)
    scene.master._send = other._send
    write(other.folder, 30)
    other.sender.written()
    other.carry()
    assert scene.master.last.step == 30


def test_transfer_of_a_checkpoint_resumes_after_a_reconnect(scene: Scene) -> None:
    write(scene.folder, 10)
    scene.sender.written()
    scene.carry(most=2)
    scene.to_master.clear()
    scene.to_node.clear()
    scene.sender.offer()
    scene.carry()
    assert scene.master.weights() == WEIGHTS


def test_damaged_checkpoint_is_rejected_with_a_warning(scene: Scene) -> None:
    write(scene.folder, 10, b"short")
    scene.sender.written()
    ((saved, _),) = scene.to_master
    scene.master.offered(scene.node, saved)
    piece = RankPiece(run="r", digest=saved.digest, offset=0, total=4)
    scene.master.piece(scene.node, piece, memoryview(b"lies"))
    assert scene.master.last.step == 0
    assert scene.warnings == [
        f"warning: the checkpoint of step 10 cannot be saved: blob {saved.digest[:12]} was damaged, "
        "or its files changed, during the transfer"
    ]


@pytest.mark.parametrize("stream", [b"", b"\xff" * 100, b"\x03\0\0\0\0\0\0\0\x91\xa1a" + b"x" * 50])
def test_invalid_checkpoint_yields_no_weights_and_a_warning(scene: Scene, stream: bytes) -> None:
    scene.blobs.mkdir()
    digest = "ab" * 32
    (scene.blobs / digest).write_bytes(stream)
    scene.master.last = Saved(step=3, digest=digest)
    assert scene.master.weights() == b""
    assert len(scene.warnings) == 1


def test_rank_resumes_from_the_checkpoint_sent_to_its_node(scene: Scene) -> None:
    write(scene.folder, 10)
    scene.sender.written()
    scene.carry()
    there = scene.folder.parent
    fetches: list[Any] = []
    fetcher = BlobFetcher(there / "node", fetches.append)
    fetcher.request([scene.master.last.digest])
    sender = BlobSender(scene.blobs)
    while fetches:
        chunk, data = sender.chunk(fetches.pop(0))
        fetcher.receive(chunk, memoryview(data))
    assert fetcher.is_complete
    (step,) = fetcher.path_of(scene.master.last.digest).iterdir()
    link_files(step, there / "new" / CHECKPOINTS / step.name)
    assert (there / "new" / CHECKPOINTS / "step-00000010" / "model.safetensors").read_bytes() == WEIGHTS


def test_blob_offered_as_a_checkpoint_is_not_deleted(scene: Scene) -> None:
    code = "cd" * 32
    scene.blobs.mkdir()
    (scene.blobs / code).write_bytes(b"code")
    scene.master.offered(scene.node, RankSaved(run="r", process=3, step=5, digest=code))
    assert scene.master.last.step == 0
    scene.master.forget()
    assert (scene.blobs / code).read_bytes() == b"code"


def test_checkpoint_of_a_new_leader_replaces_an_unfinished_transfer(scene: Scene) -> None:
    write(scene.folder, 10)
    scene.sender.written()
    scene.carry(most=2)
    scene.to_master.clear()
    scene.to_node.clear()
    later = scene.folder / "later"
    write(later, 20)
    scene.sender = CheckpointSender("r", 4, later, scene._put, scene.warnings.append, lambda: scene.now)
    scene.sender.written()
    scene.carry()
    assert scene.master.last.step == 20
    assert scene.master.weights() == WEIGHTS


def test_files_are_copied_where_links_are_not_permitted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    write(scene.folder, 10)
    scene.sender.written()
    scene.carry()
    assert scene.master.weights() == WEIGHTS


def test_checkpoint_that_cannot_be_read_gives_a_warning(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.link", fail)
    write(scene.folder, 10)
    scene.sender.written()
    assert scene.to_master == []
    assert scene.warnings == ["cannot send a checkpoint to the master: [Errno 5] Input/output error"]
