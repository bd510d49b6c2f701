"""The partition of a model: where the stages of every replica begin, their ranks, and what they keep and recompute.

Between forward and backward, a stage keeps the boundary tensors of every micro-batch. It also keeps the activations of
the micro-batch that it is recomputing and of those that it does not recompute. The policies recompute

    always        every micro-batch: only the tensors at the stage's boundary are kept
    except_last   micro-batches whose backward pass does not follow immediately (GPipe: all but the last one)
    never         no micro-batch
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

from evener.oracle.schedule import (
    SCHEDULES,
    Action,
    Rematerialise,
    ScheduleName,
    is_worth_more,
    max_held,
    simulate,
)
from evener.oracle.stages import DeviceGroup, Held, StageCut, Units, divide
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.placement import StagePlacement
from evener.parallel.pipeline.stage_layout import StageLayout, lay_out, positions_of
from evener.parallel.pipeline.stage_program import measured_seconds
from evener.records.decoding import decode_msgpack
from evener.records.errors import DoesNotFit, InvalidValue, require, require_one_of
from evener.system.memory import usable_memory
from evener.tracer.ir import record

CostFunction = Callable[[str, nn.Module | None], float]
"""Maps the path of an operation's module, and the module if it is the operation, to the operation's cost."""
Costs = Literal["measured", "estimated"] | CostFunction
"""Costs that balance the stages. A function is the user's estimate, as in Huang et al., 2019."""
POLICIES = get_args(Rematerialise)
_FLOPS_PER_BYTE = 10.0
"""Floating-point operations of a typical device in the time in which it moves a byte to or from memory."""
_FLOPS_PER_SECOND = 1e10
IN_FLIGHT = 6
"""Largest number of micro-batches whose inputs or outputs a stage holds while they are received and sent."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The user's options.

    Attributes:
        begins: Names of the modules at which the second and later stages begin; None to choose.
        micro_batches: M.
        schedule: Order of a stage's actions.
        others: Schedules to be used instead where they are faster, and no stage has to recompute.
        rematerialise: Policy of recomputation.
        costs: Costs that balance the stages.
        loss: Loss of the model's outputs for a micro-batch, if it is to be timed with the last part.
        team: Memory and links of the ranks; None to use the free memory, and links without cost.
    """

    begins: tuple[str, ...] | None
    micro_batches: int
    schedule: ScheduleName
    rematerialise: Rematerialise
    costs: Costs
    team: DeviceGroup | None
    loss: Callable[[Any], Tensor] | None = None
    others: tuple[ScheduleName, ...] = ()

    def __post_init__(self) -> None:
        require(self.micro_batches > 0, "micro_batches", self.micro_batches, "positive")
        require_one_of("schedule", self.schedule, SCHEDULES)
        require_one_of("rematerialise", self.rematerialise, POLICIES)

    def held(self, stages: int) -> Held:
        """Return how many micro-batches every stage holds; `auto` holds as few as possible."""
        policy: Rematerialise = "always" if self.rematerialise == "auto" else self.rematerialise
        rows = [SCHEDULES[self.schedule](stage, stages, self.micro_batches) for stage in range(stages)]
        return Held(
            waiting=tuple(max_held(actions) + IN_FLIGHT for actions in rows),
            kept=tuple(max_held(actions, recomputed(policy, actions, 0)) for actions in rows),
        )


