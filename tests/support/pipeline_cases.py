"""Small models, and one process that does what a pipeline promises: what the tests compare with."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.comm.group import Group
from evener.comm.joining import join_group
from evener.experiments.models.amoebanet import AmoebaNetD
from evener.experiments.models.resnet import resnet152
from evener.experiments.models.transformer import Transformer, tokens_in, translation_loss
from evener.experiments.models.unet import UNet
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.parallel.op_registry import without_synchronised
from evener.parallel.pipeline.micro_batches import divided, micro_batch_sizes
from evener.parallel.pipeline.pipeline import Pipeline
from evener.tracer.nested import call

TOLERANCE = 1e-10


class Residual(nn.Module):
    """Convolutions with BatchNorm, a residual sum, ReLUs in place, functions and tensors of its own."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(c, 6, 3, padding=1) for c in (3, 6))
        self.norm1 = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(6, momentum=None, affine=False) if norm else nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.full((6, 1, 1), 1.5))
        self.register_buffer("offset", torch.linspace(0, 1, 6).view(6, 1, 1))
        self.head = nn.Linear(6, 5)

    offset: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        z = self.relu(self.norm2(self.conv2(y)) + y) * self.scale + self.offset
        pooled = z.mean((2, 3)) if len(z.shape) == 4 else z
        outputs: Tensor = self.head(pooled.view(x.shape[0], -1))
        return outputs


class Scaled(nn.BatchNorm2d):
    """A BatchNorm of a user's own class."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnNorms(Residual):
    """A Residual whose norms are of the user's own class, and synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = Scaled(6)
        self.set_submodule("norm2", nn.SyncBatchNorm(6, momentum=0.3))


class Tied(nn.Module):
    """A weight that the first and the last layer share, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.twice(torch.tanh(self.first(x))))
        outputs: Tensor = self.last(torch.tanh(self.twice(y))) + F.linear(y, self.first.weight)
        return outputs


class Branches(nn.Module):
    """Two inputs by name, one of them used late; two outputs in a dict, one of them made early."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.join = nn.Linear(4, 8), nn.Linear(3, 8), nn.Bilinear(8, 8, 5)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Any]:
        early = torch.relu(self.left(a))
        halves = early.chunk(2, dim=1)
        late = torch.cat((halves[1], halves[0]), dim=1)
        return {"early": early, "both": (self.join(late, self.right(b)), None)}


