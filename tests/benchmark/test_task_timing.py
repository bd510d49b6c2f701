"""The time of a task by batch size; measuring it leaves no trace."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from evener.benchmark.dry_run import dry_run_of
from evener.benchmark.task_timing import affine, batch_sizes, time_task
from evener.comm.step_timing import StepTimer
from evener.records.errors import DoesNotFit, InvalidValue
from evener.records.profile import BatchTiming, TaskTiming
from support.accelerator import DEVICE, needs_device
from support.busy_machine import met_once_in
from support.told_clock import Clock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a machine busy with other things make times meaningless."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
    )


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def fetch(samples: int) -> tuple[Tensor, Tensor]:
    random.random()
    np.random.random()
    return torch.randn(samples, 1, 8, 8), torch.randint(3, (samples,))


def loss_step(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss


def timing(
    model: nn.Module,
    *,
    loss_step: Any = loss_step,
    fetch: Any = fetch,
    device: torch.device = CPU,
    timer: StepTimer | None = None,
    **options: Any,
) -> TaskTiming:
    defaults: dict[str, Any] = {"task": "digits", "precision": "fp32", "largest": 32, "seconds": 0.2}
    with dry_run_of(model, make_optimizer, loss_step, fetch, device) as trial:
        return time_task(trial, timer or StepTimer(device), **(defaults | options))


class Sleeper:
    """A loss whose forward takes 2 ms and 0.5 ms a sample, by the clock and not by the processor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.sizes.append(len(batch[0]))
        time.sleep(0.002 + 0.0005 * len(batch[0]))
        return loss_step(model, batch)


def numpy_position() -> int:
    """How many numbers NumPy's generator has drawn since it last refilled."""
    return int(np.random.get_state(legacy=False)["state"]["pos"])


def test_timing_preserves_model_gradients_and_random_state_bit_for_bit() -> None:
    model = network().eval()
    model.register_forward_pre_hook(lambda module, inputs: None)
    loss_step(model, fetch(4)).backward()  # type: ignore[no-untyped-call]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), numpy_position()
    timing(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(after) == len(gradients) == 6
    assert all(torch.equal(one, other) for one, other in zip(after, gradients, strict=True))
    assert not model.training
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert numpy_state == numpy_position()


def test_timing_leaves_no_gradients() -> None:
    model = network()
    timing(model, seconds=0.05)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.alone
@met_once_in(5)
def test_result_names_task_and_precision_and_measures_every_size() -> None:
    result = timing(network(), precision="bf16", largest=24, seconds=5.0)
    assert (result.task, result.precision, result.max_samples) == ("digits", "bf16", None)
    assert [batch.samples for batch in result.batches] == [2, 4, 8, 16, 24]
    assert all(batch.forward_seconds > 0 and batch.backward_seconds > 0 for batch in result.batches)
    assert 0 < result.update_seconds < 0.05


@pytest.mark.usefixtures("clock")
def test_fitted_line_matches_the_work() -> None:
    fixed, sample = affine(timing(network(), loss_step=Sleeper(), seconds=0.8, largest=64))
    assert sample == pytest.approx(0.0005)
    assert fixed == pytest.approx(0.002)


def test_sizes_that_would_exceed_the_time_are_skipped(clock: Clock) -> None:
    step = Sleeper()
    start = time.perf_counter()
    result = timing(network(), loss_step=step, largest=4096, seconds=0.3)
    assert clock.wall - start < 2
    assert 1 <= len(result.batches) < len(batch_sizes(4096))
    assert set(step.sizes) == {2, 4} | {batch.samples for batch in result.batches}, "2 and 4 to find what fits"


def test_single_batch_is_measured_even_if_it_exceeds_the_time() -> None:
    step = Sleeper()
    result = timing(network(), loss_step=step, seconds=1e-6)
    assert [batch.samples for batch in result.batches] == [2]
    assert result.batches[0].forward_seconds > 0.003


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("expected", "sizes"), [(0, [2]), (2, [2]), (5, [2, 4, 8]), (8, [2, 4, 8])])
def test_expected_batch_is_timed_even_if_it_takes_longer(expected: int, sizes: list[int]) -> None:
    step = Sleeper()
    result = timing(network(), loss_step=step, expected=expected, seconds=0.01)
    assert [batch.samples for batch in result.batches] == sizes
    assert affine(result)[1] == pytest.approx(0.0005 if expected > 2 else 0.0015)


def test_expected_batch_is_skipped_if_it_takes_over_half_a_minute(clock: Clock) -> None:
    def slow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        clock.compute(len(batch[0]))
        return loss_step(model, batch)

    result = timing(network(), loss_step=slow, expected=32, seconds=1.0)
    assert [batch.samples for batch in result.batches] == [2, 4]
    assert clock.wall < 50, "steps to find what fits, and the update, come on top"


