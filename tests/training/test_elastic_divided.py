"""A divided model's run loses nodes, gets others, and trains what one process trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from evener.records.errors import DoesNotFit
from evener.training.checkpoint import Checkpoints
from evener.training.elastic.divided import DividedElasticLoop
from support.elastic_threads import ElasticThreads, Fault, Outcome, serial_weights, settings

Serial = Callable[[bool], dict[str, Tensor]]


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Serial:
    """(has BatchNorm) -> the weights of one process."""

    @cache
    def of(norm: bool) -> dict[str, Tensor]:
        return serial_weights(settings(tmp_path_factory.mktemp("serial"), norm=norm))

    return of


def require_exact(outcome: Outcome, serial: dict[str, Tensor]) -> None:
    """Weights and statistics are those of one process, and the record counts every sample of three epochs once."""
    assert outcome.weights.keys() == serial.keys()
    assert max(float((outcome.weights[name] - serial[name]).abs().max()) for name in serial) < 1e-10
    assert sum(step.samples for step in outcome.history.steps()) == 180
    assert len(outcome.history.validations) == 3


def told(outcome: Outcome, kind: str) -> list[str]:
    """What the record says of such events."""
    return [event.message for event in outcome.history.events if event.kind == kind]


def test_step_known_as_complete_by_one_rank_completes_on_all(tmp_path: Path, serial: Serial) -> None:
    faults = [Fault(node=1, step=5, place="between"), Fault(node=2, step=9)]
    outcome = ElasticThreads(settings(tmp_path), "data+filter", [[0, 1], [2, 3]], faults).run()
    require_exact(outcome, serial(True))
    first, second = told(outcome, "node lost")
    assert first.startswith("n1 was killed; 3 nodes of 4 go on with step 6, ")
    assert second.startswith("n2 was killed; 2 nodes of 4 go on with step 9, ")
    assert "again" not in first + second


def test_lone_pipeline_returns_to_the_step_of_its_last_copies(tmp_path: Path, serial: Serial) -> None:
    config = settings(tmp_path, strategy="pipeline", micro_batches=1)
    outcome = ElasticThreads(config, "pipeline", [[0, 1, 2]], [Fault(node=0, step=8, returns=True)]).run()
    require_exact(outcome, serial(True))
    assert "2 nodes of 3 go on with step 2, " in told(outcome, "node lost")[0]
    assert re.search("; [67] steps to be done again$", told(outcome, "node lost")[0])  # others had ended step 8
    assert told(outcome, "joined") == ["n0 came; 3 nodes of 3 go on"]
    assert "each node's part is copied into the next node's memory" in told(outcome, "copies")[-1]


@pytest.mark.parametrize(
    ("strategy", "rows", "more"),
    [
        ("data+filter", [[0, 1], [2]], {}),
        pytest.param("pipeline", [[0, 1, 2]], {"micro_batches": 1}, marks=pytest.mark.slow),
    ],
)
def test_new_node_takes_the_place_of_a_lost_one(
    tmp_path: Path, serial: Serial, strategy: str, rows: list[list[int]], more: dict[str, Any]
) -> None:
    faults = [Fault(node=1, step=6, returns=True, by="new"), Fault(node=0, step=12)]
    outcome = ElasticThreads(settings(tmp_path, strategy=strategy, **more), strategy, rows, faults).run()
    require_exact(outcome, serial(True))
    assert told(outcome, "joined") == ["new came; 3 nodes of 4 go on"]
    assert told(outcome, "node lost")[1].startswith("n0 was killed; 2 nodes of 4 go on with step ")
    assert set(outcome.nodes) == {"n2", "new"}
    assert len(outcome.history.totals) == 4
    assert all(work.samples > 0 for work in outcome.history.totals.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rows", "faults", "norm"),
    [
        ("data+pipeline", [[0, 1], [2, 3]], [Fault(node=2, step=5), Fault(node=1, step=9, place="update")], False),
        ("data+pipeline", [[0, 1], [2]], [Fault(node=2, step=5, returns=True)], False),
        ("data+filter", [[0, 1], [2]], [Fault(node=0, step=6, place="update", returns=True)], True),
        ("data+spatial", [[0, 1], [2]], [Fault(node=1, step=7, returns=True)], True),
        ("data+channel", [[0, 1], [2]], [Fault(node=2, step=7)], True),
        ("sharded", [[0, 1, 2]], [Fault(node=2, step=7)], True),
        ("filter", [[0, 1]], [Fault(node=0, step=8)], True),
        ("pipeline", [[0, 1, 2]], [Fault(node=1, step=5), Fault(node=2, step=7)], True),
    ],
)
def test_every_division_continues_and_equals_one_process(
    tmp_path: Path, serial: Serial, strategy: str, rows: list[list[int]], faults: list[Fault], norm: bool
) -> None:
    more = {"strategy": strategy, "micro_batches": 1} if strategy.endswith("pipeline") else {}
    require_exact(ElasticThreads(settings(tmp_path, norm=norm, **more), strategy, rows, faults).run(), serial(norm))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keeps", "sentence"),
    [
        (True, r"2 nodes of 3 are left.*stage 0 needs 3 GB.*the whole state after step 4 is"),
        (
            False,
            r"2 nodes of 3 are left.*stage 0 needs 3 GB.*its weights after step 4 are what remains: train again",
        ),
    ],
    ids=["here", "on the nodes of a master"],
)
def test_state_is_saved_if_the_model_no_longer_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, sentence: str
) -> None:
    def no_room(*_: object) -> None:
        raise DoesNotFit("stage 0 needs 3 GB, and node n0 has 2 GB")

    config = settings(tmp_path, keeps_checkpoints=keeps)
    run = ElasticThreads(config, "data+filter", [[0, 1], [2]], [Fault(node=1, step=5)])
    built = DividedElasticLoop._planned
    monkeypatch.setattr(
        DividedElasticLoop, "_planned", lambda loop, among: built(loop, among) if len(among.nodes) == 3 else no_room()
    )
    with pytest.raises(DoesNotFit, match=sentence):
        run.run()
    if keeps:
        assert Checkpoints(tmp_path / "checkpoints").latest()[1].step == 4
    else:
        assert not (tmp_path / "checkpoints").exists()
        assert "0.weight" in load_file(tmp_path / "model.safetensors")
