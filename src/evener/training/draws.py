"""Random numbers that do not depend on how a batch is divided: each sample draws the same ones in any part."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evener.system.processor_draws import device_of, draw_on_processor

_ALIKE = 1024
"""Draws of one kind and shape that start from one seed; a loop that waits for another number comes to an end."""
_LARGEST_BATCH = 4096
"""More rows than this are no samples: they are drawn at once."""
_OF_LAST_DIM = ("_sample_dirichlet", "multinomial")
"""Operations of which a draw belongs to the whole of the last dimension."""

_MAX_SHAPES = 1000
"""Shapes of draws that are noted."""

Interval = tuple[int, int]
"""The samples of a part of a batch: the first one, and their number."""


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which an operation draws the same random numbers for a sample in any part of the batch.

    Neither the number of samples nor what was drawn before has an influence, nor has the device: the processor draws.
    A row of dimension 0 belongs to a sample if there are as many rows as samples; of tensors of three dimensions, which
    may have time first, a row of the first two. Samples draw differently. If the number of rows is another one, all
    rows draw the same numbers, since their samples are unknown.

    Args:
        part: the part that is computed.
        parts: all parts that the batch is compared in. A tensor that has by chance as many rows as one of them is drawn
            as that one draws it, in all of them.

    Attributes:
        round: another one draws other numbers.
        is_paused: whether operations draw as they do without this mode.
        notes: whether the shapes of draws are noted.
        shapes: of the draws that were noted. A draw for samples has another shape in a part of another size, so what is
            drawn in one shape in all parts is drawn for the whole batch.
    """

    def __init__(self, part: Interval = (0, 0), parts: Sequence[Interval] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part, self.parts, self.round = part, tuple(parts), 0
        self.notes, self.is_paused = True, False
        self.shapes: set[tuple[int, ...]] = set()
        self._drawn: Counter[tuple[int, str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, row by row if it draws."""
        kwargs = kwargs or {}
        if self.is_paused or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if device_of(args, kwargs) is not None:
            try:
                return draw_on_processor(self._draw, func, args, kwargs)
            except NotImplementedError:  # a fused operator of accelerators
                pass
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        made = self._draw_rows(func, args, kwargs)
        out = kwargs.get("out")
        return made if out is None or out is made else out.resize_(made.shape).copy_(made)

    def _draw_rows(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        lead, rest = _rows_of(func, args)
        if self.notes and len(self.shapes) < _MAX_SHAPES:
            self.shapes.add(() if func.overloadpacket.__name__ in _OF_LAST_DIM and not lead else (*lead, *rest))
        key = (self.round, func.overloadpacket.__name__, rest)
        seed = zlib.crc32(repr((key, self._drawn[key] // _ALIKE)).encode())
        self._drawn[key] += 1
        torch.manual_seed(seed)
        if not lead:
            return func(*args, **kwargs)
        seeds = [seed if sample is None else zlib.crc32(b"%d,%d" % (seed, sample)) for sample in self._samples(lead)]
        if isinstance(args[0], Tensor):
            return _draw_by_row(func, args, kwargs, lead, seeds)
        size = next(i for i, one in enumerate(args) if isinstance(one, list))
        made: dict[int, Tensor] = {}
        for one in dict.fromkeys(seeds):
            torch.manual_seed(one)
            into = {"out": torch.empty_like(kwargs["out"][:0])} if "out" in kwargs else {}
            made[one] = func(*args[:size], [1, *rest], *args[size + 1 :], **{**kwargs, **into})
        return torch.cat([made[one] for one in seeds]).reshape(args[size])

    def _samples(self, lead: tuple[int, ...]) -> Iterator[int | None]:
        """Yield the sample of every row of the dimensions `lead`; None: there is none.

        One of two dimensions may be time, and it is unknown which: row (i, j) counts as i + j, which differs for
        every sample of one time, and is the same in any part.
        """
        firsts = [first for first, count in (self.part, *self.parts) if count in lead]
        for row in range(math.prod(lead)):
            yield firsts[0] + sum(divmod(row, lead[1]) if len(lead) == 2 else (row,)) if firsts else None


def _rows_of(func: Any, args: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes of the dimensions that count samples, sizes of the others) of a call's draw."""
    first = args[0] if args else None
    sizes = first.shape if isinstance(first, Tensor) else next((one for one in args if isinstance(one, list)), ())
    shape = tuple(sizes)
    number = 2 if len(shape) == 3 else 1
    name = func.overloadpacket.__name__
    is_whole = "rnn" in name or not shape or (len(shape) == 1 and name in _OF_LAST_DIM)
    is_whole = is_whole or not 0 < math.prod(shape[:number]) <= _LARGEST_BATCH
    return ((), shape) if is_whole else (shape[:number], shape[number:])


def _draw_by_row(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], lead: tuple[int, ...], seeds: Sequence[int]
) -> Any:
    """Call `func` for the arguments' rows one by one, each with its seed, and join the results."""
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

    copies, named = [rows(one) for one in args], {name: named_rows(one) for name, one in kwargs.items()}
    made = []
    for i, seed in enumerate(seeds):
        torch.manual_seed(seed)
        positional = [row(i, a, b) for a, b in zip(args, copies, strict=True)]
        made.append(func(*positional, **{name: row(i, kwargs[name], named[name]) for name in kwargs}))
    for original, copied in zip(args, copies, strict=True):  # an operation in place has changed the copy
        if copied is not original and func._schema.is_mutable:  # type: ignore[attr-defined]
            original.copy_(copied.reshape(original.shape))
    if not isinstance(made[0], Tensor):
        return tuple(whole(parts) for parts in zip(*made, strict=True))
    return args[0] if func._schema.name.endswith("_") else whole(made)  # type: ignore[attr-defined]
