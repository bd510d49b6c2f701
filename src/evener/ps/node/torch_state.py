"""A PyTorch model's state in one block of memory, laid out as it is sent, so that loading is one copy.

It holds trained parameters, floating-point buffers and int64 counters of the state dict. Frozen parameters and other
buffers stay as the task's `model()` makes them, the same on every node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from evener.agreements.layout import ArraySpec, Flat, Kind, StateLayout, known_dtype
from evener.system import accelerators


def shared_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that nodes synchronize, by their names in the state dict; tied ones once."""
    saved = model.state_dict().keys()
    parameters = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return parameters | {n: b for n, b in buffers.items() if b.is_floating_point() or b.dtype == torch.int64}


def layout_of_model(model: nn.Module) -> StateLayout:
    """Return the layout of the model's state.

    Raises:
        InvalidValue: nothing is trained, or a tensor has a type that cannot be averaged, such as bfloat16.
    """
    return StateLayout(entries=tuple(_entry(name, tensor) for name, tensor in shared_state(model).items()))


def _entry(name: str, tensor: Tensor) -> ArraySpec:
    kind: Kind = "parameter"
    if not isinstance(tensor, nn.Parameter):
        kind = "statistic" if tensor.is_floating_point() else "counter"
    dtype = known_dtype(name, str(tensor.dtype).removeprefix("torch."))
    return ArraySpec(name=name, shape=tuple(tensor.shape), dtype=dtype, kind=kind)


class TorchState:
    """A model whose tensors and gradients are views of two blocks of memory with its layout."""

    def __init__(self, model: nn.Module, layout: StateLayout) -> None:
        state = shared_state(model)
        device = next(iter(state.values())).device
        self._model, self._layout = model, layout
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        is_pinned = accelerators.is_accelerator(device) and accelerators.capabilities(device).has_pinned_memory
        self._passage = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True) if is_pinned else None
        self._passed: torch.Event | None = None
        self._gradients = torch.zeros_like(self._memory)
        self._buffers: dict[str, Tensor] = {}
        self._reached: set[int] = set()
        self._parameters: dict[int, tuple[Tensor, Tensor]] = {}
        self._views: dict[str, Tensor] = {}
        for index, entry in enumerate(layout.entries):
            tensor, home = state[entry.name], self._view(self._memory, entry)
            home.copy_(tensor.detach())
            tensor.data = home
            if entry.kind == "parameter":
                tensor.grad = self._view(self._gradients, entry)
                self._parameters[index] = tensor, tensor.grad
                tensor.register_post_accumulate_grad_hook(partial(self._reach, index))  # type: ignore[no-untyped-call]
            else:
                self._buffers[entry.name], self._views[entry.name] = tensor, home
        rest = [s for s in layout.sections if s.kind != "parameter" and s.size]
        self._rest = [slice(s.offset, s.offset + s.size * getattr(torch, s.dtype).itemsize) for s in rest]

    def load(self, weights: Flat) -> None:
        """Load `weights` into the model."""
        self._copy_replaced()
        source = torch.from_numpy(weights.memory)
        if self._passage is not None:
            self._wait_for_passage()
            source = self._passage.copy_(source)
        self._memory.copy_(source, non_blocking=True)
        self._passed = accelerators.marked(self._memory.device, timed=False)

    def save(self, into: Flat) -> None:
        """Save the model's state."""
        self._copy_replaced()
        self._to_host(into, [(self._memory, slice(None))])

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        self._gradients.zero_()
        self._reached.clear()

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices in the layout of parameters that the last backward pass did not reach."""
        return tuple(index for index in self._parameters if index not in self._reached)

    @contextmanager
    def without_unused(self) -> Iterator[None]:
        """Hide gradients of parameters that the last backward pass did not reach, so that no optimizer updates them."""
        hidden = [self._parameters[index] for index in self.unused]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def save_gradients(self, into: Flat) -> None:
        """Save the gradients of the parameters, and statistics and counters as they are."""
        self._copy_replaced()
        self._to_host(into, [(self._gradients, slice(None)), *((self._memory, part) for part in self._rest)])

    def _to_host(self, into: Flat, pieces: list[tuple[Tensor, slice]]) -> None:
        """Copy pieces of blocks of memory, later ones over earlier ones; wait for the device once."""
        target = torch.from_numpy(into.memory)
        by_way = target if self._passage is None else self._passage
        for block, piece in pieces:
            by_way[piece].copy_(block[piece], non_blocking=self._passage is not None)
        if self._passage is not None:
            self._passed = accelerators.marked(self._memory.device, timed=False)
            self._wait_for_passage()
            target.copy_(self._passage)

    def _wait_for_passage(self) -> None:
        """Return when the pinned memory is free, which is copied from and to the device."""
        if self._passed is not None and not self._passed.query():
            self._passed.synchronize()

    def _reach(self, index: int, _: Tensor) -> None:
        self._reached.add(index)

    def _view(self, memory: Tensor, entry: ArraySpec) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        offset = self._layout.offsets[entry.name]
        return memory[offset : offset + entry.size * dtype.itemsize].view(dtype).view(entry.shape)

    def _copy_replaced(self) -> None:
        """Copy buffers that the model has replaced instead of changing in place."""
        if not self._buffers:
            return
        for name, tensor in self._model.named_buffers():
            if name in self._buffers and tensor is not self._buffers[name]:
                self._views[name].copy_(tensor)
                tensor.data = self._views[name]
                self._buffers[name] = tensor
