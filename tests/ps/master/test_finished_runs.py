"""Results of finished runs are in memory once, however many commands ask for them, and within a limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.ps.master.finished_runs import FinishedRuns
from evener.ps.protocol.messages import RunFinished, RunRejected
from evener.ps.protocol.run_result import RunResult, save_result
from evener.wire.errors import BadFrame
from evener.wire.frame import as_bytes

SIZE = 1000


class Desk:
    """Finished runs, and commands that do not take what they are sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queued: list[tuple[int | None, Any, list[memoryview]]] = []
        self.finished = FinishedRuns(folder, self.send)

    def send(self, peer: int | None, header: Any, buffers: Sequence[Any] = ()) -> None:
        self.queued.append((peer, header, [as_bytes(buffer) for buffer in buffers]))

    def keep(self, run: str, weights: bytes = bytes(SIZE), record: bytes = b"{}") -> None:
        (self.folder / run).mkdir()
        save_result(self.folder / run, RunResult(None, "", record, weights))

    def tick(self, room: int = 10 * SIZE) -> None:
        """Let everything be read that may be."""
        self.finished.tick(lambda: room - self.finished.num_bytes)
        until = time.monotonic() + 10
        while self.finished._reading is not None:
            assert time.monotonic() < until
            self.finished.tick(lambda: room - self.finished.num_bytes)

    def told(self) -> list[tuple[int | None, str, type[Any]]]:
        return [(peer, header.run, type(header)) for peer, header, _ in self.queued]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    one = Desk(tmp_path)
    yield one
    one.finished.close()


def test_result_is_in_memory_once_until_the_last_command_has_taken_it(desk: Desk) -> None:
    desk.keep("a")
    for peer in range(20):
        desk.finished.ask(peer, "a")
    assert desk.queued == []  # a thread reads it
    desk.tick()
    desk.finished.ask(20, "a")
    assert desk.told() == [(peer, "a", RunFinished) for peer in range(21)]
    assert {(bytes(record), bytes(weights)) for _, _, (record, weights) in desk.queued} == {(b"{}", bytes(SIZE))}
    assert len({id(weights.obj) for _, _, (_, weights) in desk.queued}) == 1
    assert desk.finished.num_bytes == SIZE + 2
    del desk.queued[1:]
    gc.collect()
    assert desk.finished.num_bytes == SIZE + 2
    desk.queued.clear()
    gc.collect()
    assert desk.finished.num_bytes == 0


def test_results_wait_for_memory(desk: Desk) -> None:
    for run in "abc":
        desk.keep(run)
        desk.finished.ask(1, run)
    desk.tick(room=SIZE + 100)
    assert desk.told() == [(1, "a", RunFinished)]
    desk.tick(room=100)
    assert desk.told() == [(1, "a", RunFinished)]
    assert desk.finished.is_awaited_by(1)
    desk.queued.clear()
    gc.collect()
    desk.finished.disconnected(2)
    desk.tick(room=SIZE + 100)
    assert desk.told() == [(1, "b", RunFinished)]
    desk.finished.disconnected(1)
    assert not desk.finished.is_awaited_by(1)


def test_result_that_never_fits_and_a_missing_one_are_rejected(desk: Desk) -> None:
    desk.keep("a")
    desk.finished.ask(1, "a")
    desk.finished.ask(1, "missing")
    desk.tick(room=SIZE)
    assert desk.told() == [(1, "a", RunRejected), (1, "missing", RunRejected)]


@pytest.mark.parametrize(("record", "weights"), [(b"{}", b""), (b"", b"w"), (b"", b"")])
def test_result_without_weights_or_record_is_sent(desk: Desk, record: bytes, weights: bytes) -> None:
    desk.keep("a", weights, record)
    desk.finished.ask(1, "a")
    desk.tick()
    desk.finished.ask(2, "a")
    desk.tick()
    assert [[bytes(part) for part in buffers] for _, _, buffers in desk.queued] == [[record, weights]] * 2


def test_results_that_a_command_waits_for_are_bounded(desk: Desk) -> None:
    for number in range(4):
        desk.finished.ask(1, f"{number}")
        desk.finished.ask(1, f"{number}")
    with pytest.raises(BadFrame):
        desk.finished.ask(1, "5")
    desk.finished.ask(2, "5")


def test_result_of_a_run_that_has_just_ended_counts_until_it_is_taken(desk: Desk) -> None:
    buffers = desk.finished.share(RunFinished(run="a"), b"{}", memoryview(bytes(SIZE)))
    assert [bytes(as_bytes(part)) for part in buffers] == [b"{}", bytes(SIZE)]
    desk.send(1, RunFinished(run="a"), buffers)
    del buffers
    assert desk.finished.num_bytes == SIZE + 2
    desk.finished.ask(2, "a")
    assert len(desk.queued) == 2
    desk.queued.clear()
    gc.collect()
    assert desk.finished.num_bytes == 0
