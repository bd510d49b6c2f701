"""Alternatives to the master's own merge, which processes contributions once, as they arrive (`agreements.update`).

Threads and device are the merges of the first system of this kind, for comparison: both wait until all contributions
have arrived, and read every sum of two from memory again.

    threads   six threads merge array by array; array k belongs to thread k mod 6
    device    in place on the master's accelerator, or its processor if it has none, by PyTorch:
                  mean, clip        cumulative add_ in place, then one div_, as first published
                  trimmed, median   the same block of all contributions, sorted by coordinate
                  krum              squared distances of all pairs; the one that is nearest to most others is copied

The rules are defined in `agreements.robust`; the result is the same except for rounding. If the accelerator has too
little memory, is lost, or computes no float64, the processor merges instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from evener.agreements.aggregator import WholeMerge
from evener.agreements.layout import Flat, Floats
from evener.agreements.robust import exchanges, merge_counters, nearest_by, num_left_out
from evener.agreements.settings import AgreementSettings, Robust
from evener.records.errors import MissingExtra, first_line
from evener.records.version import pip_install

_BLOCK = 1 << 24
"""Numbers of one contribution that an accelerator processes at a time: many enough for a kernel, and few enough to need
little memory beside a model.
"""
_CACHED = 1 << 15
"""Numbers of one contribution that a CPU processes at a time: blocks of several contributions stay in its cache."""


class DeviceMerge:
    """Merges by one rule.

    Args:
        rule: rule by which contributions are merged.
        notify: shows the operator why the accelerator merges no longer.
    """

    def __init__(self, rule: Robust, notify: Callable[[str], object] = lambda _: None) -> None:
        self.rule, self._notify = rule, notify

    def __call__(self, out: Flat, sources: Sequence[Flat], weights: Sequence[float]) -> None:
        """Write the merged `sources` into `out`.

        Args:
            out: where the result is stored.
            sources: contributions to merge; finite, unless the rule is a mean.
            weights: positive weights of the sources; only a mean uses them.

        Raises:
            MissingExtra: PyTorch is not installed here.
        """
        try:
            self._merge(out, sources, weights)
        except (RuntimeError, TypeError) as error:  # PyTorch's: no memory, a lost device, no float64
            if self._device.type == "cpu":
                raise
            self._notify(f"merging on {self._device} failed, the processor merges instead: {first_line(error)}")
            self._device = self._torch.device("cpu")
            self._merge(out, sources, weights)

    def _merge(self, out: Flat, sources: Sequence[Flat], weights: Sequence[float]) -> None:
        with self._torch.no_grad():
            if self.rule == "krum":
                out.copy_from(sources[nearest_by(self._squared_distances(sources))])
                return
            for index, array in enumerate(out.floats):
                parts = [source.floats[index] for source in sources]
                if self.rule in ("mean", "clip"):
                    self._mean(array, parts, weights)
                else:
                    self._sorted_mean(array, parts)
        if self.rule in ("mean", "clip"):
            np.sum([source.counters for source in sources], axis=0, out=out.counters)
        else:
            merge_counters(out, sources)

    @cached_property
    def _torch(self) -> Any:
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingExtra(f"--merge device needs PyTorch on the master: {pip_install('torch')}") from error
        return torch

    @cached_property
    def _device(self) -> Any:
        from evener.system import accelerators

        return accelerators.best()

    def _blocks(self, array: Floats) -> list[slice]:
        size = _CACHED if self._device.type == "cpu" else _BLOCK
        return [slice(start, start + size) for start in range(0, array.size, size)]

    def _here(self, array: Floats) -> Any:
        return self._torch.from_numpy(array).to(self._device)

    def _mean(self, out: Floats, parts: Sequence[Floats], weights: Sequence[float]) -> None:
        target = self._torch.from_numpy(out)
        total = target if self._device.type == "cpu" else self._torch.empty_like(target, device=self._device)
        self._torch.mul(self._here(parts[0]), weights[0], out=total)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total.add_(self._here(part), alpha=weight)
        total.div_(sum(weights))
        if total is not target:
            target.copy_(total)

    def _sorted_mean(self, out: Floats, parts: Sequence[Floats]) -> None:
        cut = num_left_out(self.rule, len(parts))
        for block in self._blocks(out):
            rows = [self._here(part[block]) for part in parts]
            for i, j in exchanges(len(parts), cut):
                rows[i], rows[j] = self._torch.minimum(rows[i], rows[j]), self._torch.maximum(rows[i], rows[j])
            self._torch.from_numpy(out[block]).copy_(
                sum(rows[cut + 1 : len(parts) - cut], rows[cut]) / (len(parts) - 2 * cut)
            )

    def _squared_distances(self, sources: Sequence[Flat]) -> Floats:
        count = len(sources)
        squares = self._torch.zeros((count, count), dtype=self._torch.float64, device=self._device)
        for index, array in enumerate(sources[0].floats):
            for block in self._blocks(array):
                parts = [self._here(source.floats[index][block]) for source in sources]
                for i in range(count):
                    for j in range(i):
                        apart = parts[i] - parts[j]
                        squares[i, j] += self._torch.dot(apart, apart)
        below: Floats = squares.cpu().numpy()
        return below + below.T


_THREADS = 6


def merge_of(agreement: AgreementSettings, notify: Callable[[str], object] = lambda _: None) -> WholeMerge | None:
    """Return the merge of an agreement; None for the master's own, by the rule `agreement.robust`.

    `notify` is that of `DeviceMerge`.
    """
    if agreement.merge == "cores":
        return None
    return merge_by_threads if agreement.merge == "threads" else DeviceMerge(agreement.robust, notify)


def merge_by_threads(out: Flat, sources: Sequence[Flat], weights: Sequence[float]) -> None:
    """Write the weighted mean of `sources` into `out`; counters are summed.

    Args:
        out: where the result is stored.
        sources: contributions to merge.
        weights: positive weights of the sources.
    """
    arrays = list(zip(out.views().values(), *(source.views().values() for source in sources), strict=True))

    def merge(first: int) -> None:
        with np.errstate(all="ignore"):  # finiteness is checked afterwards
            for target, *parts in arrays[first::_THREADS]:
                _merge_array(target, parts, weights)

    with ThreadPoolExecutor(_THREADS, "evener-merge") as pool:
        list(pool.map(merge, range(_THREADS)))


def _merge_array(target: Any, parts: Sequence[Any], weights: Sequence[float]) -> None:
    if target.dtype.kind == "i":
        np.sum(parts, axis=0, out=target)
        return
    np.multiply(parts[0], target.dtype.type(weights[0]), out=target)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        np.add(target, part * target.dtype.type(weight), out=target)
    np.divide(target, target.dtype.type(sum(weights)), out=target)
