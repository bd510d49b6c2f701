"""Whatever runs on the meta device can be followed; what cannot is named, with its line."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchvision_operators  # noqa: F401  before torchvision
from evener.parallel.pipeline.partition_problem import cut_points
from evener.records.errors import file_line
from evener.tracer.ir import TracedModel, record
from evener.tracer.tracing import CPU, NotTraceable, trace
from support.refusals import refused


class Model(nn.Module):
    """A linear layer, and whatever `code` does with it."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("count", torch.zeros(()))
        self.code = code

    count: Tensor

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def follow(code: Callable[..., Any], training: bool = True) -> TracedModel:
    return trace(Model(code), torch.zeros(3, 4), CPU, training)


def targets(found: TracedModel) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in found.operations]


def test_modules_functions_and_methods_become_operations() -> None:
    found = follow(lambda m, x: F.relu(m.inner(m.linear(x)) + x).sum())
    assert targets(found) == ["linear", "inner.0", "inner.1", "add", "relu", "sum"]


def test_branches_and_loops_on_shapes_are_traced() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        for row in x:
            x = x + row if len(row.shape) == 1 else x
        outputs: Tensor = x if x.shape[0] == 3 else m.linear(x)
        return outputs

    assert targets(follow(code)).count("add") == 3


@pytest.mark.parametrize(("training", "expected"), [(True, ["linear", "dropout"]), (False, ["linear"])])
def test_training_and_evaluation_are_traced_separately(training: bool, expected: list[str]) -> None:
    found = follow(lambda m, x: F.dropout(m.linear(x)) if m.training else m.linear(x), training)
    assert targets(found) == expected
    assert [record(node).is_random for node in found.operations] == [False, True][: len(expected)]


def test_in_place_changes_through_views_and_items_are_detected() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        z = y * 2
        y.view(-1)[:2].add_(1)
        z[0] = 0
        total: Tensor = y + z
        return total

    found = follow(code)
    assert targets(found) == ["linear", "mul", "view", "__getitem__", "add_", "__setitem__", "add"]
    assert [cut.position for cut in cut_points(found, Model(code))] == [6]


def test_inputs_that_the_model_changes_are_copied() -> None:
    assert targets(follow(lambda m, x: m.linear(x.sub_(1))))[0] == "clone"


def test_new_tensors_are_operations_and_known_numbers_stay_constant() -> None:
    outside = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def code(m: Any, x: Tensor) -> Tensor:
        steps = torch.arange(4, device=x.device)
        known = torch.ones(2).sum().item()
        return x + torch.rand(1, device=x.device) * steps + outside * known

    found = follow(code)
    assert targets(found)[:2] == ["arange", "ones"]
    assert list(found.constants) == ["constant_0"]
    assert [n.name for n in found.operations if record(n).is_random] == ["rand"]


def test_value_written_from_inputs_cannot_decide_control_flow() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(3, 4)
        mask[1:] = x[1:]
        outputs: Tensor = x * mask.tolist()[0][0]
        return outputs

    with refused(NotTraceable):
        follow(code)


def test_no_grad_and_autocast_are_recorded() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = m.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = m.linear(x)
        outputs: Tensor = y + m.linear(z.float())
        return outputs

    contexts = [record(node).modes for node in follow(code).operations]
    assert contexts[0] is not None
    assert contexts[1] is not None
    assert contexts[0].grad is False
    assert contexts[1].autocast is torch.bfloat16
    assert contexts[2:] == [None, None, None]


def test_changed_buffers_are_reported() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        return m.linear(x)  # type: ignore[no-any-return]

    assert follow(code).states == ("count",)

    def norms(m: Any, x: Tensor) -> Tensor:
        return F.batch_norm(m.linear(x), m.count.expand(4).clone(), m.inner[0].bias.detach(), training=m.training)

    assert [len(record(node).changes) for node in follow(norms).operations][-1] == 2
    assert [len(record(node).changes) for node in follow(norms, training=False).operations][-1] == 0


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if torch.rand(()) > 0.5 else x


_taken_before = Custom.apply


