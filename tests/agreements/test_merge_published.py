"""The two published ways to merge, and ours where the states are tensors, on what they have in common."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.benchmarks import benchmark
from support.merge_cases import layout, merged, sources

merging = benchmark("merging")
"""To which the ways belong that Evener is compared with."""
States = list[dict[str, NDArray[Any]]]


def states(count: int) -> States:
    draw = np.random.default_rng(0)
    return [
        {f"layer{k}.weight": draw.standard_normal((3, k + 1)) for k in range(8)}
        | {"bn.num_batches_tracked": draw.integers(1, 9, ())}
        for _ in range(count)
    ]


def as_tensors(all_states: States) -> list[dict[str, torch.Tensor]]:
    return [{key: torch.from_numpy(np.array(value)) for key, value in state.items()} for state in all_states]


def check(result: dict[str, Any], of: States) -> None:
    assert list(result) == list(of[0])
    for key, value in result.items():
        total = sum(state[key] for state in of)
        np.testing.assert_allclose(np.asarray(value), total if "tracked" in key else total / len(of), rtol=1e-15)


@pytest.mark.parametrize("count", [2, 5])
def test_merge_on_six_threads_treats_arrays_and_tensors_alike(count: int) -> None:
    given = states(count)
    before = [{key: value.copy() for key, value in state.items()} for state in given]
    check(merging.merge_on_threads(given), before)
    check(merging.merge_on_threads(as_tensors(given)), before)
    for state, kept in zip(given, before, strict=True):
        for key in state:
            np.testing.assert_array_equal(state[key], kept[key])


def test_keys_are_assigned_to_threads_by_index_modulo_six() -> None:
    workers: dict[str, int] = {}

    class Spy:
        def __init__(self, key: str) -> None:
            self.key = key

        def __add__(self, other: object) -> Spy:
            workers[self.key] = threading.get_ident()
            barrier.wait(10)
            return self

        def __itruediv__(self, other: int) -> Spy:
            return self

    barrier = threading.Barrier(6)
    merging.merge_on_threads([{f"k{i}": Spy(f"k{i}") for i in range(12)}] * 2)
    assert len(set(workers.values())) == 6
    assert all(workers[f"k{i}"] == workers[f"k{i + 6}"] for i in range(6))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_in_place_merge_turns_the_first_state_into_the_mean(count: int) -> None:
    given = states(count)
    tensors = as_tensors(given)
    addresses = {key: tensor.data_ptr() for key, tensor in tensors[0].items()}
    for tensor in tensors[0].values():
        tensor.requires_grad_(tensor.is_floating_point())
    merging.merge_in_place(tensors)
    check({key: tensor.detach().numpy() for key, tensor in tensors[0].items()}, given)
    assert {key: tensor.data_ptr() for key, tensor in tensors[0].items()} == addresses


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0, 7.0]])
def test_device_merge_equals_the_cpu_merge(weights: list[float]) -> None:
    flats = sources(len(weights), layout(400_000))
    expected = merged(flats, weights).floats[1]
    tensors = [torch.from_numpy(flat.floats[1]) for flat in flats]
    out = torch.zeros_like(tensors[0])
    merging.merge_flat_on_device(out, tensors, weights)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=5e-7)
