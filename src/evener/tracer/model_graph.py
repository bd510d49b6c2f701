"""Conversion of an nn.Module to a ModelGraph, the layers that the oracle plans with, on the meta device.

A layer is a call of a leaf module (one without children), or the functional work of a container between two such calls:

    leaf module called                    -> a layer of its name; called again: `name#2`
    container multiplies, keeps tensors   -> a layer of the container's name (attention, a positional embedding)
     for backward, or reads a parameter
    container joins outputs of layers     -> a layer if several layers read the result (the residual stream of a
     (a residual sum, a concatenation)       transformer); a single reader reads the joined outputs itself (ResNet)
    container only reshapes ...           -> no layer; readers of the result read the layer that it came from
    unused parameters                     -> counted at the nearest container that is a layer, else a layer at the end
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.records.errors import TrainingFailed, first_line
from evener.records.graph import Dim, Layer, ModelGraph, Window
from evener.tracer.ir import OpRecord, TracedModel, item, record
from evener.tracer.nested import map_tensors, tensors_in
from evener.tracer.tracing import NotTraceable, is_childless, trace

BATCH = 61
"""Samples of the traced batch: a prime, so that the sample dim of a tensor differs from its other dims."""


def trace_model_graph(model: nn.Module, sample: Any, name: str = "") -> ModelGraph:
    """Return the layers of `model` in order of execution, with the costs of each per sample of a training step.

    The model does not change: a copy of it on the meta device, in training mode, runs once.

    Args:
        model: The model, on any device.
        sample: A batch of inputs, with the sample dim first: a tensor, or a tuple or a dict of tensors that the model
            takes as positional or named arguments. Only shapes and dtypes count, not the number of samples.
        name: Name of the graph; the model's class by default.

    Returns:
        Layers whose FLOPs and bytes are per sample. `activation_bytes` counts every storage that autograd keeps for
        backward once, at the layer that keeps it first. It excludes parameters, buffers, and storages that do not grow
        with the batch.

    Raises:
        TrainingFailed: The model cannot run on the meta device; the error says where and why.
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
    layers_found = _without_single_reader_joins(_layers_of(model, traced))
    names = _names_of(layers_found)
    parameters = _parameters_by_layer(model, layers_found, names)
    layers = [_layer(one, names, index, parameters.pop(names[index], 0)) for index, one in layers_found.items()]
    layers += [_unreached(path, model.get_submodule(path), count) for path, count in parameters.items()]
    return ModelGraph(
        name=name,
        layers=tuple(layers),
        element_bytes=next((p.element_size() for p in model.parameters()), 4),
        buffer_bytes=_untrained_bytes(model),
    )


@dataclass
class _LayerDraft:
    """A layer under construction; FLOPs and bytes are those of the whole traced batch."""

    path: str
    module: nn.Module
    inputs: set[int] = field(default_factory=set)
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    flops: int = 0
    kept_bytes: int = 0
    only_joins: bool = False


def _layers_of(model: nn.Module, traced: TracedModel) -> list[_LayerDraft]:
    """Return all layers, in order, including those that only join others. A model without children is one layer."""
    if not is_childless(model):
        return _LayerFinder(model).layers_of(traced)
    input_node = next((node for node in traced.graph.nodes if node.op == "placeholder"), None)
    made = next(iter(traced.output.all_input_nodes), None)
    seen = [record(node) for node in traced.operations]
    return [
        _LayerDraft(
            path="",
            module=model,
            input_shape=_sample_shape(record(input_node).value if input_node is not None else None),
            output_shape=_sample_shape(record(made).value if made is not None else None),
            flops=sum(one.flops for one in seen),
            kept_bytes=sum(_kept_bytes(one) for one in seen),
        )
    ]


