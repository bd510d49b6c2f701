"""A node whose memory does not hold the model is left out with its reason, where the other nodes hold it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.errors import DoesNotFit, EvenerError, NotNeeded
from evener.records.plan import Plan
from evener.records.profile import TaskTiming
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.training import costs
from evener.training.costs import MeasuredCosts, measure_costs
from evener.training.elastic.start import time_to_come
from support.commands import TINY
from support.refusals import refused

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("speeds", "memory", "words"),
    [
        ("1,1", "4GB,1KB", {}),
        pytest.param("1,1", "1KB,4GB", {"shares": "1,3"}, marks=pytest.mark.slow),
        pytest.param("1,1,1", "4GB,1KB,4GB", {"shares": "equal"}, marks=pytest.mark.slow),
        pytest.param("1,1,1", "4GB,4GB,1KB", {"strategy": "filter"}, marks=pytest.mark.slow),
        pytest.param(
            "1,1,1", "4GB,1KB,4GB", {"strategy": "pipeline", "option": {"norm": "false"}}, marks=pytest.mark.slow
        ),
        pytest.param("1,1", "1KB,4GB", {"strategy": "pipeline", "option": {"norm": "false"}}, marks=pytest.mark.slow),
    ],
    ids=["measured", "a share of its own", "equal shares", "filters are divided", "a pipeline", "a pipeline of two"],
)
def test_node_that_is_too_small_is_left_out_and_the_others_train(
    speeds: str, memory: str, words: dict[str, Any], tmp_path: Path
) -> None:
    config = RunConfig(task=TINY, epochs=1, local_nodes=speeds, memory=memory, output=tmp_path / "run", **words)
    perform(config, quiet=True)
    plan = read_noun(tmp_path / "run" / "plan.json", Plan)
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    small = f"node-{memory.split(',').index('1KB')}"
    out = {one.what: one.reason for one in plan.rejected}
    assert ("memory" if words.get("strategy") == "pipeline" else "1000") in out[small]
    assert small not in [node.name for node in record.nodes]
    assert sum(step.samples for step in record.steps) == 50
    if "shares" in words or "strategy" in words:
        others = [f"node-{number}" for number in range(len(speeds.split(",")))]
        assert [one.node for one in plan.assignments] == [name for name in others if name != small]


@pytest.mark.slow
def test_model_that_fits_no_node_or_pipeline_is_refused(tmp_path: Path) -> None:
    config = RunConfig(task=TINY, epochs=1, local_nodes="1,1", memory="1KB", output=tmp_path / "run")
    with pytest.raises(EvenerError) as error:
        perform(config, quiet=True)
    assert error.value.exit_code == DoesNotFit.exit_code


@pytest.mark.slow
def test_batch_too_large_for_the_nodes_is_refused(tmp_path: Path) -> None:
    config = RunConfig(
        task=TINY, epochs=1, local_nodes="1,1", memory="60KB,1KB", output=tmp_path / "run", strategy="data",
        batch_size=50,
    )  # fmt: skip
    with refused(EvenerError) as error:
        perform(config, quiet=True)
    assert error.value.exit_code == DoesNotFit.exit_code


def test_joining_node_that_is_too_small_is_refused() -> None:
    def time() -> None:
        raise DoesNotFit("not even one sample fits")

    with pytest.raises(NotNeeded):
        time_to_come(time)  # type: ignore[arg-type]


def test_nodes_are_timed_once_even_if_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[tuple[int, int]] = []

    def measure(_env: Any, _group: Any, timed: partial[TaskTiming], accumulate: int) -> MeasuredCosts:
        times.append((timed.args[1], accumulate))
        return MeasuredCosts()

    monkeypatch.setattr(costs, "measure_ranks", measure)
    context: Any = SimpleNamespace(measured={}, env=None, group=None)
    for micro in (8, 8, 4):
        measure_costs(context, micro)
    assert times == [(8, 1), (4, 1)]
