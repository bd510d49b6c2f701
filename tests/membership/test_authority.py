"""Who is given up, who is taken in, and when: a table of what happens against the generations that follow."""

from __future__ import annotations

from evener.membership.authority import JOIN_SECONDS, LAST_HOLDER, Authority
from evener.membership.generation import Beat, Generation, Hello

PATIENCE = 4.0
FOUNDERS = ("a", "b", "c")


def founded() -> Authority:
    """Of three processes, 0, 1 and 2."""
    authority = Authority(PATIENCE)
    for process, node in ((2, "c"), (0, "a"), (1, "b")):
        assert authority.decide(0.0) is None
        authority.arrive(process, Hello(node=node, founders=FOUNDERS), 0.0)
    first = authority.decide(0.0)
    assert first is not None
    assert first.number == 1
    assert processes(first) == [0, 1, 2]
    return authority


def computing() -> Authority:
    """Likewise, who compute."""
    authority = founded()
    authority.hear(0, beat(1, holds=1))
    return authority


def processes(generation: Generation | None) -> list[int]:
    """Of a generation, by rank."""
    assert generation is not None
    return [one.process for one in generation.participants]


def beat(count: int, holds: int = 0) -> Beat:
    """With some step."""
    return Beat(count=count, step=7, holds=holds)


def test_the_run_begins_when_all_founders_have_come_in_the_order_of_the_plan() -> None:
    authority = founded()
    assert authority.generation is not None
    assert authority.generation.nodes == ["a", "b", "c"]
    assert authority.decide(0.1) is None


def test_a_process_that_ended_is_given_up_at_once_and_says_why() -> None:
    authority = founded()
    authority.lose(0, "was killed by signal 9 (SIGKILL)")
    second = authority.decide(0.1)
    assert processes(second) == [1, 2]
    assert second is not None
    assert (second.number, second.is_urgent, second.lost) == (2, True, ("a",))
    assert second.reason == "a was killed by signal 9 (SIGKILL)"
    assert authority.decide(0.1) is None


def test_silence_beyond_the_patience_is_a_death_and_slowness_is_none() -> None:
    authority = founded()
    for tenth in range(1, 60):
        now = tenth / 10
        for process in (0, 1):
            authority.hear(process, beat(tenth))
        generation = authority.decide(now)
        assert (generation is None) == (now != 4.1), now
    assert authority.generation is not None
    assert authority.generation.reason == "c has been silent for 4 s, at step 0"


def test_what_the_authority_slept_through_is_nobodys_silence() -> None:
    authority = founded()
    assert authority.decide(0.1) is None
    assert authority.decide(100.0) is None  # Ctrl-Z, and fg: nobody has beaten yet
    for process in range(3):
        authority.hear(process, beat(1))
    for tenth in range(1, 40):
        authority.hear(0, beat(tenth))
        assert authority.decide(100.0 + tenth / 10) is None
    assert processes(authority.decide(104.2)) == [0]


def looks(authority: Authority, first: float, seconds: float) -> list[Generation]:
    """The generations of so many seconds in which nobody says anything."""
    found = [authority.decide(first + tenth / 10) for tenth in range(1, round(seconds * 10) + 1)]
    return [one for one in found if one is not None]


def awaited(authority: Authority) -> list[int]:
    """Processes that are silent and waited for."""
    return sorted(authority.awaited)


def test_the_last_one_that_holds_the_state_is_waited_for_longer_and_may_come_back() -> None:
    authority = founded()
    for process in (1, 2):
        authority.lose(process, "ended")
    assert processes(authority.decide(0.1)) == [0]
    assert looks(authority, 0.1, 2 * PATIENCE) == []
    assert awaited(authority) == [0]
    authority.hear(0, beat(1))
    assert looks(authority, 10.0, PATIENCE) == []
    assert awaited(authority) == []
    assert looks(authority, 14.0, (LAST_HOLDER - 1) * PATIENCE) == []
    assert looks(authority, 14.0 + (LAST_HOLDER - 1) * PATIENCE, 1.0)[0].participants == ()
    assert authority.has_given_up(0)


def test_processes_that_are_silent_together_are_waited_for_together() -> None:
    authority = founded()
    assert looks(authority, 0.0, 2 * PATIENCE) == []
    assert awaited(authority) == [0, 1, 2]
    for tenth in range(1, 60):
        now = 2 * PATIENCE + tenth / 10
        for process in (1, 2) if tenth > 1 else (1,):
            authority.hear(process, beat(tenth))
        generation = authority.decide(now)
        assert (generation is None) == (tenth != 42), tenth
    assert authority.generation is not None
    assert processes(authority.generation) == [1, 2]


