"""`evener train` as a user runs it: results, resuming, and independence of the number of nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.errors import NonFiniteLoss
from evener.records.plan import Plan
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.commands import TINY, evener_here, last_json
from support.refusals import refused


def train(tmp_path: Path, name: str, speeds: str = "1", **words: Any) -> dict[str, torch.Tensor]:
    """The weights after training `tiny` in float64 on nodes of these speeds."""
    base = {
        "task": TINY,
        "precision": "fp64",
        "seed": 3,
        "local_nodes": speeds,
        "output": tmp_path / name,
        "check": False,
    }
    perform(RunConfig(**{**base, **words}))
    return load_file(tmp_path / name / "model.safetensors")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def test_one_process_learns_and_prints_the_documented_keys(tmp_path: Path) -> None:
    summary: dict[str, Any] = last_json(evener_here("train", TINY, "--epochs", "6", "--json", cwd=tmp_path))
    assert summary["validation_accuracy"] > 0.6
    assert summary["final_loss"] < 1.0
    assert summary["seconds"] > 0
    assert summary["samples_per_second"] > 0
    [node] = summary["nodes"]
    assert node["share"] == 1
    assert node["bytes_sent"] == 0
    assert {"name", "share", "seconds_computing", "seconds_waiting", "bytes_sent"} <= node.keys()
    [folder] = (tmp_path / "runs").iterdir()
    assert {"record.json", "plan.json", "model.safetensors", "checkpoints"} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        pytest.param("1.0,0.5", "measured", marks=pytest.mark.slow),
        ("1,1,1", "7,2,1"),
        pytest.param("1,1", "1,0", marks=pytest.mark.slow),
        pytest.param("1,1", "equal", marks=pytest.mark.slow),
    ],
)
def test_weights_do_not_depend_on_the_nodes(tmp_path: Path, speeds: str, shares: str) -> None:
    assert distance(train(tmp_path, "alone"), train(tmp_path, "nodes", speeds, shares=shares)) < 1e-10


COINS = """
import random
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from evener import Task

class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * (1 + random.random() + float(np.random.rand()))) if self.training else self.layer(x)

def data() -> TensorDataset:
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1].sin())

def task() -> Task:
    return Task(name="coins", model=Scaled, loss=nn.functional.mse_loss, train_data=data, batch_size=8, epochs=1)
