"""Accelerators without double precision, like the GPUs of Apple: they train in single precision, and say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.system import accelerators
from support import standin
from support.accelerator import DEVICE, NEEDS_DEVICE, distance, slow_after
from support.command_cluster import cluster
from support.commands import TINY, evener
from support.yolo_cases import draw_detection, needs_ultralytics, off

NARROW, WIDE = "standin:1", "standin:0"
TOLERANCE = 1e-5
"""In single precision, after some steps."""
SMOOTH = str(Path(TINY).with_name("smooth.py"))
BATCHES = str(Path(TINY).with_name("batches.py"))
pytestmark = [
    *NEEDS_DEVICE,
    pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be narrow"),
    pytest.mark.timeout(300),
]
PROGRAM = """
import sys, evener, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(3)
    run = evener.join()
    rows = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    loader = DataLoader(rows, batch_size=12, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(2):
        right = torch.zeros((), dtype=torch.int64, device=run.device)
        for inputs, targets in loader:
            inputs, targets = inputs.to(run.device), targets.to(run.device)
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            right += (run.mean(loss) < 1).long()
        assert int(run.sum(right)) >= 0
    if run.leader:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, sys.argv[1])
"""


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one of the two devices lack double precision, in the processes that a test starts."""
    monkeypatch.setenv("EVENER_TEST_NARROW", "1")


def test_sums_have_the_widest_type_of_their_device() -> None:
    library = standin.load()
    library.narrow(1, True)
    accelerators.has_float64.cache_clear()
    try:
        wide, narrow = (accelerators.wide(torch.ones(2, device=device)) for device in (WIDE, NARROW))
        assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
        assert not accelerators.has_float64(torch.device("mps"))
    finally:
        library.narrow(1, False)
        accelerators.has_float64.cache_clear()


STRATEGIES = (
    ("data", (NARROW, "cpu")),
    ("pipeline", ("cpu", NARROW)),
    ("filter", (NARROW, WIDE)),
    ("channel", (NARROW, "cpu")),
    ("spatial", (NARROW, "cpu")),
    ("sharded", (NARROW, WIDE, "cpu")),
    ("data+filter", (NARROW, "cpu", WIDE)),
    ("data", (NARROW,)),
)


@pytest.mark.parametrize(("strategy", "on"), slow_after(0, *STRATEGIES))
def test_every_strategy_equals_one_process(tmp_path: Path, strategy: str, on: tuple[str, ...]) -> None:
    shares = ("--shares", "2,1") if strategy == "data" and len(on) > 1 else ()
    words = ("train", SMOOTH, "--seed", "3", "--epochs", "1")
    for name, options in (
        ("alone", ("--devices", "cpu")),
        ("nodes", ("--devices", ",".join(on), "--strategy", strategy if len(on) > 1 else "auto", *shares)),
    ):
        ran = evener(*words, *options, "--output", name, cwd=tmp_path, timeout=200)
        assert ran.returncode == 0, ran.stderr
    check = read_noun(tmp_path / "nodes" / "record.json", TrainRecord).plan.check
    assert len(on) == 1 or (check is not None and "fp64" in check.precisions)  # compared on the processor
    alone, nodes = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "nodes"))
    assert distance(alone, nodes) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "on"), [("filter", (NARROW, WIDE)), ("pipeline", ("cpu", NARROW))])
def test_clipped_gradients_equal_one_process(tmp_path: Path, strategy: str, on: tuple[str, ...]) -> None:
    words = ("train", SMOOTH, "--seed", "3", "--epochs", "1", "--option", "clip_norm=0.1")
    for name, options in (
        ("alone", ("--devices", "cpu")),
        ("nodes", ("--devices", ",".join(on), "--strategy", strategy)),
    ):
        ran = evener(*words, *options, "--output", name, cwd=tmp_path, timeout=200)
        assert ran.returncode == 0, ran.stderr
    assert distance(*(load_file(tmp_path / name / "model.safetensors") for name in ("alone", "nodes"))) < TOLERANCE


@pytest.mark.parametrize("on", slow_after(0, ((NARROW,),), ((NARROW, "cpu"),)))
def test_double_precision_is_refused_with_a_sentence(tmp_path: Path, on: tuple[str, ...]) -> None:
    words = ("--precision", "fp64", "--devices", ",".join(on), "--no-preflight")
    ran = evener("train", TINY, *words, "--output", "run", cwd=tmp_path, timeout=200)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert f"{NARROW} has no double precision" in ran.stderr.splitlines()[-1]


