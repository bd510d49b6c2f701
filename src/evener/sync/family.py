"""The protocols by their names: each is the same algorithm with other knobs, set as published.

| name | local steps | staleness | contribution | outer optimiser |
|---|---|---|---|---|
| sync | 1 | 0 | gradient | any |
| async | 1 | unbounded | gradient | any |
| bounded | 1 | s | gradient | any |
| average | k or an epoch | 0 | delta | SGD with learning rate 1: the weighted mean of the weights |
| diloco | k | 0 | delta | SGD with Nesterov momentum |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from evener.sync.agreement import Agreement, Outer, Sgd


def synchronous(*, batch: int, outer: Outer) -> Agreement:
    """Every update is made of all workers' gradients: one process with the whole batch."""
    return Agreement(batch=batch, outer=outer)


def asynchronous(*, batch: int, outer: Outer) -> Agreement:
    """Every gradient is an update of its own, as soon as it comes, however old the weights are that it was taken at."""
    return Agreement(batch=batch, outer=outer, staleness=None)


def bounded(*, batch: int, outer: Outer, staleness: int = 4) -> Agreement:
    """Like `asynchronous`, but nobody begins more than `staleness` updates ahead of the slowest (Ho et al., 2013)."""
    return Agreement(batch=batch, outer=outer, staleness=staleness)


def averaging(*, batch: int, local_steps: int | Literal["epoch"] = "epoch") -> Agreement:
    """Each worker trains by itself, then all go on from the mean of their weights, weighted by samples."""
    outer = Sgd(learning_rate=1.0)
    return Agreement(batch=batch, outer=outer, contribution="delta", local_steps=local_steps)


def diloco(*, batch: int, local_steps: int = 500, learning_rate: float = 0.7, momentum: float = 0.9) -> Agreement:
    """Averaging with Nesterov momentum on the server; few exchanges (values of Douillard et al., 2023)."""
    outer = Sgd(learning_rate=learning_rate, momentum=momentum, is_nesterov=True)
    return Agreement(batch=batch, outer=outer, contribution="delta", local_steps=local_steps)


FAMILY: dict[str, Callable[..., Agreement]] = {
    "sync": synchronous,
    "async": asynchronous,
    "bounded": bounded,
    "average": averaging,
    "diloco": diloco,
}
"""Makes the agreement of a name."""
