"""Sums a tensor by owners of its elements, so that slow lines carry less than in a ring (`oracle.all_reduce_shares`).

    for each piece of the tensor, while later pieces travel already
        every rank     sends each owner that owner's elements
        every owner    adds what it receives, in the order of ranks, and sends the sum to the others

All ranks get the same bits, since each element is summed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 1 << 20
"""Largest size of a piece."""
_MIN_PIECE_BYTES, _PIECES = 1 << 15, 16
"""Least size of a piece, and number of pieces of a small tensor: sums of one travel while the next ones are sent."""
_AHEAD = 4
"""Number of pieces whose addends may arrive before they are summed."""
_FIRST_TAG, _TAGS = 1 << 24, 1 << 24
"""Tags of the messages; those of pipelines are smaller."""


def parts_of(flat: Tensor, shares: Sequence[float]) -> list[list[Tensor]]:
    """Return every piece of a tensor of one dim, as views of the elements of each owner."""
    ends = list(accumulate(shares))
    cuts = [0.0, *(end / ends[-1] for end in ends)]
    nbytes = min(max(flat.nbytes // _PIECES, _MIN_PIECE_BYTES), PIECE_BYTES)
    length = max(1, nbytes // flat.element_size())
    pieces = torch.split(flat, length)
    return [[piece[round(a * len(piece)) : round(b * len(piece))] for a, b in pairwise(cuts)] for piece in pieces]


def bytes_of_rank(pieces: Sequence[Sequence[Tensor]], rank: int) -> int:
    """Return the bytes that a rank sends, and receives, for a sum of these `parts_of` a tensor."""
    own = sum(parts[rank].nbytes for parts in pieces)
    size = len(pieces[0])
    return sum(part.nbytes for parts in pieces for part in parts) + own * (size - 2)


class UnevenAllReduce:
    """One sum under way, of a tensor that is contiguous and on a processor.

    Args:
        gloo: process group of Gloo, in which no other messages have its tags.
        rank: of this process.
        shares: of the sums that every rank makes, relative.
        tensor: this rank's addend, which becomes the sum.
        number: of messages of earlier sums in this group, the same on all ranks.
    """

    def __init__(self, gloo: Any, rank: int, shares: Sequence[float], tensor: Tensor, number: int) -> None:
        self._gloo, self._rank, self._number = gloo, rank, number
        self._peers = [(rank + step) % len(shares) for step in range(1, len(shares))]
        self._pieces = parts_of(tensor.view(-1), shares)
        own = [len(parts[rank]) for parts in self._pieces]
        self._rows = tensor.new_empty(min(_AHEAD, len(own)), len(shares), max(own))
        self._arriving: dict[int, list[Any]] = {}
        # An owner answers with a sum after it has received this rank's elements, so a sum may replace them in place.
        self._sent = [
            gloo.send([parts[peer]], peer, self._tag(piece, is_sum=False))
            for piece, parts in enumerate(self._pieces)
            for peer in self._peers
            if len(parts[peer])
        ]
        self._received = [
            gloo.recv([parts[peer]], peer, self._tag(piece, is_sum=True))
            for piece, parts in enumerate(self._pieces)
            for peer in self._peers
            if len(parts[peer])
        ]
        for piece in range(len(self._rows)):
            self._expect(piece)

    @property
    def num_tags(self) -> int:
        """The number of messages between two ranks, the same on all."""
        return 2 * len(self._pieces)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank sends, and receives."""
        return bytes_of_rank(self._pieces, self._rank)

    def wait(self) -> None:
        """Sum what this rank owns as it arrives, and return when all ranks' sums are here. Raises RuntimeError."""
        for piece, parts in enumerate(self._pieces):
            own = parts[self._rank]
            for message in self._arriving.pop(piece, ()):
                message.wait()
            if len(own):
                rows = self._rows[piece % _AHEAD, :, : len(own)]
                rows[self._rank] = own
                torch.add(rows[0], rows[1], out=own)
                for addend in rows[2:]:
                    own += addend
                self._sent += [self._gloo.send([own], peer, self._tag(piece, is_sum=True)) for peer in self._peers]
            if piece + _AHEAD < len(self._pieces):
                self._expect(piece + _AHEAD)
        for message in (*self._received, *self._sent):
            message.wait()

    def _expect(self, piece: int) -> None:
        """Receive the other ranks' addends of what this rank owns of a piece."""
        if length := len(self._pieces[piece][self._rank]):
            rows = self._rows[piece % _AHEAD]
            self._arriving[piece] = [
                self._gloo.recv([rows[peer, :length]], peer, self._tag(piece, is_sum=False)) for peer in self._peers
            ]

    def _tag(self, piece: int, *, is_sum: bool) -> int:
        return _FIRST_TAG + (self._number + 2 * piece + is_sum) % _TAGS
