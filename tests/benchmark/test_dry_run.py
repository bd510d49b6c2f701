"""The largest batch that fits a device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from evener.benchmark.dry_run import (
    SHARE_OF_USABLE,
    DryRun,
    capacity,
    dry_run_of,
    largest_measured,
    samples_that_fit,
    saved_bytes,
)
from evener.records.errors import DoesNotFit, InvalidValue
from evener.system.memory import usable_memory
from support.accelerator import DEVICE, needs_device
from support.refusals import refused

CPU = torch.device("cpu")
WEIGHTS = (100 * 50 + 50 * 10) * 4


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 50, bias=False), nn.ReLU(), nn.Linear(50, 10, bias=False))


class Shift(nn.Module):
    """Adds a weight: nothing of the inputs is needed for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.weight


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def momentum_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(parameters)


def fetch(samples: int) -> Tensor:
    return torch.ones(samples, 100)


def loss_step(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch)
    return output.sum()


def on_trial(check: Callable[[DryRun], Any], make_optimizer: Any = plain_sgd, model: nn.Module | None = None) -> Any:
    with dry_run_of(model or network(), make_optimizer, loss_step, fetch, CPU) as trial:
        return check(trial)


def largest(
    limit: int | None,
    asked: int = 1000,
    *,
    model: nn.Module | None = None,
    make_optimizer: Any = plain_sgd,
    loss_step: Callable[[nn.Module, Any], Tensor] = loss_step,
    fetch: Callable[[int], Any] = fetch,
    device: torch.device = CPU,
) -> int | None:
    with dry_run_of(model or network(), make_optimizer, loss_step, fetch, device) as trial:
        return capacity(trial, asked, usable_memory(str(device), limit)[1])


@pytest.mark.parametrize("samples", [1, 7, 32])
def test_saved_storages_count_once_and_without_the_weights(samples: int) -> None:
    everything, most = on_trial(lambda trial: saved_bytes(trial, samples))
    inputs, hidden = samples * 100 * 4, samples * 50 * 4  # ReLU and the second layer keep one and the same storage
    assert (everything, most) == (inputs + hidden, inputs)


def test_model_without_saved_tensors_counts_zero_bytes() -> None:
    assert on_trial(lambda trial: saved_bytes(trial, 4), model=Shift()) == (0, 0)


@pytest.mark.parametrize(("make_optimizer", "copies"), [(plain_sgd, 2), (momentum_sgd, 3), (adam, 4)])
def test_weights_gradients_and_optimizer_state_are_included(make_optimizer: Any, copies: int) -> None:
    """Usable is just enough for ten samples; with a few bytes less only nine fit."""
    per_sample = 600 + 4 * 400
    scalars = 2 * 4 if make_optimizer is adam else 0
    enough = math.ceil((copies * WEIGHTS + scalars + 10 * per_sample) / SHARE_OF_USABLE) + 1
    assert largest(enough, make_optimizer=make_optimizer) == 10
    assert largest(enough - 10, make_optimizer=make_optimizer) == 9


def test_batch_that_fits_has_no_limit() -> None:
    assert largest(None) is None
    assert largest(10**8, asked=1) is None


@pytest.mark.parametrize("asked", [1, 2, 3, 100])
def test_memory_too_small_for_one_sample_is_refused_with_advice(asked: int) -> None:
    with refused(DoesNotFit):
        largest(WEIGHTS, asked=asked)


def test_largest_batch_below_the_first_measured_size_is_found() -> None:
    assert largest(math.ceil((2 * WEIGHTS + 1 * 2200) / SHARE_OF_USABLE) + 1, asked=2) == 1


def test_largest_batch_of_zero_is_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        largest(None, asked=0)
    assert caught.value.field == "largest"


@given(st.integers(0, 10**9), st.integers(1, 10**7), st.integers(1, 10**12))
def test_samples_that_fit_is_maximal(fixed: int, each: int, usable: int) -> None:
    n = samples_that_fit(usable, fixed, (2, fixed + 2 * each), (4, fixed + 4 * each))
    room = SHARE_OF_USABLE * usable
    slack = 1e-6 * (room + fixed)
    assert n == 0 or fixed + n * each <= room + slack
    assert fixed + (n + 1) * each > room - slack


