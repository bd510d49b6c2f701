"""What remains of a run: the division as it was, shares, waiting, and results that are found again."""

from __future__ import annotations

from math import nan
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from evener.agreements.messages import WorkerTotals
from evener.agreements.worker_record import WorkerRecord
from evener.oracle.apportion import NodeCost
from evener.ps.master.lease_run import plan_of, record_of
from evener.ps.master.nodes import NodeRecord
from evener.ps.protocol.run_result import RunResult, load_result, save_result, weights_of
from evener.records.error_kind import kind_of
from evener.records.errors import MissingFile, NonFiniteLoss
from evener.records.history import Entry, History, NodeWork
from support.agreements import SYNC
from support.linear_engine import BATCH, job, weights
from support.refusals import refused

COSTS = {"fast": NodeCost(unit_seconds=1.0), "slow": NodeCost(unit_seconds=2.0)}


def test_batch_is_divided_among_present_nodes_and_lists_the_others() -> None:
    plan = plan_of(job(SYNC), ["fast", "gone", "slow"], {"fast": NodeRecord("fast", device="cuda:0")}, COSTS)
    assert [(one.rank, one.node, one.device, one.samples) for one in plan.assignments] == [
        (0, "fast", "cuda:0", 8),
        (1, "gone", "", 0),
        (2, "slow", "", 4),
    ]
    assert [one.reason for one in plan.assignments] == [
        "100% of the fastest node's speed",
        "is not connected",
        "50% of the fastest node's speed",
    ]


def test_plan_without_present_nodes_is_even() -> None:
    plan = plan_of(job(SYNC), ["a", "b"], {}, {})
    assert [one.samples for one in plan.assignments] == [BATCH / 2, BATCH / 2]
    assert [one.sample_seconds for one in plan.assignments] == [0.0, 0.0]  # nobody was timed


def test_record_counts_samples_waiting_and_contributions() -> None:
    history = History()
    for step, name in ((1, "fast"), (2, "slow")):
        history.add_node(name)
        work = NodeWork(30 // step, 2.0, sent=100, saved=5)
        history.add(Entry(step, 0, 30 // step, 30.0 / step, 5.0, 1, 1, 0, {name: work}))
    totals = WorkerTotals(applied=4, refused=1, late=2, staleness=6, most_stale=3)
    fast_worker = WorkerRecord("fast", totals=totals)
    nodes, workers = {"fast": NodeRecord("fast", device="cuda:0", peak_memory_bytes=9)}, {"fast": fast_worker}
    own = job(SYNC, name="sync")
    record = record_of(own, history, nodes, COSTS, workers, seconds=12.0, startup=2.0, environment={"evener": "0"})
    fast, slow = record.nodes
    assert [fast.share, slow.share] == pytest.approx([2 / 3, 1 / 3])
    assert (fast.seconds_computing, fast.seconds_waiting) == (2.0, 8.0)
    assert slow.seconds_waiting == 3.0  # it came after the first update
    assert (fast.contributions, fast.refused, fast.late, fast.staleness, fast.most_stale) == (4, 1, 2, 1.5, 3)
    assert (fast.device, fast.peak_memory_bytes, slow.device) == ("cuda:0", 9, "")
    assert (record.seconds, record.startup_seconds, record.samples_per_second) == (12.0, 2.0, 4.5)
    assert (record.agreement, record.bytes_saved, record.validation_accuracy) == ("sync", 10, None)


def test_saved_results_load_unchanged_or_raise_missing_file(tmp_path: Path) -> None:
    with refused(MissingFile):
        load_result(tmp_path / "run")
    flat = weights()
    flat.memory[:] = 1
    kept = RunResult(kind_of(NonFiniteLoss("b", 3, nan)), "why", b"{}", weights_of(flat))
    save_result(tmp_path / "run", kept)
    assert load_result(tmp_path / "run") == kept
    arrays = load(bytes(kept.weights))
    assert {name: array.shape for name, array in arrays.items()} == {"w": (5,), "b": (1,)}
    assert all(np.array_equal(arrays[name], view) for name, view in flat.views().items())
    (tmp_path / "run" / "record.json").unlink()
    with pytest.raises(MissingFile):
        load_result(tmp_path / "run")
