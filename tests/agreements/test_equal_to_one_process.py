"""Workers with uneven shares learn what one process learns from the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from evener.agreements.layout import Flat
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import Adam, AgreementSettings, Outer, Sgd, Workload, average, synchronous
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Merging
from support.numpy_engine import NumpyEngine, Problem
from support.serial_training import MakeOptimiser, difference, train
from support.stepped_server import SteppedServer, run_stepped

BATCH, EPOCHS = 21, 3
UNEVEN = {"a": 1.0, "b": 2.3, "c": 9.0}
OPTIMISERS: list[tuple[Outer, MakeOptimiser]] = [
    (Sgd(learning_rate=0.3), partial(torch.optim.SGD, lr=0.3)),
    (
        Sgd(learning_rate=0.1, momentum=0.9, is_nesterov=True, weight_decay=0.01),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    (Adam(learning_rate=0.05), partial(torch.optim.Adam, lr=0.05)),
    (
        Adam(learning_rate=0.05, weight_decay=0.1, is_decoupled=True),
        partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    ),
]


def run(
    agreement: AgreementSettings, problem: Problem, names: str = "abc", num_epochs: int = EPOCHS, rate: float = 0.1
) -> SteppedServer:
    workload = Workload(num_samples=problem.num_samples, num_epochs=num_epochs, seed=problem.seed)
    server = ParameterServer(agreement, workload, problem.start.copy(), quorum=len(names))
    engines = {name: NumpyEngine(problem, agreement.batch, rate) for name in names}
    return run_stepped(server, agreement, engines, UNEVEN)


@pytest.mark.parametrize(("outer", "optimiser"), OPTIMISERS)
def test_synchronous_gradients_equal_one_process_with_the_whole_batch(outer: Outer, optimiser: MakeOptimiser) -> None:
    problem = Problem()
    stepped = run(synchronous(batch=BATCH, outer=outer), problem)
    assert len({tally.num_samples for tally in [worker.totals for worker in stepped.server.workers.values()]}) == 3, (
        "the shares are uneven"
    )
    expected = train(problem, BATCH, EPOCHS, optimiser)
    assert difference(stepped.server.weights.views(), expected) < 1e-10


def test_averaging_after_one_step_equals_one_process() -> None:
    problem = Problem()
    stepped = run(average(batch=BATCH, local_steps=1), problem, rate=0.3)
    expected = train(problem, BATCH, EPOCHS, partial(torch.optim.SGD, lr=0.3))
    assert difference(stepped.server.weights.views(), expected) < 1e-10


def test_one_worker_with_many_local_steps_equals_one_process() -> None:
    problem = Problem()
    stepped = run(average(batch=8, local_steps=5), problem, names="a", rate=0.3)
    expected = train(problem, 8, EPOCHS, partial(torch.optim.SGD, lr=0.3))
    assert difference(stepped.server.weights.views(), expected) < 1e-10
    assert stepped.server.weights.counters == expected["num_batches_tracked"]


@pytest.mark.parametrize("local_steps", [1, 5])
def test_one_overlapped_worker_equals_one_process(local_steps: int) -> None:
    problem = Problem()
    outer = Sgd(learning_rate=1.0)
    agreement = AgreementSettings(
        batch=8, outer=outer, contribution="delta", local_steps=local_steps, is_overlapped=True
    )
    stepped = run(agreement, problem, names="a", rate=0.3)
    expected = train(problem, 8, EPOCHS, partial(torch.optim.SGD, lr=0.3))
    assert difference(stepped.server.weights.views(), expected) < 1e-10


def test_one_asynchronous_worker_equals_one_process() -> None:
    problem = Problem()
    agreement = AgreementSettings(batch=8, outer=Sgd(learning_rate=0.3, momentum=0.9), staleness=None)
    stepped = run(agreement, problem, names="a")
    expected = train(problem, 8, EPOCHS, partial(torch.optim.SGD, lr=0.3, momentum=0.9))
    assert difference(stepped.server.weights.views(), expected) < 1e-10
    assert stepped.server.weights.counters == expected["num_batches_tracked"]


def test_epoch_average_is_the_mean_of_workers_weighted_by_samples() -> None:
    problem = Problem()
    stepped = run(average(batch=4), problem, num_epochs=1, rate=0.3)
    states, weights, tracked = [], [], 0
    for name, hand in stepped.hands.items():
        lease = next(answer.lease for answer in hand.answers if answer.lease)
        alone = NumpyEngine(problem, 4, rate=0.3)
        state = problem.start.copy()
        alone.local_steps(lease, state)
        states.append(state.floats[0])
        weights.append(stepped.server.workers[name].totals.num_samples)
        tracked += int(state.counters[0])
    assert sum(weights) == problem.num_samples
    assert len(set(weights)) == 3
    np.testing.assert_allclose(
        stepped.server.weights.floats[0], np.average(states, axis=0, weights=weights), rtol=0, atol=1e-12
    )
    assert stepped.server.weights.counters == tracked == sum(-(-n // 4) for n in weights)


def test_float32_workers_equal_one_process_within_precision() -> None:
    problem = Problem(dtype="float32")
    stepped = run(synchronous(batch=BATCH, outer=Sgd(learning_rate=0.3)), problem)
    expected = train(problem, BATCH, EPOCHS, partial(torch.optim.SGD, lr=0.3))
    assert difference(stepped.server.weights.views(), expected) < 1e-5


def test_comparison_detects_an_unweighted_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(out: Flat, sources: Sequence[Flat], weights: Sequence[float], cores: ThreadPool) -> Merging:
        return Merging(out, sources, [1.0] * len(weights), cores)

    monkeypatch.setattr("evener.agreements.aggregator.Merging", unweighted)
    problem = Problem()
    stepped = run(synchronous(batch=BATCH, outer=Sgd(learning_rate=0.3)), problem)
    expected = train(problem, BATCH, EPOCHS, partial(torch.optim.SGD, lr=0.3))
    assert difference(stepped.server.weights.views(), expected) > 1e-4
