"""A pipeline computes what one process computes: whatever the stages, micro-batches, schedule and recomputing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from pipeline_cases import CASES, assert_equal, piped, serial

from evener.parallel.pipeline.rematerialise import POLICIES
from evener.parallel.pipeline.schedule import SCHEDULES

CPU = torch.device("cpu")
WAYS = tuple(product(SCHEDULES, POLICIES))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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
def test_every_model_with_a_batch_that_does_not_divide(name: str) -> None:
    check(name, 7, 3, 3, (("gpipe", "always"), ("1f1b", "never")))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", list(CASES))
def test_everything_with_everything(name: str, stages: int) -> None:
    for micro_batches in range(1, 9):
        check(name, 17, stages, micro_batches, WAYS if micro_batches in (3, 5) else WAYS[micro_batches % 2 :: 3])
