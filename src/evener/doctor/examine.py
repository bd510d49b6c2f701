"""Reads this machine: everything that is not read by a file of its own, and all of it together."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from evener import version
from evener.doctor.facts import FolderFacts, MachineFacts
from evener.doctor.gpus import driver_gpus, torch_gpus, visible_gpus
from evener.doctor.load import load_facts
from evener.doctor.network import network_facts
from evener.records.schema import shown
from evener.system.host import cpu_model, version_of
from evener.system.memory import usable_memory


def examine(
    folders: Mapping[str, Path], *, machine: str = "", towards: str | None = None, task_problem: str | None = None
) -> MachineFacts:
    """Return the facts of this machine; takes a second, and up to 10 where a driver or the name service hangs.

    Args:
        folders: that runs write into, by what lies there.
        machine: what it is called; its own name by default.
        towards: a host that it is to reach; None for any other.
        task_problem: why the task cannot be loaded here; empty if it can, None if there is none.
    """
    host = socket.gethostname()
    gpus, gpu_problem = driver_gpus()
    load = load_facts()  # before PyTorch may be imported
    total, free = usable_memory()
    return MachineFacts(
        machine=machine or host,
        evener=version.VERSION,
        python=platform.python_version(),
        torch=version_of("torch"),
        processor=cpu_model(),
        clock=time.time(),
        installed=Path(version.__file__).stat().st_mtime,
        total_bytes=total,
        free_bytes=free,
        machine_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        visible_gpus=visible_gpus(len(gpus), os.environ.get("CUDA_VISIBLE_DEVICES")),
        gpu_problem=shown(gpu_problem),
        torch_gpus=torch_gpus(len(gpus)),
        folders=tuple(folder_facts(purpose, path) for purpose, path in folders.items()),
        network=network_facts(os.environ, host, towards),
        load=load,
        task_problem=task_problem,
    )


def folder_facts(purpose: str, path: Path) -> FolderFacts:
    """The room in a folder, or where it would be made."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    inodes = os.statvfs(there)
    return FolderFacts(
        purpose=purpose,
        path=shown(str(there)),
        free_bytes=shutil.disk_usage(there).free,
        has_inodes=inodes.f_favail > 0 or inodes.f_files == 0,
        is_writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
    )
