"""GPUs and other devices beside the processor. No other module asks which kind of device it has.

PyTorch reaches all of them by `torch.accelerator`, but they differ in what they can do:

    kind     devices                            float64   timed events   memory counted   pinned memory   collectives
    cuda     GPUs of NVIDIA, and AMD (ROCm)     yes       yes            yes              yes             NCCL, RCCL
    xpu      GPUs of Intel                      some      yes            yes              yes             XCCL
    mps      GPUs of Apple                      no        yes            no               no              none
    others   devices of PyTorch's extensions    asked from PyTorch

An installation of PyTorch has one kind at most. Tensors of kinds without collectives go through main memory
(`comm/staged_gloo`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evener.system import host

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Capabilities:
    """Abilities of PyTorch on the devices of one kind.

    Attributes:
        has_timed_events: events in its queue measure the time between two of them.
        counts_memory: PyTorch counts the memory that tensors take there, and its peak.
        has_pinned_memory: pinned main memory is copied there while it computes.
        backend: process groups that exchange its tensors directly; None without one.
    """

    has_timed_events: bool
    counts_memory: bool
    has_pinned_memory: bool
    backend: str | None


_LOST = re.compile(
    r"device \d+ is lost|gpu is lost|device_lost|fallen off the bus|uncorrectable ecc|unspecified launch failure"
    r"|devices? is/are busy or unavailable|device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)
_KINDS = {
    "cpu": Capabilities(has_timed_events=False, counts_memory=False, has_pinned_memory=False, backend="gloo"),
    "cuda": Capabilities(has_timed_events=True, counts_memory=True, has_pinned_memory=True, backend="nccl"),
    "xpu": Capabilities(has_timed_events=True, counts_memory=True, has_pinned_memory=True, backend="xccl"),
    "mps": Capabilities(has_timed_events=True, counts_memory=False, has_pinned_memory=False, backend=None),
}


def capabilities(device: torch.device | str) -> Capabilities:
    """Return the abilities of PyTorch on `device`; a device of another machine must be of a kind in the table above."""
    kind = kind_of(device)
    return _KINDS[kind] if kind in _KINDS else _asked(kind)


def kind_of(device: torch.device | str) -> str:
    """Return the kind of a device, such as `cuda` of `cuda:0`."""
    return str(device).partition(":")[0]


def is_accelerator(device: torch.device | str) -> bool:
    """Return whether `device` computes, and is not the processor."""
    return kind_of(device) not in ("cpu", "meta")


def names() -> list[str]:
    """Return the names of this machine's accelerators, such as `cuda:0`, in order; empty without one."""
    return [f"{kind}:{index}" for kind in _kind_here() for index in range(_module(kind).device_count())]


def best() -> torch.device:
    """Return the first accelerator of this machine, or the processor."""
    return torch.device(next(iter(names()), "cpu"))


def use(device: torch.device) -> None:
    """Let this thread's operations that name no device of this kind run on `device`."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index or 0)


def used(device: torch.device) -> Any:
    """Return a context for `use`, after which this thread uses the device that it used before."""
    return torch.accelerator.device_index(device.index or 0) if is_accelerator(device) else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its queued work; the processor always has."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def marked(device: torch.device, *, timed: bool = True) -> torch.Event | None:
    """Return an event at the end of the queued work of `device`.

    Args:
        device: the device.
        timed: whether the event shall measure times.

    Returns:
        The event; None on the processor, and where events cannot measure times but shall.
    """
    if not is_accelerator(device) or (timed and not capabilities(device).has_timed_events):
        return None
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def is_lost(error: BaseException) -> bool:
    """Whether an error of PyTorch means that its accelerator works no longer, as far as drivers tell by their words."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor`, which is in main memory, on `device`, without waiting for the work that is queued there."""
    if is_accelerator(device) and capabilities(device).has_pinned_memory:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `tensors` in main memory; wait once for each device that has some of them."""
    copies = [tensor.detach().to(CPU, non_blocking=True) for tensor in tensors]  # into pinned memory
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        event = marked(device, timed=False)
        if event is not None:
            event.synchronize()
    return copies


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether `device` computes in double precision: GPUs of Apple, and some of Intel, do not."""
    if device.type == "mps":
        return False
    if device.type == "xpu":
        return bool(getattr(_module("xpu").get_device_properties(device), "has_fp64", True))
    if is_accelerator(device):
        try:
            torch.empty(1, dtype=torch.float64, device=device)
        except TypeError:  # as PyTorch raises it for GPUs of Apple
            return False
    return True


def exact(device: torch.device) -> torch.device:
    """Return `device` if it computes in double precision, else the processor."""
    return device if has_float64(device) else CPU


