"""nn.Module -> ModelGraph, by one forward pass on the meta device: nothing is computed and no memory is taken.

A layer is a call of a leaf module (one without children), or the functional work of a container between two such calls:

    leaf module called                    -> a layer of its name; called again: `name#2`
    container multiplies, keeps tensors   -> a layer of the container's name (attention, a positional embedding)
     for backward, or reads a parameter
    container joins outputs of layers     -> likewise if several layers read the result (the residual stream of a
     (a residual sum, a concatenation)       transformer); if one does, that one reads the joined outputs (ResNet)
    container only reshapes ...           -> no layer; what reads the result reads the layer that it came from
    parameters that nothing reached       -> counted at the nearest container that is a layer, else a layer at the end

Python alone knows which tensor came from where, so a TorchFunctionMode follows the origins of tensors, by identity.
Costs are counted where they are exact: FLOPs by FlopCounterMode, kept bytes by the saved-tensor hooks of autograd.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from evener.errors import TrainingFailed
from evener.graph import Dim, Layer, ModelGraph

_BATCH = 61
"""Samples of the traced batch: a prime, so that the sample dim of any tensor can be told from its other dims."""

_POINTWISE: tuple[Dim, ...] = ("sample", "channel", "row", "column")
_WEIGHTED: tuple[Dim, ...] = ("sample", "channel", "filter")
_IMAGE_CONV: tuple[Dim, ...] = ("sample", "channel", "filter", "row", "column")

_SPLITS: dict[type[nn.Module], tuple[Dim, ...]] = {
    nn.Conv2d: _IMAGE_CONV,
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d), _WEIGHTED),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _POINTWISE),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish), _POINTWISE),
    **dict.fromkeys((nn.Dropout, nn.Identity, nn.MaxPool2d, nn.AvgPool2d), _POINTWISE),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.InstanceNorm2d), ("sample", "channel")),
}
_WINDOWED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


def trace(model: nn.Module, sample: Any, name: str = "") -> ModelGraph:
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
        batch. `halo` is for equal rows of input and output: rows [a*stride, b*stride) in, rows [a, b) out.

    Raises:
        TrainingFailed: the model cannot be run without values; says where and why.
    """
    name = name or type(model).__name__
    tracer = _Tracer()
    try:
        clone = _on_meta(model).train()
        tracer.run(clone, _map_tensors(sample, _batch_on_meta))
    except Exception as error:
        where = f" in layer {tracer.innermost}" if tracer.innermost else ""
        raise TrainingFailed(
            f"cannot trace {name}{where}: {type(error).__name__}: {_first_line(error)}; if the sample has the shape of "
            "a real batch, let forward neither read values of tensors (.item(), if) nor fix the batch size or a device"
        ) from error
    costs = _without_single_reader_joins(tracer.costs)
    names = _names(costs)
    parameters = _parameters_by_layer(clone, costs, names)
    layers = [_layer(cost, names, index, parameters.pop(names[index], 0)) for index, cost in costs.items()]
    layers += [_unreached(path, clone.get_submodule(path), count) for path, count in parameters.items()]
    return ModelGraph(
        name=name,
        layers=tuple(layers),
        element_bytes=next((p.element_size() for p in clone.parameters()), 4),
        buffer_bytes=_untrained_bytes(clone),
    )


_Origins: TypeAlias = frozenset[int]
"""Indices of the layers that a tensor came from."""


@dataclass
class _Cost:
    """A layer while it is traced; FLOPs and bytes are those of the whole traced batch."""

    path: str
    module: nn.Module
    inputs: set[int] = field(default_factory=set)
    output_shape: tuple[int, ...] = ()
    flops: int = 0
    kept_bytes: int = 0
    only_joins: bool = False


