"""Membership as a table: literal sequences of what happens, and what is decided each time."""

from __future__ import annotations

import pytest

from support.membership_script import JOINED, LATE, Row, after, play

TABLE: dict[str, list[Row]] = {
    "a silent node is excluded after the patience, and the round closes without it": [
        (1, "round 12", []),
        (2, "b 1 heard", []),
        (2, "a 1 contributed", []),
        (16, "a 1 heard", []),
        (16.9, "tick", []),
        (
            17,
            "tick",
            [
                "round 12: close without node b: it has been silent for 15 s",
                "round 12: exclude node b for 10 s: it has been silent for 15 s",
            ],
        ),
        (18, "tick", []),
    ],
    "a member whose update has arrived is excluded without being passed over": [
        (1, "round 12", []),
        (1, "b 1 contributed", []),
        (15, "a 1 heard", []),
        (16, "tick", ["round 12: exclude node b for 10 s: it has been silent for 15 s"]),
    ],
    "an excluded node is told how long to wait, and taken back when it is heard after that": [
        (1, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
        (2, "a 1 heard", []),
        (3, "a 1 contributed", ["round 0: let node a wait for 8 s: it came back before its exclusion was over"]),
        (4, "a 1 disconnected", []),
        (5, "a 1 joined", ["round 0: let node a wait for 6 s: it came back before its exclusion was over"]),
        (10.9, "a 1 heard", []),
        (11, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (12, "round 1", []),
    ],
    "the exclusion doubles while a node is not well, and no further than 32 times": [
        (0, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
        (10, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (20, "a 1 late", [f"round 0: exclude node a for 20 s: {LATE}"]),
        (50, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (60, "a 1 late", [f"round 0: exclude node a for 40 s: {LATE}"]),
        (100, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (100, "a 1 late", [f"round 0: exclude node a for 80 s: {LATE}"]),
        (200, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (200, "a 1 late", [f"round 0: exclude node a for 160 s: {LATE}"]),
        (400, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (400, "a 1 late", [f"round 0: exclude node a for 320 s: {LATE}"]),
        (800, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (800, "a 1 late", [f"round 0: exclude node a for 320 s: {LATE}"]),
    ],
    "ten patiences of membership take one doubling back": [
        (0, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
        (10, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (10, "a 1 late", [f"round 0: exclude node a for 20 s: {LATE}"]),
        (30, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (180, "a 1 heard", []),
        (180, "a 1 late", [f"round 0: exclude node a for 20 s: {LATE}"]),
        (200, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (500, "a 1 heard", []),
        (500, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
    ],
    "back within the patience after a cut it is the same member, and still awaited by a long round": [
        (0, "round 1", []),
        (100, "a 1 heard", []),
        (100, "b 1 heard", []),
        (101, "b 1 disconnected", ["round 1: expect node b back within 14 s: its connection broke"]),
        (111, "a 1 contributed", []),
        (111, "tick", []),
        (111, "b 1 joined", ["round 1: continue with node b: it is back in time"]),
        (112, "b 1 contributed", []),
    ],
    "a short round closes without a node whose connection broke, which is excluded when the patience is over": [
        (10, "a 1 heard", []),
        (10, "b 1 heard", []),
        (10, "round 2", []),
        (11, "b 1 disconnected", ["round 2: expect node b back within 14 s: its connection broke"]),
        (11.0, "tick", []),
        (11.25, "tick", ["round 2: close without node b: its connection broke"]),
        (12, "round 3", []),
        (24, "a 1 heard", []),
        (25, "tick", ["round 3: exclude node b for 10 s: it has been silent for 15 s"]),
    ],
    "a heartbeat shows that the broken connection was not the last one": [
        (1, "a 1 joined", ["round 0: continue with node a: it reconnected"]),
        (1, "a 1 disconnected", ["round 0: expect node a back within 15 s: its connection broke"]),
        (2, "a 1 heard", ["round 0: continue with node a: it is back in time"]),
    ],
    "the third bad update in a row excludes the node, and a good one between clears the count": [
        (1, "round 1", []),
        (1, "a 1 refused", ["round 1: close without node a: its update was refused"]),
        (2, "a 1 refused", []),
        (3, "a 1 contributed", []),
        (4, "a 1 refused", []),
        (5, "a 1 refused", []),
        (
            6,
            "a 1 refused",
            [
                "round 1: exclude node a for 10 s: its update was refused, the 3rd lapse without a good update between",
            ],
        ),
        (7, "a 1 refused", ["round 1: let node a wait for 9 s: it came back before its exclusion was over"]),
    ],
    "a later process replaces the earlier one, whose words count no more": [
        (1, "round 1", []),
        (
            2,
            "a 2 joined",
            [
                "round 1: close without node a: its process was restarted",
                "round 1: replace node a: a later process of it joined",
            ],
        ),
        (2, "a 1 disconnected", []),
        (3, "a 1 heard", ["round 1: dismiss node a: a later process of that name has taken its place"]),
        (3, "a 1 joined", ["round 1: dismiss node a: a later process of that name has taken its place"]),
        (3, "a 1 goodbye", []),
        (3, "round 2", []),
        (4, "a 2 contributed", []),
    ],
    "a node that crashes again and again before it has done anything is excluded": [
        (1, "a 2 joined", ["round 0: replace node a: a later process of it joined"]),
        (2, "a 2 disconnected", ["round 0: expect node a back within 14 s: its connection broke"]),
        (3, "a 3 joined", ["round 0: replace node a: a later process of it joined"]),
        (
            4,
            "a 4 joined",
            [
                "round 0: exclude node a for 10 s: "
                "its process was restarted, the 3rd lapse without a good update between",
                "round 0: let node a wait for 10 s: it came back before its exclusion was over",
            ],
        ),
        (14, "a 4 heard", ["round 0: readmit node a: it responds after its exclusion"]),
    ],
    "a clock that was set back keeps a restarted node out for no longer than the patience": [
        (1, "a 0 joined", ["round 0: dismiss node a: a later process of that name has taken its place"]),
        (14, "b 1 heard", []),
        (15, "tick", ["round 0: exclude node a for 10 s: it has been silent for 15 s"]),
        (16, "a 0 joined", ["round 0: let node a wait for 9 s: it came back before its exclusion was over"]),
        (25, "a 0 heard", ["round 0: readmit node a: it responds after its exclusion"]),
    ],
    "who said goodbye is not waited for, and may join again": [
        (1, "round 3", []),
        (
            2,
            "a 1 goodbye",
            ["round 3: close without node a: it said goodbye", "round 3: let node a go: it said goodbye"],
        ),
        (3, "a 1 disconnected", []),
        (3, "a 1 heard", ["round 3: dismiss node a: it has to join first"]),
        (4, "a 2 joined", ["round 3: admit node a: it joined"]),
    ],
    "who said goodbye while its connection was broken may join again at once": [
        (0, "round 1", []),
        (10, "a 1 heard", []),
        (10, "a 1 disconnected", ["round 1: expect node a back within 15 s: its connection broke"]),
        (
            10,
            "a 1 goodbye",
            ["round 1: close without node a: it said goodbye", "round 1: let node a go: it said goodbye"],
        ),
        (10, "a 2 joined", ["round 1: admit node a: it joined"]),
    ],
    "what membership has earned back is kept over a goodbye": [
        (0, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
        (10, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (160, "a 1 heard", []),
        (161, "a 1 goodbye", ["round 0: let node a go: it said goodbye"]),
        (162, "a 2 joined", ["round 0: admit node a: it joined"]),
        (163, "a 2 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
    ],
    "a restart of the master takes nothing back of what membership has earned": [
        (0, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
        (10, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (160, "a 1 heard", []),
        (161, "restart", []),
        (162, "a 1 joined", ["round 0: continue with node a: it found the restarted master"]),
        (163, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
    ],
    "lapses are counted anew after an exclusion": [
        (1, "a 1 refused", []),
        (1, "a 1 refused", []),
        (
            1,
            "a 1 refused",
            ["round 0: exclude node a for 10 s: its update was refused, the 3rd lapse without a good update between"],
        ),
        (11, "a 1 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (12, "a 1 refused", []),
        (13, "a 1 refused", []),
    ],
    "a goodbye does not shorten a exclusion": [
        (1, "a 1 late", [f"round 0: exclude node a for 10 s: {LATE}"]),
        (2, "a 1 goodbye", ["round 0: let node a go: it said goodbye"]),
        (3, "a 2 joined", ["round 0: let node a wait for 8 s: it came back before its exclusion was over"]),
        (11, "a 2 heard", ["round 0: readmit node a: it responds after its exclusion"]),
        (11, "a 2 late", [f"round 0: exclude node a for 20 s: {LATE}"]),
    ],
    "what one tick decides comes in the order of names": [
        (0, "0 1 joined", ["round 0: admit node 0: it joined"]),
        (
            15,
            "tick",
            [
                "round 0: exclude node 0 for 10 s: it has been silent for 15 s",
                "round 0: exclude node a for 10 s: it has been silent for 15 s",
                "round 0: exclude node b for 10 s: it has been silent for 15 s",
            ],
        ),
    ],
    "who never joined is told to": [
        (1, "c 1 heard", ["round 0: dismiss node c: it has to join first"]),
        (1, "c 1 contributed", ["round 0: dismiss node c: it has to join first"]),
        (1, "c 1 disconnected", []),
        (1, "c 1 late", []),
        (1, "c 1 goodbye", []),
    ],
    "a member without a connection when the round's time is over is passed over, its silence decides the rest": [
        (0, "round 1", []),
        (14, "b 1 heard", []),
        (14, "b 1 disconnected", ["round 1: expect node b back within 15 s: its connection broke"]),
        (14, "b 1 late", ["round 1: close without node b: its update did not come in time"]),
        (14, "a 1 heard", []),
        (28.9, "a 1 heard", []),
        (29, "tick", ["round 1: exclude node b for 10 s: it has been silent for 15 s"]),
    ],
    "a restarted master expects its members back within two patiences and remembers exclusions": [
        (1, "b 1 late", [f"round 0: exclude node b for 10 s: {LATE}"]),
        (1, "c 1 joined", ["round 0: admit node c: it joined"]),
        (2, "restart", []),
        (3, "b 1 joined", ["round 0: let node b wait for 8 s: it came back before its exclusion was over"]),
        (4, "a 1 joined", ["round 0: continue with node a: it found the restarted master"]),
        (18, "a 1 heard", []),
        (31.9, "a 1 heard", []),
        (31.9, "tick", []),
        (
            32,
            "tick",
            ["round 0: exclude node c for 10 s: it did not come back within 30 s of the master's restart"],
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rows", TABLE.values(), ids=TABLE)
def test_event_sequences_give_the_expected_decisions(rows: list[Row]) -> None:
    play([*JOINED, *rows])


def test_only_present_nodes_are_awaited() -> None:
    scene = play(
        [
            *JOINED,
            (0, "c 1 joined", ["round 0: admit node c: it joined"]),
            (0, "d 1 joined", ["round 0: admit node d: it joined"]),
            (1, "b 1 late", [f"round 0: exclude node b for 10 s: {LATE}"]),
            (1, "c 1 disconnected", ["round 0: expect node c back within 14 s: its connection broke"]),
            (1, "d 1 goodbye", ["round 0: let node d go: it said goodbye"]),
            (2, "round 1", []),
        ]
    )
    assert scene.present == ("a",)
    assert scene.awaited == {"a"}


def test_round_closes_when_all_have_contributed_or_been_dropped() -> None:
    scene = play([*JOINED, (1, "round 1", []), (2, "a 1 contributed", [])])
    assert scene.awaited == {"b"}
    late, transitions = after(scene, "b 1 late", 3)
    assert late.awaited == frozenset()
    assert [transition.kind for transition in transitions] == ["pass over", "exclude"]
