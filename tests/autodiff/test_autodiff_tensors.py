"""Tensors: how they are made, which type results have, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.autodiff.backends.torch_backend import TorchBackend
from evener.autodiff.errors import InvalidOperation
from support.refusals import refused

pool = torch.nn.functional.max_pool2d
TYPES = ["bool", "uint8", "int32", "int64", "float32", "float64"]


def name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("data", [1, 2.5, True, [1, 2], [[1.5], [2.5]], [], [True, False]])
def test_tensor_from_numbers_has_the_type_and_shape_of_pytorch(data: Any) -> None:
    ours, theirs = ad.tensor(data), torch.tensor(data)
    assert (name(ours), ours.shape, ours.tolist()) == (name(theirs), tuple(theirs.shape), theirs.tolist())


def test_tensor_copies_its_data_and_from_numpy_shares_it() -> None:
    array = np.zeros(2, np.float32)
    copied, shared = ad.tensor(array), ad.from_numpy(array)
    array[0] = 5
    assert (copied.tolist(), shared.tolist()) == ([0.0, 0.0], [5.0, 0.0])


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("b", TYPES)
@pytest.mark.parametrize("shapes", [((2,), (2,)), ((), (2,)), ((2,), ()), ((), ())])
def test_type_promotion_equals_pytorch(a: str, b: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    ours = ad.ones(shapes[0], dtype=a) * ad.ones(shapes[1], dtype=b)
    theirs = torch.ones(shapes[0], dtype=getattr(torch, a)) * torch.ones(shapes[1], dtype=getattr(torch, b))
    assert name(ours) == name(theirs)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("number", [True, 2, 2.5])
def test_type_promotion_with_numbers_equals_pytorch(a: str, number: Any) -> None:
    ours, theirs = ad.ones(2, dtype=a), torch.ones(2, dtype=getattr(torch, a))
    assert name(ours * number) == name(theirs * number)
    assert name(number + ours) == name(number + theirs)
    assert name(ours / 2) == name(theirs / 2)
    assert (number / ours).tolist() == (number / theirs).tolist()


@pytest.mark.parametrize("a", TYPES)
def test_reductions_of_every_type_have_the_type_of_pytorch(backend: ad.Backend, a: str) -> None:
    ours, theirs = ad.ones(2, 3, dtype=a), torch.ones(2, 3, dtype=getattr(torch, a))
    assert name(ours.sum()) == name(theirs.sum())
    assert ours.sum(1).tolist() == theirs.sum(1).tolist()
    assert a == "bool" or name(ours.argmax()) == "int64"  # PyTorch has none of truth values
    assert name(ours.exp()) == name(theirs.exp())


def test_single_precision_results_stay_in_single_precision(backend: ad.Backend) -> None:
    x = ad.randn(3, 4)
    for y in (x + 1, x * 2.5, 1 / x, x.mean(), F.gelu(x), x.softmax(1), x @ x.T, x.exp().log(), x**2, x.sigmoid()):
        assert y.dtype == np.float32


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(-5, 5), st.integers(-5, 5))
def test_shapes_equal_pytorch(sizes: list[int], a: int, b: int) -> None:
    ours, theirs = ad.zeros(sizes), torch.zeros(sizes)
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.squeeze(),
        lambda x: x.squeeze(a),
        lambda x: x.unsqueeze(a),
        lambda x: x.transpose(a, b),
        lambda x: x.flatten(a, b),
        lambda x: x.sum(a),
        lambda x: x.mean(dim=(a, b)),
        lambda x: x.argmax(a, keepdim=True),
        lambda x: x.softmax(a),
        lambda x: x.reshape(-1, 2),
        lambda x: x.expand(2, *x.shape),
        lambda x: x[a % 2 :, None],
    ]
    for call in calls:
        assert outcome(call, ours) == outcome(call, theirs)


def outcome(call: Callable[[Any], Any], x: Any) -> tuple[int, ...] | str:
    try:
        return tuple(call(x).shape)
    except (IndexError, RuntimeError, ValueError):
        return "refused"


@given(st.integers(0, 3), st.integers(1, 5), st.sampled_from([None, 0, 1]))
def test_maximum_and_its_gradient_equal_pytorch_in_a_tie(seed: int, size: int, dim: int | None) -> None:
    values = np.random.default_rng(seed).integers(0, 2, (size, 3)).astype(float)
    ours, theirs = ad.tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    if dim is None:
        ours.amax().backward()
        torch.autograd.backward(theirs.max())
    else:
        found, expected = ours.max(dim), theirs.max(dim)
        assert found.indices.tolist() == expected.indices.tolist()  # type: ignore[union-attr]
        found.values.sum().backward()  # type: ignore[union-attr]
        torch.autograd.backward(expected.values.sum())
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.tolist() == theirs.grad.tolist()


EXTREMES = [-np.inf, -1e308, -800.0, -40.0, -1.0, -1e-300, -0.0, 0.0, 1e-12, 1.0, 40.0, 800.0, 1e308, np.inf, np.nan]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (F.relu, torch.relu),
        (F.sigmoid, torch.sigmoid),
        (F.tanh, torch.tanh),
        (ad.Tensor.abs, torch.abs),
        (lambda x: x.softmax(0), lambda x: x.softmax(0)),
        (lambda x: x.log_softmax(0), lambda x: x.log_softmax(0)),
        (lambda x: x.maximum(x * 0 + 1), lambda x: x.maximum(x * 0 + 1)),
        (lambda x: F.max_pool2d(x.reshape(1, 1, 1, -1), (1, 2), 1), lambda x: pool(x.reshape(1, 1, 1, -1), (1, 2), 1)),
    ],
)
@pytest.mark.parametrize("finite", [True, False])
def test_extreme_values_and_ties_equal_pytorch(backend: ad.Backend, ours: Any, theirs: Any, finite: bool) -> None:
    values = np.array([value for value in EXTREMES * 2 if not finite or abs(value) < 1e300])
    x, y = ad.tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    with np.errstate(invalid="raise" if finite else "ignore", over="raise" if finite else "ignore"):
        found, expected = ours(x), theirs(y)
        found.sum().backward()
    expected.sum().backward()
    np.testing.assert_allclose(found.detach().numpy(), expected.detach().numpy(), rtol=1e-12, atol=1e-300)
    if finite:
        np.testing.assert_allclose(x.grad.numpy(), y.grad.numpy(), rtol=1e-12, atol=1e-300)  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "lowest", "precision"), [(np.float32, -12, 2e-5), (np.float64, -37, 1e-12)])
def test_normal_distribution_is_accurate_in_its_tails(kind: Any, lowest: float, precision: float) -> None:
    x = np.linspace(lowest, 9, 5000, dtype=kind)
    found = F.gelu(ad.from_numpy(x)).numpy() / x
    expected = [math.erfc(-value / math.sqrt(2)) / 2 for value in x.tolist()]  # PyTorch's own is wrong below -8
    np.testing.assert_allclose(found, expected, rtol=precision)


def test_masked_gradient_is_zero_even_if_infinite(backend: ad.Backend) -> None:
    x = ad.tensor([1.0, -1.0], requires_grad=True)
    F.relu(x).backward(ad.tensor([np.inf, np.inf]))
    assert x.grad is not None
    assert x.grad.tolist() == [np.inf, 0.0]


def test_where_accepts_numbers(backend: ad.Backend) -> None:
    x = ad.tensor([1.0, 2.0], requires_grad=True)
    y = ad.where(x > 1, x, 0.0)
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([0.0, 2.0], [0.0, 1.0])  # type: ignore[union-attr]
    assert ad.where(x > 1, 1.0, x * 5).tolist() == [5.0, 1.0]


def test_conversions_and_sizes_are_correct(backend: ad.Backend) -> None:
    x = ad.ones(2, 3)
    assert (x.size(), x.size(-1), x.dim(), x.numel(), len(x)) == ((2, 3), 3, 2, 6, 2)
    assert [name(y) for y in (x.double(), x.long(), x.double().float())] == ["float64", "int64", "float32"]
    assert x.to(np.float32) is x
    assert [row.tolist() for row in x] == [[1.0] * 3] * 2
    assert (float(ad.tensor(2.5)), int(ad.tensor(2)), bool(ad.tensor(0))) == (2.5, 2, False)
    assert range(5)[ad.tensor(3)] == 3
    assert np.asarray(x).sum() == 6
    assert hash(x) != hash(ad.ones(2, 3))


def test_representation_equals_pytorch() -> None:
    for data in ([1.0, 2.0], [1, 2], [[True], [False]], 3.0):
        assert repr(ad.tensor(data)).replace(" ", "") == repr(torch.tensor(data)).replace(" ", "")
    assert repr(ad.ones(1, dtype=np.float64, requires_grad=True)) == "tensor([1.], dtype=float64, requires_grad=True)"


def test_copy_sets_a_tensor_from_another_type(backend: ad.Backend) -> None:
    x = ad.zeros(2, 2)
    x.copy_(ad.ones(2, 2, dtype=np.int64))
    assert x.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: x + ad.ones(3), r"add of float32\[2, 2\] and float32\[3\]"),
        (lambda x: x @ ad.ones(3, 2), r"as many columns as rows after it, got shapes \(2, 2\) and \(3, 2\)"),
        (lambda x: x @ ad.tensor(2.0), "matmul needs vectors, matrices"),
        (lambda x: x.reshape(3, -1), r"shape \(2, 2\) cannot be reshaped to \(3, -1\)"),
        (lambda x: x.reshape(-1, -1), "cannot be reshaped"),
        (lambda x: x.permute(0, 0), "must name each of 2 dimensions"),
        (lambda x: x.expand(3), "at least 2 sizes"),
        (lambda x: x.expand(3, 2), r"expand of float32\[2, 2\]"),
        (lambda x: x.unsqueeze(4), "dim must be from -3 to 2, got 4"),
        (lambda x: x.flatten(1, 0), "start_dim must not lie behind end_dim"),
        (lambda x: x.reshape(1, 2, 2).T, "T is for matrices"),
        (lambda x: x[2], r"index of float32\[2, 2\].*out of"),
        (lambda x: x[0, 0, 0], r"index of float32\[2, 2\]"),
        (lambda x: x[1.5], "an index must be made of integers"),
        (lambda x: x.item(), "exactly one element"),
        (lambda x: bool(x), "exactly one element"),
        (lambda x: x.requires_grad_().numpy(), r"call detach\(\).numpy\(\)"),
        (lambda x: x.requires_grad_().copy_(x.detach()), r"inside no_grad\(\)"),
        (lambda x: x.copy_(ad.ones(3)), r"copy_ needs shape \(2, 2\), got \(3,\)"),
        (lambda x: ad.cat([]), "at least one tensor"),
        (lambda x: ad.cat([x, ad.ones(1, 3)]), r"concatenate of float32\[2, 2\] and float32\[1, 3\]"),
        (lambda x: ad.zeros(0, 2).amax(), "amax of no elements"),
        (lambda x: ad.zeros(0, 2).argmax(), "argmax of no elements"),
        (lambda x: x.to(np.float16), "bool, integers, float32 or float64, got float16"),
        (lambda x: ad.tensor(["a"]), "bool, integers, float32 or float64"),
        (lambda x: ad.from_numpy(np.ones(2, ">f4")), "native byte order"),
        (lambda x: x @ ad.ones(2, 3, 2), r"as many columns as rows after it, got shapes \(2, 2\) and \(2, 3, 2\)"),
        (
            lambda x: F.linear(x.to(np.int64), ad.ones(3, 2)),
            "linear needs floating-point input and weights, got int64 and float32",
        ),
        (
            lambda x: F.conv2d(x.reshape(1, 1, 2, 2).to(np.uint8), ad.ones(1, 1, 2, 2)),
            "conv2d needs floating-point input and weights, got uint8",
        ),
        (lambda x: x.requires_grad_().sum().backward(np.ones(())), "a gradient is a tensor, got ndarray"),
        (lambda x: ad.zeros(2, -1), r"sizes must not be negative, got \(2, -1\)"),
        (lambda x: ad.tensor([[1.0, 2.0], [3.0]]), "nested lists must be of equal lengths"),
        (lambda x: ad.optim.SGD([x], lr=0.1), r"takes parameters \(nn.Parameter\), got a Tensor"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, x > 0, is_causal=True), "either attn_mask or is_causal"),
    ],
)
def test_invalid_operations_are_refused(backend: ad.Backend, call: Callable[[ad.Tensor], Any], sentence: str) -> None:
    with pytest.raises(InvalidOperation, match=sentence):
        call(ad.ones(2, 2))


def test_tensor_on_a_read_only_array_cannot_be_written() -> None:
    shared = ad.from_numpy(np.broadcast_to(np.float32(1), (2, 2)))
    assert (shared * 2).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with refused(InvalidOperation):
        shared.copy_(ad.zeros(2, 2))


@pytest.mark.parametrize("step", [(-1, -2), (2, 1), (1, -1)])
def test_positive_and_negative_strides_are_read_correctly(step: tuple[int, int]) -> None:
    values = np.arange(24.0, dtype=np.float32).reshape(4, 6)[:: step[0], :: step[1]]
    x, w = ad.from_numpy(values).detach().requires_grad_(), ad.ones(3, values.shape[1])
    y = F.linear(x, w)
    y.sum().backward()
    np.testing.assert_array_equal(y.detach().numpy(), values @ np.ones((values.shape[1], 3), np.float32))
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.full(values.shape, 3))


@pytest.mark.parametrize("layer", ["conv2d", "max_pool2d", "avg_pool2d", "linear"])
def test_empty_batch_passes_every_layer_and_back(layer: str) -> None:
    calls: dict[str, Callable[[ad.Tensor], ad.Tensor]] = {
        "conv2d": lambda x: F.conv2d(x, ad.ones(4, 3, 3, 3), padding=1),
        "max_pool2d": lambda x: F.max_pool2d(x, 2),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "linear": lambda x: F.linear(x.flatten(1), ad.ones(5, 48)),
    }
    x = ad.zeros(0, 3, 4, 4, requires_grad=True)
    y = calls[layer](x)
    y.sum().backward()
    assert x.grad is not None
    assert (y.shape[0], x.grad.shape) == (0, (0, 3, 4, 4))


@pytest.mark.parametrize("call", [lambda x: x + "a", lambda x: x * None, lambda x: len(x.sum()), lambda x: x == [1]])
def test_operands_that_are_not_numbers_are_refused(call: Callable[[ad.Tensor], Any]) -> None:
    with pytest.raises(TypeError):
        call(ad.ones(2))


@pytest.mark.parametrize(
    "index",
    [
        (0, None, [0, 1]),
        (slice(None), 1, [2, 0]),
        (Ellipsis, 0, [True, False, True]),
        ([1, 0], slice(None), 2),
        ([1, 0], slice(None), [2, 0]),
        (1, [[0, 1], [1, 0]]),
        ([[True, False, True], [False, True, True]], 1),
        (-1, Ellipsis, [0]),
    ],
)
def test_mixed_indexing_orders_dimensions_as_pytorch(backend: ad.Backend, index: Any) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)[:, :, :3]
    ours, theirs = ad.tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    found, expected = ours[index], theirs[index]
    assert found.tolist() == expected.tolist()
    (found * found).sum().backward()
    torch.autograd.backward((expected * expected).sum())
    assert ours.grad.tolist() == theirs.grad.tolist()  # type: ignore[union-attr]


def test_missing_dimension_is_refused(backend: ad.Backend) -> None:
    with pytest.raises(IndexError, match=r"dim must be from -2 to 1 for a tensor of shape \(2, 2\), got 2"):
        ad.ones(2, 2).sum(2)


def test_tensors_of_two_backends_do_not_mix() -> None:
    x = ad.ones(2)
    before = ad.set_default_backend(TorchBackend())
    try:
        y = ad.ones(2)
    finally:
        ad.set_default_backend(before)
    with refused(InvalidOperation):
        x + y
    mixes: list[Callable[[], Any]] = [lambda: y + x, lambda: F.linear(x, ad.ones(3, 2), y), lambda: ad.cat([x, y])]
    for mix in mixes:
        with refused(InvalidOperation):
            mix()


def test_deep_copy_is_an_independent_leaf(backend: ad.Backend) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm2d(2))
    net[0].bias.requires_grad_(False)
    optim.SGD(net.parameters())
    copied = copy.deepcopy(net)
    copied[0].weight.requires_grad_()
    assert isinstance(copied[0].weight, nn.Parameter)
    assert [p.requires_grad for p in copied.parameters()] == [True, False, True, True]
    copied.load_state_dict({name: t.numpy() + 1 for name, t in net.state_dict().items()})
    assert net[1].running_mean.tolist() == [0.0, 0.0]
    optim.SGD(copied.parameters())
    with refused(InvalidOperation):
        copy.deepcopy(net[0].weight * 2)


def test_converting_a_model_after_creating_an_optimizer_is_refused() -> None:
    layer = nn.Linear(1, 1)
    optim.SGD(layer.parameters())
    with pytest.raises(InvalidOperation):
        layer.double()
