"""Commands that train a model of Ultralytics, and what plain YOLO makes of their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.commands import evener

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS / "support" / "torchvision_site"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    ),
    "YOLO_OFFLINE": "true",
    "YOLO_AUTOINSTALL": "false",
}
PLAIN = """
import json, sys
sys.modules["evener"] = None
from ultralytics import YOLO
model = YOLO(sys.argv[1])
print(json.dumps([model.task, sorted({type(m).__name__ for m in model.model.modules() if "Norm" in str(type(m))})]))
"""


def yolo(*words: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    home = {"YOLO_CONFIG_DIR": str(cwd / "home")}
    (cwd / "home").mkdir(exist_ok=True)
    return evener(*words, cwd=cwd, timeout=timeout, **ENVIRONMENT, **home)


def read_by_plain_yolo(weights: Path, folder: Path) -> None:
    """Assert that plain YOLO, where there is no Evener, reads a detector; `folder` has the settings of Ultralytics."""
    read = subprocess.run(
        [sys.executable, "-c", PLAIN, str(weights)],
        env={**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(folder / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(read.stdout.splitlines()[-1]) == ["detect", ["BatchNorm2d"]]
