"""Modules: PyTorch's results, names, states and first values."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evener import autodiff as ad
from evener.autodiff import nn
from evener.autodiff.errors import InvalidOperation, StateMismatch
from support.refusals import refused

Pair = tuple[Callable[[Any], Any], tuple[int, ...]]
"""How to make a module from PyTorch's `nn` or ours, and the shape of its input."""

MODULES: dict[str, Pair] = {
    "linear": (lambda nn: nn.Linear(4, 3), (2, 5, 4)),
    "linear without bias": (lambda nn: nn.Linear(4, 3, bias=False), (2, 4)),
    "conv": (lambda nn: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), groups=2), (2, 4, 7, 8)),
    "conv without bias": (lambda nn: nn.Conv2d(2, 3, 1, bias=False), (2, 2, 3, 3)),
    "batch norm": (lambda nn: nn.BatchNorm2d(3, eps=1e-3, momentum=0.3), (4, 3, 2, 5)),
    "layer norm": (lambda nn: nn.LayerNorm((3, 4), eps=1e-3), (2, 3, 4)),
    "layer norm of one size": (lambda nn: nn.LayerNorm(4), (2, 3, 4)),
    "max pool": (lambda nn: nn.MaxPool2d(3, 2, padding=1, dilation=1), (2, 2, 7, 6)),
    "avg pool": (lambda nn: nn.AvgPool2d((2, 3), padding=(1, 0)), (2, 2, 7, 6)),
    "activations": (
        lambda nn: nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.GELU("tanh"), nn.Softmax(1)),
        (3, 4),
    ),
    "log softmax": (lambda nn: nn.LogSoftmax(dim=-1), (3, 4)),
    "flatten": (lambda nn: nn.Flatten(), (3, 4, 5)),
    "named": (lambda nn: nn.Sequential(OrderedDict(first=nn.Linear(4, 2), second=nn.Tanh())), (3, 4)),
    "network": (
        lambda nn: nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(36, 5),
        ),
        (2, 1, 8, 8),
    ),
}
modules = pytest.mark.parametrize("name", MODULES)


def twins(make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Our module and PyTorch's, float64, with the same state."""
    ours, theirs = make(nn).double(), make(torch.nn).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@modules
def test_results_gradients_and_statistics_equal_pytorch(backend: ad.Backend, name: str) -> None:
    make, shape = MODULES[name]
    ours, theirs = twins(make)
    for mode in (True, True, False):
        ours.train(mode), theirs.train(mode)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        own = ad.tensor(x.detach().numpy(), requires_grad=True)
        expected, found = theirs(x), ours(own)
        weights = torch.randn_like(expected)
        torch.autograd.backward(expected, weights)
        found.backward(ad.from_numpy(weights.numpy()))
        close(found.detach().numpy(), expected)
        close(own.grad.numpy(), x.grad)  # type: ignore[union-attr]
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(p.grad.numpy(), q.grad)
    for key, value in theirs.state_dict().items():
        close(ours.state_dict()[key].numpy(), value)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-11, atol=1e-12)


@modules
def test_state_has_the_names_order_shapes_and_types_of_pytorch(name: str) -> None:
    make, _ = MODULES[name]
    ours, theirs = make(nn).state_dict(), make(torch.nn).state_dict()
    assert [(key, t.shape, str(t.dtype)) for key, t in ours.items()] == [
        (key, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in theirs.items()
    ]
    names = [key for key, _ in make(nn).named_parameters()]
    assert names == [key for key, _ in make(torch.nn).named_parameters()]


@pytest.mark.parametrize("mask", [None, "numbers", "truth values"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_equals_pytorch(backend: ad.Backend, batch_first: bool, mask: str | None) -> None:
    ours, theirs = twins(lambda nn: nn.MultiheadAttention(6, 3, batch_first=batch_first))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    arrays = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 2, 6), (4, 2, 6), (4, 2, 6))]
    length = arrays[0].shape[1 if batch_first else 0]
    attn_mask = {
        None: None,
        "numbers": torch.randn(length, length, dtype=torch.float64),
        "truth values": torch.ones(length, length).triu(1).bool(),
    }[mask]
    expected, weights = theirs(*arrays, attn_mask=attn_mask)
    own = [ad.from_numpy(array.numpy()) for array in arrays]
    own_mask = None if attn_mask is None else ad.from_numpy(attn_mask.numpy())
    found, own_weights = ours(*own, attn_mask=own_mask)
    close(found.detach().numpy(), expected)
    close(own_weights.detach().numpy(), weights)
    assert ours(*own, need_weights=False)[1] is None
    expected.sum().backward()
    found.sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(p.grad.numpy(), q.grad)


def test_embedding_equals_pytorch(backend: ad.Backend) -> None:
    ours, theirs = twins(lambda nn: nn.Embedding(5, 3))
    index = torch.tensor([[0, 4, 4], [2, 4, 0]])
    found, expected = ours(ad.from_numpy(index.numpy())), theirs(index)
    (found * found).sum().backward()
    (expected * expected).sum().backward()
    close(found.detach().numpy(), expected)
    close(ours.weight.grad.numpy(), theirs.weight.grad)


