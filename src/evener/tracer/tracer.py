"""The tracer: runs a model once on the meta device, and records every operation in a graph.

    with TorchFunctionMode, hooks on all modules          records calls and their tensors
        with CostMeter, saved-tensor hooks                records costs
            outputs = model(inputs on the meta device)
    the identity of a tensor gives the node that it came from

Python runs normally (loops, branches on shapes, `isinstance`), so every model that runs on the meta device can be
traced. Tensors that the model makes itself keep their values until an input is mixed into them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from evener.tracer.autograd_functions import applications, applying, hooking
from evener.tracer.effects import PythonState, States
from evener.tracer.hooks import are_traced
from evener.tracer.ir import OpRecord, TorchModes, TracedModel, assign, item, record
from evener.tracer.meta_model import META, CostMeter, Twins, attributes, storage_of
from evener.tracer.nested import call, map_tensors, map_values, tensors_in
from evener.tracer.operation import (
    PLAIN,
    NotAnOperation,
    RunningOperation,
    called,
    is_computed_twice,
    is_drawn,
    moved_by,
    reads_numbers,
    refuse_hidden,
    refuse_unknown,
    setting,
    users_line,
)


class Tracer(TorchFunctionMode):
    """Runs a model on the meta device once, and records its operations. The modules `leaves` are one operation each.

    Tensors report `device` as their device to the model. If `executable`, the graph computes what the model computes.

    Attributes:
        python: The Python state of the model, which the pass may change.
    """

    def __init__(self, model: nn.Module, device: torch.device, leaves: Set[str], executable: bool) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._constants: dict[str, Tensor] = {}
        self._changed: dict[int, fx.Node] = {}
        self._model, self._device, self._leaves, self._executable = model, device, leaves, executable
        self._known: dict[int, tuple[Tensor, fx.Node]] = {}  # holds the tensor, so that its id stays unique
        self._names = {id(tensor): name for name, tensor in reversed(attributes(model))}
        self._twins = Twins()
        self._modules: list[str] = []
        self.python = PythonState(model)
        self._twice = False
        self._operation: RunningOperation | None = None
        self._listening = True
        self._meter = CostMeter([*model.parameters(), *model.buffers()])
        self._outermost: FrameType | None = None  # only set during `run`: a frame keeps its callers alive
        self._outer: TorchModes | None = None

    @property
    def innermost(self) -> str:
        """Path of the innermost running module; empty for the model itself."""
        return self._modules[-1] if self._modules else ""

    @property
    def is_in_operation(self) -> bool:
        """Whether an operation is running."""
        return self._operation is not None

    def run(self, inputs: Any, whole: dict[str, str]) -> TracedModel:
        """Trace the model once on tensors like `inputs`."""
        self._outermost = sys._getframe()
        inputs = map_tensors(inputs, lambda tensor: torch.empty_like(tensor, device=META))
        for i, tensor in enumerate(tensors_in(inputs)):
            self._know(tensor, self._note("placeholder", f"input_{i}", (), {}, tensor))
        hooks: list[Any] = []
        for path, module in [(path, module) for path, module in self._model.named_modules() if path]:
            apart = are_traced(module)
            hooks.append(module.register_forward_pre_hook(self._enter(path), prepend=not apart, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave(path), prepend=apart))
        states = States(self._model)
        try:
            with torch.enable_grad(), self._meter, saved_tensors_hooks(self._meter.keep, lambda tensor: tensor), self:
                self._outer = TorchModes.now(self._device.type)
                with applications(self._apply):
                    outputs = call(self._model, inputs)
        finally:
            self._outermost = None
            for handle in hooks:
                handle.remove()
        replaced = self._assign(states) if self._executable else []
        outputs = map_values(outputs, self._as_output)
        self._graph.output(outputs)
        return TracedModel(
            graph=self._graph,
            device=self._device,
            constants=self._constants,
            changed=self._changed,
            outputs=outputs,
            states=tuple(dict.fromkeys([*states.changed(self._changed), *replaced, *self.python.of_operations])),
            whole=whole,
        )

    def _assign(self, states: States) -> list[str]:
        """Record which buffers the model replaced during its run; return their names."""
        replaced = states.replaced()
        for name, held, now in replaced:
            self._note("call_function", assign, (self._node_of(held), name, self._node_of(now)), {}, None)
        return [name for name, _, _ in replaced]

    def _apply(self, kind: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record the application of an autograd function as one operation."""
        if not self._listening:
            return apply(*args)
        if kind is CheckpointFunction and any(tensor.requires_grad for tensor in tensors_in(args)):
            before, self._twice = self._twice, True
            outputs = args[0](*args[2:])
            self._twice = before
            return outputs
        operation = self._begin(args, {})
        outputs = apply(*operation.give(map_values(args, self._twins.of)))
        self._end("call_function", applying(kind), args, outputs)
        return outputs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and record it if it returns or changes a tensor."""
        kwargs = kwargs or {}
        if not self._listening:
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return self._device
        if func == Tensor.register_hook and self._executable:
            return self._hook(*args)
        if self._executable:
            refuse_hidden(func)
        operation = self._begin(args, kwargs)
        if any(map(self._twins.has_no_numbers, tensors_in((args, kwargs)))):
            arguments = operation.give(map_values((args, kwargs), self._twins.of))
            outputs = func(*arguments[0], **arguments[1])
            for tensor in moved_by(func, *arguments):
                tensor.add_(0)
        else:
            arguments = operation.give(map_values((args, kwargs), _on_host))
            outputs = self._meter.run_quietly(lambda: func(*arguments[0], **arguments[1]))
            self._refuse_drawn(func, operation)
        self._end(*called(func, args), outputs)
        return outputs

    def _hook(self, tensor: Any, hook: Any) -> Any:
        """Make `tensor` the output of an operation that has the hook."""
        node = self._node_of(tensor)
        if node.users:
            raise NotAnOperation("the model adds a hook to a tensor after it was read")
        self._begin((tensor,), {})
        handle = tensor.register_hook(hook)
        self._end("call_function", hooking(hook), (tensor,), tensor)
        return handle

    def _refuse_drawn(self, func: Callable[..., Any], operation: RunningOperation) -> None:
        """Raise NotAnOperation if `func` passes random values to Python."""
        if self._executable and reads_numbers(func):
            tensors = tensors_in((operation.args, operation.kwargs))
            if any(is_drawn(self._known[id(tensor)][1]) for tensor in tensors if id(tensor) in self._known):
                raise NotAnOperation("a random number decides what the model does")

    def _enter(self, path: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._operation is not None:
                return None
            if path in self._leaves and self._executable:
                self.python.refuse_changes(path, module)
            self._modules.append(path)
            if path not in self._leaves:
                return None
            operation = self._begin(args, kwargs, path)
            operation.is_call_of(module)
            return operation.give(map_values((args, kwargs), self._twins.of))

        return enter

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(module: nn.Module, _args: Any, outputs: Any) -> None:
            if self._operation is not None and self._operation.path != path:
                return
            if self._operation is not None:
                self.python.note_changes(path, module)
                self._end("call_module", path, self._operation.args, outputs)
            self._listening = False
            map_tensors(outputs, self._node_of)  # check that the outputs are traced before leaving the module
            self._listening = True
            self._modules.pop()

        return leave

    def _begin(self, args: Any, kwargs: Any, path: str = "") -> RunningOperation:
        self._operation, self._listening = RunningOperation(args, kwargs, users_line(self._outermost), path), False
        self._meter.take()
        return self._operation

    def _end(self, op: str, target: Any, args: Any, outputs: Any) -> None:
        """Record the running operation, and the nodes of its outputs."""
        operation = self._operation
        assert operation is not None
        changed = operation.changed
        if (changed or operation.changes_module) and self._executable and (self._twice or is_computed_twice()):
            raise NotAnOperation("recomputed code (torch.utils.checkpoint) changes buffers, which would change twice")
        if changed or next(tensors_in(outputs), None) is not None:
            flops, kept_bytes, is_random = self._meter.take()
            args, kwargs = map_values((tuple(args), dict(operation.kwargs)), self._as_argument)
            node = self._note(op, target, args, kwargs, outputs)
            seen = record(node)
            seen.line, seen.flops, seen.kept_sizes, seen.is_random = operation.line, flops, kept_bytes, is_random
            seen.training = operation.training
            seen.changes = tuple(self._node_of(original) for original, _ in changed)
            for original, twin in changed:
                self._changed[storage_of(original)] = node
                if twin is not original:
                    self._lose_numbers(original, twin, node)
            self._know(outputs, node)
        self._operation, self._listening = None, True

    def _lose_numbers(self, original: Tensor, changed: Tensor, node: fx.Node) -> None:
        """Record that tensors in the memory of `original` have no values, and a gradient if `changed` has one."""
        self._twins.lose_numbers(original)
        for tensor, origin in list(self._known.values()):
            if storage_of(tensor) == storage_of(original):
                twin = self._twins.of(tensor)
                if changed.requires_grad and not twin.requires_grad:
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

    def _know(self, value: Any, node: fx.Node) -> None:
        """Record that every tensor in `value` comes from `node`; several tensors get a node each."""
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, node)
        elif isinstance(value, tuple | list | dict):
            for key in value if isinstance(value, dict) else range(len(value)):
                if next(tensors_in(value[key]), None) is not None:
                    self._know(value[key], self._note("call_function", item, (node, key), {}, value[key]))
        elif self._executable:
            refuse_unknown(value)

    def _as_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node_of(value)
        return setting(value) if self._executable else value

    def _as_output(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node_of(value)
        if self._executable:
            refuse_unknown(value)
        return value if isinstance(value, PLAIN) else None

    def _node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that `tensor` comes from."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        name = self._names.get(id(tensor))
        if name is None and tensor.is_meta and self._executable:
            raise NotAnOperation("a tensor comes from something that is not an operation of torch")
        if name is None and tensor.requires_grad and self._executable:
            raise NotAnOperation(
                "a tensor that requires a gradient is neither a parameter of the model nor computed in it"
            )
        if name is None:
            name = f"constant_{len(self._constants)}"
            self._constants[name] = tensor
        node = self._note("get_attr", name, (), {}, tensor)
        self._known[id(tensor)] = (tensor, node)
        return node


def _on_host(value: Any) -> Any:
    """Return the device of tensors with values, in place of any device."""
    return torch.device("cpu") if isinstance(value, torch.device) else value
