"""Who is given up, who is taken in, and when: a table of what happens against the generations that follow."""

from __future__ import annotations

from evener.membership.coordinator import JOIN_SECONDS, LAST_HOLDER, Coordinator
from evener.membership.generation import Beat, Generation, Hello

PATIENCE = 4.0
INITIAL_NODES = ("a", "b", "c")


def founded() -> Coordinator:
    """Of three processes, 0, 1 and 2."""
    coordinator = Coordinator(PATIENCE)
    for process, node in ((2, "c"), (0, "a"), (1, "b")):
        assert coordinator.decide(0.0) is None
        coordinator.arrive(process, Hello(node=node, initial_nodes=INITIAL_NODES), 0.0)
    first = coordinator.decide(0.0)
    assert first is not None
    assert first.number == 1
    assert processes(first) == [0, 1, 2]
    return coordinator


def computing() -> Coordinator:
    """Likewise, who compute."""
    coordinator = founded()
    coordinator.hear(0, beat(1, holds=1))
    return coordinator


def join(coordinator: Coordinator, process: int, node: str, now: float) -> None:
    """A process that joins reaches all others."""
    coordinator.arrive(process, Hello(node=node), now)
    coordinator.reach(process, coordinator.to_reach(process))


def processes(generation: Generation | None) -> list[int]:
    """Of a generation, by rank."""
    assert generation is not None
    return [one.process for one in generation.participants]


def beat(count: int, holds: int = 0) -> Beat:
    """With some step."""
    return Beat(count=count, step=7, holds=holds)


def test_run_begins_when_all_initial_nodes_have_joined() -> None:
    coordinator = founded()
    assert coordinator.generation is not None
    assert coordinator.generation.nodes == ["a", "b", "c"]
    assert coordinator.decide(0.1) is None


def test_ended_process_is_dropped_at_once_with_its_reason() -> None:
    coordinator = founded()
    coordinator.lose(0, "was killed by signal 9 (SIGKILL)")
    second = coordinator.decide(0.1)
    assert processes(second) == [1, 2]
    assert second is not None
    assert (second.number, second.is_urgent, second.lost) == (2, True, ("a",))
    assert second.reason == "a was killed by signal 9 (SIGKILL)"
    assert coordinator.decide(0.1) is None


def test_silent_process_is_lost_after_the_patience_but_a_slow_one_not() -> None:
    coordinator = founded()
    for tenth in range(1, 60):
        now = tenth / 10
        for process in (0, 1):
            coordinator.hear(process, beat(tenth))
        generation = coordinator.decide(now)
        assert (generation is None) == (now != 4.1), now
    assert coordinator.generation is not None
    assert coordinator.generation.reason == "c has been silent for 4 s, at step 0"


def test_coordinator_pause_does_not_count_as_silence() -> None:
    coordinator = founded()
    assert coordinator.decide(0.1) is None
    assert coordinator.decide(100.0) is None  # Ctrl-Z, and fg: nobody has beaten yet
    for process in range(3):
        coordinator.hear(process, beat(1))
    for tenth in range(1, 40):
        coordinator.hear(0, beat(tenth))
        assert coordinator.decide(100.0 + tenth / 10) is None
    assert processes(coordinator.decide(104.2)) == [0]


def looks(coordinator: Coordinator, first: float, seconds: float) -> list[Generation]:
    """The generations of so many seconds in which nobody says anything."""
    found = [coordinator.decide(first + tenth / 10) for tenth in range(1, round(seconds * 10) + 1)]
    return [one for one in found if one is not None]


def awaited(coordinator: Coordinator) -> list[int]:
    """Processes that are silent and waited for."""
    return sorted(coordinator.awaited)


def test_last_holder_of_the_state_is_awaited_longer() -> None:
    coordinator = founded()
    for process in (1, 2):
        coordinator.lose(process, "ended")
    assert processes(coordinator.decide(0.1)) == [0]
    assert looks(coordinator, 0.1, 2 * PATIENCE) == []
    assert awaited(coordinator) == [0]
    coordinator.hear(0, beat(1))
    assert looks(coordinator, 10.0, PATIENCE) == []
    assert awaited(coordinator) == []
    assert looks(coordinator, 14.0, (LAST_HOLDER - 1) * PATIENCE) == []
    assert looks(coordinator, 14.0 + (LAST_HOLDER - 1) * PATIENCE, 1.0)[0].participants == ()
    assert coordinator.is_lost(0)