@pytest.mark.parametrize(
    "make",
    [
        lambda nn: nn.Linear(300, 400),
        lambda nn: nn.Conv2d(16, 64, 5, groups=2),
        lambda nn: nn.Embedding(300, 200),
        lambda nn: nn.MultiheadAttention(128, 4),
        lambda nn: nn.BatchNorm2d(9),
        lambda nn: nn.LayerNorm(9),
    ],
)
def test_initial_values_are_distributed_as_in_pytorch(make: Callable[[Any], Any]) -> None:
    ours, theirs = make(nn).state_dict(), make(torch.nn).state_dict()
    for name, expected in theirs.items():
        found = ours[name].numpy().ravel().astype(float)
        values = expected.numpy().ravel().astype(float)
        spread = values.std() if values.size > 1 else 0.0
        many = max(values.size, 1) ** 0.5
        assert found.mean() == pytest.approx(values.mean(), abs=6 * spread / many)
        assert found.std() == pytest.approx(spread, rel=6 / many)
        if "weight" in name and values.size > 1000 and "Embedding" not in str(make(nn)):
            assert np.abs(found).max() == pytest.approx(np.abs(values).max(), rel=0.01)


def test_seed_determines_the_initial_values(backend: ad.Backend) -> None:
    ad.manual_seed(7)
    first, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ad.manual_seed(7)
    again = nn.Linear(3, 2)
    assert again.weight.tolist() == first.weight.tolist() != other.weight.tolist()


def test_random_state_can_be_restored() -> None:
    ad.rand(3)
    state = json.loads(json.dumps(ad.get_rng_state()))
    expected = [ad.randn(2).tolist(), ad.randint(0, 100, (3,)).tolist(), ad.randperm(5).tolist()]
    ad.set_rng_state(state)
    assert [ad.randn(2).tolist(), ad.randint(0, 100, (3,)).tolist(), ad.randperm(5).tolist()] == expected


def test_state_with_wrong_names_or_shapes_is_refused_without_changes() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = {name: tensor.tolist() for name, tensor in net.state_dict().items()}
    state = {"0.weight": np.zeros((2, 2)), "0.bias": np.zeros(3), "1.weight": np.zeros((1, 2)), "2.bias": np.zeros(1)}
    with pytest.raises(StateMismatch) as caught:
        net.load_state_dict(state)
    assert "1.bias is missing" in str(caught.value)
    assert "2.bias is unknown" in str(caught.value)
    assert "0.bias has shape (3,) instead of (2,)" in str(caught.value)
    assert {name: tensor.tolist() for name, tensor in net.state_dict().items()} == before
    del state["0.bias"]
    net.load_state_dict(state, strict=False)
    assert net[0].weight.tolist() == [[0, 0], [0, 0]]
    assert net[1].bias.tolist() == before["1.bias"]


def test_weights_round_trip_to_pytorch_through_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    make, shape = MODULES["network"]
    ours, theirs = twins(make)
    x = np.random.default_rng(0).standard_normal(shape)
    ad.save_file(ours.state_dict(), tmp_path / "ours.safetensors")
    fresh = make(torch.nn).double()
    fresh.load_state_dict(safetensors.load_file(tmp_path / "ours.safetensors"))
    close(ours.eval()(ad.from_numpy(x)).detach().numpy(), fresh.eval()(torch.from_numpy(x)))
    safetensors.save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    again = make(nn).double()
    again.load_state_dict(ad.load_file(tmp_path / "theirs.safetensors"))
    close(again.eval()(ad.from_numpy(x)).detach().numpy(), theirs.eval()(torch.from_numpy(x)))


def test_transposed_values_are_saved_in_logical_order(tmp_path: Any) -> None:
    values = ad.arange(6).reshape(2, 3).T
    ad.save_file({"x": values}, tmp_path / "x.safetensors")
    assert ad.load_file(tmp_path / "x.safetensors")["x"].tolist() == values.tolist()


# How a module holds its parts.


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.scale = nn.Parameter(ad.ones(1))
        self.register_buffer("count", ad.zeros(1))
        self.bias: nn.Parameter | None = None

    def forward(self, x: ad.Tensor) -> ad.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def test_submodules_are_found_by_their_attribute_names() -> None:
    net = Custom()
    assert [name for name, _ in net.named_parameters()] == [
        "scale", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
    ]  # fmt: skip
    assert [name for name, _ in net.named_buffers()] == ["count"]
    assert [name for name, _ in net.named_modules()] == ["", "layers", "layers.0", "layers.1"]
    assert [name for name, _ in net.named_children()] == ["layers"]
    net.bias = nn.Parameter(ad.ones(1))
    assert "bias" in dict(net.named_parameters())
    net.bias = None
    del net.scale
    assert next(net.named_parameters())[0] == "layers.0.weight"
    net.count = ad.ones(1)
    assert net.state_dict()["count"].tolist() == [1.0]
    with pytest.raises(TypeError, match="count is a parameter, buffer or module; it cannot become float"):
        net.count = 2.0


