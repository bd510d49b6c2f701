"""Prices pipelines of teams: several devices compute each stage and divide its layers by filter or channel.

    seconds of a pass of a stage = sum over its layers of  max over its devices + the layer's collectives

Tensors between stages travel along as many lanes as a team has devices, simultaneously and complete on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from evener.oracle.cost.model import CostEstimate, CostModel, worst_of
from evener.oracle.cost.pipeline import PipelineReplica, make_pipeline
from evener.oracle.cost.replica import ReplicaCost
from evener.oracle.division.rules import Division
from evener.records.plan import Strategy


def price_stage_teams(
    model: CostModel, teams: Sequence[Sequence[int]], mode: Division, micro_batches: int
) -> CostEstimate:
    """Return the cost of a step in a pipeline whose stages are computed by `teams` of devices.

    Raises:
        DoesNotFit: no cut of the model fits the memory of the devices.
    """
    micro = -(-model.job.batch_size // micro_batches)
    channel = model.topology.ring(*teams)
    costs = [ReplicaCost(model, team, mode, channel) for team in teams]
    line = make_pipeline(model, [team[0] for team in teams], micro, micro_batches, costs)
    ordered = [costs[i] for i in line.order]
    devices = tuple(device for cost in ordered for device in cost.devices)
    inside, inside_bytes = _exchanges(model, ordered, line, micro)
    longest = max(range(len(ordered)), key=lambda stage: line.timeline.busy[stage])
    pairs = [(d, n) for cost, n in zip(ordered, line.parameter_bytes, strict=True) for d in cost.devices]
    exchanging = micro_batches * inside[longest]
    busy = max(line.timeline.busy)
    computing = (busy - exchanging + max(model.update_seconds(*pair) for pair in pairs)) * model.stretch(devices)
    sending = 2 * sum(line.transfer)
    waiting, members = max(0.0, line.timeline.seconds - busy - sending), len(teams[0])
    return CostEstimate(
        strategy=cast(Strategy, f"pipeline+{mode}"),
        devices=devices,
        replicas=(0,) * len(devices),
        samples=(micro,) * len(devices),
        shares=_shares(ordered, line),
        accumulate=micro_batches,
        stages=line.starts,
        members=members,
        compute_seconds=computing,
        communication_seconds=sending + exchanging,
        waiting_seconds=waiting,
        sent_bytes=round(line.sent_bytes + micro_batches * max(inside_bytes)),
        memory_bytes=tuple(nbytes for nbytes in line.memory_bytes for _ in range(members)),
        bottleneck=worst_of(
            (
                (computing, "computing of the slowest stage"),
                (sending, "sending activations from stage to stage"),
                (exchanging, "exchanges between the devices of a stage"),
                (waiting, "bubbles: stages wait while the first micro-batches arrive and the last ones leave"),
            )
        ),
    )


def _exchanges(
    model: CostModel, costs: Sequence[ReplicaCost], line: PipelineReplica, samples: int
) -> tuple[list[float], list[float]]:
    """Return (seconds, bytes of the device that sends most) inside every stage, for a micro-batch of `samples`."""
    spans = [slice(a, b) for a, b in pairwise([*line.starts, len(model.layers)])]
    seconds, sent = [], []
    for cost, span in zip(costs, spans, strict=True):
        split = cost.division
        seconds.append(float(cost.exchanges(samples)[span].sum()))
        nbytes = split.forward.nbytes + split.backward.nbytes if split is not None else None
        sent.append(samples * float(nbytes[span].sum()) if nbytes is not None else 0.0)
    return seconds, sent


def _shares(costs: Sequence[ReplicaCost], line: PipelineReplica) -> tuple[float, ...]:
    """Return the fraction of all work of every device: its share of its stage's fraction."""
    stages = [busy / sum(line.timeline.busy) for busy in line.timeline.busy]
    pairs = zip(costs, stages, strict=True)
    return tuple(stage * share / sum(cost.shares) for cost, stage in pairs for share in cost.shares)
