"""Local nodes: processes of this machine that stand for machines of given speeds.

`1.0,0.5,0.25` are three nodes of those relative speeds; `1.0,1.0@40=0.33` is a node that slows to a third at step 40.
Each CPU core holds nodes whose speeds sum to at most 1, so that the idle time of a slowed node is free for the others.
If that is impossible, all speeds shrink by one factor, which keeps their ratios. They also shrink if a CPU quota allows
less time than the nodes need together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from math import inf

from evener.records.errors import InvalidValue, require
from evener.records.schema import Part
from evener.system.cores import cpu_quota, quota_speed

_FORM = "SPEED or SPEED@STEP=SPEED, such as 1.0,0.5 or 1.0,1.0@40=0.33"
MIN_SPEED = 0.001
"""A step of a slower node would take a thousand times as long, and look like a lost node."""
_SPEEDS = f"speeds from {MIN_SPEED} to 1"
_MAX_SHARE = 1e6
_MAX_MEMORY = 2**60
_NODE = re.compile(r"^(?P<speed>[^@=]+)(?P<changes>(@\d{1,12}=[^@=]+)*)$")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*$", re.IGNORECASE)


class NodeSpec(Part, frozen=True, kw_only=True):
    """One node of the local machine.

    Attributes:
        name: `node-0`, `node-1` ...
        host: machine that it runs on; nodes of one host share its memory.
        device: as PyTorch names it.
        speeds: (first step, speed), in order of steps, the first from step 0.
        cores: of the processor that it runs on; empty for all.
        threads: that one operation may use; None for PyTorch's default.
        memory_bytes: that it may use; None for what the device has.
    """

    name: str
    host: str = "localhost"
    device: str = "cpu"
    speeds: tuple[tuple[int, float], ...] = ((0, 1.0),)
    cores: tuple[int, ...] = ()
    threads: int | None = None
    memory_bytes: int | None = None

    def speed_at(self, step: int) -> float:
        """Return the speed in `step`."""
        return next(speed for start, speed in reversed(self.speeds) if start <= step)


def parse_local_nodes(text: str, memory: Sequence[int | None] = ()) -> list[NodeSpec]:
    """The nodes that `text` describes, placed on this machine's cores.

    Raises:
        InvalidValue: `text` is not a list of speeds, or `memory` is of another length.
    """
    speeds = [_parse_speeds(item.strip()) for item in text.split(",")] if text.strip() else []
    if not speeds:
        raise InvalidValue("--local-nodes", text, f"a list of one node or more: {_FORM}")
    if memory and len(memory) != len(speeds):
        raise InvalidValue("--memory", len(memory), f"one value, or one a node ({len(speeds)})")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    fastest = [max(speed for _, speed in changes) for changes in speeds]
    places, shrink = place(fastest, len(cores))
    shrink = min(shrink, (cpu_quota() or inf) / sum(fastest))
    return [
        NodeSpec(
            name=f"node-{i}",
            speeds=tuple((step, speed * shrink) for step, speed in changes),
            cores=(cores[places[i]],),
            threads=1,
            memory_bytes=memory[i] if memory else None,
        )
        for i, changes in enumerate(speeds)
    ]


def place(speeds: Sequence[float], cores: int) -> tuple[list[int], float]:
    """A core for every node, the fastest placed first on the emptiest core; and the factor that speeds shrink by."""
    load = [0.0] * cores
    places = [0] * len(speeds)
    for i in sorted(range(len(speeds)), key=lambda i: -speeds[i]):
        places[i] = min(range(cores), key=lambda c: load[c])
        load[places[i]] += speeds[i]
    return places, min(1.0, 1.0 / max(load))


def local_nodes(devices: Sequence[str], memory: Sequence[int | None] = ()) -> list[NodeSpec]:
    """One node a device of this machine, at full speed or, on CPUs, at the speed that a CPU quota allows."""
    if memory and len(memory) != len(devices):
        raise InvalidValue("--memory", len(memory), f"one value, or one a device ({len(devices)})")
    speeds = device_speeds(devices)
    return [
        NodeSpec(name=f"node-{i}", device=device, speeds=((0, speed),), memory_bytes=memory[i] if memory else None)
        for i, (device, speed) in enumerate(zip(devices, speeds, strict=True))
    ]


def device_speeds(devices: Sequence[str]) -> list[float]:
    """The speed of a node on each of this machine's `devices`: below 1.0 on CPUs that a CPU quota limits."""
    speed = quota_speed(max(1, list(devices).count("cpu")))
    return [speed if device == "cpu" else 1.0 for device in devices]


