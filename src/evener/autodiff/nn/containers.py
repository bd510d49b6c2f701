"""Modules made of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from evener.autodiff.nn.module import Module


class Sequential(Module):
    """Modules one after the other; named by their numbers, or by the keys of an OrderedDict."""

    def __init__(self, *modules: Module | OrderedDict[str, Module]) -> None:
        super().__init__()
        for name, module in _named(modules):
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        """What the last module makes of what the one before it makes of ... x."""
        for module in self._parts[Module].values():
            x = module(x)
        return x

    def __len__(self) -> int:
        return len(self._parts[Module])

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Any:
        return list(self.children())[index]


class ModuleList(Module):
    """Modules in a list, so that the module that holds the list finds their parameters."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Put `module` at the end."""
        setattr(self, str(len(self)), module)

    def __len__(self) -> int:
        return len(self._parts[Module])

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Any:
        return list(self.children())[index]


def _named(modules: tuple[Any, ...]) -> Iterable[tuple[str, Module]]:
    if len(modules) == 1 and isinstance(modules[0], dict):
        return modules[0].items()
    return ((str(number), module) for number, module in enumerate(modules))
