"""Decides where the stages of every replica begin and on which ranks they are, and what they will hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from evener.errors import InvalidValue
from evener.memory import usable_memory
from evener.oracle.schedule import SCHEDULES, ScheduleName, max_held
from evener.oracle.stages import DeviceGroup, Held, StageCut, Unit, divide
from evener.parallel.pipeline.layout import Layout, lay_out, positions_of
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.rematerialise import Rematerialise, recomputed
from evener.parallel.pipeline.stage_timing import Costs, estimated_seconds, measured_seconds, told_seconds

ON_THEIR_WAY = 6
"""Micro-batches whose inputs or outputs a stage holds at most while they come in and go out."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asked for.

    Attributes:
        begins: names of the modules at which the second and later stages begin; None to choose.
        micro_batches: M.
        schedule: order of a stage's work.
        rematerialise: what is computed twice.
        costs: by which stages are balanced.
        loss: of what the model returns for a micro-batch, if it is to be timed with the last part.
        team: memory of the ranks and what joins them; None to take what is free, and links that cost nothing.
    """

    begins: tuple[str, ...] | None
    micro_batches: int
    schedule: ScheduleName
    rematerialise: Rematerialise
    costs: Costs
    team: DeviceGroup | None
    loss: Callable[[Any], Tensor] | None = None

    def held(self, stages: int) -> Held:
        """How many micro-batches every stage holds; `auto` holds as few as it has to."""
        policy: Rematerialise = "always" if self.rematerialise == "auto" else self.rematerialise
        rows = [SCHEDULES[self.schedule](stage, stages, self.micro_batches) for stage in range(stages)]
        return Held(
            waiting=tuple(max_held(actions) + ON_THEIR_WAY for actions in rows),
            kept=tuple(max_held(actions, recomputed(policy, actions, 0)) for actions in rows),
        )


@dataclass(frozen=True, kw_only=True)
class Design:
    """What was decided for one replica.

    Attributes:
        layout: where everything is.
        division: the oracle's answer, with its prediction; None where the user said where stages begin.
        memory: bytes of every stage's device that it may take.
        weight_bytes: of every stage: weights, gradients, the optimiser's state.
        boundary_bytes: of every stage: what comes in for one micro-batch.
        kept_bytes: of every stage: activations of one micro-batch.
        passing_bytes: of every stage: the most that is there besides for a moment, of one micro-batch.
        seconds: of every stage on its device for one micro-batch, forward and backward; where they were not measured,
            estimates of which only the ratios mean something.
        work: of every stage, the fraction of all work: of the seconds that everything takes on one device.
    """

    layout: Layout
    division: StageCut | None
    memory: tuple[float, ...]
    weight_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    passing_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    work: tuple[float, ...]

    def most_kept(self, stage: int, waiting: int, scale: float = 1.0) -> float:
        """Number of micro-batches whose activations fit, beside the inputs of `waiting` ones.

        Args:
            stage: that holds them.
            waiting: micro-batches between forward and backward.
            scale: samples of a micro-batch, relative to the one that the model was cut with.
        """
        passing = scale * ((waiting + ON_THEIR_WAY) * self.boundary_bytes[stage] + self.passing_bytes[stage])
        room = self.memory[stage] - self.weight_bytes[stage] - passing
        return room / max(1.0, scale * self.kept_bytes[stage])


class _Offer(msgspec.Struct, frozen=True):
    """What is known of a device: free memory, and seconds of every part of the model, if they were measured."""

    memory: float
    seconds: list[float]


def design(
    model: PartitionProblem,
    wish: Wish,
    devices: Sequence[torch.device],
    replicas: Sequence[Sequence[int]],
    gather: Callable[[bytes], list[bytes]],
    speed: float = 1.0,
) -> list[Design]:
    """The designs of all replicas; the same on every rank.

    Args:
        model: to be cut.
        wish: what was asked for.
        devices: of this process.
        replicas: for each one the ranks (or numbers of devices) that compute it.
        gather: every process's message.
        speed: to which this process is slowed down on purpose.

    Raises:
        InvalidValue: there are not enough places to cut, or not where the user wants them.
        DoesNotFit: no cut fits the memory.
    """
    for ranks in replicas:
        _require_places(model, len(ranks))
    measured = wish.begins is None and wish.costs == "measured"
    seconds = {d: _measured(model, d, wish.loss) if measured else [] for d in devices}
    own = msgspec.msgpack.encode([_Offer(usable_memory(str(d))[1], [s / speed for s in seconds[d]]) for d in devices])
    offers = list(chain(*(msgspec.msgpack.decode(row, type=list[_Offer]) for row in gather(own))))
    team = wish.team or DeviceGroup(memory=tuple(offer.memory for offer in offers))
    rows = [offer.seconds for offer in offers] if measured else [_told(model, wish.costs)] * len(offers)
    return [_design(model, wish, ranks, team, rows) for ranks in replicas]


def _design(
    model: PartitionProblem, wish: Wish, ranks: Sequence[int], team: DeviceGroup, seconds: Sequence[Sequence[float]]
) -> Design:
    division: StageCut | None = None
    if wish.begins is not None:
        positions = positions_of(model, wish.begins)
    else:
        units = _units(model, [seconds[rank] for rank in ranks])
        division = divide(units, _room(model, team.of(ranks)), wish.held(len(ranks)), len(ranks))
        positions = tuple(model.ends[end - 1] for end in division.ends[:-1])
        ranks = [ranks[device] for device in division.devices]
    spans = list(pairwise([0, *positions, len(model.costs)]))
    alike = seconds[min(ranks)]
    return Design(
        layout=lay_out(model, positions, ranks),
        division=division,
        memory=tuple(team.memory[rank] for rank in ranks),
        weight_bytes=tuple(model.weight_bytes(*span) for span in spans),
        boundary_bytes=tuple(model.boundary_bytes(begin) for begin, _ in spans),
        kept_bytes=tuple(model.kept_bytes(*span) for span in spans),
        passing_bytes=tuple(model.passing_bytes(*span) for span in spans),
        seconds=tuple(_between(model, seconds[rank], *span) for rank, span in zip(ranks, spans, strict=True)),
        work=tuple(_between(model, alike, *span) / sum(alike) for span in spans),
    )


def _room(model: PartitionProblem, team: DeviceGroup) -> DeviceGroup:
    """`team` with the memory that is left while any operation's backward pass runs, wherever it will be."""
    passing = model.passing_bytes(0, len(model.costs))
    return replace(team, memory=tuple(memory - passing for memory in team.memory))


