"""A rank's part of a batch, and its weight in the step.

n of N samples on p ranks: gradients are averaged over the ranks, so the mean loss of a rank counts p n / N times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from evener.comm.group import Group
from evener.data.alike import rows_of_ranks
from evener.frontends.programs.summed_batches import SummedBatches
from evener.records.errors import InvalidInput, require
from evener.tracer.nested import map_tensors, tensors_in

STAND_IN = 2
"""Samples with weight zero that a rank without samples computes: some layers need more than one."""

Count: TypeAlias = Literal["samples", "sum"] | Callable[[Any], Any]
"""The divisor of a batch's mean loss: its samples, or the number that a function returns; or "sum" for no divisor."""


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """One rank's part of one batch.

    Attributes:
        first: index of its first sample in the batch.
        samples: number of samples that count; a rank with none computes stand-ins, to take part in collectives.
        total: number of samples of the batch.
        loaded: number of samples that the rank computes.
        is_joined: whether it belongs to the last two batches of an evaluation, which are combined because the last has
            fewer samples than there are nodes.
        has_stand_ins: whether any rank has no sample of the batch, and computes stand-ins.
    """

    first: int
    samples: int
    total: int
    loaded: int
    is_joined: bool = False
    has_stand_ins: bool = False

    @property
    def rows(self) -> slice:
        """The slice of the loaded samples in the batch."""
        return slice(self.first, self.first + self.loaded)


def part_of(rank: int, sizes: Sequence[int]) -> BatchPart:
    """Return the part of `rank` in a batch that has `sizes` samples per rank."""
    total, samples = sum(sizes), sizes[rank]
    loaded = samples or min(STAND_IN, total)
    first = min(sum(sizes[:rank]), total - loaded)
    return BatchPart(first=first, samples=samples, total=total, loaded=loaded, has_stand_ins=0 in sizes)


def require_count(count: object) -> None:
    """Raise InvalidValue unless it is a Count."""
    require(count in ("samples", "sum") or callable(count), "count", count, "'samples', 'sum' or a function of a batch")


def weight_of(part: BatchPart, batch: Any, count: Count, group: Group) -> float:
    """Return the weight of the mean loss of `part`; every rank calls this for its own part of the same batch.

    Raises:
        InvalidInput: the count is no number, or negative.
    """
    if count == "samples":
        return group.size * part.samples / part.total
    if count == "sum":
        return float(group.size if part.samples else 0)
    number = _number(count, batch) if part.samples else 0.0
    whole = sum(rows_of_ranks(group, [number])[:, 0].tolist())
    return group.size * number / whole if whole else 0.0


def _number(count: Callable[[Any], Any], batch: Any) -> float:
    try:
        number = float(count(batch))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"count= must give a number for a batch: {error}") from error
    require(number >= 0, "count=", number, "zero or more")
    return number


