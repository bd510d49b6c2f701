"""`evener train --agreement` on private local nodes: it learns, agrees with one process, and says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evener.commands.train import perform
from evener.commands.train_by_agreement import train_by_agreement
from evener.config.run_config import RunConfig
from evener.records.errors import InvalidInput
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.commands import TINY
from support.refusals import refused

SMOOTH = str(Path(TINY).with_name("smooth.py"))
DIGITS = {"channels": "8", "blocks": "1"}


def train(folder: Path, speeds: str, **words: Any) -> tuple[TrainRecord, dict[str, torch.Tensor]]:
    """Record and weights of a run on local nodes."""
    base = {"task": SMOOTH, "seed": 3, "local_nodes": speeds, "output": folder}
    train_by_agreement(RunConfig(**{**base, **words}), as_json=False)
    return read_noun(folder / "record.json", TrainRecord), load_file(folder / "model.safetensors")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "adamw"))]
)
def test_synchronous_updates_equal_one_process(tmp_path: Path, optimizer: str) -> None:
    words: dict[str, Any] = {"precision": "fp64", "option": {"optimizer": optimizer}}
    perform(RunConfig(task=SMOOTH, seed=3, output=tmp_path / "alone", **words))
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    record, together = train(tmp_path / "ps", "1.0,0.5,0.25", agreement="sync", **words)
    assert distance(alone, together) < 1e-10
    alone_record = read_noun(tmp_path / "alone" / "record.json", TrainRecord)
    assert record.validation_accuracy == alone_record.validation_accuracy
    assert record.validations[-1].loss == pytest.approx(alone_record.validations[-1].loss, abs=1e-10)


@pytest.mark.parametrize("compress", ["top-k", pytest.param("int8", marks=pytest.mark.slow)])
def test_compressed_gradients_learn_and_are_named_approximate(tmp_path: Path, compress: str) -> None:
    words: dict[str, Any] = {"option": {"optimizer": "sgd"}, "epochs": 12}
    record, weights = train(tmp_path, "1.0,0.5", agreement="sync", compress=compress, **words)
    losses = [step.loss for step in record.steps if step.loss is not None]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "events.jsonl").read_text().count('"kind":"approximate"') == 1
    assert record.bytes_saved > 0
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize("option", [{"optimizer": "adam"}, {"optimizer": "sgd", "clip_norm": "1.0"}], ids=str)
def test_sparse_gradients_are_refused_where_nodes_cannot_make_the_steps(tmp_path: Path, option: dict[str, str]) -> None:
    with refused(InvalidInput):
        train(tmp_path, "1.0,0.5", agreement="sync", compress="top-k", option=option)


@pytest.mark.parametrize(
    ("task", "option"),
    [
        (TINY, {}),  # it has BatchNorm
        pytest.param(SMOOTH, {"optimizer": "rmsprop"}, marks=pytest.mark.slow),
    ],
)
def test_task_unsuited_for_a_master_trains_exactly_as_ranks(task: str, option: dict[str, str], tmp_path: Path) -> None:
    words: dict[str, Any] = {"task": task, "precision": "fp64", "option": option, "epochs": 1}
    perform(RunConfig(seed=3, output=tmp_path / "alone", **words))
    record, together = train(tmp_path / "sync", "1.0,0.5", agreement="sync", **words)
    assert distance(load_file(tmp_path / "alone" / "model.safetensors"), together) < 1e-9
    assert [event.kind for event in record.events].count("as ranks") == 1
    assert record.options["--agreement"] == "sync"


QUICK = [{"agreement": "sync"}]
SLOW = [
    {"agreement": "average", "compress": "int8", "overlap": True, "local_steps": "2"},
    {"agreement": "async"},
    {"agreement": "bounded", "staleness": 2},
    {"agreement": "average", "local_steps": "4"},
    {"agreement": "diloco", "local_steps": "2"},
    {"agreement": "sync", "compress": "bf16"},
    {"agreement": "diloco", "compress": "top-k", "local_steps": "4"},
    {"agreement": "average", "skip_late": True, "local_steps": "4"},
]


@pytest.mark.parametrize(
    "way",
    [*QUICK, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW)],
    ids=lambda way: f"{way['agreement']} {way.get('compress', '')}".strip(),
)
def test_every_protocol_learns_digits_on_three_uneven_nodes(tmp_path: Path, way: dict[str, Any]) -> None:
    epochs = 12 if way.get("compress") == "top-k" else 6  # an exchange brings a 64th of the changes
    words: dict[str, Any] = {"task": "digits", "option": DIGITS, "epochs": epochs, "batch_size": 32}
    record, weights = train(tmp_path, "1.0,0.5,0.25", **way, **words)
    assert (record.validation_accuracy or 0) > 0.75
    assert len(record.nodes) == 3
    assert len(record.validations) == epochs
    assert record.agreement == way["agreement"]
    shown = (tmp_path / "events.jsonl").read_text()
    phases = ("joining", "shipping", "preparing", "training")
    assert sorted(phases, key=lambda what: shown.index(f'"what":"{what}"')) == list(phases)
    assert (record.bytes_saved > 0) == ("compress" in way)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.alone
def test_epoch_averaging_exchanges_once_and_favours_fast_nodes(tmp_path: Path) -> None:
    words: dict[str, Any] = {"task": "digits", "option": {"channels": "16", "blocks": "1"}, "epochs": 8}
    record, _ = train(tmp_path, "1.0,0.25", agreement="average", batch_size=32, **words)
    assert record.steps[-1].step == 8
    assert all(node.contributions <= 8 for node in record.nodes)
    last = record.steps[-1].nodes  # on a busy machine both are measured alike at first, and the rounds tell
    assert last[0].samples > 1.5 * last[1].samples


@pytest.mark.slow
def test_batch_norm_statistics_are_averaged_and_counters_integral(tmp_path: Path) -> None:
    record, weights = train(tmp_path, "1,1", agreement="average", local_steps="2", task=TINY, epochs=6)
    assert (record.validation_accuracy or 0) > 0.6
    counters = {name: tensor for name, tensor in weights.items() if name.endswith("num_batches_tracked")}
    assert counters
    assert all(tensor.dtype == torch.int64 for tensor in counters.values())
    [count] = {int(tensor) for tensor in counters.values()}
    assert 30 <= count <= 42  # 6 epochs of 5 steps, whoever made them; a node's last step before an exchange is short
    means = [tensor for name, tensor in weights.items() if name.endswith("running_mean")]
    assert all(float(mean.abs().max()) > 0.01 for mean in means)


@pytest.mark.slow
def test_bf16_training_learns(tmp_path: Path) -> None:
    record, _ = train(tmp_path, "1,1", agreement="sync", precision="bf16", epochs=8)
    assert (record.validation_accuracy or 0) > 0.6
