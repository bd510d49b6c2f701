"""The graph and the loop that walks it backwards."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from evener import autodiff as ad
from evener.autodiff import nn, optim
from evener.autodiff.errors import GraphFreed, InvalidOperation, NoGradient, ParameterChanged
from evener.autodiff.graph import Node
from support.refusals import refused


def leaf(*values: float) -> ad.Tensor:
    return ad.tensor(list(values), dtype=np.float64, requires_grad=True)


def grad(tensor: ad.Tensor) -> Any:
    assert tensor.grad is not None
    return tensor.grad.tolist()


def test_reused_value_gets_the_sum_of_all_paths(backend: ad.Backend) -> None:
    x = leaf(2.0, 3.0)
    y = x * x
    (y * y + y + x).sum().backward()
    assert grad(x) == [4 * 8 + 4 + 1, 4 * 27 + 6 + 1]


def test_gradients_accumulate_until_they_are_cleared(backend: ad.Backend) -> None:
    x = leaf(1.0, 2.0)
    for _ in range(3):
        (x * 2).sum().backward()
    assert grad(x) == [6.0, 6.0]
    x.grad = None
    assert x.grad is None
    (x * 2).sum().backward()
    assert grad(x) == [2.0, 2.0]


def test_leaves_of_a_sum_do_not_share_their_gradient(backend: ad.Backend) -> None:
    x, y = leaf(1.0), leaf(2.0)
    (x + y).sum().backward()
    (x * 5).sum().backward()
    assert (grad(x), grad(y)) == ([6.0], [1.0])


def test_pass_through_gradient_is_not_modified_in_place(backend: ad.Backend) -> None:
    x = leaf(1.0)
    a = x + 0.0
    b = a + 0.0
    (a + b + b).sum().backward()
    assert grad(x) == [3.0]


def test_broadcast_operands_get_summed_gradients(backend: ad.Backend) -> None:
    x, bias = ad.ones(4, 3, dtype=np.float64, requires_grad=True), leaf(1.0, 2.0, 3.0)
    (x * bias).sum().backward()
    assert grad(bias) == [4.0, 4.0, 4.0]
    assert grad(x) == [[1.0, 2.0, 3.0]] * 4


def test_long_chain_of_operations_is_differentiated(backend: ad.Backend) -> None:
    x = leaf(1.0)
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.backward()
    assert grad(x) == [1.0]


def test_long_chain_of_operations_is_freed_without_recursion() -> None:
    y = leaf(1.0)
    for _ in range(100_000):
        y = -y
    del y


def test_backward_of_a_non_scalar_needs_a_gradient(backend: ad.Backend) -> None:
    x = leaf(1.0, 2.0)
    with refused(NoGradient):
        (x * 2).backward()
    (x * 2).backward(ad.tensor([1.0, 10.0]))
    assert grad(x) == [2.0, 20.0]
    with refused(InvalidOperation):
        (x * 2).backward(ad.ones(3))


def test_backward_without_differentiable_inputs_is_refused() -> None:
    with pytest.raises(NoGradient):
        ad.ones(1).sum().backward()


def test_freed_graph_is_refused_before_any_gradient_is_added(backend: ad.Backend) -> None:
    x = leaf(2.0)
    y = x * x
    y.backward()
    with refused(GraphFreed):
        y.backward()
    with pytest.raises(GraphFreed):
        (y * x).backward()  # its own node is new, the one behind it is freed
    assert grad(x) == [4.0]


def test_retained_graph_can_be_differentiated_again(backend: ad.Backend) -> None:
    x = leaf(2.0)
    y = (x * x).exp().log()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    assert grad(x) == pytest.approx([12.0])


def test_freeing_a_graph_releases_saved_values() -> None:
    y = leaf(2.0) * 3.0
    node = y._edge
    assert isinstance(node, Node)
    y.backward()
    assert (node.saved, tuple(node.edges)) == (None, ())


def test_no_grad_records_nothing(backend: ad.Backend) -> None:
    x = leaf(1.0)
    with ad.no_grad():
        y = x * 2
        with ad.no_grad():
            pass
        assert not ad.is_grad_enabled()
    assert not y.requires_grad
    assert ad.is_grad_enabled()
    assert ad.no_grad()(lambda: (x * 2).requires_grad)() is False


def test_no_grad_affects_only_its_own_thread() -> None:
    seen = []
    with ad.no_grad():
        thread = threading.Thread(target=lambda: seen.append((leaf(1.0) * 2).requires_grad))
        thread.start()
        thread.join()
    assert seen == [True]


def test_detached_tensor_stops_the_gradient(backend: ad.Backend) -> None:
    x = leaf(3.0)
    (x * x.detach()).backward()
    assert grad(x) == [3.0]


def test_only_leaf_tensors_store_gradients() -> None:
    x = leaf(1.0)
    y = x * 2
    y.backward()
    assert (x.is_leaf, y.is_leaf, y.grad) == (True, False, None)
    with pytest.raises(NoGradient):
        y.grad = ad.ones(1)
    with refused(InvalidOperation):
        y.requires_grad_(False)


def test_gradient_can_be_assigned(backend: ad.Backend) -> None:
    x = leaf(1.0, 1.0)
    x.grad = ad.tensor([3.0, 4.0], dtype=np.float64)
    (x * 2).sum().backward()
    assert grad(x) == [5.0, 6.0]
    with refused(InvalidOperation):
        x.grad = ad.ones(1)


def test_only_floating_point_tensors_have_gradients() -> None:
    with refused(InvalidOperation):
        ad.tensor([1, 2], requires_grad=True)


def test_operations_without_gradient_are_not_recorded(backend: ad.Backend) -> None:
    x = leaf(1.0, 2.0)
    assert not (x > 1).requires_grad
    assert not x.argmax().requires_grad


def test_gradients_have_the_dtype_of_their_tensors(backend: ad.Backend) -> None:
    single, double = ad.ones(2, requires_grad=True), leaf(2.0, 3.0)
    product = single * double
    assert product.dtype == np.float64
    product.sum().backward()
    assert single.grad is not None
    assert single.grad.dtype == np.float32
    assert grad(single) == [2.0, 3.0]


@pytest.mark.parametrize("gathered", [False, True], ids=["alone", "in an arena"])
def test_parameter_change_between_forward_and_backward_is_detected(backend: ad.Backend, gathered: bool) -> None:
    layer = nn.Linear(3, 2)
    if gathered:
        optim.SGD(layer.parameters(), lr=0.1)
    y = layer(ad.ones(1, 3)).sum()
    layer.load_state_dict(layer.state_dict())
    with refused(ParameterChanged):
        y.backward()
    assert layer.weight.grad is None
    layer(ad.ones(1, 3)).sum().backward()


def test_optimizer_step_between_forward_and_backward_is_detected(backend: ad.Backend) -> None:
    layer = nn.Linear(3, 2)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    y = layer(ad.ones(1, 3)).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    with refused(ParameterChanged):
        y.backward()


def test_threads_differentiate_concurrently() -> None:
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        arena = ad.Arena()
        x = leaf(float(number))
        for _ in range(200):
            with arena:
                x.grad = None
                (x * x * x).sum().backward()
        results[number] = grad(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [3.0 * i * i] for i in range(4)}