def _parse_speeds(item: str) -> tuple[tuple[int, float], ...]:
    if not item:
        raise InvalidValue("--local-nodes", item, _FORM, ": an item is empty")
    match = _NODE.match(item)
    if match is None:
        raise InvalidValue("--local-nodes", item, _FORM)
    changes = [change.split("=") for change in match["changes"].split("@")[1:]]
    speeds = [(0, _speed(match["speed"], item)), *((int(step), _speed(speed, item)) for step, speed in changes)]
    if [step for step, _ in speeds] != sorted({step for step, _ in speeds}):
        raise InvalidValue("--local-nodes", item, "changes of speed in order of steps")
    return tuple(speeds)


def _speed(text: str, item: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidValue("--local-nodes", item, _FORM, f": {text!r} is not a number") from None
    if not MIN_SPEED <= value <= 1:
        of_fastest = ": a speed is a part of that of the fastest node" if value > 1 else ""
        raise InvalidValue("--local-nodes", item, _SPEEDS, of_fastest)
    return value


def relative_shares(shares: str, size: int | None) -> list[float] | None:
    """Relative shares that the user named; None for measured ones.

    Args:
        shares: measured, equal, or numbers with commas between.
        size: number of nodes; None if that is not known yet.

    Raises:
        InvalidValue: it is none of these.
    """
    if shares == "measured":
        return None
    if shares == "equal":
        return [1.0] * (size or 1)
    weights = [_share(text, shares) for text in shares.split(",")]
    if size is not None and len(weights) != size:
        nodes = "1 node" if size == 1 else f"{size} nodes"
        numbers = "1 number" if len(weights) == 1 else f"{len(weights)} numbers"
        raise InvalidValue("--shares", shares, "one number a node", f": {numbers} for {nodes}")
    require(sum(weights) > 0, "--shares", shares, "numbers of which one is above zero, or no node would train")
    return weights


def options_of(
    positions: Sequence[int], *, shares: str, local_nodes: str | None, memory: str | None
) -> dict[str, str | None] | None:
    """Return the user's options of the nodes at these `positions`, by name; None if these have no share.

    Args:
        positions: of the remaining nodes among all.
        shares: option `--shares` of all nodes.
        local_nodes: option `--local-nodes`.
        memory: option `--memory`.
    """
    if shares in ("measured", "equal"):
        return {"shares": shares}
    remaining = _of(shares, positions)
    if not any(float(share) for share in remaining.split(",")):
        return None
    if local_nodes is None:
        return {"shares": remaining}
    sizes = memory if memory is None or "," not in memory else _of(memory, positions)
    return {"shares": remaining, "local_nodes": _of(local_nodes, positions), "memory": sizes}


def _of(items: str, positions: Sequence[int]) -> str:
    every = items.split(",")
    return ",".join(every[position] for position in positions)


def _share(text: str, shares: str) -> float:
    try:
        value = float(text)
    except ValueError:
        problem = f"{text!r} is not a number" if text.strip() else "an item is empty"
        raise InvalidValue("--shares", shares, "measured, equal, or numbers such as 7,2,1", f": {problem}") from None
    if not 0 <= value <= _MAX_SHARE:
        raise InvalidValue("--shares", shares, f"numbers from 0 to {_MAX_SHARE:g}", f": {text.strip()} is out of range")
    return value


def parse_memory(text: str) -> list[int]:
    """Bytes of sizes such as `512MB` or `4GiB,1GB`. Raises InvalidValue."""
    return [_parse_bytes(size) for size in text.split(",")]


def _parse_bytes(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise InvalidValue("--memory", text, "a number and a unit, such as 512MB or 4GB")
    number, unit = float(match[1]), match[2].upper()
    if unit not in _UNITS:
        raise InvalidValue("--memory", text, "a size such as 512MB or 4GB", f": the units are {', '.join(_UNITS)[2:]}")
    size = number * _UNITS[unit]
    require(1 <= size <= _MAX_MEMORY, "--memory", text, "a size from 1 byte to 2^60 bytes, such as 512MB or 4GB")
    return int(size)