def widest(device: torch.device) -> torch.dtype:
    """Return the type of sums on `device`: double precision where it has that."""
    return torch.float64 if has_float64(device) else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in the widest type of its device."""
    return tensor.to(widest(tensor.device))


class HostCopy:
    """Copies one number to the host, in the order of the device's work.

    `float(tensor)` of an accelerator waits for all queued work, including the next step. This copy, queued right after
    a step's work, can be read one step later without waiting.

    Args:
        value: a tensor of one element, or a number that the host has already.
    """

    def __init__(self, value: Tensor | float) -> None:
        self._value, self._event = value, None
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._value = value.detach().to("cpu", non_blocking=True)  # into pinned memory
            self._event = marked(value.device, timed=False)

    def read(self) -> float:
        """Return the number; wait only for the work that was queued before the copy."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return float(self._value)


def memory(device: torch.device) -> tuple[int, int] | None:
    """Return (all bytes of `device`, those that this process may take); None if they are those of the main memory.

    Memory that PyTorch holds there without using it can be taken.
    """
    if capabilities(device).counts_memory:
        ask = getattr(_module(device.type), "mem_get_info", None) or torch.accelerator.get_memory_info  # newer than 2.9
        free, total = ask(device)
        return total, free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total, total - torch.mps.current_allocated_memory()
    return None


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on `device`, whose memory PyTorch counts."""
    return torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes of tensors on `device`, whose memory PyTorch counts, since `reset_peak`."""
    return torch.accelerator.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Count the peak of `device`, whose memory PyTorch counts, from now on."""
    torch.accelerator.reset_peak_memory_stats(device)


def release_memory(device: torch.device) -> None:
    """Give memory that PyTorch holds on `device` without using it back to others."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif is_accelerator(device):
        torch.accelerator.empty_cache()


def generators(device: torch.device) -> list[torch.Generator]:
    """Return PyTorch's generators of random numbers: that of the processor, then that of an accelerator `device`."""
    if not is_accelerator(device):
        return [torch.default_generator]
    module = _module(device.type)
    if device.type == "mps":
        return [torch.default_generator, module._get_default_mps_generator()]
    if hasattr(module, "init"):
        module.init()  # there are no generators before
    return [torch.default_generator, module.default_generators[device.index or 0]]


@contextmanager
def random_numbers_kept(*devices: torch.device) -> Iterator[None]:
    """Restore PyTorch's generators of the processor and of `devices` at the end."""
    states = {one: one.get_state() for device in (CPU, *devices) for one in generators(device)}
    try:
        yield
    finally:
        for one, state in states.items():
            one.set_state(state)


def model_and_units(device: torch.device) -> tuple[str, int]:
    """Return the model of an accelerator, and its number of multiprocessors or cores, 1 if that is not known."""
    if device.type == "mps":
        units = getattr(torch.backends.mps, "get_core_count", lambda: 1)()
        return f"{host.cpu_model()} GPU", units
    with suppress(AttributeError, RuntimeError):
        properties = _module(device.type).get_device_properties(device)
        units = getattr(properties, "multi_processor_count", 0) or getattr(properties, "max_compute_units", 1)
        return properties.name, units
    return kind_of(device), 1


def versions() -> dict[str, str]:
    """Return the versions of the drivers and libraries by which PyTorch reaches accelerators, and the first one."""
    found = {name: getattr(torch.version, name, None) or "none" for name in ("cuda", "hip", "xpu")}
    if names():
        found["gpu"] = model_and_units(best())[0]
        cudnn: Any = torch.backends.cudnn
        if cudnn.is_available():
            found["cudnn"] = str(cudnn.version())
    return found


def common_backend(devices: Sequence[str]) -> str | None:
    """Return the process group that exchanges the tensors of all these devices directly; None without one."""
    backends = {capabilities(device).backend for device in devices}
    return backends.pop() if len(backends) == 1 else None


def _kind_here() -> tuple[str, ...]:
    """Return the kind of accelerators that this installation of PyTorch can have."""
    kind = torch.accelerator.current_accelerator()
    return () if kind is None else (kind.type,)


def _module(kind: str) -> Any:
    """Return PyTorch's module for a kind of accelerators."""
    return torch.get_device_module(kind)


@cache
def _asked(kind: str) -> Capabilities:
    """Return the abilities of PyTorch on devices of an extension of it, as PyTorch itself reports them."""
    event = memory = pinned = False
    with suppress(RuntimeError, TypeError):
        torch.Event(kind, enable_timing=True).record()
        event = True
    with suppress(RuntimeError):
        memory = bool(torch.accelerator.memory_stats())
    with suppress(RuntimeError):
        pinned = torch.empty(1).pin_memory().is_pinned()
    backend = torch.distributed.Backend.default_device_backend_map.get(kind)
    own = None if backend == "gloo" else backend
    return Capabilities(has_timed_events=event, counts_memory=memory, has_pinned_memory=pinned, backend=own)