def _measured(model: PartitionProblem, device: torch.device, loss: Callable[[Any], Tensor] | None) -> list[float]:
    return measured_seconds(model.traced, model.skeleton, model.cut_points, device, loss)


def _between(model: PartitionProblem, seconds: Sequence[float], begin: int, end: int) -> float:
    """Sum of the `seconds` of the parts of operations [begin, end)."""
    return sum(own for own, (first, last) in zip(seconds, model.spans, strict=True) if begin <= first and last <= end)


def _units(model: PartitionProblem, seconds: Sequence[Sequence[float]]) -> list[Unit]:
    return [
        Unit(
            seconds=tuple(row[i] for row in seconds),
            weight_bytes=model.weight_bytes(begin, end),
            kept_bytes=model.kept_bytes(begin, end),
            boundary_bytes=model.boundary_bytes(end),
        )
        for i, (begin, end) in enumerate(model.spans)
    ]


def _told(model: PartitionProblem, costs: Costs) -> list[float]:
    """Seconds of every part between two places, estimated or as the user's function says."""
    told = told_seconds(model.traced, model.skeleton, costs) if callable(costs) else estimated_seconds(model.costs)
    return [sum(told[begin:end]) for begin, end in model.spans]


def _require_places(model: PartitionProblem, stages: int) -> None:
    """Raises InvalidValue if there are too few places to cut; names modules that could not be looked into."""
    if len(model.cut_points) + 1 < stages:
        whole = "".join(f"; {path} stays whole because of {why}" for path, why in model.traced.whole.items())
        allowed = f"at most {len(model.cut_points) + 1}, as there are {len(model.cut_points)} places to cut{whole}"
        raise InvalidValue("stages", stages, allowed)
