"""Whether nodes and one process drift apart by more than rounding: weights of YOLO in double precision, step by step.

    python benchmarks/yolo_rounding.py --data my-data.yaml [--shares 3,1] [--imgsz 64] [--epochs 1] [--json]

Plain `yolo train` is compared with nodes, and with itself where the images of every batch lie in the opposite order:
nothing is divided there, only sums over images are rounded otherwise. What a training makes of that, it makes of nodes.
A figure is the largest difference of a weight's numbers over the largest of them.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from results import open_results, parser_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.yolo_cases import Case, train

_SMALLEST = 1e-6
"""Of a weight, that differences are related to."""


def differences(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    """Step by step: of the weight that differs most."""
    return [
        float(((own - other).abs().amax(1) / other.abs().amax(1).clamp(min=_SMALLEST)).max())
        for own, other in zip(found, wanted, strict=True)
    ]


def main() -> None:
    """Train three times, and print how far apart they are."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="yaml of a data set")
    parser.add_argument("--model", default="yolov8n.yaml")
    parser.add_argument("--shares", default="3,1", help="of the nodes")
    parser.add_argument("--imgsz", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    settings: dict[str, Any] = {name: getattr(asked, name) for name in ("data", "imgsz", "batch", "epochs", "seed")}
    settings |= {"nbs": asked.batch, "val": False, "plots": False, "cache": "ram", "verbose": False}
    ways: dict[str, dict[str, Any]] = {
        "yolo train": {"is_plain": True},
        "its batches backwards": {"is_plain": True, "is_backwards": True},
        f"nodes {asked.shares}": {"shares": asked.shares},
    }
    with open_results(asked) as results, tempfile.TemporaryDirectory() as folder:
        steps: dict[str, list[torch.Tensor]] = {}
        for way, how in ways.items():
            out = str(Path(folder) / str(len(steps)))
            case = Case(model=asked.model, settings=settings, out=out, keeps_steps=True, **how)
            steps[way] = train(case, len(case.shares.split(",")))[0]["steps"]
        first, *others = ways
        for way in others:
            for number, off in enumerate(differences(steps[way], steps[first]), 1):
                results.add("step {step:3}: {off:.1e}  {way}", step=number, off=off, way=way)


if __name__ == "__main__":
    import_module("yolo_rounding").main()  # ranks import what is defined here
