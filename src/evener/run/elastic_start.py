"""How a rank comes into an elastic run: from its beginning, or later, by itself, from what the others left for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch.distributed as dist

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.launch.rank_environment import RankEnvironment
from evener.parallel.replicated import ReplicatedModel
from evener.plan import Plan
from evener.run.config import RunConfig
from evener.run.context import make_context
from evener.run.training import Training, make_training
from evener.schema import Part
from evener.task import Task

_LEFT = "elastic/left"


class _Left(Part, frozen=True, kw_only=True):
    """What ranks that come later need to know: the plan, and whether every weight has a gradient in every step."""

    plan: Plan
    uses_all: bool


def why_fixed(training: Training, config: RunConfig) -> str:
    """Why the run needs all of its ranks, in words; empty if it can go on without some: each has all that it needs."""
    env, strategy = training.context.env, training.plan.strategy
    reasons = {
        "nodes are replaced only where this command starts several on this machine": env.line is None,
        "there is one node": training.group.size == 1,
        f"with strategy {strategy} every node holds what no other one has": strategy != "data",
        "data that stays where it is (--stationary) is lost with its node": config.stationary,
        "--compile would compile again for other shares": config.compile,
        "collectives of GPUs cannot be left": any(node.device != "cpu" for node in env.nodes),
    }
    return next((words for words, is_so in reasons.items() if is_so), "")


def leave_word(training: Training) -> None:
    """Leave what ranks that come later need to know."""
    store = training.context.env.store
    model = training.model
    if training.group.is_leader and store is not None:
        assert isinstance(model, ReplicatedModel)
        store.set(_LEFT, msgspec.json.encode(_Left(plan=training.plan, uses_all=model.uses_all)).decode())


def late_training(env: RankEnvironment, config: RunConfig, task: Task | None) -> Training:
    """What a rank works with that comes when the run has begun; all is as was left, and nothing is measured.

    Args:
        env: of the rank.
        config: of the run.
        task: of the run, if it is known; None: the one that `config` names.
    """
    assert env.store is not None
    left = msgspec.json.decode(env.store.get(_LEFT), type=_Left)
    alone = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    timer = StepTimer(env.device, env.node.speed_at(0))
    group = Group(rank=0, size=1, device=env.device, nodes=[env.node.name], timer=timer, is_elastic=True)
    context = replace(make_context(env, group, config, task), uses_all=left.uses_all)
    return make_training(context, left.plan, config)
