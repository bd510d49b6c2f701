"""A run whose ranks work together, at the master: who is started when, who is left behind, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from evener.membership.generation import Beat, Generation, Hello, encode_message
from evener.membership.shared_values import AskValues, SetValue, Values, decode_to_rank
from evener.ps.master.effects import EVENTS
from evener.ps.master.nodes import MEASURING_S, NodeRecord, Nodes
from evener.ps.master.ranks.rank_checkpoints import RankCheckpoints
from evener.ps.master.ranks.rank_journal import RankJournal, Saved
from evener.ps.master.ranks.rank_run import ActiveRankRun
from evener.ps.master.ranks.rank_table import LINE_RETRY_S
from evener.ps.master.ranks.rank_training import RankTraining
from evener.ps.master.ranks.remote_rank import RemoteFailure, why_ended
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.rank_messages import (
    PrepareRank,
    RankEnded,
    RankJob,
    RankPlace,
    RankReady,
    RankSaved,
    RankTold,
    StartRank,
    StopRank,
    decode_rank_job,
    decode_rank_place,
)
from evener.records.error_kind import kind_of
from evener.records.errors import (
    DeviceLost,
    DoesNotFit,
    Interrupted,
    InvalidInput,
    LineCut,
    NodeLost,
    NonFiniteLoss,
    NotNeeded,
    NoUsableNode,
)
from evener.records.events import encode_events
from evener.records.history import History
from evener.records.plan import Assignment, Plan
from evener.records.profile import DeviceProfile
from evener.records.record import Epoch, Event, Step
from evener.wire.errors import BadFrame
from support.refusals import refused

PATIENCE = 5.0
PROFILE = DeviceProfile(node="any", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)
DIVERGED = kind_of(NonFiniteLoss("b", 9, float("nan")))
REFUSED, STOPPED, NOT_NEEDED = (kind_of(one("why")) for one in (InvalidInput, Interrupted, NotNeeded))
PLAN = Plan(strategy="data", batch_size=1, assignments=(Assignment(rank=0, node="a", device="cpu", samples=1),))


class Scene:
    """A run, and nodes of a master that are imitated."""

    folder: ClassVar[Path]
    journals: ClassVar[list[RankJournal]] = []

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.journal = RankJournal(StateDir(self.folder), "r", print)
        self.journals.append(self.journal)
        self.nodes = Nodes(PATIENCE)
        self.sent: list[tuple[int | None, Any, Any]] = []
        job = RankJob(run="r", task="tiny", title="tiny", config=b"{}")
        self.said: list[str] = []
        checkpoints = RankCheckpoints(self.folder / "blobs", self._send, self.journal.add, self.said.append)
        self.run = RankTraining(job, self.nodes, self._send, lambda: self.now, self.journal, checkpoints)
        for name in names:
            self.come(name)

    def _send(self, peer: int | None, header: Any, buffers: Sequence[Any] = ()) -> None:
        self.sent.append((peer, header, buffers))

    def come(self, name: str) -> NodeRecord:
        """A node joins, and has the code."""
        node = self.nodes.record(name)
        node.profile, node.origin, node.device = PROFILE, "10.0.0.1, port 1", "cpu"
        self.nodes.decide("joined", node, self.now, incarnation=len(self.sent) + 1)
        self.nodes.connect(node, 10 + len(self.sent))
        self.run.admit(node)
        assert isinstance(self.sent[-1][1], PrepareRank)
        return node

    def ready(self, *names: str, process: int = 0) -> None:
        for name in names:
            self.run.ready(self.nodes.by_name[name], RankReady(run="r", process=process, speed=1.0))

    def places(self) -> dict[int, RankPlace]:
        """Of the processes that were started, by number."""
        started = [(header.process, buffers[0]) for _, header, buffers in self.sent if isinstance(header, StartRank)]
        return {number: decode_rank_place(data) for number, data in started}

    def say(self, name: str, process: int, message: Hello | Beat | SetValue | AskValues) -> None:
        data = encode_message(message) if isinstance(message, Hello | Beat) else msgspec.msgpack.encode(message)
        self.run.said(self.nodes.by_name[name], process, data)

    def generations(self, process: int) -> list[Generation]:
        told = [b[0] for _, header, b in self.sent if isinstance(header, RankTold) and header.process == process]
        return [one for one in map(decode_to_rank, told) if isinstance(one, Generation)]

    def end(self, name: str, process: int, **words: Any) -> None:
        self.run.ended(self.nodes.by_name[name], RankEnded(run="r", process=process, **words), ())

    def found(self) -> None:
        """Both nodes train."""
        self.ready("a", "b")
        self.run.tick()
        for name, process in (("a", 1), ("b", 2)):
            self.say(name, process, Hello(node=name, initial_nodes=("a", "b")))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path) -> Iterator[None]:
    Scene.folder = tmp_path
    yield
    while Scene.journals:
        Scene.journals.pop().close()


def test_ranks_start_when_all_present_nodes_have_the_code() -> None:
    scene = Scene("a", "b")
    scene.ready("a")
    scene.run.tick()
    assert scene.places() == {}
    scene.ready("b")
    scene.run.tick()
    places = scene.places()
    assert {number: (place.rank, place.is_late) for number, place in places.items()} == {1: (0, False), 2: (1, False)}
    assert [node.name for node in places[1].nodes] == ["a", "b"]
    assert places[1].secret == places[2].secret
    assert len(places[1].secret) == 16


def test_weights_of_an_ended_process_are_kept_without_a_copy() -> None:
    scene = Scene("a", "b")
    scene.found()
    node, data = scene.nodes.by_name["a"], memoryview(bytearray(1000))
    assert scene.run.wants_weights(node, 1, 1000, room=1000)
    assert not scene.run.wants_weights(scene.nodes.by_name["b"], 2, 1000, room=1000)
    assert scene.run.held_bytes == 1000
    scene.run.disconnected(node)
    assert scene.run.held_bytes == 0
    assert scene.run.wants_weights(node, 1, 1000, room=1000)
    scene.run.ended(node, RankEnded(run="r", process=1, has_finished=True), [data])
    assert scene.run.weights is data
    assert scene.run.held_bytes == 1000


def test_weights_that_the_master_cannot_hold_end_the_run() -> None:
    scene = Scene("a", "b")
    scene.found()
    assert not scene.run.wants_weights(scene.nodes.by_name["a"], 7, 1001, room=1000)
    assert scene.run.failure is None  # there is no such process
    with refused(BadFrame):
        scene.run.wants_weights(scene.nodes.by_name["a"], 1, 1001, room=1000)
    assert scene.run.failure is None  # others may have taken the room for a while
    scene.now += 121
    assert not scene.run.wants_weights(scene.nodes.by_name["a"], 1, 1001, room=1000)
    assert isinstance(scene.run.failure, DoesNotFit)
    scene.end("a", 1, has_finished=True)
    scene.run.tick()
    assert not scene.run.is_complete


def test_run_waits_for_a_node_that_is_still_profiling() -> None:
    scene = Scene("a", "b")
    scene.nodes.by_name["b"].profile = None
    scene.ready("a")
    scene.run.tick()
    assert not scene.places()
    scene.nodes.by_name["b"].profile = PROFILE
    scene.ready("b")
    scene.run.tick()
    assert len(scene.places()) == 2


def test_run_waits_for_a_profiling_node_if_no_other_can_take_part() -> None:
    scene = Scene("a", "b")
    scene.nodes.by_name["b"].profile = None
    scene.run.not_ready(scene.nodes.by_name["a"], "it has no PyTorch")
    scene.run.tick()
    assert scene.run.failure is None
    scene.nodes.by_name["b"].profile = PROFILE
    scene.ready("b")
    scene.run.tick()
    assert [node.name for node in scene.places()[1].nodes] == ["b"]


def test_run_does_not_wait_for_a_node_that_measures_for_too_long() -> None:
    scene = Scene("a", "b")
    scene.nodes.by_name["b"].profile, scene.nodes.by_name["b"].joined_at = None, scene.now
    scene.now += MEASURING_S - 1.0
    scene.ready("a")
    scene.run.tick()
    assert not scene.places()
    scene.now += 2.0
    scene.run.tick()
    assert [node.name for node in scene.places()[1].nodes] == ["a"]


def test_run_whose_only_node_measures_for_too_long_ends() -> None:
    scene = Scene("a", "b")
    scene.run.not_ready(scene.nodes.by_name["a"], "it has no PyTorch")
    scene.nodes.by_name["b"].profile, scene.nodes.by_name["b"].joined_at = None, scene.now
    scene.now += MEASURING_S
    scene.run.tick()
    assert scene.run.failure is None
    scene.now += 1.0
    scene.run.tick()
    assert isinstance(scene.run.failure, NoUsableNode)
    assert "node b has not measured its device" in str(scene.run.failure)


def test_run_whose_nodes_are_away_does_not_end_by_one_that_measures_for_too_long() -> None:
    scene = Scene("b")
    scene.nodes.by_name["b"].profile, scene.nodes.by_name["b"].joined_at = None, scene.now
    scene.now += MEASURING_S + 1.0
    scene.run.tick()
    assert scene.run.failure is None
    scene.come("a")
    scene.ready("a")
    scene.run.tick()
    assert [node.name for node in scene.places()[1].nodes] == ["a"]


def test_run_starts_without_a_node_that_is_not_ready_in_time() -> None:
    scene = Scene("a", "b")
    scene.ready("a")
    scene.now += PATIENCE + 1
    scene.run.tick()
    assert list(scene.places()) == [1]


def test_run_skips_unusable_nodes_and_fails_without_any_other() -> None:
    scene = Scene("a", "b")
    scene.run.not_ready(scene.nodes.by_name["a"], "it has no PyTorch")
    scene.ready("b")
    scene.run.tick()
    assert [node.name for node in scene.places()[1].nodes] == ["b"]
    other = Scene("a")
    other.run.not_ready(other.nodes.by_name["a"], "it has no PyTorch")
    other.run.tick()
    assert str(other.run.failure) == ("no node can take part in the run: node a cannot take part: it has no PyTorch")


def test_dead_process_is_replaced_and_the_others_continue() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.end("a", 1, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    last = scene.generations(2)[-1]
    assert (last.nodes, last.reason) == (["b"], "a was killed by signal 9 (SIGKILL)")
    assert scene.places()[3].is_late
    assert [node.name for node in scene.places()[3].nodes] == ["a"]
    scene.run.tick()
    assert scene.run.failure is None


def test_closed_connection_is_a_loss_unless_the_node_reconnects_soon() -> None:
    scene = Scene("a", "b")
    scene.found()
    node = scene.nodes.by_name["a"]
    assert node.peer is not None
    scene.nodes.disconnect(node.peer)
    scene.run.tick()
    scene.now += 1.0
    scene.run.tick()
    scene.nodes.connect(node, 77)
    scene.ready("a", process=1)
    scene.now += 1.0
    scene.run.tick()
    assert len(scene.generations(2)) == 1
    scene.nodes.disconnect(77)
    scene.run.tick()
    scene.now += 2.0
    scene.run.tick()
    assert scene.generations(2)[-1].nodes == ["b"]


def test_loss_of_an_excluded_node_names_it_in_a_sentence() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.lose(scene.nodes.by_name["a"], "it has been silent for 6 s")
    scene.run.tick()
    assert scene.generations(2)[-1].reason == "a has been silent for 6 s"


def test_silent_node_with_the_only_copy_of_the_state_is_not_lost() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.end("b", 2, has_finished=False, kind=kind_of(NodeLost("")), is_own=False, sentence="", ending="")
    scene.run.tick()
    assert scene.generations(1)[-1].nodes == ["a"]
    active = ActiveRankRun.__new__(ActiveRankRun)  # the rest of it needs a master
    active.training = scene.run
    active.follow(EVENTS["exclude"], "it has been silent for 6 s", scene.nodes.by_name["a"], is_lost=True)
    scene.nodes.disconnect(scene.nodes.by_name["a"].peer or 0)
    for _ in range(5):
        scene.now += 1.0
        scene.run.tick()
    assert scene.run.failure is None
    assert scene.generations(1)[-1].nodes == ["a"]
    scene.run.lose(scene.nodes.by_name["a"], "it left")
    scene.run.tick()
    assert "begins again" in [event.kind for event in scene.run.news.events if isinstance(event, Event)]


def test_node_that_reconnects_without_its_process_gets_a_new_one() -> None:
    scene = Scene("a", "b")
    scene.found()
    node = scene.nodes.by_name["a"]
    assert node.peer is not None
    scene.nodes.disconnect(node.peer)
    scene.nodes.connect(node, 77)
    scene.ready("a", process=0)
    scene.run.tick()
    assert scene.generations(2)[-1].reason == "a reconnected after its process had died"
    assert scene.places()[3].is_late


def test_node_that_joins_during_a_run_gets_a_process() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.come("c")
    scene.ready("c")
    scene.run.tick()
    assert scene.places()[3].is_late
    scene.say("c", 3, Hello(node="c"))
    assert scene.nodes.by_name["c"].doing == "runs process 3"


def lose_each_time(scene: Scene, name: str, beginnings: int) -> None:
    """The process on a node is killed before the first step, in so many beginnings of a run of two nodes."""
    for beginning in range(beginnings):
        scene.ready("a", "b")
        scene.run.tick()
        scene.end(name, 1 + 2 * beginning, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
        scene.run.tick()
        scene.now += 2.0
        scene.run.tick()


def test_node_lost_three_times_before_the_first_step_is_left_out() -> None:
    scene = Scene("a", "b")
    lose_each_time(scene, "a", 3)
    assert scene.run.failure is None
    scene.run.tick()
    last = max(scene.places())
    assert [node.name for node in scene.places()[last].nodes] == ["b"]
    told = [event for event in scene.run.news.events if isinstance(event, Event)]
    assert [event.kind for event in told] == ["begins again", "begins again", "left out", "begins again"]
    assert told[2].nodes == ("a",)
    scene.end("b", last, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    scene.run.tick()
    scene.now += 2.0
    scene.run.tick()
    assert isinstance(scene.run.failure, NodeLost)
    assert scene.run.failure.nodes == ("b",)


def test_late_node_trains_without_the_node_lost_three_times() -> None:
    scene = Scene("a")
    for process in (1, 2, 3):
        scene.ready("a")
        scene.run.tick()
        if process == 3:
            scene.come("b")
        scene.end("a", process, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
        scene.run.tick()
    assert scene.run.failure is None
    scene.ready("b")
    scene.run.tick()
    assert [node.name for node in scene.places()[4].nodes] == ["b"]


def test_loss_that_leaves_too_few_nodes_ends_the_run() -> None:
    scene = Scene("a", "b")
    lose_each_time(scene, "a", 3)
    scene.run.tick()
    last = max(scene.places())
    scene.end("b", last, has_finished=False, kind=REFUSED, is_own=True, sentence="too few for two shares", ending="x")
    for _ in range(3):
        scene.run.tick()
        scene.now += 1.0
    assert isinstance(scene.run.failure, NodeLost)
    assert scene.run.failure.nodes == ("a",)


def test_error_of_the_task_code_becomes_the_error_of_the_run() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.end("b", 2, has_finished=False, kind=DIVERGED, is_own=True, sentence="the loss of node b is nan", ending="x")
    scene.run.tick()
    scene.now += 2.0
    scene.run.tick()
    assert scene.run.failure is not None
    assert isinstance(scene.run.failure, NonFiniteLoss)
    assert (scene.run.failure.node, scene.run.failure.step) == ("b", 9)


def test_error_of_one_node_among_several_names_it() -> None:
    scene = Scene("a", "b")
    scene.found()
    sentence = "FileNotFoundError: x.pt"
    scene.end("b", 2, has_finished=False, kind=DIVERGED, is_own=True, sentence=sentence, ending="x")
    scene.run.tick()
    scene.now += 2.0
    scene.run.tick()
    assert str(scene.run.failure) == f"node b failed: {sentence}"


def test_lost_device_explains_lost_connections() -> None:
    named, broken = DeviceLost("node b lost its device", ["b"]), NodeLost("node a lost its connection")
    ranks: Any = [SimpleNamespace(node=one, failure=None, ending="was killed") for one in "abc"]
    ranks[0].failure, ranks[1].failure = RemoteFailure(False, broken), RemoteFailure(False, named)
    assert why_ended(ranks, None, 3) is named


def test_error_of_all_nodes_names_none() -> None:
    scene = Scene("a", "b")
    scene.found()
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, has_finished=False, kind=DIVERGED, is_own=True, sentence="a bug", ending="x")
    scene.run.tick()
    scene.now += 2.0
    scene.run.tick()
    assert str(scene.run.failure) == "a bug"


def lose_before_the_first_step() -> Scene:
    """A run of two nodes, of which one has died before the first step, with its process and its connection."""
    scene = Scene("a", "b")
    scene.ready("a", "b")
    scene.run.tick()
    lost = scene.nodes.by_name["b"]
    scene.nodes.disconnect(lost.peer or 0)
    scene.nodes.decide("disconnected", lost, scene.now)
    scene.end("a", 1, has_finished=False, kind=kind_of(NodeLost("")), is_own=False, sentence="lost b", ending="x")
    for _ in range(3):
        scene.now += 1.0
        scene.run.tick()
    assert sorted(scene.places()) == [1, 2]
    return scene


def test_restart_before_the_first_step_waits_for_the_lost_node() -> None:
    scene = lose_before_the_first_step()
    scene.come("b")
    scene.ready("b")
    scene.run.tick()
    assert [node.name for node in scene.places()[3].nodes] == ["a", "b"]


def test_node_joins_a_one_node_run_at_the_next_checkpoint() -> None:
    scene = lose_before_the_first_step()
    scene.now += PATIENCE + 1
    scene.run.tick()
    assert [node.name for node in scene.places()[3].nodes] == ["a"]
    step = encode_events([Step(step=4, epoch=0, samples=1, loss=0.5, seconds=0.1, nodes=())])
    scene.run.shown(scene.nodes.by_name["a"], 3, memoryview(step))
    scene.run.checkpoints.last = Saved(step=3, digest="ab" * 32)
    scene.come("b")
    scene.ready("b")
    for _ in range(3):
        scene.run.tick()
    assert sorted(scene.places()) == [1, 2, 3]
    scene.run.checkpoints.last = Saved(step=7, digest="cd" * 32)
    scene.run.tick()
    assert (3, True) in [
        (header.process, header.at_once) for _, header, _ in scene.sent if isinstance(header, StopRank)
    ]
    asked = [decode_rank_job(buffers[0]) for _, header, buffers in scene.sent if isinstance(header, PrepareRank)]
    assert asked[-1].checkpoint == "cd" * 32
    scene.ready("a", "b")
    scene.run.tick()
    assert [node.name for node in scene.places()[4].nodes] == ["a", "b"]


def test_unreachable_node_retries_during_a_one_node_run() -> None:
    scene = Scene("a", "b")
    scene.ready("a", "b")
    scene.run.tick()
    sentence = "node b does not reach node a"
    scene.end("b", 2, has_finished=False, kind=kind_of(LineCut(sentence, ("b",))), sentence=sentence, ending="x")
    scene.end("a", 1, has_finished=False, ending="ended with code 4")
    scene.now += 2.0
    for _ in range(2):
        scene.run.tick()
    assert scene.run.failure is None
    last = max(scene.places())
    assert [node.name for node in scene.places()[last].nodes] == ["a"]
    step = encode_events([Step(step=4, epoch=0, samples=1, loss=0.5, seconds=0.1, nodes=())])
    scene.run.shown(scene.nodes.by_name["a"], last, memoryview(step))
    scene.run.checkpoints.last = Saved(step=3, digest="ab" * 32)
    scene.now += LINE_RETRY_S - 3.0
    scene.run.tick()
    assert scene.nodes.by_name["b"].left_out_of == {"r"}
    scene.now += 3.0
    for _ in range(2):
        scene.run.tick()
    scene.run.checkpoints.last = Saved(step=7, digest="cd" * 32)
    scene.run.tick()
    scene.ready("a", "b")
    scene.run.tick()
    assert [node.name for node in scene.places()[max(scene.places())].nodes] == ["a", "b"]


def test_node_lost_three_times_retries_during_a_one_node_run() -> None:
    scene = Scene("a", "b")
    lose_each_time(scene, "a", 3)
    scene.run.tick()
    step = encode_events([Step(step=4, epoch=0, samples=1, loss=0.5, seconds=0.1, nodes=())])
    scene.run.shown(scene.nodes.by_name["b"], max(scene.places()), memoryview(step))
    scene.run.tick()
    assert scene.nodes.by_name["a"].left_out_of == {"r"}
    scene.now += LINE_RETRY_S
    scene.run.tick()
    assert scene.nodes.by_name["a"].left_out_of == set()


def test_unneeded_node_is_asked_again_after_a_loss() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.come("c")
    scene.ready("c")
    scene.run.tick()
    assert scene.places()[3].is_late
    scene.end(
        "c",
        3,
        has_finished=False,
        kind=NOT_NEEDED,
        is_own=True,
        sentence="a step would not be shorter",
        ending="x",
    )
    for _ in range(3):
        scene.now += 20.0
        scene.run.tick()
    assert scene.run.failure is None
    assert list(scene.places()) == [1, 2, 3]
    told = [event for event in scene.run.news.events if isinstance(event, Event) and event.kind == "left out"]
    assert [(one.message, one.nodes) for one in told] == [
        ("node c cannot take part: a step would not be shorter", ("c",))
    ]
    scene.end("a", 1, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    scene.run.tick()
    assert [scene.generations(2)[-1].lost, sorted(scene.places())] == [("a",), [1, 2, 3, 4]]
    scene.say("b", 2, Beat(count=1, step=5, holds=2))  # what c is compared with is of now
    for _ in range(2):
        scene.run.tick()
    assert [scene.generations(2)[-1].lost, sorted(scene.places())] == [("a",), [1, 2, 3, 4, 5]]


def test_only_current_ranks_may_report_progress() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.end("a", 1, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    step = encode_events([Step(step=4, epoch=0, samples=1, loss=0.5, seconds=0.1, nodes=())])
    scene.run.shown(scene.nodes.by_name["a"], 3, memoryview(step))  # it has come, and takes no part yet
    assert scene.run.num_updates == 0
    scene.run.shown(scene.nodes.by_name["b"], 2, memoryview(step))
    assert scene.run.num_updates == 4
    scene.run.shown(scene.nodes.by_name["b"], 2, memoryview(encode_events([PLAN])))
    assert scene.run.news.so_far == [PLAN]


def test_stopping_a_run_stops_its_ranks_and_waits_for_them() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.stop(Interrupted("stopped as asked"))
    assert [header.at_once for _, header, _ in scene.sent if isinstance(header, StopRank)] == [False, False]
    scene.run.tick()
    assert scene.run.failure is None
    for name, process in (("a", 1), ("b", 2)):
        scene.end(
            name,
            process,
            has_finished=False,
            kind=STOPPED,
            is_own=True,
            sentence="stopped after step 3",
        )
    scene.run.tick()
    assert isinstance(scene.run.failure, Interrupted)


def test_stopped_run_waits_for_validation_then_for_its_patience() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.stop(Interrupted("stopped as asked"))
    for _ in range(20):
        scene.now += 1.0
        for name, process in (("a", 1), ("b", 2)):
            scene.say(name, process, Beat(count=int(scene.now) + 1, step=5, holds=2))
        scene.run.tick()
        assert scene.run.failure is None
    stopped = {"has_finished": False, "kind": STOPPED, "is_own": True, "sentence": "stopped after step 3"}
    scene.end("a", 1, **stopped)
    scene.run.tick()
    assert scene.run.failure is None
    scene.now += scene.nodes.patience + 1.0
    scene.run.tick()
    assert isinstance(scene.run.failure, Interrupted)


def test_stopped_run_waits_for_validation_though_a_node_that_was_left_out_has_ended() -> None:
    scene = Scene("a", "b")
    scene.ready("a", "b")
    scene.run.tick()  # without a generation, as one node trains
    scene.end("b", 2, has_finished=True)
    scene.run.stop(Interrupted("stopped as asked"))
    for _ in range(3):
        scene.run.tick()
        scene.now += scene.nodes.patience
        assert scene.run.failure is None
    scene.end("a", 1, has_finished=False, kind=STOPPED, is_own=True, sentence="stopped after step 3")
    scene.run.tick()
    assert isinstance(scene.run.failure, Interrupted)


def test_run_stops_at_once_only_on_request() -> None:
    scene = Scene("a", "b")
    scene.found()
    for _ in range(2):  # a command that has reconnected repeats its request
        scene.run.stop(Interrupted("stopped as asked"))
    scene.now += 0.1
    scene.run.tick()
    assert scene.run.failure is None
    scene.run.stop(Interrupted("stopped as asked"), at_once=True)
    scene.now += 0.1
    scene.run.tick()
    assert isinstance(scene.run.failure, Interrupted)


def test_ranks_find_each_other_through_values_at_the_master() -> None:
    scene = Scene("a", "b")
    scene.ready("a", "b")
    scene.run.tick()
    scene.say("a", 1, AskValues(number=1, keys=("mesh/1",), waits=True))
    scene.say("b", 2, SetValue(number=1, key="mesh/1", value=b"10.0.0.1 99"))
    told = [(header.process, decode_to_rank(b[0])) for _, header, b in scene.sent if isinstance(header, RankTold)]
    assert [(process, getattr(one, "values", None)) for process, one in told] == [(2, ()), (1, (b"10.0.0.1 99",))]


@pytest.mark.parametrize("is_over", [False, True])
def test_run_is_complete_only_after_all_ranks_end_with_a_record(is_over: bool) -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.end("a", 1, has_finished=True, ending="ended with exit code 0")
    scene.run.tick()
    assert not scene.run.is_complete
    if is_over:
        scene.end("b", 2, has_finished=True, ending="ended with exit code 0")
    scene.now += 1.0
    scene.run.tick()
    assert scene.run.failure is None or str(scene.run.failure) == "the run ended without a record"
    assert (scene.run.failure is not None) == is_over


def test_restarted_master_resumes_from_its_announced_generation(tmp_path: Path) -> None:
    before = Scene("a", "b")
    before.found()
    before.say("b", 2, SetValue(number=9, key="plan", value=b"left for those who come later"))
    before.end("a", 1, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    number, started = before.generations(2)[-1].number, max(before.places())
    found = RankJournal(StateDir(tmp_path), "r", print).load()
    assert found is not None
    after = Scene()
    after.run.resume(found)
    after.run.tick()
    for name, process in (("a", started), ("b", 2)):
        after.come(name)
        after.ready(name, process=process)
    after.say("b", 2, Beat(count=40, step=9, holds=1))
    after.say("b", 2, AskValues(number=10, keys=("plan",), waits=True))
    after.say("a", started, Hello(node="a"))
    assert after.places() == {}  # nobody is started anew
    after.now += 1.0
    after.run.tick()
    later = after.generations(2)
    assert all(one.number > number for one in later)
    answers = [decode_to_rank(b[0]) for _, header, b in after.sent if isinstance(header, RankTold)]
    assert [one.values for one in answers if isinstance(one, Values)] == [(b"left for those who come later",)]


def test_restarted_master_without_nodes_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    before = Scene("a")  # a run on one node has no generation, which would tell that it has trained
    before.ready("a")
    before.run.tick()
    before.journal.add(Saved(step=20, digest="ab" * 32))
    found = RankJournal(StateDir(tmp_path), "r", print).load()
    assert found is not None
    after = Scene()
    after.run.resume(found)
    for _ in range(40):
        after.now += 1.0
        after.run.tick()
    for name in ("a", "b"):
        after.come(name)
    prepared = [buffers[0] for _, header, buffers in after.sent if isinstance(header, PrepareRank)]
    assert [decode_rank_job(part).checkpoint for part in prepared] == ["ab" * 32] * 2
    assert after.run.failure is None


def restarted_before_the_first_generation(folder: Path) -> Scene:
    """A run whose master was killed when it had started two processes; the first one's node has come to the next."""
    before = Scene("a", "b")
    before.ready("a", "b")
    before.run.tick()
    found = RankJournal(StateDir(folder), "r", print).load()
    assert found is not None
    after = Scene()
    after.run.resume(found)
    after.run.tick()
    after.come("a")
    after.ready("a", process=1)
    after.say("a", 1, Hello(node="a", initial_nodes=("a", "b")))
    return after


