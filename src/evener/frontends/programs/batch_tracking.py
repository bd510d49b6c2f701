"""Tracking of batches that the program computes later than it loads them.

Most programs compute every batch in the loop that loads it and need no tracking. Model calls are tracked in the forked
replicas, and in a run as soon as the program keeps a batch or its replicas have computed one later. In other runs, they
are watched for batches from elsewhere: during the first few batches and then ever less often, because a function mode
may double the time of a small step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from evener.frontends.programs.batch_lookup import HandedBatch, HandedBatches, Provenance
from evener.frontends.programs.batch_parts import BatchPart, OpenParts
from evener.frontends.programs.function_modes import are_functions_compiled
from evener.records.errors import InvalidInput

_EACH, _WATCHED_UPDATES = 4, 8
"""Number of first batches that are all watched, and largest number of updates during one."""
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
        self._are_kept = self._is_unsure = self._follows = False
        self._is_watched = False
        self._updates = 0
        self._watches: Counter[object] = Counter()
        self._are_known: set[bool] = set()
        self._recent: list[HandedBatch] = []

    def give(self, batch: Any, owner: object, part: BatchPart, weight: float, is_training: bool) -> None:
        """Record that the program received `batch`, which is current until tracking shows another one."""
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
        self._follows = True
        self._begin_provenance(models)

    def watch(self, models: Iterable[nn.Module], owner: object, *, is_left: bool = False) -> None:
        """Begin to note whether the batches of calls of `models` are known, if it is time to do that again.

        Programs that compile functions are not watched, since they would be compiled once more.

        Args:
            models: of the program.
            owner: of a batch that begins.
            is_left: whether the program has left the loop over `owner` instead, whose last batch stays the current one.
        """
        self.end_watch()
        self._watches[owner, is_left] += 1
        number = self._watches[owner, is_left]
        is_time = number <= _EACH or number & (number - 1) == 0
        if is_time and not are_functions_compiled():
            self._begin_provenance(models)
            self._is_watched, self._updates, self._are_known = True, 0, set()

    def end_watch(self) -> None:
        """Stop to note whether batches are known."""
        self._is_watched = False
        if not self._follows and self._provenance is not None:
            self._provenance.end()
            self._provenance = None

    def _begin_provenance(self, models: Iterable[nn.Module]) -> None:
        if self._provenance is None:
            self._provenance = Provenance(self._batches, self._called, self._met)
            self._provenance.begin()
            for model in models:
                self._provenance.follow(model)

    @property
    def is_unknown(self) -> bool:
        """Whether models trained since the last update, and only on unknown batches, although calls were watched."""
        return self._is_watched and self._are_known == {False}

    def end_update(self) -> None:
        """Note that weights were updated by the batches so far."""
        self._are_known = set()
        self._updates += 1
        if self._is_watched and self._updates >= _WATCHED_UPDATES:
            self.end_watch()

    def add(self, model: nn.Module) -> None:
        """Track another model, if tracking has begun."""
        if self._provenance is not None:
            self._provenance.follow(model)

    def end(self) -> None:
        """Stop tracking."""
        if self._provenance is not None:
            self._provenance.end()

    def _called(self, batch: HandedBatch | None, trains: bool) -> None:
        """Handle a model call with `batch`. Raises InvalidInput if the model trains on an unknown batch."""
        if trains:
            self._are_known.add(batch is not None)
        if not self._follows:
            return
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
        if self._follows and self._is_unsure and not is_known and self._matters():
            raise InvalidInput(_UNKNOWN)

    def _is_last(self, batch: HandedBatch) -> bool:
        """Whether `batch` was loaded last and is not over."""
        return self._batches.is_last(batch) and self._parts.is_open(batch.owner)
