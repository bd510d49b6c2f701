"""Examines machines: what `evener benchmark` has every rank do."""

from __future__ import annotations

from pathlib import Path

import msgspec

from evener.benchmark.device import environment, profile_device
from evener.benchmark.links import measure_links
from evener.comm.group import leave_group
from evener.launch.rank_environment import RankEnvironment
from evener.profile import ClusterProfile, DeviceProfile
from evener.run.prepare import measure, prepare
from evener.run.settings import Settings
from evener.run.world import join_world
from evener.schema import Part
from evener.tasks.load import load_task


class Examination(Part, frozen=True, kw_only=True):
    """What to measure; travels to every rank.

    Attributes:
        task: also time this task's model; None for devices and links only.
        data_dir: folder of its data, or None.
        patience: seconds of silence after which a rank is given up.
    """

    task: str | None
    data_dir: str | None
    patience: float


def examine(seat: RankEnvironment, order: Examination) -> None:
    """Measure this rank's device, the links to the others and, if asked, a task; the leader tells the profile."""
    world = join_world(seat)
    speed = seat.node.speed_at(0)
    own = profile_device(seat.node.name, seat.device, speed=speed, memory_limit=seat.node.memory_bytes)
    links = measure_links(world)
    if order.task is not None:
        task = load_task(order.task, Path(order.data_dir) if order.data_dir else None)
        settings = Settings(batch_size=task.batch_size, epochs=1, checkpoint="", patience=order.patience)
        timing = measure(prepare(task, settings, seat), world, seat, task.batch_size)
        own = msgspec.structs.replace(own, timings=(timing,))
    rows = world.all_gather_bytes(msgspec.json.encode(own))
    devices = tuple(msgspec.json.decode(row, type=DeviceProfile) for row in rows)
    if world.is_leader:
        seat.notify(ClusterProfile(devices=devices, links=links, environment=environment()))
    world.barrier()
    leave_group()