def _images(samples: int, size: int) -> Tensor:
    return torch.randn(samples, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 + 1


def _labels(samples: int, *shape: int) -> Tensor:
    return torch.randint(0, 5, (samples, *shape), generator=torch.Generator().manual_seed(2))


def _tokens(samples: int, length: int, seed: int) -> Tensor:
    tokens = torch.randint(1, 20, (samples, length), generator=torch.Generator().manual_seed(seed))
    lengths = torch.arange(samples) % (length - 1) + 2
    return tokens * (torch.arange(length)[None, :] < lengths[:, None])


def _branch_loss(outputs: Any, targets: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(outputs["both"][0], targets) + outputs["early"].square().mean()
    return loss


def _pixel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(logits, targets)
    return loss


@dataclass(frozen=True)
class Case:
    """A model and a task for it."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    targets: Callable[[int], Any] = _labels
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    weigh: Callable[[Any], Any] = len

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().double()


CASES = {
    "residual": Case(Residual, lambda n: _images(n, 6)),
    "own_norms": Case(lambda: without_synchronised(OwnNorms()), lambda n: _images(n, 6)),
    "plain": Case(lambda: Residual(norm=False), lambda n: _images(n, 6)),
    "tied": Case(
        Tied, lambda n: _images(n, 2)[:, 0, 0, :1].expand(n, 6).cumsum(1), lambda n: _labels(n), F.cross_entropy
    ),
    "branches": Case(
        Branches,
        lambda n: {"b": _images(n, 1)[:, :, 0, 0], "a": _images(n, 2)[:, 0].flatten(1)},
        _labels,
        _branch_loss,
    ),
    "amoebanet": Case(lambda: AmoebaNetD(3, 16, classes=5), lambda n: _images(n, 64)),
    "resnet152": Case(lambda: resnet152(5, width=4, depths=(1, 1, 2, 1)), lambda n: _images(n, 64)),
    "unet": Case(
        lambda: UNet(3, 5, width=4, depth=2), lambda n: _images(n, 8), lambda n: _labels(n, 8, 8), _pixel_loss
    ),
    "transformer": Case(
        lambda: Transformer(20, layers=2, dim=8, heads=2, hidden=16, dropout=0.0),
        lambda n: (_tokens(n, 5, 3), _tokens(n, 4, 4)),
        lambda n: _tokens(n, 4, 5),
        translation_loss,
        lambda targets: int(tokens_in(targets)),
    ),
}


@dataclass
class Result:
    loss: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def serial(case: Case, samples: int, micro_batches: int | list[int], steps: int = 2) -> Result:
    """One process that computes the same micro-batches (their number, or their sizes).

    Running statistics follow all values that a layer saw.
    """
    model, x, y = case.make(), case.inputs(samples), case.targets(samples)
    sizes = micro_batch_sizes(samples, micro_batches) if isinstance(micro_batches, int) else micro_batches
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
    seen: dict[str, list[Tensor]] = {}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(
            lambda _module, args, name=name: seen.setdefault(name, []).append(args[0].detach())
        )
    loss = torch.zeros((), dtype=torch.float64)
    for _ in range(steps):
        before = {name: copy.deepcopy(norm.state_dict()) for name, norm in norms.items()}
        model.zero_grad()
        seen.clear()
        parts = list(zip(divided(x, sizes), divided(y, sizes), strict=True))
        total = sum(case.weigh(part) for _, part in parts)
        loss = sum(
            (case.loss(call(model, a), b) * (case.weigh(b) / total) for a, b in parts), start=torch.zeros(()).double()
        )
        torch.autograd.backward(loss)
        for name, norm in norms.items():
            _move(norm, before[name], torch.cat(seen[name]))
        descend(model.parameters())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(loss.detach(), gradients, dict(model.state_dict()))


def _move(norm: _BatchNorm, before: dict[str, Tensor], values: Tensor) -> None:
    """BatchNorm's own rule for what it saw in the whole batch."""
    norm.load_state_dict(before)
    again = nn.BatchNorm2d(values.shape[1], momentum=norm.momentum, affine=False).double()
    again.load_state_dict({k: v for k, v in before.items() if k not in ("weight", "bias")})
    again.train()(values)
    norm.load_state_dict({**before, **again.state_dict()})


def descend(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad


def cost(path: str, _module: nn.Module | None) -> float:
    """Some cost that depends on the name only, so that cuts lie in odd places."""
    return zlib.crc32(path.encode()) % 7 + 1


def piped(case: Case, samples: int, steps: int = 2, **options: Any) -> tuple[Result, Pipeline]:
    """What a pipeline computes; of a process its own part."""
    x, y = case.inputs(samples), case.targets(samples)
    pipeline = Pipeline(case.make(), x, case.loss, weigh=case.weigh, **{"costs": cost, **options})
    loss = torch.zeros(())
    for _ in range(steps):
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.step(x if pipeline.is_first else None, y if pipeline.is_last else None)
        descend(pipeline.parameters())
    gradients = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
    return Result(loss, gradients, pipeline.state_dict()), pipeline


def start(program: Any, ranks: int, order: Any = None) -> None:
    """Run `program` on so many ranks of this machine."""
    run_local(program, [NodeSpec(name=f"n{i}", threads=1) for i in range(ranks)], order, patience=30, on_event=print)


def joined(env: RankEnvironment) -> Group:
    """All ranks, as one of them sees them."""
    return join_group(rank=env.rank, nodes=env.names, device=env.device, store=env.store, patience=30)


def assert_equal(found: Result, expected: Result, whole: bool, what: str = "", tolerance: float = TOLERANCE) -> None:
    """`found` is `expected`, or if not `whole` a part of it."""
    for kind, a, b in (("gradient", found.gradients, expected.gradients), ("state", found.state, expected.state)):
        assert a.keys() == b.keys() if whole else a.keys() <= b.keys(), f"{what}: {kind}s {a.keys() ^ b.keys()}"
        for name, value in a.items():
            assert value.shape == b[name].shape
            assert value.dtype == b[name].dtype
            error = float((value - b[name]).abs().max()) / max(1.0, float(b[name].abs().max()))
            assert error <= tolerance, f"{what}: {kind} of {name} is off by {error}"
