"""The stand-in for torchvision's compiled operators, which other tests rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import torchvision_operators

TESTS = Path(torchvision_operators.__file__).parent
BOXES = torch.tensor([[0, 0, 10, 10], [1, 0, 10, 10], [20, 20, 30, 30], [0, 0, 10, 4.0]])
SCORES = torch.tensor([0.5, 0.9, 0.3, 0.7])


def test_box_overlap_is_intersection_over_union() -> None:
    expected = torch.tensor([1, 0.9, 0, 0.4])
    torch.testing.assert_close(torchvision_operators.overlap(BOXES[0], BOXES), expected)


def test_suppression_selects_the_best_of_overlapping_boxes() -> None:
    for threshold, kept in ((0.95, [1, 3, 0, 2]), (0.5, [1, 3, 2]), (0.3, [1, 2])):
        assert torchvision_operators.non_maximum_suppression(BOXES, SCORES, threshold).tolist() == kept


def test_suppression_of_no_boxes_returns_none() -> None:
    kept = torchvision_operators.non_maximum_suppression(torch.zeros(0, 4), torch.zeros(0), 0.5)
    assert (kept.shape, kept.dtype) == ((0,), torch.int64)


def test_torchvision_imports_with_the_stand_in_operators() -> None:
    code = """
import torchvision_operators, torch, torchvision
boxes = torch.tensor([[0, 0, 10, 10], [1, 0, 10, 10], [20, 20, 30, 30.0]])
print(torchvision.ops.nms(boxes, torch.tensor([0.5, 0.9, 0.3]), 0.5).tolist())
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=TESTS, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[1, 2]", "")
