"""A recipe: a model, its optimiser, its loss and its batches, as a user would write them; all of it in float64."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

KINDS = (
    "structures",
    "baked",
    "views",
    "gradients",
    "hooks",
    "parametrised",
    "norms",
    "optimisers",
    "clipping",
    "randomness",
    "shapes",
    "vision",
    "losses",
)
Make = Callable[[Generator, int], Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A program that trains.

    Attributes:
        name: `kind/name`.
        model: makes it.
        inputs: of so many samples.
        targets: likewise.
        loss: mean over the samples.
        optimizer: of some parameters.
        clip: bound on the norm of the gradient.
        draws: whether its masks differ with the division of samples, as the guarantees say.
        across: whether it looks across samples in training, so that micro-batches are another model.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Make
    targets: Make
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], Optimizer]
    clip: float | None = None
    draws: bool = False
    across: bool = False

    def batch(self, number: int, samples: int) -> tuple[Any, Any]:
        """Inputs and targets of batch `number`, always the same ones."""
        generator = Generator().manual_seed(1000 + number)
        return self.inputs(generator, samples), self.targets(generator, samples)

    def looks_across(self, model: nn.Module) -> bool:
        """Whether a sample's outputs depend on the other samples of its micro-batch."""
        return self.across or any(isinstance(module, _BatchNorm) for module in model.modules())


def images(channels: int = 3, height: int = 8, width: int = 6) -> Make:
    return lambda g, n: torch.randn(n, channels, height, width, generator=g, dtype=torch.float64)


def rows(features: int = 6) -> Make:
    return lambda g, n: torch.randn(n, features, generator=g, dtype=torch.float64)


def sequences(length: int = 5, features: int = 6) -> Make:
    return lambda g, n: torch.randn(n, length, features, generator=g, dtype=torch.float64)


def tokens(length: int = 5, vocabulary: int = 11) -> Make:
    return lambda g, n: torch.randint(0, vocabulary, (n, length), generator=g)


def classes(number: int = 5) -> Make:
    return lambda g, n: torch.randint(0, number, (n,), generator=g)


def together(*makes: Make) -> Make:
    """Several inputs, in order."""
    return lambda g, n: tuple(make(g, n) for make in makes)


def _weights(g: Generator, n: int) -> Tensor:
    return torch.randn(n, generator=g, dtype=torch.float64)


def readout(outputs: Any, targets: Tensor) -> Tensor:
    """A loss of whatever a model returns: each sample's numbers, bent and weighed by its target."""
    parts = []
    for out in tensors_of(outputs):
        if out.is_floating_point():
            per_sample = (out.tanh() * (1 + out)).reshape(len(targets), -1).mean(1) if out.dim() else out
            parts.append((per_sample * (1 + targets)).mean() if out.dim() else per_sample)
    return torch.stack(parts).sum()


def descent(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value of whatever types, in order."""
    return [tensor for _, tensor in _leaves(value, "")]


def shape_of(value: Any) -> list[str]:
    """Where in a value which tensors are, and of which types everything around them is."""
    return [place for place, _ in _leaves(value, "")]


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    place += f"<{type(value).__name__}>" if not isinstance(value, Tensor) else ""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{place}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            yield from _leaves(one, f"{place}[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{place}.{field.name}")
    elif hasattr(value, "__dict__"):
        for key, one in vars(value).items():
            yield from _leaves(one, f"{place}.{key}")


class Kind:
    """Recipes of one kind; `@kind(inputs, ...)` adds what makes a model, under its own name."""

    def __init__(self, name: str) -> None:
        self.name = name.rpartition(".")[2]
        self.recipes: dict[str, Recipe] = {}

    def __call__(self, inputs: Make, **settings: Any) -> Callable[[Any], Any]:
        def add(model: Any) -> Any:
            self.add(model.__name__, model, inputs, **settings)
            return model

        return add

    def add(self, name: str, model: Callable[[], nn.Module], inputs: Make, **settings: Any) -> None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
        assert name not in self.recipes, name
        chosen = {"targets": _weights, "loss": readout, "optimizer": descent, **settings}
        self.recipes[name] = Recipe(name=f"{self.name}/{name}", model=model, inputs=inputs, **chosen)


def recipes_of(kind: str) -> dict[str, Recipe]:
    found: dict[str, Recipe] = importlib.import_module(f"exact.kinds.{kind}").kind.recipes
    return found


def recipe_of(reference: str) -> Recipe:
    """The recipe of this name: of a kind, or drawn by a number."""
    kind, _, name = reference.partition("/")
    if kind == "drawn":
        made: Recipe = importlib.import_module("exact.drawn").recipe(name)
        return made
    return recipes_of(kind)[name]
