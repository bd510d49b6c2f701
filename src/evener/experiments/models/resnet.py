"""ResNet-152 (He et al., 2016) as the chain of eight segments in which a pipeline takes it apart.

stem | layer1 | layer2 | first half of layer3 | second half | layer4 | mean over pixels | fc
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from evener.records.errors import require

_EXPANSION = 4


class Bottleneck(nn.Module):
    """relu(shortcut(x) + three convolutions of x): [N, C, H, W] -> [N, 4 width, H/stride, W/stride].

    Args:
        inputs: C.
        width: channels of the middle convolution.
        stride: of the middle convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        outputs: Tensor = self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))
        return outputs


def resnet152(classes: int = 1000, width: int = 64, depths: tuple[int, int, int, int] = (3, 8, 36, 3)) -> nn.Sequential:
    """[N, 3, H, W] -> logits [N, classes]; 60 192 808 parameters for 1000 classes.

    Args:
        classes: to tell apart.
        width: channels of the stem.
        depths: blocks of the four layers; smaller ones, and a smaller width, make a model for tests.
    """
    require(
        min(depths) > 0 and depths[2] > 1, "depths", depths, "positive, with two blocks in the third layer at least"
    )
    layers, inputs = [], width
    for i, depth in enumerate(depths):
        blocks = []
        for block in range(depth):
            blocks.append(Bottleneck(inputs, width << i, 2 if i and block == 0 else 1))
            inputs = (width << i) * _EXPANSION
        layers.append(blocks)
    half = len(layers[2]) // 2
    segments: list[tuple[str, nn.Module]] = [
        ("stem", _stem(width)),
        ("layer1", nn.Sequential(*layers[0])),
        ("layer2", nn.Sequential(*layers[1])),
        ("layer3_first", nn.Sequential(*layers[2][:half])),
        ("layer3_second", nn.Sequential(*layers[2][half:])),
        ("layer4", nn.Sequential(*layers[3])),
        ("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())),
        ("fc", nn.Linear(inputs, classes)),
    ]
    model = nn.Sequential(OrderedDict(segments))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _stem(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
