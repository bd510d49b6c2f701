"""The flat buffers: what is sent, saved and stepped is one contiguous array, and backward writes into it."""

from __future__ import annotations

import numpy as np
import pytest

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.autodiff.errors import InvalidOperation
from evener.autodiff.parameters import Parameter, arena_of
from support.refusals import refused


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def host(backend: ad.Backend, array: object) -> np.ndarray:
    return np.array(backend.to_numpy(array))


def test_flat_values_are_contiguous(backend: ad.Backend) -> None:
    net = model()
    before = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    arena = ad.ParameterArena(net.named_parameters())
    assert [(e.name, e.shape, e.offset, e.size) for e in arena.entries] == [
        ("0.weight", (4, 3), 0, 12),
        ("0.bias", (4,), 12, 4),
        ("2.weight", (2, 4), 16, 8),
        ("2.bias", (2,), 24, 2),
    ]
    assert arena.size == 26
    flat = host(backend, arena.values)
    assert flat.tolist() == np.concatenate([value.ravel() for value in before.values()]).tolist()
    assert flat.dtype == np.float32


def test_tensors_and_flat_values_share_memory(backend: ad.Backend) -> None:
    net = model()
    arena = ad.ParameterArena(net.parameters())
    arena.load(np.arange(26, dtype=np.float32))
    assert net[2].bias.tolist() == [24.0, 25.0]
    net.load_state_dict({name: np.zeros(p.shape) for name, p in net.named_parameters()})
    assert not host(backend, arena.values).any()


def test_backward_writes_into_the_flat_gradients(backend: ad.Backend) -> None:
    net = model()
    x = ad.randn(5, 3)
    net(x).sum().backward()
    expected = np.concatenate([p.grad.numpy().ravel() for p in net.parameters() if p.grad is not None])
    net.zero_grad()
    arena = ad.ParameterArena(net.parameters())
    net(x).sum().backward()
    np.testing.assert_array_equal(host(backend, arena.gradients), expected)
    net(x).sum().backward()
    np.testing.assert_allclose(host(backend, arena.gradients), 2 * expected, rtol=1e-6)
    arena.zero_grad()
    assert net[0].weight.grad is None
    net(x).sum().backward()
    np.testing.assert_array_equal(host(backend, arena.gradients), expected)


def test_layer_gradient_is_computed_in_place(backend: ad.Backend) -> None:
    net = nn.Linear(3, 2)
    arena = ad.ParameterArena(net.parameters())
    net(ad.ones(1, 3)).sum().backward()
    assert net.weight.grad is not None
    flat = backend.to_numpy(arena.gradients)
    flat[0] = 77
    assert net.weight.grad.tolist()[0][0] == 77


def test_gradients_without_contributions_are_zero(backend: ad.Backend) -> None:
    net = model()
    arena = ad.ParameterArena(net.parameters())
    net(ad.ones(1, 3)).sum().backward()
    arena.zero_grad()
    net[2].bias.sum().backward()
    assert host(backend, arena.gradients).tolist() == [0.0] * 24 + [1.0, 1.0]
    assert net[0].weight.grad is None


def test_existing_gradients_move_into_the_arena(backend: ad.Backend) -> None:
    net = nn.Linear(1, 1)
    net(ad.full((1, 1), 5.0)).sum().backward()
    arena = ad.ParameterArena(net.parameters())
    assert host(backend, arena.gradients).tolist() == [5.0, 1.0]


def test_loaded_flat_gradients_are_used_by_the_step(backend: ad.Backend) -> None:
    net = nn.Linear(2, 1)
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    optimizer.arena.load(np.zeros(3))
    optimizer.zero_grad()
    optimizer.step()
    assert net.weight.tolist() == [[0.0, 0.0]]
    optimizer.arena.load_gradients([1.0, 2.0, 3.0])
    optimizer.step()
    assert host(backend, optimizer.arena.values).tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("method", ["load", "load_gradients"])
def test_arrays_of_the_wrong_size_are_refused(method: str) -> None:
    arena = ad.ParameterArena(nn.Linear(2, 1).parameters())
    with refused(InvalidOperation):
        getattr(arena, method)(np.zeros(4))


def test_shared_parameter_is_stored_once(backend: ad.Backend) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    arena = ad.ParameterArena(net.named_parameters())
    assert [e.name for e in arena.entries] == ["0.weight"]
    net(ad.ones(1, 2)).sum().backward()
    flat = host(backend, arena.gradients)
    w = net[0].weight.detach().numpy()
    ones = np.ones((1, 2), np.float32)
    expected = w.T @ ones.T @ ones + ones.T @ (ones @ w.T)
    np.testing.assert_allclose(flat.reshape(2, 2), expected, rtol=1e-6)


def test_frozen_parameter_collects_no_gradient_and_can_be_unfrozen(backend: ad.Backend) -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    net[0].requires_grad_(False)
    before = net[0].weight.tolist()
    F.mse_loss(net(ad.ones(1, 3)), ad.zeros(1, 2)).backward()
    optimizer.step()
    assert net[0].weight.tolist() == before
    net[0].requires_grad_()
    F.mse_loss(net(ad.ones(1, 3)), ad.zeros(1, 2)).backward()
    assert host(backend, optimizer.arena.gradients)[:12].any()


def test_optimizers_share_the_existing_arena() -> None:
    net = model()
    arena = ad.ParameterArena(net.named_parameters())
    assert optim.SGD(net.parameters()).arena is arena
    assert optim.Adam(net[0].parameters()).arena is arena
    assert arena_of(list(net.parameters())) is arena


def test_parameters_of_different_arenas_are_refused() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    ad.ParameterArena(a.parameters())
    with refused(InvalidOperation):
        optim.SGD([*a.parameters(), *b.parameters()])
    with refused(InvalidOperation):
        ad.ParameterArena(a.named_parameters())


def test_arena_requires_parameters_of_one_type() -> None:
    with refused(InvalidOperation):
        ad.ParameterArena([])
    with refused(InvalidOperation):
        ad.ParameterArena([ad.ones(1)])  # type: ignore[arg-type]
    with refused(InvalidOperation):
        ad.ParameterArena([Parameter(ad.ones(1)), Parameter(ad.ones(1, dtype=np.float64))])


def test_parameter_created_inside_an_arena_outlives_it(backend: ad.Backend) -> None:
    with ad.Arena():
        layer = nn.Linear(2, 2)
    assert layer(ad.ones(1, 2)).shape == (1, 2)


def test_parameter_used_outside_layers_gets_its_gradient(backend: ad.Backend) -> None:
    w = Parameter(ad.ones(2, 3))
    arena = ad.ParameterArena([w])
    ((w * ad.full((4, 2, 3), 2.0)).sum() + w[0].sum() + w.T.sum()).backward()
    assert host(backend, arena.gradients).reshape(2, 3).tolist() == [[10.0] * 3, [9.0] * 3]
