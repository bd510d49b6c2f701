"""The state of the stages' optimisers, as that of one optimiser of the whole model, and back.

An optimiser's state dict knows parameters by their place in it. That of the whole model is, group by group, the order
of the model's parameters, which the stages find out by telling each other the names of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.parallel.pipeline.collecting import collect_tensors

_Row = tuple[list[list[str]], dict[str, dict[str, Any]]]
"""Names of the parameters of every group, and by name what an optimiser keeps that is not a tensor."""


def gather_optimizer(
    group: Group, optimizer: Optimizer, own: Mapping[str, nn.Parameter], order: Mapping[str, int], is_first: bool
) -> dict[str, Any]:
    """The state dict of an optimiser of the whole model on the first rank, else an empty one.

    Args:
        group: all ranks; every one calls this.
        optimizer: of this rank's stage.
        own: parameters of this rank's stage, by name.
        order: place of every name in the model.
        is_first: whether this rank is of the first replica, which is the one that is asked.
    """
    kept = _kept(optimizer, own) if is_first else {}
    tensors = {f"{n}/{key}": v for n, values in kept.items() for key, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: {k: v for k, v in values.items() if not isinstance(v, Tensor)} for n, values in kept.items()}
    rows = _tell(group, (_names(optimizer, own) if is_first else [], numbers))
    places = _places([row[0] for row in rows], order)
    state: dict[int, dict[str, Any]] = {}
    for name, values in ((name, values) for row in rows for name, values in row[1].items()):
        state.setdefault(places[name], {}).update(values)
    for key, tensor in collect_tensors(group, tensors).items():
        name, _, what = key.rpartition("/")
        state.setdefault(places[name], {})[what] = tensor
    if not group.is_leader:
        return {}
    groups = optimizer.state_dict()["param_groups"]
    grouped = _grouped([row[0] for row in rows], order)
    wholes = [{**one, "params": [places[name] for name in names]} for one, names in zip(groups, grouped, strict=True)]
    return {"state": dict(sorted(state.items())), "param_groups": wholes}


def load_optimizer(
    group: Group,
    optimizer: Optimizer,
    own: Mapping[str, nn.Parameter],
    order: Mapping[str, int],
    whole: Mapping[str, Any],
) -> None:
    """Take what belongs to this rank's stage from the state dict of an optimiser of the whole model.

    Every rank of `group` calls this.
    """
    names = _names(optimizer, own)
    places = _places([row[0] for row in _tell(group, (names, {}))], order)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for one, params in zip(whole["param_groups"], (entry["params"] for entry in optimizer.param_groups), strict=True):
        groups.append({**one, "params": list(range(index, index + len(params)))})
        for name in _named(params, own):
            if name is not None and places[name] in whole["state"]:
                state[index] = whole["state"][places[name]]
            index += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _named(params: Sequence[Any], own: Mapping[str, nn.Parameter]) -> list[str | None]:
    names = {id(parameter): name for name, parameter in own.items()}
    return [names.get(id(parameter)) for parameter in params]  # None: stands in for a stage without parameters


def _names(optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> list[list[str]]:
    return [[name for name in _named(entry["params"], own) if name] for entry in optimizer.param_groups]


def _kept(optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[parameter] for name, parameter in own.items() if parameter in optimizer.state}


def _tell(group: Group, row: _Row) -> list[_Row]:
    """Every rank's row."""
    return [msgspec.json.decode(one, type=_Row) for one in group.all_gather_bytes(msgspec.json.encode(row))]


def _grouped(rows: Sequence[Sequence[Sequence[str]]], order: Mapping[str, int]) -> list[list[str]]:
    """Names of every group over all ranks, in the order of the model."""
    number = max(map(len, rows))
    names = [{name for row in rows if row for name in row[i]} for i in range(number)]
    return [sorted(found, key=order.__getitem__) for found in names]


def _places(rows: Sequence[Sequence[Sequence[str]]], order: Mapping[str, int]) -> dict[str, int]:
    """By name, the place in the whole model's optimiser."""
    every = [name for names in _grouped(rows, order) for name in names]
    return {name: place for place, name in enumerate(every)}
