"""Measures links: a message between two ranks costs alpha + bytes * beta seconds, by ping-pong.

    for every pair:                     all other ranks wait at the barrier
        asker                           answerer
        send the header (bytes, rounds) receive it; no rounds: done with this pair
        rounds times:
            send payload         ->     receive payload
            receive payload      <-     send payload
        the shortest round trip counts

Each rank waits for its message before it sends the next one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from evener.benchmark.timing import now
from evener.comm.group import Group
from evener.records.decoding import decode_json
from evener.records.errors import NodeLost, require
from evener.records.profile import LinkProfile

_HEADER = struct.Struct("<qq")
_MAX_RANKS_FOR_ALL_PAIRS = 8
_SMALL_BYTES = 8
_LARGE_BYTES = tuple(1 << power for power in range(16, 28, 2))
_LONG_ROUND_TRIP_S = 0.008
_TRIAL_ROUNDS = 3
_MAX_ROUNDS = 400
_TURNS = 4
_MESSAGES = 20


def measure_links(group: Group, first: int = 0, seconds: float = 0.5) -> tuple[LinkProfile, ...]:
    """Measure alpha and beta between the ranks of `group`; every rank must call this.

    All pairs are measured up to 8 ranks; with more, neighbours in the ring and every rank with rank 0.

    Args:
        group: the ranks; every wait is bounded by the timeout of its process groups.
        first: index, in the profile, of the device of rank 0; the other ranks follow in order.
        seconds: duration per pair; a slow link may take longer, at least three round trips of 64 KB.

    Returns:
        One profile per measured pair, by source and target, the same on every rank; empty for a single rank.

    Raises:
        InvalidValue: `seconds` is not positive.
        NodeLost: a rank did not answer in time.
    """
    require(seconds > 0, "seconds", seconds, "positive")
    own_links = []
    try:
        for asker, answerer in pairs(group.size):
            group.barrier()
            if group.rank == asker:
                own_links.append(_ask(group, answerer, seconds, first))
            elif group.rank == answerer:
                _answer(group, asker)
        parts = group.all_gather_bytes(msgspec.json.encode(own_links))
    except RuntimeError as error:
        me = f"node {group.nodes[group.rank]} (rank {group.rank})"
        raise NodeLost(f"{me} got no answer from a rank while measuring links: {error}") from error
    links = [link for part in parts for link in decode_json(part, list[LinkProfile])]
    return tuple(sorted(links, key=lambda link: (link.source, link.target)))


def measure_lines(group: Group, hosts: Sequence[str]) -> list[float]:
    """Return the bytes per second that every rank's line carries each way, while the others' carry as much.

    Ranks are paired as in a tournament; the two of a pair send to each other at once. A line carries what it does with
    its best partner: with the others, theirs is the limit. Every rank of the group calls this and gets the same result.

    Args:
        group: ranks on two machines or more.
        hosts: machine of every rank; two on one machine measure no line.

    Raises:
        NodeLost: a rank did not answer in time.
    """
    best = 0.0
    try:
        for partners in _rounds_of_pairs(group.size):
            group.barrier()
            peer = partners.get(group.rank)
            if peer is not None and hosts[peer] != hosts[group.rank]:
                best = max(best, _rate_with(group, peer))
        rows = group.all_gather_bytes(struct.pack("<d", best))
    except RuntimeError as error:
        me = f"node {group.nodes[group.rank]} (rank {group.rank})"
        raise NodeLost(f"{me} got no answer from a rank while measuring lines: {error}") from error
    return [float(struct.unpack("<d", row)[0]) for row in rows]


def measure_message(group: Group, sender: int, receiver: int, nbytes: int) -> float:
    """Return the seconds of a tensor of `nbytes` from one rank to another; every rank of the group calls this."""
    seconds = 0.0
    if group.rank in (sender, receiver):
        peer = sender + receiver - group.rank
        seconds = median(_ping_pong(group, peer, max(4, nbytes), _MESSAGES, leads=group.rank == sender)) / 2
    return group.all_reduce_max([seconds])[0]


def pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs (lower rank, higher rank) of `size` ranks to measure, in order.

    All pairs are measured up to 8 ranks; with more, neighbours in the ring and every rank with rank 0.
    """
    if size <= _MAX_RANKS_FOR_ALL_PAIRS:
        return list(combinations(range(size), 2))
    return sorted({(0, rank) for rank in range(1, size)} | {(rank, rank + 1) for rank in range(size - 1)})


