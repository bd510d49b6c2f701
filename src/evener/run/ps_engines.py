"""From a job to the engine that computes it on this node: PyTorch's where it is installed, else the thin one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from evener.errors import MissingExtra
from evener.ps.engine import NodeEngine, Workshop
from evener.tasks.file import import_file
from evener.tasks.load import has_thin_task, is_path, load_task, load_thin_task, thin_twin


def build(workshop: Workshop) -> NodeEngine:
    """The engine of a job on this node.

    Raises:
        MissingExtra: the job needs PyTorch, which is not installed.
        InvalidInput: task or data are not those of the job.
    """
    if importlib.util.find_spec("torch") is None or is_thin(_reference(workshop)):
        return build_thin(workshop)
    return build_torch(workshop)


def build_thin(workshop: Workshop) -> NodeEngine:
    """The thin engine, also where PyTorch is installed. Raises as `build`."""
    from evener.ps.thin_engine import ThinEngine

    job, reference = workshop.job, _reference(workshop)
    if not has_thin_task(reference):
        raise MissingExtra(
            f"task {job.title} has no thin twin, so this node needs PyTorch: pip install 'evener[torch]', "
            "or see docs/autodiff.md on how to write one"
        )
    return ThinEngine(load_thin_task(reference, workshop.data, job.options), workshop)


def build_torch(workshop: Workshop) -> NodeEngine:
    """PyTorch's engine. Raises as `build`."""
    import torch

    from evener.ps.torch_engine import TorchEngine
    from evener.run.precision import Arithmetic

    job = workshop.job
    task = load_task(_reference(workshop), workshop.data, job.options)
    arithmetic = Arithmetic(job.precision, torch.device(workshop.device))  # type: ignore[arg-type]  # was checked
    return TorchEngine(task, workshop, arithmetic)


def is_thin(reference: str) -> bool:
    """Whether here only the thin engine can do a task: PyTorch is missing, or the task is said for that engine alone.

    Args:
        reference: name, or path of a file.

    Raises:
        EvenerError: the file cannot be run.
    """
    if is_path(reference) and not Path(reference).is_file():
        return False  # PyTorch's way says what is wrong
    if importlib.util.find_spec("torch") is None:
        return has_thin_task(reference)
    return is_path(reference) and _defines_only_thin_task(Path(reference))


def _defines_only_thin_task(path: Path) -> bool:
    if thin_twin(path) is not None or not has_thin_task(str(path)):
        return False
    module = import_file(path)
    return hasattr(module, "thin_task") and not hasattr(module, "task")


def _reference(workshop: Workshop) -> str:
    """The task's name, or the file of it that travelled here."""
    return str(workshop.code / workshop.job.task) if workshop.code else workshop.job.task
