"""What a node is and has, and what its engine for a job is therefore made from."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from evener import __version__
from evener.host import version_of
from evener.profile import DeviceProfile
from evener.ps.admission import Versions
from evener.ps.blob_transfer import BlobReceiver
from evener.ps.engine import Build, EngineSetup
from evener.ps.job import Job


class NodeConfig(NamedTuple):
    """What a node is and has.

    Attributes:
        name: of the node.
        device: that computes.
        speed: 1, or the fraction to which it is slowed down.
        data: folder of its own data; None if it has none.
        cache: folder of what is sent to it.
        versions: of what runs on it.
        measure: the profile of its device; takes a few seconds.
        build: makes engines.
    """

    name: str
    device: str
    speed: float
    data: Path | None
    cache: Path
    versions: Versions
    measure: Callable[[], DeviceProfile]
    build: Build


def versions_here() -> Versions:
    """What runs on this machine; PyTorch is not imported."""
    return Versions(__version__, platform.python_version(), version_of("torch"))


def setup_for(job: Job, own: NodeConfig, blobs: BlobReceiver, between_steps: Callable[[], None]) -> EngineSetup:
    """What the engine of `job` is made from, once its blobs are here.

    The node's own data come before those that the command named, and what was sent with the job before both.
    """
    shared = Path(job.data_dir) if job.data_dir else None
    return EngineSetup(
        job=job,
        code=blobs.path_of(job.code) if job.code else None,
        data=blobs.path_of(job.data) if job.data else shared and (own.data or shared),
        device=own.device,
        speed=own.speed,
        between_steps=between_steps,
    )
