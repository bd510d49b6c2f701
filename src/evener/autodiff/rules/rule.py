"""What a row of the table of rules holds: how to compute an operation, and how its gradient flows back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

Forward = Callable[..., tuple[Any, Any]]
Vjp = Callable[[Any, Any, Any, Any], Any]


class Rule(NamedTuple):
    """A primitive of differentiation: forward, and a vector-Jacobian product for every input.

    Attributes:
        forward: (backend, *input arrays, *arguments) -> (output, saved): `saved` is whatever the products will need.
        vjps: one for each input, in order: (backend, g, saved, out) -> the gradient of that input, where g is that of
            the output. It may be shaped as the output where the input was broadcast. `out` is an array of the input's
            shape that the gradient may be written into and returned, or None. g is never written to: others may hold
            it. Empty if the operation has no gradient.
        prepare: (backend, g, saved) -> what all vjps get for `saved`, computed once for all of them.
    """

    forward: Forward
    vjps: Iterable[Vjp] = ()
    prepare: Callable[[Any, Any, Any], Any] | None = None


class ForEach:
    """The vjps of a rule that takes any number of inputs: `vjp(i, backend, g, saved, out)` for input i."""

    def __init__(self, vjp: Callable[..., Any]) -> None:
        self._vjp = vjp

    def __iter__(self) -> Iterator[Vjp]:
        number = 0
        while True:
            yield partial(self._vjp, number)
            number += 1


def through(_backend: Any, g: Any, _saved: Any, _out: Any) -> Any:
    """The vjp of an input that is passed on, or only broadcast."""
    return g


def without_saving(primitive: str) -> Forward:
    """A forward that computes one primitive of the back end and saves nothing."""
    return lambda backend, *inputs: (getattr(backend, primitive)(*inputs), None)
