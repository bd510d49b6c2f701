"""The timeline of a step: what was busy when, and a file for trace viewers."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evener.oracle.schedule import Kind
from evener.parallel.pipeline.pipeline import Pipeline
from evener.parallel.pipeline.timeline import StageEvent, Timeline


def event(stage: int, begin: float, end: float, kind: Kind = "forward", micro_batch: int = 0) -> StageEvent:
    return StageEvent(stage=stage, micro_batch=micro_batch, kind=kind, begin=begin, end=end)


TWO = Timeline(num_stages=2, events=(event(0, 5.0, 6.0), event(1, 6.0, 8.0), event(0, 8.0, 9.0, "backward")))


def test_idle_share_is_the_time_without_computing() -> None:
    assert TWO.seconds == 4.0
    assert [TWO.busy_seconds(stage) for stage in (0, 1)] == [2.0, 2.0]
    assert TWO.bubble == pytest.approx(0.5)


def test_trace_file_has_one_row_per_stage_in_microseconds() -> None:
    rows = json.loads(TWO.chrome_trace())["traceEvents"]
    assert [row["args"]["name"] for row in rows if row["ph"] == "M"] == ["stage 0", "stage 1"]
    boxes = [(row["name"], row["tid"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"]
    assert boxes == [("forward 0", 0, 0.0, 1e6), ("forward 0", 1, 1e6, 2e6), ("backward 0", 0, 3e6, 1e6)]


def test_timeline_lists_all_actions_of_a_step_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.zeros(4, 3)
    options = {"rematerialise": "always", "schedule": "gpipe", "costs": "estimated"}
    pipeline = Pipeline(model, x, F.mse_loss, on=[torch.device("cpu")] * 2, micro_batches=2, **options)  # type: ignore[arg-type]
    for _ in range(2):
        pipeline.step(x, x)
        events = pipeline.timeline().events
        for stage in (0, 1):
            found = [(e.kind, e.micro_batch) for e in events if e.stage == stage]
            again = [("recompute", 1), ("backward", 1), ("recompute", 0), ("backward", 0)]
            assert found == [("forward", 0), ("forward", 1), *again]
    pipeline(x)
    assert list(pipeline.timeline().events) == list(events)  # still of the last step
