"""Copies of every rank's part of a model in the memory of the next rank: one lost node loses no state.

own part  ->  kept here  ->  sent to the rank after this one, on another node
                             kept there, until all ranks have the copies of a later step
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.group import Group
from evener.oracle.replication import replication_interval
from evener.training.elastic.held_state import StateHead, read_head

_TAG = 77
"""Of messages that no pipeline sends."""


class PartCopies:
    """The copies on this rank: of its part, and of the part of the previous rank.

    Args:
        group: the ranks, which may change.

    Attributes:
        every: steps between two copies; 0: none are made.
        seconds: that the last copy took, on the slowest rank.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._kept: list[bytes] = []
        self._step, self._largest = 0, 0
        self.every, self.seconds = 0, 0.0

    def end(self) -> None:
        """Drop the copies, and make no more."""
        self._kept, self.every = [], 0

    def is_due(self, step: int) -> bool:
        """Return whether a copy is due after `step`."""
        return self.every > 0 and step >= self._step + self.every

    @property
    def words(self) -> str:
        """The interval of the copies, as a message to the user."""
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        return (
            f"{steps} each node's part is copied into the next node's memory, up to {self._largest / 1e6:.1f} MB in "
            f"{self.seconds:.3f} s: a lost node costs no more than the steps since then"
        )

    def copy(self, step: int, part: bytes, step_seconds: float) -> None:
        """Keep this rank's encoded part, and that of the rank before; all ranks call this after the same step.

        On return, all ranks have the copies; an interrupted rank keeps the previous ones, too.

        Args:
            step: whose state it is.
            part: this rank's encoded part.
            step_seconds: of a step, the same on all ranks; it decides when the next copy is due.
        """
        group, begin = self._group, time.perf_counter()
        sizes = [int(row) for row in group.all_gather_bytes(str(len(part)).encode())]
        before = (group.rank - 1) % group.size
        taken = torch.empty(sizes[before], dtype=torch.uint8)
        sent = _tensor_of(part)
        works = [
            dist.isend(sent, group=group.process_group, group_dst=(group.rank + 1) % group.size, tag=_TAG),
            dist.irecv(taken, group=group.process_group, group_src=before, tag=_TAG),
        ]
        for work in works:
            assert work is not None
            work.wait()
        new = [part, taken.numpy().tobytes()]
        self._kept += new
        (self.seconds,) = group.all_reduce_max([time.perf_counter() - begin])
        self._kept, self._step, self._largest = new, step, max(sizes)
        self.every = replication_interval(self.seconds, step_seconds)

    def held(self) -> list[tuple[StateHead, bytes]]:
        """Return the copies, each with its header."""
        return [(read_head(data), data) for data in self._kept]


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
