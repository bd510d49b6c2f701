"""What samples cost on every node: measured, or the shares that the user named instead."""

from __future__ import annotations

import msgspec

from evener.benchmark.task_timing import affine
from evener.comm.group import Group
from evener.errors import DoesNotFit, InvalidValue, require
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import Worker
from evener.profile import TaskTiming
from evener.run.prepare import Work, measure


def measured_timings(work: Work, world: Group, seat: RankEnvironment, micro: int) -> list[TaskTiming]:
    """How long the task takes on every node, all of them measuring at the same time; the same on every rank.

    Raises:
        DoesNotFit: a node cannot hold the model and one sample; on every rank.
    """
    try:
        own = b"+" + msgspec.json.encode(measure(work, world, seat, micro))
    except DoesNotFit as error:
        own = b"-" + f"node {seat.node.name}: {error}".encode()
    rows = world.all_gather_bytes(own)
    for row in rows:
        if row.startswith(b"-"):
            raise DoesNotFit(row[1:].decode())
    return [msgspec.json.decode(row[1:], type=TaskTiming) for row in rows]


def worker_of(timing: TaskTiming, accumulate: int) -> Worker:
    """What a micro-batch costs: the update, which a step makes once, counts to each of its micro-batches in part."""
    fixed, each = affine(timing)
    fixed -= timing.update_seconds * (1 - 1 / accumulate)
    return Worker(unit_seconds=max(each, 1e-9), fixed_seconds=max(fixed, 0.0), most=timing.max_samples)


def relative_shares(shares: str, size: int) -> list[float] | None:
    """Relative shares that the user named; None for measured ones. Raises InvalidValue."""
    if shares == "measured":
        return None
    if shares == "equal":
        return [1.0] * size
    try:
        weights = [float(text) for text in shares.split(",")]
    except ValueError:
        raise InvalidValue("--shares", shares, "measured, equal, or numbers such as 7,2,1") from None
    ok = len(weights) == size and min(weights) >= 0 and sum(weights) > 0
    require(ok, "--shares", shares, f"measured, equal, or {size} numbers of zero or more, one a node")
    return weights
