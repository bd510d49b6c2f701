"""Measuring on ranks of this machine: a GPU each where there are enough, else local nodes of one speed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.launch.nodes import LocalNode, local_nodes, parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput
from evener.system.cores import usable_cores
from evener.training.context import join_world

R = TypeVar("R")

_PATIENCE = 600.0


def measure_on(
    nodes: Sequence[LocalNode], measurement: Callable[[Group], R], result: type[R], backend: str | None = None
) -> R:
    """What `measurement` gives on the leader of a group with a rank on each of `nodes`.

    Args:
        nodes: one a rank.
        measurement: what every rank does; a module-level function, or a `partial` of one.
        result: type of what it gives; a plain value.
        backend: `nccl` or `gloo`; by default what suits the devices.

    Raises:
        EvenerError: of the rank that failed first-hand.
    """
    return measure_ranks(nodes, partial(_of_group, measurement), result, backend)


def measure_ranks(
    nodes: Sequence[LocalNode],
    measurement: Callable[[RankEnvironment, Group], R],
    result: type[R],
    backend: str | None = None,
) -> R:
    """As `measure_on`, for what needs every rank's environment, too, as a run does."""
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        file = Path(folder, "result.json")
        run_local(_rank, nodes, (measurement, str(file), backend), patience=_PATIENCE, on_event=lambda _: None)
        return msgspec.json.decode(file.read_bytes(), type=result)


def _of_group(measurement: Callable[[Group], R], _environment: RankEnvironment, group: Group) -> R:
    return measurement(group)


def _rank(environment: RankEnvironment, order: tuple[Callable[[RankEnvironment, Group], Any], str, str | None]) -> None:
    measurement, file, backend = order
    group = join_world(environment, backend)
    found = measurement(environment, group)
    if group.is_leader:
        atomic_write(Path(file), msgspec.json.encode(found))
    group.barrier()
    leave_group()


def equal_nodes(ranks: int, most: int) -> list[LocalNode]:
    """`ranks` nodes, each as fast as if there were `most` of them, so that different numbers can be compared.

    Where there are fewer cores than `most`, every node is slowed down to its part of a core.
    """
    if torch.cuda.device_count() >= most:
        return local_nodes([f"cuda:{i}" for i in range(ranks)])
    speed = min(1.0, usable_cores() / most)
    return parse_local_nodes(",".join([str(speed)] * ranks))


def where(most: int) -> str:
    """A few words about such nodes."""
    if torch.cuda.device_count() >= most:
        return f"a node: {torch.cuda.get_device_name()}"
    cores = usable_cores()
    return f"a node: a core of {cores}" if most <= cores else f"a node: {cores / most:.0%} of a core"


def require_gpus(option: str, most: int) -> None:
    """Raise InvalidInput unless this machine has `most` GPUs."""
    if torch.cuda.device_count() < most:
        raise InvalidInput(
            f"--full is for {most} GPUs, and this machine has {torch.cuda.device_count()}: "
            f"name smaller numbers with {option}, or leave --full out"
        )
