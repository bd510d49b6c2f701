"""A plan and a module in, this rank's module out: same outputs, gradients and weights as one process."""

from evener.parallel.data import DataParallel
from evener.parallel.divided import DividedModel
from evener.parallel.gradients import GradientSums
from evener.parallel.joint import Criterion, JointModel, call
from evener.parallel.normalisation import GroupBatchNorm, statistics_exchanges, synchronise_batch_norm
from evener.parallel.pipeline import Pipeline
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.place import Place, take_place
from evener.parallel.read import Reader
from evener.parallel.replicated import ReplicatedModel
from evener.parallel.sharded import ShardedModel

__all__ = [
    "Criterion",
    "DataParallel",
    "DividedModel",
    "GradientSums",
    "GroupBatchNorm",
    "JointModel",
    "Pipeline",
    "Place",
    "Reader",
    "ReplicatedModel",
    "ShardedModel",
    "StagedModel",
    "call",
    "statistics_exchanges",
    "synchronise_batch_norm",
    "take_place",
]