class OpenParts:
    """The parts that this rank computes now: the last one of every loader under iteration.

    Training and evaluation batches are tracked separately. If the batch of a model's call is known, its weight is used
    instead of the weight of the batch that was loaded last.
    """

    def __init__(self) -> None:
        self._of_kind: dict[bool, dict[object, float]] = {True: {}, False: {}}
        self._is_training = True
        self._left: set[object] = set()
        self._used: dict[int, float] = {}
        self._is_done = True
        self._was_evaluated = False
        self._with_stand_ins: set[object] = set()
        self._summed = SummedBatches()

    @property
    def _weights(self) -> dict[object, float]:
        return self._of_kind[self._is_training]

    def open(
        self,
        owner: object,
        weight: float,
        is_training: bool = True,
        *,
        has_stand_ins: bool = False,
        has_samples: bool = True,
    ) -> set[object]:
        """Begin a batch of `owner` with this `weight`; return the owners whose batches ended.

        Args:
            owner: that loaded it.
            weight: of this rank's part.
            is_training: whether the program trains on it.
            has_stand_ins: see `BatchPart`.
            has_samples: whether this rank has samples of it.
        """
        closed, self._left = self._left - {owner}, set()
        self._was_evaluated = False
        for other in closed:
            self._of_kind[True].pop(other, None)
        self._used = {} if self._is_done else self._used
        if is_training:
            self._summed.open(owner, has_samples, has_stand_ins)
        self._of_kind[not is_training].pop(owner, None)
        self._is_training = is_training
        self._weights[owner] = weight
        (self._with_stand_ins.add if has_stand_ins else self._with_stand_ins.discard)(owner)
        return closed

    def reweigh(self, weight: float) -> None:
        """Set the weight of the current batches, which was not known when they began."""
        if self._used:
            self._used = dict.fromkeys(self._used, weight)
            return
        self._of_kind[self._is_training] = dict.fromkeys(self._weights, weight)

    def use(self, number: int, weight: float, trains: bool, has_samples: bool = True) -> None:
        """Record that a model is called with this batch; a training call is followed by a `backward()`."""
        if trains:
            self._summed.use(has_samples)
        self._used = {} if self._is_done or not trains else self._used
        self._used[number] = weight
        self._is_done = not trains

    def close(self, owner: object, is_over: bool) -> None:
        """End the iteration of `owner`, either at its end (`is_over`) or before it.

        A training batch whose loop was left early stays current until another batch is loaded.
        """
        if owner in self._of_kind[True] and not is_over:
            self._left.add(owner)
            return
        self._was_evaluated = owner in self._of_kind[False]
        if owner in self._of_kind[True]:
            self._summed.close(owner)
        for weights in self._of_kind.values():
            weights.pop(owner, None)
        if not self._weights:
            self._is_training = not self._is_training if self._of_kind[not self._is_training] else True

    def forget_training(self) -> None:
        """Record that no later sum is of training batches that are over."""
        self._summed = SummedBatches()

    @property
    def is_done(self) -> bool:
        """Whether no model was called in training since the last `backward()`."""
        return self._is_done

    def await_gradients(self) -> None:
        """Record that a model is called in training, with the batch that was loaded last."""
        self._is_done = False

    @property
    def are_any(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._used or self._weights)

    @property
    def are_trained(self) -> bool:
        """Whether the program trains on the batch that was loaded last."""
        return self._is_training

    @property
    def are_used(self) -> bool:
        """Whether the batch of the last model call is known."""
        return bool(self._used)

    def is_used(self, number: int) -> bool:
        """Whether a model was called with the batch of this number since the last `backward()`."""
        return number in self._used

    def is_open(self, owner: object) -> bool:
        """Whether a batch of `owner` is being computed, judged by loading alone."""
        return any(owner in weights for weights in self._of_kind.values())

    def weight(self) -> float:
        """Return the weight of the current batch; 1 if no batch is divided, as all ranks then compute the same.

        Raises:
            InvalidInput: batches of several loaders are computed, which count differently.
        """
        weights = set((self._used or self._weights).values())
        if len(weights) > 1:
            raise InvalidInput(
                "batches are trained on at once that are divided in different proportions: "
                "give both loaders the same batch_size, or put both data sets into one"
            )
        return weights.pop() if weights else 1.0

    def weight_of_gradients(self) -> float:
        """Return the weight of the current batch in a `backward()`; the next training call begins a new step."""
        self._is_done = True
        return self.weight()

    def require_clear(self, what: str, *, is_training: bool) -> None:
        """Check that a value belongs either to the training batch or to an evaluation that has just ended amid it.

        Args:
            what: `run.sum` or `run.mean`.
            is_training: whether a model is in training mode, and gradients are recorded.

        Raises:
            InvalidInput: the value may be of either, and would count differently.
        """
        is_of_pass = not (self._used or self._weights or self._was_evaluated)
        if what == "run.sum" and is_of_pass and not is_training and self._summed.may_have_ended_with_stand_ins:
            raise InvalidInput(
                "run.sum in evaluation mode, after a loop over training data of which a node had no sample of a batch: "
                "the sum may be of the training or of an evaluation without a prepared loader; take sums of the "
                "training before model.eval(), and give the loader of the evaluation to run.prepare"
            )
        if not (self._was_evaluated and self._is_training and self._weights):
            return
        if what == "run.sum" and is_training and not self._with_stand_ins.isdisjoint(self._weights):
            raise InvalidInput(
                "run.sum after an evaluation inside the loop over the training data: a node has no sample of the "
                "training batch, and the sum may be of the batch or of the evaluation; take sums of the batch before "
                "the evaluation, and sums of the evaluation before model.train()"
            )
        if what == "run.mean" and not is_training:
            raise InvalidInput(
                "run.mean after an evaluation inside the loop over the training data is of the training batch: take it "
                "before the evaluation or after model.train(), and divide sums of the evaluation by run.sum"
            )

    def of_sum(self) -> set[bool]:
        """Return whether this rank has samples of the training batches of a sum: see `SummedBatches.take`.

        The set is empty for a sum of an evaluation, or of no batch.
        """
        if self._was_evaluated or (self._weights and not self._is_training):
            return set()
        return self._summed.take(is_kept=bool(self._used), is_open=bool(self._weights))

    def weight_of_open(self) -> float:
        """Return the weight of the batch that was loaded last; 1 outside of loaders and after an evaluation."""
        return self.weight() if self._weights and not self._was_evaluated else 1.0


def rows_of(batch: Any, dim: int) -> int:
    """Return the samples of a batch, the size of its tensors in `dim`. Raises InvalidInput if sizes differ or are 0."""
    sizes = {tensor.shape[dim] for tensor in tensors_in(batch) if tensor.dim() > dim}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInput(
            f"run.share needs tensors with as many samples each in dim {dim}, and at least one, got {sorted(sizes)}"
        )
    return int(sizes.pop())


def cut_rows(batch: Any, part: BatchPart, dim: int) -> Any:
    """Return the rows of `part` of all tensors in `batch`."""
    place = (slice(None),) * dim + (part.rows,)
    return map_tensors(batch, lambda tensor: tensor[place] if tensor.dim() > dim else tensor)
