"""Federated averaging is what its definition says: data that stay, a sample of workers a round, means by samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evener.agreements.messages import Lease, positions
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import Workload, federated
from evener.data.shares import class_balanced_shares, order_of_parts
from evener.records.errors import InvalidValue
from support.numpy_engine import NumpyEngine, Problem
from support.refusals import refused
from support.stepped_server import SteppedServer, run_stepped

SIZES = {"a": 53, "b": 30, "c": 13}
BATCH, RATE = 8, 0.3


class KeepingEngine(NumpyEngine):
    """An engine whose samples are those of its part."""

    def __init__(self, problem: Problem, parts: list[NDArray[np.int64]]) -> None:
        super().__init__(problem, BATCH, RATE)
        self._parts, self.rounds = parts, list[int]()

    def _samples(self, lease: Lease) -> NDArray[Any]:
        self.rounds.append(lease.samples.epoch)
        return order_of_parts(self._parts, self._problem.seed, lease.samples.epoch)[positions(lease.samples)]


def workload(problem: Problem, rounds: int) -> Workload:
    return Workload(num_samples=problem.num_samples, num_epochs=rounds, seed=problem.seed, parts=tuple(SIZES.items()))


def run(problem: Problem, fraction: float, rounds: int) -> tuple[SteppedServer, dict[str, KeepingEngine]]:
    agreement = federated(batch=BATCH, fraction=fraction)
    parts = class_balanced_shares(problem.labels, list(SIZES.values()), problem.seed)
    engines = {name: KeepingEngine(problem, parts) for name in SIZES}
    server = ParameterServer(agreement, workload(problem, rounds), problem.start.copy(), quorum=len(SIZES))
    return run_stepped(server, agreement, engines, {"a": 1.0, "b": 2.3, "c": 9.0}), engines


def defined(problem: Problem, drawn: list[list[str]]) -> NDArray[Any]:
    """w <- sum n_k w_k / sum n_k over the drawn, each from w over its own part in batches, as a plain loop."""
    parts = dict(zip(SIZES, class_balanced_shares(problem.labels, list(SIZES.values()), problem.seed), strict=True))
    common = problem.start.copy()
    for number, names in enumerate(drawn):
        found = []
        for name in names:
            alone = NumpyEngine(problem, BATCH, RATE)
            alone.load(common)
            draw = np.random.default_rng([problem.seed, number, list(SIZES).index(name)])
            own = draw.permutation(parts[name])
            for first in range(0, len(own), BATCH):
                _, gradients = alone._step(own[first : first + BATCH])
                for key, gradient in gradients.items():
                    alone.state.views()[key] -= RATE * gradient
            found.append(alone.state.floats[0].copy())
        common.floats[0][...] = np.average(found, axis=0, weights=[SIZES[name] for name in names])
    return common.floats[0]


@pytest.mark.parametrize(("fraction", "most"), [(1.0, 3), (0.67, 2), (0.1, 1)])
def test_federated_weights_match_their_definition(fraction: float, most: int) -> None:
    problem = Problem()
    stepped, engines = run(problem, fraction, rounds=6)
    drawn = [[name for name in SIZES if number in engines[name].rounds] for number in range(6)]
    assert [len(names) for names in drawn] == [most] * 6
    assert most == 3 or len({tuple(names) for names in drawn}) > 1, "other workers are drawn in other rounds"
    np.testing.assert_allclose(stepped.server.weights.floats[0], defined(problem, drawn), rtol=0, atol=1e-12)
    used = {name: len(engines[name].rounds) * size for name, size in SIZES.items()}
    assert {name: one.totals.num_samples for name, one in stepped.server.workers.items()} == used


def test_data_of_a_lost_worker_stay_unused() -> None:
    problem, agreement = Problem(), federated(batch=BATCH)
    parts = class_balanced_shares(problem.labels, list(SIZES.values()), problem.seed)
    stepped = SteppedServer(ParameterServer(agreement, workload(problem, 4), problem.start.copy(), quorum=1), agreement)
    engines = {name: KeepingEngine(problem, parts) for name in (*SIZES, "late")}
    for name, engine in engines.items():
        stepped.join(name, engine)
    stepped.lose("b")
    stepped.run()
    assert engines["late"].rounds == []
    assert stepped.server.is_over
    assert sum(one.totals.num_samples for one in stepped.server.workers.values()) < 4 * (SIZES["a"] + SIZES["c"]) + 1


def test_resumed_server_repeats_the_open_round() -> None:
    problem, agreement = Problem(), federated(batch=BATCH)
    server = ParameterServer(agreement, workload(problem, 5), problem.start.copy(), quorum=3)
    for name in SIZES:
        server.admit(name)
    assert server.snapshot().state.cursor.epoch == 0
    again = ParameterServer.resume(server.snapshot(), first_number=100)
    replies = [reply for name in SIZES for reply in again.admit(name).replies]
    assert {reply.answer.lease.samples.epoch for reply in replies if reply.answer.lease} == {0}


@pytest.mark.parametrize("parts", [(("a", 50), ("b", 45)), (("a", 96), ("b", 0)), (("a", 48), ("a", 48))])
def test_parts_must_have_distinct_workers_and_cover_the_data(parts: tuple[tuple[str, int], ...]) -> None:
    with refused(InvalidValue):
        Workload(num_samples=96, num_epochs=1, parts=parts)