def test_one_without_the_state_is_given_up_while_the_last_holder_is_waited_for() -> None:
    authority = founded()
    for process in (1, 2):
        authority.lose(process, "ended")
    authority.arrive(7, Hello(node="d"), 0.0)
    assert processes(authority.decide(0.1)) == [0, 7]
    assert [processes(one) for one in looks(authority, 0.1, 2 * PATIENCE)] == [[0]]
    assert awaited(authority) == [0]


def test_who_was_given_up_never_comes_back() -> None:
    authority = founded()
    authority.lose(1, "ended")
    authority.decide(0.1)
    authority.hear(1, beat(1))
    authority.arrive(1, Hello(node="b"), 0.2)
    assert authority.decide(2.0) is None
    assert authority.has_given_up(1)


def test_newcomers_wait_for_each_other_and_then_for_a_step_to_end() -> None:
    authority = computing()
    authority.arrive(7, Hello(node="d"), 1.0)
    assert authority.decide(1.0 + JOIN_SECONDS / 2) is None
    authority.arrive(8, Hello(node="e"), 1.0 + JOIN_SECONDS / 2)
    assert authority.decide(1.0 + JOIN_SECONDS) is None
    second = authority.decide(1.0 + 2 * JOIN_SECONDS)
    assert processes(second) == [0, 1, 2, 7, 8]
    assert second is not None
    assert (second.is_urgent, second.joined) == (False, ("d", "e"))
    assert [one.since for one in second.participants] == [1, 1, 1, 2, 2]


def test_who_comes_before_a_newcomer_has_met_the_others_waits_until_it_has() -> None:
    authority = computing()
    authority.arrive(7, Hello(node="d"), 1.0)
    assert processes(authority.decide(2.0)) == [0, 1, 2, 7]
    authority.arrive(8, Hello(node="e"), 2.0)
    assert authority.decide(9.0) is None  # those who compute would go past the place where 7 waits for them
    authority.hear(0, beat(2, holds=2))
    assert processes(authority.decide(9.1)) == [0, 1, 2, 7, 8]


def test_a_loss_takes_waiting_newcomers_along() -> None:
    authority = founded()
    authority.arrive(7, Hello(node="d"), 1.0)
    authority.lose(2, "ended")
    second = authority.decide(1.0)
    assert processes(second) == [0, 1, 7]
    assert second is not None
    assert second.is_urgent


def test_a_newcomer_that_dies_before_it_is_in_changes_nothing() -> None:
    authority = founded()
    authority.arrive(7, Hello(node="d"), 1.0)
    authority.lose(7, "ended")
    assert authority.decide(2.0) is None


def test_the_state_is_gone_when_all_are_who_were_given_it() -> None:
    authority = computing()
    authority.arrive(7, Hello(node="d"), 0.0)
    authority.decide(1.0)
    for process in range(3):
        authority.lose(process, "ended")
    authority.decide(1.0)
    assert not authority.has_state
    assert authority.may_have_state  # it may be about to say so
    authority.hear(7, beat(1, holds=2))
    assert authority.has_state


def test_who_never_met_anybody_with_the_state_cannot_hold_it() -> None:
    authority = founded()
    for process in range(3):
        authority.lose(process, "ended")
    authority.arrive(7, Hello(node="d"), 0.0)
    assert processes(authority.decide(0.0)) == [7]
    assert not authority.may_have_state
    authority.arrive(8, Hello(node="e"), 1.0)
    assert authority.decide(2.0) is None
    assert not authority.may_have_state


def test_a_generation_is_settled_once_its_first_process_has_its_state() -> None:
    authority = founded()
    assert not authority.is_settled
    authority.hear(1, beat(1, holds=1))
    assert not authority.is_settled
    authority.hear(0, beat(1, holds=1))
    assert authority.is_settled
    authority.lose(0, "was killed")
    authority.decide(0.1)
    assert not authority.is_settled
    authority.hear(1, beat(2, holds=2))
    assert authority.is_settled
    for process in (1, 2):
        authority.lose(process, "was killed")
    authority.decide(0.2)
    assert not authority.is_settled
