"""Decides where the stages of every replica begin, on which ranks they are, and what they hold and compute twice.

A stage keeps the boundary of every micro-batch between its forward and its backward pass, and the activations inside
the stage of those that it does not recompute, and of the one that it is recomputing:

    always        every micro-batch is computed again: only what came in at the stage's boundary is kept
    except_last   those whose backward pass does not follow at once (GPipe: all but the last one)
    never         none
    auto          as few as the memory allows
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor, fx, nn

from evener.oracle.schedule import SCHEDULES, Action, Rematerialise, ScheduleName, max_held
from evener.oracle.stages import DeviceGroup, Held, StageCut, Units, divide
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.placement import StagePlacement
from evener.parallel.pipeline.stage_layout import StageLayout, lay_out, positions_of
from evener.parallel.pipeline.stage_program import measured_seconds
from evener.records.errors import InvalidValue, require, require_one_of
from evener.system.memory import usable_memory
from evener.tracer.ir import record

CostFunction = Callable[[str, nn.Module | None], float]
"""Cost of an operation, from the path of the module around it (or that it is) and that module if it is one."""
Costs = Literal["measured", "estimated"] | CostFunction
"""By what stages are balanced; a function is the user's (Huang et al., 2019, let a layer bring its own estimate)."""
POLICIES = get_args(Rematerialise)
_FLOPS_PER_BYTE = 10.0
"""Of a typical device: floating-point operations in the time of moving a byte to or from memory."""
_FLOPS_PER_SECOND = 1e10
IN_FLIGHT = 6
"""Micro-batches whose inputs or outputs a stage holds at most while they come in and go out."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
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

    def __post_init__(self) -> None:
        require(self.micro_batches > 0, "micro_batches", self.micro_batches, "positive")
        require_one_of("schedule", self.schedule, SCHEDULES)
        require_one_of("rematerialise", self.rematerialise, POLICIES)

    def held(self, stages: int) -> Held:
        """How many micro-batches every stage holds; `auto` holds as few as it has to."""
        policy: Rematerialise = "always" if self.rematerialise == "auto" else self.rematerialise
        rows = [SCHEDULES[self.schedule](stage, stages, self.micro_batches) for stage in range(stages)]
        return Held(
            waiting=tuple(max_held(actions) + IN_FLIGHT for actions in rows),
            kept=tuple(max_held(actions, recomputed(policy, actions, 0)) for actions in rows),
        )


def recomputed(policy: Rematerialise, actions: Sequence[Action], most_kept: float) -> frozenset[int]:
    """Micro-batches that a stage computes again, of its forward and backward `actions`.

    Only `auto` asks for `most_kept`: the number of micro-batches whose activations fit the memory at once.
    """
    every = frozenset(action.micro_batch for action in actions)
    if policy == "always":
        return every
    if policy == "never":
        return frozenset()
    at_once = {now.micro_batch for now, then in pairwise(actions) if then == Action("backward", now.micro_batch)}
    if policy == "except_last":
        return every - at_once
    order = [action.micro_batch for action in actions if action.kind == "backward"]
    return next((choice for choice in _choices(order, at_once) if max_held(actions, choice) <= most_kept), every)


def _choices(order: Sequence[int], at_once: Collection[int]) -> list[frozenset[int]]:
    """Sets to recompute, the smaller ones first.

    Those whose backward pass comes latest are recomputed first, as they would be held longest; or, where forward and
    backward passes alternate, some of every few in a row.
    """
    found = [frozenset(order[i:]) - frozenset(at_once) for i in range(len(order) + 1)]
    for every in range(2, len(order) + 1):
        for kept in range(1, every):
            found.append(frozenset(i for i in order if i % every >= kept) - frozenset(at_once))
    return sorted(set(found), key=len)


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """What was decided for one replica; rows are of every stage.

    Attributes:
        layout: where everything is.
        division: the oracle's answer, with its prediction; None where the user said where stages begin.
        memory: bytes of the device that it may take.
        weight_bytes: weights, gradients, the optimiser's state.
        boundary_bytes: what comes in for one micro-batch.
        kept_bytes: activations of one micro-batch.
        passing_bytes: the most that is there besides for a moment, of one micro-batch.
        seconds: on its device for one micro-batch, forward and backward; where they were not measured, estimates of
            which only the ratios mean something.
        work: the fraction of all work: of the seconds that everything takes on one device.
        speeds: of lanes, how fast the ranks of every stage are, relative to each other; else empty.
    """

    layout: StageLayout
    division: StageCut | None
    memory: tuple[float, ...]
    weight_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    passing_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    work: tuple[float, ...]
    speeds: tuple[tuple[float, ...], ...] = ()

    def most_kept(self, stage: int, waiting: int, scale: float = 1.0) -> float:
        """Number of micro-batches whose activations fit, beside the inputs of `waiting` ones between both passes.

        Their samples are `scale` times those of the micro-batch that the model was cut with.
        """
        passing = scale * ((waiting + IN_FLIGHT) * self.boundary_bytes[stage] + self.passing_bytes[stage])
        room = self.memory[stage] - self.weight_bytes[stage] - passing
        return room / max(1.0, scale * self.kept_bytes[stage])


class _Device(msgspec.Struct, frozen=True):
    """What is known of a device: free memory, and seconds of every part of the model, if they were measured."""

    memory: float
    seconds: list[float]


def plan_partition(problem: PartitionProblem, config: PipelineConfig, placement: StagePlacement) -> list[PartitionPlan]:
    """The plans of all replicas, or lanes; the same on every rank.

    Raises:
        InvalidValue: there are not enough places to cut, or not where the user wants them.
        DoesNotFit: no cut fits the memory.
    """
    for ranks in placement.replicas:
        _require_places(problem, len(ranks))
    measured = config.begins is None and config.costs == "measured"

    def seconds_on(device: torch.device) -> list[float]:
        if not measured:
            return []
        return measured_seconds(problem, device, config.loss)

    seconds = {device: seconds_on(device) for device in placement.devices}
    own = [_Device(usable_memory(str(d))[1], [s / placement.speed for s in seconds[d]]) for d in placement.devices]
    rows = placement.gather(msgspec.msgpack.encode(own))
    devices = list(chain(*(msgspec.msgpack.decode(row, type=list[_Device]) for row in rows)))
    team = config.team or DeviceGroup(memory=tuple(device.memory for device in devices))
    timings = [one.seconds for one in devices] if measured else [_told(problem, config.costs)] * len(devices)
    if placement.are_lanes:
        return _lanes(problem, config, placement.replicas, team, timings)
    return [_plan(problem, config, ranks, team, timings) for ranks in placement.replicas]


def _lanes(
    problem: PartitionProblem,
    config: PipelineConfig,
    lanes: Sequence[Sequence[int]],
    memory: DeviceGroup,
    seconds: Sequence[Sequence[float]],
) -> list[PartitionPlan]:
    """The plans of `lanes`, which are cut alike: as if the ranks of each stage were one, as fast as all together.

    Activations are whole on all of them, so the least of their memories counts.
    """
    teams = list(zip(*lanes, strict=True))
    least = DeviceGroup(memory=tuple(min(memory.memory[rank] for rank in team) for team in teams))
    together = [
        [1 / sum(1 / max(one, 1e-12) for one in row) for row in zip(*(seconds[rank] for rank in team), strict=True)]
        for team in teams
    ]
    plan = _plan(problem, config, range(len(teams)), least, together)
    speeds = tuple(tuple(1 / max(sum(seconds[rank]), 1e-12) for rank in teams[team]) for team in plan.layout.ranks)
    ranks = [tuple(teams[team][lane] for team in plan.layout.ranks) for lane in range(len(lanes))]
    return [replace(plan, layout=replace(plan.layout, ranks=own), speeds=speeds) for own in ranks]


def _plan(
    problem: PartitionProblem,
    config: PipelineConfig,
    ranks: Sequence[int],
    team: DeviceGroup,
    seconds: Sequence[Sequence[float]],
) -> PartitionPlan:
    division: StageCut | None = None
    if config.begins is not None:
        positions = positions_of(problem, config.begins)
    else:
        units = _units(problem, [seconds[rank] for rank in ranks])
        passing = problem.passing_bytes(0, len(problem.costs))  # of any operation's backward pass, wherever it will be
        room = team.of(ranks)
        room = replace(room, memory=tuple(memory - passing for memory in room.memory))
        division = divide(units, room, config.held(len(ranks)), len(ranks))
        positions = tuple(problem.ends[end - 1] for end in division.ends[:-1])
        ranks = [ranks[device] for device in division.devices]
    spans = list(pairwise([0, *positions, len(problem.costs)]))
    alike = seconds[min(ranks)]
    return PartitionPlan(
        layout=lay_out(problem, positions, ranks),
        division=division,
        memory=tuple(team.memory[rank] for rank in ranks),
        weight_bytes=tuple(problem.weight_bytes(*span) for span in spans),
        boundary_bytes=tuple(problem.boundary_bytes(begin) for begin, _ in spans),
        kept_bytes=tuple(problem.kept_bytes(*span) for span in spans),
        passing_bytes=tuple(problem.passing_bytes(*span) for span in spans),
        seconds=tuple(_between(problem, seconds[rank], *span) for rank, span in zip(ranks, spans, strict=True)),
        work=tuple(_between(problem, alike, *span) / sum(alike) for span in spans),
    )


def _between(problem: PartitionProblem, seconds: Sequence[float], begin: int, end: int) -> float:
    """Sum of the `seconds` of the parts of operations [begin, end)."""
    return sum(own for own, (first, last) in zip(seconds, problem.spans, strict=True) if begin <= first and last <= end)


def _units(problem: PartitionProblem, seconds: Sequence[Sequence[float]]) -> Units:
    spans = problem.spans
    return Units(
        seconds=np.array(seconds, dtype=np.float64).T,
        weight_bytes=np.array([problem.weight_bytes(*span) for span in spans], dtype=np.float64),
        kept_bytes=np.array([problem.kept_bytes(*span) for span in spans], dtype=np.float64),
        boundary_bytes=np.array([problem.boundary_bytes(end) for _, end in spans], dtype=np.float64),
    )


def _told(problem: PartitionProblem, costs: Costs) -> list[float]:
    """Cost of every part between two places: as the user's function says, or estimated in seconds.

    An estimate is by arithmetic or by memory traffic, whichever takes longer; only ratios hold.
    """
    if callable(costs):
        told = [_cost(problem, node, costs) for node in problem.traced.operations]
    else:
        told = [max(c.flops, c.moved_bytes * _FLOPS_PER_BYTE) * 3 / _FLOPS_PER_SECOND for c in problem.costs]
    return [sum(told[begin:end]) for begin, end in problem.spans]


def _cost(problem: PartitionProblem, node: fx.Node, cost: CostFunction) -> float:
    if node.op == "call_module":
        return float(cost(str(node.target), problem.skeleton.get_submodule(str(node.target))))
    return float(cost(record(node).module, None))


def _require_places(problem: PartitionProblem, stages: int) -> None:
    """Raises InvalidValue if there are too few places to cut; names modules that could not be looked into."""
    places = len(problem.cut_points)
    if places + 1 < stages:
        whole = "".join(f"; {path} stays whole because of {why}" for path, why in problem.traced.whole.items())
        raise InvalidValue("stages", stages, f"at most {places + 1}, as there are {places} places to cut{whole}")
