"""Tracking of batches that the program computes later than it loads them.

Most programs compute every batch in the loop that loads it and need no tracking. Model calls are tracked in the forked
replicas, and in a run as soon as the program keeps a batch or its replicas have computed one later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from evener.frontends.programs.batch_lookup import HandedBatch, HandedBatches, Provenance
from evener.frontends.programs.batch_parts import BatchPart, OpenParts
from evener.records.errors import InvalidInput

_UNKNOWN = (
    "the program keeps batches, or loads them ahead, and calls the model with tensors of an unknown batch: "
    "call it with tensors of the loader, or with what torch functions make of them; or compute every batch in the loop "
    "that loads it (num_workers= of the loader loads ahead)"
)


class BatchFollowing:
    """Tracks the batches of a rank's program.

    Args:
        parts: that the rank computes now.
        used: called with a batch that is computed although another one was loaded since, and with whether it trains.
        matters: whether the batch makes a difference, as with several nodes.

    Attributes:
        is_delayed: whether the program computes batches later than it loads them.
    """

    def __init__(
        self, parts: OpenParts, used: Callable[[HandedBatch, bool], None], matters: Callable[[], bool]
    ) -> None:
        self.is_delayed = False
        self._parts, self._used, self._matters = parts, used, matters
        self._batches = HandedBatches()
        self._provenance: Provenance | None = None
        self._are_kept = self._is_unsure = False
        self._recent: list[HandedBatch] = []
        self._loaded = 0
        self._are_parts: set[bool] = set()

    def give(self, batch: Any, owner: object, part: BatchPart, weight: float, is_training: bool) -> None:
        """Record that the program received `batch`, which is current until tracking shows another one."""
        self._loaded = part.loaded
        self._batches.give(batch, owner, part, weight, is_training)
        closed = self._parts.open(
            owner, weight, is_training, has_stand_ins=part.has_stand_ins, has_samples=part.samples > 0
        )
        for other in closed:
            self._batches.leave(other)

    def note_kept(self, models: Iterable[nn.Module]) -> None:
        """Track the calls of `models` if the program keeps batches, which it may compute again."""
        if not self._are_kept and self._batches.are_kept():
            self._are_kept = True
            self.begin(models)

    def begin(self, models: Iterable[nn.Module]) -> None:
        """Begin to track the calls of `models`."""
        if self._provenance is None:
            self._provenance = Provenance(self._batches, self._called, self._met)
            self._provenance.begin()
            for model in models:
                self._provenance.follow(model)

    def add(self, model: nn.Module) -> None:
        """Track another model, if tracking has begun."""
        if self._provenance is not None:
            self._provenance.follow(model)

    def end(self) -> None:
        """Stop tracking."""
        if self._provenance is not None:
            self._provenance.end()

    @property
    def trains_on_others(self) -> bool:
        """Whether models trained since the last update, and only on tensors that are not parts of divided batches.

        A tensor of an unknown batch counts as made from a part if it has as many rows.
        """
        return self._are_parts == {False}

    def end_update(self) -> None:
        """Note that weights were updated by the batches so far."""
        self._are_parts = set()

    def _called(self, batch: HandedBatch | None, trains: bool, rows: set[int]) -> None:
        """Handle a model call with `batch`. Raises InvalidInput if the model trains on an unknown batch."""
        if trains:
            self._are_parts.add(batch is not None or self._loaded in rows)
        self._is_unsure = batch is None and trains
        if batch is None:
            has_none = not self._parts.are_used if self.is_delayed else self._are_kept and not self._parts.are_any
            if trains and has_none and self._matters():
                raise InvalidInput(_UNKNOWN)
        elif self.is_delayed or not self._is_last(batch):
            self._begin_delayed()
            self._used(batch, trains)
        elif trains:
            self._recent = [*([] if self._parts.is_done else self._recent), batch]
            self._parts.await_gradients()

    def _begin_delayed(self) -> None:
        """Note that the program computes kept batches, from now on and perhaps beside those that it has just used."""
        if not self.is_delayed and not self._parts.is_done:
            for batch in self._recent:
                self._parts.use(batch.number, batch.weight, trains=True, has_samples=batch.part.samples > 0)
        self.is_delayed = True

    def _met(self, batch: HandedBatch) -> None:
        """Handle trained tensors combined with `batch`. Raises InvalidInput if the model's batch was another one."""
        is_known = self._parts.is_used(batch.number) if self.is_delayed else self._is_last(batch)
        if self._is_unsure and not is_known and self._matters():
            raise InvalidInput(_UNKNOWN)

    def _is_last(self, batch: HandedBatch) -> bool:
        """Whether `batch` was loaded last and is not over."""
        return self._batches.is_last(batch) and self._parts.is_open(batch.owner)
