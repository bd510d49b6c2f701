"""Listens to a model while it runs on the meta device, and writes down every operation in a graph of torch.fx."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._python_dispatch import TorchDispatchMode

from evener.parallel.pipeline.context import Context
from evener.parallel.pipeline.skeleton import META, attributes, on_meta, storage_of
from evener.parallel.pipeline.tensors import call, map_tensors, map_values, tensors_in, values_in

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""What may stand in arguments and results beside tensors."""


class NotFollowed(Exception):
    """Something happened that is not an operation. (A TypeError would be taken by Python's operators for their own.)"""


class _Randomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices that something draws random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass
class _Operation:
    """One that is under way.

    Attributes:
        args: positional arguments.
        kwargs: named arguments.
        path: of the module, if it is one.
        versions: the tensors given, as the model knows them and as the operation does, and how often that was changed.
    """

    args: Any
    kwargs: Any
    path: str
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


class Listener(TorchFunctionMode):
    """Runs a model once and writes down what it does.

    Args:
        model: on the meta device.
        device: that the model is told if it asks where a tensor is.
        whole: modules not to look into, beside those without children.

    Attributes:
        graph: of torch.fx.
        constants: tensors with numbers that came from nowhere, by name.
        changed: the last node that changed a storage in place.
        states: buffers that the pass changed.
    """

    def __init__(self, model: nn.Module, device: torch.device, whole: Collection[str]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.changed: dict[int, fx.Node] = {}
        self.states: tuple[str, ...] = ()
        self._model, self._device, self._whole = model, device, whole
        self._known: dict[int, tuple[Tensor, fx.Node, bool]] = {}  # the tensor is held: its id is not used again
        self._names = {id(tensor): name for name, tensor in reversed(attributes(model))}
        self._without_numbers: set[int] = set()
        self._modules: list[str] = []
        self._operation: _Operation | None = None
        self._listening = True
        self._randomness = _Randomness()  # type: ignore[no-untyped-call]
        self._outer = Context.now(device.type)

    @property
    def innermost(self) -> str:
        """Path of the module that runs now; empty for the model itself."""
        return self._modules[-1] if self._modules else ""

    @property
    def innermost_module(self) -> nn.Module:
        """The module that runs now."""
        return self._model.get_submodule(self.innermost)

    @property
    def is_in_operation(self) -> bool:
        """Whether an operation is under way."""
        return self._operation is not None

    def run(self, inputs: Any) -> None:
        """Run the model on tensors like `inputs`."""
        inputs = map_tensors(inputs, lambda tensor: torch.empty_like(tensor, device=META))
        for i, tensor in enumerate(tensors_in(inputs)):
            self._know(tensor, self._note("placeholder", f"input_{i}", (), {}, tensor))
        for path, module in self._model.named_modules():
            if path:
                module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True)
                module.register_forward_hook(self._leave(path))
        states = [(name, tensor, tensor._version) for name, tensor in _states(self._model)]
        with torch.enable_grad(), self._randomness, self:
            outputs = call(self._model, inputs)
        self.graph.output(map_values(outputs, self._as_output))
        self.states = tuple(name for name, tensor, version in states if tensor._version != version)
        self._keep_inputs()

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
        given = (args, kwargs)
        if any(map(self._is_without_numbers, values_in(given))):
            given = map_values(given, on_meta)
        operation.give(given)
        outputs = func(*given[0], **given[1])
        self._end(*_called(func, args), outputs)
        return outputs

    def _is_without_numbers(self, value: Any) -> bool:
        """Whether what is computed with `value` can only be computed without numbers."""
        if isinstance(value, Tensor):
            return value.is_meta or storage_of(value) in self._without_numbers
        return isinstance(value, torch.device)

    def _enter(self, path: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._operation is not None:
                return None
            self._modules.append(path)
            if path not in self._whole and next(module.children(), None) is not None:
                return None
            operation = self._begin(args, kwargs, path)
            return operation.give(map_values((args, kwargs), on_meta))

        return enter

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, outputs: Any) -> None:
            if self._operation is not None and self._operation.path != path:
                return
            if self._operation is not None:
                self._end("call_module", path, self._operation.args, outputs)
            with self._not_listening():
                map_tensors(outputs, self._node_of)  # that the module can be followed is known before it is left
            self._modules.pop()

        return leave

    @contextmanager
    def _not_listening(self) -> Iterator[None]:
        self._listening = False
        yield
        self._listening = True

    def _begin(self, args: Any, kwargs: Any, path: str = "") -> _Operation:
        self._operation, self._listening = _Operation(args, kwargs, path), False
        self._randomness.seen = False
        return self._operation

    def _end(self, op: str, target: Any, args: Any, outputs: Any) -> None:
        """Write the operation under way down, and where its outputs come from."""
        assert self._operation is not None
        changed = self._operation.changed
        if changed or next(tensors_in(outputs), None) is not None:
            args, kwargs = map_values((tuple(args), dict(self._operation.kwargs)), self._as_argument)
            node = self._note(op, target, args, kwargs, outputs, random=self._randomness.seen)
            for original, given in changed:
                self.changed[storage_of(original)] = node
                if given is not original:
                    self._without_numbers.add(storage_of(original))
            self._know(outputs, node)
        self._operation, self._listening = None, True

    def _note(self, op: str, target: Any, args: Any, kwargs: Any, value: Any, random: bool = False) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        context = Context.now(self._device.type)
        node.meta.update(
            value=value,
            number=len(self.graph.nodes),
            random=random,
            context=None if context == self._outer else context,
            module=self.innermost,
        )
        return node

    def _know(self, value: Any, node: fx.Node) -> None:
        """Remember that every tensor in `value` comes from `node`, through a node of its own each if there are many."""
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, node, value.requires_grad)
        elif isinstance(value, tuple | list | dict):
            for key in value if isinstance(value, dict) else range(len(value)):
                if next(tensors_in(value[key]), None) is not None:
                    self._know(value[key], self._note("call_function", _item, (node, key), {}, value[key]))
        elif not isinstance(value, _PLAIN):
            raise NotFollowed(f"returns a {type(value).__name__}, which is neither tensor, tuple, list nor dict")

    def _as_argument(self, value: Any) -> Any:
        return self._node_of(value) if isinstance(value, Tensor) else value

    def _as_output(self, value: Any) -> Any:
        if not isinstance(value, (Tensor, *_PLAIN)):
            raise NotFollowed(f"returns a {type(value).__name__}, which is neither tensor, tuple, list nor dict")
        return self._as_argument(value)

    def _node_of(self, tensor: Tensor) -> fx.Node:
        """The node that `tensor` comes from."""
        if id(tensor) in self._known:
            _, node, required_grad = self._known[id(tensor)]
            if tensor.requires_grad != required_grad and storage_of(tensor) not in self.changed:
                raise NotFollowed("an autograd function of the model's own was applied")
            return node
        name = self._names.get(id(tensor))
        if name is None and tensor.is_meta:
            raise NotFollowed("a tensor comes from something that is not an operation of torch")
        if name is None:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
        node = self._note("get_attr", name, (), {}, tensor)
        self._known[id(tensor)] = (tensor, node, tensor.requires_grad)
        return node

    def _keep_inputs(self) -> None:
        """Copy inputs that the model changes in place: the user's stay as they are, and may be computed with again."""
        for node in [node for node in self.graph.nodes if node.op == "placeholder"]:
            if storage_of(node.meta["value"]) in self.changed:
                with self.graph.inserting_after(node):
                    clone = self.graph.call_method("clone", (node,))
                clone.meta.update(node.meta)
                node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)


def _called(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """(kind, target, arguments) of the call of `func`, as torch.fx writes them."""
    if func.__name__ == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)  # type: ignore[attr-defined]
    if is_tensor_method_or_property(func):
        return "call_method", func.__name__, args
    return "call_function", func, args


def _item(values: Any, key: Any) -> Any:
    """One of several values that an operation returned."""
    return values[key]


def _states(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers other than those of BatchNorms."""
    norms = {id(buffer) for m in model.modules() if isinstance(m, _BatchNorm) for buffer in m.buffers()}
    return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in norms]
