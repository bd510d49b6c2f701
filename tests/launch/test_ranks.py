"""A run that loses a process before its first step begins again, with another one in its place; later it does not.

One that cannot go on without a rank is begun anew by those who are left, if it can be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from evener.launch import rank_heartbeat
from evener.launch.nodes import NodeSpec
from evener.launch.processes import LocalProcess, LocalProcesses
from evener.launch.rank_environment import RankEnvironment, RankFunction
from evener.launch.rank_heartbeat import has_left, read_beat
from evener.launch.ranks import run_local
from evener.records.errors import Interrupted, InvalidInput, NodeLost
from evener.records.events import Phase, RunEvent
from evener.records.record import Event, Step
from support.refusals import refused

NODES = [NodeSpec(name="a"), NodeSpec(name="b")]


def end_early(env: RankEnvironment, words: tuple[str, int, int, int]) -> None:
    """The second rank is killed, or frozen, in the first of its lives, so many, when it has come to a step."""
    folder, lives, step, number = words
    vars(rank_heartbeat)["LEAST_START_SECONDS"] = 3.0  # in the process of this rank; elsewhere it stays 30
    mark = Path(folder) / f"life-{len(list(Path(folder).iterdir()))}"
    if env.rank == 0:
        env.notify(Event(step=0, kind="told", message="by the first rank"))
        while number == signal.SIGSTOP and len(list(Path(folder).iterdir())) <= lives:
            time.sleep(0.01)  # as in a collective: it would end before anybody is missed
        return
    mark.touch()
    if len(list(Path(folder).iterdir())) > lives:
        return
    env.at_step(step)
    assert env.store is not None
    while read_beat(env.store, env.rank)[1] != step:
        time.sleep(0.01)
    os.kill(os.getpid(), number)
    threading.Event().wait(60)  # a frozen process that is woken up is a lost one


def events_of(
    folder: Path, lives: int, step: int, *, number: int = signal.SIGKILL, patience: float = 20.0
) -> list[str]:
    """Kinds of what was told. Raises NodeLost."""
    told: list[RunEvent] = []
    words = (str(folder), lives, step, int(number))
    run_local(end_early, NODES, words, patience=patience, on_event=told.append, is_elastic=True)
    return [event.kind for event in told if isinstance(event, Event)]


def test_process_killed_before_the_first_step_restarts_the_run(tmp_path: Path) -> None:
    kinds = events_of(tmp_path, lives=1, step=0)
    assert kinds[-2:] == ["begins again", "told"]


@pytest.mark.slow
def test_process_frozen_before_the_first_step_restarts_the_run(tmp_path: Path) -> None:
    kinds = events_of(tmp_path, lives=1, step=0, number=signal.SIGSTOP, patience=3)
    assert kinds[-2:] == ["begins again", "told"]


def test_run_does_not_restart_after_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(NodeLost) as lost:
        events_of(tmp_path, lives=1, step=3)
    assert lost.value.nodes == ("b",)
    assert len(list(tmp_path.iterdir())) == 1


def end_after_steps(env: RankEnvironment, _: None) -> None:
    """The only rank is killed after its sixth step; it sends no heartbeats, and knows no generation."""
    env.notify(Step(step=6, epoch=0, samples=4, loss=1.0, seconds=0.1, nodes=()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_elastic", [False, True])
def test_lone_rank_that_is_killed_is_named_with_its_last_step(is_elastic: bool) -> None:
    with pytest.raises(NodeLost) as lost:
        run_local(end_after_steps, NODES[:1], None, patience=20, on_event=lambda _: None, is_elastic=is_elastic)
    assert lost.value.nodes == ("a",)
    assert "at step 6" in str(lost.value)


def freeze_last(env: RankEnvironment, folder: str) -> None:
    """The first rank ends; then the second one is frozen in a step."""
    if env.rank == 0:
        Path(folder, "ended").touch()
        return
    env.at_step(3)
    while not Path(folder, "ended").exists():
        time.sleep(0.01)
    time.sleep(1)  # until its last beat is known
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("is_elastic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_last_rank_that_is_frozen_ends_the_run(tmp_path: Path, is_elastic: bool) -> None:
    begin = time.monotonic()
    with pytest.raises(NodeLost) as lost:
        run_local(freeze_last, NODES, str(tmp_path), patience=3, on_event=lambda _: None, is_elastic=is_elastic)
    assert lost.value.nodes == ("b",)
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_process_killed_at_every_start_ends_the_run(tmp_path: Path) -> None:
    with refused(NodeLost):
        events_of(tmp_path, lives=9, step=0)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_node_killed_at_every_start_is_left_out(tmp_path: Path) -> None:
    told: list[RunEvent] = []
    asked: list[tuple[Sequence[int], tuple[str, ...]]] = []

    def without(config: tuple[str, int, int, int], kept: Sequence[int], event: Event) -> tuple[str, int, int, int]:
        asked.append((kept, event.nodes))
        return config

    words = (str(tmp_path), 9, 0, int(signal.SIGKILL))
    run_local(end_early, NODES, words, patience=20, on_event=told.append, is_elastic=True, without=without)
    assert asked == [([0], ("b",))]
    kinds = [event.kind for event in told if isinstance(event, Event) and event.kind != "told"]
    assert kinds == ["begins again", "begins again", "node lost"]
    assert len(list(tmp_path.iterdir())) == 3


def miss_the_second(env: RankEnvironment, _: None) -> None:
    """All ranks say that the second one was silent, itself among them, as it has woken up."""
    if len(env.nodes) > 1:
        raise NodeLost("node b has been silent", ["b"])


def test_node_silent_before_the_first_step_is_left_out() -> None:
    asked: list[Sequence[int]] = []
    run_local(
        miss_the_second,
        NODES,
        None,
        patience=20,
        on_event=lambda _: None,
        is_elastic=True,
        without=lambda _config, kept, _event: asked.append(kept) or "the same",  # type: ignore[func-returns-value]
    )
    assert asked == [[0]]


class Left(msgspec.Struct, frozen=True):
    """What ranks do, of which some are left.

    Attributes:
        lost: names of the nodes that were lost before.
        ending: how the last of several ranks goes: `killed`, `silent` or `failed`.
    """

    ending: str
    lost: tuple[str, ...] = ()


def end_until_two_are_left(env: RankEnvironment, left: Left) -> None:
    env.at_step(len(left.lost) + 1)
    if env.rank == len(env.nodes) - 1 and len(env.nodes) > 2:
        assert env.store is not None
        while read_beat(env.store, env.rank)[1] == 0:
            time.sleep(0.01)
        if left.ending == "failed":
            raise InvalidInput("the task is wrong")
        os.kill(os.getpid(), signal.SIGKILL if left.ending == "killed" else signal.SIGSTOP)
    if len(env.nodes) > 2:
        threading.Event().wait(60)  # whoever is lost ends this
    if env.rank == 0:
        env.notify(Event(step=0, kind="told", message=" ".join(env.names), nodes=left.lost))


def run_of_those_left(ending: str, *, goes_on: bool = True, patience: float = 20) -> list[Event]:
    told: list[RunEvent] = []

    def without(before: Left, kept: Sequence[int], event: Event) -> Left | None:
        assert len(kept) == 4 - len(before.lost) - 1
        return msgspec.structs.replace(before, lost=(*before.lost, *event.nodes)) if goes_on else None

    nodes = [NodeSpec(name=name) for name in "abcd"]
    run_local(
        end_until_two_are_left, nodes, Left(ending), patience=patience, on_event=told.append, without=without
    )  # fmt: skip
    return [event for event in told if isinstance(event, Event)]


def test_remaining_nodes_continue_after_each_loss() -> None:
    first, second, told = run_of_those_left("killed")
    assert [first.kind, second.kind] == ["node lost", "node lost"]
    assert first.message.startswith("node d (rank 3) was killed by signal 9 (SIGKILL) at step 1")
    assert second.message.startswith("node c (rank 2) was killed by signal 9 (SIGKILL) at step 2")
    assert (told.message, told.nodes) == ("a b", ("d", "c"))


@pytest.mark.slow
def test_silent_node_is_named_and_the_others_continue() -> None:
    first, second, told = run_of_those_left("silent", patience=2)
    assert "node d (rank 3) has been silent for 2 s, at step 1" in first.message
    assert [first.nodes, second.nodes, told.nodes] == [("d",), ("c",), ("d", "c")]


def test_loss_ends_the_run_if_it_cannot_continue() -> None:
    with refused(NodeLost):
        run_of_those_left("killed", goes_on=False)


def test_error_in_the_program_is_no_loss() -> None:
    with refused(InvalidInput):
        run_of_those_left("failed")


def end_one_after_the_other(env: RankEnvironment, seconds: float) -> None:
    """The second rank is left out and ends at once; the first has something to tell later."""
    if env.rank == 0:
        time.sleep(seconds)
        env.notify(Event(step=0, kind="told", message="by the first rank"))


def test_rank_that_ended_well_with_unread_messages_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, looks = LocalProcesses.receive, list[float]()

    def slow_to_look(self: LocalProcesses, timeout: float) -> list[tuple[LocalProcess, bytes]]:
        looks.append(timeout)
        if len(looks) > 1:
            return receive(self, timeout)
        self._started[1].process.join()  # it ends after the pipes were read, and before its end is looked for
        return []

    monkeypatch.setattr(LocalProcesses, "receive", slow_to_look)
    told: list[RunEvent] = []
    run_local(end_one_after_the_other, NODES, 1.5, patience=20, on_event=told.append)
    assert [event.kind for event in told if isinstance(event, Event)] == ["told"]


def compute_for_long(env: RankEnvironment, words: tuple[str, float, int]) -> None:
    """Finish a step that takes `seconds`, then stop if that was requested; the rank `late` never ends."""
    folder, seconds, late = words
    env.at_step(1)
    assert env.store is not None
    while not all(read_beat(env.store, rank)[1] for rank in range(len(env.nodes))):
        time.sleep(0.01)
    if env.rank == 0:
        env.notify(Event(step=1, kind="told", message="in a step"))
    time.sleep(seconds)
    while env.rank == late:
        time.sleep(1.0)
    (Path(folder) / f"saved-{env.rank}").touch()
    assert env.stop_requested
    raise Interrupted("stopped after step 1 as asked")


def _stopped_run(
    folder: Path,
    seconds: float,
    late: int = -1,
    nodes: Sequence[NodeSpec] = tuple(NODES),
    program: RankFunction = compute_for_long,
) -> list[RunEvent]:
    """Events of a run that is asked to stop once, in the middle of its step."""
    told: list[RunEvent] = []

    def on_event(event: RunEvent) -> None:
        told.append(event)
        if isinstance(event, Event) and event.kind == "told":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_local(program, nodes, (str(folder), seconds, late), patience=2.0, on_event=on_event)
    return told


def test_stopped_run_finishes_a_step_longer_than_the_patience(tmp_path: Path) -> None:
    told = _stopped_run(tmp_path, 6.0)
    assert len(list(tmp_path.glob("saved-*"))) == len(NODES)
    assert [event.what for event in told if isinstance(event, Phase)] == ["stopping"]


def test_rank_that_does_not_stop_is_ended_within_the_patience(tmp_path: Path) -> None:
    begin = time.monotonic()
    _stopped_run(tmp_path, 0.5, late=1)
    assert time.monotonic() - begin < 20
    assert [path.name for path in tmp_path.glob("saved-*")] == ["saved-0"]


def test_lone_rank_that_is_stopped_finishes_its_step(tmp_path: Path) -> None:
    _stopped_run(tmp_path, 0.5, nodes=NODES[:1])
    assert [path.name for path in tmp_path.glob("saved-*")] == ["saved-0"]


def compute_without_one(env: RankEnvironment, words: tuple[str, float, int]) -> None:
    """The second rank is not needed and ends. Then the first one finishes a step and stops if that was requested."""
    if env.rank == 1:
        return
    folder, seconds, _ = words
    assert env.store is not None
    while not has_left(env.store, 1):
        time.sleep(0.01)
    time.sleep(1.0)  # until its end has been seen
    env.at_step(1)
    while not read_beat(env.store, env.rank)[1]:
        time.sleep(0.01)
    env.notify(Event(step=1, kind="told", message="in a step"))
    time.sleep(seconds)
    (Path(folder) / f"saved-{env.rank}").touch()
    assert env.stop_requested
    raise Interrupted("stopped after step 1 as asked")


@pytest.mark.slow
def test_stopped_run_finishes_a_long_step_after_an_unneeded_rank_has_ended(tmp_path: Path) -> None:
    _stopped_run(tmp_path, 8.0, program=compute_without_one)
    assert [path.name for path in tmp_path.glob("saved-*")] == ["saved-0"]
