"""A master and nodes with GPUs, beside nodes with a processor and nodes without PyTorch: one model, learned alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from evener.agreements.layout import Flat, flat_of, layout_of
from evener.agreements.robust import merge_robustly
from evener.agreements.settings import Merge, Robust, average
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Merging
from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.ps.master.merges import DeviceMerge, merge_of
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support import standin
from support.accelerator import DEVICE, NEEDS_DEVICE, TOLERANCE, distance, slow_after
from support.command_cluster import Cluster, cluster, wait_until
from support.commands import TINY

pytestmark = [*NEEDS_DEVICE, pytest.mark.timeout(300)]
SMOOTH = str(Path(TINY).with_name("smooth.py"))
LOSING = str(Path(TINY).with_name("losing.py"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """One process on the processor."""
    folder = tmp_path_factory.mktemp("alone")
    perform(RunConfig(task=SMOOTH, seed=3, precision="fp64", devices="cpu", output=folder, check=False))
    return load_file(folder / "model.safetensors")


def trained(ps: Cluster, *words: str) -> tuple[TrainRecord, dict[str, torch.Tensor]]:
    ps.train(SMOOTH, "--seed", "3", "--output", "run", *words)
    folder = ps.folder / "run"
    return read_noun(folder / "record.json", TrainRecord), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("others", slow_after(1, (("cpu",),), ((),), (("gpu",),), (("gpu", "cpu", "cpu"),)))
def test_synchronous_updates_equal_one_process(alone: dict[str, torch.Tensor], others: tuple[str, ...]) -> None:
    with cluster() as ps:
        for index, kind in enumerate(("gpu", *others)):
            ps.join(f"{kind}-{index}", device=DEVICE if kind == "gpu" else "cpu")
        ps.wait_for_nodes()
        record, weights = trained(ps, "--agreement", "sync", "--precision", "fp64")
        ps.down()
    assert distance(alone, weights) < TOLERANCE
    assert {node.device for node in record.nodes} <= {DEVICE, "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("agreement", ["async", "bounded", "average", "diloco"])
def test_other_agreements_learn_on_a_gpu(agreement: str) -> None:
    with cluster() as ps:
        ps.join("gpu", device=DEVICE)
        ps.join("cpu")
        ps.wait_for_nodes()
        record, _ = trained(ps, "--agreement", agreement, "--epochs", "6")
        ps.down()
    assert (record.validation_accuracy or 0) > 0.5


@pytest.mark.slow
def test_gpu_and_thin_node_serve_one_run(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (400, 28, 28), np.uint8)
    labels = draw.integers(0, 10, 400, np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">u4").tobytes()
        (tmp_path / f"train-{name}-ubyte").write_bytes(head + array.tobytes())
    words = ("nfnn", "--data", str(tmp_path), "--agreement", "sync", "--batch-size", "100", "--epochs", "5")
    with cluster() as ps:
        ps.join("gpu", "--data", str(tmp_path), device=DEVICE)
        ps.wait_for_nodes()
        ps.train(*words, "--output", "alone")
        ps.join("thin", "--data", str(tmp_path), "--thin")
        ps.wait_for_nodes()
        ps.train(*words, "--output", "together")
        weights = [load_file(ps.folder / name / "model.safetensors") for name in ("alone", "together")]
        ps.down()
    assert distance(*weights) < 1e-4  # single precision


@pytest.mark.slow
def test_run_completes_after_a_gpu_is_killed_and_another_joins(tmp_path: Path) -> None:
    words = ("--seed", "3", "--precision", "fp64", "--epochs", "60")
    perform(RunConfig(task=SMOOTH, seed=3, precision="fp64", epochs=60, devices="cpu", output=tmp_path, check=False))
    with cluster() as ps:
        ps.join("gpu", device=DEVICE)
        ps.join("cpu")
        ps.wait_for_nodes()
        process = ps.start_training(SMOOTH, "--agreement", "sync", "--output", "run", *words)
        wait_until(lambda: ps.version() > 10, "that the run makes steps")
        ps.nodes["gpu"].kill()
        ps.join("late", device=DEVICE)
        assert process.wait(timeout=120) == 0, ps.said("train.out")
        record = read_noun(ps.folder / "run" / "record.json", TrainRecord)
        weights = load_file(ps.folder / "run" / "model.safetensors")
        ps.down()
    alone = read_noun(tmp_path / "record.json", TrainRecord)
    assert record.validation_accuracy == pytest.approx(alone.validation_accuracy, abs=0.05)
    assert (
        distance(load_file(tmp_path / "model.safetensors"), weights) < 0.1
    )  # what a killed node had begun comes later
    assert {"gpu", "cpu"} <= {node.name for node in record.nodes}


@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be lost")
@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["", "1"], ids=["lost", "hangs"])
@pytest.mark.parametrize("agreement", [("sync",), ("diloco", "--local-steps", "5")], ids=lambda words: words[0])
def test_node_whose_device_is_lost_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreement: tuple[str, ...], hangs: str
) -> None:
    here = tmp_path / "here"
    here.touch()
    monkeypatch.setenv("EVENER_TEST_LOSS", str(here))
    monkeypatch.setenv("EVENER_TEST_HANGS", hangs)
    with cluster(*(("--patience", "3") if hangs else ())) as ps:
        ps.join("first", device=DEVICE)
        ps.join("second", device="standin:1")
        ps.wait_for_nodes()
        options = [word for one in ("norm=false", "samples=200", "pause=0.02") for word in ("--option", one)]
        words = ("--agreement", *agreement, *options, "--epochs", "20")
        process = ps.start_training(LOSING, *words, "--output", "run")
        wait_until(lambda: ps.version() > 3, "that the run makes steps")
        (tmp_path / "struck" / "checkpoints").mkdir(parents=True)
        wait_until(lambda: not here.exists(), "that the device is lost")
        assert ps.nodes["first"].wait(timeout=60 if hangs else 20) == 4
        assert process.wait(timeout=120) == 0, ps.said("train.out")
        record, said = read_noun(ps.folder / "run" / "record.json", TrainRecord), ps.said("first.out")
        ps.down()
    assert "node first lost its device standin:0" in said.splitlines()[-1]
    assert any("lost its device standin:0" in event.message for event in record.events), record.events


FULL = """
from itertools import count
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task
from support import standin

