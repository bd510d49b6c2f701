"""A node's part in a run whose ranks work together: what it has ready, what it starts, and what it passes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import msgspec
import pytest

from evener.membership.generation import Beat, Hello, encode_message
from evener.membership.shared_values import SetValue, Values
from evener.ps.node.checkpoint_sender import CHECKPOINTS
from evener.ps.node.node import Node
from evener.ps.node.node_part import NodeConfig
from evener.ps.node.rank_child import RankHost, RankTask
from evener.ps.protocol.blob import Blob, whole_folder
from evener.ps.protocol.config import Versions
from evener.ps.protocol.messages import BlobChunk, FetchBlob, Heartbeat, Join, NotReady, Release, Welcome
from evener.ps.protocol.rank_messages import (
    PrepareRank,
    RankEnded,
    RankJob,
    RankNode,
    RankPiece,
    RankPlace,
    RankReady,
    RankSaid,
    RankSaved,
    RankShown,
    RankTold,
    StartRank,
    StopRank,
    encode_rank_part,
)
from evener.records.events import RunEvent, encode_events
from evener.records.profile import DeviceProfile
from evener.records.record import WEIGHTS, Event
from support.fake_runs import fake_run
from support.linear_engine import Mood, build

JOB = RankJob(run="r", task="tiny", title="tiny", config=b"{}")
PLACE = RankPlace(
    rank=0,
    nodes=(RankNode(name="a", host="10.0.0.1", device="cpu", speed=1.0),),
    secret=b"s" * 16,
    patience=5.0,
    is_late=False,
)


class Rank:
    """A process that is imitated, and what opens it: `LocalProcess` and `LocalProcesses`."""

    failure = None

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.stops: list[bool] = []
        self.said: deque[bytes] = deque()
        self.shown: SimpleQueue[list[tuple[Any, bytes]]] = SimpleQueue()
        self.task: RankTask
        self.has_ended = self.has_finished = self.is_closed = False
        self.ending = "ended"
        self.process = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = not self.has_ended

    def start(self, _name: str, _target: object, task: RankTask) -> Self:
        self.task = task
        return self

    def receive(self, _timeout: float) -> list[tuple[Any, bytes]]:
        with suppress(Empty):
            return self.shown.get(timeout=0.01)
        return []

    @property
    def is_drained(self) -> bool:
        return self.shown.empty()

    def show(self, data: bytes) -> None:
        self.shown.put([(self, data)])

    def end(self) -> None:
        self.has_ended = self.has_finished = True

    def tell(self, data: bytes) -> None:
        self.told.append(data)

    def request_stop(self) -> None:
        self.stops.append(False)

    def kill(self) -> None:
        self.stops.append(True)


WELCOME = Welcome(patience=60.0)
PROFILE = DeviceProfile(node="a", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)


def node(cache: Path, connection: Any, log: list[str], host: RankHost | None) -> Node:
    """A node whose connection to the master is `connection`."""
    config = NodeConfig(
        "a", "cpu", 1.0, None, cache, Versions("0", "3.11", ""), lambda: PROFILE, build(Mood()), host=host
    )
    return Node(config, lambda *_: connection, log.append)


class Scene:
    """A node, whose messages to its master are collected."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.started: list[Rank] = []
        self.sent: list[tuple[Any, list[bytes]]] = []
        self.log: list[str] = []
        self.node = node(cache, self, self.log, RankHost(lambda *_: None, 0.5, "10.0.0.9", self._open))

    def _open(self) -> Any:
        self.started.append(Rank())
        return self.started[-1]

    def send(self, header: Any, buffers: Sequence[Any] = ()) -> None:
        if not isinstance(header, Join | Heartbeat):
            self.sent.append((header, [bytes(buffer) for buffer in buffers]))

    def close(self) -> None:
        """End the connection."""

    def prepare(self, job: RankJob = JOB) -> None:
        self.node.handle(PrepareRank(run=job.run), [memoryview(encode_rank_part(job))])

    def start(self, process: int) -> Rank:
        """The process that the node starts."""
        self.node.handle(StartRank(run="r", process=process), [memoryview(encode_rank_part(PLACE))])
        return self.started[-1]

    def of(self, kind: type) -> list[Any]:
        return [header for header, _ in self.sent if isinstance(header, kind)]

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """What a thread of the node has done."""
        deadline = time.monotonic() + 10
        while not (found := condition()):
            assert time.monotonic() < deadline, self.sent
            time.sleep(0.002)
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    one = Scene(tmp_path)
    yield one
    one.node.close()


