"""From what copies of a program wrote to the sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from evener.program.verdict import Verdict, judge

PARTS = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 1.0, 5.0, -1.0]], dtype=torch.float64)


def verdict(folder: Path, factors: Tensor, whole: Tensor) -> Verdict:
    """Of a program whose parts count so often, where the whole has another gradient."""
    save_file({"0/gradient/w": factors @ PARTS, "parts": PARTS}, folder / "divided.safetensors")
    save_file({"0/gradient/w": whole, "parts": whole[None].clone()}, folder / "whole.safetensors")
    return judge(folder / "divided", folder / "whole", is_wide=True)


MEAN = torch.tensor([0.75, 0.25], dtype=torch.float64)


@pytest.mark.parametrize(
    ("whole", "advice"),
    [
        (PARTS.sum(0), 'count="sum"'),
        (torch.tensor([0.4, 0.6], dtype=torch.float64) @ PARTS, "a mean over something else than samples"),
        (torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64), "evener.gather"),
    ],
)
def test_the_sentence_says_which_tool_to_use(tmp_path: Path, whole: Tensor, advice: str) -> None:
    found = verdict(tmp_path, MEAN, whole)
    assert found.sentence.startswith("the program would train something else than in one process: the gradient of w")
    assert advice in found.sentence
    assert found.sentence.endswith("or start it with --approximate")


def test_equal_gradients_say_nothing(tmp_path: Path) -> None:
    found = verdict(tmp_path, MEAN, MEAN @ PARTS)
    assert found.sentence == ""
    assert found.off == 0.0
