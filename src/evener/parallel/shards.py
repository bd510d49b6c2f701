"""This rank's part of a model's weights: a copy of the model in which every layer has only its own filters or channels.

Names of parameters and buffers stay those of the model, only their shapes shrink.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

from torch import Tensor, nn

from evener.errors import InvalidInput
from evener.oracle.division.layout import length
from evener.oracle.division.network import Operation
from evener.oracle.division.plan import ReplicaPlan
from evener.oracle.division.weights import Shard
from evener.parallel.redistribute import part_of


def divided_copy(model: nn.Module, plan: ReplicaPlan, rank: int) -> nn.Module:
    """A copy of `model` with rank `rank`'s part of every weight; nothing in it works in place.

    Raises:
        InvalidInput: two layers share a weight that would be divided.
    """
    shards = plan.shards
    _refuse_ties(model, shards)
    memo: dict[int, Any] = {}
    for name, shard in shards.items():
        if shard.layout.state == "split":
            tensor: Tensor = operator.attrgetter(name)(model)
            own = part_of(tensor.detach(), shard.layout.region(rank, shard.shape)).clone()
            memo[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
    copied = copy.deepcopy(model, memo)
    modules: list[Any] = list(copied.modules())
    for module in modules:
        if hasattr(module, "inplace"):
            module.inplace = False
    for operation, step in zip(plan.network.operations, plan.steps, strict=True):
        reads = step.choice.needs[0].along(1) if step.choice.mode == "filter" else None
        if operation.groups > 1 and reads is not None:
            width = _channels(plan, operation) // operation.groups
            layer: Any = copied.get_submodule(operation.name)
            layer.groups = max(1, length(reads[rank]) // width)
    return copied


def _channels(plan: ReplicaPlan, operation: Operation) -> int:
    return plan.network.operations[operation.inputs[0]].shape[1]


def _refuse_ties(model: nn.Module, shards: dict[str, Shard]) -> None:
    """A weight of two layers can only be kept one if both hold the same part of it."""
    first: dict[int, str] = {}
    for name in shards:
        other = first.setdefault(id(operator.attrgetter(name)(model)), name)
        if shards[name].layout != shards[other].layout:
            raise InvalidInput(f"{other} and {name} are one weight, of which their layers need different parts")
