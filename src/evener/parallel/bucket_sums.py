"""Sums of gradients in buckets that are reduced during backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from evener.comm.group import Group
from evener.parallel.gradient_buckets import DividedBucket, GradientBucket


class BucketSums:
    """Sum gradients during backward, one bucket after another. All ranks have the same buckets.

    Args:
        world: The ranks.
        buckets: Buckets of weights that every rank has.
        divided: Buckets of weights of which ranks have parts; these are summed last.
    """

    def __init__(self, world: Group, buckets: Sequence[GradientBucket], divided: Sequence[DividedBucket] = ()) -> None:
        self._world, self._divided = world, divided
        self._sums = True
        self._started = False
        self._launched = 0
        self._missing: list[int] = []
        self._arrange(buckets)
        hooked: list[Any] = [weight for bucket in buckets for weight in bucket.weights]
        hooked += [weight for bucket in divided for weight in bucket.weights]
        arrived = _weakly(self._arrived)
        for weight in hooked:
            weight.register_post_accumulate_grad_hook(arrived)

    def _arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Use these buckets from now on."""
        self._buckets = buckets
        self._bucket_of = {id(weight): i for i, bucket in enumerate(buckets) for weight in bucket.weights}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients on this rank: for all micro-batches of a step but the last."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def _arrived(self, weight: Tensor) -> None:
        """Note that a weight's gradient is complete on this rank, and start the buckets that are full."""
        if not self._sums:
            return
        if not self._started:
            self._start()
        bucket = self._bucket_of.get(id(weight))
        if bucket is not None:
            self._missing[bucket] -= 1
        while self._launched < len(self._buckets) and self._missing[self._launched] == 0:
            self._launch()

    @property
    def has_started(self) -> bool:
        """Whether a backward pass has started whose gradients are not complete."""
        return self._started

    def begin(self) -> None:
        """Start a backward pass, on a rank without a part of any weight, where no gradient triggers it."""
        if self._sums and not self._started:
            self._start()

    def _start(self) -> None:
        self._started, self._launched = True, 0
        self._missing = [len(bucket.weights) for bucket in self._buckets]

    def _finish_with_backward(self) -> None:
        """Finish all sums before the current `backward()` returns."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.finish() if self._started else None)

    def _launch(self) -> None:
        self._world.timer.break_for_others()
        self._buckets[self._launched].start()
        self._launched += 1

    def _launch_all(self) -> None:
        if not self._started:
            self._start()
        while self._launched < len(self._buckets):
            self._launch()

    def forget(self) -> None:
        """Drop the unfinished step: the next gradient that arrives starts another one."""
        self._started, self._sums = False, True
        for bucket in self._buckets:
            bucket.forget()

    def finish(self) -> None:
        """Wait for all buckets, then sum the divided weights."""
        self._launch_all()
        self._started = False
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                bucket.finish()
        for divided in self._divided:
            divided.sum()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return `method` without a reference to its object: a weight whose hook refers back to it would not be freed."""
    reference = WeakMethod(method)

    def call(weight: Tensor) -> None:
        living = reference()
        assert living is not None, "a weight is trained after its model was freed"
        living(weight)

    return call
