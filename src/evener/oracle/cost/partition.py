"""How the ranks of one replica divide every layer by filters, channels or rows, and what they then tell each other.

    mode      a convolution or linear layer   before or after it, forward            backward
    filter    each rank some filters          all-gather of the output               all-reduce of the input's gradient
    channel   each rank some input channels   all-reduce of the output               all-gather of the input's gradient
    hybrid    `channel` where no rank would get fewer channels than there are ranks, else `filter`
    sharded   values stay divided by channel; a layer that narrows divides its input and reduce-scatters its output,
              any other all-gathers its input and divides its output; backward the other way round
    spatial   each rank some rows             halo of the input                      halo of the output's gradient

The first three are as published (Kahira et al. 2021): whatever has no weights is done by every rank alike, on whole
values, which are put together by copying. Rows end where a layer cannot be divided by them or has a single one: there
they are gathered, and the rest is done by every rank alike. (A rank may have no row of a small image.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Literal, TypeAlias, get_args

import numpy as np

from evener.oracle.cost.layers import Counts, Flags, Layers, Numbers
from evener.oracle.cost.roofline import LayerShare
from evener.oracle.division.rules import Division

Mode: TypeAlias = Division | Literal["none"]
MODES: tuple[Division, ...] = get_args(Division)


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Bytes of one sample that each collective of a layer carries: of the whole tensor, in columns over layers.

    Attributes:
        forward_gather, backward_gather: of all-gathers, or of reduce-scatters, which cost the same.
        forward_reduce, backward_reduce: of all-reduces.
        halo: received from both neighbours, in each pass.
        forward_copy, backward_copy: moved in memory to take tensors apart and to put them together.
    """

    forward_gather: Numbers
    backward_gather: Numbers
    forward_reduce: Numbers
    backward_reduce: Numbers
    halo: Numbers
    forward_copy: Numbers
    backward_copy: Numbers


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """What every rank of a replica does of every layer.

    Attributes:
        mode: how it was divided.
        shares: of the ranks, summing to 1.
        by_filter, by_channel, by_rows: the layers that are divided so.
        follows: layers without weights that work on divided channels.
        gathers: layers whose whole input a rank of mode `sharded` has to keep.
        parts: of every rank: fractions of filters and channels, and of rows or of what follows divided channels.
        exchanges: what they tell each other.
    """

    mode: Mode
    shares: tuple[float, ...]
    by_filter: Flags
    by_channel: Flags
    by_rows: Flags
    follows: Flags
    gathers: Flags
    parts: tuple[LayerShare, ...]
    exchanges: Exchanges

    def parameter_bytes(self, layers: Layers, rank: int) -> Numbers:
        """Bytes of every layer's parameters that `rank` holds."""
        part = self.parts[rank]
        weights = (layers.weight_bytes - layers.bias_bytes) * part.filters * part.channels
        return weights * np.where(self.follows, part.rows, 1.0) + layers.bias_bytes * part.filters

    def value_share(self, rank: int) -> Numbers:
        """The fraction of every layer's values that `rank` holds."""
        if self.mode == "sharded":
            return np.where(self.by_filter | self.by_channel | self.follows, self.shares[rank], 1.0)
        return self.parts[rank].rows

    def kept_bytes(self, layers: Layers, rank: int) -> Numbers:
        """Bytes of one sample that `rank` keeps of every layer for backward."""
        kept = layers.kept_bytes * self.value_share(rank)
        if self.mode == "sharded":
            return kept + layers.input_bytes * self.gathers
        return kept + layers.input_bytes * np.where(self.by_channel, self.parts[rank].channels, 0.0)


def divide_layers(layers: Layers, mode: Mode, shares: Sequence[float], *, published: bool = False) -> ModelSplit:
    """How ranks with `shares` of the work divide every layer in `mode`; `published`: see `TrainingJob`."""
    return _spatial(layers, shares) if mode == "spatial" else _by_channels(layers, mode, shares, published)


def _by_channels(layers: Layers, mode: Mode, shares: Sequence[float], published: bool) -> ModelSplit:
    size = len(shares)
    candidates = (
        layers.is_weighted & (layers.filters > 0) & (layers.channels > 0) & (~layers.is_linear | (not published))
    )
    enough = (layers.channels >= size) | (mode == "channel" and not published)
    none = np.zeros(len(layers), dtype=np.bool_)
    follows, gathered = none, none
    if mode == "filter":
        by_channel = none
    elif mode == "sharded":
        by_channel = candidates & enough & (layers.output_bytes < layers.input_bytes)
    else:
        by_channel = candidates & enough
    by_filter = candidates & ~by_channel & (mode != "channel")
    if mode == "sharded":
        follows, gathered = _flow(layers, by_filter, by_channel)
    parts = tuple(_parts_by_channels(layers, by_filter, by_channel, follows, shares))
    if mode == "sharded":
        exchanges = _sharded_exchanges(layers, by_filter, by_channel, gathered)
    else:
        back = (
            layers.needs_gradient
            if published
            else layers.needs_gradient & _first_readers(layers, by_filter | by_channel)
        )
        exchanges = _published_exchanges(layers, by_filter, by_channel, back, size)
    return ModelSplit(
        mode=mode,
        shares=tuple(share / sum(shares) for share in shares),
        by_filter=by_filter,
        by_channel=by_channel,
        by_rows=none,
        follows=follows,
        gathers=gathered & by_filter,
        parts=parts,
        exchanges=exchanges,
    )


