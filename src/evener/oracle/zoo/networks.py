"""Networks, layer by layer, with their libraries' names: torchvision's, U-Net, YOLOv8n, CosmoFlow, Transformer.

Sources: Krizhevsky 2014 (one weird trick), Simonyan & Zisserman 2015, He et al. 2016, Ronneberger et al. 2015,
Mathuriya et al. 2018, Vaswani et al. 2017.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from evener.oracle.zoo.amoebanet import amoebanet_d
from evener.oracle.zoo.sketch import Flow, Sketch
from evener.records.errors import InvalidValue, require, require_one_of
from evener.records.graph import ModelGraph

_UNET_WIDTHS = (64, 128, 256, 512)
_BOX_BINS = 16


def unet(image: tuple[int, int, int] = (3, 512, 512), classes: int = 2) -> ModelGraph:
    """Return U-Net with padded convolutions, BatchNorm and transposed convolutions: 31.0 M parameters.

    Its skip connections reach from the first layers to the last, which is hard on pipelines.

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
    """Return YOLOv8n: 3.2 M parameters; three heads on three scales."""
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
    """Add a convolution whose second half runs through `depth` bottlenecks; all halves together go through another."""
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
    """Add an SPPF: three poolings of 5x5, one after the other, and all four tensors together through a convolution."""
    filters = x.shape[0]
    parts = [_conv(net, f"{name}.cv1", x, filters // 2, 1)]
    for _ in range(3):
        parts.append(net.pool(parts[-1], f"{name}.m", 5, 1, 2))
    return _conv(net, f"{name}.cv2", net.concat(*parts), filters, 1)


def _head(net: Sketch, name: str, x: Flow, classes: int) -> None:
    """Add boxes, as 16 bins for each of four sides, and classes; the widths are those of the finest scale."""
    for branch, width, outputs in (("cv2", 64, 4 * _BOX_BINS), ("cv3", max(64, min(classes, 100)), classes)):
        y = _conv(net, f"{name}.{branch}.0", x, width, 3)
        net.conv(_conv(net, f"{name}.{branch}.1", y, width, 3), f"{name}.{branch}.2", outputs, 1)


def transformer(
    layers: int = 24, width: int = 1024, heads: int = 16, feed: int = 4096, tokens: int = 512, words: int = 32_000
) -> ModelGraph:
    """Return a Transformer of `layers` encoder layers on sentences of `tokens` words: about 12 layers width^2
    parameters.

    Raises:
        InvalidValue: `heads` does not divide `width`.
    """
    require(width % heads == 0, "heads", heads, f"a divisor of the width {width}")
    net = Sketch(f"transformer({layers},{width})")
    x = net.embed(net.input(tokens), "embed", words, width)
    for i in range(layers):
        x = _layer(net, x, f"layers.{i}", heads, feed)
    net.linear(net.layer_norm(x, "norm"), "decode", words)
    return net.graph()


def _layer(net: Sketch, x: Flow, name: str, heads: int, feed: int) -> Flow:
    y = net.attention(net.layer_norm(x, f"{name}.norm1"), f"{name}.attention", heads)
    x = net.join((x, y), f"{name}.sum1", "Sum", x.shape)
    y = net.relu(net.linear(net.layer_norm(x, f"{name}.norm2"), f"{name}.linear1", feed), f"{name}.relu")
    y = net.linear(y, f"{name}.linear2", x.shape[-1])
    return net.join((x, y), f"{name}.sum2", "Sum", x.shape)


def cosmoflow(volume: tuple[int, int, int, int] = (4, 128, 128, 128), outputs: int = 4) -> ModelGraph:
    """Return CosmoFlow: five 3-D convolutions, each with a pooling, and three linear layers; 8.9 M parameters at 128^3.

    It has few parameters and very large activations: a volume of 512^3 needs spatial parallelism.
    """
    net = Sketch("cosmoflow")
    x = net.input(*volume)
    for i in range(5):
        x = net.smooth(net.conv(x, f"conv{i + 1}", 32 << i, 3, 1, 1), f"act{i + 1}", "LeakyReLU")
        x = net.pool(x, f"pool{i + 1}", 2, 2)
    x = net.flatten(x)
    for i, features in enumerate((128, 64), start=1):
        x = net.smooth(net.linear(x, f"linear{i}", features), f"act{5 + i}", "LeakyReLU")
        x = net.dropout(x, f"dropout{i}")
    net.linear(x, "linear3", outputs)
    return net.graph()


_VGG16_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_RESNET_WIDTHS = (64, 128, 256, 512)


def alexnet(image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ModelGraph:
    """Return AlexNet: 61.1 M parameters."""
    net = Sketch("alexnet")
    x = net.conv(net.input(*image), "features.0", 64, 11, 4, 2)
    x = net.pool(net.relu(x, "features.1"), "features.2", 3, 2)
    x = net.conv(x, "features.3", 192, 5, 1, 2)
    x = net.pool(net.relu(x, "features.4"), "features.5", 3, 2)
    for index, filters in ((6, 384), (8, 256), (10, 256)):
        x = net.relu(net.conv(x, f"features.{index}", filters, 3, 1, 1), f"features.{index + 1}")
    x = net.average(net.pool(x, "features.12", 3, 2), "avgpool", 6)
    x = net.linear(net.dropout(net.flatten(x), "classifier.0"), "classifier.1", 4096)
    x = net.dropout(net.relu(x, "classifier.2"), "classifier.3")
    x = net.relu(net.linear(x, "classifier.4", 4096), "classifier.5")
    net.linear(x, "classifier.6", classes)
    return net.graph()


def vgg16(image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000, ceil: bool = False) -> ModelGraph:
    """Return VGG-16: 138.4 M parameters at 224 x 224.

    Args:
        image: channels, rows, columns.
        classes: outputs.
        ceil: whether pooling rounds sizes up, as in Caffe and Chainer, and the first linear layer reads all positions;
            otherwise as in torchvision, which rounds down and averages to 7 x 7.
    """
    net = Sketch("vgg16")
    x, index = net.input(*image), 0
    for filters, convolutions in _VGG16_BLOCKS:
        for _ in range(convolutions):
            x = net.relu(net.conv(x, f"features.{index}", filters, 3, 1, 1), f"features.{index + 1}")
            index += 2
        x = net.pool(x, f"features.{index}", 2, 2, ceil=ceil)
        index += 1
    x = net.flatten(x if ceil else net.average(x, "avgpool", 7))
    for index in (0, 3):
        x = net.relu(net.linear(x, f"classifier.{index}", 4096), f"classifier.{index + 1}")
        x = net.dropout(x, f"classifier.{index + 2}")
    net.linear(x, "classifier.6", classes)
    return net.graph()


def resnet50(image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ModelGraph:
    """Return ResNet-50: 25.6 M parameters."""
    return _resnet("resnet50", (3, 4, 6, 3), image, classes)


def resnet152(image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ModelGraph:
    """Return ResNet-152: 60.2 M parameters."""
    return _resnet("resnet152", (3, 8, 36, 3), image, classes)


def _resnet(name: str, depths: tuple[int, ...], image: tuple[int, int, int], classes: int) -> ModelGraph:
    net = Sketch(name)
    x = net.conv(net.input(*image), "conv1", 64, 7, 2, 3, bias=False)
    x = net.pool(net.relu(net.norm(x, "bn1"), "relu"), "maxpool", 3, 2, 1)
    for stage, (width, depth) in enumerate(zip(_RESNET_WIDTHS, depths, strict=True), start=1):
        for block in range(depth):
            x = _bottleneck(net, x, f"layer{stage}.{block}", width, stride=2 if stage > 1 and block == 0 else 1)
    net.linear(net.flatten(net.average(x, "avgpool")), "fc", classes)
    return net.graph()


def _bottleneck(net: Sketch, x: Flow, name: str, width: int, stride: int) -> Flow:
    """Add 1x1 to `width`, 3x3 and 1x1 to four times `width`, and the sum with `x`, projected if its shape differs."""
    y = net.relu(net.norm(net.conv(x, f"{name}.conv1", width, 1, bias=False), f"{name}.bn1"), f"{name}.relu")
    y = net.norm(net.conv(y, f"{name}.conv2", width, 3, stride, 1, bias=False), f"{name}.bn2")
    y = net.norm(net.conv(net.relu(y, f"{name}.relu"), f"{name}.conv3", 4 * width, 1, bias=False), f"{name}.bn3")
    if stride > 1 or x.shape[0] != 4 * width:
        x = net.conv(x, f"{name}.downsample.0", 4 * width, 1, stride, bias=False)
        x = net.norm(x, f"{name}.downsample.1")
    return net.relu(net.add(y, x), f"{name}.relu")


ZOO: Mapping[str, Callable[..., ModelGraph]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet50": resnet50,
    "resnet152": resnet152,
    "amoebanet-d": amoebanet_d,
    "transformer": transformer,
    "unet": unet,
    "cosmoflow": cosmoflow,
    "yolov8n": yolov8n,
}


def draw(name: str, options: Mapping[str, str] | None = None) -> ModelGraph:
    """Return the network `name` of the zoo.

    Args:
        name: a key of `ZOO`.
        options: options of its function, as text: `{"image": "3x64x64", "classes": "200"}`.

    Raises:
        InvalidValue: the network or option does not exist, or a value is not whole numbers joined by x.
    """
    require_one_of("the network", name, ZOO)
    network, known = ZOO[name], ZOO[name].__annotations__
    values: dict[str, object] = {}
    for key, text in (options or {}).items():
        if key not in known or key == "return":
            raise InvalidValue("--option", key, f"an option of {name}: {', '.join(k for k in known if k != 'return')}")
        values[key] = _value(key, text, is_shape="tuple" in known[key])
    return network(**values)


def default_options(name: str) -> dict[str, str]:
    """Return the options of the network `name` as `draw` takes them, with their default values."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(ZOO[name]).parameters.items()}
    return {
        key: "x".join(map(str, value)) if isinstance(value, tuple) else f"{value:d}" for key, value in defaults.items()
    }


_MAX_SIZE = 10**9


def _value(key: str, text: str, *, is_shape: bool) -> int | tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0 or max(sizes) > _MAX_SIZE or (len(sizes) > 1) != is_shape:
        allowed = "sizes such as 3x224x224" if is_shape else "a whole number"
        raise InvalidValue(f"--option {key}", text, f"{allowed}, at most {_MAX_SIZE}")
    return sizes if is_shape else sizes[0]
