"""Evener trains one PyTorch model on uneven machines. What is named here is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.errors import EvenerError
    from evener.graph import ModelGraph
    from evener.plan import Plan
    from evener.profile import ClusterProfile
    from evener.record import TrainRecord
    from evener.task import Task, ThinTask

__version__ = "0.1.0"

__all__ = ["ClusterProfile", "EvenerError", "ModelGraph", "Plan", "Task", "ThinTask", "TrainRecord", "__version__"]

_HOMES = {
    "ClusterProfile": "profile",
    "EvenerError": "errors",
    "ModelGraph": "graph",
    "Plan": "plan",
    "Task": "task",
    "ThinTask": "task",
    "TrainRecord": "record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
