"""Layers for images [N, C, H, W]: convolution and pooling."""

from __future__ import annotations

from evener.autodiff import functional as F
from evener.autodiff.errors import require
from evener.autodiff.functional.images import Size, pair
from evener.autodiff.nn import init
from evener.autodiff.nn.module import Module
from evener.autodiff.parameters import Parameter
from evener.autodiff.tensors import Tensor, zeros


class Conv2d(Module):
    """Convolution with weight[F, C / groups, kh, kw] and bias[F]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        fits = groups > 0 and in_channels % groups == 0 and out_channels % groups == 0
        require(fits, "groups must divide {} and {} channels, got {}", in_channels, out_channels, groups)
        self.stride, self.padding, self.dilation, self.groups = pair(stride), pair(padding), pair(dilation), groups
        self.weight = Parameter(zeros(out_channels, in_channels // groups, *pair(kernel_size)))
        self.bias = Parameter(zeros(out_channels)) if bias else None
        inputs = init.fan_in(self.weight)
        init.by_fan_in_(self.weight, inputs)
        if self.bias is not None:
            init.by_fan_in_(self.bias, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, F, H', W']."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """Sizes and options."""
        filters, channels, *kernel = self.weight.shape
        return (
            f"{channels * self.groups}, {filters}, kernel_size={tuple(kernel)}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        )


class MaxPool2d(Module):
    """The largest of every window."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H', W']."""
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        """Options."""
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"


class AvgPool2d(Module):
    """The mean of every window."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H', W']."""
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self) -> str:
        """Options."""
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}"