def test_constant_memory_need_always_or_never_fits() -> None:
    assert samples_that_fit(1000, 0, (2, 900), (4, 900)) == math.inf
    assert samples_that_fit(1000, 0, (2, 901), (4, 901)) == 0


PEAKS: dict[str, Callable[[int], float]] = {
    "a line": lambda n: 100.0 + 9 * n,
    "weights that outweigh small batches": lambda n: max(5000.0, 3.0 * n),
    "a workspace above a size": lambda n: 9.0 * n + (2000 if n > 500 else 0),
    "steps of a kilobyte": lambda n: 1024.0 * -(-n // 100),
    "memory that ends before the room does": lambda n: 9.0 * n if n <= 850 else math.inf,
    "half of each batch twice": lambda n: 10.0 * n + 5.0 * (n // 2),
}


@pytest.mark.parametrize("kind", PEAKS)
@pytest.mark.parametrize("room", [1, 700, 6000, 9000, 50_000, 10**6])
@pytest.mark.parametrize("most", [1, 2, 3, 64, 10**6])
def test_measured_batch_fits_and_is_near_the_largest_possible(kind: str, room: float, most: int) -> None:
    peak, tried = PEAKS[kind], list[int]()

    def measured(samples: int) -> float:
        tried.append(samples)
        return peak(samples)

    found = largest_measured(measured, most, room)
    best = max((n for n in range(1, min(most, 400_000) + 1) if peak(n) <= room), default=0)
    assert found == 0 or peak(found) <= room
    assert found >= 0.97 * best - 1 or peak(found) >= 0.97 * room
    assert (found == 0) == (best == 0)
    assert len(tried) <= 26
    assert all(peak(n) < max(9 * room, 9 * peak(2)) or peak(n) == math.inf for n in tried)


def test_out_of_memory_in_a_gpu_step_means_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is simulated: steps above 85 fail, now by PyTorch's allocator, now by a library."""
    state = {"peak": 0}

    def run_step(self: DryRun, samples: int) -> None:
        if samples > 90:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        if samples > 85:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        state["peak"] = 9 * samples

    monkeypatch.setattr(DryRun, "run_step", run_step)
    for name in ("release_memory", "reset_peak", "allocated_bytes"):
        monkeypatch.setattr(f"evener.system.accelerators.{name}", lambda _: 0)
    monkeypatch.setattr("evener.system.accelerators.peak_bytes", lambda _: state["peak"])
    monkeypatch.setattr("evener.benchmark.dry_run._total", lambda tensors: 0)
    model = network()
    trial = DryRun(
        model=model,
        optimizer=plain_sgd(model.parameters()),
        loss_step=loss_step,
        fetch=fetch,
        device=torch.device("cuda:0"),
    )
    found = capacity(trial, 1000, 10_000)
    assert found is not None
    assert 83 <= found <= 85
    assert capacity(trial, 80, 10_000) is None
    with pytest.raises(DoesNotFit):
        capacity(trial, 80, 5)


def test_other_gpu_step_errors_are_not_treated_as_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_step(self: DryRun, samples: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(DryRun, "run_step", run_step)
    for name in ("release_memory", "reset_peak", "allocated_bytes"):
        monkeypatch.setattr(f"evener.system.accelerators.{name}", lambda _: 0)
    model = network()
    device = torch.device("cuda:0")
    trial = DryRun(
        model=model, optimizer=plain_sgd(model.parameters()), loss_step=loss_step, fetch=fetch, device=device
    )
    with pytest.raises(RuntimeError, match="shapes"):
        capacity(trial, 80, 10_000)


@needs_device
def test_gpu_batch_is_within_the_limit_and_near_it() -> None:
    device, limit = torch.device(DEVICE), 256 << 20
    found = largest(
        limit, asked=10**7, model=network().to(device), device=device, fetch=lambda n: torch.ones(n, 100, device=device)
    )
    assert found is not None
    assert 0.2 * limit / 2000 < found < limit / 600
