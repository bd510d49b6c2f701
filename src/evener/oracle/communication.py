"""What collectives cost between ranks joined by links of latency alpha [s] and inverse bandwidth beta [s/byte].

Ring algorithms (Patarasuk & Yuan 2009; Thakur et al. 2005): p ranks, n bytes,
all-reduce: 2 (p-1) steps of n/p bytes each.
"""

from __future__ import annotations


def all_reduce_seconds(nbytes: float, size: int, alpha: float, beta: float) -> float:
    """Seconds of a ring all-reduce of `nbytes` over `size` ranks: 2 (p-1) (alpha + n/p beta)."""
    return 0.0 if size < 2 else 2 * (size - 1) * (alpha + nbytes / size * beta)


def ring_bytes(nbytes: int, size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `nbytes`: 2 (p-1)/p n."""
    return 2 * (size - 1) * nbytes / size
