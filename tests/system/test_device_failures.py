"""A full or lost device is recognised behind every error that a task or Evener raises because of it."""

from __future__ import annotations

import pytest

from evener.records.errors import (
    DeviceLost,
    DoesNotFit,
    EvenerError,
    InvalidInput,
    InvalidValue,
    NodeLost,
    NotExact,
    TrainingFailed,
)
from evener.system.device_failures import explained_failure

LOST = RuntimeError("CUDA error: device 0 is lost")
FULL = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
WRAPPERS = [
    TrainingFailed("a"),
    InvalidInput("b"),
    NotExact("c"),
    InvalidValue("BatchTask.metrics['d']", None, "a number"),
    NodeLost("e"),
    ValueError("f"),
]


def raised(error: Exception, cause: Exception | None) -> Exception:
    """Return `error` after it was raised from `cause`."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def explained(error: Exception, device: str = "cuda:0") -> EvenerError | None:
    return explained_failure(error, device, node="a", advice="take a smaller batch")


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda error: type(error).__name__)
def test_failure_is_found_behind_another_error(wrapper: Exception) -> None:
    lost = explained(raised(wrapper, LOST))
    assert isinstance(lost, DeviceLost)
    assert lost.nodes == ("a",)
    assert isinstance(explained(raised(wrapper, raised(ValueError("g"), FULL))), DoesNotFit)
    assert explained(raised(wrapper, ValueError("h"))) is None
    assert explained(raised(wrapper, None)) is None


def test_failure_is_explained_once() -> None:
    for error in (LOST, FULL):
        found = explained(error)
        assert isinstance(found, DeviceLost | DoesNotFit)
        assert explained(raised(found, error)) is None


def test_main_memory_cannot_be_lost_but_full() -> None:
    assert explained(LOST, "cpu") is None
    assert isinstance(explained(FULL, "cpu"), DoesNotFit)
