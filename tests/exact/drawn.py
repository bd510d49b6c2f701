"""Random recipes: a description, drawn by a seed or by hypothesis, and the recipe that it describes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exact.parts import ANY, JOINS, PARTS, Do, InTraining
from exact.recipe import Make, Recipe, descent, images, readout, recipes_of, rows, sequences

Choose = Callable[[Sequence[Any]], Any]
"""One of several."""
INPUTS: dict[str, Make] = {"images": images(3, 7, 6), "rows": rows(6), "sequences": sequences(4, 6)}
OPTIMISERS: dict[str, Callable[[Any], Any]] = {
    "momentum": descent,
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-2),
    "decay_by_dims": lambda p: recipes_of("optimisers")["decay_by_dims"].optimizer(p),
    "lars": lambda p: recipes_of("optimisers")["lars_of_rows"].optimizer(p),
    "centralised": lambda p: recipes_of("optimisers")["centralised_of_rows"].optimizer(p),
}
NAMES = {"images": PARTS[4], "rows": PARTS[2], "sequences": PARTS[3]}


def describe(choose: Choose, most: int = 5) -> dict[str, Any]:
    """A description: plain values, which a seed draws or hypothesis does."""
    return {
        "inputs": choose(list(INPUTS)),
        "seed": choose(range(50)),
        "parts": _describe_parts(choose, most, 2),
        "outputs": choose(["tensor", "tensor", "tensor", "tuple", "dict"]),
        "optimiser": choose(["momentum", "momentum", "momentum", *OPTIMISERS]),
        "clip": choose([None, None, None, 0.05]),
    }


def _describe_parts(choose: Choose, most: int, depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(choose(range(1, most + 1))):
        number = choose(range(60))
        if depth and choose(range(4)) == 0:
            found.append([choose(JOINS), number, _describe_parts(choose, 2, depth - 1)])
        else:
            table = choose([ANY, NAMES["images"], NAMES["images"], NAMES["rows"], NAMES["sequences"]])
            found.append([choose(list(table)), number])
    return found


def draw(seed: int) -> str:
    """The name of a recipe that a seed draws."""
    return name_of(describe(Random(seed).choice))


def name_of(description: dict[str, Any]) -> str:
    return f"drawn/{json.dumps(description, separators=(',', ':'))}"


def recipe(name: str) -> Recipe:
    """The recipe of a description as JSON."""
    found = json.loads(name)
    return Recipe(
        name=f"drawn/{name}",
        model=lambda: _model(found),
        inputs=INPUTS[found["inputs"]],
        targets=lambda g, n: torch.randn(n, generator=g, dtype=torch.float64),
        loss=readout,
        optimizer=OPTIMISERS[found["optimiser"]],
        clip=found["clip"],
        across="spectral_norm" in name,
    )


class _Outputs(nn.Module):
    def __init__(self, net: nn.Module, kind: str, shape: Sequence[int]) -> None:
        super().__init__()
        self.net, self.kind, self.head = net, kind, nn.Linear(shape[-1], 2)

    def forward(self, x: Any) -> Any:
        y = self.net(x)
        z = self.head(y)
        if self.kind == "tuple":
            return z, y
        return {"out": z, "features": y} if self.kind == "dict" else z


def _model(found: dict[str, Any]) -> nn.Module:
    torch.manual_seed(found["seed"])
    x = INPUTS[found["inputs"]](torch.Generator().manual_seed(0), 4).float()
    net, y = _sequence(found["parts"], x)
    return _Outputs(net, found["outputs"], y.shape)


def _sequence(parts: list[Any], x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """What is described, as far as it fits tensors like `x`; and what it makes of it."""
    made = []
    for name, number, *inner in parts:
        module = _joined(name, inner[0], x) if inner else _single(name, number, x)
        if module is None:
            continue
        try:
            with torch.no_grad():
                y = module.eval()(x.clone())
        except (RuntimeError, ValueError):  # the part does not fit these sizes
            continue
        if y.numel() > 4000 or not y.numel():
            continue
        made.append(module.train())
        x = y
    return nn.Sequential(*made), x


def _single(name: str, number: int, x: torch.Tensor) -> nn.Module | None:
    table = {**ANY, **PARTS[x.dim()]}
    return table[name](tuple(x.shape), number) if name in table else None


def _joined(name: str, parts: list[Any], x: torch.Tensor) -> nn.Module | None:
    branch, y = _sequence(parts, x)
    alike = y.shape == x.shape
    if name == "residual" and alike:
        return Do(lambda x, m: x + m(x), branch)
    if name == "product" and alike:
        return Do(lambda x, m: x * m(x).sigmoid(), branch)
    if name == "twin" and alike:
        return Do(lambda x, m: m(m(x)), branch)
    if name == "in_training" and alike:
        return InTraining(nn.Identity(), _OfOther(branch))
    if name == "beside" and y.dim() == x.dim() and y.shape[2:] == x.shape[2:]:
        return Do(lambda x, m: torch.cat((x, m(x)), 1), branch)
    return None


class _OfOther(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.other = module

    def forward(self, x: Any, _: Any) -> Any:
        return F.tanh(self.other(x))


def smaller(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Descriptions that are one step simpler."""
    for parts in _smaller_parts(description["parts"]):
        yield {**description, "parts": parts}
    for key, plain in (("outputs", "tensor"), ("optimiser", "momentum"), ("clip", None), ("seed", 0)):
        if description[key] != plain:
            yield {**description, key: plain}


def _smaller_parts(parts: list[Any]) -> Iterator[list[Any]]:
    for i, (name, number, *inner) in enumerate(parts):
        yield parts[:i] + parts[i + 1 :]
        if inner:
            yield parts[:i] + inner[0] + parts[i + 1 :]
            for less in _smaller_parts(inner[0]):
                yield [*parts[:i], [name, number, less], *parts[i + 1 :]]


def shrink(description: dict[str, Any], fails: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The simplest description, step by step, that still fails."""
    while True:
        better = next((one for one in smaller(description) if fails(one)), None)
        if better is None:
            return description
        description = better
