"""Norms while samples are divided: what counts, what is exchanged, and norms that are no plain BatchNorm modules.

SharedStatistics        functional norms, and those in modules of the user's, have the statistics of all replicas
untracked, uncounted    a pass that is computed again, and one of a rank without samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from evener.oracle.division.layout import Layout
from evener.parallel.norm_statistics import DataAxis, Gathers
from evener.parallel.norms import GroupBatchNorm, move, normalise_channels
from evener.parallel.op_registry import is_plain
from evener.parallel.process_mesh import ProcessMesh

T = TypeVar("T")


def needs_sharing(model: nn.Module) -> bool:
    """Whether `model` has norms with running statistics that are not replaced by a GroupBatchNorm."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    return not all(map(is_plain, norms))


class SharedStatistics(TorchFunctionMode):
    """Inside, `F.batch_norm` and `F.instance_norm` that train have, and keep, the statistics of all replicas.

    Args:
        group: by number of channels, who gathers.

    Attributes:
        counting: whether this rank's samples count.
        found: whether there was any such norm.
    """

    def __init__(self, group: Callable[[int], Gathers]) -> None:
        super().__init__()
        self._group, self.counting, self.found = group, True, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`func`, or what stands for it."""
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func is F.instance_norm:
            return self._instance_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        self.found = True
        group = self._group(input.shape[1])
        y, seen = normalise_channels(input, weight, bias, eps, group, self.counting)
        if running_mean is not None and running_var is not None:
            move(running_mean, running_var, seen, momentum)
        return y

    def _instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        y = F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        if not use_input_stats or running_mean is None or running_var is None:
            return y
        self.found = True
        count = float(len(input) * self.counting)
        with torch.no_grad():  # every sample moves them by its own statistics: they are means over the samples
            own = torch.cat((running_mean, running_var, running_mean.new_ones(1))) * count
            sums = self._group(input.shape[1]).all_gather(own, "statistics").sum(0)
            mean, var = (sums[:-1] / sums[-1]).chunk(2)
            running_mean.copy_(mean)
            running_var.copy_(var)
        return y


def with_all_replicas(
    compute: Callable[[T], Tensor],
    mesh: ProcessMesh,
    layout: Layout,
    trains: Callable[[], bool],
    counts: Callable[[], bool],
) -> Callable[[T], Tensor]:
    """`compute`, which all ranks of a replica do alike, with the statistics of all replicas if it has norms inside.

    Args:
        compute: a part of the model.
        mesh: of this rank.
        layout: of a value that all ranks of a replica have.
        trains: whether it is in training now.
        counts: whether the replica has samples.
    """
    replicas = len(mesh.arrangement.replicas)
    if replicas == 1:
        return compute
    shared = SharedStatistics(cache(lambda channels: DataAxis(mesh, (layout,) * replicas, channels)))

    def run(inputs: T) -> Tensor:
        shared.counting = counts()
        with shared if trains() else nullcontext():
            return compute(inputs)

    return run


def statistics_exchanges(model: nn.Module) -> tuple[int, int]:
    """(number, bytes to each peer) of exchanges of statistics in a pass: of 2 C + 1 and 2 C numbers a BatchNorm."""
    norms = _norms(model)
    numbers = sum(4 * norm.num_features + 1 for norm in norms)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    return 2 * len(norms), numbers * (8 if wide else 4)


def _norms(model: nn.Module) -> list[GroupBatchNorm | _BatchNorm]:
    return [module for module in model.modules() if isinstance(module, GroupBatchNorm | _BatchNorm)]


@contextmanager
def untracked(model: nn.Module) -> Iterator[None]:
    """Inside, running statistics stay as they are: for a forward pass that is computed again.

    They are given a momentum of 0 rather than taken away: PyTorch keeps them for backward, and what is computed again
    has to keep the same tensors as the first time.
    """
    norms = _norms(model)
    before = [(n.momentum, None if n.num_batches_tracked is None else n.num_batches_tracked.clone()) for n in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and batches is not None:
                norm.num_batches_tracked.copy_(batches)


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Inside, this rank's samples count in no statistics: it has none, but has to take part in the collectives."""
    norms = [norm for norm in _norms(model) if isinstance(norm, GroupBatchNorm)]
    for norm in norms:
        norm.counting = False
    try:
        yield
    finally:
        for norm in norms:
            norm.counting = True
