"""Callbacks: they receive every event of a run, and may end it at an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias, final

from evener.records.errors import require
from evener.records.events import RunEvent
from evener.records.plan import Plan
from evener.records.record import Epoch
from evener.report.scalars import ScalarLog, ScalarLogger

Callback: TypeAlias = Callable[[RunEvent], object]
"""Called with every plan, step, validation, event and record; true at the end of an epoch ends the run there."""


@final
class EarlyStopping:
    """Ends a run when its loss (of the validation, if there is one) has not fallen for some epochs.

    Args:
        patience: epochs without a better loss.
        least: by which a loss has to be smaller to be better.
    """

    def __init__(self, patience: int = 3, least: float = 0.0) -> None:
        require(patience > 0, "patience", patience, "positive")
        self._patience, self._least = patience, least
        self._best, self._since = math.inf, 0

    def __call__(self, event: RunEvent) -> bool:
        """Return whether the run should end."""
        if isinstance(event, Plan):  # of another run
            self._best, self._since = math.inf, 0
        if not isinstance(event, Epoch):
            return False
        loss = event.loss if event.validation is None else event.validation.loss
        if loss is None:
            return False
        is_better = loss < self._best - self._least
        self._best, self._since = (loss, 0) if is_better else (self._best, self._since + 1)
        return self._since >= self._patience


@contextmanager
def watched(callbacks: Sequence[Callback], loggers: Sequence[ScalarLogger]) -> Iterator[Callback]:
    """Combine callbacks and loggers into one callback, which calls each of them; close the loggers afterwards."""
    with ExitStack() as stack:
        logs = [ScalarLog(logger) for logger in loggers]
        for log in logs:
            stack.callback(log.close)
        receivers: list[Callback] = [*logs, *callbacks]

        def call(event: RunEvent) -> bool:
            answers = [bool(one(event)) for one in receivers]
            return any(answers)

        yield call