def test_restarted_master_waits_beyond_the_patience_for_a_reconnect(tmp_path: Path) -> None:
    scene = restarted_before_the_first_generation(tmp_path)
    for _ in range(17):
        scene.now += 1.0  # it tries again after 10 s at most, for 8 s
        scene.run.tick()
    scene.come("b")
    scene.ready("b", process=2)
    scene.say("b", 2, Hello(node="b", initial_nodes=("a", "b")))
    scene.run.tick()
    assert scene.run.failure is None
    assert scene.places() == {}  # nobody is started anew
    assert scene.generations(1)[-1].nodes == ["a", "b"]


def test_restarted_master_restarts_a_run_without_an_absent_node(
    tmp_path: Path,
) -> None:
    scene = restarted_before_the_first_generation(tmp_path)
    for _ in range(30):
        scene.now += 1.0
        scene.run.tick()
    assert scene.run.failure is None
    assert "begins again" in [event.kind for event in scene.run.news.events if isinstance(event, Event)]
    assert [[node.name for node in place.nodes] for place in scene.places().values()] == [["a"]]


def test_restart_from_the_checkpoint_waits_for_all_lost_nodes() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    lost = {"has_finished": False, "ending": "was killed by signal 9 (SIGKILL)"}
    scene.say("a", 1, Beat(count=1, step=9, holds=1))
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, **lost)
    scene.run.tick()
    assert scene.run.failure is None
    told = [event.message for event in scene.run.news.events if isinstance(event, Event)]
    assert told[-1].startswith("from the checkpoint of step 7, with the nodes that are available:")
    prepared = [buffers[0] for _, header, buffers in scene.sent if isinstance(header, PrepareRank)]
    assert decode_rank_job(prepared[-1]).checkpoint == "ab" * 32
    before = len(scene.places())
    scene.ready("a")
    scene.run.tick()
    assert len(scene.places()) == before
    scene.ready("b")
    scene.run.tick()
    assert [place.is_late for place in scene.places().values()][before:] == [False, False]


