"""The device of the tests that are about GPUs, and trainings on it that are held against one process.

make test-gpu                               on the first GPU; skipped where there is none
EVENER_TEST_DEVICE=standin:0 make test-gpu  on accelerators in main memory (`support.standin`)
EVENER_TEST_DEVICE=cpu make test-gpu        on the processor: whether the tests themselves are right
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.system import accelerators
from support import standin
from support.commands import TINY

DEVICE = os.environ.get("EVENER_TEST_DEVICE") or next(iter(accelerators.names()), "none")
_WHY_NOT = standin.why_not() if DEVICE.startswith("standin") else "needs a GPU" if DEVICE == "none" else ""
NEEDS_DEVICE = (
    pytest.mark.cuda,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "there is a device"),
)


def needs_device(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as one that needs a device."""
    for mark in NEEDS_DEVICE:
        test = mark(test)
    return test


def slow_after(quick: int, *cases: Any) -> list[Any]:
    """Return the parameters of a test, a tuple for each case; mark all but the first `quick` cases as slow."""
    return [pytest.param(*case, marks=[pytest.mark.slow] if at >= quick else []) for at, case in enumerate(cases)]


TOLERANCE = 1e-9
"""In float64: a GPU adds in another order than a processor."""


def devices(*names: str) -> str:
    """As `--devices` has them; `gpu` is the device of the tests."""
    return ",".join(DEVICE if name == "gpu" else name for name in names)


def train(folder: Path, on: str, **words: Any) -> dict[str, torch.Tensor]:
    """The weights after training `tiny` in float64 on these devices, one node each."""
    base = {"task": TINY, "precision": "fp64", "seed": 3, "devices": on, "output": folder, "check": False}
    perform(RunConfig(**{**base, **words}))
    return load_file(folder / "model.safetensors")


def record(folder: Path) -> TrainRecord:
    """What a training left."""
    return read_noun(folder / "record.json", TrainRecord)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
