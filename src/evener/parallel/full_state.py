"""Weights and optimiser's state, of which ranks hold parts, as those of one process: gathered, and loaded.

    weights divided among ranks (`divided.py`)     every part travels to the first rank
    weights on some ranks only (`pipeline/`)       the first rank that holds one sends it to the first of all

What is gathered is the model's ordinary state dict, and that of an optimiser of the whole model: any other division, on
any number of ranks, loads it. No more than one whole tensor travels at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.comm.exchange import Exchange, Route
from evener.comm.group import Group
from evener.oracle.division.layout import Region
from evener.oracle.division.pieces import Piece
from evener.oracle.division.plan import Shard
from evener.parallel.redistribute import part_of, regions
from evener.records.errors import InvalidInput


def gather_tensors(group: Group, own: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The tensors of all ranks, whole, on the first one; elsewhere none. Every rank of `group` calls this.

    Args:
        group: the ranks.
        own: this rank's tensors, or parts of tensors, by name.
        shards: by name, how tensors are divided; the parts of one are on all ranks.
    """
    rows = [msgspec.json.decode(row, type=list[str]) for row in group.all_gather_bytes(msgspec.json.encode(list(own)))]
    first_holder = {name: rank for rank, names in reversed(list(enumerate(rows))) for name in names}
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(chain(*rows)):
        if name in shards and shards[name].layout.state == "split":
            tensor: Tensor | None = _assembled(group, own[name], shards[name])
        else:
            tensor = _sent_to_first(group, own.get(name), name, first_holder[name])
        if group.is_leader and tensor is not None:
            whole[name] = tensor
    return whole


def _assembled(group: Group, own: Tensor, shard: Shard) -> Tensor:
    """The whole tensor on the first rank, something smaller elsewhere."""
    nothing: Region = tuple(() for _ in shard.shape)
    whole = tuple(((0, size),) for size in shard.shape)
    need = (whole, *[nothing] * (group.size - 1))
    exchange = Exchange(group, [Route(regions(shard.layout, shard.shape, group.size), need)], "weights")
    return exchange.all_gather([own.detach()])[0]


def _sent_to_first(group: Group, own: Tensor | None, name: str, holder: int) -> Tensor | None:
    """On the first rank the tensor that `holder` has; what comes from another one is on the CPU."""
    if group.rank == holder:
        assert own is not None
        if holder == 0:
            return own.detach().clone()
        assert group.mesh is not None
        group.mesh.send_to(0, safetensors.torch.save({name: own.detach().cpu().contiguous()}))
    elif group.is_leader:
        assert group.mesh is not None
        return safetensors.torch.load(group.mesh.receive_from(holder))[name]
    return None


def own_part(shard: Shard, whole: Tensor, rank: int) -> Tensor:
    """What `rank` holds of a `whole` tensor. Raises InvalidInput if it has not the shape of `shard`."""
    if tuple(whole.shape) != shard.shape:
        raise InvalidInput(f"weight {shard.name} must be of shape {shard.shape}, got {tuple(whole.shape)}")
    return part_of(whole, shard.layout.region(rank, shard.shape)).clone()


def pieces_of(shards: Mapping[str, Shard], rank: int) -> dict[str, Piece]:
    """Which part of every divided tensor `rank` holds, by name; what is not in it is whole."""
    return {
        name: Piece(shape=shard.shape, region=shard.layout.region(rank, shard.shape))
        for name, shard in shards.items()
        if shard.layout.state == "split"
    }


class _OptimizerParts(msgspec.Struct, frozen=True):
    """What one rank's optimiser holds: by parameter, the tensors that are divided as it is, and what is no tensor."""

    divided: dict[str, list[str]]
    plain: dict[str, dict[str, Any]]