def test_processes_silent_together_are_awaited_until_one_returns() -> None:
    coordinator = founded()
    assert looks(coordinator, 0.0, 2 * PATIENCE) == []
    assert awaited(coordinator) == [0, 1, 2]
    for tenth in range(1, 60):
        now = 2 * PATIENCE + tenth / 10
        for process in (1, 2) if tenth > 1 else (1,):
            coordinator.hear(process, beat(tenth))
        generation = coordinator.decide(now)
        assert (generation is None) == (tenth != 42), tenth
    assert coordinator.generation is not None
    assert processes(coordinator.generation) == [1, 2]


def test_process_without_state_is_dropped_while_the_holder_is_awaited() -> None:
    coordinator = founded()
    for process in (1, 2):
        coordinator.lose(process, "ended")
    join(coordinator, 7, "d", 0.0)
    assert processes(coordinator.decide(0.1)) == [0, 7]
    assert [processes(one) for one in looks(coordinator, 0.1, 2 * PATIENCE)] == [[0]]
    assert awaited(coordinator) == [0]


def test_dropped_process_never_returns() -> None:
    coordinator = founded()
    coordinator.lose(1, "ended")
    coordinator.decide(0.1)
    coordinator.hear(1, beat(1))
    coordinator.arrive(1, Hello(node="b"), 0.2)
    assert coordinator.decide(2.0) is None
    assert coordinator.is_lost(1)


def test_joining_processes_wait_for_each_other_and_the_end_of_a_step() -> None:
    coordinator = computing()
    join(coordinator, 7, "d", 1.0)
    assert coordinator.decide(1.0 + JOIN_SECONDS / 2) is None
    join(coordinator, 8, "e", 1.0 + JOIN_SECONDS / 2)
    assert coordinator.decide(1.0 + JOIN_SECONDS) is None
    second = coordinator.decide(1.0 + 2 * JOIN_SECONDS)
    assert processes(second) == [0, 1, 2, 7, 8]
    assert second is not None
    assert (second.is_urgent, second.joined) == (False, ("d", "e"))
    assert [one.since for one in second.participants] == [1, 1, 1, 2, 2]


def test_second_joining_process_waits_until_the_first_has_entered() -> None:
    coordinator = computing()
    join(coordinator, 7, "d", 1.0)
    assert processes(coordinator.decide(2.0)) == [0, 1, 2, 7]
    join(coordinator, 8, "e", 2.0)
    assert coordinator.decide(9.0) is None  # those who compute would go past the place where 7 waits for them
    coordinator.hear(0, beat(2, holds=2))
    assert processes(coordinator.decide(9.1)) == [0, 1, 2, 7, 8]


def test_loss_admits_waiting_processes_at_once() -> None:
    coordinator = founded()
    join(coordinator, 7, "d", 1.0)
    coordinator.lose(2, "ended")
    second = coordinator.decide(1.0)
    assert processes(second) == [0, 1, 7]
    assert second is not None
    assert second.is_urgent


def test_joining_process_lost_before_entering_changes_nothing() -> None:
    coordinator = founded()
    join(coordinator, 7, "d", 1.0)
    coordinator.lose(7, "ended")
    assert coordinator.decide(2.0) is None


def test_state_may_survive_with_a_process_that_is_receiving_it() -> None:
    coordinator = computing()
    join(coordinator, 7, "d", 0.0)
    coordinator.decide(1.0)
    for process in range(3):
        coordinator.lose(process, "ended")
    coordinator.decide(1.0)
    assert not coordinator.has_state
    assert coordinator.may_have_state  # it may be about to say so
    coordinator.hear(7, beat(1, holds=2))
    assert coordinator.has_state


def test_process_that_met_no_holder_cannot_have_the_state() -> None:
    coordinator = founded()
    for process in range(3):
        coordinator.lose(process, "ended")
    join(coordinator, 7, "d", 0.0)
    assert processes(coordinator.decide(0.0)) == [7]
    assert not coordinator.may_have_state
    join(coordinator, 8, "e", 1.0)
    assert coordinator.decide(2.0) is None
    assert not coordinator.may_have_state


def test_generation_computes_once_its_first_process_has_the_state() -> None:
    coordinator = founded()
    assert not coordinator.is_computing
    coordinator.hear(1, beat(1, holds=1))
    assert not coordinator.is_computing
    coordinator.hear(0, beat(1, holds=1))
    assert coordinator.is_computing
    coordinator.lose(0, "was killed")
    coordinator.decide(0.1)
    assert not coordinator.is_computing
    coordinator.hear(1, beat(2, holds=2))
    assert coordinator.is_computing
    for process in (1, 2):
        coordinator.lose(process, "was killed")
    coordinator.decide(0.2)
    assert not coordinator.is_computing