def test_shared_module_is_found_once_and_saved_under_both_names() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    assert len(list(net.parameters())) == 2
    assert list(net.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_module_without_super_init_is_reported() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Linear(1, 1)

    with refused(InvalidOperation):
        Forgetful()


def test_training_mode_reaches_all_submodules() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    assert not any(module.training for module in net.eval().modules())
    assert all(module.training for module in net.train().modules())


def test_dropout_preserves_the_mean_and_acts_only_in_training(backend: ad.Backend) -> None:
    layer, x = nn.Dropout(0.25), ad.ones(200, 200, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert set(np.unique(y.detach().numpy())) == {np.float32(0), np.float32(1 / 0.75)}
    assert y.mean().item() == pytest.approx(1.0, abs=0.02)
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), y.detach().numpy())
    assert layer.eval()(x) is x
    assert float(nn.Dropout(1.0)(x).sum()) == 0.0


def test_dropout_draws_the_same_mask_on_every_backend(backend: ad.Backend) -> None:
    drawn = np.random.default_rng(0).random(8, np.float32)  # the seed of these tests
    expected = 2.0 * (drawn >= 0.5)
    assert nn.Dropout(0.5)(ad.ones(8)).tolist() == expected.tolist()


def test_representation_shows_submodules() -> None:
    text = repr(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Linear(4, 5, bias=False))))
    assert (
        "(0): Conv2d(weight=(2, 1, 3, 3), bias=(2,), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)" in text
    )
    assert "    (0): Linear(weight=(5, 4))\n  )\n)" in text
    assert repr(nn.Dropout(0.1)) == "Dropout(p=0.1)"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: nn.Linear(3, 2)(ad.ones(1, 4)), "linear needs 3 features in the last dimension"),
        (lambda: nn.Conv2d(3, 2, 3)(ad.ones(1, 4, 5, 5)), r"cannot take 4 channels to weights of shape \(2, 3, 3, 3\)"),
        (
            lambda: nn.Conv2d(1, 1, 3)(ad.ones(1, 1, 2, 5)),
            r"window over \(3, 3\) does not fit an image \(2, 5\) padded by \(0, 0\)",
        ),
        (lambda: nn.Conv2d(3, 2, 3, groups=2), "groups must divide 3 and 2 channels, got 2"),
        (lambda: nn.MaxPool2d(2, padding=2)(ad.ones(1, 1, 5, 5)), "at most half its kernel"),
        (lambda: nn.AvgPool2d(2)(ad.ones(5, 5)), r"pooling needs \[N, C, H, W\], got \(5, 5\)"),
        (lambda: nn.MaxPool2d(2, stride=0)(ad.ones(1, 1, 5, 5)), "stride and dilation must be at least 1"),
        (lambda: nn.BatchNorm2d(2)(ad.ones(1, 2, 1, 1)), "more than one value a channel"),
        (lambda: nn.BatchNorm2d(2)(ad.ones(2, 2)), r"BatchNorm2d needs \[N, C, H, W\]"),
        (lambda: nn.LayerNorm(3)(ad.ones(2, 4)), r"ends in \(3,\), got \(2, 4\)"),
        (lambda: nn.Embedding(3, 2)(ad.tensor([3])), "index is outside 0..2|out of range"),
        (lambda: nn.Embedding(3, 2)(ad.tensor([-1])), "index is outside 0..2|out of range"),
        (lambda: nn.Embedding(3, 2)(ad.ones(1)), "index of integers, got float32"),
        (lambda: nn.NLLLoss()(ad.ones(2, 3), ad.tensor([0, 3])), "index is outside 0..2|out of bounds"),
        (lambda: nn.NLLLoss()(ad.ones(2, 3), ad.tensor([0, -1])), "index is outside 0..2|out of bounds"),
        (lambda: nn.CrossEntropyLoss()(ad.ones(2, 3), ad.ones(2)), "integer classes"),
        (lambda: nn.CrossEntropyLoss()(ad.ones(2, 3), ad.tensor([0])), "without dimension 1"),
        (lambda: nn.MSELoss()(ad.ones(2), ad.ones(2, 1)), "equal shapes"),
        (lambda: nn.MSELoss("most")(ad.ones(2), ad.ones(2)), "'mean', 'sum' or 'none', got 'most'"),
        (lambda: nn.Dropout(1.5)(ad.ones(2)), "p must be from 0 to 1, got 1.5"),
        (lambda: nn.GELU("fast")(ad.ones(2)), "'none' or 'tanh', got 'fast'"),
        (lambda: nn.MultiheadAttention(5, 2), "num_heads must divide embed_dim 5, got 2"),
    ],
)
def test_wrong_inputs_are_refused(backend: ad.Backend, call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InvalidOperation, match=sentence):
        call()
