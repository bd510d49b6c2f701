"""Whatever runs on the meta device can be followed; what cannot is named, with its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchvision_operators  # noqa: F401  before torchvision
from evener.errors import InvalidInput
from evener.parallel.pipeline.partition import cut_points
from evener.parallel.pipeline.partition_problem import trace_micro_batch
from evener.tracer.ir import TracedModel, record

CPU = torch.device("cpu")


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
    return trace_micro_batch(Model(code), torch.zeros(3, 4), CPU, training)


def targets(found: TracedModel) -> list[str]:
    return [str(getattr(node.target, "__name__", node.target)) for node in found.operations]


def test_modules_functions_and_methods_are_operations() -> None:
    found = follow(lambda m, x: F.relu(m.inner(m.linear(x)) + x).sum())
    assert targets(found) == ["linear", "inner.0", "inner.1", "add", "relu", "sum"]


def test_branches_and_loops_on_shapes_run_as_they_do() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        for row in x:
            x = x + row if len(row.shape) == 1 else x
        outputs: Tensor = x if x.shape[0] == 3 else m.linear(x)
        return outputs

    assert targets(follow(code)).count("add") == 3


@pytest.mark.parametrize(("training", "expected"), [(True, ["linear", "dropout"]), (False, ["linear"])])
def test_training_and_evaluation_are_followed_apart(training: bool, expected: list[str]) -> None:
    found = follow(lambda m, x: F.dropout(m.linear(x)) if m.training else m.linear(x), training)
    assert targets(found) == expected
    assert [record(node).is_random for node in found.operations] == [False, True][: len(expected)]


def test_changes_in_place_are_noticed_through_views_and_items() -> None:
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


def test_tensors_made_from_nothing_are_operations_and_known_numbers_stay_known() -> None:
    outside = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def code(m: Any, x: Tensor) -> Tensor:
        steps = torch.arange(4, device=x.device)
        known = torch.ones(2).sum().item()
        return x + torch.rand(1, device=x.device) * steps + outside * known

    found = follow(code)
    assert targets(found)[:2] == ["arange", "ones"]
    assert list(found.constants) == ["constant_0"]
    assert [n.name for n in found.operations if record(n).is_random] == ["rand"]


def test_a_number_that_comes_from_the_inputs_is_not_known_afterwards() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(3, 4)
        mask[1:] = x[1:]
        outputs: Tensor = x * mask.tolist()[0][0]
        return outputs

    with pytest.raises(InvalidInput, match=r"x \* mask.tolist\(\)"):
        follow(code)


def test_gradients_switched_off_and_autocast_are_kept() -> None:
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


def test_buffers_that_a_pass_changes_are_told() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        return m.linear(x)  # type: ignore[no-any-return]

    assert follow(code).states == ("count",)


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

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Custom.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return y


def test_a_module_that_cannot_be_looked_into_stays_whole() -> None:
    found = trace_micro_batch(nn.Sequential(nn.Linear(4, 4), Opaque(), nn.ReLU()), torch.zeros(3, 4), CPU)
    assert targets(found) == ["0", "1", "2"]
    assert list(found.whole) == ["1"]
    assert "Opaque.forward" in found.whole["1"]


def test_the_line_that_cannot_be_followed_is_named() -> None:
    def code(m: Any, x: Tensor) -> Tensor:
        return x if m.linear(x).sum() > 0 else -x

    place = re.escape(f"{__file__}, line {code.__code__.co_firstlineno + 1}")
    with pytest.raises(InvalidInput, match=rf"cannot be cut into stages, because of {place} .*m.linear"):
        follow(code)


def test_a_result_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="returns a object, which is neither tensor, tuple, list nor dict"):
        follow(lambda m, x: (m.linear(x), object()))
    with pytest.raises(InvalidInput, match=r"Opaque.forward.*autograd function"):
        trace_micro_batch(Opaque(), torch.zeros(3, 4), CPU)


def test_the_model_itself_is_left_alone() -> None:
    model = Model(lambda m, x: m.linear(x))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace_micro_batch(model, torch.zeros(3, 4), CPU, training=False)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.linear._forward_hooks


@pytest.mark.parametrize("name", ["densenet121", "mobilenet_v3_small", "swin_t", "vit_b_32", "convnext_tiny"])
def test_models_of_torchvision_are_followed_to_the_end(name: str) -> None:
    import torchvision

    with torch.device("meta"):
        model = getattr(torchvision.models, name)(weights=None)
    found = trace_micro_batch(model, torch.zeros(2, 3, 224, 224), CPU)
    assert not found.whole
    assert len(cut_points(found, model)) > 30