def test_joining_process_enters_once_it_reaches_all_others() -> None:
    coordinator = computing()
    coordinator.arrive(7, Hello(node="d"), 1.0)
    coordinator.arrive(8, Hello(node="e"), 1.0)
    assert coordinator.to_reach(0) == {}
    assert coordinator.to_reach(7) == {0: "a", 1: "b", 2: "c"}
    assert coordinator.to_reach(8) == {0: "a", 1: "b", 2: "c", 7: "d"}
    coordinator.reach(7, (0, 1))
    coordinator.reach(8, (0, 1, 2))
    assert coordinator.decide(9.0) is None
    coordinator.lose(7, "does not reach node c")
    assert processes(coordinator.decide(9.1)) == [0, 1, 2, 8]


def test_loss_does_not_admit_a_process_that_cannot_reach_the_others() -> None:
    coordinator = computing()
    coordinator.arrive(7, Hello(node="d"), 1.0)
    coordinator.reach(7, (0, 2))
    coordinator.lose(2, "ended")
    assert processes(coordinator.decide(2.0)) == [0, 1]
    assert coordinator.to_reach(7) == {0: "a", 1: "b"}
    coordinator.lose(1, "ended")
    assert processes(coordinator.decide(2.1)) == [0, 7]


def test_process_leaves_on_notice_after_the_others_compute_without_it() -> None:
    coordinator = computing()
    coordinator.release(0)
    second = coordinator.decide(0.1)
    assert second is not None
    assert (processes(second), second.is_urgent, second.left, second.lost) == ([1, 2], False, ("a",), ())
    assert (coordinator.outgoing, coordinator.is_lost(0)) == ({0}, False)
    assert coordinator.decide(0.2) is None  # the others may not have finished the step
    coordinator.hear(1, beat(2, holds=2))
    assert coordinator.decide(0.3) is None
    assert (coordinator.outgoing, coordinator.is_lost(0)) == (set(), True)


def test_processes_leave_one_by_one_and_the_last_holder_stays() -> None:
    coordinator = computing()
    for process in (0, 1, 2):
        coordinator.release(process)
    for number, left in ((2, "a"), (3, "b")):
        generation = coordinator.decide(0.1)
        assert generation is not None
        assert generation.left == (left,)
        first = generation.participants[0].process
        coordinator.hear(first, beat(number, holds=number))
    assert coordinator.decide(0.2) is None
    assert coordinator.generation is not None
    assert coordinator.generation.nodes == ["c"]


def test_holder_stays_until_a_process_that_joined_has_its_state() -> None:
    coordinator = computing()
    for process in (1, 2):
        coordinator.lose(process, "was killed")
    coordinator.decide(0.1)
    join(coordinator, 3, "d", 0.1)
    coordinator.hear(0, beat(2, holds=2))
    assert processes(coordinator.decide(1.0)) == [0, 3]
    coordinator.hear(0, beat(3, holds=3))
    coordinator.release(0)
    assert coordinator.decide(1.1) is None
    coordinator.hear(3, beat(1, holds=3))
    assert processes(coordinator.decide(1.2)) == [3]


def test_leaving_process_that_is_lost_before_its_step_ends_is_lost() -> None:
    coordinator = computing()
    coordinator.release(1)
    coordinator.lose(1, "was killed")
    second = coordinator.decide(0.1)
    assert second is not None
    assert (second.is_urgent, second.left, second.lost) == (True, (), ("b",))


def test_leaving_process_does_not_join_again() -> None:
    coordinator = computing()
    join(coordinator, 3, "d", 0.1)
    coordinator.release(3)
    assert coordinator.decide(1.0) is None
    assert coordinator.is_lost(3)


def test_leaving_process_that_is_lost_in_its_last_step_breaks_that_step() -> None:
    coordinator = computing()
    coordinator.release(0)
    assert processes(coordinator.decide(0.1)) == [1, 2]
    coordinator.lose(0, "was killed")
    third = coordinator.decide(0.2)
    assert third is not None
    assert (processes(third), third.is_urgent, third.lost, third.left) == ([1, 2], True, ("a",), ())
    assert coordinator.decide(0.3) is None