@pytest.mark.usefixtures("clock")
def test_delayed_pass_does_not_count() -> None:
    step = Sleeper()

    def held_up(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(step.sizes) % 3 == 0:
            time.sleep(0.1)
        return step(model, batch)

    result = timing(network(), loss_step=held_up, largest=2, seconds=0.5)
    assert 0.003 <= result.batches[0].forward_seconds < 0.1


@pytest.mark.usefixtures("clock")
def test_fetching_batches_does_not_count_as_work() -> None:
    def slow_fetch(samples: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.1)
        return fetch(samples)

    result = timing(network(), fetch=slow_fetch, largest=2, seconds=0.3)
    assert result.batches[0].seconds < 0.1


class Work(nn.Module):
    """Computes for about 20 ms of processor time, whatever else runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return self.weight * inputs.sum()


@pytest.mark.alone
@pytest.mark.parametrize(("speed", "least"), [(0.5, 0.035), (0.25, 0.075)])
@met_once_in(5)
def test_slowed_node_takes_as_long_as_its_speed_requires(speed: float, least: float) -> None:
    def work(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = model(batch[0])
        return result

    timer = StepTimer(CPU, speed)
    result = timing(Work(), loss_step=work, timer=timer, largest=2, seconds=0.3)
    assert least < result.batches[0].forward_seconds < 3 * least
    assert timer.close_step(0)[0].seconds == 0, "what was timed must not be part of the next step"


def test_memory_bounds_the_sizes() -> None:
    tight = timing(network(), largest=4096, memory_limit=200_000, seconds=0.5)
    assert tight.max_samples is not None
    assert 2 <= tight.max_samples < 200
    assert all(batch.samples <= tight.max_samples for batch in tight.batches)
    with pytest.raises(DoesNotFit):
        timing(network(), memory_limit=2000)


@pytest.mark.parametrize(("option", "value"), [("largest", 0), ("seconds", 0.0), ("memory_limit", 0)])
def test_invalid_argument_is_named(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(InvalidValue, match=f"{option.replace('_', ' ')} must be positive"):
        timing(network(), **options)


@given(st.integers(1, 10**6))
def test_batch_sizes_are_few_increasing_and_end_with_the_largest(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert len(sizes) <= 21
    assert 1 not in sizes or largest == 1


@needs_device
def test_gpu_timing_preserves_its_random_state() -> None:
    device = torch.device(DEVICE)
    model = nn.Sequential(network(), nn.Dropout()).to(device)
    module = torch.get_device_module(device)
    before = module.get_rng_state(device)

    def fetch_there(samples: int) -> tuple[Tensor, ...]:
        return tuple(part.to(device) for part in fetch(samples))

    result = timing(model, device=device, timer=StepTimer(device), fetch=fetch_there)
    assert all(0 < batch.seconds < 1 for batch in result.batches)
    assert torch.equal(before, module.get_rng_state(device))


SIZES = st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True).map(sorted)


def timing_of(points: list[tuple[int, float]], update: float = 0.0) -> TaskTiming:
    batches = tuple(BatchTiming(samples=n, forward_seconds=t / 3, backward_seconds=t * 2 / 3) for n, t in points)
    return TaskTiming(task="t", precision="fp32", batches=batches, update_seconds=update)


@given(SIZES, st.floats(0, 0.1), st.floats(1e-6, 0.1), st.floats(0, 1))
def test_exact_line_is_recovered(sizes: list[int], fixed: float, sample: float, update: float) -> None:
    found = affine(timing_of([(n, fixed + sample * n) for n in sizes], update))
    scale = fixed + sample * sizes[-1]
    assert found[0] == pytest.approx(fixed + update, abs=1e-7 * scale)
    assert found[1] == pytest.approx(sample, abs=1e-7 * scale)


@given(SIZES, st.data())
def test_fitted_line_is_non_negative_and_optimal(sizes: list[int], data: st.DataObject) -> None:
    points = [(n, data.draw(st.floats(1e-4, 1.0))) for n in sizes]
    fixed, sample = affine(timing_of(points))
    assert fixed >= 0
    assert sample >= 0

    def error(a: float, b: float) -> float:
        return sum(((a + b * n) / t - 1) ** 2 for n, t in points)

    slowest = max(t for _, t in points)
    steps = [(i / 20) ** 2 for i in range(21)]
    rivals = product((slowest * s for s in steps), (slowest / sizes[0] * s for s in steps))
    assert error(fixed, sample) <= min(error(a, b) for a, b in rivals) + 1e-9


def test_single_batch_gives_a_line_through_zero() -> None:
    assert list(affine(timing_of([(8, 0.4)], update=0.1))) == pytest.approx([0.1, 0.05])


def test_small_batches_count_as_much_as_large_ones() -> None:
    fixed, _ = affine(timing_of([(1, 0.011), (10, 0.020), (1000, 1.2)]))
    assert fixed == pytest.approx(0.01, rel=0.1)


def test_batches_too_short_for_the_clock_are_accepted() -> None:
    assert list(affine(timing_of([(1, 0.0), (2, 0.0)]))) == pytest.approx([0, 0], abs=1e-8)
