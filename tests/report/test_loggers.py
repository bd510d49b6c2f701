"""Loggers for services, against their real packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.records.events import RunEvent
from evener.records.plan import Assignment, Plan
from evener.report.loggers import MLflow, Wandb
from evener.report.scalars import ScalarLog
from support.fake_runs import fake_run

PLAN = Plan(
    strategy="data",
    batch_size=3,
    assignments=tuple(
        Assignment(rank=rank, node=name, device="cpu", samples=1) for rank, name in enumerate(("ada", "bob", "cleo"))
    ),
)


def events() -> list[RunEvent]:
    run = fake_run(num_steps=3)
    return [PLAN, *run.steps, run.validations[0]]


@pytest.fixture
def wandb() -> Iterator[Any]:
    module: Any = pytest.importorskip("wandb")
    yield module
    module.teardown()  # its process


def test_wandb_receives_steps_and_plan(tmp_path: Path, wandb: Any) -> None:
    log = ScalarLog(Wandb(mode="offline", dir=str(tmp_path), project="evener", config={"own": 1}))
    for event in events():
        log(event)
    assert dict(wandb.run.config) == {"strategy": "data", "batch_size": 3, "nodes": "ada 1, bob 1, cleo 1", "own": 1}
    assert wandb.run.summary["loss/train"] == pytest.approx(fake_run(num_steps=3).steps[-1].loss)
    log.close()
    log.close()
    assert wandb.run is None
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow_receives_steps_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a data base needs more than mlflow-skinny
    uri = tmp_path.joinpath("mlruns").as_uri()
    log = ScalarLog(MLflow(uri, experiment="digits", run_name="one"))
    for event in events():
        log(event)
    log.close()
    log.close()
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"strategy": "data", "batch_size": "3", "nodes": "ada 1, bob 1, cleo 1"}
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    expected = [step.loss for step in fake_run(num_steps=3).steps]
    assert [(one.step, one.value) for one in losses] == list(zip([1, 2, 3], expected, strict=True))
    assert run.data.metrics["loss/validation"] > 0
