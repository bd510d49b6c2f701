"""Measurements on ranks of this machine: one GPU each if there are enough, else local nodes of equal speed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.launch.nodes import NodeSpec, local_nodes, parse_local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.atomic import atomic_write
from evener.records.decoding import decode_json
from evener.records.errors import InvalidInput
from evener.system import accelerators
from evener.system.cores import usable_cores
from evener.training.context import join_world

R = TypeVar("R")

_PATIENCE_S = 600.0


def measure_on(
    nodes: Sequence[NodeSpec], measurement: Callable[[Group], R], result: type[R], backend: str | None = None
) -> R:
    """Run `measurement` on a group with a rank on each of `nodes`, and return the leader's result.

    Args:
        nodes: one per rank.
        measurement: function that every rank calls; a module-level function, or a `partial` of one.
        result: type of its result; a plain value.
        backend: `nccl` or `gloo`; by default chosen by device.

    Raises:
        EvenerError: the error of the rank that failed first.
    """
    return measure_ranks(nodes, partial(_of_group, measurement), result, backend)


def measure_ranks(
    nodes: Sequence[NodeSpec],
    measurement: Callable[[RankEnvironment, Group], R],
    result: type[R],
    backend: str | None = None,
) -> R:
    """Run a measurement that also needs every rank's environment; otherwise like `measure_on`."""
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        file = Path(folder, "result.json")
        run_local(_rank, nodes, (measurement, str(file), backend), patience=_PATIENCE_S, on_event=lambda _: None)
        return decode_json(file.read_bytes(), result)


def _of_group(measurement: Callable[[Group], R], _environment: RankEnvironment, group: Group) -> R:
    return measurement(group)


def _rank(environment: RankEnvironment, order: tuple[Callable[[RankEnvironment, Group], Any], str, str | None]) -> None:
    measurement, file, backend = order
    group = join_world(environment, backend)
    result = measurement(environment, group)
    if group.is_leader:
        atomic_write(Path(file), msgspec.json.encode(result))
    group.barrier()
    leave_group()


def equal_nodes(ranks: int, max_ranks: int) -> list[NodeSpec]:
    """Return `ranks` nodes, each as fast as if there were `max_ranks`, so that different numbers are comparable.

    With fewer cores than `max_ranks`, every node is slowed down to its fraction of a core.
    """
    if len(accelerators.names()) >= max_ranks:
        return local_nodes(accelerators.names()[:ranks])
    speed = min(1.0, usable_cores() / max_ranks)
    return parse_local_nodes(",".join([str(speed)] * ranks))


def where(max_ranks: int) -> str:
    """Return a phrase that describes such nodes."""
    if len(accelerators.names()) >= max_ranks:
        return f"a node: {accelerators.model_and_units(accelerators.best())[0]}"
    cores = usable_cores()
    return f"a node: a core of {cores}" if max_ranks <= cores else f"a node: {cores / max_ranks:.0%} of a core"


def require_gpus(option: str, count: int) -> None:
    """Raise InvalidInput unless this machine has `count` GPUs."""
    if len(accelerators.names()) < count:
        raise InvalidInput(
            f"--full needs {count} GPUs, but this machine has {len(accelerators.names())}: "
            f"use smaller numbers for {option}, or remove --full"
        )