class _LayerFinder:
    """Groups operations into layers, and records the layers from which every value came."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[_LayerDraft] = []
        self._origins: dict[fx.Node, frozenset[int]] = {}

    def layers_of(self, traced: TracedModel) -> list[_LayerDraft]:
        """Return all layers of the traced model."""
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
        layer_input = record(node.all_input_nodes[0]).value if node.all_input_nodes else None
        self._layers.append(_LayerDraft(path, self._model.get_submodule(path), input_shape=_sample_shape(layer_input)))
        self._add(node, self._origins_of(node))

    def _add_functional(self, node: fx.Node) -> None:
        """Make a layer of a container's own computation if it costs anything, or joins layers."""
        seen, origins = record(node), self._origins_of(node)
        reads = [record(one).value for one in node.all_input_nodes]
        only_joins = not (seen.flops or _kept_bytes(seen) or any(isinstance(value, nn.Parameter) for value in reads))
        if only_joins and len(origins) < 2:
            self._origins[_written(node)] = origins
            return
        last = self._layers[-1] if self._layers else None
        module = self._model.get_submodule(seen.module)
        if last is None or last.module is not module or last.only_joins != only_joins:
            self._layers.append(_LayerDraft(seen.module, module, only_joins=only_joins))
        self._add(node, origins)

    def _add(self, node: fx.Node, origins: frozenset[int]) -> None:
        """Add the costs of `node` to the last layer."""
        index, layer, seen = len(self._layers) - 1, self._layers[-1], record(node)
        layer.inputs |= origins - {index}
        layer.flops += seen.flops
        layer.kept_bytes += _kept_bytes(seen)
        layer.output_shape = _sample_shape(next(tensors_in(record(_written(node)).value), None))
        self._origins[_written(node)] = frozenset({index})

    def _origins_of(self, node: fx.Node) -> frozenset[int]:
        return frozenset(index for one in node.all_input_nodes for index in self._origins.get(one, ()))


def _written(node: fx.Node) -> fx.Node:
    """Return the node whose value `node` makes: itself, or the target of an assignment."""
    written = node.args[0] if node.target == "__setitem__" else node
    assert isinstance(written, fx.Node)
    return written


def _kept_bytes(seen: OpRecord) -> int:
    """Return the kept bytes of storages that grow with the batch."""
    return sum(nbytes for nbytes in seen.kept_sizes if nbytes % BATCH == 0)


