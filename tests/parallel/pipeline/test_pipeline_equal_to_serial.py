"""A pipeline computes what one process computes: whatever the stages, micro-batches, schedule and recomputing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from evener.oracle.schedule import SCHEDULES
from evener.parallel.pipeline import pipeline, stage_program
from evener.parallel.pipeline.partition_plan import POLICIES
from evener.parallel.pipeline.partition_problem import partition_problem, trace_micro_batch
from evener.tracer.nested import tensors_in
from support.pipeline_cases import CASES, assert_equal, piped, serial

CPU = torch.device("cpu")
WAYS = tuple(product(SCHEDULES, POLICIES))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one model of a test is followed once for every shape; each pipeline cuts, compiles and runs it anew."""
    monkeypatch.setattr(pipeline, "partition_problem", once(partition_problem))
    monkeypatch.setattr(stage_program, "trace_micro_batch", once(trace_micro_batch))


def once(follow: Callable[..., Any]) -> Callable[..., Any]:
    """`follow`, which remembers what it found for inputs of the same shapes."""
    known: dict[Any, Any] = {}

    def remembered(model: nn.Module, inputs: Any, *how: Any) -> Any:
        key = (how, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(inputs)))
        if key not in known:
            known[key] = follow(model, inputs, *how)
        return known[key]

    return remembered


def check(name: str, samples: int, stages: int, micro_batches: int, ways: tuple[tuple[str, str], ...]) -> None:
    """Every way of `ways` against one process."""
    expected = serial(CASES[name], samples, micro_batches)
    for schedule, policy in ways:
        found, _ = piped(
            CASES[name], samples, on=[CPU] * stages, micro_batches=micro_batches, schedule=schedule,
            rematerialise=policy,
        )  # fmt: skip
        assert_equal(found, expected, whole=True, what=f"{name} K={stages} M={micro_batches} {schedule} {policy}")
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["residual", "tied", "branches"])
def test_stages_schedules_and_recomputing_change_nothing(name: str, stages: int) -> None:
    check(name, 17, stages, 3, WAYS)
    for micro_batches in (1, 8):
        check(name, 17, stages, micro_batches, (("gpipe", "except_last"), ("1f1b", "always")))


@pytest.mark.parametrize("name", list(CASES))
def test_every_model_equals_serial_with_an_indivisible_batch(name: str) -> None:
    check(name, 7, 3, 3, (("gpipe", "always"), ("1f1b", "never")))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", list(CASES))
def test_all_models_stages_and_micro_batches_equal_serial(name: str, stages: int) -> None:
    for micro_batches in range(1, 9):
        check(name, 17, stages, micro_batches, WAYS if micro_batches in (3, 5) else WAYS[micro_batches % 2 :: 3])
