"""A model as operations that can be divided: the planner's network, and each operation's computation in one process.

The operations come from the model's trace. A model that cannot be traced, as its control flow depends on data, is
refused. Operations may only make new values, so changes in place are converted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.oracle.division.layout import Shape
from evener.oracle.division.network import Kind, Network, Operation, Weight
from evener.oracle.division.plan import ReplicaPlan
from evener.parallel import op_registry
from evener.parallel.new_values import assigned, with_new_values, with_part
from evener.parallel.op_call import At, Call, Item, OpGraph, Slot
from evener.parallel.refusals import new_states, untraceable
from evener.tracer.autograd_functions import has_own_backward
from evener.tracer.ir import TracedModel, item, record
from evener.tracer.meta_model import attribute
from evener.tracer.nested import map_values, tensors_in, values_in
from evener.tracer.tracing import CPU, trace


def op_graph(
    model: nn.Module,
    inputs: Sequence[Tensor],
    device: torch.device = CPU,
    training: bool = True,
    whole: Collection[str] = (),
) -> OpGraph:
    """Return the operations of `model` for `inputs`, of which only shape and dtype matter.

    Args:
        model: The model; it is neither run nor changed.
        inputs: Inputs of one batch.
        device: Device on which the operations will run.
        training: Whether the model trains or evaluates.
        whole: Names of parameters that must stay whole on every rank.

    Raises:
        InvalidInput: The model cannot be traced, or a change in place cannot become a new value.
    """

    def of_samples(samples: int) -> OpGraph:
        others = [torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device="meta") for x in inputs]
        return op_graph(model, others, device, training, whole)

    with untraceable(f"{type(model).__name__} cannot be divided layer by layer"):
        traced = trace(model, list(inputs), device, training, op_registry.is_one_operation, is_part=True)
    traced = with_new_values(traced, type(model).__name__)
    return _Builder(model, traced, training, whole).build(cache(of_samples))


def unknown_undivided(graph: OpGraph, plan: ReplicaPlan) -> OpGraph:
    """Return `graph` with layers that `plan` does not know computed whole on every rank, as their weights are whole."""
    known = {operation.name for operation in plan.network.operations}
    operations = tuple(
        replace(one, kind="other", weights=tuple(replace(weight, role="free") for weight in one.weights))
        if one.weights and one.name not in known and one.kind != "constant"
        else one
        for one in graph.network.operations
    )
    return replace(graph, network=Network(operations))


class _Builder:
    """Turns the nodes of a traced model into operations."""

    def __init__(self, model: nn.Module, traced: TracedModel, training: bool, whole: Collection[str] = ()) -> None:
        self._model, self._traced = model, traced
        self._own_modes = {
            node.target for node in traced.operations if not all(mode == training for mode in record(node).training)
        }
        self._operations: list[Operation] = []
        self._calls: list[Call] = []
        self._slots: dict[Any, Slot] = {}
        self._whole = {id(attribute(model, name)) for name in whole} | self._of_several_kinds()

    def build(self, of_samples: Callable[[int], OpGraph]) -> OpGraph:
        """Return the graph of the operations that lead to an output."""
        states = new_states(self._traced, self._model, _changes_a_value)
        needed = _leading_to_output(self._traced.graph, set(states.values()))
        for node in self._traced.graph.nodes:
            if node in needed and node.op != "output" and self._is_operation(node):
                first = len(self._calls)
                self._slots[node] = self._read(node)
                for i in range(first, len(self._calls)):
                    self._calls[i] = self._as_seen(self._calls[i], node)
        outputs = map_values(self._traced.outputs, lambda x: self._argument(x) if isinstance(x, fx.Node) else x)
        moved = {name: self._slots[node] for name, node in states.items()}
        self._add("output", "output", (), Call(args=(outputs, moved)))
        network, calls = Network(tuple(self._operations)), tuple(self._calls)
        return OpGraph(network, calls, outputs, of_samples, moved, not self._traced.states)

    def _as_seen(self, call: Call, node: fx.Node) -> Call:
        """Return `call` with what the trace recorded about its `node`."""
        seen = record(node)
        training = seen.training if node.target in self._own_modes else ()
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(seen.value)) if seen.is_random else ()
        modes, is_random, line = seen.modes, seen.is_random, seen.line
        return replace(call, modes=modes, is_random=is_random, training=training, line=line, shapes=shapes)

    def _is_operation(self, node: fx.Node) -> bool:
        """Return whether `node` computes a tensor, or a nest of several at once."""
        value = record(node).value
        if isinstance(value, Tensor):
            return True
        return node.target is not item and not _cuts_channels(node) and next(tensors_in(value), None) is not None

    def _of_several_kinds(self) -> set[int]:
        """Return ids of parameters that several kinds of operations use: layers and reads, or different layers."""
        kinds: dict[int, set[str]] = {}
        for node in self._traced.graph.nodes:
            if node.op == "get_attr" and str(node.target) not in self._traced.constants:
                kinds.setdefault(id(attribute(self._model, str(node.target))), set()).add("")
            elif node.op == "call_module":
                kind = self._description(node).get("kind", "other")
                for parameter in self._model.get_submodule(str(node.target)).parameters():
                    kinds.setdefault(id(parameter), set()).add(kind)
        return {key for key, users in kinds.items() if len(users) > 1}

    def _read(self, node: fx.Node) -> Slot:
        """Add the operations that compute the tensor of `node`, or the nest of its tensors."""
        if node.op == "placeholder":
            return self._add(node.name, "input", self._shape(node), Call())
        if node.op == "get_attr":
            return self._constant(node)
        if node.op == "call_module":
            return self._module(node)
        if node.target is item:
            return self._element(node, ())
        plain = op_registry.not_in_place(node.target)
        if plain in op_registry.AS_MODULES:
            return self._function_as_module(node, op_registry.AS_MODULES[plain])
        if plain in op_registry.MEANS and op_registry.averages(self._shapes_read(node), node):
            return self._average(node)
        if plain in op_registry.CONCATENATIONS:
            return self._concat(node)
        if op_registry.is_pointwise(plain) or self._keeps_shape(node, plain):
            return self._add_call(node, "pointwise", _function(plain))
        if plain in op_registry.RESHAPES and op_registry.flattens(self._shapes_read(node), self._shape(node)):
            return self._add_call(node, "flatten", None)
        is_whole = plain in op_registry.NORMS or has_own_backward(plain)
        return self._add_call(node, "whole" if is_whole else "other", _function(plain))

    def _constant(self, node: fx.Node) -> Slot:
        name = str(node.target)
        if name in self._traced.constants:
            tensor = self._traced.constants[name].to(self._traced.device)
            return self._add(name, "constant", self._shape(node), Call(lambda: tensor))
        held = attribute(self._model, name)
        trainable = isinstance(held, nn.Parameter) and held.requires_grad
        weight = Weight(name="", shape=tuple(held.shape), role="free", trainable=trainable)
        return self._add(name, "constant", self._shape(node), Call(), weights=(weight,))

    def _module(self, node: fx.Node) -> Slot:
        path, shape = str(node.target), self._shape(node)
        module = self._model.get_submodule(path)
        if isinstance(module, nn.Flatten) and op_registry.flattens(self._shapes_read(node), shape):
            return self._add_call(node, "flatten", None)
        description = self._description(node)
        is_shared = any(id(parameter) in self._whole for parameter in module.parameters())
        if is_shared and description["kind"] not in ("batch_norm", "whole"):
            weights = tuple(replace(weight, role="free") for weight in description["weights"])
            return self._add(path, "other", shape, self._call(node, At(path)), weights=weights, shares_weights=True)
        return self._add(path, call=self._call(node, At(path)), shape=shape, **description)

    def _description(self, node: fx.Node) -> op_registry.Description:
        module, is_alone = self._model.get_submodule(str(node.target)), len(node.args) + len(node.kwargs) == 1
        if not is_alone:
            return op_registry.undivided(module)
        return op_registry.of_module(module, self._shapes_read(node), self._shape(node))

    def _function_as_module(self, node: fx.Node, kind: type[nn.Module]) -> Slot:
        """Add a function with settings as the module with the same settings."""
        arguments = node.normalized_arguments(self._model, normalize_to_only_use_kwargs=True)
        settings = dict(arguments.kwargs) if arguments is not None else {}
        x = settings.pop("input", None)
        known = inspect.signature(kind).parameters
        values = {
            key: fx.node.map_arg(value, self._argument)
            for key, value in settings.items()
            if key in known and key != "inplace"
        }
        others = {key: value for key, value in settings.items() if key not in known and key != "training" and value}
        if not isinstance(x, fx.Node) or others:
            return self._add_call(node, "other", _function(node.target))
        module, shape = kind(**values) if settings.get("training", True) else nn.Identity(), self._shape(node)
        description = op_registry.of_module(module, self._shapes_read(node), shape)
        return self._add(f"{node.name}()", call=Call(module, (self._slots[x],)), shape=shape, **description)

    def _average(self, node: fx.Node) -> Slot:
        """Add a mean over all pixels; it is flattened unless the dims are kept."""
        n, c = self._shape(node)[:2]
        source, [input_shape] = self._argument(node.args[0]), self._shapes_read(node)
        ones = (1,) * (len(input_shape) - 2)
        whole = self._add(f"{node.name}()", "average", (n, c, *ones), Call(args=(source,)))
        if len(self._shape(node)) == len(input_shape):
            return whole
        return self._add(f"{node.name}()", "flatten", (n, c), Call(args=(whole,)))

    def _concat(self, node: fx.Node) -> Slot:
        call = self._call(node, torch.cat)
        tensors, dim = (*call.args, 0)[:2] if call.args else (call.kwargs["tensors"], call.kwargs.get("dim", 0))
        dim = call.kwargs.get("dim", dim)
        shape = self._shape(node)
        return self._add(f"{node.name}()", "concat", shape, Call(args=tuple(tensors)), concat_dim=dim % len(shape))

    def _element(self, source: Any, keys: tuple[Any, ...]) -> Slot:
        """Add the value under `keys`, one after another, in the nest that `source` returns."""
        while source.target is item:
            source, keys = source.args[0], (source.args[1], *keys)
        if (source, keys) not in self._slots:
            self._slots[source, keys] = self._taken(source, keys)
        return self._slots[source, keys]

    def _taken(self, source: fx.Node, keys: tuple[Any, ...]) -> Slot:
        if _cuts_channels(source):
            return self._part(source, *keys)
        take = Item(keys)
        shape = tuple(take(record(source).value).shape)
        return self._add(f"{source.name}(){list(keys)}", "item", shape, Call(take, (self._slots[source],)))

    def _part(self, source: fx.Node, index: int) -> Slot:
        """Add an interval of channels."""
        widths = [part.shape[1] for part in record(source).value]
        start = sum(widths[:index])
        shape = tuple(record(source).value[index].shape)
        call = Call(args=(self._argument(source.args[0]),))
        return self._add(f"{source.name}()[{index}]", "part", shape, call, bounds=(start, start + widths[index]))

    def _add_call(self, node: fx.Node, kind: Kind, function: Any) -> Slot:
        return self._add(f"{node.name}()", kind, self._shape(node), self._call(node, function))

    def _add(self, name: str, kind: Kind, shape: Shape, call: Call, **fields: Any) -> Slot:
        inputs = tuple(leaf.operation for leaf in values_in((call.args, call.kwargs)) if isinstance(leaf, Slot))
        self._operations.append(Operation(name=name, kind=kind, inputs=inputs, shape=shape, **fields))
        self._calls.append(call)
        return Slot(len(self._operations) - 1)

    def _call(self, node: fx.Node, function: Any) -> Call:
        args: Any = fx.node.map_arg(node.args, self._argument)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._argument)
        return Call(function, tuple(args), {key: value for key, value in kwargs.items() if key != "inplace"})

    def _argument(self, node: Any) -> Any:
        """Return a Slot for a tensor, Slots for a nest of tensors, and any other value itself."""
        value = record(node).value
        return self._slots[node] if isinstance(value, Tensor) else self._elements(node, value, ())

    def _elements(self, node: Any, value: Any, keys: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            return self._element(node, keys)
        if isinstance(value, tuple | list):
            return tuple(self._elements(node, one, (*keys, i)) for i, one in enumerate(value))
        if isinstance(value, dict):
            return {key: self._elements(node, one, (*keys, key)) for key, one in value.items()}
        return value

    def _keeps_shape(self, node: fx.Node, plain: Any) -> bool:
        return plain in op_registry.RESHAPES and self._shapes_read(node)[:1] == [self._shape(node)]

    def _shape(self, node: fx.Node) -> Shape:
        """Return the shape of the first tensor of `node`."""
        return tuple(next(tensors_in(record(node).value)).shape)

    def _shapes_read(self, node: fx.Node) -> list[Shape]:
        """Return the shapes of the tensors that `node` reads."""
        return [self._shape(one) for one in node.all_input_nodes if isinstance(record(one).value, Tensor)]


def _leading_to_output(graph: fx.Graph, needed: set[fx.Node]) -> set[fx.Node]:
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder") or any(user in needed for user in node.users):
            needed.add(node)
    return needed


def _changes_a_value(node: fx.Node) -> bool:
    """Return whether the operation of `node` changes a value in place, as no new value replaces it."""
    return node.target not in (assigned, with_part) and op_registry.not_in_place(node.target) == node.target


def _cuts_channels(node: fx.Node) -> bool:
    """Return whether `node` splits channels into intervals."""
    return node.target in op_registry.CUTS and bool(node.kwargs.get("dim", (*node.args, 0, 0)[2]) == 1)


def _function(target: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(Tensor, target) if isinstance(target, str) else target
    return function
