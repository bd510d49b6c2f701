"""The base of all modules, which registers parameters, buffers and submodules under their attribute names.

And the modules that are made of modules: Sequential, ModuleList.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from evener.autodiff.errors import StateMismatch, require
from evener.autodiff.graph import no_grad
from evener.autodiff.parameters import Parameter
from evener.autodiff.tensors.tensor import Tensor

M = TypeVar("M", bound="Module")


class Module:
    """A part of a model. A subclass creates its parts in `__init__`, after `super().__init__()`, and defines `forward`.

    Attributes:
        training: whether it is being trained (`train`) or used (`eval`); dropout and batch norm differ.
    """

    training: bool
    _parts: dict[type, dict[str, Any]]

    def __init__(self) -> None:
        object.__setattr__(self, "_parts", {kind: {} for kind in (Parameter, Tensor, Module)})
        self.training = True

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the module's outputs."""
        raise NotImplementedError(f"{type(self).__name__} needs a method forward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the result of `forward`."""
        return self.forward(*inputs, **options)

    # Parts.

    def __setattr__(self, name: str, value: Any) -> None:
        require("_parts" in self.__dict__, "{} must call super().__init__() before it gets parts", type(self).__name__)
        for parts in self._parts.values():
            if name in parts and not (value is None or isinstance(value, Tensor | Module)):
                raise TypeError(f"{name} is a parameter, buffer or module; it cannot become {type(value).__name__}")
        if isinstance(value, Parameter | Module):
            self._register(Parameter if isinstance(value, Parameter) else Module, name, value)
        elif name in self._parts[Parameter] or name in self._parts[Module]:
            self._register(None, name, value)
        elif name in self._parts[Tensor]:
            self._parts[Tensor][name] = value
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._register(None, name, None)
        object.__delattr__(self, name)

    def register_buffer(self, name: str, tensor: Tensor) -> None:
        """Register `tensor` as an attribute that belongs to the state but is not trained."""
        self._register(Tensor, name, tensor)
        object.__setattr__(self, name, tensor)

    def _register(self, kind: Any, name: str, value: Any) -> None:
        require("." not in name and bool(name), "a part of a module needs a name without dots, got {!r}", name)
        for parts in self._parts.values():
            parts.pop(name, None)
        if kind is not None:
            self._parts[kind][name] = value

    # Looking through the parts.

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all submodules, each once, with names such as `features.0`."""
        yield from _once(self._all_modules(prefix))

    def modules(self) -> Iterator[Module]:
        """Yield this module and all submodules, each once."""
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the direct submodules with their names."""
        yield from self._parts[Module].items()

    def children(self) -> Iterator[Module]:
        """Yield the direct submodules."""
        return iter(self._parts[Module].values())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters, each once, with names such as `features.0.weight`."""
        yield from _once(self._all_parts(Parameter))

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers, each once, with names such as `features.1.running_mean`."""
        yield from _once(self._all_parts(Tensor))

    def _all_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, child in self._parts[Module].items():
            yield from child._all_modules(f"{prefix}.{name}" if prefix else name)

    def _all_parts(self, *kinds: type) -> Iterator[tuple[str, Any]]:
        for prefix, module in self._all_modules():
            for kind in kinds:
                for name, part in module._parts[kind].items():
                    yield (f"{prefix}.{name}" if prefix else name), part

    # State.

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name, sharing memory; PyTorch's module has the same names."""
        return {name: tensor.detach() for name, tensor in self._state()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the values of a state: tensors of this library, of PyTorch (on the CPU), or arrays.

        Args:
            state: values by name.
            strict: refuse a state with names that are missing or unknown; otherwise load what there is.

        Raises:
            StateMismatch: names (if `strict`) or shapes differ; nothing was changed.
        """
        tensors, arrays = dict(self._state()), {name: _array(value) for name, value in state.items()}
        wrong = [f"{name} is missing" for name in tensors if strict and name not in arrays]
        wrong += [f"{name} is unknown" for name in arrays if strict and name not in tensors]
        common = tensors.keys() & arrays.keys()
        wrong += [
            f"{name} has shape {arrays[name].shape} instead of {tensor.shape}"
            for name, tensor in tensors.items()
            if name in common and arrays[name].shape != tensor.shape
        ]
        if wrong:
            raise StateMismatch(f"the state does not fit {type(self).__name__}: {'; '.join(wrong)}")
        with no_grad():
            for name in common:
                tensors[name].copy_(arrays[name])

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers in PyTorch's order; a shared one appears under each of its names."""
        return self._all_parts(Parameter, Tensor)

    # Modes.

    def train(self: M, mode: bool = True) -> M:
        """Set the module and all submodules to training or evaluation, and return it."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: M) -> M:
        """Set the module and all submodules to evaluation, and return it."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Make all parameters collect gradients, or stop doing so, and return the module."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self) -> None:
        """Reset the gradients of all parameters."""
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = None

    def double(self: M) -> M:
        """Convert parameters and floating-point buffers to float64, before creating an optimizer; return the module."""
        for _, tensor in self._state():
            if tensor.dtype.kind == "f":
                tensor._become(np.float64)
        return self

    def __repr__(self) -> str:
        """Return the submodules, or, for a single layer, the shapes of its parameters and its options."""
        parts = [f"\n  ({name}): " + repr(part).replace("\n", "\n  ") for name, part in self.named_children()]
        if parts:
            return f"{type(self).__name__}({''.join(parts)}" + "\n)"
        shapes = {name: parameter.shape for name, parameter in self._parts[Parameter].items()}
        options = {k: v for k, v in vars(self).items() if isinstance(v, int | float | str | tuple) and k != "training"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in (shapes | options).items())})"


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _once(named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each part only under the first of its names."""
    seen: set[int] = set()
    for name, part in named:
        if id(part) not in seen:
            seen.add(id(part))
            yield name, part


class _ListOfModules(Module):
    def __len__(self) -> int:
        return len(self._parts[Module])

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Any:
        return list(self.children())[index]


class Sequential(_ListOfModules):
    """A chain of modules, named by their numbers or by the keys of an OrderedDict."""

    def __init__(self, *modules: Module | OrderedDict[str, Module]) -> None:
        super().__init__()
        for name, module in _named(modules):
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        """Apply the modules in order."""
        for module in self._parts[Module].values():
            x = module(x)
        return x


class ModuleList(_ListOfModules):
    """Modules in a list, so that the module that holds the list finds their parameters."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Append `module`."""
        setattr(self, str(len(self)), module)


def _named(modules: tuple[Any, ...]) -> Iterable[tuple[str, Module]]:
    if len(modules) == 1 and isinstance(modules[0], dict):
        return modules[0].items()
    return ((str(number), module) for number, module in enumerate(modules))
