"""What a node makes of the model of a `.pt` that lies on another machine: the same weights, settings and name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.yolo_cases import needs_ultralytics
from support.yolo_commands import ENVIRONMENT

pytestmark = needs_ultralytics
SENT_AND_MADE = """
import json, sys
from pathlib import Path
import torch
from ultralytics import YOLO
from evener.frontends.yolo.first_weights import make_first_weights, write_first_weights
from evener.frontends.yolo.run_folder import write_checkpoint

folder, made_of = Path(sys.argv[1]), YOLO(sys.argv[2])
for parameter in made_of.model.parameters():
    torch.nn.init.normal_(parameter)
write_checkpoint(made_of.model, {"imgsz": 96, "lr0": 0.5}, folder / "mine.pt")
mine = YOLO(str(folder / "mine.pt"))
write_first_weights(mine, folder / "sent.safetensors")
theirs = YOLO(str(make_first_weights(folder / "sent.safetensors", folder / "node")))
own, other = mine.model.state_dict(), theirs.model.state_dict()
assert own.keys() == other.keys()
print(json.dumps({
    "equal": all(torch.equal(own[name], other[name]) for name in own),
    "task": theirs.task, "imgsz": theirs.overrides["imgsz"], "name": Path(theirs.ckpt_path).name,
    "others": sorted(set(theirs.overrides) - {"imgsz", "task", "model", "data", "single_cls"}),
}))
"""


@pytest.mark.parametrize(
    ("model", "task"), [("yolov8n.yaml", "detect"), ("yolov8s-seg.yaml", "segment"), ("yolo26n-cls.yaml", "classify")]
)
def test_node_starts_with_weights_of_a_file_that_it_lacks(tmp_path: Path, model: str, task: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", SENT_AND_MADE, str(tmp_path), model],
        env={**os.environ, **ENVIRONMENT, "YOLO_CONFIG_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    found = json.loads(told.stdout.splitlines()[-1])
    assert found == {"equal": True, "task": task, "imgsz": 96, "name": "mine.pt", "others": []}