def test_custom_autograd_function_is_an_operation() -> None:
    found = follow(lambda m, x: Custom.apply(_taken_before(m.linear(x))))  # type: ignore[no-untyped-call]
    assert [getattr(node.target, "__name__", node.target) for node in found.operations] == [
        "linear",
        "Custom",
        "Custom",
    ]
    assert all(record(node).value.requires_grad for node in found.operations)
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_untraceable_module_stays_one_operation() -> None:
    found = trace(nn.Sequential(nn.Linear(4, 4), Opaque(), nn.ReLU()), torch.zeros(3, 4), CPU)
    assert targets(found) == ["0", "1", "2"]
    assert list(found.whole) == ["1"]
    assert "a random number decides" in found.whole["1"]


def test_untraceable_line_is_named() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        return x if m.linear(x).sum() > 0 else -x

    place = re.escape(file_line(__file__, code.__code__.co_firstlineno + 1))
    with pytest.raises(NotTraceable, match=rf"^{place} .*m.linear"):
        follow(code)


def test_result_of_an_unknown_type_is_refused() -> None:
    with refused(NotTraceable):
        follow(lambda m, x: (m.linear(x), object()))


def test_traced_model_is_not_modified() -> None:
    model = Model(lambda m, x: m.linear(x))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace(model, torch.zeros(3, 4), CPU, training=False)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.linear._forward_hooks


@pytest.mark.parametrize("name", ["densenet121", "mobilenet_v3_small", "swin_t", "vit_b_32", "convnext_tiny"])
def test_torchvision_models_are_traced_completely(name: str) -> None:
    import torchvision

    with torch.device("meta"):
        model = getattr(torchvision.models, name)(weights=None)
    found = trace(model, torch.zeros(2, 3, 224, 224), CPU)
    assert not found.whole
    assert len(cut_points(found, model)) > 30


# --- numbers that come from no input


def test_tensor_with_written_inputs_has_their_gradient() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(3, 4)
        mask[:, 1:] = m.linear(x)[:, 1:]
        mask[:, :1].copy_(m.linear(x)[:, :1])
        return mask * 2

    values = {node.name: record(node).value for node in follow(code).operations}
    assert values["zeros"].requires_grad
    assert values["mul"].requires_grad


def test_masks_on_the_input_device_keep_their_values() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4, device=x.device)
        outputs: Tensor = m.linear(x) if bool((mask.to(x.device) == mask).all()) else x
        return outputs + mask[0]

    assert "linear" in targets(follow(code))


def test_traced_random_draws_preserve_the_generator() -> None:
    model = Model(lambda m, x: x + torch.rand(4) + torch.rand(4, device=x.device))
    state = torch.random.get_rng_state()
    found = trace(model, torch.zeros(3, 4))
    assert [record(node).is_random for node in found.operations].count(True) == 2
    assert torch.equal(state, torch.random.get_rng_state())


# --- modules as operations


def test_leaf_module_that_fails_is_traced_inside() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x) if bool(mask.any()) else x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky = Picky()

        def forward(self, x: Tensor) -> Tensor:
            return self.picky(x, torch.ones(4))  # type: ignore[no-any-return]

    found = trace(Outer(), torch.zeros(3, 4), is_leaf=lambda module: isinstance(module, Picky))
    assert "linear" in targets(found)


def test_several_threads_trace_models_concurrently() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: targets(trace(model, torch.zeros(3, 4))), range(12)))
    assert found == [["0", "1", "2", "3"]] * 12


def test_operation_records_its_own_line_and_costs() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        return (y * y).relu()  # type: ignore[no-any-return]

    linear, product, relu = (record(node) for node in follow(code).operations)
    assert linear.flops == 2 * 3 * 4 * 4
    assert (linear.kept_sizes, product.kept_sizes, relu.kept_sizes) == ((3 * 4 * 4,), (3 * 4 * 4,), (3 * 4 * 4,))
    assert linear.line == file_line(__file__, code.__code__.co_firstlineno + 1)
    assert product.line == file_line(__file__, code.__code__.co_firstlineno + 2)