CALLS = count()

def data():
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(600, 8, generator=draw), torch.randint(0, 3, (600,), generator=draw))

def loss(outputs, targets):
    if outputs.requires_grad and outputs.device.type == "standin" and next(CALLS) == 60:
        standin.load().limit_memory(outputs.device.index, 10)
    return nn.functional.cross_entropy(outputs, targets)

task = Task(model=lambda: nn.Linear(8, 3), loss=loss, train_data=data, batch_size=10, epochs=3)
"""


@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be full")
@pytest.mark.parametrize("others", slow_after(0, ((),), (("standin:1",),)))
def test_run_whose_nodes_are_all_full_does_not_fit(others: tuple[str, ...]) -> None:
    with cluster() as ps:
        for index, device in enumerate((DEVICE, *others)):
            ps.join(f"node-{index}", device=device)
        ps.wait_for_nodes()
        (ps.folder / "task.py").write_text(FULL)
        ran = ps.evener("train", "task.py", "--agreement", "sync", "--no-check", "--home", str(ps.home), timeout=120)
        ps.down()
    assert ran.returncode == 5, ran.stderr
    for index in range(1 + len(others)):
        assert f"node node-{index} ran out of memory" in " ".join(ran.stderr.split())


@pytest.mark.parametrize("merge", ["cores", "threads", "device"])
def test_device_merges_equal_cpu_merges(merge: Merge) -> None:
    draw = np.random.default_rng(0)
    arrays: list[dict[str, Any]] = [{f"w{i}": draw.standard_normal((i + 1, 3)) for i in range(7)} for _ in range(4)]
    layout = layout_of(arrays[0], statistics=())
    flats, weights = [flat_of(layout, one) for one in arrays], [5.0, 2.0, 1.0, 3.0]
    found, wanted = Flat(layout), Flat(layout)
    with ThreadPool(1) as cores:
        Merging(wanted, flats, weights, cores).finish()
        whole = merge_of(replace(average(batch=1, local_steps=2), merge=merge))
        if whole is None:
            Merging(found, flats, weights, cores).finish()
        else:
            whole(found, flats, weights)
    for name, value in wanted.views().items():
        np.testing.assert_allclose(found.views()[name], value, rtol=1e-14)


@pytest.mark.parametrize("rule", ["trimmed", "median", "krum"])
def test_robust_device_merges_equal_cpu_merges(rule: Robust) -> None:
    draw = np.random.default_rng(0)
    arrays: list[dict[str, Any]] = [{f"w{i}": draw.standard_normal((i + 1, 3)) for i in range(7)} for _ in range(5)]
    layout = layout_of(arrays[0], statistics=())
    flats = [flat_of(layout, one) for one in arrays]
    found, wanted = Flat(layout), Flat(layout)
    with ThreadPool(1) as cores:
        merge_robustly(rule, wanted, flats, cores)
    DeviceMerge(rule)(found, flats, [1.0] * 5)
    for name, value in wanted.views().items():
        np.testing.assert_allclose(found.views()[name], value, rtol=1e-14)


@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that can be lost")
@pytest.mark.parametrize("rule", ["mean", "trimmed", "krum"])
@pytest.mark.parametrize("fault", ["lost", "full"])
def test_device_that_is_lost_or_full_leaves_merges_to_the_processor(rule: Robust, fault: str) -> None:
    draw, said = np.random.default_rng(0), list[str]()
    arrays: list[dict[str, Any]] = [{"w": draw.standard_normal((100, 30))} for _ in range(5)]
    layout = layout_of(arrays[0], statistics=())
    flats = [flat_of(layout, one) for one in arrays]
    found, wanted = Flat(layout), Flat(layout)
    DeviceMerge(rule)(wanted, flats, [1.0] * 5)
    controls, total = standin.load(), torch.accelerator.get_memory_info(0)[1]
    controls.lose(0, True) if fault == "lost" else controls.limit_memory(0, 1000)
    try:
        DeviceMerge(rule, said.append)(found, flats, [1.0] * 5)
    finally:
        controls.lose(0, False) if fault == "lost" else controls.limit_memory(0, total)
    assert "standin:0" in said[0]
    np.testing.assert_allclose(found.views()["w"], wanted.views()["w"], rtol=1e-14)
