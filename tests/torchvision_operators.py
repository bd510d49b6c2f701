"""Makes torchvision usable where its compiled operators do not load: a build of another kind than that of torch.

torchvision's classifiers need none of those operators, but `import torchvision` fails without `nms`. Importing this
module before torchvision defines it (in plain PyTorch) if, and only if, the compiled library cannot be loaded. All
other operators stay as missing as they were.

    import torchvision_operators  # noqa: F401
    import torchvision
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def non_maximum_suppression(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes to keep, best score first, int64 [K].

    A box goes if its overlap (intersection / union) with a better box that is kept exceeds `threshold`.

    Args:
        boxes: [N, 4]: x and y of two corners, the lesser first.
        scores: [N].
        threshold: between 0 and 1.
    """
    left = scores.argsort(descending=True, stable=True)
    kept = []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        left = left[overlap(boxes[best], boxes[left]) <= threshold]
    return torch.stack(kept) if kept else left


def overlap(box: Tensor, others: Tensor) -> Tensor:
    """Intersection / union of `box` [4] with each of `others` [N, 4]."""
    low, high = torch.maximum(box[:2], others[:, :2]), torch.minimum(box[2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=1)
    areas = (others[:, 2:] - others[:, :2]).prod(dim=1) + (box[2:] - box[:2]).prod()
    return common / (areas - common)


def compiled_operators_load() -> bool:
    """Whether torchvision's own library loads with this torch; True where torchvision is not installed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    libraries = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("_C*.*")]
    operators: Any = torch.ops
    try:
        for library in libraries:
            operators.load_library(library)
    except OSError:
        return False
    return bool(libraries)


def define_operators() -> Any:
    """Define what `import torchvision` asks for; the definitions last as long as the library that is returned."""
    new_library: Any = torch.library.Library
    library = new_library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", non_maximum_suppression, "CompositeExplicitAutograd")
    return library


def _allow_nms() -> None:
    """Lets `torchvision.ops.nms` be called, which otherwise refuses without the compiled library."""
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None


if "torchvision" not in sys.modules and not compiled_operators_load():
    LIBRARY = define_operators()
    _allow_nms()
