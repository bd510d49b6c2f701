"""The server's optimiser that does what a task's own would do in one process, where the server makes the steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evener.records.errors import UnknownOptimizer
from evener.sync import protocol
from evener.sync.protocol import Outer, Rate

Hyperparameters = Mapping[str, Any]
"""Of one group of parameters: `lr`, `momentum`, `betas` ..., as far as the optimiser has them."""

_SGD, _ADAM = "SGD", ("Adam", "AdamW")
_FIXED = ("momentum", "betas")


def server_optimizer(
    kind: str,
    groups: Sequence[Hyperparameters],
    schedule: Sequence[Sequence[Hyperparameters]],
    group_of: Sequence[int],
) -> Outer:
    """The server's optimiser that does what the task's would.

    Args:
        kind: name of the task's optimiser: SGD, Adam, AdamW, or one that is refused.
        groups: its groups of parameters.
        schedule: what a schedule sets for every group in every step; one step's if nothing ever changes.
        group_of: the group of every parameter, in the order of the layout.

    Raises:
        UnknownOptimizer: the server has none like it.
    """
    rules = tuple([_rule(kind, group, [step[i] for step in schedule]) for i, group in enumerate(groups)])
    if all(rule == rules[0] for rule in rules):
        return rules[0]
    return protocol.Grouped(rules=rules, group_of=tuple(group_of))


def group_numbers(groups: Sequence[Hyperparameters], parameters: Iterable[object]) -> list[int]:
    """The group of each of `parameters`, by identity; 0 of those that no group has, which are never moved."""
    numbers = {id(one): number for number, group in enumerate(groups) for one in group["params"]}
    return [numbers.get(id(one), 0) for one in parameters]


def _rule(kind: str, group: Hyperparameters, steps: Sequence[Hyperparameters]) -> protocol.Sgd | protocol.Adam:
    """What the server does for one group of parameters, which a schedule sets in every one of `steps`."""
    for step in steps:
        changed = [name for name in _FIXED if name in step and step[name] != group[name]]
        _refuse_if(bool(changed), f"a schedule that changes {' and '.join(changed)}")
    _refuse_if(group.get("maximize", False), "maximize")
    rate, weight_decay = _rate([step["lr"] for step in steps]), float(group.get("weight_decay", 0.0))
    if kind == _SGD:
        _refuse_if(group.get("dampening", 0) != 0, "dampening")
        return protocol.Sgd(
            learning_rate=rate,
            momentum=float(group["momentum"]),
            is_nesterov=bool(group["nesterov"]),
            weight_decay=weight_decay,
        )
    _refuse_if(kind not in _ADAM, kind)
    _refuse_if(group.get("amsgrad", False), "amsgrad")
    return protocol.Adam(
        learning_rate=rate,
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=weight_decay,
        is_decoupled=kind == "AdamW" or bool(group.get("decoupled_weight_decay")),
    )


def _refuse_if(condition: bool, what: str) -> None:
    if condition:
        raise UnknownOptimizer(what)


def _rate(rates: Sequence[float]) -> Rate:
    """One number if it never changes; a rate of 0 becomes the smallest there is, for a server's has to be positive."""
    positive = tuple(max(float(rate), sys.float_info.min) for rate in rates)
    return positive[0] if len(set(positive)) == 1 else positive
