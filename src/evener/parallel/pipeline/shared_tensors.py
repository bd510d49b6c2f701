"""Tensors that several stages or replicas hold: tied weights, and all tensors if there are several replicas.

The gradient of a parameter is the sum over all stages and replicas that hold it, so tied weights and replicas are
treated alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.comm.group import Group
from evener.parallel.deferred_statistics import DeferredStatistics
from evener.parallel.gradient_buckets import sum_over
from evener.parallel.pipeline.stage_layout import StageLayout
from evener.parallel.pipeline.stage_modules import StageModules


@dataclass(frozen=True)
class _Common:
    """The tensors that this rank shares with the other ranks of `group`."""

    group: Group
    parameters: Sequence[nn.Parameter]
    buffers: Sequence[Tensor]
    norms: Sequence[DeferredStatistics]

    def broadcast(self) -> None:
        """Copy the tensors of the first rank."""
        for tensor in (*self.parameters, *self.buffers):
            dist.broadcast(tensor.data, group_src=0, group=self.group.process_group)

    def move_statistics(self) -> None:
        """Combine the statistics of all ranks, then move the running statistics."""
        collected = [(norm, torch.cat(seen)) for norm in self.norms for seen in norm.collected()]
        if not collected:
            return
        rows = self.group.all_gather(torch.cat([seen for _, seen in collected]), "statistics")
        parts = torch.split(rows, [len(seen) for _, seen in collected], dim=1)
        for (norm, _), columns in zip(collected, parts, strict=True):
            norm.move(norm.combined(columns.view(len(rows), 3, -1)))


class SharedTensors:
    """Synchronises tensors with several holders. All holders start with the values of the first one.

    Args:
        group: All ranks, which create this object together; None for a single process.
        families: One family of all replicas' layouts, or one family for each lane, which shares tensors only with
            itself.
        modules: The stages of this process.
    """

    def __init__(
        self, group: Group | None, families: Sequence[Sequence[StageLayout]], modules: Mapping[int, StageModules]
    ) -> None:
        copies: dict[str, list[nn.Parameter]] = defaultdict(list)
        for held in modules.values():
            for name, parameter in held.parameters.items():
                copies[name].append(parameter)
        self._tied = [held for held in copies.values() if len(held) > 1]
        stage = next(iter(modules.values()))
        self._common = [one for layouts in families for one in _common(group, layouts, stage)] if group else []
        together = {id(norm) for common in self._common for norm in common.norms}
        self._own_norms = [n for held in modules.values() for n in held.norms.values() if id(n) not in together]
        self._summed = [*chain(*self._tied), *(p for one in self._common for p in one.parameters)]
        self._before: list[Tensor | None] = []
        with torch.no_grad():
            for first, *others in self._tied:
                for other in others:
                    other.copy_(first)
        for common in self._common:
            common.broadcast()

    def begin(self) -> None:
        """Begin a step: set aside gradients of earlier steps, which are summed already."""
        self._before = [parameter.grad for parameter in self._summed]
        for parameter in self._summed:
            parameter.grad = None

    def sum_gradients(self) -> None:
        """Add the sum of this step's gradients over all holders to the gradients from before."""
        for held in self._tied:
            gradients = [parameter.grad for parameter in held if parameter.grad is not None]
            if gradients:
                total = sum((g.to(gradients[0].device) for g in gradients[1:]), start=gradients[0])
                for parameter in held:
                    parameter.grad = total.to(parameter.device, copy=True)
        for common in self._common:  # in the same order on all ranks, to avoid deadlock
            sum_over(common.group, [parameter for parameter in common.parameters if parameter.requires_grad])
        for parameter, before in zip(self._summed, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def move_statistics(self) -> None:
        """Move running statistics of BatchNorms by the statistics of all replicas in this step."""
        for norm in self._own_norms:
            for seen in norm.collected():
                norm.move(seen)
        for common in self._common:
            common.move_statistics()


def _common(group: Group, layouts: Sequence[StageLayout], stage: StageModules) -> list[_Common]:
    """Return for each set of ranks what this rank's `stage` shares with them."""
    parameters, buffers, norms = (_holders(layouts, kind) for kind in ("parameters", "buffers", "norms"))
    held = dict(stage.root.named_buffers())
    common = []
    for ranks in sorted({*parameters.values(), *buffers.values(), *norms.values()}):
        joined = group.subgroup(ranks) if len(ranks) > 1 else None
        if joined is not None:
            joined.traffic = group.traffic
            common.append(
                _Common(
                    joined,
                    [stage.parameters[name] for name in parameters if parameters[name] == ranks],
                    [held[name] for name in buffers if buffers[name] == ranks and name in held],
                    [stage.norms[name] for name in norms if norms[name] == ranks],
                )
            )
    return common


def _holders(layouts: Sequence[StageLayout], kind: str) -> dict[str, tuple[int, ...]]:
    """Return by name the ranks that hold each of the layouts' `parameters`, `buffers` or `norms`."""
    holders: dict[str, set[int]] = defaultdict(set)
    for layout in layouts:
        for rank, names in zip(layout.ranks, getattr(layout, kind), strict=True):
            for name in names:
                holders[name].add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}
