"""The seam: what a back end has to bring, and that the engine needs nothing else."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff import nn, optim
from evener.autodiff.backends.interface import primitives
from evener.autodiff.backends.torch_backend import TorchBackend
from support.accelerator import DEVICE, needs_device


@pytest.mark.parametrize("name", primitives())
def test_backend_without_a_primitive_cannot_be_created(name: str) -> None:
    others = {other: getattr(ad.NumpyBackend, other) for other in primitives() if other != name}
    with pytest.raises(TypeError, match=f"{name}$"):
        type("Incomplete", (ad.Backend,), others)()


@pytest.mark.parametrize("name", primitives())
def test_backends_accept_the_same_arguments(name: str) -> None:
    numpy, torch = (inspect.signature(getattr(kind, name)).parameters for kind in (ad.NumpyBackend, TorchBackend))
    assert list(torch) == list(numpy)


def test_interface_documents_the_arguments_of_every_primitive() -> None:
    source = inspect.getsource(ad.Backend)
    said = dict(re.findall(r'    (\w+): Primitive\n    """\((.+?)\): ', source))
    assert len(said) > 30
    for name, arguments in said.items():
        taken = list(inspect.signature(getattr(ad.NumpyBackend, name)).parameters.values())[1:]
        assert [p.name + ("=None" if p.default is None else "") for p in taken] == arguments.split(", "), name


def test_tensors_keep_the_backend_that_created_them() -> None:
    before = ad.set_default_backend(TorchBackend())
    try:
        x = ad.ones(2, requires_grad=True)
    finally:
        ad.set_default_backend(before)
    y = (x * 2 + 1).sum()
    y.backward()
    assert y._lease.backend.name == "torch"
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def train(steps: int) -> list[float]:
    ad.manual_seed(5)
    images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    net = nn.Sequential(images, nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3)).double()
    optimizer, arena = optim.AdamW(net.parameters(), lr=0.01), ad.Arena()
    x, y, losses = ad.randn(6, 1, 8, 8, dtype=np.float64), ad.randint(0, 3, (6,)), []
    for _ in range(steps):
        with arena:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_network_trains_equally_on_both_backends() -> None:
    ours = train(20)
    before = ad.set_default_backend(TorchBackend())
    try:
        theirs = train(20)
    finally:
        ad.set_default_backend(before)
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert ours[-1] < ours[0] / 2


@needs_device
def test_network_trains_equally_on_a_gpu() -> None:
    ours = train(20)
    before = ad.set_default_backend(TorchBackend(DEVICE))
    try:
        theirs = train(20)
    finally:
        ad.set_default_backend(before)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)
