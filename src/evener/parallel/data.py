"""Data parallelism with uneven shares: every rank computes its own samples of a batch; gradients are summed.

The loss is a sum: a rank's loss is the sum over its samples divided by the number of samples of the *whole* batch.
Gradients then add up to those of one process, whatever the shares; nothing is averaged over ranks afterwards.
The exchange itself is DistributedDataParallel's: buckets, overlapped with the backward pass.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm.group import Group
from evener.parallel.normalisation import uncounted
from evener.parallel.parallel_model import call

_BUFFERS_ARE_OURS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}  # the name before PyTorch 2.13
)


class DataParallel:
    """A model that computes this rank's samples and sums gradients over the ranks of a group.

    Args:
        model: on the group's device; its BatchNorms already synchronised.
        group: the ranks; with a single one the model runs as it is.
        forward: the module to call, if not `model` itself (a compiled one).
    """

    def __init__(self, model: nn.Module, group: Group, forward: nn.Module | None = None) -> None:
        self.model = model
        self.group = group
        self._forward: nn.Module = forward if forward is not None else model
        self._replica: DistributedDataParallel | None = None
        if group.size > 1:
            self._replica = DistributedDataParallel(
                self._forward,
                process_group=group.process_group,
                **_BUFFERS_ARE_OURS,
                gradient_as_bucket_view=True,
            )
            self._replica.register_comm_hook(group, _sum_bucket)

    def __call__(self, inputs: Any) -> Any:
        """The model's outputs for this rank's `inputs`: a tensor, or positional or named arguments."""
        return call(self._replica if self._replica is not None else self._forward, inputs)

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside, gradients stay on this rank: for all but the last micro-batch of a step."""
        return self._replica.no_sync() if self._replica is not None else nullcontext()

    def without_samples(self) -> AbstractContextManager[None]:
        """Inside, this rank passes a stand-in sample that counts for nothing, so that it joins every collective."""
        return uncounted(self.model)


def _sum_bucket(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Sum one bucket over the ranks; after the last one this rank only waits."""
    if bucket.is_last():
        group.timer.pause(before_update=True)
    else:
        group.timer.break_for_others()
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, group=group.process_group, async_op=True)
    group.count_all_reduce(buffer, "gradients")
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
