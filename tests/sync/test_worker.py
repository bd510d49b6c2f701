"""The worker's side: the loop, what overlapping does to its weights, and what compressing costs."""

from __future__ import annotations

import queue
import threading

import msgspec
import numpy as np
import pytest
from numpy_engine import NumpyEngine, Problem
from star_on_paper import Star, run_star

from evener.errors import InvalidValue
from evener.sync.agreement import Agreement, Sgd
from evener.sync.family import diloco, synchronous
from evener.sync.flat import Flat
from evener.sync.messages import Answer, Lease, Push, ServerOutput
from evener.sync.samples import SampleRange
from evener.sync.server import Server
from evener.sync.worker import Replica, work
from evener.sync.workload import Workload

SGD = Sgd(learning_rate=0.3)
LEASES = [Lease(number=k, version=0, samples=SampleRange(epoch=0, ranges=((8 * k, 8),)), num_steps=2) for k in range(4)]


class Wire:
    """Exchanges of threads with one server."""

    def __init__(self, server: Server) -> None:
        self._server, self._lock = server, threading.Lock()
        self._mail: dict[str, queue.Queue[tuple[Answer, bytes | None]]] = {}

    def connect(self, name: str) -> Line:
        self._mail[name] = queue.Queue()
        return Line(self, name)

    def admit(self, name: str) -> None:
        with self._lock:
            self._heed(self._server.admit(name))

    def push(self, name: str, push: Push, image: memoryview) -> None:
        with self._lock:
            inbox = self._server.inbox(name, push.number)
            assert inbox is not None
            inbox[:] = image
            self._heed(self._server.push(name, push, len(image)))

    def pull(self, name: str) -> tuple[Answer, bytes | None]:
        return self._mail[name].get(timeout=20)

    def _heed(self, outcome: ServerOutput) -> None:
        for reply in outcome.replies:
            self._mail[reply.worker].put((reply.answer, None if reply.image is None else bytes(reply.image)))


class Line:
    """One worker's exchange."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name

    def push(self, push: Push, image: memoryview) -> None:
        self._wire.push(self._name, push, image)

    def pull(self) -> tuple[Answer, memoryview | None]:
        answer, data = self._wire.pull(self._name)
        return answer, None if data is None else memoryview(data)


@pytest.mark.parametrize(
    "agreement",
    [
        synchronous(batch=24, outer=SGD),
        Agreement(batch=8, outer=SGD, staleness=None),
        Agreement(batch=8, outer=SGD, staleness=1),
        Agreement(batch=8, outer=Sgd(learning_rate=1.0), contribution="delta", local_steps=3, is_overlapped=True),
        diloco(batch=8, local_steps=4),
    ],
)
def test_workers_in_threads_train_to_the_end(agreement: Agreement) -> None:
    problem = Problem()
    server = Server(agreement, Workload(num_samples=96, num_epochs=20, seed=problem.seed), problem.start.copy())
    wire = Wire(server)
    engines = {name: NumpyEngine(problem) for name in "abc"}
    threads = []
    for name, engine in engines.items():
        exchange, replica = wire.connect(name), Replica(engine, agreement)
        threads.append(threading.Thread(target=work, args=(replica, exchange, agreement.depth), name=f"evener-{name}"))
    for name in engines:
        wire.admit(name)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert server.is_over
    assert sorted(used for engine in engines.values() for used in engine.used) == [
        (epoch, p) for epoch in range(20) for p in range(96)
    ]
    assert problem.loss(server.weights) < 0.4 * problem.loss(problem.start)


def overlapped(rate: float = 1.0) -> Agreement:
    return Agreement(batch=4, outer=Sgd(learning_rate=rate), contribution="delta", local_steps=2, is_overlapped=True)


def test_overlapping_goes_on_from_the_new_weights_and_the_progress_that_still_travels() -> None:
    problem = Problem()
    engine = NumpyEngine(problem, batch=4)
    replica = Replica(engine, overlapped())
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


def test_what_was_refused_is_not_kept() -> None:
    problem = Problem()
    engine = NumpyEngine(problem, batch=4)
    replica = Replica(engine, overlapped())
    start = problem.start.memory.data
    replica.take(Answer(version=0, contents="weights"), start)
    replica.work(LEASES[0])
    replica.take(Answer(version=0, answers=0, verdict="refused", contents="weights"), start)
    np.testing.assert_array_equal(engine.state.floats[0], problem.start.floats[0])


def test_a_gradient_that_still_travels_does_not_move_the_weights() -> None:
    problem = Problem()
    engine = NumpyEngine(problem)
    replica = Replica(engine, synchronous(batch=8, outer=SGD))
    replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)
    replica.work(LEASES[0])
    replica.take(Answer(version=0, contents="weights", is_anew=True), problem.start.memory.data)
    np.testing.assert_array_equal(engine.state.floats[0], problem.start.floats[0])
    assert list(replica.underway) == [0]


class Script:
    """An exchange that says what was written down for it, and notes what it hears."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.pushed: list[int] = []

    def push(self, push: Push, image: memoryview) -> None:
        self.pushed.append(push.number)

    def pull(self) -> tuple[Answer, memoryview | None]:
        return self._answers.pop(0), None


