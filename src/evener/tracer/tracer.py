"""Follows one forward pass: which module runs, which layers a tensor came from, what was spent and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from evener.tracer.meta import BATCH, call, shape_of_sample, tensors_in

_Origins: TypeAlias = frozenset[int]
"""Indices of the layers that a tensor came from."""


@dataclass
class Cost:
    """A layer while it is traced; FLOPs and bytes are those of the whole traced batch."""

    path: str
    module: nn.Module
    inputs: set[int] = field(default_factory=set)
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    flops: int = 0
    kept_bytes: int = 0
    only_joins: bool = False


class Tracer(TorchFunctionMode):
    """Follows one forward pass: which module runs, which layers a tensor came from, what was spent and kept so far."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[Cost] = []
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
            call(model, batch)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; what a container computes by itself becomes a layer if it costs anything."""
        kwargs = kwargs or {}
        if not self._running or is_leaf(self._running[-1][1]):
            return func(*args, **kwargs)
        before = self._spent()
        outputs = func(*args, **kwargs)
        written = args[0] if func is Tensor.__setitem__ else outputs
        read = list(tensors_in((args, kwargs)))
        if next(tensors_in(written), None) is not None:
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
        if is_leaf(module):
            shape = shape_of_sample(next(tensors_in((args, kwargs)), None))
            self.costs.append(Cost(path, module, input_shape=shape))
            self._add(self._origins_of(tensors_in((args, kwargs))), self._started, outputs)

    def _add_functional(self, origins: _Origins, before: tuple[int, int], outputs: Any, only_joins: bool) -> None:
        """Add functional work to the layer of the container that runs, a new one unless it is the last so far."""
        path, module = self._running[-1]
        last = self.costs[-1] if self.costs else None
        if last is None or last.module is not module or last.only_joins != only_joins:
            self.costs.append(Cost(path, module, only_joins=only_joins))
        self._add(origins, before, outputs)

    def _add(self, origins: _Origins, before: tuple[int, int], outputs: Any) -> None:
        """Add what was spent since `before` to the last layer."""
        index, cost = len(self.costs) - 1, self.costs[-1]
        flops, kept_bytes = self._spent()
        cost.inputs |= origins - {index}
        cost.flops += flops - before[0]
        cost.kept_bytes += kept_bytes - before[1]
        cost.output_shape = shape_of_sample(next(tensors_in(outputs), None))
        self._mark(outputs, frozenset({index}))

    def _spent(self) -> tuple[int, int]:
        return self._flops.get_total_flops(), self._kept_bytes

    def _mark(self, outputs: Any, origins: _Origins) -> None:
        for tensor in tensors_in(outputs):
            self._origins[id(tensor)] = (tensor, origins)  # the tensor is held so that its id is not used again

    def _origins_of(self, tensors: Iterable[Tensor]) -> _Origins:
        known = (self._origins.get(id(tensor)) for tensor in tensors)
        return frozenset(index for origin in known if origin for index in origin[1])

    def _keep(self, tensor: Tensor) -> Tensor:
        if self._remember(tensor):
            num_bytes = tensor.untyped_storage().nbytes()
            self._kept_bytes += num_bytes if num_bytes % BATCH == 0 else 0
        return tensor

    def _remember(self, tensor: Tensor) -> bool:
        """Hold the storage of `tensor`; true if it is a new one."""
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._stored
        self._stored[storage._cdata] = storage
        return new


def is_leaf(module: nn.Module) -> bool:
    """Whether `module` has no children."""
    return next(module.children(), None) is None
