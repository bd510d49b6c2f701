"""A process's line to the authority of its run: how it is reached, whatever the line is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evener.records.errors import EvenerError


@dataclass(frozen=True, kw_only=True)
class Line:
    """One process's way to the authority.

    Attributes:
        process: its number.
        node: that it computes on.
        is_late: whether the run has begun without it.
        send: to the authority. Raises OSError when it is gone.
        receive: from it; waits. Raises EOFError or OSError when it is gone.
        open_store: a connection of its own to the store where the processes of a generation find each other.
        end: ends this process at once by an error, from any thread.
        patience: seconds of silence after which the authority gives this process up.
        absence: seconds that an authority which is gone is waited for, before this process ends; it computes no more
            after half the patience.
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
