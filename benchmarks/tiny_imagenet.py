"""Tiny-ImageNet with a ResNet-18 where torchvision's compiled operators do not load, as on some CPU builds.

    evener train benchmarks/tiny_imagenet.py --data DIR --local-nodes 1.0,0.5 ...

Elsewhere the same is `evener train tiny-imagenet --data DIR`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torchvision_operators  # noqa: F401  (registers the operators before torchvision is imported)
from evener.data.tasks.tiny_imagenet import task

__all__ = ["task"]
