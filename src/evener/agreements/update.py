"""From contributions to the next weights: their weighted mean, then the server's optimizer, each in one pass.

The mean is computed on all cores, each part while the next one arrives. With weights n_0, n_1, ... (samples) and N =
sum n_i, the mean of the sources c_i is computed block by block as

    out = n_0 / N * (c_0 + n_1 / n_0 * c_1 + n_2 / n_0 * c_2 + ...)

which for equal weights needs a single multiplication. A block of `out` stays in the cache until it is done, so every
source is read from memory once and the result is written once. The sum has the order of the sources, so the bits of the
result do not depend on arrival, blocks or threads. The same pass checks whether the result is finite: it is, if and
only if all sources are.

The optimizer allocates nothing. The next weights are written where the caller says: in place, or elsewhere while the
present ones are still being read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np

from evener.agreements.layout import SECTIONS, Flat, Floats, StateLayout
from evener.agreements.settings import Adam, Grouped, Outer, Sgd, rate_at
from evener.agreements.threads import BLOCK_BYTES, ThreadPool


class Merging:
    """One weighted mean of states or changes in progress; counters are summed.

    Args:
        out: where the result is stored.
        sources: contributions to merge, which may still be arriving.
        weights: positive weights of the sources; only their ratios matter.
        cores: threads that compute.
    """

    def __init__(self, out: Flat, sources: Sequence[Flat], weights: Sequence[float], cores: ThreadPool) -> None:
        self._out, self._sources, self._cores = out, sources, cores
        self._arrays = [
            (array, tuple([source.floats[k] for source in sources]), offset)
            for k, (array, offset) in enumerate(zip(out.floats, out.layout.float_offsets, strict=True))
        ]
        self._done = [0] * len(self._arrays)
        self._ratios = tuple(weight / weights[0] for weight in weights)
        self._share = weights[0] / sum(weights)
        self._is_finite = True

    def advance(self, num_bytes: int) -> None:
        """Merge whole blocks of the first `num_bytes` of every source, which have arrived."""
        for k, (out, sources, offset) in enumerate(self._arrays):
            start, stop = self._done[k], min((num_bytes - offset) // out.itemsize, out.size)
            if (stop - start) * out.itemsize >= BLOCK_BYTES or start < stop == out.size:
                self._merge(out, sources, start, stop)
                self._done[k] = stop

    def finish(self) -> tuple[int, ...]:
        """Merge the rest, when everything has arrived.

        Returns:
            Sources to leave out, because they are not finite; empty if the result is good. If the sum of finite sources
            exceeds the range of the dtype, all of them.
        """
        self.advance(self._out.layout.num_bytes)
        self._sum_counters()
        if self._is_finite:
            return ()
        bad = tuple(i for i, source in enumerate(self._sources) if not is_finite(source, self._cores))
        return bad or tuple(range(len(self._sources)))

    def _sum_counters(self) -> None:
        total = self._out.counters
        if not total.size:
            return
        np.copyto(total, self._sources[0].counters)
        for source in self._sources[1:]:
            np.add(total, source.counters, out=total)

    def _merge(self, out: Floats, sources: tuple[Floats, ...], start: int, stop: int) -> None:
        first, rest = sources[0], tuple(zip(sources[1:], self._ratios[1:], strict=True))

        def block(thread: int, a: int, b: int) -> None:
            total, sum_so_far = out[a:b], first[a:b]
            scratch = self._cores.scratch(thread, 0, total)
            for source, ratio in rest:
                part = source[a:b] if ratio == 1 else np.multiply(source[a:b], ratio, out=scratch)
                sum_so_far = np.add(sum_so_far, part, out=total)
            np.multiply(sum_so_far, self._share, out=total)
            if not _block_is_finite(total):
                self._is_finite = False

        self._cores.each(start, stop, out.itemsize, block)


def is_finite(flat: Flat, cores: ThreadPool) -> bool:
    """Return whether no number in `flat` is infinite or NaN."""
    result = True

    def block(_: int, a: int, b: int) -> None:
        nonlocal result
        if not _block_is_finite(array[a:b]):
            result = False

    for array in flat.floats:
        cores.each(0, array.size, array.itemsize, block)
    return result


def _block_is_finite(block: Floats) -> bool:
    """Return whether all of `block` is finite: its largest and its smallest number are, and a NaN would be either."""
    return isfinite(np.maximum.reduce(block)) and isfinite(np.minimum.reduce(block))


State = tuple[Floats, ...]
"""Optimizer state of an array: momentum; or running mean and mean square; or nothing."""

Rule = Callable[[Floats, Floats, State, Floats, Floats, Floats], None]
"""Updates a block: present weights, gradient, state, output for the next weights, two blocks of scratch."""


class Optimiser:
    """Turns weights and a merged contribution into the next weights.

    Args:
        outer: settings of the optimizer.
        layout: layout of the weights.
        cores: threads that compute.
        clip_norm: bound on the norm of a gradient; None for none.
    """

    def __init__(self, outer: Outer, layout: StateLayout, cores: ThreadPool, clip_norm: float | None = None) -> None:
        self._outer, self._cores, self._clip_norm = outer, cores, clip_norm
        names = state_names(outer)
        self._states: list[State] = [tuple(np.zeros_like(p) for _ in names) for p in Flat(layout).parameters]
        self._pieces = _pieces_of(layout)
        self._rules = [
            outer.rules[outer.group_of[p.number]] if isinstance(outer, Grouped) else outer for p in self._pieces
        ]
        self._skipped = np.zeros(len(layout.entries))
        self.arrays: Mapping[str, Floats] = {
            f"{name}.{array.dtype.name}": array
            for state in self._states
            for name, array in zip(names, state, strict=True)
        }
        if "mean" in names:  # Adam counts the steps of every parameter
            self.arrays = {**self.arrays, "skipped.float64": self._skipped}
        """Optimizer state by name, to save or to overwrite."""

    def step(
        self, version: int, weights: Flat, change: Flat, into: Flat, unused: Collection[int] = frozenset()
    ) -> None:
        """Write the weights of `version` + 1.

        Parameters follow the (pseudo-)gradient downwards; statistics their mean change; counters increase by all
        increments.

        Args:
            version: version of `weights`, the number of updates before.
            weights: present weights.
            change: merged contribution; unchanged, except for a gradient that is longer than the bound.
            into: where the next weights are written, perhaps `weights` itself.
            unused: indices in the layout of parameters without a gradient; they and their optimizer state stay
                unchanged, as in PyTorch.
        """
        if self._clip_norm is not None:
            _clip(change.parameters, self._clip_norm)
        if isinstance(self._outer, Grouped) or unused or self._skipped.any():
            self._step_by_piece(version, weights, change, into, unused)
        else:
            rule = _rule(self._outer, version, 0)
            arrays = zip(weights.parameters, change.parameters, self._states, into.parameters, strict=True)
            for source, gradient, state, target in arrays:
                self._pass(rule, source, gradient, state, target)
        for source, down, target in zip(weights.statistics, change.statistics, into.statistics, strict=True):
            np.subtract(source, down, out=target)
        np.add(weights.counters, change.counters, out=into.counters)

    def _step_by_piece(self, version: int, weights: Flat, change: Flat, into: Flat, unused: Collection[int]) -> None:
        """Make a step of each parameter separately, or none."""
        for piece, outer in zip(self._pieces, self._rules, strict=True):
            source, gradient, target = (
                one.parameters[piece.array][piece.start : piece.stop] for one in (weights, change, into)
            )
            if piece.place in unused:
                np.copyto(target, source)
                self._skipped[piece.place] += 1
                continue
            state = tuple([one[piece.start : piece.stop] for one in self._states[piece.array]])
            rule = _rule(outer, version, int(self._skipped[piece.place]))
            self._pass(rule, source, gradient, state, target)

    def _pass(self, rule: Rule, source: Floats, gradient: Floats, state: State, target: Floats) -> None:
        def block(thread: int, a: int, b: int) -> None:
            part = target[a:b]
            scratch = self._cores.scratch(thread, 0, part), self._cores.scratch(thread, 1, part)
            rule(source[a:b], gradient[a:b], tuple([one[a:b] for one in state]), part, *scratch)

        self._cores.each(0, source.size, source.itemsize, block)


def state_names(outer: Outer) -> tuple[str, ...]:
    """Return the names of the arrays that an optimizer keeps for each parameter."""
    if isinstance(outer, Grouped):
        return max((state_names(rule) for rule in outer.rules), key=len)
    if isinstance(outer, Adam):
        return ("mean", "square")
    return ("momentum",) if outer.momentum else ()


def _clip(gradients: Sequence[Floats], bound: float) -> None:
    """Shorten a gradient to the norm `bound`, as `torch.nn.utils.clip_grad_norm_` does."""
    norm = sqrt(sum(float(np.dot(array, array)) for array in gradients))
    factor = bound / (norm + 1e-6)
    if factor < 1:
        for array in gradients:
            np.multiply(array, factor, out=array)


class _Piece(NamedTuple):
    """A parameter: its index in the layout and among the parameters, and its part of one of the parameters' arrays."""

    place: int
    number: int
    array: int
    start: int
    stop: int