def test_leases_that_were_voided_are_not_worked_on() -> None:
    script = Script(
        Answer(version=0, lease=LEASES[0]),
        Answer(version=0, lease=LEASES[1]),
        Answer(version=0, lease=LEASES[2]),
        Answer(version=0, answers=0, verdict="late", lease=LEASES[3], is_anew=True),
        Answer(version=0, is_last=True),
    )
    work(Replica(NumpyEngine(Problem(), batch=4), overlapped()), script, 2)
    assert script.pushed == [0, 1, 3]


def test_a_lease_that_is_told_again_while_its_contribution_travels_is_not_done_again() -> None:
    script = Script(
        Answer(version=0, lease=LEASES[0]),
        Answer(version=0, lease=LEASES[0], is_anew=True),
        Answer(version=0, answers=0, verdict="applied", lease=LEASES[1]),
        Answer(version=0, answers=1, verdict="applied", is_last=True),
    )
    work(Replica(NumpyEngine(Problem()), synchronous(batch=8, outer=SGD)), script, 1)
    assert script.pushed == [0, 1]


def test_a_difference_to_weights_that_it_does_not_have_is_refused() -> None:
    problem = Problem()
    agreement = Agreement(batch=8, outer=SGD, pull="int8")
    replica = Replica(NumpyEngine(problem), agreement)
    replica.take(Answer(version=3, contents="weights"), problem.start.memory.data)
    with pytest.raises(InvalidValue, match="base of a difference must be 3, the last pull's, got 4"):
        replica.take(Answer(version=5, contents="difference", base=4), memoryview(bytes(10)))


def test_a_loss_that_is_not_finite_is_told_as_none_and_time_is_the_engines_alone() -> None:
    problem = Problem()
    problem.inputs[:] = np.nan
    clock = iter([10.0, 12.5])
    replica = Replica(NumpyEngine(problem), synchronous(batch=8, outer=SGD), clock=lambda: next(clock))
    replica.take(Answer(version=0, contents="weights"), problem.start.memory.data)
    push, _ = replica.work(LEASES[0])
    assert (push.loss, push.seconds, push.number) == (None, 2.5, 0)


def trained(agreement: Agreement, num_epochs: int = 15) -> tuple[Problem, Star]:
    problem = Problem()
    workload = Workload(num_samples=96, num_epochs=num_epochs, seed=problem.seed)
    server = Server(agreement, workload, problem.start.copy(), quorum=3)
    return problem, run_star(server, agreement, {name: NumpyEngine(problem) for name in "abc"})


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize(
    "agreement",
    [
        synchronous(batch=24, outer=SGD),
        Agreement(batch=8, outer=Sgd(learning_rate=0.1), staleness=None),
        diloco(batch=8, local_steps=4),
    ],
)
def test_compressing_both_ways_trains_as_well(agreement: Agreement, compression: str) -> None:
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


def test_a_thousand_updates_of_eight_bits_do_not_drift() -> None:
    agreement = Agreement(batch=24, outer=Sgd(learning_rate=0.05), push="int8", pull="int8")
    problem, packed = trained(agreement, num_epochs=250)
    _, plain = trained(synchronous(batch=24, outer=Sgd(learning_rate=0.05)), num_epochs=250)
    np.testing.assert_allclose(packed.server.weights.parameters[0], plain.server.weights.parameters[0], atol=5e-3)
    assert packed.server.version == 1000
    assert problem.loss(packed.server.weights) < 0.2 * problem.loss(problem.start)
