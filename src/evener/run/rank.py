"""The whole way of a run on one page: task -> measure -> plan -> train -> record.

`train_rank` is what every rank runs, whoever started it. All decisions are made on every rank from the same numbers, so
that nobody has to be told the plan.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from evener.comm.group import leave_group
from evener.launch.rank_environment import RankEnvironment
from evener.run.assemble import assemble
from evener.run.checkpoint import save_weights
from evener.run.decide import decide
from evener.run.draw import draw_timeline
from evener.run.load import load
from evener.run.loop import train
from evener.run.order import Order
from evener.run.prepare import prepare
from evener.run.world import join_world
from evener.run.write_down import write_down


def train_rank(seat: RankEnvironment, order: Order) -> None:
    """One rank's whole way; the leader tells plan, steps and record through the seat."""
    world = join_world(seat)
    order = msgspec.json.decode(world.all_gather_bytes(msgspec.json.encode(order))[0], type=Order)
    task, settings = load(order)
    work = prepare(task, settings, seat, on_device=order.strategy != "pipeline")
    plan = decide(work, world, seat, order)
    group = world.subgroup([seat.names.index(a.node) for a in plan.assignments])
    if group is None:
        return
    run = assemble(work, plan, group, seat, order)
    if group.is_leader:
        seat.notify(run.plan)
    startup = time.time() - order.started
    history = train(run)
    record = write_down(run, history, startup)
    draw_timeline(run.model, Path(order.output))
    weights = run.model.gather_weights()
    if group.is_leader:
        save_weights(weights, Path(order.output) / "model.safetensors")
        seat.notify(record)
    group.barrier()
    leave_group()
