"""A plan and a module in, this rank's module out: same outputs, gradients and weights as one process."""

from evener.parallel.data import DataParallel
from evener.parallel.normalisation import GroupBatchNorm, statistics_exchanges, synchronise_batch_norm

__all__ = ["DataParallel", "GroupBatchNorm", "statistics_exchanges", "synchronise_batch_norm"]
