"""The server's optimiser on flat arrays: one pass in blocks that stay in the cache, without allocating.

The next weights are written where the caller says: in place, or elsewhere while somebody still reads the present ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt

import numpy as np

from evener.sync.agreement import Adam, Outer, Sgd, rate_at
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.layout import Floats, Layout

State = tuple[Floats, ...]
"""What an optimiser remembers of an array: momentum; or running mean and mean square; or nothing."""

Rule = Callable[[Floats, Floats, State, Floats, Floats, Floats], None]
"""Updates a block: present weights, gradient, state, where the next weights go, two blocks of scratch."""


class Optimiser:
    """Turns weights and a merged contribution into the next weights.

    Args:
        outer: which optimiser.
        layout: of the weights.
        cores: that do it.
    """

    def __init__(self, outer: Outer, layout: Layout, cores: Cores) -> None:
        self._outer, self._cores = outer, cores
        names = _remembered(outer)
        self._states: list[State] = [tuple(np.zeros_like(p) for _ in names) for p in Flat(layout).parameters]
        self.arrays: Mapping[str, Floats] = {
            f"{name}.{array.dtype.name}": array
            for state in self._states
            for name, array in zip(names, state, strict=True)
        }
        """What it remembers, by name: to be saved, or overwritten from what was saved."""

    def step(self, version: int, weights: Flat, change: Flat, into: Flat) -> None:
        """Write the weights of `version` + 1.

        Parameters go down the (pseudo-)gradient; statistics down their mean change; counters up by all increments.

        Args:
            version: of `weights`; as many updates have been made before.
            weights: the present ones.
            change: the merged contribution; is left as it is.
            into: where the next ones are written, perhaps `weights` itself.
        """
        rule = _rule(self._outer, version)
        arrays = zip(weights.parameters, change.parameters, self._states, into.parameters, strict=True)
        for source, gradient, state, target in arrays:
            self._pass(rule, source, gradient, state, target)
        for source, down, target in zip(weights.statistics, change.statistics, into.statistics, strict=True):
            np.subtract(source, down, out=target)
        np.add(weights.counters, change.counters, out=into.counters)

    def _pass(self, rule: Rule, source: Floats, gradient: Floats, state: State, target: Floats) -> None:
        def block(thread: int, a: int, b: int) -> None:
            part = target[a:b]
            scratch = self._cores.scratch(thread, 0, part), self._cores.scratch(thread, 1, part)
            rule(source[a:b], gradient[a:b], tuple([one[a:b] for one in state]), part, *scratch)

        self._cores.each(0, source.size, source.itemsize, block)


def _remembered(outer: Outer) -> tuple[str, ...]:
    if isinstance(outer, Adam):
        return ("mean", "square")
    return ("momentum",) if outer.momentum else ()


def _rule(outer: Outer, version: int) -> Rule:
    rate = rate_at(outer.learning_rate, version)
    return partial(_adam, outer, rate, version + 1) if isinstance(outer, Adam) else partial(_sgd, outer, rate)


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
    """Kingma and Ba, 2015; decoupled weight decay: Loshchilov and Hutter, 2019.

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
    """g + decay w, computed in `into`; g itself if there is no decay."""
    return np.add(g, np.multiply(w, decay, out=into), out=into) if decay else g
