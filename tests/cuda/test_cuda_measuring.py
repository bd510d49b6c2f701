"""What is measured of a GPU: its speeds, and how large a batch its memory holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evener.benchmark.dry_run import capacity, dry_run_of
from evener.experiments.models.resnet import resnet152
from evener.records.errors import DoesNotFit
from evener.records.profile import ClusterProfile
from evener.records.schema import read_noun
from evener.system import accelerators
from evener.system.memory import usable_memory
from support.accelerator import DEVICE, NEEDS_DEVICE
from support.commands import evener

pytestmark = [*NEEDS_DEVICE, pytest.mark.timeout(300)]
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="the memory of a GPU is counted by PyTorch")
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wide": (lambda: nn.Sequential(nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 1024)), (1024,)),
    "deep": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(40))), (512,)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)),
        (3, 64, 64),
    ),
    "resnet50": (lambda: resnet152(classes=100, depths=(3, 4, 6, 3)), (3, 96, 96)),
    "transformer": (lambda: nn.TransformerEncoderLayer(256, 8, batch_first=True, dropout=0.0), (128, 256)),
}


@pytest.mark.slow
def test_profile_has_speeds_of_every_precision(tmp_path: Path) -> None:
    ran = evener("benchmark", "--devices", DEVICE, "--output", "cluster.json", cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr
    (device,) = read_noun(tmp_path / "cluster.json", ClusterProfile).devices
    assert device.device == DEVICE
    assert device.bandwidth
    single = device.throughput("fp32")
    assert single is not None
    assert single.score
    if DEVICE != "cpu":
        assert device.model == accelerators.model_and_units(torch.device(DEVICE))[0]
        half = device.throughput("bf16")
        assert half is not None
        assert (half.matmul_flops or 0) > (single.matmul_flops or 0)


def step(precision: torch.dtype, model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(torch.device(DEVICE).type, precision, enabled=precision != torch.float32):
        out: Tensor = model(batch)
    return out.float().square().mean()


@pytest.mark.slow
@ON_A_GPU
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_predicted_batch_fits_and_its_peak_is_near_the_limit(name: str, precision: torch.dtype) -> None:
    if DEVICE.startswith("standin") and precision == torch.float16 and name in ("wide", "deep"):
        pytest.skip("a processor takes minutes for it in float16; bfloat16 has the same sizes")
    build, shape = NETWORKS[name]
    device = torch.device(DEVICE)
    model = build().to(device)
    original = sum(tensor.nbytes for tensor in model.state_dict().values())  # the trial has a copy of it
    allowed = 4 * original + (1 << 27) if DEVICE.startswith("standin") else 2 << 30  # processors fill less in a second
    with dry_run_of(
        model,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        partial(step, precision),
        lambda samples: torch.rand(samples, *shape, device=device),
        device,
    ) as trial:
        samples = capacity(trial, 1 << 24, allowed)
        assert samples is not None
        accelerators.reset_peak(device)
        trial.run_step(samples)
        peak = accelerators.peak_bytes(device) - original
    assert 0.8 * 0.9 * allowed < peak < 1.05 * 0.9 * allowed + 64e6


@ON_A_GPU
def test_model_too_large_for_any_sample_is_refused() -> None:
    device = torch.device(DEVICE)
    model = nn.Linear(4096, 4096, device=device)
    with (
        dry_run_of(
            model,
            partial(torch.optim.SGD, lr=0.01),
            partial(step, torch.float32),
            lambda samples: torch.rand(samples, 4096, device=device),
            device,
        ) as trial,
        pytest.raises(DoesNotFit),
    ):
        capacity(trial, 1000, 1 << 20)


@ON_A_GPU
def test_device_memory_equals_that_of_the_driver() -> None:
    total, usable = usable_memory(DEVICE)
    assert total == torch.accelerator.get_memory_info(DEVICE)[1]
    assert 0 < usable <= total
