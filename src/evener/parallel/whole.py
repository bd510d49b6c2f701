"""A divided model's weights, and its optimiser's state, as those of one process: gathered from the ranks, and loaded.

What is gathered is the model's ordinary state dict: any other arrangement, on any number of ranks, loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.errors import InvalidInput
from evener.oracle.division.layout import ALIKE, Region
from evener.oracle.division.weights import Shard
from evener.parallel.redistribute import part_of, regions
from evener.parallel.sharded import ShardedModel


def gather_weights(model: ShardedModel) -> dict[str, Tensor]:
    """The state dict of the whole model on the first rank of each replica; every rank of the replica calls this.

    Other ranks get an empty one. No more than one whole tensor travels at a time.
    """
    own = model.part.state_dict()
    whole = {name: _gathered(model, shard, own[name]) for name, shard in _shards(model).items()}
    return whole if model.mesh.group.is_leader else {}


def load_weights(model: ShardedModel, weights: Mapping[str, Tensor]) -> None:
    """Take this rank's part of every weight from a state dict of the whole model.

    Raises:
        InvalidInput: a weight is missing, unknown, or of another shape.
    """
    own = model.part.state_dict()
    if own.keys() != weights.keys():
        missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise InvalidInput(f"the state dict lacks {missing or 'nothing'} and has {unknown or 'nothing'} besides")
    for name, shard in _shards(model).items():
        own[name].copy_(_own_part(model, shard, weights[name]))


def gather_optimizer(model: ShardedModel, optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimiser of the whole model, on the first rank of each replica, else an empty one.

    Args:
        model: this rank's part.
        optimizer: of `model.part.parameters()`; its tensors of a weight's shape are divided as the weight is.
    """
    shards, group = _shards(model), model.mesh.group
    names = {id(weight): name for name, weight in model.part.named_parameters()}
    weights = [weight for entry in optimizer.param_groups for weight in entry["params"]]
    state: dict[int, dict[str, Any]] = {}
    for index, weight in enumerate(weights):
        own = optimizer.state.get(weight, {})
        for key, number in _agreed(group, own, weight).items():
            if number is None:  # a rank without any of the weight need not have a state
                value = _gathered(model, shards[names[id(weight)]], own.get(key, weight.detach()))
            else:
                value = own.get(key, torch.tensor(number))
            state.setdefault(index, {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    return {"state": state, "param_groups": groups} if group.is_leader else {}


def load_optimizer(model: ShardedModel, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
    """Take this rank's part of an optimiser's state from that of one of the whole model."""
    shards = _shards(model)
    names = {id(weight): name for name, weight in model.part.named_parameters()}
    weights = [weight for entry in optimizer.param_groups for weight in entry["params"]]
    state: dict[int, dict[str, Any]] = {}
    for index, values in whole["state"].items():
        shard = shards[names[id(weights[index])]]
        state[index] = {
            key: _own_part(model, shard, value) if isinstance(value, Tensor) and value.shape == shard.shape else value
            for key, value in values.items()
        }
    optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})


def _agreed(group: Group, own: Mapping[str, Any], weight: Tensor) -> dict[str, float | None]:
    """What the state of a weight consists of: numbers, which are alike on all ranks, and (None) divided tensors."""
    numbers = {
        key: None if isinstance(value, Tensor) and value.shape == weight.shape else float(value)
        for key, value in own.items()
    }
    rows = [msgspec.json.decode(row) for row in group.all_gather_bytes(msgspec.json.encode(numbers))]
    return max(rows, key=len)


def _shards(model: ShardedModel) -> dict[str, Shard]:
    """By name, how every tensor of the state dict is held; what no operation has is alike on all ranks."""
    by_tensor: dict[int, Shard] = {}
    own = model.part.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name in model.shards:
            by_tensor.setdefault(id(tensor), model.shards[name])
    return {
        name: by_tensor.get(id(tensor), Shard(name, tuple(tensor.shape), ALIKE, tensor.requires_grad))
        for name, tensor in own.items()
    }


def _gathered(model: ShardedModel, shard: Shard, own: Tensor) -> Tensor:
    """The whole tensor on the first rank, something smaller elsewhere."""
    group = model.mesh.group
    if shard.layout.state != "split":
        return own.detach().clone()
    nothing: Region = tuple(() for _ in shard.shape)
    whole = tuple(((0, size),) for size in shard.shape)
    need = (whole, *[nothing] * (group.size - 1))
    exchange = Exchange(group, [Route(regions(shard.layout, shard.shape, group.size), need)], "weights")
    return exchange.spread([own.detach()])[0]


def _own_part(model: ShardedModel, shard: Shard, whole: Tensor) -> Tensor:
    if tuple(whole.shape) != shard.shape:
        raise InvalidInput(f"weight {shard.name} must be of shape {shard.shape}, got {tuple(whole.shape)}")
    return part_of(whole, shard.layout.region(model.mesh.group.rank, shard.shape)).clone()
