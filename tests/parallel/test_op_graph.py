"""What ranks divide is derived from what a model does: modes and custom gradients stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.parallel.op_graph import op_graph
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import ShardedModule
from support.compare_divided import hold_against, train
from support.thread_ranks import together

IMAGES = torch.zeros(2, 3, 6, 6)


class Straight(torch.autograd.Function):
    """Rounds, as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(4).round().div(4)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.conv(x))  # type: ignore[no-any-return,no-untyped-call]


class Everything(nn.Module):
    """Gradients switched off, a gradient of its own, numbers made in the forward pass, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rounded, self.last = nn.Conv2d(3, 5, 3, padding=1), Rounded(), nn.Conv2d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            level = y.abs() / 2
        y = self.rounded(y - level) * torch.empty(1, dtype=y.dtype, device=y.device).fill_(2.0)
        y += torch.arange(5, dtype=y.dtype, device=y.device).view(1, 5, 1, 1)
        y = torch.relu_(y / 3)
        return self.last(F.relu(1 - y, inplace=True)).flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("division", ["sharded", "filter", "channel", "spatial"])
def test_modes_and_custom_gradients_equal_one_process(division: Any) -> None:
    torch.manual_seed(0)
    expected = train(Everything().double(), (2, 3, 6, 6))
    arrangement = Arrangement(division=division, replicas=(Replica(shares=(2, 1)),))
    together(2, lambda group: hold_against(group, expected, arrangement, [2]))


class Bounded(torch.autograd.Function):
    """Changes nothing, but bounds the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-1e-3, 1e-3)


class BoundsGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3), nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        bounded: Any = Bounded
        y = bounded.apply(self.first(x))
        z = self.second(y)
        z.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.last(z).flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("division", ["sharded", "filter", "channel", "spatial"])
def test_user_gradient_operations_see_complete_gradients(division: Any) -> None:
    torch.manual_seed(0)
    expected = train(BoundsGradients().double(), (2, 3, 6, 6))
    arrangement = Arrangement(division=division, replicas=(Replica(shares=(2, 1)),))
    together(2, lambda group: hold_against(group, expected, arrangement, [2]))


class InModes(nn.Module):
    """Does other things in training than in evaluation, and sets modes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.late = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.twice = nn.Sequential(nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        y = self.norm(F.dropout(self.body(x), 0.5, training=False))
        before = self.twice.training
        quiet = self.twice.eval()(y)
        y = self.twice.train(before)(y) + quiet
        if self.training:
            return torch.as_tensor(y.mean((2, 3)) * 2)
        return torch.as_tensor(F.dropout(self.late(y).mean((2, 3)), 1.0) + y.mean((2, 3)))


@pytest.mark.parametrize("division", ["sharded", "filter", "channel", "spatial"])
def test_training_and_evaluation_modes_are_traced_separately(division: Any) -> None:
    torch.manual_seed(0)
    whole = InModes().double()
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    arrangement = Arrangement(division=division, replicas=(Replica(shares=(2, 1)),))

    def outputs(model: nn.Module) -> list[Tensor]:
        found = []
        for training in (True, False, True, False):
            found.append(model.train(training)(images).detach())
        return found

    def check(group: Group) -> None:
        model = ShardedModule(whole, form_process_mesh(group, arrangement), [images])
        torch.testing.assert_close(outputs(model), expected)
        found = model.gather_weights()
        if group.is_leader:
            torch.testing.assert_close(found, dict(trained.state_dict()))

    trained = copy.deepcopy(whole)
    expected = outputs(trained)
    together(2, check)


class Model(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.code = nn.Conv2d(3, 4, 1), code

    def forward(self, x: Tensor) -> Any:
        return self.code(self.conv(x))


def test_halves_changed_separately_are_traced() -> None:
    def code(y: Tensor) -> Tensor:
        first, last = y[:, :2], y[:, 2:]
        return torch.cat([last, first.relu_()], 1)

    assert op_graph(Model(code), [IMAGES]).network.operations[-2].kind == "concat"


def test_meta_model_is_traced() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    kinds = [operation.kind for operation in op_graph(model, [IMAGES.to("meta")]).network.operations]
    assert kinds == ["input", "convolution", "batch_norm", "pointwise", "output"]


class Unusual(nn.Module):
    """A temperature, a scalar for a sample, images without windows, groups of features, layers named as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
        self.mean, self.cat = nn.Linear(6, 6), nn.Conv2d(6, 6, 1)
        self.norm, self.output = nn.GroupNorm(3, 12), nn.Linear(12, 4)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.cat(F.interpolate(self.x(x).relu(), scale_factor=1.5, mode="bicubic"))
        average = self.mean(y.mean((2, 3)))
        both = self.norm(torch.cat([average, y.amax((2, 3))], 1))
        largest = both.norm(dim=1).sigmoid() * self.temperature.exp()
        return self.output(both * largest[:, None])  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Layers that return nests of tensors, of which some are read, and one is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 4)
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True)
        self.attention, self.cell = nn.MultiheadAttention(8, 2, batch_first=True), nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Any:
        rows = self.conv(x).mean(3).transpose(1, 2)
        found, (hidden, _) = self.lstm(rows)
        found, weights = self.attention(found, found, found)
        state = self.cell(found[:, 1], self.cell(found[:, 0]))
        return self.last(state), hidden.transpose(0, 1), weights, torch.cat(found.split((2, 4), 1), 1)


