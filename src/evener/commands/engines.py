"""The engine of a task on a node, and its backend where a run is submitted.

The backend is PyTorch's if that is installed. Otherwise, and for files that define only a thin task, it is
the thin one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.data.tasks.load import has_thin_task, import_file, is_path, load_task, load_thin_task, thin_twin
from evener.ps.node.engine import EngineSetup, ModelBackend, TaskEngine
from evener.records.errors import InvalidInput, MissingExtra, NotExact
from evener.records.task import Task, ThinTask
from evener.records.version import pip_install
from evener.system.malloc import keep_freed_memory

if TYPE_CHECKING:
    from evener.config.run_config import RunConfig  # which a node does not need
    from evener.ps.node.torch_backend import TorchBackend
    from evener.training.sync_check import ProbeOf


def load_backend(config: RunConfig, *, thin: bool = False) -> tuple[ModelBackend, Task | ThinTask]:
    """Return the task of `config`, and a backend with its initial weights.

    Args:
        config: of the run.
        thin: whether to load the thin twin even if PyTorch is installed.

    Raises:
        EvenerError: the task is wrong.
    """
    if thin or is_thin(config.task):
        twin = load_thin_task(config.task, config.data, config.option)
        return _thin_backend(twin, config.seed, config.precision), twin
    task = load_task(config.task, config.data, config.option)
    return torch_backend(task, config), task


def torch_backend(task: Task, config: RunConfig) -> ModelBackend:
    """Return a backend of `task` with its initial weights, where a run is submitted.

    Raises:
        EvenerError: the task is wrong.
    """
    from evener.training.task_faults import refuse_outputs

    backend = _torch_backend(task, config.seed, config.precision, "cpu")
    refuse_outputs(task, backend.model, backend.samples)
    return backend


def require_twins(config: RunConfig, task: Task) -> None:
    """Raise NotExact if the thin twin of the user's task, for nodes without PyTorch, differs from the task."""
    path = thin_twin(Path(config.task).resolve()) if is_path(config.task) else None
    if path is None:
        return
    from evener.ps.node.parity import check_parity

    try:
        check_parity(task, load_thin_task(config.task, config.data, config.option))
    except InvalidInput as error:
        raise NotExact(
            f"--agreement sync would train something else on nodes without PyTorch, by {path.name}: {error}; "
            "correct it, take it away, or --no-check"
        ) from error


def probe_of(backend: Any, task: Task | ThinTask, seed: int) -> ProbeOf:
    """Return a function that makes the probes of a submitted task, for `sync_check`."""
    if isinstance(task, ThinTask):
        from evener.training.sync_probe_thin import ThinProbe

        return lambda precision, _: ThinProbe(backend, task, seed, precision)
    from evener.training.sync_probe_torch import TorchProbe

    return lambda precision, is_asked: TorchProbe(backend, task, seed, precision, is_asked=is_asked)


def build_engine(setup: EngineSetup) -> TaskEngine:
    """Return the engine of a job on this node.

    Raises:
        MissingExtra: the job needs PyTorch, which is not installed.
        InvalidInput: task or data are not those of the job.
    """
    if not _has_torch() or is_thin(_reference(setup)):
        return build_thin_engine(setup)
    return build_torch_engine(setup)


def build_thin_engine(setup: EngineSetup) -> TaskEngine:
    """Return the thin engine, even if PyTorch is installed. Raises the errors of `build_engine`."""
    job, reference = setup.job, _reference(setup)
    if not has_thin_task(reference):
        raise MissingExtra(
            f"task {job.title} has no thin twin, so this node needs PyTorch: {pip_install('torch')}, "
            "or see docs/autodiff.md on how to write one"
        )
    task = load_thin_task(reference, setup.data, job.options)
    return TaskEngine(_thin_backend(task, job.workload.seed, job.precision), setup)


def build_torch_engine(setup: EngineSetup) -> TaskEngine:
    """Return PyTorch's engine. Raises the errors of `build_engine`."""
    job = setup.job
    if setup.device == "cpu":
        keep_freed_memory()
    task = load_task(_reference(setup), setup.data, job.options)
    return TaskEngine(_torch_backend(task, job.workload.seed, job.precision, setup.device), setup)


def is_thin(reference: str) -> bool:
    """Return whether only the thin backend can compute a task here: PyTorch is missing, or the task is thin.

    Args:
        reference: name, or path of a file.

    Raises:
        EvenerError: the file cannot be run.
    """
    if is_path(reference) and not Path(reference).is_file():
        return False  # the loader of PyTorch tasks reports the error
    if not _has_torch():
        return has_thin_task(reference)
    return is_path(reference) and _defines_only_thin_task(Path(reference))


def _defines_only_thin_task(path: Path) -> bool:
    if thin_twin(path) is not None or not has_thin_task(str(path)):
        return False
    module = import_file(path)
    return hasattr(module, "thin_task") and not hasattr(module, "task")


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _reference(setup: EngineSetup) -> str:
    """Return the task's name, or the path of its shipped file."""
    return str(setup.code / setup.job.task) if setup.code else setup.job.task


def _thin_backend(task: ThinTask, seed: int, precision: str) -> ModelBackend:
    from evener.ps.node.thin_backend import ThinBackend

    return ThinBackend(task, seed, precision)


def _torch_backend(task: Task, seed: int, precision: Any, device: str) -> TorchBackend:
    import torch

    from evener.ps.node.torch_backend import TorchBackend
    from evener.training.context import Arithmetic

    return TorchBackend(task, seed, Arithmetic(precision, torch.device(device)), device)