def _pieces_of(layout: StateLayout) -> list[_Piece]:
    pieces: list[_Piece] = []
    places = [place for place, entry in enumerate(layout.entries) if entry.kind == "parameter"]
    parameters = [(number, place, layout.entries[place]) for number, place in enumerate(places)]
    dtypes = [dtype for dtype, kind in SECTIONS if kind == "parameter"]
    used = [dtype for dtype in dtypes if any(entry.dtype == dtype and entry.size for *_, entry in parameters)]
    for array, dtype in enumerate(used):
        start = 0
        for number, place, entry in parameters:
            if entry.dtype == dtype:
                pieces.append(_Piece(place, number, array, start, start + entry.size))
                start += entry.size
    return pieces


def _rule(outer: Sgd | Adam, version: int, skipped: int) -> Rule:
    """Return the rule of the update of `version`, for a parameter without a gradient in `skipped` updates."""
    rate = rate_at(outer.learning_rate, version)
    return partial(_adam, outer, rate, version + 1 - skipped) if isinstance(outer, Adam) else partial(_sgd, outer, rate)


def _sgd(rule: Sgd, rate: float, w: Floats, g: Floats, state: State, out: Floats, s: Floats, t: Floats) -> None:
    """With m the momentum: m <- mu m + (g + decay w); w <- w - rate m, or w - rate (g + decay w + mu m) if Nesterov."""
    g = _decayed(g, w, rule.weight_decay, s)
    if state:
        (m,) = state
        np.multiply(m, rule.momentum, out=m)
        np.add(m, g, out=m)
        g = np.add(g, np.multiply(m, rule.momentum, out=t), out=t) if rule.is_nesterov else m
    np.subtract(w, np.multiply(g, rate, out=t), out=out)


