"""A model that fits no single memory is built on the meta device; every stage gives memory and values to its own part.

    with torch.device("meta"):
        model = HugeTransformer()
    pipeline = Pipeline(model, ...)

Initial values come from a seed made of the process's seed and the module's name, so they do not depend on the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from evener.errors import InvalidInput
from evener.parallel.pipeline.randomness import mix


def give_memory(root: nn.Module, device: torch.device, fill: Callable[[str, nn.Module], None]) -> None:
    """Give every parameter and buffer in `root` that has none memory on `device`; `fill` sets those of one module.

    Of the modules that share a tensor the first one sets it.
    """
    memory: dict[int, torch.Tensor] = {}
    for path, module in root.named_modules():
        fresh, shared = False, list[torch.Tensor]()
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


def _memory_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def initialise(path: str, module: nn.Module) -> None:
    """Initial values of one module, by its own `reset_parameters`.

    Raises:
        InvalidInput: it has none.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise InvalidInput(
            f"{path or 'the model'} ({type(module).__name__}) is on the meta device and cannot be initialised: "
            "give it a method reset_parameters(), or build the model on a device with memory"
        )
    devices = {t.device for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)) if t.is_cuda}
    number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest())
    seed = mix(torch.initial_seed(), number)
    with torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed)
        reset()
