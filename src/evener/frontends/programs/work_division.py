"""The two divisions of a program's work: samples of batches, or layers of models.

BatchDivision   every rank has the whole model and a part of each batch; gradients are means over the batch
LayerDivision   every rank has each whole batch, and a part of every layer

Weights and norms that a program adds to models after `run.prepare`, such as a new head, join before the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from evener.comm.group import Group
from evener.data.alike import require_alike
from evener.data.fingerprint import print_of
from evener.frontends.programs.alike_draws import AlikeDraws
from evener.frontends.programs.batch_parts import BatchPart, Count, OpenParts, part_of, weight_of
from evener.frontends.programs.layer_gradients import Means
from evener.frontends.programs.prepared import PreparedModel
from evener.frontends.programs.prepared_layers import SAME_BATCHES, PreparedLayers
from evener.frontends.programs.random_state import OwnDraws
from evener.frontends.programs.summed_batches import MIXED
from evener.frontends.programs.totals import numbers_of, sum_like, total_of
from evener.frontends.programs.undivided_gradients import UndividedGradients
from evener.oracle.division.plan import Arrangement
from evener.parallel.norm_forward import computation_of, norms_with_statistics
from evener.records.errors import InvalidInput


class Prepared(Protocol):
    """A model that all ranks are ready to train.

    Attributes:
        model: for the program.
        means: of its gradients.
    """

    model: nn.Module

    @property
    def means(self) -> Means:
        """The interface to its gradients."""

    def prepare_added(self, norms: Mapping[str, Any], weights: Sequence[nn.Parameter]) -> None:
        """Prepare norms, by name, and weights that were added to the model."""

    def compute(self, part: BatchPart) -> None:
        """Begin to compute `part`, whose samples count in statistics."""

    def refuse_lone_sample(self, lone: str) -> None:
        """Raise InvalidInput by `lone` as soon as a norm cannot compute a batch of one sample."""

    @property
    def norm_passes(self) -> int:
        """The number of passes of norms in training mode."""


class WorkDivision(Protocol):
    """A division of work among a run's ranks.

    Attributes:
        draws_alike: whether all ranks draw the same random numbers, as they load the same samples.
        alike_draws: shares some or all draws, once it is active.
    """

    draws_alike: bool
    alike_draws: AlikeDraws | None

    def prepared(self, model: nn.Module) -> Prepared:
        """Return `model`, prepared on all ranks."""

    def part(self, count: int, sizes: Callable[[int], Sequence[int]], /) -> BatchPart:
        """Return this rank's part of a batch of `count`, which `sizes` divides among ranks."""

    def weight(self, part: BatchPart, batch: Any, count: Count, /) -> float:
        """Return the weight of the loss of `part`."""

    def begin_draws(self) -> None:
        """Begin local random numbers at the first batch."""

    def draw_alike(self) -> None:
        """Switch to random numbers that all ranks share."""

    def draw_own(self) -> None:
        """Switch to local random numbers."""

    def sum(self, value: Any) -> Any:
        """Return the sum of every rank's `value`."""

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks."""


class BatchDivision:
    """A division of batches into samples; every rank holds the whole model.

    Args:
        group: the ranks.
        parts: that this rank computes now.
        patience: seconds of silence after which a rank is lost.
        undivided: observes the gradients of batches that are not divided.
        step: returns the number of the current step.
    """

    draws_alike = False

    def __init__(
        self,
        group: Group,
        parts: OpenParts,
        patience: float,
        undivided: UndividedGradients,
        step: Callable[[], int] = int,
    ) -> None:
        self._group, self._parts, self._patience, self._step = group, parts, patience, step
        self._draws = OwnDraws(group)
        self.alike_draws: AlikeDraws | None = None
        self._undivided = undivided

    def prepared(self, model: nn.Module) -> Prepared:
        """Return `model`, prepared on all ranks."""
        weight, are_any = self._parts.weight_of_gradients, lambda: self._parts.are_any
        prepared = PreparedModel(model, self._group, weight, are_any, self._step, self.draw_alike)
        prepared.means.observe = self._undivided.observe
        return prepared

    def part(self, count: int, sizes: Callable[[int], Sequence[int]]) -> BatchPart:
        """Return this rank's part of a batch of `count`."""
        return part_of(self._group.rank, sizes(count))

    def weight(self, part: BatchPart, batch: Any, count: Count) -> float:
        """Return the weight of the loss of `part`."""
        return weight_of(part, batch, count, self._group)

    def begin_draws(self) -> None:
        """Begin local random numbers at the first batch."""
        self._draws.begin()

    def draw_alike(self) -> None:
        """Switch to random numbers that all ranks share."""
        if self.alike_draws is not None:
            self.alike_draws.is_after_backward = True
        else:
            self._draws.leave()

    def draw_own(self) -> None:
        """Switch to local random numbers."""
        if self.alike_draws is not None:
            self.alike_draws.is_after_backward = False
        else:
            self._draws.resume()

    def sum(self, value: Any) -> Any:
        """Return the sum of every rank's `value`."""
        numbers, has_samples = numbers_of(value), self._parts.of_sum()
        if has_samples == {False}:
            numbers = np.zeros_like(numbers)
        elif np.isnan(numbers).any() and not self._parts.weight_of_open():
            numbers = np.nan_to_num(numbers, posinf=np.inf, neginf=-np.inf)  # such as a mean over no tokens
        flagged = np.append(numbers.ravel(), float(len(has_samples) > 1))
        total = total_of(self._group, "sum", flagged, self._patience)
        if total[-1]:
            raise InvalidInput(MIXED)
        return sum_like(value, total[:-1].reshape(numbers.shape))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        return gather_rows(rows, self._group, self._parts.weight())


