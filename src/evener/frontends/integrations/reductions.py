"""Collectives of trainers on a run's ranks: means, sums, decisions and broadcasts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from evener.frontends.programs.batch_parts import Count
from evener.frontends.programs.run import Run
from evener.frontends.programs.totals import mean_like, numbers_of, sum_like, total_of
from evener.records.errors import InvalidInput


class Reductions:
    """The collectives of a run.

    Args:
        run: of the program.
        count: divisor of the mean loss.
    """

    def __init__(self, run: Run, count: Count) -> None:
        self.run, self._count = run, count
        self._is_inside = False
        self._prepared: list[Any] = []

    def once(self, thing: Any) -> Any:
        """Prepare a model, optimizer or loader once, although trainers repeat this for every stage."""
        if not any(thing is one for one in self._prepared):
            made = self.run.prepare(thing, count=self._count)
            self._prepared += [thing, made]
            return made
        return thing

    def loader(self, loader: object) -> object:
        """Prepare a loader, whose batches are then divided.

        Raises:
            InvalidInput: a trainer would load one batch ahead of the one that is computed.
        """
        if not isinstance(loader, DataLoader):
            return loader
        try:
            len(loader)
        except TypeError as error:
            raise InvalidInput(
                "of a stream without a length the trainer loads one batch ahead: give the class of the data a __len__"
            ) from error
        return self.once(loader)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let values inside belong to the current batch."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def reduced(self, value: Any, how: Any) -> Any:
        """Return a number or a tensor reduced over all ranks: a sum if `how` names one, else a mean."""
        is_sum = "sum" in str(how).lower()
        if self.run.group.size == 1:
            return value
        if self._is_inside:
            return self.run.sum(value) if is_sum else self.run.mean(value)
        total = total_of(self.run.group, "sum", numbers_of(value), 0.0)
        return sum_like(value, total) if is_sum else mean_like(value, total / self.run.group.size)

    def decided(self, decision: bool, by_all: bool) -> bool:
        """Return whether all ranks, or any of them, decide so."""
        if self.run.group.size == 1:
            return decision
        said = float(total_of(self.run.group, "decision", np.asarray(float(decision)), 0.0))
        return said == self.run.group.size if by_all else said > 0

    def broadcast(self, thing: Any) -> Any:
        """Return the leader's object."""
        if self.run.group.size == 1:
            return thing
        return pickle.loads(self.run.group.broadcast(pickle.dumps(thing)))  # among ranks of one user

    def rows(self, rows: Tensor) -> Tensor:
        """Return `rows` of a single rank. Raises InvalidInput with several, whose numbers of rows differ."""
        if self.run.group.size == 1:
            return rows
        raise InvalidInput("nodes have different numbers of samples: call evener.gather in the place of all_gather")
