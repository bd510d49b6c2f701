"""Who may join is decided from what it says of itself: refusals carry a cure, remarks say what differs."""

from __future__ import annotations

from typing import Any

import pytest

from evener.ps.config import Versions
from evener.ps.handlers import CLOCK_SECONDS, Admission, admission_of
from evener.ps.messages import PROTOCOL, Join

HERE = Versions("0.1.0", "3.11.7", "2.13.0")


def join(**words: Any) -> Join:
    usual: dict[str, Any] = {
        "protocol": PROTOCOL,
        "name": "attic",
        "incarnation": 1,
        "evener": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.1",
        "clock": 1000.0,
        "device": "cpu",
    }
    return Join(**{**usual, **words})


def test_a_node_like_the_master_is_received_without_a_word() -> None:
    assert admission_of(join(), HERE, 1000.0) == Admission()
    assert admission_of(join(torch=""), HERE, 1000.0 + CLOCK_SECONDS) == Admission()


def test_another_protocol_is_refused_with_both_versions_and_a_cure() -> None:
    found = admission_of(join(protocol=PROTOCOL + 1, evener="9.0"), HERE, 1000.0)
    assert found.refusal == (
        "Evener 9.0 on the node does not understand Evener 0.1.0 on the master: install the same version on both"
    )


@pytest.mark.parametrize("name", ["", " attic", "at\ntic", "x" * 65])
def test_a_name_that_would_spoil_a_table_is_refused(name: str) -> None:
    assert "1 to 64 printable characters" in admission_of(join(name=name), HERE, 1000.0).refusal


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ({"clock": 1008.0}, "the clock of node attic is 8 s ahead of the master's: let both follow NTP"),
        ({"clock": 992.0}, "the clock of node attic is 8 s behind the master's: let both follow NTP"),
        ({"evener": "0.1.1"}, "node attic runs Evener 0.1.1, the master 0.1.0"),
        ({"python": "3.12.1"}, "node attic runs Python 3.12, the master 3.11"),
        ({"torch": "2.12.0"}, "node attic runs PyTorch 2.12, the master 2.13"),
    ],
)
def test_what_differs_is_remarked(words: dict[str, Any], remark: str) -> None:
    assert admission_of(join(**words), HERE, 1000.0) == Admission(remarks=(remark,))
