"""Runs a model once on tensors without memory, and writes every operation down in a graph.

    with TorchFunctionMode, hooks on all modules          what is called, with which tensors
        with CostMeter, saved-tensor hooks                what it costs
            outputs = model(inputs on the meta device)
    a tensor is known by its identity: the node that it came from

Python runs as it always does (loops, branches on shapes, `isinstance`), so whatever runs on the meta device can be
followed. Tensors that the model makes itself keep their numbers as long as no input is mixed into them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from evener.errors import is_users
from evener.tracer.hooks import are_followed
from evener.tracer.ir import OpRecord, TorchModes, TracedModel, item, record
from evener.tracer.meta_model import META, CostMeter, attributes, storage_of, value_on_meta
from evener.tracer.nested import call, map_tensors, map_values, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""What may stand in arguments and results beside tensors."""
_UNKNOWN = "neither tensor, tuple, list nor dict"


class NotFollowed(Exception):
    """Something happened that is not an operation. (A TypeError would be taken by Python's operators for their own.)"""


@dataclass
class _Operation:
    """One that is under way, with what it was called with.

    `versions` are the tensors given: as the model knows them and as the operation does, and how often that was changed.
    """

    args: Any
    kwargs: Any
    line: str
    path: str
    training: tuple[bool, ...] = ()
    versions: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    def give(self, given: Any) -> Any:
        """The operation runs with the tensors in `given`, which stand for its own."""
        pairs = zip(tensors_in((self.args, self.kwargs)), tensors_in(given), strict=True)
        self.versions = [(original, tensor, tensor._version) for original, tensor in pairs]
        return given

    @property
    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Those that it changed in place: (as the model knows it, as it was given)."""
        return [(original, tensor) for original, tensor, version in self.versions if tensor._version != version]


class Tracer(TorchFunctionMode):
    """Runs a model on the meta device once, and writes down what it does; the modules `leaves` are one operation each.

    The model is told `device` if it asks where a tensor is. The graph computes what the model does if `executable`.
    """

    def __init__(self, model: nn.Module, device: torch.device, leaves: Set[str], executable: bool) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._constants: dict[str, Tensor] = {}
        self._changed: dict[int, fx.Node] = {}
        self._model, self._device, self._leaves, self._executable = model, device, leaves, executable
        self._known: dict[int, tuple[Tensor, fx.Node, bool]] = {}  # the tensor is held: its id is not used again
        self._names = {id(tensor): name for name, tensor in reversed(attributes(model))}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._without_numbers: set[int] = set()
        self._modules: list[str] = []
        self._operation: _Operation | None = None
        self._listening = True
        self._meter = CostMeter([*model.parameters(), *model.buffers()])
        self._outermost: FrameType | None = None
        self._outer: TorchModes | None = None

    @property
    def innermost(self) -> str:
        """Path of the module that runs now; empty for the model itself."""
        return self._modules[-1] if self._modules else ""

    @property
    def is_in_operation(self) -> bool:
        """Whether an operation is under way."""
        return self._operation is not None

    def run(self, inputs: Any, whole: dict[str, str]) -> TracedModel:
        """What the model does with tensors like `inputs`, once."""
        self._outermost = sys._getframe()
        inputs = map_tensors(inputs, lambda tensor: torch.empty_like(tensor, device=META))
        for i, tensor in enumerate(tensors_in(inputs)):
            self._know(tensor, self._note("placeholder", f"input_{i}", (), {}, tensor))
        for path, module in self._model.named_modules():
            if path:
                apart = are_followed(module)
                module.register_forward_pre_hook(self._enter(path), prepend=not apart, with_kwargs=True)
                module.register_forward_hook(self._leave(path), prepend=apart)
        states = [(name, tensor, tensor._version) for name, tensor in _states(self._model)]
        with torch.enable_grad(), self._meter, saved_tensors_hooks(self._meter.keep, lambda kept: kept), self:
            self._outer = TorchModes.now(self._device.type)
            outputs = call(self._model, inputs)
        self._graph.output(map_values(outputs, self._as_output))
        return TracedModel(
            graph=self._graph,
            device=self._device,
            constants=self._constants,
            changed=self._changed,
            states=tuple(name for name, tensor, version in states if tensor._version != version),
            whole=whole,
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and write it down if a tensor comes out of it or is changed by it."""
        kwargs = kwargs or {}
        if not self._listening:
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return self._device
        operation = self._begin(args, kwargs)
        if any(map(self._is_without_numbers, tensors_in((args, kwargs)))):
            given = operation.give(map_values((args, kwargs), self._twin))
            outputs = func(*given[0], **given[1])
        else:
            given = operation.give(map_values((args, kwargs), _on_host))
            outputs = self._meter.run_quietly(lambda: func(*given[0], **given[1]))
        self._end(*_called(func, args), outputs)
        return outputs

    def _is_without_numbers(self, tensor: Tensor) -> bool:
        return tensor.is_meta or storage_of(tensor) in self._without_numbers

    def _twin(self, value: Any) -> Any:
        """What stands for `value` where there are no numbers, always the same."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value_on_meta(value)
        return self._twins.setdefault(id(value), (value, value_on_meta(value)))[1]

    def _enter(self, path: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._operation is not None:
                return None
            self._modules.append(path)
            if path not in self._leaves:
                return None
            operation = self._begin(args, kwargs, path)
            operation.training = tuple(one.training for one in module.modules())
            return operation.give(map_values((args, kwargs), self._twin))

        return enter

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, outputs: Any) -> None:
            if self._operation is not None and self._operation.path != path:
                return
            if self._operation is not None:
                self._end("call_module", path, self._operation.args, outputs)
            self._listening = False
            map_tensors(outputs, self._node_of)  # that the module can be followed is known before it is left
            self._listening = True
            self._modules.pop()

        return leave

    def _begin(self, args: Any, kwargs: Any, path: str = "") -> _Operation:
        self._operation, self._listening = _Operation(args, kwargs, self._user_line(), path), False
        self._meter.take()
        return self._operation

    def _end(self, op: str, target: Any, args: Any, outputs: Any) -> None:
        """Write the operation under way down, and where its outputs come from."""
        operation = self._operation
        assert operation is not None
        changed = operation.changed
        if changed or next(tensors_in(outputs), None) is not None:
            flops, kept, is_random = self._meter.take()
            args, kwargs = map_values((tuple(args), dict(operation.kwargs)), self._as_argument)
            node = self._note(op, target, args, kwargs, outputs)
            seen = record(node)
            seen.line, seen.flops, seen.kept, seen.is_random = operation.line, flops, kept, is_random
            seen.training = operation.training
            seen.changes = tuple(self._node_of(original) for original, _ in changed)
            for original, given in changed:
                self._changed[storage_of(original)] = node
                if given is not original:
                    self._lose_numbers(original, given, node)
            self._know(outputs, node)
        self._operation, self._listening = None, True

    def _lose_numbers(self, original: Tensor, given: Tensor, node: fx.Node) -> None:
        """From now on `original`, and what shares its memory, has no numbers, and a gradient if `given` has one."""
        self._without_numbers.add(storage_of(original))
        for tensor, origin, _ in list(self._known.values()):
            if storage_of(tensor) == storage_of(original):
                twin = self._twin(tensor)
                if given.requires_grad and not twin.requires_grad:
                    twin.requires_grad_()
                self._changed[storage_of(twin)] = node
                record(origin).value = twin

    def _note(self, op: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self._graph.create_node(op, target, args, kwargs)
        modes = TorchModes.now(self._device.type)
        node.meta["record"] = OpRecord(
            value=value,
            number=len(self._graph.nodes),
            module=self.innermost,
            modes=None if self._outer in (None, modes) else modes,
        )
        return node

    def _user_line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outermost:
            if is_users(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _know(self, value: Any, node: fx.Node) -> None:
        """Remember that every tensor in `value` comes from `node`, through a node of its own each if there are many."""
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, node, value.requires_grad)
        elif isinstance(value, tuple | list | dict):
            for key in value if isinstance(value, dict) else range(len(value)):
                if next(tensors_in(value[key]), None) is not None:
                    self._know(value[key], self._note("call_function", item, (node, key), {}, value[key]))
        elif self._executable and not isinstance(value, _PLAIN):
            raise NotFollowed(f"returns a {type(value).__name__}, which is {_UNKNOWN}")

    def _as_argument(self, value: Any) -> Any:
        return self._node_of(value) if isinstance(value, Tensor) else value

    def _as_output(self, value: Any) -> Any:
        if isinstance(value, (Tensor, *_PLAIN)):
            return self._as_argument(value)
        if self._executable:
            raise NotFollowed(f"returns a {type(value).__name__}, which is {_UNKNOWN}")
        return None

    def _node_of(self, tensor: Tensor) -> fx.Node:
        """The node that `tensor` comes from."""
        if id(tensor) in self._known:
            _, node, required_grad = self._known[id(tensor)]
            changed = tensor.requires_grad != required_grad and storage_of(tensor) not in self._changed
            if changed and self._executable:
                raise NotFollowed("an autograd function of the model's own was applied")
            return node
        name = self._names.get(id(tensor))
        if name is None and tensor.is_meta and self._executable:
            raise NotFollowed("a tensor comes from something that is not an operation of torch")
        if name is None and tensor.requires_grad and self._executable:
            raise NotFollowed("a tensor that learns is neither a parameter of the model nor computed in it")
        if name is None:
            name = f"constant_{len(self._constants)}"
            self._constants[name] = tensor
        node = self._note("get_attr", name, (), {}, tensor)
        self._known[id(tensor)] = (tensor, node, tensor.requires_grad)
        return node


def _called(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """(kind, target, arguments) of the call of `func`, as torch.fx writes them."""
    if func.__name__ == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)  # type: ignore[attr-defined]
    if is_tensor_method_or_property(func):
        return "call_method", func.__name__, args
    return "call_function", func, args


def _on_host(value: Any) -> Any:
    """The device that has the numbers of tensors that come from no input."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _states(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers other than those of BatchNorms."""
    norms = {id(buffer) for m in model.modules() if isinstance(m, _BatchNorm) for buffer in m.buffers()}
    return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in norms]
