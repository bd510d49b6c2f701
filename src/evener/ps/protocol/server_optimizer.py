"""The server's optimizer: it makes the same steps as a task's own optimizer in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evener.agreements import settings
from evener.agreements.settings import Outer, Rate
from evener.records.errors import UnknownOptimizer

Hyperparameters = Mapping[str, Any]
"""Hyperparameters of one group of parameters: `lr`, `momentum`, `betas` ..., as far as the optimizer has them."""

_SGD, _ADAM = "SGD", ("Adam", "AdamW")
_FIXED = ("momentum", "betas")


def server_optimizer(
    kind: str,
    groups: Sequence[Hyperparameters],
    schedule: Sequence[Sequence[Hyperparameters]],
    group_of: Sequence[int],
) -> Outer:
    """Return the server's optimizer that is equivalent to the task's.

    Args:
        kind: name of the task's optimizer: SGD, Adam, AdamW, or one that is refused.
        groups: groups of parameters of the optimizer.
        schedule: hyperparameters of every group in every step; one step's if they never change.
        group_of: group of every parameter, in the order of the layout.

    Raises:
        UnknownOptimizer: the server has no equivalent.
    """
    rules = tuple([_rule(kind, group, [step[i] for step in schedule]) for i, group in enumerate(groups)])
    if all(rule == rules[0] for rule in rules):
        return rules[0]
    return settings.Grouped(rules=rules, group_of=tuple(group_of))


def group_numbers(groups: Sequence[Hyperparameters], parameters: Iterable[object]) -> list[int]:
    """Return the group of each of `parameters`, by identity; 0 for those without a group, which never change."""
    numbers = {id(one): number for number, group in enumerate(groups) for one in group["params"]}
    return [numbers.get(id(one), 0) for one in parameters]


def _rule(kind: str, group: Hyperparameters, steps: Sequence[Hyperparameters]) -> settings.Sgd | settings.Adam:
    """Return the server's rule for one group of parameters; `steps` has its hyperparameters in every step."""
    for step in steps:
        changed = [name for name in _FIXED if name in step and step[name] != group[name]]
        _refuse_if(bool(changed), f"a schedule that changes {' and '.join(changed)}")
    _refuse_if(group.get("maximize", False), "maximize")
    rate, weight_decay = _rate([step["lr"] for step in steps]), float(group.get("weight_decay", 0.0))
    if kind == _SGD:
        _refuse_if(group.get("dampening", 0) != 0, "dampening")
        return settings.Sgd(
            learning_rate=rate,
            momentum=float(group["momentum"]),
            is_nesterov=bool(group["nesterov"]),
            weight_decay=weight_decay,
        )
    _refuse_if(kind not in _ADAM, kind)
    _refuse_if(group.get("amsgrad", False), "amsgrad")
    return settings.Adam(
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
    """Return one number if it never changes; replace 0 by the smallest positive number, as the server requires."""
    positive = tuple(max(float(rate), sys.float_info.min) for rate in rates)
    return positive[0] if len(set(positive)) == 1 else positive
