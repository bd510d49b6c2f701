"""What every operation of a model takes, found on tensors without memory: arithmetic, traffic, bytes of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, enable_grad, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import FlopCounterMode

from evener.parallel.pipeline.cut import last_use
from evener.parallel.pipeline.skeleton import on_meta, storage_of, without_memory
from evener.parallel.pipeline.tensors import tensors_in
from evener.parallel.pipeline.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What one operation takes, for the traced number of samples.

    Attributes:
        flops: of the forward pass.
        moved_bytes: read and written.
        kept_bytes: that backward needs and no operation before has kept.
        weight_bytes: of trained parameters that no operation before has used.
        gradient_bytes: of gradients that are there while its backward pass runs: of what it makes, what it reads, and
            what passes it by.
    """

    flops: float
    moved_bytes: int
    kept_bytes: int
    weight_bytes: int
    gradient_bytes: int


def spent(trace: Trace, model: nn.Module) -> list[Spent]:
    """What every operation of the traced `model` takes; nothing is computed."""
    meter = _Meter(without_memory(model), trace)
    with enable_grad(), meter.flops:
        meter.run(*(node.meta["value"] for node in trace.graph.nodes if node.op == "placeholder"))
    return [meter.found[node] for node in trace.operations]


class _Meter(fx.Interpreter):
    """Runs a graph on the meta device and notes what every operation takes."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        for name, tensor in trace.constants.items():
            model.register_buffer(name, on_meta(tensor))
        super().__init__(fx.GraphModule(model, trace.graph), garbage_collect_values=False)
        self.flops = FlopCounterMode(display=False)
        self.found: dict[fx.Node, Spent] = {}
        self._own, self._gradient_bytes = model, _gradient_bytes(trace)
        self._known = {storage_of(t): t for t in (*model.parameters(), *model.buffers())}
        self._used: set[int] = set()
        self._kept = 0

    def run_node(self, n: fx.Node) -> Any:
        before, self._kept = self.flops.get_total_flops(), 0
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            value = super().run_node(n)
        if n.op.startswith("call"):
            inputs = [self.env[node] for node in n.all_input_nodes]
            self.found[n] = Spent(
                flops=self.flops.get_total_flops() - before,
                moved_bytes=sum(tensor.nbytes for tensor in tensors_in((inputs, value))),
                kept_bytes=self._kept,
                weight_bytes=self._new_weights(n),
                gradient_bytes=self._gradient_bytes[n],
            )
        return value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return map_aggregate(super().fetch_args_kwargs_from_env(n), on_meta)

    def _keep(self, tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in self._known:
            self._known[storage_of(tensor)] = tensor  # held, so that its storage is not given to another
            self._kept += tensor.untyped_storage().nbytes()
        return tensor

    def _new_weights(self, node: fx.Node) -> int:
        owners = list(self._own.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
        owners += [value for value in (self.env[i] for i in node.all_input_nodes) if isinstance(value, nn.Parameter)]
        new = {id(p): p for p in owners if p.requires_grad and id(p) not in self._used}
        self._used |= set(new)
        return sum(parameter.nbytes for parameter in new.values())


def _gradient_bytes(trace: Trace) -> Mapping[fx.Node, int]:
    """By operation; the gradient of a value is there from the backward pass of its last user to that of its maker."""
    operations = trace.operations
    index = {node: i for i, node in enumerate(operations)}
    found = dict.fromkeys(operations, 0)
    for maker in operations:
        nbytes = sum(tensor.nbytes for tensor in tensors_in(maker.meta["value"]) if tensor.requires_grad)
        for node in operations[index[maker] : last_use(maker, index) + 1]:
            found[node] += nbytes
    return found
