"""Parts of batches: who has which rows, and how often they count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.programs.batch_parts import (
    BatchPart,
    Count,
    OpenParts,
    cut_rows,
    part_of,
    require_count,
    rows_of,
    weight_of,
)
from evener.records.errors import InvalidInput
from support.refusals import refused


def alone(size: int = 1) -> Group:
    cpu = torch.device("cpu")
    return Group(rank=0, size=size, device=cpu, nodes=["n"] * size, timer=StepTimer(cpu))


@pytest.mark.parametrize(
    ("sizes", "rows", "samples"),
    [
        ([5, 2, 1], [(0, 5), (5, 7), (7, 8)], [5, 2, 1]),
        ([3, 0], [(0, 3), (1, 3)], [3, 0]),  # two samples stand in, which count for nothing
        ([0, 1], [(0, 1), (0, 1)], [0, 1]),
    ],
)
def test_parts_are_contiguous_and_empty_ranks_get_stand_ins(
    sizes: list[int], rows: list[tuple[int, int]], samples: list[int]
) -> None:
    parts = [part_of(rank, sizes) for rank in range(len(sizes))]
    assert [(part.rows.start, part.rows.stop) for part in parts] == rows
    assert [part.samples for part in parts] == samples
    assert {part.total for part in parts} == {sum(sizes)}


@pytest.mark.parametrize(("count", "weight"), [("samples", 2 * 3 / 4), ("sum", 2.0)])
def test_means_are_weighted_by_samples_and_sums_are_not(count: Count, weight: float) -> None:
    assert weight_of(part_of(0, [3, 1]), None, count, alone(2)) == weight
    assert weight_of(part_of(1, [4, 0]), None, count, alone(2)) == 0


def test_count_function_must_return_a_non_negative_number() -> None:
    assert weight_of(part_of(0, [3]), torch.ones(3), lambda batch: batch.sum(), alone()) == 1
    with refused(InvalidInput):
        weight_of(part_of(0, [3]), None, lambda batch: batch, alone())
    with refused(InvalidInput):
        weight_of(part_of(0, [3]), None, lambda _: -1, alone())
    with refused(InvalidInput):
        require_count("tokens")


def test_loaders_open_together_must_have_equal_weights() -> None:
    parts = OpenParts()
    assert parts.weight() == 1.0
    parts.open("a", 0.5)
    parts.open("b", 0.5)
    assert parts.weight() == 0.5
    parts.open("b", 0.25)
    with refused(InvalidInput):
        parts.weight()
    parts.close("a", is_over=True)
    assert parts.weight() == 0.25


def test_handmade_batch_is_cut_along_its_sample_dimension() -> None:
    batch = {"x": torch.arange(12).view(2, 6), "name": "text"}
    assert rows_of(batch, 1) == 6
    cut = cut_rows(batch, BatchPart(first=4, samples=2, total=6, loaded=2), 1)
    assert cut["x"].tolist() == [[4, 5], [10, 11]]
    assert cut["name"] == "text"
    with refused(InvalidInput):
        rows_of((torch.ones(3), torch.ones(4)), 0)


def test_evaluation_during_training_has_its_own_weights() -> None:
    parts = OpenParts()
    parts.open("train", 1.5)
    parts.open("others", 1.2, is_training=False)
    assert parts.weight() == 1.2
    parts.close("others", is_over=True)
    assert parts.weight() == 1.5
    parts.open("others", 1.2, is_training=False)
    parts.open("train", 0.5)  # though the evaluation was never left
    parts.reweigh(0.7)
    assert parts.weight() == 0.7
    parts.close("train", is_over=True)
    assert parts.weight() == 1.2
    parts.close("others", is_over=True)
    assert not parts.are_any
    assert parts.weight() == 1.0


def test_sum_after_nested_evaluation_includes_ranks_without_samples() -> None:
    parts = OpenParts()
    parts.open("train", 0.0)
    assert parts.weight_of_open() == 0.0
    parts.open("others", 1.2, is_training=False)
    parts.close("others", is_over=True)
    assert parts.weight_of_open() == 1.0
    assert parts.weight() == 0.0
    parts.open("train", 0.0)
    assert parts.weight_of_open() == 0.0


def test_batch_stays_open_after_its_loader_until_the_next_load() -> None:
    parts = OpenParts()
    parts.open("train", 1.5)
    parts.close("train", is_over=False)
    assert parts.is_open("train")
    assert parts.weight() == 1.5
    assert parts.open("train", 0.5) == set()
    parts.close("train", is_over=False)
    assert parts.open("next", 0.7) == {"train"}
    assert parts.weight() == 0.7


def test_weight_follows_the_batch_in_use_not_the_last_loaded_one() -> None:
    parts = OpenParts()
    parts.open("train", 1.5)
    parts.open("train", 0.5)  # loaded ahead
    parts.use(1, 1.5, trains=True)
    assert parts.weight_of_gradients() == 1.5
    parts.close("train", is_over=True)
    assert parts.weight() == 1.5  # such as of its mean loss
    parts.use(2, 0.5, trains=True)
    assert parts.weight() == 0.5
    parts.use(1, 1.5, trains=True)  # beside the other one: there was no backward pass between
    with refused(InvalidInput):
        parts.weight_of_gradients()
    parts.use(2, 0.5, trains=False)
    assert parts.weight() == 0.5


@pytest.mark.parametrize(
    ("samples", "counts"), [((True, True), {True}), ((False, False), {False}), ((True, False), {True, False})]
)
def test_sum_after_a_loop_covers_all_its_batches(samples: Sequence[bool], counts: set[bool]) -> None:
    parts = OpenParts()
    for has_samples in samples:
        parts.open("train", 1.0, has_samples=has_samples)
    parts.close("train", is_over=True)
    assert parts.of_sum() == counts
    assert parts.of_sum() == counts  # of another value
    parts.open("tests", 1.0, is_training=False)
    assert parts.of_sum() == set()
    parts.close("tests", is_over=True)
    assert parts.of_sum() == set()


def test_sum_inside_a_loop_covers_batches_since_the_last_sum() -> None:
    parts = OpenParts()
    assert parts.of_sum() == set()
    parts.open("train", 1.0)
    parts.open("train", 0.0, has_samples=False)
    assert parts.of_sum() == parts.of_sum() == {True, False}
    parts.open("train", 0.0, has_samples=False)
    assert parts.of_sum() == {False}
    parts.use(1, 1.0, trains=True)  # one that was kept
    assert parts.of_sum() == {True}


def test_evaluation_sum_after_a_loop_with_stand_ins_is_refused() -> None:
    parts = OpenParts()
    parts.open("train", 1.0, has_stand_ins=True)
    parts.close("train", is_over=True)
    parts.require_clear("run.sum", is_training=True)
    with refused(InvalidInput):
        parts.require_clear("run.sum", is_training=False)
    parts.open("tests", 1.0, is_training=False)
    parts.close("tests", is_over=True)
    parts.require_clear("run.sum", is_training=False)


def test_a_call_in_training_awaits_gradients_until_backward() -> None:
    parts = OpenParts()
    parts.open("train", 1.5)
    assert parts.is_done
    parts.await_gradients()
    assert not parts.is_done
    parts.weight_of_gradients()
    assert parts.is_done
