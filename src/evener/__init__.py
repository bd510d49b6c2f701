"""Evener trains one PyTorch model on uneven machines. What is named here is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evener.records.version import VERSION

if TYPE_CHECKING:
    from evener.frontends.programs.calling import Trained, train
    from evener.frontends.programs.entry import gather, join
    from evener.frontends.programs.run import Run
    from evener.records.errors import EvenerError
    from evener.records.graph import ModelGraph
    from evener.records.plan import Plan
    from evener.records.profile import ClusterProfile
    from evener.records.record import Epoch, TrainRecord, Validation
    from evener.records.task import BatchTask, Task, ThinTask
    from evener.report.loggers import MLflow, TensorBoard, Wandb
    from evener.training.callbacks import EarlyStopping

__version__ = VERSION

__all__ = [
    "BatchTask",
    "ClusterProfile",
    "EarlyStopping",
    "Epoch",
    "EvenerError",
    "MLflow",
    "ModelGraph",
    "Plan",
    "Run",
    "Task",
    "TensorBoard",
    "ThinTask",
    "TrainRecord",
    "Trained",
    "Validation",
    "Wandb",
    "__version__",
    "gather",
    "join",
    "train",
]

_HOMES = {
    "BatchTask": "records.task",
    "ClusterProfile": "records.profile",
    "EarlyStopping": "training.callbacks",
    "Epoch": "records.record",
    "EvenerError": "records.errors",
    "MLflow": "report.loggers",
    "ModelGraph": "records.graph",
    "Plan": "records.plan",
    "Run": "frontends.programs.run",
    "Task": "records.task",
    "TensorBoard": "report.loggers",
    "ThinTask": "records.task",
    "TrainRecord": "records.record",
    "Trained": "frontends.programs.calling",
    "Validation": "records.record",
    "Wandb": "report.loggers",
    "gather": "frontends.programs.entry",
    "join": "frontends.programs.entry",
    "train": "frontends.programs.calling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
