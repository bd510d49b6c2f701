"""What a step takes alone, of two sizes in turn, and what is told of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evener.benchmark.task_timing import affine
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.programs.batch_parts import part_of
from evener.frontends.programs.timing_probe import TimingProbe
from evener.records.profile import TaskTiming
from support.commands import evener
from support.told_clock import Clock

CPU = torch.device("cpu")


def step(copy: TimingProbe, clock: Clock, owner: object, loading: float, update: float) -> int:
    """One step of a batch of 24, at 3 s a sample and 5 s besides; its samples."""
    timer = copy.group.timer
    copy.end_step(owner)
    timer.resume("io")
    clock.compute(loading)
    timer.pause()
    part = part_of(0, copy.sizes(24))
    copy.begin_step(owner, part)
    timer.resume("fb")
    clock.compute(5 + 3 * part.loaded)
    timer.pause()
    timer.resume("wu")
    clock.compute(update)
    timer.pause()
    return part.loaded


@pytest.mark.parametrize(("workers", "loading"), [(0, 7.0), (2, 0.0)])
def test_two_step_sizes_separate_fixed_and_per_sample_seconds(
    clock: Clock, tmp_path: Path, workers: int, loading: float
) -> None:
    class Owner:
        num_workers = workers

    group = Group(rank=0, size=3, device=CPU, nodes=["a", "b", "c"], timer=StepTimer(CPU))
    copy, owner = TimingProbe(group, tmp_path / "alone.json", math.inf), Owner()
    sizes = []
    for number in range(7):
        sizes.append(step(copy, clock, owner, loading=7.0, update=4.0 * (number % 2)))
        if number == 3:  # an evaluation between two steps
            copy.end_step(owner)
            copy.end_step(object())
            group.timer.resume("fb")
            clock.compute(1000)
            copy.end_step(object())
    copy.write(tmp_path / "alone.json")
    assert sizes == [8, 4, 8, 4, 8, 4, 8]
    timing = msgspec.json.decode((tmp_path / "alone.json").read_bytes(), type=TaskTiming)
    assert [batch.samples for batch in timing.batches] == [4, 8]
    assert affine(timing) == pytest.approx((5 + loading + 2.0, 3))


def test_probe_without_timings_raises_value_error(tmp_path: Path) -> None:
    group = Group(rank=0, size=2, device=CPU, nodes=["a", "b"], timer=StepTimer(CPU))
    copy = TimingProbe(group, tmp_path / "alone.json", math.inf)
    assert list(copy.sizes(1)) == [1]
    with pytest.raises(ValueError, match="at least one measured batch"):
        copy.write(tmp_path / "alone.json")


PROGRAM = """
import evener
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    reference = run.group.timer.pace.reference
    print(run.sum(int(reference is not None and reference(8) >= reference(4) > 0)))
"""


@pytest.mark.slow
def test_slowed_nodes_of_a_program_have_a_reference_time(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words: Any = ("run", "program.py", "--local-nodes", "1,0.5,0.25", "--run-folder", "out")
    result = evener(*words, cwd=tmp_path, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2", "2"]
    steps = json.loads((tmp_path / "out" / "record.json").read_text())["steps"]
    assert [one["samples"] for one in steps] == [8] * 10