def recomputed(policy: Rematerialise, actions: Sequence[Action], max_kept: float) -> frozenset[int]:
    """Return the micro-batches that a stage recomputes, given its forward and backward `actions`.

    `max_kept`, used only by `auto`, is the number of micro-batches whose activations fit the memory at once.
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
    return next((choice for choice in _choices(order, at_once) if max_held(actions, choice) <= max_kept), every)


def _choices(order: Sequence[int], at_once: Collection[int]) -> list[frozenset[int]]:
    """Return sets to recompute, smaller ones first.

    Micro-batches with the latest backward passes are recomputed first, as they would be held longest. Where forward and
    backward passes alternate, some of every few in a row are recomputed.

    """
    choices = [frozenset(order[i:]) - frozenset(at_once) for i in range(len(order) + 1)]
    for every in range(2, len(order) + 1):
        for num_kept in range(1, every):
            choices.append(frozenset(i for i in order if i % every >= num_kept) - frozenset(at_once))
    return sorted(set(choices), key=len)


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """The decisions for one replica. Tuples have an entry per stage.

    Attributes:
        layout: The layout of the stages.
        division: The oracle's answer, with its prediction; None if the user chose where stages begin.
        memory: Bytes of the device that the stage may use.
        weight_bytes: Bytes of weights, gradients and optimizer state.
        boundary_bytes: Bytes received for one micro-batch.
        kept_bytes: Bytes of activations of one micro-batch.
        passing_bytes: Largest number of other bytes that one micro-batch needs for a moment.
        seconds: Seconds of one micro-batch, forward and backward; estimates, of which only ratios count, unless
            measured.
        work: Fraction of all work, in seconds on one device.
        speeds: For lanes, relative speeds of the ranks of every stage; otherwise empty.
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

    def max_kept(self, stage: int, waiting: int, scale: float = 1.0) -> float:
        """Return the number of micro-batches whose activations fit, beside the inputs of `waiting` ones.

        Their samples are `scale` times those of the micro-batch that the model was cut with.
        """
        passing = scale * ((waiting + IN_FLIGHT) * self.boundary_bytes[stage] + self.passing_bytes[stage])
        room = self.memory[stage] - self.weight_bytes[stage] - passing
        return room / max(1.0, scale * self.kept_bytes[stage])


class _Device(msgspec.Struct, frozen=True):
    """A device's free memory and, if measured, the seconds of every part of the model."""

    memory: float
    seconds: list[float]


def plan_partition(
    problem: PartitionProblem, config: PipelineConfig, placement: StagePlacement
) -> tuple[list[PartitionPlan], ScheduleName]:
    """Return the plans of all replicas, or lanes, and the schedule; they are the same on every rank.

    Raises:
        InvalidValue: There are too few cut points, or none where the user wants one.
        DoesNotFit: No cut fits the memory.
    """
    for ranks in placement.replicas:
        _require_places(problem, len(ranks))
    measured = config.begins is None and config.costs == "measured"

    def seconds_on(device: torch.device) -> list[float]:
        if not measured:
            return []
        return measured_seconds(problem, device, config.loss)

    seconds = {device: seconds_on(device) for device in placement.devices}
    local_devices = [
        _Device(usable_memory(str(d))[1], [s / placement.speed for s in seconds[d]]) for d in placement.devices
    ]
    rows = placement.gather(msgspec.msgpack.encode(local_devices))
    devices = list(chain(*(decode_msgpack(row, list[_Device]) for row in rows)))
    team = config.team or DeviceGroup(memory=tuple(device.memory for device in devices))
    timings = [one.seconds for one in devices] if measured else [_estimated(problem, config.costs)] * len(devices)

    def plans_with(schedule: ScheduleName) -> list[PartitionPlan]:
        by = replace(config, schedule=schedule)
        if placement.are_lanes:
            return _lanes(problem, by, placement.replicas, team, timings)
        return [_plan(problem, by, ranks, team, timings) for ranks in placement.replicas]

    plans, best = plans_with(config.schedule), config.schedule
    for other in config.others:
        try:
            alternative = plans_with(other)
        except DoesNotFit:
            continue
        times = [_step_seconds(*row, config.micro_batches, team) for row in ((alternative, other), (plans, best))]
        if is_worth_more(*times) and not _recomputes(alternative, other, config):
            plans, best = alternative, other
    return plans, best


def _recomputes(plans: Sequence[PartitionPlan], schedule: ScheduleName, config: PipelineConfig) -> bool:
    """Return whether a stage computes activations twice."""
    for plan in plans:
        for stage in range(plan.layout.num_stages):
            actions = SCHEDULES[schedule](stage, plan.layout.num_stages, config.micro_batches)
            if recomputed(config.rematerialise, actions, plan.max_kept(stage, max_held(actions))):
                return True
    return False


