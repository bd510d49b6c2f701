"""Evener trains one PyTorch model on uneven machines. What is named here is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evener.version import VERSION

if TYPE_CHECKING:
    from evener.errors import EvenerError
    from evener.graph import ModelGraph
    from evener.plan import Plan
    from evener.profile import ClusterProfile
    from evener.program.joining import gather, join
    from evener.program.session import Run
    from evener.record import TrainRecord
    from evener.task import Task, ThinTask

__version__ = VERSION

__all__ = [
    "ClusterProfile",
    "EvenerError",
    "ModelGraph",
    "Plan",
    "Run",
    "Task",
    "ThinTask",
    "TrainRecord",
    "__version__",
    "gather",
    "join",
]

_HOMES = {
    "ClusterProfile": "profile",
    "EvenerError": "errors",
    "ModelGraph": "graph",
    "Plan": "plan",
    "Run": "program.session",
    "Task": "task",
    "ThinTask": "task",
    "TrainRecord": "record",
    "gather": "program.joining",
    "join": "program.joining",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
