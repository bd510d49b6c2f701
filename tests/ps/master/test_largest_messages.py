"""Every message that a token allows, at its largest, many times: memory, disk and answers stay within their bounds."""

from __future__ import annotations

import pytest

from evener.ps.master.access.quotas import MAX_LOG_BYTES
from evener.wire.identity import Role
from support.largest_messages import STATES, Found, try_state
from support.small_frames import floods

MOST_GROWTH, MAX_SECONDS = 0.2, 1.0
MOST_DISK = 64 * 2**20
"""Of a run's events, values, record, and of names: far below what is asked to be written, and `MAX_LOG_BYTES`."""


def require_bounded(found: list[Found], growth: float = MOST_GROWTH) -> None:
    assert found
    for one in found:
        assert one.growth < growth, str(one)
        assert one.disk < MOST_DISK < MAX_LOG_BYTES, str(one)
        assert one.undisturbed < MAX_SECONDS, str(one)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("RankSaid", 12),
        ("FetchBlob", 12),
        pytest.param("RankSaid.4", 400, id="questions that wait"),
        pytest.param("RankShown.0", 60, id="events"),
    ],
)
def test_largest_messages_of_a_rank_are_bounded(only: str, count: int) -> None:
    require_bounded(try_state("node", "a rank", count, only))


@pytest.mark.timeout(300)
def test_many_joins_during_a_run_do_not_fill_the_disk() -> None:
    (found,) = try_state("node", "in a run", 300, "Join")
    assert found.disk < 2**20, str(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("role", "state"), STATES, ids=lambda one: one.replace(" ", "-"))
def test_thousand_of_every_message_at_full_size_are_bounded(role: Role, state: str) -> None:
    require_bounded(try_state(role, state, 1000))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("role", "state"), STATES, ids=lambda one: one.replace(" ", "-"))
def test_admin_gets_answers_within_a_second_under_floods_of_frames(role: Role, state: str) -> None:
    found = list(floods(role, state, seconds=1.0))
    assert sum(one.sent for one in found) > 100_000
    for one in found:
        assert one.undisturbed < MAX_SECONDS, str(one)
        assert one.growth < MOST_GROWTH, str(one)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_admin_gets_answers_within_a_second_under_heartbeats() -> None:
    found = list(floods("node", "node", 2.0, "Heartbeat", (24,)))
    assert sum(one.sent for one in found) > 10_000
    assert max(one.undisturbed for one in found) < MAX_SECONDS, "\n".join(map(str, found))
