"""The record of an elastic run: nodes that left or joined, the time this cost, and unreported steps."""

from __future__ import annotations

import time

import msgspec

from evener.comm.group import Group
from evener.data.sampler import Sampler
from evener.membership.elastic_group import ElasticGroup
from evener.membership.generation import Generation
from evener.records.decoding import decode_json
from evener.records.history import Entry, History
from evener.records.record import Event
from evener.training.monitor import Monitor


def tell_generation(
    generation: Generation,
    membership: ElasticGroup,
    monitor: Monitor,
    group: Group,
    mark: float,
    num_nodes: int,
    last: int,
    repeated: int = 0,
) -> float:
    """Record why `generation` began and how much time it cost; return the time on this rank. All ranks call this.

    Args:
        generation: with the reasons of previous ones that were not recorded.
        membership: with the time when this process learnt of a loss.
        monitor: keeps the history.
        group: the ranks of the generation.
        mark: when the last step ended here, by `time.perf_counter`.
        num_nodes: of the whole run.
        last: step that is contained in the weights.
        repeated: steps that were done and will be done again.
    """
    now = time.perf_counter()
    seconds_here = (now - mark, now - membership.known_at if membership.known_at else 0.0)
    rows = group.all_gather_bytes(msgspec.json.encode(seconds_here))
    lost, since = map(max, zip(*(decode_json(row) for row in rows), strict=True))
    membership.known_at, history = 0.0, monitor.history
    if generation.number == 1:
        return now
    lost += repeated * history.seconds / max(1, history.last_step)
    history.lost_seconds += lost
    count = len(generation.participants)
    who, verb = ("node", "goes") if count == 1 else ("nodes", "go")
    message = f"{generation.reason}; {count} {who} of {num_nodes} {verb} on"
    if generation.lost:
        message += f" with step {last + 1}, {since:.3f} s after that was known; {lost:.3f} s lost"
    if repeated:
        message += f"; {repeated} step{'' if repeated == 1 else 's'} to be done again"
    changes = [("node lost", generation.lost), ("left", generation.left), ("joined", generation.joined)]
    (kind, nodes), *others = [(kind, nodes) for kind, nodes in changes if nodes]
    monitor.emit(Event(step=last, kind=kind, message=message, nodes=nodes))
    for kind, nodes in others:  # a node may even be lost and come back in one generation
        monitor.emit(Event(step=last, kind=kind, message=f"{', '.join(nodes)} {kind}", nodes=nodes))
    return now


def add_untold(history: History, sampler: Sampler, first: int, last: int) -> None:
    """Count steps up to `last` whose reports were lost with a node; the run's first one here was `first`."""
    for step in range(max(history.last_step, first - 1) + 1, last + 1):
        part = sampler.step(step)[0]
        history.add(Entry(step=step, epoch=part.epoch, samples=part.total, num_unknown=part.total, steps=1))
