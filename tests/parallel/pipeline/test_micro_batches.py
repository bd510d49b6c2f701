"""Batches as micro-batches: as equal as whole samples can be, in the order of the samples, none empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.parallel.pipeline.micro_batches import divided, joined, micro_batch_sizes, resized, samples_in
from evener.records.errors import InvalidValue
from evener.tracer.nested import tensors_in
from support.refusals import refused


@pytest.mark.parametrize(
    ("samples", "micro_batches", "expected"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 5, [1, 1]), (9, 1, [9])],
)
def test_literal_sizes(samples: int, micro_batches: int, expected: list[int]) -> None:
    assert micro_batch_sizes(samples, micro_batches) == expected


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_add_up_and_differ_by_one_at_most(samples: int, micro_batches: int) -> None:
    sizes = micro_batch_sizes(samples, micro_batches)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, micro_batches)
    assert max(sizes) - min(sizes) <= 1


def test_nested_batches_are_split_and_joined() -> None:
    batch = {"a": torch.arange(10.0).view(5, 2), "b": [torch.arange(5), torch.tensor(3.0)], "c": "word"}
    parts = divided(batch, [3, 2])
    assert [part["a"].shape for part in parts] == [(3, 2), (2, 2)]
    assert [part["c"] for part in parts] == ["word", "word"]
    whole = joined(parts)
    for one, other in zip(tensors_in(whole), tensors_in(batch), strict=True):
        assert torch.equal(one, other)
    assert [tuple(tensor.shape) for tensor in tensors_in(resized(batch, 7))] == [(7, 2), (7,), ()]


def test_batch_without_samples_or_with_unequal_lengths_is_refused() -> None:
    with refused(InvalidValue):
        samples_in((torch.zeros(3), torch.zeros(4, 2)))
    with refused(InvalidValue):
        samples_in("word")
    with refused(InvalidValue):
        micro_batch_sizes(0, 2)
