"""Dims along which a layer's work can be divided, as a table; and the window of a layer."""

from __future__ import annotations

from torch import nn

from evener.records.graph import Dim, Window

_POINTWISE: tuple[Dim, ...] = ("sample", "channel", "row", "column")
_WEIGHTED: tuple[Dim, ...] = ("sample", "channel", "filter")
_IMAGE_CONV: tuple[Dim, ...] = ("sample", "channel", "filter", "row", "column")

_SPLITS: dict[type[nn.Module], tuple[Dim, ...]] = {
    **dict.fromkeys((nn.Conv2d, nn.Conv3d), _IMAGE_CONV),
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _WEIGHTED),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _POINTWISE),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish), _POINTWISE),
    **dict.fromkeys((nn.Dropout, nn.Identity), _POINTWISE),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.MaxPool3d, nn.AvgPool3d), _POINTWISE),
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.InstanceNorm2d), ("sample", "channel")),
    **dict.fromkeys((nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d, nn.InstanceNorm3d), ("sample", "channel")),
}
_HAS_WINDOW = (
    nn.modules.conv._ConvNd,
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)


def splits_of(module: nn.Module, output_shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Return the dims of the table, without rows and columns if there are none, and without channels if groups tie
    them.

    Rows and columns are the first two spatial dims: depth and rows for volumes.
    """
    dims = next((_SPLITS[kind] for kind in type(module).__mro__ if kind in _SPLITS), ("sample",))
    if len(output_shape) not in (3, 4):
        dims = tuple(dim for dim in dims if dim not in ("row", "column"))
    if getattr(module, "groups", 1) != 1:
        dims = tuple(dim for dim in dims if dim not in ("channel", "filter"))
    return dims


def window_of(module: nn.Module) -> Window | None:
    """Return the window of a convolution or pooling; None for other modules and adaptive poolings."""
    if not isinstance(module, _HAS_WINDOW):
        return None
    dims = range(_extent_dims(module))
    return Window(
        kernel=tuple(_size(module, "kernel_size", dim) for dim in dims),
        stride=tuple(_size(module, "stride", dim, default=1) for dim in dims),
        padding=tuple(_padding_before(module, dim) for dim in dims),
        dilation=tuple(_size(module, "dilation", dim, default=1) for dim in dims),
        transposed=isinstance(module, nn.modules.conv._ConvTransposeNd),
    )


def _extent_dims(module: nn.Module) -> int:
    """Return 1, 2 or 3: the digit in the class's name."""
    return next(int(name[-2]) for kind in type(module).__mro__ if (name := kind.__name__).endswith(("1d", "2d", "3d")))


def _padding_before(module: nn.Module, dim: int) -> int:
    if module.padding == "valid":
        return 0
    if module.padding == "same":
        return (_size(module, "dilation", dim, default=1) * (_size(module, "kernel_size", dim) - 1)) // 2
    return _size(module, "padding", dim)


def _size(module: nn.Module, field: str, dim: int, default: int = 0) -> int:
    value = getattr(module, field, default)
    return int(value[dim] if isinstance(value, tuple) else value)
