"""The profile of a node's device: measured when the node first joins, then known for a day.

So a node that is restarted, however often, is of use at once instead of measuring for two seconds first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from evener.errors import InvalidInput
from evener.profile import ClusterProfile, DeviceProfile
from evener.ps.admission import Versions
from evener.ps.numpy_benchmark import profile_numpy
from evener.schema import read_noun, write_noun

MEASURE_SECONDS = 2.0
KNOWN_SECONDS = 24 * 3600.0
"""After which a device is measured anew."""


def measuring(
    name: str, device: str, speed: float, *, thin: bool, versions: Versions, cache: Path
) -> Callable[[], DeviceProfile]:
    """What gives the profile of a node's device when it is called.

    Args:
        name: of the node.
        device: that computes.
        speed: 1, or the fraction to which the node is slowed down.
        thin: whether NumPy computes, though PyTorch may be installed.
        versions: of what runs on the node.
        cache: folder in which the profile is kept.
    """
    is_thin = thin or importlib.util.find_spec("torch") is None
    what = repr((name, device, speed, is_thin, tuple(versions)))
    file = cache / "profiles" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    measure = profile_numpy if is_thin else partial(_measure, device)
    return partial(remembered, file, partial(measure, name, speed, MEASURE_SECONDS), time.time)


def remembered(file: Path, measure: Callable[[], DeviceProfile], clock: Callable[[], float]) -> DeviceProfile:
    """The profile in `file` if it was written within a day, else the one that `measure` makes, which is kept there."""
    try:
        if 0 <= clock() - file.stat().st_mtime < KNOWN_SECONDS:
            return read_noun(file, ClusterProfile).devices[0]
    except (OSError, InvalidInput):
        pass  # there is none, or none that this version reads: measure
    profile = measure()
    write_noun(ClusterProfile(devices=(profile,)), file)
    return profile


def _measure(device: str, name: str, speed: float, seconds: float) -> DeviceProfile:
    import torch

    from evener.benchmark.device import profile_device

    return profile_device(name, torch.device(device), speed=speed, seconds=seconds)
