"""Values and gradients of every operation, against PyTorch and against central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff.backends.interface import Pair
from evener.autodiff.rules import RULES
from support.autodiff_operations import OPERATIONS, Operation

names = pytest.mark.parametrize("name", OPERATIONS)
few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@names
@few
@given(data=st.data())
def test_operations_equal_pytorch_to_twelve_digits(backend: ad.Backend, name: str, data: st.DataObject) -> None:
    operation = OPERATIONS[name]
    arrays, options = operation.draw(data)
    theirs = [torch.tensor(array, requires_grad=True) for array in arrays]
    expected = operation.theirs(*theirs, **options)
    ours = [ad.tensor(array, requires_grad=True) for array in arrays]
    found = operation.ours(*ours, **options)
    _close(found.detach().numpy(), expected)
    weights = np.random.default_rng(0).standard_normal(found.shape)
    torch.autograd.backward(expected, torch.from_numpy(weights))
    found.backward(ad.from_numpy(weights))
    for own, other in zip(ours, theirs, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        _close(own.grad.numpy(), other.grad)


def _close(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    assert found.shape == tuple(expected.shape)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-12, atol=1e-12)


@names
@few
@given(data=st.data())
def test_operations_agree_with_central_differences(name: str, data: st.DataObject) -> None:
    operation = OPERATIONS[name]
    arrays, options = operation.draw(data)
    _check(operation, arrays, options)


def _check(operation: Operation, arrays: list[Any], options: dict[str, Any]) -> None:
    inputs = [ad.tensor(array, requires_grad=True) for array in arrays]
    ad.gradcheck(lambda *tensors: operation.ours(*tensors, **options), inputs)


def test_tested_operations_cover_every_differentiable_rule() -> None:
    tested = set().union(*(operation.rules for operation in OPERATIONS.values())) | {"dropout"}  # has its own test
    assert tested == {name for name, rule in RULES.items() if rule.vjps != ()}


@pytest.mark.parametrize(
    ("channels", "filters", "kernel", "padding", "dilation", "groups"),
    [
        (4, 4, (3, 3), (1, 1), (1, 1), 1),  # gathered: as many values come back as went in
        (6, 4, (2, 3), (0, 2), (1, 2), 2),
        (4, 2, (1, 3), (0, 0), (2, 1), 1),
        (2, 6, (3, 2), (1, 0), (1, 1), 1),  # scattered: more come back
        (4, 2, (2, 2), (2, 1), (1, 1), 2),  # scattered: a result lies wholly in the padding
    ],
)
def test_stride_1_convolution_gradients_equal_pytorch(
    channels: int, filters: int, kernel: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, channels, 6, 7)), rng.standard_normal((filters, channels // groups, *kernel))
    options: dict[str, Any] = {"padding": padding, "dilation": dilation, "groups": groups}
    ours = [ad.tensor(array, requires_grad=True) for array in (x, w)]
    theirs = [torch.from_numpy(array).requires_grad_() for array in (x, w)]
    y = F.conv2d(ours[0], ours[1], **options)
    g = rng.standard_normal(y.shape)
    y.backward(ad.tensor(g))
    expected = torch.autograd.grad(torch.nn.functional.conv2d(theirs[0], theirs[1], **options), theirs, torch.tensor(g))
    for leaf, gradient in zip(ours, expected, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(leaf.grad.numpy(), gradient.numpy(), atol=1e-12)
