"""Tensors that several stages or replicas hold: tied weights, and everything where there are several replicas.

A gradient is a sum: that of a parameter is the sum of what all stages and replicas that hold it have computed. So tied
weights and replicas are one thing here: for every parameter, the set of ranks that hold it, and an all-reduce over it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.comm.group import Group
from evener.parallel.gradient_sums import sum_over
from evener.parallel.norm_statistics import Statistics, combine
from evener.parallel.pipeline.layout import Layout
from evener.parallel.pipeline.stage_modules import StageModules


class Shared(Protocol):
    """What is held more than once; when this is made, all holders take the values of the first one."""

    def begin(self) -> None:
        """A step begins: what gradients hold from earlier ones is laid aside."""

    def sum_gradients(self) -> None:
        """Every holder's gradients become the sums of this step's, besides what they held before it."""

    def move_statistics(self) -> None:
        """Running statistics of BatchNorms move by what all replicas have seen in this step."""


class _Aside:
    """Gradients of earlier steps, which were summed already."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[Tensor | None] = []

    def lay(self) -> None:
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def add_back(self) -> None:
        for parameter, before in zip(self._parameters, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


class ThreadShared:
    """Within one process: copies of tied weights on several stages.

    Args:
        parts: of the stages.
    """

    def __init__(self, parts: Sequence[StageModules]) -> None:
        self._norms = [norm for part in parts for norm in part.norms.values()]
        copies: dict[str, list[nn.Parameter]] = defaultdict(list)
        for part in parts:
            for name, parameter in part.parameters.items():
                copies[name].append(parameter)
        self._tied = [held for held in copies.values() if len(held) > 1]
        self._aside = _Aside([parameter for held in self._tied for parameter in held])
        with torch.no_grad():
            for first, *others in self._tied:
                for other in others:
                    other.copy_(first)

    def begin(self) -> None:
        """Lay earlier gradients aside."""
        self._aside.lay()

    def sum_gradients(self) -> None:
        """Sum over the stages that hold a weight."""
        for held in self._tied:
            gradients = [parameter.grad for parameter in held if parameter.grad is not None]
            if gradients:
                total = sum((g.to(gradients[0].device) for g in gradients[1:]), start=gradients[0])
                for parameter in held:
                    parameter.grad = total.to(parameter.device, copy=True)
        self._aside.add_back()

    def move_statistics(self) -> None:
        """Every BatchNorm is on one stage."""
        for norm in self._norms:
            norm.move(norm.collected())


class ProcessShared:
    """Between processes.

    Args:
        group: all ranks; all of them make this object at the same time.
        layouts: of all replicas.
        part: of this rank.
    """

    def __init__(self, group: Group, layouts: Sequence[Layout], part: StageModules) -> None:
        parameters, buffers, norms = (_holders(layouts, kind) for kind in ("parameters", "buffers", "norms"))
        every = sorted({*parameters.values(), *buffers.values(), *norms.values()})
        self._groups = {ranks: group.subgroup(ranks) for ranks in every if len(ranks) > 1}

        def of_mine(holders: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], list[str]]:
            return {r: [n for n in holders if holders[n] == r] for r, joined in self._groups.items() if joined}

        self._parameters = {
            ranks: [part.parameters[name] for name in names if part.parameters[name].requires_grad]
            for ranks, names in of_mine(parameters).items()
        }
        self._norms = {ranks: [part.norms[name] for name in names] for ranks, names in of_mine(norms).items()}
        common = {id(norm) for norms_held in self._norms.values() for norm in norms_held}
        self._own_norms = [norm for norm in part.norms.values() if id(norm) not in common]
        held = dict(part.root.named_buffers())
        self._tensors = {
            ranks: [part.parameters[n].data for n in names] for ranks, names in of_mine(parameters).items()
        }
        for ranks, names in of_mine(buffers).items():
            self._tensors[ranks] += [held[name] for name in names if name in held]
        self._aside = _Aside([parameter for shared in self._parameters.values() for parameter in shared])

    def agree(self) -> None:
        """Every rank takes what the first one that holds a tensor has."""
        for ranks, tensors in self._tensors.items():
            for tensor in tensors:
                dist.broadcast(tensor, group_src=0, group=self._joined(ranks).process_group)

    def begin(self) -> None:
        """Lay earlier gradients aside."""
        self._aside.lay()

    def sum_gradients(self) -> None:
        """All-reduce over every set of ranks; in one order of sets on all ranks, so that somebody can always go on."""
        for ranks, parameters in self._parameters.items():
            sum_over(self._joined(ranks), parameters)
        self._aside.add_back()

    def move_statistics(self) -> None:
        """Combine what the replicas have seen, then move."""
        for norm in self._own_norms:
            norm.move(norm.collected())
        for ranks, norms in self._norms.items():
            own = [norm.collected() for norm in norms]
            if not own:
                continue
            rows = self._joined(ranks).all_gather(torch.cat([torch.cat(seen) for seen in own]), "statistics")
            widths = [3 * norm.num_features for norm in norms]
            for norm, columns in zip(norms, torch.split(rows, widths, dim=1), strict=True):
                norm.move(combine(Statistics(*columns.view(len(ranks), 3, -1).unbind(1))))

    def _joined(self, ranks: tuple[int, ...]) -> Group:
        group = self._groups[ranks]
        assert group is not None
        return group


def _holders(layouts: Sequence[Layout], kind: str) -> dict[str, tuple[int, ...]]:
    """Ranks that hold each of the layouts' `parameters`, `buffers` or `norms`, by name."""
    found: dict[str, set[int]] = defaultdict(set)
    for layout in layouts:
        for rank, names in zip(layout.ranks, getattr(layout, kind), strict=True):
            for name in names:
                found[name].add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}
