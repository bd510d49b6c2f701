"""On a GPU, beside others on it or beside the processor: the weights of one process, however work is divided."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evener.system import accelerators
from support.accelerator import DEVICE, NEEDS_DEVICE, TOLERANCE, devices, distance, record, slow_after, train
from support.commands import TINY, command, evener

pytestmark = [*NEEDS_DEVICE, pytest.mark.timeout(300)]
SMOOTH = str(Path(TINY).with_name("smooth.py"))
PLAIN = {"batch_norm": "false", "image": "3x8x8", "width": "6", "samples": "70", "classes": "3"}
"""A network without BatchNorm, whose micro-batches are like the whole batch."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """One process on the processor."""
    return train(tmp_path_factory.mktemp("alone") / "run", "cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The same of a network without BatchNorm."""
    return stages(tmp_path_factory.mktemp("plain") / "run", "cpu")


def stages(folder: Path, on: str, **words: Any) -> dict[str, torch.Tensor]:
    return train(folder, on, task="synthetic", option=PLAIN, batch_size=15, epochs=2, **words)


@pytest.mark.parametrize(
    ("on", "words"),
    slow_after(
        2,
        (("gpu", "cpu"), {"shares": "9,1"}),
        (("gpu", "gpu", "gpu"), {"shares": "5,0,2", "accumulate": 2}),
        (("gpu",), {}),
        (("gpu",), {"accumulate": 3}),
        (("gpu", "gpu"), {"shares": "1,1"}),
        (("gpu", "gpu"), {"shares": "7,3"}),
        (("gpu", "gpu"), {"shares": "1,0"}),
        (("gpu", "gpu", "gpu"), {"shares": "5,3,2"}),
        (("cpu", "gpu"), {"shares": "1,3"}),
        (("gpu", "cpu"), {"shares": "measured"}),
    ),
)
def test_data_parallel_training_equals_one_process(
    tmp_path: Path, alone: dict[str, torch.Tensor], on: tuple[str, ...], words: dict[str, Any]
) -> None:
    if "accumulate" in words:
        alone = train(tmp_path / "alone", "cpu", accumulate=words["accumulate"])
    assert distance(alone, train(tmp_path / "run", devices(*on), **words)) < TOLERANCE
    assert {node.device for node in record(tmp_path / "run").nodes} <= set(devices(*on).split(","))


@pytest.mark.parametrize(
    ("strategy", "on", "words"),
    slow_after(
        1,
        ("filter", ("gpu", "gpu"), {"shares": "2,1"}),
        ("channel", ("gpu", "gpu"), {"shares": "3,1"}),
        ("hybrid", ("gpu", "gpu"), {"shares": "1,1"}),
        ("sharded", ("gpu", "gpu"), {"shares": "1,0"}),
        ("sharded", ("gpu", "gpu", "gpu"), {"shares": "5,3,2"}),
        ("sharded", ("gpu", "cpu"), {"shares": "3,1"}),
        ("sharded", ("gpu", "gpu"), {"rematerialise": "always", "accumulate": 3, "shares": "1,2"}),
        ("spatial", ("gpu", "gpu"), {"shares": "2,1"}),
        ("spatial", ("gpu", "cpu"), {"shares": "2,1"}),
        ("data+sharded", ("gpu", "gpu", "gpu"), {"shares": "2,1,4", "replicas": "2,1"}),
        ("data+sharded", ("gpu", "gpu", "cpu"), {"shares": "2,1,1", "replicas": "2,1"}),
        ("data+spatial", ("gpu", "gpu", "gpu"), {"shares": "1,2,3"}),
        ("data+filter", ("gpu", "gpu", "gpu", "gpu"), {"replicas": "2,2"}),
    ),
)
def test_divided_layer_training_equals_one_process(
    tmp_path: Path, alone: dict[str, torch.Tensor], strategy: str, on: tuple[str, ...], words: dict[str, Any]
) -> None:
    if "accumulate" in words:
        alone = train(tmp_path / "alone", "cpu", accumulate=words["accumulate"])
    assert distance(alone, train(tmp_path / "run", devices(*on), strategy=strategy, **words)) < TOLERANCE
    assert record(tmp_path / "run").plan.strategy == strategy