def _step_seconds(
    plans: Sequence[PartitionPlan], schedule: ScheduleName, micro_batches: int, team: DeviceGroup
) -> float:
    """Return the seconds of a step of the slowest replica, in which a forward pass takes a third of a stage's time."""
    seconds = []
    for plan in plans:
        transfer = [
            team.alpha[a][b] + team.beta[a][b] * nbytes if team.alpha else 0.0
            for (a, b), nbytes in zip(pairwise(plan.layout.ranks), plan.boundary_bytes[1:], strict=True)
        ]
        forward, backward = ([part * one for one in plan.seconds] for part in (1 / 3, 2 / 3))
        seconds.append(simulate(forward, backward, micro_batches, schedule, transfer).seconds)
    return max(seconds)


def _lanes(
    problem: PartitionProblem,
    config: PipelineConfig,
    lanes: Sequence[Sequence[int]],
    memory: DeviceGroup,
    seconds: Sequence[Sequence[float]],
) -> list[PartitionPlan]:
    """Return the plans of `lanes`, which are cut alike: each stage's ranks count as one, with the sum of their speeds.

    Every rank holds whole activations, so the smallest of a team's memories counts.
    """
    teams = list(zip(*lanes, strict=True))
    smallest = DeviceGroup(memory=tuple(min(memory.memory[rank] for rank in team) for team in teams))
    together = [
        [1 / sum(1 / max(one, 1e-12) for one in row) for row in zip(*(seconds[rank] for rank in team), strict=True)]
        for team in teams
    ]
    plan = _plan(problem, config, range(len(teams)), smallest, together)
    speeds = tuple(tuple(1 / max(sum(seconds[rank]), 1e-12) for rank in teams[team]) for team in plan.layout.ranks)
    ranks = [tuple(teams[team][lane] for team in plan.layout.ranks) for lane in range(len(lanes))]
    return [replace(plan, layout=replace(plan.layout, ranks=lane_ranks), speeds=speeds) for lane_ranks in ranks]


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
        passing = problem.passing_bytes(0, len(problem.costs))  # the largest of all operations, as stages are unknown
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
    """Return the sum of the `seconds` of the parts of operations [begin, end)."""
    return sum(one for one, (first, last) in zip(seconds, problem.spans, strict=True) if begin <= first and last <= end)


def _units(problem: PartitionProblem, seconds: Sequence[Sequence[float]]) -> Units:
    spans = problem.spans
    return Units(
        seconds=np.array(seconds, dtype=np.float64).T,
        weight_bytes=np.array([problem.weight_bytes(*span) for span in spans], dtype=np.float64),
        kept_bytes=np.array([problem.kept_bytes(*span) for span in spans], dtype=np.float64),
        boundary_bytes=np.array([problem.boundary_bytes(end) for _, end in spans], dtype=np.float64),
    )


def _estimated(problem: PartitionProblem, costs: Costs) -> list[float]:
    """Return the cost of every part between two cut points, from the user's function or estimated in seconds.

    An estimate is the longer of arithmetic and memory traffic; only ratios count.
    """
    if callable(costs):
        costs_of_operations = [_cost(problem, node, costs) for node in problem.traced.operations]
    else:
        costs_of_operations = [
            max(c.flops, c.moved_bytes * _FLOPS_PER_BYTE) * 3 / _FLOPS_PER_SECOND for c in problem.costs
        ]
    return [sum(costs_of_operations[begin:end]) for begin, end in problem.spans]


def _cost(problem: PartitionProblem, node: fx.Node, cost: CostFunction) -> float:
    if node.op == "call_module":
        return float(cost(str(node.target), problem.skeleton.get_submodule(str(node.target))))
    return float(cost(record(node).module, None))


def _require_places(problem: PartitionProblem, stages: int) -> None:
    """Raise InvalidValue if there are too few cut points; the error names modules that could not be traced."""
    places = len(problem.cut_points)
    if places + 1 < stages:
        whole = "".join(f"; {path} stays whole because of {why}" for path, why in problem.traced.whole.items())
        raise InvalidValue("stages", stages, f"at most {places + 1}, because the model has {places} cut points{whole}")
