"""Evener trains one PyTorch model on uneven machines. What is named here is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evener.version import VERSION

if TYPE_CHECKING:
    from evener.errors import EvenerError
    from evener.graph import ModelGraph
    from evener.plan import Plan
    from evener.profile import ClusterProfile
    from evener.program.calling import Trained, train
    from evener.program.joining import gather, join
    from evener.program.session import Run
    from evener.record import Epoch, TrainRecord, Validation
    from evener.report.loggers import MLflow, TensorBoard, Wandb
    from evener.run.callbacks import EarlyStopping
    from evener.task import BatchTask, Task, ThinTask

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
    "BatchTask": "task",
    "ClusterProfile": "profile",
    "EarlyStopping": "run.callbacks",
    "Epoch": "record",
    "EvenerError": "errors",
    "MLflow": "report.loggers",
    "ModelGraph": "graph",
    "Plan": "plan",
    "Run": "program.session",
    "Task": "task",
    "TensorBoard": "report.loggers",
    "ThinTask": "task",
    "TrainRecord": "record",
    "Trained": "program.calling",
    "Validation": "record",
    "Wandb": "report.loggers",
    "gather": "program.joining",
    "join": "program.joining",
    "train": "program.calling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
