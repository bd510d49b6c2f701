"""The worker's side: what overlapping does to its weights, and what compressing costs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from evener.agreements.compression import compressor_for
from evener.agreements.layout import Flat
from evener.agreements.messages import Answer, Lease, SampleRange
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Sgd, Workload, diloco, synchronous
from evener.agreements.threads import ThreadPool
from evener.agreements.worker import WorkerReplica
from evener.records.errors import InvalidValue
from support.numpy_engine import NumpyEngine, Problem
from support.refusals import refused
from support.stepped_server import SteppedServer, run_stepped

SGD = Sgd(learning_rate=0.3)
LEASES = [Lease(number=k, version=0, samples=SampleRange(epoch=0, ranges=((8 * k, 8),)), num_steps=2) for k in range(4)]


def overlapped(rate: float = 1.0) -> AgreementSettings:
    return AgreementSettings(
        batch=4, outer=Sgd(learning_rate=rate), contribution="delta", local_steps=2, is_overlapped=True
    )


def test_overlapped_worker_adds_its_progress_in_flight_to_new_weights() -> None:
    problem = Problem()
    engine = NumpyEngine(problem, batch=4)
    replica = WorkerReplica(engine, overlapped())
    replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)
    first = Flat(problem.layout, np.frombuffer(replica.work(LEASES[0])[1], np.uint8)).copy()
    assumed = engine.state.floats[0].copy()
    np.testing.assert_allclose(assumed, problem.start.floats[0] - first.floats[0], atol=1e-15)
    replica.work(LEASES[1])
    local = engine.state.floats[0].copy()
    common = problem.start.copy()
    common.floats[0][:] += np.random.default_rng(0).standard_normal(common.floats[0].size)
    common.counters[:] = 100
    replica.take(Answer(version=1, answers=0, verdict="applied", contents="weights"), common.memory.data)
    np.testing.assert_allclose(engine.state.floats[0], local + common.floats[0] - assumed, atol=1e-12)
    assert engine.state.counters == 102, "two steps still travel"


def test_rejected_work_is_discarded() -> None:
    problem = Problem()
    engine = NumpyEngine(problem, batch=4)
    replica = WorkerReplica(engine, overlapped())
    start = problem.start.memory.data
    replica.take(Answer(version=0, contents="weights"), start)
    replica.work(LEASES[0])
    replica.take(Answer(version=0, answers=0, verdict="refused", contents="weights"), start)
    np.testing.assert_array_equal(engine.state.floats[0], problem.start.floats[0])


def test_gradient_in_flight_does_not_move_the_weights() -> None:
    problem = Problem()
    engine = NumpyEngine(problem)
    replica = WorkerReplica(engine, synchronous(batch=8, outer=SGD))
    replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)
    replica.work(LEASES[0])
    replica.take(Answer(version=0, contents="weights", resets_leases=True), problem.start.memory.data)
    np.testing.assert_array_equal(engine.state.floats[0], problem.start.floats[0])
    assert list(replica.underway) == [0]


def test_difference_to_unknown_weights_is_rejected() -> None:
    problem = Problem()
    agreement = AgreementSettings(batch=8, outer=SGD, pull="int8")
    replica = WorkerReplica(NumpyEngine(problem), agreement)
    replica.take(Answer(version=3, contents="weights"), problem.start.memory.data)
    with refused(InvalidValue):
        replica.take(Answer(version=5, contents="difference", base=4), memoryview(bytes(10)))


def test_non_finite_loss_becomes_none_and_only_compute_time_counts() -> None:
    problem = Problem()
    problem.inputs[:] = np.nan
    clock = iter([10.0, 12.5])
    replica = WorkerReplica(NumpyEngine(problem), synchronous(batch=8, outer=SGD), clock=lambda: next(clock))
    replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)
    push, _ = replica.work(LEASES[0])
    assert (push.loss, push.seconds, push.number) == (None, 2.5, 0)


def trained(agreement: AgreementSettings, num_epochs: int = 15) -> tuple[Problem, SteppedServer]:
    problem = Problem()
    workload = Workload(num_samples=96, num_epochs=num_epochs, seed=problem.seed)
    server = ParameterServer(agreement, workload, problem.start.copy(), quorum=3)
    return problem, run_stepped(server, agreement, {name: NumpyEngine(problem) for name in "abc"})


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize(
    "agreement",
    [
        synchronous(batch=24, outer=SGD),
        AgreementSettings(batch=8, outer=Sgd(learning_rate=0.1), staleness=None),
        diloco(batch=8, local_steps=4),
    ],
)
def test_compression_both_ways_trains_as_well(agreement: AgreementSettings, compression: str) -> None:
    problem, plain = trained(agreement)
    both = msgspec.structs.replace(agreement, push=compression, pull=compression)
    _, packed = trained(both)
    kinds = [
        answer.contents for hand in packed.hands.values() for answer in hand.answers if answer.contents != "nothing"
    ]
    assert kinds.count("weights") == 3, "whole weights at the beginning only"
    assert packed.server.push_bytes < plain.server.push_bytes
    assert problem.loss(packed.server.weights) < 1.1 * problem.loss(plain.server.weights) + 0.01
    if agreement.staleness == 0:
        assert len({hand.engine.state.memory.tobytes() for hand in packed.hands.values()}) == 1, "the same bits"


def test_thousand_int8_updates_do_not_drift() -> None:
    agreement = AgreementSettings(batch=24, outer=Sgd(learning_rate=0.05), push="int8", pull="int8")
    problem, packed = trained(agreement, num_epochs=250)
    _, plain = trained(synchronous(batch=24, outer=Sgd(learning_rate=0.05)), num_epochs=250)
    np.testing.assert_allclose(packed.server.weights.parameters[0], plain.server.weights.parameters[0], atol=5e-3)
    assert packed.server.version == 1000
    assert problem.loss(packed.server.weights) < 0.2 * problem.loss(problem.start)


@pytest.mark.parametrize(
    "agreement",
    [
        synchronous(batch=24, outer=SGD),
        AgreementSettings(batch=8, outer=Sgd(learning_rate=0.1), staleness=None),
        diloco(batch=8, local_steps=4),
        msgspec.structs.replace(diloco(batch=8, local_steps=4), is_overlapped=True),
    ],
)
def test_switch_to_compression_during_a_run_trains_as_well(
    agreement: AgreementSettings,
) -> None:
    problem, plain = trained(agreement)
    agreement = msgspec.structs.replace(agreement, slow_link="int8")
    workload = Workload(num_samples=96, num_epochs=15, seed=problem.seed)
    server = ParameterServer(agreement, workload, problem.start.copy(), quorum=3)
    stepped = SteppedServer(server, agreement)
    for name in "abc":
        stepped.join(name, NumpyEngine(problem))
    for _ in range(3):
        for name in "abc":
            stepped.turn(name)
    assert server.send_less("a", 1.0)
    assert not server.send_less("a", 2.0), "it is told already"
    stepped.run()
    answers = stepped.hands["a"].answers
    told = [answer for answer in answers if answer.compression == "int8"]
    assert len(told) > 0.5 * len(answers)
    assert {answer.contents for answer in told} <= {"difference", "nothing"}
    assert [answer.base for answer in told if answer.contents == "difference"].count(None) == 1, "zeros, to begin with"
    assert all(answer.compression == "none" for name in "bc" for answer in stepped.hands[name].answers)
    assert sum(update.num_samples for update in stepped.updates) == 15 * 96
    assert server.workers["a"].totals.refused == server.workers["a"].totals.late == 0
    assert problem.loss(server.weights) < 1.1 * problem.loss(plain.server.weights) + 0.01


def test_only_workers_switched_to_compression_may_send_fewer_bytes() -> None:
    agreement = msgspec.structs.replace(synchronous(batch=24, outer=SGD), slow_link="int8")
    problem = Problem()
    workload = Workload(num_samples=96, num_epochs=1)
    server = ParameterServer(agreement, workload, problem.start.copy(), quorum=2)
    replies = [*server.admit("a").replies, *server.admit("b").replies]
    number = next(one.answer.lease.number for one in replies if one.worker == "a" and one.answer.lease)
    short = compressor_for(problem.layout, "int8", ThreadPool(1))
    assert short is not None
    assert server.inbox("a", number, short.num_bytes) is None
    assert server.send_less("a", 1.0)
    found = server.inbox("a", number, short.num_bytes)
    assert found is not None
    assert len(found) == short.num_bytes
    whole = server.inbox("a", number)  # what it had begun before it was told
    assert whole is not None
    assert len(whole) == server.push_bytes


def test_switch_to_compression_needs_the_setting_for_slow_links() -> None:
    problem, agreement = Problem(), synchronous(batch=24, outer=SGD)
    for push in ("none", "int8"):
        both = msgspec.structs.replace(agreement, push=push, pull=push)
        server = ParameterServer(both, Workload(num_samples=96, num_epochs=1), problem.start.copy())
        assert not server.send_less("a", 1.0)
    with refused(InvalidValue):
        AgreementSettings(batch=8, outer=SGD, push="int8", pull="int8", slow_link="int8")
