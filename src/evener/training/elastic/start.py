"""The entry of a rank into an elastic run: at its start, or later with the state that the others published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch.distributed as dist

from evener.comm.abortable_group import register_staged
from evener.comm.group import Group
from evener.comm.staged_gloo import BACKEND
from evener.comm.step_timing import StepTimer
from evener.config.run_config import RunConfig
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost, weights_to_workers
from evener.oracle.replication import MEAN_TIME_BETWEEN_LOSSES_S
from evener.records.decoding import json_decoder
from evener.records.errors import DoesNotFit, NotNeeded
from evener.records.history import History
from evener.records.plan import WHOLE_MODEL, Assignment, Plan
from evener.records.profile import TaskTiming
from evener.records.schema import Part
from evener.records.task import Task
from evener.system.accelerators import is_accelerator
from evener.system.pace import StepSeconds
from evener.training.admission import place_for
from evener.training.context import RankContext, make_context
from evener.training.costs import time_here, worker_of
from evener.training.elastic.held_state import HeldState
from evener.training.elastic.part_copies import PartCopies
from evener.training.loop import Loop
from evener.training.training import Training, follows_speeds

_STATE_KEY = "elastic/left"
_decode_reference = json_decoder(StepSeconds | None).decode


class PublishedState(Part, frozen=True, kw_only=True):
    """The published state for ranks that join later.

    Attributes:
        plan: of the run.
        uses_all: whether every weight has a gradient in every step.
        references: reference steps of throttled nodes, by name; they are measured only at the start.
    """

    plan: Plan
    uses_all: bool
    references: dict[str, StepSeconds]


def why_fixed(training: Training, config: RunConfig) -> str:
    """Return why the run needs all of its ranks; empty if it can continue without some."""
    env, strategy = training.context.env, training.plan.strategy
    reasons = {
        "nodes are replaced only where this command starts several on this machine": env.control is None,
        "there is one node": training.group.size == 1,
        f"with strategy {strategy} a node holds what others do not: it goes on with --elastic alone": (
            strategy != "data" and not config.elastic
        ),
        "the optimiser looks at whole tensors, of which each node has a part": training.optimizer.is_gathered,
        "data that stays where it is (--stationary) is lost with its node": config.stationary,
        "--compile would compile again for other shares": config.compile,
        "collectives of GPUs cannot be abandoned": training.group.has_accelerators and training.group.sums is None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def publish_state(env: RankEnvironment, group: Group, plan: Plan, *, uses_all: bool) -> None:
    """Publish the state that ranks need when they join later; all ranks call this."""
    rows = group.all_gather_bytes(msgspec.json.encode(group.timer.pace.reference))
    decoded = {name: _decode_reference(row) for name, row in zip(group.nodes, rows, strict=True)}
    if group.is_leader and env.store is not None:
        references = {name: one for name, one in decoded.items() if one is not None}
        state = PublishedState(plan=plan, uses_all=uses_all, references=references)
        env.store.set(_STATE_KEY, msgspec.json.encode(state).decode())


def late_group(env: RankEnvironment) -> tuple[Group, PublishedState]:
    """Return a group of this late rank alone, and the state that the others published."""
    assert env.store is not None
    state = env.store.get_as(_STATE_KEY, PublishedState)
    alone = dist.HashStore()  # type: ignore[attr-defined]
    register_staged()
    backend = BACKEND if is_accelerator(env.device) else "gloo"
    dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    timer = StepTimer(env.device, env.node.speed_at(0))
    timer.pace.reference = state.references.get(env.node.name)
    return Group(rank=0, size=1, device=env.device, nodes=[env.node.name], timer=timer, is_elastic=True), state


def with_copies(training: Training, config: RunConfig) -> Training:
    """Return `training` whose plan has the interval of part copies, if it needs them; all ranks call this."""
    plan = training.plan
    if plan.strategy in WHOLE_MODEL or len(plan.replica_ranks) > 1:
        return training
    copies, settings = PartCopies(training.group), Loop(training, config).state(0)
    seconds = plan.prediction.step_seconds if plan.prediction else 0.0
    copies.copy(0, HeldState.of(training, settings, History()).encode(), seconds or MEAN_TIME_BETWEEN_LOSSES_S)
    return replace(training, plan=msgspec.structs.replace(plan, copy_steps=copies.every))


def cost_here(context: RankContext, plan: Plan, config: RunConfig) -> NodeCost | None:
    """Measure the costs of samples on this node while the others train; None if `plan` knows them.

    With `--shares`, the node gets the average share of the others.

    Raises:
        NotNeeded: the node cannot hold the model and one sample.
    """
    if context.env.node.name in [one.node for one in plan.assignments]:
        return None
    if not follows_speeds(config, plan):
        shares = plan.replica_samples
        return weights_to_workers([*shares, sum(shares) / len(shares)], [None] * (len(shares) + 1))[-1]
    return worker_of(time_to_come(lambda: time_here(context, plan.micro_batch_size)), plan.accumulate)


def time_to_come(time: Callable[[], TaskTiming]) -> TaskTiming:
    """Call `time` on a node that joins. Raise NotNeeded if it cannot hold the model and one sample."""
    try:
        return time()
    except DoesNotFit as error:
        raise NotNeeded(str(error)) from error


def place_here(context: RankContext, plan: Plan, config: RunConfig) -> Assignment | None:
    """Return the place of this rank's node in a divided model, with its costs; None if `plan` knows it.

    Raises:
        NotNeeded: no node of the plan is missing.
    """
    place = place_for(context.env, plan)
    if place is None:
        return None
    node, reason = context.env.node, f"came in the place of {place.node}"
    assignment = msgspec.structs.replace(place, node=node.name, device=node.device, samples=0, reason=reason)
    if config.shares != "measured" or not all(one.sample_seconds for one in plan.assignments):
        return assignment
    cost = worker_of(time_to_come(lambda: time_here(context, plan.micro_batch_size)), plan.accumulate)
    return msgspec.structs.replace(assignment, fixed_seconds=cost.fixed_seconds, sample_seconds=cost.unit_seconds)


def late_context(env: RankEnvironment, config: RunConfig, task: Task | None) -> tuple[RankContext, Plan]:
    """Return the context of a rank that joins later, and the first plan of the run.

    Args:
        env: of the rank.
        config: of the run.
        task: of the run, if it is known; None: the one that `config` names.
    """
    group, state = late_group(env)
    return replace(make_context(env, group, config, task), uses_all=state.uses_all), state.plan
