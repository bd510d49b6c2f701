"""Says which node a piece of a blob can be fetched from, so that the master sends it once and not to every node."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from ipaddress import ip_address
from itertools import count

from evener.ps.protocol.blob import MIN_PIECE_BYTES
from evener.ps.protocol.messages import FetchBlob, FetchFrom, OfferPieces
from evener.records.errors import EvenerError
from evener.wire.errors import BadFrame
from evener.wire.identity import Address, Token

_MAX_BLOBS = 8
"""Blobs whose pieces are remembered: about one for each run in progress."""
_NONE = -1


class PieceHolders:
    """The nodes that serve pieces, and the pieces that the master has sent to each since its offer.

    A node offers pieces again in every run. What it was sent before may be gone, unless it says that it is complete.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._number_of: dict[int, int] = {}
        self._offers: dict[int, OfferPieces] = {}
        self._sent: OrderedDict[str, array[int]] = OrderedDict()
        self._complete: dict[str, list[int]] = {}
        self._turns = count()

    def offer(self, peer: int, offer: OfferPieces, origin: str = "") -> None:
        """Note where a node serves pieces: at the address that the master sees, or at one of a private network.

        Args:
            peer: connection of the node.
            offer: what it says. One of a loopback interface counts only from the master's machine.
            origin: address of the node, as the master sees it; empty for a socket of this machine.

        Raises:
            BadFrame: other nodes cannot connect there, or must not.
        """
        try:
            address = Address.parse(offer.address)
            host = ip_address(address.host)
            Token.parse(offer.token)
        except (EvenerError, ValueError) as error:
            raise BadFrame(f"pieces cannot be fetched at {offer.address}: {error}") from error
        is_near = host.is_private or address.host == origin
        if not address.port or host.is_unspecified or host.is_multicast or not is_near:
            raise BadFrame(f"pieces cannot be fetched at {offer.address}")
        if host.is_loopback and origin and not ip_address(origin).is_loopback:
            return
        self.disconnected(peer)
        self._number_of[peer] = next(self._numbers)
        self._offers[self._number_of[peer]] = offer
        for digest in offer.complete:
            self._complete.setdefault(digest, []).append(self._number_of[peer])

    def disconnected(self, peer: int) -> None:
        """Forget a connection that is gone."""
        number = self._number_of.pop(peer, _NONE)
        if (offer := self._offers.pop(number, None)) is not None:
            for digest in offer.complete:
                self._complete[digest].remove(number)
                if not self._complete[digest]:
                    del self._complete[digest]

    def holder(self, peer: int, fetch: FetchBlob, num_bytes: int) -> FetchFrom | None:
        """Return where a node fetches a piece of a blob; None if the master sends it, which is then remembered.

        Args:
            peer: connection of the node.
            fetch: its request.
            num_bytes: length of the blob.
        """
        own = self._number_of.get(peer, _NONE)
        if fetch.is_direct or own == _NONE or not 0 <= fetch.offset < num_bytes:
            return None
        if fetch.digest not in self._sent:
            self._sent[fetch.digest] = array("q", [_NONE]) * (num_bytes // MIN_PIECE_BYTES + 1)
            if len(self._sent) > _MAX_BLOBS:
                self._sent.popitem(last=False)
        sent, piece = self._sent[fetch.digest], fetch.offset // MIN_PIECE_BYTES
        offer = self._offers.get(sent[piece])
        if fetch.num_bytes < MIN_PIECE_BYTES and fetch.offset + fetch.num_bytes < num_bytes:
            return None  # less than a piece
        if offer is None:
            offer = self._having_all(fetch.digest, own)
        if offer is None or sent[piece] == own:
            sent[piece] = own
            return None
        return FetchFrom(digest=fetch.digest, offset=fetch.offset, address=offer.address, token=offer.token)

    def _having_all(self, digest: str, own: int) -> OfferPieces | None:
        """Return the offer of a node that has a blob from an earlier run; they take turns."""
        if not (numbers := self._complete.get(digest)):
            return None
        number = numbers[next(self._turns) % len(numbers)]
        return None if number == own else self._offers[number]