class OptimizerState:
    """The state of the optimisers of all ranks' parameters, as that of one optimiser of the whole model, and back.

    An optimiser's state dict knows parameters by their place in it, group by group.

    Args:
        group: the ranks; all of them make the same calls.
        parameters: this rank's, by name.
        shards: by name, how parameters are divided; what is not in it is whole where it is.
        grouped: by group of the whole model's optimiser, the names of its parameters in its order.
        absent: by name, of divided parameters of which this rank has and uses nothing, parts without elements.
    """

    def __init__(
        self,
        group: Group,
        parameters: Mapping[str, nn.Parameter],
        shards: Mapping[str, Shard],
        grouped: Sequence[Sequence[str]],
        absent: Mapping[str, nn.Parameter] = {},
    ) -> None:
        self._group, self._shards, self._grouped = group, shards, grouped
        self._places = {name: place for place, name in enumerate(chain(*grouped))}
        self._parameters, self._absent = self._trained(parameters), self._trained(absent)
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def _trained(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Those of `parameters` that the optimiser was given: others, such as frozen ones, have no state."""
        return {name: parameter for name, parameter in parameters.items() if name in self._places}

    def gather(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimiser of the whole model on the first rank, else an empty one."""
        rows = self._all_parts(optimizer)
        tensors = gather_tensors(self._group, *self._tensors(optimizer, rows))
        if not self._group.is_leader:
            return {}
        places = self._places
        state: dict[int, dict[str, Any]] = {}
        for row in rows:
            for name, values in row.plain.items():
                state.setdefault(places[name], {}).update(values)
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            state.setdefault(places[name], {})[key] = tensor
        return {"state": dict(sorted(state.items())), "param_groups": self._whole_groups(optimizer)}

    def own(self, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Piece]]:
        """What this rank has of that state dict; and which part of their wholes those of its tensors are that are none.

        By `<parameter index>.<name>`; nothing is sent.
        """
        state: dict[int, dict[str, Any]] = {}
        pieces: dict[str, Piece] = {}
        divided = pieces_of(self._shards, self._group.rank)
        for name, weight in self._parameters.items():
            values, place = optimizer.state.get(weight, {}), self._places[name]
            if values:
                state[place] = dict(values)
            pieces |= {f"{place}.{key}": divided[name] for key in values if self._is_divided(name, values[key])}
        return {"state": dict(sorted(state.items())), "param_groups": self._whole_groups(optimizer)}, pieces

    def _whole_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Parameter groups of an optimiser of the whole model."""
        return [
            {**settings, "params": [self._places[name] for name in names]}
            for settings, names in zip(optimizer.state_dict()["param_groups"], self._grouped, strict=True)
        ]

    def load(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Take what belongs to this rank's parameters from the state dict of an optimiser of the whole model."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        for settings, own in zip(whole["param_groups"], optimizer.param_groups, strict=True):
            groups.append({**settings, "params": list(range(index, index + len(own["params"])))})
            for parameter in own["params"]:
                name = self._names[id(parameter)]
                if self._places[name] in whole["state"]:
                    state[index] = self._own_values(name, whole["state"][self._places[name]])
                index += 1
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _own_values(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        shard = self._shards.get(name)
        return {
            key: own_part(shard, value, self._group.rank)
            if shard is not None and isinstance(value, Tensor) and value.shape == shard.shape
            else value
            for key, value in values.items()
        }

    def _all_parts(self, optimizer: Optimizer) -> list[_OptimizerParts]:
        """What every rank's optimiser holds."""
        held = {name: optimizer.state.get(weight, {}) for name, weight in self._parameters.items()}
        own = _OptimizerParts(
            divided={
                name: [key for key, value in values.items() if self._is_divided(name, value)]
                for name, values in held.items()
            },
            plain={
                name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
                for name, values in held.items()
            },
        )
        rows = self._group.all_gather_bytes(msgspec.json.encode(own))
        return [msgspec.json.decode(row, type=_OptimizerParts) for row in rows]

    def _is_divided(self, name: str, value: Any) -> bool:
        shard = self._shards.get(name)
        is_split = shard is not None and shard.layout.state == "split"
        return is_split and isinstance(value, Tensor) and value.shape == self._parameters[name].shape

    def _tensors(self, optimizer: Optimizer, rows: list[_OptimizerParts]) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """This rank's tensors, by parameter and key, and how those are divided that are."""
        own: dict[str, Tensor] = {}
        shards: dict[str, Shard] = {}
        for name, weight in (*self._parameters.items(), *self._absent.items()):
            values = optimizer.state.get(weight, {})
            own |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
            for key in dict.fromkeys(key for row in rows for key in row.divided.get(name, ())):
                shards[f"{name}/{key}"] = self._shards[name]
                own.setdefault(f"{name}/{key}", weight)  # of which this rank has nothing, or there were a state
        return own, shards
