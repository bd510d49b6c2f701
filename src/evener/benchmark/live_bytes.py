"""Counts the bytes of tensors that are alive, on any device: what re-materialisation saves can be seen on a CPU too."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evener.tracer.nested import tensors_in


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts what operations of this thread (backward passes on CPUs included) allocate.

    Attributes:
        now: bytes of the tensors that were made since it was entered, and are still there.
        peak: the most that `now` has been.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; its results count if they do not share the memory of an argument."""
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage not in self._known:
                self._known.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return outputs

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