def test_node_reports_ready_again_after_a_reconnect(scene: Scene) -> None:
    scene.prepare()
    scene.wait_for(lambda: scene.of(RankReady))
    scene.start(3)
    scene.prepare()
    first, second = scene.wait_for(lambda: len(scene.of(RankReady)) == 2 and scene.of(RankReady))
    assert (first.process, second.process, first.speed) == (0, 3, 0.5)
    assert not scene.started[0].is_closed


def test_process_starts_once_and_is_closed_for_the_next(scene: Scene) -> None:
    scene.prepare()
    first = scene.start(3)
    assert scene.start(3) is first
    second = scene.start(4)
    assert (first.is_closed, second.is_closed) == (True, False)
    assert (second.task.process, second.task.resumes) == (4, False)
    assert (second.task.task, second.task.place, second.task.towards) == ("tiny", PLACE, "10.0.0.9")
    scene.node.handle(StartRank(run="another", process=5), [memoryview(encode_rank_part(PLACE))])
    assert len(scene.started) == 2


def test_rank_messages_are_forwarded_and_resent_until_answered(scene: Scene) -> None:
    scene.prepare()
    rank = scene.start(3)
    said = [encode_message(Hello(node="a")), msgspec.msgpack.encode(SetValue(number=7, key="k", value=b"v"))]
    for data in (*said, encode_message(Beat(count=1, step=1, holds=0))):
        rank.said.append(data)
    scene.wait_for(lambda: len(scene.of(RankSaid)) == 3)
    scene.node.handle(WELCOME, [])
    scene.wait_for(lambda: len(scene.of(RankSaid)) == 5)
    answer = msgspec.msgpack.encode(Values(number=7, values=()))
    scene.node.handle(RankTold(run="r", process=3), [memoryview(answer)])
    assert rank.told == [answer]
    scene.node.handle(WELCOME, [])
    scene.wait_for(lambda: len(scene.of(RankSaid)) == 6)
    assert [buffers[0] for header, buffers in scene.sent if isinstance(header, RankSaid)][3:] == [*said, said[0]]


def test_plan_and_record_are_sent_again_over_a_new_connection(scene: Scene) -> None:
    """A master that is killed takes with it what had just been sent to it."""
    scene.prepare()
    rank, run = scene.start(3), fake_run(num_steps=3)
    shown: list[RunEvent] = [run.plan, *run.steps, run]
    for event in shown:
        rank.show(encode_events([event]))
    scene.wait_for(lambda: len(scene.of(RankShown)) == 5)
    scene.node.handle(WELCOME, [])
    scene.wait_for(lambda: len(scene.of(RankShown)) == 7)
    again = [buffers[0] for header, buffers in scene.sent if isinstance(header, RankShown)][5:]
    assert again == [encode_events([run.plan]), encode_events([run])]


def test_messages_for_another_process_are_not_forwarded(scene: Scene) -> None:
    scene.prepare()
    rank = scene.start(3)
    scene.node.handle(RankTold(run="r", process=2), [memoryview(b"")])
    scene.node.handle(StopRank(run="r", process=2), [])
    assert (rank.told, rank.stops) == ([], [])
    scene.node.handle(StopRank(run="r", process=3, at_once=True), [])
    assert rank.stops == [True]


