"""Data parallelism with uneven shares: every rank is a replica by itself, computes its own samples, and sums gradients.

The exchange itself is DistributedDataParallel's: buckets, overlapped with the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm.group import Group
from evener.errors import InvalidInput
from evener.parallel.gradient_sums import sum_bucket
from evener.parallel.norms import GroupBatchNorm
from evener.parallel.optimizer import HeldModel, HeldParameter
from evener.parallel.parallel_model import Criterion
from evener.parallel.shared_statistics import SharedStatistics, needs_sharing, uncounted
from evener.tracer.nested import call

_BUFFERS_ARE_OURS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}  # the name before PyTorch 2.13
)


class ReplicatedModel:
    """A model of which every rank has the whole; its BatchNorms are already synchronised.

    With `compiled`, all but its exchanges of statistics is; of a single rank the model runs as it is.
    """

    is_reporter = True

    def __init__(self, model: nn.Module, group: Group, criterion: Criterion, compiled: bool = False) -> None:
        self.group, self.replica, self.rng_stream = group, group.rank, group.rank
        self._model, self._criterion = model, criterion
        self._forward = _compiled(model) if compiled else model
        self._shared = SharedStatistics(lambda _: group) if group.size > 1 and not compiled else None
        self._keeps_sharing = needs_sharing(model)
        self._summing: DistributedDataParallel | None = None
        if group.size > 1:
            self._summing = DistributedDataParallel(
                self._forward, process_group=group.process_group, gradient_as_bucket_view=True, **_BUFFERS_ARE_OURS
            )
            self._summing.register_comm_hook(group, sum_bucket)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of the model."""
        return self._model.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """From now on the model trains, or evaluates."""
        return self._model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """As `ParallelModel`; gradients travel with the last micro-batch."""
        travelling = nullcontext() if is_last or self._summing is None else self._summing.no_sync()
        present = nullcontext() if samples else uncounted(self._model)
        model = self._forward if self._summing is None else self._summing
        with travelling, present:
            return self._criterion.backward(
                partial(self._outputs, model, samples > 0), inputs, targets, samples / total
            )

    def _outputs(self, model: nn.Module, counting: bool, inputs: Any) -> Any:
        """What `model` returns; the first pass finds out whether it has norms that are no modules."""
        shared = self._shared
        if shared is None:
            return call(model, inputs)
        shared.counting = counting
        with shared:
            outputs = call(model, inputs)
        self._shared = shared if shared.found or self._keeps_sharing else None
        return outputs

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The outputs; ranks compute them independently of each other."""
        with self._criterion.autocast():
            return call(self._model, inputs)

    def clip(self, largest: float) -> None:
        """As `ParallelModel`; all ranks have the same gradients."""
        nn.utils.clip_grad_norm_(self._model.parameters(), largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """As `ParallelModel`."""
        return self._model.state_dict() if self.group.is_leader else {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As `ParallelModel`."""
        try:
            self._model.load_state_dict(weights)
        except RuntimeError as error:
            raise InvalidInput(" ".join(str(error).split())) from error

    def held(self) -> HeldModel:
        """As `ParallelModel`."""
        found = [HeldParameter(name, tuple(own.shape), own) for name, own in self._model.named_parameters()]
        return HeldModel(self.group, found)


def _compiled(model: nn.Module) -> nn.Module:
    """`model`, compiled; the compiler is loaded here and not with this file, as it takes longer than all the rest."""
    for module in model.modules():
        if isinstance(module, GroupBatchNorm):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
    return cast(nn.Module, torch.compile(model))
