"""State dicts of the whole model and its optimizer, gathered from ranks that hold parts, and loaded into them.

    weights divided among ranks (`sharded.py`)     every rank sends its part to the first rank
    weights on some ranks only (`pipeline/`)       the first rank that holds a weight sends it to the first rank of all

The gathered state dicts are those of a single process: any other division, on any number of ranks, can load them. At
most one whole tensor is sent at a time.
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
from evener.records.decoding import decode_json
from evener.records.errors import InvalidInput


def gather_tensors(group: Group, local: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Return the whole tensors of all ranks on the first rank, and nothing elsewhere. Every rank of `group` calls this.

    Args:
        group: The ranks.
        local: This rank's tensors, or parts of tensors, by name.
        shards: How tensors are divided, by name; parts of a divided tensor are on all ranks.
    """
    rows = [decode_json(row, list[str]) for row in group.all_gather_bytes(msgspec.json.encode(list(local)))]
    first_holder = {name: rank for rank, names in reversed(list(enumerate(rows))) for name in names}
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(chain(*rows)):
        if name in shards and shards[name].layout.state == "split":
            tensor: Tensor | None = _assembled(group, local[name], shards[name])
        else:
            tensor = _sent_to_first(group, local.get(name), name, first_holder[name])
        if group.is_leader and tensor is not None:
            whole[name] = tensor
    return whole


def _assembled(group: Group, part: Tensor, shard: Shard) -> Tensor:
    """Return the whole tensor on the first rank, and something smaller elsewhere."""
    nothing: Region = tuple(() for _ in shard.shape)
    whole = tuple(((0, size),) for size in shard.shape)
    need = (whole, *[nothing] * (group.size - 1))
    exchange = Exchange(group, [Route(regions(shard.layout, shard.shape, group.size), need)], "weights")
    return exchange.all_gather([part.detach()])[0]


def _sent_to_first(group: Group, local: Tensor | None, name: str, holder: int) -> Tensor | None:
    """Return on the first rank the tensor of `holder`; a tensor of another rank arrives on the CPU."""
    if group.rank == holder:
        assert local is not None
        if holder == 0:
            return local.detach().clone()
        assert group.mesh is not None
        group.mesh.send_to(0, safetensors.torch.save({name: local.detach().cpu().contiguous()}))
    elif group.is_leader:
        assert group.mesh is not None
        return safetensors.torch.load(group.mesh.receive_from(holder))[name]
    return None


def own_part(shard: Shard, whole: Tensor, rank: int) -> Tensor:
    """Return the part of a `whole` tensor that `rank` holds. Raises InvalidInput for another shape than `shard`'s."""
    if tuple(whole.shape) != shard.shape:
        raise InvalidInput(f"weight {shard.name} must be of shape {shard.shape}, got {tuple(whole.shape)}")
    return part_of(whole, shard.layout.region(rank, shard.shape)).clone()


def pieces_of(shards: Mapping[str, Shard], rank: int) -> dict[str, Piece]:
    """Return by name the piece of every divided tensor that `rank` holds."""
    return {
        name: Piece(shape=shard.shape, region=shard.layout.region(rank, shard.shape))
        for name, shard in shards.items()
        if shard.layout.state == "split"
    }


class _OptimizerParts(msgspec.Struct, frozen=True):
    """The contents of one rank's optimizer by parameter: names of divided tensors, and values other than tensors."""

    divided: dict[str, list[str]]
    plain: dict[str, dict[str, Any]]


class OptimizerState:
    """Converts between the optimizer states of all ranks and the state of an optimizer of the whole model.

    An optimizer's state dict identifies parameters by their index, counted over all groups.

    Args:
        group: The ranks; all of them make the same calls.
        parameters: This rank's parameters, by name.
        shards: How parameters are divided, by name; all others are whole.
        grouped: Names of the parameters in each group of the whole model's optimizer.
        absent: Empty parts of the divided parameters that this rank does not use, by name.
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
        """Return the state dict of an optimizer of the whole model on the first rank, and an empty one elsewhere."""
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
        return self._whole_dict(optimizer, state)

    def own(self, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Piece]]:
        """Return this rank's part of that state dict, and by `<parameter index>.<name>` which tensors are pieces.

        This sends nothing.
        """
        state: dict[int, dict[str, Any]] = {}
        pieces: dict[str, Piece] = {}
        divided = pieces_of(self._shards, self._group.rank)
        for name, weight in self._parameters.items():
            values, place = optimizer.state.get(weight, {}), self._places[name]
            if values:
                state[place] = dict(values)
            pieces |= {f"{place}.{key}": divided[name] for key in values if self._is_divided(name, values[key])}
        return self._whole_dict(optimizer, state), pieces

    def _whole_dict(self, optimizer: Optimizer, state: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Return the state dict of an optimizer of the whole model that has this state of its parameters."""
        own = optimizer.state_dict()
        groups = [
            {**settings, "params": [self._places[name] for name in names]}
            for settings, names in zip(own["param_groups"], self._grouped, strict=True)
        ]
        return {**own, "state": dict(sorted(state.items())), "param_groups": groups}

    def load(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load the state of this rank's parameters from the state dict of an optimizer of the whole model."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        for settings, group in zip(whole["param_groups"], optimizer.param_groups, strict=True):
            groups.append({**settings, "params": list(range(index, index + len(group["params"])))})
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                if self._places[name] in whole["state"]:
                    state[index] = self._own_values(name, whole["state"][self._places[name]])
                index += 1
        optimizer.load_state_dict({**whole, "state": state, "param_groups": groups})

    def _own_values(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        shard = self._shards.get(name)
        return {
            key: own_part(shard, value, self._group.rank)
            if shard is not None and isinstance(value, Tensor) and value.shape == shard.shape
            else value
            for key, value in values.items()
        }

    def _all_parts(self, optimizer: Optimizer) -> list[_OptimizerParts]:
        """Return what every rank's optimizer holds."""
        held = {name: optimizer.state.get(weight, {}) for name, weight in self._parameters.items()}
        parts = _OptimizerParts(
            divided={
                name: [key for key, value in values.items() if self._is_divided(name, value)]
                for name, values in held.items()
            },
            plain={
                name: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
                for name, values in held.items()
            },
        )
        rows = self._group.all_gather_bytes(msgspec.json.encode(parts))
        return [decode_json(row, _OptimizerParts) for row in rows]

    def _is_divided(self, name: str, value: Any) -> bool:
        shard = self._shards.get(name)
        is_split = shard is not None and shard.layout.state == "split"
        return is_split and isinstance(value, Tensor) and value.shape == self._parameters[name].shape

    def _tensors(self, optimizer: Optimizer, rows: list[_OptimizerParts]) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """Return this rank's tensors, by parameter and key, and how the divided ones are divided."""
        local: dict[str, Tensor] = {}
        shards: dict[str, Shard] = {}
        for name, weight in (*self._parameters.items(), *self._absent.items()):
            values = optimizer.state.get(weight, {})
            local |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
            for key in dict.fromkeys(key for row in rows for key in row.divided.get(name, ())):
                shards[f"{name}/{key}"] = self._shards[name]
                local.setdefault(f"{name}/{key}", weight)  # an empty part: otherwise there would be a state
        return local, shards
