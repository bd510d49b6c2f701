"""From the user's words about agreeing, and the task's own optimiser, to a SyncProtocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec.structs import replace

from evener.errors import InvalidInput, InvalidValue, require
from evener.run.ps_options import Way
from evener.sync import protocol
from evener.sync.protocol import Outer, SyncProtocol

_GRADIENTS = ("sync", "async", "bounded")
"""The server makes the steps; with the others every node makes its own."""


def agreement_of(way: Way, outer: Callable[[], Outer], *, clips: bool, batch: int) -> SyncProtocol:
    """How the nodes agree.

    Args:
        way: that was asked for.
        outer: gives the optimiser that does as the task's, where the server makes the steps.
        clips: whether the task bounds the norm of the gradient.
        batch: samples.

    Raises:
        InvalidInput: the server cannot do as the task's optimiser does, or a value is not allowed.
    """
    require(way.outer_lr is None or way.outer_lr > 0, "--outer-lr", way.outer_lr, "positive")
    momentum = way.outer_momentum
    require(momentum is None or 0 < momentum < 1, "--outer-momentum", momentum, "between 0 and 1")
    require(way.staleness is None or way.staleness > 0, "--staleness", way.staleness, "positive")
    compression: Any = way.compress or "none"
    return replace(_plain(way, outer, clips, batch), push=compression, pull=compression, is_overlapped=way.overlap)


def _plain(way: Way, outer: Callable[[], Outer], clips: bool, batch: int) -> SyncProtocol:
    if way.protocol in _GRADIENTS:
        if way.protocol == "async":
            return protocol.asynchronous(batch=batch, outer=outer())
        if way.protocol == "bounded":
            return protocol.bounded(batch=batch, outer=outer(), **_given(staleness=way.staleness))
        if clips:
            raise InvalidInput(
                "--agreement sync cannot bound the norm of the gradient of all nodes (clip_norm of the task); "
                "the other protocols bound that of each node"
            )
        return protocol.synchronous(batch=batch, outer=outer())
    steps = _local_steps(way.local_steps)
    if way.protocol == "average":
        return protocol.averaging(batch=batch, **_given(local_steps=steps))
    if steps == "epoch":
        raise InvalidValue("--local-steps", steps, "a number with --agreement diloco")
    return protocol.diloco(
        batch=batch, **_given(local_steps=steps, learning_rate=way.outer_lr, momentum=way.outer_momentum)
    )


def _given(**values: Any) -> dict[str, Any]:
    """The values that are not None: the protocol's own default holds for the others."""
    return {name: value for name, value in values.items() if value is not None}


def _local_steps(text: str | None) -> int | Literal["epoch"] | None:
    if text is None or text == "epoch":
        return text  # type: ignore[return-value]  # it is one of the two
    if not text.isdecimal() or int(text) == 0:
        raise InvalidValue("--local-steps", text, "a positive number, or epoch")
    return int(text)
