"""Which dims a layer's work can be divided along, and the halo that rows and columns then need: a table."""

from __future__ import annotations

from torch import nn

from evener.graph import Dim

_POINTWISE: tuple[Dim, ...] = ("sample", "channel", "row", "column")
_WEIGHTED: tuple[Dim, ...] = ("sample", "channel", "filter")
_IMAGE_CONV: tuple[Dim, ...] = ("sample", "channel", "filter", "row", "column")

_SPLITS: dict[type[nn.Module], tuple[Dim, ...]] = {
    nn.Conv2d: _IMAGE_CONV,
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d), _WEIGHTED),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _POINTWISE),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish), _POINTWISE),
    **dict.fromkeys((nn.Dropout, nn.Identity, nn.MaxPool2d, nn.AvgPool2d), _POINTWISE),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.InstanceNorm2d), ("sample", "channel")),
}
_WINDOWED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


def splits_of(module: nn.Module, output_shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Dims of the table, less rows and columns where there are none and less channels that groups tie together."""
    dims = next((_SPLITS[kind] for kind in type(module).__mro__ if kind in _SPLITS), ("sample",))
    if len(output_shape) != 3:
        dims = tuple(dim for dim in dims if dim not in ("row", "column"))
    if getattr(module, "groups", 1) != 1:
        dims = tuple(dim for dim in dims if dim not in ("channel", "filter"))
    return dims


def halo_of(module: nn.Module) -> tuple[int, int]:
    """Rows and columns that a window reads beyond the own ones, on the wider side; (0, 0) for other modules."""
    if not isinstance(module, _WINDOWED):
        return (0, 0)
    return (_halo_along(module, 0), _halo_along(module, 1))


def _halo_along(module: nn.Module, dim: int) -> int:
    """Rows that output rows [a, b) read beyond their own input rows [a*stride, b*stride), on the worse side."""
    kernel, stride = (_size(module, field, dim) for field in ("kernel_size", "stride"))
    extent = _size(module, "dilation", dim, default=1) * (kernel - 1) + 1
    padding = module.padding
    before = (
        {"same": (extent - 1) // 2, "valid": 0}[padding] if isinstance(padding, str) else _size(module, "padding", dim)
    )
    return max(before, extent - stride - before, 0)


def _size(module: nn.Module, field: str, dim: int, default: int = 0) -> int:
    value = getattr(module, field, default)
    return int(value[dim] if isinstance(value, tuple) else value)
