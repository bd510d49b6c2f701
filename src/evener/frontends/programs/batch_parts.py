"""A rank's part of a batch, and how much it counts in the step that it belongs to.

n of N samples on p ranks: gradients are averaged over the ranks, so the mean loss of a rank counts p n / N times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from evener.comm.group import Group
from evener.data.alike import rows_of_ranks
from evener.records.errors import InvalidInput, require
from evener.tracer.nested import map_tensors, tensors_in

STAND_IN = 2
"""Samples of a rank that has none, which count for nothing: layers may want more than one."""

Count: TypeAlias = Literal["samples", "sum"] | Callable[[Any], Any]
"""What the loss of a batch is a mean over: its samples, or so many things as the function says; or it is a sum."""


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """One rank's part of one batch.

    Attributes:
        first: of its samples, in the batch.
        samples: that count; with none, the rank computes some all the same, as it has to take part.
        total: samples of the batch.
        loaded: samples that are computed.
        is_joined: whether it is of two batches of an evaluation, of which the last has fewer samples than there are
            nodes.
    """

    first: int
    samples: int
    total: int
    loaded: int
    is_joined: bool = False

    @property
    def rows(self) -> slice:
        """Where the loaded samples are in the batch."""
        return slice(self.first, self.first + self.loaded)


def part_of(rank: int, sizes: Sequence[int]) -> BatchPart:
    """The part of `rank` in a batch of which every rank has so many samples."""
    total, samples = sum(sizes), sizes[rank]
    loaded = samples or min(STAND_IN, total)
    first = min(sum(sizes[:rank]), total - loaded)
    return BatchPart(first=first, samples=samples, total=total, loaded=loaded)


def require_count(count: object) -> None:
    """Raise InvalidValue unless it is a Count."""
    require(count in ("samples", "sum") or callable(count), "count", count, "'samples', 'sum' or a function of a batch")


def weight_of(part: BatchPart, batch: Any, count: Count, group: Group) -> float:
    """How often the mean loss of `part` counts; every rank calls this for its own part of the same batch.

    Raises:
        InvalidInput: the count is no number, or negative.
    """
    if count == "samples":
        return group.size * part.samples / part.total
    if count == "sum":
        return float(group.size if part.samples else 0)
    own = _number(count, batch) if part.samples else 0.0
    whole = sum(rows_of_ranks(group, [own])[:, 0].tolist())
    return group.size * own / whole if whole else 0.0


def _number(count: Callable[[Any], Any], batch: Any) -> float:
    try:
        own = float(count(batch))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"count= must give a number for a batch: {error}") from error
    require(own >= 0, "count=", own, "zero or more")
    return own


class OpenParts:
    """The parts that this rank computes now: of every loader that is being gone through, the last one.

    A batch that is evaluated while another one is trained on, or before that loader was left, is another matter. Where
    it is known of what batch a model was called, that counts, and not which was loaded last.
    """

    def __init__(self) -> None:
        self._of_kind: dict[bool, dict[object, float]] = {True: {}, False: {}}
        self._is_training = True
        self._left: set[object] = set()
        self._used: dict[int, float] = {}
        self._is_done = True
        self._was_evaluated = False

    @property
    def _weights(self) -> dict[object, float]:
        return self._of_kind[self._is_training]

    def open(self, owner: object, weight: float, is_training: bool = True) -> set[object]:
        """A batch of `owner` is computed from now on; it counts `weight` times. Others whose batches no longer are."""
        left, self._left = self._left - {owner}, set()
        self._was_evaluated = False
        for other in left:
            self._of_kind[True].pop(other, None)
        self._used = {} if self._is_done else self._used
        self._of_kind[not is_training].pop(owner, None)
        self._is_training = is_training
        self._weights[owner] = weight
        return left

    def reweigh(self, weight: float) -> None:
        """What is computed now counts `weight` times, which was not known when it began."""
        if self._used:
            self._used = dict.fromkeys(self._used, weight)
            return
        self._of_kind[self._is_training] = dict.fromkeys(self._weights, weight)

    def use(self, number: int, weight: float, trains: bool) -> None:
        """A model is called with the batch of this number; if it trains, another `backward()` has to come."""
        self._used = {} if self._is_done or not trains else self._used
        self._used[number] = weight
        self._is_done = not trains

    def close(self, owner: object, is_over: bool) -> None:
        """No batch of `owner` is loaded any more; it was left before its end unless it `is_over`.

        A batch that was trained on when its loader was left is computed until another one is loaded.
        """
        if owner in self._of_kind[True] and not is_over:
            self._left.add(owner)
            return
        self._was_evaluated = owner in self._of_kind[False]
        for weights in self._of_kind.values():
            weights.pop(owner, None)
        if not self._weights:
            self._is_training = not self._is_training if self._of_kind[not self._is_training] else True

    @property
    def are_any(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._used or self._weights)

    @property
    def are_used(self) -> bool:
        """Whether it is known of what batch a model was called last."""
        return bool(self._used)

    def is_used(self, number: int) -> bool:
        """Whether a model was called with the batch of this number since the last `backward()`."""
        return number in self._used

    def is_open(self, owner: object) -> bool:
        """Whether a batch of `owner` is computed, as far as that follows from when it was loaded."""
        return any(owner in weights for weights in self._of_kind.values())

    def weight(self) -> float:
        """How often what is computed now counts: once where no batch is divided, as all ranks compute the same.

        Raises:
            InvalidInput: batches of several loaders are computed, which count differently.
        """
        found = set((self._used or self._weights).values())
        if len(found) > 1:
            raise InvalidInput(
                "batches are trained on at once that are divided in different proportions: "
                "give both loaders the same batch_size, or put both data sets into one"
            )
        return found.pop() if found else 1.0

    def weight_of_gradients(self) -> float:
        """Likewise, in a `backward()`: the next call of a model that trains begins anew."""
        self._is_done = True
        return self.weight()

    def weight_of_open(self) -> float:
        """How often what is loaded now counts; once where none is, or an evaluation has just ended."""
        return self.weight() if self._weights and not self._was_evaluated else 1.0


def rows_of(batch: Any, dim: int) -> int:
    """Samples of a batch: the size of all its tensors in `dim`. Raises InvalidInput: they differ, or there is none."""
    sizes = {tensor.shape[dim] for tensor in tensors_in(batch) if tensor.dim() > dim}
    if len(sizes) != 1:
        raise InvalidInput(f"run.share needs tensors with as many samples each in dim {dim}, got {sorted(sizes)}")
    return int(sizes.pop())


def cut_rows(batch: Any, part: BatchPart, dim: int) -> Any:
    """The rows of `part` of all tensors in `batch`."""
    place = (slice(None),) * dim + (part.rows,)
    return map_tensors(batch, lambda tensor: tensor[place] if tensor.dim() > dim else tensor)
