"""Which bytes bring a worker up to date: the weights, or how they differ from those that it has.

The server keeps a copy of what the workers have. What is sent is the difference of the true weights to that copy, in
few bytes; the copy moves by what those bytes mean, and so do the workers: server and workers hold the same bits, and
what a message could not express is in the next difference. In rounds all workers move together and share one copy;
otherwise each has one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from evener.sync.agreement import Agreement
from evener.sync.codes import Bytes
from evener.sync.common import Common
from evener.sync.cores import Cores
from evener.sync.flat import Flat
from evener.sync.packing import Packing, packing_for


class Contents(msgspec.Struct, frozen=True):
    """Bytes for a worker: the weights, or their difference to those of version `base`."""

    kind: Literal["weights", "difference"]
    image: memoryview
    base: int | None = None


@dataclass
class Copy:
    """What a worker has.

    Attributes:
        flat: its weights.
        version: that these stand for.
        base: version of the weights that `image` is the difference to.
        image: how to come from there to here; None at first.
    """

    flat: Flat
    version: int
    base: int = -1
    image: Bytes | None = None


class Pulls:
    """Brings workers up to date.

    Args:
        agreement: whether and how weights are compressed.
        common: the true weights.
        cores: that compress.
    """

    def __init__(self, agreement: Agreement, common: Common, cores: Cores) -> None:
        self._common = common
        self._packing = packing_for(common.weights.layout, agreement.pull, cores)
        self._is_shared = agreement.staleness == 0
        self._copies: dict[str, Copy] = {}
        self._versions: dict[str, int] = {}

    def contents(self, worker: str) -> Contents:
        """What to send to `worker`, which has got all that was sent to it since it was last forgotten."""
        if self._packing is None:
            return Contents("weights", self._common.lend())
        copy = self._up_to_date(self._packing, "" if self._is_shared else worker)
        before = self._versions.get(worker)
        self._versions[worker] = copy.version
        if copy.image is not None and before == copy.base:
            return Contents("difference", copy.image.data, copy.base)
        return Contents("weights", copy.flat.memory.copy().data)

    def forget(self, worker: str) -> None:
        """Send `worker` whole weights next time: it is gone, or nobody knows what it got."""
        self._versions.pop(worker, None)
        self._copies.pop(worker, None)

    def _up_to_date(self, packing: Packing, key: str) -> Copy:
        version = self._common.version
        if key not in self._copies:
            self._copies[key] = Copy(self._common.weights.copy(), version)
        copy = self._copies[key]
        if copy.version != version:
            copy.base, copy.version = copy.version, version
            copy.image = np.empty(packing.num_bytes, np.uint8)
            packing.pack_difference(self._common.weights, copy.flat, copy.image)
        return copy
