"""Who is silent: a table, and heartbeats on a real store."""

import threading
import time

import pytest

from evener.comm.signed_store import SignedStore
from evener.launch.rank_heartbeat import RankHeartbeat, read_beat, read_ending
from evener.launch.store import LEAST_START_SECONDS
from evener.records.errors import NodeLost
from support.refusals import refused
from support.stores import memory_store


def test_heartbeat_reads_back_and_starts_at_zero() -> None:
    store = memory_store()
    assert read_beat(store, 1) == (0, 0)
    store.set("beat/1", "[12,345]")
    assert read_beat(store, 1) == (12, 345)


@pytest.mark.parametrize("value", [b"", b"1:2", b"[1,2,3]", b"[-1,2]", b'["x",2]', b"\xff", b"null", b"[1e999,1]"])
def test_malformed_heartbeat_raises_node_lost(value: bytes) -> None:
    store, lost = memory_store(), list[NodeLost]()
    store.set("beat/1", value)
    with refused(NodeLost):
        read_beat(store, 1)
    heartbeat = RankHeartbeat(store, rank=0, nodes=["a", "b"], patience=60, on_lost=lost.append)
    heartbeat.start()
    heartbeat.join(timeout=30)
    assert [type(one) for one in lost] == [NodeLost]
    store.set("left/1", value)
    if value != b"null":  # a rank that has done its work
        with refused(NodeLost):
            read_ending(store, 1)


