"""The modules and tensors of one stage, under their names in the model.

A model that fits no single memory is built on the meta device. Every stage allocates and initialises its own part:

    with torch.device("meta"):
        model = HugeTransformer()
    pipeline = Pipeline(model, ...)

Random numbers do not depend on the cut. Initial values use a seed made of the process's seed and the module's name.
Every random operation uses a seed made of the step's seed, the micro-batch and its number in the model, so that
recomputation draws the same numbers. The generator of the process is not changed.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.parallel.deferred_statistics import DeferredStatistics, defer_statistics, deferred_in
from evener.records.errors import InvalidInput
from evener.system import accelerators
from evener.tracer.hooks import without_traced_hooks
from evener.tracer.meta_model import attribute

_ONE_GENERATOR = threading.RLock()
"""Guards the CPU's generator, which all threads share; stages of one process draw in turn."""


@dataclass(frozen=True, kw_only=True)
class StageModules:
    """The modules of one stage.

    Attributes:
        root: A tree of modules; names in it are names in the model.
        parameters: Parameters by their first name in the model; a tied one has one name, and a copy on every stage that
            uses it.
        norms: Objects that defer running statistics of norms, by the norm's name.
    """

    root: nn.Module
    parameters: Mapping[str, nn.Parameter]
    norms: Mapping[str, DeferredStatistics]


def targets_of(graph: fx.Graph, constants: Collection[str]) -> list[str]:
    """Return names of the modules and tensors that `graph` uses, except `constants`, each once, in order."""
    names = (str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    return list(dict.fromkeys(name for name in names if name not in constants))


def names_under(named: Iterable[tuple[str, Tensor]], model: nn.Module, targets: Iterable[str]) -> list[str]:
    """Return those names of the tensors `named` that are held under `targets` of `model`, by any name."""
    under = {id(tensor) for target in targets for tensor in _tensors_in(attribute(model, target))}
    return [name for name, tensor in named if id(tensor) in under]


def make_stage_modules(
    model: nn.Module,
    targets: Sequence[Sequence[str]],
    devices: Mapping[int, torch.device],
) -> dict[int, StageModules]:
    """Return the parts of the stages on `devices`, from what every stage uses of the whole `model`.

    The first stage that uses a module or tensor of `model` takes it over without a copy; its BatchNorms defer their
    statistics.
    """
    alive = [*model.modules(), *model.parameters(), *model.buffers()]  # keeps ids unique while they are compared
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages: dict[int, StageModules] = {}
    taken: set[int] = set()
    for stage, device in devices.items():
        root, copies = tree(model, targets[stage], taken)
        first_names = names | {id(copies[key]): name for key, name in names.items() if key in copies}
        identity = {place: first_names[id(tensor)] for place, tensor in _places(root) if id(tensor) in first_names}
        taken |= {id(module) for module in root.modules()} | {id(tensor) for _, tensor in _places(root)}
        give_memory(root, device, initialise)
        root.to(device)
        held = {name: getattr(root.get_submodule(path), last) for (path, last), name in identity.items()}
        stages[stage] = StageModules(root=root, parameters=held, norms=deferred_in(root))
    del alive
    return stages


def tree(model: nn.Module, targets: Iterable[str], taken: Set[int] = frozenset()) -> tuple[nn.Module, dict[int, Any]]:
    """Return a tree of the modules and tensors in `targets`, and copies by id of those that were `taken`."""
    root, copies = nn.Module(), dict[int, Any]()
    for target in targets:
        value = attribute(model, target)
        if not taken.isdisjoint(_ids(value)):
            value = copy.deepcopy(value, copies)
        attach(root, target, value, model)
    return root, copies


def attach(root: nn.Module, target: str, value: nn.Module | Tensor, model: nn.Module) -> None:
    """Hold `value` in `root` under its name `target` in `model`."""
    path, _, name = target.rpartition(".")
    where, owner = _container(root, path), model.get_submodule(path)
    if isinstance(value, nn.Module):
        where._modules[name] = defer_statistics(without_traced_hooks(value))
    elif isinstance(value, nn.Parameter):
        where.register_parameter(name, value)
    else:
        persistent = name in owner._buffers and name not in owner._non_persistent_buffers_set
        where.register_buffer(name, value, persistent=persistent)


def _container(root: nn.Module, path: str) -> nn.Module:
    """Return the module at `path` in `root`, creating empty modules as needed."""
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]  # type: ignore[assignment]
    return root


def _tensors_in(value: nn.Module | Tensor) -> list[Tensor]:
    return [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]


def _ids(value: nn.Module | Tensor) -> set[int]:
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return {id(part) for part in (*modules, *_tensors_in(value))}


def _places(root: nn.Module) -> list[tuple[tuple[str, str], Tensor]]:
    """Return ((module, name), tensor) of every place in `root` that holds a tensor, which may be in several places."""
    return [
        ((path, name), tensor)
        for path, module in root.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]


def give_memory(root: nn.Module, device: torch.device, fill: Callable[[str, nn.Module], None]) -> None:
    """Allocate every parameter and buffer in `root` that has no memory on `device`; `fill` initialises one module.

    If modules share a tensor, the first one initialises it.
    """
    memory: dict[int, Tensor] = {}
    for path, module in root.named_modules():
        fresh, shared = False, list[Tensor]()
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) in memory:
                        shared.append(memory[id(tensor)])
                    memory.setdefault(id(tensor), _memory_like(tensor, device))
                    tensors[name], fresh = memory[id(tensor)], True
        if fresh:
            with torch.no_grad():
                values = [tensor.clone() for tensor in shared]
                fill(path, module)
                for tensor, value in zip(shared, values, strict=True):
                    tensor.copy_(value)


def _memory_like(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def initialise(path: str, module: nn.Module) -> None:
    """Initialise one module with its `reset_parameters`. Raises InvalidInput if it has none."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise InvalidInput(
            f"{path or 'the model'} ({type(module).__name__}) is on the meta device and cannot be initialised: "
            "give it a method reset_parameters(), or build the model on a CPU or GPU"
        )
    devices = {t.device for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest())
    seed = mix(torch.initial_seed(), number)
    with accelerators.random_numbers_kept(*devices):
        torch.manual_seed(seed)
        reset()


@dataclass
class StageRNG:
    """Seeds the random operations of a stage on `device`, by step and micro-batch."""

    device: torch.device
    seed: int = 0
    micro_batch: int = 0

    @contextmanager
    def seeded_for(self, operation: int) -> Iterator[None]:
        """Draw the random numbers of `operation` for this step and micro-batch."""
        seed = mix(self.seed, self.micro_batch, operation)
        with _ONE_GENERATOR, accelerators.random_numbers_kept(self.device):
            for generator in accelerators.generators(self.device):
                generator.manual_seed(seed)
            yield


def mix(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on all of `numbers`."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