def test_control_flow_on_random_numbers_is_refused() -> None:
    with refused(NotTraceable):
        follow(lambda m, x: m.linear(x) if torch.rand(()) > 0.5 else x)
    assert targets(follow(lambda m, x: m.linear(x) * torch.rand(3, 1).shape[0])) == ["linear", "rand", "mul"]


def test_python_random_numbers_are_refused() -> None:
    with refused(NotTraceable):
        follow(lambda m, x: m.linear(x) * random.random())


def test_attributes_that_affect_later_passes_are_refused() -> None:
    def counted(m: Any, x: Tensor) -> Any:
        m.calls = getattr(m, "calls", 0) + 1
        return m.linear(x)

    def cached(m: Any, x: Tensor) -> Any:
        if not hasattr(m, "steps"):
            m.steps = torch.arange(4)
        return m.linear(x) + m.steps

    def kept(m: Any, x: Tensor) -> Any:
        m.last = m.linear(x) + getattr(m, "last", 0)
        return m.last

    assert targets(follow(counted)) == ["linear"]
    assert targets(follow(cached)) == ["arange", "linear", "add"]
    with refused(NotTraceable):
        follow(lambda m, x: counted(m, x) * m.calls)
    with refused(NotTraceable):
        follow(kept)


def test_stateful_module_is_one_operation_with_a_state() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.linear(x) * self.calls

    found = trace(nn.Sequential(nn.Linear(4, 4), Counts()), torch.zeros(3, 4), CPU)
    assert targets(found) == ["0", "1"]
    assert found.states == ("1.calls",)


def test_setting_attributes_of_a_layer_from_outside_is_refused() -> None:
    def code(m: Any, x: Tensor) -> Any:
        m.linear.scale = x.shape[0]
        return m.linear(x)

    with refused(NotTraceable):
        follow(code)


def test_replaced_buffer_is_assigned() -> None:
    def code(m: Any, x: Tensor) -> Any:
        m.count = m.count * 0.5 + x.sum()
        return m.linear(x) / m.count

    found = follow(code)
    assert targets(found) == ["mul", "sum", "add", "linear", "div", "assign"]
    assert found.states == ("count",)


def test_modes_set_by_the_model_apply_to_the_call() -> None:
    def code(m: Any, x: Tensor) -> Any:
        m.inner.eval()
        return m.inner(m.linear(x))

    assert [record(node).training for node in follow(code).operations] == [(True,), (False,), (False,)]


def test_container_with_backward_hooks_is_one_operation() -> None:
    model = Model(lambda m, x: m.inner(m.linear(x)).sum())
    model.inner.register_full_backward_hook(lambda module, grads, outs: None)
    model.linear.register_full_backward_hook(lambda module, grads, outs: None)
    assert targets(trace(model, torch.zeros(3, 4), CPU)) == ["linear", "inner", "sum"]
    model.register_full_backward_hook(lambda module, grads, outs: None)
    with refused(NotTraceable):
        trace(model, torch.zeros(3, 4), CPU)


def test_tensor_hooks_become_operations_and_other_hooks_are_refused() -> None:
    def code(m: Any, x: Tensor) -> Any:
        y = m.linear(x)
        y.register_hook(lambda grad: grad * 2)
        return y.relu()

    assert targets(follow(code)) == ["linear", "hooked", "relu"]
    with refused(NotTraceable):
        follow(lambda m, x: torch.autograd.grad(m.linear(x).sum(), m.linear.weight)[0])

    def sets(m: Any, x: Tensor) -> Any:
        m.linear.weight.data = m.linear.weight * 2
        return m.linear(x)

    with refused(NotTraceable):
        follow(sets)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_traced_once(reentrant: bool) -> None:
    def code(m: Any, x: Tensor) -> Any:
        return checkpoint(m.inner, m.linear(x), use_reentrant=reentrant)

    assert targets(follow(code)) == ["linear", "inner.0", "inner.1"]
    model = Model(code)
    model.inner[1] = nn.BatchNorm1d(4)
    with refused(NotTraceable):
        trace(model, torch.zeros(3, 4), CPU)


def test_dictionaries_preserve_their_type() -> None:
    found = follow(lambda m, x: OrderedDict(out=m.linear(x), other=[x]))
    assert type(found.outputs) is OrderedDict
