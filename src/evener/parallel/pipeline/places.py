"""Which devices and ranks a pipeline runs on, from what the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evener.comm.group import Group
from evener.errors import require


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where stages run.

    Attributes:
        group: the ranks, one a stage; None if all stages are in this process.
        devices: of this process: that of its rank, or one a stage.
        replicas: of each one the ranks, or else the numbers of devices.
    """

    group: Group | None
    devices: tuple[torch.device, ...]
    replicas: tuple[tuple[int, ...], ...]

    @property
    def own_replica(self) -> int:
        """Number of the replica that this process belongs to."""
        return 0 if self.group is None else next(i for i, row in enumerate(self.replicas) if self.group.rank in row)

    @property
    def speed(self) -> float:
        """To which this process is slowed down on purpose."""
        return 1.0 if self.group is None else self.group.timer.pace.speed

    def gather(self, message: bytes) -> list[bytes]:
        """Every process's message."""
        return [message] if self.group is None else self.group.all_gather_bytes(message)


def places(
    on: Group | Sequence[torch.device] | None,
    stages: int | Sequence[str] | None,
    replicas: Sequence[Sequence[int]] | None,
) -> Places:
    """Where `stages` (their number, or names of all but the first) run.

    Raises:
        InvalidValue: they do not fit the devices, or `replicas` do not hold every rank once.
    """
    number = stages if stages is None or isinstance(stages, int) else len(stages) + 1
    require(number is None or number > 0, "stages", stages, "positive")
    group = on if isinstance(on, Group) and on.size > 1 else None
    devices = _local_devices(number) if on is None else (on.device,) if isinstance(on, Group) else tuple(on)
    size = group.size if group else len(devices)
    rows = (tuple(range(size)),) if replicas is None else tuple(tuple(ranks) for ranks in replicas)
    every = sorted(rank for ranks in rows for rank in ranks)
    require(every == list(range(size)) and all(rows), "replicas", replicas, f"each rank from 0 to {size - 1} once")
    require(group is not None or len(rows) == 1, "replicas", replicas, "a single one in a process alone")
    for ranks in rows:
        allowed = f"{len(ranks)}, one on every device or rank of a replica"
        require(number in (None, len(ranks)), "stages", stages, allowed)
    return Places(group=group, devices=devices, replicas=rows)


def _local_devices(number: int | None) -> tuple[torch.device, ...]:
    """All GPUs, or as many as there are stages; where there is none, the processor for every stage."""
    gpus = tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    return gpus[:number] if gpus else (torch.device("cpu"),) * (number or 1)