def test_end_of_a_process_sends_its_weights(scene: Scene) -> None:
    scene.prepare()
    rank = scene.start(3)
    (Path(rank.task.folder) / WEIGHTS).write_bytes(b"weights")
    rank.end()
    scene.wait_for(lambda: scene.of(RankEnded))
    header, buffers = scene.sent[-1]
    assert (header.has_finished, header.process, buffers) == (True, 3, [b"weights"])


def test_checkpoint_is_offered_and_sent_on_request(scene: Scene) -> None:
    scene.prepare()
    rank = scene.start(3)
    step = Path(rank.task.folder) / CHECKPOINTS / "step-00000020"
    step.mkdir(parents=True)
    (step / WEIGHTS).write_bytes(b"weights")
    told = Event(step=20, kind="checkpoint", message="its node offers it to the master")
    rank.show(encode_events([told]))
    (offer,) = scene.wait_for(lambda: scene.of(RankSaved))
    assert (offer.step, offer.process) == (20, 3)
    assert len(scene.of(RankShown)) == 1
    scene.node.handle(FetchBlob(digest=offer.digest, offset=0), [])
    scene.wait_for(lambda: scene.of(RankPiece))
    header, (data,) = scene.sent[-1]
    blob = Blob(step.parent, [f"{step.name}/{WEIGHTS}"])
    assert (header.digest, header.total) == (offer.digest, len(data)) == (blob.digest, blob.num_bytes)
    assert bytes(data) == blob.read(0, blob.num_bytes)


def test_run_can_be_prepared_again_from_a_checkpoint(scene: Scene, tmp_path: Path) -> None:
    scene.prepare()
    before = scene.start(3)
    place = tmp_path / "saved" / "step-00000020"
    place.mkdir(parents=True)
    (place / WEIGHTS).write_bytes(b"weights")
    blob = Blob(place.parent, whole_folder(place.parent))
    scene.prepare(msgspec.structs.replace(JOB, checkpoint=blob.digest))
    assert before.is_closed
    fetch = scene.wait_for(lambda: scene.of(FetchBlob))[0]
    data = blob.read(fetch.offset, blob.num_bytes)
    scene.node.handle(BlobChunk(digest=blob.digest, offset=0, total=blob.num_bytes), [memoryview(data)])
    scene.wait_for(lambda: len(scene.of(RankReady)) == 2)
    rank = scene.start(4)
    assert rank.task.resumes
    assert (Path(rank.task.folder) / CHECKPOINTS / "step-00000020" / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.posix
def test_node_without_pytorch_is_not_ready_and_gives_the_reason(scene: Scene, tmp_path: Path) -> None:
    scene.node.close()
    scene.node = node(tmp_path, scene, scene.log, None)
    scene.prepare()
    (answer,) = scene.of(NotReady)
    assert "its ranks need PyTorch" in answer.reason


def test_release_removes_everything_of_the_run(scene: Scene) -> None:
    scene.prepare()
    rank = scene.start(3)
    scene.node.handle(Release(run="another"), [])
    assert not rank.is_closed
    scene.node.handle(Release(run="r"), [])
    assert rank.is_closed
    assert not Path(rank.task.folder).exists()


def test_release_leaves_folders_of_other_nodes_on_the_machine(scene: Scene, tmp_path: Path) -> None:
    scene.prepare()
    scene.start(1)
    ranks = next(tmp_path.rglob("ranks"))
    other = ranks / "r" / "2" / "model.safetensors"
    other.parent.mkdir()
    other.touch()
    scene.node.handle(Release(run="r"), [])
    assert other.exists()
    assert not (ranks / "r" / "1").exists()


def test_node_without_disk_space_is_not_ready_and_gives_the_reason(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    scene.prepare()
    monkeypatch.setattr(Path, "mkdir", fail)
    scene.node.handle(StartRank(run="r", process=3), [memoryview(encode_rank_part(PLACE))])
    (refusal,) = scene.wait_for(lambda: scene.of(NotReady))
    assert "No space left on device" in refusal.reason
    assert scene.started == []
