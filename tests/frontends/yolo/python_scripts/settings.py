"""Settings of all scripts: one batch per epoch and nothing drawn, so that plain Ultralytics sees the same batches."""

import json
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "data": "data/data.yaml", "epochs": 3, "imgsz": 64, "batch": 8, "project": str(Path("runs").resolve()), "seed": 1,
    "optimizer": "SGD", "lr0": 1e-2, "nbs": 8, "warmup_epochs": 0, "plots": False, "amp": False, "verbose": False,
    "mosaic": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "translate": 0.0, "scale": 0.0, "fliplr": 0.0,
    "erasing": 0.0, "auto_augment": None,
}  # fmt: skip


def note(line: object) -> None:
    """Add a line to the file of what the script has seen; callbacks run in other processes."""
    with Path(__file__).with_name("seen.txt").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
