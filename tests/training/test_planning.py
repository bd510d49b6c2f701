"""The plan of a run: the first strategy unless another is much faster, predicted where that can be known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.errors import DoesNotFit
from evener.records.plan import Assignment, Plan
from evener.records.record import TrainRecord
from evener.records.schema import read_noun, write_noun
from evener.report.bars import plan_figure
from evener.report.html import write_page
from evener.training.planning import MIN_GAIN, choose, those_of_one_process, why_divided
from support.commands import TINY
from support.refusals import refused

NAMES = ["data", "sharded", "pipeline"]


def estimate(strategy: str, seconds: float, accumulate: int = 1) -> Any:
    return SimpleNamespace(strategy=strategy, step_seconds=seconds, accumulate=accumulate)


@pytest.mark.parametrize(
    ("estimates", "chosen"),
    [
        ([], "data"),
        ([estimate("data", 1.0), estimate("sharded", 2.0)], "data"),
        ([estimate("sharded", 1.0), estimate("data", MIN_GAIN)], "data"),
        ([estimate("sharded", 1.0), estimate("data", MIN_GAIN + 0.01)], "sharded"),
        ([estimate("pipeline", 1.0), estimate("sharded", 1.1), estimate("serial", 9.0)], "pipeline"),
        ([estimate("data", 0.5, accumulate=2), estimate("sharded", 1.0)], "sharded"),
    ],
    ids=["no prices", "slower", "not much faster", "much faster", "the fastest", "whole models fit only in parts"],
)
def test_first_strategy_is_chosen_unless_another_is_much_faster(estimates: list[Any], chosen: str) -> None:
    assert choose(NAMES, "", estimates) == chosen


def test_model_too_large_for_any_node_becomes_a_pipeline_if_allowed() -> None:
    assert choose(NAMES, "node-1: too large", []) == "pipeline"
    with refused(DoesNotFit):
        choose(["data"], "node-1: too large", [])


@pytest.mark.parametrize(
    ("chosen", "misfit", "estimates", "reason"),
    [
        ("pipeline", "", [estimate("pipeline", 1.0), estimate("serial", 1.5)], "pipeline is predicted to be 1.50"),
        ("pipeline", "node-1: too large", [], "node-1: too large"),
        ("sharded", "", [estimate("data", 0.5, accumulate=2), estimate("sharded", 1.0)], "do not fit the memory"),
    ],
)
def test_plan_explains_why_a_model_is_divided(chosen: str, misfit: str, estimates: list[Any], reason: str) -> None:
    [rejected] = why_divided(NAMES, chosen, misfit, estimates)
    assert rejected.what == "data"
    assert reason in rejected.reason


def test_plan_explains_no_division_of_whole_or_pipelined_models() -> None:
    assert why_divided(NAMES, "data", "", [estimate("data", 1.0)]) == ()
    assert why_divided(["pipeline"], "pipeline", "", []) == ()


def test_auto_excludes_pipelines_for_models_with_batch_norm() -> None:
    names = ["data", "filter", "pipeline", "data+pipeline"]
    normalised = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert those_of_one_process(names, normalised) == ["data", "filter"]
    assert those_of_one_process(names, nn.Linear(2, 2)) == names
    assert those_of_one_process(["pipeline"], normalised) == ["pipeline"]


def staged(strategy: str, nodes: str, folder: Path, shares: str = "measured") -> TrainRecord:
    """The record of a run of `tiny`."""
    config = RunConfig(task=TINY, strategy=strategy, shares=shares, precision="fp64", local_nodes=nodes, output=folder)
    perform(config)
    return read_noun(folder / "record.json", TrainRecord)


@pytest.mark.slow
def test_pipeline_predicts_its_sent_bytes_before_the_first_step(tmp_path: Path) -> None:
    record = staged("pipeline", "1,1", tmp_path / "run")
    said = record.plan.prediction
    assert said is not None
    assert said.sent_bytes == pytest.approx(max(node.sent_bytes for node in record.steps[1].nodes), abs=1)
    parts = said.compute_seconds + said.communication_seconds + said.waiting_seconds
    assert said.step_seconds == pytest.approx(parts)
    assert said.communication_seconds > 0


TIED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.between, self.write = nn.Embedding(40, 6), nn.Linear(6, 6), nn.Linear(6, 40, bias=False)
        self.write.weight = self.read.weight

    def forward(self, x):
        return self.write(torch.tanh(self.between(self.read(x))))

words = torch.arange(64) % 40
task = Task(model=Words, loss=nn.functional.cross_entropy, train_data=lambda: TensorDataset(words, words.flip(0)),
            batch_size=16)
"""


