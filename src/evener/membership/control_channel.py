"""The control channel of a process to the coordinator of its run, for any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evener.records.errors import EvenerError


@dataclass(frozen=True, kw_only=True)
class ControlChannel:
    """One process's channel to the coordinator.

    Attributes:
        process: number of the process.
        node: of the process.
        is_late: whether it joins a run under way.
        send: sends to the coordinator. Raises OSError if it is gone.
        receive: waits for its next message. Raises EOFError or OSError if it is gone.
        open_store: opens a connection to the rendezvous store of the generations.
        end: ends this process by an error, at once and from any thread.
        patience: seconds of silence after which this process is lost.
        absence: seconds that this process waits for a coordinator that is gone; it stops computing after half the
            patience.
    """

    process: int
    node: str
    is_late: bool
    send: Callable[[bytes], None]
    receive: Callable[[], bytes]
    open_store: Callable[[], Any]
    end: Callable[[EvenerError], None]
    patience: float
    absence: float = 0.0
