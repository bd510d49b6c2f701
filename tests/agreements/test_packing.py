"""What is compressed loses nothing in the long run, and a worker has the very bits that the server thinks it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evener.agreements.compression import CODECS, Compressor, compressor_for
from evener.agreements.layout import Flat
from evener.agreements.threads import BLOCK_BYTES, ThreadPool
from support.merge_cases import layout, sources

NAMES: list[Any] = list(CODECS)


def packing(name: Any, of: Flat) -> tuple[Compressor, Any]:
    made = compressor_for(of.layout, name, ThreadPool(1))
    assert made is not None
    return made, np.zeros(made.num_bytes, np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_preserves_the_sum_of_updates_but_for_its_decay(name: Any) -> None:
    of = layout(2000, doubles=700)
    pack, image = packing(name, Flat(of))
    residual, arrived = Flat(of), Flat(of)
    meant, sent = [np.zeros(p.size) for p in arrived.parameters], [np.zeros(p.size) for p in arrived.parameters]
    quanta = [np.zeros(p.size) for p in arrived.parameters]
    for step in range(60):
        change = sources(1, of, seed=step)[0]
        decay = [(1 - CODECS[name].feedback) * owed for owed in residual.parameters]
        pack.pack(change, residual, image)
        pack.unpack(image, arrived)
        for k, values in enumerate(change.parameters):
            meant[k] += values - decay[k]
            sent[k] += arrived.parameters[k]
            quanta[k] = np.maximum(quanta[k], np.abs(arrived.parameters[k]).max() / (127 if name == "int8" else 256))
        if name != "top-k":  # which has no quantum
            for k in range(2):
                assert (np.abs(meant[k] - sent[k]) <= quanta[k] + 1e-4).all()
    for k in range(2):
        np.testing.assert_allclose(meant[k] - sent[k], residual.parameters[k], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_and_counters_are_sent_uncompressed(name: Any) -> None:
    change = sources(1, layout(300))[0]
    pack, image = packing(name, change)
    arrived = Flat(change.layout)
    pack.pack(change, Flat(change.layout), image)
    pack.unpack(image, arrived)
    np.testing.assert_array_equal(arrived.counters, change.counters)
    np.testing.assert_array_equal(arrived.statistics[0], change.statistics[0])
    assert not np.array_equal(arrived.parameters[1], change.parameters[1])


@pytest.mark.parametrize("name", NAMES)
def test_non_finite_values_arrive_and_do_not_enter_the_residual(name: Any) -> None:
    of = layout(600)
    pack, image = packing(name, Flat(of))
    residual, arrived = Flat(of), Flat(of)
    pack.pack(sources(1, of)[0], residual, image)
    owed = residual.copy()
    bad = sources(1, of, seed=1)[0]
    bad.views()["w"][5] = np.nan
    pack.pack(bad, residual, image)
    pack.unpack(image, arrived)
    assert np.isnan(arrived.views()["w"][5])
    assert all(np.isfinite(array).all() for array in residual.floats)
    assert residual.views()["w"][5] == owed.views()["w"][5]


@pytest.mark.parametrize("name", NAMES)
def test_differences_converge_to_the_weights_with_identical_bits(name: Any) -> None:
    steps = 600 if name == "top-k" else 6  # each sends a 64th of the numbers
    of = layout(BLOCK_BYTES // 32 if name == "top-k" else 3 * BLOCK_BYTES // 4, doubles=300)
    weights = sources(1, of)[0]
    theirs, worker = Flat(of), Flat(of)
    pack, image = packing(name, weights)
    errors = []
    for step in range(steps):
        pack.pack_difference(weights, theirs, image)
        pack.unpack_difference(image, worker)
        assert theirs.memory.tobytes() == worker.memory.tobytes()
        errors.append(max(float(np.abs(w - p).max()) for w, p in zip(weights.floats, worker.floats, strict=True)))
        if step < 3:
            for array in weights.parameters:
                array += 0.001 * np.random.default_rng(step).standard_normal(array.size).astype(array.dtype)
    assert errors[-1] < 1e-5 < errors[0]


@pytest.mark.parametrize("name", NAMES)
def test_threads_change_no_bit(name: Any) -> None:
    change = sources(1, layout(9 * BLOCK_BYTES // 4 + 5))[0]
    images = []
    for threads in (1, 2):
        with ThreadPool(threads) as cores:
            pack = Compressor(change.layout, name, cores)
            image = np.zeros(pack.num_bytes, np.uint8)
            pack.pack(change, Flat(change.layout), image)
            images.append(image.tobytes())
    assert images[0] == images[1]


def test_compressed_size_follows_from_the_layout() -> None:
    of = layout(1000, doubles=3)  # 2 counters, 3 float64 and 1000 float32 parameters, 2 float32 statistics
    plain = 2 * 8 + 2 * 4
    assert Compressor(of, "bf16", ThreadPool(1)).num_bytes == plain + 8 + 2000
    assert Compressor(of, "int8", ThreadPool(1)).num_bytes == plain + 8 + 4 * 4 + 1000
    assert Compressor(of, "top-k", ThreadPool(1)).num_bytes == plain + 116 + 116
    assert compressor_for(of, "none", ThreadPool(1)) is None