CLIPPED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def model():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3))

draw = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 3, 6, 6, generator=draw), torch.randint(0, 3, (48,), generator=draw))
task = Task(model=model, loss=nn.functional.cross_entropy, train_data=lambda: data, batch_size=16{clipped})
"""


@pytest.mark.parametrize("nodes", ["1,1", pytest.param("1,1,1", marks=pytest.mark.slow)])
def test_pipeline_predicts_the_bytes_of_tied_weights(tmp_path: Path, nodes: str) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    folder = tmp_path / "run"
    perform(
        RunConfig(task=str(tmp_path / "tied.py"), strategy="pipeline", local_nodes=nodes, output=folder), quiet=True
    )
    record = read_noun(folder / "record.json", TrainRecord)
    assert record.plan.prediction is not None
    sent = max(node.sent_bytes for node in record.steps[1].nodes)
    assert sent > 40 * 6 * 4
    assert record.plan.prediction.sent_bytes == pytest.approx(sent, abs=1)


@pytest.mark.parametrize("strategy", ["filter", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_bytes_of_clipped_norms_are_predicted(tmp_path: Path, strategy: str) -> None:
    sent = []
    for name, clipped in (("plain", ""), ("clipped", ", clip_norm=0.5")):
        (tmp_path / f"{name}.py").write_text(CLIPPED.format(clipped=clipped))
        folder, task = tmp_path / name, str(tmp_path / f"{name}.py")
        shares = "measured" if strategy == "pipeline" else "equal"  # of stages, which follow the layers
        config = RunConfig(task=task, strategy=strategy, shares=shares, local_nodes="1,1", output=folder)
        perform(config, quiet=True)
        record = read_noun(folder / "record.json", TrainRecord)
        assert record.plan.prediction is not None
        sent.append(max(node.sent_bytes for node in record.steps[1].nodes))
        assert record.plan.prediction.sent_bytes == pytest.approx(sent[-1], abs=1)
    assert sent[1] == sent[0] + 8


@pytest.mark.slow
def test_replicas_with_different_cuts_predict_nothing(tmp_path: Path) -> None:
    assert staged("data+pipeline", "1,1,1", tmp_path / "run", "equal").plan.prediction is None


def test_untimed_node_has_no_predicted_seconds_in_plan_and_figure(tmp_path: Path) -> None:
    perform(RunConfig(task=TINY, output=tmp_path / "run"))
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    [assignment] = read_noun(tmp_path / "run" / "plan.json", Plan).assignments
    assert (assignment.sample_seconds, assignment.fixed_seconds, record.plan.prediction) == (0.0, 0.0, None)
    assert [axes.get_xlabel() for axes in plan_figure(record.plan).axes] == ["samples"]
    write_page(tmp_path / "page.html", {"alone": record}, title="alone")
    assert "Nothing to compare: the plan holds no prediction" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_plan_without_seconds_is_followed_by_its_samples(tmp_path: Path) -> None:
    parts = [Assignment(rank=rank, node=f"node-{rank}", device="cpu", samples=n) for rank, n in enumerate((7, 3))]
    write_noun(Plan(strategy="data", batch_size=10, assignments=tuple(parts)), tmp_path / "plan.json")
    perform(RunConfig(task=TINY, plan=tmp_path / "plan.json", epochs=1, local_nodes="1,1", output=tmp_path / "run"))
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    assert [node.samples for node in record.steps[0].nodes] == [7, 3]
    assert record.plan.prediction is not None