class _Tracer(TorchFunctionMode):
    """Follows one forward pass: which module runs, which layers a tensor came from, what was spent and kept so far."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[_Cost] = []
        self._running: list[tuple[str, nn.Module]] = []
        self._started: tuple[int, int] = (0, 0)
        self._origins: dict[int, tuple[Tensor, _Origins]] = {}
        self._flops = FlopCounterMode(display=False)
        self._stored: dict[int, torch.UntypedStorage] = {}
        self._kept_bytes = 0

    @property
    def innermost(self) -> str:
        """Path of the module that runs now; empty for the model itself."""
        return self._running[-1][0] if self._running else ""

    def run(self, model: nn.Module, batch: Any) -> None:
        """Run `model` on `batch`, both on the meta device; fills `costs`."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._remember(tensor)
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(path), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, with_kwargs=True)
        with (
            torch.enable_grad(),
            self._flops,
            saved_tensors_hooks(self._keep, lambda kept: kept),
            torch.device("meta"),
            self,
        ):
            _call(model, batch)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; what a container computes by itself becomes a layer if it costs anything."""
        kwargs = kwargs or {}
        if not self._running or _is_leaf(self._running[-1][1]):
            return func(*args, **kwargs)
        before = self._spent()
        outputs = func(*args, **kwargs)
        written = args[0] if func is Tensor.__setitem__ else outputs
        read = list(_tensors((args, kwargs)))
        if next(_tensors(written), None) is not None:
            origins = self._origins_of(read)
            costs = self._spent() != before or any(isinstance(tensor, nn.Parameter) for tensor in read)
            if costs or len(origins) > 1:
                self._add_functional(origins, before, written, only_joins=not costs)
            else:
                self._mark(written, origins)
        return outputs

    def _enter(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, _args: Any, _kwargs: Any) -> None:
            self._running.append((path, module))
            self._started = self._spent()

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        path, _ = self._running.pop()
        if _is_leaf(module):
            self.costs.append(_Cost(path, module))
            self._add(self._origins_of(_tensors((args, kwargs))), self._started, outputs)

    def _add_functional(self, origins: _Origins, before: tuple[int, int], outputs: Any, only_joins: bool) -> None:
        """Add functional work to the layer of the container that runs, a new one unless it is the last so far."""
        path, module = self._running[-1]
        last = self.costs[-1] if self.costs else None
        if last is None or last.module is not module or last.only_joins != only_joins:
            self.costs.append(_Cost(path, module, only_joins=only_joins))
        self._add(origins, before, outputs)

    def _add(self, origins: _Origins, before: tuple[int, int], outputs: Any) -> None:
        """Add what was spent since `before` to the last layer."""
        index, cost = len(self.costs) - 1, self.costs[-1]
        flops, kept_bytes = self._spent()
        cost.inputs |= origins - {index}
        cost.flops += flops - before[0]
        cost.kept_bytes += kept_bytes - before[1]
        cost.output_shape = _shape_of_sample(next(_tensors(outputs), None))
        self._mark(outputs, frozenset({index}))

    def _spent(self) -> tuple[int, int]:
        return self._flops.get_total_flops(), self._kept_bytes

    def _mark(self, outputs: Any, origins: _Origins) -> None:
        for tensor in _tensors(outputs):
            self._origins[id(tensor)] = (tensor, origins)  # the tensor is held so that its id is not used again

    def _origins_of(self, tensors: Iterable[Tensor]) -> _Origins:
        known = (self._origins.get(id(tensor)) for tensor in tensors)
        return frozenset(index for origin in known if origin for index in origin[1])

    def _keep(self, tensor: Tensor) -> Tensor:
        if self._remember(tensor):
            num_bytes = tensor.untyped_storage().nbytes()
            self._kept_bytes += num_bytes if num_bytes % _BATCH == 0 else 0
        return tensor

    def _remember(self, tensor: Tensor) -> bool:
        """Hold the storage of `tensor`; true if it is a new one."""
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._stored
        self._stored[storage._cdata] = storage
        return new


class _CopyToMeta(TorchFunctionMode):
    """While it is active, deep copies of tensors have their shape and dtype but no memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the two ways in which a deep copy gets memory: plain tensors, and the clone inside of parameters."""
        if func is Tensor.clone:
            return torch.empty_like(args[0], device="meta")
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _on_meta(model: nn.Module) -> nn.Module:
    with torch.no_grad(), _CopyToMeta():
        return copy.deepcopy(model)


def _batch_on_meta(tensor: Tensor) -> Tensor:
    shape = (_BATCH, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` of every tensor in it; named tuples become plain ones."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return [_map_tensors(item, function) for item in value]
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _shape_of_sample(output: Tensor | None) -> tuple[int, ...]:
    """The shape of an output without its sample dim; windows and tokens that were folded into it are kept."""
    shape = list(output.shape) if output is not None else []
    if _BATCH in shape:
        shape.remove(_BATCH)
    elif shape and shape[0] % _BATCH == 0:
        shape[0] //= _BATCH
    return tuple(shape)


def _without_single_reader_joins(costs: list[_Cost]) -> dict[int, _Cost]:
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


def _names(costs: dict[int, _Cost]) -> dict[int, str]:
    """A unique name for every layer: the module's path, from the second call on with its number."""
    calls: Counter[str] = Counter()
    names: dict[int, str] = {}
    for index, cost in costs.items():
        name = cost.path or type(cost.module).__name__
        calls[name] += 1
        names[index] = name if calls[name] == 1 else f"{name}#{calls[name]}"
    return names


