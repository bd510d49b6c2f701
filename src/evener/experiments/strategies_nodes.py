"""The nodes that an experiment's ranks run on: a GPU each where there are enough, else local nodes of one speed."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from evener.errors import InvalidInput
from evener.launch.nodes import LocalNode, local_nodes, parse_local_nodes


def equal_nodes(ranks: int, most: int) -> list[LocalNode]:
    """`ranks` nodes, each as fast as if there were `most` of them, so that different numbers can be compared.

    Where there are fewer cores than `most`, every node is slowed down to its part of a core.
    """
    if torch.cuda.device_count() >= most:
        return local_nodes([f"cuda:{i}" for i in range(ranks)])
    speed = min(1.0, _cores() / most)
    return parse_local_nodes(",".join([str(speed)] * ranks))


def where(most: int) -> str:
    """A few words about such nodes."""
    if torch.cuda.device_count() >= most:
        return f"a node: {torch.cuda.get_device_name()}"
    cores = _cores()
    return f"a node: a core of {cores}" if most <= cores else f"a node: {cores / most:.0%} of a core"


def require_gpus(option: str, most: int) -> None:
    """Raise InvalidInput unless this machine has `most` GPUs."""
    if torch.cuda.device_count() < most:
        raise InvalidInput(
            f"--full is for {most} GPUs, and this machine has {torch.cuda.device_count()}: "
            f"name smaller numbers with {option}, or leave --full out"
        )


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Different positive numbers such as 1,2,4, in order. Raises InvalidInput."""
    found: Sequence[int] = [int(item) if item.strip().isdecimal() else 0 for item in text.split(",")]
    if not all(found) or len(set(found)) != len(found):
        raise InvalidInput(f"{option} must be different positive numbers such as 1,2,4, got {text!r}")
    return tuple(sorted(found))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
