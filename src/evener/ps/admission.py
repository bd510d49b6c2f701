"""Whether a node may join, and what its user should know of what differs between it and the master."""

from __future__ import annotations

from typing import NamedTuple

from evener.doctor.peers import CLOCK_SECONDS, minor
from evener.ps.config import Versions
from evener.ps.messages import PROTOCOL, Join

_LONGEST_NAME = 64


class Admission(NamedTuple):
    """The answer to a node.

    Attributes:
        refusal: why it may not join, with a cure; empty if it may.
        remarks: sentences for its user.
    """

    refusal: str = ""
    remarks: tuple[str, ...] = ()


def admission_of(join: Join, here: Versions, now: float) -> Admission:
    """What to answer to `join`.

    Args:
        join: of the node.
        here: what runs on the master.
        now: the master's clock, seconds since 1970.
    """
    if join.protocol != PROTOCOL:
        return Admission(
            f"Evener {join.evener} on the node does not understand Evener {here.evener} on the master: "
            "install the same version on both"
        )
    if not join.name.isprintable() or not 0 < len(join.name) <= _LONGEST_NAME or join.name != join.name.strip():
        return Admission(f"the name of a node must be 1 to {_LONGEST_NAME} printable characters, got {join.name!r}")
    return Admission(remarks=tuple(_remarks(join, here, now)))


def _remarks(join: Join, here: Versions, now: float) -> list[str]:
    """What differs and may matter: results need not be the same to the last bit, and logs do not fit each other."""
    remarks = []
    if abs(join.clock - now) > CLOCK_SECONDS:
        relation = "ahead of" if join.clock > now else "behind"
        seconds = abs(join.clock - now)
        remarks.append(f"the clock of node {join.name} is {seconds:.0f} s {relation} the master's: let both follow NTP")
    pairs = {
        "Evener": (join.evener, here.evener),
        "Python": (minor(join.python), minor(here.python)),
        "PyTorch": (minor(join.torch), minor(here.torch)),
    }
    for what, (theirs, ours) in pairs.items():
        if theirs and ours and theirs != ours:
            remarks.append(f"node {join.name} runs {what} {theirs}, the master {ours}")
    return remarks
