"""Evener trains one PyTorch model on uneven machines."""

from evener.errors import EvenerError
from evener.graph import ModelGraph
from evener.plan import Plan
from evener.profile import ClusterProfile
from evener.record import TrainRecord
from evener.task import Task

__version__ = "0.1.0"

__all__ = ["ClusterProfile", "EvenerError", "ModelGraph", "Plan", "Task", "TrainRecord", "__version__"]
