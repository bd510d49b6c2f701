"""Random numbers that do not depend on how a batch is divided: every sample is given the same ones."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALIKE = 1024
"""Draws of one kind and shape that start from one seed; a loop that waits for another number comes to an end."""
_LARGEST_BATCH = 4096
"""More rows than this are no samples: they are drawn at once."""


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, an operation that draws random numbers draws those of one sample, again for every other one.

    Neither the number of samples nor what was drawn before has an influence, so the parts of a batch are given what
    the whole is given. A sample is a row of dimension 0; of tensors of three dimensions, which may have time first, a
    row of the first two.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, row by row if it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        lead, rest = _rows_of(func, args)
        key = (func.overloadpacket.__name__, rest)
        seed = zlib.crc32(repr((key, self._drawn[key] // _ALIKE)).encode())
        self._drawn[key] += 1
        torch.manual_seed(seed)
        if not lead:
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor):
            return _of_tensors(func, args, kwargs, lead, seed)
        size = next(i for i, one in enumerate(args) if isinstance(one, list))
        row = func(*args[:size], [1, *rest], *args[size + 1 :], **kwargs)
        return row.expand(math.prod(lead), *rest).reshape(args[size]).clone()


def _rows_of(func: Any, args: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes of the dimensions that count samples, sizes of the others) of what a call draws; no such: ((), all)."""
    first = args[0] if args else None
    given = first.shape if isinstance(first, Tensor) else next((one for one in args if isinstance(one, list)), ())
    shape = tuple(given)
    number = 2 if len(shape) == 3 else 1
    is_whole = "rnn" in func.overloadpacket.__name__ or not shape or not 0 < math.prod(shape[:number]) <= _LARGEST_BATCH
    return ((), shape) if is_whole else (shape[:number], shape[number:])


def _of_tensors(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], lead: tuple[int, ...], seed: int
) -> Any:
    """What `func` returns of its arguments' rows one by one, each from the same `seed`."""
    number, dims = math.prod(lead), len(lead)

    def rows(value: Any) -> Any:
        is_samples = isinstance(value, Tensor) and tuple(value.shape[:dims]) == lead
        return value.reshape(number, *value.shape[dims:]).clone() if is_samples else value

    def whole(parts: Sequence[Tensor]) -> Tensor:
        made = torch.cat(list(parts))
        return made.reshape(*lead, *made.shape[1:])

    def row(i: int, original: Any, copied: Any) -> Any:
        return original if copied is original else copied[i : i + 1]

    def named_rows(value: Any) -> Any:  # a mask of [T, S] has no samples, though there may be T of them
        return rows(value) if isinstance(value, Tensor) and value.dim() == args[0].dim() else value

    given, named = [rows(one) for one in args], {name: named_rows(one) for name, one in kwargs.items()}
    made = []
    for i in range(number):
        torch.manual_seed(seed)
        positional = [row(i, a, b) for a, b in zip(args, given, strict=True)]
        made.append(func(*positional, **{name: row(i, kwargs[name], named[name]) for name in kwargs}))
    for original, copied in zip(args, given, strict=True):  # an operation in place has changed the copy
        if copied is not original and func._schema.is_mutable:  # type: ignore[attr-defined]
            original.copy_(copied.reshape(original.shape))
    if not isinstance(made[0], Tensor):
        return tuple(whole(parts) for parts in zip(*made, strict=True))
    return args[0] if func._schema.name.endswith("_") else whole(made)  # type: ignore[attr-defined]
