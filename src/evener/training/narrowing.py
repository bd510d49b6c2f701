"""Whether a model that is compared in double precision casts values down: that rounding is then no error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_TIMES, _MAX_TOLERANCE = 200.0, 0.5
"""Times the relative rounding error of the narrowest type, differences may be; and the most that they may be."""


class Narrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, notes casts of double precision to narrower types.

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
        if func is torch.ops.aten._to_copy.default:
            self._note(args[0], result)
        elif func is torch.ops.aten.copy_.default:
            self._note(args[1], args[0])
        return result

    def _note(self, source: Any, target: Any) -> None:
        both = isinstance(source, Tensor) and isinstance(target, Tensor) and target.dtype.is_floating_point
        if both and source.dtype == torch.float64 and target.dtype != torch.float64:
            eps = torch.finfo(target.dtype).eps
            self.tolerance = max(self.tolerance, min(_TIMES * eps, _MAX_TOLERANCE))
