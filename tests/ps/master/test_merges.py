"""Other ways of merging give what the master's own gives, whatever is merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from evener.agreements.aggregator import WholeMerge
from evener.agreements.layout import Flat, flat_of, layout_of
from evener.agreements.messages import Push
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.robust import merge_robustly
from evener.agreements.settings import AgreementSettings, Merge, Robust, Workload, average
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Merging
from evener.ps.master.merges import DeviceMerge, merge_by_threads, merge_of
from evener.records.errors import InvalidValue
from support.refusals import refused

MERGES = [merge_by_threads, DeviceMerge("mean"), DeviceMerge("clip")]


def contributions(count: int) -> list[Flat]:
    draw = np.random.default_rng(0)
    arrays: list[dict[str, Any]] = [
        {
            **{f"w{i}": draw.standard_normal((i + 1, 3)) for i in range(7)},
            "bias": draw.standard_normal(5).astype(np.float32),
            "mean": draw.standard_normal(4).astype(np.float32),
            "tracked": draw.integers(0, 9, ()),
        }
        for _ in range(count)
    ]
    layout = layout_of(arrays[0], statistics=("mean",))
    return [flat_of(layout, one) for one in arrays]


def server_of(agreement: AgreementSettings, flats: dict[str, Flat]) -> ParameterServer:
    """A server to which each worker has pushed what `flats` says."""
    start = Flat(flats["a"].layout)
    work = Workload(num_samples=12, num_epochs=1)
    server = ParameterServer(agreement, work, start, quorum=len(flats), merge=merge_of(agreement))
    for worker in flats:
        server.admit(worker)
    for worker, flat in flats.items():
        number = next(iter(server.worker(worker).leases))
        inbox = server.inbox(worker, number)
        assert inbox is not None
        inbox[:] = flat.memory.data
        del inbox
        server.push(worker, Push(number=number, seconds=1.0, loss=1.0), start.layout.num_bytes)
    return server


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("weights", [[3.0, 1.0], [5.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
def test_every_merge_equals_one_pass(merge: WholeMerge, weights: list[float]) -> None:
    sources = contributions(len(weights))
    found, wanted = Flat(sources[0].layout), Flat(sources[0].layout)
    merge(found, sources, weights)
    with ThreadPool(1) as cores:
        Merging(wanted, sources, weights, cores).finish()
    for name, value in wanted.views().items():
        np.testing.assert_allclose(found.views()[name], value, rtol=1e-6 if value.dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("name", ["threads", "device"])
@pytest.mark.parametrize("bad", [False, True])
def test_server_merges_by_any_method_and_drops_nan(name: Merge, bad: bool) -> None:
    flats = dict(zip("abc", contributions(3), strict=True))
    if bad:
        flats["c"].floats[0][0] = np.nan
    agreement = replace(average(batch=1, local_steps=2), merge=name)
    server = server_of(agreement, flats)
    weights = {worker: float(server.worker(worker).totals.num_samples) for worker in flats}
    kept = ["a", "b"] if bad else ["a", "b", "c"]
    wanted = sum(flats[one].floats[0] * weights[one] for one in kept) / sum(weights[one] for one in kept)
    assert server.version == 1
    np.testing.assert_allclose(server.weights.floats[0], -wanted, rtol=1e-12)
    assert server.worker("c").totals.refused == (1 if bad else 0)


@pytest.mark.parametrize("rule", ["trimmed", "median", "krum"])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_robust_merge_on_the_device_equals_the_cpu(rule: Robust, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.ps.master.merges._CACHED", 4)
    sources = contributions(count)
    sources[-1].floats[0][:] = -1e30
    found, wanted = Flat(sources[0].layout), Flat(sources[0].layout)
    DeviceMerge(rule)(found, sources, [1.0] * count)
    with ThreadPool(1) as cores:
        merge_robustly(rule, wanted, sources, cores)
    for name, value in wanted.views().items():
        np.testing.assert_allclose(found.views()[name], value, rtol=1e-6 if value.dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("rule", ["mean", "clip", "trimmed", "median", "krum"])
def test_processor_merges_after_the_device_failed(rule: Robust, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    sources = contributions(3)
    found, again, wanted = (Flat(sources[0].layout) for _ in range(3))
    DeviceMerge(rule)(wanted, sources, [1.0, 2.0, 3.0])
    merge = DeviceMerge(rule, said.append)
    with monkeypatch.context() as patched:
        patched.setattr("evener.system.accelerators.best", lambda: torch.device("meta"))  # nothing can be read there
        merge(found, sources, [1.0, 2.0, 3.0])
    merge(again, sources, [1.0, 2.0, 3.0])
    assert len(said) == 1
    for name, value in wanted.views().items():
        np.testing.assert_array_equal(found.views()[name], value)
        np.testing.assert_array_equal(again.views()[name], value)


@pytest.mark.parametrize("bad", [False, True])
def test_server_merges_robustly_on_its_device_and_drops_nan(bad: bool) -> None:
    flats = dict(zip("abc", contributions(3), strict=True))
    if bad:
        flats["c"].floats[0][0] = np.nan
    agreement = replace(average(batch=1, local_steps=2), merge="device", robust="median")
    server = server_of(agreement, flats)
    kept = ["a", "b"] if bad else ["a", "b", "c"]
    assert server.version == 1
    np.testing.assert_allclose(
        server.weights.floats[0], -np.median([flats[one].floats[0] for one in kept], axis=0), rtol=1e-12
    )
    assert server.worker("c").totals.refused == (1 if bad else 0)


def test_robust_merge_with_threads_is_rejected() -> None:
    with refused(InvalidValue):
        replace(average(batch=1), robust="median", merge="threads")
