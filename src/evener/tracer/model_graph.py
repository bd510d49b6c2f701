"""nn.Module -> ModelGraph, the layers that the oracle plans with: nothing is computed and no memory is taken.

A layer is a call of a leaf module (one without children), or the functional work of a container between two such calls:

    leaf module called                    -> a layer of its name; called again: `name#2`
    container multiplies, keeps tensors   -> a layer of the container's name (attention, a positional embedding)
     for backward, or reads a parameter
    container joins outputs of layers     -> likewise if several layers read the result (the residual stream of a
     (a residual sum, a concatenation)       transformer); if one does, that one reads the joined outputs (ResNet)
    container only reshapes ...           -> no layer; what reads the result reads the layer that it came from
    parameters that nothing reached       -> counted at the nearest container that is a layer, else a layer at the end
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.records.errors import TrainingFailed, first_line
from evener.records.graph import Layer, ModelGraph
from evener.tracer.ir import OpRecord, TracedModel, item, record
from evener.tracer.nested import map_tensors, tensors_in
from evener.tracer.splits import splits_of, window_of
from evener.tracer.tracing import NotTraceable, is_childless, trace

BATCH = 61
"""Samples of the traced batch: a prime, so that the sample dim of any tensor can be told from its other dims."""


def trace_model_graph(model: nn.Module, sample: Any, name: str = "") -> ModelGraph:
    """The layers of `model` in order of execution, with what each costs per sample of a training step.

    The model itself is not touched: a copy of it on the meta device, in training mode, runs once.

    Args:
        model: on any device.
        sample: a batch of inputs, with the sample dim first: a tensor, or a tuple or a dict of tensors that the
            model takes as positional or named arguments. Only shapes and dtypes count, not the number of samples.
        name: of the graph; the model's class by default.

    Returns:
        Layers whose FLOPs and bytes are per sample. `activation_bytes` holds every storage that autograd keeps for
        backward once, at the layer that keeps it first, without parameters, buffers and what does not grow with the
        batch.

    Raises:
        TrainingFailed: the model cannot be run without values; says where and why.
    """
    name = name or type(model).__name__
    try:
        traced = trace(model, map_tensors(sample, _batch_like), executable=False)
    except NotTraceable as error:
        cause = error.__cause__
        assert cause is not None
        where = f" in layer {error.module}" if error.module else ""
        raise TrainingFailed(
            f"cannot trace {name}{where}: {type(cause).__name__}: {first_line(cause)}; if the sample has the shape of "
            "a real batch, let forward neither read values of tensors (.item(), if) nor fix the batch size or a device"
        ) from cause
    found = _without_single_reader_joins(_layers_of(model, traced))
    names = _names_of(found)
    parameters = _parameters_by_layer(model, found, names)
    layers = [_layer(one, names, index, parameters.pop(names[index], 0)) for index, one in found.items()]
    layers += [_unreached(path, model.get_submodule(path), count) for path, count in parameters.items()]
    return ModelGraph(
        name=name,
        layers=tuple(layers),
        element_bytes=next((p.element_size() for p in model.parameters()), 4),
        buffer_bytes=_untrained_bytes(model),
    )


@dataclass
class _Found:
    """A layer while it is found; FLOPs and bytes are those of the whole traced batch."""

    path: str
    module: nn.Module
    inputs: set[int] = field(default_factory=set)
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    flops: int = 0
    kept_bytes: int = 0
    only_joins: bool = False


def _layers_of(model: nn.Module, traced: TracedModel) -> list[_Found]:
    """All layers, in order, those that only join others included; a model without children is one."""
    if not is_childless(model):
        return _LayerFinder(model).layers_of(traced)
    given = next((node for node in traced.graph.nodes if node.op == "placeholder"), None)
    made = next(iter(traced.output.all_input_nodes), None)
    seen = [record(node) for node in traced.operations]
    return [
        _Found(
            path="",
            module=model,
            input_shape=_sample_shape(record(given).value if given is not None else None),
            output_shape=_sample_shape(record(made).value if made is not None else None),
            flops=sum(one.flops for one in seen),
            kept_bytes=sum(_kept_bytes(one) for one in seen),
        )
    ]


class _LayerFinder:
    """Gathers operations in layers, and follows which layers every value came from."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[_Found] = []
        self._origins: dict[fx.Node, frozenset[int]] = {}

    def layers_of(self, traced: TracedModel) -> list[_Found]:
        """All layers of the traced model."""
        for node in traced.operations:
            if node.op == "call_module":
                self._add_module(node)
            elif node.target is item:
                self._origins[node] = self._origins_of(node)
            else:
                self._add_functional(node)
        return self._layers

    def _add_module(self, node: fx.Node) -> None:
        path = str(node.target)
        given = record(node.all_input_nodes[0]).value if node.all_input_nodes else None
        self._layers.append(_Found(path, self._model.get_submodule(path), input_shape=_sample_shape(given)))
        self._add(node, self._origins_of(node))

    def _add_functional(self, node: fx.Node) -> None:
        """What a container computes by itself becomes a layer if it costs anything, or joins layers."""
        seen, origins = record(node), self._origins_of(node)
        reads = [record(one).value for one in node.all_input_nodes]
        only_joins = not (seen.flops or _kept_bytes(seen) or any(isinstance(value, nn.Parameter) for value in reads))
        if only_joins and len(origins) < 2:
            self._origins[_written(node)] = origins
            return
        last = self._layers[-1] if self._layers else None
        module = self._model.get_submodule(seen.module)
        if last is None or last.module is not module or last.only_joins != only_joins:
            self._layers.append(_Found(seen.module, module, only_joins=only_joins))
        self._add(node, origins)

    def _add(self, node: fx.Node, origins: frozenset[int]) -> None:
        """Add what `node` took to the last layer."""
        index, layer, seen = len(self._layers) - 1, self._layers[-1], record(node)
        layer.inputs |= origins - {index}
        layer.flops += seen.flops
        layer.kept_bytes += _kept_bytes(seen)
        layer.output_shape = _sample_shape(next(tensors_in(record(_written(node)).value), None))
        self._origins[_written(node)] = frozenset({index})

    def _origins_of(self, node: fx.Node) -> frozenset[int]:
        return frozenset(index for one in node.all_input_nodes for index in self._origins.get(one, ()))


