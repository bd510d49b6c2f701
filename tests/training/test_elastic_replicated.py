"""A rank that comes is given the state while the others train, and the run trains what one process trains."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from evener.comm.group import Group
from evener.comm.mesh import Mesh
from evener.config.run_config import RunConfig
from evener.membership.side_channel import SideChannel
from evener.records.errors import NodeLost
from evener.training.elastic import replicated
from evener.training.elastic.state_transfer import send_state
from support.elastic_threads import ElasticThreads, Fault, Outcome, serial_weights, settings


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    """Of this process alone, as every rank of an elastic run has one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(epochs) -> the weights of one process."""

    @cache
    def of(epochs: int) -> dict[str, Tensor]:
        return serial_weights(of_epochs(tmp_path_factory.mktemp("serial"), epochs))

    return of


def of_epochs(folder: Path, epochs: int) -> RunConfig:
    """A run of eighteen steps."""
    option = {"samples": str(180 // epochs), "schedule": "true", "norm": "true"}
    return settings(folder, option=option, epochs=epochs)


def require_exact(outcome: Outcome, serial: dict[str, Tensor]) -> None:
    """Weights and statistics are those of one process, and the record counts every sample once."""
    assert max(float((outcome.weights[name] - serial[name]).abs().max()) for name in serial) < 1e-10
    assert sum(step.samples for step in outcome.history.steps()) == 180
    assert len(outcome.history.validations) == outcome.history.epoch + 1


def steps_of(outcome: Outcome, kind: str) -> list[int]:
    """After which steps this happened."""
    return [event.step for event in outcome.history.events if event.kind == kind]


def slow(monkeypatch: pytest.MonkeyPatch, run: ElasticThreads, steps: int) -> None:
    """Let the state travel until `steps` more have been made, unless nobody makes any for half a second."""

    def send_slowly(held: Any, mesh: Any, rank: int) -> None:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not any(
            life.last_step >= held.head.step + steps for life in run._lives.values()
        ):
            time.sleep(0.001)
        send_state(held, mesh, rank)

    monkeypatch.setattr(replicated, "send_state", send_slowly)


def test_training_continues_during_a_state_transfer_and_rank_catches_up(
    tmp_path: Path, serial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ElasticThreads(of_epochs(tmp_path, 1), "data", [[0], [1]], [Fault(node=1, step=2, returns=True)])
    slow(monkeypatch, run, 3)
    outcome = run.run()
    require_exact(outcome, serial(1))
    (came,), (caught_up,) = steps_of(outcome, "joined"), steps_of(outcome, "caught up")
    assert caught_up - came >= 3
    samples = {step.step: step.nodes[1].samples for step in outcome.history.steps()}
    assert not any(samples[step] for step in range(came + 1, caught_up + 3))
    assert samples[caught_up + 3] > 0


def test_joining_rank_has_the_counters_of_the_optimizer(tmp_path: Path) -> None:
    option = {"samples": "60", "norm": "true", "counted": "true"}
    expected = serial_weights(settings(tmp_path / "serial", option=option))
    run = ElasticThreads(
        settings(tmp_path / "elastic", option=option), "data", [[0], [1]], [Fault(node=1, step=4, returns=True)]
    )
    require_exact(run.run(), expected)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault(node=1, step=2, returns=True), Fault(node=0, step=8)], id="the giver is killed"),
        pytest.param([Fault(node=1, step=2, returns=True), Fault(node=3, step=8)], id="the taker is killed"),
        pytest.param([Fault(node=1, step=2, returns=True), Fault(node=2, step=3, returns=True)], id="two come"),
        pytest.param([Fault(node=1, step=2, returns=True), Fault(node=2, step=4, returns=True)], id="another comes"),
        pytest.param([Fault(node=0, step=5, place="late"), Fault(node=2, step=5, place="torn")], id="one lags"),
    ],
)
def test_run_equals_one_process_despite_losses_during_a_join(
    tmp_path: Path, serial: Any, monkeypatch: pytest.MonkeyPatch, faults: list[Fault], epochs: int
) -> None:
    run = ElasticThreads(of_epochs(tmp_path, epochs), "data", [[0], [1], [2]], faults)
    slow(monkeypatch, run, 5)
    require_exact(run.run(), serial(epochs))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault(node=1, step=2, returns=True), Fault(node=0, step=8)], id="two go, one comes"),
        pytest.param([Fault(node=0, step=5, place="late"), Fault(node=2, step=5, place="torn")], id="one lags"),
    ],
)
def test_run_with_sums_divided_by_lines_equals_one_process(
    tmp_path: Path, serial: Any, monkeypatch: pytest.MonkeyPatch, faults: list[Fault]
) -> None:
    begun = Counter[int]()
    original = Group._begin_uneven_all_reduce

    def counted(group: Group, tensor: Tensor, kind: str) -> Any:
        begun[group.size] += 1
        return original(group, tensor, kind)

    monkeypatch.setattr(Group, "_begin_uneven_all_reduce", counted)
    rates = [3e8, 2e8, 2e7, 3e8]
    run = ElasticThreads(of_epochs(tmp_path, 1), "data", [[0], [1], [2], [3]], faults, rates)
    require_exact(run.run(), serial(1))
    assert begun[4] > 0
    assert begun[3] > 0 or faults[0].place == "late"  # in which two go at once


def test_stored_gradients_stay_within_the_memory_bound(
    tmp_path: Path, serial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "_KEPT_BYTES", 0)
    monkeypatch.setattr(replicated, "_FEWEST_KEPT", 2)
    run = ElasticThreads(of_epochs(tmp_path, 1), "data", [[0], [1]], [Fault(node=1, step=2, returns=True)])
    slow(monkeypatch, run, 5)
    outcome = run.run()
    require_exact(outcome, serial(1))
    assert steps_of(outcome, "caught up")[0] - steps_of(outcome, "joined")[0] <= 4


def test_state_may_come_before_its_taker_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the transfer may run to its end before the constructor goes on, on a busy machine."""
    monkeypatch.setattr(replicated, "take_state", lambda *_: "state")
    channels: list[SideChannel] = []

    class Ranks:
        def side_channel(self, _first: int, _second: int, work: Callable[[Mesh, SideChannel], None]) -> SideChannel:
            channels.append(SideChannel(lambda: NoMesh(), work))  # type: ignore[arg-type,return-value]
            channels[0].wait_for(lambda: channels[0].error is not None)
            return channels[0]

    class NoMesh:
        def receive_from(self, _: int) -> bytes:
            raise NodeLost("the giver is gone")

        def close(self) -> None:
            """Close nothing."""

    taker = replicated.Taker(Ranks(), 0, 1, None)  # type: ignore[arg-type]
    assert isinstance(channels[0].error, NodeLost)
    assert taker.has_come
