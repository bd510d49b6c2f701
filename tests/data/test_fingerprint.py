"""The print of a sample or a batch: other for other values and orders, alike for values that differ by rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evener.data.fingerprint import print_of

FLOATS = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
INTEGERS = (FLOATS * 1000).long()


def is_close(first: Any, other: Any) -> bool:
    return bool(np.isclose(print_of(first), print_of(other), rtol=1e-9, atol=0.0))


@pytest.mark.parametrize("numbers", [FLOATS, INTEGERS, INTEGERS.to(torch.uint8)], ids=["floats", "integers", "bytes"])
@pytest.mark.parametrize("distance", [1, 2, 64, 250, 251, 502, 2**10, 2**14, 2**15, 17 * 251, 2**14 + 1])
def test_fingerprint_detects_swapped_numbers_at_any_distance(numbers: torch.Tensor, distance: int) -> None:
    other = numbers.clone()
    here = next(i for i in range(7, len(numbers)) if numbers[i] != numbers[i + distance])
    other[here], other[here + distance] = numbers[here + distance], numbers[here]
    assert not is_close(numbers, other)
    assert not is_close(numbers, numbers.roll(distance))


def test_fingerprint_tolerates_rounding_errors() -> None:
    wide = FLOATS.double()
    assert is_close(wide, wide * (1 + 1e-14))
    assert is_close([wide[:7], {"a": wide[7:] + 1e-15}], [wide[:7], {"a": wide[7:]}])
    assert not is_close(wide, wide * (1 + 1e-7))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_fingerprint_detects_one_changed_integer_among_millions(kind: torch.dtype) -> None:
    numbers = torch.full((3_000_000,), 1, dtype=kind)
    other = numbers.clone()
    other[1_234_567] = 0
    assert not is_close(numbers, other)
    assert not is_close([FLOATS, numbers], [FLOATS, other])


@pytest.mark.parametrize("first", [2**53, 10**12, 1_700_000_000, -(2**63)])
def test_fingerprint_detects_large_integers_that_differ_by_one(first: int) -> None:
    assert not is_close(torch.tensor([first]), torch.tensor([first + 1]))
    assert not is_close({"id": first}, {"id": first + 1})


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_fingerprint_detects_changes_next_to_non_finite_values(wrong: float) -> None:
    first = torch.tensor([1.0, wrong, 3.0, 4.0])
    assert is_close(first, first.clone())
    for other in ([1.0, wrong, 3.0, 5.0], [wrong, 1.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]):
        assert not is_close(first, torch.tensor(other))
    assert not is_close(torch.tensor([float("inf")]), torch.tensor([float("-inf")]))
    assert not is_close(torch.full((3,), wrong), torch.full((4,), wrong))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ([FLOATS[:2], FLOATS[2:3]], [FLOATS[:1], FLOATS[1:3]]),
        ([[1, 2], 3], [[2, 1], 3]),
        (["a", "b"], ["b", "a"]),
        ({"a": "x", "b": 1.5}, {"a": "y", "b": 1.5}),
        ([b"x", 0.0], [b"y", 0.0]),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
        (np.array([1 + 2j]), np.array([1 + 3j])),
        (torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse()),
        (np.array([1, 2], np.uint16), np.array([2, 1], np.uint16)),
        (np.float32(1.5), np.float32(2.5)),
        (1e-300, 2e-300),
        ([1e-12, 2e-12], [2e-12, 1e-12]),
    ],
    ids=str,
)
def test_fingerprint_differs_for_different_values_only(first: Any, other: Any) -> None:
    assert is_close(first, first)
    assert not is_close(first, other)


def test_fingerprint_is_independent_of_the_memory_layout() -> None:
    square = FLOATS[: 500 * 500].reshape(500, 500)
    assert print_of(square.T) == print_of(square.T.contiguous())
    assert print_of(INTEGERS[::3]) == print_of(INTEGERS[::3].clone())
    assert print_of({"b": 1}) == print_of({"b": torch.tensor(1)}) == print_of([np.int32(1)])
    assert print_of([]) == print_of(object()) == 0.0


def test_fingerprint_is_stable_across_versions() -> None:  # nodes with different ones compare them
    assert print_of(torch.arange(40_000)) == print_of(np.arange(40_000))
    assert print_of([torch.arange(20_000, dtype=torch.float64), "a", 3]) == pytest.approx(PINNED, rel=1e-12)


PINNED = 845421590.317967