class LayerDivision:
    """A division of layers; every rank has all samples.

    Args:
        group: the ranks.
        arrangement: division of layers among the ranks.
        tell: called with a sentence for models without divided layers.
        parts: that this rank computes now.
    """

    draws_alike = True

    def __init__(self, group: Group, arrangement: Arrangement, tell: Callable[[str], None], parts: OpenParts) -> None:
        self._group, self._arrangement, self._tell, self._parts = group, arrangement, tell, parts
        self.alike_draws: AlikeDraws | None = None

    def prepared(self, model: nn.Module) -> Prepared:
        """Return `model`, prepared on all ranks."""
        return PreparedLayers(model, self._group, self._arrangement, self._tell, lambda: self._parts.are_any)

    def part(self, count: int, _sizes: Callable[[int], Sequence[int]]) -> BatchPart:
        """Return the whole batch as the part of this rank."""
        return BatchPart(first=0, samples=count, total=count, loaded=count)

    def weight(self, _part: BatchPart, batch: Any, _count: Count) -> float:
        """Return 1. Raises InvalidInput if ranks have different batches."""
        require_alike(self._group, print_of(batch), SAME_BATCHES)
        return 1.0

    def begin_draws(self) -> None:
        """Do nothing, because ranks share all random numbers."""

    def draw_alike(self) -> None:
        """Do nothing, because ranks share all random numbers."""

    def draw_own(self) -> None:
        """Do nothing, because ranks share all random numbers."""

    def sum(self, value: Any) -> Any:
        """Return `value`, which every rank computes from all samples."""
        return value.detach() if isinstance(value, Tensor) else value

    def gather(self, rows: Tensor) -> Tensor:
        """Return `rows`, which every rank has of all samples."""
        return rows


def gather_rows(x: Tensor, group: Group, weight: float) -> Tensor:
    """Return the rows of every rank's `x`, in the order of ranks; a rank with weight zero has none.

    Args:
        x: (rows, ...), of one shape on all ranks except for the number of rows.
        group: the ranks; all of them call this.
        weight: of this rank's loss.

    Raises:
        InvalidInput: `x` is a scalar, or rows have different shapes on another rank.
    """
    if x.dim() == 0:
        raise InvalidInput("gather needs a tensor with rows; of a single number take run.mean or run.sum")
    rows = x if weight else x[:0]
    described = np.asarray([len(rows), weight, rows[:1].numel() if len(rows) else -1], dtype=np.float64).tobytes()
    table = np.stack([np.frombuffer(one) for one in group.all_gather_bytes(described, "evener.gather")])
    if len({size for size in table[:, 2] if size >= 0}) > 1:
        raise InvalidInput("gather needs rows of one shape on all nodes")
    sizes = [int(size) for size in table[:, 0]]
    function: Any = _GatherRows
    return cast(Tensor, function.apply(rows, group, sizes, weight))


class _GatherRows(torch.autograd.Function):
    """(local rows) -> rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group, sizes: list[int], weight: float) -> Tensor:
        ctx.group, ctx.sizes, ctx.weight = group, sizes, weight
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: len(local)] = local
        return torch.cat([rows[:size] for rows, size in zip(group.all_gather(padded, "rows"), sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, sizes = ctx.group, ctx.sizes
        total = group.all_reduce((grad * ctx.weight).contiguous(), "rows")
        begin = sum(sizes[: group.rank])
        local = total[begin : begin + sizes[group.rank]]
        return local / ctx.weight if ctx.weight else local, None, None, None


def prepare_added(models: Sequence[Prepared]) -> None:
    """Prepare the weights and norms that were added to `models`; call it before a training batch.

    Raises:
        InvalidInput: an added weight has a gradient already, computed from this node's samples alone.
    """
    for one in models:
        norms, weights = _new_norms(one), added_weights(one.model.parameters(), models)
        _refuse_late(any(weight.grad is not None for weight in weights))
        if norms or weights:
            one.prepare_added(norms, weights)


def refuse_added(models: Sequence[Prepared], optimizers: Sequence[Optimizer]) -> None:
    """Raise InvalidInput if a weight or norm was added to a model or an optimizer since the last batch."""
    trained = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    held = [weight for one in models for weight in one.model.parameters()]
    _refuse_late(bool(added_weights([*held, *trained], models)) or any(_new_norms(one) for one in models))


def _refuse_late(is_late: bool) -> None:
    if is_late:
        raise InvalidInput(
            "new weights or norms were added to a model between a batch and its update, so they saw only one node's "
            "samples: change models, and add weights to optimizers, before a batch is loaded"
        )


def _new_norms(one: Prepared) -> dict[str, Any]:
    norms = norms_with_statistics(one.model)
    return {name: norm for name, norm in norms.items() if computation_of(norm) is None}


def added_weights(weights: Iterable[Any], models: Sequence[Prepared]) -> list[nn.Parameter]:
    """Return the parameters in `weights` whose gradients no model averages yet, and make parameters of tensors."""
    parameters = {id(w): as_parameter(w) for w in weights if w.is_floating_point() or w.is_complex()}
    return [w for w in parameters.values() if not any(one.means.averages(w) for one in models)]


def as_parameter(weight: Any) -> nn.Parameter:
    """Return the same tensor, which PyTorch takes for a parameter, as `torch.zeros(2, requires_grad=True)` is none."""
    if not isinstance(weight, nn.Parameter):
        weight._is_param = True
    parameter: nn.Parameter = weight
    return parameter
