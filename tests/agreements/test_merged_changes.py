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
from evener.agreements.settings import AgreementSettings, Workload, average, diloco, federated, synchronous
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


AGREEMENTS = {
    "average": sparse(average(batch=8, local_steps=2)),
    "diloco": sparse(diloco(batch=8, local_steps=2)),
    "overlapped": sparse(diloco(batch=8, local_steps=2), is_overlapped=True),
}


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
    images = changes.since(version)
    return -1 if images is None else len(images)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", AGREEMENTS)
def test_workers_hold_the_bits_of_the_server_and_learn(name: str, dtype: str) -> None:
    problem = Problem(dtype=dtype)
    plain = msgspec.structs.replace(AGREEMENTS[name], push="none", pull="none")
    dense = run_stepped(server_of(problem, plain), plain, {one: NumpyEngine(problem) for one in "abc"})
    stepped = run_stepped(
        server_of(problem, AGREEMENTS[name]), AGREEMENTS[name], {one: NumpyEngine(problem) for one in "abc"}
    )
    assert len(common_of(stepped)) == 1
    assert contents_of(stepped)["weights"] == 3, "whole weights at the beginning only"
    assert contents_of(stepped)["merged"] > 20
    assert problem.loss(stepped.server.weights) < 1.2 * problem.loss(dense.server.weights) + 0.02


@pytest.mark.parametrize("name", AGREEMENTS)
def test_workers_that_come_late_or_come_back_hold_the_bits_of_the_server(name: str) -> None:
    problem, agreement = Problem(), AGREEMENTS[name]
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
    problem, agreement = Problem(), sparse(federated(batch=8, fraction=0.5))
    parts = tuple((one, problem.num_samples // 4) for one in "abcd")
    workload = Workload(num_samples=problem.num_samples, num_updates=20, seed=problem.seed, parts=parts)
    server = ParameterServer(agreement, workload, problem.start.copy(), quorum=4)
    changes = server._aggregator.broadcast._merged
    assert changes is not None
    changes._limit *= 20  # this model is hardly larger than the image of a change
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


@pytest.mark.parametrize("name", AGREEMENTS)
def test_resumed_server_continues_with_what_was_left_out(name: str, tmp_path: Path) -> None:
    problem, agreement = Problem(), AGREEMENTS[name]
    stepped = SteppedServer(server_of(problem, agreement), agreement)
    for one in "abc":
        stepped.join(one, NumpyEngine(problem))
    for _ in range(30):
        for one in "abc":
            stepped.turn(one)
    save_snapshot(stepped.server.snapshot(), tmp_path / "master.safetensors")
    snapshot = load_snapshot(tmp_path / "master.safetensors")
    server = ParameterServer.resume(snapshot, first_number=10**6, quorum=3)
    before, after = (one._aggregator.broadcast.arrays for one in (stepped.server, server))
    assert before.keys() == after.keys() == {"owed.float64"}
    assert after["owed.float64"].any()
    for owed in before:
        np.testing.assert_array_equal(before[owed], after[owed])
    assert len(common_of(run_stepped(server, agreement, {one: NumpyEngine(problem) for one in "abc"}))) == 1


def test_what_is_left_out_follows_later() -> None:
    of, cores = layout(10_000, doubles=300), ThreadPool(1)
    packing = compressor_for(of, "top-k", cores)
    assert packing is not None
    changes = MergedChanges(of, packing)
    meant, sent = Flat(of), Flat(of)
    for version in range(40):
        change = sources(1, of, seed=version)[0]
        for total, one in zip(meant.floats, change.floats, strict=True):
            total += one
        decoded = changes.compressed(version, change)
        for total, one in zip(sent.floats, decoded.floats, strict=True):
            total += one
        np.testing.assert_array_equal(decoded.counters, change.counters)
    for total, arrived, owed in zip(meant.parameters, sent.parameters, changes.arrays.values(), strict=True):
        np.testing.assert_allclose(total - arrived, owed, atol=1e-4)
    for total, arrived in zip(meant.statistics, sent.statistics, strict=True):
        np.testing.assert_array_equal(total, arrived)


def test_numbers_beyond_the_code_stay_exact_and_everybody_receives_the_weights() -> None:
    of, cores = layout(10_000, doubles=300), ThreadPool(1)
    packing = compressor_for(of, "top-k", cores)
    assert packing is not None
    changes = MergedChanges(of, packing)
    changes.compressed(0, sources(1, of)[0])
    before = {name: array.copy() for name, array in changes.arrays.items()}
    change = sources(1, of, seed=1)[0]
    change.parameters[0][7] = 1e300  # a float64
    expected = change.copy()
    assert changes.compressed(1, change) is change
    assert change.memory.tobytes() == expected.memory.tobytes()
    for name, array in changes.arrays.items():
        np.testing.assert_array_equal(array, before[name])
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
    problem, agreement = Problem(), AGREEMENTS["diloco"]
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
    replica = WorkerReplica(NumpyEngine(problem), AGREEMENTS["diloco"])
    with refused(InvalidValue):
        replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)


def test_gradients_and_slow_lines_are_not_made_sparse() -> None:
    with refused(InvalidValue):
        sparse(synchronous(batch=8, outer=average(batch=8).outer))
    with refused(InvalidValue):
        msgspec.structs.replace(average(batch=8), slow_link="top-k")