def _rounds_of_pairs(size: int) -> list[dict[int, int]]:
    """Return rounds in which every rank has another partner, or none if their number is odd."""
    seats = list(range(size + size % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [pair for pair in zip(seats, seats[::-1], strict=True) if max(pair) < size]
        rounds.append(dict(pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _rate_with(group: Group, peer: int) -> float:
    """Return the bytes per second that both ranks send each other at the same time; both call this."""
    small = _exchange_seconds(group, peer, _SMALL_BYTES)
    for nbytes in _LARGE_BYTES:
        seconds = max(_exchange_seconds(group, peer, nbytes) - small, 1e-9)
        if seconds > _LONG_ROUND_TRIP_S:
            break
    return nbytes / seconds


def _exchange_seconds(group: Group, peer: int, nbytes: int) -> float:
    """Return the shortest of some times in which both ranks send each other `nbytes`; both get that of the slower."""
    assert group.mesh is not None
    outgoing, incoming = _payload(group, nbytes), _payload(group, nbytes)
    best = float("inf")
    for _ in range(_TRIAL_ROUNDS):
        group.mesh.send_to(peer, b".")
        group.mesh.receive_from(peer)
        start = time.perf_counter()
        messages = [
            dist.irecv(incoming, group=group.process_group, group_src=peer),
            dist.isend(outgoing, group=group.process_group, group_dst=peer),
        ]
        for message in messages:
            assert message is not None
            message.wait()
        best = min(best, now(incoming.device) - start)
    group.mesh.send_to(peer, struct.pack("<d", best))
    (other,) = struct.unpack("<d", group.mesh.receive_from(peer))
    return max(best, float(other))


def latency_and_cost(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Return (alpha, beta) of the line through two messages of (bytes, seconds one way); neither is negative."""
    beta = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
    return max(0.0, small[1] - small[0] * beta), beta


def _ask(group: Group, peer: int, seconds: float, first: int) -> LinkProfile:
    """Lead the measurement with `peer`: small and large messages in turn, and the shortest time of each."""
    deadline = time.perf_counter() + seconds
    large_bytes, large = _large_message(group, peer)
    small = _round_trip(group, peer, _SMALL_BYTES, _TRIAL_ROUNDS)
    share = seconds / _TURNS / 2
    while time.perf_counter() < deadline:
        small = min(small, _round_trip(group, peer, _SMALL_BYTES, _rounds(share, small)))
        large = min(large, _round_trip(group, peer, large_bytes, _rounds(share, large)))
    _send_header(group, peer, 0, 0)
    alpha, beta = latency_and_cost((_SMALL_BYTES, small / 2), (large_bytes, large / 2))
    backend = dist.get_backend(group.process_group)
    return LinkProfile(source=first + group.rank, target=first + peer, alpha=alpha, beta=beta, backend=backend)


def _large_message(group: Group, peer: int) -> tuple[int, float]:
    """Return the bytes of a message whose latency is negligible, and its round-trip seconds."""
    for nbytes in _LARGE_BYTES:
        seconds = _round_trip(group, peer, nbytes, _TRIAL_ROUNDS)
        if seconds > _LONG_ROUND_TRIP_S:
            break
    return nbytes, seconds


def _rounds(seconds: float, round_trip: float) -> int:
    """Return the number of round trips that fit `seconds`, from 1 to a limit."""
    return int(min(max(seconds / max(round_trip, 1e-9), 1), _MAX_ROUNDS))


def _round_trip(group: Group, peer: int, nbytes: int, rounds: int) -> float:
    """Return the shortest of `rounds` round trips with messages of `nbytes`."""
    _send_header(group, peer, nbytes, rounds)
    return min(_ping_pong(group, peer, nbytes, rounds, leads=True))


def _answer(group: Group, peer: int) -> None:
    """Return what the asker `peer` sends, until it sends a header without rounds."""
    assert group.mesh is not None
    while True:
        nbytes, rounds = _HEADER.unpack(group.mesh.receive_from(peer))
        if rounds == 0:
            return
        _ping_pong(group, peer, nbytes, rounds, leads=False)


def _ping_pong(group: Group, peer: int, nbytes: int, rounds: int, *, leads: bool) -> list[float]:
    """Return the round-trip seconds of every round with `peer`; the leader sends first."""
    payload, seconds = _payload(group, nbytes), []
    for _ in range(rounds):
        start = time.perf_counter()
        for sends in (leads, not leads):
            if sends:
                work = dist.isend(payload, group=group.process_group, group_dst=peer)
            else:
                work = dist.irecv(payload, group=group.process_group, group_src=peer)
            assert work is not None
            work.wait()
        seconds.append(now(payload.device) - start)
    return seconds


def _send_header(group: Group, peer: int, nbytes: int, rounds: int) -> None:
    assert group.mesh is not None
    group.mesh.send_to(peer, _HEADER.pack(nbytes, rounds))


def _payload(group: Group, nbytes: int) -> Tensor:
    """Return a message on this rank's device."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=group.device)
