"""Two accelerators in main memory, so that tests of GPUs run on any machine with a C++ compiler.

`standin.cpp` says what they do. The library is compiled once and kept in `~/.cache/evener`. Processes that have
`PATHS` in their PYTHONPATH load it together with PyTorch, which finds it by the entry point `torch.backends`.

    waits()                   how often the host has waited for a device: reads, copies that block, synchronisation
    waits_of_thread()         how often this thread has
    limit_memory(0, 10**6)    device 0 runs out of memory
    hang(0, True)             its work never ends
    lose(0, True)             it fails from now on
    narrow(0, True)           it has no float64, like a GPU of Apple; so does EVENER_TEST_NARROW=0 in the environment
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

NAME = "standin"
SOURCE = Path(__file__).with_name("standin.cpp")
PATHS = (str(Path(__file__).with_name("autoload")), str(Path(__file__).parents[2]))
"""Folders that make PyTorch load the devices in processes that have them in their PYTHONPATH."""


def why_not() -> str:
    """Return why the devices cannot be compiled here; empty if they can."""
    if is_built():
        return ""
    if shutil.which(_compiler()) is None:
        return "the stand-in accelerator needs a C++ compiler"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"the stand-in accelerator needs {header}"


def is_built() -> bool:
    """Whether the library is there already."""
    return (_folder() / f"{NAME}.so").exists()


@cache
def load() -> Any:
    """Make the devices known to PyTorch in this process; return the module with their controls."""
    library = _library()
    for index in filter(None, os.environ.get("EVENER_TEST_NARROW", "").split(",")):
        library.narrow(int(index), True)
    rename_privateuse1_backend(NAME)
    generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
    torch._register_device_module(NAME, _device_module(library))  # type: ignore[no-untyped-call]
    nn.Module._apply = _with_parameters_kept(nn.Module._apply)  # type: ignore[method-assign]
    return library


def _with_parameters_kept(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Let a model's parameters stay the same objects when it moves to a device, as PyTorch lets them on a GPU.

    PyTorch then swaps their contents, and with these their hooks. So a model that does not move is left to PyTorch.
    """

    @wraps(apply)
    def kept(module: nn.Module, convert: Callable[[Tensor], Tensor], *arguments: Any, **named: Any) -> nn.Module:
        if torch.is_inference_mode_enabled():  # its tensors cannot be trained later
            return apply(module, convert, *arguments, **named)
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(before or _moves(module, convert))
        try:
            return apply(module, convert, *arguments, **named)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return kept


def _moves(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> bool:
    """Whether `convert` moves parameters of `module` to another kind of device."""
    devices = {(one.device, one.dtype) for one in module.parameters()}
    return any(convert(torch.empty(0, device=on, dtype=dtype)).device.type != on.type for on, dtype in devices)


def _device_module(library: Any) -> types.ModuleType:
    """Return what PyTorch asks of a kind of devices."""
    module = types.ModuleType(f"torch.{NAME}")
    generators = tuple(library.generator(index) for index in range(library.device_count()))

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(library.current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": library.device_count,
        "current_device": library.current_device,
        "set_device": lambda device: library.set_device(index_of(device)),
        "device": lambda device: torch.accelerator.device_index(index_of(device)),
        "synchronize": lambda device=None: library.synchronize(index_of(device)),
        "default_generators": generators,
        "get_rng_state": lambda device=None: generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index_of(device)].set_state(state),
        "manual_seed": lambda seed: generators[index_of()].manual_seed(seed),
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in generators],
        "empty_cache": torch.accelerator.empty_cache,
        "memory_reserved": lambda device=None: torch.accelerator.memory_reserved(index_of(device)),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=NAME, total_memory=torch.accelerator.get_memory_info(index_of(device))[1]
        ),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(members)
    return module


def _library() -> Any:
    """Load the library, which is compiled first if it is not there."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    import fcntl  # the library is compiled where POSIX is

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built():
            _compile(folder)
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(folder: Path) -> None:
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

    draft = folder / f"{NAME}-{os.getpid()}.so"
    places = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [f"-L{TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}"]
    subprocess.run([_compiler(), *options, *places, str(SOURCE), *libraries, "-o", str(draft)], check=True)
    draft.replace(folder / f"{NAME}.so")


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _folder() -> Path:
    """Return the folder of the library for this PyTorch, Python and source."""
    made_of = (SOURCE.read_bytes(), torch.__version__.encode(), sys.version.encode())
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "evener" / f"{NAME}-{digest}"
