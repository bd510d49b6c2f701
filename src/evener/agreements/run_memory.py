"""The memory that a run may take at its server: for itself, and for each member."""

from __future__ import annotations

from typing import NamedTuple

from evener.agreements.layout import StateLayout
from evener.agreements.settings import AgreementSettings
from evener.agreements.update import state_names


class RunMemory(NamedTuple):
    """The memory of a run at its server.

    Attributes:
        fixed_bytes: bytes of the weights, of the optimizer's state, and of what compressing merged contributions takes.
        member_bytes: bytes for each member: its contributions, and weights that it has not received or a copy of its
            own.
    """

    fixed_bytes: int
    member_bytes: int


def run_memory(agreement: AgreementSettings, layout: StateLayout) -> RunMemory:
    """Return the memory that a run of this agreement may take for weights of this layout."""
    has_own_weights = agreement.staleness != 0 or agreement.slow_link != "none"
    return RunMemory(
        layout.num_bytes
        * (1 + len(state_names(agreement.outer)) + 2 * agreement.sends_merged + agreement.remembers_gradients),
        layout.num_bytes * (agreement.depth + has_own_weights + 2 * agreement.sends_merged),
    )