def _adam(
    rule: Adam, rate: float, count: int, w: Floats, g: Floats, state: State, out: Floats, s: Floats, t: Floats
) -> None:
    """Apply Adam (Kingma and Ba, 2015), with decoupled weight decay (Loshchilov and Hutter, 2019).

    m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2; w <- w - rate (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps).
    """
    (m, v), (b1, b2) = state, rule.betas
    if rule.is_decoupled:
        w = np.multiply(w, 1 - rate * rule.weight_decay, out=out)
    else:
        g = _decayed(g, w, rule.weight_decay, s)
    np.multiply(m, b1, out=m)
    np.add(m, np.multiply(g, 1 - b1, out=t), out=m)
    np.multiply(v, b2, out=v)
    np.multiply(g, g, out=t)
    np.add(v, np.multiply(t, 1 - b2, out=t), out=v)
    np.sqrt(v, out=t)
    np.multiply(t, 1 / sqrt(1 - b2**count), out=t)
    np.add(t, rule.eps, out=t)
    np.divide(m, t, out=t)
    np.subtract(w, np.multiply(t, rate / (1 - b1**count), out=t), out=out)


def _decayed(g: Floats, w: Floats, decay: float, into: Floats) -> Floats:
    """Return g + decay w, computed in `into`; g itself if there is no decay."""
    return np.add(g, np.multiply(w, decay, out=into), out=into) if decay else g
