"""What it takes to bring a value from one layout to another, forward and backward: a table, and its bytes.

from      to        forward         backward
split     split     own -> needed   sum to the owners       a halo, if needed regions overlap; else a re-partition
split     whole     own -> all      sum to the owners       a gather
split     alike     own -> all      the own part
partial   split     sum to owners   own -> all              a reduce-scatter
partial   whole     all-reduce      all-reduce
partial   alike     all-reduce      -
alike     split     the own part    own -> all
alike     whole     -               all-reduce
whole     split     the own part    zeros elsewhere
whole     alike     -               1 / ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from evener.oracle.division.layout import WHOLE, Layout, Shape, State, common, is_disjoint, ring_bytes
from evener.oracle.division.placement import Placement

Pattern: TypeAlias = Literal["spread", "collect", "reduce"]
"""`spread`: from owners to all who need it; `collect`: the sum of what these have, to the owners."""

PATTERNS: dict[tuple[State, State], tuple[Pattern | None, Pattern | None]] = {
    ("split", "split"): ("spread", "collect"),
    ("split", "whole"): ("spread", "collect"),
    ("split", "alike"): ("spread", None),
    ("partial", "split"): ("collect", "spread"),
    ("partial", "whole"): ("reduce", "reduce"),
    ("partial", "alike"): ("reduce", None),
    ("alike", "split"): (None, "spread"),
    ("alike", "whole"): (None, "reduce"),
    ("whole", "split"): (None, None),
    ("whole", "alike"): (None, None),
}


def elements_moved(shape: Shape, have: Placement, need: Placement) -> int:
    """What all ranks together send to bring a value there and its gradient back, for each rank but one.

    Of neighbours' parts it is not known before the shares are: it is taken for the least that is not nothing.
    """
    if have == need:
        return 0
    patterns = [pattern for pattern in PATTERNS[have.state, need.state] if pattern is not None]
    if have.state == need.state:
        return 1
    return sum(prod(shape) * (2 if pattern == "reduce" else 1) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value is brought from one placement to another, whoever the ranks are."""

    value: int
    have: Placement
    need: Placement


@dataclass(frozen=True, slots=True)
class Move:
    """A value changes its layout.

    Attributes:
        value: index of the operation that made it.
        shape: of the value.
        size: number of ranks.
        have: its layout.
        need: the layout that an operation wants.
    """

    value: int
    shape: Shape
    size: int
    have: Layout
    need: Layout

    @property
    def owners(self) -> Layout:
        """Who owns which part in the exchange behind this move, if there is one."""
        return self.have if self.have.state == "split" else self.need

    @property
    def needers(self) -> Layout:
        """Who needs which part in that exchange."""
        return self.need if self.have.state == "split" else WHOLE

    @property
    def kind(self) -> str:
        """Under which its bytes are counted."""
        if "partial" in (self.have.state,) and self.need.state == "split":
            return "reduce-scatter"
        if "split" not in (self.have.state, self.need.state) or self.have.state == "whole":
            return "all-reduce"
        if self.have.state == self.need.state:
            return "re-partition" if is_disjoint(self.need, self.shape) else "halo"
        return "gather"

    def elements(self, rank: int, backward: bool) -> tuple[float, float]:
        """(sent, received) by `rank`, in one direction of a pass."""
        pattern = PATTERNS[self.have.state, self.need.state][backward]
        if pattern is None:
            return 0, 0
        if pattern == "reduce":
            volume = ring_bytes(prod(self.shape), self.size)
            return volume, volume
        own = [self.owners.region(r, self.shape) for r in range(self.size)]
        need = [self.needers.region(r, self.shape) for r in range(self.size)]
        others = [r for r in range(self.size) if r != rank]
        given, taken = sum(common(own[rank], need[r]) for r in others), sum(common(own[r], need[rank]) for r in others)
        return (given, taken) if pattern == "spread" else (taken, given)