@pytest.mark.slow
def test_batch_task_equals_one_process(tmp_path: Path) -> None:
    words = ("train", BATCHES, "--seed", "3", "--epochs", "1")
    for name, options in (
        ("alone", ("--devices", "cpu")),
        ("nodes", ("--devices", f"{NARROW},cpu", "--shares", "2,1")),
    ):
        ran = evener(*words, *options, "--output", name, cwd=tmp_path, timeout=200)
        assert ran.returncode == 0, ran.stderr
    assert distance(*(load_file(tmp_path / name / "model.safetensors") for name in ("alone", "nodes"))) < TOLERANCE


@pytest.mark.slow
def test_program_equals_one_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for file, words in (("alone", ("--devices", "cpu")), ("both", ("--devices", f"{NARROW},cpu", "--shares", "2,1"))):
        ran = evener("run", *words, "program.py", file, cwd=tmp_path, timeout=200)
        assert ran.returncode == 0, ran.stderr
    assert distance(*(torch.load(tmp_path / name) for name in ("alone", "both"))) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_processor_thin_node_and_two_accelerators_equal_one_process(tmp_path: Path, precision: str) -> None:
    write_digits(tmp_path)
    task = ("nfnn", "--data", str(tmp_path), "--agreement", "sync", "--batch-size", "100", "--epochs", "3")
    words = (*task, "--precision", precision)
    with cluster() as ps:
        ps.join("cpu", "--data", str(tmp_path))
        ps.wait_for_nodes()
        ps.train(*words, "--output", "alone")
        ps.join("thin", "--data", str(tmp_path), "--thin")
        ps.join("wide", "--data", str(tmp_path), device=WIDE)
        ps.join("narrow", "--data", str(tmp_path), device=NARROW)
        ps.wait_for_nodes()
        ps.train(*words, "--output", "together")
        weights = [load_file(ps.folder / name / "model.safetensors") for name in ("alone", "together")]
        record = read_noun(ps.folder / "together" / "record.json", TrainRecord)
        ps.down()
    assert distance(*weights) < (1e-4 if precision == "fp32" else 1e-10)
    used = {node.name for node in record.nodes if node.contributions}
    assert used == {"cpu", "thin", "wide"} | ({"narrow"} if precision == "fp32" else set())
    reasons = [event.message for event in record.events if f"{NARROW} has no double precision" in event.message]
    assert bool(reasons) == (precision == "fp64"), record.events


@pytest.mark.slow
@pytest.mark.parametrize("agreement", ["async", "bounded", "average", "diloco"])
def test_mixed_nodes_learn_by_every_agreement(tmp_path: Path, agreement: str) -> None:
    write_digits(tmp_path)
    with cluster() as ps:
        for name, device, own in (
            ("cpu", "cpu", ()),
            ("thin", "cpu", ("--thin",)),
            ("wide", WIDE, ()),
            ("narrow", NARROW, ()),
        ):
            ps.join(name, "--data", str(tmp_path), *own, device=device)
        ps.wait_for_nodes()
        steps = ("--local-steps", "2") if agreement in ("average", "diloco") else ()
        words = ("nfnn", "--data", str(tmp_path), "--batch-size", "20", "--epochs", "30", *steps)
        ps.train(*words, "--agreement", agreement, "--output", "run")
        record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
        ps.down()
    assert {node.name for node in record.nodes if node.contributions} == {"cpu", "thin", "wide", "narrow"}
    assert (record.validation_accuracy or 0) > 0.5


YOLO = """
import sys
from support.yolo_cases import SETTINGS, Case, train
data, out, on = sys.argv[1:]
settings = {**SETTINGS, "lr0": 1e-3, "warmup_bias_lr": 0.0, "amp": False, "data": data}
train(Case(model="yolov8n.yaml", settings=settings, out=out, shares="2,1", devices=on.split(","), dtype="float32"), 2)
"""


@pytest.mark.slow
@needs_ultralytics
def test_yolo_learns_what_processors_learn(tmp_path: Path) -> None:
    data = draw_detection(tmp_path / "data", count=24)
    for name, on in (("processors", "cpu,cpu"), ("narrow", f"{NARROW},cpu")):
        subprocess.run([sys.executable, "-c", YOLO, str(data), str(tmp_path / name), on], check=True)
    for rank in range(2):
        processors, narrow = (torch.load(tmp_path / name / f"{rank}.pt") for name in ("processors", "narrow"))
        assert off(narrow["weights"], processors["weights"]) < 1e-3  # single precision


def write_digits(folder: Path) -> None:
    """Write images of ten classes that can be learnt, as files of MNIST."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 400), ("t10k", 100)):
        labels = draw.integers(0, 10, count, np.uint8)
        images = draw.integers(0, 60, (count, 28, 28), np.uint8)
        images[np.arange(count), 2 * labels + 3] += 150
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())