@pytest.mark.parametrize(
    ("strategy", "on", "words"),
    slow_after(
        1,
        ("pipeline", ("gpu", "gpu"), {"micro_batches": 4, "schedule": "1f1b"}),
        ("pipeline", ("gpu", "gpu", "gpu"), {"micro_batches": 4, "schedule": "gpipe", "rematerialise": "always"}),
        ("pipeline", ("gpu", "cpu"), {"micro_batches": 3}),
        ("pipeline", ("gpu", "gpu"), {"micro_batches": 4, "schedule": "zero-bubble"}),
        ("pipeline", ("cpu", "gpu"), {"micro_batches": 3, "rematerialise": "always"}),
        ("data+pipeline", ("gpu", "gpu", "gpu"), {"shares": "1,1,1", "replicas": "2,1", "micro_batches": 3}),
    ),
)
def test_pipeline_training_equals_one_process(
    tmp_path: Path, plain: dict[str, torch.Tensor], strategy: str, on: tuple[str, ...], words: dict[str, Any]
) -> None:
    assert distance(plain, stages(tmp_path / "run", devices(*on), strategy=strategy, **words)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "on"),
    [
        ("filter", ("gpu", "gpu")),
        ("sharded", ("gpu", "cpu")),
        ("pipeline", ("gpu", "gpu")),
        ("pipeline", ("cpu", "gpu")),
    ],
)
def test_clipped_gradients_equal_one_process(tmp_path: Path, strategy: str, on: tuple[str, ...]) -> None:
    words: dict[str, Any] = {"task": SMOOTH, "option": {"clip_norm": "0.1"}}
    free = train(tmp_path / "free", "cpu", task=SMOOTH)
    alone = train(tmp_path / "alone", "cpu", **words)
    assert distance(free, alone) > 1e-3
    assert distance(alone, train(tmp_path / "run", devices(*on), strategy=strategy, **words)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(len(accelerators.names()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["data", "sharded", "spatial", "filter"])
def test_nccl_training_equals_one_process(tmp_path: Path, alone: dict[str, torch.Tensor], strategy: str) -> None:
    found = train(tmp_path / "run", ",".join(accelerators.names()[:2]), strategy=strategy, shares="2,1")
    assert distance(alone, found) < TOLERANCE


@pytest.mark.slow
def test_divided_layer_draws_equal_one_process_on_the_device(tmp_path: Path) -> None:
    option = {"dropout": "0.5"}
    one = train(tmp_path / "one", DEVICE, option=option)
    two = train(tmp_path / "two", devices("gpu", "gpu"), option=option, strategy="sharded", shares="2,1")
    assert distance(one, two) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["bf16", "fp32", pytest.param("fp16", marks=pytest.mark.skipif(DEVICE == "cpu", reason="is for GPUs"))]
)
@pytest.mark.parametrize("on", [("gpu",), ("gpu", "gpu")])
def test_reduced_precision_learns(tmp_path: Path, precision: str, on: tuple[str, ...]) -> None:
    train(tmp_path / "run", devices(*on), precision=precision, epochs=8)
    assert (record(tmp_path / "run").validation_accuracy or 0) > 0.6


COMPILES = pytest.mark.skipif(DEVICE.startswith("standin"), reason="PyTorch generates no code for the stand-in")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", pytest.param("sharded", marks=COMPILES)])
def test_compiled_training_equals_one_process(tmp_path: Path, alone: dict[str, torch.Tensor], strategy: str) -> None:
    found = train(tmp_path / "run", devices("gpu", "gpu"), strategy=strategy, shares="2,1", compile=True)
    assert distance(alone, found) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(("gpu", "gpu"), ("cpu",)), (("cpu",), ("gpu", "gpu", "gpu"))])
def test_checkpoint_resumes_on_other_devices(tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]) -> None:
    whole = train(tmp_path / "whole", "cpu", epochs=4)
    train(tmp_path / "first", devices(*first), epochs=2, checkpoint=tmp_path / "kept", shares=equal(first))
    words = {"epochs": 4, "checkpoint": tmp_path / "kept", "resume": True, "shares": equal(second)}
    assert distance(whole, train(tmp_path / "second", devices(*second), **words)) < TOLERANCE


def equal(on: tuple[str, ...]) -> str:
    return ",".join("1" for _ in on)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "sharded", "spatial"])
def test_self_check_passes_before_the_first_step(tmp_path: Path, strategy: str) -> None:
    words = ("--devices", devices("gpu", "gpu"), "--strategy", strategy, "--shares", "2,1", "--output", "run")
    ran = evener("train", TINY, *words, cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_model_that_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    words = ("train", "synthetic", "--devices", DEVICE, "--memory", "1MB", "--output", "run")
    ran = evener(*words, cwd=tmp_path, timeout=120)
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.strip().splitlines()[-1]) < 600


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_leaves_a_record(tmp_path: Path) -> None:
    endless = str(Path(TINY).with_name("endless.py"))
    words = command("train", endless, "--devices", devices("gpu", "gpu"), "--output", "run")
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while " samples/s " not in (line := process.stdout.readline()):  # of a step, not of what was measured before it
        assert line or process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert record(tmp_path / "run").steps


def test_weights_load_in_plain_pytorch_without_a_gpu(tmp_path: Path) -> None:
    train(tmp_path / "run", DEVICE)
    assert all(value.device.type == "cpu" for value in load_file(tmp_path / "run" / "model.safetensors").values())