class ReadTwice(nn.Module):
    """Weights that layers and other operations read; layers that are used where the ranks divide, and where not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.body, self.features = nn.Linear(6, 5), nn.Linear(5, 5)
        self.tied = nn.Embedding(6, 5)
        self.tied.weight = nn.Parameter(self.body.weight.detach().t().clone())

    def forward(self, x: Tensor) -> Any:
        y = self.again(self.first(x)).relu()
        y = self.again(y.mean((2, 3), keepdim=True)).flatten(1)
        code = self.features(self.features(self.body(y))).tanh()
        back = F.linear(code, self.body.weight.t()) + F.linear(code, self.tied.weight)
        ids = torch.arange(6, device=x.device) % 4
        return back, self.tied(ids).sum(0) * code, self.first.weight.square().sum() * code


ONE, TWO = (Replica(shares=(2, 1)),), (Replica(shares=(1, 1)), Replica(shares=(1,)))


@pytest.mark.parametrize(
    ("division", "replicas"),
    [
        *((division, ONE) for division in ("sharded", "filter", "channel", "spatial")),
        ("sharded", TWO),
        *(pytest.param(division, TWO, marks=pytest.mark.slow) for division in ("filter", "channel", "spatial")),
    ],
)
@pytest.mark.parametrize("model", [Unusual, Recurrent, ReadTwice])
def test_unusual_operations_equal_one_process(
    model: type[nn.Module], division: Any, replicas: tuple[Replica, ...]
) -> None:
    torch.manual_seed(0)
    expected = train(model().double(), (4, 3, 6, 6))
    arrangement = Arrangement(division=division, replicas=replicas)
    samples = [4] if len(replicas) == 1 else [3, 1]
    together(arrangement.size, lambda group: hold_against(group, expected, arrangement, samples))


def test_changed_buffers_are_outputs_of_the_graph() -> None:
    class Moves(nn.Module):
        mean: Tensor
        last: Tensor

        def __init__(self, part: bool) -> None:
            super().__init__()
            self.linear, self.part = nn.Linear(4, 4), part
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            with torch.no_grad():
                (self.mean[:2] if self.part else self.mean).mul_(0.9)
                self.mean.add_(y.mean(0))
                self.last = y[0]
            return y - self.mean

    for part in (False, True):
        graph = op_graph(Moves(part), [torch.zeros(3, 4)])
        assert set(graph.states) == {"mean", "last"}
