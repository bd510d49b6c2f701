"""From what copies of a program wrote to the sentence that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from evener.frontends.programs.equivalence_probe import Facts
from evener.frontends.programs.replica_comparison import ReplicaComparison, judge

MEAN = torch.tensor([0.75, 0.25], dtype=torch.float64)
PARTS = torch.tensor([[1.0, 2.0, 0.0, 3.0], [0.0, 1.0, 5.0, -1.0]], dtype=torch.float64)


def comparison(folder: Path, factors: Tensor, whole: Tensor) -> ReplicaComparison:
    """Of a program whose parts count so often, where the whole has another gradient."""
    return comparison_of(
        folder, {"0/gradient/w": factors @ PARTS}, {"0/gradient/w": whole}, [Facts(), Facts()], Facts()
    )


def comparison_of(
    folder: Path,
    values: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    copies: Sequence[Facts],
    alone: Facts,
    names: Sequence[str] | None = None,
) -> ReplicaComparison:
    """Of what copies that divided batches, and the one that did not, wrote."""
    whole = expected.get("0/gradient/w", MEAN @ PARTS)
    parts = {f"parts/{number}": PARTS.clone() for number in range(2)}
    totals = {f"parts/{number}": whole[None].clone() for number in range(2)}
    save_file({**values, **parts}, folder / "divided.safetensors")
    save_file({**expected, **totals}, folder / "whole.safetensors")
    for name, facts in (("divided", copies), ("whole", [alone])):
        rows = [msgspec.msgpack.encode(one) for one in facts]
        (folder / f"{name}.facts").write_bytes(msgspec.msgpack.encode(rows))
    return judge(folder / "divided", folder / "whole", is_wide=True, names=names)


@pytest.mark.parametrize(
    ("whole", "advice"),
    [
        (PARTS.sum(0), 'count="sum"'),
        (torch.tensor([0.4, 0.6], dtype=torch.float64) @ PARTS, "a mean over something else than samples"),
        (torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64), "evener.gather"),
    ],
)
def test_comparison_message_names_the_tool_to_use(tmp_path: Path, whole: Tensor, advice: str) -> None:
    found = comparison(tmp_path, MEAN, whole)
    assert found.sentence.startswith("the program would train something else than in one process: the gradient of w")
    assert advice in found.sentence
    assert found.sentence.endswith("or --no-check for a task")


def test_equal_gradients_give_no_message(tmp_path: Path) -> None:
    found = comparison(tmp_path, MEAN, MEAN @ PARTS)
    assert found.sentence == ""
    assert found.off == 0.0


ACROSS = {"0/gradient/w": torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64)}


@pytest.mark.parametrize(
    ("copies", "alone", "names", "advice"),
    [
        ([Facts(outside={"target": 1.0}), Facts(outside={"target": 2.0})], Facts(), None, "`target` differs"),
        ([Facts(outside={"scale": 1.0}), Facts(outside={"scale": 2.0})], Facts(), ["scale"], "`scale` is in no model"),
        ([Facts(outside={"loss": 1.0}), Facts(outside={"loss": 2.0})], Facts(), [], "evener.gather"),
        ([Facts(rates=(0.1,)), Facts(rates=(0.3,))], Facts(rates=(0.4,)), None, "the learning rate is 0.1"),
        (
            [Facts(outside={"center": 1.0}, outside_later={"center": value}) for value in (2.0, 3.0)],
            Facts(),
            None,
            "`center` is in no model",
        ),
        ([Facts(rows=((1.0,),)), Facts(rows=((2.0,),))], Facts(rows=((1.5, 1.5),)), None, "collate_fn mixes samples"),
        ([Facts(rows=((1.0,),)), Facts(rows=((2.0,),))], Facts(rows=((1.0, 2.0),)), None, "evener.gather"),
    ],
)
def test_comparison_names_the_gradient_that_differs_between_nodes(
    tmp_path: Path, copies: Sequence[Facts], alone: Facts, names: Sequence[str] | None, advice: str
) -> None:
    found = comparison_of(tmp_path, {"0/gradient/w": MEAN @ PARTS}, ACROSS, copies, alone, names)
    assert found.where == "the gradient of w"
    assert advice in found.sentence


def test_comparison_names_the_first_batch_that_differs(tmp_path: Path) -> None:
    same = {"0/gradient/w": MEAN @ PARTS}
    values = {f"0/gradient/w of batch {number}": torch.full((4,), float(number)) for number in (10, 2)}
    expected = {name: 2 * value for name, value in values.items()}
    found = comparison_of(tmp_path, {**same, **values}, {**same, **expected}, [Facts(), Facts()], Facts())
    assert found.where == "the gradient of w of batch 2"