def _layer(cost: _Cost, names: dict[int, str], index: int, parameters: int) -> Layer:
    return Layer(
        name=names[index],
        kind=type(cost.module).__name__,
        output_shape=cost.output_shape,
        parameters=parameters,
        forward_flops=cost.flops / _BATCH,
        activation_bytes=cost.kept_bytes // _BATCH,
        splits=_splits(cost.module, cost.output_shape),
        halo=_halo(cost.module),
        inputs=tuple(names[origin] for origin in sorted(cost.inputs)),
    )


def _splits(module: nn.Module, output_shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Dims of the table, less rows and columns where there are none and less channels that groups tie together."""
    dims = next((_SPLITS[kind] for kind in type(module).__mro__ if kind in _SPLITS), ("sample",))
    if len(output_shape) != 3:
        dims = tuple(dim for dim in dims if dim not in ("row", "column"))
    if getattr(module, "groups", 1) != 1:
        dims = tuple(dim for dim in dims if dim not in ("channel", "filter"))
    return dims


def _halo(module: nn.Module) -> tuple[int, int]:
    if not isinstance(module, _WINDOWED):
        return (0, 0)
    return (_halo_along(module, 0), _halo_along(module, 1))


def _halo_along(module: nn.Module, dim: int) -> int:
    """Rows that output rows [a, b) read beyond their own input rows [a*stride, b*stride), on the worse side."""
    kernel, stride = (_size(module, field, dim) for field in ("kernel_size", "stride"))
    extent = _size(module, "dilation", dim, default=1) * (kernel - 1) + 1
    padding = module.padding
    before = (
        {"same": (extent - 1) // 2, "valid": 0}[padding] if isinstance(padding, str) else _size(module, "padding", dim)
    )
    return max(before, extent - stride - before, 0)


def _size(module: nn.Module, field: str, dim: int, default: int = 0) -> int:
    value = getattr(module, field, default)
    return int(value[dim] if isinstance(value, tuple) else value)


def _parameters_by_layer(model: nn.Module, costs: dict[int, _Cost], names: dict[int, str]) -> dict[str, int]:
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


def _unreached(path: str, module: nn.Module, parameters: int) -> Layer:
    kind = type(module).__name__
    return Layer(name=path or kind, kind=kind, output_shape=(), parameters=parameters)


def _untrained_bytes(model: nn.Module) -> int:
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.buffers(), *frozen))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or "no message"
