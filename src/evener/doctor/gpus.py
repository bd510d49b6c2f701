"""Reads which GPUs the driver shows, and how many of them PyTorch can use, which is imported for that alone."""

from __future__ import annotations

import shutil
import subprocess
from itertools import takewhile
from pathlib import Path

from evener.doctor.facts import GpuFacts
from evener.system.host import version_of

_COMMAND = "nvidia-smi"
_SECONDS = 6.0
_FIELDS = (
    "name", "driver_version", "memory.total", "memory.free",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
)  # fmt: skip
_OTHER_DRIVER = Path("/dev/kfd")
"""Device file of AMD's driver, whose GPUs PyTorch shows in the same way."""


def driver_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs of NVIDIA's driver, and why none although its tool is installed; empty without the tool."""
    command = shutil.which(_COMMAND)
    if command is None:
        return (), ""
    query = [command, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{_COMMAND} does not answer: {error}"
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return (), f"{_COMMAND} fails: {lines[0] if lines else f'exit code {done.returncode}'}"
    return tuple(_gpu_of(line) for line in done.stdout.splitlines() if line.strip()), ""


def torch_gpus(shown: int) -> int | None:
    """GPUs that PyTorch can use; None if no driver is here, or no PyTorch, so that it has not to be asked."""
    if not (shown or _OTHER_DRIVER.exists()) or not version_of("torch"):
        return None
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_gpus(shown: int, chosen: str | None) -> int:
    """Return how many of the GPUs $CUDA_VISIBLE_DEVICES leaves to this process: those before the first invalid one."""
    if chosen is None:
        return shown
    ids = [one.strip() for one in chosen.split(",")]
    return min(shown, len(list(takewhile(lambda one: one and not one.startswith("-"), ids))))


def _gpu_of(line: str) -> GpuFacts:
    """Return the GPU of a line of the tool; missing numbers are 0."""
    values = [value.strip() for value in line.split(",")]
    name, driver, total, free, *slowed = [*values, *[""] * (len(_FIELDS) - len(values))]
    return GpuFacts(
        name=name,
        driver=driver,
        total_bytes=_mebibytes(total),
        free_bytes=_mebibytes(free),
        is_hot="Active" in slowed,
    )


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0
