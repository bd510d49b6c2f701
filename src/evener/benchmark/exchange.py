"""What an all-reduce costs among the ranks of a run: the alpha and beta of the ring that they form together."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from evener.benchmark.clock import now
from evener.comm.group import Group

_SMALL_BYTES = 8
_LEAST_LARGE_BYTES = 2**20
_ROUNDS = 5
_MESSAGES = 20


def measure_all_reduce(group: Group, largest_bytes: int) -> tuple[float, float]:
    """(alpha [s], beta [s/byte]) of a ring all-reduce: 2 (p-1) (alpha + n/p beta) seconds for n bytes over p ranks.

    All ranks of the group call this and get the same answer, that of the slowest.

    Args:
        group: the ranks; (0, 0) for a single one.
        largest_bytes: of the messages to come; the large message is of this size, within reason.
    """
    if group.size == 1:
        return 0.0, 0.0
    large_bytes = min(max(largest_bytes, _LEAST_LARGE_BYTES), 25 * 2**20)
    small, large = (_seconds(group, nbytes) for nbytes in (_SMALL_BYTES, large_bytes))
    steps = 2 * (group.size - 1)
    alpha = small / steps
    beta = max(0.0, large - small) / steps * group.size / large_bytes
    agreed = group.all_reduce_max([alpha, beta])
    return agreed[0], agreed[1]


def measure_message(group: Group) -> float:
    """Seconds of an exchange of small tensors among all ranks, such as BatchNorm's statistics: that of the slowest."""
    if group.size == 1:
        return 0.0
    message, taken = torch.zeros(64, device=group.device), []
    for _ in range(_MESSAGES):
        start = time.perf_counter()
        group.all_sum(message, "measuring")
        taken.append(now(group.device) - start)
    return group.all_reduce_max([median(taken)])[0]


def measure_passing(group: Group, sender: int, receiver: int, nbytes: int) -> float:
    """Seconds of a tensor of `nbytes` from one rank to another; every rank of the group calls this."""
    if group.rank not in (sender, receiver):
        return group.all_reduce_max([0.0])[0]
    numbers, peer = torch.zeros(max(1, nbytes // 4)), sender + receiver - group.rank
    numbers = numbers.to(group.device if dist.get_backend(group.process_group) == "nccl" else "cpu")
    taken = []
    for _ in range(_MESSAGES):
        start = now(group.device)
        for mine in (group.rank == sender, group.rank == receiver):
            if mine:
                work = dist.isend(numbers, group=group.process_group, group_dst=peer)
            else:
                work = dist.irecv(numbers, group=group.process_group, group_src=peer)
            assert work is not None
            work.wait()
        taken.append((now(group.device) - start) / 2)
    return group.all_reduce_max([median(taken)])[0]


def _seconds(group: Group, nbytes: int) -> float:
    """Least seconds of an all-reduce of `nbytes`."""
    buffer = torch.zeros(nbytes // 4, device=group.device)
    best = float("inf")
    for _ in range(_ROUNDS):
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(buffer, "measuring")
        best = min(best, now(group.device) - start)
    return best