def _batch_like(tensor: Tensor) -> Tensor:
    """Return a meta tensor of `BATCH` samples shaped like those of `tensor`."""
    shape = (BATCH, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _sample_shape(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the shape of a tensor without its sample dim; dims that were folded into it are kept."""
    shape = list(tensor.shape) if tensor is not None else []
    if BATCH in shape:
        shape.remove(BATCH)
    elif shape and shape[0] % BATCH == 0:
        shape[0] //= BATCH
    return tuple(shape)


def _without_single_reader_joins(drafts: list[_LayerDraft]) -> dict[int, _LayerDraft]:
    """Return layers by index, without joins that a single layer reads; that layer reads the joined layers itself."""
    layers = dict(enumerate(drafts))
    for index, one in enumerate(drafts):
        readers = [reader for reader in drafts[index + 1 :] if index in reader.inputs] if one.only_joins else []
        if len(readers) == 1:
            readers[0].inputs = readers[0].inputs - {index} | one.inputs
            del layers[index]
    return layers


def _names_of(layers: dict[int, _LayerDraft]) -> dict[int, str]:
    """Return a unique name for every layer: the module's path, with a number from the second call on."""
    calls: Counter[str] = Counter()
    names: dict[int, str] = {}
    for index, one in layers.items():
        name = one.path or type(one.module).__name__
        calls[name] += 1
        names[index] = name if calls[name] == 1 else f"{name}#{calls[name]}"
    return names


def _layer(draft: _LayerDraft, names: dict[int, str], index: int, parameters: int) -> Layer:
    """Return one layer, per sample of the traced batch."""
    return Layer(
        name=names[index],
        kind=type(draft.module).__name__,
        output_shape=draft.output_shape,
        parameters=parameters,
        forward_flops=draft.flops / BATCH,
        activation_bytes=draft.kept_bytes // BATCH,
        splits=splits_of(draft.module, draft.output_shape),
        inputs=tuple(names[origin] for origin in sorted(draft.inputs)),
        input_shape=draft.input_shape,
        window=window_of(draft.module),
        groups=getattr(draft.module, "groups", 1),
    )


def _parameters_by_layer(model: nn.Module, layers: dict[int, _LayerDraft], names: dict[int, str]) -> dict[str, int]:
    """Return trainable scalars by name of the layer that owns them, or by path of a module without a layer."""
    first: dict[str, str] = {}
    for index, one in layers.items():
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
    """Return the layer of module `path`, else of the nearest module around it that has one, else `path`."""
    around = path
    while around not in first and around:
        around = around.rpartition(".")[0]
    return first.get(around, path)


def _unreached(path: str, module: nn.Module, parameters: int) -> Layer:
    """Return a layer without work, for parameters that the forward pass did not use."""
    kind = type(module).__name__
    return Layer(name=path or kind, kind=kind, output_shape=(), parameters=parameters)


def _untrained_bytes(model: nn.Module) -> int:
    """Return the bytes of buffers and frozen parameters."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.buffers(), *frozen))


_POINTWISE: tuple[Dim, ...] = ("sample", "channel", "row", "column")
_WEIGHTED: tuple[Dim, ...] = ("sample", "channel", "filter")
_IMAGE_CONV: tuple[Dim, ...] = ("sample", "channel", "filter", "row", "column")

_SPLITS: dict[type[nn.Module], tuple[Dim, ...]] = {
    **dict.fromkeys((nn.Conv2d, nn.Conv3d), _IMAGE_CONV),
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _WEIGHTED),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _POINTWISE),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish), _POINTWISE),
    **dict.fromkeys((nn.Dropout, nn.Identity), _POINTWISE),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.MaxPool3d, nn.AvgPool3d), _POINTWISE),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.InstanceNorm2d), ("sample", "channel")),
    **dict.fromkeys((nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d, nn.InstanceNorm3d), ("sample", "channel")),
}
_HAS_WINDOW = (
    nn.modules.conv._ConvNd,
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)


def splits_of(module: nn.Module, output_shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Return the dims of the table, without rows and columns if there are none, and without channels if groups tie
    them.

    Rows and columns are the first two spatial dims: depth and rows for volumes.
    """
    dims = next((_SPLITS[kind] for kind in type(module).__mro__ if kind in _SPLITS), ("sample",))
    if len(output_shape) not in (3, 4):
        dims = tuple(dim for dim in dims if dim not in ("row", "column"))
    if getattr(module, "groups", 1) != 1:
        dims = tuple(dim for dim in dims if dim not in ("channel", "filter"))
    return dims


def window_of(module: nn.Module) -> Window | None:
    """Return the window of a convolution or pooling; None for other modules and adaptive poolings."""
    if not isinstance(module, _HAS_WINDOW):
        return None
    dims = range(_extent_dims(module))
    return Window(
        kernel=tuple(_size(module, "kernel_size", dim) for dim in dims),
        stride=tuple(_size(module, "stride", dim, default=1) for dim in dims),
        padding=tuple(_padding_before(module, dim) for dim in dims),
        dilation=tuple(_size(module, "dilation", dim, default=1) for dim in dims),
        transposed=isinstance(module, nn.modules.conv._ConvTransposeNd),
    )


def _extent_dims(module: nn.Module) -> int:
    """Return 1, 2 or 3: the digit in the class's name."""
    return next(int(name[-2]) for kind in type(module).__mro__ if (name := kind.__name__).endswith(("1d", "2d", "3d")))


def _padding_before(module: nn.Module, dim: int) -> int:
    if module.padding == "valid":
        return 0
    if module.padding == "same":
        return (_size(module, "dilation", dim, default=1) * (_size(module, "kernel_size", dim) - 1)) // 2
    return _size(module, "padding", dim)


def _size(module: nn.Module, field: str, dim: int, default: int = 0) -> int:
    value = getattr(module, field, default)
    return int(value[dim] if isinstance(value, tuple) else value)
