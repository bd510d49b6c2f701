"""Memory for contributions that are on their way to a server: one a worker, lent for as long as they are merged."""

from __future__ import annotations

import numpy as np

from evener.sync.compression import Bytes, compressor_for
from evener.sync.layout import StateLayout
from evener.sync.protocol import Compression
from evener.sync.threads import BLOCK_BYTES, ThreadPool
from evener.sync.weights import Buffer, BufferPool


class ReceiveBuffers:
    """Memory for contributions under way, one a worker.

    Args:
        layout: of the weights.
        compression: of the contributions.
        thin: of those of workers that are told to send less.
        cores: that unpack them.
        is_streamed: whether they may be merged while they arrive.

    Attributes:
        num_bytes: of a contribution, exactly.
        thin_bytes: of one that is to be shorter.
        comes_in_parts: whether what has arrived can be merged while the rest is still to come; less than a block never
            is.
    """

    def __init__(
        self,
        layout: StateLayout,
        compression: Compression,
        cores: ThreadPool,
        thin: Compression = "none",
        *,
        is_streamed: bool = True,
    ) -> None:
        self._packing, self._thin = compressor_for(layout, compression, cores), compressor_for(layout, thin, cores)
        self._shelf = BufferPool(layout)
        self._pages: dict[str, Buffer] = {}
        self._images: dict[str, Bytes] = {}
        self.num_bytes = layout.num_bytes if self._packing is None else self._packing.num_bytes
        self.thin_bytes = self.num_bytes if self._thin is None else self._thin.num_bytes
        self.comes_in_parts = is_streamed and self._packing is None and self.num_bytes > BLOCK_BYTES

    def fits(self, num_bytes: int, *, is_thin: bool) -> bool:
        """Whether a contribution has so many bytes; what was begun before a worker was told to send less is whole."""
        return num_bytes == self.num_bytes or (is_thin and num_bytes == self.thin_bytes)

    def open(self, worker: str, num_bytes: int | None = None) -> memoryview:
        """Where the next bytes of `worker` belong: `num_bytes`, which fit; memory that nobody else writes to."""
        if worker in self._pages or worker in self._images:  # of which somebody may still hold the memory
            self.forget(worker)
        if self._packing is None and num_bytes in (None, self.num_bytes):
            return self.page(worker).lend()
        self._images[worker] = np.empty(num_bytes or self.num_bytes, np.uint8)
        return self._images[worker].data

    def is_packed(self, worker: str) -> bool:
        """Whether what arrives from `worker` has to be unpacked when all of it is here."""
        return worker in self._images

    def page(self, worker: str) -> Buffer:
        """The memory that the contribution of `worker` arrives in, or will be unpacked into."""
        page = self._pages.get(worker)
        if page is None:
            page = self._pages[worker] = self._shelf.take()
        return page

    def take(self, worker: str) -> Buffer:
        """The contribution that has arrived from `worker`; keep it until it is given to `reuse`."""
        if (packing := self._packing or self._thin) is not None and worker in self._images:
            packing.unpack(self._images.pop(worker), self.page(worker).flat)
        return self._pages.pop(worker)

    def reuse(self, page: Buffer) -> None:
        """Have the memory of a contribution that has been merged."""
        self._shelf.put_back(page)

    def forget(self, worker: str) -> None:
        """Drop what has arrived from `worker` so far."""
        self._images.pop(worker, None)
        page = self._pages.pop(worker, None)
        if page is not None:
            self._shelf.put_back(page)
