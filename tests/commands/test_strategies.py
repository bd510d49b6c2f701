"""`evener train --strategy`: whatever is divided, the weights are those of one process; checkpoints fit each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.errors import EvenerError, InvalidInput
from evener.records.plan import Assignment, Plan
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.training.planning import fit_plan, replica_rows
from support.commands import TINY, evener_here
from support.refusals import refused

TOLERANCE = 1e-10


def train(folder: Path, speeds: str = "1", **words: Any) -> dict[str, torch.Tensor]:
    """The weights after training `tiny` in float64 on nodes of these speeds."""
    base = {"task": TINY, "precision": "fp64", "seed": 3, "local_nodes": speeds, "output": folder, "check": False}
    perform(RunConfig(**{**base, **words}))
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return train(tmp_path_factory.mktemp("alone") / "run")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.parametrize(
    ("strategy", "speeds", "words"),
    [
        ("filter", "1,0.5", {}),
        pytest.param("channel", "1,1", {"shares": "3,1"}, marks=pytest.mark.slow),
        pytest.param("sharded", "1,1,1", {"shares": "5,3,2"}, marks=pytest.mark.slow),
        pytest.param(
            "sharded",
            "1,1",
            {"rematerialise": "always", "accumulate": 3, "shares": "1,2"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "spatial", "1,1", {"shares": "2,1"}, marks=pytest.mark.slow
        ),  # the reduced precision has a quick one
        pytest.param("data+sharded", "1,1,1", {"shares": "2,1,4", "replicas": "2,1"}, marks=pytest.mark.slow),
        pytest.param("data+spatial", "1,1,1", {"shares": "1,2,3"}, marks=pytest.mark.slow),
        pytest.param(
            "data+sharded", "1,1,1", {"shares": "2,1,4", "option": {"dropout": "0.5"}}, marks=pytest.mark.slow
        ),
    ],
)
def test_sharded_layers_equal_one_process(
    tmp_path: Path, alone: dict[str, torch.Tensor], strategy: str, speeds: str, words: dict[str, Any]
) -> None:
    learnt = {name: words[name] for name in ("accumulate", "option") if name in words}
    if learnt:
        alone = train(tmp_path / "alone", **learnt)
    assert distance(alone, train(tmp_path / "run", speeds, strategy=strategy, **words)) < TOLERANCE
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    assert record.plan.strategy == strategy
    assert sum(node.share for node in record.nodes) == pytest.approx(1)
    assert record.plan.schedule == ""
    assert record.plan.prediction is not None
    most = max(node.sent_bytes for node in record.steps[1].nodes)
    if "rematerialise" not in words:  # which sends what forward moves a second time
        assert record.plan.prediction.sent_bytes == pytest.approx(most, abs=1)


def unnormalised(folder: Path, speeds: str = "1", **words: Any) -> dict[str, torch.Tensor]:
    """The same of a network without BatchNorm, whose micro-batches are like the whole batch."""
    options = {"batch_norm": "false", "image": "3x8x8", "width": "6", "samples": "70", "classes": "3"}
    return train(folder, speeds, task="synthetic", option=options, batch_size=15, epochs=2, **words)


@pytest.mark.parametrize(
    ("strategy", "speeds", "words"),
    [
        pytest.param("pipeline", "1,0.5", {}, marks=pytest.mark.slow),
        pytest.param(
            "pipeline",
            "1,1,1",
            {"micro_batches": 4, "schedule": "gpipe", "rematerialise": "always"},
            marks=pytest.mark.slow,
        ),
        pytest.param("pipeline", "1,1,0.5", {"micro_batches": 6, "schedule": "zero-bubble"}, marks=pytest.mark.slow),
        ("data+pipeline", "1,1,1", {"shares": "1,1,1", "replicas": "2,1", "micro_batches": 3}),
    ],
)
def test_pipeline_stages_equal_one_process(tmp_path: Path, strategy: str, speeds: str, words: dict[str, Any]) -> None:
    alone = unnormalised(tmp_path / "alone")
    assert distance(alone, unnormalised(tmp_path / "run", speeds, strategy=strategy, **words)) < TOLERANCE
    record, other = (read_noun(tmp_path / name / "record.json", TrainRecord) for name in ("run", "alone"))
    assert [v.loss for v in record.validations] == pytest.approx([v.loss for v in other.validations], rel=1e-9)
    assert [v.accuracy for v in record.validations] == [v.accuracy for v in other.validations]
    assert {"timeline.json", "timeline.png"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert {a.stage for a in record.plan.assignments} == set(range(len(record.plan.replica_ranks[0])))
    assert sum(node.share for node in record.nodes) == pytest.approx(1)
    best = "zero-bubble" if strategy == "pipeline" else "1f1b"  # the replica of one stage takes longest
    assert record.plan.schedule == words.get("schedule", best)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "speeds", "words"),
    [
        ("pipeline+filter", "1,0.5,1,0.5", {}),
        ("pipeline+hybrid", "1,1,1,1", {"shares": "2,1,0,3", "micro_batches": 3, "rematerialise": "always"}),
        ("pipeline+channel", "1,1,1,1,1,1", {"shares": "2,1,1,1,3,1", "members": 3}),
    ],
)
def test_stages_of_several_nodes_equal_one_process(
    tmp_path: Path, strategy: str, speeds: str, words: dict[str, Any]
) -> None:
    alone = unnormalised(tmp_path / "alone")
    assert distance(alone, unnormalised(tmp_path / "run", speeds, strategy=strategy, **words)) < TOLERANCE
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    assert [a.stage for a in record.plan.assignments] in (
        [0, 0, 1, 1],
        [1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1],
        [1, 1, 1, 0, 0, 0],
    )
    assert sum(node.share for node in record.nodes) == pytest.approx(1)
    assert record.plan.schedule == "1f1b"
    assert record.plan.prediction is not None
    most = max(node.sent_bytes for node in record.steps[1].nodes)
    assert "rematerialise" in words or record.plan.prediction.sent_bytes == pytest.approx(most, abs=1)
    words = {"plan": tmp_path / "run" / "plan.json", "rematerialise": words.get("rematerialise", "auto")}
    assert distance(alone, unnormalised(tmp_path / "again", speeds, **words)) < TOLERANCE
    again = read_noun(tmp_path / "again" / "record.json", TrainRecord).plan
    (before, *_), (after, *_) = record.plan.teams, again.teams
    assert before == after
    own, kept = ([plan.assignments[rank].share for rank in before] for plan in (record.plan, again))
    assert [one / sum(own) for one in own] == pytest.approx([one / sum(kept) for one in kept])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "spatial", "pipeline"])
def test_reduced_precision_learns_under_model_parallelism(tmp_path: Path, strategy: str) -> None:
    train(tmp_path / "run", "1,1", strategy=strategy, precision="bf16", epochs=8)
    assert (read_noun(tmp_path / "run" / "record.json", TrainRecord).validation_accuracy or 0) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["filter", "sharded", "spatial", "data+sharded"])
def test_compiled_parallel_model_equals_one_process(
    tmp_path: Path, alone: dict[str, torch.Tensor], strategy: str
) -> None:
    train(tmp_path / "run", "1,1,1", strategy=strategy, shares="2,1,1", compile=True)
    assert distance(alone, load_file(tmp_path / "run" / "model.safetensors")) < TOLERANCE


@pytest.mark.slow
def test_torchrun_gives_the_weights_of_one_process(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "evener"]
    words = ["train", TINY, "--precision", "fp64", "--seed", "3", "--strategy", "sharded", "--output", "ranks"]
    subprocess.run([*launcher, *words], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    assert distance(alone, load_file(tmp_path / "ranks" / "model.safetensors")) < TOLERANCE


@pytest.mark.slow
def test_checkpoint_of_any_strategy_resumes_under_any_other(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("1,1", "pipeline", {"epochs": 1}),
        ("1,1,1", "sharded", {"epochs": 2, "resume": True, "shares": "3,2,1"}),
        ("1,1,1", "data+pipeline", {"epochs": 3, "resume": True, "shares": "equal"}),
        ("1,1,1,1", "pipeline+channel", {"epochs": 4, "resume": True, "shares": "2,1,1,3"}),
        ("1", "data", {"epochs": 5, "resume": True}),
    ]
    options = {"batch_norm": "false", "image": "3x8x8", "width": "6", "samples": "60", "classes": "3"}
    words: dict[str, Any] = {"task": "synthetic", "option": options, "batch_size": 15}
    straight = train(tmp_path / "straight", "1", epochs=5, **words)
    for i, (speeds, strategy, more) in enumerate(ways):
        last = train(tmp_path / str(i), speeds, strategy=strategy, checkpoint=kept, **words, **more)
    assert distance(straight, last) < TOLERANCE


@pytest.mark.slow
def test_saved_plan_is_reused(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    train(tmp_path / "first", "1,1,1", strategy="data+sharded", shares="2,1,4", replicas="2,1")
    file = tmp_path / "first" / "plan.json"
    again = train(tmp_path / "again", "1,1,1", plan=file)
    assert distance(alone, again) < TOLERANCE
    saved, performed = read_noun(file, Plan), read_noun(tmp_path / "again" / "record.json", TrainRecord).plan
    assert performed == msgspec.structs.replace(saved, check=performed.check)
    with refused(EvenerError):
        train(tmp_path / "few", "1,1", plan=file)


LINEAR = {"kind": "mlp", "batch_norm": "false", "image": "3x16x16", "width": "256", "depth": "4", "samples": "32"}
"""Weights of 1.6 MB; a step takes three or four times that."""


@pytest.mark.parametrize(
    ("memory", "strategies"),
    [pytest.param(10**9, {"serial", "data"}, marks=pytest.mark.slow), (45 * 10**5, {"pipeline"})],
)
def test_model_too_large_for_one_node_is_split_into_stages(tmp_path: Path, memory: int, strategies: set[str]) -> None:
    record = perform(
        RunConfig(
            task="synthetic",
            option=LINEAR,
            batch_size=8,
            epochs=1,
            output=tmp_path / "run",
            local_nodes="1,1",
            memory=str(memory),
        )
    )
    assert record.plan.strategy in strategies
    assert all(a.memory_bytes < memory for a in record.plan.assignments)


def test_plan_fits_nodes_in_another_order() -> None:
    def plan(strategy: Any, *parts: tuple[str, int, int]) -> Plan:
        rows = [
            Assignment(rank=i, node=node, device="cpu", samples=4, replica=replica, stage=stage, share=0.5)
            for i, (node, replica, stage) in enumerate(parts)
        ]
        return Plan(
            strategy=strategy, batch_size=4 * len({replica for _, replica, _ in parts}), assignments=tuple(rows)
        )

    fitted = fit_plan(plan("pipeline", ("b", 0, 0), ("a", 0, 1)), ["a", "b", "c"])
    assert [(a.rank, a.node, a.stage) for a in fitted.assignments] == [(0, "a", 1), (1, "b", 0)]
    mixed = plan("data+sharded", ("a", 0, 0), ("c", 0, 0), ("b", 1, 0), ("d", 1, 0))
    assert fit_plan(mixed, ["a", "c", "b", "d"]) == mixed
    with refused(InvalidInput):
        fit_plan(mixed, ["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"strategy": "magic"}, "--strategy must be one of auto, data, filter"),
        ({"strategy": "filter", "replicas": "2,1"}, "--replicas does not go with --strategy filter"),
        (
            {"strategy": "pipeline", "members": 3},
            r"--members does not go with --strategy pipeline: it is for pipeline\+",
        ),
        ({"strategy": "pipeline+filter", "elastic": True}, "--elastic does not go with --strategy pipeline"),
        ({"strategy": "pipeline+sharded"}, "--strategy must be one of"),
        ({"strategy": "data", "micro_batches": 2}, "--micro-batches does not go with --strategy data"),
        ({"strategy": "pipeline", "accumulate": 2}, "pipelines have --micro-batches"),
        ({"strategy": "pipeline", "shares": "2,1"}, "stages follow the layers"),
        ({"strategy": "pipeline", "schedule": "zigzag"}, "--schedule must be one of"),
        ({"strategy": "spatial", "rematerialise": "sometimes"}, "--rematerialise must be one of"),
        ({"strategy": "spatial", "precision": "fp16"}, "take bf16"),
        ({"strategy": "pipeline", "compile": True}, "--compile does not go with --strategy pipeline"),
        ({"strategy": "sharded", "stationary": True}, "--stationary does not go with"),
        ({"strategy": "data", "rematerialise": "always"}, "--rematerialise does not go with"),
    ],
    ids=str,
)
def test_contradictory_strategy_options_are_rejected(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        RunConfig(task=TINY, **words)


def test_replicas_are_contiguous_and_cover_every_node() -> None:
    assert replica_rows("sharded", None, 3) == ((0, 1, 2),)
    assert replica_rows("data+sharded", None, 5) == ((0, 1, 2), (3, 4))
    assert replica_rows("data+pipeline", "1,3,1", 5) == ((0,), (1, 2, 3), (4,))
    for sizes in ("3,3", "5,0", "two", ""):
        with refused(InvalidInput):
            replica_rows("data+filter", sizes, 5)


def test_sharding_on_one_node_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    result = evener_here("train", TINY, "--strategy", "data+filter", cwd=tmp_path)
    assert result.returncode == 2
    assert "--local-nodes must be at least 2 for data+filter, got 1" in " ".join(result.stderr.split())


FLAT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

task = Task(model=lambda: nn.Linear(4, 3), loss=nn.functional.cross_entropy, batch_size=5,
            train_data=lambda: TensorDataset(torch.arange(40.0).view(10, 4), torch.arange(10) % 3))
"""


def test_unshardable_model_is_computed_fully_by_every_node(tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text(FLAT)
    task, folder = str(tmp_path / "flat.py"), tmp_path / "run"
    perform(RunConfig(task=task, strategy="spatial", shares="3,1", local_nodes="1,1", output=folder), quiet=True)
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    assert [one.share for one in record.plan.assignments] == [1.0, 1.0]
    assert {one.reason for one in record.plan.assignments} == {
        "computes all: no layer of this model can be divided by spatial"
    }
    assert [node.share for node in record.nodes] == [1.0, 1.0]