@pytest.mark.parametrize(
    ("last", "now", "silent"),
    [
        ((10.0, 10.0), 11.0, None),
        ((10.0, 4.9), 10.0, 2),
        ((10.0, 5.0), 10.0, None),
        ((1.0, 2.0), 10.0, 1),
    ],
)
def test_rank_whose_count_stops_for_the_patience_is_silent(
    last: tuple[float, ...], now: float, silent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory_store()
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    heartbeat = RankHeartbeat(store, rank=0, nodes=["a", "b", "c"], patience=5.0, on_lost=print)
    for seconds, rank in sorted(zip(last, (1, 2), strict=True)):
        store.set(f"beat/{rank}", "[1,3]")
        heartbeat._find_lost(seconds)
    lost = heartbeat._find_lost(now)
    assert (lost is None) == (silent is None)
    assert lost is None or f"(rank {silent}) has been silent for 5 s, at step 3" in str(lost)
    assert lost is None or lost.nodes == (heartbeat._nodes[silent or 0],)


def test_time_in_which_this_rank_was_stopped_is_no_silence_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = memory_store(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heartbeat = RankHeartbeat(store, rank=0, nodes=["a", "b"], patience=5.0, on_lost=print)
    store.set("beat/1", "[1,3]")
    assert heartbeat._beat(1) is None
    now = 600.0
    assert heartbeat._beat(2) is None
    for _ in range(4):
        now += 1.25
        lost = heartbeat._beat(3)
    assert lost is not None
    assert lost.nodes == ("b",)


def test_rank_without_a_first_heartbeat_has_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    heartbeat = RankHeartbeat(memory_store(), rank=0, nodes=["a", "b"], patience=5.0, on_lost=print)
    assert heartbeat._find_lost(LEAST_START_SECONDS - 1) is None
    assert heartbeat._find_lost(LEAST_START_SECONDS + 1) is not None


def test_rank_without_heartbeats_is_named_with_node_rank_and_step() -> None:
    store, lost = memory_store(), list[NodeLost]()
    heartbeat = RankHeartbeat(store, rank=0, nodes=["a", "b"], patience=2.0, on_lost=lost.append)
    heartbeat.start()
    for count in range(1, 9):
        store.set("beat/1", f"[{count},7]")
        time.sleep(0.1)
    assert not lost
    heartbeat.join(timeout=20)
    assert [str(one) for one in lost] == ["node b (rank 1) has been silent for 2 s, at step 7; node a waited for it"]
    assert lost[0].nodes == ("b",)
    assert read_beat(store, 1) == (8, 7)
    assert read_beat(store, 0)[1] == 0


def test_reported_failure_reaches_the_others_at_once() -> None:
    store, lost = memory_store(), list[NodeLost]()
    heartbeat = RankHeartbeat(store, rank=0, nodes=["a", "b"], patience=60, on_lost=lost.append)
    RankHeartbeat(store, rank=1, nodes=["a", "b"], patience=60, on_lost=print).report_failure(
        "node b ran out of memory"
    )
    heartbeat.start()
    heartbeat.join(timeout=5)
    assert [str(one) for one in lost] == ["node b ran out of memory"]


def test_stopped_heartbeat_reports_nothing() -> None:
    lost = list[NodeLost]()
    heartbeat = RankHeartbeat(memory_store(), rank=0, nodes=["a", "b"], patience=0.2, on_lost=lost.append)
    heartbeat.start()
    heartbeat.stop()
    time.sleep(0.5)
    assert all(thread.name != "evener-heartbeat" for thread in threading.enumerate())
    assert not lost


@pytest.mark.parametrize("word", ["left", "heard"])
def test_store_host_stops_after_the_ranks_that_need_it(word: str) -> None:
    store, ended = memory_store(), threading.Event()
    keeper = RankHeartbeat(store, rank=0, nodes=["a", "b", "c"], patience=60.0, on_lost=print, keeps_store=True)
    store.set("left/2", "1")

    def stop() -> None:
        keeper.stop()
        ended.set()

    ending = threading.Thread(target=stop, daemon=True)
    ending.start()
    assert not ended.wait(0.3)
    store.set(f"{word}/1", "1")
    assert ended.wait(30)
    ending.join()


def test_store_host_does_not_wait_for_silent_ranks() -> None:
    keeper = RankHeartbeat(memory_store(), rank=0, nodes=["a", "b"], patience=0.2, on_lost=print, keeps_store=True)
    keeper.stop()


def test_rank_acknowledges_a_failure() -> None:
    store, lost = memory_store(), list[NodeLost]()
    heartbeat = RankHeartbeat(store, rank=1, nodes=["a", "b"], patience=2.0, on_lost=lost.append)
    store.set("failure", "node a (rank 0) failed: why")
    heartbeat.start()
    heartbeat.join(timeout=10)
    assert [str(one) for one in lost] == ["node a (rank 0) failed: why"]
    assert store.check(["heard/1"])


class CutStore(SignedStore):
    """A store whose line is cut at some time: calls do not return any more."""

    def __init__(self) -> None:
        whole = memory_store()
        super().__init__(whole.inner, whole.secret)
        self.is_cut, self._is_over = threading.Event(), threading.Event()

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        if self.is_cut.is_set():
            self._is_over.wait(60)
        super().set(key, value)

    def release(self) -> None:
        """Let calls return."""
        self._is_over.set()


@pytest.mark.parametrize("ends", [False, True], ids=["amid the run", "at its end"])
def test_rank_cut_off_from_the_store_ends_itself(ends: bool) -> None:
    store, lost, ended = CutStore(), list[NodeLost](), threading.Event()

    def end(error: NodeLost) -> None:
        lost.append(error)
        ended.set()

    heartbeat = RankHeartbeat(store, rank=0, nodes=["a"], patience=0.5, on_lost=end)
    heartbeat.start()
    time.sleep(1.0)
    assert lost == []
    store.is_cut.set()
    stopping = threading.Thread(target=heartbeat.stop, daemon=True)
    if ends:
        stopping.start()
    assert ended.wait(10)
    store.release()
    if not ends:
        stopping.start()
    stopping.join()
    heartbeat.join(10)
    assert len(lost) == 1


def test_store_host_lets_others_read_the_failure_before_it_ends() -> None:
    store, ended = memory_store(), threading.Event()
    nodes = ["a", "b"]
    keeper = RankHeartbeat(store, rank=0, nodes=nodes, patience=60.0, on_lost=lambda _: ended.set(), keeps_store=True)
    other = RankHeartbeat(store, rank=1, nodes=nodes, patience=60.0, on_lost=print)
    other.report_failure("node b failed: x.pt")
    keeper.start()
    assert not ended.wait(1.2)
    other.start()
    assert ended.wait(10)
    other.join(timeout=10)
