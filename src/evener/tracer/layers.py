"""From traced costs to the layers of a graph: names, owners of parameters, edges."""

from __future__ import annotations

from collections import Counter

from torch import nn

from evener.graph import Layer
from evener.tracer.meta import BATCH
from evener.tracer.splits import halo_of, splits_of, window_of
from evener.tracer.tracer import Cost


def without_single_reader_joins(costs: list[Cost]) -> dict[int, Cost]:
    """The layers by index, less those that only join others for one reader, which then reads these itself."""
    left = dict(enumerate(costs))
    for index, cost in enumerate(costs):
        if not cost.only_joins:
            continue
        readers = [reader for reader in costs[index + 1 :] if index in reader.inputs]
        if len(readers) == 1:
            readers[0].inputs = readers[0].inputs - {index} | cost.inputs
            del left[index]
    return left


def names_of(costs: dict[int, Cost]) -> dict[int, str]:
    """A unique name for every layer: the module's path, from the second call on with its number."""
    calls: Counter[str] = Counter()
    names: dict[int, str] = {}
    for index, cost in costs.items():
        name = cost.path or type(cost.module).__name__
        calls[name] += 1
        names[index] = name if calls[name] == 1 else f"{name}#{calls[name]}"
    return names


def layer_of(cost: Cost, names: dict[int, str], index: int, parameters: int) -> Layer:
    """The layer of one cost, per sample of the traced batch."""
    return Layer(
        name=names[index],
        kind=type(cost.module).__name__,
        output_shape=cost.output_shape,
        parameters=parameters,
        forward_flops=cost.flops / BATCH,
        activation_bytes=cost.kept_bytes // BATCH,
        splits=splits_of(cost.module, cost.output_shape),
        halo=halo_of(cost.module),
        inputs=tuple(names[origin] for origin in sorted(cost.inputs)),
        input_shape=cost.input_shape,
        window=window_of(cost.module),
        groups=getattr(cost.module, "groups", 1),
    )


def parameters_by_layer(model: nn.Module, costs: dict[int, Cost], names: dict[int, str]) -> dict[str, int]:
    """Trainable scalars by name of the layer that owns them, or by path of a module that no layer stands for."""
    first: dict[str, str] = {}
    for index, cost in costs.items():
        first.setdefault(cost.path, names[index])
    paths = [*first, *(path for path, _ in model.named_modules() if path not in first)]
    counted: set[int] = set()
    owned: dict[str, int] = {}
    for path in paths:
        for parameter in model.get_submodule(path).parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in counted:
                counted.add(id(parameter))
                owner = _owner(path, first)
                owned[owner] = owned.get(owner, 0) + parameter.numel()
    return owned


def _owner(path: str, first: dict[str, str]) -> str:
    """The layer of module `path`, else of the nearest module around it that has one, else `path` itself."""
    around = path
    while around not in first and around:
        around = around.rpartition(".")[0]
    return first.get(around, path)


def unreached(path: str, module: nn.Module, parameters: int) -> Layer:
    """A layer of no work, for parameters that the forward pass did not reach."""
    kind = type(module).__name__
    return Layer(name=path or kind, kind=kind, output_shape=(), parameters=parameters)


def untrained_bytes(model: nn.Module) -> int:
    """Bytes of buffers and frozen parameters."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.buffers(), *frozen))
