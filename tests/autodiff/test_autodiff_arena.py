"""The arena of an iteration: bump allocation, one reset, no silent garbage, nothing from the system."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.autodiff.errors import InvalidOperation, TensorExpired
from support.refusals import refused


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 10),
    )


def everything() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.LayerNorm(4 * 7 * 7),
        nn.Linear(4 * 7 * 7, 64),
        nn.Sigmoid(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))


def training(
    model: nn.Module, optimizer: Callable[..., optim.Optimizer], batch: int = 64
) -> tuple[Callable[[], float], ad.Arena]:
    arena = ad.Arena()
    steps = optimizer(model.parameters(), lr=0.01)
    x, y = ad.randn(batch, 1, 28, 28), ad.randint(0, 10, (batch,))

    def step() -> float:
        with arena:
            steps.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            steps.step()
            return float(loss)

    return step, arena


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("model", [mlp, lenet, everything])
def test_steps_after_the_first_allocate_no_array_memory(
    model: Callable[[], nn.Module], optimizer: Callable[..., optim.Optimizer]
) -> None:
    step, arena = training(model(), optimizer)
    step()
    held = arena.num_bytes
    step()  # makes the array objects of the single chunk that the arena has moved into
    gc.collect()
    buffers = np.setbufsize(16)  # NumPy's iterators borrow buffers of 8192 elements, and give them back at once
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            step()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        np.setbufsize(buffers)
    assert arena.num_bytes == held
    assert held > 300_000
    assert peak < 20_000  # Python's own objects


def test_convolution_needs_little_more_memory_than_its_images() -> None:
    model, x = nn.Conv2d(8, 8, 3, padding=1), ad.randn(400, 8, 16, 16, requires_grad=True)
    arena = ad.Arena()
    for _ in range(2):
        with arena:
            model(x).sum().backward()
    image_bytes = 4 * 400 * 8 * 16 * 16  # gathering all taps of a batch at once would take 9 times this, twice
    assert arena.num_bytes < 5 * image_bytes


def test_arena_reuses_memory_freed_within_an_iteration(backend: ad.Backend) -> None:
    arena = ad.Arena()
    kind = backend.native(np.dtype(np.float32))
    for _ in range(3):
        with arena:
            kept = backend.fill(backend.new((100,), kind), 1)
            for _ in range(1000):
                mark = backend.mark()
                backend.fill(backend.new((1000,), kind), 2)
                backend.rewind(mark)
            assert backend.to_numpy(kept).tolist() == [1.0] * 100
            assert backend.to_numpy(backend.fill(backend.new((100,), kind), 3)).tolist() == [3.0] * 100
    assert arena.num_bytes < 100_000


def test_training_is_equal_with_and_without_an_arena(backend: ad.Backend) -> None:
    losses = []
    for inside in (True, False):
        ad.manual_seed(3)
        step, _ = training(lenet(), optim.SGD, batch=4)
        if inside:
            losses.append([step() for _ in range(4)])
            continue
        ad.manual_seed(3)
        model = lenet()
        steps = optim.SGD(model.parameters(), lr=0.01)
        x, y = ad.randn(4, 1, 28, 28), ad.randint(0, 10, (4,))
        plain = []
        for _ in range(4):
            steps.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            steps.step()
            plain.append(float(loss))
        losses.append(plain)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def uses(x: ad.Tensor, other: ad.Tensor) -> list[Callable[[], Any]]:
    return [
        lambda: x + 1,
        lambda: other * x,
        lambda: x.sum(),
        lambda: x.item(),
        lambda: x.numpy(),
        lambda: x.tolist(),
        lambda: x.detach(),
        lambda: x.clone(),
        lambda: x[0],
        lambda: other[x],
        lambda: np.asarray(x),
        lambda: ad.cat([other, x]),
        lambda: bool(x == 1),
        lambda: other.copy_(x),
    ]


@pytest.mark.parametrize("number", range(14))
def test_every_use_of_a_tensor_after_the_reset_is_refused(backend: ad.Backend, number: int) -> None:
    other = ad.zeros(1)
    with ad.Arena():
        x = other + 1
    with refused(TensorExpired):
        uses(x, other)[number]()
    assert "iteration 1 of an arena, which is over" in repr(x)


def test_backward_after_the_reset_is_refused(backend: ad.Backend) -> None:
    x = ad.ones(2, requires_grad=True)
    with ad.Arena():
        y = (x * 2).sum()
    with pytest.raises(TensorExpired):
        y.backward()
    arena = ad.Arena()
    with arena:
        y = x * 2
    with pytest.raises(TensorExpired), arena:
        y.sum()
    assert x.grad is None


def test_extracted_values_outlive_the_arena(backend: ad.Backend) -> None:
    arena = ad.Arena()
    x = ad.ones(3, requires_grad=True)
    with arena:
        y = x * 2
        y.sum().backward()
        taken, number = y.detach().numpy(), y.sum().item()
    with arena:
        x.detach() * 100  # goes where y was
    assert (taken.tolist(), number) == ([2.0, 2.0, 2.0], 6.0)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]  # belongs to x, which was made outside


def test_exception_inside_an_arena_frees_all_memory(backend: ad.Backend) -> None:
    arena = ad.Arena()
    made = []

    def fail() -> None:
        with arena:
            made.append(ad.ones(1) * 2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(TensorExpired):
        made[0] + 1
    y = ad.ones(1) * 2  # outside again
    with arena:
        pass
    assert y.item() == 2


def test_nested_arena_leaves_the_outer_one_usable(backend: ad.Backend) -> None:
    with ad.Arena():
        a = ad.ones(2) * 2
        with ad.Arena():
            b = a + 1
            assert b.tolist() == [3.0, 3.0]
        c = a + 2
        assert c.tolist() == [4.0, 4.0]
        with pytest.raises(TensorExpired):
            b + 1


def test_gradient_lives_as_long_as_its_leaf(backend: ad.Backend) -> None:
    inner = ad.Arena()
    with ad.Arena():
        x = ad.ones(3, requires_grad=True)
        with inner:
            (x * 2).sum().backward()
        with inner:
            ad.full((3,), 7.0)  # goes where the inner arena's temporaries were
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_arenas_must_be_left_in_reverse_order() -> None:
    first, second = ad.Arena(), ad.Arena()
    first.__enter__()
    second.__enter__()
    with refused(InvalidOperation):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    with refused(InvalidOperation):
        first.__exit__(None, None, None)


def test_entering_an_arena_twice_is_refused() -> None:
    arena = ad.Arena()
    with arena, pytest.raises(InvalidOperation), arena:
        pass


def test_arena_handles_changing_shapes(backend: ad.Backend) -> None:
    arena = ad.Arena()
    for size in (3, 1000, 5, 100_000, 5, 1000):
        with arena:
            x = ad.full((size,), 2.0)
            assert float((x * x).sum()) == 4 * size


def test_arrays_of_one_iteration_do_not_overlap() -> None:
    arena = ad.Arena()
    rng = np.random.default_rng(0)
    for _ in range(5):
        with arena:
            kept = []
            for number in range(50):
                shape = tuple(int(n) for n in rng.integers(0, 40, rng.integers(0, 4)))
                kind = [np.float32, np.float64, np.int64, np.bool_, np.uint8][number % 5]
                kept.append((number, ad.full(shape, number % 2, dtype=kind)))
            for number, tensor in kept:
                assert (tensor.numpy() == number % 2).all()


def test_arrays_begin_at_a_cache_line() -> None:
    arena = ad.Arena()
    for _ in range(2):
        with arena:
            for size in (1, 7, 100_001):
                assert ad.zeros(size)._array.ctypes.data % 64 == 0


@pytest.mark.parametrize("taps_bytes", [1, 3000, 9000])
@pytest.mark.parametrize(("groups", "stride", "padding"), [(1, 1, 1), (2, 2, 0), (1, 2, 2)])
def test_convolution_in_parts_equals_that_of_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch, taps_bytes: int, groups: int, stride: int, padding: int
) -> None:
    layer = nn.Conv2d(4, 6, 3, stride=stride, padding=padding, groups=groups)
    x = ad.randn(7, 4, 9, 8, requires_grad=True)

    def outcome() -> list[Any]:
        x.grad = None
        layer.zero_grad()
        with ad.Arena():
            y = layer(x)
            (y * y).sum().backward()
            assert layer.weight.grad is not None
            assert x.grad is not None
            return [tensor.numpy().copy() for tensor in (y.detach(), layer.weight.grad, x.grad)]

    whole = outcome()
    monkeypatch.setattr("evener.autodiff.backends.numpy_images.TAPS_BYTES", taps_bytes)
    for expected, found in zip(whole, outcome(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
