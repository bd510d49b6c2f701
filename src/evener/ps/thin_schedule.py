"""What a thin task's optimiser and rate would do in each step of a run, for the server that does it instead."""

from __future__ import annotations

from evener import autodiff as ad
from evener.errors import InvalidInput
from evener.sync.agreement import Adam, Outer, Rate, Sgd
from evener.task import ThinTask

_SMALLEST = 2.0**-1022
"""For a rate of 0: a server's has to be positive."""


def outer_of_thin(task: ThinTask, model: ad.nn.Module, num_steps: int) -> Outer:
    """The server's optimiser that does what the task's would.

    Raises:
        InvalidInput: the server has none like it.
    """
    optimizer = task.optimizer(model.parameters())
    if len(optimizer.param_groups) != 1:
        raise InvalidInput(
            f"the server knows one group of parameters, the task's optimiser has {len(optimizer.param_groups)}"
        )
    [group] = optimizer.param_groups
    rate = _rate(task, float(group["lr"]), num_steps)
    if type(optimizer) is ad.optim.SGD:
        return Sgd(
            learning_rate=rate,
            momentum=group["momentum"],
            is_nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
        )
    if type(optimizer) not in (ad.optim.Adam, ad.optim.AdamW):
        raise InvalidInput(
            f"the server does as SGD, Adam and AdamW do, and does not know {type(optimizer).__name__}; "
            "with --agreement average or diloco every node uses the task's own optimiser"
        )
    return Adam(
        learning_rate=rate,
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        is_decoupled=type(optimizer) is ad.optim.AdamW,
    )


def _rate(task: ThinTask, peak: float, num_steps: int) -> Rate:
    if task.rate is None:
        return peak
    return tuple(max(peak * task.rate(step, num_steps), _SMALLEST) for step in range(num_steps))