"""


def test_numbers_for_the_whole_batch_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "coins.py").write_text(COINS)
    words: dict[str, Any] = {"task": str(tmp_path / "coins.py"), "check": True}
    assert distance(train(tmp_path, "alone", **words), train(tmp_path, "nodes", "1,1", shares="3,1", **words)) < 1e-10


@pytest.mark.slow
def test_accumulated_micro_batches_equal_one_process(tmp_path: Path) -> None:
    alone = train(tmp_path, "alone", accumulate=3)
    assert distance(alone, train(tmp_path, "nodes", "1,1", shares="2,1", accumulate=3)) < 1e-10
    assert distance(alone, train(tmp_path, "whole")) > 1e-6


@pytest.mark.slow
def test_resumed_run_on_other_nodes_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options = {"schedule": "true"}
    straight = train(tmp_path, "straight", "1,1", option=options)
    with refused(NonFiniteLoss) as failure:
        train(tmp_path, "b", option={**options, "explode_at": "8"}, checkpoint_every="3")
    assert (failure.value.node, failure.value.step) == ("node-0", 8)
    assert sorted(p.name for p in (tmp_path / "b" / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]
    kept = tmp_path / "b" / "checkpoints"
    resumed = train(tmp_path, "on", "1,1,1", shares="1,3,2", option=options, checkpoint=kept, resume=True)
    assert distance(straight, resumed) < 1e-10


@pytest.mark.slow
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_used(tmp_path: Path) -> None:
    straight = train(tmp_path, "straight", "1,1", epochs=3)
    train(tmp_path, "two", "1,1", epochs=2)
    kept = tmp_path / "two" / "checkpoints"
    newest = max(kept.iterdir())
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"damaged!")
    resumed = train(tmp_path, "on", "1,1,1", shares="1,3,2", epochs=3, checkpoint=kept, resume=True)
    assert distance(straight, resumed) < 1e-10
    events = read_noun(tmp_path / "on" / "record.json", TrainRecord).events
    [event] = [one for one in events if one.kind == "damaged checkpoint"]
    assert event.message == f"it is called {kept}/damaged-{newest.name} now"


@pytest.mark.slow
def test_checkpoints_are_written_at_a_time_interval(tmp_path: Path) -> None:
    train(tmp_path, "run", "1,1", epochs=1, option={"pause": "0.2", "samples": "100"}, checkpoint_every="1s")
    events = read_noun(tmp_path / "run" / "record.json", TrainRecord).events
    steps = [one.step for one in events if one.kind == "checkpoint"]
    assert steps[-1] == 10
    assert 1 < len(steps) < 5


def test_record_describes_the_run(tmp_path: Path) -> None:
    train(tmp_path, "run", "1.0,0.5", shares="2,1")
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    plan = read_noun(tmp_path / "run" / "plan.json", Plan)
    assert record.plan == plan
    assert [a.node for a in plan.assignments] == ["node-0", "node-1"]
    assert sum(step.samples for step in record.steps) == 2 * 50
    assert [v.epoch for v in record.validations] == [0, 1]
    assert record.options["--shares"] == "2,1"
    assert all(node.memory_bytes > 0 and node.cpu_seconds > 0 for node in record.steps[-1].nodes)
    assert sum(node.share for node in record.nodes) == pytest.approx(1)
    assert record.nodes[0].bytes_sent > 0
    assert record.environment["torch"].startswith("2.")
    step = record.steps[-1]
    assert sum(node.samples for node in step.nodes) == step.samples
    assert all(node.compute_seconds > 0 for node in step.nodes)


@pytest.mark.parametrize(
    ("speeds", "accumulate"),
    [("1,1", 2), *(pytest.param(speeds, 1, marks=pytest.mark.slow) for speeds in ("1,1", "1,1,1"))],
)
def test_sent_bytes_equal_the_prediction(tmp_path: Path, speeds: str, accumulate: int) -> None:
    train(tmp_path, "run", speeds, shares="equal", accumulate=accumulate)
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    assert record.plan.prediction is not None
    assert record.plan.prediction.sent_bytes > 0
    for step in record.steps[1:]:
        assert {node.sent_bytes for node in step.nodes} <= {
            record.plan.prediction.sent_bytes,
            record.plan.prediction.sent_bytes + 1,
            record.plan.prediction.sent_bytes - 1,
        }


@pytest.mark.slow
def test_stationary_data_of_all_nodes_are_used(tmp_path: Path) -> None:
    train(tmp_path, "s", "1,1", stationary=True, shares="3,1", epochs=6)
    record = read_noun(tmp_path / "s" / "record.json", TrainRecord)
    assert (record.validation_accuracy or 0) > 0.6
    assert [node.share for node in record.nodes] == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_reduced_precision_learns(tmp_path: Path, precision: str) -> None:
    train(tmp_path, "r", "1,1", precision=precision, epochs=8)
    assert (read_noun(tmp_path / "r" / "record.json", TrainRecord).validation_accuracy or 0) > 0.6


@pytest.mark.slow
def test_torchrun_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    alone = train(tmp_path, "alone")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [
        "-m",
        "evener",
        "train",
        TINY,
        "--precision",
        "fp64",
        "--seed",
        "3",
        "--output",
        "ranks",
        "--shares",
        "2,1",
        "--json",
    ]
    result = subprocess.run([*launcher, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    summary = last_json(result)
    assert [node["share"] for node in summary["nodes"]] == pytest.approx([2 / 3, 1 / 3], abs=0.05)
    assert distance(alone, load_file(tmp_path / "ranks" / "model.safetensors")) < 1e-10


@pytest.mark.slow
def test_compiled_model_gives_the_same_weights(tmp_path: Path) -> None:
    compiled = train(tmp_path, "compiled", "1,1", shares="2,1", compile=True)
    assert distance(train(tmp_path, "eager"), compiled) < 1e-10


def test_unwatched_run_continues_to_its_last_epoch(tmp_path: Path) -> None:
    result = evener_here("train", TINY, "--epochs", "3", "--output", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    assert [validation.epoch for validation in record.validations] == [0, 1, 2]
