"""Detection of casts to narrower types in a model that is compared in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evener.tracer.nested import tensors_in

_TIMES, _MAX_TOLERANCE = 200.0, 0.5
"""Times the relative rounding error of the narrowest type, differences may be; and the most that they may be."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_NEW_VALUES = ("_like", "empty", "new_")
"""In names of operations that take the shape of a tensor, and none of its values."""


class Narrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, notes operations that round values in double precision to narrower types.

    Such are casts, and sums into a narrower tensor: `total = torch.zeros(()); total += loss` rounds the loss.

    Attributes:
        tolerance: relative, of what is computed from such values; 0 without any.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tolerance = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`."""
        result = func(*args, **(kwargs or {}))
        narrow = {one.dtype for one in tensors_in(result) if one.dtype in _NARROW}
        if narrow and any(one.dtype == torch.float64 for one in tensors_in([args, kwargs])):
            name = func.overloadpacket.__name__
            if not any(part in name for part in _NEW_VALUES):
                eps = max(torch.finfo(dtype).eps for dtype in narrow)
                self.tolerance = max(self.tolerance, min(_TIMES * eps, _MAX_TOLERANCE))
        return result
