"""Tensors that several stages or replicas hold: tied weights, and everything where there are several replicas.

The gradient of a parameter is the sum of what all stages and replicas that hold it have computed; so tied weights and
replicas are one thing here.
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
    """What this rank holds together with the other ranks of `group`."""

    group: Group
    parameters: Sequence[nn.Parameter]
    buffers: Sequence[Tensor]
    norms: Sequence[DeferredStatistics]

    def broadcast(self) -> None:
        """Take what the first rank has."""
        for tensor in (*self.parameters, *self.buffers):
            dist.broadcast(tensor.data, group_src=0, group=self.group.process_group)

    def move_statistics(self) -> None:
        """Combine what the ranks have seen, then move."""
        own = [(norm, torch.cat(seen)) for norm in self.norms for seen in norm.collected()]
        if not own:
            return
        rows = self.group.all_gather(torch.cat([seen for _, seen in own]), "statistics")
        parts = torch.split(rows, [len(seen) for _, seen in own], dim=1)
        for (norm, _), columns in zip(own, parts, strict=True):
            norm.move(norm.combined(columns.view(len(rows), 3, -1)))


class SharedTensors:
    """What is held more than once; when this is made, all holders take the values of the first one.

    Args:
        group: all ranks, which make this object at the same time; None for a process alone.
        families: of all replicas; of lanes, which hold the same by themselves, one family each.
        modules: of the stages of this process.
    """

    def __init__(
        self, group: Group | None, families: Sequence[Sequence[StageLayout]], modules: Mapping[int, StageModules]
    ) -> None:
        copies: dict[str, list[nn.Parameter]] = defaultdict(list)
        for held in modules.values():
            for name, parameter in held.parameters.items():
                copies[name].append(parameter)
        self._tied = [held for held in copies.values() if len(held) > 1]
        own = next(iter(modules.values()))
        self._common = [one for layouts in families for one in _common(group, layouts, own)] if group else []
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
        """A step begins: what gradients hold from earlier ones, which were summed already, is laid aside."""
        self._before = [parameter.grad for parameter in self._summed]
        for parameter in self._summed:
            parameter.grad = None

    def sum_gradients(self) -> None:
        """Every holder's gradients become the sums of this step's, besides what they held before it."""
        for held in self._tied:
            gradients = [parameter.grad for parameter in held if parameter.grad is not None]
            if gradients:
                total = sum((g.to(gradients[0].device) for g in gradients[1:]), start=gradients[0])
                for parameter in held:
                    parameter.grad = total.to(parameter.device, copy=True)
        for common in self._common:  # in one order on all ranks, so that somebody can always go on
            sum_over(common.group, [parameter for parameter in common.parameters if parameter.requires_grad])
        for parameter, before in zip(self._summed, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def move_statistics(self) -> None:
        """Running statistics of BatchNorms move by what all replicas have seen in this step."""
        for norm in self._own_norms:
            for seen in norm.collected():
                norm.move(seen)
        for common in self._common:
            common.move_statistics()


def _common(group: Group, layouts: Sequence[StageLayout], own: StageModules) -> list[_Common]:
    """By set of ranks, what this rank's stage `own` holds together with them."""
    parameters, buffers, norms = (_holders(layouts, kind) for kind in ("parameters", "buffers", "norms"))
    held = dict(own.root.named_buffers())
    found = []
    for ranks in sorted({*parameters.values(), *buffers.values(), *norms.values()}):
        joined = group.subgroup(ranks) if len(ranks) > 1 else None
        if joined is not None:
            joined.traffic = group.traffic
            found.append(
                _Common(
                    joined,
                    [own.parameters[name] for name in parameters if parameters[name] == ranks],
                    [held[name] for name in buffers if buffers[name] == ranks and name in held],
                    [own.norms[name] for name in norms if norms[name] == ranks],
                )
            )
    return found


def _holders(layouts: Sequence[StageLayout], kind: str) -> dict[str, tuple[int, ...]]:
    """Ranks that hold each of the layouts' `parameters`, `buffers` or `norms`, by name."""
    found: dict[str, set[int]] = defaultdict(set)
    for layout in layouts:
        for rank, names in zip(layout.ranks, getattr(layout, kind), strict=True):
            for name in names:
                found[name].add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}
