"""Networks that name an image: AlexNet, VGG-16, ResNet-50 and ResNet-152, named layer by layer as torchvision's.

Sources: Krizhevsky 2014 (one weird trick), Simonyan & Zisserman 2015, He et al. 2016.
"""

from __future__ import annotations

from evener.graph import ModelGraph
from evener.zoo.sketch import Flow, Sketch

_VGG16_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_RESNET_WIDTHS = (64, 128, 256, 512)


def alexnet(image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ModelGraph:
    """AlexNet: 61.1 M parameters."""
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
    """VGG-16: 138.4 M parameters at 224 x 224.

    Args:
        image: channels, rows, columns.
        classes: outputs.
        ceil: pool like Caffe and Chainer, which round sizes up, and let the first linear layer see what that leaves;
            otherwise like torchvision, which rounds down and averages to 7 x 7.
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
    """ResNet-50: 25.6 M parameters."""
    return _resnet("resnet50", (3, 4, 6, 3), image, classes)


def resnet152(image: tuple[int, int, int] = (3, 224, 224), classes: int = 1000) -> ModelGraph:
    """ResNet-152: 60.2 M parameters."""
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
    """1x1 to `width`, 3x3, 1x1 to four times `width`, and the sum with `x`, brought to that shape if it has another."""
    y = net.relu(net.norm(net.conv(x, f"{name}.conv1", width, 1, bias=False), f"{name}.bn1"), f"{name}.relu")
    y = net.norm(net.conv(y, f"{name}.conv2", width, 3, stride, 1, bias=False), f"{name}.bn2")
    y = net.norm(net.conv(net.relu(y, f"{name}.relu"), f"{name}.conv3", 4 * width, 1, bias=False), f"{name}.bn3")
    if stride > 1 or x.shape[0] != 4 * width:
        x = net.conv(x, f"{name}.downsample.0", 4 * width, 1, stride, bias=False)
        x = net.norm(x, f"{name}.downsample.1")
    return net.relu(net.add(y, x), f"{name}.relu")