def _written(node: fx.Node) -> fx.Node:
    """The node whose value `node` makes: itself, or what it assigns to."""
    written = node.args[0] if node.target == "__setitem__" else node
    assert isinstance(written, fx.Node)
    return written


def _kept_bytes(seen: OpRecord) -> int:
    """Of what grows with the batch."""
    return sum(nbytes for nbytes in seen.kept if nbytes % BATCH == 0)


def _batch_like(tensor: Tensor) -> Tensor:
    """A tensor of `BATCH` samples shaped like those of `tensor`, without memory."""
    shape = (BATCH, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _sample_shape(tensor: Tensor | None) -> tuple[int, ...]:
    """The shape of a tensor without its sample dim; windows and tokens that were folded into it are kept."""
    shape = list(tensor.shape) if tensor is not None else []
    if BATCH in shape:
        shape.remove(BATCH)
    elif shape and shape[0] % BATCH == 0:
        shape[0] //= BATCH
    return tuple(shape)


def _without_single_reader_joins(found: list[_Found]) -> dict[int, _Found]:
    """The layers by index, less those that only join others for one reader, which then reads these itself."""
    left = dict(enumerate(found))
    for index, one in enumerate(found):
        readers = [reader for reader in found[index + 1 :] if index in reader.inputs] if one.only_joins else []
        if len(readers) == 1:
            readers[0].inputs = readers[0].inputs - {index} | one.inputs
            del left[index]
    return left


def _names_of(found: dict[int, _Found]) -> dict[int, str]:
    """A unique name for every layer: the module's path, from the second call on with its number."""
    calls: Counter[str] = Counter()
    names: dict[int, str] = {}
    for index, one in found.items():
        name = one.path or type(one.module).__name__
        calls[name] += 1
        names[index] = name if calls[name] == 1 else f"{name}#{calls[name]}"
    return names


def _layer(found: _Found, names: dict[int, str], index: int, parameters: int) -> Layer:
    """One layer, per sample of the traced batch."""
    return Layer(
        name=names[index],
        kind=type(found.module).__name__,
        output_shape=found.output_shape,
        parameters=parameters,
        forward_flops=found.flops / BATCH,
        activation_bytes=found.kept_bytes // BATCH,
        splits=splits_of(found.module, found.output_shape),
        inputs=tuple(names[origin] for origin in sorted(found.inputs)),
        input_shape=found.input_shape,
        window=window_of(found.module),
        groups=getattr(found.module, "groups", 1),
    )


def _parameters_by_layer(model: nn.Module, found: dict[int, _Found], names: dict[int, str]) -> dict[str, int]:
    """Trainable scalars by name of the layer that owns them, or by path of a module that no layer stands for."""
    first: dict[str, str] = {}
    for index, one in found.items():
        first.setdefault(one.path, names[index])
    paths = [*first, *(path for path, _ in model.named_modules() if path not in first)]
    counted: set[int] = set()
    owned: Counter[str] = Counter()
    for path in paths:
        for parameter in model.get_submodule(path).parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in counted:
                counted.add(id(parameter))
                owned[_owner(path, first)] += parameter.numel()
    return dict(owned)


def _owner(path: str, first: dict[str, str]) -> str:
    """The layer of module `path`, else of the nearest module around it that has one, else `path` itself."""
    around = path
    while around not in first and around:
        around = around.rpartition(".")[0]
    return first.get(around, path)


def _unreached(path: str, module: nn.Module, parameters: int) -> Layer:
    """A layer of no work, for parameters that the forward pass did not reach."""
    kind = type(module).__name__
    return Layer(name=path or kind, kind=kind, output_shape=(), parameters=parameters)


def _untrained_bytes(model: nn.Module) -> int:
    """Bytes of buffers and frozen parameters."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.buffers(), *frozen))
