"""A run of one rank in this very process: nothing to start, nothing to wait for."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from evener.launch.nodes import LocalNode
from evener.launch.seat import Program, Seat, run_seat


def run_alone(
    program: Program, node: LocalNode, order: Any, *, patience: float, on_word: Callable[[Any], None]
) -> None:
    """Run `program` on `node` here. Ctrl-C asks it to stop after its step, a second one stops it at once."""
    seat = Seat(rank=0, nodes=[node], device=torch.device(node.device), patience=patience, emit=on_word)
    with _signals_ask(seat):
        run_seat(seat, program, order)


@contextmanager
def _signals_ask(seat: Seat) -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM asks `seat` to stop; the next acts as it would without us."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _frame: object) -> None:
        seat.ask_to_stop()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
