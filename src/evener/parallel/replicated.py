"""Data parallelism with uneven shares: every rank is a replica, computes its own samples, and sums gradients.

Buckets of gradients are reduced during backward. DistributedDataParallel does it where every parameter has a gradient
in every step; otherwise `ReplicaSums` does it.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm.group import Group
from evener.oracle.division.pieces import Piece
from evener.parallel.gradient_hooks import GradientHooks
from evener.parallel.gradient_sums import ReplicaSums, sum_bucket
from evener.parallel.norm_forward import leave_uncompiled
from evener.parallel.optimizer import HeldModel, HeldParameter
from evener.parallel.parallel_model import Criterion
from evener.parallel.shared_statistics import SharedStatistics, shared_by, uncounted
from evener.records.errors import InvalidInput
from evener.tracer.meta_model import META, on_meta, value_on_meta
from evener.tracer.nested import call, map_values

_BUFFERS_ARE_OURS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}  # the name before PyTorch 2.13
)


class ReplicatedModel:
    """A model that every rank holds whole, and whose BatchNorms are already synchronised.

    With `compiled`, the model is compiled except for its exchanges of statistics. On a single rank the model runs as it
    is. `uses_all` says whether every parameter has a dense gradient in every step.
    """

    is_reporter = True

    def __init__(
        self, model: nn.Module, group: Group, criterion: Criterion, compiled: bool = False, uses_all: bool = True
    ) -> None:
        self.group, self.replica, self.rng_stream = group, group.rank, group.rank
        self._model, self._criterion, self.uses_all = model, criterion, uses_all
        self._forward = _compiled(model) if compiled else model
        self._shared = None if group.is_alone or compiled else SharedStatistics(lambda _: group)
        self._hooks = GradientHooks.taken_off(model)
        self._summing: DistributedDataParallel | None = None
        self._sums = None if group.is_alone or uses_all else ReplicaSums(model, group)
        if uses_all and not group.is_alone:
            self._summing = self._sum_in_buckets(group.process_group)

    def _sum_in_buckets(self, process_group: dist.ProcessGroup | None) -> DistributedDataParallel:
        summing = DistributedDataParallel(
            self._forward,
            process_group=process_group,
            gradient_as_bucket_view=True,
            init_sync=not self.group.is_elastic,
            **_BUFFERS_ARE_OURS,
        )
        summing.register_comm_hook(self.group, sum_bucket)
        return summing

    def regroup(self, single_rank: dist.ProcessGroup) -> None:
        """Continue with other ranks in the group, and drop the unfinished step. All ranks call this.

        DistributedDataParallel is rebuilt, so that all ranks have the same buckets. It is built on a process group of
        this rank alone, because it queries its process group about buckets and must not wait for ranks that can leave.

        Args:
            single_rank: The process group of this rank alone.
        """
        self.replica = self.rng_stream = self.group.rank
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._sums is not None:
            self._sums.forget()
        if self._summing is not None:
            for name in ("reducer", "logger"):  # its hooks on the parameters go with it
                delattr(self._summing, name)
            self._summing = self._sum_in_buckets(single_rank)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters of the model."""
        return self._model.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """Set training or evaluation mode."""
        return self._model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """Run forward and backward on a micro-batch; gradients are reduced with the last one."""
        present = nullcontext() if samples else uncounted(self._model)
        model = self._forward if self._summing is None else self._summing
        with nullcontext() if is_last else self._accumulating(), present:
            outputs = partial(self._outputs, model, samples > 0)
            loss = self._criterion.backward(outputs, inputs, targets, samples / total)
        if is_last:
            if self._sums is not None:
                self._sums.finish()
            self._hooks.run(self._model.named_parameters())
        return loss

    def _accumulating(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay on this rank."""
        if self._sums is not None:
            return self._sums.accumulating()
        return nullcontext() if self._summing is None else self._summing.no_sync()

    def _outputs(self, model: nn.Module, counting: bool, inputs: Any) -> Any:
        """Return the outputs of `model`. The first pass detects functional norms."""
        shared = self._shared
        if shared is None:
            return call(model, inputs)
        shared.counting = counting
        with shared:
            outputs = call(model, inputs)
        self._shared = shared if shared.found else None
        return outputs

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Return the outputs; every rank computes its own."""
        with self._criterion.autocast():
            return call(self._model, inputs)

    def clip(self, largest: float) -> None:
        """Scale the gradients, which all ranks have alike, to a norm of at most `largest`."""
        nn.utils.clip_grad_norm_(self._model.parameters(), largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict on the first rank, and an empty one elsewhere."""
        return self.weights() if self.group.is_leader else {}

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Return the state dict, which every rank has whole."""
        return self.weights(), {}

    def weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model."""
        return self._model.state_dict()

    def buffers(self) -> Iterator[Tensor]:
        """Return the model's buffers."""
        return self._model.buffers()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load the state dict of a whole model."""
        try:
            self._model.load_state_dict(weights)
        except RuntimeError as error:
            raise InvalidInput(" ".join(str(error).split())) from error

    def held(self) -> HeldModel:
        """Describe all parameters; every rank has them whole."""
        held = [HeldParameter(name, tuple(weight.shape), weight) for name, weight in self._model.named_parameters()]
        return HeldModel(self.group, held)


def _compiled(model: nn.Module) -> nn.Module:
    """Return `model`, compiled. The compiler is imported here because importing it is slow."""
    for module in model.modules():
        if shared_by(module) is not None:
            leave_uncompiled(module)
    return cast(nn.Module, torch.compile(model))


def uses_all(model: nn.Module, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any) -> bool:
    """Return whether every parameter of `model` certainly has a dense gradient in every step.

    A step on the meta device shows it, unless random numbers or values decide what the model does.

    Args:
        model: The model; it is neither run nor changed.
        loss: Maps (outputs, targets) to a scalar.
        inputs: Inputs of some samples.
        targets: Targets of the same samples.
    """
    rng_states = random.getstate(), torch.random.get_rng_state()
    try:
        twin = on_meta(model).train()
        with META:
            outputs = call(twin, map_values(inputs, value_on_meta))
            torch.autograd.backward(loss(outputs, map_values(targets, value_on_meta)))
    except Exception:  # the user's model may fail in any way on the meta device
        return False
    finally:
        was_drawn = random.getstate() != rng_states[0] or not torch.equal(torch.random.get_rng_state(), rng_states[1])
        random.setstate(rng_states[0])
        torch.random.set_rng_state(rng_states[1])
    gradients = [parameter.grad for parameter in twin.parameters() if parameter.requires_grad]
    return not was_drawn and all(grad is not None and not grad.is_sparse for grad in gradients)
