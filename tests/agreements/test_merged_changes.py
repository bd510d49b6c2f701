"""With `top-k`, workers make the server's steps with merged contributions, and hold the same bits as the server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evener.agreements.compression import compressor_for
from evener.agreements.layout import Flat
from evener.agreements.messages import Answer
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import (
    Adam,
    AgreementSettings,
    Grouped,
    Sgd,
    Workload,
    asynchronous,
    average,
    bounded,
    diloco,
    federated,
    synchronous,
)
from evener.agreements.snapshot import load_snapshot, save_snapshot
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Optimiser
from evener.agreements.weights import MergedChanges
from evener.agreements.worker import WorkerReplica
from evener.records.errors import InvalidValue
from support.merge_cases import layout, sources
from support.numpy_engine import NumpyEngine, Problem
from support.refusals import refused
from support.stepped_server import SteppedServer, run_stepped


def sparse(agreement: AgreementSettings, **changes: object) -> AgreementSettings:
    return msgspec.structs.replace(agreement, push="top-k", pull="top-k", **changes)


CASES = {
    "average": sparse(average(batch=8, local_steps=2)),
    "diloco": sparse(diloco(batch=8, local_steps=2, learning_rate=0.5, momentum=0.5)),
    "overlapped": sparse(average(batch=8, local_steps=2), is_overlapped=True),
    "sync": sparse(synchronous(batch=24, outer=Sgd(learning_rate=0.01, momentum=0.9))),
}
HIDDEN = 1000
"""Hidden units of a model of 10 000 parameters; a contribution holds 192 of them."""


def server_of(problem: Problem, agreement: AgreementSettings, epochs: int = 12, quorum: int = 3) -> ParameterServer:
    workload = Workload(num_samples=problem.num_samples, num_epochs=epochs, seed=problem.seed)
    return ParameterServer(agreement, workload, problem.start.copy(), quorum=quorum)


def common_of(stepped: SteppedServer) -> set[bytes]:
    """The workers' copies of the common weights, and the server's."""
    copies = {hand.replica._common.memory.tobytes() for hand in stepped.hands.values()}
    return copies | {stepped.server.weights.memory.tobytes()}


def contents_of(stepped: SteppedServer) -> Counter[str]:
    return Counter(answer.contents for hand in stepped.hands.values() for answer in hand.answers)


def length_since(changes: MergedChanges, version: int) -> int:
    pull = changes.since(version)
    return -1 if pull is None else len(pull.image)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_workers_hold_the_bits_of_the_server_and_learn(name: str, dtype: str) -> None:
    problem = Problem(dtype=dtype, hidden=HIDDEN)
    engines = {one: NumpyEngine(problem, rate=0.01) for one in "abc"}
    stepped = run_stepped(server_of(problem, CASES[name], epochs=40), CASES[name], engines)
    assert len(common_of(stepped)) == 1
    assert contents_of(stepped)["weights"] == 3, "whole weights at the beginning only"
    assert contents_of(stepped)["merged"] > 150
    losses = [problem.loss(weights) for weights in (problem.start, stepped.server.weights)]
    assert losses[1] < 0.1 * losses[0]


@pytest.mark.parametrize("name", CASES)
def test_workers_that_come_late_or_come_back_hold_the_bits_of_the_server(name: str) -> None:
    problem, agreement = Problem(hidden=HIDDEN), CASES[name]
    stepped = SteppedServer(server_of(problem, agreement, quorum=1), agreement)
    for one in "ab":
        stepped.join(one, NumpyEngine(problem))
    for turn in range(120):
        if turn == 20:
            stepped.join("c", NumpyEngine(problem))
        if turn == 50:
            stepped.lose("a")
        if turn == 70:
            stepped.join("a", NumpyEngine(problem))
        if turn == 90:  # its connection was interrupted: the answer repeats everything
            stepped.heed(stepped.server.admit("b"))
        for one in list(stepped.hands):
            stepped.turn(one)
    stepped.run()
    assert len(common_of(stepped)) == 1
    assert stepped.server.is_over


def test_workers_that_are_not_drawn_take_all_updates_at_once() -> None:
    problem, agreement = Problem(hidden=HIDDEN), sparse(federated(batch=8, fraction=0.5))
    parts = tuple((one, problem.num_samples // 4) for one in "abcd")
    workload = Workload(num_samples=problem.num_samples, num_updates=20, seed=problem.seed, parts=parts)
    server = ParameterServer(agreement, workload, problem.start.copy(), quorum=4)
    stepped = run_stepped(server, agreement, {one: NumpyEngine(problem) for one in "abcd"})
    assert len(common_of(stepped)) == 1
    assert contents_of(stepped)["weights"] <= 4
    missed = [
        answer.version - answer.base
        for hand in stepped.hands.values()
        for answer in hand.answers
        if answer.contents == "merged" and answer.base is not None
    ]
    assert max(missed) > 1


@pytest.mark.parametrize("name", CASES)
def test_workers_of_a_resumed_server_hold_its_bits(name: str, tmp_path: Path) -> None:
    problem, agreement = Problem(hidden=HIDDEN), CASES[name]
    stepped = SteppedServer(server_of(problem, agreement), agreement)
    for one in "abc":
        stepped.join(one, NumpyEngine(problem))
    for _ in range(30):
        for one in "abc":
            stepped.turn(one)
    save_snapshot(stepped.server.snapshot(), tmp_path / "master.safetensors")
    server = ParameterServer.resume(load_snapshot(tmp_path / "master.safetensors"), first_number=10**6, quorum=3)
    assert len(common_of(run_stepped(server, agreement, {one: NumpyEngine(problem) for one in "abc"}))) == 1


def test_merged_changes_are_the_largest_numbers() -> None:
    of, cores = layout(10_000, doubles=300), ThreadPool(1)
    packing = compressor_for(of, "top-k", cores)
    assert packing is not None
    changes, change = MergedChanges(of, packing), sources(1, of)[0]
    exact = change.copy()
    decoded = changes.compressed(0, change)
    np.testing.assert_array_equal(decoded.counters, exact.counters)
    np.testing.assert_array_equal(decoded.statistics[0], exact.statistics[0])
    assert [np.count_nonzero(array) for array in decoded.parameters] == [64, 3 * 64]
    for array, whole in zip(decoded.parameters, exact.parameters, strict=True):
        for first in range(0, array.size, 4096):
            part, rest = array[first : first + 4096], np.abs(whole[first : first + 4096])
            assert rest[part == 0].max() <= rest[part != 0].min()


@pytest.mark.parametrize("local_steps", [2, 20])
@pytest.mark.parametrize("workers", [2, 5])
def test_sparse_average_does_not_diverge_where_all_numbers_move_alike(local_steps: int, workers: int) -> None:
    size, draw = 8_192, np.random.default_rng(0)
    packing = compressor_for(of := layout(size, doubles=64), "top-k", ThreadPool(1))
    assert packing is not None
    changes, weights, image = (
        MergedChanges(of, packing),
        np.ones(size, np.float32),
        np.empty(packing.num_bytes, np.uint8),
    )
    residuals, change, sent = [Flat(of) for _ in range(workers)], Flat(of), Flat(of)
    for version in range(200):
        merged = Flat(of)
        for residual in residuals:
            local = weights.copy()
            for _ in range(local_steps):  # towards zero, with noise
                local -= 0.02 * (local + 0.1 * draw.standard_normal(size).astype(np.float32))
            change.parameters[1][:] = weights - local
            packing.pack(change, residual, image)
            packing.unpack(image, sent)
            merged.parameters[1][:] += sent.parameters[1] / workers
        weights -= changes.compressed(version, merged).parameters[1]
        assert np.mean(weights**2) < 2
    assert np.mean(weights**2) < 0.95


def test_numbers_beyond_the_code_stay_exact_and_everybody_receives_the_weights() -> None:
    of, cores = layout(10_000, doubles=300), ThreadPool(1)
    packing = compressor_for(of, "top-k", cores)
    assert packing is not None
    changes = MergedChanges(of, packing)
    changes.compressed(0, sources(1, of)[0])
    change = sources(1, of, seed=1)[0]
    change.parameters[0][7] = 1e300  # a float64
    expected = change.copy()
    assert changes.compressed(1, change) is change
    assert change.memory.tobytes() == expected.memory.tobytes()
    assert changes.since(0) is None
    assert changes.since(2) is not None
    changes.compressed(2, sources(1, of, seed=2)[0])
    assert changes.since(1) is None
    assert length_since(changes, 2) == packing.num_bytes


def test_changes_are_remembered_while_they_are_shorter_than_the_weights() -> None:
    of, cores = layout(10_000, doubles=300), ThreadPool(1)
    packing = compressor_for(of, "top-k", cores)
    assert packing is not None
    changes = MergedChanges(of, packing)
    for version in range(200):
        changes.compressed(version, sources(1, of, seed=version)[0])
    most = of.num_bytes // packing.num_bytes
    assert 50 < most < 150
    assert length_since(changes, 200 - most) == most * packing.num_bytes
    assert changes.since(200 - most - 1) is None
    assert changes.since(201) is None


@pytest.mark.parametrize("answer", [{"base": 4}, {"base": 3, "version": 6}, {"base": 3, "version": 2}, {}])
def test_changes_of_unknown_weights_or_of_another_length_are_rejected(answer: dict[str, int]) -> None:
    problem, agreement = Problem(), CASES["diloco"]
    outer = Optimiser(agreement.outer, problem.layout, ThreadPool(1))
    state = np.concatenate([problem.start.memory, *(array.view(np.uint8) for array in outer.arrays.values())])
    replica = WorkerReplica(NumpyEngine(problem), agreement)
    replica.take(Answer(version=3, contents="weights"), state.data)
    packing = compressor_for(problem.layout, "top-k", ThreadPool(1))
    assert packing is not None
    header = msgspec.structs.replace(Answer(version=5, contents="merged"), **answer)
    with refused(InvalidValue):
        replica.take(header, memoryview(bytes(packing.num_bytes)))


def test_weights_without_the_state_of_the_optimizer_are_rejected() -> None:
    problem = Problem()
    replica = WorkerReplica(NumpyEngine(problem), CASES["diloco"])
    with refused(InvalidValue):
        replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)


@pytest.mark.parametrize(
    "agreement",
    [
        synchronous(batch=8, outer=Adam(learning_rate=0.01)),
        synchronous(batch=8, outer=Grouped(rules=(Adam(learning_rate=0.01),), group_of=(0,))),
        msgspec.structs.replace(synchronous(batch=8, outer=Sgd(learning_rate=0.01)), clip_norm=1.0),
        asynchronous(batch=8, outer=Sgd(learning_rate=0.01)),
        bounded(batch=8, outer=Sgd(learning_rate=0.01)),
    ],
    ids=["Adam", "Adam of groups", "clip_norm", "async", "bounded"],
)
def test_steps_that_workers_cannot_make_with_sparse_gradients_are_refused(agreement: AgreementSettings) -> None:
    with refused(InvalidValue):
        sparse(agreement)


def test_slow_lines_are_not_made_sparse() -> None:
    with refused(InvalidValue):
        msgspec.structs.replace(average(batch=8), slow_link="top-k")


def test_more_of_a_gradient_comes_if_what_was_left_out_is_remembered() -> None:
    size = 8_192
    packing = compressor_for(of := layout(size, doubles=64), "top-k", ThreadPool(1))
    assert packing is not None
    change = Flat(of)
    change.parameters[1][:] = np.random.default_rng(0).standard_normal(size)
    received = {}
    for remembers in (True, False):
        changes, total = MergedChanges(of, packing, remembers=remembers), np.zeros(size)
        for version in range(400):
            total += changes.compressed(version, change).parameters[1]
        received[remembers] = np.count_nonzero(total)
    assert received[False] == size // 4096 * 64
    assert received[True] > 6 * received[False]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_sparse_gradients_with_an_unused_parameter_keep_the_bits_alike(is_grouped: bool) -> None:
    problem = Problem(hidden=HIDDEN)
    sgd = Sgd(learning_rate=0.01, momentum=0.9, weight_decay=0.01)
    faster = msgspec.structs.replace(sgd, learning_rate=0.02)
    num_parameters = sum(entry.kind == "parameter" for entry in problem.layout.entries)
    groups = Grouped(rules=(sgd, faster), group_of=(0, 1) * (num_parameters // 2))
    agreement = sparse(synchronous(batch=24, outer=groups if is_grouped else sgd))
    engines = {"a": Forgetful(problem), "b": Forgetful(problem), "c": Forgetful(problem)}
    stepped = run_stepped(server_of(problem, agreement), agreement, engines)
    assert len(common_of(stepped)) == 1
    assert {
        len(answer.unused) for hand in stepped.hands.values() for answer in hand.answers if answer.contents == "merged"
    } <= {0, 1}


class Forgetful(NumpyEngine):
    """An engine whose optimizer does not hold the first parameter, as `unused` says; its gradient is not zero."""

    unused = (0,)


def test_parameters_that_no_optimizer_holds_stay_as_they_are() -> None:
    problem = Problem(hidden=HIDDEN)
    sgd = Sgd(learning_rate=0.01, momentum=0.9, weight_decay=0.1)
    agreement = sparse(synchronous(batch=24, outer=sgd))
    stepped = SteppedServer(server_of(problem, agreement, quorum=1), agreement)
    for name in "abc":  # the second and third come later
        stepped.join(name, Forgetful(problem))
        for _ in range(20):
            for one in list(stepped.hands):
                stepped.turn(one)
    stepped.run()
    assert len(common_of(stepped)) == 1
    before, after = (weights.views() for weights in (problem.start, stepped.server.weights))
    first, second = [entry.name for entry in problem.layout.entries if entry.kind == "parameter"][:2]
    np.testing.assert_array_equal(before[first], after[first])
    assert np.abs(before[second] - after[second]).max() > 0


def test_resumed_server_remembers_what_compression_left_out(tmp_path: Path) -> None:
    agreement = CASES["sync"]
    problem = Problem(hidden=HIDDEN)
    first = SteppedServer(server_of(problem, agreement), agreement)
    for name in "abc":
        first.join(name, NumpyEngine(problem))
    for _ in range(40):
        for name in "abc":
            first.turn(name)
    save_snapshot(first.server.snapshot(), tmp_path / "master.safetensors")
    resumed = ParameterServer.resume(load_snapshot(tmp_path / "master.safetensors"), first_number=10**6)
    ours, saved = resumed._aggregator.broadcast.arrays, first.server._aggregator.broadcast.arrays
    assert sum(np.count_nonzero(array) for array in saved.values()) > 0
    for name, array in saved.items():
        np.testing.assert_array_equal(ours[name], array)


@pytest.mark.parametrize("robust", ["trimmed", "median", "krum"])
def test_sparse_contributions_have_no_median(robust: str) -> None:
    with refused(InvalidValue):
        sparse(average(batch=8), robust=robust)
    with refused(InvalidValue):
        msgspec.structs.replace(average(batch=8), robust=robust, skips_late=True)
