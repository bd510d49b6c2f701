"""Networks that answer for every place of an image: U-Net (Ronneberger et al. 2015) and YOLOv8n (Ultralytics 2023)."""

from __future__ import annotations

from evener.errors import require
from evener.graph import ModelGraph
from evener.zoo.sketch import Flow, Sketch

_UNET_WIDTHS = (64, 128, 256, 512)
_BOX_BINS = 16


def unet(image: tuple[int, int, int] = (3, 512, 512), classes: int = 2) -> ModelGraph:
    """U-Net with padded convolutions, BatchNorm and transposed convolutions: 31.0 M parameters.

    Its skips reach from the first layers to the last, which is hard on pipelines.

    Raises:
        InvalidValue: rows or columns cannot be halved four times.
    """
    require(all(size % 16 == 0 for size in image[1:]), "image", image, "rows and columns that are multiples of 16")
    net = Sketch("unet")
    x, skips = net.input(*image), []
    for level, width in enumerate(_UNET_WIDTHS):
        x = _double(net, f"down{level}", x, width)
        skips.append(x)
        x = net.pool(x, f"pool{level}", 2, 2)
    x = _double(net, "bottom", x, 2 * _UNET_WIDTHS[-1])
    for level in reversed(range(len(_UNET_WIDTHS))):
        width = _UNET_WIDTHS[level]
        x = net.conv(x, f"up{level}.enlarge", width, 2, 2, transposed=True)
        x = _double(net, f"up{level}", net.concat(skips[level], x), width)
    net.conv(x, "head", classes, 1)
    return net.graph()


def _double(net: Sketch, name: str, x: Flow, width: int) -> Flow:
    for i in (1, 2):
        x = net.norm(net.conv(x, f"{name}.conv{i}", width, 3, 1, 1, bias=False), f"{name}.norm{i}")
        x = net.relu(x, f"{name}.relu{i}")
    return x


def yolov8n(image: tuple[int, int, int] = (3, 640, 640), classes: int = 80) -> ModelGraph:
    """YOLOv8n: 3.2 M parameters; three heads on three scales."""
    net = Sketch("yolov8n")
    x = _conv(net, "0", net.input(*image), 16, 3, 2)
    x = _c2f(net, "2", _conv(net, "1", x, 32, 3, 2), 32, 1)
    x = fine = _c2f(net, "4", _conv(net, "3", x, 64, 3, 2), 64, 2)
    x = middle = _c2f(net, "6", _conv(net, "5", x, 128, 3, 2), 128, 2)
    x = _c2f(net, "8", _conv(net, "7", x, 256, 3, 2), 256, 1)
    coarse = _pooled_pyramid(net, "9", x)
    x = net.concat(net.upsample(coarse, "10"), middle)
    up = _c2f(net, "12", x, 128, 1, shortcut=False)
    small = _c2f(net, "15", net.concat(net.upsample(up, "13"), fine), 64, 1, shortcut=False)
    x = net.concat(_conv(net, "16", small, 64, 3, 2), up)
    medium = _c2f(net, "18", x, 128, 1, shortcut=False)
    x = net.concat(_conv(net, "19", medium, 128, 3, 2), coarse)
    large = _c2f(net, "21", x, 256, 1, shortcut=False)
    for scale, flow in enumerate((small, medium, large)):
        _head(net, f"22.{scale}", flow, classes)
    return net.graph()


def _conv(net: Sketch, name: str, x: Flow, filters: int, kernel: int, stride: int = 1) -> Flow:
    y = net.norm(net.conv(x, f"{name}.conv", filters, kernel, stride, kernel // 2, bias=False), f"{name}.bn")
    return net.smooth(y, f"{name}.act")


def _c2f(net: Sketch, name: str, x: Flow, filters: int, depth: int, shortcut: bool = True) -> Flow:
    """A convolution whose second half runs through `depth` bottlenecks; all halves together go through another."""
    both = _conv(net, f"{name}.cv1", x, filters, 1)
    parts = [both]
    last = net.part(both, filters // 2)
    for i in range(depth):
        y = _conv(net, f"{name}.m.{i}.cv1", last, filters // 2, 3)
        y = _conv(net, f"{name}.m.{i}.cv2", y, filters // 2, 3)
        last = net.join((last, y), f"{name}.m.{i}", "Bottleneck", y.shape) if shortcut else y
        parts.append(last)
    return _conv(net, f"{name}.cv2", net.concat(*parts), filters, 1)


def _pooled_pyramid(net: Sketch, name: str, x: Flow) -> Flow:
    """SPPF: three poolings of 5x5, one after the other, and all four tensors together through a convolution."""
    filters = x.shape[0]
    parts = [_conv(net, f"{name}.cv1", x, filters // 2, 1)]
    for _ in range(3):
        parts.append(net.pool(parts[-1], f"{name}.m", 5, 1, 2))
    return _conv(net, f"{name}.cv2", net.concat(*parts), filters, 1)


def _head(net: Sketch, name: str, x: Flow, classes: int) -> None:
    """Boxes as 16 bins for each of four sides, and classes; the widths are those of the model's finest scale."""
    for branch, width, outputs in (("cv2", 64, 4 * _BOX_BINS), ("cv3", max(64, min(classes, 100)), classes)):
        y = _conv(net, f"{name}.{branch}.0", x, width, 3)
        net.conv(_conv(net, f"{name}.{branch}.1", y, width, 3), f"{name}.{branch}.2", outputs, 1)
