"""Sums of gradients in buckets, which travel while backward goes on."""

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
    """Sums gradients in buckets while backward goes on, one bucket after the other: all ranks have the same ones.

    Args:
        world: the ranks.
        buckets: of weights that every rank has.
        divided: of weights of which ranks have parts; summed last.
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
        """From now on these are the buckets."""
        self._buckets = buckets
        self._bucket_of = {id(weight): i for i, bucket in enumerate(buckets) for weight in bucket.weights}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients stay on this rank: for all but the last micro-batch of a step."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def _arrived(self, weight: Tensor) -> None:
        """A weight's gradient is complete on this rank."""
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
        """Whether a backward pass has begun whose gradients are not complete."""
        return self._started

    def begin(self) -> None:
        """A backward pass begins; of a rank that has no part of any weight, no gradient would tell."""
        if self._sums and not self._started:
            self._start()

    def _start(self) -> None:
        self._started, self._launched = True, 0
        self._missing = [len(bucket.weights) for bucket in self._buckets]

    def _finish_with_backward(self) -> None:
        """Everything is complete before the `backward()` returns that goes on now."""
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
        """The step was not finished: the next gradient that arrives is the first of another."""
        self._started, self._sums = False, True
        for bucket in self._buckets:
            bucket.forget()

    def finish(self) -> None:
        """Wait for all buckets, then sum what is divided."""
        self._launch_all()
        self._started = False
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                bucket.finish()
        for divided in self._divided:
            divided.sum()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`method`, without keeping its object: Python's collector cannot free a weight whose hook refers back to it."""
    known = WeakMethod(method)

    def call(weight: Tensor) -> None:
        living = known()
        assert living is not None, "weights are trained that outlived the model they are of"
        living(weight)

    return call