def _flow(layers: Layers, by_filter: Flags, by_channel: Flags) -> tuple[Flags, Flags]:
    """Of mode `sharded`: layers without weights that get divided values, and layers that need a divided value whole.

    A value is gathered once, for all its readers.
    """
    divided: dict[str, bool] = {}
    present_whole: set[str] = set()
    follows, gathered = np.zeros(len(layers), dtype=np.bool_), np.zeros(len(layers), dtype=np.bool_)
    for index, layer in enumerate(layers.graph.layers):
        sources = [name for name in layer.inputs if divided[name]]
        follows[index] = bool(sources) and bool(layers.is_divisible[index])
        needs_whole = not follows[index] and not by_channel[index]
        gathered[index] = needs_whole and any(name not in present_whole for name in sources)
        if needs_whole:
            present_whole.update(sources)
        divided[layer.name] = bool(by_filter[index] or by_channel[index] or follows[index])
    return follows, gathered


def _parts_by_channels(
    layers: Layers, by_filter: Flags, by_channel: Flags, follows: Flags, shares: Sequence[float]
) -> list[LayerShare]:
    weights = tuple(shares)
    filters = _fractions(layers.filters, by_filter, weights)
    channels = _fractions(layers.channels, by_channel, weights)
    outputs = np.array([layer.output_shape[0] if layer.output_shape else 0 for layer in layers.graph.layers])
    followed = _fractions(outputs, follows, weights)
    return [LayerShare(filters=f, channels=c, rows=r) for f, c, r in zip(filters, channels, followed, strict=True)]


def _fractions(sizes: Counts, divided: Flags, shares: tuple[float, ...]) -> list[Numbers]:
    """Of every rank, the fraction of each divided size that it gets; 1 where nothing is divided."""
    table = np.ones((len(shares), len(divided)))
    for size in map(int, np.unique(sizes[divided & (sizes > 0)])):
        counts = np.array(division(size, shares), dtype=np.float64)
        table[:, divided & (sizes == size)] = (counts / size)[:, None]
    return list(table)


@lru_cache(maxsize=65536)
def division(size: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """`size` units among ranks in proportion to `shares`, by D'Hondt's rule, as `apportion` divides them.

    The rule gives nobody less than its quota rounded down (Balinski & Young 1982); only what is left is handed out.
    """
    total = sum(shares)
    units = [int(size * share / total) for share in shares]
    queue = [((n + 1) / share, rank) for rank, (n, share) in enumerate(zip(units, shares, strict=True)) if share > 0]
    heapify(queue)
    for _ in range(size - sum(units)):
        _, rank = queue[0]
        units[rank] += 1
        heapreplace(queue, ((units[rank] + 1) / shares[rank], rank))
    return tuple(units)


def _first_readers(layers: Layers, divided: Flags) -> Flags:
    """Of the divided layers that read the same value, the first: the gradient of a value is exchanged once."""
    seen: set[tuple[str, ...]] = set()
    first = np.zeros(len(layers), dtype=np.bool_)
    for index in np.flatnonzero(divided):
        inputs = layers.graph.layers[index].inputs
        first[index] = inputs not in seen
        seen.add(inputs)
    return first


def _published_exchanges(layers: Layers, by_filter: Flags, by_channel: Flags, back: Flags, size: int) -> Exchanges:
    outputs, inputs = layers.output_bytes, layers.input_bytes * back
    return Exchanges(
        forward_gather=outputs * by_filter,
        backward_reduce=inputs * by_filter,
        forward_reduce=outputs * by_channel,
        backward_gather=inputs * by_channel,
        halo=np.zeros(len(layers)),
        forward_copy=2 * outputs * by_filter + 2 * layers.input_bytes / size * by_channel,
        backward_copy=2 * outputs / size * by_filter + 2 * inputs * by_channel,
    )


def _sharded_exchanges(layers: Layers, by_filter: Flags, by_channel: Flags, gathered: Flags) -> Exchanges:
    inputs = layers.input_bytes * gathered
    back = inputs * layers.needs_gradient * by_filter
    scattered = layers.output_bytes * by_channel
    none = np.zeros(len(layers))
    return Exchanges(
        forward_gather=inputs + scattered,
        backward_gather=back + scattered,
        forward_reduce=none,
        backward_reduce=none,
        halo=none,
        forward_copy=2 * (inputs + scattered),
        backward_copy=2 * (back + scattered),
    )


def _spatial(layers: Layers, shares: Sequence[float]) -> ModelSplit:
    none = np.zeros(len(layers), dtype=np.bool_)
    by_rows, gathered = layers.strips
    parts = tuple(
        LayerShare(filters=np.ones(len(layers)), channels=np.ones(len(layers)), rows=rows)
        for rows in _fractions(layers.rows, by_rows, tuple(shares))
    )
    zeros = np.zeros(len(layers))
    exchanges = Exchanges(
        forward_gather=layers.input_bytes * gathered,
        backward_gather=zeros,
        forward_reduce=zeros,
        backward_reduce=zeros,
        halo=layers.halo_bytes * by_rows,
        forward_copy=2 * layers.input_bytes * gathered,
        backward_copy=zeros,
    )
    return ModelSplit(
        mode="spatial",
        shares=tuple(share / sum(shares) for share in shares),
        by_filter=none,
        by_channel=none,
        by_rows=by_rows,
        follows=none,
        gathers=none,
        parts=parts,
        exchanges=exchanges,
    )
