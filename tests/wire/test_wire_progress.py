"""Deadlines as a table: what moved, what ought to, and for how long it has not."""

import pytest

from evener.wire.progress import Progress
from evener.wire.traffic import Tally, Traffic, count


@pytest.mark.parametrize(
    ("seen", "idle"),
    [
        ([(0.0, 0, True)], 0.0),
        ([(5.0, 0, True)], 5.0),
        ([(5.0, 0, False)], 0.0),
        ([(5.0, 1, True)], 0.0),
        ([(5.0, 1, True), (9.0, 1, True)], 4.0),
        ([(5.0, 1, True), (9.0, 1, True), (10.0, 2, True)], 0.0),
        ([(5.0, 1, True), (9.0, 1, False), (10.0, 1, True)], 1.0),
        ([(5.0, 0, False), (105.0, 0, True)], 100.0),
    ],
)
def test_idle_seconds(seen: list[tuple[float, int, bool]], idle: float) -> None:
    progress = Progress(0.0)
    answers = [progress.idle_seconds(counter, expected=expected, now=now) for now, counter, expected in seen]
    assert answers[-1] == idle


def test_traffic_adds_up_by_kind_and_direction() -> None:
    one, other = Traffic(wire_bytes_sent=5), Traffic(wire_bytes_sent=1, wire_bytes_received=2)
    count(one.sent, Tally(), 10, 12, 0.5)
    count(one.sent, Tally(), 20, 22, 0.25)
    count(one.received, Traffic(), 1, 2, 0.0)
    count(other.sent, Tally(), 100, 101, 1.0)
    one.add(other)
    assert one == Traffic(
        sent={"Tally": Tally(frames=3, payload_bytes=130, frame_bytes=135, seconds=1.75)},
        received={"Traffic": Tally(frames=1, payload_bytes=1, frame_bytes=2, seconds=0.0)},
        wire_bytes_sent=6,
        wire_bytes_received=2,
    )
    assert other.sent["Tally"].frames == 1
