"""Divides an all-reduce among ranks whose lines differ: the share of the sums that each rank makes, and its bytes.

Each element of a tensor has an owner, which adds what the others send, and sends them the sum
(`comm.uneven_all_reduce`). A rank that owns a share f of n bytes, among p ranks, sends and receives n (1 + f (p - 2))
bytes. In a ring every rank sends and receives 2 n (p - 1) / p bytes (Patarasuk & Yuan 2009). So a rank on a slow line
that owns nothing carries p / (2 (p - 1)) of a ring's bytes: two thirds among four ranks, and never less than half.

    shares f such that all lines end after T seconds per byte:    1 + f (p - 2) = T rate,  f >= 0,  their sum is 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evener.records.errors import require

MAX_RATIO = 0.9
"""An uneven all-reduce must take at most this fraction of a ring's predicted time: less gain may be an error of
measurement."""
_MAX_FASTER = 1e6
"""Factor of the slowest line's rate above which a faster line counts no more."""


def shares_of_sums(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the share of every rank's sums that ends first; empty if a ring is as fast.

    Args:
        rates: bytes per second that each rank's line carries each way, in order of ranks.

    Raises:
        InvalidValue: a rate is not positive.
    """
    require(min(rates, default=1.0) > 0, "rate of a line", min(rates, default=1.0), "positive")
    size = len(rates)
    if size < 3:
        return ()
    rates = [min(rate / min(rates), _MAX_FASTER) for rate in rates]
    seconds = 1.0
    if sum(_wanted(rates, seconds)) < 1:
        low, high = seconds, 2 * (size - 1) / size  # the time of a ring, in which there is room for all
        for _ in range(60):
            seconds = (low + high) / 2
            low, high = (low, seconds) if sum(_wanted(rates, seconds)) >= 1 else (seconds, high)
        seconds = high
    if seconds > MAX_RATIO * 2 * (size - 1) / size:
        return ()
    wanted = _wanted(rates, seconds)
    return tuple(share / sum(wanted) for share in wanted)


def shares_among(nodes: Iterable[str], line_rates: Mapping[str, float]) -> tuple[float, ...]:
    """Return `shares_of_sums` of a rank on each of these nodes; empty if the rate of a line is not known.

    Args:
        nodes: in order of ranks.
        line_rates: bytes per second by node.
    """
    rates = [line_rates.get(node, 0.0) for node in nodes]
    return shares_of_sums(rates) if all(rates) else ()


def _wanted(rates: Sequence[float], seconds: float) -> list[float]:
    """Return the shares that the lines carry while the slowest one, of rate 1, carries the tensor `seconds` times."""
    return [max(0.0, (seconds * rate - 1) / (len(rates) - 2)) for rate in rates]


def bytes_of_uneven_all_reduce(nbytes: float, size: int, share: float) -> float:
    """Return the bytes that a rank with this share of the sums sends, and receives, for a tensor of `nbytes`."""
    return nbytes * (1 + share * (size - 2))
