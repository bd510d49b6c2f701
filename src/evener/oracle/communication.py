"""What collectives cost between ranks joined by links of latency alpha [s] and inverse bandwidth beta [s/byte].

Sources: Thakur, Rabenseifner & Gropp 2005 (all of the table but the ring), Patarasuk & Yuan 2009 (ring). Of p ranks:

    all-reduce, ring                  2 (p-1) (alpha + n/p beta)            n: bytes that every rank has and gets
    all-reduce, recursive doubling    ceil(log2 p) (alpha + n beta)
    all-reduce, halving and doubling  2 ceil(log2 p) alpha + 2 (p-1)/p n beta
    all-gather, ring                  (p-1) (alpha + m beta)                m: bytes of the largest part
    reduce-scatter, ring              (p-1) (alpha + m beta)
    all-to-all, pairwise              (p-1) alpha + m beta                  m: most bytes that a rank sends or receives
    broadcast, binomial tree          ceil(log2 p) (alpha + n beta)
    broadcast, scatter and all-gather (ceil(log2 p) + p-1) alpha + 2 (p-1)/p n beta
    point to point                    alpha + n beta

In a ring of uneven parts every step has some rank send the largest part, and all wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from evener.errors import require


@dataclass(frozen=True)
class Channel:
    """What a message costs while its collective runs: alpha + bytes * beta seconds.

    Attributes:
        alpha: seconds.
        beta: seconds per byte.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        require(self.alpha >= 0, "alpha", self.alpha, "zero seconds or more")
        require(self.beta >= 0, "beta", self.beta, "zero seconds per byte or more")

    def seconds(self, nbytes: float) -> float:
        """Seconds of one message of `nbytes`."""
        return self.alpha + nbytes * self.beta


def all_reduce_seconds(nbytes: float, size: int, alpha: float, beta: float) -> float:
    """Seconds of a ring all-reduce of `nbytes` over `size` ranks: 2 (p-1) (alpha + n/p beta)."""
    return 0.0 if size < 2 else 2 * (size - 1) * (alpha + nbytes / size * beta)


def doubling_all_reduce_seconds(nbytes: float, size: int, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce by recursive doubling, the quickest for small messages."""
    return ceil(log2(size)) * (alpha + nbytes * beta)


def halving_all_reduce_seconds(nbytes: float, size: int, alpha: float, beta: float) -> float:
    """Seconds of a reduce-scatter by recursive halving and an all-gather by recursive doubling (Rabenseifner)."""
    return 2 * ceil(log2(size)) * alpha + 2 * (size - 1) / size * nbytes * beta


def all_gather_seconds(part_bytes: Sequence[float], alpha: float, beta: float) -> float:
    """Seconds of a ring all-gather of one part a rank, all of them possibly different."""
    return (len(part_bytes) - 1) * (alpha + max(part_bytes) * beta)


def reduce_scatter_seconds(part_bytes: Sequence[float], alpha: float, beta: float) -> float:
    """Seconds of a ring reduce-scatter that leaves each rank its part: an all-gather run backwards."""
    return all_gather_seconds(part_bytes, alpha, beta)


def all_to_all_seconds(sent_bytes: Sequence[Sequence[float]], alpha: float, beta: float) -> float:
    """Seconds of a pairwise exchange in which rank i sends `sent_bytes[i][j]` to rank j."""
    size = len(sent_bytes)
    sent = [sum(row) - row[rank] for rank, row in enumerate(sent_bytes)]
    received = [sum(row[rank] for row in sent_bytes) - sent_bytes[rank][rank] for rank in range(size)]
    return (size - 1) * alpha + max(*sent, *received) * beta if size > 1 else 0.0


def broadcast_seconds(nbytes: float, size: int, alpha: float, beta: float) -> float:
    """Seconds of a broadcast by the quicker of a binomial tree and a scatter followed by a ring all-gather."""
    rounds = ceil(log2(size))
    return min(rounds * (alpha + nbytes * beta), (rounds + size - 1) * alpha + 2 * (size - 1) / size * nbytes * beta)


def ring_bytes(nbytes: int, size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `nbytes`: 2 (p-1)/p n."""
    return 2 * (size - 1) * nbytes / size
