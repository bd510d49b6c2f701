"""Every rank's part of a model that nobody else has, copied into the memory of the next rank: no loss takes all of it.

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
    """The copies that this rank keeps: of its own part, and of that of the rank before it.

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
        """None are needed, nor made, any more."""
        self._kept, self.every = [], 0

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be copied."""
        return self.every > 0 and step >= self._step + self.every

    @property
    def words(self) -> str:
        """How often, for the user."""
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        return (
            f"{steps} each node's part is copied into the next node's memory, up to {self._largest / 1e6:.1f} MB in "
            f"{self.seconds:.3f} s: a lost node costs no more than the steps since then"
        )

    def copy(self, step: int, own: bytes, step_seconds: float) -> None:
        """Keep this rank's encoded part, and that of the rank before; all ranks call this after the same step.

        Whoever returns knows that all have the copies; who is interrupted keeps those of before, too.

        Args:
            step: whose state it is.
            own: the part.
            step_seconds: that a step takes, alike on all ranks, by which it is decided when the next copy is due.
        """
        group, begin = self._group, time.perf_counter()
        sizes = [int(row) for row in group.all_gather_bytes(str(len(own)).encode())]
        before = (group.rank - 1) % group.size
        taken = torch.empty(sizes[before], dtype=torch.uint8)
        sent = _tensor_of(own)
        works = [
            dist.isend(sent, group=group.process_group, group_dst=(group.rank + 1) % group.size, tag=_TAG),
            dist.irecv(taken, group=group.process_group, group_src=before, tag=_TAG),
        ]
        for work in works:
            assert work is not None
            work.wait()
        new = [own, taken.numpy().tobytes()]
        self._kept += new
        (self.seconds,) = group.all_reduce_max([time.perf_counter() - begin])
        self._kept, self._step, self._largest = new, step, max(sizes)
        self.every = replication_interval(self.seconds, step_seconds)

    def held(self) -> list[tuple[StateHead, bytes]]:
        """What is kept, and what each of it is."""
        return [(read_head(data), data) for data in self._kept]


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