def test_run_restarts_at_most_three_times_from_one_checkpoint() -> None:
    scene = Scene("a")
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    beginnings = 0
    while scene.run.failure is None and beginnings < 10:
        beginnings += 1
        scene.ready("a")
        scene.run.tick()
        process = max(scene.places())
        scene.say("a", process, Hello(node="a", initial_nodes=("a",)))
        scene.end("a", process, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
        scene.run.tick()
    assert isinstance(scene.run.failure, NodeLost)
    assert beginnings == 4  # once as it was submitted, since a step was made; three times from the checkpoint


def test_run_restarts_if_all_nodes_are_lost_before_the_first_step() -> None:
    scene = Scene("a", "b")
    scene.found()
    for name, process in (("a", 1), ("b", 2)):
        scene.say(name, process, Beat(count=1, step=1, holds=1))
        scene.end(name, process, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    scene.run.tick()
    assert scene.run.failure is None
    told = [event for event in scene.run.news.events if isinstance(event, Event)]
    assert told[-1].kind == "begins again"
    assert told[-1].message.startswith("before the first step")


def lose_after_a_step(scene: Scene, first: int, *, is_heard_of_first: bool) -> None:
    """The rank of node a is killed after a step of a run that no rank may leave, and then that of node b."""
    scene.ready("a", "b")
    scene.run.tick()
    step = encode_events([Step(step=9, epoch=0, samples=1, loss=0.5, seconds=0.1, nodes=())])
    scene.run.shown(scene.nodes.by_name["a"], first, memoryview(step))
    if is_heard_of_first:
        scene.end("a", first, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    said = "node b lost node a (rank 0): the connection was closed"
    scene.end("b", first + 1, has_finished=False, kind=kind_of(NodeLost("", ["a"])), sentence=said)
    for _ in range(3):
        scene.run.tick()
        scene.now += 1


@pytest.mark.parametrize("is_heard_of_first", [True, False])
@pytest.mark.parametrize(("saved", "words"), [(0, "from the first step:"), (7, "from the checkpoint of step 7")])
def test_run_restarts_from_the_checkpoint_or_the_first_step(saved: int, words: str, is_heard_of_first: bool) -> None:
    scene = Scene("a", "b")
    scene.run.checkpoints.last = Saved(step=saved, digest="ab" * 32)
    lose_after_a_step(scene, 1, is_heard_of_first=is_heard_of_first)
    assert scene.run.failure is None
    told = [event for event in scene.run.news.events if isinstance(event, Event)]
    assert told[-1].kind == "begins again"
    assert told[-1].message.startswith(words)
    assert scene.run.job.checkpoint == ("ab" * 32 if saved else "")


def test_run_without_a_checkpoint_starts_three_times_at_most() -> None:
    scene = Scene("a", "b")
    for beginning in range(3):
        assert scene.run.failure is None
        lose_after_a_step(scene, 1 + 2 * beginning, is_heard_of_first=True)
    assert isinstance(scene.run.failure, NodeLost)


def test_another_node_restarts_when_the_only_working_one_is_lost() -> None:
    scene = Scene("a", "b")
    scene.ready("a", "b")
    scene.run.tick()
    scene.end("b", 2, has_finished=True, ending="ended")  # the plan has nothing for it
    step = encode_events([Step(step=9, epoch=0, samples=1, loss=0.5, seconds=0.1, nodes=())])
    scene.run.shown(scene.nodes.by_name["a"], 1, memoryview(step))
    scene.nodes.decide("disconnected", scene.nodes.by_name["a"], scene.now)
    scene.nodes.disconnect(scene.nodes.by_name["a"].peer or 0)
    for _ in range(10):
        scene.now += 1.0
        scene.run.tick()
    assert scene.run.failure is None
    last = max(scene.places())
    assert (last, [node.name for node in scene.places()[last].nodes]) == (3, ["b"])


def test_run_waits_for_all_nodes_if_fewer_cannot_use_the_checkpoint() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    scene.say("a", 1, Beat(count=1, step=9, holds=1))
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    scene.run.tick()
    scene.ready("a")
    scene.now += PATIENCE + 1
    scene.run.tick()
    alone = max(scene.places())
    scene.end("a", alone, has_finished=False, kind=REFUSED, is_own=True, sentence="too few for two stages")
    for _ in range(3):
        scene.run.tick()
        scene.now += PATIENCE
    assert scene.run.failure is None
    assert max(scene.places()) == alone
    told = [event.message for event in scene.run.news.events if isinstance(event, Event)]
    assert told[-1] == "when 2 nodes are available, since 1 cannot continue: too few for two stages"
    scene.ready("b")
    scene.run.tick()
    assert {place.rank for number, place in scene.places().items() if number > alone} == {0, 1}
    for name, process in (("a", alone + 1), ("b", alone + 2)):
        scene.end(
            name,
            process,
            has_finished=False,
            kind=REFUSED,
            is_own=True,
            sentence="too few for two stages",
        )
    scene.run.tick()
    assert str(scene.run.failure) == "too few for two stages"


def test_node_that_cannot_start_its_process_is_left_out_of_a_restart() -> None:
    scene = Scene("a", "b")
    scene.ready("a", "b")
    scene.run.tick()
    scene.run.not_ready(scene.nodes.by_name["a"], "No space left on device")
    for seconds in (0.0, 2.0, 2.0):
        scene.now += seconds
        scene.run.tick()
    assert scene.run.failure is None
    last = max(scene.places())
    assert (last, [node.name for node in scene.places()[last].nodes]) == (3, ["b"])


def test_node_that_reconnects_is_reported_as_back() -> None:
    scene = Scene("a", "b")
    scene.found()
    active = ActiveRankRun.__new__(ActiveRankRun)  # the rest of it needs a master
    active.training = scene.run
    for kind in (EVENTS["expect"], EVENTS["resume"]):
        active.follow(kind, "its connection broke", scene.nodes.by_name["a"], is_lost=False)
    assert [event.kind for event in scene.run.news.events if isinstance(event, Event)][-2:] == ["away", "back"]


def test_base_stays_until_the_journal_names_the_next_one(tmp_path: Path) -> None:
    scene = Scene("a", "b")
    digests = [letter * 64 for letter in "de"]
    (tmp_path / "blobs").mkdir()
    for step, digest in enumerate(digests, start=1):
        scene.ready("a", "b")
        scene.run.tick()
        (tmp_path / "blobs" / digest).touch()
        scene.run.checkpoints.last = Saved(step=step, digest=digest)
        for name, process in (("a", 2 * step - 1), ("b", 2 * step)):
            scene.say(name, process, Hello(node=name, initial_nodes=("a", "b")))
            scene.end(name, process, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
        scene.run.tick()
        state = RankJournal(StateDir(tmp_path), "r", print).load()
        assert state is not None
        base = state.begun.job.checkpoint
        assert not base or (tmp_path / "blobs" / base).exists()
    assert (base, scene.run.job.checkpoint) == tuple(digests)
    scene.ready("a", "b")
    scene.run.tick()
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == digests[1:]


def test_ranks_stop_for_other_nodes_that_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.pause(("c",))
    stopped = [header.process for _, header, _ in scene.sent if isinstance(header, StopRank)]
    assert (stopped, scene.run.has_paused) == ([1, 2], False)
    scene.run.saved(scene.nodes.by_name["a"], RankSaved(run="r", process=1, step=7, digest="ab" * 32))
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, has_finished=False, kind=STOPPED, is_own=True, sentence="stopped")
        scene.run.tick()
    assert not scene.run.has_paused  # the checkpoint has not come yet
    scene.run.checkpoints.disconnected(scene.nodes.by_name["a"])
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    scene.run.tick()
    assert scene.run.has_paused
    scene.run.go_on()
    assert (scene.run.job.nodes, scene.run.job.checkpoint) == (("c",), "ab" * 32)
    scene.run.tick()
    assert (scene.run.failure, scene.run.is_complete) == (None, False)  # it waits for the node
    scene.come("c")
    scene.ready("a", "c")
    scene.run.tick()
    assert [node.name for node in scene.places()[3].nodes] == ["c"]
    state = RankJournal(StateDir(tmp_path), "r", print).load()
    assert state is not None
    assert (state.begun.job.nodes, state.roster.next) == (("c",), 4)


def test_paused_run_is_resumed_as_such_by_the_next_master(tmp_path: Path) -> None:
    scene = Scene("a", "b")
    scene.found()
    epoch = Epoch(step=4, epoch=0, loss=1.0)
    scene.run.shown(scene.nodes.by_name["a"], 1, memoryview(encode_events([epoch, epoch])))
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    scene.journal.add(scene.run.checkpoints.last)
    scene.run.pause(())
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, has_finished=False, kind=STOPPED, is_own=True, sentence="stopped")
    scene.run.tick()
    scene.run.go_on()
    assert scene.run.job.rests
    scene.journal.close()
    later = Scene()
    state = later.journal.load()
    assert state is not None
    later.run.job = state.begun.job
    later.run.resume(state)
    assert later.run.news.so_far == [epoch]
    assert later.run.checkpoints.last.step == 7
    later.run.pause(("b",))
    later.run.go_on()
    later.come("b")
    later.ready("b")
    later.run.tick()
    assert list(later.places()) == [3]  # numbers of processes never come again
    assert later.run.job.checkpoint == "ab" * 32


def test_run_that_is_complete_when_it_should_stop_for_other_nodes_is_complete() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.pause(("c",))
    settings = {"task": "tiny", "seed": 0, "epochs": 1, "precision": "fp32"}
    record = History().record([], plan=PLAN, seconds=1.0, startup_seconds=0.0, **settings)
    scene.run.shown(scene.nodes.by_name["a"], 1, memoryview(encode_events([record])))
    done = RankEnded(run="r", process=1, has_finished=True)
    scene.run.ended(scene.nodes.by_name["a"], done, [memoryview(b"weights")])
    scene.end("b", 2, has_finished=True)
    scene.run.tick()
    assert scene.run.is_complete
    scene.run.news.forget_record()


def test_run_can_be_stopped_while_its_ranks_stop_for_other_nodes() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.pause(("c",))
    scene.run.stop(Interrupted("stopped as asked"))
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, has_finished=False, kind=STOPPED, is_own=True, sentence="stopped")
    scene.run.tick()
    assert isinstance(scene.run.failure, Interrupted)
    scene.run.pause(("c",))
    assert not scene.run.has_paused


def test_run_whose_nodes_are_gone_goes_on_with_those_assigned_to_it() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    scene.run.pause(("c",))
    for name, process in (("a", 1), ("b", 2)):
        scene.end(name, process, has_finished=False, ending="was killed by signal 9 (SIGKILL)")
    scene.run.tick()
    assert scene.run.has_paused


def test_failure_of_the_ranks_ends_a_run_that_should_stop_for_other_nodes() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.pause(())
    scene.end("a", 1, has_finished=False, kind=DIVERGED, is_own=True, sentence="loss is nan")
    scene.end("b", 2, has_finished=False, kind=STOPPED, is_own=True, sentence="stopped")
    scene.run.tick()
    assert isinstance(scene.run.failure, NonFiniteLoss)


def test_ranks_that_stop_for_other_nodes_do_so_under_the_next_master() -> None:
    scene = Scene("a", "b")
    scene.found()
    scene.run.checkpoints.last = Saved(step=7, digest="ab" * 32)
    scene.journal.add(scene.run.checkpoints.last)
    scene.run.pause(("c",))
    assert set(scene.run.claimed_nodes or ()) == set()  # a run on all nodes has no others
    scene.journal.close()
    later = Scene("a", "b")
    state = later.journal.load()
    assert state is not None
    assert state.assigned == ("c",)
    later.run.job = state.begun.job
    later.run.resume(state)
    for name, process in (("a", 1), ("b", 2)):
        later.ready(name, process=process)
        later.end(name, process, has_finished=False, kind=STOPPED, is_own=True, sentence="stopped")
    assert {header.process for _, header, _ in later.sent if isinstance(header, StopRank)} == {1, 2}
    later.run.tick()
    assert later.run.failure is None
    assert later.run.has_paused
    later.run.go_on()
    assert later.run.job.nodes == ("c",)
    assert later.run.claimed_nodes == ("c",)
    later.run.pause(("d",))
    assert set(later.run.claimed_nodes or ()) == {"c", "d"}
