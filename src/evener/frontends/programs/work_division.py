"""What nodes divide of a program's work: the samples of its batches, or the layers of its models.

BatchDivision   every rank has the whole model and a part of each batch; gradients are means over the batch
LayerDivision   every rank has each whole batch, and a part of every layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from evener.comm.group import Group
from evener.data.alike import print_of, require_alike
from evener.frontends.programs.batch_parts import BatchPart, Count, OpenParts, part_of, weight_of
from evener.frontends.programs.layer_gradients import Means
from evener.frontends.programs.prepared import PreparedModel
from evener.frontends.programs.prepared_layers import PreparedLayers
from evener.frontends.programs.random_state import OwnDraws
from evener.frontends.programs.rows import gather_rows
from evener.frontends.programs.totals import numbers_of, sum_like, total_of
from evener.oracle.division.plan import Arrangement


class Prepared(Protocol):
    """A model that is ready to be trained by all ranks.

    Attributes:
        model: what the program is to use.
        means: of its gradients.
    """

    model: nn.Module

    @property
    def means(self) -> Means:
        """Of its gradients."""

    def take_in(self, norms: Mapping[str, Any], weights: Sequence[nn.Parameter]) -> None:
        """Norms, by name, and weights have come into the model."""

    def compute(self, part: BatchPart) -> None:
        """This rank computes `part` from now on, whose samples count in statistics, if there are any."""

    @property
    def norm_passes(self) -> int:
        """How often norms have computed in training mode."""


class WorkDivision(Protocol):
    """How a run's ranks divide the work.

    Attributes:
        draws_alike: whether all ranks draw the same random numbers, as they load the same samples.
    """

    draws_alike: bool

    def prepared(self, model: nn.Module) -> Prepared:
        """`model`, on all ranks."""

    def part(self, count: int, sizes: Callable[[int], Sequence[int]], /) -> BatchPart:
        """This rank's part of a batch of `count`, which `sizes` divides among ranks."""

    def weight(self, part: BatchPart, batch: Any, count: Count, /) -> float:
        """How often what is computed of `part` counts."""

    def begin_draws(self) -> None:
        """The first batch of a round is computed from now on."""

    def draw_alike(self) -> None:
        """From now on ranks draw what changes weights."""

    def draw_own(self) -> None:
        """From now on ranks draw for samples, and for what follows."""

    def sum(self, value: Any) -> Any:
        """Over all samples, of what this rank has."""

    def gather(self, rows: Tensor) -> Tensor:
        """Those of all samples."""


class BatchDivision:
    """As `WorkDivision`.

    Args:
        group: the ranks.
        parts: that this rank computes now.
        patience: seconds of silence after which a rank is given up.
        step: number of the step that goes on.
    """

    draws_alike = False

    def __init__(self, group: Group, parts: OpenParts, patience: float, step: Callable[[], int] = int) -> None:
        self._group, self._parts, self._patience, self._step = group, parts, patience, step
        self._draws = OwnDraws(group)

    def prepared(self, model: nn.Module) -> Prepared:
        """As `WorkDivision`."""
        weight = self._parts.weight_of_gradients
        return PreparedModel(model, self._group, weight, lambda: self._parts.are_any, self._step, self.draw_alike)

    def part(self, count: int, sizes: Callable[[int], Sequence[int]]) -> BatchPart:
        """As `WorkDivision`."""
        return part_of(self._group.rank, sizes(count))

    def weight(self, part: BatchPart, batch: Any, count: Count) -> float:
        """As `WorkDivision`."""
        return weight_of(part, batch, count, self._group)

    def begin_draws(self) -> None:
        """As `WorkDivision`: every rank draws for samples of its own."""
        self._draws.begin()

    def draw_alike(self) -> None:
        """As `WorkDivision`."""
        self._draws.leave()

    def draw_own(self) -> None:
        """As `WorkDivision`."""
        self._draws.resume()

    def sum(self, value: Any) -> Any:
        """As `WorkDivision`."""
        own = numbers_of(value)
        own = own if self._parts.weight_of_open() else np.zeros_like(own)  # of no samples it may be a NaN
        return sum_like(value, total_of(self._group, "sum", own, self._patience))

    def gather(self, rows: Tensor) -> Tensor:
        """As `WorkDivision`."""
        return gather_rows(rows, self._group, self._parts.weight())


class LayerDivision:
    """As `WorkDivision`: what a rank has is of all samples.

    Args:
        group: the ranks.
        arrangement: how they divide layers.
        tell: is told of models of which nothing is divided.
    """

    draws_alike = True

    def __init__(self, group: Group, arrangement: Arrangement, tell: Callable[[str], None]) -> None:
        self._group, self._arrangement, self._tell = group, arrangement, tell

    def prepared(self, model: nn.Module) -> Prepared:
        """As `WorkDivision`."""
        return PreparedLayers(model, self._group, self._arrangement, self._tell)

    def part(self, count: int, _sizes: Callable[[int], Sequence[int]]) -> BatchPart:
        """As `WorkDivision`."""
        return BatchPart(first=0, samples=count, total=count, loaded=count)

    def weight(self, _part: BatchPart, batch: Any, _count: Count) -> float:
        """As `WorkDivision`. Raises InvalidInput: ranks have different batches."""
        require_alike(self._group, print_of(batch), "nodes that divide layers need the same batches: seed them alike")
        return 1.0

    def begin_draws(self) -> None:
        """As `WorkDivision`: ranks go on to draw alike."""

    def draw_alike(self) -> None:
        """As `WorkDivision`: they do."""

    def draw_own(self) -> None:
        """As `WorkDivision`: no rank has samples of its own."""

    def sum(self, value: Any) -> Any:
        """As `WorkDivision`."""
        return value.detach() if isinstance(value, Tensor) else value

    def gather(self, rows: Tensor) -> Tensor:
        """As `WorkDivision`."""
        return rows
